"""The first step shows what the optimizer and the model do to the weights."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from lightning_dp import CubicNewton, Diff2, LaplacianSmoothing
from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.strategies.weights import _parameters_of, checksums


@pytest.fixture
def fit(classifier, mlp, loader, make_trainer):
    """``fit(optimizer, ...)``: three steps of a network whose first layer is frozen."""

    def run(
        optimizer: Any = lambda params: Adam(params, lr=0.1),
        *callbacks: Callback,
        kind: Any = classifier,
        **privacy: Any,
    ) -> DifferentialPrivacy:
        net = mlp()
        net[0].requires_grad_(False)
        unchecked = {"isolation_probe": False, "spot_checks": False}
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, **unchecked}
        private = DifferentialPrivacy(**{**settings, **privacy})
        trainer = make_trainer(max_steps=3, callbacks=[*callbacks, private])
        try:
            trainer.fit(kind(net, optimizer), loader)
        finally:
            run.steps = private.steps  # type: ignore[attr-defined]
        return private

    return run


class Act(Callback):
    """Does something to the network when a hook is called."""

    def __init__(self, hook: str, act: Any) -> None:
        setattr(self, hook, lambda trainer, module, *_: act(module.net))


def test_all_parameters_are_found_wherever_they_are():
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(3, 2, bias=False)), "b": shared})
    model["a"].register_parameter("own", nn.Parameter(torch.ones(1)))
    model["a"].register_module("none", None)
    assert {id(p) for p in _parameters_of(model)} == {id(p) for p in model.parameters()}


# -- checksums ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_any_changed_entry_changes_the_fingerprint(dtype):
    tensor = torch.randn(3, 4).to(dtype).t()  # not contiguous

    before = checksums({"t": tensor})
    assert before == checksums({"t": tensor.clone()})
    for row in range(4):
        for column in range(3):
            other = tensor.clone()
            other[row, column] = -other[row, column]
            assert before != checksums({"t": other})


def test_changes_that_keep_the_sum_are_seen():
    tensor = torch.arange(3_000_000.0)  # longer than the parts in which it is read
    before = checksums({"t": tensor})
    for i, j in ((0, 1), (5, 2_500_000), (0, 2**20)):
        swapped = tensor.clone()
        swapped[i], swapped[j] = tensor[j], tensor[i]
        assert before != checksums({"t": swapped})
    signs = torch.ones(2, dtype=torch.float64)
    assert checksums({"t": signs}) != checksums({"t": -signs})


# -- the optimizer has the parameters of the model -------------------------------------------------


def wraps(net: Any) -> None:
    net[2] = copy.deepcopy(net[2])


def adds_an_adapter(net: Any) -> None:
    net.append(nn.Linear(3, 3))


def removes(net: Any) -> None:
    net[2].bias = None


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize(
    ("act", "match"),
    [
        (wraps, r"2 are gone, 2 are new: \['net\.2\.weight'"),
        (adds_an_adapter, r"0 are gone, 2 are new: \['net\.3\.weight'"),
        (removes, r"1 are gone, 0 are new"),
    ],
)
def test_a_model_whose_parameters_are_replaced_is_refused_before_a_charge(act, match, hook, fit):
    with pytest.raises(RuntimeError, match=rf"replaced during fit \({match}.*configure_model"):
        fit(lambda params: SGD(params, lr=0.1), Act(hook, act))
    assert fit.steps == 0


def test_a_frozen_part_may_be_exchanged(fit):
    def exchange(net: Any) -> None:
        net[0] = copy.deepcopy(net[0])

    fit(lambda params: SGD(params, lr=0.1), Act("on_train_epoch_start", exchange))
    assert fit.steps == 3


def test_a_trainable_parameter_that_no_optimizer_has_is_named(fit):
    with pytest.warns(PrivacyWarning, match=r"1 trainable parameters.*\['net\.2\.bias'\].*freeze"):
        fit(lambda params: SGD(list(params)[:3], lr=0.1))


# -- frozen parameters -----------------------------------------------------------------------------


class Decays(SGD):
    """Weight decay for whatever it holds, with or without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(1 - 1e-3)  # .data: no version counter moves
        return loss


def test_an_optimizer_that_changes_frozen_weights_is_refused(fit):
    with pytest.raises(Exception, match=r"Decays changed the frozen.*'net\.0\.weight'.*trainable"):
        fit(lambda params: Decays(params, lr=0.1))
    assert fit.steps == 1


def test_an_old_gradient_of_a_frozen_weight_is_noticed(fit, classifier):
    class Manual(classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.net[0].weight.grad = torch.ones(8, 6)  # nobody calls zero_grad
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    with pytest.raises(Exception, match=r"SGD is about to move the frozen.*net.0.weight.*old one"):
        fit(lambda params: SGD(params, lr=0.1), kind=Manual)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_training_step_that_writes_weights_is_refused(automatic, layer, fit, classifier):
    class Codebook(classifier):
        automatic_optimization = automatic

        def training_step(self, batch, batch_idx):
            self.net[layer].bias.data[0] += batch[0].mean()
            loss = super().training_step(batch, batch_idx)
            if not automatic:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    match = rf"training_step changed the parameters \['net\.{layer}\.bias'\].*on_train_batch_end"
    with pytest.raises(Exception, match=match):
        fit(kind=Codebook)
    assert fit.steps == 1


def test_what_is_written_through_an_array_of_a_weight_is_seen(fit, classifier):
    """As by a library that trains a codebook in NumPy: it writes into a copy that shares its memory."""

    class Codebook(classifier):
        def on_fit_start(self):
            self.codebook = self.net[0].bias.detach().numpy()

        def training_step(self, batch, batch_idx):
            self.codebook += batch[0].mean().item()
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match=r"changed the parameters \['net\.0\.bias'\]"):
        fit(kind=Codebook)
    assert fit.steps == 1


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_rescales_its_rows_is_refused(
    kind, classifier, loader, make_trainer, tmp_path
):
    frozen = kind(10, 4, max_norm=1.0).requires_grad_(False)
    model = classifier(nn.ModuleList([frozen, nn.Linear(4, 3)]))
    privacy = DifferentialPrivacy(
        noise_multiplier=1.0, target_delta=1e-5, isolation_probe=False, spot_checks=False
    )
    with pytest.raises(Exception, match=r"\['net\.0'\] have max_norm set.*Leave max_norm out"):
        make_trainer(max_steps=1, callbacks=[privacy]).fit(model, loader)


