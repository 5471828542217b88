"""Which noise a training should have: independent, or banded; from public numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp._validate import whole
from lightning_dp.accounting.base import Relation
from lightning_dp.noise import AbstractNoise, BandedNoise, IndependentNoise, Workload
from lightning_dp.plan.training_plan import calibrated_noise, steps_per_epoch
from lightning_dp.sampling import AbstractSampling, CyclicPoisson, Poisson

__all__ = ["NoiseSuggestion", "suggest_noise"]

_BANDS = (1, 2, 4, 8, 16, 32)
_WORTH_IT = 0.95  # of the error of independent noise; less is not worth the memory
_ALIKE = 1.02  # an error that is nearly the best, for half of the memory


@dataclass(frozen=True)
class NoiseSuggestion:
    """What :func:`suggest_noise` found.

    Args:
        noise, sampling: to be given to ``DifferentialPrivacy``.
        errors: predicted error by number of bands, over that of independent noise.
    """

    noise: AbstractNoise
    sampling: AbstractSampling
    errors: dict[int, float]


def suggest_noise(
    num_records: int,
    batch_size: int,
    epochs: int,
    *,
    target_epsilon: float,
    target_delta: float,
    relation: Relation = "add_remove",
    momentum: float = 0.0,
) -> NoiseSuggestion:
    """Compare independent noise with banded noise at equal ε: bands b with b·q at most 1.

    Predicted is the root mean square of the noise in all iterates (:meth:`AbstractNoise.error`, times the
    z that keeps the budget). Banded noise pays where steps are small and budgets large (z below about
    1.2); for large batches over many epochs, and for ε up to 1, independent noise is as good.

    Args:
        num_records: N.
        batch_size: B of a whole step.
        epochs: passes.
        target_epsilon, target_delta, relation: the budget.
        momentum: of SGD, in [0, 1).

    Raises:
        ValueError: naming the argument.

    Example:
        >>> found = suggest_noise(60_000, 2048, 40, target_epsilon=1.0, target_delta=1e-5)
        >>> found.noise, found.sampling
        (IndependentNoise(), Poisson())
    """
    num_records, batch_size = whole("num_records", num_records), whole("batch_size", batch_size)
    steps = whole("epochs", epochs) * steps_per_epoch(num_records, batch_size)
    rate, workload = min(1.0, batch_size / num_records), Workload(momentum)
    errors: dict[int, float] = {}
    for bands in _BANDS:
        if bands * rate > 1 or bands > steps:
            break
        rounds = math.ceil(steps / bands)
        z = calibrated_noise(bands * rate, rounds, target_epsilon, target_delta, relation)
        noise = BandedNoise(bands, workload).for_steps(steps)
        errors[bands] = z * noise.error(steps, workload)
    errors = {bands: error / errors[1] for bands, error in errors.items()}
    best = min(errors.values())
    bands = next(each for each, error in errors.items() if error <= _ALIKE * best)
    if not errors[bands] < _WORTH_IT:
        return NoiseSuggestion(IndependentNoise(), Poisson(), errors)
    return NoiseSuggestion(BandedNoise(bands, workload), CyclicPoisson(bands), errors)
