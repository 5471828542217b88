"""Small models, data and Trainers that the tests share."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities import registry
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp import Checks
from lightning_dp.accounting._grid import CurveSearch, GridSearch
from lightning_dp.callbacks import DifferentialPrivacy
from tests import zoo
from tests.zoo import Classifier

torch.set_num_threads(1)


class Noting(L.LightningModule):
    """Writes down the records of each step, for a twin; another pass over a chunk counts once."""

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer
        self.chunks: dict[tuple[int, int], tuple[bool, list[int]]] = {}
        passes: list[int] = []  # in closures, which no snapshot holds
        self.begin_pass, self.count_passes = lambda: passes.append(1), lambda: len(passes)
        self.seen: list[Tensor] = []  # the parameters that validation saw

    @property
    def batches(self) -> list[list[int]]:
        """The records of each step."""
        steps: list[list[int]] = []
        for first, indices in self.chunks.values():
            steps = [*steps, []] if first else steps
            steps[-1] += indices
        return steps

    @property
    def flat(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.parameters()).detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        chunk = self.trainer.train_dataloader.current
        records = index.tolist() if chunk.size else []
        self.chunks.setdefault((self.current_epoch, batch_idx), (chunk.first, records))
        self.begin_pass()
        loss = self.loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.flat)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


@dataclass
class Fit:
    """``fit(estimator, ...)``: one private fit; what it left is in ``model``, ``privacy``, ``trainer``.

    Args:
        net: makes the network.
        loss: of outputs and targets, a mean over the records.
        data: all records.
        lr: of SGD, where a test gives no optimizer.
    """

    make_trainer: Callable[..., L.Trainer]
    net: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: tuple[Tensor, Tensor]
    lr: float
    model: Noting = field(init=False)
    privacy: DifferentialPrivacy = field(init=False)
    trainer: L.Trainer = field(init=False)

    def __call__(
        self,
        estimator: Any = None,
        *,
        optimizer: Callable[[Any], Any] | None = None,
        batch_size: int = 12,
        workers: int = 0,
        ckpt_path: Any = None,
        callbacks: tuple[L.Callback, ...] = (),
        validate: bool = False,
        trainer: dict[str, Any] | None = None,
        **privacy: Any,
    ) -> Fit:
        self.model = self._fresh_model(optimizer or self._sgd)
        unchecked = {"checks": Checks(dry_run=False, comparisons=False)}
        settings = {"target_delta": 1e-5, "estimator": estimator, **unchecked}
        self.privacy = DifferentialPrivacy(**{**settings, **privacy})
        options = {"enable_checkpointing": bool(callbacks), **(trainer or {})}
        self.trainer = self.make_trainer(callbacks=[self.privacy, *callbacks], **options)
        records = TensorDataset(torch.arange(len(self.data[0])), *self.data)
        held_out = DataLoader(records, len(records)) if validate else None
        loader = DataLoader(records, batch_size, num_workers=workers)
        self.trainer.fit(self.model, loader, held_out, ckpt_path=ckpt_path)
        return self

    @property
    def start(self) -> NDArray[np.float64]:
        """The parameters that every fit begins with."""
        return np.asarray(self._fresh_model(self._sgd).flat.double())

    def _sgd(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)

    def _fresh_model(self, optimizer: Callable[[Any], Any]) -> Noting:
        torch.manual_seed(0)
        return Noting(self.net(), self.loss, optimizer)


class Recorded(Dataset[tuple[Tensor, Tensor]]):
    """A data set that writes down which records were asked for (in this process)."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        return self.x[index], self.y[index]


