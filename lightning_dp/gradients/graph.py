"""The graph of a loss: which recorded calls it contains, and whether they are all uses of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_dp.gradients.checkpointing import is_checkpoint

__all__ = ["Region", "Survey", "survey", "uncovered"]


@dataclass
class Survey:
    """The findings in a graph.

    Args:
        uses: for each parameter, by ``id``, in how many places it meets something else.
        reached: the recorded calls that the graph contains.
        innermost: those of them that no other recorded call feeds.
        checkpoints: nodes of reentrant activation checkpoints, with parts of the model inside.
        variables: the leaves, by ``id``.
    """

    uses: Counter[int] = field(default_factory=Counter)
    reached: set[Any] = field(default_factory=set)
    innermost: set[Any] = field(default_factory=set)
    checkpoints: list[Any] = field(default_factory=list)
    variables: dict[int, Any] = field(default_factory=dict)


def survey(root: Any, calls: Collection[Any], stop: Collection[Any] = ()) -> Survey:
    """Find in one walk of a graph where parameters are used and which recorded calls it contains.

    A transpose, a cast or a norm of a parameter alone is still the parameter; the node that brings
    it together with something else is one use of it, and so is a recorded call of a layer. A layer
    of the usual kind uses its parameters once in each call, so a larger count than that of the
    recorded calls tells of a use that nobody recorded.

    Args:
        root: the graph node where to begin, ``loss.grad_fn``.
        calls: the nodes of the outputs of recorded layer calls.
        stop: nodes below which nothing is looked at.
    """
    found, boundaries = Survey(), set(calls)
    owner: dict[Any, int | None] = {}  # of each node: the only parameter it depends on, if any
    feeds_on_calls: set[Any] = set()
    edges: dict[Any, list[Any]] = {}
    stack = [] if root is None else [root]
    while stack:
        node = stack[-1]
        if (below := edges.get(node)) is None:
            into = () if node in stop else node.next_functions
            edges[node] = below = [child for child, _ in into if child is not None]
            if waiting := [child for child in below if child not in edges]:
                stack += waiting
                continue
        stack.pop()
        if node in owner:
            continue
        is_boundary = node in boundaries
        if is_boundary:
            found.reached.add(node)
        if is_checkpoint(node):
            found.checkpoints.append(node)
            boundaries.add(node)
            is_boundary = True
        if not below:
            owner[node] = _leaf(node, found)
            continue
        if not (boundaries.isdisjoint(below) and feeds_on_calls.isdisjoint(below)):
            feeds_on_calls.add(node)
        owners = [owner[child] for child in below]
        one = owners[0] if owners.count(owners[0]) == len(owners) else None
        owner[node] = None if is_boundary else one
        if one is None or is_boundary:
            for each in owners:
                if each is not None:
                    found.uses[each] += 1
    if (last := owner.get(root)) is not None:
        found.uses[last] += 1
    found.innermost = found.reached - feeds_on_calls
    return found


def _leaf(node: Any, found: Survey) -> int | None:
    """Note the leaf that a node stands for; return its ``id``."""
    if (variable := getattr(node, "variable", None)) is None:
        return None
    found.variables[id(variable)] = variable
    return id(variable)


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


def uncovered(root: Any, regions: Mapping[Any, Region], trained: Collection[int]) -> set[int]:
    """Return the trained parameters that the loss depends on otherwise than by recorded calls.

    Args:
        root: the graph node where to begin, ``loss.grad_fn``.
        regions: of recorded calls, by the graph nodes of their outputs.
        trained: the parameters, by ``id``.
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
        variable = id(getattr(node, "variable", None))
        if variable in trained and (inside is None or variable not in inside.own):
            missing.add(variable)
        stack += [(child, inside) for child, _ in node.next_functions]
    return missing
