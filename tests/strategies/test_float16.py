"""float16 by Trainer(precision="16-mixed"): one constant loss scale, whatever the records do."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, CubicNewton, Diff2, FullBatch
from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import RecordPasses
from lightning_dp.strategies.step import LOSS_SCALE
from tests.zoo import Classifier, flat, private, records

ENGINES = ("layers", "records", "ghost", "one_by_one")


class Scaler(torch.amp.GradScaler):
    """Raises where a loss scale would follow the gradients, or a step be left out."""

    def scale(self, outputs):
        raise AssertionError

    unscale_ = step = update = scale


def half():
    """The precision of Trainer(precision="16-mixed") on a GPU: on the CPU Lightning takes bfloat16."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", Scaler("cpu"))]}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def gradients(model, engine, batch, *, dtype=torch.float16, size=None, divisor=1.0):
    """Norms of the records, and the clipped sum."""
    x, y = batch
    weight = torch.where(x[:, 0] > 50, 1e3, 1.0)  # the loss of a record out of range

    def loss(batch):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = model(batch[0])
            found = nn.functional.cross_entropy(scores, batch[1], reduction="none")
            return (found * batch[2]).mean() / divisor

    scale = LOSS_SCALE if dtype == torch.float16 else 1.0
    with RecordPasses(model, list(model.parameters()), engine, loss_scale=scale) as passes:
        value = passes.forward(loss, (x, y, weight), len(x))
        assert value.isfinite()
        passes.backward(value, divisor=divisor)
        found = passes.take(divisor)
        return found.norms(), bounded_sum(found, 0.5).value


@pytest.mark.parametrize("divisor", [1.0, 8.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_those_of_float32(engine, divisor):
    model, batch = net(), records(30)

    norms, total = gradients(model, engine, batch, divisor=divisor)

    exact, expected = gradients(model, engine, batch, dtype=torch.float32, divisor=divisor)
    torch.testing.assert_close(norms, exact, rtol=5e-3, atol=1e-5)
    assert (total - expected).norm() < 2e-3 * expected.norm()
    assert not total.equal(expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_small_gradients_are_no_zeros(engine):
    """Without the scale, these are below what float16 can hold."""

    def norms(scale):
        model, (x, y) = net(), records(30)

        def loss(batch):
            with torch.autocast("cpu", torch.float16):
                return nn.functional.cross_entropy(model(batch[0]), batch[1]) * 1e-7

        with RecordPasses(model, list(model.parameters()), engine, loss_scale=scale) as passes:
            return passes.run(loss, (x, y), 30).norms() * 1e7

    exact, _ = gradients(net(), engine, records(30), dtype=torch.float32)
    found = norms(LOSS_SCALE)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=1e-3)
    assert (norms(1.0) - exact).norm() > 20 * (found - exact).norm()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_record_that_overflows_contributes_zero_and_moves_nobody(engine):
    x, y = records(30)
    x[6, 0] = 100.0  # its loss is multiplied

    norms, total = gradients(net(), engine, (x, y))
    rest = torch.arange(30) != 6
    others, expected = gradients(net(), engine, (x[rest], y[rest]))

    assert not norms[6].isfinite() and others.isfinite().all()
    torch.testing.assert_close(norms[rest], others, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(total, expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_overflows_depends_on_the_record_alone(engine):
    """Not on how many others its mean is over, or on accumulation: else it would be back without them."""
    x, y = records(200)
    x[0, 0] = 100.0

    for size, divisor in ((1, 1.0), (2, 1.0), (200, 1.0), (200, 64.0)):
        norms, _ = gradients(net(), engine, (x[:size], y[:size]), divisor=divisor)
        assert not norms[0].isfinite()
        assert norms[1:].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_range_of_float32_ends_for_a_record_wherever_it_is(engine):
    """Its gradients are kept in float32: the scale of the mean must not be put onto them."""

    def norm(size):
        model, x = nn.Linear(1, 1, bias=False), torch.ones(size, 1)
        x[0] = 5e34
        with RecordPasses(model, list(model.parameters()), engine, loss_scale=LOSS_SCALE) as passes:
            return passes.run(lambda batch: model(batch[0]).mean(), (x,), size).norms()[0]

    assert norm(2).isfinite() == norm(1000).isfinite()


class Overflows(Classifier):
    """The loss of every third record leaves the range of float16."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return (losses * torch.where(y == 0, 1e5, 1.0)).mean()


def fit(make_trainer, model, *, options=None, callbacks=(), ckpt_path=None, size=24, **privacy):
    callback = private(**privacy)
    more = {"max_steps": 4, **(options or half())}
    trainer = make_trainer(callbacks=[*callbacks, callback], **more)
    loader = DataLoader(TensorDataset(*records(240)), size, shuffle=True)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return callback, trainer


def test_no_step_is_left_out_and_epsilon_is_that_of_every_run(make_trainer):
    model = Overflows(net())
    exact, _ = fit(make_trainer, Classifier(net()), options={"max_steps": 4})

    found, trainer = fit(make_trainer, model)

    assert trainer.global_step == found.steps == 4
    assert found.epsilon == exact.epsilon
    assert flat(model).isfinite().all()
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "settings",
    [{}, {"estimator": Diff2(restart_every=2)}, {"estimator": CubicNewton(1.0, 1.0, 2, keep=20)}],
    ids=["dp-sgd", "diff2", "cubic newton"],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_is_the_run_in_float32_up_to_rounding(settings, accumulate, make_trainer):
    runs = []
    for kind in (half(), {}):
        model = Classifier(net())
        fit(
            make_trainer,
            model,
            options={**kind, "max_steps": 4, "accumulate_grad_batches": accumulate},
            size=math.ceil(240 / accumulate),
            sampling=FullBatch(),
            noise_multiplier=1e-6,
            **settings,
        )
        runs.append(flat(model))
    moved = (runs[1] - flat(net())).norm()
    assert 0 < (runs[0] - runs[1]).norm() < 0.02 * moved


@pytest.mark.parametrize("kind", [Classifier, Overflows])
def test_comparisons_find_nothing_in_it(kind, make_trainer):
    """Among them those with other records: an overflow there is theirs alone, too."""
    found, trainer = fit(
        make_trainer, kind(net()), checks=Checks(), options={**half(), "max_steps": 12}
    )
    assert found.steps == 12
    assert trainer.strategy.private_run.isolation.startswith("compared on synthetic samples")


def test_all_records_overflow_and_the_run_trains_on_noise(make_trainer):
    class All(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e5

    model = All(net())
    found, _ = fit(make_trainer, model, noise_multiplier=1e-6, sampling=FullBatch())
    assert found.steps == 4
    assert (flat(model) - flat(net())).norm() < 1e-6


def test_after_the_fit_the_plugin_has_its_scaler_as_it_was(make_trainer):
    options = half()
    (plugin,) = options["plugins"]
    _, trainer = fit(make_trainer, Classifier(net()), options=options)
    assert trainer.precision_plugin is plugin
    assert plugin.scaler.get_scale() == 2.0**16


def test_it_resumes_whatever_scale_was_saved(make_trainer, tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {**half(), "max_steps": 2, "enable_checkpointing": True}
    fit(make_trainer, Classifier(net()), options=options, callbacks=[saving])
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=False)
    assert "MixedPrecision" not in checkpoint
    checkpoint["MixedPrecision"] = Scaler("cpu", init_scale=4.0).state_dict()
    torch.save(checkpoint, tmp_path / "scaled.ckpt")

    found, trainer = fit(make_trainer, Classifier(net()), ckpt_path=tmp_path / "scaled.ckpt")

    assert trainer.global_step == found.steps == 4
