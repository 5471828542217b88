"""The model keeps its parameters, and training_step writes to none of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import nn
from torch.optim import SGD

from lightning_dp import CubicNewton, Diff2
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import private


@pytest.fixture
def fit(classifier, mlp, loader, make_trainer):
    """``fit(...)``: three steps of a network whose first layer is frozen."""

    def run(
        *callbacks: Callback,
        kind: Any = classifier,
        optimizer: Any = lambda params: SGD(params, lr=1.0),
        **privacy: Any,
    ) -> DifferentialPrivacy:
        net = mlp()
        net[0].requires_grad_(False)
        run.privacy = private(**privacy)
        make_trainer(max_steps=3, callbacks=[*callbacks, run.privacy]).fit(
            kind(net, optimizer), loader
        )
        return run.privacy

    return run


class Act(Callback):
    """Does something to the network when a hook is called."""

    def __init__(self, hook: str, act: Any) -> None:
        setattr(self, hook, lambda trainer, module, *_: act(module.net))


# -- the optimizer has the parameters of the model -------------------------------------------------


def exchanges_trained(net: Any) -> None:
    net[2] = copy.deepcopy(net[2])


def adds_an_adapter(net: Any) -> None:
    net.append(nn.Linear(3, 3))


def removes(net: Any) -> None:
    net[2].bias = None


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize(
    ("act", "match"),
    [
        (exchanges_trained, r"2 are gone, 2 are new: \['net\.2\.weight'"),
        (adds_an_adapter, r"0 are gone, 2 are new: \['net\.3\.weight'"),
        (removes, r"1 are gone, 0 are new"),
    ],
)
def test_a_model_whose_parameters_are_replaced_is_refused_before_a_charge(act, match, hook, fit):
    with pytest.raises(RuntimeError, match=rf"replaced during fit \({match}.*configure_model"):
        fit(Act(hook, act))
    assert fit.privacy.steps == 0


def test_a_trainable_parameter_that_no_optimizer_has_is_named(fit):
    with pytest.warns(PrivacyWarning, match=r"1 trainable parameters.*\['net\.2\.bias'\].*freeze"):
        fit(optimizer=lambda params: SGD(list(params)[:3], lr=0.1))


# -- training_step writes no weight ----------------------------------------------------------------


def adds(param: nn.Parameter, number: Any) -> None:
    with torch.no_grad():
        param[0] += number


def exchanges_the_memory(param: nn.Parameter, number: Any) -> None:
    param.data = param.data + number


@pytest.fixture
def writer(classifier):
    """``writer(write, layer, step, automatic=True)``: a model that does it from that step on."""

    def make(write: Any, layer: int, step: int, *, automatic: bool = True) -> Any:
        class Codebook(classifier):
            automatic_optimization = automatic

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.global_step >= step:
                    write(self.net[layer].bias, batch[0].mean())
                loss = super().training_step(batch, batch_idx)
                if automatic:
                    return loss
                self.manual_backward(loss)
                self.optimizers().step()
                return None

        return Codebook

    return make


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("layer", [0, 2], ids=["frozen", "trained"])
@pytest.mark.parametrize("write", [adds, exchanges_the_memory])
def test_what_writes_weights_is_refused_at_once_and_ends_the_run_later(
    write, layer, automatic, fit, writer
):
    match = rf"training_step changed the parameters \['net\.{layer}\.bias'\].*on_train_batch_end"
    with pytest.raises(MisconfigurationException, match=match):
        fit(kind=writer(write, layer, 0, automatic=automatic))
    assert fit.privacy.steps == 1

    with pytest.raises(VoidedRunError, match=match):
        fit(kind=writer(write, layer, 1, automatic=automatic))
    assert fit.privacy.steps == 2


@pytest.mark.parametrize("engine", ["records", "one_by_one"])
def test_it_is_seen_where_records_run_alone(engine, fit, writer):
    with pytest.raises(MisconfigurationException, match=r"changed the parameters \['net\.0\.bias'"):
        fit(kind=writer(adds, 0, 0), engine=engine)

    with pytest.raises(VoidedRunError, match=r"changed the parameters \['net\.0\.bias'"):
        fit(kind=writer(adds, 0, 1), engine=engine)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_frozen_embedding_that_rescales_its_rows_is_refused(
    kind, classifier, loader, make_trainer
):
    frozen = kind(10, 4, max_norm=1.0).requires_grad_(False)
    model = classifier(nn.ModuleList([frozen, nn.Linear(4, 3)]))
    with pytest.raises(Exception, match=r"\['net\.0'\] have max_norm set.*Leave max_norm out"):
        make_trainer(max_steps=1, callbacks=[private()]).fit(model, loader)


# -- no alarm --------------------------------------------------------------------------------------


def exchanges_frozen(net: Any) -> None:
    net[0] = copy.deepcopy(net[0])


def bounds(net: Any) -> None:
    with torch.no_grad():
        net[2].weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    "callback",
    [
        Act("on_train_epoch_start", exchanges_frozen),
        Act("on_train_batch_end", bounds),
        EMAWeightAveraging(),
    ],
    ids=["a frozen part is exchanged", "weights are bounded between steps", "averaged weights"],
)
def test_what_happens_between_steps_is_no_alarm(callback, fit):
    assert fit(callback).steps == 3


def test_memory_that_is_exchanged_for_the_same_values_is_no_alarm(fit, writer):
    """An LSTM that puts its weights together does this."""

    def makes_flat(param: nn.Parameter, number: Any) -> None:
        param.data = param.data.clone()

    assert fit(kind=writer(makes_flat, 2, 0)).steps == 3


@pytest.mark.parametrize(
    "estimator",
    [
        Diff2(restart_every=2, max_grad_norm=1.0, diff_norm=1.0),
        CubicNewton(strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=2, keep_fraction=0.04),
    ],
    ids=["DIFF2", "cubic Newton"],
)
def test_other_estimates_are_no_alarm(estimator, fit):
    assert fit(estimator=estimator).steps == 3
