r"""The check of a loss by its autograd graph: records meet in sums with constant coefficients only."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.gradients.base import ALONE, UnsupportedModelError

__all__ = ["CoupledLossError", "check_loss_graph"]


class CoupledLossError(UnsupportedModelError):
    """The loss mixes records by more than sums with constant coefficients."""


def check_loss_graph(loss: Tensor, records: int, outputs: Collection[Any]) -> None:
    r"""Refuse a loss that is not :math:`\sum_i c_i f_i` with f_i of record i alone and constant c_i.

    One walk goes from the loss back to the rows, which are tensors with a dimension that is a multiple
    of the number of records; what happens before them is not judged. On the way only sums, means,
    constant factors and changes of shape may stand, and anything within a single record
    (``losses[3].sqrt()``). A factor without a gradient is taken for a constant.

    Args:
        loss: before its backward pass.
        records: n, the number of records it was computed from.
        outputs: the graph nodes that made the outputs of trained layers, which depend on records.

    Raises:
        CoupledLossError: naming the node and the cure.

    Example:
        >>> import torch
        >>> output = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        >>> losses = output.pow(2).mean(1)
        >>> check_loss_graph(losses.clamp(max=9.0).mean(), 4, {output.grad_fn})
        >>> check_loss_graph(losses.mean().clamp(max=9.0), 4, {output.grad_fn})
        Traceback (most recent call last):
        lightning_dp.gradients.loss_graph.CoupledLossError: The loss takes clamp (ClampBackward1) of ...
    """
    if records > 1 and loss.grad_fn is not None:
        _Walk(records, outputs).back_from(loss.grad_fn)


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Nodes that choose some entries, that put them into a whole, and that only move them.
_CHOICES = _names(
    "Index IndexSelect Gather MaskedSelect Take Select Slice Split SplitWithSizes UnsafeSplit "
    "UnsafeSplitWithSizes Unbind PackPaddedSequence"
)
_WHOLES = _names("Stack Cat IndexPut IndexCopy IndexAdd Scatter ScatterAdd CopySlices")
_HOOK = "BackwardHookFunction"  # a module's full backward hooks: an identity
_MOVES = (_CHOICES | _WHOLES | {_HOOK}) | _names(
    "ToCopy Clone Copy Alias View UnsafeView ReshapeAlias AsStrided Squeeze Unsqueeze Expand Repeat "
    "Permute Transpose T Flip Roll Diagonal ConstantPadNd AccumulateGrad"
)
_LINEAR = _MOVES | _names("Add Sub Rsub Neg Sum Mean Cumsum Trace NllLoss NllLoss2D")
_PRODUCTS = _names("Mul Mm Bmm Mv Dot Vdot Addmm Addmv Addbmm Baddbmm")
_LOSSES = _names(  # sums or means of what each row is alone
    "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss "
    "MultiMarginLoss MultilabelMarginLoss"
)


class _Walk:
    """One walk from a loss of n records back to their rows."""

    def __init__(self, n: int, outputs: Collection[Any]) -> None:
        self._n, self._outputs = n, outputs
        self._constant = set[Any]()  # nodes that hold nothing of the records

    def back_from(self, root: Any) -> None:
        """Refuse the first node that takes more than a sum over records."""
        todo, met = [(root, 0)], set[Any]()
        while todo:
            node, number = todo.pop()
            if node in met or self._rows(node, number):
                continue
            met.add(node)
            if not self._is_linear(node):
                if (taker := self._taker(node)) is not None:
                    raise _refusal(_OVER if taker is node else _OF, node, taker)
                continue  # and what is above it is within a record, too
            if self._is_mean_of_chosen(node):
                raise _refusal(_CHOSEN, node)
            todo += _above(node)

    def _rows(self, node: Any, number: int) -> list[int]:
        """Return the sizes of the dimensions that may be those of the rows, of an output of a node."""
        return [size for size in _shape(node, number) if size and size % self._n == 0]

    def _is_linear(self, node: Any) -> bool:
        """Return whether a node without rows takes a sum with constant coefficients."""
        name, inputs = _name(node), node.next_functions
        if name in _PRODUCTS:  # a matrix product of rows takes the sum over them
            factors = [e for e in inputs[-2:] if e[0] is not None and self._is_of_records(e[0])]
            return len(factors) < 2 or all(self._rows(*edge) for edge in factors)
        if name == "Div":
            return not any(each is not None and self._is_of_records(each) for each, _ in inputs[1:])
        is_norm_1 = 1 in (getattr(node, "_saved_ord", 0), getattr(node, "_saved_p", 0))
        if name in _LOSSES or (is_norm_1 and name.endswith("Norm")):
            return all(self._rows(*edge) for edge in _above(node))
        return name in _LINEAR and (name != "CopySlices" or len(inputs) > 1)  # 1: done in place

    def _is_of_records(self, node: Any) -> bool:
        """Return whether a node depends on records: on a layer's output, or on data with a gradient."""
        todo, met = [node], set[Any]()
        while todo:
            node = todo.pop()
            if node in met or node in self._constant:
                continue
            met.add(node)
            variable = getattr(node, "variable", None)
            is_data = variable is not None and not isinstance(variable, nn.Parameter)
            is_output = node in self._outputs or _name(node) == _HOOK
            if is_output or (is_data and self._rows(node, 0)):
                return True
            todo += [each for each, _ in _above(node)]
        self._constant |= met
        return False

    def _taker(self, start: Any, number: int = 0, taker: Any = None) -> Any:
        """Return a node, from one on upwards, that takes the rows of all records; None if none does.

        Where some rows were chosen (one record in a loop, say), nobody knows whose they are. With a
        ``taker`` below, which takes whatever rows there are, only they are looked for.
        """
        todo, met = [(start, number, taker)], set[Any]()
        while todo:
            node, number, taker = todo.pop()
            above = [edge for edge in _above(node) if self._is_of_records(edge[0])]
            if taker is not None and not above:
                return taker
            for child, output in above:
                rows, lower = self._rows(child, output), taker
                if rows and lower is None:
                    if not self._goes_over(node, child, output):
                        continue
                    lower = node
                elif _name(node) in _CHOICES and rows != self._rows(node, number):
                    continue
                if (child, output, lower is None) not in met:
                    met.add((child, output, lower is None))
                    todo.append((child, output, lower))
        return None

    def _goes_over(self, node: Any, child: Any, output: int) -> bool:
        """Return whether a node without rows surely takes them together."""
        name = _name(node)
        if name in _MOVES or name in _PRODUCTS:
            return name in _PRODUCTS
        before, after = _shape(child, output), _shape(node)
        return len(after) < len(before) or after[before.index(self._rows(child, output)[0])] == 1

    def _is_mean_of_chosen(self, mean: Any) -> bool:
        """Return whether a node is a mean over as many records as a mask or an index chose."""
        if _name(mean) != "Mean" and getattr(mean, "_saved_reduction", 0) != 1:
            return False
        kept = set(_shape(mean))
        todo = [(child, set(_shape(child, output)) - kept) for child, output in _above(mean)]
        met = set[Any]()
        while todo:
            node, sizes = todo.pop()  # of dimensions that the mean may go over
            if node in met or not sizes or node in self._outputs or _name(node) in _WHOLES:
                continue
            met.add(node)
            for child, output in _above(node):
                before, after = _shape(child, output), _shape(node)
                if after and after[0] in sizes and self._is_chosen(node, before, after):
                    if self._taker(child, output, mean) is not None:
                        return True
                else:
                    todo.append((child, sizes.intersection(before)))
        return False

    def _is_chosen(self, node: Any, before: Sequence[int], after: Sequence[int]) -> bool:
        """Return whether the number of rows may follow the records: that of a mask, even if it is n."""
        first = node._saved_indices[0] if _name(node) == "Index" else None
        if first is None or before[0] != self._n:
            return False
        return bool(first.dtype == torch.bool or after[0] != self._n)


