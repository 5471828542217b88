"""The batch that Lightning trains on is the one that was drawn last, at the rate of its step."""

from __future__ import annotations

from lightning_dp.mechanism import Mechanism
from lightning_dp.sampling.loader import Chunk, PrivateDataLoader

__all__ = ["check_rate", "chunk_in_hand"]


def chunk_in_hand(loader: PrivateDataLoader, batch_idx: int) -> Chunk:
    """Return the chunk that the loader handed out last.

    Raises:
        RuntimeError: if it is not batch ``batch_idx`` of the epoch.
    """
    chunk = loader.current
    if chunk is None or chunk.index != batch_idx:
        raise RuntimeError(
            f"Batch {batch_idx} of the epoch is not the one that the loader handed out last. "
            "Something fetches batches ahead or skips them; private batches go one by one."
        )
    return chunk


def check_rate(chunk: Chunk, mechanism: Mechanism) -> None:
    """Refuse a chunk that was drawn for another step of the plan.

    Raises:
        RuntimeError: with both rates.
    """
    planned = mechanism.plan.rate(mechanism.step)
    if chunk.sample_rate != planned:
        raise RuntimeError(
            f"The batch was drawn with rate {chunk.sample_rate}, but step {mechanism.step} is "
            f"planned with {planned}: an optimizer step was left out. "
            f"{mechanism.plan.estimator} needs one for each batch."
        )
