"""Graphs of losses, which nearly every step makes alike: what their structure decides is found once."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from lightning_dp.gradients.graph import Order, in_order

__all__ = ["Graph", "Known", "KnownGraphs", "Sources"]

# Outputs of nodes: the place of each node, and the number of its output.
Sources: TypeAlias = tuple[tuple[int, int], ...]

_MOST = 32  # structures that are kept


@dataclass
class Known:
    """All that was found in graphs of one structure, and no node of any of them.

    Args:
        flows: what each node holds of the records, where it is rows or nothing.
        looked: the places of nodes for which more than the structure decides that, with inputs of which
            it is enough that they are rows of one shape; None if more is to be looked at.
    """

    flows: tuple[Any, ...] = ()
    looked: tuple[tuple[int, Sources | None], ...] | None = None


@dataclass(frozen=True)
class Graph:
    """The graph of a loss.

    Args:
        order: its nodes, each after those that feed it.
        outputs: the nodes that made outputs of layers.
        leaves: the variables where it ends.
        known: of graphs of this structure.
    """

    order: Order
    outputs: Collection[Any]
    leaves: tuple[Any, ...]
    known: Known

    @classmethod
    def of(cls, root: Any, outputs: Collection[Any]) -> Graph:
        """Walk through a graph of which nothing is known."""
        order = in_order(root)
        return cls(order, outputs, _leaves(order), Known())

    @cached_property
    def nodes(self) -> list[Any]:
        """The nodes in their order."""
        return list(self.order)


class KnownGraphs:
    """Recognises graphs by their structure.

    That is the types of all nodes, what feeds each, which of them made outputs of layers, and which
    variables are the leaves. Shapes and saved attributes, which follow the size of a batch, are no
    part of it.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Known] = {}

    def graph(self, root: Any, outputs: Collection[Any]) -> Graph:
        """Return a graph, with what is known of those made alike.

        Args:
            root: the node where to begin, ``loss.grad_fn``.
            outputs: the nodes that made outputs of layers.
        """
        order = in_order(root)
        leaves = _leaves(order)
        place = {node: number for number, node in enumerate(order)}.get
        structure = (
            tuple(map(type, order)),
            tuple(map(len, order.values())),
            tuple([(place(node), number) for into in order.values() for node, number in into]),
            frozenset(map(place, outputs)),
            tuple([(id(leaf), type(leaf)) for leaf in leaves]),  # ids of what is gone come again
        )
        known = self._known.get(structure)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[structure] = known = Known()
        return Graph(order, outputs, leaves, known)


def _leaves(order: Order) -> tuple[Any, ...]:
    """Return the variable of each node that nothing feeds; None for one that has none."""
    return tuple([getattr(node, "variable", None) for node, into in order.items() if not into])
