"""The functions of a forward pass in which parameters meet records, as they go by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dp._generators import generator_state
from lightning_dp.gradients.base import ALONE, UnsupportedModelError
from lightning_dp.gradients.function_call import FunctionCall, Given, in_place_target
from lightning_dp.gradients.graph import in_order
from lightning_dp.gradients.hessian import split
from lightning_dp.gradients.layouts import Layout, layouts_after, name_of_function
from lightning_dp.gradients.parts import Part
from lightning_dp.gradients.sharded import WholeParameters
from lightning_dp.gradients.surroundings import Surroundings

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
_REPEATING = {"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"}


@dataclass(frozen=True)
class _Before:
    """The state before a call: afterwards a function in place has changed it."""

    tensors: list[Tensor]
    parts: list[Part | None]
    layouts: list[tuple[Tensor, Layout]]
    has_records: bool
    sources: list[Any]
    target: Tensor | None
    kept: Tensor | None  # the target as it was
    random_state: Tensor | None


class FunctionTracer(TorchFunctionMode):
    """Sees every function that a forward pass calls, and records those where parameters meet records.

    Each tensor is one of three: a *part*, computed from parameters and constants alone; one that
    *holds records*, made from the batch, with the place of the records in it; or a constant. What a
    function makes of parts and constants is a part again, what it makes of records holds records.
    Where both come in, the call is recorded: there, and nowhere else, has a parameter a gradient per
    record.

    A tensor that holds records and is taken for a constant (the model went through NumPy, say) costs
    memory and no correctness: what is computed with it is a part with entries for each record.

    Args:
        params: the trained parameters, by name.
        module: the whole model, which holds constants.
        whole: knows which parameters stand for shards.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], module: nn.Module, whole: WholeParameters
    ) -> None:
        super().__init__()
        self._module = module
        self._params, self._whole = params, whole
        self._trained = {id(p): Part(p, frozenset([name]), p) for name, p in params.items()}
        self.n = 1
        self._made: Any = None  # without a batch: what did not come from outside
        self._held = {id(each) for part in module.modules() for each in _held_by(part)}
        self._takes_values = False
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls: list[FunctionCall] = []
        self.problem: UnsupportedModelError | None = None  # that came up while it watched
        self._holders: dict[int, list[FunctionCall]] = {}  # of tensors, by their storage
        self._parts: dict[int, Part] = dict(self._trained)
        self._is_along = False
        self._records: Any = WeakTensorKeyDictionary()
        self._totals: Any = WeakTensorKeyDictionary()  # calls that took sums over the records
        self._recorded: set[Any] = set()  # graph nodes of outputs of recorded calls, and of layers

    @contextmanager
    def following(self, batch: Any, n: int) -> Iterator[None]:
        """Watch, inside, a forward pass over a batch of n records."""
        self.n = max(1, n)
        self._made = None if batch is not None else WeakTensorKeyDictionary()
        leaves = list(_leaves(batch))
        for each in leaves:
            if isinstance(each, Tensor) and each.dim():
                layout = Layout()
                self._records[each] = layout if layout.fits(each, n) else None
        plain = Tensor | int | float | None
        self._takes_values = batch is None or any(not isinstance(each, plain) for each in leaves)
        with self:
            yield

    def go_along(self) -> None:
        """Take the dual numbers that stand in the places of the parameters now for these."""
        self._is_along = True
        for name, dual in self._module.named_parameters():
            if (param := self._params.get(name)) is not None:
                self._parts[id(dual)] = Part(dual, frozenset([name]), param)

    # -- what a tensor is ------------------------------------------------------------------

    def holds_records(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was computed from the batch."""
        if tensor in self._records:
            return True
        return self._is_from_records(tensor) or self._is_from_outside(tensor)

    def _is_from_outside(self, tensor: Tensor) -> bool:
        """Tell, where the batch is not at hand, whether a tensor must have come with it."""
        if self._made is None or tensor in self._made or id(tensor) in self._held:
            return False
        if tensor.requires_grad or not Layout().fits(tensor, self.n):
            return False
        self._records[tensor] = Layout()
        return True

    def layout_of(self, tensor: Tensor) -> Layout | None:
        """Return where a tensor holds the records; None if that is not known, or it holds none.

        Where an unknown function made it, rows as many as records are taken for the records, as they
        are by every layer without a tracer; the isolation probe finds models in which they are not.
        """
        layout: Layout | None = self._records.get(tensor)
        if layout is None and tensor in self._records and Layout().fits(tensor, self.n):
            return Layout()
        return layout

    def part_of(self, tensor: Tensor) -> Part | None:
        """Return what is known of a tensor that was computed from parameters alone."""
        if not tensor.requires_grad:
            return None
        part = self._parts.get(id(tensor)) or self._of_shard(tensor)
        if part is None and tensor not in self._records and not self._is_from_records(tensor):
            part = self._new_part(tensor)
        return part

    def _of_shard(self, tensor: Tensor) -> Part | None:
        """Return a whole parameter that stands for a trained one, which is a shard."""
        known = self._trained.get(id(self._whole.found(tensor)))
        if known is None:
            return None
        part = self._trained[id(tensor)] = Part(tensor, known.names, known.param)
        self._parts[id(tensor)] = part
        return part

    def _is_from_records(self, tensor: Tensor) -> bool:
        """Tell it of a tensor that an unseen function made, by its graph, and remember it."""
        if not tensor.requires_grad or id(tensor) in self._parts or tensor.grad_fn is None:
            return False
        seen, stack = set[Any](), list[Any]([tensor.grad_fn])
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._recorded:
                layout = Layout()
                self._records[tensor] = layout if layout.fits(tensor, self.n) else None
                return True
            stack += [child for child, _ in node.next_functions]
        return False

    def _new_part(self, tensor: Tensor) -> Part | None:
        names = self._names_below(tensor)
        if not names:
            return None  # of parameters that are not trained
        part = Part(tensor, names, has_rows=True)  # made nobody saw of what
        self._parts[id(tensor)] = part
        return part

    def _names_below(self, tensor: Tensor) -> frozenset[str]:
        names, seen = set[str](), set[Any]()
        stack: list[Any] = [get_gradient_edge(tensor).node]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None:
                known = self._trained.get(id(variable)) or self._of_shard(variable)
                names |= known.names if known is not None else set()
            stack += [child for child, _ in node.next_functions]
        return frozenset(names)

    def add_layer_output(self, tensor: Tensor) -> None:
        """Note the output of a layer whose call is recorded elsewhere."""
        self._recorded.add(tensor.grad_fn)
        self._parts.pop(id(tensor), None)  # of a state that is a constant, say
        if tensor not in self._records:
            layout = Layout()
            self._records[tensor] = layout if layout.fits(tensor, self.n) else None

    def forget_since(self, mark: int) -> None:
        """Drop the calls from a number on: they are inside of a layer that is recorded as one."""
        del self.calls[mark:]

    # -- calls -----------------------------------------------------------------------------

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
        tensors = list(_tensors((args, kwargs)))
        target = in_place_target(func, args, kwargs)
        if not tensors or name_of_function(func).startswith("new_") or _is_wrapped(tensors):
            result = func(*args, **kwargs)
            self._note_values(func, result)
            if self._made is not None:
                self._made.update((each, True) for each in _tensors(result))
            return result
        before = None
        with self._noting_problems(func):
            before = self._before(tensors, target)
        result = func(*args, **kwargs)
        if before is not None and before.sources:
            result = _apart(result, before.sources)
        outputs = [target] if target is not None else list(_tensors(result))
        if outputs and before is not None:
            with self._noting_problems(func):
                self._after(func, args, kwargs, before, outputs)
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

    def _note_values(self, func: Callable[..., Any], result: Any) -> None:
        """Take tensors that are made of the batch's texts or lists for what holds the records."""
        is_made = name_of_function(func) in ("tensor", "as_tensor", "from_numpy", "asarray")
        is_tensor = isinstance(result, Tensor) and Layout().fits(result, self.n)
        if self._takes_values and is_made and is_tensor:
            self._records[result] = Layout()

    def _before(self, tensors: list[Tensor], target: Tensor | None) -> _Before:
        if target is not None:
            for call in self._holders.pop(_storage_of(target), ()):
                call.keep_own(_storage_of(target))
        known = [self.holds_records(each) for each in tensors]  # of all: it is noted
        parts = [self.part_of(each) for each in tensors]
        layouts = [
            (each, layout) for each in tensors if (layout := self.layout_of(each)) is not None
        ]
        is_meeting = torch.is_grad_enabled() and any(known) and any(parts)
        return _Before(
            tensors,
            parts,
            layouts,
            any(known),
            [_source(each) for each in tensors] if is_meeting else [],
            target,
            target.detach().clone() if is_meeting and target is not None else None,
            generator_state(tensors[0].device) if is_meeting else None,
        )

    def _after(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        before: _Before,
        outputs: list[Tensor],
    ) -> None:
        is_differentiable = any(each.requires_grad for each in outputs)
        if self._made is not None and not before.has_records:
            self._made.update((each, True) for each in outputs)
        if any(before.parts) and not before.has_records:
            if is_differentiable:
                self._note_parts(func, before, outputs)
        elif before.has_records:
            layouts = self._layouts_after(func, args, kwargs, before, outputs)
            for each, layout in zip(outputs, layouts, strict=True):
                self._records[each] = layout
                self._parts.pop(id(each), None)  # a target that was one
            if not is_differentiable or not torch.is_grad_enabled():
                return
            is_meeting = any(before.parts)
            is_total = len(outputs) == 1 and layouts[0] is None and before.target is None
            if is_meeting or is_total:
                call = self._call(func, args, kwargs, before, outputs, layouts)
                if is_total:
                    self._totals[outputs[0]] = call
                if is_meeting:
                    self.calls.append(call)
                    for tensor in (*(each.tensor for each in call.given), *call.outputs):
                        self._holders.setdefault(_storage_of(tensor), []).append(call)
                    nodes = [edge.node for edge in call.edges if edge is not None]
                    self._recorded.update(nodes)

    def _note_parts(
        self, func: Callable[..., Any], before: _Before, outputs: Sequence[Tensor]
    ) -> None:
        (source, *others) = [part for part in before.parts if part is not None]
        has_rows = any(part.has_rows for part in (source, *others)) or any(
            part is None
            and id(each) not in self._held
            and self.n > 1
            and Layout().fits(each, self.n)
            for each, part in zip(before.tensors, before.parts, strict=True)
        )
        for each in outputs:
            if not each.requires_grad:
                continue
            repeated = None
            if not others and name_of_function(func) in _REPEATING:
                repeated = source if _only_repeats(source.tensor, each) else None
            names = frozenset[str]().union(source.names, *(part.names for part in others))
            self._parts[id(each)] = Part(each, names, repeated=repeated, has_rows=has_rows)

    def _layouts_after(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        before: _Before,
        outputs: list[Tensor],
    ) -> list[Layout | None]:
        if not before.layouts:
            return [None] * len(outputs)
        if before.target is not None:
            known = self.layout_of(before.target)
            layout = Layout() if known is None else known
            return [layout if layout.fits(before.target, self.n) else None]
        return layouts_after(func, args, kwargs, before.layouts, outputs, self.n)

    def _call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        before: _Before,
        outputs: list[Tensor],
        layouts: list[Layout | None],
    ) -> FunctionCall:
        """Return what is needed to run the call again for each record."""
        edges = [get_gradient_edge(each) if each.requires_grad else None for each in outputs]
        leaves, spec = tree_flatten((args, dict(kwargs)))
        parts = {id(each): part for each, part in zip(before.tensors, before.parts, strict=True)}
        given = [
            self._given(place, each, parts.get(id(each)), before)
            for place, each in enumerate(leaves)
            if isinstance(each, Tensor)
        ]
        sources = dict(zip(map(id, before.tensors), before.sources, strict=False))
        of_parts = {sources[key] for key, part in parts.items() if part is not None}
        call = FunctionCall(
            func,
            [None if isinstance(each, Tensor) else each for each in leaves],
            spec,
            given,
            [each.detach() for each in outputs],
            layouts,
            edges,
            set(before.sources) - of_parts,
            of_parts,
            self.n,
            Surroundings.now(outputs[0].device, before.random_state),
            self._derivatives(before, leaves),
        )
        return call

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

    def _given(self, place: int, tensor: Tensor, part: Part | None, before: _Before) -> Given:
        places = {id(each): place for each, place in before.layouts}
        layout = None if part is not None else places.get(id(tensor))
        is_lost = part is None and layout is None and tensor in self._records
        if tensor is before.target and before.kept is not None:
            version = before.kept._version
            return Given(place, before.kept, part, layout, version, is_lost=is_lost)
        total = self._totals.get(tensor) if layout is None and part is None else None
        is_lost = is_lost and total is None
        return Given(place, tensor.detach(), part, layout, tensor._version, total, is_lost)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _source(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None


def _apart(result: Any, sources: Sequence[Any]) -> Any:
    """Return what a function returned, so that no output is computed from another one.

    Of ``lstm_cell`` the hidden state is made of the cell's: what comes back to the latter is only what
    others gave it, where it is a view.
    """
    outputs = [each for each in _tensors(result) if each.grad_fn is not None]
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


def _only_repeats(before: Tensor, after: Tensor) -> bool:
    """Tell whether only dimensions of one entry, and new first ones, became longer."""
    extra = after.dim() - before.dim()
    return extra >= 0 and all(
        size in (1, now) for size, now in zip(before.shape, after.shape[extra:], strict=True)
    )


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    for each in vars(module).values():
        yield from _tensors(each)


def _is_wrapped(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a transform of torch.func is running."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(each) for each in tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _leaves(batch: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what a batch is made of, also inside objects of the user's own."""
    if isinstance(batch, Tensor | int | float | str | bytes) or batch is None or depth > 8:
        yield batch
    elif isinstance(batch, dict):
        for each in batch.values():
            yield from _leaves(each, depth + 1)
    elif isinstance(batch, list | tuple | set):
        for each in batch:
            yield from _leaves(each, depth + 1)
    elif hasattr(batch, "__dict__"):
        yield from _leaves(vars(batch), depth + 1)
    else:
        yield batch
