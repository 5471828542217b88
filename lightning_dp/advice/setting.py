"""The public numbers of a training that advice is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_dp._validate import above_0, normalise, not_negative, positive, probability, whole
from lightning_dp.accounting.base import Relation
from lightning_dp.functional import number_of_entries
from lightning_dp.plan import weight_size
from lightning_dp.plan.learning_rate import Optimizer as Kind

__all__ = ["OptimizerSetting", "Setting", "optimizer_setting"]

_ADAM = (
    *(optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.RMSprop, optim.Adagrad, optim.Adadelta),
)


@dataclass(frozen=True)
class OptimizerSetting:
    """The optimizer's settings, as far as advice needs them.

    Args:
        name: of its class.
        kind: "sgd", or "adam" for all that divide by a running mean square; None for others.
        learning_rate: the largest of its groups, at the start.
        momentum: of SGD.
    """

    name: str
    kind: Kind | None
    learning_rate: float
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training as it was set up: what users chose, and sizes; nothing of the data but their number.

    Args:
        num_records: N, of the training set.
        batch_size: B = qN, the expected size of a step's batch.
        steps: T, planned and afforded by the budget.
        planned_steps: as the Trainer has them.
        steps_per_epoch: steps in a pass over the data.
        noise_multiplier: z, of the first step.
        clip_norm: C, of one record.
        size: d, trained weights.
        weight_size: s of :func:`lightning_dp.plan.weight_size`; None where it is not known.
        target_epsilon, target_delta, relation: the budget; None without one.
        optimizer: None where there are several.
        is_constant: every step asks for a mean gradient with the same z, C and q.
    """

    num_records: int
    batch_size: float
    steps: float
    planned_steps: float
    steps_per_epoch: int
    noise_multiplier: float
    clip_norm: float
    size: int
    weight_size: float | None
    target_epsilon: float | None
    target_delta: float
    relation: Relation
    optimizer: OptimizerSetting | None
    is_constant: bool

    def __post_init__(self) -> None:
        normalise(self, whole, "num_records", "size", of="Setting")
        normalise(self, positive, "batch_size", of="Setting")
        normalise(self, not_negative, "noise_multiplier", of="Setting")
        normalise(self, above_0, "clip_norm", of="Setting")
        normalise(self, probability, "target_delta", of="Setting")

    @property
    def sample_rate(self) -> float:
        """q, the probability of a record to be in a batch."""
        return min(1.0, self.batch_size / self.num_records)

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.steps / max(1, self.steps_per_epoch)

    @property
    def noise_length(self) -> float:
        """z·C·√d / B, the length of the noise in a step's mean gradient."""
        return self.noise_multiplier * self.clip_norm * math.sqrt(self.size) / self.batch_size


def optimizer_setting(optimizer: Optimizer) -> tuple[OptimizerSetting, int, float | None]:
    """Return what was chosen of an optimizer, the number of weights it trains, and their size.

    The size is None where no trained parameter is a matrix.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    setting = OptimizerSetting(
        type(optimizer).__name__,
        _kind(optimizer),
        max(_number(g.get("initial_lr", g.get("lr", math.nan))) for g in optimizer.param_groups),
        max(_number(g.get("momentum", 0.0)) for g in optimizer.param_groups),
    )
    shapes = [tuple(parameter.shape) for parameter in trained]
    matrices = [shape for shape in shapes if len(shape) > 1 and math.prod(shape)]
    size = number_of_entries(trained)
    return setting, size, weight_size(matrices) if matrices else None


def _kind(optimizer: Optimizer) -> Kind | None:
    if isinstance(optimizer, _ADAM):
        return "adam"
    return "sgd" if isinstance(optimizer, optim.SGD) else None


def _number(value: float | Tensor) -> float:
    """Return a setting as a number: torch allows tensors too."""
    return float(value)
