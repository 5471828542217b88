"""The isolation probe: does each record's gradient depend on that record alone?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.isolation.coupling import CURES, Pair, common_factor, mixing_module, moved
from lightning_dp.isolation.kinds import (
    NO_KINDS,
    SyntheticKind,
    SyntheticKinds,
    base_kind,
    parts_of,
)
from lightning_dp.isolation.nesting import number_of_rows
from lightning_dp.isolation.passes import Answer, NotProbed, Passes
from lightning_dp.isolation.state_leaks import KEPT, tensors_that_keep_records
from lightning_dp.isolation.synthetic import (
    NoSyntheticBatch,
    ValidLabels,
    has_other_rows,
    leaves_of,
    replace_leaf,
    synthetic_pool,
    take_rows,
)

__all__ = ["BY_CONSTRUCTION", "Isolation", "check_isolation", "pool_that_runs", "probe_isolation"]

BY_CONSTRUCTION = "by construction: each record runs alone (engine='one_by_one')"


Outcome = Literal["isolated", "coupled", "kept", "refused", "not probed"]

_RECORDS = 4
# How many class numbers, from which on: models may have few, and lengths may not be 0.
_CLASSES = ((8, 0), (4, 0), (3, 0), (2, 0), (2, 1), (1, 1))
_IGNORED = (-100, -1)  # torch's default ignore_index, and what others write by hand

CONDITION = "provided that no target is ignored (ignore_index=-100)"
_NOTHING = 1e-30  # engines add a little to norms, so that a bound holds
_WATCHED = " (every batch is watched for ignored targets)"


@dataclass(frozen=True)
class Isolation:
    """Outcome of a probe; nothing in it comes from a value of the data, except by your own call.

    Args:
        outcome: "isolated"; "coupled" (a record moved another's gradient); "kept" (records are
            written into weights or buffers); "refused" (the gradient engine cannot tell the
            records apart); "not probed".
        reason: why, with the cure; "" if isolated. Of an exception of the model its type only.
        modules: names of the modules through which records are coupled, or of the tensors.
        condition: further assumption that the verdict rests on; "" if there is none.
        is_doubtful: True if that often fails: records have several targets each, as where padding
            is ignored.
        is_mean_of_targets: True if the loss is a mean over the targets of all records, by torch's
            own functions: each real batch must be watched for ignored ones.
        sentinels: for losses written by hand, the places of tensors in a batch and the values in
            them that may not occur.
        kinds: synthetic records that the model took, and that moved no other's gradient. Empty
            where the records were given.
    """

    outcome: Outcome
    reason: str = ""
    modules: tuple[str, ...] = ()
    condition: str = ""
    is_doubtful: bool = False
    is_mean_of_targets: bool = False
    sentinels: tuple[tuple[int, int], ...] = ()
    kinds: SyntheticKinds = NO_KINDS

    def __str__(self) -> str:
        if self.outcome == "not probed":
            return f"not probed ({self.reason})"
        verdict = "isolated" if self.outcome == "isolated" else f"FAILED: {self.reason}"
        watched = _WATCHED if self.is_mean_of_targets or self.sentinels else ""
        condition = f", {self.condition}" if self.condition else ""
        return f"probed, {verdict}{watched}{condition}"


def check_isolation(
    module: LightningModule,
    batch: Any,
    *,
    engine: str = "auto",
    trained: Sequence[str] | None = None,
    trainer: Trainer | None = None,
) -> Isolation:
    r"""Probe with the records of a batch that you give: they are used, with their values.

    For every position j the gradients :math:`\hat g_i`, i ≠ j, that the engine attributes to the
    other records must be the same if record j is replaced by another one, and if it is left out:
    then :math:`\hat g_i` is a function of record i alone, and clipping it bounds what a record can
    do. Each record's norm and a weighted sum of the gradients are compared. And what
    ``training_step`` writes into weights and buffers must be the same after other records: it
    leaves without noise.

    If the batch is private, so is the outcome (it is computed without noise): look at it yourself,
    and do not publish it. :func:`probe_isolation` uses no values and has no such limit.

    Not covered: ``collate_fn``, the hooks that move a batch to the device, branches of
    ``training_step`` that these records do not take. The mean over other losses than what
    ``training_step`` returns is not seen. Where the forward pass draws random numbers by other
    means than ``nn.Dropout``, records are only replaced, not left out.

    Args:
        module: in training mode; a copy of it is run, about 12 times.
        batch: at least 4 records in tensors with one row each; half of the first 8 are the batch,
            the others the replacements.
        engine: the gradient engine whose answers are compared.
        trained: names of the parameters to look at; default all that require a gradient.
        trainer: what ``self.trainer`` is in ``training_step``; its loggers are mute.

    Example:
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(3, 2)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return torch.nn.functional.cross_entropy(self.layer(x), y, weight=self.weight)
        ...     weight = None
        >>> batch = torch.eye(8)[:, :3], torch.arange(8) % 2
        >>> check_isolation(Model(), batch).outcome
        'isolated'
        >>> Model.weight = torch.tensor([1.0, 9.0])
        >>> check_isolation(Model(), batch).reason[:48]
        'the loss divides by something that other records'
    """
    if engine == "one_by_one":
        return Isolation("isolated", condition=BY_CONSTRUCTION)
    passes = _passes(module, engine, trained, trainer)
    with passes.quietly():
        try:
            rows = number_of_rows(batch)
            if rows < 4:
                raise NotProbed(f"the batch has {rows} records; at least 4 are needed")
            return _probe(passes, _on_cpu(batch), min(_RECORDS, rows // 2))
        except Exception as error:
            return _not_probed(error)


def probe_isolation(
    module: LightningModule,
    like: Any,
    *,
    engine: str = "auto",
    trained: Sequence[str] | None = None,
    trainer: Trainer | None = None,
) -> Isolation:
    """Probe with synthetic records: of ``like``, only shapes, dtypes and nesting are used.

    What a private run does at its start; see :func:`check_isolation` for what is compared. The
    outcome is a function of the model and of the shapes, and what leaves is the outcome, names of
    modules, and the *type* of an exception. Values of records have no part in it: real numbers are
    uniform in (0, 1), class numbers are 0 … 7 (fewer where the model has fewer classes), other
    whole numbers are 0 and 1. (Shapes may tell lengths, where records are padded to the longest.)
    A model that raises on such a batch is "not probed"; that is no verdict.

    Whether your targets hold the value -100, torch's ``ignore_index``, cannot be known without
    looking. If ignoring a target changes the others' gradients, the outcome carries a
    ``condition``.

    A token mean is caught through a mask of 0 and 1, or an ``ignore_index`` of 0 or 1; class weights
    if they differ among the classes tried.

    Args:
        like: a batch of the training loader. The other arguments are those of
            :func:`check_isolation`.
    """
    if engine == "one_by_one":
        return Isolation("isolated", condition=BY_CONSTRUCTION)
    passes = _passes(module, engine, trained, trainer)
    with passes.quietly(), ValidLabels():
        try:
            return _probe_synthetic(passes, like)
        except Exception as error:
            return _not_probed(error)


def _probe_synthetic(passes: Passes, like: Any) -> Isolation:
    """Probe with the first synthetic records on which there is something to compare."""
    failure: NotProbed | None = None
    for pool, kind in _pools_that_run(passes, like):
        try:
            found = _probe(passes, pool, _RECORDS)
        except NotProbed as error:  # other class numbers may give a gradient
            failure = failure or error
            continue
        if found.outcome != "isolated":
            return found
        return replace(_with_condition(passes, pool), kinds=SyntheticKinds((kind,)))
    assert failure is not None
    raise failure


def _passes(
    module: LightningModule, engine: str, trained: Sequence[str] | None, trainer: Trainer | None
) -> Passes:
    if trained is None:
        trained = [name for name, param in module.named_parameters() if param.requires_grad]
    return Passes(module, engine, trained, trainer)


def _not_probed(error: Exception) -> Isolation:
    """Return the outcome for an exception: the model's own may hold anything, and stay inside."""
    if isinstance(error, UnsupportedModelError):  # ours: names of layers only
        return Isolation("refused", str(error))
    if isinstance(error, NotProbed | NoSyntheticBatch):
        return Isolation("not probed", str(error))
    return Isolation("not probed", f"the model raised {type(error).__name__}")


