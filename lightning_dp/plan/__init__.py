"""Plan a private training before it is run: batch, epochs, noise, time, learning rate.

``python -m lightning_dp.plan --records N --epsilon 3`` prints a table; :func:`suggest` returns it.
Nothing here sees data.
"""

from lightning_dp.plan.learning_rate import learning_rate, weight_size
from lightning_dp.plan.suggestion import Suggestion, suggest
from lightning_dp.plan.training_plan import TrainingPlan, plan_training

__all__ = [
    "Suggestion",
    "TrainingPlan",
    "learning_rate",
    "plan_training",
    "suggest",
    "weight_size",
]
