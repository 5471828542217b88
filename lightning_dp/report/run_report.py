"""The report of a run, and the cost of other trainings on the same records or weights.

A model that was trained before is recognised by hashes of its weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp._refusals import text_of, warn
from lightning_dp._world import held_here
from lightning_dp.accounting.base import epsilon_text
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.journal import Charges, JournalContent, JournalError
from lightning_dp.accounting.ledger import Ledger, Neighbours, neighbours, union
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.clipping import Flat
from lightning_dp.noise import IndependentNoise
from lightning_dp.plan.advice import facts
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import has_guarantee
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import FixedOrder
from lightning_dp.sampling.units import is_by_user, is_named

_NOT_COVERED = (
    "figures written down about the training data (such as train_loss), and decisions that follow them",
    "tests on other private data (validation), and choices made by looking at their results",
    "other trainings on the same data, such as trials, and any other use of them",
    "records that change each other's part in a step (such as by a loss over all records of a batch) "
    "where the checks do not see it",
    "records into which others are mixed when the data are read (such as mixup in the data set)",
    "rounding in the computer (floating point) and the time it takes: the promise is about the ideal "
    "mathematics",
)
_IN_ORDER = (
    "an order of the records that follows what is in them, or that is not the same in every pass (such "
    "as by a shuffle buffer): a record that comes back sooner costs more than is counted"
)
_REPLANNED = (
    "the moment of a crash, or of the end of a fit that another one followed: the noise after it was "
    "planned for the ε that was left, as if neither records nor releases had led to it (a lack of memory "
    "may follow them)"
)

_ROUND = (
    "{} on the batch of each step, charged together before the first as one Gaussian on one sample"
)

_SEEDED = "PCG64, seeded by the operating system; on another device its own generator"
_CIPHER = (
    "AES-256 in counter mode, keyed by the operating system; releases rounded to 2^-20 of the noise"
)
_UNIT = "a user, of whom a step reads at most {} rows; their mean gradient is clipped once"
_VIEWS = "{} of each row that a step reads; the mean of their gradients is clipped"


def report_of_run(run: PrivateRun) -> PrivacyReport:
    """Return the report of a run, during or after a fit."""
    config, batches, epsilon = run.config, run.batches, float(run.epsilon)
    of_plan, latest = run.epsilon_of_plan, run.noise_multiplier  # inf: nothing left, and no step
    journal = run.ledger.journal_path
    return PrivacyReport(
        epsilon=epsilon,
        delta=float(config.target_delta),
        epsilon_of_plan=None if of_plan is None else float(of_plan),
        relation=config.relation,
        steps=run.steps,
        target_epsilon=None if config.target_epsilon is None else float(config.target_epsilon),
        claims_budget=run.is_adaptive,
        private=math.isfinite(epsilon) and not run.is_seeded,
        seeded=run.is_seeded,
        isolation=run.isolation,
        spot_checks=_spot_checks(run),
        gradient_edits=config.checks.gradient_edits,
        public_state=tuple(config.checks.public_state),
        guard=FixedGuard.description if run.mechanism is None else run.mechanism.guard.description,
        accountant=config.accountant.name,
        accountant_settings=_settings(config.accountant),
        mechanism=_mechanism(run),
        clip_norms=_clip_norms(run),
        noise_multiplier=None if latest is None or latest == math.inf else float(latest),
        sample_rate=None if batches is None else float(batches.sample_rate),
        expected_batch_size=None if batches is None else float(batches.expected_batch_size),
        num_records=None if batches is None else int(batches.num_records),
        unit=config.unit_word,
        learning=facts(run.setting, run.signal) if config.advice else {},
        about={} if config.about is None else config.about.to_dict(),
        started=run.started or _minute(run.ledger.began),
        ended=_minute(run.ledger.latest),
        stop_reason=run.stop_reason,
        not_covered=(
            *_NOT_COVERED,
            *[_IN_ORDER] * isinstance(config.sampling, FixedOrder),
            *run.not_covered,
            *[_REPLANNED] * run.ledger.is_replanned,
        ),
        versions=dict(_versions()),
        ledger_id=run.ledger.id,
        weights=run.ledger.latest_weights,
        journal=None if journal is None else str(journal),
        events=run.ledger.runs,
    )


def _minute(moment: datetime | None) -> str | None:
    """Return a moment to the minute: times of single steps stay private."""
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M UTC")


def _spot_checks(run: PrivateRun) -> str:
    """Return how many steps passed a comparison, and the reasons why others were not compared."""
    if not run.config.checks.comparisons:
        return "opted out"
    if run.engine.startswith("one_by_one") and not run.spot_checks:
        return "not needed: each record runs alone"
    passed = run.spot_checks - sum(run.not_compared.values())
    of = f"of {run.steps_begun} steps" if run.started is None else "steps since the run was resumed"
    reasons = "; ".join(f"{reason} ({count})" for reason, count in sorted(run.not_compared.items()))
    state = "; gradients by construction" if run.isolation.startswith("by construction") else ""
    return f"passed at {passed} {of}{state}{f'; not compared: {reasons}' if reasons else ''}"


def _mechanism(run: PrivateRun) -> dict[str, str]:
    config = run.config
    estimator = config.resolved_estimator()
    queries = estimator.traits.queries_per_step
    return {
        "estimator": repr(estimator),
        **({} if isinstance(config.clipping, Flat) else {"clipping": repr(config.clipping)}),
        **({"queries": _ROUND.format(queries)} if queries > 1 else {}),
        "noise schedule": repr(config.noise_schedule),
        "post-processing": repr(list(config.postprocessing)),
        "sampling": repr(config.sampling),
        **({} if config.unit is None else {"unit": _UNIT.format(config.unit.most_rows)}),
        **(
            {}
            if config.augmentations == 1
            else {"augmentations": _VIEWS.format(config.augmentations)}
        ),
        **({} if config.noise == IndependentNoise() else {"noise": repr(config.noise)}),
        "gradient engine": run.engine,
        "random numbers": _CIPHER if config.secure_noise else _SEEDED,
        **({} if run.optimizers is None else {"private optimizer": run.optimizers}),
    }


def _clip_norms(run: PrivateRun) -> dict[str, float]:
    """Return the fields of the estimator whose names end with "norm": all of this package's do.

    And where the clip norm moves, where it is now.
    """
    found = {
        name: float(value)
        for name, value in _settings(run.config.resolved_estimator()).items()
        if name.endswith("_norm") and value is not None
    }
    moved = None if run.mechanism is None else run.mechanism.clip_norm
    return found if moved is None else {**found, "latest": moved}


def _settings(part: object) -> dict[str, float | None]:
    """Return the numbers among the fields of a dataclass."""
    if not is_dataclass(part):
        return {}
    values: dict[str, Any] = {field.name: getattr(part, field.name) for field in fields(part)}
    return {
        name: value
        for name, value in values.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Look versions up once: at every checkpoint it would cost more than ε."""
    names = ("lightning-dp", "lightning", "torch", "opacus", "numpy", "scipy")
    return (("python", python_version()), *((name, _version(name)) for name in names))


