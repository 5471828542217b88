"""Events, accountants and calibration: the questions asked of the data, and their cost."""

from collections.abc import Sequence

from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.calibration import calibrate, calibrate_history
from lightning_dp.accounting.events import (
    AbstractEvent,
    Gaussian,
    History,
    PoissonGaussian,
    RepeatAndSelect,
)
from lightning_dp.accounting.journals import recover_journal, sweep_history
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.rdp import StreamingRDPAccountant
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.accounting.search import draw_number_of_runs

__all__ = [
    "Gaussian",
    "PLDAccountant",
    "PoissonGaussian",
    "RepeatAndSelect",
    "StreamingRDPAccountant",
    "calibrate",
    "calibrate_history",
    "delta",
    "draw_number_of_runs",
    "epsilon",
    "epsilon_text",
    "recover_journal",
    "sweep_history",
]

Events = AbstractEvent | Sequence[AbstractEvent | tuple[AbstractEvent, int]]


def epsilon(events: Events, delta: float, relation: Relation = "add_remove") -> float:
    """The epsilon of a sequence of events, by :class:`PLDAccountant`.

    Args:
        events: an event, or a sequence of events and ``(event, count)`` pairs.
        delta: in (0, 1).
        relation: ``"add_remove"`` or ``"replace_one"``.

    Returns:
        epsilon >= 0, never below the truth; ``inf`` when a step has no noise.

    Raises:
        ValueError: if an argument is illegal.

    Example:
        >>> round(epsilon([(PoissonGaussian(1.0, 0.01), 1000)], delta=1e-5), 2)
        1.83
    """
    return PLDAccountant().epsilon(_history(events), delta, relation)


def delta(events: Events, epsilon: float, relation: Relation = "add_remove") -> float:
    """The delta of a sequence of events at ``epsilon``, by :class:`PLDAccountant`.

    Args:
        events: an event, or a sequence of events and ``(event, count)`` pairs.
        epsilon: at least 0.
        relation: ``"add_remove"`` or ``"replace_one"``.

    Returns:
        delta in [0, 1], never below the truth; 1 when a step has no noise.

    Raises:
        ValueError: if an argument is illegal.

    Example:
        >>> round(delta(Gaussian(1.0), epsilon=1.0), 6)
        0.126937
    """
    return PLDAccountant().delta(_history(events), epsilon, relation)


def _history(events: Events) -> History:
    """Return events and pairs as pairs."""
    if isinstance(events, AbstractEvent):
        return [(events, 1)]
    return [(e, 1) if isinstance(e, AbstractEvent) else e for e in events]
