"""The frame of a case: a small module, its records, and the one fit that all cases share."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_dp import Checks, DifferentialPrivacy, FullBatch

__all__ = [
    "BAD",
    "ORDINARY",
    "Bad",
    "Ordinary",
    "Record",
    "Records",
    "Rows",
    "Small",
    "bad",
    "checked_fit",
    "far",
    "not_a_number",
    "ordinary",
    "points",
    "unchecked_fit",
]

Record: TypeAlias = tuple[Any, ...]
Records: TypeAlias = list[Record]

OFF: dict[str, Any] = {
    "checks": Checks(
        dry_run=False, loss_graph=False, comparisons=False, gradient_edits="none declared"
    ),
}


class Small(L.LightningModule):
    """Four features, three classes, one linear layer; a case overrides what it is about."""

    lr = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.make()

    def make(self) -> nn.Module:
        return nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss(self(x), x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def points(n: int) -> Records:
    """Features between .1 and .9; four of five labels are 0, so that gradients point one way."""
    generator = torch.Generator().manual_seed(1)
    x = 0.1 + 0.8 * torch.rand(n, 4, generator=generator)
    y = torch.tensor([0, 0, 1, 0, 0, 0, 0, 2, 0, 0])[torch.arange(n) % 10]
    return list(zip(x, y, strict=True))


class Rows(Dataset[Record]):
    """Records in a list."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]


@dataclass(frozen=True)
class Bad:
    """A module that lets a record move more than its own gradient.

    Args:
        make: returns it.
        kind: of coupling, in words.
        seen_by: the layer that is to see it first.
        odd: the record that takes the first one's place in the neighbouring data set.
        records: makes the others.
        steps: of the fits on neighbouring data sets.
        data: makes the data set of the records, if that is what mixes them.
        collate: the loader's ``collate_fn``.
        callbacks: makes the Trainer's, if they are at fault.
        epochs: of the fit with all checks.
        shown: False if neighbours by replacement in full batches do not show it.
    """

    make: Callable[[], L.LightningModule]
    kind: str
    seen_by: str
    odd: Callable[..., Record]
    records: Callable[[int], Records] = points
    steps: int = 3
    data: Callable[[Records], Dataset[Any]] = Rows
    collate: Callable[[list[Any]], Any] | None = None
    callbacks: Callable[[], list[L.Callback]] = list
    epochs: int = 4
    shown: bool = True

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", "")

    def neighbours(self, n: int) -> tuple[Records, Records]:
        """Two lists of n records that differ in the first one."""
        records = self.records(n)
        return records, [self.odd(*records[0]), *records[1:]]


@dataclass(frozen=True)
class Ordinary:
    """A module that keeps records apart, and must train with all checks on.

    Args:
        make: returns it.
        records: of its data set.
        trainer: arguments of the Trainer that it needs.
        collate: the loader's ``collate_fn``.
        data: makes the data set of the records.
    """

    make: Callable[[], L.LightningModule]
    records: Callable[[int], Records] = points
    trainer: dict[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    data: Callable[[Records], Dataset[Any]] = Rows

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", "")


def unchecked_fit(
    case: Bad, records: Records, noise_multiplier: float
) -> tuple[L.Trainer, DifferentialPrivacy]:
    """Train on full batches with the checks off, and neighbours by replacement."""
    privacy = DifferentialPrivacy(
        noise_multiplier=noise_multiplier,
        target_delta=1e-5,
        sampling=FullBatch(),
        relation="replace_one",
        **OFF,
    )
    trainer = _fit(
        case,
        records,
        len(records),
        [privacy, *case.callbacks()],
        max_steps=case.steps,
        max_epochs=-1,
    )
    return trainer, privacy


def checked_fit(
    case: Bad | Ordinary, records: Records, **arguments: Any
) -> tuple[L.Trainer, DifferentialPrivacy]:
    """Train on Poisson batches of about 16 records as a user does, with everything checked."""
    privacy = DifferentialPrivacy(noise_multiplier=8.0, target_delta=1e-5, **arguments)
    if isinstance(case, Bad):
        settings, callbacks = {"max_epochs": case.epochs}, case.callbacks()
    else:
        settings, callbacks = {"max_epochs": 2, **case.trainer}, []
    callbacks = [privacy, *callbacks, *settings.pop("callbacks", [])]  # type: ignore[misc]
    return _fit(case, records, 16, callbacks, **settings), privacy


def _fit(
    case: Bad | Ordinary,
    records: Records,
    batch_size: int,
    callbacks: Sequence[L.Callback],
    **settings: Any,
) -> L.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=list(callbacks),
            **settings,
        )
        loader = DataLoader(case.data(records), batch_size, collate_fn=case.collate)
        trainer.fit(case.make(), loader)
    return trainer


BAD: dict[str, Bad] = {}
ORDINARY: dict[str, Ordinary] = {}


def bad(**about: Any) -> Callable[[Any], Any]:
    """Enter a class or function that returns a module into the list of bad ones."""

    def enter(make: Any) -> Any:
        BAD[make.__name__] = Bad(make, **{"odd": far, **about})
        return make

    return enter


def ordinary(make: Any = None, **about: Any) -> Any:
    """Do the same for the ordinary ones."""
    if make is None:
        return lambda each: ordinary(each, **about)
    ORDINARY[make.__name__] = Ordinary(make, **about)
    return make


def far(x: Tensor, y: Tensor) -> Record:
    """Features of 3,000 and the rarest label: a large loss."""
    return torch.full_like(x, 3000.0), torch.full_like(y, 2)


def not_a_number(x: Tensor, y: Tensor) -> Record:
    return x * torch.nan, y
