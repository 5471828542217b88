"""The public numbers of a fit, for advice and metrics."""

from __future__ import annotations

import math

from lightning_dp.advice import Setting, optimizer_setting
from lightning_dp.estimators import MeanGradient
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.optimizers import Optimizers

__all__ = ["setting_of"]


def setting_of(
    run: PrivateRun, mechanism: Mechanism, optimizers: Optimizers, planned_steps: float
) -> Setting:
    """Return the setting of a fit whose plan was declared.

    Args:
        run: its batches and its budget.
        mechanism: at the first step of this fit.
        optimizers: the private one, and if there are others.
        planned_steps: that the Trainer is going to make.
    """
    config, batches, plan = run.config, run.batches, mechanism.plan
    assert batches is not None
    estimator = config.resolved_estimator()
    optimizer, size, weight_size = optimizer_setting(optimizers.private)
    step = mechanism.step
    clips = estimator.traits.estimates_gradient
    noise = plan.noise_multiplier(step)
    return Setting(
        num_records=batches.num_records,
        batch_size=plan.rate(step) * batches.num_records,
        steps=step + run.remaining_steps,
        planned_steps=step + planned_steps,
        steps_per_epoch=batches.steps_per_epoch,
        noise_multiplier=noise if math.isfinite(noise) else 0.0,
        clip_norm=vars(estimator).get("max_grad_norm", math.inf) if clips else math.inf,
        size=size,
        weight_size=weight_size,
        target_epsilon=config.target_epsilon,
        target_delta=config.target_delta,
        relation=config.relation,
        optimizer=None if optimizers.public else optimizer,
        is_constant=plan.is_constant and type(estimator) is MeanGradient,
    )
