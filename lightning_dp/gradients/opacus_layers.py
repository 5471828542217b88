"""Opacus' recurrent and attention layers: where the records are in the calls inside of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import DPGRUCell, DPLSTMCell, DPRNNBase, DPRNNCell, RNNLinear
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.module_hooks import ModuleHooks

__all__ = [
    "Arrange",
    "FromPacked",
    "OpacusLayers",
    "as_it_is",
    "from_the_second",
    "own_parameters",
    "refuse",
]

# Makes of a tensor of a call one with the records in the first dimension, a row for each.
Arrange = Callable[[Tensor], Tensor]

_CELLS = {DPRNNCell.forward, DPGRUCell.forward, DPLSTMCell.forward}
_PROJECTIONS = ("qlinear", "klinear", "vlinear", "out_proj")


def as_it_is(tensor: Tensor) -> Tensor:
    """Return a tensor of a call that has the records in the first dimension."""
    return tensor


def from_the_second(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, 0)


@dataclass(frozen=True)
class FromPacked:
    """The arrangement of one time step of packed sequences: records whose sequences are over get zeros.

    Args:
        records: which ones the rows are, the longest sequence first; later steps have fewer rows.
    """

    records: Tensor

    def __call__(self, tensor: Tensor) -> Tensor:
        rows = tensor.new_zeros(len(self.records), *tensor.shape[1:])
        places = self.records[: len(tensor)].to(tensor.device)
        return rows.index_copy_(0, places, tensor)


class _AbstractInside(ABC):
    """One running forward pass of a layer of Opacus."""

    @abstractmethod
    def arrange(self, part: nn.Module, given: Tensor) -> Arrange:
        """Return the arrangement that puts the records of a part's call first, or refuse the call."""


class _InAttention(_AbstractInside):
    """A pass of attention, whose projections see (positions, records, ...) without ``batch_first``."""

    def __init__(self, layer: DPMultiheadAttention) -> None:
        self._arrange: Arrange = as_it_is if layer.batch_first else from_the_second
        self._parts = {getattr(layer, name) for name in _PROJECTIONS}

    def arrange(self, part: nn.Module, given: Tensor) -> Arrange:
        if part not in self._parts or given.dim() != 3:
            raise UnsupportedModelError(
                "DPMultiheadAttention contains a layer that is not its own, or was called with "
                "tensors without a dimension of the records. Call it with query, key and value of "
                "three dimensions each.",
                topic="opacus-layers",
            )
        return self._arrange


class _InRecurrent(_AbstractInside):
    """A recurrent pass: linear layers are called for each time step, with the records that have one."""

    def __init__(self, layer: DPRNNBase, given: Tensor | PackedSequence) -> None:
        self._name = type(layer).__name__
        self._is_in_order = True
        self._arrange: Arrange = as_it_is
        sizes: list[int] = []
        if isinstance(given, PackedSequence):
            sizes = given.batch_sizes.tolist()
            self._is_in_order = given.sorted_indices is not None
            if given.sorted_indices is not None:
                self._arrange = FromPacked(given.sorted_indices)
        elif given.dim() == 3:
            steps, records = given.shape[:2] if not layer.batch_first else given.shape[1::-1]
            sizes = [records] * steps
        # How many rows the calls of each part must have, in turn.
        self._rows: dict[nn.Module, Iterator[int]] = {}
        for i, cell in enumerate(layer.cells):
            is_reverse = i % layer.num_directions == 1
            for part in (cell.ih, cell.hh):
                self._rows[part] = reversed(sizes) if is_reverse else iter(sizes)

    def arrange(self, part: nn.Module, given: Tensor) -> Arrange:
        if not self._is_in_order:
            raise UnsupportedModelError(
                f"{self._name} was called with sequences that were packed with enforce_sorted=True, "
                "which does not tell the order of the records. Use enforce_sorted=False, and leave "
                "the batch in the order in which it came.",
                topic="packed-sequences",
            )
        rows = next(self._rows.get(part, iter(())), None)
        if given.dim() != 2 or len(given) != rows:
            raise UnsupportedModelError(
                f"{self._name} was called in a way that does not keep the records apart. Call it "
                "with a tensor of three dimensions or with packed sequences, and with a state, if "
                "any, that has a row for each record.",
                topic="opacus-layers",
            )
        return self._arrange


