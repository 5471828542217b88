"""The isolation probe: does each record's gradient depend on that record alone?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_dp._validate import flag, instance
from lightning_dp.gradients import CoupledLossError, EngineChoice, UnsupportedModelError
from lightning_dp.gradients.compiled import as_written
from lightning_dp.isolation.collated import CollatedPool
from lightning_dp.isolation.comparison import NOTHING, Comparisons
from lightning_dp.isolation.coupling import CURES
from lightning_dp.isolation.draws import probe_draws
from lightning_dp.isolation.effort import Effort
from lightning_dp.isolation.kinds import SyntheticKind
from lightning_dp.isolation.later import probe_later, probe_shortly
from lightning_dp.isolation.nesting import kinds_of_objects, number_of_rows
from lightning_dp.isolation.outcome import BY_CONSTRUCTION, ISOLATED, Isolation, first_failure
from lightning_dp.isolation.own_numbers import last_numbers
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.pools import pools_that_run
from lightning_dp.isolation.positions import probe_one_position, probe_positions
from lightning_dp.isolation.public_steps import probe_public_steps
from lightning_dp.isolation.sizes import probe_size
from lightning_dp.isolation.stand_ins import NoCollectives, NotProbed
from lightning_dp.isolation.state_leaks import probe_state
from lightning_dp.isolation.synthetic import (
    NoSyntheticBatch,
    leaves_of,
    replace_leaf,
    take_rows,
)
from lightning_dp.isolation.targets import mean_of_targets, probe_targets
from lightning_dp.isolation.two_steps import probe_steps
from lightning_dp.isolation.values import probe_values

__all__ = ["check_isolation", "probe_again", "probe_isolation"]


_RECORDS = 4
_SEEDS = 3
_CONSTANT = (
    "The loss of a record that is alone in its batch does not depend on the parameters (it compares "
    "records with each other, as a contrastive loss does), so the training would be on noise alone. "
    "Compare each record with itself (two views of it) or with a fixed set of classes, not with "
    "other records."
)
_FOLDED = (
    "other values, larger batches, and real records exchanged: rows of a batch are not records"
)


@as_written()
def check_isolation(
    module: LightningModule,
    batch: Any,
    *,
    engine: str = "auto",
    trained: Sequence[str] | None = None,
    trainer: Trainer | None = None,
    loss_graph_check: bool = True,
) -> Isolation:
    r"""Probe with the records of a batch that you give: they are used, with their values.

    For every position j the gradients :math:`\hat g_i`, i ≠ j, that the engine attributes to the
    other records must be the same if record j is replaced by another one, and if it is left out:
    then :math:`\hat g_i` is a function of record i alone, and clipping it bounds what a record can
    do. Each record's norm, and some entries of its gradient in each parameter, are compared. And what
    ``training_step`` writes into weights and buffers must be the same after other records: it
    leaves without noise.

    If the batch is private, so is the outcome (it is computed without noise): look at it yourself,
    and do not publish it. :func:`probe_isolation` uses no values and has no such limit.

    Not covered: ``collate_fn`` (:func:`~lightning_dp.audit.check_collate_fn` looks at it), the hooks
    that move a batch to the device, branches of ``training_step`` that these records do not take.
    The mean over other losses than what ``training_step`` returns is not seen. Where the forward pass
    draws random numbers by other means than ``nn.Dropout``, records are only replaced, not left out.

    Args:
        module: in training mode; a copy of it is run, about 12 times.
        batch: at least 4 records in tensors with one row each; half of the first 8 are the batch,
            the others the replacements.
        engine: the gradient engine whose answers are compared. Where one cannot tell these records
            apart, all begins again with the next that the name stands for.
        trained: names of the parameters to look at; default all that require a gradient.
        trainer: what ``self.trainer`` is in ``training_step``; its loggers are mute.
        loss_graph_check: look at the loss's graph too, as a run does at every step.

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
    flag("loss_graph_check", loss_graph_check, of="check_isolation")
    instance("module", module, LightningModule, of="check_isolation")
    if engine == "one_by_one":
        return Isolation("isolated", condition=BY_CONSTRUCTION)
    passes = _passes(module, engine, trained, trainer, loss_graph_check)
    with passes.quietly():
        return _outcome(passes, _probe_given, batch)