def _version(name: str) -> str:
    """Return the installed version; a package may be on the path only."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


# -- other journals of its folder: the first and the last line of a fit --------------------------


def other_journals(
    found: Neighbours, folder: Path | None, run: PrivateRun, *, is_over: bool = False
) -> str:
    """Return the line about other journals in the folder, before the first step or after the last."""
    line = f"privacy: {_number_of(found)} in {folder}."
    counted, left_out = _split(found, folder, run)
    if counted:
        cost = _cost_of(counted, run, with_run if is_over else with_whole_plan)
        line += f" If of the same records: {cost}"
    return " ".join([line, *left_out])


def at_end(run: PrivateRun) -> str | None:
    """Return :func:`other_journals` after a fit; None if there are none."""
    path = run.ledger.journal_path
    found = Neighbours() if path is None else neighbours(path.parent, run.ledger.id)
    if path is None or not found.count:
        return None
    return other_journals(found, path.parent, run, is_over=True)


def _cost_of(
    written: list[JournalContent],
    run: PrivateRun,
    cost: Callable[[Charges, PrivateRun], str],
    more: Iterable[Charges] = (),
) -> str:
    """Return the sentence about the charges of journals, and more, or why there is no sum."""
    try:
        together = union(written)
        for each in more:
            together.merge(each)
        return cost(together, run)
    except (JournalError, ValueError) as error:  # such as a guarantee under another relation
        return f"What that costs together is unknown: {text_of(error)}"


def with_whole_plan(others: Charges, run: PrivateRun) -> str:
    """Return the sentence about others' charges, together with the whole plan of this run."""
    config, spent = run.config, _not_of(run, others).history()
    at = f"at δ = {epsilon_text(config.target_delta, 6)} ({config.relation})"
    epsilon = run.epsilon_beside(spent)
    if epsilon is not None:
        return f"Together with the whole plan of this run that is ε = {epsilon_text(epsilon)} {at}."
    alone = PLDAccountant().epsilon(spent, config.target_delta, config.relation)
    return f"That spent ε = {epsilon_text(alone)} {at} already, to which this run adds."


