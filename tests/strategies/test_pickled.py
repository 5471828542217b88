"""After a private fit its parts can be pickled and copied as those of a plain one, with the ledger."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Diff2, FullBatch, Momentum, PrivacyConfig
from lightning_dp.callbacks import DifferentialPrivacy, PrivateSingleDeviceStrategy
from lightning_dp.schedules import Exponential
from tests.zoo import private

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "deepcopy": copy.deepcopy,
}
PARTS: dict[str, Callable[[L.Trainer], Any]] = {
    "strategy": lambda trainer: trainer.strategy,
    "callbacks": lambda trainer: trainer.callbacks,
    "progress bar": lambda trainer: trainer.progress_bar_callback,
    "loops": lambda trainer: trainer.fit_loop,
    "loader": lambda trainer: trainer.train_dataloader,
    "model": lambda trainer: trainer.model,
    "trainer": lambda trainer: trainer,
}
RUNS: dict[str, dict[str, Any]] = {
    "constant": {"noise_multiplier": 1.0},
    "calibrated": {"target_epsilon": 3.0},
    "full batches": {"target_epsilon": 3.0, "sampling": FullBatch()},
    "schedule": {"noise_multiplier": 2.0, "noise_schedule": Exponential(0.1)},
    "stateful": {
        "noise_multiplier": 1.0,
        "estimator": Diff2(restart_every=2, max_grad_norm=1.0, diff_norm=1.0),
        "postprocessing": [Momentum(0.5)],
    },
}


class Wide(BoringModel):
    """With so many parameters that a thread draws the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 1200), nn.Linear(1200, 2))  # type: ignore[assignment]


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


@pytest.mark.parametrize("run", RUNS)
def test_all_parts_of_a_fit_can_be_copied(run: str, fitted: Any) -> None:
    privacy = private(**RUNS[run])
    trainer = fitted(privacy)
    for way in WAYS.values():
        for part in PARTS.values():
            way(part(trainer))
        twin = way(privacy)
        assert (twin.epsilon, twin.steps) == (privacy.epsilon, privacy.steps)
        assert str(twin.report()) == str(privacy.report())


def test_parts_of_a_private_strategy_of_its_own_class_can_be_pickled(fitted: Any) -> None:
    config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-5, isolation_probe=False)
    trainer = fitted(None, strategy=PrivateSingleDeviceStrategy("cpu", privacy=config))
    twin = pickle.loads(pickle.dumps(trainer))
    assert type(twin.strategy) is PrivateSingleDeviceStrategy
    assert twin.strategy.private_run.steps == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_trainer_saves_the_ledger_and_goes_on_spending_it(
    way: str, fitted: Any, tmp_path: Path
) -> None:
    privacy = private()
    twin = WAYS[way](fitted(privacy))
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


def test_two_copies_of_a_ledger_both_count(fitted: Any) -> None:
    privacy = private()
    fitted(privacy)
    one, two = pickle.loads(pickle.dumps(privacy)), copy.deepcopy(privacy)
    fitted(one)
    fitted(two)
    assert (one.steps, two.steps) == (8, 12)  # the journal of both is one
    fitted(privacy)
    assert privacy.steps == 16


def test_what_a_callback_pickles_holds_no_model_data_or_trainer(fitted: Any) -> None:
    privacy = private()
    fitted(privacy)
    content = pickle.dumps(privacy._run)  # Lightning sets the model's log() on every callback
    assert len(content) < 20_000
    for word in (b"Trainer", b"BoringModel", b"TensorDataset", b"Strategy", b"Generator"):
        assert word not in content


def test_copies_made_in_mid_step_hold_nothing_that_is_not_noised(make_trainer: Any) -> None:
    class Copying(L.Callback):
        made: list[Any] = []  # noqa: RUF012 (of the class: copies do not copy it)

        def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
            self.made += [way(trainer.strategy) for way in WAYS.values()]

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


def test_no_thread_is_left_after_a_fit(make_trainer: Any) -> None:
    before = threading.active_count()
    privacy = private()
    trainer = make_trainer(max_steps=3, limit_val_batches=0, callbacks=[privacy])
    trainer.fit(Wide())
    assert privacy.steps == 3
    for thread in threading.enumerate():
        if thread.name.startswith("noise"):
            thread.join(timeout=5)
    assert threading.active_count() == before


def test_copies_of_a_noise_source_draw_other_noise() -> None:
    from lightning_dp._noise import NoiseSource

    source = NoiseSource()
    sources = (source, copy.deepcopy(source), pickle.loads(pickle.dumps(source)))
    drawn = [torch.zeros(4) for _ in sources]
    for each, vector in zip(sources, drawn, strict=True):
        each.add_normal(vector, 1.0)
    assert not drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])


def test_another_module_is_fitted_plainly_by_a_fresh_trainer_after_it(
    fitted: Any, make_trainer: Any
) -> None:
    """Hooks, grad mode, global state of torch: a plain fit is what it was."""
    weights = []
    for is_after in (False, True):
        if is_after:
            fitted(private(engine="hooks"))
        torch.manual_seed(0)
        model, data = BoringModel(), torch.randn(40, 32)
        trainer = make_trainer(max_epochs=1, limit_val_batches=1)
        trainer.fit(model, DataLoader(TensorDataset(data), 4, collate_fn=records))
        pickle.dumps(trainer)
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