def _on_cpu(batch: Any) -> Any:
    for place, leaf in enumerate(leaves_of(batch)):
        half = leaf.dtype in (torch.float16, torch.bfloat16)
        value = leaf.detach().cpu()
        batch = replace_leaf(batch, place, value.float() if half else value)
    return batch


def pool_that_runs(passes: Passes, like: Any) -> Any:
    """Make 8 synthetic records with as many class numbers as the model takes; raise what it raises."""
    pool, _ = next(_pools_that_run(passes, like))
    return pool


def _pools_that_run(passes: Passes, like: Any) -> Iterator[tuple[Any, SyntheticKind]]:
    """Make at least one pool of synthetic records on which the model runs, with their kind."""
    failure: Exception | None = None
    is_any = False
    for classes, first in _CLASSES:
        pool = synthetic_pool(like, 2 * _RECORDS, classes, first)
        try:
            passes.loss(take_rows(pool, range(2 * _RECORDS)))
        except Exception as error:
            failure = error
        else:
            is_any = True
            yield pool, base_kind(parts_of(like), classes, first)
    if is_any or failure is None:
        return
    if has_other_rows(like):
        raise NoSyntheticBatch(
            "the batch has tensors without one row for each record, and the model raised "
            f"{type(failure).__name__}"
        )
    raise failure


