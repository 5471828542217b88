"""After a fit, however it ended, model and Trainer are plain ones; so is every copy, with the ledger."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import signal
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from lightning_dp import Checks
from lightning_dp._noise import NoiseSource
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.strategies.update_guard import StepGuard
from tests.strategies.conftest import HOOKS
from tests.zoo import flat, private

# -- models ---------------------------------------------------------------------------------------


class Planted(Exception):
    pass


@pytest.fixture
def failing(classifier):
    """A classifier that can be told to fail in its fourth step, at different places."""

    class Fails(classifier):
        error, where = None, "after forward"

        def fail(self, where, batch_idx=3):
            is_fit = isinstance(self._trainer, L.Trainer)  # not the dry run
            if self.error is not None and is_fit and batch_idx == 3 and where == self.where:
                raise self.error

        def training_step(self, batch, batch_idx):
            self.fail("before forward", batch_idx)
            loss = super().training_step(batch, batch_idx)
            self.fail("after forward", batch_idx)
            return loss

        def on_after_backward(self):
            self.fail("after backward")

        def on_before_optimizer_step(self, optimizer):
            self.fail("before the step")

        def test_step(self, batch, batch_idx):
            self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    return Fails


@pytest.fixture(autouse=True)
def keyboard():
    """Lightning ignores Ctrl+C for the rest of the process once it was pressed."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything a fit could leave on modules and parameters, by name."""
    found: dict[str, Any] = {"type": type(model), "state": list(model.state_dict())}
    for name, part in model.named_modules():
        counts = [len(getattr(part, hooks)) for hooks in HOOKS]
        found[name] = type(part), set(vars(part)), counts, part.training
    for name, param in model.named_parameters():
        hooks = len(param._backward_hooks or ()), len(param._post_accumulate_grad_hooks or ())
        found[name] = type(param), set(vars(param)), hooks, param.requires_grad
    return found


@pytest.mark.parametrize(
    ("where", "error", "checks"),
    [
        ("", None, True),
        ("", None, False),
        ("before forward", Planted(), False),
        ("after forward", KeyboardInterrupt(), False),
        ("after backward", Planted(), False),
        ("before the step", KeyboardInterrupt(), False),
    ],
)
def test_a_fit_leaves_what_a_plain_fit_leaves(where, error, checks, failing, mlp, loader, fit):
    privacy, models = private(checks=Checks(dry_run=checks, comparisons=checks)), []
    for ours in (None, privacy):
        models.append(failing(mlp()))
        models[-1].error, models[-1].where = error, where
        options = {"max_steps": 6, "limit_val_batches": 1}
        if error is None:
            fit(models[-1], ours, validate=loader, **options)
            continue
        with pytest.raises((Planted, SystemExit)):
            fit(models[-1], ours, validate=loader, **options)

    assert privacy.steps == 6 if error is None else 0 < privacy.steps <= 4
    assert traces(models[1]) == traces(models[0])
    # And the model can be trained again, plainly and privately.
    models[1].error, spent = None, privacy.steps
    fit(models[1], None, max_steps=2)
    fit(models[1], privacy, max_steps=2)
    assert privacy.steps == spent + 2


def test_gradients_of_the_last_step_are_private_or_gone(classifier, mlp, fit):
    model = classifier(mlp())
    fit(model, private(noise_multiplier=1e6), max_steps=3)
    left = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(float(grad.abs().mean()) > 1e3 for grad in left)


@pytest.mark.parametrize("checks", [Checks(), Checks(dry_run=False, comparisons=False)])
def test_a_batch_is_free_when_the_next_one_is_read(checks, classifier, mlp, loader, fit):
    handed_over, alive = [], []

    class Records(Dataset):
        def __len__(self):
            return len(loader.dataset)

        def __getitem__(self, index):
            alive.append(sum(each() is not None for each in handed_over))
            return loader.dataset[index]

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            handed_over.append(weakref.ref(batch[0]))

    gc.disable()  # what stands in a circle is not free
    try:
        data = DataLoader(Records(), batch_size=24)
        fit(classifier(mlp()), private(checks=checks), data, max_steps=12, callbacks=[Watch()])
    finally:
        gc.enable()
    # A comparison reads records again, and keeps its batch until the next step.
    assert len(handed_over) == 12 and max(alive) <= (1 if checks.comparisons else 0)


