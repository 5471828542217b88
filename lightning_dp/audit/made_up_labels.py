"""Losses that read past the end of memory where labels are out of range, kept within it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["ValidLabels"]

_NAMES = ("log_probs", "targets", "input_lengths", "target_lengths", "blank")


class ValidLabels(TorchFunctionMode):
    """Inside, ``ctc_loss`` gets labels and lengths that it can take, made from what it is given.

    It checks nothing on the CPU, and made-up labels end the process: run models on them inside.
    The loss stays one of single records: the labels of record i are made from its own, or from none
    where all are in one row. Whole input lengths, labels of at most half of it, no blanks among them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in (F.ctc_loss, torch.ctc_loss):
            named.update(zip(_NAMES, args, strict=False))
            rest, args = args[len(_NAMES) :], ()
            given = _valid(named["log_probs"], named["targets"], int(named.pop("blank", 0)))
            for name in _NAMES[:4]:
                named.pop(name, None)
            args = (*given, *rest)
        return func(*args, **named)


def _valid(log_probs: Tensor, targets: Tensor, blank: int) -> tuple[Any, ...]:
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    if not (classes > 1 and steps and 0 <= blank < classes):
        raise ValueError("ctc_loss needs a time step, a blank and another class.")
    records = log_probs.shape[1] if log_probs.dim() == 3 else 1
    device = log_probs.device
    # Whose a label in one row is, records decide.
    rows = torch.zeros(records, 1, dtype=torch.int64, device=device)
    if targets.dim() == 2 and len(targets) == records and targets.shape[1]:
        rows = targets.detach().to(device, torch.int64)
    length = min(rows.shape[1], (steps + 1) // 2)
    labels = (blank + 1 + rows[:, :length] % (classes - 1)) % classes
    if log_probs.dim() == 2:
        return log_probs, labels[0], torch.tensor(steps), torch.tensor(length), blank
    ones = torch.ones(records, dtype=torch.int64)
    return log_probs, labels, ones * steps, ones * length, blank
