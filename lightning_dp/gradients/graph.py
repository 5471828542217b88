"""Walks through the autograd graph of a loss: where it uses parameters, and how it joins records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_dp.gradients.base import ALONE, UnsupportedModelError

__all__ = [
    "CoupledLossError",
    "WaitingLosses",
    "changes_order",
    "check_loss_graph",
    "nodes",
    "reached",
    "refuse_reentrant",
    "survey",
]


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Nodes of a graph, each after those that feed it, with these: ``next_functions``.
Order: TypeAlias = dict[Any, tuple[tuple[Any, int], ...]]

_CHOOSING = _names("Index IndexSelect Gather Flip Roll Sort IndexPut IndexCopy")
_REENTRANT: type = CheckpointFunction._backward_cls  # of ``checkpoint(..., use_reentrant=True)``


@dataclass
class Survey:
    """The findings in a graph.

    Args:
        uses: for each leaf that is a variable, by ``id``, in how many places it meets something else.
        leaves: these variables.
        reached: the recorded calls that the graph contains.
        innermost: those of them that no other recorded call feeds.
        choosing: nodes between recorded calls that may put rows into another order.
    """

    uses: Counter[int] = field(default_factory=Counter)
    leaves: list[Any] = field(default_factory=list)
    reached: set[Any] = field(default_factory=set)
    innermost: set[Any] = field(default_factory=set)
    choosing: list[Any] = field(default_factory=list)


def nodes(root: Any) -> Iterator[Any]:
    """Yield every node of a graph once, from ``loss.grad_fn`` on."""
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


def in_order(root: Any) -> Order:
    """Return the nodes of a graph with the nodes that feed each, these first."""
    order: Order = {}
    stack = [] if root is None else [(root, root.next_functions)]
    while stack:
        node, into = stack[-1]
        is_ready = True
        for child, _ in into:
            if child is None or child in order:
                continue
            if below := child.next_functions:
                stack.append((child, below))
                is_ready = False
            else:
                order[child] = below
        if is_ready:
            stack.pop()
            order[node] = into
    return order


def survey(root: Any, calls: Collection[Any]) -> Survey:
    """Find in one walk of a graph where parameters are used and which recorded calls it contains.

    A transpose, a cast or a norm of a parameter alone is still the parameter; the node that brings
    it together with something else is one use of it, and so is a recorded call of a layer. A layer
    uses each of its parameters once in each call, so any other count than that of the recorded
    calls tells of a use that nobody recorded. Reentrant activation checkpoints, inside of which
    nothing is seen, are refused.

    Args:
        root: the node where to begin, ``loss.grad_fn``.
        calls: the nodes of the outputs of recorded layer calls.
    """
    found, uses = Survey(), list[int | None]()
    owner: dict[Any, int | None] = {}  # of each node: the only parameter it depends on, if any
    over_calls: set[Any] = set()  # the calls, and what they feed
    chosen: dict[Any, bool] = {}  # nodes that choose among rows of calls: is a call after them?
    after_choice: set[Any] = set()
    for node, into in in_order(root).items():
        below = [child for child, _ in into if child is not None] if into else []
        if not into and (variable := getattr(node, "variable", None)) is not None:
            found.leaves.append(variable)
            owners: list[int | None] = [id(variable)]
        else:
            owners = list(map(owner.__getitem__, below))
        is_call, is_fed = node in calls, not over_calls.isdisjoint(below)
        if is_call:
            found.reached.add(node)
            if not is_fed:
                found.innermost.add(node)
        if is_fed and _name(node.__class__.__name__) in _CHOOSING:
            chosen[node] = False
            after_choice.add(node)
        elif chosen and not after_choice.isdisjoint(below):
            after_choice.add(node)
            if is_call:
                chosen.update(dict.fromkeys(chosen, True))
        if type(node) is _REENTRANT:
            raise _reentrant()
        if is_fed or is_call:
            over_calls.add(node)
        one = owners[0] if owners and owners.count(owners[0]) == len(owners) else None
        owner[node] = None if is_call and into else one
        if into and (one is None or is_call):
            uses += owners
    uses += [owner[root]] if owner else []
    found.uses = Counter(filter(None, uses))
    found.choosing = [node for node, is_between in chosen.items() if is_between]
    return found


def changes_order(node: Any) -> bool:
    """Return whether a node of :attr:`Survey.choosing` may move what stands in the first dimension.

    Which index stands where decides, never its values: they may be the records'. With indices of several
    dimensions one entry of each record is chosen, as a rule (``h[arange(n), last]``).
    """
    name = _name(node.__class__.__name__)
    if name in ("Index", "IndexPut"):
        first, *others = node._saved_indices
        return first is not None and all(each is None for each in others)
    dims = len(node._input_metadata[0].shape)
    if name in ("Flip", "Roll"):
        places = node._saved_dims
        return not places or any(_signed(place) % dims == 0 for place in places)
    return bool(dims) and _signed(node._saved_dim) % dims == 0


def _signed(number: int) -> int:
    """Return a dimension, which autograd's nodes keep without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def refuse_reentrant(root: Any) -> None:
    """Refuse a graph with reentrant activation checkpoints: each goes back by itself inside."""
    if any(type(node) is _REENTRANT for node in nodes(root)):
        raise _reentrant()


