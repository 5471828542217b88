"""The final weights are those after one step, every step with the same probability."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp.callbacks import DifferentialPrivacy, RandomIterate


class Iterates(L.Callback):
    """The weights after each optimizer step."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step not in self.seen:
            self.seen[trainer.global_step] = flat(module)


def private() -> DifferentialPrivacy:
    return DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=1.0, isolation_probe=False, spot_checks=False
    )


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def chosen(model: nn.Module, iterates: Iterates) -> int | None:
    """The step after which the weights were the final ones; None for one before a resume."""
    steps = [s for s, weights in iterates.seen.items() if torch.equal(weights, flat(model))]
    assert len(steps) <= 1
    return steps[0] if steps else None


@pytest.fixture
def train(classifier, mlp, blobs, make_trainer):
    def run(accumulate: int = 1, ckpt_path: Any = None, callbacks: Any = (), **options: Any) -> Any:
        L.seed_everything(5, verbose=False)  # must not decide
        model, iterates = classifier(mlp()), Iterates()
        privacy = private()
        trainer = make_trainer(
            callbacks=[privacy, iterates, RandomIterate(), *callbacks],
            accumulate_grad_batches=accumulate,
            enable_checkpointing=bool(callbacks),
            **options,
        )
        trainer.fit(model, DataLoader(blobs, 40 // accumulate), ckpt_path=ckpt_path)
        return chosen(model, iterates)

    return run


def test_every_step_is_as_likely(train):
    counts = [0] * 3
    for _ in range(45):
        counts[train(max_steps=3) - 1] += 1
    assert stats.chisquare(counts).pvalue > 1e-4  # [45, 0, 0] or never the last: < 2e-5


def test_batches_that_are_accumulated_are_no_iterates(train):
    assert train(accumulate=2, max_steps=3) in (1, 2, 3)


def test_a_second_fit_chooses_among_its_own_iterates(classifier, mlp, blobs, make_trainer):
    ends = []
    for _ in range(20):
        model, iterates = classifier(mlp()), Iterates()
        privacy = private()
        trainer = make_trainer(
            callbacks=[privacy, iterates, RandomIterate()], max_steps=3, accumulate_grad_batches=2
        )
        loader = DataLoader(blobs, 40)
        trainer.fit(model, loader)
        iterates.seen.clear()
        trainer.fit_loop.epoch_loop.max_steps = 5
        trainer.fit(model, loader)
        assert trainer.global_step == 5
        ends.append(chosen(model, iterates))
    assert set(ends) == {4, 5}  # all 20 alike: probability 2e-6; None: the weights before the fit


def test_a_resumed_run_goes_on_from_the_latest_and_remembers_the_kept(train, tmp_path):
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    train(max_steps=4, callbacks=(saving,))
    checkpoint = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    kept = checkpoint["callbacks"]["RandomIterate"]
    assert (kept["seen"], kept["global_step"]) == (4, 4)

    before = [
        torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        for step in range(1, 5)
    ]
    assert any(
        all(torch.equal(weights[name], kept["kept"][name]) for name in weights)
        for weights in before
    )

    # Half of 8 iterates are from before the checkpoint: then it is the one kept there.
    ends = [train(max_steps=8, ckpt_path=tmp_path / "step=4.ckpt") for _ in range(24)]
    assert all(end is None or end in range(5, 9) for end in ends)
    assert stats.binomtest(sum(end is None for end in ends), 24, 0.5).pvalue > 1e-5