def with_run(others: Charges, run: PrivateRun) -> str:
    """Return the same for a run that is over; noise chosen at run time adds its whole budget."""
    config, spent = run.config, _not_of(run, others).history()
    delta = config.target_delta
    if run.is_adaptive:
        epsilon = PLDAccountant().epsilon(spent, delta, config.relation) + run.epsilon
        delta *= 2
    else:
        history = [*spent, *run.ledger.history()]
        epsilon = PLDAccountant().epsilon(history, delta, config.relation)
    words = f"ε = {epsilon_text(epsilon)} at δ = {epsilon_text(delta, 6)} ({config.relation})"
    return f"Together with this run that is {words}."


def _not_of(run: PrivateRun, others: Charges) -> Charges:
    """Return the others' charges without those that this run's ledger counts itself."""
    own = run.ledger.runs
    return Charges(
        {name: each for name, each in others.items() if others.length(name) > own.length(name)}
    )


def _number_of(found: Neighbours) -> str:
    return "another journal" if found.count == 1 else f"{found.count} other journals"


def _split(
    found: Neighbours, folder: Path | None, run: PrivateRun
) -> tuple[list[JournalContent], list[str]]:
    """Return the journals of the sum, and sentences about the others."""
    same = [each for each in found.written if _may_share_records(each, run)]
    with_noise = [each for each in same if has_guarantee(each.runs)]
    counted = [each for each in with_noise if each.budget is None]
    budgets = [each.budget.declared for each in with_noise if each.budget is not None]
    lines = [f"Left out, add it: {each}." for each in budgets]
    if others := len(found.written) - len(same):
        lines.append(f"Left out: {others} of other data (another name, or number of records).")
    if without := len(same) - len(with_noise):
        lines.append(f"Left out: {without} without noise, which must stay secret: ε would be inf.")
    if found.unread:
        lines.append(
            f"{found.unread} of them are too long to be added up now; python -m "
            f"lightning_dp.report {folder} --delta {run.config.target_delta:g} does it."
        )
    if found.damaged:
        lines.append(f"Damaged: {', '.join(path.name for path in found.damaged[:5])}.")
    return counted, lines


def _may_share_records(journal: JournalContent, run: PrivateRun) -> bool:
    """Compare units and names of the data sets, or without both names the numbers of units."""
    if run.batches is None or not journal.data:
        return True
    own_name, own_number = run.config.data_set, run.batches.num_records
    return any(
        is_by_user(name) == is_by_user(own_name)
        and (name == own_name if is_named(name) and is_named(own_name) else number == own_number)
        for number, name in journal.data
    )


# -- earlier trainings of the model --------------------------------------------------------------


@dataclass
class _Process:
    """The trainings of this process."""

    ledgers: dict[str, Ledger] = field(default_factory=dict)  # that released weights
    earlier: dict[str, list[Ledger]] = field(default_factory=dict)  # whose weights each began with
    warned: set[tuple[str, str]] = field(default_factory=set)


_process = _Process()


