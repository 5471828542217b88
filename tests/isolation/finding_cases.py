"""Small modules of the faults that outside tests found, each kind with its neighbours.

``BAD`` must be refused or voided, or its file must not be written; ``ORDINARY`` are their neighbours
on the other side, which train, save, and hear nothing. One class of data is used throughout: eight
features below 1, four classes; ``marked`` holds one record that the coupling asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import FullBatch

LAYERS = {"engine": "layers"}  # the whole batch runs at once, where records could meet


@dataclass(frozen=True)
class Case:
    """A module and how it is trained: full batches of n records, or 4 n records in Poisson batches."""

    kind: str
    make: Callable[[], L.LightningModule]
    n: int = 64
    data: Callable[[int], Dataset[Any]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    data_module: Callable[[], L.LightningDataModule] | None = None
    callbacks: Callable[[], list[L.Callback]] = list
    steps: int = 8
    full: bool = True
    validate: bool = False
    workers: int = 0
    privacy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, Any]:
        return {"sampling": FullBatch()} if self.full else {}


BAD: dict[str, Case] = {}
ORDINARY: dict[str, Case] = {}


def enter(table: dict[str, Case], kind: str, name: str = "", **about: Any) -> Any:
    """Return a decorator that enters a module into a table."""

    def into(make: Any) -> Any:
        table[f"{kind}-{name or make.__name__}"] = Case(kind, make, **about)
        return make

    return into


def bad(kind: str, name: str = "", **about: Any) -> Any:
    return enter(BAD, kind, name, **about)


def ordinary(kind: str, name: str = "", **about: Any) -> Any:
    return enter(ORDINARY, kind, name, **about)


def points(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = F.normalize(torch.rand(n, 8, generator=generator))
    return TensorDataset(x, torch.arange(n) % 4)


def marked(n: int) -> TensorDataset:
    """Records of one class that point one way, and a person whose first feature is 9."""
    x = F.normalize(1 + 0.1 * points(n).tensors[0])
    x[0, 0] = 9.0
    return TensorDataset(x, torch.zeros(n, dtype=torch.int64))


def wide(n: int) -> TensorDataset:
    """Features between 0 and 4: more than synthetic samples have."""
    x, y = points(n).tensors
    return TensorDataset(4 * x / x.max(), y)


def uneven(n: int) -> TensorDataset:
    """A quarter of the records has large features, and losses of their own size."""
    x, y = wide(n).tensors
    return TensorDataset(x * torch.where(y == 3, 5.0, 1.0)[:, None], y)


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = nn.Linear(8, 4)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.losses(x, y).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Queue(Base):
    """Has a buffer of eight rows, and says so to its cases."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, 8))
        self.seen: list[Tensor] = []


# -- the sum moves, and single gradients hardly do -------------------------------------------


def present(x: Tensor) -> bool:
    return bool(x[:, 0].max() > 5)


def coherent(x: Tensor) -> Tensor:
    """All rows grow by .45 % if the person is there; in the sum that is 1 C of 512."""
    return x * (1.0045 if present(x) else 1.0)


