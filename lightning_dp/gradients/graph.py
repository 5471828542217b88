"""How often the autograd graph of a loss uses each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

__all__ = ["parameter_uses"]


def parameter_uses(root: Any, calls: Collection[Any], stop: Collection[Any] = ()) -> Counter[int]:
    """For each parameter, by ``id``, in how many places of a graph it meets something else.

    A transpose, a cast or a norm of a parameter alone is still the parameter; the node that brings
    it together with something else is one use of it, and so is a recorded call of a layer. A layer
    of the usual kind uses its parameters once in each call, so a larger count than that of the
    recorded calls tells of a use that nobody recorded.

    Args:
        root: the graph node where to begin, ``loss.grad_fn``.
        calls: the nodes of the outputs of recorded layer calls.
        stop: nodes below which nothing is counted.
    """
    uses: Counter[int] = Counter()
    boundaries = set(calls)
    owner: dict[Any, int | None] = {}  # of each node: the only parameter it depends on, if any
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
        if (variable := getattr(node, "variable", None)) is not None:
            owner[node] = id(variable)
            continue
        owners = [owner[child] for child in below]
        if len(set(owners)) == 1 and node not in boundaries:
            owner[node] = owners[0]
        else:
            uses.update(found for found in owners if found is not None)
    if (found := owner.get(root)) is not None:
        uses[found] += 1
    return uses
