"""Losses of a step with several optimizers: public parts go back at once, private ones wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dp.gradients.graph import nodes

__all__ = ["WaitingLosses", "reached"]


def reached(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of the parameters that a loss depends on, by its graph.

    Example:
        >>> layer, other = nn.Linear(2, 1), nn.Linear(1, 1)
        >>> loss = other(layer(torch.ones(3, 2)).detach()).sum()
        >>> [p is other.weight for p in reached(loss, [layer.weight, other.weight])]
        [True]
    """
    found = {id(getattr(node, "variable", None)) for node in nodes(loss.grad_fn)}
    return [param for param in parameters if id(param) in found]


class WaitingLosses:
    """The meaning of ``backward`` where one optimizer is private and others are public.

    A loss gives public parameters their ordinary ``p.grad`` at once. If it reaches private ones as
    well, it waits: their gradients, per record, are those of the sum of all losses that came since
    ``p.grad`` was last zeroed, as in ordinary training. So the loss of a generator, which goes
    through the discriminator, counts for nothing there once the discriminator's gradients are
    zeroed (or if they are switched off, by ``toggle_optimizer``).

    Args:
        private: the parameters that are trained on records.
        public: those of the other optimizers.
    """

    def __init__(self, private: Sequence[nn.Parameter], public: Sequence[nn.Parameter]) -> None:
        self._private, self.public = tuple(private), tuple(public)
        self._losses: list[Tensor] = []
        # Zeros in one p.grad: they are gone, or were written to, when somebody zeroed the gradients.
        self._marked = min(private, key=Tensor.numel)
        self._mark: tuple[Tensor, int] | None = None

    def add(self, loss: Tensor, *, waits: bool) -> None:
        """Go back to public parameters, and keep the loss for the private ones if it ``waits``."""
        self._drop_zeroed()
        if public := reached(loss, self.public):
            torch.autograd.backward(loss, inputs=public, retain_graph=True)
        if waits:
            self._losses.append(loss)
            zeros = torch.zeros_like(self._marked)
            self._marked.grad, self._mark = zeros, (zeros, zeros._version)

    def reaches_private(self, loss: Tensor) -> bool:
        """Tell whether a loss depends on a private parameter."""
        return bool(reached(loss, self._private))

    def take(self) -> Tensor | None:
        """Return the sum of the losses that wait, once; None if there are none."""
        self._drop_zeroed()
        losses = self._losses
        self.drop()
        return sum(losses[1:], losses[0]) if losses else None

    def drop(self) -> None:
        """Forget what waits."""
        if self._mark is not None and self._marked.grad is self._mark[0]:
            self._marked.grad = None
        self._losses, self._mark = [], None

    def _drop_zeroed(self) -> None:
        if self._mark is not None:
            zeros, version = self._mark
            if self._marked.grad is not zeros or zeros._version != version:
                self._losses, self._mark = [], None
