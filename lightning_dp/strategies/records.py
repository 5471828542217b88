"""The way of records to ``training_step``: tried once, then watched at a few steps."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils.data import default_collate

from lightning_dp._checks import MisconfigurationError, repeated_record
from lightning_dp._warnings import warn
from lightning_dp._world import World
from lightning_dp.gradients.batches import DEFAULT_LAYOUT, UNKNOWN_LAYOUT, Layout
from lightning_dp.isolation.collated import CollatedPool, collated_pools, has_folded_rows
from lightning_dp.isolation.collation import Collate, EachAlone, Trial, try_collate
from lightning_dp.isolation.copies import Copies, quiet
from lightning_dp.isolation.drawn import MIXED, NotRepeatable, fetch, mixes_samples
from lightning_dp.isolation.outcome import Isolation
from lightning_dp.isolation.padding import compare_lengths
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.rows_behind import chosen_rows, shared_rows
from lightning_dp.isolation.samples import SampleMaker, lengths_in, size_of
from lightning_dp.isolation.transfer import TransferHooks
from lightning_dp.run import PrivateRun
from lightning_dp.sampling.at_once import collates_as_torch
from lightning_dp.sampling.loader import Chunk, PrivateDataLoader
from lightning_dp.strategies.step import PrivateStep

__all__ = ["Records"]

_LOOKED_AT = 4  # records, for one whose shapes tell where several rows are
_OTHERS = 2  # records that are drawn with the one that is looked at
_PADDING = (
    "{} pads a batch to its longest record, and how much it pads changes the others' gradients{}. "
    "Clipping does not bound what the longest record does then, and ε would not hold. Pad on the right, "
    "hide the padding from attention, means and losses by a mask, or pad to one fixed length. (Found on "
    "synthetic samples. If it is wrong, leave the check out with isolation_probe=False.)"
)
_CHANGED = "The training set was changed during fit. {}"
_SHARED = (
    "Each of the {samples} samples of {kind} is made of {each} of the {rows} rows of its attribute "
    "{name!r}, so one row is in several samples. ε is for one sample; all those of a row, and of "
    "the person behind it, are protected less than it says. Make one sample of each row, with random "
    "variants in __getitem__. (If the rows are public, nothing is lost.)"
)
_OTHER_ROWS = (
    "train_dataloader gives other rows of the data set than before. If the records decide which (by "
    "their losses, say), what is left out and what stays tells of them without noise, and ε would not "
    "hold. Choose by numbers of epochs or by a seed, or train on all rows."
)
_RARELY = 50  # steps between two looks, on average


class Records:
    """Refuses a ``collate_fn`` or a hook that mixes samples; watches a data set that would.

    Args:
        module: the user's model.
        step: is told of a fault that real records show.
        run: is told the outcome.
        world: the processes; the outcome of the lead one holds for all.
    """

    def __init__(
        self, module: LightningModule, step: PrivateStep, run: PrivateRun, world: World
    ) -> None:
        self._module, self._step, self._run, self._world = module, step, run, world
        self._tries = run.config.isolation_probe
        self._watches = run.config.spot_checks
        self._asks_for_rows = False
        self._steps = 0
        self._loader: PrivateDataLoader | None = None  # of the latest epoch
        self._rows: object = None  # that it has
        self._has_said = False

    def find_layout(self, loader: PrivateDataLoader, chunk: Chunk) -> Layout:
        """Return where in a batch the samples are, from batches of 2 and of 3 made-up ones.

        Nobody has to try where the ``collate_fn`` is torch's own. One of three is longer, where samples
        have lengths: what a batch takes from its longest one shows then.
        """
        hooks = self._hooks
        if self._is_torchs_own(loader.collate_of_user, hooks):
            return DEFAULT_LAYOUT
        engine = self._step.engine
        if not (self._run.config.isolation_probe or engine.choice.isolates):
            return UNKNOWN_LAYOUT  # and no code of the user's runs on made-up samples
        copies = Copies(loader.collate_of_user, closes_datasets=True)
        fresh = partial(hooks.fresh, copies) if hooks.overridden else copies.fresh
        try:
            maker = SampleMaker(_sample(loader, chunk))
        except Exception:
            return UNKNOWN_LAYOUT
        lengths = {length: 2 * length for length in lengths_in(maker.like, 0)}
        for longest in (lengths, {}):
            try:
                with quiet():
                    last = maker.make(2, lengths=longest)
                    two = [maker.make(i) for i in range(2)]
                    return Layout.of(fresh()(two), fresh()([*two, last]))
            except Exception:  # of the user's, on samples that are none
                continue
        return UNKNOWN_LAYOUT

    def at_first_batch(self, loader: PrivateDataLoader, chunk: Chunk) -> None:
        """Refuse what mixes samples, once in a fit and before anything is charged.

        Raises:
            MisconfigurationException: with the cure.
        """
        if not self._tries:
            return
        self._tries, self._asks_for_rows = False, self._world.is_lead
        is_lead = self._world.is_lead
        name, trial = self._world.broadcast(self._tried(loader, chunk) if is_lead else None)
        if trial.outcome == "mixed":
            raise MisconfigurationError(
                f"{name} {trial.reason}. (Found on synthetic samples. If it is wrong, leave the check "
                "out with isolation_probe=False.)",
                topic="collate-fn",
            )
        if trial.outcome == "untried":
            self._run.isolation += f"; {name} was not tried ({trial.reason})"
        if trial.pads and not self._run.config.runs_each_record_alone:
            self._compare_lengths(name, loader, chunk)
        if trial.drops and is_lead:
            warn(
                f"{name} leaves out samples that are None or hold NaN. If your data have such, the "
                "run ends at the first batch with one, and its ε is withdrawn: take them out of the "
                "data set before the training.",
                topic="collate-fn",
            )

    def _warn_of_shared_rows(self, loader: PrivateDataLoader, chunk: Chunk) -> None:
        found = shared_rows(loader.dataset, chunk.records[:2])
        if found is not None:
            kind = type(loader.dataset).__name__
            warn(_SHARED.format(kind=kind, **vars(found)), topic="repeated-records")
            times = found.each * found.samples / found.rows  # of a table's numbers nothing is told
            often = f" ({times:.3g} on average)" if times > 1 else ""
            note = f"rows of the data that are in several samples{often}"
            self._run.not_covered = (*self._run.not_covered, note)

    def _compare_lengths(self, name: str, loader: PrivateDataLoader, chunk: Chunk) -> None:
        """Refuse a model that reads what its batches are padded with; note what was compared.

        Raises:
            MisconfigurationException: with the cure.
        """
        is_lead = self._world.is_lead
        found = self._world.broadcast(self._of_lengths(loader, chunk) if is_lead else None)
        if found.outcome == "coupled":
            where = f" (first in {found.modules[0]})" if found.modules else ""
            raise MisconfigurationError(_PADDING.format(name, where), topic="padding")
        not_compared = f"not compared ({found.reason})"
        were = "compared" if found.outcome == "isolated" else not_compared
        self._run.isolation += f"; batches padded to other lengths were {were}"

    def _of_lengths(self, loader: PrivateDataLoader, chunk: Chunk) -> Isolation:
        engine = self._step.engine
        if self._world.is_sharded:
            return Isolation("not probed", "parameters are sharded")
        try:
            sample = _sample(loader, chunk)
        except Exception:  # a data set that gives each record once
            return Isolation("not probed", "a record could not be read again")
        hooks = self._hooks
        copies = Copies(loader.collate_of_user, closes_datasets=True)
        fresh = partial(hooks.fresh, copies) if hooks.overridden else copies.fresh
        with engine.off():
            trainer = self._module.trainer
            passes = Passes(
                self._module, engine.choice, engine.trained_names, trainer, made_up=True
            )
            return compare_lengths(passes, fresh, sample)

    def after_charge(self, loader: PrivateDataLoader, chunk: Chunk) -> None:
        """Note a fault that a charged batch shows.

        As a pass begins, that the data set names a record twice by now; at a few steps, that a sample
        depends on the others.
        """
        if self._asks_for_rows and chunk.size:
            self._asks_for_rows = False
            self._warn_of_shared_rows(loader, chunk)
        if not chunk.index:
            self._compare_rows(loader)
        if not chunk.index and (fault := self.repeated(loader)) is not None:
            self._step.note(fault)
        due = self._watches and chunk.first and self._is_due()
        if not due or not chunk.size or not self._watches:
            return
        record, *others = _some(chunk.records, 1 + _OTHERS)
        try:
            found = bool(others) and mixes_samples(loader.dataset, record, others)
        except NotRepeatable:
            self._watches = False
            self._run.isolation += "; whether samples depend on each other was not seen"
            return
        if found:
            self._step.note(MIXED.format(type(loader.dataset).__name__) + ".")

    def _compare_rows(self, loader: PrivateDataLoader) -> None:
        """Warn once if a new loader has other rows than the first one."""
        if loader is self._loader or self._has_said:
            return
        is_first, self._loader = self._loader is None, loader
        before, self._rows = self._rows, chosen_rows(loader.dataset)
        self._has_said = not is_first and before != self._rows
        if self._has_said and self._world.is_lead:
            warn(_OTHER_ROWS, topic="data-changed")

    def repeated(self, loader: PrivateDataLoader) -> str | None:
        """Return why steps may not be released, if somebody has had a record named twice since."""
        text = repeated_record(loader.dataset)
        return None if text is None else _CHANGED.format(text)

    def _is_due(self) -> bool:
        """Decide by public chance alone: surely at the first step, often at the start, then rarely."""
        self._steps += 1
        return secrets.randbelow(min(self._steps, _RARELY)) == 0

    def _tried(self, loader: PrivateDataLoader, chunk: Chunk) -> tuple[str, Trial]:
        """Return what was tried, as code, and the outcome."""
        collate = loader.collate_of_user
        hooks = self._hooks
        name = f"collate_fn ({_name(collate)})"
        if self._is_torchs_own(collate, hooks):
            return name, Trial("apart")
        try:
            sample = _sample(loader, chunk)
        except Exception as error:  # a data set that gives each record once
            reason = f"{type(error).__name__} where a record was read again"
            return name, Trial("untried", reason)
        assert self._run.batches is not None
        chunks = self._world.size * self._run.batches.chunks_per_step
        size = max(1, round(self._run.batches.expected_batch_size / chunks))
        copies = Copies(collate, closes_datasets=True)
        wrap = EachAlone if self._run.config.runs_each_record_alone else _together
        trial = try_collate(lambda: wrap(copies.fresh()), sample, size)
        if trial.outcome != "apart" or not hooks.overridden:
            return name, trial
        return " and ".join(hooks.overridden), hooks.tried(copies, sample, size, wrap)

    def pools(self, loader: PrivateDataLoader, chunk: Chunk) -> list[CollatedPool] | None:
        """Return synthetic batches where rows are not records; None where they are, or nobody knows."""
        collate, hooks = loader.collate_of_user, self._hooks
        if self._is_torchs_own(collate, hooks) or self._run.config.runs_each_record_alone:
            return None
        try:
            sample = _sample(loader, chunk)
        except Exception:
            return None
        copies = Copies(collate, closes_datasets=True)
        fresh = partial(hooks.fresh, copies) if hooks.overridden else copies.fresh
        return list(collated_pools(fresh, sample)) if has_folded_rows(fresh, sample) else None

    @property
    def _hooks(self) -> TransferHooks:
        trainer = self._module.trainer
        return TransferHooks(self._module, trainer.datamodule, trainer)  # type: ignore[attr-defined]

    @staticmethod
    def _is_torchs_own(collate: Collate, hooks: TransferHooks) -> bool:
        return collate is default_collate and collates_as_torch() and not hooks.overridden


def _sample(loader: PrivateDataLoader, chunk: Chunk) -> Any:
    """Return the largest of a few records, of which only types and shapes are used."""
    with quiet():
        return max(fetch(Copies(loader.dataset).fresh(), chunk.records[:_LOOKED_AT]), key=size_of)


def _some(records: Any, count: int) -> list[int]:
    """Return different records of a batch, by chance that no seed of the user's decides."""
    return secrets.SystemRandom().sample(list(records), min(count, len(records)))


def _together(collate: Collate) -> Collate:
    return collate


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
