"""Small models, data and Trainers that the tests share."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities import registry
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp.accounting._curve import Together
from lightning_dp.accounting._grid import GridSearch
from lightning_dp.callbacks import DifferentialPrivacy

torch.set_num_threads(1)

PAPERS = Path(__file__).parents[1] / "examples" / "papers"


class Classifier(L.LightningModule):
    """An ordinary LightningModule around any network."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


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
        self.passes = 0
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
        self.passes += 1
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
        unchecked = {"isolation_probe": False, "spot_checks": False}
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


def pytest_collection_finish() -> None:
    """Leave the tests and all modules out of garbage collections, which fits cause all the time."""
    gc.collect()
    gc.freeze()


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
    (Together, "values", once(Together.values)),
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
    """A small network with the same weights every time."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return make


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
def import_paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of examples/papers by name; it and its neighbours are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(PAPERS))
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(PAPERS)):
            del sys.modules[name]


@pytest.fixture
def run_paper(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script of examples/papers as a user does, from a temporary folder."""

    def run(name: str, *arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PAPERS / name), *arguments],
            cwd=tmp_path,
            env={**os.environ, "LIGHTNING_DP_DATA": str(data), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """A folder with something of the shape of MNIST: ten noisy patterns."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 160, (10, 28, 28))
    labels = rng.integers(0, 10, 7000).astype(np.uint8)
    images = (patterns[labels] + rng.integers(0, 96, (7000, 28, 28))).astype(np.uint8)
    np.savez(
        tmp_path / "mnist.npz",
        **{"X_train": images[:6000], "y_train": labels[:6000]},
        **{"X_test": images[6000:], "y_test": labels[6000:]},
    )
    return tmp_path


@pytest.fixture
def explains_missing_mnist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[ModuleType, tuple[str, ...]], None]:
    """Checks that a script of examples/papers stops at once and says where MNIST is looked for."""

    def check(script: ModuleType, arguments: tuple[str, ...]) -> None:
        monkeypatch.delenv("LIGHTNING_DP_DATA", raising=False)
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
        with pytest.raises(SystemExit) as stop:
            script.main()
        assert stop.value.code == 2
        said = capsys.readouterr().err
        for words in (
            "MNIST is missing",
            "--data DIR",
            "LIGHTNING_DP_DATA",
            "mnist.npz",
            "MNIST/raw/",
        ):
            assert words in said

    return check


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
