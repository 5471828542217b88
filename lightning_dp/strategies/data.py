"""The user's training loader, made private: drawn batches, in order, for the fit loop alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sized
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, TypeGuard

from lightning.pytorch import Trainer
from lightning.pytorch.loops import fetchers, training_epoch_loop
from lightning.pytorch.utilities import combined_loader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._world import World
from lightning_dp.config import PrivacyConfig
from lightning_dp.isolation.requirements import MisconfigurationError, check_loader, repeated_record
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import AbstractSampling, FixedOrder, TruncatedPoisson
from lightning_dp.sampling.blocks import AbstractBlockSampling
from lightning_dp.sampling.loader import Chunk, ChunkSampler, PrivateDataLoader
from lightning_dp.sampling.repeats import digest_of_rows
from lightning_dp.sampling.stream import Stream, by_place, in_workers
from lightning_dp.sampling.units import RowsOfUnits

__all__ = [
    "before_transfer",
    "changed_rows",
    "check_limit",
    "check_rate",
    "check_same_units",
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
    if isinstance(run.config.sampling, FixedOrder) and _is_stream(loader):
        loader = by_place(_checked_stream(loader, run.config, run.config.sampling, world))
        run.not_covered = (*(each for each in run.not_covered if each != _STREAM), _STREAM)
    checked = check_loader(loader)
    units = run.config.rows_of_units(checked.dataset)
    num_records = len(checked.dataset if units is None else units)  # type: ignore[arg-type]
    _check_block(checked, trainer, run.config.sampling)
    check_limit(run.config, world)
    check_same_units(checked.dataset, units, num_records, run.config.unit_word, world)
    plan = run.config.sampling.plan(
        num_records=num_records,
        batch_size=checked.batch_size or 0,
        accumulate=accumulate,
        world_size=world.size,
        loader_length=_length(checked, num_records, world),
    )
    run.use_batches(plan, world.size)
    sampler = ChunkSampler(
        plan,
        run.config.sampling,
        rank=world.rank,
        world_size=world.size,
        limit=_limit(plan.chunks_per_epoch, trainer.limit_train_batches),
        seed=run.config.seed,
        draw=run.draw,
        rate=run.rate,
        first_step=partial(getattr, run, "step"),
        units=units,
        secure=run.config.secure_noise,
    )
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return PrivateDataLoader(
        checked,
        sampler,
        position=partial(attrgetter("current.ready"), progress),  # fetched, by Lightning's count
        admit=_check_asker,
        each_alone=run.config.runs_each_record_alone and units is None,
    )


def check_same_units(
    dataset: object,
    units: RowsOfUnits | None,
    num_records: int,
    unit_word: str,
    world: World,
) -> None:
    """Refuse processes that do not share the same records, or users with the same rows.

    Otherwise one could be in the batches of two processes, each in the place of another.
    """
    chosen = digest_of_rows(dataset) if world.size > 1 else ""
    mine = (num_records, None if units is None else units.digest, chosen)
    number, rows, chosen_there = world.broadcast(mine)
    if num_records != number:
        raise RefusedSetting(
            f"Rank {world.rank} has a training set of {num_records} {unit_word}s, rank 0 "
            f"one of {number}. Every rank must see the same data set; each draws from its own shard.",
            topic="ranks-differ",
        )
    if chosen != chosen_there:
        raise RefusedSetting(
            f"Rank {world.rank} has other records in its training set than rank 0, or in another order. "
            "One could be in a batch twice. A split or shuffle without a seed is another one in each "
            "process: call lightning.seed_everything(0) before it, or give it a seeded generator.",
            topic="ranks-differ",
        )
    if units is not None and units.digest != rows:
        raise RefusedSetting(
            f"Rank {world.rank} has other rows for the {unit_word}s of its training set than rank 0: "
            "UserLevel(ids=...) or the order of the rows differs. Build both in the same way on every "
            "rank; hash() of a text does not, so give the text itself as the id.",
            topic="ranks-differ",
        )


def check_limit(config: PrivacyConfig, world: World) -> None:
    """Refuse a limit in each of several processes, where one record less moves others between them.

    Which records share a limit would then differ, and the sum be another one by more than 2 C.
    """
    keeps_places = config.relation == "replace_one" and config.unit is None
    if isinstance(config.sampling, TruncatedPoisson) and world.size > 1 and not keeps_places:
        raise RefusedSetting(
            f"sampling={config.sampling} with {world.size} processes: with one {config.unit_word} more "
            "or less others meet the limit of another process, which has no bound here. Use one process, "
            "or sampling=Poisson(); relation='replace_one', of records, has a bound.",
            topic="batch-limit",
        )


def _length(loader: DataLoader[Any], num_records: int, world: World) -> int:
    """Return the batches in which a process would see its share of the records, or units."""
    if num_records == len(loader.dataset):  # type: ignore[arg-type]
        return len(loader)
    batches = math.ceil(num_records / world.size) / (loader.batch_size or 1)
    return max(1, int(batches) if loader.drop_last else math.ceil(batches))


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


_STREAM = "a record that a stream (or two workers) gives twice in a pass: of other data it is seen"


def _is_stream(loader: object) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _checked_stream(
    loader: DataLoader[Any], config: PrivacyConfig, sampling: FixedOrder, world: World
) -> DataLoader[Any]:
    """Return a loader of a stream, if its records have a fixed place."""
    name = type(loader.dataset).__name__
    if not isinstance(loader.dataset, Sized):
        raise MisconfigurationError(
            f"The training set {name} is an IterableDataset without a length, so the expected batch size "
            "and the end of a pass are not known. Give it a __len__: the number of records in one pass.",
            topic="fixed-order",
        )
    if sampling.shuffle:
        raise MisconfigurationError(
            f"The training set {name} is an IterableDataset, and sampling={sampling}: no order but its "
            "own can be had. Use FixedOrder().",
            topic="fixed-order",
        )
    if config.has_several_rows:
        raise MisconfigurationError(
            f"The training set {name} is an IterableDataset, which gives each row once and in its own "
            "order: unit and augmentations need rows at any place. Use a data set with __getitem__.",
            topic="user-level",
        )
    workers, size = loader.num_workers, len(loader.dataset)
    found, lead = size, world.broadcast(workers)
    if workers > 1:  # of which each may have one block that is not full
        blocks = size // (loader.batch_size or 1) + workers + 1
        found = sum(islice(in_workers(loader, len, persistent=False), blocks))
    if (found, workers) != (size, lead):
        raise MisconfigurationError(
            f"The training set {name} is an IterableDataset of {size} records, of which num_workers="
            f"{workers} (on rank 0: {lead}) gave {found if found <= size else 'more'}. As many workers "
            "on every rank must give one part each: islice(records, info.id, None, "
            "info.num_workers), info = torch.utils.data.get_worker_info(). Or use num_workers=1.",
            topic="fixed-order",
        )
    return loader


def _check_block(loader: DataLoader[Any], trainer: Trainer, sampling: AbstractSampling) -> None:
    """Refuse a loader of which records would come back earlier than batches of a block count on."""
    if not isinstance(sampling, AbstractBlockSampling):
        return
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        raise MisconfigurationError(
            f"Trainer(reload_dataloaders_every_n_epochs=...) with sampling={sampling}: another data set "
            "may have other records at the same places, and they would take part too soon. Leave it out.",
            topic="fixed-order",
        )
    # With several processes Lightning's own sampler is here, which shuffles whatever the user said; it
    # draws nothing in a private run.
    shuffles = isinstance(loader.sampler, RandomSampler)
    if shuffles and isinstance(sampling, FixedOrder) and not sampling.shuffle:
        raise MisconfigurationError(
            "The training loader has shuffle=True, which draws another order each epoch, and "
            "sampling=FixedOrder() repeats one: records would come back sooner than after a whole pass. "
            "Use DataLoader(shuffle=False), or FixedOrder(shuffle=True), which shuffles once.",
            topic="fixed-order",
        )


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
    caller = inspect.currentframe()
    for _ in range(2):  # the iteration that calls this, and who asks it
        # A frame that is held by its own variable would keep the batch until Python collects circles.
        caller = caller and caller.f_back
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


def changed_rows(loader: PrivateDataLoader, *, look: bool = True) -> str | None:
    """Return why steps may not be released: a record is named twice now, or came twice.

    Without a ``look`` at who is named, which takes time, only what reading has shown.
    """
    text = repeated_record(loader.dataset) if look else None
    if isinstance(loader.dataset, Stream):
        text = text or loader.dataset.fault
    return None if text is None else f"The training set was changed during fit. {text}"


def check_rate(chunk: Chunk, mechanism: Mechanism) -> None:
    """Refuse a chunk that was drawn for another step of the plan.

    Raises:
        RuntimeError: with both rates.
    """
    planned = mechanism.plan.rate(mechanism.step)
    if mechanism.plan.is_block and (
        chunk.step != mechanism.step or (mechanism.is_begun and chunk.first)
    ):
        raise RefusedRun(
            f"The batch was drawn for step {chunk.step}, and step {mechanism.step} is next: an optimizer "
            f"step was left out. With {mechanism.plan.sampling} records come back after a fixed number "
            "of steps, so each batch needs one. Step once per batch, or use sampling=Poisson().",
            topic="fixed-order",
        )
    if chunk.sample_rate != planned:
        raise RefusedRun(
            f"The batch was drawn with rate {chunk.sample_rate}, but step {mechanism.step} is "
            f"planned with {planned}: an optimizer step was left out. "
            f"{mechanism.plan.estimator} needs one for each batch.",
            topic="batches-and-steps",
        )
