"""Models and optimizers that cannot be trained privately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader

from lightning_dp.callbacks import DifferentialPrivacy


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "BatchNorm2d": lambda: nn.BatchNorm2d(6),
    "BatchNorm, frozen": lambda: frozen(nn.BatchNorm1d(6)),
    "BatchNorm, affine=False": lambda: nn.BatchNorm1d(6, affine=False),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
    "frozen InstanceNorm with statistics": lambda: frozen(
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalisation_over_the_batch_is_refused(
    name, loader, classifier, make_trainer, privacy, assert_refused
):
    model = classifier(nn.Sequential(NORMS[name](), nn.Linear(6, 3)))
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader),
        r"\['net\.0'\] normalise.*lightning_dp\.fix\(model\)",
        model,
    )


UNSUPPORTED = {
    "LSTM": (lambda: nn.LSTM(6, 3), r"net \(LSTM\).*DPLSTM"),
    "GRU": (lambda: nn.GRU(6, 3), r"net \(GRU\).*lightning_dp\.fix"),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(6, 2),
        r"net \(MultiheadAttention\).*DPMultiheadAttention",
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8),
        r"net\.self_attn \(MultiheadAttention\).*DPMultiheadAttention",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_hooks_refuse_a_layer_without_a_rule_with_its_replacement(
    name, loader, classifier, make_trainer, assert_refused
):
    make, match = UNSUPPORTED[name]
    model = classifier(make())
    privacy = DifferentialPrivacy(target_delta=1e-5, noise_multiplier=1.0, engine="hooks")
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(lambda: trainer.fit(model, loader), match, model)


class WithBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.seen


def test_a_trainable_layer_with_a_constant_buffer_is_fine(
    loader, classifier, make_trainer, privacy
):
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(WithBuffer()), loader)
    assert privacy.steps == 10


# -- optimizers --------------------------------------------------------------------------------


class Optimizers(L.LightningModule):
    def __init__(self, make: Callable[[L.LightningModule], Any], *, automatic: bool = True) -> None:
        super().__init__()
        self.net, self.make = nn.Linear(6, 3), make
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self)


def two_optimizers(model: Any) -> list[Optimizer]:
    return [SGD([model.net.weight], lr=0.1), SGD([model.net.bias], lr=0.1)]


def frozen_optimizer(model: Any) -> Optimizer:
    return SGD(model.requires_grad_(False).parameters(), lr=0.1)


OPTIMIZERS = {
    "two": (two_optimizers, True, "multiple optimizers is only supported with manual"),  # Lightning
    "two, manual": (two_optimizers, False, "2 optimizers.*groups of one optimizer"),
    "none": (lambda model: None, True, "no optimizer.*[Rr]eturn one"),
    "empty list": (lambda model: [], True, "no optimizer.*[Rr]eturn one"),
    "LBFGS": (
        lambda model: torch.optim.LBFGS(model.parameters()),
        True,
        "LBFGS evaluates the loss several times.*Use SGD",
    ),
    "a parameter from elsewhere": (
        lambda model: SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1),
        True,
        "not a parameter of the LightningModule.*Register it on the module",
    ),
    "only frozen parameters": (frozen_optimizer, True, "no trainable parameter.*requires_grad"),
}


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned `None`")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_anything_but_one_ordinary_optimizer_is_refused(
    name, loader, make_trainer, privacy, assert_refused
):
    make, automatic, match = OPTIMIZERS[name]
    model = Optimizers(make, automatic=automatic)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(lambda: trainer.fit(model, loader), match, model)


class Greedy(SGD):
    """Evaluates its closure twice, as line searches do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class WithClosure(Optimizers):
    """Gives its optimizer a closure in manual optimization too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return cross_entropy(self.net(batch[0]), batch[1])

        def closure() -> None:
            self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))

        self.optimizers().step(closure=closure)
        return None


@pytest.mark.parametrize("automatic", [True, False])
def test_a_closure_evaluated_twice_is_refused(
    automatic, loader, make_trainer, privacy, assert_refused
):
    model = WithClosure(lambda m: Greedy(m.parameters(), lr=0.1), automatic=automatic)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader),
        "Greedy evaluated its closure twice.*Use an optimizer that evaluates it once",
        model,
        charged=1,
        gradient_left=True,
    )


class Manual(Optimizers):
    """Manual optimization of a loss, with the steps that a test asks for."""

    def __init__(self, act: Callable[[Any, Optimizer, Any], None]) -> None:
        super().__init__(lambda model: SGD(model.parameters(), lr=0.1), automatic=False)
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.act(self, self.optimizers(), lambda: cross_entropy(self.net(batch[0]), batch[1]))


def steps_twice(model: Any, optimizer: Any, loss: Any) -> None:
    model.manual_backward(loss())
    optimizer.step()
    optimizer.step()


def steps_on_two_losses(model: Any, optimizer: Any, loss: Any) -> None:
    for _ in range(2):
        model.manual_backward(loss())
        optimizer.step()


def backward_twice(model: Any, optimizer: Any, loss: Any) -> None:
    model.manual_backward(loss())
    model.manual_backward(loss())


def steps_the_bare_optimizer(model: Any, optimizer: Any, loss: Any) -> None:
    model.manual_backward(loss())
    optimizer.optimizer.step()


def bare_backward_and_step(model: Any, optimizer: Any, loss: Any) -> None:
    loss().backward()
    optimizer.optimizer.step()


@pytest.mark.parametrize(
    ("act", "match", "charged", "released"),
    [
        (steps_twice, "Two optimizer steps on one batch.*Step once per batch", 1, 1),
        (steps_on_two_losses, "Backward ran more than once.*backward once per batch", 1, 1),
        (backward_twice, "Backward ran more than once.*backward once per batch", 1, 0),
        (steps_the_bare_optimizer, "not made private.*self.optimizers\\(\\).step", 1, 0),
        (bare_backward_and_step, r"not made private", 1, 0),
    ],
)
def test_a_batch_used_twice_or_past_the_strategy_is_refused(
    act, match, charged, released, loader, make_trainer, privacy, assert_refused
):
    model, trainer = Manual(act), make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, loader),
        match,
        model,
        charged=charged,
        released=released,
        gradient_left=released > 0,
    )


# -- forward passes ----------------------------------------------------------------------------


class Forwards(Optimizers):
    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(lambda model: SGD(model.parameters(), lr=0.1))
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self, batch)


def bypasses_the_layer(model: Any, batch: Any) -> Tensor:
    return cross_entropy(linear(batch[0], model.net.weight, model.net.bias), batch[1])


def penalises_the_weights(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model.net(batch[0].detach()).detach(), batch[1]) + model.net.weight.sum()


def test_a_weight_used_outside_of_its_layer_is_fine(loader, make_trainer, privacy):
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(Forwards(bypasses_the_layer), loader)
    assert privacy.steps == 10


def test_a_gradient_that_no_layer_has_is_refused_by_the_engine_of_layers(
    loader, make_trainer, assert_refused
):
    model = Forwards(penalises_the_weights)
    privacy = DifferentialPrivacy(target_delta=1e-5, noise_multiplier=1.0, engine="layers")
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(lambda: trainer.fit(model, loader), r"net\.weight", model)


class OwnParameter(Optimizers):
    """A parameter directly on the LightningModule, used in training_step."""

    def __init__(self) -> None:
        super().__init__(lambda model: Adam(model.parameters(), lr=0.1))
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]) * self.scale, batch[1])


def test_a_parameter_used_outside_forward_is_fine(loader, make_trainer, privacy):
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(OwnParameter(), loader)
    assert privacy.steps == 10


def test_a_frozen_layer_in_eval_mode_is_fine(loader, classifier, make_trainer, privacy):
    model = classifier(nn.Sequential(frozen(nn.Linear(6, 4)).eval(), nn.Linear(4, 3)))
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps == 10


@pytest.mark.parametrize("engine", ["layers"])
def test_a_loop_over_the_records_is_refused_before_a_charge(
    engine, classifier, blobs, make_trainer
):
    class OneByOne(classifier):
        def forward(self, x):
            return torch.stack([self.net(record) for record in x])

    privacy = DifferentialPrivacy(target_delta=1e-5, noise_multiplier=1.0, engine=engine)
    trainer = make_trainer(max_steps=2, callbacks=[privacy])
    with pytest.raises(TypeError, match=r"called with a tensor of 1 dimensions"):
        trainer.fit(OneByOne(nn.Linear(6, 3)), DataLoader(blobs, 3))
    assert privacy.epsilon == 0
