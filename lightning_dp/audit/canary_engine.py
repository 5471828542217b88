"""Canaries: records that are in the data by a coin, and whose gradients are known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_dp._noise import random_generator
from lightning_dp.audit.bounds import FloatArray
from lightning_dp.boundary import Query, Release, State
from lightning_dp.estimators.base import AbstractEstimator, Traits
from lightning_dp.functional import number_of_entries
from lightning_dp.gradients import AbstractGradientEngine
from lightning_dp.gradients.base import AbstractPerSampleGradients, Around, Forward
from lightning_dp.gradients.batches import SampleBatch

_STRENGTH = 10.0  # the norm of a canary's gradient, in clip norms: without clipping it shows


class Canaries:
    """m canaries: which are in, the coordinate of each, and what the releases said there.

    A canary's gradient is ±10 C along one coordinate (Dirac), another for each, whatever the model
    is; out of the data it is 0. The sign changes from step to step, so that neither what other records
    do there nor noise that repeats itself adds up; and between the points of one query, so that
    differences of gradients are long.

    Args:
        number: m, at most the number of parameters.
        records: N, of the data set without them.
    """

    def __init__(self, number: int, records: int) -> None:
        self._rng = random_generator(None)
        self.number, self.records = number, records
        self.included = self._rng.integers(2, size=number).astype(bool)
        self.coordinates = torch.zeros(0, dtype=torch.int64)
        self.batch: list[int] = []  # the records of the present chunk, in order
        self.passes = 0  # over the present chunk
        self.sign, self.clip_norm = 1.0, 1.0  # of the present step
        self.noise_multipliers: list[float] = []
        self.steps: list[int] = []
        self.seen: list[FloatArray] = []  # for each step a_i: noised, in clip norms

    def place(self, parameters: int) -> None:
        """Choose a coordinate for each."""
        if self.number > parameters:
            raise ValueError(
                f"num_canaries={self.number} must be at most the number of trained parameters, "
                f"{parameters}: each canary takes one coordinate."
            )
        chosen = self._rng.choice(parameters, size=self.number, replace=False)
        self.coordinates = torch.from_numpy(chosen.astype(np.int64))

    def next_batch(self, records: Sequence[int]) -> None:
        self.batch, self.passes = list(records), 0

    def next_step(self, step: int, query: Query) -> None:
        self.sign = -1.0 if len(self.steps) % 2 else 1.0
        self.clip_norm = query.clip_norm
        self.steps.append(step)
        self.noise_multipliers.append(query.noise_multiplier)

    def plant(self, gradients: AbstractPerSampleGradients) -> AbstractPerSampleGradients:
        """Return the gradients of the present chunk, with those of the canaries in their places."""
        self.passes += 1
        if gradients.count != len(self.batch):
            return gradients  # the caller refuses them
        rows = [row for row, record in enumerate(self.batch) if record >= self.records]
        numbers = [self.batch[row] - self.records for row in rows]
        length = self.sign * _STRENGTH * self.clip_norm * (1.0 if self.passes % 2 else -1.0)
        values = torch.from_numpy(length * self.included[numbers].astype(np.float64))
        places = self.coordinates[numbers]
        return _CanaryGradients(gradients, torch.tensor(rows), places, values, self.coordinates)

    def observe(self, release: Tensor) -> None:
        """Record the noised sum's entry of each canary."""
        values = release.detach().cpu()[self.coordinates].double().numpy()
        self.seen.append(values * (self.sign / self.clip_norm))


