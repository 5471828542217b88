"""One call of a function in which a parameter meets records, as it is recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.bilinear import AbstractFolding
from lightning_dp.gradients.layouts import Layout, name_of_function
from lightning_dp.gradients.parts import Part
from lightning_dp.gradients.surroundings import Surroundings

__all__ = ["FunctionCall", "Given", "in_place_target"]


@dataclass(frozen=True)
class Given:
    """A tensor that a function was called with.

    Args:
        place: among the leaves of the arguments.
        tensor: cut off from the graph.
        part: if it was computed from parameters alone.
        layout: of the records that it holds; None for a constant, and for a part.
        version: of the tensor when the function had been called.
        total: the call that made it a sum over the records, where it holds them no longer.
        is_lost: it was computed from records, and in which place it holds whose is not known.
    """

    place: int
    tensor: Tensor
    part: Part | None
    layout: Layout | None
    version: int
    total: FunctionCall | None = None
    is_lost: bool = False


@dataclass
class FunctionCall:
    """A function with its arguments, until the backward pass comes to its outputs.

    Args:
        function: of torch.
        leaves: of ``(args, kwargs)``; tensors are in ``given``.
        spec: puts the leaves together again.
        given: the tensors among the leaves.
        outputs: its tensors, cut off from the graph.
        layouts: the places of the records in the outputs.
        edges: of the outputs; None for those without a gradient.
        sources: the graph nodes that made the tensors among the arguments; those of parts first.
        part_sources: those that made the parts.
        n: the number of records; of rows, where there is a folding.
        surroundings: for running it again.
        folding: whose the rows are, where they are scattered.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    given: list[Given]
    outputs: list[Tensor]
    layouts: list[Layout | None]
    edges: list[GradientEdge | None]
    sources: set[Any]
    part_sources: set[Any]
    n: int
    surroundings: Surroundings
    moved: dict[int, Tensor] = field(default_factory=dict)  # along a direction: derivatives
    folding: AbstractFolding | None = None

    @property
    def name(self) -> str:
        """The names of the parameters and of the function."""
        names = sorted({name for each in self.parts for name in each.part.names})  # type: ignore[union-attr]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more} in {name_of_function(self.function)}()"

    @property
    def parts(self) -> list[Given]:
        """The tensors that come from parameters alone."""
        return [each for each in self.given if each.part is not None]

    def check_unchanged(self) -> None:
        """Raise UnsupportedModelError if a tensor was overwritten after the call."""
        if any(each.tensor._version != each.version for each in self.given):
            raise UnsupportedModelError(
                f"A tensor that met {self.name} was overwritten afterwards. Do not change tensors in "
                "place between layers.",
                topic="overwritten-tensors",
            )

    def keep_own(self, storage: int) -> None:
        """Copy the tensors of a storage that is about to be overwritten, after checking them."""
        self.check_unchanged()

        def is_there(tensor: Tensor) -> bool:
            return tensor.untyped_storage().data_ptr() == storage

        for i, each in enumerate(self.given):
            if is_there(each.tensor):
                copy = each.tensor.clone()
                self.given[i] = replace(each, tensor=copy, version=copy._version)
        self.outputs = [each.clone() if is_there(each) else each for each in self.outputs]

    def called_with(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with other tensors; return its tensors, as they are recorded."""
        leaves = list(self.leaves)
        for each, tensor in zip(self.given, tensors, strict=True):
            leaves[each.place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        if (target := in_place_target(self.function, args, kwargs)) is not None:
            copy = target.clone()
            result = self.function(copy, *args[1:], **kwargs)
            return [copy if result is None else result]
        return [
            each
            for each in tree_flatten(self.function(*args, **kwargs))[0]
            if isinstance(each, Tensor)
        ]


@cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """Return the position of the argument ``inplace``; None for functions without it."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of functions that are not written in Python
        return None
    return names.index("inplace") if "inplace" in names else None


def in_place_target(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the tensor that a function changes; None for one that makes a new one."""
    name = name_of_function(function)
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    is_in_place |= name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    if not is_in_place and (place := _place_of_inplace(function)) is not None:
        is_in_place = bool(kwargs.get("inplace", args[place] if len(args) > place else False))
    if is_in_place and args and isinstance(args[0], Tensor):
        return args[0]
    return None
