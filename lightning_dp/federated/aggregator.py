"""A tree of aggregators: each looks like one client from above and like the server from below."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_dp._validate import normalise, whole
from lightning_dp.estimators.base import State
from lightning_dp.federated.asynchronous import FORMS, LOST, REFUSED, ROUND, UPDATE
from lightning_dp.federated.base import Message, MessageError
from lightning_dp.federated.replies import Reply, check_client, read_reply

__all__ = ["Aggregator"]


@dataclass
class Aggregator:
    """Adds up the updates of its children, clients or other aggregators, and sends one.

    ``offer`` it what comes from above. While it has a round, ``request`` and ``receive`` speak to
    the children as :class:`~lightning_dp.federated.AsyncServer` does; ``reply`` is what goes up
    once all children have answered. Each child's update is in the sum once.

    It sees noised updates only, so it need not be trusted with more than the server is. Children
    wait for each other; sub-trees do not.

    Args:
        num_children: children are 0, ..., num_children - 1.

    Example:
        >>> import torch
        >>> node = Aggregator(num_children=2)
        >>> facts = {"run": "trial", "round": 0, "counter": 0}
        >>> node.offer(Message("round", facts, {"model": torch.zeros(1)}).to_bytes())
        >>> for child in (0, 1, 1):
        ...     update = Message("update", {"round": 0, "counter": 0}, {"update": torch.ones(1)})
        ...     _ = node.receive(child, update.to_bytes())
        >>> Message.from_bytes(node.reply).tensors["update"]
        tensor([2.])
    """

    num_children: int

    def __post_init__(self) -> None:
        normalise(self, whole, "num_children")
        self._request: bytes | None = None
        self._round = -1
        self._sums: dict[int, Tensor] = {}
        self._counters = 0
        self._left: list[int] = []
        self._reply: bytes | None = None

    def offer(self, request: bytes) -> None:
        """A request from above: a new round, or the same one again.

        Raises:
            MessageError: for an older round.
        """
        message = Message.from_bytes(request)
        i = message.whole("round")
        if message.kind != ROUND or i < self._round:
            raise MessageError(f"Round {i} ({message.kind!r}) was asked for after {self._round}.")
        if i == self._round and self._reply is not None and not self._is_lost:
            return
        if i > self._round:
            self._round, self._sums = i, {}
        self._request, self._reply = request, None

    @property
    def _is_lost(self) -> bool:
        return self._reply is not None and Message.from_bytes(self._reply).kind == LOST

    @property
    def reply(self) -> bytes | None:
        """What goes up; None while it waits. The same bytes for the same round."""
        return self._reply

    def request(self, child: int) -> bytes | None:
        """What to send to a child now; None if it must wait."""
        if self._reply is not None or child in self._sums or child in self._left:
            return None
        return self._request

    def receive(self, child: int, reply: bytes) -> bool:
        """A child's reply; whether it was new. Raises MessageError if it is none."""
        check_client(child, self.num_children)
        read = read_reply(f"Child {child}", reply, FORMS)
        i = read.numbers["round"]
        if i > self._round:
            raise MessageError(f"Child {child} answers for round {i}, which it was not asked for.")
        if i < self._round or child in self._sums or child in self._left:
            return False  # it came twice, or late
        if read.kind == LOST:
            self._reply = reply  # only from above can the model come
            return False
        if read.kind == REFUSED:
            self._left.append(child)
        else:
            self._add(child, read)
        self._finish()
        return True

    def _add(self, child: int, read: Reply) -> None:
        """Take an update that can be added to the others: of their size and dtype, and finite."""
        raw, counter = read.raw, read.numbers["counter"]
        assert raw is not None
        if not counter <= self._round:
            raise MessageError(f"Child {child} answers for a model that it was not sent.")
        like = next(iter(self._sums.values()), raw)
        self._sums[child] = read.vector(like.numel(), like.dtype)
        self._counters = min(counter, self._counters) if len(self._sums) > 1 else counter

    def _finish(self) -> None:
        """All children have answered: make the reply."""
        if len(self._sums) + len(self._left) < self.num_children:
            return
        if not self._sums:
            self._reply = Message(REFUSED, {"round": self._round}).to_bytes()
            return
        order = sorted(self._sums)  # not that of arrival, so that the same sum is the same
        total = self._sums[order[0]].clone()
        for child in order[1:]:
            total += self._sums[child]
        facts = {"round": self._round, "counter": self._counters}
        self._reply = Message(UPDATE, facts, {"update": total}).to_bytes()

    def state_dict(self) -> State:
        """Released values only."""
        return {
            "round": self._round,
            "request": None if self._request is None else list(self._request),
            "sums": dict(self._sums),
            "counters": self._counters,
            "left": list(self._left),
            "reply": None if self._reply is None else list(self._reply),
        }

    def load_state_dict(self, state: State) -> None:
        self._round, self._counters = int(state["round"]), int(state["counters"])
        self._request = None if state["request"] is None else bytes(state["request"])
        self._sums, self._left = dict(state["sums"]), list(state["left"])
        self._reply = None if state["reply"] is None else bytes(state["reply"])