class _CanaryGradients(AbstractPerSampleGradients):
    """Gradients of which some rows are replaced by one entry each.

    Other records are silent at the coordinates of all canaries: an attacker who knows them would
    subtract what they do there.
    """

    def __init__(
        self,
        others: AbstractPerSampleGradients,
        rows: Tensor,
        coordinates: Tensor,
        values: Tensor,
        silent: Tensor,
    ) -> None:
        self._others, self._values, self._silent = others, values, silent
        self._rows, self._coordinates = rows.to(torch.int64), coordinates

    @property
    def count(self) -> int:
        return self._others.count

    def norms(self) -> Tensor:
        norms = self._others.norms().clone()
        norms[self._rows] = self._values.abs().to(norms)
        return norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        rest = weights.clone()
        rest[self._rows] = 0.0
        total = self._others.weighted_sum(rest)
        total[self._silent.to(total.device)] = 0.0
        own = self._values.to(total) * weights[self._rows].to(total)
        return total.index_add_(0, self._coordinates.to(total.device), own)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> _CanaryGradients:
        values, inner = weight * self._values, []
        for other_weight, other in others:
            assert isinstance(other, _CanaryGradients)
            values = values + other_weight * other._values
            inner.append((other_weight, other._others))
        combined = self._others.combine(weight, inner)
        return _CanaryGradients(combined, self._rows, self._coordinates, values, self._silent)


class CanaryEngine(AbstractGradientEngine):
    """The user's gradient engine with canaries planted in its answers."""

    name = "canaries"

    def __init__(self, engine: AbstractGradientEngine, canaries: Canaries) -> None:
        self._engine, self._canaries = engine, canaries
        self.isolates = engine.isolates

    def run(self, forward: Forward, batch: SampleBatch, around: Around | None = None) -> Any:
        output = self._engine.run(forward, batch, around)
        self.has_asked = self._engine.has_asked
        return output

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        self._engine.backward(loss, keep_graph=keep_graph, combined=combined)

    def watching(self) -> AbstractContextManager[None]:
        return self._engine.watching()

    def repeating(self) -> AbstractContextManager[None]:
        return self._engine.repeating()

    def outputs_of_layers(self) -> Collection[Any]:
        return self._engine.outputs_of_layers()

    def take(self, scale: float) -> AbstractPerSampleGradients:
        return self._canaries.plant(self._engine.take(scale))

    def drop(self) -> None:
        self._engine.drop()


class CanaryEstimator(AbstractEstimator):
    """The user's estimator, whose releases the canaries observe.

    Args:
        estimator: asks one query per step, on all coordinates.
        canaries: watch.
        batch_size: the expected one at each step, which a sum was divided by.
    """

    def __init__(
        self,
        estimator: AbstractEstimator,
        canaries: Canaries,
        batch_size: Callable[[int], float],
    ) -> None:
        self._estimator, self._canaries, self._batch_size = estimator, canaries, batch_size

    def __repr__(self) -> str:
        return f"watched {self._estimator!r}"

    @property
    def traits(self) -> Traits:
        return self._estimator.traits

    def check(self, optimizer: Optimizer) -> None:
        self._estimator.check(optimizer)

    def init(self, params: Sequence[Tensor]) -> State:
        self._canaries.place(number_of_entries(params))
        return self._estimator.init(params)

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query | None:
        query = self._estimator.ask(state, params, step, noise_multiplier)
        if query is not None:
            self._canaries.next_step(step, query)
        return query

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor | None, State]:
        if self._canaries.steps and self._canaries.steps[-1] == step:
            self._canaries.observe(released.value * self._batch_size(step))
        return self._estimator.tell(state, params, step, released)


class CanaryData(Dataset[Any]):
    """The user's records, then the canaries: copies of records, of which only the place counts."""

    def __init__(self, data: Dataset[Any], canaries: Canaries) -> None:
        self._data, self._canaries = data, canaries

    def __len__(self) -> int:
        return self._canaries.records + self._canaries.number

    def __getitem__(self, index: int) -> Any:
        return self._data[index % self._canaries.records]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Note the records of the present batch, and return them."""
        self._canaries.next_batch(indices)
        return [self[index] for index in indices]

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader with the same sampling rate."""
        size = round((loader.batch_size or 1) * len(self) / self._canaries.records)
        return DataLoader(self, batch_size=max(1, size), shuffle=True, collate_fn=loader.collate_fn)
