"""Spending of others: ledgers that trained this model, and other journals in the folder.

A model that was trained before is known by its modules and by hashes of its weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_dp._refusals import warn
from lightning_dp._world import held_here
from lightning_dp.accounting.journal import JournalError
from lightning_dp.accounting.ledger import Ledger, Neighbours, neighbours, union
from lightning_dp.report.totals import at_start, with_whole_plan
from lightning_dp.run import PrivateRun

__all__ = ["EarlierTraining", "fingerprints", "some_of"]


@dataclass(frozen=True)
class _Trained:
    """A ledger that trained a module, and the weights that it began with."""

    ledger: Ledger
    before: frozenset[str]


@dataclass
class _Process:
    """The trainings of this process."""

    modules: WeakKeyDictionary[nn.Module, list[_Trained]] = field(default_factory=WeakKeyDictionary)
    ledgers: dict[str, Ledger] = field(default_factory=dict)  # that released weights
    said: set[tuple[str, str]] = field(default_factory=set)


_process = _Process()


class EarlierTraining:
    """Warns at the start of a fit if another ledger trained the model, and recognises the model later.

    A model is known by its modules (the same object, or another one around the same parts), and by
    the weights that a ledger released: those of copies, of loaded checkpoints, and, by the journals
    in the folder, of other processes. Weights that are what they were before the other
    training are nobody's.

    Args:
        module: the model.
        run: whose fit begins.
    """

    def __init__(self, module: nn.Module, run: PrivateRun) -> None:
        self._module, self._run = module, run
        self._before: frozenset[str] = frozenset()  # the weights when training started

    def begin(self, folder: Path | None) -> None:
        """Say what others spent, and remember who trains now, once the plan is declared.

        Args:
            folder: of the journal (lead process); None if there is none.
        """
        run = self._run
        self._before = frozenset(fingerprints(self._module.parameters()))
        others = {each.ledger.id: each.ledger for each in self._of_modules()}
        found = Neighbours()
        if not run.steps:  # one that goes on has its own weights
            others |= {
                ledger.id: ledger
                for ledger in _process.ledgers.values()
                if not ledger.weights.isdisjoint(self._before)
            }
            if folder is not None:
                found = neighbours(folder, run.ledger.id, self._before)
        others.pop(run.ledger.id, None)
        self._remember()
        self._say_trained_before(others, found)
        if found.count:
            rank_zero_info(at_start(found, folder, run))

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

    def _of_modules(self) -> list[_Trained]:
        """Return who trained parts of the model in this process, unless they are as they were before."""
        return [
            trained
            for part in self._module.modules()
            for trained in _process.modules.get(part, [])
            if trained.ledger.steps
            and not trained.before.issuperset(fingerprints(part.parameters(recurse=False)))
        ]

    def _remember(self) -> None:
        ledger = self._run.ledger
        for part in self._module.modules():
            if any(param.requires_grad for param in part.parameters(recurse=False)):
                known = _process.modules.get(part, [])
                same = [each for each in known if each.ledger.id == ledger.id]
                before = same[0].before if same else self._before
                others = [each for each in known if each.ledger.id != ledger.id]
                _process.modules[part] = [*others, _Trained(ledger, before)]

    def _say_trained_before(self, others: Mapping[str, Ledger], found: Neighbours) -> None:
        run, names = self._run, {*others, *(each.ledger_id for each in found.trained)}
        names = {name for name in names if (run.ledger.id, name) not in _process.said}
        if not names:
            return
        try:
            together = union(found.trained)
            for each in others.values():
                together.merge(each.runs)
            spent = with_whole_plan(together, run)
        except JournalError as error:
            spent = f"What that costs together is unknown: {error.text}"
        warn(
            f"This model, or a part of it, was trained before under another privacy ledger "
            f"({', '.join(sorted(names))}), and neither counts the other. {spent} To "
            "count all in one place, give the same DifferentialPrivacy object to each fit, or go on "
            "with fit(ckpt_path=...); for a search see lightning_dp.search.Search and "
            "lightning_dp.accounting.sweep_history. (If it saw other records, or was "
            "initialised again since, each claim holds as it is.)",
            topic="earlier-training",
        )
        _process.said.update((run.ledger.id, name) for name in names)


_SAMPLE = 4096  # entries of a tensor that are looked at
_MOST = 16  # tensors of a model that are remembered


def fingerprints(tensors: Iterable[object]) -> list[str]:
    """Return a hash for each tensor, of its exact values wherever they are.

    After a private step no two tensors share their values, so one of them in a new model says that
    the model, or a part of it, was trained. Tensors whose values are all equal say nothing: that is
    how they are made (biases, norms).

    Args:
        tensors: as in the values of a ``state_dict``; whatever else is among them is left out.

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
