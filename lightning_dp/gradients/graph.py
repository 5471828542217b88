"""What the autograd graph of a loss tells about recorded layer calls and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Survey", "survey"]


@dataclass
class Survey:
    """What was found in a graph.

    Args:
        uses: for each parameter, by ``id``, in how many places it meets something else.
        reached: the recorded calls that the graph contains.
        innermost: those of them that no other recorded call feeds.
    """

    uses: Counter[int] = field(default_factory=Counter)
    reached: set[Any] = field(default_factory=set)
    innermost: set[Any] = field(default_factory=set)


def survey(root: Any, calls: Collection[Any], stop: Collection[Any] = ()) -> Survey:
    """Walk a graph once.

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
    stack = [(root, False)]
    while stack:
        node, is_finished = stack.pop()
        if node is None or (node in owner and not is_finished):
            continue
        below = [child for child, _ in node.next_functions if child is not None]
        below = [] if node in stop else below
        if not is_finished:
            owner[node] = None
            stack.append((node, True))
            stack.extend((child, False) for child in below)
            continue
        if any(child in feeds_on_calls or child in boundaries for child in below):
            feeds_on_calls.add(node)
        if node in boundaries:
            found.reached.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            owner[node] = id(variable)
            continue
        owners = [owner[child] for child in below]
        if len(set(owners)) == 1 and node not in boundaries:
            owner[node] = owners[0]
        else:
            found.uses.update(each for each in owners if each is not None)
    if (last := owner.get(root)) is not None:
        found.uses[last] += 1
    found.innermost = found.reached - feeds_on_calls
    return found