@as_written()
def probe_isolation(
    module: LightningModule,
    like: Any,
    *,
    engine: str | EngineChoice = "auto",
    trained: Sequence[str] | None = None,
    trainer: Trainer | None = None,
    loss_graph_check: bool = True,
    expected: int = 0,
    is_count_public: bool = False,
    pools: Iterable[CollatedPool] | None = None,
) -> Isolation:
    """Probe with synthetic records: of ``like``, only shapes, dtypes and nesting are used.

    What a private run does at its start; see :func:`check_isolation` for what is compared. The
    outcome is a function of the model and of the shapes, and what leaves is the outcome, names of
    modules, and the *type* of an exception. Values of records have no part in it: real numbers are
    uniform in (0, 1), class numbers are 0 … 7 (fewer where the model has fewer classes), other
    whole numbers are 0 and 1. (Shapes may tell lengths, where records are padded to the longest.)
    A model that raises on such a batch is "not probed"; that is no verdict.

    Then some of these records are exchanged for others: of other scales, with NaN or infinity, with
    equal labels, the last class, or the number that the model takes for padding; under random
    numbers that take rare branches, if it draws any; and among as many records as a batch of the run
    has. What the model does not take is left out. Where a pass takes long (beyond 1e10 operations,
    by shapes), fewer are made: one record is left out instead of each, and of other values, steps
    and later moments the first are tried; what is not is said.

    Whether your targets hold the value -100, torch's ``ignore_index``, cannot be known without
    looking. If ignoring a target changes the others' gradients, the outcome carries a
    ``condition``.

    Args:
        like: a batch of the training loader. The other arguments are those of
            :func:`check_isolation`; the engine may be a choice that is shared with others.
        expected: the number of records in a batch of the run; 0 if there is none.
        is_count_public: each batch has as many; public optimizers may then step by the number.
        pools: where rows of a batch are not records, and ``like`` tells nothing: synthetic records
            of which the first are taken on which the model runs.
    """
    if engine == "one_by_one":
        return Isolation("isolated", condition=BY_CONSTRUCTION)
    passes = _passes(
        module,
        engine,
        trained,
        trainer,
        loss_graph_check,
        made_up=True,
        is_count_public=is_count_public,
    )
    probe = partial(_probe_synthetic, expected=expected)
    if pools is not None:
        probe = partial(_probe_collated, pools=list(pools))
    with passes.quietly():
        return _outcome(passes, probe, like)


@as_written()
def probe_again(
    module: LightningModule,
    like: Any,
    *,
    engine: str | EngineChoice = "auto",
    trained: Sequence[str] | None = None,
    trainer: Trainer | None = None,
    alone: bool = False,
    is_count_public: bool = False,
) -> Isolation:
    """Probe in short a model that was probed before, in its present state.

    Nothing is refused that cannot be probed now.

    Args:
        alone: no other process takes part, so that nothing may be asked of one. The other arguments
            are those of :func:`probe_isolation`.
    """
    passes = _passes(
        module, engine, trained, trainer, False, made_up=True, is_count_public=is_count_public
    )
    with passes.quietly(), NoCollectives() if alone else contextlib.nullcontext():
        try:
            pool, _ = next(pools_that_run(passes, like))
        except Exception:
            return ISOLATED
        return probe_shortly(passes, pool, _RECORDS)


def _outcome(passes: Passes, probe: Callable[[Passes, Any], Isolation], batch: Any) -> Isolation:
    """Return what a probe finds: of a coupling that the graph shows, the modules if there are any."""
    try:
        return probe(passes, batch)
    except CoupledLossError as error:
        reason = error.text.removesuffix(".")
    except UnsupportedModelError as error:  # ours: names of layers and shapes only
        if passes.choice.fall(error):
            return _outcome(passes, probe, batch)
        refusal = passes.choice.refusal(error)
        return Isolation("refused", refusal.text, topic=refusal.topic)
    except Exception as error:
        return _not_probed(error)
    found = _outcome(passes.without_graph(), probe, batch)
    if found.outcome == "coupled":
        return found
    return Isolation("coupled", reason[0].lower() + reason[1:])


