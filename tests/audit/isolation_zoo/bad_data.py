"""Records mix before ``training_step`` sees them: in the data set, the loader, or on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import default_collate

from isolation_zoo.cases import Record, Rows, Small, bad

COLLATE = "collate trial"
KIND = "records mix before the step"


def mixup(rows: list[Any]) -> Any:
    """The collate function of torchvision's manual."""
    x, y = default_collate(rows)
    return 0.2 * x + 0.8 * x.amax(0), y


def padded(rows: list[Any]) -> Any:
    """Rows of zeros are cut off, and the length of the longest is told to each."""
    x, y = default_collate(rows)
    return torch.cat([x[:, :3], (x.amax().expand(len(x), 1) > 30) * 10.0], 1), y


def by_class(rows: list[Any]) -> Any:
    """Weights of the classes of the batch."""
    x, y = default_collate(rows)
    return x * (1 + 3 * (y == 2).any()), y


def mixing(**about: Any) -> Any:
    return bad(**{"kind": KIND, "seen_by": COLLATE, **about})


@mixing(collate=mixup)
def collate_mixup() -> Small:
    return Small()


@mixing(collate=padded)
def collate_tells_the_longest() -> Small:
    return Small()


def one_class(n: int) -> list[Record]:
    return [(torch.full((4,), 0.5) + i % 7 / 20, torch.tensor(0)) for i in range(n)]


@mixing(collate=by_class, odd=lambda x, y: (x, 0 * y + 2), records=one_class)
def collate_looks_for_a_class() -> Small:
    return Small()


class Remembers(Rows):
    """Mixes a record with the one that was asked for before it."""

    last: Any = None

    def __getitem__(self, index: int) -> Record:
        x, y = super().__getitem__(index)
        before = x if self.last is None else self.last
        self.last = torch.maximum(x, before)
        return x / self.last.max(), y


@mixing(data=Remembers)
def data_set_with_memory() -> Small:
    return Small()


class Partner(Rows):
    """Mixes a record with another row of the data set: always the same one."""

    def __getitem__(self, index: int) -> Record:
        x, y = super().__getitem__(index)
        return (x + self.records[0][0]) / 2, y


@mixing(data=Partner, seen_by="nothing")
def data_set_reads_another_row() -> Small:
    return Small()


class Fitted(Rows):
    """Scales by what it found in all records when it was made."""

    def __init__(self, records: list[Record]) -> None:
        super().__init__(records)
        self.scale = max(float(x.max()) for x, _ in records)

    def __getitem__(self, index: int) -> Record:
        x, y = super().__getitem__(index)
        return x / self.scale, y


@mixing(data=Fitted, seen_by="nothing")
def data_set_fitted_to_all_records() -> Small:
    return Small()


@mixing(seen_by="probe")
class AfterTransfer(Small):
    """The hook for augmentations on the device normalises over the batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x / x.max(), y


@mixing(seen_by="probe")
class BeforeTransfer(Small):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x - x.mean(0), y


@mixing(seen_by="probe")
class Transfer(Small):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return x * torch.where(x.max() > 30, -1.0, 1.0), y


@mixing(seen_by="probe")
class BatchStartEditsTheBatch(Small):
    """A hook that is given the batch edits it in place."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].div_(batch[0].abs().max())
