"""The trial of a ``collate_fn``, and of what follows it, on synthetic samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dp._validate import whole
from lightning_dp.isolation.copies import Copies, ReadsDataset, quiet
from lightning_dp.isolation.rows import OtherRows
from lightning_dp.isolation.sample_pairs import Collate, SamplePairs, Untried
from lightning_dp.isolation.samples import NoSyntheticSample

__all__ = ["Collate", "EachAlone", "Trial", "check_collate_fn", "try_collate"]

CURES = {
    "rows": (
        "mixes samples: what it makes of one sample changes when another one does (mixup or cutmix "
        "across the batch, statistics of the batch, shuffled labels, packing, other samples as "
        "negatives). Mix within one sample, normalise with constants, and do the rest in "
        "__getitem__, drawn for each sample"
    ),
    "shared": (
        "hands out {where}, a value for the whole batch that is computed from its samples: whatever "
        "uses it lets records change each other's gradients. Leave it out; a constant, or one value "
        "for each record, may stay"
    ),
    "state": (
        "keeps what it saw: what it makes of a sample depends on the batches before (a running mean, "
        "a cache of samples, a vocabulary that grows). Normalise with constants that are fixed before "
        "the training, and keep nothing from batch to batch"
    ),
    "data set": (
        "reads records of the data set: which ones are in a batch is then not what was drawn, and not "
        "what ε is computed for. Use nothing but the samples that it is given"
    ),
    "other rows": (
        "makes batches in which rows are not records (several samples packed into one row, or one cut "
        "into several). Make one row of each sample, padded to the longest"
    ),
}


@dataclass(frozen=True)
class Trial:
    """Outcome of a trial; no value of any record has a part in it.

    Args:
        outcome: "apart": each row is a function of one sample; "mixed"; "untried".
        reason: what was seen with the cure, or why nothing was; "" if apart.
        drops: True if it leaves out samples that are None or hold NaN.
        pads: True if a batch is as long as its longest sample.
    """

    outcome: Literal["apart", "mixed", "untried"]
    reason: str = ""
    drops: bool = False
    pads: bool = False


@dataclass(frozen=True)
class EachAlone:
    """Makes one batch of each sample, as where each record is to run alone."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [self.collate([sample]) for sample in samples]


def check_collate_fn(collate_fn: Collate, sample: Any, batch_size: int = 32) -> Trial:
    r"""Tell whether a ``collate_fn`` makes of each sample a row that depends on that sample alone.

    A batch of synthetic samples is collated twice, with one of them exchanged, from the same random
    state. The rows of the others must be equal, in whatever order. Tried with several random states,
    kinds of values, lengths and sizes, and after other batches. Padding to the longest is no mixing.

    Args:
        collate_fn: a copy is called where it can be copied, some hundred times.
        sample: one of the data set; its types, shapes and dtypes are used, texts may be.
        batch_size: the size of batches in the training.

    Returns:
        The outcome: ``"apart"``, ``"mixed"`` or ``"untried"``, with the reason.

    Raises:
        ValueError: if ``batch_size`` is no whole number of at least 1.

    Example:
        >>> import torch
        >>> from torch.utils.data import default_collate
        >>> sample = torch.zeros(3), 1
        >>> check_collate_fn(default_collate, sample).outcome
        'apart'
        >>> def normalised(samples):
        ...     x, y = default_collate(samples)
        ...     return x - x.mean(0), y
        >>> check_collate_fn(normalised, sample).outcome
        'mixed'
    """
    size = whole("batch_size", batch_size, of="check_collate_fn")
    return try_collate(Copies(collate_fn, closes_datasets=True).fresh, sample, size)


def try_collate(fresh: Callable[[], Collate], sample: Any, batch_size: int) -> Trial:
    """Try what :func:`check_collate_fn` says on anything that makes batches of lists of samples.

    Args:
        fresh: returns what makes batches, each time in the state in which it is now.
        sample, batch_size: see there.
    """
    with quiet():
        try:
            try:
                pairs = SamplePairs(fresh, sample)
            except OtherRows:
                return Trial("mixed", CURES["other rows"])
            fault = pairs.fault(batch_size)
            if fault is not None:
                kind, where = fault
                return Trial("mixed", CURES[kind].format(where=f"batch{where}"))
            if pairs.is_blind:
                return Trial("untried", "its random draws depend on the samples")
            return Trial("apart", drops=pairs.drops(), pads=pairs.pads())
        except ReadsDataset:
            return Trial("mixed", CURES["data set"])
        except (Untried, NoSyntheticSample) as error:
            return Trial("untried", str(error))
        except Exception as error:
            return Trial("untried", f"{type(error).__name__} on made-up samples")
