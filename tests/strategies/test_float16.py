"""float16 by Trainer(precision="16-mixed"): one constant loss scale, whatever the records do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import Checks, CubicNewton, Diff2, FullBatch
from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import RecordPasses
from lightning_dp.strategies.step import LOSS_SCALE
from tests.zoo import Classifier, flat, private, records

ENGINES = pytest.mark.parametrize("engine", ("layers", "records", "ghost", "one_by_one"))


class Scaler(torch.amp.GradScaler):
    """Raises where a loss scale would follow the gradients, or a step be left out."""

    def scale(self, outputs: Any) -> Any:
        raise AssertionError

    unscale_ = step = update = scale


def half() -> dict[str, Any]:
    """The precision of Trainer(precision="16-mixed") on a GPU: on the CPU Lightning takes bfloat16."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", Scaler("cpu"))]}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def gradients(
    engine: str, batch: Any, *, dtype: Any = torch.float16, divisor: float = 1.0,
    factor: float = 1.0, scale: float = LOSS_SCALE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norms of the records, and the clipped sum; a first feature above 50 makes a loss overflow."""
    model, (x, y) = net(), batch

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return (found * batch[2]).mean() * factor / divisor

    scale = scale if dtype == torch.float16 else 1.0
    weight = torch.where(x[:, 0] > 50, 1e3, 1.0)
    with RecordPasses(model, list(model.parameters()), engine, loss_scale=scale) as passes:
        value = passes.forward(loss, (x, y, weight), len(x))
        assert value.isfinite()
        passes.backward(value, divisor=divisor)
        found = passes.take(divisor)
        return found.norms() / factor, bounded_sum(found, 0.5).value


@pytest.mark.parametrize("divisor", [1.0, 8.0])
@ENGINES
def test_gradients_are_those_of_float32(engine, divisor):
    norms, total = gradients(engine, records(30), divisor=divisor)
    exact, expected = gradients(engine, records(30), dtype=torch.float32, divisor=divisor)
    torch.testing.assert_close(norms, exact, rtol=5e-3, atol=1e-5)
    assert (total - expected).norm() < 2e-3 * expected.norm()
    assert not total.equal(expected)


@ENGINES
def test_small_gradients_are_no_zeros(engine):
    """Without the scale, these are below what float16 can hold."""
    exact, _ = gradients(engine, records(30), dtype=torch.float32)
    found, _ = gradients(engine, records(30), factor=1e-7)
    unscaled, _ = gradients(engine, records(30), factor=1e-7, scale=1.0)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=1e-3)
    assert (unscaled - exact).norm() > 20 * (found - exact).norm()


@ENGINES
def test_what_overflows_depends_on_the_record_alone_and_moves_nobody(engine):
    """Not on how many others its mean is over, or on accumulation: else it would be back without them."""
    x, y = records(200)
    x[0, 0] = 100.0
    for size, divisor in ((1, 1.0), (2, 1.0), (200, 1.0), (200, 64.0)):
        norms, total = gradients(engine, (x[:size], y[:size]), divisor=divisor)
        assert not norms[0].isfinite() and norms[1:].isfinite().all()
    others, expected = gradients(engine, (x[1:], y[1:]), divisor=64.0)
    torch.testing.assert_close(norms[1:], others, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(total, expected, rtol=5e-3, atol=1e-4)


@ENGINES
def test_the_range_of_float32_ends_for_a_record_wherever_it_is(engine):
    """Its gradients are kept in float32: the scale of the mean must not be put onto them."""

    def norm(size: int) -> Tensor:
        model, x = nn.Linear(1, 1, bias=False), torch.ones(size, 1)
        x[0] = 5e34
        with RecordPasses(model, list(model.parameters()), engine, loss_scale=LOSS_SCALE) as passes:
            return passes.run(lambda batch: model(batch[0]).mean(), (x,), size).norms()[0]

    assert norm(2).isfinite() == norm(1000).isfinite()


# -- fits ------------------------------------------------------------------------------------------


class Overflows(Classifier):
    """The loss of every third record leaves the range of float16, or that of all."""

    all_records = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return (losses * torch.where((y == 0) | self.all_records, 1e5, 1.0)).mean()


def test_no_step_is_left_out_and_epsilon_is_that_of_every_run(fit):
    exact, found, model = private(), private(), Overflows(net())
    fit(Classifier(net()), exact, max_steps=4)
    trainer = fit(model, found, max_steps=4, **half())
    assert trainer.global_step == found.steps == 4
    assert found.epsilon == exact.epsilon
    assert flat(model).isfinite().all()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**16  # as it was


@pytest.mark.parametrize(
    "settings",
    [{}, {"estimator": Diff2(restart_every=2)}, {"estimator": CubicNewton(1.0, 1.0, 2, keep=20)}],
    ids=["dp-sgd", "diff2", "cubic newton"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_the_run_in_float32_up_to_rounding(settings, accumulate, blobs, fit):
    runs, loader = [], DataLoader(blobs, math.ceil(240 / accumulate))
    options = {"max_steps": 4, "accumulate_grad_batches": accumulate}
    for kind in (half(), {}):
        model = Classifier(net())
        privacy = private(sampling=FullBatch(), noise_multiplier=1e-6, **settings)
        fit(model, privacy, loader, **kind, **options)
        runs.append(flat(model))
    assert 0 < (runs[0] - runs[1]).norm() < 0.02 * (runs[1] - flat(net())).norm()


@pytest.mark.parametrize("kind", [Classifier, Overflows])
def test_comparisons_find_nothing_in_it(kind, fit):
    """Among them those with other records: an overflow there is theirs alone, too."""
    privacy = private(checks=Checks())
    trainer = fit(kind(net()), privacy, max_steps=12, **half())
    assert privacy.steps == 12
    assert trainer.strategy.private_run.isolation.startswith("compared on synthetic samples")


def test_all_records_overflow_and_the_run_trains_on_noise(fit):
    model, privacy = Overflows(net()), private(noise_multiplier=1e-6, sampling=FullBatch())
    model.all_records = True
    fit(model, privacy, max_steps=4, **half())
    assert privacy.steps == 4
    assert (flat(model) - flat(net())).norm() < 1e-6


def test_it_resumes_whatever_scale_was_saved(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    on = {"max_steps": 2, "enable_checkpointing": True, **half()}
    fit(Classifier(net()), private(), callbacks=[saving], **on)
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=False)
    assert "MixedPrecision" not in checkpoint
    checkpoint["MixedPrecision"] = Scaler("cpu", init_scale=4.0).state_dict()
    torch.save(checkpoint, tmp_path / "scaled.ckpt")

    privacy = private()
    path = tmp_path / "scaled.ckpt"
    trainer = fit(Classifier(net()), privacy, ckpt_path=path, max_steps=4, **half())
    assert trainer.global_step == privacy.steps == 4
