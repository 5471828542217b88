"""Steps of public optimizers must not follow the records: they have no noise, and are not charged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp._training_step import call_training_step
from lightning_dp.isolation.nesting import copied
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.randomness import SameFirstRows, seed
from lightning_dp.isolation.stand_in_optimizers import ByHand, PublicStep
from lightning_dp.isolation.stand_ins import Now
from lightning_dp.isolation.synthetic import leaves_of, replace_leaf, take_rows

__all__ = ["compare_public_steps", "probe_public_steps"]

_BATCHES = 10  # of an epoch: a critic may step more often than its generator
_LATER = (Now(epoch=1, step=1000), Now(epoch=50, step=100_000))
_ENOUGH = 2  # batches with public steps
_TOLERANCE = 1e-5

_VALUES = (
    "the step of optimizer {} ({}) is public and follows the records: the gradient of {} changes when "
    "they are exchanged for others. Let its loss depend on released and synthetic values alone (random "
    "inputs, random labels, weights of the private model); if it needs the records, give its "
    "parameters to the private optimizer, as a further parameter group"
)
_COUNT = (
    "the step of optimizer {} ({}) is public and follows the number of records in the batch, which is "
    "drawn at random and private: the gradient of {} changes when the batch has another number. Draw "
    "a fixed number of rows for its loss, torch.randn(64, ...) in place of torch.randn(len(batch), "
    "...), or use sampling=FullBatch()"
)
_CHANGES = (
    "public optimizers step for some batches and not for others, by their records. Let numbers of "
    "batches alone decide"
)
_NONE = "steps of public optimizers: none in the first batches of an epoch"


def probe_public_steps(passes: Passes, pool: Any, n: int, *, in_short: bool = False) -> Isolation:
    """Exchange all records for others, and compare what public optimizers step by.

    At the first batches of an epoch, of which two with such a step are compared, and the first of
    later epochs.

    Args:
        pool: 2n synthetic records.
        in_short: one batch only.
    """
    if not passes.has_public_optimizers:
        return ISOLATED
    found = 0
    for now in (*(Now(batch_idx=i) for i in range(_BATCHES)), *_LATER):
        if found >= (1 if in_short else _ENOUGH) and now not in _LATER:
            continue
        try:
            outcome, has_steps = _compared(passes.at(now), pool, n)
        except Exception:
            if now == Now():
                raise
            continue  # the model knows no such moment
        if outcome.outcome != "isolated":
            return outcome
        found += has_steps
    return ISOLATED if found else Isolation("isolated", left_out=(_NONE,))


def compare_public_steps(passes: Passes, pool: Any, n: int) -> Isolation:
    """Do the same at the moment of the passes alone; of a model that raises there, say nothing."""
    if not passes.has_public_optimizers:
        return ISOLATED
    try:
        return _compared(passes, pool, n)[0]
    except Exception:
        return ISOLATED


def _compared(passes: Passes, pool: Any, n: int) -> tuple[Isolation, bool]:
    """Return what one moment shows, and whether there is any public step."""
    (_, batch), *others = _exchanged(pool, n, is_count_public=passes.is_count_public)
    first = _steps(passes, batch)
    for text, other in others:
        reason = _difference(passes, first, _steps(passes, other), text)
        if reason is not None:
            return Isolation("kept", reason), True
    return ISOLATED, bool(first)


def _steps(passes: Passes, batch: Any) -> tuple[PublicStep, ...]:
    """Return the steps that public optimizers make on a batch."""
    with passes.on_copy() as module, SameFirstRows():  # type: ignore[no-untyped-call]
        seed()
        by_hand = ByHand(module, passes.stills_of(module))
        with passes.valid_labels():
            call_training_step(module, copied(batch), passes.now.batch_idx)
        return tuple(by_hand.public_steps)


def _exchanged(pool: Any, n: int, *, is_count_public: bool) -> Iterator[tuple[str, Any]]:
    """Yield a batch, and others; with what is to be said if a public step tells them apart."""
    yield "", take_rows(pool, range(n))
    other = take_rows(pool, range(n, 2 * n))
    for place, leaf in enumerate(leaves_of(other)):
        if leaf.is_floating_point():
            other = replace_leaf(other, place, 3 * leaf)
    yield _VALUES, other
    if not is_count_public:
        yield _COUNT, take_rows(pool, range(2 * n - 1))


def _difference(
    passes: Passes, first: Sequence[PublicStep], other: Sequence[PublicStep], text: str
) -> str | None:
    if [each.place for each in first] != [each.place for each in other]:
        return _CHANGES
    names = {id(param): name for name, param in passes.module.named_parameters()}
    for a, b in zip(first, other, strict=True):
        for number, (one, two) in enumerate(zip(a.gradients, b.gradients, strict=True)):
            if _differ(one, two):
                assert passes.trainer is not None
                real = passes.trainer.optimizers[a.place]
                held = [p for group in real.param_groups for p in group["params"]]
                name = names.get(id(held[number]), "a parameter")
                return text.format(a.place, type(real).__name__, name)
    return None


def _differ(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is not two
    scale = torch.maximum(one.abs().max(), two.abs().max()) if one.numel() else torch.zeros(())
    difference = (one - two).abs().max() if one.numel() else torch.zeros(())
    return not bool(difference <= _TOLERANCE * scale) and bool(scale != 0)
