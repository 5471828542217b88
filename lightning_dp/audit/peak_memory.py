"""Peak memory of a private step by the records in its physical batches, and which of them fit."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dp._validate import explained, instance, listed, optional, positive, whole
from lightning_dp.config import PrivacyConfig
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.pools import pool_that_runs
from lightning_dp.isolation.synthetic import ValidLabels, take_rows
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import FullBatch
from lightning_dp.sampling.schemes import factorisations, largest_chunk
from lightning_dp.schedules import Constant
from lightning_dp.strategies.install import install

__all__ = [
    "MemoryLine",
    "PhysicalBatch",
    "measure_memory",
    "suggest_physical_batch",
]

_STEPS = 3  # the first makes the optimizer's state, the second is a difference where there are some
_CHUNKS = 2  # so that there is a sum to add to
_POOL = 8  # records that pool_that_runs makes
_SHARE = 0.9  # of a GPU's memory: its allocator needs some room
_CHANCE = 1e-9
_SETTLED = {"accumulate_grad_batches", "callbacks", "devices", "max_epochs", "max_steps"}


@dataclass(frozen=True)
class MemoryLine:
    """Peak memory of private steps: ``fixed + per_record * records`` bytes, a line above what was seen.

    Args:
        device: where it was measured.
        fixed: bytes without records: parameters, optimizer, noise, sums.
        per_record: bytes for each record of a physical batch.
        measured: ``(records, bytes)`` of each measurement.
    """

    device: str
    fixed: float
    per_record: float
    measured: tuple[tuple[int, int], ...]

    def at(self, records: int) -> float:
        """Return the bytes at the peak with so many records in a physical batch."""
        return self.fixed + self.per_record * records

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size, _ in self.measured)
        return (
            f"memory = {_in_words(self.fixed)} + {_in_words(self.per_record)} · records "
            f"(measured on {self.device} with {sizes})"
        )


@dataclass(frozen=True)
class PhysicalBatch:
    """Arguments with which a step fits into the memory, and q is what it was.

    Args:
        batch_size: for the DataLoader.
        accumulate_grad_batches: for the Trainer.
        sample_rate: q, unchanged.
        num_records: N, the size of the data set.
        chunk: records in the largest physical batch, except with probability ``chance`` per step.
        chance: that probability.
        predicted: bytes at the peak with that many.
        memory: bytes that there are.
        line: what was measured.
    """

    batch_size: int
    accumulate_grad_batches: int
    sample_rate: float
    num_records: int
    chunk: int
    chance: float
    predicted: float
    memory: float
    line: MemoryLine = field(repr=False)

    def __str__(self) -> str:
        return (
            f"DataLoader(..., batch_size={self.batch_size}), "
            f"Trainer(..., accumulate_grad_batches={self.accumulate_grad_batches})\n"
            f"q = {self.sample_rate:.6g} of {self.num_records} records, as before\n"
            f"peak {_in_words(self.predicted)} of {_in_words(self.memory)}, "
            f"with {self.chunk} records: Poisson batches vary, "
            f"and one is larger with probability {self.chance:g} per step\n"
            f"{self.line}"
        )


def measure_memory(
    module: LightningModule,
    loader: DataLoader[Any],
    privacy: PrivacyConfig,
    *,
    trainer: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = (8, 16, 32),
) -> MemoryLine:
    """Make a few private steps on synthetic records for each size, and fit a line.

    The steps are those of a Trainer with this privacy (engine, estimator, optimizer, noise), each on
    two chunks of exactly that size, on a journal that is thrown away. Of the loader's first batch
    only shapes, dtypes and nesting are used.

    GPU: ``torch.cuda.max_memory_allocated`` (or that of another accelerator's module), everything that
    torch holds. CPU: the peak of what
    torch's allocator hands out during the fit, by its profiler, and parameters, buffers and NumPy's
    noise (8 bytes for each trained parameter); not Python, libraries, nor your data set.

    Args:
        module: your model; copies are run.
        loader: your training loader.
        privacy: ``DifferentialPrivacy(...).config``.
        trainer: other arguments of your Trainer that matter to memory, such as ``precision`` and
            ``accelerator``. One device is used.
        sizes: records in the physical batches that are measured, at least two.

    Raises:
        ValueError: if fewer than two sizes are given, or the model cannot be run on synthetic records.
    """
    instance("module", module, LightningModule, of="measure_memory")
    instance("loader", loader, DataLoader, of="measure_memory")
    instance("privacy", privacy, PrivacyConfig, of="measure_memory")
    chosen = sorted({whole("sizes", size, 0) for size in listed("sizes", sizes, "numbers")})
    if len(chosen) < 2 or not chosen[0] >= 1:
        raise ValueError(f"sizes={tuple(sizes)} must be at least two different numbers above 0.")
    arguments = dict(trainer or {})
    if settled := _SETTLED & set(arguments):
        raise ValueError(f"trainer holds {sorted(settled)}, which the measurement sets itself.")
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    passes = Passes(module, privacy.engine, names, None)
    pool = _synthetic_records(passes, loader)
    measured, device = [], ""
    with passes.quietly(), _silent_trainer(), ValidLabels():
        for size in (chosen[0], *chosen):  # the first makes what is made once in a process
            peak, device = _peak(copy.deepcopy(module), pool, size, privacy, arguments)
            measured.append((size, peak))
    measured = measured[1:]
    # The least squares' slope, and the lowest line of that slope with no measurement above it.
    x, y = np.array(measured, dtype=float).T
    slope = max(float(np.polyfit(x, y, 1)[0]), 0.0)
    return MemoryLine(device, float(np.max(y - slope * x)), slope, tuple(measured))


def suggest_physical_batch(
    module: LightningModule,
    loader: DataLoader[Any],
    privacy: PrivacyConfig,
    *,
    memory: float | None = None,
    accumulate_grad_batches: int = 1,
    world_size: int = 1,
    trainer: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = (8, 16, 32),
) -> PhysicalBatch:
    """Find the largest physical batch that fits, with the logical batch and so q exactly as they are.

    Of all ``(batch_size, accumulate_grad_batches)`` with the same product, the one with the largest
    ``batch_size`` whose largest chunk (see ``sampling.schemes.largest_chunk``) fits by
    :func:`measure_memory`. The noise and ε are those of the logical batch, so nothing changes but
    the time. (With ``drop_last=True`` an epoch may get another number of steps.)

    Args:
        module: your model; copies are run.
        loader: your training loader, with the ``batch_size`` that you would like to have. Its first
            batch is fetched for the shapes; no value of it is used.
        privacy: ``DifferentialPrivacy(...).config``, with Poisson sampling. (With full batches the
            loader's ``batch_size`` may be anything: see :func:`measure_memory`.)
        memory: bytes that a step may take on the device; by default 90 % of what is free on the
            GPU. Must be given on the CPU, where it is memory for tensors, without Python, libraries
            and the data set.
        accumulate_grad_batches: of your Trainer.
        world_size: processes of your Trainer.
        trainer: other arguments of your Trainer that matter to memory, such as ``precision`` and
            ``accelerator``. One device is used.
        sizes: records in the physical batches that are measured.

    Raises:
        ValueError: if nothing fits, with the numbers; if an argument is out of range.
    """
    instance("privacy", privacy, PrivacyConfig, of="suggest_physical_batch")
    if not privacy.sampling.follows_loader:
        raise ValueError(
            f"sampling={privacy.sampling} cuts its batches itself, so batch_size does not change q: "
            "ask measure_memory() for the line and take the largest batch_size that fits."
        )
    accumulate_grad_batches = whole("accumulate_grad_batches", accumulate_grad_batches)
    world_size = whole("world_size", world_size)
    memory = optional(explained(positive, "It is in bytes."))("memory", memory)
    logical = int(loader.batch_size or 0) * accumulate_grad_batches
    pairs = factorisations(logical)
    num_records = len(loader.dataset)  # type: ignore[arg-type]
    estimator = privacy.resolved_estimator()
    rates = [estimator.traits.relative_rate(step) for step in range(estimator.traits.period)]
    line = measure_memory(module, loader, privacy, trainer=trainer, sizes=sizes)
    there_is = _free(line.device) if memory is None else memory
    for batch_size, accumulate in pairs:
        chunk = largest_chunk(
            logical, accumulate, world_size, num_records, relative_rate=max(rates), chance=_CHANCE
        )
        found = PhysicalBatch(
            batch_size=batch_size,
            accumulate_grad_batches=accumulate,
            sample_rate=min(1.0, batch_size * accumulate * world_size / num_records),
            num_records=num_records,
            chunk=chunk,
            chance=_CHANCE,
            predicted=line.at(chunk),
            memory=there_is,
            line=line,
        )
        if found.predicted <= there_is:
            return found
    raise ValueError(_too_little(found))


def _too_little(smallest: PhysicalBatch) -> str:
    return (
        f"memory={_in_words(smallest.memory)} is too little: batch_size=1 and "
        f"accumulate_grad_batches={smallest.accumulate_grad_batches} need "
        f"{_in_words(smallest.predicted)} with {smallest.chunk} records in a physical batch; "
        f"{smallest.line}. Use a smaller model, an optimizer with less state, or another device."
    )


def _free(device: str) -> float:
    module: Any = None if device == "cpu" else torch.get_device_module(device)
    if not (hasattr(module, "mem_get_info") and hasattr(module, "memory_reserved")):
        raise ValueError(f"memory must be given, in bytes, for a run on {device}.")
    free, _ = module.mem_get_info(device)
    return _SHARE * float(free + module.memory_reserved(device))


# -- measuring ---------------------------------------------------------------------------------


def _synthetic_records(passes: Passes, loader: DataLoader[Any]) -> Any:
    """Make records like those of the loader's first batch on which the model runs."""
    with passes.quietly(), ValidLabels():
        try:
            return pool_that_runs(passes, next(iter(loader)))
        except Exception as error:  # its message may hold anything
            failure = type(error).__name__
    raise ValueError(
        f"module raised {failure} on synthetic records with the shapes of the loader's first "
        "batch, so nothing can be measured."
    )


@contextlib.contextmanager
def _silent_trainer() -> Iterator[None]:
    """Silence Lightning's lines about devices and the end of a fit."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Private(Callback):
    """Makes a Trainer private for a configuration that the callback would not take."""

    def __init__(self, run: PrivateRun) -> None:
        self._run = run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        install(trainer, self._run)


def _peak(
    module: LightningModule, pool: Any, size: int, privacy: PrivacyConfig, arguments: dict[str, Any]
) -> tuple[int, str]:
    """Return the bytes at the peak of a few steps on chunks of this size, and the device."""
    loader: DataLoader[Any] = DataLoader(
        range(_CHUNKS * size),  # type: ignore[arg-type]
        batch_size=size,
        collate_fn=lambda rows: take_rows(pool, [row % _POOL for row in rows]),
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "devices": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            privacy,
            target_epsilon=None,
            noise_multiplier=1.0,
            noise_schedule=Constant(),
            sampling=FullBatch(),
            isolation_probe=False,
            spot_checks=False,
            ledger_dir=folder,
        )
        fit = Trainer(
            **{**quiet, **arguments, "max_epochs": _STEPS, "default_root_dir": folder},
            callbacks=[_Private(PrivateRun(config))],
        )
        device = fit.strategy.root_device
        return _peak_of(lambda: fit.fit(module, loader), module, device), str(device)


def _peak_of(fit: Callable[[], None], module: LightningModule, device: torch.device) -> int:
    if device.type != "cpu":
        counts: Any = torch.get_device_module(device)
        if not hasattr(counts, "max_memory_allocated"):  # Apple's
            raise ValueError(f"memory cannot be measured on {device}, which counts no peak of it.")
        counts.reset_peak_memory_stats(device)
        fit()
        return int(counts.max_memory_allocated(device))
    gc.collect()  # what an earlier fit left is not to be freed while this one is measured
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        fit()
    noise = 8 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    loaded = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = np.cumsum([change for _, change in sorted(changes)])
    return int(held.max(initial=0)) + noise + loaded


def _in_words(number: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"
