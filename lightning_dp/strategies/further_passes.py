"""A chunk of a batch again, for queries over several points, directions or rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_dp._training_step import is_differentiable
from lightning_dp.boundary import AbstractPerSampleGradients, Pass, Query
from lightning_dp.strategies.replay import RandomState, at_point, muted
from lightning_dp.strategies.watched_model import WatchedModel

__all__ = ["FurtherPasses", "Replay"]


class _NoLoss(Exception):
    """A further pass gave nothing to go back from."""


@dataclass(frozen=True)
class Replay:
    """A chunk that can be run again.

    Args:
        forward: runs it and returns its loss.
        random_state: the randomness of its first pass; None if it will not be run again.
        size: how many records it has.
    """

    forward: Callable[[], Tensor | None]
    random_state: RandomState | None
    size: int


class FurtherPasses:
    """Runs a chunk again as a query asks, with the same records and the same randomness.

    Args:
        model: the model under its engine.
        params: the trained parameters.
        device: where the model runs.
    """

    def __init__(
        self, model: WatchedModel, params: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self._model, self._params, self._device = model, params, device

    def combine(
        self, query: Query, replay: Replay, here: AbstractPerSampleGradients | None
    ) -> AbstractPerSampleGradients | None:
        """Each record's combination over the query's terms.

        Args:
            query: has the passes to be made.
            replay: the chunk.
            here: its gradients at the present parameters, where they are known already.

        Returns:
            None where a pass gave nothing. If a pass saw other rows than the chunk has records, the
            gradients of that pass, whose ``count`` tells it.
        """
        parts: list[tuple[float, AbstractPerSampleGradients]] = []
        for each in query.passes:
            is_here = each.direction is None and each.point is None and here is not None
            gradients = here if is_here else self.again(each, replay)
            if gradients is None or gradients.count != replay.size:
                return gradients
            parts.append((1.0 if each.direction is not None else each.gradient, gradients))
        (weight, first), *others = parts
        return first if weight == 1 and not others else first.combine(weight, others)

    def again(self, each: Pass, replay: Replay) -> AbstractPerSampleGradients | None:
        """The same records with the same randomness once more, leaving no trace."""
        module = self._model.module
        if not module.automatic_optimization:
            raise MisconfigurationException(
                "An estimator that compares gradients at two points must run training_step again, "
                "which manual optimization does not allow. Use automatic optimization."
            )
        assert replay.random_state is not None
        now = RandomState(self._device)
        elsewhere = nullcontext() if each.point is None else at_point(self._params, each.point)
        with muted(module), elsewhere, torch.enable_grad():
            replay.random_state.restore()
            gradients = self._run(each, replay.forward)
        now.restore()
        return gradients

    def _run(
        self, each: Pass, forward: Callable[[], Tensor | None]
    ) -> AbstractPerSampleGradients | None:
        """One more pass; None if it gives no loss to go back from."""
        if each.direction is not None:
            return self._along(each.direction, (each.gradient, each.product), forward)
        with self._model.watching():
            loss = forward()
        if not is_differentiable(loss):
            self._model.drop()
            return None
        if self._model.runs_backward:
            self._model.backward(loss)
        else:
            self._model.module.backward(loss)
        return self._model.take(1.0)

    def _along(
        self,
        direction: Tensor,
        weights: tuple[float, float],
        forward: Callable[[], Tensor | None],
    ) -> AbstractPerSampleGradients | None:
        def loss_of_records() -> Tensor:
            if not is_differentiable(loss := forward()):
                raise _NoLoss
            return loss

        try:
            return self._model.along(loss_of_records, direction, weights)
        except _NoLoss:
            self._model.drop()
            return None
