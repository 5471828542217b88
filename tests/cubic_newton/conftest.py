"""Logistic regression through a Trainer, and the same rounds written down in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CubicNewton
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.sparsify import shared_mask

Array = NDArray[np.float64]
RECORDS, FEATURES = 48, 5
SIZE = FEATURES + 1


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).double()


class Logistic(L.LightningModule):
    """Writes down the records of each step; a further pass over a chunk is not counted again."""

    def __init__(self, optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(FEATURES, 1).double()
        self.make_optimizer = optimizer
        self.chunks: dict[tuple[int, int], tuple[bool, list[int]]] = {}
        self.passes = 0
        self.seen: list[Tensor] = []  # the parameters that validation saw

    @property
    def batches(self) -> list[list[int]]:
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
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(x)[:, 0], y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.flat)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


@dataclass
class Fit:
    """``fit(estimator, ...)``: one private fit; what it left is in ``model`` and ``privacy``."""

    make_trainer: Callable[..., L.Trainer]
    model: Logistic = field(init=False)
    privacy: DifferentialPrivacy = field(init=False)
    trainer: L.Trainer = field(init=False)

    def __call__(
        self,
        estimator: Any,
        *,
        optimizer: Callable[[Any], Any] = sgd,
        batch_size: int = 12,
        ckpt_path: Any = None,
        callbacks: tuple[L.Callback, ...] = (),
        validate: bool = False,
        trainer: dict[str, Any] | None = None,
        **privacy: Any,
    ) -> Fit:
        self.model = Logistic(optimizer)
        self.privacy = DifferentialPrivacy(
            **{"target_delta": 1e-5, "estimator": estimator, **privacy}
        )
        options = {"enable_checkpointing": bool(callbacks), **(trainer or {})}
        self.trainer = self.make_trainer(callbacks=[self.privacy, *callbacks], **options)
        records = TensorDataset(torch.arange(RECORDS), *data())
        held_out = DataLoader(records, RECORDS) if validate else None
        loader = DataLoader(records, batch_size)
        self.trainer.fit(self.model, loader, held_out, ckpt_path=ckpt_path)
        return self

    @property
    def start(self) -> Array:
        return np.asarray(Logistic(sgd).flat)


@pytest.fixture
def fit(make_trainer: Callable[..., L.Trainer]) -> Fit:
    return Fit(make_trainer)


def design() -> tuple[Array, Array]:
    x, y = (np.asarray(part) for part in data())
    return np.concatenate([x, np.ones((RECORDS, 1))], axis=1), y


def gradients_and_hessians(params: Array) -> tuple[Array, Array]:
    """Of every record: (RECORDS, SIZE) and (RECORDS, SIZE, SIZE)."""
    x, y = design()
    p = 1 / (1 + np.exp(-x @ params))
    return (p - y)[:, None] * x, (p * (1 - p))[:, None, None] * x[:, :, None] * x[:, None, :]


@dataclass
class Twin:
    """The algorithm as the paper and the privacy rules write it, with dense Hessians."""

    newton: CubicNewton
    keep: int
    z: float
    noise: Callable[[int], Array]
    expected_batch_size: float
    learning_rate: float = 1.0

    def rounds(self, batches: list[list[list[int]]], x: Array) -> Array:
        """Each round: a batch for each inner step."""
        for t, of_steps in enumerate(batches):
            x = self._round(t, of_steps, x)
        return x

    def _round(self, t: int, batches: list[list[int]], x: Array) -> Array:
        n, tau = self.newton, self.newton.inner_steps
        c = shared_mask(n.mask_seed, t, SIZE, self.keep).numpy()
        g, h = gradients_and_hessians(x)
        g, h = g[:, c], h[:, c][:, :, c]
        theta, average = x[c], np.zeros(len(c))
        for s in range(tau):
            v = theta - x[c]
            length = float(np.linalg.norm(v))
            bound = math.sqrt(len(c) / SIZE) * (n.max_grad_norm + n.max_hessian_norm * length)
            u = (g + h @ v)[batches[s]]
            u = u * np.minimum(1, bound / np.linalg.norm(u, axis=1, keepdims=True))
            z = self.z if n.fresh_batches else self.z * math.sqrt(tau)
            total = u.sum(0) + z * bound * self.noise(len(c))
            slope = total / self.expected_batch_size + n.weight_decay * theta
            slope = slope + n.hessian_lipschitz / 2 * length * v
            size = 2 / (n.strong_convexity * (s + 2))
            theta = theta - min(size, n.max_step_size or math.inf) * slope
            if n.box is not None:
                theta = np.clip(theta, -n.box, n.box)
            average = average + 2 * (s + 1) / (tau * (tau + 1)) * theta
        moved = x.copy()
        moved[c] += self.learning_rate * (average - x[c])
        return moved


@pytest.fixture
def twin() -> type[Twin]:
    return Twin


@pytest.fixture
def optimum() -> Callable[[float], Array]:
    """The minimiser of the mean loss plus λ‖x‖²/2 over all records, by Newton's method."""

    def find(weight_decay: float) -> Array:
        x = np.zeros(SIZE)
        for _ in range(50):
            g, h = (part.mean(0) for part in gradients_and_hessians(x))
            x = x - np.linalg.solve(h + weight_decay * np.eye(SIZE), g + weight_decay * x)
        return x

    return find
