"""The state machines of a federation, its messages, and the records that a client answers for."""

from __future__ import annotations

import importlib
import json
import math
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from lightning_dp._refusals import Refusal
from lightning_dp._validate import above_0, instance, normalise, optional, whole
from lightning_dp.accounting.events import AbstractEvent, counted
from lightning_dp.boundary import BoundedSum, Query, State
from lightning_dp.config import check_same, config_dict
from lightning_dp.functional import is_finite, length

__all__ = [
    "REFUSED",
    "AbstractServer",
    "Attendance",
    "Fact",
    "Message",
    "MessageError",
    "Quorum",
    "Records",
    "norm_bound",
]

Fact: TypeAlias = str | int | float | bool

REFUSED = "refused"  # the reply of every protocol where a client has no budget left

_HEADER = "lightning_dp"
_LARGEST_NUMBER = 2**63
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


@runtime_checkable
class Records(Protocol):
    """The data set of one client.

    :class:`lightning_dp.federated.local.LocalRecords` is one, made of a LightningModule and a
    data set. Records of your own may also have its ``check_point``, ``try_once``, ``has_products``,
    ``fingerprint`` and ``users``; what they lack is not checked.
    """

    @property
    def num_records(self) -> int:
        """N of this client, of users where they are the unit."""

    @property
    def unit(self) -> str:
        """The unit whose part is clipped, each "record" or "user", or the whole "client" as one."""

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        """Return the sum of the query over these records, each clipped; sensitive until it is noised."""


# -- clients that are late or wrong ------------------------------------------------------------


