"""A small mechanism, and parts that write down what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import BoundedSum, Query, Release, State, Term
from lightning_dp.estimators import AbstractEstimator, MeanGradient
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.postprocessing import AbstractPostProcessor
from lightning_dp.sampling import Poisson
from lightning_dp.schedules import AbstractSchedule, Constant


@dataclass(frozen=True)
class Asking(AbstractEstimator):
    """Asks for a multiple of the planned noise, counts its steps and writes down its calls."""

    calls: list[str] = field(default_factory=list, repr=False)
    factor: float = 1.0
    clip_norm: float = 1.0

    def init(self, params: Sequence[Tensor]) -> State:
        self.calls.append("init")
        return {"told": 0}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        self.calls.append(f"ask {step}")
        return Query((Term(),), self.clip_norm, self.factor * noise_multiplier)

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        self.calls.append("tell")
        return released.value, {"told": state["told"] + 1}


@dataclass(frozen=True)
class Doubled(AbstractPostProcessor):
    """Doubles the estimate."""

    calls: list[str] = field(default_factory=list, repr=False)

    def init(self, params: Sequence[Tensor]) -> State:
        return {"size": sum(param.numel() for param in params)}

    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        self.calls.append(f"post-process {state['size']}")
        return 2 * estimate, state


class Trial:
    """A small mechanism, and one step of it."""

    rate, batch_size, size = 0.1, 20.0, 6
    params = (torch.zeros(2, 2), torch.zeros(2))
    Asking, Doubled = Asking, Doubled

    def make(
        self,
        *,
        noise_multiplier: float = 1.0,
        schedule: AbstractSchedule | None = None,
        estimator: AbstractEstimator | None = None,
        postprocessing: tuple[AbstractPostProcessor, ...] = (),
        ledger: Ledger | None = None,
        limit: float = math.inf,
        noise: NoiseSource | None = None,
        directory: Path | None = None,
        spares_memory: bool = False,
    ) -> Mechanism:
        ledger = Ledger() if ledger is None else ledger
        ledger.begin("run-1", directory)
        schedule = Constant() if schedule is None else schedule
        return Mechanism(
            plan=NoisePlan(
                noise_multiplier,
                schedule,
                Poisson(),
                self.rate,
                MeanGradient(1.0) if estimator is None else estimator,
            ),
            postprocessing=postprocessing,
            ledger=ledger,
            guard=FixedGuard(limit),
            num_records=self.batch_size / self.rate,
            noise=NoiseSource(0) if noise is None else noise,
            world=World(),
            spares_memory=spares_memory,
        )

    def step(self, mechanism: Mechanism, *values: Tensor) -> Tensor:
        query = mechanism.ask(self.params)
        for value in values:
            mechanism.answer(BoundedSum(value.clone(), query.clip_norm))
        return mechanism.tell(self.params)


@pytest.fixture
def trial() -> Trial:
    return Trial()
