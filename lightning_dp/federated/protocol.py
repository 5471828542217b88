"""The parts of every protocol: the machines of server and client, and what records answer."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._refusals import RefusedRun
from lightning_dp._validate import instance
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, Query, Release, State, add_noise
from lightning_dp.sampling import AbstractSampling, Poisson

__all__ = [
    "AbstractClient",
    "AbstractServer",
    "Records",
    "bounded",
    "check_records",
    "check_start",
    "draw",
    "noise_source",
    "noised_sum",
]

_POISSON = Poisson()


class Records(Protocol):
    """One client's data set, as far as a protocol knows it.

    :class:`lightning_dp.federated.local.LocalRecords` is one, made of a LightningModule and a
    data set. Records of your own may also have its ``check_point``, ``try_once``, ``has_products``
    and ``fingerprint``; what they lack is not checked.
    """

    @property
    def num_records(self) -> int:
        """N of this client."""

    @property
    def unit(self) -> str:
        """The unit whose part is clipped, each "record", or the "client" with its whole sum as one."""

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        """Return the sum of the query over these records, each clipped; sensitive until it is noised."""


def check_records(records: object) -> None:
    """Raise TypeError for what cannot be the records of a client."""
    if not hasattr(records, "num_records"):
        raise TypeError(
            f"records={reprlib.repr(records)} must be records of a client, such as "
            "LocalRecords(module, data_set)."
        )


def check_start(start: object) -> None:
    """Raise for what cannot be the model that a server begins with."""
    given = instance("start", start, Tensor)
    if given.dim() != 1 or not bool(torch.isfinite(given).all()):
        raise ValueError("start must be a vector of finite numbers.")


class AbstractServer(ABC):
    """The server of a protocol, without an engine, a clock or a network.

    An engine does this, in any order and at any time::

        while not server.is_done:
            for client in those that no message is in flight to:
                if (request := server.request(client)) is not None:
                    send it
            for each reply that came:
                server.receive(client, reply)

    - At most one message is in flight to a client. A reply that does not come is no loss: the same
      request is made again, and the client answers with the same bytes.
    - A reply that comes twice, or too late, is not applied again.
    - :meth:`state_dict` may be taken between any two calls, and holds released values only. If
      the server may die, it must be saved before a request leaves that was made from a new state
      (:attr:`round` has changed), so that the server is never behind a client.
    """

    @property
    @abstractmethod
    def point(self) -> Tensor:
        """A copy of the global model, its trained parameters as one flat vector."""

    @property
    @abstractmethod
    def round(self) -> int:
        """The number of rounds that are over."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True when nothing will be asked any more."""

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
            True if it was applied; not one that came twice or too late, nor one that says that the
            client lost the model. An engine that hears nothing else for long gives up.

        Raises:
            MessageError: if it is none; nothing has changed then.
        """

    def forget(self, client: int) -> None:  # noqa: B027 (many send everything each time)
        """Note that the client's process is new and knows nothing that it was sent before."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return tensors, numbers, strings, lists and dicts, to be read with ``weights_only=True``."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Go on from there. Raises ValueError if the configuration was another."""


class AbstractClient(ABC):
    """The client of a protocol: requests in, replies out, one at a time.

    What it has spent is in its ledger, on disk before a reply is made. A client may die at any
    moment: a new one, on the same ledger, answers the same request with the same bytes.
    """

    @abstractmethod
    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request.

        If the budget does not allow what is asked, the reply says so, and nothing is charged.

        Raises:
            MessageError: for bytes that are no request of this protocol, or too old a one.
            JournalError: if the ledger cannot be trusted, or another process uses it.
        """

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Numbers about this client that may be seen, among them ``epsilon``, spent so far."""


# -- what clients do with their records --------------------------------------------------------


def draw(
    records: Records,
    rate: float,
    rng: np.random.Generator,
    sampling: AbstractSampling = _POISSON,
) -> list[int]:
    """Draw the records of a batch: each with probability ``rate``, by default."""
    return [int(record) for record in sampling.draw(records.num_records, rate, rng)]


def noise_source(seed: int | None, *stream: int) -> NoiseSource:
    """Return noise of the operating system; with a ``seed``, for tests, a function of seed and stream."""
    if seed is None:
        return NoiseSource()
    return NoiseSource(int(random_generator(seed, 2, *stream).integers(2**62)))


def bounded(records: Records, query: Query, drawn: list[int]) -> BoundedSum:
    """Return the answer of the records, checked to have the bound that was asked for."""
    total = records.bounded_sum(query, drawn)
    if total.clip_norm != query.clip_norm:
        raise RefusedRun(
            f"The answer is bounded by {total.clip_norm}, the query asked for {query.clip_norm}.",
            topic="out-of-order",
        )
    return total


def noised_sum(records: Records, query: Query, drawn: list[int], source: NoiseSource) -> Release:
    """Return the sum over the drawn records, with the noise of the query."""
    return add_noise(bounded(records, query, drawn), query.noise_multiplier, source, World())