def _probe_given(passes: Passes, batch: Any) -> Isolation:
    """Probe with half of the given records; the others are the replacements."""
    rows = number_of_rows(batch)
    if rows < 4:
        raise NotProbed(f"the batch has {rows} records; at least 4 are needed")
    return _probe(Comparisons(passes), _on_cpu(batch), min(_RECORDS, rows // 2))


def _probe_synthetic(passes: Passes, like: Any, expected: int) -> Isolation:
    """Probe with the first synthetic records on which there is something to compare."""
    failure: NotProbed | None = None
    for pool, kind in pools_that_run(passes, like):
        try:
            return first_failure(_layers(passes, pool, kind, expected))
        except NotProbed as error:  # other class numbers may give a gradient
            failure = failure or error
    assert failure is not None
    raise failure


def _probe_collated(passes: Passes, like: Any, pools: Sequence[CollatedPool]) -> Isolation:
    """Probe with the first samples of which the model takes batches."""
    failure: Exception = NotProbed("no synthetic sample can be made")
    for pool in pools:
        try:
            passes.loss(pool.take(range(2 * _RECORDS)))
        except Exception as error:
            failure = error.with_traceback(None)  # whose frames hold the whole pass
            continue
        if not pool.is_telling:
            raise NotProbed("rows of a batch are not records, and samples cannot be made up")
        return first_failure(_layers_of_collated(passes, pool))
    raise failure


def _layers_of_collated(passes: Passes, pool: CollatedPool) -> Iterator[Isolation]:
    """Probe with batches in which a record has several rows; each layer may rely on those before."""
    n, comparisons = _RECORDS, Comparisons(passes)
    if passes.choice.isolates:
        yield _probe_constant(passes, pool, n)
        yield Isolation("isolated", condition=BY_CONSTRUCTION)
        return
    is_long = Effort.of(passes, pool, n).is_long(n)
    yield probe_public_steps(passes, pool, n, in_short=is_long)
    found = _probe(comparisons, pool, n, in_short=is_long)
    if found.reason == CURES["pairs"]:
        found = replace(found, reason=CURES["owners"])
    yield found
    yield probe_draws(comparisons, pool, n, in_short=is_long)
    yield mean_of_targets(comparisons, pool, n)
    yield probe_steps(passes, pool, n, steps=2 if is_long else 3)
    yield probe_later(passes, pool, n, in_short=is_long)
    yield Isolation("isolated", left_out=(_FOLDED,))


def _layers(passes: Passes, pool: Any, kind: SyntheticKind, expected: int) -> Iterator[Isolation]:
    """Probe with synthetic records of one kind, layer by layer; each may rely on those before."""
    n, comparisons = _RECORDS, Comparisons(passes)
    effort = Effort.of(passes, pool, n)
    is_long = effort.is_long(n)
    if (
        passes.choice.isolates
    ):  # in the model records cannot mix: what they leave may still show them
        yield _probe_constant(passes, pool, n)
        if passes.choice.is_last:
            yield Isolation("isolated", condition=BY_CONSTRUCTION)
            return
        yield probe_state(comparisons, pool, n)
        yield probe_steps(passes, pool, n, steps=2 if is_long else 3)
        yield Isolation("isolated", condition=BY_CONSTRUCTION)
        return
    if names := kinds_of_objects(pool):
        yield Isolation("isolated", left_out=(f"what objects of {', '.join(names)} hold",))
    if is_long:
        yield Isolation("isolated", left_out=("each position, and a third step",))
    yield probe_public_steps(passes, pool, n, in_short=is_long)
    yield _probe(comparisons, pool, n, in_short=is_long)
    yield probe_draws(comparisons, pool, n, in_short=is_long)
    yield probe_targets(comparisons, pool, n)
    last = last_numbers(passes, pool, kind)
    yield probe_values(comparisons, pool, n, kind, last, in_short=is_long)
    yield probe_size(comparisons, pool, n, kind, last, expected, effort.records)
    yield probe_steps(passes, pool, n, steps=2 if is_long else 3)
    yield probe_later(passes, pool, n, in_short=is_long)


def _probe_constant(passes: Passes, pool: Any, n: int) -> Isolation:
    """Refuse a loss that no parameter changes where a record is alone: it compares records."""
    for seed in range(_SEEDS):
        for record in range(n):
            norms = passes.run(take_rows(pool, [record]), 1, seed_number=seed).norms
            if bool((norms > NOTHING).any()):
                return ISOLATED
    return Isolation("refused", _CONSTANT, topic="coupled-records")


def _probe(comparisons: Comparisons, pool: Any, n: int, *, in_short: bool = False) -> Isolation:
    """Compare what n records of a pool do to each other, and to what outlives a step."""
    layers = (probe_one_position if in_short else probe_positions, probe_state)
    return first_failure(layer(comparisons, pool, n) for layer in layers)


def _passes(
    module: LightningModule,
    engine: str | EngineChoice,
    trained: Sequence[str] | None,
    trainer: Trainer | None,
    loss_graph_check: bool,
    *,
    made_up: bool = False,
    is_count_public: bool = False,
) -> Passes:
    if trained is None:
        trained = [name for name, param in module.named_parameters() if param.requires_grad]
    return Passes(
        module,
        engine,
        trained,
        trainer,
        loss_graph_check=loss_graph_check,
        made_up=made_up,
        is_count_public=is_count_public,
    )


def _not_probed(error: Exception) -> Isolation:
    """Return the outcome for an exception: the model's own may hold anything, and stay inside."""
    if isinstance(error, NotProbed | NoSyntheticBatch):
        return Isolation("not probed", str(error))
    return Isolation("not probed", f"the model raised {type(error).__name__}")


def _on_cpu(batch: Any) -> Any:
    for place, leaf in enumerate(leaves_of(batch)):
        half = leaf.dtype in (torch.float16, torch.bfloat16)
        value = leaf.detach().cpu()
        batch = replace_leaf(batch, place, value.float() if half else value)
    return batch