@dataclass(frozen=True)
class Quorum:
    """The clients that a round needs, and the limits on waiting: public, and fixed before the run.

    Once a round has its quorum, it goes on when ``wait`` is over, or no other is worth waiting for:
    those who failed ``tries`` times in it, and those who were left out before and have sent nothing
    usable since. Who is left out counts as zero under the denominator of all, and is asked again in
    the next round.

    Args:
        clients: the fewest whose replies a round needs; None for more than half of all.
        wait: seconds; math.inf waits for everybody.
        tries: failures of one client in one round.
        patience: seconds without a usable reply after which waiting is over, too; and a run whose
            round lacks its quorum then ends, to be gone on with later.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> Quorum().least(5), Quorum(clients=2, wait=60.0).least(5)
        (3, 2)
    """

    clients: int | None = None
    wait: float = 1200.0
    tries: int = 5
    patience: float = 1800.0

    def __post_init__(self) -> None:
        normalise(self, optional(whole), "clients")
        normalise(self, whole, "tries")
        normalise(self, above_0, "wait", "patience")

    def least(self, num_clients: int) -> int:
        """Return the number of clients that a round needs, of all."""
        return whole("clients", self.clients or num_clients // 2 + 1, 1, num_clients)


@dataclass
class Attendance:
    """Signs of life of the clients, by which an engine finds when waiting for them is over.

    Args:
        quorum: the limits.
        began: when the present stage of the server began.

    Example:
        >>> attendance = Attendance(Quorum(wait=60.0, tries=1), began=0.0)
        >>> attendance.fail(1)
        >>> [attendance.is_over({1}, now=5.0), attendance.is_over({1, 2}, now=5.0)]
        [True, False]
        >>> attendance.is_over({1, 2}, now=60.0)
        True
    """

    quorum: Quorum
    began: float
    _failures: Counter[int] = field(default_factory=Counter)
    _silent: set[int] = field(default_factory=set)

    def begin(self, now: float, left_out: Iterable[int] = ()) -> None:
        """Note that a stage begins, and who was left out of the one before."""
        self.began, self._failures = now, Counter()
        self._silent.update(left_out)

    def hear(self, client: int) -> None:
        """Note a sign of life that can be used: the next rounds wait for this client."""
        self._silent.discard(client)

    def fail(self, client: int) -> None:
        """Note a message that is lost, an error, or a reply that cannot be used."""
        self._failures[client] += 1

    def is_over(self, awaited: Collection[int], now: float) -> bool:
        """Return True if no client that is awaited is worth waiting for."""
        return now - self.began >= self.quorum.wait or all(
            client in self._silent or self._failures[client] >= self.quorum.tries
            for client in awaited
        )


def norm_bound(
    clip_norm: float,
    noise_multiplier: float,
    batch_size: float,
    size: int,
    num_records: float = math.inf,
    draws: int = 1,
) -> float:
    r"""Return a norm that one of ``draws`` honest noised sums exceeds with probability below 1e-9.

    The sum is :math:`\sum_{j \in B} u_j + \mathcal N(0, (z C)^2 I_k)` with ‖u_j‖ ≤ C, over a Poisson
    batch B of expected size b. With L = ln(2·10⁹ · draws) the bound is

        C min(b + 10 √b + (2/3) L, N) + z C (√k + √(2 L)).

    - The size of B is a sum of independent indicators of variance σ² ≤ b. By Bernstein's inequality
      it is at least b + t with probability ≤ exp(-t² / (2 (σ² + t/3))), which is ≤ e^-L for
      t = 10 √b + (2/3) L, since t² - (2/3) L t = 10 √b t ≥ 100 b ≥ 2 L b as long as L ≤ 50.
    - The squared norm of the noise over (z C)² is chi-square with k degrees of freedom. The norm is
      a 1-Lipschitz function of a Gaussian, with mean at most √k: P(χ_k ≥ √k + √(2 L)) ≤ e^-L.

    One part in 1000 is added for rounding. A check by this bound uses noised values only.

    Args:
        clip_norm, noise_multiplier, batch_size, size: C, z, b and k.
        num_records: N, the most that a batch can have.
        draws: the number of sums.

    Example:
        >>> round(norm_bound(1.0, 2.0, batch_size=100.0, size=10_000), 1)
        427.8
    """
    tail = math.log(2e9 * draws)
    records = min(batch_size + 10 * math.sqrt(batch_size) + 2 * tail / 3, num_records)
    noise = noise_multiplier * clip_norm if noise_multiplier else 0.0
    return 1.001 * (clip_norm * records + noise * (math.sqrt(size) + math.sqrt(2 * tail)))


# -- the two machines --------------------------------------------------------------------------


class AbstractServer(ABC):
    """The server of a protocol, without an engine, a clock or a network.

    An engine does this, in any order and at any time::

        while not server.is_done:
            for client in those that no message is in flight to:
                if (request := server.request(client)) is not None:
                    send it
            for each reply that came:
                server.receive(client, reply)
            if there was no reply of the clients in server.awaited for too long:
                server.leave_out()

    - At most one message is in flight to a client. A reply that does not come is no loss: the same
      request is made again, and the client answers with the same bytes.
    - :meth:`state_dict` may be taken between any two calls, and holds released values only. It must be
      saved before a request leaves that was made from a new state, so that the server is never behind
      a client; and before anybody sees its :attr:`point`, so that no second noise is drawn for it.

    A subclass gives ``run``, the first model ``start``, ``num_clients`` and a ``quorum``, and calls
    :meth:`_begin`; clients without budget leave.
    """

    run: str
    start: Tensor
    num_clients: int
    quorum: Quorum = Quorum()
    _settings: ClassVar[tuple[str, ...]] = ()  # further ones that a resumed run must have

    def _begin(self) -> None:
        """Check the first model and the quorum, and begin with them."""
        start = instance("start", self.start, Tensor)
        if start.dim() != 1 or not is_finite(start):
            raise ValueError("start must be a vector of finite numbers.")
        self._least = instance("quorum", self.quorum, Quorum).least(self.num_clients)
        self._point, self._left = start.detach().clone(), set[int]()

    @property
    def point(self) -> Tensor:
        """A copy of the global model, its trained parameters as one flat vector."""
        return self._point.clone()

    @property
    @abstractmethod
    def round(self) -> int:
        """The number of rounds that are over."""

    def round_of(self, client: int) -> int:
        """Return the round that this client may answer now; of one that is ahead, a later one."""
        return self.round

    @property
    def stage(self) -> tuple[int, ...]:
        """The round and its part, which change as soon as others are asked, or something else is."""
        return (self.round,)

    @property
    @abstractmethod
    def awaited(self) -> set[int]:
        """The clients without whose replies the present stage does not end."""

    @property
    def refused(self) -> set[int]:
        """The clients that have no budget left, and are asked no more."""
        return set(self._left)

    def _end_of_budgets(self) -> str:
        """Return the reason to end where too few clients have budget; empty if there are enough."""
        staying = self.num_clients - len(self._left)
        few = f"{staying} of the clients have budget left, and a round needs {self._least}"
        return few if staying < self._least else ""

    @abstractmethod
    def leave_out(self) -> set[int]:
        """End the stage without those who are awaited, if it has its quorum; return who they were."""

    @property
    def is_done(self) -> bool:
        """True when nothing will be asked any more."""
        return bool(self.reason)

    @property
    @abstractmethod
    def reason(self) -> str:
        """The reason why it is done; empty while it is not."""

    @abstractmethod
    def request(self, client: int) -> bytes | None:
        """Return the message to send to a client now, asked again the same; None if it must wait."""

    @abstractmethod
    def receive(self, client: int, reply: bytes) -> bool:
        """Take a client's reply.

        Args:
            client: from whom.
            reply: from anybody: everything in it is checked before anything changes.

        Returns:
            True if it was applied; False for a reply that came twice or too late. An engine that
            hears nothing else for long gives up.

        Raises:
            MessageError: for any other bytes; nothing has changed then.
        """

    @property
    def facts(self) -> dict[str, Any]:
        """Public facts about the run as a whole, for its report."""
        return {}

    def cost(self, i: int, num_records: int, client: int) -> list[AbstractEvent] | None:
        """Return what round i costs a record of a client with so many, by the plan; None: unknown."""
        return None

    def spent(self, num_records: int, client: int) -> list[tuple[AbstractEvent, int]] | None:
        """Return what the rounds so far cost together."""
        found = [self.cost(i, num_records, client) for i in range(self.round)]
        return None if None in found else counted((e, 1) for each in found for e in each or ())

    def _read(
        self, client: int, reply: bytes, numbers: tuple[str, ...], vectors: Mapping[str, str]
    ) -> Message:
        """Read a reply, and check its sender and its form; its place is not checked yet.

        Args:
            client: the sender.
            reply: from anybody.
            numbers: the facts of every reply, whole numbers >= 0.
            vectors: the tensor of a reply, by its kind; a refusal has none.
        """
        if type(client) is not int or not 0 <= client < self.num_clients:
            raise MessageError(
                f"client={reprlib.repr(client)} is none of the clients 0, ..., {self.num_clients - 1}."
            )
        message = Message.from_bytes(reply)
        tensors = {**{kind: {name} for kind, name in vectors.items()}, REFUSED: set[str]()}
        form = (set(numbers), tensors.get(message.kind))
        if (set(message.facts), set(message.tensors)) != form:
            parts = (message.kind, [*message.facts], [*message.tensors])
            kind, facts, there = (reprlib.repr(part) for part in parts)
            raise MessageError(
                f"A reply of kind {kind} with the numbers {facts} and the tensors {there} belongs "
                "to another protocol."
            )
        for name in numbers:
            message.whole(name)
        return message

    def state_dict(self) -> State:
        """Return tensors, numbers, strings, lists and dicts, to be read with ``weights_only=True``."""
        return {
            "configuration": config_dict(self._configuration),
            "point": self._point.clone(),
            "left": sorted(self._left),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there. Raises ValueError if the configuration was another."""
        earlier = {"quorum": Quorum()}  # versions before it had a quorum wrote none
        check_same(state["configuration"], self._configuration, earlier.get)
        self._point, self._left = state["point"].clone(), set(state.get("left", ()))

    @property
    def _configuration(self) -> dict[str, object]:
        names = ("run", "plan", "num_clients", "quorum", *self._settings)
        return {**{name: getattr(self, name) for name in names}, "size": len(self.start)}


# -- messages ----------------------------------------------------------------------------------


class MessageError(Refusal, ValueError):
    """Bytes that are no message, or a message that does not keep to the protocol."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="federated-messages")


@dataclass(frozen=True)
class Message:
    """A kind, some facts and some vectors.

    The bytes are those of safetensors: reading them runs no code, and takes memory in proportion.

    Args:
        kind: what it means to the two machines that exchange it.
        facts: strings, whole numbers below 2**63, truth values and floating-point numbers.
        tensors: vectors of float64, float32, bfloat16, float16 or int64; detached, on the CPU when
            read.

    Example:
        >>> message = Message("update", {"round": 3}, {"sum": torch.tensor([1.0, 2.0])})
        >>> again = Message.from_bytes(message.to_bytes())
        >>> again.kind, again["round"], again.tensors["sum"]
        ('update', 3, tensor([1., 2.]))
    """

    kind: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return a fact. Raises MessageError if it is missing."""
        if name not in self.facts:
            kind, there = reprlib.repr(self.kind), reprlib.repr([*self.facts])
            raise MessageError(f"A message {kind} has no {name!r}, only {there}.")
        return self.facts[name]

    def whole(self, name: str) -> int:
        """Return a fact that must be a whole number >= 0. Raises MessageError if it is not."""
        value = self[name]
        if type(value) is not int or not value >= 0:
            raise MessageError(f"{name}={reprlib.repr(value)} must be a whole number >= 0.")
        return value

    def tensor(self, name: str) -> Tensor:
        """Return a vector. Raises MessageError if it is missing."""
        if name not in self.tensors:
            raise MessageError(f"A message {reprlib.repr(self.kind)} has no tensor {name!r}.")
        return self.tensors[name]

    def reals(
        self, name: str, size: int, dtype: torch.dtype, largest: float = math.inf
    ) -> tuple[Tensor, float]:
        """Return a vector in a protocol's dtype and its norm, finite there, and at most ``largest``.

        Raises:
            MessageError: for another size, or numbers or a norm that are too large; its own norm
                is not in the message.
        """
        raw = self.tensor(name)
        if len(raw) != size:
            raise MessageError(f"{name} has {len(raw)} numbers and is not a vector of {size}.")
        if not raw.is_floating_point():
            raise MessageError(f"{name} is of {raw.dtype}, not of real numbers.")
        value = raw.to(torch.promote_types(dtype, torch.float32))
        norm = float(length(value))
        if not norm * norm <= torch.finfo(value.dtype).max:
            raise MessageError(f"{name} is not finite, or has no finite norm, as {value.dtype}.")
        if not norm <= largest:
            raise MessageError(f"{name} is longer than {largest:.6g}, which the plan allows.")
        return value, norm

    def to_bytes(self) -> bytes:
        """Return the bytes, always the same for the same message."""
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor)
        content = {name: each.detach().cpu().clone() for name, each in self.tensors.items()}
        header = json.dumps([self.kind, dict(self.facts)], sort_keys=True)
        return bytes(_safetensors().save(content, {_HEADER: header}))

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Read what :meth:`to_bytes` wrote. Raises MessageError for anything else."""
        library = _safetensors()
        try:
            tensors = library.load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            kind, facts = json.loads(header["__metadata__"][_HEADER])
        except Exception as error:  # the bytes may be anybody's
            raise MessageError(
                f"These bytes are no message of lightning-dp ({type(error).__name__})."
            ) from None
        if not isinstance(kind, str) or not isinstance(facts, dict):
            raise MessageError("A message has no kind or no facts.")
        for value in facts.values():
            is_large = isinstance(value, int) and not abs(value) < _LARGEST_NUMBER
            if is_large or not isinstance(value, str | int | float):
                raise MessageError("A fact is neither a string nor a number below 2**63.")
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        return cls(kind, facts, tensors)


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise ImportError(
            "Messages need safetensors: pip install 'lightning-dp[federated]', or safetensors."
        ) from None


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES or tensor.dim() != 1:
        shape = reprlib.repr(tuple(tensor.shape))
        raise MessageError(
            f"{reprlib.repr(name)} is of shape {shape} and {tensor.dtype}; a message has vectors of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}."
        )