class OpacusLayers:
    """Follows the forward passes of Opacus' layers in a model.

    ``DPMultiheadAttention`` declares which dimension holds the records, and the layers inside of it
    see the same. ``DPRNN``, ``DPGRU`` and ``DPLSTM`` call theirs step by step; of packed sequences the
    rows are in the order of the lengths, and become fewer. What a call inside must look like is known
    beforehand, and one that looks otherwise is refused.
    """

    def __init__(self, module: nn.Module) -> None:
        self._inside: _AbstractInside | None = None
        self.hooks = ModuleHooks()
        for each in module.modules():
            if isinstance(each, DPRNNBase | DPMultiheadAttention):
                enter = partial(each.register_forward_pre_hook, with_kwargs=True)
                self.hooks.add(each, enter, self._enter)
                leave = partial(each.register_forward_hook, always_call=True)
                self.hooks.add(each, leave, self._leave)

    @property
    def is_inside(self) -> bool:
        """True while a layer of Opacus runs."""
        return self._inside is not None

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(layer, DPMultiheadAttention):
            self._inside = _InAttention(layer)
        else:
            self._inside = _InRecurrent(layer, args[0] if args else kwargs["input"])

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside = None

    def arrange(self, layer: nn.Module, given: Tensor) -> Arrange:
        """Return the arrangement that puts the records first in the current call of a layer.

        Args:
            layer: any layer of the model, of Opacus' or not.
            given: the first tensor that it was called with.

        Raises:
            UnsupportedModelError: if that is not certain.
        """
        if isinstance(layer, SequenceBias):  # inside of DPMultiheadAttention it has its own order
            return as_it_is if layer.batch_first else from_the_second
        return as_it_is if self._inside is None else self._inside.arrange(layer, given)


def own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that its own calls use, without those of layers inside that it lists.

    A recurrent layer of Opacus lists its cells' parameters, a head its decoder's bias.
    """
    own = list(layer.parameters(recurse=False))
    if not own:  # most modules with others inside: what all of those hold need not be looked up
        return []
    inside = {id(param) for each in layer.children() for param in each.parameters()}
    return [param for param in own if id(param) not in inside]


def refuse(name: str, layer: nn.Module, has_rule: bool) -> None:
    """Refuse layers of Opacus that were changed, or are not known here. Raises UnsupportedModelError.

    Args:
        name: of the layer in the model.
        layer: any layer.
        has_rule: whether there is a rule for its type.
    """
    is_of_opacus = type(layer).__module__.startswith("opacus.layers")
    if isinstance(layer, DPRNNBase):
        is_known = _is_recurrent(layer)
    elif isinstance(layer, DPMultiheadAttention):
        is_known = _is_attention(layer)
    elif isinstance(layer, SequenceBias):
        is_known = has_rule  # run record by record it would take positions for records
    else:
        is_known = not is_of_opacus or type(layer).forward in {*_CELLS, nn.Linear.forward}
    if not is_known:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) is a layer of Opacus that was changed, or is not known "
            "to this engine. Use engine='hooks', or engine='bookkeeping' and the layer as it is.",
            topic="opacus-layers",
        )


def _is_recurrent(layer: DPRNNBase) -> bool:
    kind, parts = type(layer), [part for cell in layer.cells for part in (cell.ih, cell.hh)]
    return (
        kind.forward is DPRNNBase.forward
        and kind.forward_layer is DPRNNBase.forward_layer
        and kind.iterate_layers is DPRNNBase.iterate_layers
        and all(type(cell).forward in _CELLS for cell in layer.cells)
        and all(type(part) is RNNLinear for part in parts)
        and not own_parameters(layer)
        and _has_nothing_else(layer, parts)
    )


def _is_attention(layer: DPMultiheadAttention) -> bool:
    projections = [getattr(layer, name) for name in _PROJECTIONS]
    added = [layer.seq_bias_k, layer.seq_bias_v] if layer.add_bias_kv else []
    return (
        type(layer).forward is DPMultiheadAttention.forward
        and all(type(part).forward is nn.Linear.forward for part in projections)
        and all(type(each) is SequenceBias and not each.batch_first for each in added)
        and _has_nothing_else(layer, [*projections, *added])
    )


def _has_nothing_else(layer: nn.Module, parts: list[nn.Module]) -> bool:
    """True if all its parameters are those of the parts."""
    known = {param for part in parts for param in part.parameters(recurse=False)}
    return all(param in known for param in layer.parameters())
