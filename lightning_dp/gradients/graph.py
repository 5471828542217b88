"""The graph of a loss: which recorded calls it contains, and whether they are all uses of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.utils.checkpoint import CheckpointFunction

__all__ = [
    "Checkpoint",
    "Order",
    "Region",
    "Survey",
    "changes_order",
    "in_order",
    "survey",
    "uncovered",
]

# The nodes of ``torch.utils.checkpoint`` with ``use_reentrant=True``.
Checkpoint: type = CheckpointFunction._backward_cls

# Nodes of a graph, each after those that feed it, with these: ``next_functions``.
Order: TypeAlias = dict[Any, tuple[tuple[Any, int], ...]]


@dataclass
class Survey:
    """The findings in a graph.

    Args:
        uses: for each parameter, by ``id``, in how many places it meets something else.
        reached: the recorded calls that the graph contains.
        innermost: those of them that no other recorded call feeds.
        checkpoints: nodes of reentrant activation checkpoints, with parts of the model inside.
        choosing: nodes between recorded calls that may put rows into another order.
    """

    uses: Counter[int] = field(default_factory=Counter)
    reached: set[Any] = field(default_factory=set)
    innermost: set[Any] = field(default_factory=set)
    checkpoints: list[Any] = field(default_factory=list)
    choosing: list[Any] = field(default_factory=list)


_CHOOSING = {
    *("IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "FlipBackward0"),
    *("RollBackward0", "SortBackward0", "IndexPutBackward0", "IndexCopyBackward0"),
}


def in_order(root: Any, stop: Collection[Any] = ()) -> Order:
    """Return the nodes of a graph with the nodes that feed each, these first.

    Args:
        root: the node where to begin, ``loss.grad_fn``.
        stop: nodes below which nothing is looked at.
    """
    order: Order = {}
    stack = [] if root is None else [(root, _below(root, stop))]
    while stack:
        node, into = stack[-1]
        is_ready = True
        for child, _ in into:
            if child is None or child in order:
                continue
            if below := _below(child, stop) if stop else child.next_functions:
                stack.append((child, below))
                is_ready = False
            else:
                order[child] = below
        if is_ready:
            stack.pop()
            order[node] = into
    return order


def _below(node: Any, stop: Collection[Any]) -> tuple[tuple[Any, int], ...]:
    return () if node in stop else node.next_functions


def survey(order: Order, calls: Collection[Any]) -> Survey:
    """Find in one walk of a graph where parameters are used and which recorded calls it contains.

    A transpose, a cast or a norm of a parameter alone is still the parameter; the node that brings
    it together with something else is one use of it, and so is a recorded call of a layer. A layer
    of the usual kind uses its parameters once in each call, so a larger count than that of the
    recorded calls tells of a use that nobody recorded.

    Args:
        order: as :func:`in_order` gives it.
        calls: the nodes of the outputs of recorded layer calls.
    """
    found, uses = Survey(), list[int | None]()
    owner: dict[Any, int | None] = {}  # of each node: the only parameter it depends on, if any
    boundaries = set(calls)
    over_calls: set[Any] = set()  # the boundaries, and what they feed
    chosen: dict[Any, bool] = {}  # nodes that choose among rows of calls: is a call after them?
    after_choice: set[Any] = set()
    for node, into in order.items():
        if not into and (variable := getattr(node, "variable", None)) is not None:
            owners: list[int | None] = [id(variable)]
        else:
            owners = [owner[child] for child, _ in into if child is not None]
        is_fed = not over_calls.isdisjoint([child for child, _ in into])
        if is_boundary := node in boundaries:
            found.reached.add(node)
            if not is_fed:
                found.innermost.add(node)
        if is_fed and type(node).__name__ in _CHOOSING:
            chosen[node] = False
            after_choice.add(node)
        elif chosen and not after_choice.isdisjoint([child for child, _ in into]):
            after_choice.add(node)
            if is_boundary:
                chosen.update(dict.fromkeys(chosen, True))
        if isinstance(node, Checkpoint):
            found.checkpoints.append(node)
            is_boundary = True
        if is_fed or is_boundary:
            over_calls.add(node)
        one = owners[0] if owners and owners.count(owners[0]) == len(owners) else None
        owner[node] = None if is_boundary and into else one
        if into and (one is None or is_boundary):
            uses += owners
    uses += [owner[root] for root in (*order,)[-1:]]
    found.uses = Counter(each for each in uses if each is not None)
    found.choosing = [node for node, is_between in chosen.items() if is_between]
    return found


def changes_order(node: Any) -> bool:
    """Tell whether a node of :attr:`Survey.choosing` may move what stands in the first dimension.

    Which index stands where decides, never its values: they may be the records'. With indices of several
    dimensions one entry of each record is chosen, as a rule (``h[arange(n), last]``).
    """
    name = type(node).__name__
    if name in ("IndexBackward0", "IndexPutBackward0"):
        first, *others = node._saved_indices
        return first is not None and all(each is None for each in others)
    dims = len(node._input_metadata[0].shape)
    if name in ("FlipBackward0", "RollBackward0"):
        places = node._saved_dims
        return not places or any(_signed(place) % dims == 0 for place in places)
    return bool(dims) and _signed(node._saved_dim) % dims == 0


def _signed(number: int) -> int:
    """Return a dimension, which autograd's nodes keep without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


@dataclass(frozen=True)
class Region:
    """The part of a graph that belongs to one recorded call: from its outputs down to its inputs.

    Args:
        sources: the nodes that made the inputs, where the graph of the rest begins.
        own: parameters that the call's rule knows of, by ``id``.
        known: the nodes that made what is computed from parameters alone, and is pulled back.
    """

    sources: Collection[Any]
    own: Collection[int] = ()
    known: Collection[Any] = ()


def uncovered(root: Any, regions: Mapping[Any, Region], trained: Mapping[int, int]) -> set[int]:
    """Return the trained parameters that the loss depends on otherwise than by recorded calls.

    Args:
        root: the graph node where to begin, ``loss.grad_fn``.
        regions: of recorded calls, by the graph nodes of their outputs.
        trained: the parameters, by the ``id`` of what a graph ends in: themselves, or whole ones that
            stand for shards.
    """
    missing: set[int] = set()
    seen: set[tuple[Any, int]] = set()
    stack: list[tuple[Any, Region | None]] = [(root, None)]
    while stack:
        node, inside = stack.pop()
        if node is None or (node, id(inside)) in seen:
            continue
        seen.add((node, id(inside)))
        if inside is not None and node in inside.known:
            continue
        if inside is not None and node in inside.sources:
            inside = None
        if inside is None:
            inside = regions.get(node)
        param = trained.get(id(getattr(node, "variable", None)))
        if param is not None and (inside is None or param not in inside.own):
            missing.add(param)
        stack += [(child, inside) for child, _ in node.next_functions]
    return missing