def _reentrant() -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model has reentrant activation checkpoints. Give torch.utils.checkpoint "
        "use_reentrant=False; with Hugging Face, gradient_checkpointing_enable("
        "gradient_checkpointing_kwargs={'use_reentrant': False}).",
        topic="checkpointing",
    )


# -- how records are joined ----------------------------------------------------------------------


class CoupledLossError(UnsupportedModelError):
    """The loss mixes records by more than sums with constant coefficients."""


def check_loss_graph(loss: Tensor, records: int, outputs: Collection[Any]) -> None:
    r"""Refuse a loss that is not :math:`\sum_i c_i f_i` with f_i of record i alone and constant c_i.

    One walk goes from the loss back to the rows, which are tensors with a dimension that is a multiple
    of the number of records; what happens before them is not judged. On the way only sums, means,
    constant factors and changes of shape may stand, and anything within a single record
    (``losses[3].sqrt()``). A factor without a gradient is taken for a constant. Nothing of it may be in
    half precision, where 1/n is rounded, so that n would decide about a factor of all records.

    Args:
        loss: before its backward pass.
        records: n, the number of records it was computed from.
        outputs: the graph nodes that made the outputs of trained layers, which depend on records.

    Raises:
        CoupledLossError: naming the node and the cure.
        UnsupportedModelError: if records are joined in half precision.

    Example:
        >>> import torch
        >>> output = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        >>> losses = output.pow(2).mean(1)
        >>> check_loss_graph(losses.clamp(max=9.0).mean(), 4, {output.grad_fn})
        >>> check_loss_graph(losses.mean().clamp(max=9.0), 4, {output.grad_fn})
        Traceback (most recent call last):
        lightning_dp.gradients.graph.CoupledLossError: The loss takes clamp (ClampBackward1) of ...
    """
    if records > 1 and loss.grad_fn is not None:
        _Walk(records, outputs).back_from(loss.grad_fn)


# Nodes that choose some entries, that put them into a whole, and that only move them.
_CHOICES = _names(
    "Index IndexSelect Gather MaskedSelect Take Select Slice Split SplitWithSizes UnsafeSplit "
    "UnsafeSplitWithSizes Unbind PackPaddedSequence"
)
_WHOLES = _names("Stack Cat IndexPut IndexCopy IndexAdd Scatter ScatterAdd CopySlices")
_MOVES = (_CHOICES | _WHOLES) | _names(  # a full backward hook of a module is an identity
    "BackwardHookFunction ToCopy Clone Copy Alias View UnsafeView ReshapeAlias AsStrided Squeeze "
    "Unsqueeze Expand Repeat Permute Transpose T Flip Roll Diagonal ConstantPadNd AccumulateGrad"
)
_NLL = _names("NllLoss NllLoss2D")
_LINEAR = (_MOVES | _NLL) | _names("Add Sub Rsub Neg Sum Mean Cumsum Trace")
_PRODUCTS = _names("Mul Mm Bmm Mv Dot Vdot Addmm Addmv Addbmm Baddbmm")
_LOSSES = _names(  # sums or means of what each row is alone
    "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss "
    "MultiMarginLoss MultilabelMarginLoss"
)


