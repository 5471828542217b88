"""Records that run alone through ``training_step``, and what Lightning is shown of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor

from lightning_dp.gradients.batches import loss_in
from lightning_dp.gradients.side_effects import NotedCalls

__all__ = ["RecordsAlone"]


class RecordsAlone:
    """The batch of one step as its records: each runs alone, and what they leave is put together.

    The loss that Lightning goes on with is the mean of theirs, cut off from any parameter. What they
    log and count is logged and counted once (:class:`~lightning_dp.gradients.side_effects.NotedCalls`).
    No record sees any of it.

    Args:
        module: the user's model. While a record runs, it is kept apart
            (:func:`lightning_dp._snapshot.apart`).
    """

    def __init__(self, module: LightningModule) -> None:
        self._noted = NotedCalls(module)
        self._outputs: dict[int, Any] = {}  # of each record's first run, by place

    def forwards(
        self, forward: Callable[[Any], Any], batches: Sequence[Any]
    ) -> list[tuple[Callable[[Any], Tensor | None], Any]]:
        """Return, for each record, what runs it and returns its loss, and its batch; a first run counts.

        Args:
            forward: runs ``training_step`` on a batch.
            batches: of one record each.
        """
        self._outputs = {}
        self._noted.forget()
        return [(partial(self._run, forward, i), batch) for i, batch in enumerate(batches)]

    def _run(self, forward: Callable[[Any], Any], place: int, batch: Any) -> Tensor | None:
        if place in self._outputs:
            again: Tensor | None = loss_in(forward(batch))
            return again
        with self._noted.noting(torch.tensor([place])):
            output = forward(batch)
        detached = output.detach() if isinstance(output, Tensor) else output
        is_mapping = isinstance(output, Mapping)
        self._outputs[place] = recursive_detach(output) if is_mapping else detached
        loss: Tensor | None = loss_in(output)
        return loss

    def together(self, device: torch.device) -> Any:
        """Count and log what the records left, and return their outputs as one of the whole batch."""
        self._noted.do()
        outputs, self._outputs = list(self._outputs.values()), {}
        losses = [loss for each in outputs if isinstance(loss := loss_in(each), Tensor)]
        mean = torch.stack([each.mean() for each in losses]).mean() if losses else None
        loss = torch.zeros((), device=device) if mean is None else mean
        loss = loss.requires_grad_()
        names = dict.fromkeys(n for each in outputs if isinstance(each, Mapping) for n in each)
        if not names:
            return loss
        of_each = [each if isinstance(each, Mapping) else {} for each in outputs]
        return {**{name: [each.get(name) for each in of_each] for name in names}, "loss": loss}
