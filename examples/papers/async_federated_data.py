"""Data of async_federated.py, and the records that its clients hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import archives
import numpy as np
import torch
from outer_products import NetworkGradients, Outer
from torch import Tensor, nn
from trainee import Trainee

from lightning_dp.boundary import BoundedSum, Query, bounded_sum
from lightning_dp.functional import flatten, unflatten

# LeNet's steps on one record are faster without oneDNN.
torch.backends.mkldnn.enabled = False
COVERTYPE_CLASS = 2  # against the rest: LIBSVM's covtype.binary
TWO_DIGITS = "MNIST, 0 and 1"


@lru_cache(maxsize=2)
def binary(name: str, folder: str) -> tuple[Tensor, Tensor]:
    """Features with a constant column, and labels -1/+1, in a random order that never changes."""
    if name == TWO_DIGITS:
        images, digits, *_ = mnist(folder)
        chosen = digits <= 1
        x = images[chosen].flatten(1)
        return torch.cat([x, torch.ones(len(x), 1)], dim=1), digits[chosen].float() * 2 - 1
    path = archives.find(name, archives.folder_of(folder), name)
    if path is None:
        raise SystemExit(2)
    x, y = archives.read_whole(path)
    x = x.astype(np.float32)
    if name == "covertype_subset":
        y = np.where(y == COVERTYPE_CLASS, 1, -1)
        scale = np.abs(x).max(axis=0)  # these data are public: nothing here is private
        x = x / np.where(scale > 0, scale, 1)
    order = np.random.default_rng(0).permutation(len(y))
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)[order]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y[order], dtype=torch.float32)


@lru_cache(maxsize=1)
def mnist(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and digits, test images and digits."""
    x, y, x_test, y_test = (torch.tensor(np.ascontiguousarray(a)) for a in archives.mnist(folder))
    images = [(part.double() / 255).float().unsqueeze(1) for part in (x, x_test)]
    return images[0], y.long(), images[1], y_test.long()


def logistic_gradients(x: Tensor, y: Tensor, point: Tensor, decay: float) -> NetworkGradients:
    """g_i = c_i x_i + λ w, c_i = -y_i / (1 + exp(y_i x_i·w)): none is ever formed."""
    terms = [((-y * torch.sigmoid(-y * (x @ point)))[None], x.T)]
    if decay:
        terms.append((torch.full_like(y, decay)[None], point[:, None].expand(-1, len(y))))
    return NetworkGradients([Outer(tuple(terms))])


class LogisticRecords:
    """One client's records for logistic regression."""

    unit = "record"

    def __init__(self, x: Tensor, y: Tensor, weight_decay: float = 0.0) -> None:
        self._x, self._y, self._decay = x, y, weight_decay

    @property
    def num_records(self) -> int:
        return len(self._y)

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        (term,) = query.terms
        assert term.point is not None and term.weight == 1 and query.coordinates is None
        if query.clip_norm == float("inf") and len(records) == 1:
            return BoundedSum.received(self._gradient(term.point, records[0]), query)
        chosen = torch.as_tensor(records, dtype=torch.int64)
        x, y = self._x[chosen], self._y[chosen]
        return bounded_sum(logistic_gradients(x, y, term.point, self._decay), query.clip_norm)

    def _gradient(self, point: Tensor, record: int) -> Tensor:
        """One record's gradient, without the overhead of a batch: local steps ask for 20,000."""
        x, w, y = self._x[record].numpy(), point.numpy(), float(self._y[record])
        factor = -y / (1 + np.exp(min(y * float(x @ w), 80.0)))
        return torch.from_numpy(np.float32(factor) * x + np.float32(self._decay) * w)


def lenet() -> nn.Sequential:
    """The same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


class LeNetRecords(Trainee):
    """One client's digits; sums that are not clipped take one pass for all records."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        super().__init__(lenet(), images, digits)

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        if query.clip_norm < float("inf"):
            return super().bounded_sum(query, records)
        assert query.terms[0].point is not None
        load(self.params, query.terms[0].point)
        chosen = list(records)
        outputs = self.net(self.x[chosen])
        loss = nn.functional.cross_entropy(outputs, self.y[chosen], reduction="sum")
        return BoundedSum.received(flatten(torch.autograd.grad(loss, self.params)), query)


def load(params: Sequence[Tensor], point: Tensor) -> None:
    """Put a flat vector into a model."""
    with torch.no_grad():
        for param, value in zip(params, unflatten(point, params), strict=True):
            param.copy_(value)
