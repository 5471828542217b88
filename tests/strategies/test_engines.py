"""Engines in a Trainer: each record alone, all of them alike, and the next one where one refuses."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, CubicNewton, Diff2, FullBatch, Poisson
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.estimators import Storm
from lightning_dp.gradients import UnsupportedModelError, engines
from lightning_dp.gradients.layer_calls import LayerCalls
from tests.zoo import mlp

C = 0.3
N = 10
SEEN: list[float] = [0.0]  # outside of every model


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        self.net = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.after(self.net(x)), y)

    @staticmethod
    def after(x: Tensor) -> Tensor:
        return x

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def records(count: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def clipped_by_a_loop(model: L.LightningModule, data: Any) -> Tensor:
    """Run the records one after the other, each in a copy of the model, and add them up."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for record in data:
        alone = copy.deepcopy(model)
        batch = torch.utils.data.default_collate([record])
        loss = alone.training_step(batch, 0)
        SEEN[:] = [0.0]
        loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        flat = torch.cat([grad.double().flatten() for grad in grads])
        if bool(flat.isfinite().all()):
            total += flat * min(1.0, C / float(flat.norm()))
    return total


ESTIMATORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "diff2": lambda: Diff2(3, C, 0.5, split=2.0),
    "storm": lambda: Storm(momentum=0.3, max_grad_norm=C),
    "cubic_newton": lambda: CubicNewton(
        strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=3, max_grad_norm=C, keep=40
    ),
}


@pytest.fixture
def fit(make_trainer):
    def run(
        model: L.LightningModule,
        data: Any = None,
        *,
        batch_size: int = 4,
        callbacks: Sequence[L.Callback] = (),
        trainer: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        settings = {
            "noise_multiplier": 0.0,
            "max_grad_norm": C,
            "target_delta": 1e-5,
            "sampling": FullBatch(),
            "engine": "one_by_one",
        }
        privacy = DifferentialPrivacy(**{**settings, **options})
        arguments = {"max_steps": 1, "callbacks": [privacy, *callbacks], **(trainer or {})}
        made = make_trainer(**arguments)
        data = records() if data is None else data
        made.fit(model, DataLoader(data, batch_size))
        return made, privacy

    return run


@pytest.fixture
def released_sum(fit, weights):
    """lr = 1 and q = 1, so one update times N is the released sum."""

    def run(model: L.LightningModule, data: Any = None, **options: Any) -> Tensor:
        before = weights(model).double()
        fit(model, data, **options)
        return (before - weights(model).double()) * len(records() if data is None else data)

    return run


# -- sums ----------------------------------------------------------------------------------------


UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False)}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_makes_the_same_steps_with_every_engine(name, fit, weights):
    found = []
    for engine in ("layers", "one_by_one", "ghost", "hooks"):
        if engine == "hooks" and name == "cubic_newton":
            continue  # whose products with Hessians need no gradients of records
        model, estimator = Base(), ESTIMATORS[name]()
        asked = {} if estimator is None else {"estimator": estimator, "max_grad_norm": None}
        steps = 4 if name in ("diff2", "cubic_newton") else 2  # which begin again after three
        trainer = {"trainer": {"max_steps": steps}}
        _, privacy = fit(model, engine=engine, seed=1, **asked, **UNCHECKED, **trainer)
        found.append(weights(model))
        torch.testing.assert_close(found[0], found[-1], rtol=0, atol=1e-5)
        if (name, engine) == ("diff2", "ghost"):
            said = "layers, since ghost does not cover this model: The estimator"
            assert privacy.report().mechanism["gradient engine"].startswith(said)