def _weights(records: int) -> Tensor:
    """Return uneven weights, so that movements of several records do not cancel."""
    # Multiples of the golden ratio modulo 1 are spread evenly, and no two of them are equal.
    return 1.0 + torch.arange(records, dtype=torch.float64).mul(0.618).remainder(1.0)


def _probe(passes: Passes, pool: Any, n: int) -> Isolation:
    """Leave out the record at every position in turn; replace it where that cannot be compared."""
    for j in range(n):
        found = _probe_position(passes, pool, n, j)
        if found.outcome != "isolated":
            return found
    if names := tensors_that_keep_records(passes, pool, n):
        return Isolation("kept", f"{KEPT}: {', '.join(names[:5])}", names)
    return Isolation("isolated")


def _probe_position(passes: Passes, pool: Any, n: int, j: int) -> Isolation:
    others = [i for i in range(n) if i != j]
    weights = _weights(n)
    weights[j] = 0.0
    before = _run(passes, pool, range(n), weights)
    removed = _Change(others, weights[others], range(n - 1))
    replaced = _Change([n + j if i == j else i for i in range(n)], weights, others)
    change = replaced if before.is_random else removed
    try:
        after = _run(passes, pool, change.rows, change.weights)
    except UnsupportedModelError:
        raise
    except Exception:  # some models run on an even number of records only
        change = replaced
        after = _run(passes, pool, change.rows, change.weights)
    if n != before.count or after.count != len(change.rows):
        return Isolation("coupled", CURES["rows"])
    if not moved(before, after):
        return Isolation("isolated")
    a, b = (
        passes.run(take_rows(pool, rows), w, watch_modules=True)
        for rows, w in ((range(n), weights), (change.rows, change.weights))
    )
    pair = Pair(a, b, others, change.places, (n, len(change.rows)))
    return _diagnose(pair, passes, pool)


@dataclass(frozen=True)
class _Change:
    """A batch with one record fewer or another one: its records, weights, and where the others are."""

    rows: Sequence[int]
    weights: Tensor
    places: Sequence[int]


