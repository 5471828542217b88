"""What a gradient engine is: it answers for each record of the batch that was just run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_dp.clipping import AbstractPerSampleGradients

__all__ = ["AbstractGradientEngine", "UnsupportedModelError"]


class UnsupportedModelError(TypeError):
    """The gradient of a single record cannot be had from this model."""


class AbstractGradientEngine(ABC):
    """Watches a model's ordinary forward and backward passes, and keeps what each record did.

    Between :meth:`attach` and :meth:`detach` it may hang hooks on the model; afterwards nothing of
    it is left there.
    """

    @abstractmethod
    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        """Start watching.

        Args:
            module: the whole model.
            params: the parameters that are trained, in the order of flat vectors.

        Raises:
            UnsupportedModelError: naming the layers that cannot be handled, and the cure.
        """

    @abstractmethod
    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> AbstractPerSampleGradients:
        """The per-sample gradients of the last backward pass; they are handed over once.

        The loss must have been the mean over the records of the batch.

        Args:
            scale: what to multiply with, to undo a division of the loss.
            touched: the parameters that got an ordinary gradient, by name.

        Raises:
            UnsupportedModelError: if one of them has no gradient per record.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget forward passes without a backward one (``training_step`` returned None)."""

    @abstractmethod
    def detach(self) -> None:
        """Stop watching and leave the model as it was. May be called twice."""
