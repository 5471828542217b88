"""Ledgers without a disk, for what one process plays on public data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._world import World
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.postprocessing import AbstractPostProcessor


def mechanism_of(
    plan: NoisePlan,
    steps: int,
    num_records: int,
    seed: int,
    postprocessing: tuple[AbstractPostProcessor, ...] = (),
) -> Mechanism:
    """The package's mechanism for so many steps, its ledger in memory."""
    ledger = Ledger()
    ledger.begin("experiment")
    return Mechanism(
        plan=plan,
        postprocessing=postprocessing,
        ledger=ledger,
        guard=FixedGuard(steps),
        num_records=num_records,
        noise=NoiseSource(seed),
        world=World(),
    )


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