def _above(node: Any) -> list[tuple[Any, int]]:
    """Return the nodes that feed a node, each with the number of its output."""
    return [edge for edge in node.next_functions if edge[0] is not None]


def _shape(node: Any, number: int = 0) -> Sequence[int]:
    return tuple(node._input_metadata[number].shape)


def _name(node: Any) -> str:
    """Return the name of what a node differentiates."""
    return _without_end(type(node).__name__)


@cache
def _without_end(name: str) -> str:
    return re.sub(r"Backward[s\d]*(_copy)?$", "", name)


_OF = (
    "{} of what {} makes of several records, so that records change each other's gradients. Take it of "
    "each record's own value (reduction='none'), then the mean over the records, and only sums after it."
)
_OVER = (
    "{} over several records, which is more than their sum, so that records change each other's "
    "gradients. Take it within each record, over the other dimensions, and then the mean over the "
    "records; leave out terms between records."
)
_CHOSEN = (
    "{} over rows that a mask or an index chose, so that it divides by a number that all records "
    "decide. Multiply each row's loss by the mask instead: (losses * mask).mean()."
)


def _refusal(text: str, *nodes: Any) -> CoupledLossError:
    names = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", _name(node)).lower() for node in nodes]
    words = [f"{name} ({type(node).__name__})" for name, node in zip(names, nodes, strict=True)]
    return CoupledLossError(f"The loss takes {text.format(*words)} {ALONE}", topic="coupled-loss")
