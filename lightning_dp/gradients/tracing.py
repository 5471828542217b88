"""The functions of a forward pass in which parameters meet records, as they go by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dp._generators import generator_state
from lightning_dp.gradients.base import ALONE, UnsupportedModelError
from lightning_dp.gradients.bilinear import Owned
from lightning_dp.gradients.chosen_rows import places_after_choice
from lightning_dp.gradients.function_call import FunctionCall, Given, in_place_target
from lightning_dp.gradients.graph import in_order
from lightning_dp.gradients.hessian import split
from lightning_dp.gradients.layouts import Layout, by_shape, layouts_after, name_of_function
from lightning_dp.gradients.parts import Part
from lightning_dp.gradients.scattered import (
    Place,
    Scattered,
    common_owners,
    places_after,
)
from lightning_dp.gradients.surroundings import Surroundings
from lightning_dp.gradients.tensor_roles import TensorRoles, tensors_in

__all__ = ["FunctionTracer"]

# Of these no tensor comes.
_QUESTIONS = {
    *(
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad_fn",
        "ndim",
        "is_leaf",
        "is_cuda",
        "layout",
    ),
    *("is_sparse", "is_nested", "is_meta", "is_quantized", "is_mkldnn", "_version", "names"),
    *(
        "size",
        "dim",
        "stride",
        "numel",
        "__len__",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
    ),
    *("element_size", "data_ptr", "storage_offset", "has_names", "is_inference", "get_device"),
}


@dataclass(frozen=True)
class _Before:
    """A call, and the state before it: afterwards a function in place has changed it."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    parts: list[Part | None]
    layouts: list[tuple[Tensor, Place]]
    has_records: bool
    sources: list[Any]
    target: Tensor | None
    kept: Tensor | None  # the target as it was
    random_state: Tensor | None


