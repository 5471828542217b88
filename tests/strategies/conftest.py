"""One way to fit, to read what a fit left, and to see that one ends: for all tests of strategies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import Checks
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import flat, private, records

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@pytest.fixture
def numbered() -> Callable[..., TensorDataset]:
    """n records (x, y, number of the record), the same every time."""

    def make(n: int = 240, dtype: torch.dtype = torch.float32) -> TensorDataset:
        x, y = records(n)
        return TensorDataset(x.to(dtype), y, torch.arange(n))

    return make


@pytest.fixture
def recording(classifier: type[Any], mlp: Callable[[], nn.Module]) -> type[Any]:
    """A classifier that writes down which records each noised step used."""

    class Recording(classifier):  # type: ignore[misc]
        def __init__(self, net: nn.Module | None = None, *args: Any) -> None:
            super().__init__(mlp() if net is None else net, *args)
            self.batches: list[list[int]] = []
            self.chunk_counts: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y, number = batch
            chunk = self.trainer.train_dataloader.current  # only it knows a stand-in from a record
            if chunk.first:
                self.batches.append([])
                self.chunk_counts.append(0)
            self.chunk_counts[-1] += 1
            if chunk.size:
                self.batches[-1] += number.tolist()
            return super().training_step((x, y), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch[:2], batch_idx)

    return Recording


@pytest.fixture
def fit(make_trainer: Callable[..., L.Trainer], loader: Any) -> Callable[..., L.Trainer]:
    """``fit(model, privacy, ...)``: a private fit, on 240 records in batches of 24; its Trainer."""

    def run(
        model: L.LightningModule,
        privacy: L.Callback | None,
        data: Any = None,
        validate: Any = None,
        ckpt_path: Any = None,
        callbacks: Any = (),
        **options: Any,
    ) -> L.Trainer:
        ours = [] if privacy is None else [privacy]
        trainer = make_trainer(callbacks=[*callbacks, *ours], **options)
        trainer.fit(model, loader if data is None else data, validate, ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def charges(tmp_path: Path) -> Callable[[], list[Any]]:
    """The events in the run's journal on the disk, in order."""

    def read() -> list[Any]:
        (path,) = (tmp_path / "privacy").glob("*.journal")
        _, runs = read_journal(path)
        return [event for run in runs.values() for event, n in run for _ in range(n)]

    return read


@pytest.fixture
def privacy() -> DifferentialPrivacy:
    """Little noise, so that training visibly works."""
    return private(noise_multiplier=0.5)


# -- fits that end with an error -----------------------------------------------------------------


class Released(L.Callback):
    """Weights of the model at the start and after each step that was released."""

    def __init__(self) -> None:
        self.after: dict[int, Tensor] = {}
        self.params = nn.ParameterList()

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.params = nn.ParameterList(pl_module.parameters())
        self.on_train_batch_end(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.after[trainer.global_step] = flat(self.params)


def of_ours(model: nn.Module) -> list[str]:
    """Hooks, attributes and gradients that no untouched model has."""
    left = []
    for name, part in model.named_modules():
        left += [f"{name}.{hooks}" for hooks in HOOKS if getattr(part, hooks)]
        ours = {"activations", "max_batch_len", "autograd_grad_sample_hooks"}
        left += [f"{name}.{attribute}" for attribute in ours & set(vars(part))]
    for name, param in model.named_parameters():
        left += [f"{name}.{attribute}" for attribute in vars(param)]
        left += [f"{name} hook"] if param._post_accumulate_grad_hooks else []
        left += [f"{name}.grad"] if param.grad is not None else []
    return left


@pytest.fixture
def ends(make_trainer: Callable[..., L.Trainer], loader: Any) -> Callable[..., DifferentialPrivacy]:
    """``ends(model, match, ...)``: the one contract of all fits that end with an error of ours.

    ``charged`` steps are in the ledger and in its journal, ``released`` of them reached the
    weights, of a run that is void ε is infinite and of others it is not, and nothing stays on the
    model: no hook, no attribute, and no gradient but one that is private (``gradient_left``).
    """

    def check(
        model: Any,
        match: str,
        data: Any = None,
        privacy: dict[str, Any] | DifferentialPrivacy | None = None,
        *,
        first: Any = (),
        callbacks: Any = (),
        validate: Any = None,
        act: Callable[[L.Trainer, Any], Any] | None = None,
        error: Any = Exception,
        voids: bool = False,
        charged: int = 0,
        released: int = 0,
        gradient_left: bool = False,
        **trainer: Any,
    ) -> DifferentialPrivacy:
        if not isinstance(privacy, DifferentialPrivacy):
            privacy = private(**{"checks": Checks(), **(privacy or {})})
        watch, kind = Released(), type(model)
        made = make_trainer(
            callbacks=[*first, privacy, *callbacks, watch], **{"max_epochs": 1, **trainer}
        )
        data = loader if data is None else data
        with pytest.raises(VoidedRunError if voids else error, match=f"(?s){match}") as raised:
            (act or (lambda made, model: made.fit(model, data, validate)))(made, model)

        assert isinstance(raised.value, VoidedRunError) == voids
        assert math.isinf(privacy.epsilon) == voids
        journal = privacy._run.ledger.journal_path
        written = read_journal(journal)[1].total if journal and journal.exists() else 0
        assert written == privacy.steps + voids  # which the journal says, too
        assert (privacy.steps, made.global_step) == (charged, released)
        if made.global_step in watch.after:
            assert torch.equal(watch.after[made.global_step], flat(watch.params))
        assert type(model) is kind
        left = of_ours(model)
        assert [name for name in left if not (gradient_left and name.endswith(".grad"))] == []
        return privacy

    return check
