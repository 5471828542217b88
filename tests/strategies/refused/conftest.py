"""Refusals of whole fits, each of which must leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _charges_on_disk(folder: Path) -> int:
    journals = [read_journal(path)[1] for path in folder.glob("*.journal")]
    return sum(count for runs in journals for run in runs.values() for _, count in run)


def _left_behind(model: nn.Module) -> list[str]:
    """Everything on a model that an ordinary, untouched model does not have."""
    left = []
    for name, part in model.named_modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            left += [f"{name}.{hooks}"] if getattr(part, hooks) else []
        for attribute in (
            "activations",
            "max_batch_len",
            "autograd_grad_sample_hooks",
            "ft_compute_sample_grad",
        ):
            left += [f"{name}.{attribute}"] if attribute in vars(part) else []
    for name, param in model.named_parameters():
        for attribute in ("grad_sample", "_forward_counter", "_current_grad_sample"):
            left += [f"{name}.{attribute}"] if hasattr(param, attribute) else []
        left += [f"{name} hook"] if param._post_accumulate_grad_hooks else []
        left += [f"{name}.grad"] if param.grad is not None else []
    return left


@pytest.fixture
def privacy() -> DifferentialPrivacy:
    return DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)


@pytest.fixture
def assert_refused(tmp_path: Path, privacy: DifferentialPrivacy) -> Callable[..., None]:
    """Assert that an action is refused with this message, and that nothing happened.

    ``charged`` steps are in the ledger and its journal (0 where the refusal comes before the first
    step), ``released`` of them reached the weights. ``gradient_left``: a
    gradient that is already private may lie in p.grad, as after any interrupted step.
    """

    def check(
        action: Callable[[], Any],
        match: str,
        model: L.LightningModule,
        charged: int = 0,
        released: int = 0,
        gradient_left: bool = False,
    ) -> None:
        before, kind = _copies(model), type(model)

        with pytest.raises(Exception, match=f"(?s){match}"):
            action()

        assert privacy.steps == charged
        assert _charges_on_disk(tmp_path / "privacy") == charged
        after = model.state_dict()
        assert type(model) is kind
        assert after.keys() == before.keys()
        same = all(torch.equal(before[name], after[name]) for name in before)
        assert same == (released == 0)
        left = _left_behind(model)
        assert [name for name in left if not (gradient_left and name.endswith(".grad"))] == []

    return check


@pytest.fixture
def refuses(
    loader: Any,
    make_trainer: Callable[..., L.Trainer],
    privacy: DifferentialPrivacy,
    assert_refused: Callable[..., None],
) -> Callable[..., None]:
    """``refuses(model, match, data, callbacks=..., charged=..., max_epochs=...)``: of a whole fit."""

    def check(
        model: L.LightningModule, match: str, data: Any = None, callbacks: Any = (), **options: Any
    ) -> None:
        left = {k: options.pop(k) for k in ("charged", "released", "gradient_left") if k in options}
        trainer = make_trainer(**{"max_epochs": 1, "callbacks": [privacy, *callbacks], **options})
        assert_refused(
            lambda: trainer.fit(model, loader if data is None else data), match, model, **left
        )

    return check
