"""DIFF2 beside what else is in a training run: dropout, metrics, logs, schedules, averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, FullBatch, Momentum
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.estimators import Diff2, Storm
from lightning_dp.schedules import Exponential

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


def private(**options: Any) -> DifferentialPrivacy:
    return DifferentialPrivacy(
        **{
            "target_delta": 1e-5,
            "noise_multiplier": 1.0,
            "estimator": Diff2(3),
            "sampling": FullBatch(),
            "checks": Checks(dry_run=False, comparisons=False),
            **options,
        }
    )


def test_dropout_is_the_same_at_both_points_and_records_count_once(classifier, blobs, make_trainer):
    masks: list[Tensor] = []  # outside of the module, whose second passes leave no trace in it

    class Counting(classifier):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
            self.seen: list[int] = []
            self.net[1].register_forward_hook(lambda m, i, o: masks.append((o != 0) | (i[0] == 0)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.accuracy(torch.zeros(len(batch[1]), 3), batch[1])
            self.log("accuracy", self.accuracy, on_step=True)
            self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append(int(self.accuracy.tp.sum() + self.accuracy.fn.sum()))

    model = Counting()
    privacy = private()  # checks, which are off in it, would be seen by the hook, too
    make_trainer(max_epochs=6, callbacks=[privacy]).fit(model, DataLoader(blobs, 240))

    # Steps 0 and 3 look once, the others twice.
    assert len(masks) == 10
    for first, second in ((1, 2), (3, 4), (6, 7), (8, 9)):
        assert torch.equal(masks[first], masks[second])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[4], masks[5])
    assert model.seen == [240] * 6


def test_noise_schedule_and_momentum_compose_with_it(classifier, mlp, blobs, make_trainer):
    """z_t is the schedule's times the kind of step's; momentum averages the estimates."""
    privacy = private(noise_schedule=Exponential(rate=0.5), postprocessing=[Momentum(0.9)])
    make_trainer(max_epochs=4, callbacks=[privacy]).fit(classifier(mlp()), DataLoader(blobs, 240))
    ratio = Diff2(3).relative_noise(1)
    charged = [event.noise_multiplier for event, _ in privacy._run.ledger.history()]
    shape = [torch.tensor(-0.5 * t).double().exp().item() for t in range(4)]
    expected = [shape[0], ratio * shape[1], ratio * shape[2], shape[3]]
    assert charged == pytest.approx(expected, rel=1e-6)


def test_averaged_iterates_are_lightnings_own_callback(classifier, mlp, blobs, make_trainer):
    """The mean of the iterates, a function of released values: private as they are."""
    model = classifier(mlp())
    iterates: list[Tensor] = []

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            iterates.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            return result

    model.make_optimizer = lambda params: Keep(params, lr=0.1)
    trainer = make_trainer(max_epochs=5, callbacks=[private(), WeightAveraging()])
    trainer.fit(model, DataLoader(blobs, 240))
    final = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(final, torch.stack(iterates).mean(0), rtol=0, atol=1e-6)


def test_bfloat16_autocast(classifier, mlp, blobs, make_trainer):
    privacy = private(noise_multiplier=0.0)
    model, exact = classifier(mlp()), classifier(mlp())
    options = {"max_epochs": 5}
    make_trainer(callbacks=[privacy], precision="bf16-mixed", **options).fit(
        model, DataLoader(blobs, 240)
    )
    make_trainer(callbacks=[private(noise_multiplier=0.0)], **options).fit(
        exact, DataLoader(blobs, 240)
    )
    for rough, fine in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(rough, fine, rtol=0, atol=0.02)


# -- the second pass of a difference leaves no trace in the user's module ------------------------


class Counts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("in_place", torch.zeros(1))
        self.register_buffer("assigned", torch.zeros(1))
        self.plain, self.seen = 0, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.in_place += 1
        self.assigned = self.assigned + 1
        self.plain += 1
        self.seen.append(batch_idx)
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_counters_count_steps(tmp_path):
    model, data = Counts(), TensorDataset(torch.randn(256, 8), torch.randint(4, (256,)))
    privacy = DifferentialPrivacy(
        noise_multiplier=1e-3,
        target_delta=1e-5,
        ledger_dir=tmp_path,
        estimator=Diff2(restart_every=3),
    )
    trainer = L.Trainer(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[privacy],
    )
    trainer.fit(model, DataLoader(data, batch_size=32))
    assert model.global_step == 6
    assert (model.in_place.item(), model.assigned.item(), model.plain) == (6, 6, 6)
    assert len(model.seen) == 6


# -- a run with differences, resumed in any round, is the run that was not interrupted -----------


STEPS = 6


def options(estimator: Any, noise: float = 0.0) -> dict[str, Any]:
    return {
        "estimator": estimator,
        "noise_multiplier": noise,
        "sampling": FullBatch(),
        "trainer": {"max_epochs": STEPS},
        "batch_size": 25,
    }


@pytest.mark.parametrize("estimator", [Diff2(3, 1.2, 0.5), Storm(0.3)])
def test_resume_from_every_round(fit, tmp_path, estimator):
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole = fit(callbacks=(saving,), **options(estimator)).model.flat
    for step in (1, 2, 3, 4) if isinstance(estimator, Diff2) else (1, 5):
        path: Path = tmp_path / f"step={step}.ckpt"
        resumed = fit(ckpt_path=path, **options(estimator))
        torch.testing.assert_close(resumed.model.flat, whole, rtol=0, atol=0)
        assert resumed.privacy._run.mechanism.step == STEPS


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("step", [3, 4, 5])
def test_the_noisy_estimate_is_carried_over(fit, tmp_path, step):
    """The checkpoint holds v with its noise, and the point where it was asked for."""
    estimator = Diff2(3, 1.2, 0.5)
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    before = fit(callbacks=(saving,), **options(estimator, noise=1.0)).privacy
    checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
    state = checkpoint["lightning_dp"]["mechanism"]
    weights = torch.cat([part.flatten() for part in checkpoint["state_dict"].values()])
    moved = weights - state["estimator"]["point"]
    torch.testing.assert_close(moved, -0.3 * state["estimator"]["estimate"])
    assert state["step"] == step

    path = tmp_path / f"step={step}.ckpt"
    resumed = fit(ckpt_path=path, **options(estimator, noise=1.0)).privacy
    assert resumed.steps == before.steps + STEPS - step  # both runs count
    assert resumed.epsilon > before.epsilon


def test_another_interval_is_another_run(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(callbacks=(saving,), **options(Diff2(3)))
    with pytest.raises(ValueError, match=r"estimator differs.*restart_every=3.*restart_every=4"):
        fit(ckpt_path=tmp_path / "step=4.ckpt", **options(Diff2(4)))


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_larger_batches_of_restarts_go_on_where_they_were(fit, tmp_path, workers):
    """A resume, also in the middle of an epoch, draws each step at the rate that it is charged."""
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {
        "estimator": Diff2(3, restart_rate=5.0),
        "noise_multiplier": 2.0,
        "workers": workers,
        "trainer": {"max_epochs": 2},
    }
    fit(callbacks=(saving,), **options)
    for step in (2, 6):
        resumed = fit(ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        sizes = [len(batch) for batch in resumed.model.batches]
        is_whole = [size == 60 for size in sizes]  # 12 on average, 60 at restarts
        assert is_whole == [t % 3 == 0 for t in range(step, 10)]
