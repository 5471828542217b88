"""Models, optimizers, Trainers, callbacks, tuners and strategies that cannot train privately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import (
    CubicNewton,
    LaplacianSmoothing,
    Momentum,
    PrivacyConfig,
)
from lightning_dp.callbacks import PrivateSingleDeviceStrategy
from lightning_dp.strategies.checks import (
    check_strategy,
)
from tests.zoo import private

# -- models --------------------------------------------------------------------------------------


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
def test_normalisation_over_the_batch_is_refused(name, classifier, refuses):
    model = classifier(nn.Sequential(NORMS[name](), nn.Linear(6, 3)))
    refuses(model, r"\['net\.0'\] normalise.*lightning_dp\.fix\(model\)")


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
def test_anything_but_one_ordinary_optimizer_is_refused(name, refuses):
    make, automatic, match = OPTIMIZERS[name]
    refuses(Optimizers(make, automatic=automatic), match)


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
def test_a_closure_evaluated_twice_is_refused(automatic, refuses):
    model = WithClosure(lambda m: Greedy(m.parameters(), lr=0.1), automatic=automatic)
    match = "Greedy evaluated its closure twice.*Use an optimizer that evaluates it once"
    refuses(model, match, charged=1, gradient_left=True)


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
def test_a_batch_used_twice_or_past_the_strategy_is_refused(act, match, charged, released, refuses):
    left = {"charged": charged, "released": released, "gradient_left": released > 0}
    refuses(Manual(act), match, **left)


# -- Trainers, callbacks and tuners --------------------------------------------------------------


class Line(L.LightningModule):
    """One layer; can be pickled for a process that is spawned."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.learning_rate, self.batch_size = nn.Linear(6, 3), 0.1, 24

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.learning_rate)


class TakesIterator(Line):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return cross_entropy(self.net(batch[0]), batch[1])


def test_training_step_with_dataloader_iter_is_refused(refuses):
    refuses(TakesIterator(), r"dataloader_iter.*training_step\(batch")


class OwnPrecision(MixedPrecision):
    """May scale the loss as it likes."""


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"overfit_batches": 2}, r"overfit_batches=2.*limit_train_batches"),
        ({"overfit_batches": 0.5}, r"overfit_batches=0.5.*limit_train_batches"),
        (
            {"plugins": [OwnPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
            "16-mixed.*bf16-mixed",
        ),
    ],
)
def test_trainer_arguments_under_which_epsilon_would_not_hold_are_refused(
    arguments, match, refuses
):
    refuses(Line(), match, **arguments)


def test_float16_with_gradients_of_opacus_is_refused(fit, assert_refused):
    """Their check adds records up in float16, where the sum of good ones may overflow."""
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    model, match = Line(), "16-mixed.*'hooks'.*bf16-mixed"
    options = {"max_epochs": 1, "plugins": plugins}
    assert_refused(lambda: fit(model, private(engine="hooks"), **options), match, model)


CALLBACKS = {
    "LearningRateFinder": (LearningRateFinder, "outside the ledger.*learning rate"),
    "BatchSizeFinder": (BatchSizeFinder, "outside the ledger.*physical one that fits"),
    "GradientAccumulationScheduler": (
        lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "sampling rate.*accumulate_grad_batches",
    ),
    "StochasticWeightAveraging": (
        lambda: StochasticWeightAveraging(swa_lrs=0.1),
        "extra pass.*EMAWeightAveraging",
    ),
    "BackboneFinetuning": (
        lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1),
        "changes which parameters.*before fit",
    ),
}


@pytest.mark.parametrize(
    ("name", "behind"),
    [*((name, True) for name in CALLBACKS), ("StochasticWeightAveraging", False)],
)
def test_a_callback_that_trains_past_the_ledger_is_refused(
    name, behind, loader, make_trainer, privacy, assert_refused
):
    make, reason = CALLBACKS[name]
    callbacks = [privacy, make()] if behind else [make(), privacy]
    model = Line()
    model.backbone = nn.Linear(2, 2)  # BackboneFinetuning looks for it
    model.train_dataloader = lambda: loader  # BatchSizeFinder wants to make it anew
    trainer = make_trainer(max_epochs=1, callbacks=callbacks)

    assert_refused(lambda: trainer.fit(model), f"{name} cannot be used.*{reason}", model)


def test_a_callback_that_the_model_brings_is_refused(refuses):
    model = Line()
    model.configure_callbacks = lambda: StochasticWeightAveraging(swa_lrs=0.1)  # type: ignore
    refuses(model, "StochasticWeightAveraging cannot be used")


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_a_tuner_is_refused(method, loader, make_trainer, privacy, assert_refused):
    model, trainer = Line(), make_trainer(max_epochs=1, callbacks=[privacy])
    model.train_dataloader = lambda: loader  # type: ignore[method-assign]

    assert_refused(
        lambda: getattr(Tuner(trainer), method)(model), "Finder cannot be used.*ledger", model
    )
    assert not trainer.fit_loop.epoch_loop.global_step


# -- the set of trained parameters ---------------------------------------------------------------


class Changes(Callback):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.change(trainer.optimizers[0], pl_module.net)


def adds_a_group(optimizer: Any, net: Any) -> None:
    optimizer.add_param_group({"params": [net[2].bias.requires_grad_(True)]})


def unfreezes(optimizer: Any, net: Any) -> None:
    net[0].bias.requires_grad_(True)


def unfreezes_outside_the_optimizer(optimizer: Any, net: Any) -> None:
    net[2].bias.requires_grad_(True)


def freezes(optimizer: Any, net: Any) -> None:
    net[0].weight.requires_grad_(False)