class Scaled(Base):
    """A parameter of its own, in a forward pass that logs."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.log("mean", x.mean())
        return self.net(x * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


def test_a_module_that_runs_again_for_each_record_may_log(fit, weights):
    found = [Scaled(), Scaled()]
    for model, engine in zip(found, ("hooks", "auto"), strict=True):
        fit(model, engine=engine, **UNCHECKED)
    torch.testing.assert_close(*map(weights, found), rtol=0, atol=2e-6)


class Remembers(Base):
    """Everything that may pass from one record to the next."""

    def build(self) -> None:
        super().build()
        SEEN[:] = [0.0]
        self.last, self.queue = 0.0, deque([0.0], maxlen=4)
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("largest", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.mean.update(loss.detach())
        self.largest.copy_(torch.maximum(self.largest, loss.detach()))
        kept = self.last + sum(self.queue) + SEEN[-1]
        self.last = float(loss)
        self.queue.append(float(loss))
        SEEN.append(float(loss))
        seen = self.trainer.callback_metrics.get("seen", torch.zeros(())) if self._trainer else 0
        self.log("seen", loss.detach(), on_step=True)
        return loss * (1 + self.largest + self.mean.compute() + seen + kept)

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer:
            super().log(*args, **kwargs)


def test_no_record_sees_what_another_left(released_sum):
    """The oracle begins with a copy of the model for each record."""
    expected = clipped_by_a_loop(Remembers(), records())
    model = Remembers()
    total = released_sum(model, checks=Checks(dry_run=False, comparisons=False))
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)
    assert not model.largest and not model.last and sum(model.queue) == 0


@pytest.mark.parametrize("own", [False, True])
def test_each_record_draws_anew_and_both_points_of_its_difference_the_same(own, fit):
    """From the global generator, and from one of the module."""
    draws: SimpleQueue[float] = SimpleQueue()  # no snapshot holds what is in it

    class Draws(Base):
        def build(self) -> None:
            super().build()
            self.generator = torch.Generator().manual_seed(0) if own else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            draws.put(float(torch.rand((), generator=self.generator)))
            return super().training_step(batch, batch_idx)

    estimator = Diff2(9, C, 0.5, split=2.0)
    options = {**UNCHECKED, "trainer": {"max_steps": 2}, "batch_size": N}
    fit(Draws(), estimator=estimator, max_grad_norm=None, **options)
    drawn = [draws.get() for _ in range(draws.qsize())]
    assert drawn[N::2] == drawn[N + 1 :: 2] and len(set(drawn)) == 2 * N


def test_what_a_record_draws_does_not_depend_on_the_others(released_sum):
    class Draws(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            torch.randn(int(x[0, 0].abs() * 100))  # so many numbers that depend on the record
            if x[0, 0] > 100:
                torch.manual_seed(0)
            return F.cross_entropy(self.net(x + torch.randn_like(x)), y)

    data = records()
    other = TensorDataset(data.tensors[0].clone(), data.tensors[1])
    other.tensors[0][2] = 200.0
    sums = []
    for each in (data, other):
        model = Draws()
        torch.manual_seed(5)
        sums.append(released_sum(model, each))
    assert float((sums[0] - sums[1]).norm()) <= 2 * C + 1e-5


def test_poisson_batches_with_empty_chunks(fit):
    """Stand-in records run, and leave nothing."""
    trainer, privacy = fit(
        Base(),
        sampling=Poisson(),
        noise_multiplier=1.0,
        batch_size=1,
        trainer={"max_steps": 12, "accumulate_grad_batches": 2},
    )
    assert trainer.global_step == 12 and privacy.report().steps == 12


# -- what is told of the records together: in logs, metrics, hooks and the report ----------------


def test_what_is_logged_and_counted_is_that_of_the_batch(fit):
    class Logs(Base):
        def build(self) -> None:
            super().build()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            output = self.net(x)
            loss = F.cross_entropy(output, y)
            self.accuracy(output, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log_dict({"loss": loss, "count": len(x)}, on_step=True, on_epoch=True)
            self.log("total", float(len(x)), reduce_fx="sum", batch_size=len(x))
            return {"loss": loss, "output": output.detach()}

    seen = []
    for engine in ("layers", "one_by_one"):
        trainer, _ = fit(Logs(), engine=engine, sampling=FullBatch(), batch_size=N)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if "privacy" not in k}
        seen.append({k: round(v, 5) for k, v in metrics.items() if "count" not in k})
    assert seen[0] == seen[1]
    assert {"accuracy_step", "accuracy_epoch", "loss_step", "total"} <= set(seen[0])


def test_a_metric_counts_the_rows_of_the_batch_whatever_its_state_is(fit):
    class Pearson(Base):
        def build(self) -> None:
            super().build()
            self.pearson = torchmetrics.PearsonCorrCoef()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.pearson.update(batch[0].flatten(), batch[0].flatten().square())
            return super().training_step(batch, batch_idx)

    model, x = Pearson(), records().tensors[0].flatten()
    fit(model, sampling=FullBatch(), batch_size=N)
    expected = torchmetrics.functional.pearson_corrcoef(x, x.square())
    torch.testing.assert_close(model.pearson.compute(), expected)


# -- a charged step whose batch an engine cannot answer: the next one does, once -----------------


class Fussy(LayerCalls):
    """Refuses a large number, at one of the places where an engine can refuse."""

    name, place = "fussy", "backward"

    def _refuse(self, place: str, *, is_odd: bool) -> None:
        if place == self.place and is_odd:
            raise UnsupportedModelError("net (Linear) saw large numbers. Take small ones.")

    def __init__(self, module: nn.Module, params: Any, **how: Any) -> None:
        super().__init__(module, params, **how)
        self._odd = False
        layer = next(part for part in module.modules() if isinstance(part, nn.Linear))

        def look(layer: nn.Module, args: Any) -> None:
            self._odd = bool((args[0] > 50).any())
            self._refuse("forward", is_odd=self._odd)

        self._hooks.add(layer, layer.register_forward_pre_hook, look)

    def backward(self, loss: Tensor, **how: Any) -> None:
        self._refuse("backward", is_odd=self._odd)
        super().backward(loss, **how)

    def take(self, scale: float) -> Any:
        self._refuse("take", is_odd=self._odd)
        return super().take(scale)


class Fussier(Fussy):
    def _refuse(self, place: str, *, is_odd: bool) -> None:
        if place == "take" and is_odd:
            raise UnsupportedModelError("net (Linear) saw what nobody takes. Cure.")


class Counts(Base):
    """Counts, drops and logs."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.4), nn.Linear(5, 3))
        self.seen, self.metric = 0, torchmetrics.MeanMetric()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        self.steps += 1
        self.metric.update(float(batch_idx))
        self.log("steps", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class ByHand(Counts):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == 2:
            self.optimizers().step()


@pytest.fixture
def climb(fit, monkeypatch):
    """A fit of two steps in three chunks, of which the second has a large number."""

    def run(place: str | None, model: Any = Counts, below: Any = LayerCalls) -> Any:
        monkeypatch.setattr(Fussy, "place", place)
        monkeypatch.setitem(engines._LADDERS, "auto", (Fussy, LayerCalls))
        begin = engines.EngineChoice.__init__

        def with_rungs(self: Any, name: str, **how: Any) -> None:
            begin(self, name, **how)
            self._rungs = (Fussy, below)

        monkeypatch.setattr(engines.EngineChoice, "__init__", with_rungs)
        data = records(24)
        data.tensors[0][12, 3] = 60.0
        made, options = model(), {"trainer": {"max_epochs": 2, "max_steps": -1}, **UNCHECKED}
        trainer, privacy = fit(made, data, batch_size=8, engine="auto", seed=3, **options)
        return made, privacy.report(), trainer

    return run


@pytest.mark.parametrize("place", ["forward", "backward", "take"])
def test_a_batch_is_answered_by_the_next_engine_as_if_by_the_first(place, climb):
    module, report, trainer = climb(place)
    expected, plain, usual = climb(None)
    for (name, ours), theirs in zip(
        module.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        # Two engines round apart; another draw of dropout or of noise is another number.
        is_same = torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-7)
        assert is_same or (place == "forward" and name == "steps"), name
    assert report.mechanism["gradient engine"] == "fussy"  # a batch's numbers are not in the report
    assert (report.epsilon, report.steps) == (plain.epsilon, plain.steps)
    assert trainer.global_step == usual.global_step == 2
    if place != "forward":  # where training_step ended on its way, it begins once more
        assert module.seen == expected.seen
        assert trainer.callback_metrics["steps"] == usual.callback_metrics["steps"]


@pytest.mark.parametrize(
    ("model", "below", "match"),
    [
        (ByHand, LayerCalls, "saw large numbers"),  # training_step cannot run again
        (Counts, Fussier, r"nobody takes.*easier: engine='fussy' names it\."),
    ],
)
def test_without_a_next_engine_the_run_ends(model, below, match, climb):
    with pytest.raises(Exception, match=match):
        climb("backward", model, below)


# -- refused -------------------------------------------------------------------------------------


class Gain(nn.Module):
    """A layer of two inputs that no engine has a rule of."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * self.gain


def build_gain(self: Any) -> None:
    self.net = nn.Sequential(Gain(), nn.Linear(6, 3))


def twice_differentiable_nowhere(x: Tensor) -> Tensor:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient * ctx.saved_tensors[0]

    return Once.apply(x)


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({"automatic_optimization": False}, {}, "Use automatic optimization"),
        (
            {"after": staticmethod(twice_differentiable_nowhere)},
            {"estimator": ESTIMATORS["cubic_newton"](), "max_grad_norm": None},
            "an estimator without Hessians",
        ),
        # A named engine does not fall back on another one.
        ({"build": build_gain}, {"engine": "layers"}, "net.0.*engine"),
    ],
)
def test_what_an_engine_does_not_do_is_refused_with_a_cure(change, options, match, fit):
    with pytest.raises((MisconfigurationException, UnsupportedModelError), match=match):
        fit(type("Changed", (Base,), change)(), **options)
