"""State that follows the records, carried along until something reads it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_dp.gradients.snapshot import ABSENT, Path, Snapshot, held_in, restored

__all__ = ["Marks", "TwinState", "is_public_metric", "logged_in_training", "setting_in_words"]

_FAR = 1e6  # times the difference of two worlds, for thresholds that lie far from both
_FAR_WHOLE = 1e3  # the same for whole numbers, which may be sizes
_NAMED = 5  # attributes in a message
_KEPT = ("buffer", "parameter")  # in every checkpoint
_LOGGED = "trainer.callback_metrics"
_PUBLIC = ("epoch", "step", "global_step")

_READ = (
    "Gradients, or settings of an optimizer, depend on {}, which follows the records of earlier steps, "
    "so clipping does not bound what a record does. Keep there only what depends on no record; log the "
    "rest with self.log."
)
_SET = (
    "{}() sets {} by {}, which follows the records of earlier steps, without noise. "
    "Set it by the number of steps or epochs, or by a metric of public validation data."
)


@dataclass(frozen=True)
class _Twin:
    """The value that an attribute has where other records were in a batch, and the one without these."""

    name: str
    value: Any
    end: Any


class TwinState:
    """The values that attributes and buffers would have if a batch had held other records.

    Two runs of one step, from one snapshot and one random state, with some records exchanged, end
    with other values in what follows the records. That is ordinary (a list of losses, a metric)
    until a gradient or an optimizer setting reads it. So the other run's values, the twins, are kept:
    a later comparison, or a hook, runs once more with them in place.

    All ranks must ask alike, since hooks may wait for each other; :attr:`has_twins` may differ.

    Args:
        module: the user's model.

    Example:
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.steps, self.latest = 0, 0.0
        >>> model, ends = Model(), []
        >>> for loss in (1.5, 2.5):  # of the batch, and of the one with other records
        ...     with restored(model):
        ...         model.steps, model.latest = model.steps + 1, loss
        ...         ends.append(Snapshot.of(model))
        >>> twins = TwinState(model)
        >>> twins.after_pair(*ends)
        >>> twins.names
        ('latest',)
        >>> with twins.in_place():
        ...     seen = model.latest
        >>> seen, model.latest
        (2.5, 0.0)
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._twins: dict[Path, _Twin] = {}
        self._left: dict[Path, _Twin] = {}  # that had no place when twins were put in place
        self._ends: tuple[dict[Path, _Twin], dict[Path, _Twin]] = ({}, {})  # of the latest pair
        self._ever: dict[Path, _Twin] = {}  # of all pairs, whatever became of it since
        self._reads_logs = False  # the module has asked its Trainer for what was logged

    @property
    def has_twins(self) -> bool:
        """True if something follows the records."""
        return self._reads_logs or bool(self._twins)

    @property
    def has_ever(self) -> bool:
        """True if something followed the records of any pair, whatever became of it since."""
        return self._reads_logs or bool(self._ever)

    @property
    def names(self) -> tuple[str, ...]:
        """The dotted names of what follows the records."""
        return tuple(dict.fromkeys(twin.name for twin in self._twins.values()))

    def after_pair(self, end: Snapshot, other: Snapshot, fewer: Snapshot | None = None) -> None:
        """Take the twins of what differs between a batch and one with other records; the rest stays.

        Args:
            end: after the batch.
            other: after the one with other records, from the same start.
            fewer: after one with fewer records: which numbers follow the size of the batch.
        """
        there, here = _twins_of(end, other), _twins_of(other, end)
        if fewer is not None:
            there = {**_numbers(_twins_of(end, fewer)), **there}
            here = {**_numbers(_twins_of(fewer, end)), **here}
        self._twins |= there
        self._ends = here, there
        self._ever |= self._twins

    def after_twin(self, end: Snapshot, other: Snapshot) -> None:
        """Replace all twins by what differs after a run with twins; what was overwritten loses its own.

        Args:
            end: after the batch.
            other: after the same batch, with the twins in place at its start.
        """
        self._twins = {**self._left, **_twins_of(end, other)}

    @contextmanager
    def in_place(self, *, scale: float = 1.0) -> Iterator[None]:
        """Put the twins into the module inside, which is restored afterwards, weights too.

        Args:
            scale: times the difference between the twin and the value of now, for numbers.
        """
        with self._world(self._twins, scale, scale) as self._left:
            yield

    def at_ends(self) -> Iterator[AbstractContextManager[object]]:
        """Put what followed the records of the latest pair into the module inside.

        Yields:
            the world of the batch, and that of the one with other records.
        """
        return (self._world(each, 1.0, shift) for shift, each in enumerate(self._ends))

    def far(self, sign: float) -> AbstractContextManager[object]:
        """Put all that ever followed the records far away from both worlds inside.

        Args:
            sign: 1 or -1, the direction; 0 leaves it where it is.
        """
        return self._world(self._ever, sign * _FAR, sign * _FAR)

    @contextmanager
    def _world(
        self, twins: Mapping[Path, _Twin], scale: float, shift: float
    ) -> Iterator[dict[Path, _Twin]]:
        """Yield those that have no place in the module."""
        with restored(self._module, parameters=True) as now:
            left = _put(now, twins, scale)
            with self.noting_reads(shift):
                yield left

    @contextmanager
    def noting_reads(self, shift: float = 0.0) -> Iterator[None]:
        """Note inside that the module asks its Trainer for metrics, of which training logged some.

        Or its data module does. Those follow the records, and have no twins: comparisons log nothing.

        Args:
            shift: moves them: x to x + shift (1 + abs(x)). In a world of twins that one's counts.
        """
        trainer = self._module._trainer
        if trainer is None or isinstance(trainer, _MovedLogs):
            yield
            return

        def note() -> None:
            self._reads_logs = True

        view = _MovedLogs.of(trainer, shift, note)
        owners = [self._module, *filter(None, [getattr(trainer, "datamodule", None)])]
        for owner in owners:
            owner.trainer = view
        try:
            yield
        finally:
            for owner in owners:
                owner.trainer = trainer

    def fault(self) -> str:
        """Return the words for gradients that differ with the twins in place."""
        return _READ.format(self._in_words)

    def run_hook(
        self,
        hook: Callable[..., Any],
        *args: Any,
        is_of_epoch: bool = False,
        is_trial: bool = False,
    ) -> str | None:
        """Run a hook of the module in other worlds, before it runs in earnest; restore all.

        What it computes from twins becomes a twin, what it overwrites is none any more. It runs with the
        twins in place and far away from there, where there are any. Where it raises, nothing is said.

        Args:
            hook: a bound method, such as ``module.on_train_epoch_end``.
            args: of it.
            is_of_epoch: also run it with all that ever followed the records far away: what the latest
                batch has overwritten follows the records of that one.
            is_trial: it is not about to run in earnest, so that all twins stay.

        Returns:
            The fault, if an optimizer setting follows the records.
        """
        if (end := self._end_in(self.far(0.0), hook, args)) is None:
            return None
        worlds: list[AbstractContextManager[object]] = []
        if self.has_twins:
            worlds += [self.in_place(scale=scale) for scale in (1.0, _FAR, -_FAR)]
        near = len(worlds)
        if is_of_epoch and self._ever:
            worlds += [self.far(1.0), self.far(-1.0)]
        found: dict[Path, _Twin] = {}
        for i, world in enumerate(worlds):
            if (other := self._end_in(world, hook, args)) is None:
                found = {**self._twins, **found}
                continue
            settings = [each.name for each in end.differences(other) if each.kind == "setting"]
            if settings:
                name = getattr(hook, "__name__", hook)
                return _SET.format(name, setting_in_words(settings[0]), self._in_words)
            if i < near:
                found = {**self._left, **_twins_of(end, other), **found}
        if not is_trial:
            self._twins = found
            self._ever |= found
        return None

    def written_alike(self, hook: Callable[..., Any]) -> set[str]:
        """Return the names of buffers and weights that a hook writes, whatever the records were.

        Nothing is said of a hook that raises.

        Args:
            hook: a bound method without arguments, such as ``module.on_train_epoch_end``.
        """
        written, ends = set[str](), list[Snapshot]()
        try:
            for sign in (0.0, 1.0, -1.0):
                with self.far(sign):
                    marks = Marks.of(self._module)
                    before = Snapshot.of(self._module, parameters=True)
                    hook()
                    ends.append(Snapshot.of(self._module, parameters=True))
                    changed = (each for each in before.differences(ends[-1]) if each.kind in _KEPT)
                    written |= {each.name for each in changed}
                    written |= set(Marks.of(self._module).changed_since(marks))
        except Exception:  # of the user's, on values that no run had
            return set()
        return written - {each.name for end in ends[1:] for each in ends[0].differences(end)}

    def _end_in(
        self, world: AbstractContextManager[object], hook: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """Return the state after a hook; None if it raises."""
        try:
            with world, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hook(*args)
                return Snapshot.of(self._module)
        except Exception:  # of the user's, on values that no run had
            return None

    @property
    def _in_words(self) -> str:
        ended = (twin.name for each in (self._ends[0], self._ever) for twin in each.values())
        logged = [_LOGGED] if self._reads_logs else []
        names = list(dict.fromkeys([*logged, *self.names, *ended]))
        return ", ".join(f"self.{name}" for name in names[:_NAMED])


class _MovedLogs(Trainer):
    """The Trainer as it is, of which the metrics that training logged are moved."""

    _shift: float
    _note: Callable[[], None]

    @classmethod
    def of(cls, trainer: Trainer, shift: float, note: Callable[[], None]) -> _MovedLogs:
        """Make one; ``note`` is called when the metrics are asked for."""
        bases = (cls,) if type(trainer) is Trainer else (cls, type(trainer))
        view: _MovedLogs = object.__new__(type(cls.__name__, bases, {}))
        vars(view).update(vars(trainer), _shift=shift, _note=note)
        return view

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The metrics of callbacks."""
        return self._moved(super().callback_metrics)

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The metrics of loggers."""
        return self._moved(super().logged_metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The metrics of progress bars."""
        return self._moved(super().progress_bar_metrics)

    def _moved(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        self._note()
        of_training, shift = logged_in_training(self), self._shift
        return {
            name: value + shift * (1 + abs(value)) if name in of_training else value
            for name, value in metrics.items()
        }


def logged_in_training(trainer: Trainer) -> set[str]:
    """Return the names of the metrics of records: those that were logged while training.

    Lightning keeps them apart from those of validation.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    metas = [each.meta for each in results.values()]
    names = {name for x in metas for name in (x.name, x.forked_name(True), x.forked_name(False))}
    return set(filterfalse(is_public_metric, names))


def setting_in_words(name: str) -> str:
    """Return the words for a setting of a snapshot.

    Example:
        >>> setting_in_words("optimizers.0.param_groups.0.lr")
        'lr of an optimizer'
    """
    owner, name = name.partition(".")[0], name.rpartition(".")[2]
    return f"{name} of {'the Trainer' if owner == 'trainer' else 'an optimizer'}"


def is_public_metric(name: str) -> bool:
    """Return True for the names of counters and of our own metrics, also where the module logs them."""
    return name in _PUBLIC or name.startswith("privacy/")


def _put(now: Snapshot, twins: Mapping[Path, _Twin], scale: float) -> dict[Path, _Twin]:
    """Put twins into the module; return those that have no place there now: of items yet to come."""
    left: dict[Path, _Twin] = {}
    whole_first = sorted(twins.items(), key=lambda item: item[0][-1] is not ...)
    for path, twin in whole_first:
        try:
            now.put(path, _moved(now.value_at(path), twin, scale))
        except LookupError:
            left[path] = twin
    return left


def _twins_of(end: Snapshot, other: Snapshot) -> dict[Path, _Twin]:
    found: dict[Path, _Twin] = {}
    for path, difference in end.differing_values(other).items():
        if difference.kind in ("attribute", "buffer"):
            with suppress(LookupError):  # there is no such object in the other world
                found[path] = _Twin(difference.name, other.value_at(path), end.value_at(path))
    return found


def _numbers(twins: Mapping[Path, _Twin]) -> dict[Path, _Twin]:
    """Return those that are numbers, or tensors of one shape: not those with a row for each record."""
    return {
        path: twin
        for path, twin in twins.items()
        if isinstance(twin.end, int | float | np.number)
        or (isinstance(twin.value, Tensor) and _are_alike(twin.end, twin.value))
    }


def _moved(value: Any, twin: _Twin, scale: float) -> Any:
    """Return the twin; or a number moved by so many times the difference of the two ends of its pair."""
    other, end = twin.value, twin.end
    if (value if scale == 0 else other) is ABSENT:
        return ABSENT
    if scale == 0:
        return value.clone() if isinstance(value, Tensor) else copy.copy(value)
    if isinstance(other, Tensor):
        if scale == 1 or not (_are_alike(value, other) and _are_alike(end, other)):
            return other.clone()
        step = (other.double() - end.double()) * _limited(scale, other.is_floating_point())
        return (value.double() + step).to(other.dtype)
    is_number = isinstance(other, int | float | np.number) and not isinstance(other, bool)
    are_alike = type(value) is type(end) is type(other)
    if scale == 1 or not (is_number and are_alike) or not math.isfinite(value):
        return copy.copy(other)
    factor = _limited(scale, isinstance(other, float | np.floating))
    moved = value + (other - end) * factor
    return type(other)(moved) if math.isfinite(moved) else copy.copy(other)


def _are_alike(a: object, b: Tensor) -> bool:
    is_same = isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return is_same and not (b.dtype == torch.bool or b.is_complex())


def _limited(scale: float, is_real: bool) -> float:
    return scale if is_real else math.copysign(min(abs(scale), _FAR_WHOLE), scale)


@dataclass(frozen=True)
class Marks:
    """Marks of all buffers and frozen parameters, which show that one was written to or replaced.

    Objects, addresses and ``_version``: no values are read. Not seen are writes into ``.data``.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> before = Marks.of(layer)
        >>> _ = layer.running_mean.add_(1)
        >>> Marks.of(layer).changed_since(before)
        ('running_mean',)
    """

    _module: nn.Module = field(repr=False)
    _tensors: tuple[Tensor, ...] = field(repr=False)  # which keeps their ids from being used again
    _marks: tuple[tuple[int, int, int], ...] = field(repr=False)

    @classmethod
    def of(cls, module: nn.Module, *, trained: bool = False) -> Marks:
        """Return the marks of now.

        Args:
            module: the whole model.
            trained: also mark what is trained, of which addresses do not count.
        """
        tensors = held_in(module, "_buffers", "_parameters")
        marked = tuple(tensors if trained else filterfalse(_IS_TRAINED, tensors))
        return cls(module, marked, tuple(map(_mark, marked)))

    @property
    def names(self) -> set[str]:
        """The dotted names of all of them."""
        marked = set(map(id, self._tensors))
        both = (*self._module.named_buffers(), *self._module.named_parameters())
        return {name for name, each in both if id(each) in marked}

    def changed_since(self, earlier: Marks) -> tuple[str, ...]:
        """Return the dotted names of what was written to, or is another object, since earlier marks.

        A parameter that was frozen or set free in between is left out.
        """
        if self._marks == earlier._marks:
            return ()
        known = {each[0]: each for each in earlier._marks}
        buffers = [(name, _mark(each)) for name, each in self._module.named_buffers()]
        params = [(name, _mark(each)) for name, each in self._module.named_parameters()]
        return tuple(
            [name for name, mark in buffers if known.get(mark[0]) != mark]
            + [name for name, mark in params if _differ(known.get(mark[0], mark), mark)]
        )


_IS_TRAINED = attrgetter("requires_grad")


def _differ(before: tuple[int, int, int], now: tuple[int, int, int]) -> bool:
    """Compare marks of a parameter; while it is trained it has no address."""
    return before[1] != now[1] or 0 != before[2] != now[2] != 0


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), version, 0 if tensor.requires_grad else tensor.data_ptr()