class EarlierTraining:
    """Warns at the start of a fit if another ledger trained the model, and recognises the model later.

    A model is known by the weights that a ledger released, whatever object holds them: a copy, one around
    the same parts, a loaded checkpoint, and, by the journals in the folder, those of other processes.
    """

    def __init__(self, module: nn.Module, run: PrivateRun) -> None:
        self._module, self._run = module, run
        self._before: frozenset[str] = frozenset()  # the weights when training started

    def begin(self, folder: Path | None) -> str | None:
        """Warn of what others spent, and remember who trains now, once the plan is declared.

        Return the line about other journals in the folder (of the lead process); None without them.
        """
        run = self._run
        self._before = frozenset(fingerprints(self._module.parameters()))
        others: list[Ledger] = []
        found = Neighbours()
        if not run.steps:  # one that goes on has its own weights
            ledgers = [each for each in _process.ledgers.values() if each.id != run.ledger.id]
            others = [each for each in ledgers if not each.weights.isdisjoint(self._before)]
            others += [each for known in others for each in _process.earlier.get(known.id, ())]
            _process.earlier[run.ledger.id] = others
            if folder is not None:
                found = neighbours(folder, run.ledger.id)
        same = [each for each in found.written if not each.weights.isdisjoint(self._before)]
        self._warn_trained_before(others, same)
        return other_journals(found, folder, run) if found.count else None

    def released(self, tensors: Mapping[str, object] | None = None) -> None:
        """Note the trained weights that others will see: those of a checkpoint, or as they are now."""
        if not (self._run.is_under_way and self._run.steps):
            return
        trained: dict[str, object] = {
            name: param for name, param in self._module.named_parameters() if param.requires_grad
        }
        values = trained if tensors is None else {k: v for k, v in tensors.items() if k in trained}
        new = [each for each in fingerprints(values.values()) if each not in self._before]
        ledger = self._run.ledger
        ledger.note_weights(some_of(new))
        _process.ledgers[ledger.id] = ledger

    def _warn_trained_before(self, others: Sequence[Ledger], written: list[JournalContent]) -> None:
        run = self._run
        names = {*(each.id for each in others), *(each.ledger_id for each in written)}
        names = {name for name in names if (run.ledger.id, name) not in _process.warned}
        if not names:
            return
        spent = _cost_of(written, run, with_whole_plan, (each.runs for each in others))
        warn(
            f"This model, or a part of it, was trained before under another privacy ledger "
            f"({', '.join(sorted(names))}), and neither counts the other. {spent} To "
            "count all in one place, give the same DifferentialPrivacy object to each fit (with a "
            "noise_multiplier: calibrated noise leaves nothing after the first), or go on with "
            "fit(ckpt_path=...); for a search see lightning_dp.search.Search and sweep_history. "
            "(If it saw other records, or was initialised again since, each claim holds as it is.)",
            topic="earlier-training",
        )
        _process.warned.update((run.ledger.id, name) for name in names)


_SAMPLE = 4096  # entries of a tensor that are looked at
_MOST = 16  # tensors of a model that are remembered


def fingerprints(tensors: Iterable[object]) -> list[str]:
    """Return a hash for each tensor among some objects, of its exact values wherever they are.

    After a private step no two tensors share their values, so one of them in a new model says that
    the model, or a part of it, was trained. Tensors whose values are all equal say nothing: that is
    how they are made (biases, norms).

    Example:
        >>> one, other = torch.tensor([0.5, 1.5]), torch.tensor([0.5, 1.25])
        >>> fingerprints([one, torch.zeros(3)]) == fingerprints([one.clone()])
        True
        >>> fingerprints([one]) == fingerprints([other])
        False
    """
    return [each for each in map(_fingerprint, tensors) if each is not None]


def some_of(found: Sequence[str]) -> list[str]:
    """Return as many of them as a journal keeps, evenly chosen from first to last."""
    if len(found) <= _MOST:
        return list(found)
    return [found[i * (len(found) - 1) // (_MOST - 1)] for i in range(_MOST)]


def _fingerprint(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    flat = held_here([tensor])[0].detach().flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].cpu().contiguous()
    if sample.numel() < 2 or bool((sample == sample[0]).all()):
        return None
    digest = hashlib.blake2b(f"{tensor.dtype} {tensor.numel()} ".encode(), digest_size=8)
    digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
