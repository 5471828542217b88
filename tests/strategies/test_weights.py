"""training_step writes to no weight, and what happens between steps is no alarm."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import SGD

from lightning_dp._refusals import PrivacyWarning
from tests.zoo import Classifier, mlp, private


class Codebook(Classifier):
    """Its first layer is frozen, and it writes to a bias from some step on."""

    def __init__(self, write: Any = None, layer: int = 2, step: int = 0, by_hand: bool = False):
        net = mlp()
        net[0].requires_grad_(False)
        super().__init__(net, lambda params: SGD(params, lr=1.0))
        self.write, self.layer, self.step = write, layer, step
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.write is not None and self.global_step >= self.step:
            self.write(self.net[self.layer].bias, batch[0].mean())
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        return None


def adds(param: nn.Parameter, number: Any) -> None:
    with torch.no_grad():
        param[0] += number


def exchanges_the_memory(param: nn.Parameter, number: Any) -> None:
    param.data = param.data + number


def makes_flat(param: nn.Parameter, number: Any) -> None:
    """Give a weight another storage, as an LSTM that puts its weights together does."""
    param.data = param.data.clone()


@pytest.mark.parametrize("layer", [0, 2], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    ("write", "by_hand", "engine"),
    [
        *(
            (write, hand, "auto")
            for write in (adds, exchanges_the_memory)
            for hand in (False, True)
        ),
        *((adds, False, engine) for engine in ("records", "one_by_one")),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_what_writes_weights_is_refused_at_once_and_ends_the_run_later(
    write, by_hand, engine, layer, step, fit
):
    privacy, model = private(engine=engine), Codebook(write, layer, step, by_hand)
    match = rf"training_step changed the parameters \['net\.{layer}\.bias'\].*on_train_batch_end"
    with pytest.raises(Exception, match=match):
        fit(model, privacy, max_steps=3)
    assert privacy.steps == step + 1
    assert (privacy.epsilon == float("inf")) == (step > 0)


def test_a_trainable_parameter_that_no_optimizer_has_is_named(fit):
    model = Codebook()
    model.make_optimizer = lambda params: SGD(list(params)[:3], lr=0.1)
    with pytest.warns(PrivacyWarning, match=r"1 trainable parameters.*\['net\.2\.bias'\].*freeze"):
        fit(model, private(), max_steps=3)


def acts(hook: str, act: Any) -> Callback:
    callback = L.Callback()
    setattr(callback, hook, lambda trainer, module, *_: act(module.net))
    return callback


def exchanges_frozen(net: Any) -> None:
    net[0] = copy.deepcopy(net[0])


def bounds(net: Any) -> None:
    with torch.no_grad():
        net[2].weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("write", "callbacks"),
    [
        (None, [acts("on_train_epoch_start", exchanges_frozen)]),
        (None, [acts("on_train_batch_end", bounds)]),
        (makes_flat, []),
    ],
    ids=["frozen part exchanged", "bounded", "made flat"],
)
def test_what_happens_between_steps_is_no_alarm(write, callbacks, fit):
    privacy = private()
    fit(Codebook(write), privacy, callbacks=callbacks, max_steps=3)
    assert privacy.steps == 3