_HALF = (torch.float16, torch.bfloat16)
_ROUNDED = (
    "The loss joins the records in half precision, in which the number of records that it is divided by "
    "is rounded, so that one more changes the gradients of all others. Take it in float32: "
    f"cross_entropy(logits.float(), y), or losses.float().mean(). {ALONE}"
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
            if node._input_metadata[number].dtype in _HALF:
                raise UnsupportedModelError(_ROUNDED, topic="coupled-loss")
            if not self._is_linear(node):
                if (taker := self._taker(node)) is not None:
                    raise _refusal(_OVER if taker is node else _OF, node, taker)
                continue  # and what is above it is within a record, too
            if self._is_mean_of_chosen(node):
                raise _refusal(_CHOSEN, node)
            todo += _above(node)

    def _rows(self, node: Any, number: int) -> list[int]:
        """Return the sizes of the dimensions that may be those of the rows, of an output of a node."""
        shape = node._input_metadata[number].shape
        return [size for size in shape if size and size % self._n == 0]

    def _is_linear(self, node: Any) -> bool:
        """Return whether a node without rows takes a sum with constant coefficients."""
        name, inputs = _name(node.__class__.__name__), node.next_functions
        if name in _PRODUCTS:  # a matrix product of rows takes the sum over them
            factors = [e for e in inputs[-2:] if e[0] is not None and self._is_of_records(e[0])]
            return len(factors) < 2 or all(self._rows(*edge) for edge in factors)
        if name == "Div":
            return not any(each is not None and self._is_of_records(each) for each, _ in inputs[1:])
        if name in _NLL and node._saved_reduction == 1 and node._saved_weight is not None:
            return False  # divides by the weights of all targets
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
            if node in self._outputs or (is_data and self._rows(node, 0)):
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
                elif _name(node.__class__.__name__) in _CHOICES and rows != self._rows(
                    node, number
                ):
                    continue
                if (child, output, lower is None) not in met:
                    met.add((child, output, lower is None))
                    todo.append((child, output, lower))
        return None

    def _goes_over(self, node: Any, child: Any, output: int) -> bool:
        """Return whether a node without rows surely takes them together."""
        name = _name(node.__class__.__name__)
        if name in _MOVES or name in _PRODUCTS:
            return name in _PRODUCTS
        before, after = _shape(child, output), _shape(node)
        return len(after) < len(before) or after[before.index(self._rows(child, output)[0])] == 1

    def _is_mean_of_chosen(self, mean: Any) -> bool:
        """Return whether a node is a mean over as many records as a mask or an index chose."""
        if _name(mean.__class__.__name__) != "Mean" and getattr(mean, "_saved_reduction", 0) != 1:
            return False
        kept = set(_shape(mean))
        todo = [(child, set(_shape(child, output)) - kept) for child, output in _above(mean)]
        met = set[Any]()
        while todo:
            node, sizes = todo.pop()  # of dimensions that the mean may go over
            is_end = node in self._outputs or _name(node.__class__.__name__) in _WHOLES
            if is_end or node in met or not sizes:
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
        first = node._saved_indices[0] if _name(node.__class__.__name__) == "Index" else None
        if first is None or before[0] != self._n:
            return False
        return bool(first.dtype == torch.bool or after[0] != self._n)


def _above(node: Any) -> list[tuple[Any, int]]:
    """Return the nodes that feed a node, each with the number of its output."""
    return [edge for edge in node.next_functions if edge[0] is not None]


def _shape(node: Any, number: int = 0) -> Sequence[int]:
    return tuple(node._input_metadata[number].shape)


@cache  # by names: a class that a step defines holds what its functions close over
def _name(kind: str) -> str:
    """Return the name of what a kind of node differentiates."""
    return re.sub(r"Backward[s\d]*(_copy)?$", "", kind)


_OF = (
    "{} of what {} makes of several records, so that records change each other's gradients. Take it of "
    "each record's own value (reduction='none'), then the mean over the records, and only sums after it."
)
_OVER = (
    "{} over several records, which is more than their sum, so that records change each other's "
    "gradients. Take it within each record (reduction='none', or over the other dimensions), and then "
    "the mean over the records; leave out terms between records."
)
_CHOSEN = (
    "{} over rows that a mask or an index chose, so that it divides by a number that all records "
    "decide. Multiply each row's loss by the mask instead: (losses * mask).mean()."
)


def _refusal(text: str, *nodes: Any) -> CoupledLossError:
    kinds = [_name(node.__class__.__name__) for node in nodes]
    names = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", each).lower() for each in kinds]
    words = [f"{name} ({type(node).__name__})" for name, node in zip(names, nodes, strict=True)]
    return CoupledLossError(f"The loss takes {text.format(*words)} {ALONE}", topic="coupled-loss")


# -- losses of a step with several optimizers ----------------------------------------------------


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
