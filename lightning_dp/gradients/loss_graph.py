r"""The check of a loss by its autograd graph: records meet in sums with constant coefficients only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_dp.gradients import flow_arithmetic as arithmetic
from lightning_dp.gradients import flow_of_parts as of_parts
from lightning_dp.gradients.flow_arithmetic import Outcome, Rule
from lightning_dp.gradients.known_graphs import Graph, Sources
from lightning_dp.gradients.record_flow import (
    NOTHING,
    ROWS,
    CoupledLossError,
    Flow,
    Given,
    Meeting,
    name_of,
)

__all__ = ["CoupledLossError", "check_graph", "check_loss_graph"]

# What a value of any shape may hold; more than that would keep nodes of a graph.
_ANY_SHAPE = (ROWS, NOTHING)


def check_loss_graph(loss: Tensor, records: int, outputs: Collection[Any]) -> None:
    r"""Refuse a loss that is not :math:`\sum_i c_i f_i` with f_i of record i alone and constant c_i.

    Seen in the graph alone, whatever the values are: where does the dimension of the records go?
    Nodes that take rows to rows may be anything. A node that goes over the records may be a sum or
    a mean, and after it only sums, constant factors and changes of shape may come. Values that are
    known to be of one record (``losses[3]``) may go through anything, too.

    The dimension of the records is that whose size is a multiple of their number. Where several
    are, or none, nothing is refused until it is clear again: a batch of another size tells, and
    the other checks of isolation look at values. A coefficient without a gradient is taken for a
    constant.

    Args:
        loss: before its backward pass.
        records: n, the number of records it was computed from.
        outputs: the graph nodes that made the outputs of trained layers: there the rows begin.
            Tensors with a gradient that are no parameters have rows, too.

    Raises:
        CoupledLossError: naming the node and the cure.

    Example:
        >>> import torch
        >>> output = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        >>> losses = output.pow(2).mean(1)
        >>> check_loss_graph(losses.clamp(max=9.0).mean(), 4, {output.grad_fn})
        >>> try:
        ...     check_loss_graph(losses.mean().clamp(max=9.0), 4, {output.grad_fn})
        ... except CoupledLossError as error:
        ...     str(error)[:60]
        'The loss takes clamp (ClampBackward1) of what mean (MeanBack'
    """
    check_graph(Graph.of(loss.grad_fn, outputs), records)


def check_graph(graph: Graph, records: int) -> None:
    """Do the same with the graph of a loss.

    Of graphs made alike only those nodes are looked at again whose shapes or attributes decide.

    Raises:
        CoupledLossError: naming the node and the cure.
    """
    if records < 2:
        return
    if graph.known.looked is None or not _Walk(records, graph).once_more():
        _Walk(records, graph).along()


class _Walk:
    """One walk through a graph, from what it begins with to the loss.

    Args:
        records: their number.
        graph: its outputs of layers are the nodes at which rows begin.
    """

    def __init__(self, records: int, graph: Graph) -> None:
        self._records, self._graph, self._outputs = records, graph, graph.outputs
        self._flows: dict[Any, Outcome] = {}
        self._pieces: dict[Any, Outcome] = {}

    @cached_property
    def _layers(self) -> set[Any]:
        return {_behind_a_view(node) for node in self._outputs}

    def along(self) -> None:
        """Follow the records from the first node to the last, and remember what structure decides."""
        flows, looked = self._flows, list[tuple[int, Sources | None]]()
        places = {node: number for number, node in enumerate(self._graph.order)}
        for number, (node, edges) in enumerate(self._graph.order.items()):
            given = self._given(edges)
            decided = self._by_structure(node, edges, given)
            if decided is None:
                flows[node] = self._flow(node, edges, given)
                looked.append((number, self._sources(node, edges, given, places)))
            else:
                flows[node] = decided
        known = self._graph.known
        known.flows = tuple([flow if flow in _ANY_SHAPE else None for flow in flows.values()])
        known.looked = tuple(looked)

    def once_more(self) -> bool:
        """Look only where structure did not decide; False if something else is found there."""
        graph, known = self._graph, self._graph.known
        self._flows = flows = dict(zip(graph.order, known.flows, strict=True))
        for number, sources in known.looked or ():
            if sources is not None:
                if self._are_rows(sources):
                    continue
                return False
            node, before = graph.nodes[number], known.flows[number]
            edges = graph.order[node]
            flows[node] = flow = self._flow(node, edges, self._given(edges))
            if before is not None and flow is not before:
                return False  # and what follows may have relied on it
        return True

    def _given(self, edges: Any) -> list[Outcome]:
        return [NOTHING if into is None else self._flows[into] for into, _ in edges]

    def _by_structure(self, node: Any, edges: Any, given: Sequence[Outcome]) -> Flow | None:
        """Return what a node of any shape and with any attributes holds; None if they decide."""
        nothing, rows = given.count(NOTHING), given.count(ROWS)
        if nothing == len(given):
            return None if self._may_begin(node, edges) else NOTHING
        if rows != 1 or rows + nothing != len(given):
            return None
        rule, is_entry_by_entry = _rules[type(node)]
        is_of_rows = is_entry_by_entry or (rule in _LAYERS and node in self._layers)
        return ROWS if is_of_rows else None

    def _sources(
        self, node: Any, edges: Any, given: Sequence[Outcome], places: dict[Any, int]
    ) -> Sources | None:
        """Return inputs of which it is enough that they are rows of one shape: then the node has rows.

        None if more decides what it holds.
        """
        flows = _each(given, edges)
        are_sure = all(
            each is NOTHING or flow is ROWS for each, flow in zip(given, flows, strict=True)
        )
        if not (are_sure and self._makes_rows(node, edges, flows)):
            return None
        pairs = zip(edges, flows, strict=True)
        return tuple([(places[into], number) for (into, number), flow in pairs if flow is ROWS])

    def _are_rows(self, sources: Sources) -> bool:
        """Tell whether outputs of nodes, by their places, are rows of one shape."""
        first: Any = None
        for place, number in sources:
            node = self._graph.nodes[place]
            flow = self._flows[node]
            if (flow[number] if isinstance(flow, list) else flow) is not ROWS:
                return False
            if len(sources) > 1:
                shape = node._input_metadata[number].shape
                if first is not None and shape != first:
                    return False
                first = shape
        return True

    def _makes_rows(self, node: Any, edges: Any, flows: Sequence[Flow]) -> bool:
        """Tell whether a node makes rows of rows of one shape, and of nothing else of the records."""
        rule, is_entry_by_entry = _rules[type(node)]
        rows = flows.count(ROWS)
        if not rows or rows + flows.count(NOTHING) != len(flows):
            return False
        if rows == 1:
            return is_entry_by_entry or (rule in _LAYERS and node in self._layers)
        return rule in _OF_ALIKE and _are_alike(edges, flows)  # so that rows meet their own ones

    def _flow(self, node: Any, edges: Any, given: Sequence[Outcome]) -> Outcome:
        """Return what a node holds, from what its inputs hold."""
        rule, flows = _rules[type(node)][0], _each(given, edges)
        if self._makes_rows(node, edges, flows):
            return ROWS
        rows = flows.count(ROWS)
        if rows + flows.count(NOTHING) == len(flows):
            if not rows:
                return self._beginning(node, edges)
            if rows == 1 and rule is of_parts.parts:
                return self._parts(node, edges, flows)
        return rule(self._meeting(node, edges, flows))

    def _meeting(self, node: Any, edges: Any, flows: Sequence[Flow]) -> Meeting:
        inputs = [
            None if e is None else Given(flow, e._input_metadata[number].shape)
            for (e, number), flow in zip(edges, flows, strict=True)
        ]
        return Meeting(node, inputs, self._records)

    def _parts(self, node: Any, edges: Any, flows: Sequence[Flow]) -> Outcome:
        """Return what parts of rows hold: alike wherever the same is cut in the same way."""
        into, number = next(e for e, flow in zip(edges, flows, strict=True) if flow is ROWS)
        sizes = getattr(node, "_saved_split_sizes", None) or getattr(node, "_saved_split_size", 0)
        shape = tuple(into._input_metadata[number].shape)
        key = type(node), shape, node._saved_dim, str(sizes)
        if key not in self._pieces:
            self._pieces[key] = of_parts.parts(self._meeting(node, edges, flows))
        return self._pieces[key]

    def _beginning(self, node: Any, edges: Any) -> Flow:
        """Return rows where they begin: at a layer's output, or in data that have a gradient."""
        if not self._may_begin(node, edges):
            return NOTHING
        if edges:
            return self._with_rows(node._input_metadata[0].shape)
        is_parameter = isinstance(node.variable, nn.Parameter)
        return NOTHING if is_parameter else self._with_rows(node.variable.shape)

    def _may_begin(self, node: Any, edges: Any) -> bool:
        """Tell whether rows may begin at a node that holds nothing of them else."""
        if edges:
            return node in self._outputs or type(node).__name__ == _HOOK
        variable = getattr(node, "variable", None)
        return variable is not None and type(variable) is not nn.Parameter

    def _with_rows(self, shape: Sequence[int]) -> Flow:
        """Return rows for a shape that has them first, or after the time."""
        first = shape[: max(1, min(2, len(shape) - 1))]
        return ROWS if any(size and size % self._records == 0 for size in first) else NOTHING


