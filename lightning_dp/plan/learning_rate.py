r"""A learning rate to begin with, from public numbers alone.

The principle: over the whole run, the noise shall move each weight about as far as a weight of its
layer is long. Every step adds noise to the weights, which walk at random; T steps take them
:math:`\sqrt{T}` times as far as one. The gradients' common direction takes them T times as far as one
step. What is learnt, over the noise, is therefore the same at any learning rate: the learning rate only
says how far both go. Too small, and the training ends near its first weights, with most of the budget
unused; too large, and noise is what the weights hold.

How long a weight is: :math:`s = \sqrt{2/n}` in a layer that adds up n inputs, the size with which
signals keep theirs (He et al., arXiv 1502.01852, equation 10), however a model was initialised.

- Adam and its kin divide by the root of the mean square of what they see, which is noise for the most
  part. A step is then about as long as the learning rate η whatever the gradient, and the walk is
  :math:`\eta\sqrt{T}`: so :math:`\eta = s/\sqrt{T}`.
- SGD walks by :math:`\eta z C/B` in a step: :math:`\eta = s B/(z C \sqrt{T})`, times 1 − momentum.

It is a scale, not an optimum: a third of it and three times as much are worth a try, on public data or
with the trials charged. Pre-trained weights hold something that noise can overwrite: take a third.
Where there is little noise in a step it says little, and a rate that is stable without privacy is the
limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from lightning_dp._validate import above_0, between, instance, one_of, positive
from lightning_dp.plan.training_plan import TrainingPlan

__all__ = ["Optimizer", "learning_rate", "rounded", "weight_size"]

Optimizer = Literal["adam", "sgd"]


def weight_size(shapes: Iterable[Sequence[int]]) -> float:
    r"""Return the root mean square of :math:`\sqrt{2/n}` over all weights of these shapes.

    Args:
        shapes: of the trained parameters, ``(outputs, inputs, ...)`` as in torch; n is the product of
            all but the first. Vectors (biases, scales of norms) do not count.

    Raises:
        ValueError: if there is nothing but vectors.

    Example:
        >>> round(weight_size([(16, 8, 3, 3), (16,), (10, 200)]), 3)
        0.128
    """
    weights = [tuple(shape) for shape in shapes if len(shape) > 1]
    number = sum(math.prod(shape) for shape in weights)
    if not number > 0:
        raise ValueError(
            "shapes holds no weight matrix, so there is no size to compare the noise with: give the "
            "shapes of all trained parameters."
        )
    return math.sqrt(sum(2 * shape[0] for shape in weights) / number)  # 2/n, n weights per output


def learning_rate(
    plan: TrainingPlan,
    size: float,
    *,
    optimizer: Optimizer = "adam",
    max_grad_norm: float = 1.0,
    momentum: float = 0.0,
) -> float:
    """Return the constant learning rate at which the noise moves a weight by its size.

    Args:
        plan: the training.
        size: s, of a weight; see :func:`weight_size`.
        optimizer: ``"adam"`` stands for all that divide by a running mean square.
        max_grad_norm: C; Adam does not see it.
        momentum: of SGD, in [0, 1).

    Raises:
        ValueError: if an argument is illegal, or SGD is asked about without noise.

    Example:
        >>> from lightning_dp.plan import plan_training
        >>> plan = plan_training(22_000, 1024, epochs=6, target_epsilon=3.0, target_delta=1e-5)
        >>> round(learning_rate(plan, 0.095), 4), round(learning_rate(plan, 0.095, optimizer="sgd"), 1)
        (0.0083, 7.7)
    """
    instance("plan", plan, TrainingPlan)
    size = positive("size", size)
    one_of(get_args(Optimizer))("optimizer", optimizer)
    if optimizer == "adam":
        return size / math.sqrt(plan.steps)
    step = plan.noise_batch_ratio * above_0("max_grad_norm", max_grad_norm)
    if not 0 < step < math.inf:
        raise ValueError(
            f"noise_multiplier={plan.noise_multiplier} makes no noise that could set a learning rate."
        )
    free: float = 1 - between("[0, 1)")("momentum", momentum)
    return free * size / (step * math.sqrt(plan.steps))


def rounded(rate: float) -> float:
    """Return one significant digit of a learning rate: more would promise more than is known.

    Example:
        >>> rounded(0.0083), rounded(7.6)
        (0.008, 8.0)
    """
    return float(f"{rate:.0e}")
