"""The public schedule of comparisons: at which steps, and with which samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

__all__ = ["Schedule"]

_EARLY = frozenset({0, 1, 2, 4, 8, 16, 32})  # and some odd ones, for what happens every other time
_ODD = frozenset({5, 11, 23})
_ONE_IN, _ALLOWANCE = 60, 24
_FEW = 16  # samples, where not all of the batch are compared
_ALSO = frozenset({2, 4})  # looks at all of it, at the beginning


@dataclass(frozen=True)
class Schedule:
    """The comparisons of a run, as a function of its public name: the same on all ranks.

    At steps 0, 1, 2, 4, 8, 16 and 32, at 5, 11 and 23, at one in 60 of all, and at the first step of each
    epoch, where epochs are long enough: 24 of them, and one for each 60 steps.

    Args:
        name: of the run; nobody can know it when the model is written.

    Example:
        >>> schedule = Schedule("a run")
        >>> [step for step in range(90) if schedule.is_due(step, 0, begins_epoch=False)]
        [0, 1, 2, 4, 5, 8, 11, 16, 23, 32, 66, 77]
    """

    name: str

    def is_due(self, step: int, looks: int, *, begins_epoch: bool) -> bool:
        """Return True if a step is compared.

        Args:
            step: steps since the fit began.
            looks: steps of the schedule so far.
            begins_epoch: True at the first step of an epoch.
        """
        if step in _EARLY | _ODD or self._number(step, "due") % _ONE_IN == 0:
            return True
        return begins_epoch and looks < _ALLOWANCE + step // _ONE_IN

    def chunk(self, step: int, chunks: int) -> int:
        """Return which chunk of the step's batch is compared."""
        return self._number(step, "chunk") % chunks

    @staticmethod
    def takes_all(look: int) -> bool:
        """Return True if all samples of the batch are compared: from the second look to the sixth, and
        then at every other one.
        """
        return look % 2 == 1 or look in _ALSO

    def samples(self, step: int, look: int, n: int) -> list[int]:
        """Return the places in a batch of the samples that are compared, in their order.

        All of them, or 16 at most.
        """
        if self.takes_all(look) or n <= _FEW:
            return list(range(n))
        return sorted(self._permutation(step, "samples", n)[:_FEW])

    def kept(self, step: int, look: int, n: int, attempt: int = 0, *, first: int = 0) -> list[int]:
        """Return the places of the samples that are kept, in their order: at least one, and not all.

        A half or a quarter of all in turn, and of a few also an eighth and a sixteenth: what a rare
        sample does shows where few are kept, what a few places do where many are. Of the first and the
        last place, of which a module may keep something, one is exchanged each time, in turn.
        """
        turn = first + look // 2 + attempt
        share = 2 ** (1 + turn % (2 if self.takes_all(look) else 4))
        count = max(1, min(n - 1, -(-n // share)))
        places = self._permutation(step, f"kept {attempt}", n)
        places.remove(0 if (look + first + attempt) % 2 == 0 else n - 1)
        return sorted(places[:count])

    def _permutation(self, step: int, what: str, n: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._number(step, what))
        return torch.randperm(n, generator=generator).tolist()

    def _number(self, step: int, what: str) -> int:
        text = f"{self.name}/{step}/{what}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