def _run(passes: Passes, pool: Any, rows: Sequence[int], weights: Tensor) -> Answer:
    answer = passes.run(take_rows(pool, rows), weights)
    if answer.count == len(rows) and not bool(torch.isfinite(answer.norms).all()):
        raise NotProbed("gradients are not finite on the synthetic batch")
    if answer.count == 0 or (
        answer.count == len(rows) and not bool((answer.norms > _NOTHING).any())
    ):
        raise NotProbed("the batch gives no gradient")
    return answer


def _diagnose(pair: Pair, passes: Passes, pool: Any) -> Isolation:
    module = mixing_module(pair)
    if module is not None:
        name = f"{module.name} ({module.kind})" if module.name else module.kind
        return Isolation("coupled", f"{name} {CURES['module']}", (module.name or module.kind,))
    # All gradients scaled alike: the loss is divided by something that the changed record moves.
    factor = common_factor(pair.before, pair.after)
    if factor is None:
        return Isolation("coupled", CURES["pairs"])
    # The engine takes the loss for a mean and multiplies by the number of records. If it is a sum,
    # that factor stays: m / n between the two batches, whatever the records are.
    n, m = pair.sizes
    is_sum = m < n and abs(factor * n / m - 1) < 1e-3 and not _any_value_moves(passes, pool, n)
    return Isolation("coupled", CURES["sum" if is_sum else "denominator"])


def _any_value_moves(passes: Passes, pool: Any, n: int) -> bool:
    """Tell whether replacing a record moves others: of a sum, only their number does."""
    for j in range(n):
        weights = _weights(n)
        weights[j] = 0.0
        rows = [n + j if i == j else i for i in range(n)]
        if moved(_run(passes, pool, range(n), weights), _run(passes, pool, rows, weights)):
            return True
    return False


def _with_condition(passes: Passes, pool: Any) -> Isolation:
    """Find what an ignored target would do: where torch's own losses divide, and by trying.

    Trying writes it into each tensor of whole numbers that may hold it.
    """
    found = _mean_of_targets(passes, pool)
    if found.outcome != "isolated":
        return found
    rows, weights = list(range(_RECORDS)), _weights(_RECORDS)
    weights[0] = 0.0
    for place, leaf in enumerate(leaves_of(pool)):
        if leaf.dtype not in (torch.int64, torch.int32, torch.int16) or not leaf.dim():
            continue
        several = leaf[0].numel() > 1
        for sentinel in _IGNORED:
            ignored = leaf.clone()
            ignored[0].view(-1)[1 if several else 0 :: 2] = sentinel
            try:
                before = passes.run(take_rows(pool, rows), weights)
                after = passes.run(take_rows(replace_leaf(pool, place, ignored), rows), weights)
            except Exception:  # this tensor cannot hold it
                continue
            if after.count == _RECORDS and moved(before, after):
                by_hand = () if found.is_mean_of_targets else ((place, sentinel),)
                found = replace(
                    found,
                    condition=CONDITION,
                    is_doubtful=found.is_doubtful or several,
                    sentinels=(*found.sentinels, *by_hand),
                )
    return found


def _mean_of_targets(passes: Passes, pool: Any) -> Isolation:
    """Tell whether the loss is one mean over all targets, rather than one for each record."""
    whole = passes.run(take_rows(pool, range(_RECORDS)), _weights(_RECORDS))
    if not whole.means:
        return Isolation("isolated")
    try:
        fewer = passes.run(take_rows(pool, range(_RECORDS - 1)), _weights(_RECORDS - 1))
    except Exception:  # some models run on an even number of records only
        fewer = whole
    if fewer.means != whole.means:  # their number grows with that of the records
        return Isolation("isolated")
    if whole.has_class_weights:
        return Isolation("coupled", CURES["denominator"])
    return Isolation("isolated", condition=CONDITION, is_mean_of_targets=True)
