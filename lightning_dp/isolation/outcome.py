"""Outcomes of comparisons, and the words for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BY_CONSTRUCTION", "CURES", "OUTSIDE_OF_LAYERS", "Outcome"]

BY_CONSTRUCTION = "by construction: each record runs alone"

OUTSIDE_OF_LAYERS = (
    "training_step itself, outside of layers: such as a loss that divides by the number of tokens or of "
    "targets that are not ignored in the whole batch, or by class weights (take each record's own loss "
    "first; of a language model, lightning_dp.losses_of_records(output.logits, labels, "
    "shift=True).mean())"
)

CURES = {
    "exchanged": (
        "when some records of a batch are exchanged for others, the clipped sum of the rest moves by "
        "more than 0.05 C{where}. Use a loss of single records, layers that treat each record alone, a "
        "collate_fn and hooks that mix none, and nothing that was computed from other records"
    ),
    "alone": (
        "without the other records of its batch, a record has another gradient{where}. Take "
        "the mean over the records, each counted once (reduction='mean', not 'sum'; a mean for each "
        "record first where lengths or ignored targets differ), whatever the size of the batch"
    ),
    "buffer": (
        "what the step sees of the records is written into weights or buffers, without noise: {names}. "
        "They are in every checkpoint, and steer later steps. Leave them fixed, compute them from "
        "weights, or make them parameters that are trained"
    ),
    "setting": (
        "{names} follow what the step sees of the records, without noise. Fix them in advance, or as "
        "functions of released values"
    ),
    "public": (
        "a public optimizer steps by gradients that follow the records, without noise. Give its loss "
        "released or synthetic values only"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison.

    Args:
        kind: "isolated": nothing moved; "coupled": a record changes what others contribute, or what
            outlives the step; "not compared": nothing can be said.
        reason: in words; for "coupled" with the cure.

    Example:
        >>> print(Outcome("not compared", "the model drew other random numbers"))
        not compared (the model drew other random numbers)
    """

    kind: Literal["isolated", "coupled", "not compared"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind
