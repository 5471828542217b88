"""Code of a user that changes gradients, and the places where it can run before the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.optim.lr_scheduler import StepLR

REFUSED = r"(?s)not what was released.*gradient_edits="
Edit = Callable[[Any], None]


def trained(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def scales(model: Any) -> None:
    for param in trained(model):
        param.grad.mul_(0.5)


def adds_next_to_nothing(model: Any) -> None:
    trained(model)[1].grad[0] *= 1.001


def exchanges_the_memory(model: Any) -> None:
    trained(model)[0].grad.data = torch.ones_like(trained(model)[0])


def replaces(model: Any) -> None:
    trained(model)[0].grad = torch.ones_like(trained(model)[0])


def takes_one_away(model: Any) -> None:
    trained(model)[-1].grad = None


def makes_one_sparse(model: Any) -> None:
    trained(model)[0].grad = (2 * trained(model)[0].grad).to_sparse()


def clips_by_hand(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


EDITS = [
    adds_next_to_nothing,
    exchanges_the_memory,
    replaces,
    takes_one_away,
    makes_one_sparse,
    clips_by_hand,
]


@dataclass
class Setting:
    """What a place needs of a fit."""

    model: Any
    callbacks: list[L.Callback]
    plugins: list[Any]


def in_the_module(setting: Setting, edit: Edit) -> None:
    setting.model.on_before_optimizer_step = lambda optimizer: edit(setting.model)


def between_steps(setting: Setting, edit: Edit) -> None:
    setting.model.on_train_batch_end = lambda *_: edit(setting.model)


def in_a_callback(setting: Setting, edit: Edit) -> None:
    class Edits(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            edit(pl_module)

    setting.callbacks.append(Edits())


def in_clipping(setting: Setting, edit: Edit) -> None:
    setting.model.configure_gradient_clipping = lambda optimizer, *_, **__: edit(setting.model)


def in_a_hook_of_the_optimizer(setting: Setting, edit: Edit) -> None:
    """It exchanges the closure."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs["closure"]

        def edited() -> Any:
            result = closure()
            edit(setting.model)
            return result

        return args, {**kwargs, "closure": edited}

    setting.model.on_train_start = lambda: register(setting.model, hook)


def in_a_hook_that_runs_the_closure(setting: Setting, edit: Edit) -> None:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        kwargs["closure"]()
        edit(setting.model)
        return args, {**kwargs, "closure": None}

    setting.model.on_train_start = lambda: register(setting.model, hook)


def register(model: Any, hook: Any) -> None:
    model.trainer.optimizers[0].register_step_pre_hook(hook)


def around_step(setting: Setting, edit: Edit) -> None:
    """As schedulers do it: the attribute of the instance wraps the method."""
    make = setting.model.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = make()
        scheduler = StepLR(optimizer, 5)
        step = optimizer.step

        def wrapped(closure: Any) -> Any:
            loss = closure()
            edit(setting.model)
            step()
            return loss

        optimizer.step = wrapped
        return [optimizer], [scheduler]

    setting.model.configure_optimizers = configure_optimizers


def in_a_precision_plugin(setting: Setting, edit: Edit) -> None:
    class Edits(Precision):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            self._wrap_closure(model, optimizer, closure)
            edit(model)
            return optimizer.step(**kwargs)

    setting.plugins.append(Edits())


def in_the_clipping_of_a_plugin(setting: Setting, edit: Edit) -> None:
    class Edits(Precision):
        def clip_gradients(self, optimizer: Any, *unused: Any, **also: Any) -> None:
            edit(setting.model)

    setting.plugins.append(Edits())


PLACES = [
    in_the_module,
    in_a_callback,
    in_clipping,
    in_a_hook_of_the_optimizer,
    in_a_hook_that_runs_the_closure,
    around_step,
    in_a_precision_plugin,
    in_the_clipping_of_a_plugin,
]


def by_hand(model: Any) -> None:
    model.automatic_optimization = False