def _each(given: Sequence[Outcome], edges: Any) -> list[Flow]:
    """Return what comes along each edge, of what its node gives."""
    return [
        each[number] if isinstance(each, list) else each
        for each, (_, number) in zip(given, edges, strict=True)
    ]


def _behind_a_view(node: Any) -> Any:
    """Return the node that computes a layer's output: a linear one has a view behind it."""
    is_view = _rules[type(node)][0] is arithmetic.linear and len(node.next_functions) == 1
    return node.next_functions[0][0] if is_view else node


def _are_alike(edges: Any, flows: Sequence[Flow]) -> bool:
    """Tell whether all inputs that hold rows have one shape."""
    first = None
    for (into, number), flow in zip(edges, flows, strict=True):
        if flow is ROWS:
            shape = into._input_metadata[number].shape
            if first is None:
                first = shape
            elif shape != first:
                return False
    return True


# A module's full backward hooks stand behind its output, and in front of its inputs: an identity.
_HOOK = "BackwardHookFunctionBackward"


def _own_function(meeting: Meeting) -> Outcome:
    """Follow a Function that somebody wrote: of what is in it, nothing is known."""
    is_identity = type(meeting.node).__name__ == _HOOK
    return arithmetic.linear(meeting) if is_identity else arithmetic.anything(meeting)


