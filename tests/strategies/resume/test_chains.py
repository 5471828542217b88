"""Random chains of interruptions: a private run goes wherever a plain one goes, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dp.callbacks import DifferentialPrivacy

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
]

# Each of the first ones could not go on, or made other steps, when the loader kept its own position.
FEW = [6]
MANY = [10, 13, 23, *range(100, 160)]


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)]
)
def test_a_private_chain_of_resumes_goes_where_the_plain_one_goes(
    seed: int, chains: Any, whole_set: Any, make_trainer: Any, tmp_path: Path
) -> None:
    def privacy() -> DifferentialPrivacy:
        return DifferentialPrivacy(
            noise_multiplier=1.0,
            target_delta=1e-5,
            sampling=whole_set,
            isolation_probe=False,
            spot_checks=False,
        )

    chain = chains.Chain.of(seed)
    plain = [trail for trail, *_ in chain.run(tmp_path / "plain", make_trainer)]
    assert len(plain) == 6

    steps = interruptions = 0
    private = chain.run(tmp_path / "private", make_trainer, privacy)
    for expected, (trail, model, spent) in zip(plain, private, strict=True):
        assert trail == expected  # not the steps alone: all progress of all loops
        if not trail.is_resumed:
            steps = interruptions = 0
        steps, interruptions = steps + len(model.seen), interruptions + 1
        assert 0 <= spent.steps - steps <= interruptions
        for chunks in model.seen:  # every step saw a whole batch, and no chunk of another one
            assert [chunk.first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
            assert sum(chunk.size for chunk in chunks) == chains.RECORDS


def test_fits_of_one_trainer_without_a_checkpoint_go_where_plain_ones_go(
    chains: Any, whole_set: Any, make_trainer: Any
) -> None:
    def steps_and_epochs(callbacks: list[Any]) -> list[tuple[int, int]]:
        places, model = [], chains.Stepping()
        error = chains.Interrupt("on_train_batch_end", 5, chains.Planted())
        options = {"accumulate_grad_batches": 2, "limit_train_batches": 7}
        trainer = make_trainer(callbacks=[*callbacks, error], max_epochs=2, **options)
        for max_epochs in (2, 2, 4, 5):
            trainer.fit_loop.max_epochs = max_epochs
            try:
                trainer.fit(model)
            except chains.Planted:
                assert not places
            places.append((trainer.global_step, trainer.current_epoch))
        return places

    privacy = DifferentialPrivacy(
        noise_multiplier=1.0,
        target_delta=1e-5,
        sampling=whole_set,
        isolation_probe=False,
        spot_checks=False,
    )
    private = steps_and_epochs([privacy])
    assert private == steps_and_epochs([])
    assert privacy.steps == private[-1][0] + 1  # one batch was charged and interrupted


def test_a_position_that_an_older_checkpoint_holds_is_ignored(
    fit: Any, save_at: Any, tmp_path: Path
) -> None:
    path = tmp_path / "old.ckpt"
    fit(max_steps=6, callbacks=(save_at(path, 0, 4),))
    checkpoint = torch.load(path, weights_only=True)
    loops = checkpoint["loops"]["fit_loop"]["state_dict"]
    assert loops["combined_loader"] == [{}]  # nothing about records, and no position
    loops["combined_loader"] = [{"chunks_done": 9}]
    torch.save(checkpoint, path)
    assert fit(path).probe.optimizer_steps == 24 - 5


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_saved_at_an_epochs_last_batch_is_resumed_again_and_again(
    workers: int, fit: Any, tmp_path: Path
) -> None:
    path, options = tmp_path / "last.ckpt", {"workers": workers, "max_epochs": -1}
    for steps in (12, 15, 24, 24, 29):
        saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
        given = path if path.exists() else None
        fitted = fit(given, callbacks=(saving,), max_steps=steps, **options)
        assert fitted.trainer.global_step == fitted.privacy.steps == steps
