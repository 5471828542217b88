"""The client of every protocol: a release is charged before its records are asked, and made once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.federated.ledger import NoLedger, ReleaseLedger
from lightning_dp.federated.messages import LOST, REFUSED, Fact, Message, MessageError
from lightning_dp.federated.protocol import AbstractClient, Records, noise_source
from lightning_dp.federated.spending import Spending
from lightning_dp.mechanism import BudgetExhausted

__all__ = ["AbstractRounds", "Asked", "Client", "Latest", "MakeMessage"]

MakeMessage: TypeAlias = Callable[[np.random.Generator, NoiseSource], Message]
"""Asks the records, with the generator of the batch, and noises what they answer."""

Latest: TypeAlias = Callable[[], tuple[Message, Message] | None]
"""The note and the content of the run's latest release; None if there is none."""


@dataclass(frozen=True)
class Asked:
    """One release that a server asks for, public and checked.

    Args:
        round, part: its place in the ledger.
        place: its place as the server calls it, for a reply that says nothing else.
        make: makes it, once it is charged; None if the client no longer has the model that it was
            to be made at, and can only repeat it.
        keep: False for what must not be written to disk (a sum that a trusted server will noise).
        note: what a new process must know to go on after it; public.
    """

    round: int
    part: int
    place: Mapping[str, Fact]
    make: MakeMessage | None
    keep: bool = True
    note: bytes = b""


@dataclass(frozen=True)
class AbstractRounds(ABC):
    """The rounds of one protocol at one client: their price, and what is made of the records.

    It holds no state. What a round needs comes with the request, or with the latest release.

    Args:
        records: the client's data.
    """

    records: Records

    kinds: ClassVar[tuple[str, ...]]
    """The requests that it has, by kind."""

    @property
    def facts(self) -> dict[str, Any]:
        """Further numbers about this client that may be seen."""
        return {}

    @abstractmethod
    def events(self, i: int) -> Sequence[AbstractEvent]:
        """Return the privacy events of the ledger's round i, charged before its first release."""

    @abstractmethod
    def read(self, request: Message, latest: Latest) -> Asked:
        """Check a request of this run, before anything is charged.

        Raises:
            MessageError: for one that does not keep to what was agreed on.
        """

    def reply(self, made: bytes) -> bytes:
        """Return the reply that is in a release, or raise the error that it tells of."""
        return made


class Client(AbstractClient):
    """A client, of whichever protocol.

    For each request, in this order: it is checked; the first time, the model is tried on made-up
    records; the round is charged to the ledger, on disk; the records are asked, and the answer is
    noised; the reply is kept, on disk, and sent. So

    - asked again, also as a new process on the same ledger, the client sends the same bytes, and no
      second noise is drawn;
    - a refused request, or a round that the budget does not allow, charges nothing.

    Args:
        rounds: the protocol, on this client's data.
        ledger: of this data set.
        spending: the whole plan and the budget.
        seed: for tests only: the same batches and noise each time, which protects nobody.
    """

    def __init__(
        self,
        rounds: AbstractRounds,
        ledger: ReleaseLedger | NoLedger,
        spending: Spending,
        *,
        seed: int | None = None,
    ) -> None:
        self._rounds, self._ledger, self._spending = rounds, ledger, spending
        self._seed = seed

    @property
    def epsilon(self) -> float:
        """ε at ``target_delta`` spent so far on this data set, by all runs; inf without a ledger."""
        return self._ledger.epsilon(self._spending.target_delta, self._spending.relation)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "unit": self._rounds.records.unit,
            "seeded": self._seed is not None,
            **self._rounds.facts,
            **self._ledger.facts(self._spending),
        }

    def answer(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        if message.kind not in self._rounds.kinds or message["run"] != self._spending.run:
            raise MessageError(
                f"This client answers rounds of run {self._spending.run!r}, not {message.facts}."
            )
        asked = self._rounds.read(message, self._latest)
        if asked.make is None:
            sent = self._ledger.find(self._spending, asked.round, asked.part)
            return sent or Message(LOST, asked.place).to_bytes()
        self._try_before_first_charge()
        try:
            made = self._release(asked, asked.make)
        except BudgetExhausted:
            return Message(REFUSED, asked.place).to_bytes()
        return self._rounds.reply(made)

    def _latest(self) -> tuple[Message, Message] | None:
        found = self._ledger.latest(self._spending)
        if found is None:
            return None
        note, content = found
        return Message.from_bytes(note), Message.from_bytes(content)

    def _try_before_first_charge(self) -> None:
        """Run the client's module once before its first round: a mistake there costs nothing yet."""
        try_once = getattr(self._rounds.records, "try_once", None)  # others have nothing to try
        if try_once is not None and not self._ledger.has_begun(self._spending):
            try_once()

    def _release(self, asked: Asked, make: MakeMessage) -> bytes:
        def charged(rng: np.random.Generator) -> bytes:
            if self._seed is not None:  # batches and noise are different streams of it
                rng = random_generator(self._seed, 1, asked.round)
            return make(rng, noise_source(self._seed, asked.round, asked.part)).to_bytes()

        return self._ledger.release(
            self._spending, asked.round, asked.part, charged, keep=asked.keep, note=asked.note
        )
