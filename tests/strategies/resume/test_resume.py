"""A resumed run is the run that was not interrupted: same steps, same ε, same weights."""

from __future__ import annotations

import math
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CyclicPoisson, FixedOrder, FullBatch, Momentum, Poisson, RandomAllocation
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.events import PoissonGaussian
from lightning_dp.schedules import Exponential
from tests.zoo import WholeSet, flat, private

# -- random chains of interruptions and resumes, run by a plain or a private Trainer -------------


# A multiple of 1, 2 and 3 batches: private epochs are as long as plain ones.
CHAIN_RECORDS, CHAIN_BATCH = 24, 2


class Planted(Exception):
    """The error that ends a fit in the middle."""


class Stepping(L.LightningModule):
    """Counts the optimizer's steps and notes what each of them saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.chunks: list[Any] = []  # since the last step
        self.seen: list[list[Any]] = []  # the chunks of each step

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(CHAIN_RECORDS, 2)), CHAIN_BATCH)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(CHAIN_RECORDS, 2)), CHAIN_RECORDS // 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.chunks.append(getattr(self.trainer.train_dataloader, "current", None))
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        optimizer.register_step_post_hook(self._after_step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
                "interval": "step",
            },
        }

    def _after_step(self, *_: Any) -> None:
        self.seen.append(self.chunks)
        self.chunks = []


HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Interrupt(L.Callback):
    """Ends a fit when a hook is called for the n-th time."""

    def __init__(self, hook: str, after: int, error: BaseException | None) -> None:
        self.after, self.error, self.calls = after, error, 0
        setattr(self, hook, self._called)

    def _called(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.after:
            if self.error is not None:
                raise self.error
            trainer.should_stop = True


@dataclass(frozen=True)
class Stage:
    """One fit of a chain: how it ends, and who saves what the next one resumes from."""

    hook: str
    after: int
    ending: str  # "error", "ctrl-c", "stop", or "end": at a limit
    limits: dict[str, int]  # how much more than the checkpoint has
    saves_after: bool  # trainer.save_checkpoint() when the fit is over


@dataclass(frozen=True)
class Trail:
    """Return the place of a Trainer after a fit: if it raised, its steps, epoch and all its progress."""

    ended: str
    global_step: int
    epoch: int
    progress: Any = field(repr=False)
    is_resumed: bool = field(repr=False)


@dataclass(frozen=True)
class Chain:
    """Settings of a run and six interruptions, all chosen by a seed."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    saving: dict[str, Any] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()

    @classmethod
    def of(cls, seed: int) -> Chain:
        rng = random.Random(seed)
        per_epoch = rng.choice([{}, {}, {"limit_train_batches": 7}, {"limit_train_batches": 0.45}])
        options: dict[str, Any] = {
            "accumulate_grad_batches": rng.choice([1, 2, 3]),
            "reload_dataloaders_every_n_epochs": rng.choice([0, 0, 1, 2]),
            **per_epoch,
            **rng.choice(
                [
                    {},
                    {"limit_val_batches": 0},
                    {"val_check_interval": 3},
                    {"val_check_interval": 0.4},
                    {"val_check_interval": 4, "check_val_every_n_epoch": None},
                    {"check_val_every_n_epoch": 2},
                ]
            ),
        }
        saving = rng.choice(
            [
                {"every_n_train_steps": 1},
                {"every_n_train_steps": 3},
                {"every_n_train_steps": 2, "save_on_train_epoch_end": True},
                {"every_n_epochs": 1},
                {"every_n_epochs": 1, "save_on_train_epoch_end": True},
                {"every_n_epochs": 1, "save_on_train_epoch_end": False},
            ]
        )
        saving = {**saving, "exceptions": rng.random() < 0.5}
        stages = tuple(cls._stage(rng, number) for number in range(6))
        return cls(seed, options, saving, stages)

    @staticmethod
    def _stage(rng: random.Random, number: int) -> Stage:
        limits = rng.choice([{"max_epochs": rng.randrange(3)}, {"max_steps": rng.randrange(1, 15)}])
        return Stage(
            hook=rng.choice(HOOKS),
            after=rng.randrange(1, 14),
            ending=rng.choice(["error", "error", "ctrl-c", "stop", "end"]),
            limits=limits,
            saves_after=rng.random() < 0.5,
        )

    def run(
        self,
        folder: Path,
        make_trainer: Callable[..., L.Trainer],
        privacy: Callable[[], L.Callback] | None = None,
    ) -> Iterator[tuple[Trail, Stepping, Any]]:
        """Each fit in turn: where the Trainer is afterwards, its model and its privacy."""
        newest: Path | None = None
        for number, stage in enumerate(self.stages):
            place, model = folder / str(number), Stepping()
            ours = None if privacy is None else privacy()
            trainer = make_trainer(
                callbacks=[*self._callbacks(stage, place), *([ours] if ours else [])],
                enable_checkpointing=True,
                default_root_dir=folder,
                num_sanity_val_steps=0,
                **{**self.options, **_limits(stage, newest)},
            )
            ended = "at a limit"
            with _keyboard_kept():
                try:
                    trainer.fit(model, ckpt_path=newest, weights_only=True)
                except (Planted, SystemExit) as error:
                    ended = type(error).__name__
            if stage.saves_after:
                trainer.save_checkpoint(place / "after.ckpt")
            is_resumed = newest is not None
            newest = max(place.glob("*.ckpt"), key=_saved_at, default=newest)
            progress = trainer.fit_loop.state_dict()
            progress["state_dict"].pop("combined_loader", None)
            steps, epoch = trainer.global_step, trainer.current_epoch
            yield Trail(ended, steps, epoch, progress, is_resumed), model, ours

    def _callbacks(self, stage: Stage, place: Path) -> list[L.Callback]:
        saving = dict(self.saving)
        watching: list[L.Callback] = []
        if saving.pop("exceptions"):
            watching.append(OnExceptionCheckpoint(place, "raised"))
        errors = {"error": Planted(), "ctrl-c": KeyboardInterrupt(), "stop": None}
        if stage.ending != "end":
            watching.append(Interrupt(stage.hook, stage.after, errors[stage.ending]))
        return [ModelCheckpoint(place, save_last=True, **saving), *watching]


