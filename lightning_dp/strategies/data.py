"""The user's training loader, made private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_dp._world import World
from lightning_dp.private_run import PrivateRun
from lightning_dp.sampling.loader import ChunkSampler, PrivateDataLoader
from lightning_dp.strategies.checks import check_loader
from lightning_dp.strategies.fit_loop_only import check_asker

__all__ = ["make_private_loader"]


def make_private_loader(
    loader: object, trainer: Trainer, accumulate: int, run: PrivateRun, world: World
) -> PrivateDataLoader:
    """Replace the loader's batches by the private ones of the run's sampling scheme.

    Args:
        loader: what the user's ``train_dataloader`` gave, as Lightning prepared it.
        trainer: whose limits hold.
        accumulate: ``accumulate_grad_batches`` as the user set it.
        run: fixes the batches as a constant of the run.
        world: the processes; each draws from its own shard.

    Raises:
        MisconfigurationException: if its records cannot be sampled.
        ValueError: if the batches changed during the run, or differ between processes.
    """
    checked = check_loader(loader)
    num_records = len(checked.dataset)  # type: ignore[arg-type]
    if num_records != (of_lead := world.broadcast(num_records)):
        raise ValueError(
            f"Rank {world.rank} has a training set of {num_records} records, rank 0 one of "
            f"{of_lead}. Every rank must see the same data set; each draws from its own shard."
        )
    plan = run.config.sampling.plan(
        num_records=num_records,
        batch_size=checked.batch_size or 0,
        accumulate=accumulate,
        world_size=world.size,
        loader_length=len(checked),
    )
    run.use_batches(plan)
    sampler = ChunkSampler(
        plan,
        run.config.sampling,
        rank=world.rank,
        world_size=world.size,
        limit=_limit(plan.chunks_per_epoch, trainer.limit_train_batches),
        seed=run.config.seed,
        rate=run.rate,
        first_step=_FirstStep(run),
    )
    position = _PlaceInEpoch(trainer.fit_loop.epoch_loop.batch_progress)
    return PrivateDataLoader(checked, sampler, position=position, admit=check_asker)


@dataclass(frozen=True)
class _FirstStep:
    """The step of the run at which a pass of the loader begins."""

    run: PrivateRun

    def __call__(self) -> int:
        return self.run.step


@dataclass(frozen=True)
class _PlaceInEpoch:
    """The number of chunks of the epoch that Lightning has fetched, by its own count."""

    progress: Any

    def __call__(self) -> int:
        return int(self.progress.current.ready)


def _limit(chunks: int, limit_train_batches: float | int | None) -> int:
    """How many chunks of an epoch Lightning will use."""
    if isinstance(limit_train_batches, int):
        return min(chunks, limit_train_batches)
    return chunks if limit_train_batches is None else int(chunks * limit_train_batches)
