"""Targets that the loss may ignore: what would an ignored one do to the other records?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_dp.isolation.comparison import Batch, Change, Comparisons
from lightning_dp.isolation.coupling import CURES
from lightning_dp.isolation.outcome import CONDITION, ISOLATED, Isolation
from lightning_dp.isolation.own_numbers import padding_numbers
from lightning_dp.isolation.synthetic import leaves_of, replace_leaf, take_rows

__all__ = ["IGNORED", "mean_of_targets", "probe_targets"]

IGNORED = (-100, -1, 255)  # torch's default ignore_index, and what others write by hand


def probe_targets(comparisons: Comparisons, pool: Any, n: int) -> Isolation:
    """Find what an ignored target would do: where torch's own losses divide, and by trying.

    Trying writes it into each tensor of whole numbers that may hold it.
    """
    found = mean_of_targets(comparisons, pool, n)
    if found.outcome != "isolated":
        return found
    before = Batch.of(pool, range(n))
    own = (number for number in padding_numbers(comparisons.passes.module) if number < 0)
    sentinels = tuple(dict.fromkeys((*IGNORED, *own)))
    for place, leaf in enumerate(leaves_of(pool)):
        if leaf.dtype not in (torch.int64, torch.int32, torch.int16) or not leaf.dim():
            continue
        several = leaf[0].numel() > 1
        for sentinel in sentinels:
            ignored = leaf.clone()
            ignored[0].view(-1)[1 if several else 0 :: 2] = sentinel
            after = take_rows(replace_leaf(pool, place, ignored), range(n))
            try:
                key = (id(pool), "ignored", place, sentinel)
                change = Change.exchanged(before, after, [0], key=key)
                tried = comparisons.outcome(change, why=False)
            except Exception:  # this tensor cannot hold it
                continue
            if tried.outcome != "isolated":
                is_seen = None in comparisons.answer(change.after).ignored
                by_hand = () if is_seen else ((place, sentinel),)
                found = replace(
                    found,
                    condition=CONDITION,
                    is_doubtful=found.is_doubtful or several,
                    sentinels=(*found.sentinels, *by_hand),
                )
    return found


def mean_of_targets(comparisons: Comparisons, pool: Any, n: int) -> Isolation:
    """Tell whether the loss is one mean over all targets, rather than one for each record.

    Args:
        pool: of at least n records, the first of which are the batch.
    """
    whole = comparisons.answer(Batch.of(pool, range(n)))
    if not whole.means:
        return ISOLATED
    half = Batch.of(pool, range(n // 2))
    try:
        fewer = comparisons.answer(
            half if comparisons.knows(half) else Batch.of(pool, range(n - 1))
        )
    except Exception:  # some models run on an even number of records only
        fewer = whole
    if fewer.means != whole.means:  # their number grows with that of the records
        return ISOLATED
    if whole.has_class_weights:
        return Isolation("coupled", CURES["denominator"])
    # What the model ignores of every synthetic record alike is no record's own doing.
    pairs = zip(whole.ignored, fewer.ignored, strict=True)
    ignored = tuple(a if a is not None and a == b else 0 for a, b in pairs)
    return Isolation("isolated", condition=CONDITION, is_mean_of_targets=True, ignored=ignored)