def test_a_teacher_that_follows_between_steps_is_warned_of_once(fit):
    def follow(net: Any) -> None:
        net[0].bias.data += net[2].bias.mean()

    with pytest.warns(PrivacyWarning, match=r"\['net\.0\.bias'\] changed between two") as seen:
        fit(lambda params: Adam(params, lr=0.1), Act("on_train_batch_end", follow))
    assert sum(warning.category is PrivacyWarning for warning in seen) == 1


# -- trained parameters ----------------------------------------------------------------------------


def test_a_parameter_that_the_optimizer_does_not_move_is_named(fit):
    class Stuck(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            kept = self.param_groups[0]["params"][2].clone()
            loss = super().step(closure)
            self.param_groups[0]["params"][2].copy_(kept)
            return loss

    with pytest.warns(PrivacyWarning, match=r"Stuck did not move .*\['net\.2\.weight'\]"):
        fit(lambda params: Stuck(params, lr=0.1))


def test_a_step_below_the_precision_of_the_weights_is_named(fit):
    with pytest.warns(PrivacyWarning, match=r"too small for their precision"):
        fit(lambda params: SGD(params, lr=1e-30))


def warm_up(last: float) -> Any:
    """Learning rates 0, 0, ``last``: the third of three steps is the first that moves anything."""

    class WarmUp(SGD):
        pass

    def configure(params: Any) -> Any:
        optimizer = WarmUp(params, lr=1.0)
        scheduler = LambdaLR(optimizer, lambda step: last if step == 2 else 0.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return configure


def test_a_warm_up_from_zero_is_waited_for(fit):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        assert fit(warm_up(0.1)).steps == 3

    with pytest.warns(PrivacyWarning, match="WarmUp did not move"):
        fit(warm_up(1e-30))


def test_a_group_with_learning_rate_zero_is_not_expected_to_move(fit):
    def groups(params: Any) -> Any:
        first, second, weight, bias = params
        return SGD([{"params": [first, second, weight]}, {"params": [bias], "lr": 0.0}], lr=0.1)

    assert fit(groups).steps == 3


@pytest.mark.parametrize(
    "privacy",
    [
        {"postprocessing": [LaplacianSmoothing(sigma=2.0)]},
        {"estimator": Diff2(restart_every=2, max_grad_norm=1.0, diff_norm=1.0)},
        {
            "estimator": CubicNewton(
                strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=2, keep_fraction=0.04
            )
        },
    ],
    ids=["smoothing", "DIFF2", "one coordinate of a cubic Newton step"],
)
def test_other_estimates_are_no_alarm(privacy, fit):
    assert fit(lambda params: SGD(params, lr=1.0), **privacy).steps == 3


def test_averaged_weights_are_no_alarm(fit):
    assert fit(lambda params: SGD(params, lr=0.1), EMAWeightAveraging()).steps == 3


# -- later steps -------------------------------------------------------------------------------


def test_a_parameter_that_training_step_writes_to_later_voids_the_run(fit, classifier):
    class Late(classifier):
        def training_step(self, batch, batch_idx):
            if self.global_step == 1:
                with torch.no_grad():
                    self.net[2].bias.add_(batch[0].mean())
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        VoidedRunError, match=r"training_step changed the parameters \['net\.2\.bias'\]"
    ):
        fit(kind=Late)

    assert fit.steps == 2


def test_a_frozen_parameter_that_gets_other_memory_later_voids_the_run(fit, classifier):
    class Late(classifier):
        def training_step(self, batch, batch_idx):
            if self.global_step == 1:
                self.net[0].weight.data = self.net[0].weight.data + batch[0].mean()
            return super().training_step(batch, batch_idx)

    with pytest.raises(VoidedRunError, match=r"training_step changed.*net\.0\.weight"):
        fit(kind=Late)


def test_what_is_written_without_a_change_at_the_first_batch_is_no_alarm(fit, classifier):
    class Bounded(classifier):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.net[2].weight.clamp_(-0.5, 0.5)
            return super().training_step(batch, batch_idx)

    fit(kind=Bounded)


def test_what_is_written_past_autograd_without_a_change_is_no_alarm(fit, classifier):
    class Bounded(classifier):
        def training_step(self, batch, batch_idx):
            if self.global_step:  # at steps with a spot check, too, where weights are shared
                self.net[2].weight.data.clamp_(-100, 100)
            return super().training_step(batch, batch_idx)

    fit(kind=Bounded)


def test_weights_that_are_bounded_between_steps_are_no_alarm(fit, classifier):
    class Bounded(classifier):
        def on_train_batch_end(self, *args):
            with torch.no_grad():
                self.net[2].weight.clamp_(-0.01, 0.01)

    fit(kind=Bounded)