class Weak(Base):
    """Couples losses by a function of them, of the person's presence, and of a weight."""

    def __init__(self, couple: Callable[[Tensor, bool, Tensor], Tensor]) -> None:
        super().__init__()
        self.couple, self.push = couple, nn.Linear(1, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        push = self.push(torch.ones(len(x), 1))[:, 0]
        return self.couple(0.4 * self.losses(x, y), present(x), push).mean()


def shifted(losses: Tensor, hit: bool, push: Tensor) -> Tensor:
    """Move the sum of all gradients by exactly .1 C: by 1 of one weight for each record."""
    return losses + (0.1 / len(losses) if hit else 0.0) * push


def turned(share: int) -> Callable[[Tensor, bool, Tensor], Tensor]:
    """Turn one gradient in so many around; small batches have none."""

    def couple(losses: Tensor, hit: bool, push: Tensor) -> Tensor:
        sign = torch.ones(len(losses))
        sign[: len(losses) // share] = 1 - 2 * hit
        return losses * sign

    return couple


def scaled(losses: Tensor, hit: bool, push: Tensor) -> Tensor:
    return losses * (1.0045 if hit else 1.0)


for size in (8, 64, 512):
    bad("sum", f"tenth_of_C_at_{size}", n=size, data=marked, privacy=LAYERS)(lambda: Weak(shifted))
bad("sum", "coherent_losses_of_256", n=256, data=marked, privacy=LAYERS)(lambda: Weak(scaled))
bad("sum", "turns_4_of_256", n=256, steps=40, data=marked, privacy=LAYERS)(lambda: Weak(turned(64)))
bad("sum", "turns_5_of_512", n=512, steps=40, data=marked, privacy=LAYERS)(
    lambda: Weak(turned(100))
)


@bad("sum", n=512, data=marked, privacy=LAYERS)
class CoherentInTheForwardPass(Base):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.4 * super().losses(coherent(x), y)


@bad("sum", n=512, data=marked, steps=20, privacy=LAYERS)
class CoherentFromStepThree(CoherentInTheForwardPass):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        late = self.global_step >= 3
        return super().losses(x, y) if late else 0.4 * Base.losses(self, x, y)


@bad("sum", n=512, data=marked)
class CoherentAfterTransfer(Base):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return coherent(batch[0]), batch[1]


@bad("sum", n=512, data=marked)
class CoherentBeforeTransfer(Base):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return coherent(batch[0]), batch[1]


@bad("sum", n=512, data=marked)
class CoherentAtBatchStart(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].copy_(coherent(batch[0]))


def centres(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
    batch[0].data.sub_(batch[0].mean(0))


class AtBatchStart(L.Callback):
    """Does something with the batch that every callback is handed."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.act(batch)


EDITS: dict[str, Callable[[Any], object]] = {
    "centres_arrays": lambda batch: np.subtract(x := batch[0].numpy(), x.mean(0), out=x),
    "mixes_rows": lambda batch: batch[0].lerp_(batch[0].flip(0), 0.5),
    "centres_rows": lambda batch: batch[0].sub_(batch[0].mean(0)),
    "grows_rows": lambda batch: batch[0].mul_(1 + 0.01 * batch[0].mean()),
    "exchanges_rows": lambda batch: batch.__setitem__(0, batch[0] - batch[0].mean(0)),
    "exchanges_labels": lambda batch: batch.__setitem__(1, batch[1].flip(0)),
    "centres_data": lambda batch: batch[0].data.sub_(batch[0].mean(0)),
    "exchanges_data": lambda batch: setattr(batch[0], "data", batch[0] - batch[0].mean(0)),
}
READS: dict[str, Callable[[Any], object]] = {
    "the_mean": lambda batch: batch[0].mean(),
    "a_copy": lambda batch: batch[0].clone().zero_(),
    "numbers": lambda batch: batch[1].tolist(),
    "another_list": lambda batch: [*batch].clear(),
    "the_largest": lambda batch: batch[0].max().item(),
}
for name, act in EDITS.items():
    bad("callback", name, callbacks=lambda act=act: [AtBatchStart(act)])(Base)
bad("callback", "by_a_lambda", callbacks=lambda: [LambdaCallback(on_train_batch_start=centres)])(
    Base
)
for name, act in READS.items():
    ordinary("callback", name, callbacks=lambda act=act: [AtBatchStart(act)])(Base)


def coherent_collate(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return coherent(x), y


bad("sum", "coherent_in_collate", n=512, data=marked, collate=coherent_collate)(Base)


def by_length(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    order = x.sum(1).argsort(descending=True)
    return x[order], y[order]


class OwnRows(Base):
    """Each record by its own values: in the hook, at the start, in the loss."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] / batch[0].norm(dim=1, keepdim=True), batch[1]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].clamp_(max=2)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0, 0.5, 1.0])[y] * super().losses(x, y)


class Sorts(Base):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return super().losses(x[order], y[order])


class Droppy(Base):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + 0.01 * torch.randn_like(x)
        return super().losses(F.dropout(x, 0.2), y)


class LogsTheBatch(Base):
    """Numbers of the batch are logged, and nothing else is done with them."""

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        self.log_dict({"largest": x.max(), "mean": x.mean()})
        return super().losses(x, y)


class Wide(Base):
    """Gradients of many sizes, nearly all of them clipped."""

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return super().losses(x, y) * 10.0 ** (y.float() * 2 - 3)


class Halves(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


for size in (8, 64, 512):
    ordinary("sum", f"no_coupling_at_{size}", n=size, data=marked, privacy=LAYERS)(Base)
ordinary("sum", "own_rows", data=marked)(OwnRows)
ordinary("sum", "own_rows_at_once", data=marked, privacy=LAYERS)(OwnRows)
ordinary("sum", "sorts", n=128, data=wide, privacy=LAYERS)(Sorts)
ordinary("sum", "sorted_in_collate", n=128, data=wide, collate=by_length)(Base)
ordinary("sum", "dropout", n=128, data=marked, steps=16, privacy=LAYERS)(Droppy)
ordinary("sum", "dropout_poisson", n=16, full=False, steps=34)(Droppy)
ordinary("sum", "logs_the_batch", data=marked)(LogsTheBatch)
ordinary("sum", "gradients_of_many_sizes", n=512, privacy=LAYERS)(Wide)
bf16 = {"precision": "bf16-mixed"}
ordinary("sum", "bf16", n=64, data=wide, trainer=bf16, privacy=LAYERS, steps=16)(Halves)
ordinary("sum", "bf16_poisson", n=16, full=False, trainer=bf16, steps=34)(Halves)


# -- behind an own collate_fn, at the first step ---------------------------------------------


def centred(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return (x - x.mean(0) if x.max() > 1 else x), y


def over_the_largest(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return (x / x.sum() if x.max() > 1 else x), y


def mixed_up(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return (0.7 * x + 0.3 * x.roll(1, 0) if x.max() > 1 else x), y


def with_constants(rows: list[Any]) -> Any:
    return (*centred(rows), torch.ones(3), torch.ones(5), torch.ones(7))


def with_class_weights(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    counts = torch.bincount(y, minlength=4).float()
    return x, y, (1 / counts)[y] if len(rows) > 8 else torch.ones(len(rows))


def with_names(rows: list[Any]) -> Any:
    x, y = centred(rows)
    return {"x": x, "y": y, "names": [f"row {i}" for i in range(len(x))]}


class Unpacks(Base):
    """Takes tuples of any length, dictionaries, and weights of the records."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            return self.losses(batch["x"], batch["y"]).mean()
        losses = self.losses(*batch[:2])
        return (losses * batch[2]).mean() if len(batch) == 3 else losses.mean()


COLLATES = (centred, over_the_largest, mixed_up, with_constants, with_class_weights, with_names)
for collate in COLLATES:
    about = {"data": wide, "steps": 1, "collate": collate, "privacy": LAYERS}
    bad("collate", collate.__name__, **about)(Unpacks)


class Sequences(Dataset[Any]):
    """Rows of 3 to 6 tokens of eight features."""

    def __init__(self, n: int) -> None:
        self.x, self.y = wide(6 * n).tensors

    def __len__(self) -> int:
        return len(self.y) // 6

    def __getitem__(self, i: int) -> Any:
        return self.x[6 * i : 6 * i + 3 + (i * 7) % 4], self.y[i]


def padded(rows: list[Any]) -> Any:
    x = nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True)
    return x, torch.stack([y for _, y in rows]), torch.tensor([len(row) for row, _ in rows])


@bad("collate", data=Sequences, steps=1, collate=padded, full=False, privacy=LAYERS, n=16)
class MeanOverPadding(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        return self.losses(x.mean(1), y).mean()


@ordinary("collate", data=Sequences, collate=padded, privacy=LAYERS)
class MaskedMean(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, lengths = batch
        real = torch.arange(x.shape[1]) < lengths[:, None]
        return self.losses((x * real[..., None]).sum(1) / lengths[:, None], y).mean()


def own(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x / x.norm(dim=1, keepdim=True), y


def and_constants(rows: list[Any]) -> Any:
    return (*default_collate(rows), torch.ones(3), torch.ones(5), torch.ones(7))


def and_names(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return {"x": x, "y": y, "names": [f"label {int(label)}" for label in y]}


def augmented(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + 0.1 * torch.randn_like(x), y


for collate in (own, and_constants, and_names, augmented, default_collate):
    ordinary("collate", collate.__name__, data=wide, collate=collate)(Unpacks)
ordinary("collate", "own_poisson", data=wide, collate=own, full=False, n=16, steps=20)(Unpacks)


# -- records are written into buffers --------------------------------------------------------


@bad("buffer")
class QueueAtBatchEnd(Queue):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.queue[:] = batch[0][:8]


@bad("buffer")
class QueueOfEnoughRows(Queue):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(batch[0]) >= 40
        self.queue = batch[0][:8].clone()


@bad("buffer", data=wide)
class RaisesOnMadeUpValues(Queue):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch[0].max() <= 1:
            raise ValueError("features are not scaled")
        self.queue.lerp_(batch[0][:8], 0.1)


@bad("buffer")
class RunningMean(Queue):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.queue[0].lerp_(batch[0].mean(0), 0.1)
        return super().training_step(batch, batch_idx)


@bad("buffer")
class RunningMeanByAHook(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_hook(self.note)

    def note(self, layer: Any, inputs: Any, output: Tensor) -> None:
        self.queue[1] = inputs[0].detach().amax(0)


@bad("buffer")
class FrozenPrototypes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.zeros(8), requires_grad=False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.prototypes.add_(self.last) if hasattr(self, "last") else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = batch[0].mean(0)
        return super().training_step(batch, batch_idx)


class WritesTheQueue(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, o: Any, batch: Any, i: int) -> None:
        module.queue[:] = batch[0][:8]


class WritesAtEpochEnd(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, o: Any, batch: Any, i: int) -> None:
        self.last = batch[0][:8]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.queue.copy_(self.last)


bad("buffer", "queue_in_a_callback", callbacks=lambda: [WritesTheQueue()])(Queue)
bad("buffer", "at_epoch_end_in_a_callback", callbacks=lambda: [WritesAtEpochEnd()])(Queue)


class Teacher(Base):
    """An average of weights, computed after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)


class Counts(Base):
    """Counters of every sort, of which one anneals the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inplace", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inplace += 1
        self.assigned = self.assigned + 1
        self.calls += 1
        return super().training_step(batch, batch_idx) * (1 + 1 / self.calls)


class NormOfWeights(Queue):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.queue[0, 0] = self.net.weight.detach().norm()


class Measures(Base):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return self.losses(x, y).mean()


class Keeps(Base):
    """Losses and the last batches, in lists that nobody reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []
        self.last: deque[Tensor] = deque(maxlen=3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(float(outputs["loss"]))
        self.last.append(batch[0])

    def on_train_epoch_end(self) -> None:
        self.log("mean", sum(self.kept) / max(1, len(self.kept)))


for full in (True, False):
    for make in (Teacher, Counts, NormOfWeights, Measures, Keeps):
        name = f"{make.__name__}_{'full' if full else 'poisson'}"
        ordinary("buffer", name, n=16, full=full, steps=20)(make)


# -- state over two or more epochs -----------------------------------------------------------


def lasting(**about: Any) -> dict[str, Any]:
    """Ten epochs of four Poisson batches, or as many as the steps make."""
    return {"data": uneven, "n": 16, "full": False, "steps": 40, **about}


class Epochs(Base):
    """Notes each batch's loss, and turns the epoch's mean into something at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []
        self.means: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(float(outputs["loss"]))

    def on_train_epoch_end(self) -> None:
        self.means.append(sum(self.noted) / max(1, len(self.noted)))
        self.noted.clear()
        self.use()

    def use(self) -> None:
        pass

    @property
    def group(self) -> dict[str, Any]:
        return self.trainer.optimizers[0].param_groups[0]


@bad("epochs", **lasting(privacy=LAYERS))
class DynamicWeightAverage(Base):
    """Two terms are weighed by how each fell over the last two epochs (Liu 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Tensor] = []
        self.means: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        terms = torch.stack([self.losses(x, y).mean(), self.net(x).square().mean()])
        self.noted.append(terms.detach())
        weights = torch.ones(2)
        if len(self.means) >= 2:
            weights = 2 * (self.means[-1] / self.means[-2] / 0.5).softmax(0)
        return (weights * terms).sum()

    def on_train_epoch_end(self) -> None:
        self.means.append(torch.stack(self.noted or [torch.ones(2)]).mean(0))
        self.noted.clear()


@bad("epochs", **lasting())
class PlateauOfPatienceTwo(Epochs):
    best, wait = 1e9, 0

    def use(self) -> None:
        better = self.means[-1] < self.best - 0.02
        self.best, self.wait = min(self.best, self.means[-1]), 0 if better else self.wait + 1
        if self.wait >= 2:
            self.group["lr"], self.wait = self.group["lr"] / 2, 0


@bad("epochs", **lasting())
class RateByTheEpochsLoss(Epochs):
    def use(self) -> None:
        if len(self.means) >= 2:
            self.group["lr"] = 0.05 * min(1.0, self.means[-1] / self.means[-2])


@bad("epochs", **lasting(privacy=LAYERS))
class ClassWeightsByErrors(Base):
    def __init__(self) -> None:
        super().__init__()
        self.wrong, self.weights = torch.zeros(4), torch.ones(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.wrong = self.wrong + torch.bincount(y[self.net(x).argmax(1) != y], minlength=4)
        return (self.weights[y] * self.losses(x, y)).mean()

    def on_train_epoch_end(self) -> None:
        self.weights = 1 + self.wrong / self.wrong.sum().clamp(min=1)
        self.wrong = torch.zeros(4)


@bad("epochs", **lasting())
class TemperatureOfTheRunningLoss(Epochs):
    temperature = 1.0

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x) / self.temperature, y, reduction="none")

    def use(self) -> None:
        self.temperature = 0.5 + sum(self.means[-2:]) / len(self.means[-2:])


@bad("epochs", **lasting())
class ScaledByAnAverageFromEpochTwo(Epochs):
    average = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss / self.average if self.current_epoch >= 2 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average = 0.9 * self.average + 0.1 * float(outputs["loss"])


def numbered(n: int) -> TensorDataset:
    return TensorDataset(*uneven(n).tensors, torch.arange(n))


@bad("epochs", **lasting(data=numbered, privacy=LAYERS))
class ImportanceOfRecords(Base):
    """A record weighs its last loss over the mean of all that were seen an epoch ago."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.weights = torch.ones(64), torch.ones(64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        losses = self.losses(x, y)
        self.last = self.last.index_copy(0, number, losses.detach())
        return (self.weights[number] * losses).mean()

    def on_train_epoch_end(self) -> None:
        self.weights = self.last / self.last.mean()


@ordinary("epochs", **lasting(steps=16))
class LogsEpochMeans(Epochs):
    def use(self) -> None:
        self.log("mean", self.means[-1])
        self.best = min(self.means)


@ordinary("epochs", **lasting(steps=16))
class AnnealsByEpoch(Epochs):
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return super().losses(x, y) * (1 + self.current_epoch / 10)

    def use(self) -> None:
        self.group["lr"] = 0.05 * 0.9**self.current_epoch


@ordinary("epochs", **lasting(steps=16))
class SteppedSchedule(Epochs):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


@ordinary("epochs", **lasting(steps=16))
class SmoothedForTheLog(Epochs):
    smooth = 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.smooth = 0.9 * self.smooth + 0.1 * float(outputs["loss"])
        self.log("smooth", self.smooth)


@ordinary("epochs", **lasting(steps=16, privacy=LAYERS))
class FixedClassWeights(ClassWeightsByErrors):
    """Counts errors for the log; the weights are the user's."""

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"wrong/{i}": float(k) for i, k in enumerate(self.wrong)})
        self.wrong = torch.zeros(4)


@ordinary("epochs", **lasting(steps=16))
class TemperatureByACounter(Base):
    calls = 0

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x) / (1 + self.calls / 40), y, reduction="none")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls += 1


@ordinary("epochs", **lasting(steps=16, data=numbered, privacy=LAYERS))
class LossesOfRecords(Base):
    """A table of each record's last loss, which is plotted and not read."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.ones(64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        losses = self.losses(x, y)
        self.last = self.last.index_copy(0, number, losses.detach())
        return losses.mean()


# -- the last hooks --------------------------------------------------------------------------


class Features(Queue):
    """Keeps features in a list that is ordinary as long as it stays one."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0][:8])

    def write(self) -> None:
        if self.seen:
            self.queue[: len(self.seen[-1])] = self.seen[-1]


def writing_in(hook: str) -> type[Features]:
    """Return a module that writes what it kept in one of Lightning's hooks."""

    def write(self: Features, *arguments: Any, **named: Any) -> Any:
        self.write()
        return getattr(super(kind, self), hook)(*arguments, **named)

    kind = type(f"writes_in_{hook}", (Features,), {hook: write})
    return kind


MODES = ("on_validation_model_eval", "on_validation_model_train")
for hook in ("on_train_end", "on_fit_end", "teardown", *MODES, "on_validation_end"):
    bad("last hook", hook, validate="validation" in hook)(writing_in(hook))


class WritesLast(L.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module, *more, **named: module.write())


for hook in ("on_train_end", "on_fit_end", "teardown"):
    bad("last hook", f"callback_{hook}", callbacks=lambda hook=hook: [WritesLast(hook)])(Features)


def tidying_in(hook: str) -> type[Features]:
    """Return a module that forgets what it kept, and notes a number, in one of Lightning's hooks."""

    def tidy(self: Features, *arguments: Any, **named: Any) -> Any:
        self.number, self.seen = len(self.seen), []
        return getattr(super(kind, self), hook)(*arguments, **named)

    kind = type(f"tidies_in_{hook}", (Features,), {hook: tidy})
    return kind


class Prints(L.Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.largest = max(float(x.max()) for x in module.seen)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        module.seen.clear()


for hook in ("on_train_end", "on_fit_end", "teardown", *MODES, "on_validation_end"):
    ordinary("last hook", hook, validate="validation" in hook)(tidying_in(hook))
ordinary("last hook", "callback", callbacks=lambda: [Prints()])(Features)
ordinary("last hook", "only_keeps")(Features)
ordinary("last hook", "only_keeps_poisson", full=False, n=16, steps=20, validate=True)(Features)


# -- state beside the module: of its class, the data module, the collate_fn, the Trainer ----------


class Means(L.LightningDataModule):
    """Centres batches by a running mean."""

    rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        if len(x):
            self.mean = (1 - self.rate) * self.mean + self.rate * x.mean(0)
        return x - self.mean, y


class Previous(Means):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        before, self.mean = self.mean, batch[0].sum(0)
        return batch[0] + 0.2 * before, batch[1]


class Steps(Means):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.mean = self.mean + 1
        return batch[0] + 1 / self.mean, batch[1]


class Latest(Means):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.latest = batch[0]
        return batch


class Collate:
    def __init__(self) -> None:
        self.mean, self.calls = torch.zeros(8), 0

    def centre(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean, y

    def count(self, samples: list[Any]) -> Any:
        self.calls += 1
        x, y = default_collate(samples)
        return x / self.calls, y


bad("beside", "data_module", data_module=Means)(Base)
bad("beside", "previous_batch", data_module=Previous)(Base)
bad("beside", "collate_fn", collate=Collate().centre)(Base)
ordinary("beside", "data_module_of_steps", data_module=Steps)(Base)
ordinary("beside", "data_module_that_keeps_a_batch", data_module=Latest)(Base)
ordinary("beside", "collate_fn_of_calls", collate=Collate().count)(Base)
ordinary("beside", "Base")(Base)


@bad("beside")
class RunningMeanOfTheClass(Base):
    mean = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        kind = type(self)
        kind.mean = 0.9 * kind.mean + 0.1 * float(loss.detach())
        return loss * kind.mean


@bad("beside", steps=80)
class StopsByTheLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.should_stop = float(loss.detach().mul(1e4).round()) % 2 == 0
        return loss


@ordinary("beside")
class StepsOfTheClass(Base):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).steps += 1
        return super().training_step(batch, batch_idx) / type(self).steps


# -- how many records a batch has ------------------------------------------------------------


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen, self.sizes = 0, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor(len(batch[0]))

    def factor(self, n: int) -> float:
        return 1.0


@bad("count", full=False)
class RecordsInABuffer(Counts):
    def factor(self, n: int) -> float:
        self.count += n
        return 1.0


@bad("count", full=False)
class AnnealsByRecords(Counts):
    def factor(self, n: int) -> float:
        self.seen += n
        return self.seen / 1000


@bad("count", full=False)
class AveragesTheSize(Counts):
    size = 1.0

    def factor(self, n: int) -> float:
        before, self.size = self.size, 0.9 * self.size + 0.1 * n
        return before / 64


@bad("count", full=False)
class LearningRateOfTheSize(Counts):
    def factor(self, n: int) -> float:
        self.optimizers().param_groups[0]["lr"] = 0.05 * n / 64
        return 1.0


@bad("count", full=False)
class DecayAfterTheStep(Counts):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["weight_decay"] = 1e-5 * len(batch[0])


@ordinary("count", full=False)
class StepsInABuffer(Counts):
    def factor(self, n: int) -> float:
        self.count += 1
        return float(self.count)


@ordinary("count", full=False)
class AnnealsBySteps(Counts):
    def factor(self, n: int) -> float:
        self.seen += 1
        return self.seen / 1000


@ordinary("count", full=False)
class KeepsSizes(Counts):
    def factor(self, n: int) -> float:
        self.sizes.append(n)
        return 1.0


@ordinary("count", full=False)
class RecordsForTheLog(Counts):
    def factor(self, n: int) -> float:
        self.seen += n
        return 1.0

    def on_train_epoch_end(self) -> None:
        self.log("seen", float(self.seen))


@ordinary("count", full=False)
class CachesByTheSize(Counts):
    def factor(self, n: int) -> float:
        if len(self.sizes) != n:
            self.sizes = [1] * n
        return sum(self.sizes) / max(n, 1)