def _limits(stage: Stage, checkpoint: Path | None) -> dict[str, int]:
    done = {"epoch": 0, "global_step": 0}
    if checkpoint is not None:
        done = torch.load(checkpoint, weights_only=True)
    if "max_steps" in stage.limits:
        return {"max_epochs": -1, "max_steps": done["global_step"] + stage.limits["max_steps"]}
    return {"max_epochs": done["epoch"] + 1 + stage.limits["max_epochs"]}


def _saved_at(path: Path) -> int:
    return path.stat().st_mtime_ns


@contextmanager
def _keyboard_kept() -> Iterator[None]:
    """Lightning ignores Ctrl+C for the rest of the process once it was pressed."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]

# (accumulate, epoch, batch_idx): the end of an epoch, its middle, inside an accumulation window.
PLACES = [(1, 0, 11), (1, 1, 4), (3, 0, 11), (3, 1, 5), (3, 0, 4), (3, 1, 0)]


def crash_at(step: int) -> Interrupt:
    """Raises in the middle of that step, before the optimizer moves."""
    return Interrupt("on_after_backward", step + 1, Planted())


def with_scheduler(params: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def charged_by_hand(steps: int, accumulate: int = 1) -> float:
    """ε of that many steps of the standard run, straight from the accountant."""
    event = PoissonGaussian(1.0, 4 * accumulate / 48)
    return PLDAccountant().epsilon([(event, steps)], 1e-5, "add_remove")


@pytest.mark.few(3)
@pytest.mark.parametrize(("accumulate", "epoch", "batch_idx"), PLACES)
def test_resumed_weights_equal_the_uninterrupted_runs(
    fit, save_at, tmp_path, accumulate, epoch, batch_idx
):
    privacy = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.3,
        "sampling": WholeSet(),
        "postprocessing": [Momentum(0.6)],
    }
    options = {"accumulate_grad_batches": accumulate, "optimizer": with_scheduler}
    saving = save_at(tmp_path / "mid.ckpt", epoch, batch_idx)
    whole = fit(privacy=privacy, callbacks=(saving,), **options)
    resumed = fit(tmp_path / "mid.ckpt", privacy=privacy, weights_only=True, **options)
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=1e-6)
    assert (whole.weights - flat(fit.model())).norm() > 0.2
    before = (epoch * 12 + batch_idx + 1) // accumulate
    planned = 2 * fit.steps_per_epoch(accumulate)
    assert resumed.trainer.global_step == whole.trainer.global_step == planned
    assert resumed.probe.optimizer_steps == planned - before  # noised steps continue the plan
    assert resumed.privacy.steps == planned + resumed.probe.optimizer_steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_interrupted_run_and_its_resume_cost_what_one_run_costs(fit, tmp_path, accumulate):
    every = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    planned = 2 * fit.steps_per_epoch(accumulate)
    options = {"accumulate_grad_batches": accumulate}
    # max_steps ends the first run in the middle of an epoch.
    first = fit(callbacks=(every,), max_steps=planned // 2 + 1, **options)
    resumed = fit(tmp_path / f"step={planned // 2 + 1}.ckpt", **options)
    assert first.privacy.steps == planned // 2 + 1
    assert resumed.privacy.steps == planned
    by_hand = charged_by_hand(planned, accumulate)
    assert resumed.privacy.epsilon == pytest.approx(by_hand, rel=1e-9)


def test_noise_schedule_continues_at_the_step_of_an_older_checkpoint(fit, save_at, tmp_path):
    rate = 0.1
    privacy = {"noise_multiplier": 4.0, "noise_schedule": Exponential(rate)}
    fit(privacy=privacy, callbacks=(save_at(tmp_path / "old.ckpt", 0, 2),), max_steps=5)
    resumed = fit(tmp_path / "old.ckpt", privacy=privacy, max_steps=6)
    steps = [0, 1, 2, 3, 4, 3, 4, 5]  # those after the checkpoint were charged, and are again
    expected = Counter(PoissonGaussian(4.0 * math.exp(-rate * t), 4 / 48) for t in steps)
    assert Counter(dict(resumed.ledger.history())) == expected
    assert resumed.privacy.noise_multiplier == pytest.approx(4.0 * math.exp(-rate * 5))


def test_calibrated_noise_is_kept_and_spends_exactly_the_rest(fit, tmp_path):
    privacy = {"noise_multiplier": None, "target_epsilon": 3.0}
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    whole = fit(privacy=privacy)
    with pytest.raises(Planted):
        fit(privacy=privacy, callbacks=(saving, crash_at(5)))
    resumed = fit(tmp_path / "last.ckpt", privacy=privacy)
    # The step that crashed is charged: one step fewer fits, at the same noise.
    assert resumed.privacy.noise_multiplier == pytest.approx(whole.privacy.noise_multiplier)
    assert resumed.privacy.steps <= 24
    assert resumed.probe.optimizer_steps == resumed.privacy.steps - 6
    assert 2.85 < resumed.privacy.epsilon <= 3.0


@pytest.mark.parametrize("sampling", [Poisson(), FullBatch()])
def test_noise_of_a_fit_after_one_that_ended_early_is_said_to_follow_it(fit, sampling):
    """Name the assumption of noise planned after a look; full batches add up for any noise."""

    stop = Interrupt("on_train_epoch_end", 1, None)
    privacy = private(target_epsilon=3.0, sampling=sampling)
    first = fit(privacy=privacy, callbacks=(stop,), max_epochs=4)
    said = [any("another one followed" in text for text in privacy.report().not_covered)]
    fit(privacy=privacy, max_epochs=4)
    said.append(any("another one followed" in text for text in privacy.report().not_covered))
    assert said == [False, sampling == Poisson()]
    assert first.trainer.global_step < privacy.steps and 2.9 < privacy.epsilon <= 3.0


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [CyclicPoisson(5), RandomAllocation(), FixedOrder()])
def test_steps_beyond_a_plan_that_ends_inside_a_block_do_not_exceed_the_target(
    fit, at_each_step, sampling
):
    def lengthen(trainer: Any, module: Any) -> None:
        trainer.fit_loop.epoch_loop.max_steps = 20

    longer = at_each_step(lengthen)
    relation = "zero_out" if sampling == FixedOrder() else "add_remove"
    privacy = private(target_epsilon=3.0, sampling=sampling, relation=relation)
    fitted = fit(privacy=privacy, callbacks=(longer,), max_steps=7)
    assert privacy.epsilon <= 3.0
    assert fitted.trainer.global_step == privacy.steps == 7

    privacy = private(noise_multiplier=1.0, sampling=sampling, relation=relation)
    fitted = fit(privacy=privacy, callbacks=(longer,), max_steps=7)
    assert fitted.trainer.global_step == 20
    charged = [event.steps for event, count in fitted.ledger.history() for _ in range(count)]
    expected = [5, 2, 3, 5, 5] if sampling == CyclicPoisson(5) else [7, 5, 12]
    assert sorted(charged) == sorted(expected)  # one more than the blocks, and not one a step


def test_full_batch_resumes_between_and_inside_its_steps(fit, save_at, tmp_path):
    privacy = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "sampling": FullBatch()}
    whole = fit(privacy=privacy, max_epochs=4)
    for epoch, batch_idx in [(1, 11), (2, 6)]:
        saving = save_at(tmp_path / "mid.ckpt", epoch, batch_idx)
        fit(privacy=privacy, callbacks=(saving,), max_epochs=4)
        resumed = fit(tmp_path / "mid.ckpt", privacy=privacy, max_epochs=4)
        torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=1e-6)
        assert resumed.probe.optimizer_steps == 2


def test_checkpoint_after_fit_extends_the_run(fit, tmp_path):
    first = fit(max_epochs=1)
    for weights_only in (True, False):
        first.trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=weights_only)
        saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["lightning_dp"]["ledger"]
        assert [count for charges in saved["runs"].values() for _, count in charges] == [12]
    resumed = fit(tmp_path / "after.ckpt", max_epochs=3)
    assert resumed.probe.optimizer_steps == 24
    assert resumed.privacy.steps == 36
    assert resumed.privacy.epsilon == pytest.approx(charged_by_hand(36), rel=1e-9)


def test_weights_only_checkpoint_holds_the_ledger_and_lightning_refuses_to_resume_it(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="w", save_weights_only=True)
    first = fit(callbacks=(saving,))
    ledger = torch.load(tmp_path / "w.ckpt", weights_only=True)["lightning_dp"]["ledger"]
    assert sum(count for charges in ledger["runs"].values() for _, count in charges) == 24
    with pytest.raises(KeyError, match="only the model"):
        fit(tmp_path / "w.ckpt", privacy=first.privacy)
    assert first.privacy.steps == 24


@pytest.mark.parametrize(("limit", "accumulate", "steps"), [(5, 2, 9), (0.5, 1, 18)])
def test_limited_epochs_resume_at_their_end_and_middle(
    fit, save_at, tmp_path, limit, accumulate, steps
):
    options = {"limit_train_batches": limit, "accumulate_grad_batches": accumulate}
    for epoch, batch_idx in [(0, int(limit if limit > 1 else 12 * limit) - 1), (1, 2)]:
        path = tmp_path / f"{epoch}.ckpt"
        fit(max_epochs=epoch + 1, callbacks=(save_at(path, epoch, batch_idx),), **options)
        known = torch.load(path, weights_only=True)["global_step"]
        resumed = fit(path, max_epochs=3, **options)
        assert resumed.trainer.global_step == steps
        assert resumed.probe.optimizer_steps == steps - known


@pytest.mark.parametrize("accumulate", [1, 2])
def test_checkpoint_of_an_exception_inside_a_step_resumes(fit, tmp_path, accumulate):
    callbacks = (OnExceptionCheckpoint(tmp_path, "crash"), crash_at(3 * accumulate))
    with pytest.raises(Planted):
        fit(callbacks=callbacks, accumulate_grad_batches=accumulate)
    resumed = fit(tmp_path / "crash.ckpt", accumulate_grad_batches=accumulate)
    planned = 2 * fit.steps_per_epoch(accumulate)
    assert resumed.trainer.global_step == planned
    assert resumed.probe.optimizer_steps == planned - 3
    assert resumed.privacy.steps == planned + 1  # the step that crashed was charged


def test_resume_with_worker_processes(fit, save_at, tmp_path):
    saving = save_at(tmp_path / "mid.ckpt", 0, 6)
    fit(callbacks=(saving,), max_steps=9, workers=2)
    resumed = fit(tmp_path / "mid.ckpt", max_steps=14, workers=2)
    assert resumed.probe.optimizer_steps == 7
    assert resumed.privacy.steps == 9 + 7


def test_manual_optimization_resumes(fit, save_at, tmp_path):
    class Manual(fit.classifier):  # type: ignore[misc, name-defined]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    fit.classifier = Manual
    fit(callbacks=(save_at(tmp_path / "mid.ckpt", 1, 3),))
    resumed = fit(tmp_path / "mid.ckpt")
    assert resumed.trainer.global_step == 24
    assert resumed.privacy.steps == 24 + 8


def test_same_trainer_goes_back_to_an_older_checkpoint(fit, save_at, tmp_path):
    fitted = fit(callbacks=(save_at(tmp_path / "mid.ckpt", 0, 5),))
    fitted.trainer.fit(fitted.model, fit.loader(), ckpt_path=tmp_path / "mid.ckpt")
    assert fitted.probe.optimizer_steps == 24 + 18
    assert fitted.privacy.steps == 24 + 18
    assert fitted.privacy.epsilon == pytest.approx(charged_by_hand(42), rel=1e-9)


def test_a_run_that_was_seeded_once_is_never_reported_as_private(fit, tmp_path):
    fit(privacy={"seed": 0}, max_steps=2).trainer.save_checkpoint(tmp_path / "seeded.ckpt")
    report = fit(tmp_path / "seeded.ckpt", max_steps=3).privacy.report()
    assert not report.private
    assert str(report).startswith("NOT PRIVATE (a seed was set)")


# -- random chains of interruptions -----------------------------------------------------------------

# Each of the first ones could not go on, or made other steps, when the loader kept its own position.
FEW = [6]
MANY = [10, 13, 23, *range(100, 160)]


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)]
)
def test_a_private_chain_of_resumes_goes_where_the_plain_one_goes(seed, make_trainer, tmp_path):
    chain = Chain.of(seed)
    plain = [trail for trail, *_ in chain.run(tmp_path / "plain", make_trainer)]
    assert len(plain) == 6

    steps = interruptions = 0
    ours = chain.run(tmp_path / "private", make_trainer, lambda: private(sampling=WholeSet()))
    for expected, (trail, model, spent) in zip(plain, ours, strict=True):
        assert trail == expected  # not the steps alone: all progress of all loops
        if not trail.is_resumed:
            steps = interruptions = 0
        steps, interruptions = steps + len(model.seen), interruptions + 1
        assert 0 <= spent.steps - steps <= interruptions
        for chunks in model.seen:  # every step saw a whole batch, and no chunk of another one
            assert [chunk.first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
            assert sum(chunk.size for chunk in chunks) == CHAIN_RECORDS


def test_fits_of_one_trainer_without_a_checkpoint_go_where_plain_ones_go(make_trainer):
    def steps_and_epochs(callbacks: list[Any]) -> list[tuple[int, int]]:
        places, model = [], Stepping()
        error = Interrupt("on_train_batch_end", 5, Planted())
        options = {"accumulate_grad_batches": 2, "limit_train_batches": 7}
        trainer = make_trainer(callbacks=[*callbacks, error], max_epochs=2, **options)
        for max_epochs in (2, 2, 4, 5):
            trainer.fit_loop.max_epochs = max_epochs
            try:
                trainer.fit(model)
            except Planted:
                assert not places
            places.append((trainer.global_step, trainer.current_epoch))
        return places

    privacy = private(sampling=WholeSet())
    ours = steps_and_epochs([privacy])
    assert ours == steps_and_epochs([])
    assert privacy.steps == ours[-1][0] + 1  # one batch was charged and interrupted


def test_a_position_that_an_older_checkpoint_holds_is_ignored(fit, save_at, tmp_path):
    path = tmp_path / "old.ckpt"
    fit(max_steps=6, callbacks=(save_at(path, 0, 4),))
    checkpoint = torch.load(path, weights_only=True)
    loops = checkpoint["loops"]["fit_loop"]["state_dict"]
    assert loops["combined_loader"] == [{}]  # nothing about records, and no position
    loops["combined_loader"] = [{"chunks_done": 9}]
    torch.save(checkpoint, path)
    assert fit(path).probe.optimizer_steps == 24 - 5


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_saved_at_an_epochs_last_batch_is_resumed_again_and_again(workers, fit, tmp_path):
    path, options = tmp_path / "last.ckpt", {"workers": workers, "max_epochs": -1}
    for steps in (12, 15, 24, 24, 29):
        saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
        given = path if path.exists() else None
        fitted = fit(given, callbacks=(saving,), max_steps=steps, **options)
        assert fitted.trainer.global_step == fitted.privacy.steps == steps
    assert len(list((tmp_path / "privacy").glob("*.journal"))) == 1
