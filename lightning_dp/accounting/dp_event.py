"""A history in the words of dp-accounting, Google's library, for its accountants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp.accounting.events import ZCDP, AbstractEvent, History, check_history

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = ["to_dp_event"]


def to_dp_event(history: History) -> DpEvent:
    """Return a history as one event of dp-accounting (``pip install dp-accounting``).

    It costs the same under its relation ``ADD_OR_REMOVE_ONE``, which is ``"add_remove"`` here.

    Args:
        history: events and their counts.

    Returns:
        a ``ComposedDpEvent``: of Gaussian releases, on a Poisson sample where they are, and of zCDP.

    Raises:
        TypeError: for an event that is neither.
        ValueError: for no history; for zCDP under another relation, which says nothing about this one.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> event = to_dp_event([(PoissonGaussian(1.0, 0.01), 1000)])
        >>> event.events[0].count, event.events[0].event.sampling_probability
        (1000, 0.01)
    """
    from dp_accounting import dp_event as theirs

    def one(event: AbstractEvent) -> DpEvent:
        if isinstance(event, ZCDP):
            return theirs.ZCDpEvent(event.costs("add_remove")[2])
        if not event.is_pair or event.withdrawn is not None or "add_remove" in event.no_bound:
            raise TypeError(
                f"history={type(event).__name__}: dp-accounting has no event that costs the same. "
                "Take ε from lightning_dp.accounting.epsilon."
            )
        noise_multiplier, sample_rate = event.pair
        release = theirs.GaussianDpEvent(noise_multiplier)
        return release if sample_rate == 1 else theirs.PoissonSampledDpEvent(sample_rate, release)

    entries = check_history(history)
    composed = [theirs.SelfComposedDpEvent(one(event), count) for event, count in entries]
    return theirs.ComposedDpEvent(composed)