# What takes longest in few tests. Begun last, one process would be left alone with it.
_LONGEST = (
    "tests/devices",
    "tests/package/test_install.py",
    "tests/strategies/processes",
    "tests/strategies/resume/test_killed.py",
    "tests/audit",
    "tests/models",
    "tests/package",
    "tests/callbacks",
    "tests/strategies",
    "tests/estimators",
    "tests/report",
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of pytest-xdist: files with many tests first


@pytest.hookimpl(tryfirst=True)  # before pytest leaves slow tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take, as pytest-xdist hands them out; leave cases to slow runs."""

    def place(item: pytest.Item) -> int:
        name = item.nodeid
        return next(
            (n for n, start in enumerate(_LONGEST) if name.startswith(start)), len(_LONGEST)
        )

    items.sort(key=place)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():  # as many of them run as ``few`` says, spread evenly
        (count,) = alike[0].get_closest_marker("few").args
        run = {len(alike) * k // count for k in range(count)}
        for n, item in enumerate(alike):
            if n not in run:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave the tests and all modules out of garbage collections, and make these rarer.

    Fits cause them all the time, and would spend a tenth of their time on them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def plugins_looked_for_once() -> Iterator[None]:
    """Every Trainer asks all installed packages for plugins, which takes a seventh of a small fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", cache(registry.entry_points))
        yield


@pytest.fixture(scope="session", autouse=True)
def disks_not_waited_for() -> Iterator[None]:
    """A killed process loses nothing that it wrote; only a power cut could, and none is made here."""

    def look(descriptor: int) -> None:
        os.fstat(descriptor)  # of an open file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", look)
        yield


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is not run again for arguments of the same content."""
    known: dict[bytes, Any] = {}

    def remembered(*arguments: Any) -> Any:
        content = pickle.dumps(arguments)
        if content not in known:
            known[content] = function(*arguments)
        return copy.copy(known[content])

    return remembered


_ACCOUNTED = (
    (GridSearch, "worst_direction", once(GridSearch.worst_direction)),
    (GridSearch, "profile", once(GridSearch.profile)),
    (CurveSearch, "values", once(CurveSearch.values)),
)


@pytest.fixture(autouse=True)
def plans_accounted_once() -> Iterator[None]:
    """The curve and the profile of ε take longer than a small fit, and most of these are alike."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, name, function in _ACCOUNTED:
            patch.setattr(kind, name, function)
        yield


@pytest.fixture(autouse=True)
def loggers_stay_as_they_are() -> Iterator[None]:
    """Scripts that a test runs make Lightning quiet, and the next test may want to hear it."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch")]
    before = [(each.level, each.propagate) for each in loggers]
    yield
    for each, (level, propagates) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.propagate = propagates


@pytest.fixture
def classifier() -> type[Classifier]:
    return Classifier


@pytest.fixture
def recorded() -> type[Recorded]:
    return Recorded


@pytest.fixture
def mlp() -> Callable[[], nn.Sequential]:
    return zoo.mlp


@pytest.fixture
def blobs() -> TensorDataset:
    """240 records, 6 features, 3 classes."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(240) % 3
    x = torch.randn(240, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6)
    return TensorDataset(x, y)


@pytest.fixture
def loader(blobs: TensorDataset) -> DataLoader[Any]:
    return DataLoader(blobs, batch_size=24, shuffle=True)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """A quiet CPU Trainer whose files go to a temporary folder."""

    def make(**arguments: Any) -> L.Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        return L.Trainer(**{**quiet, **arguments})

    return make


@pytest.fixture
def make_fit(make_trainer: Callable[..., L.Trainer]) -> Callable[..., Fit]:
    return partial(Fit, make_trainer)


@pytest.fixture
def at_each_step() -> Callable[[Callable[[L.Trainer, Any], None]], L.Callback]:
    """A callback that calls a function after every chunk."""

    class Calls(L.Callback):
        def __init__(self, function: Callable[[L.Trainer, Any], None]) -> None:
            self.function = function

        def on_train_batch_end(
            self, trainer: L.Trainer, pl_module: Any, *args: Any, **kwargs: Any
        ) -> None:
            self.function(trainer, pl_module)

    return Calls


@pytest.fixture
def weights() -> Callable[[nn.Module], Tensor]:
    """All parameters as one flat vector of their own."""

    def flat(module: nn.Module) -> Tensor:
        return torch.cat([p.detach().flatten().clone() for p in module.parameters()])

    return flat


@pytest.fixture
def dense() -> Callable[[int, float], NDArray[np.float64]]:
    """A_σ = I - σL, entry by entry: each row of L has a 1 for either neighbour on the circle."""

    def matrix(d: int, sigma: float) -> NDArray[np.float64]:
        laplacian = np.zeros((d, d))
        for i in range(d):
            laplacian[i, i] -= 2
            laplacian[i, (i + 1) % d] += 1
            laplacian[i, (i - 1) % d] += 1
        return np.eye(d) - sigma * laplacian

    return matrix
