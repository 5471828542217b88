"""What two ranks do, one scenario after another; each saves what it saw.

Usage: RANK=0|1 python ranks.py FOLDER SCENARIO [SCENARIO ...]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import Diff2, FullBatch, PrivacyConfig
from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.trusted_server import TrustedServer
from lightning_dp.functional import flatten

SIZES = (40, 25)  # records of the ranks
COLLECTIVES = ("broadcast", "gather", "all_gather", "reduce", "all_reduce", "scatter")


class Net(L.LightningModule):
    """Each rank starts from its own weights; rank 0's count."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Flat(L.LightningModule):
    """20,000 weights whose gradient is zero: what moves them is the noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(200, 100, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(torch.zeros(len(batch[0]), 200)).sum(1).mean()


def records(rank: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(SIZES[rank], 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(SIZES[rank]) % 3)


class Watched(LocalRecords):
    """Keeps the sums, for the test to look for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sums: list[Tensor] = []

    def bounded_sum(self, query: Query, records: Any) -> BoundedSum:
        answer = super().bounded_sum(query, records)
        self.sums.append(answer.value.clone())
        return answer


def listen() -> list[Tensor]:
    """Everything that collectives leave on this rank from now on."""
    heard: list[Tensor] = []

    def after(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = collective(*arguments, **options)
            for each in [*arguments, *options.values()]:
                tensors = each if isinstance(each, list) else [each]
                heard.extend(t.detach().clone().flatten() for t in tensors if torch.is_tensor(t))
            return result

        return call

    for name in COLLECTIVES:
        setattr(dist, name, after(getattr(dist, name)))
    return heard


class Spoilt(Watched):
    """Its sums are not finite from the second on, on rank 1."""

    def bounded_sum(self, query: Query, records: Any) -> BoundedSum:
        answer = super().bounded_sum(query, records)
        if len(self.sums) > 1 and int(os.environ["RANK"]) == 1:
            return BoundedSum(answer.value + float("inf"), answer.clip_norm)
        return answer


def refused(rank: int, folder: Path, rounds: int, **privacy: Any) -> dict[str, Any]:
    try:
        train(rank, folder, rounds, **privacy)
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def train(rank: int, folder: Path, rounds: int, **privacy: Any) -> dict[str, Any]:
    module = privacy.pop("module", None) or Net(rank)
    sample_rate = privacy.pop("sample_rate", 1.0)
    momentum = privacy.pop("momentum", 0.0)
    local = privacy.pop("local", Watched)(module, records(rank), chunk_size=16)
    before = local.point
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=momentum)
    config = PrivacyConfig(**{"target_delta": 1e-5, "sampling": FullBatch(), **privacy})
    training = TrustedServer(local, optimizer, config, sample_rate=sample_rate)
    training.fit(rounds, folder / f"rank-{rank}")
    return {
        "before": before,
        "after": flatten(list(module.parameters())),
        "sums": local.sums,
        "epsilon": training.epsilon,
        "steps": training.private_run.steps,
        "reason": training.private_run.stop_reason,
    }


SCENARIOS: dict[str, Callable[[int, Path], dict[str, Any]]] = {
    "diff2": lambda rank, folder: train(
        rank, folder, 7, noise_multiplier=0.0, estimator=Diff2(3, 0.5, 0.4), momentum=0.5
    ),
    "heard": lambda rank, folder: train(
        rank, folder, 3, noise_multiplier=2.0, seed=1, estimator=Diff2(3, 0.5, 0.4)
    ),
    "noise": lambda rank, folder: train(
        rank, folder, 1, noise_multiplier=3.0, max_grad_norm=2.0, seed=2, module=Flat()
    ),
    "budget": lambda rank, folder: train(
        rank, folder, 100, target_epsilon=2.0, noise_multiplier=3.0
    ),
    "spoilt": lambda rank, folder: refused(rank, folder, 2, noise_multiplier=3.0, local=Spoilt),
    "unlike": lambda rank, folder: refused(
        rank, folder, 2, noise_multiplier=3.0, module=Flat() if rank else None
    ),
    "poisson": lambda rank, folder: train(
        rank, folder, 20, sample_rate=0.02, noise_multiplier=1.0, sampling=_poisson()
    ),
}


def _poisson() -> Any:
    from lightning_dp import Poisson

    return Poisson()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    heard = listen()
    for name in sys.argv[2:]:
        heard.clear()
        result = SCENARIOS[name](rank, folder / name)
        torch.save({**result, "heard": list(heard)}, folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()
