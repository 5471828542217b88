"""A ledger without a disk, for clients that one process plays on public data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_dp._noise import random_generator
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.federated.ledger import ReleaseLedger, Spending


class ScratchLedger(ReleaseLedger):
    """Books an experiment on public data, in memory: nothing of it may outlive the process."""

    def __init__(self) -> None:
        super().__init__("/nowhere", "an experiment")
        self._events: list[AbstractEvent] = []

    def history(self) -> list[tuple[AbstractEvent, int]]:
        return [(event, 1) for event in self._events]

    def release(
        self,
        spending: Spending,
        round_: int,
        part: int,
        make: Callable[[np.random.Generator], bytes],
        *,
        keep: bool = True,
        try_first: Callable[[], object] | None = None,
        request: bytes = b"",
    ) -> bytes:
        if try_first is not None and not self._events:
            try_first()
        self._events += spending.events(round_)
        return make(random_generator(None))