def replaces(optimizer: Any, net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = net[0].weight


@pytest.mark.parametrize(
    "change", [adds_a_group, unfreezes, unfreezes_outside_the_optimizer, freezes, replaces]
)
def test_changing_the_trained_parameters_during_fit_is_refused(change, classifier, mlp, refuses):
    model = classifier(mlp(), lambda params: SGD(list(params)[:3], lr=0.1))  # not the last bias
    for bias in (model.net[0].bias, model.net[2].bias):
        bias.requires_grad_(False)
    match = "set of trained parameters changed during fit.*before fit"
    refuses(model, match, callbacks=[Changes(change)])


# -- another package -------------------------------------------------------------------------------


def test_a_trainer_of_pytorch_lightning_is_refused(loader, tmp_path, privacy, assert_refused):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Model(pytorch_lightning.LightningModule):  # type: ignore[name-defined, misc]
        training_step, configure_optimizers = Line.training_step, Line.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.net, self.learning_rate = nn.Linear(6, 3), 0.1

    model = Model()
    quiet = {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[privacy], enable_progress_bar=False, **quiet
    )
    match = "'pytorch_lightning'.*Import everything from lightning.pytorch"
    assert_refused(lambda: trainer.fit(model, loader), match, model)


def test_somebody_elses_hook_on_a_gradient_is_refused(refuses):
    model = Line()
    seen: list[torch.Tensor] = []
    handle = model.net.weight.register_hook(seen.append)

    refuses(model, "gradient hooks.*Remove them before fit")
    handle.remove()
    assert seen == []


# -- strategies, and two configurations of one ---------------------------------------------------


def uninitialised(kind: type[Any]) -> Any:
    """An object of a strategy whose own package is not installed."""
    return object.__new__(kind)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
        uninitialised(DeepSpeedStrategy),
        uninitialised(XLAStrategy),
        uninitialised(SingleDeviceXLAStrategy),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_strategies_that_shard_or_compile_are_refused(strategy):
    name = type(strategy).__name__
    cures = r"strategy='ddp'.*ModelParallelStrategy\(data_parallel_size"
    with pytest.raises(Exception, match=f"(?s)strategy {name} is not supported.*{cures}"):
        check_strategy(strategy)


def test_a_forked_fit_is_refused(refuses):
    refuses(Line(), "spawn or fork.*strategy='ddp' in a script", strategy="ddp_fork")


@pytest.mark.parametrize(
    "strategy",
    ["ddp_fork", "ddp_notebook", pytest.param("ddp_spawn", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_refusal_of_a_copied_process_comes_from_the_parent(strategy, devices, fit, privacy):
    with pytest.raises(MisconfigurationException, match=r"spawn or fork.*devices=1") as refused:
        fit(Line(), privacy, strategy=strategy, devices=devices, max_epochs=1)

    assert refused.value.__cause__ is None and refused.value.__suppress_context__


def test_several_devices_of_a_notebook_are_refused_in_the_parent(fit, privacy, monkeypatch):
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE"
    monkeypatch.setattr(connector, True)

    with pytest.raises(MisconfigurationException, match=r"spawn or fork.*strategy='ddp'"):
        fit(Line(), privacy, devices=2, max_epochs=1)


def test_two_configurations_and_none_are_refused(loader, make_trainer, refuses, assert_refused):
    own = PrivacyConfig(noise_multiplier=2.0, target_delta=1e-5)
    refuses(Line(), "configured twice.*Keep one of them", callbacks=[private()])
    strategy = PrivateSingleDeviceStrategy(privacy=own)
    refuses(Line(), "configured twice.*Keep one of them", strategy=strategy)

    model, trainer = Line(), make_trainer(max_epochs=1, strategy=PrivateSingleDeviceStrategy())
    match = "no privacy configuration.*privacy=PrivacyConfig"
    assert_refused(lambda: trainer.fit(model, loader), match, model)


# -- what sharded parameters do not allow --------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_processes_are_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class OneShardedLayer(Line):
    """One network, sharded as a function says, over one process."""

    def __init__(self, shard: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.net, self.shard = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), shard

    def configure_model(self) -> None:
        self.shard(self.net, self.device_mesh["data_parallel"])


def in_one_shard(net: nn.Module, mesh: Any) -> object:
    return fully_shard(net, mesh=mesh)


@pytest.fixture
def sharded_is_refused(make_trainer, tmp_path):
    def check(match: str, shard: Callable[[nn.Module, Any], object] = in_one_shard, **privacy: Any):
        callback = private(**privacy)
        trainer = make_trainer(
            max_steps=3, strategy=ModelParallelStrategy(1, 1), callbacks=[callback]
        )
        records = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
        with pytest.raises(MisconfigurationException, match=match):
            trainer.fit(OneShardedLayer(shard), DataLoader(records, batch_size=8))
        assert not list(tmp_path.rglob("*.journal"))

    return check


@pytest.mark.parametrize(
    ("privacy", "name"),
    [
        ({"estimator": CubicNewton(1.0, 1.0, 3)}, "CubicNewton"),
        ({"postprocessing": [Momentum(0.5), LaplacianSmoothing(1.0)]}, "LaplacianSmoothing"),
        ({"count_clipped": True}, "count_clipped=True"),
        ({"engine": "one_by_one"}, "engine='one_by_one'"),
    ],
)
def test_what_needs_more_than_an_entry_is_refused_by_name(sharded_is_refused, privacy, name):
    match = f"{name}.* does not work on sharded parameters.*strategy='ddp'"
    sharded_is_refused(match, **privacy)


def test_a_model_that_is_not_sharded_is_refused(sharded_is_refused):
    match = r"\['net\.0\.weight', .* are trained and not sharded.*fully_shard\(self\.model"
    sharded_is_refused(match, shard=lambda net, mesh: None)
