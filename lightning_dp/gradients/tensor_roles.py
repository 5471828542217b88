"""The roles of tensors in a forward pass: made from parameters, holding records, or constant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dp.gradients.layouts import Layout, name_of_function
from lightning_dp.gradients.parts import Part
from lightning_dp.gradients.scattered import Place
from lightning_dp.gradients.sharded import WholeParameters

__all__ = ["TensorRoles", "tensors_in"]

_REPEATING = {"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"}


class TensorRoles:
    """Knows the role of each tensor of a forward pass, which is one of three.

    A *part* is computed from parameters and constants alone; a tensor *holds records* if it was made
    from the batch, with the place of the records in it; all others are constants.

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
        self._module = module
        self._params, self._whole = params, whole
        self._trained = {id(p): Part(p, frozenset([name]), p) for name, p in params.items()}
        self.n = 1
        """The number of records."""
        self._made: Any = None  # without a batch: what did not come from outside
        self._held = {id(each) for part in module.modules() for each in _held_by(part)}
        self._takes_values = False
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._parts: dict[int, Part] = dict(self._trained)
        self._records: Any = WeakTensorKeyDictionary()
        self._recorded: set[Any] = set()  # graph nodes of outputs of recorded calls, and of layers

    def begin(self, batch: Any, n: int) -> None:
        """Begin a forward pass over a batch of n records; None if it is not at hand."""
        self.n = max(1, n)
        self._made = None if batch is not None else WeakTensorKeyDictionary()
        leaves = list(_leaves(batch))
        for each in leaves:
            if isinstance(each, Tensor) and each.dim():
                layout = Layout()
                self._records[each] = layout if layout.fits(each, n) else None
        plain = Tensor | int | float | None
        self._takes_values = batch is None or any(not isinstance(each, plain) for each in leaves)

    def go_along(self) -> None:
        """Take the dual numbers that stand in the places of the parameters now for these."""
        for name, dual in self._module.named_parameters():
            if (param := self._params.get(name)) is not None:
                self._parts[id(dual)] = Part(dual, frozenset([name]), param)

    def is_noted(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was noted as one that holds records."""
        return tensor in self._records

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

    def layout_of(self, tensor: Tensor) -> Place | None:
        """Return where a tensor holds the records; None if that is not known, or it holds none.

        Where an unknown function made it, rows as many as records are taken for the records, as they
        are by every layer without a tracer; the isolation probe finds models in which they are not.
        """
        layout: Place | None = self._records.get(tensor)
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

    def add_layer_output(self, tensor: Tensor, place: Place) -> None:
        """Note the output of a layer whose call is recorded elsewhere, and where it holds the records."""
        self._recorded.add(tensor.grad_fn)
        self._parts.pop(id(tensor), None)  # of a state that is a constant, say
        if tensor not in self._records:
            self._records[tensor] = place if place.fits(tensor, self.n) else None

    def add_recorded(self, nodes: Iterable[Any]) -> None:
        """Note the graph nodes of outputs of a recorded call."""
        self._recorded.update(nodes)

    def add_records(self, tensors: Sequence[Tensor], layouts: Sequence[Place | None]) -> None:
        """Note that tensors hold records, and where; None where that is not known."""
        for each, layout in zip(tensors, layouts, strict=True):
            self._records[each] = layout
            self._parts.pop(id(each), None)  # a target that was one

    def add_made(self, function: Callable[..., Any], result: Any) -> None:
        """Note what a function made of no tensor; of the batch's texts or lists it holds the records."""
        is_made = name_of_function(function) in ("tensor", "as_tensor", "from_numpy", "asarray")
        is_tensor = isinstance(result, Tensor) and Layout().fits(result, self.n)
        if self._takes_values and is_made and is_tensor:
            self._records[result] = Layout()
        if self._made is not None:
            self._made.update((each, True) for each in tensors_in(result))

    def add_without_records(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        parts: Sequence[Part | None],
        outputs: Sequence[Tensor],
    ) -> None:
        """Note what a function made of parts and constants.

        Args:
            function: was called.
            tensors: among its arguments.
            parts: what is known of each of them.
            outputs: all its tensors.
        """
        if self._made is not None:
            self._made.update((each, True) for each in outputs)
        differentiable = [each for each in outputs if each.requires_grad]
        if not (any(parts) and differentiable):
            return
        (source, *others) = [part for part in parts if part is not None]
        has_rows = any(part.has_rows for part in (source, *others)) or any(
            part is None
            and id(each) not in self._held
            and self.n > 1
            and Layout().fits(each, self.n)
            for each, part in zip(tensors, parts, strict=True)
        )
        names = frozenset[str]().union(source.names, *(part.names for part in others))
        may_repeat = not others and name_of_function(function) in _REPEATING
        for each in differentiable:
            repeated = source if may_repeat and _only_repeats(source.tensor, each) else None
            self._parts[id(each)] = Part(each, names, repeated=repeated, has_rows=has_rows)


def _only_repeats(before: Tensor, after: Tensor) -> bool:
    """Tell whether only dimensions of one entry, and new first ones, became longer."""
    extra = after.dim() - before.dim()
    return extra >= 0 and all(
        size in (1, now) for size, now in zip(before.shape, after.shape[extra:], strict=True)
    )


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    for each in vars(module).values():
        yield from tensors_in(each)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


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