_BY_NAME = {
    arithmetic.linear: "Add Sub Rsub Neg ToCopy Clone Copy Alias View UnsafeView ReshapeAlias Unsqueeze "
    "Squeeze Permute Transpose T Expand Repeat AsStrided ConstantPadNd Real Imag ViewAsReal "
    "ViewAsComplex Conj ConjPhysical Triu Tril Diagonal ToDense Unfold Rot90",
    arithmetic.product: "Mul",
    arithmetic.quotient: "Div",
    arithmetic.power: "Pow",
    arithmetic.interpolated: "Lerp",
    arithmetic.total: "Sum",
    arithmetic.mean: "Mean",
    arithmetic.by_more_than_sums: "Max Min Amax Amin Aminmax Median Nanmedian Mode Kthvalue Topk Prod "
    "Std Var StdMean VarMean Logsumexp Nansum",
    arithmetic.norm: "Norm LinalgVectorNorm",
    arithmetic.along: "Softmax SafeSoftmax LogSoftmax Sort Cumprod Cummax Cummin Logcumsumexp",
    arithmetic.running_sum: "Cumsum FftC2C FftR2C FftC2R",
    arithmetic.loss_function: "NllLoss NllLoss2D MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy "
    "BinaryCrossEntropyWithLogits SoftMarginLoss MultiMarginLoss MultilabelMarginLoss",
    arithmetic.layer_norm: "NativeLayerNorm FusedRmsNorm",
    arithmetic.batch_norm: "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm",
    arithmetic.matrix_product: "Mm Bmm Mv Dot Vdot Addmm Addmv Addbmm Baddbmm",
    arithmetic.matrix_function: "LinalgSvd LinalgQr LinalgEig LinalgEigh LinalgInvEx LinalgDet "
    "LinalgSlogdet LinalgCholeskyEx LinalgSolveEx LinalgLuFactorEx LinalgLu LinalgLstsq "
    "LinalgMatrixExp LinalgPinv LinalgSolveTriangular CholeskySolve CholeskyInverse",
    arithmetic.distances: "Cdist EuclideanDist Pdist",
    of_parts.part: "Select Slice",
    of_parts.parts: "Unbind Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes",
    of_parts.whole: "Stack Cat IndexPut IndexCopy IndexFill Scatter MaskedScatter SelectScatter "
    "SliceScatter",
    of_parts.written: "CopySlices",
    of_parts.added_at: "IndexAdd ScatterAdd Put",
    of_parts.reduced_at: "ScatterReduce IndexReduce SegmentReduce",
    of_parts.chosen: "Index IndexSelect Gather MaskedSelect Take",
    of_parts.packed: "PackPaddedSequence",
    of_parts.moved: "Roll Flip",
}
# Of rows alone, these make rows, whatever the shapes are.
_ENTRY_BY_ENTRY = frozenset(
    (
        *("Relu", "Gelu", "Silu", "Tanh", "Sigmoid", "LeakyRelu", "Elu", "Hardtanh", "Hardswish"),
        *("Exp", "Log", "Sqrt", "Rsqrt", "Abs", "Clamp", "Convolution", "MaxPool2DWithIndices"),
        *("AvgPool2D", "AdaptiveAvgPool2D", "NativeDropout"),
    )
)
_LAYERS = {arithmetic.matrix_product, arithmetic.layer_norm}
_OF_ALIKE = {arithmetic.linear, arithmetic.product, arithmetic.quotient}
_OF_ONE = {arithmetic.linear, arithmetic.product, arithmetic.quotient, arithmetic.power}


class _Rules(dict[type, tuple[Rule, bool]]):
    """For each type of node the rule, and whether it makes rows of the rows of one input."""

    def __missing__(self, kind: type) -> tuple[Rule, bool]:
        if issubclass(kind, BackwardCFunction):
            return _own_function, False  # not kept: such classes come and go
        name = name_of(kind)
        rule = _by_name.get(name, arithmetic.anything)
        if name.startswith("ScaledDotProduct"):
            rule = arithmetic.attention
        self[kind] = rule, rule in _OF_ONE or name in _ENTRY_BY_ENTRY
        return self[kind]


_by_name = {name: rule for rule, names in _BY_NAME.items() for name in names.split()}
_rules = _Rules()
