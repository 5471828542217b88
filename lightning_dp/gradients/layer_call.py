"""One call of a layer, whose rule says what each record's gradient is; calls of either kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import AbstractFolding
from lightning_dp.gradients.function_call import FunctionCall
from lightning_dp.gradients.hessian import Dual
from lightning_dp.gradients.opacus_layers import Arrange
from lightning_dp.gradients.rules import Rule
from lightning_dp.gradients.saved_inputs import SavedInputs

__all__ = ["Call", "LayerCall"]


@dataclass(eq=False, slots=True)
class LayerCall:
    """One call of a layer, until the backward pass comes to it."""

    name: str
    layer: nn.Module
    rule: Rule
    inputs: tuple[Tensor, ...]
    versions: list[int]
    sources: set[Any]  # the graph nodes that made the inputs
    edges: list[GradientEdge]  # of the output
    arrange: Arrange  # makes of its tensors such with rows first
    folding: AbstractFolding | None  # whose the rows are; None if they are the records
    moved: tuple[Dual, ...] = ()  # along a direction: the inputs with their derivatives
    saved: SavedInputs | None = None  # the inputs, where autograd holds them

    def take_inputs(self, *, keep: bool = False) -> tuple[Tensor, ...]:
        """Hand over the inputs. Raises if they are not what they were.

        Args:
            keep: they are taken once more; else they are not held any longer.
        """
        inputs = self.inputs if self.saved is None else self.saved.take(keep=keep)
        if not keep:
            self.inputs, self.saved = (), None
        if (
            inputs is None
            or [each._version for each in inputs[: len(self.versions)]] != self.versions
        ):
            raise UnsupportedModelError(
                f"The input of {self.name or 'the module'} ({type(self.layer).__name__}) was "
                "overwritten after the layer had used it. Do not change tensors in place between layers.",
                topic="overwritten-tensors",
            )
        return inputs


Call: TypeAlias = LayerCall | FunctionCall
