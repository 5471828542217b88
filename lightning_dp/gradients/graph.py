"""Walks through autograd graphs: which recorded calls a loss depends on, and how it uses parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.utils.checkpoint import CheckpointFunction

from lightning_dp.gradients.base import UnsupportedModelError

__all__ = ["Order", "Survey", "changes_order", "in_order", "nodes", "refuse_reentrant", "survey"]

# Nodes of a graph, each after those that feed it, with these: ``next_functions``.
Order: TypeAlias = dict[Any, tuple[tuple[Any, int], ...]]

_REENTRANT: type = CheckpointFunction._backward_cls  # of ``checkpoint(..., use_reentrant=True)``
_CHOOSING = {
    *("IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "FlipBackward0"),
    *("RollBackward0", "SortBackward0", "IndexPutBackward0", "IndexCopyBackward0"),
}


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
    """Yield every node of a graph once.

    Args:
        root: the node where to begin, ``loss.grad_fn``.
    """
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


def in_order(root: Any) -> Order:
    """Return the nodes of a graph with the nodes that feed each, these first.

    Args:
        root: the node where to begin, ``loss.grad_fn``.
    """
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
    calls tells of a use that nobody recorded.

    Args:
        root: the node where to begin, ``loss.grad_fn``.
        calls: the nodes of the outputs of recorded layer calls.

    Raises:
        UnsupportedModelError: for a reentrant activation checkpoint, inside of which nothing is seen.
    """
    found, uses = Survey(), list[int | None]()
    owner: dict[Any, int | None] = {}  # of each node: the only parameter it depends on, if any
    over_calls: set[Any] = set()  # the calls, and what they feed
    chosen: dict[Any, bool] = {}  # nodes that choose among rows of calls: is a call after them?
    after_choice: set[Any] = set()
    for node, into in in_order(root).items():
        below = [child for child, _ in into if child is not None]
        if not into and (variable := getattr(node, "variable", None)) is not None:
            found.leaves.append(variable)
            owners: list[int | None] = [id(variable)]
        else:
            owners = [owner[child] for child in below]
        is_call, is_fed = node in calls, not over_calls.isdisjoint(below)
        if is_call:
            found.reached.add(node)
            if not is_fed:
                found.innermost.add(node)
        if is_fed and type(node).__name__ in _CHOOSING:
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
    found.uses = Counter(each for each in uses if each is not None)
    found.choosing = [node for node, is_between in chosen.items() if is_between]
    return found


def changes_order(node: Any) -> bool:
    """Return whether a node of :attr:`Survey.choosing` may move what stands in the first dimension.

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


def refuse_reentrant(root: Any) -> None:
    """Refuse a graph with reentrant activation checkpoints: each goes back by itself inside.

    Args:
        root: the node where to begin, ``loss.grad_fn``.

    Raises:
        UnsupportedModelError: with the cure.
    """
    if any(type(node) is _REENTRANT for node in nodes(root)):
        raise _reentrant()


def _reentrant() -> UnsupportedModelError:
    return UnsupportedModelError(
        "The model has reentrant activation checkpoints. Give torch.utils.checkpoint "
        "use_reentrant=False; with Hugging Face, gradient_checkpointing_enable("
        "gradient_checkpointing_kwargs={'use_reentrant': False}).",
        topic="checkpointing",
    )
