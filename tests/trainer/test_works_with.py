"""What people already use with Lightning goes on working, one small test for each."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from lightning_dp import PrivacyConfig
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.strategies import PrivateSingleDeviceStrategy
from lightning_dp.warnings import PrivacyWarning

DELTA = 1e-5


@pytest.fixture
def privacy():
    """Little noise, so that training visibly works."""
    return DifferentialPrivacy(noise_multiplier=0.5, target_delta=DELTA)


def loss_of(model, loader):
    with torch.no_grad():
        x, y = loader.dataset.tensors
        return float(nn.functional.cross_entropy(model(x), y))


def assert_trained(trainer, model, privacy, loader, untrained, steps):
    assert trainer.global_step == privacy.steps == steps
    assert loss_of(model, loader) < 0.9 * loss_of(untrained, loader)


# -- optimizers, schedulers, precision, limits ---------------------------------------------


def test_fused_adamw(privacy, classifier, mlp, loader, make_trainer):
    model = classifier(mlp(), lambda params: torch.optim.AdamW(params, lr=0.02, fused=True))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


def test_parameter_groups_with_their_own_learning_rates(
    privacy, classifier, mlp, loader, make_trainer
):
    net = mlp()
    model = classifier(
        net,
        lambda _: torch.optim.SGD(
            [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}], lr=0.3
        ),
    )

    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)

    assert net[0].weight.equal(mlp()[0].weight)
    assert not net[2].weight.equal(mlp()[2].weight)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_cycle_schedule_over_the_estimated_steps(
    accumulate, privacy, classifier, mlp, loader, make_trainer
):
    class OneCycle(classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.5, total_steps=self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": self.cycle, "interval": "step"}]

    model = OneCycle(mlp())
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[privacy])

    trainer.fit(model, loader)

    assert model.cycle.total_steps == trainer.global_step == privacy.steps == 20 // accumulate
    assert model.cycle.last_epoch == model.cycle.total_steps


def test_reduce_on_plateau(privacy, classifier, mlp, loader, make_trainer):
    class Plateau(classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=1e9, threshold_mode="abs"
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }

    trainer = make_trainer(max_epochs=3, callbacks=[privacy])

    trainer.fit(Plateau(mlp()), loader, loader)

    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)


def test_bf16_mixed(privacy, classifier, mlp, loader, make_trainer):
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, precision="bf16-mixed", callbacks=[privacy])

    trainer.fit(model, loader)

    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_max_steps(accumulate, privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(max_steps=7, accumulate_grad_batches=accumulate, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == privacy.steps == 7


@pytest.mark.parametrize(("interval", "at"), [(0.5, [5, 10, 15, 20]), (4, [4, 8, 14, 18])])
def test_val_check_interval(interval, at, privacy, classifier, mlp, loader, make_trainer):
    validated_at = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            validated_at.append(trainer.global_step)

    trainer = make_trainer(
        max_epochs=2,
        val_check_interval=interval,
        num_sanity_val_steps=0,
        callbacks=[privacy, Watch()],
    )

    trainer.fit(classifier(mlp()), loader, loader)

    assert validated_at == at
    assert trainer.global_step == privacy.steps == 20


def test_fast_dev_run(privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(fast_dev_run=2, callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader, loader)

    assert trainer.global_step == privacy.steps == 2


def test_fast_dev_run_with_a_target(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(target_epsilon=1.0, target_delta=DELTA)

    make_trainer(fast_dev_run=True, callbacks=[privacy]).fit(classifier(mlp()), loader)

    assert privacy.steps == 1
    assert 0.99 < privacy.epsilon <= 1.0


def test_gradient_clip_val_warns_that_the_gradient_is_private_already(
    privacy, classifier, mlp, loader, make_trainer, weights
):
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=1.0))
    trainer = make_trainer(max_steps=1, gradient_clip_val=1e-3, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match=r"gradient_clip_val=0.001.*already private"):
        trainer.fit(model, loader)

    assert float((weights(model) - weights(mlp())).norm()) == pytest.approx(1e-3, rel=1e-3)


# -- data ----------------------------------------------------------------------------------


def test_data_module(privacy, classifier, mlp, loader, blobs, make_trainer):
    class Blobs(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(blobs, batch_size=24, shuffle=True)

        def val_dataloader(self):
            return DataLoader(blobs, batch_size=60)

    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, datamodule=Blobs())

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


def test_workers(privacy, classifier, mlp, blobs, loader, make_trainer):
    with_workers = DataLoader(
        blobs, batch_size=24, shuffle=True, num_workers=2, persistent_workers=True
    )
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=3, callbacks=[privacy])

    trainer.fit(model, with_workers)

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=30)


def test_custom_collate_with_strings(privacy, classifier, mlp, blobs, loader, make_trainer):
    def collate(records):
        x, y = zip(*records, strict=True)
        names = [f"class {int(label)}" for label in y]
        return {"x": torch.stack(x), "names": names, "meta": {"source": "blobs"}}

    class Strings(classifier):
        def training_step(self, batch, batch_idx):
            assert batch["meta"] == {"source": "blobs"}
            y = torch.tensor([int(name.removeprefix("class ")) for name in batch["names"]])
            return nn.functional.cross_entropy(self(batch["x"]), y)

    model = Strings(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, DataLoader(blobs, batch_size=24, collate_fn=collate))

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_reloading_the_loader_every_epoch(
    accumulate, privacy, classifier, mlp, blobs, make_trainer
):
    made = []

    class Reloads(L.LightningDataModule):
        def train_dataloader(self):
            made.append(DataLoader(blobs, batch_size=24, shuffle=True))
            return made[-1]

    trainer = make_trainer(
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[privacy],
    )

    trainer.fit(classifier(mlp()), datamodule=Reloads())

    assert len(made) == 3
    assert trainer.global_step == privacy.steps == 3 * math.ceil(10 / accumulate)


def test_a_reloaded_loader_of_another_size_is_refused(
    privacy, classifier, mlp, blobs, make_trainer
):
    sizes = iter([24, 12])

    class Grows(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(blobs, batch_size=next(sizes))

    trainer = make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=[privacy])

    with pytest.raises(ValueError, match="batches changed during the run"):
        trainer.fit(classifier(mlp()), datamodule=Grows())

    assert privacy.steps == 10


# -- manual optimization -------------------------------------------------------------------


@pytest.fixture
def manual(classifier):
    class Manual(classifier):
        backwards = steps = 1

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(self.backwards):
                self.manual_backward(super().training_step(batch, batch_idx))
            for _ in range(self.steps):
                optimizer.step()

    return Manual


def test_manual_optimization(privacy, manual, mlp, loader, make_trainer):
    model = manual(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, manual(mlp()), steps=20)


def test_manual_optimization_without_a_step_warns(privacy, manual, mlp, loader, make_trainer):
    model = manual(mlp())
    model.steps = 0
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    with pytest.warns(PrivacyWarning, match=r"charged and never released.*Call it once per batch"):
        trainer.fit(model, loader)

    assert trainer.global_step == 0
    assert privacy.steps == 10  # each batch was looked at


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 2}, "Two optimizer steps on one batch"),
        ({"backwards": 2}, "Backward ran more than once for one batch"),
    ],
)
def test_manual_optimization_uses_a_batch_once(
    wrong, message, privacy, manual, mlp, loader, make_trainer
):
    model = manual(mlp())
    for name, value in wrong.items():
        setattr(model, name, value)

    with pytest.raises(RuntimeError, match=message):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)

    assert privacy.steps == 1


def test_stepping_the_bare_optimizer_is_an_error(privacy, classifier, mlp, loader, make_trainer):
    class Bare(classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().optimizer.step()

    with pytest.raises(RuntimeError, match="gradients that were not made private"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Bare(mlp()), loader)


# -- modules -------------------------------------------------------------------------------


def test_torchmetrics_in_the_module(privacy, classifier, mlp, loader, make_trainer):
    class Metrics(classifier):
        rows = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
            self.seen = torchmetrics.SumMetric()

        def training_step(self, batch, batch_idx):
            x, y = batch
            scores = self(x)
            self.accuracy(scores, y)
            self.seen(len(y))
            self.rows += len(y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            return nn.functional.cross_entropy(scores, y)

    model = Metrics(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    trainer.fit(model, loader)

    assert float(trainer.callback_metrics["seen"]) == model.rows
    assert 0.4 < float(trainer.callback_metrics["accuracy"]) <= 1


def test_unused_parameters_get_noise_only(privacy, classifier, mlp, loader, make_trainer):
    class Unused(classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.never_called = nn.Linear(40, 40)

    model = Unused(mlp(), lambda params: torch.optim.SGD(params, lr=1.0))
    before = model.never_called.weight.detach().clone()

    make_trainer(max_steps=1, callbacks=[privacy]).fit(model, loader)

    moved = (model.never_called.weight - before).detach()
    assert float(moved.std()) == pytest.approx(0.5 * 1.0 / 24, rel=0.15)


def test_frozen_layers_do_not_move_and_take_no_part_of_the_norm(
    classifier, mlp, loader, make_trainer, weights
):
    silent = DifferentialPrivacy(noise_multiplier=0.0, max_grad_norm=1e-3, target_delta=DELTA)
    net = mlp()
    net[0].requires_grad_(False)
    model = classifier(net, lambda params: torch.optim.SGD(params, lr=1.0))
    trainer = make_trainer(max_steps=1, callbacks=[silent])

    trainer.fit(model, DataLoader(loader.dataset, batch_size=240))

    assert weights(net[0]).equal(weights(mlp()[0]))
    # Every record is clipped; were frozen gradients in the norm, the rest would be shorter.
    x, y = loader.dataset.tensors
    head, total = mlp(), 0.0
    for i in range(240):
        loss = nn.functional.cross_entropy(head(x[i : i + 1]), y[i : i + 1])
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(head[2].parameters()))]
        )
        total = total + gradient * min(1.0, 1e-3 / float(gradient.norm()))
    torch.testing.assert_close(
        weights(mlp()[2]) - weights(net[2]), total / 240, rtol=1e-3, atol=1e-8
    )


class Direct(L.LightningModule):
    """Parameters directly on the LightningModule."""

    def __init__(self, through_self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 6) * 0.1)
        self.bias = nn.Parameter(torch.zeros(3))
        self.through_self = through_self

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x) if self.through_self else self.forward(x)
        return nn.functional.cross_entropy(scores, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_parameters_on_the_module_itself_used_through_self(privacy, loader, make_trainer):
    model = Direct(through_self=True)
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, Direct(True), steps=20)


def test_parameters_on_the_module_itself_used_otherwise_are_refused_with_the_reason(
    privacy, loader, make_trainer
):
    with pytest.raises(TypeError, match=r"'weight'.*no gradient per record.*call self\(x\)"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Direct(through_self=False), loader)


@pytest.mark.parametrize("when", ["before", "in configure_model"])
def test_a_compiled_network(when, privacy, classifier, mlp, loader, make_trainer):
    class Compiles(classifier):
        def configure_model(self):
            if when == "in configure_model":
                self.net.compile(backend="eager")

    net = mlp()
    if when == "before":
        net.compile(backend="eager")
        net(torch.zeros(2, 6))  # a graph from before the fit
    model = Compiles(net, lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


def test_a_compiled_network_gets_the_gradients_of_a_plain_one(
    classifier, mlp, loader, make_trainer, weights
):
    trained = []
    for compiled in (False, True):
        silent = DifferentialPrivacy(
            noise_multiplier=0.0, max_grad_norm=0.1, target_delta=DELTA, seed=0
        )
        net = mlp()
        if compiled:
            net.compile(backend="eager")
        model = classifier(net)
        make_trainer(max_epochs=1, callbacks=[silent]).fit(model, loader)
        trained.append(weights(model))

    torch.testing.assert_close(*trained)


def test_training_step_may_skip_batches_by_returning_none(
    privacy, classifier, mlp, loader, make_trainer
):
    class Skips(classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    model = Skips(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=4, callbacks=[privacy])

    trainer.fit(model, loader)

    # A skipped batch is a step of noise alone: whether data moved the weights stays private.
    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=40)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_loss_leaves_nothing_for_the_next_one(
    accumulate, classifier, mlp, loader, make_trainer, weights
):
    """Returning None after the forward pass is the same as before it."""

    class Skips(classifier):
        forward_first = False

        def training_step(self, batch, batch_idx):
            if batch_idx % 3 != 1:
                return super().training_step(batch, batch_idx)
            if self.forward_first:
                super().training_step(batch, batch_idx)
            return None

    trained = []
    for forward_first in (False, True):
        silent = DifferentialPrivacy(noise_multiplier=0.0, target_delta=DELTA, seed=0)
        model = Skips(mlp())
        model.forward_first = forward_first
        trainer = make_trainer(max_epochs=2, accumulate_grad_batches=accumulate, callbacks=[silent])
        trainer.fit(model, loader)
        assert trainer.global_step == silent.steps == 20 // accumulate
        trained.append(weights(model))

    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_a_forward_pass_before_training_does_not_matter(
    privacy, classifier, mlp, loader, make_trainer
):
    class Draws(classifier):
        def on_train_start(self):
            self(torch.zeros(2, 6))  # as logger.experiment.add_graph does

    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    trainer.fit(Draws(mlp()), loader)

    assert trainer.global_step == privacy.steps == 10


@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_a_forward_pass_beside_the_loss_is_no_part_of_it_or_refused(
    engine, classifier, mlp, loader, make_trainer
):
    class Twice(classifier):
        def training_step(self, batch, batch_idx):
            self(torch.ones_like(batch[0]))
            return super().training_step(batch, batch_idx)

    def fit(kind):
        privacy = DifferentialPrivacy(
            target_delta=1e-5, noise_multiplier=0.0, seed=1, engine=engine
        )
        model = kind(mlp())
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
        return nn.utils.parameters_to_vector(model.parameters())

    if engine == "hooks":
        with pytest.raises(RuntimeError, match=r"not back-propagated.*torch.no_grad\(\)"):
            fit(Twice)
    else:
        assert torch.equal(fit(Twice), fit(classifier))


def test_a_loss_kept_for_the_next_batch_is_refused(privacy, classifier, mlp, loader, make_trainer):
    class Keeps(classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                self.kept = loss
                return None
            return loss + self.kept

    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(Keeps(mlp()), loader)

    assert privacy.steps == 2


def test_training_step_may_return_a_dictionary(privacy, classifier, mlp, loader, make_trainer):
    ends = []

    class Dictionary(classifier):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "rows": len(batch[0])}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            ends.append(outputs["rows"] == len(batch[0]))

    model = Dictionary(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, loader)

    assert ends == [True] * 20
    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_user_hooks_see_private_gradients_or_none(
    accumulate, classifier, mlp, loader, make_trainer
):
    after_backward, before_step = [], []

    class Looks(L.Callback):
        def on_after_backward(self, trainer, pl_module):
            after_backward.extend(param.grad for param in pl_module.parameters())

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            before_step.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]))

    class LooksToo(classifier):
        def on_after_backward(self):
            after_backward.extend(param.grad for param in self.parameters())

        def on_before_optimizer_step(self, optimizer):
            before_step.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    noisy = DifferentialPrivacy(noise_multiplier=1e6, target_delta=DELTA)
    model = LooksToo(mlp(), lambda params: torch.optim.SGD(params, lr=0.0))
    trainer = make_trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[Looks(), noisy]
    )

    trainer.fit(model, loader)

    assert len(after_backward) == 2 * 4 * 10
    assert all(grad is None for grad in after_backward)
    assert len(before_step) == 2 * 10 // accumulate
    std = 1e6 / (24 * accumulate)
    assert float(torch.cat(before_step).std()) == pytest.approx(std, rel=0.25)


# -- other doors, other callbacks ----------------------------------------------------------


def test_the_strategy_door(classifier, mlp, loader, make_trainer):
    config = PrivacyConfig(target_epsilon=2.0, target_delta=DELTA)
    strategy = PrivateSingleDeviceStrategy("cpu", privacy=config)
    trainer = make_trainer(max_epochs=2, strategy=strategy)

    trainer.fit(classifier(mlp()), loader)

    assert trainer.global_step == strategy.private_run.steps == 20
    assert 0.99 * 2.0 < strategy.private_run.epsilon <= 2.0


def test_the_registered_strategy_with_the_callback(privacy, classifier, mlp, loader, make_trainer):
    trainer = make_trainer(max_epochs=1, strategy="private_single_device", callbacks=[privacy])

    trainer.fit(classifier(mlp()), loader)

    assert type(trainer.strategy) is PrivateSingleDeviceStrategy
    assert trainer.global_step == privacy.steps == 10


def test_the_registered_strategy_without_a_configuration_is_refused(
    classifier, mlp, loader, make_trainer
):
    trainer = make_trainer(max_epochs=1, strategy="private_single_device")

    with pytest.raises(ValueError, match=r"no privacy configuration.*PrivacyConfig"):
        trainer.fit(classifier(mlp()), loader)


def test_privacy_configured_twice_is_refused(privacy, classifier, mlp, loader, make_trainer):
    config = PrivacyConfig(target_epsilon=2.0, target_delta=DELTA)
    strategy = PrivateSingleDeviceStrategy("cpu", privacy=config)

    with pytest.raises(ValueError, match="Privacy is configured twice"):
        make_trainer(strategy=strategy, callbacks=[privacy]).fit(classifier(mlp()), loader)

    assert privacy.steps == strategy.private_run.steps == 0


def test_two_callbacks_are_refused(privacy, classifier, mlp, loader, make_trainer):
    other = DifferentialPrivacy(noise_multiplier=1.0, target_delta=DELTA)

    with pytest.raises((ValueError, RuntimeError)):  # Lightning refuses equal callbacks first
        make_trainer(callbacks=[privacy, other]).fit(classifier(mlp()), loader)

    assert privacy.steps == other.steps == 0


def test_moving_average_of_the_weights(privacy, classifier, mlp, loader, make_trainer, weights):
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append(weights(pl_module))

    model = classifier(mlp())
    average = EMAWeightAveraging(decay=0.8)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy, Watch(), average])

    trainer.fit(model, loader)

    assert trainer.global_step == privacy.steps == len(seen) == 10
    expected = seen[0]
    for later in seen[1:]:
        expected = 0.8 * expected + 0.2 * later
    torch.testing.assert_close(weights(model), expected)


class CLIModel(L.LightningModule):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CLIData(L.LightningDataModule):
    def __init__(self, batch_size: int = 24) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, torch.arange(240) % 3)
        return DataLoader(data, batch_size=self.batch_size)


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_lightning_cli_builds_the_callback_from_a_configuration(tmp_path):
    schedule = {
        "class_path": "lightning_dp.schedules.Exponential",
        "init_args": {"rate": 0.05},
    }
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": [
                {
                    "class_path": "lightning_dp.callbacks.DifferentialPrivacy",
                    "init_args": {
                        "target_epsilon": 2.0,
                        "target_delta": DELTA,
                        "noise_schedule": schedule,
                        "estimator": {
                            "class_path": "lightning_dp.estimators.Diff2",
                            "init_args": {"restart_every": 2, "max_grad_norm": 0.5, "split": 2.0},
                        },
                        "postprocessing": [
                            {
                                "class_path": "lightning_dp.postprocessing.Momentum",
                                "init_args": {"beta": 0.9},
                            },
                            {
                                "class_path": "lightning_dp.postprocessing.LaplacianSmoothing",
                                "init_args": {"sigma": 1.0},
                            },
                        ],
                        "sampling": {"class_path": "lightning_dp.sampling.Poisson"},
                        "relation": "replace_one",
                    },
                }
            ],
        },
        "model": {"hidden": 5},
        "data": {"batch_size": 48},
    }

    cli = LightningCLI(CLIModel, CLIData, args={"fit": config, "subcommand": "fit"})

    (privacy,) = [c for c in cli.trainer.callbacks if isinstance(c, DifferentialPrivacy)]
    report = privacy.report()
    assert cli.trainer.global_step == privacy.steps == 10
    assert 0.99 * 2.0 < privacy.epsilon <= 2.0
    assert report.relation == "replace_one"
    assert report.mechanism == {
        "estimator": "Diff2(restart_every=2, max_grad_norm=0.5, diff_norm=1.0, split=2.0, "
        "step_length=None, restart_rate=1.0)",
        "noise schedule": "Exponential(rate=0.05)",
        "post-processing": "[Momentum(beta=0.9), LaplacianSmoothing(sigma=1.0, "
        "per_parameter=False)]",
        "sampling": "Poisson()",
        "gradient engine": "bookkeeping",
    }
    assert (tmp_path / "config.yaml").read_text().count("Momentum") == 1
