"""Plan a private training before it is run: batch, epochs, noise, time, learning rate.

``python -m lightning_dp.plan --records N --epsilon 3`` prints a table; :func:`suggest` returns it.
Nothing here reads data; ``plan.advice`` and ``plan.signal`` are about the releases of a run.
"""

from typing import TYPE_CHECKING

from lightning_dp._lazy import names_from

if TYPE_CHECKING:
    from lightning_dp.plan.suggestion import Suggestion, suggest
    from lightning_dp.plan.training_plan import (
        TrainingPlan,
        learning_rate,
        plan_training,
        weight_size,
    )
else:
    __getattr__ = names_from(__name__, "training_plan", "suggestion")

__all__ = [
    "Suggestion",
    "TrainingPlan",
    "learning_rate",
    "plan_training",
    "suggest",
    "weight_size",
]
