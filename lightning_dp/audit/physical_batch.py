"""Which physical batch fits into the memory, for the same logical batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_dp._validate import number, whole
from lightning_dp.audit.memory import MemoryLine, measure_memory, text_of_bytes
from lightning_dp.config import PrivacyConfig
from lightning_dp.sampling import Poisson
from lightning_dp.sampling.schemes import factorisations, largest_chunk

__all__ = ["PhysicalBatch", "suggest_physical_batch"]

_SHARE = 0.9  # of a GPU's memory: its allocator needs some room
_CHANCE = 1e-9


@dataclass(frozen=True)
class PhysicalBatch:
    """What to type in, so that a step fits into the memory and q stays what it was.

    Args:
        batch_size: for the DataLoader.
        accumulate_grad_batches: for the Trainer.
        sample_rate: q, unchanged.
        num_records: N.
        chunk: records in the largest physical batch, but for a chance of ``chance`` per step.
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
            f"peak {text_of_bytes(self.predicted)} of {text_of_bytes(self.memory)}, "
            f"with {self.chunk} records: Poisson batches vary, "
            f"and one is larger with probability {self.chance:g} per step\n"
            f"{self.line}"
        )


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
    """The largest physical batch that fits, with the logical batch and so q exactly as they are.

    Of all ``(batch_size, accumulate_grad_batches)`` with the same product, the one with the largest
    ``batch_size`` whose largest chunk (see ``sampling.physical_batches.largest_chunk``) fits by
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
    if not isinstance(privacy.sampling, Poisson):
        raise ValueError(
            f"sampling={privacy.sampling} cuts its batches itself, so batch_size does not change q: "
            "ask measure_memory() for the line and take the largest batch_size that fits."
        )
    accumulate_grad_batches = whole("accumulate_grad_batches", accumulate_grad_batches)
    world_size = whole("world_size", world_size)
    if memory is not None and not 0 < number("memory", memory) < math.inf:
        raise ValueError(f"memory={memory} must be a finite number of bytes above 0.")
    logical = int(loader.batch_size or 0) * accumulate_grad_batches
    pairs = factorisations(logical)
    num_records = len(loader.dataset)  # type: ignore[arg-type]
    estimator = privacy.resolved_estimator()
    rates = [estimator.relative_rate(step) for step in range(estimator.period)]
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
    raise ValueError(
        f"memory={text_of_bytes(there_is)} is too little: batch_size=1 and "
        f"accumulate_grad_batches={logical} need {text_of_bytes(found.predicted)} with "
        f"{found.chunk} records in a physical batch; {line}. Use a smaller model, an optimizer with "
        "less state, or another device."
    )


def _free(device: str) -> float:
    if not device.startswith("cuda"):
        raise ValueError("memory must be given, in bytes, for a run on the CPU.")
    free, _ = torch.cuda.mem_get_info(device)
    return _SHARE * (free + torch.cuda.memory_reserved(device))
