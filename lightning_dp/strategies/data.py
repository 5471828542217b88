"""The user's training loader, made private: drawn batches, in order, for the fit loop alone."""

from __future__ import annotations

import inspect
from functools import partial
from operator import attrgetter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops import fetchers, training_epoch_loop
from lightning.pytorch.utilities import combined_loader
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dp._checks import MisconfigurationError, check_loader, repeated_record
from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._world import World
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun
from lightning_dp.sampling.loader import Chunk, ChunkSampler, PrivateDataLoader

__all__ = [
    "before_transfer",
    "changed_rows",
    "check_rate",
    "chunk_in_hand",
    "make_private_loader",
    "private_loader_of",
]


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
        raise RefusedSetting(
            f"Rank {world.rank} has a training set of {num_records} records, rank 0 one of "
            f"{of_lead}. Every rank must see the same data set; each draws from its own shard.",
            topic="ranks-differ",
        )
    plan = run.config.sampling.plan(
        num_records=num_records,
        batch_size=checked.batch_size or 0,
        accumulate=accumulate,
        world_size=world.size,
        loader_length=len(checked),
    )
    run.use_batches(plan, world.size)
    sampler = ChunkSampler(
        plan,
        run.config.sampling,
        rank=world.rank,
        world_size=world.size,
        limit=_limit(plan.chunks_per_epoch, trainer.limit_train_batches),
        seed=run.config.seed,
        rate=run.rate,
        first_step=partial(getattr, run, "step"),
    )
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return PrivateDataLoader(
        checked,
        sampler,
        position=partial(attrgetter("current.ready"), progress),  # fetched, by Lightning's count
        admit=_check_asker,
        each_alone=run.config.runs_each_record_alone,
    )


def private_loader_of(trainer: Trainer) -> PrivateDataLoader:
    """Return the private loader that the Trainer trains on.

    Raises:
        MisconfigurationException: if it has several, in a list or dict.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, PrivateDataLoader):
        raise MisconfigurationError(
            "train_dataloader gives several loaders (or one inside a list or dict). One ledger "
            "covers one data set: return a single DataLoader, for several private sets over a "
            "ConcatDataset. Public data need no ledger: read them from a DataLoader of the module's "
            "own, and add the gradient of their loss (torch.autograd.grad) to p.grad in "
            "on_before_optimizer_step, with "
            "checks=Checks(gradient_edits='adds the gradient of public data').",
            topic="several-loaders",
        )
    return loader


def _limit(chunks: int, limit_train_batches: float | int | None) -> int:
    """Return the number of chunks of an epoch that Lightning will use."""
    if isinstance(limit_train_batches, int):
        return min(chunks, limit_train_batches)
    return chunks if limit_train_batches is None else int(chunks * limit_train_batches)


_NAMELESS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
_ON_THE_WAY = (combined_loader.__name__, fetchers.__name__)


def _check_asker() -> None:
    """Refuse to hand out a batch but to Lightning's training epoch; call it where one is made.

    Only there is every batch charged before it is used. No state of the Trainer tells its request
    from one of a hook that runs between two batches, so this looks at who called.

    Raises:
        MisconfigurationException: naming the function that asked.
    """
    asked = inspect.currentframe()
    loader = asked and asked.f_back  # the iteration that calls this
    caller = loader and loader.f_back
    while caller is not None and caller.f_globals.get("__name__") in _ON_THE_WAY:
        caller = caller.f_back
    name = None if caller is None else caller.f_globals.get("__name__")
    if caller is not None and name == training_epoch_loop.__name__:
        return
    while caller is not None and caller.f_code.co_name in _NAMELESS:
        caller = caller.f_back
    where = "The program" if caller is None else f"{name}.{caller.f_code.co_name}"
    raise MisconfigurationError(
        f"{where} reads a batch from the Trainer's training loader, which only the training steps "
        "of fit may use: they charge each batch before its use. Anything else computed from its "
        "records (a centre, statistics, a prediction) would carry no noise and not be in epsilon. "
        "Use public data for it, in a DataLoader of your own.",
        topic="loader-elsewhere",
    )


def chunk_in_hand(loader: PrivateDataLoader, batch_idx: int) -> Chunk:
    """Return the chunk that the loader handed out last.

    Raises:
        RuntimeError: if it is not batch ``batch_idx`` of the epoch.
    """
    chunk = loader.current
    if chunk is None or chunk.index != batch_idx:
        raise RefusedRun(
            f"Batch {batch_idx} of the epoch is not the one that the loader handed out last. "
            "Something fetches batches ahead or skips them; private batches go one by one.",
            topic="batches-and-steps",
        )
    return chunk


def before_transfer(trainer: Trainer, batch: Any) -> Any:
    """Return a batch after the user's hook for batches that are not on the device yet."""
    of_data = getattr(trainer, "datamodule", None)
    name = "on_before_batch_transfer"
    is_of_data = of_data is not None and is_overridden(name, of_data)
    owner: Any = of_data if is_of_data else trainer.lightning_module
    return owner.on_before_batch_transfer(batch, 0)


def changed_rows(loader: PrivateDataLoader) -> str | None:
    """Return why steps may not be released, if somebody has had a record named twice since."""
    text = repeated_record(loader.dataset)
    return None if text is None else f"The training set was changed during fit. {text}"


def check_rate(chunk: Chunk, mechanism: Mechanism) -> None:
    """Refuse a chunk that was drawn for another step of the plan.

    Raises:
        RuntimeError: with both rates.
    """
    planned = mechanism.plan.rate(mechanism.step)
    if chunk.sample_rate != planned:
        raise RefusedRun(
            f"The batch was drawn with rate {chunk.sample_rate}, but step {mechanism.step} is "
            f"planned with {planned}: an optimizer step was left out. "
            f"{mechanism.plan.estimator} needs one for each batch.",
            topic="batches-and-steps",
        )
