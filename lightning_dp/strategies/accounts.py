"""The accounts of one batch: which records still have no answer, and why it may not be released."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dp.gradients import Replay
from lightning_dp.gradients.base import UNANSWERED
from lightning_dp.sampling.loader import Chunk

__all__ = ["BatchAccounts"]


@dataclass
class BatchAccounts:
    """The accounts of one logical batch, from its first chunk on.

    Args:
        chunk: was handed out last; None once its backward pass was answered.
        is_whole: all chunks of the batch were handed out.
        owed: records that were handed out and have no answer yet.
        faults: reasons for which the batch may not be released.
        answered: the chunks of a step that asks several queries.
    """

    chunk: Chunk | None = None
    is_whole: bool = False
    owed: int = 0
    faults: list[str] = field(default_factory=list)
    answered: list[Replay] = field(default_factory=list)

    def hand_out(self, chunk: Chunk) -> None:
        """Owe an answer for each record of the next chunk."""
        self.chunk, self.is_whole = chunk, chunk.last
        self.owed += chunk.size

    def fault(self, name: str, *, is_asked: bool) -> str | None:
        """Return why what was answered so far may not be released; None if it may.

        Args:
            name: of the module's class.
            is_asked: there is a query; else nothing is released, and nothing owed.
        """
        if self.faults:
            return self.faults[0]
        return UNANSWERED.format(name) if is_asked and self.owed else None