def test_released_gradients_are_free_when_they_are_zeroed(classifier, mlp, fit):
    released, free = [], []

    class Watch(L.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            found = [param.grad for param in module.parameters()]
            released[:] = [weakref.ref(each) for each in found if each is not None]

        def on_before_backward(self, trainer, module, loss):
            free.append(len(released) > 0 and all(each() is None for each in released))

    checks = Checks(dry_run=False, comparisons=False)
    fit(classifier(mlp()), private(checks=checks), max_steps=6, callbacks=[Watch()])
    assert free == [False, *[True] * 5]  # none were released before the first


def test_the_same_trainer_validates_tests_and_predicts_before_and_after(
    privacy, failing, mlp, loader, make_trainer
):
    held_out, model = DataLoader(loader.dataset, batch_size=24), failing(mlp())
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    def evaluate():
        x, y = loader.dataset.tensors
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(x), y))
        (validated,) = trainer.validate(model, held_out, verbose=False)
        (tested,) = trainer.test(model, held_out, verbose=False)
        assert validated["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert tested["test_loss"] == pytest.approx(loss, rel=1e-5)
        assert len(torch.cat(trainer.predict(model, held_out))) == 240
        return loss

    before = evaluate()
    assert privacy.steps == 0
    trainer.fit(model, loader)
    assert evaluate() < before
    assert privacy.steps == 20  # evaluation charges nothing


def test_an_ordinary_trainer_after_a_private_one_is_ordinary(privacy, classifier, mlp, loader, fit):
    """The class of Lightning's own strategy is not touched, and neither is the user's loader."""
    sampler = loader.batch_sampler
    fit(classifier(mlp()), privacy, max_epochs=1)
    assert loader.batch_sampler is sampler

    model, expected = classifier(mlp()), classifier(mlp())
    torch.manual_seed(7)
    trainer = fit(model, None, max_epochs=1)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    torch.manual_seed(7)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    torch.testing.assert_close(flat(model), flat(expected))


def test_a_step_that_was_not_allowed_raises_and_one_is_allowed_once():
    module = nn.Linear(2, 2)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    StepGuard(optimizer).allow()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called with gradients that w"):
        optimizer.step()


def test_a_step_that_was_refused_inside_of_another_allows_no_later_one():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    guard = StepGuard(optimizer)

    def closure():
        with contextlib.suppress(RuntimeError):
            optimizer.step()
        guard.allow()

    optimizer.step(closure)
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called with gradients that w"):
        optimizer.step()


# -- copies of a model, made at any moment of a fit ----------------------------------------------


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


TWO_WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "deepcopy": copy.deepcopy,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    **TWO_WAYS,
    "copy": copy.copy,
    "torch.save": saved_and_loaded,
    "average": lambda module: AveragedModel(module).module,
    "parameters": lambda module: nn.ParameterList(copy.deepcopy(list(module.parameters()))),
}
PLACES = (
    *("on_fit_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
)


def of_ours(module: nn.Module, plain: nn.Module) -> list[str]:
    """List what a copy has and a plain copy does not."""
    found, wanted = traces(module), traces(plain)
    return [name for name in found if name in wanted and found[name] != wanted[name]]


class Gain(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), Gain(), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def copying(classifier: Any) -> type[Any]:
    """Copies its network in every way at every place of a fit."""

    class Copying(classifier):  # type: ignore[misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            type(self).copies = []  # of the class: copies of the whole model do not copy them

        def copied(self, place: str) -> None:
            if self.trainer.global_step < 1:
                self.copies += [(place, name, way(self.net)) for name, way in WAYS.items()]
                self.copies.append((place, "the whole model", copy.deepcopy(self).net))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.copied("training_step")
            return loss

    for place in PLACES:
        setattr(Copying, place, lambda self, *args, place=place: self.copied(place))
    return Copying


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "engine", ["auto", "records", pytest.param("hooks", marks=pytest.mark.slow)]
)
def test_copies_made_at_any_moment_have_nothing_of_the_engine(engine, copying, fit):
    model, plain = copying(network()), network()
    fit(model, private(engine=engine), max_steps=1)

    seen = [place for place in PLACES if not place.endswith("_end")]
    if engine == "hooks":  # a record that runs alone leaves no copy of what it has behind
        seen.append("training_step")
    assert {(place, way) for place, way, _ in model.copies} >= {
        (place, way) for place in seen for way in WAYS
    }
    x = torch.randn(4, 6)
    for place, way, twin in model.copies:
        if way == "parameters":
            assert of_ours(twin, nn.ParameterList(plain.parameters())) == [], (place, way)
            continue
        if (place, way) not in {("training_step", w) for w in ("pickle", "torch.save")}:
            assert of_ours(twin, plain) == [], (place, way)
        twin.zero_grad()
        twin(x).sum().backward()  # trained plainly, it does what a plain network does
        again = network()
        again.load_state_dict(twin.state_dict())
        again(x).sum().backward()
        for mine, its in zip(twin.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        pickle.dumps(twin)


# -- copies of a Trainer and its parts -----------------------------------------------------------


@pytest.fixture
def fitted(classifier, mlp, loader, fit) -> Callable[..., L.Trainer]:
    """A fit of four more steps."""

    def run(privacy: DifferentialPrivacy) -> L.Trainer:
        bar = [TQDMProgressBar(refresh_rate=0)]
        options = {"max_steps": 4, "enable_progress_bar": True}
        return fit(classifier(mlp()), privacy, callbacks=bar, **options)

    return run


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_copied_trainer_saves_the_ledger_and_goes_on_spending_it(way, fitted, loader, tmp_path):
    privacy = private()
    twin = TWO_WAYS[way](fitted(privacy))
    (its,) = (each for each in twin.callbacks if isinstance(each, DifferentialPrivacy))
    assert its is not privacy and twin.strategy.private_run is its._run

    twin.save_checkpoint(tmp_path / "twin.ckpt")
    saved = torch.load(tmp_path / "twin.ckpt", weights_only=True)["lightning_dp"]["ledger"]
    assert saved == privacy._run.ledger.state_dict()

    twin.fit_loop.epoch_loop.max_steps = 6
    twin.fit(twin.lightning_module, loader)
    assert (its.steps, privacy.steps) == (6, 4)


def test_two_copies_of_a_ledger_both_count_and_hold_no_model_data_or_trainer(fitted):
    privacy = private()
    fitted(privacy)
    content = pickle.dumps(privacy._run)  # Lightning sets the model's log() on every callback
    assert len(content) < 20_000
    for word in (b"Trainer", b"Classifier", b"TensorDataset", b"Strategy", b"Generator"):
        assert word not in content
    one, two = pickle.loads(pickle.dumps(privacy)), copy.deepcopy(privacy)
    fitted(one)
    fitted(two)
    assert (one.steps, two.steps) == (8, 12)  # the journal of both is one
    fitted(privacy)
    assert privacy.steps == 16


class Copies(L.Callback):
    made: list[Any] = []  # noqa: RUF012 (of the class: copies do not copy it)

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.made += [way(trainer.strategy) for way in TWO_WAYS.values()]


def test_copies_made_in_mid_step_hold_nothing_that_is_not_noised(classifier, mlp, fit):
    Copies.made = []
    fit(classifier(mlp()), private(), callbacks=[Copies()], max_steps=1)
    assert len(Copies.made) == 2
    for strategy in Copies.made:
        run = strategy.private_run
        assert strategy._fit is None
        assert run.mechanism.query is None and not run.mechanism.is_begun
        assert run.steps == 1  # it is charged all the same
        with pytest.raises(RuntimeError, match="begin"):
            run.ledger.charge(next(iter(run.ledger.runs.values()))[0][0])


def test_copies_of_a_noise_source_draw_other_noise():
    source = NoiseSource()
    sources = (source, copy.deepcopy(source), pickle.loads(pickle.dumps(source)))
    drawn = [torch.zeros(4) for _ in sources]
    for each, vector in zip(sources, drawn, strict=True):
        each.add_normal(vector, 1.0)
    assert not drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])
