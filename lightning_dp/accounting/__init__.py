"""Events, accountants and calibration: the questions asked of the data, and their cost.

Each name is imported when it is first asked for: a training needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp._lazy import names_from

__all__ = [
    "ZCDP",
    "ApproximateDP",
    "Gaussian",
    "PLDAccountant",
    "PoissonGaussian",
    "StreamingRDPAccountant",
    "TradeOff",
    "calibrate",
    "delta",
    "epsilon",
    "epsilon_text",
    "recover_journal",
    "sweep_history",
    "trade_off",
]

if TYPE_CHECKING:
    from lightning_dp.accounting.calibration import calibrate
    from lightning_dp.accounting.events import ZCDP, ApproximateDP, Gaussian, PoissonGaussian
    from lightning_dp.accounting.hypothesis_tests import TradeOff, trade_off
    from lightning_dp.accounting.journals import recover_journal, sweep_history
    from lightning_dp.accounting.pld import PLDAccountant, delta, epsilon
    from lightning_dp.accounting.rdp import StreamingRDPAccountant
    from lightning_dp.accounting.rounding import epsilon_text
else:
    homes = ("events", "pld", "rdp", "calibration", "rounding", "journals", "hypothesis_tests")
    __getattr__ = names_from(__name__, *homes)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
