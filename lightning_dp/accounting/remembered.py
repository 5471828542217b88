"""An accountant that is not asked the same thing twice."""

from __future__ import annotations

from collections.abc import Callable

from lightning_dp.accounting.base import AbstractAccountant, History, Relation, check_entry
from lightning_dp.accounting.events import AbstractEvent

__all__ = ["Remembered"]

_MOST = 16


class Remembered(AbstractAccountant):
    """The answers of another accountant, of which the latest few are kept.

    Histories are the same if they have the same events equally often: their order has no meaning. So
    the ε of a whole plan, of which every step makes another part the past, is computed once.

    Args:
        accountant: who answers.

    Example:
        >>> from lightning_dp.accounting import Gaussian, PLDAccountant
        >>> accountant = Remembered(PLDAccountant())
        >>> first = accountant.epsilon([(Gaussian(2.0), 3)], delta=1e-5)
        >>> first == accountant.epsilon([(Gaussian(2.0), 1), (Gaussian(2.0), 2)], delta=1e-5)
        True
    """

    def __init__(self, accountant: AbstractAccountant) -> None:
        self._accountant = accountant
        self._answers: dict[object, float] = {}

    @property
    def name(self) -> str:
        """That of the accountant who answers."""
        return self._accountant.name

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the accountant's ε, computed or remembered."""
        key = ("epsilon", _key(history), delta, relation)
        return self._answer(key, lambda: self._accountant.epsilon(history, delta, relation))

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the accountant's δ, computed or remembered."""
        key = ("delta", _key(history), epsilon, relation)
        return self._answer(key, lambda: self._accountant.delta(history, epsilon, relation))

    def _answer(self, key: object, compute: Callable[[], float]) -> float:
        if key not in self._answers:
            if len(self._answers) == _MOST:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = compute()
        return self._answers[key]


def _key(history: History) -> frozenset[tuple[AbstractEvent, int]]:
    counts: dict[AbstractEvent, int] = {}
    for event, count in map(check_entry, history):
        counts[event] = counts.get(event, 0) + count
    return frozenset(counts.items())
