"""Copies and pickles of a model, a Trainer and its parts are plain ones, with the ledger."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import private

# -- copies of a model, made at any moment of a fit ----------------------------------------------


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "average": lambda module: AveragedModel(module).module,
    "parameters": lambda module: nn.ParameterList(copy.deepcopy(list(module.parameters()))),
}
PLACES = (
    "on_fit_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
)


def of_ours(module: nn.Module, plain: nn.Module) -> list[str]:
    """List hooks and attributes of a copy that a plain copy does not have."""
    found = []
    for part, twin in zip(module.modules(), plain.modules(), strict=True):
        found += sorted(set(vars(part)) - set(vars(twin)))
        found += [kind for kind in HOOKS if len(getattr(part, kind)) > len(getattr(twin, kind))]
    for param in module.parameters():
        found += sorted(vars(param))
        found += ["hook"] * len(param._backward_hooks or ())
        found += ["hook"] * len(param._post_accumulate_grad_hooks or ())
    return found


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
        if place != "training_step":

            def hook(self: Any, *args: Any, place: str = place) -> None:
                self.copied(place)

            setattr(Copying, place, hook)
    return Copying


ENGINES = ("auto", "records", pytest.param("hooks", marks=pytest.mark.slow))


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_copies_made_at_any_moment_have_nothing_of_the_engine(engine, copying, fit):
    model, plain = copying(network()), network()
    fit(model, private(engine=engine), max_steps=1)

    seen = [place for place in PLACES if not place.endswith("_end")]
    if engine != "hooks":  # a record that runs alone leaves no copy of what it has behind
        seen.remove("training_step")
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
        assert of_ours(twin, plain) == [] or "pickle" in way or "save" in way
        pickle.dumps(twin)


# -- after a fit its parts can be pickled and copied ---------------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

TWO_WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "deepcopy": copy.deepcopy,
}


def records(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


@pytest.fixture
def fitted(make_trainer: Any) -> Callable[..., L.Trainer]:
    def fit(privacy: DifferentialPrivacy | None, **options: Any) -> L.Trainer:
        callbacks = [TQDMProgressBar(refresh_rate=0), *([privacy] if privacy else [])]
        trainer: L.Trainer = make_trainer(
            callbacks=callbacks,
            max_steps=4,
            enable_progress_bar=True,
            limit_val_batches=1,
            **options,
        )
        trainer.fit(
            BoringModel(), DataLoader(TensorDataset(torch.randn(40, 32)), 4, collate_fn=records)
        )
        return trainer

    return fit


@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_copied_trainer_saves_the_ledger_and_goes_on_spending_it(way, fitted, tmp_path):
    privacy = private()
    twin = TWO_WAYS[way](fitted(privacy))
    (its,) = (each for each in twin.callbacks if isinstance(each, DifferentialPrivacy))
    assert its is not privacy and twin.strategy.private_run is its._run

    twin.save_checkpoint(tmp_path / "twin.ckpt")
    saved = torch.load(tmp_path / "twin.ckpt", weights_only=True)["lightning_dp"]["ledger"]
    assert saved == privacy._run.ledger.state_dict()

    twin.fit_loop.epoch_loop.max_steps = 6
    twin.fit(
        twin.lightning_module, DataLoader(TensorDataset(torch.randn(40, 32)), 4, collate_fn=records)
    )
    assert (its.steps, privacy.steps) == (6, 4)


def test_two_copies_of_a_ledger_both_count(fitted):
    privacy = private()
    fitted(privacy)
    one, two = pickle.loads(pickle.dumps(privacy)), copy.deepcopy(privacy)
    fitted(one)
    fitted(two)
    assert (one.steps, two.steps) == (8, 12)  # the journal of both is one
    fitted(privacy)
    assert privacy.steps == 16


def test_what_a_callback_pickles_holds_no_model_data_or_trainer(fitted):
    privacy = private()
    fitted(privacy)
    content = pickle.dumps(privacy._run)  # Lightning sets the model's log() on every callback
    assert len(content) < 20_000
    for word in (b"Trainer", b"BoringModel", b"TensorDataset", b"Strategy", b"Generator"):
        assert word not in content


def test_copies_made_in_mid_step_hold_nothing_that_is_not_noised(make_trainer):
    class Copying(L.Callback):
        made: list[Any] = []  # noqa: RUF012 (of the class: copies do not copy it)

        def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
            self.made += [way(trainer.strategy) for way in TWO_WAYS.values()]

    privacy = private()
    trainer = make_trainer(max_steps=1, callbacks=[privacy, Copying()])
    Copying.made = []
    trainer.fit(BoringModel())
    assert len(Copying.made) == 2
    for strategy in Copying.made:
        run = strategy.private_run
        assert strategy._fit is None
        assert run.mechanism.query is None and not run.mechanism.is_begun
        assert run.steps == 1  # it is charged all the same
        with pytest.raises(RuntimeError, match="begin"):
            run.ledger.charge(next(iter(run.ledger.runs.values()))[0][0])


def test_copies_of_a_noise_source_draw_other_noise():
    from lightning_dp._noise import NoiseSource

    source = NoiseSource()
    sources = (source, copy.deepcopy(source), pickle.loads(pickle.dumps(source)))
    drawn = [torch.zeros(4) for _ in sources]
    for each, vector in zip(sources, drawn, strict=True):
        each.add_normal(vector, 1.0)
    assert not drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])