class FunctionTracer(TorchFunctionMode):
    """Sees every function that a forward pass calls, and records those where parameters meet records.

    What a function makes of parts and constants is a part again, what it makes of records holds records
    (:class:`TensorRoles`). Where both come in, the call is recorded: there, and nowhere else, has a
    parameter a gradient per record.

    Args:
        roles: knows what each tensor is.
    """

    def __init__(self, roles: TensorRoles) -> None:
        super().__init__()
        self.roles = roles
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self.roles.clear()
        self.calls: list[FunctionCall] = []
        self.problem: UnsupportedModelError | None = None  # that came up while it watched
        self._holders: dict[int, list[FunctionCall]] = {}  # of tensors, by their storage
        self._totals: Any = WeakTensorKeyDictionary()  # calls that took sums over the records
        self._is_along = False

    @contextmanager
    def following(self, batch: Any, n: int) -> Iterator[None]:
        """Watch, inside, a forward pass over a batch of n records."""
        self.roles.begin(batch, n)
        with self:
            yield

    def go_along(self) -> None:
        """Take the dual numbers that stand in the places of the parameters now for these."""
        self._is_along = True
        self.roles.go_along()

    def forget_since(self, mark: int) -> None:
        """Drop the calls from a number on: they are inside of a layer that is recorded as one."""
        del self.calls[mark:]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if name_of_function(func) in _QUESTIONS:
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        target = in_place_target(func, args, kwargs)
        if not tensors or name_of_function(func).startswith("new_") or _is_wrapped(tensors):
            result = func(*args, **kwargs)
            self.roles.add_made(func, result)
            return result
        before = None
        with self._noting_problems(func):
            before = self._before(func, args, kwargs, tensors, target)
        result = func(*args, **kwargs)
        if before is not None and before.sources:
            result = _apart(result, before.sources)
        outputs = [target] if target is not None else list(tensors_in(result))
        if outputs and before is not None:
            with self._noting_problems(func):
                self._after(before, outputs)
        return result

    @contextmanager
    def _noting_problems(self, func: Callable[..., Any]) -> Iterator[None]:
        """Keep what goes wrong inside from the user's code: the model is refused at its loss."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except UnsupportedModelError as error:
            self.problem = self.problem or error.plain()
        except Exception as error:
            self.problem = self.problem or UnsupportedModelError(
                f"The records could not be followed through {name_of_function(func)}() "
                f"({type(error).__name__}). {ALONE}",
                topic="unsupported-layer",
            )

    def _before(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
        target: Tensor | None,
    ) -> _Before:
        if target is not None:
            for call in self._holders.pop(_storage_of(target), ()):
                call.keep_own(_storage_of(target))
        roles = self.roles
        known = [roles.holds_records(each) for each in tensors]  # of all: it is noted
        parts = [roles.part_of(each) for each in tensors]
        layouts = [
            (each, layout) for each in tensors if (layout := roles.layout_of(each)) is not None
        ]
        is_meeting = torch.is_grad_enabled() and any(known) and any(parts)
        return _Before(
            func,
            args,
            kwargs,
            tensors,
            parts,
            layouts,
            any(known),
            [_source(each) for each in tensors] if is_meeting else [],
            target,
            target.detach().clone() if is_meeting and target is not None else None,
            generator_state(tensors[0].device) if is_meeting else None,
        )

    def _after(self, before: _Before, outputs: list[Tensor]) -> None:
        if not before.has_records:
            self.roles.add_without_records(before.func, before.tensors, before.parts, outputs)
            return
        layouts = self._layouts_after(before, outputs)
        self.roles.add_records(outputs, layouts)
        is_differentiable = any(each.requires_grad for each in outputs)
        if not is_differentiable or not torch.is_grad_enabled():
            return
        is_meeting = any(before.parts)
        is_total = len(outputs) == 1 and layouts[0] is None and before.target is None
        if is_meeting or is_total:
            call = self._call(before, outputs, layouts)
            if is_total:
                self._totals[outputs[0]] = call
            if is_meeting:
                self._add(call)

    def _add(self, call: FunctionCall) -> None:
        self.calls.append(call)
        for tensor in (*(each.tensor for each in call.given), *call.outputs):
            self._holders.setdefault(_storage_of(tensor), []).append(call)
        self.roles.add_recorded([edge.node for edge in call.edges if edge is not None])

    def _layouts_after(self, before: _Before, outputs: list[Tensor]) -> list[Place | None]:
        if not before.layouts:
            return [None] * len(outputs)
        places, n = before.layouts, self.roles.n
        call = before.func, before.args, before.kwargs
        chosen = places_after_choice(*call, places, outputs, n)
        if chosen is not None:
            return chosen
        is_in_place = before.target is not None
        if any(isinstance(place, Scattered) for _, place in places):
            return [*places_after(*call, places, outputs, n, in_place=is_in_place)]
        rows = [(each, place) for each, place in places if isinstance(place, Layout)]
        if before.target is not None:
            known = self.roles.layout_of(before.target) or by_shape(rows, before.target)
            layout = Layout() if known is None else known
            return [layout if layout.fits(before.target, n) else None]
        return [*layouts_after(before.func, before.args, before.kwargs, rows, outputs, n)]

    def _call(
        self, before: _Before, outputs: list[Tensor], layouts: list[Place | None]
    ) -> FunctionCall:
        """Return what is needed to run the call again for each record, or for each scattered row."""
        edges = [get_gradient_edge(each) if each.requires_grad else None for each in outputs]
        leaves, spec = tree_flatten((before.args, dict(before.kwargs)))
        parts = {id(each): part for each, part in zip(before.tensors, before.parts, strict=True)}
        owners = self._owners_of_rows(before, layouts, outputs[0].device)
        n = self.roles.n if owners is None else len(owners)
        given = [
            self._given(place, each, parts.get(id(each)), before, owners)
            for place, each in enumerate(leaves)
            if isinstance(each, Tensor)
        ]
        sources = dict(zip(map(id, before.tensors), before.sources, strict=False))
        of_parts = {sources[key] for key, part in parts.items() if part is not None}
        return FunctionCall(
            before.func,
            [None if isinstance(each, Tensor) else each for each in leaves],
            spec,
            given,
            [each.detach() for each in outputs],
            [_of_rows(each, n) for each in layouts],
            edges,
            set(before.sources) - of_parts,
            of_parts,
            n,
            Surroundings.now(outputs[0].device, before.random_state),
            self._derivatives(before, leaves),
            None if owners is None else Owned(self.roles.n, owners),
        )

    def _owners_of_rows(
        self, before: _Before, layouts: Sequence[Place | None], device: torch.device
    ) -> Tensor | None:
        """Return whose the rows are, where a call has some that are scattered and treats each alike."""
        places = [*(place for _, place in before.layouts), *layouts]
        known = [place for place in places if place is not None]
        if self.roles.n == 1 or not any(isinstance(place, Scattered) for place in known):
            return None
        owners = common_owners(known, self.roles.n, device)
        return owners if owners is not None and bool((owners >= 0).all()) else None

    def _derivatives(self, before: _Before, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Return the derivatives along the direction of what goes in, by its place."""
        if not self._is_along:
            return {}
        if before.target is not None:
            raise UnsupportedModelError(
                "A parameter is written into a tensor in place, which has no Hessian-vector products "
                "here. Join tensors with torch.cat or torch.where.",
                topic="hessian-products",
            )
        duals = {i: split(each)[1] for i, each in enumerate(leaves) if isinstance(each, Tensor)}
        return {i: each for i, each in duals.items() if each is not None}

    def _given(
        self, place: int, tensor: Tensor, part: Part | None, before: _Before, owners: Tensor | None
    ) -> Given:
        places = {id(each): place for each, place in before.layouts}
        found = None if part is not None else places.get(id(tensor))
        layout = _of_rows(found, self.roles.n if owners is None else len(owners))
        is_lost = part is None and found is None and self.roles.is_noted(tensor)
        is_lost |= isinstance(found, Scattered) and owners is None and self.roles.n > 1
        if tensor is before.target and before.kept is not None:
            version = before.kept._version
            return Given(place, before.kept, part, layout, version, is_lost=is_lost)
        total = self._totals.get(tensor) if found is None and part is None else None
        is_lost = is_lost and total is None
        return Given(place, tensor.detach(), part, layout, tensor._version, total, is_lost)


def _of_rows(place: Place | None, n: int) -> Layout | None:
    """Return the place of rows that are the records of a call; None for what is not split."""
    if isinstance(place, Scattered):
        return None if place.dim is None or n == 1 else Layout(place.dim)
    return place


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _source(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None


def _apart(result: Any, sources: Sequence[Any]) -> Any:
    """Return what a function returned, so that no output is computed from another one.

    Of ``lstm_cell`` the hidden state is made of the cell's: what comes back to the latter is only what
    others gave it, where it is a view.
    """
    outputs = [each for each in tensors_in(result) if each.grad_fn is not None]
    if len(outputs) < 2:
        return result
    inner = {
        node
        for each in outputs
        for node in in_order(each.grad_fn, sources)
        if node is not each.grad_fn
    }

    def seen_apart(each: Any) -> Any:
        is_inner = isinstance(each, Tensor) and each.grad_fn in inner
        return each.view_as(each) if is_inner else each

    return tree_map(seen_apart, result)


def _is_wrapped(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a transform of torch.func is running."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(each) for each in tensors)
