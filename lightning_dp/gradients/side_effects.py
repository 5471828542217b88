"""Logs, metrics and state of a ``training_step`` that runs for each sample alone: done once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_dp._refusals import warn
from lightning_dp.gradients.base import Around
from lightning_dp.gradients.batches import SampleRows, joined, map_leaves, whole_batch
from lightning_dp.gradients.record_calls import (
    CallRecorder,
    DifferentPaths,
    is_sample,
    outside,
    rows,
)
from lightning_dp.gradients.snapshot import Snapshot

__all__ = ["NotedCalls", "SideEffects"]

_Key: TypeAlias = tuple[Any, ...]

_LOGS = ("log", "log_dict")
_COUNTS = ("update", "forward", "compute", "reset")
_RETURNING = frozenset(("forward", "compute"))
_LOG = inspect.signature(LightningModule.log)
_ABSENT = object()
_OVER: dict[Any, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}

_DIFFERS = (
    "training_step leaves another value in {} for some records than for others, so that later steps "
    "could read what a record left. Keep there only what depends on no record; log the rest."
)
_NUMBER = (
    "self.log({0!r}, ...) in training_step is given a number made of a tensor (.item(), float()), for "
    "which each record has to run by itself, slowly. Log the tensor: self.log({0!r}, loss), or "
    "loss.detach()."
)


@dataclass(frozen=True, slots=True)
class _Later:
    """Stands for the result of a metric's call until it is made, or for one entry of it."""

    key: _Key
    entry: str | None


@dataclass(frozen=True, slots=True)
class _Noted:
    """A call that is made once for the whole batch, after the pass."""

    part: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Group:
    """Samples that ran together: their places in the batch, and the calls that they wish to make."""

    places: Tensor
    calls: dict[_Key, _Noted]


class NotedCalls:
    """Calls of a module's ``log`` and torchmetrics, by samples that run apart, made once for all.

    What samples log becomes one entry per name and call: their mean (sum, maximum, minimum, as
    ``reduce_fx`` says). torchmetrics get one call with the rows of all samples, in the order of the
    batch. Samples that run one after the other may use what their metric's ``forward`` and ``compute``
    return for them alone; under vmap it can only be logged, and is that of the batch.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._groups: list[_Group] = []
        self._later: dict[int, tuple[Tensor, _Later]] = {}
        self._is_inside = False  # of a metric's own function, which calls others of it
        self._has_warned = False

    def forget(self) -> None:
        """Make none of the calls so far."""
        self._groups, self._later = [], {}

    @property
    def has_groups(self) -> bool:
        """True if some samples have run."""
        return bool(self._groups)

    # -- in the pass -------------------------------------------------------------------------------

    @contextmanager
    def noting(self, places: Tensor, recorder: CallRecorder | None = None) -> Iterator[None]:
        """Note what the module logs and its metrics count, inside, instead of doing it.

        Args:
            places: in the batch, of the samples that run.
            recorder: of samples that run at once; None if there is one sample.
        """
        calls: dict[_Key, _Noted] = {}
        shadowed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for part in self._module.modules():
                is_metric = isinstance(part, Metric | MetricCollection)
                names = _LOGS if isinstance(part, LightningModule) else _COUNTS if is_metric else ()
                for name in names:
                    own, function = vars(part), getattr(part, name)
                    shadowed.append((own, name, own.get(name, _ABSENT)))
                    own[name] = partial(self._note, recorder, calls, part, name, function)
            yield
        finally:
            for own, name, value in shadowed:
                if value is _ABSENT:
                    del own[name]
                else:
                    own[name] = value
        self._groups.append(_Group(places, calls))

    def _note(
        self,
        recorder: CallRecorder | None,
        calls: dict[_Key, _Noted],
        part: Any,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        calls_log = name == "log_dict" and id(args[0] if args else None) not in self._later
        if calls_log or self._is_inside:
            return function(*args, **kwargs)
        label: tuple[Any, ...] = (len(args), *kwargs)
        if name == "log":
            kwargs, args = dict(_LOG.bind(part, *args, **kwargs).arguments), ()
            del kwargs["self"]
            label, value = (kwargs["name"],), kwargs["value"]
            if isinstance(value, Tensor) and is_sample(value) and value.numel() != 1:
                raise ValueError(
                    f"self.log({label[0]!r}, ...) needs a single number of each record."
                )
        number, key = 0, (name, id(part), label, 0)
        while key in calls:
            number, key = number + 1, (*key[:-1], number + 1)
        if recorder is None:
            calls[key] = _Noted(part, *map_leaves((args, kwargs), _of_one))
            return None if name in _LOGS else self._inside(function, args, kwargs)
        with _aside():
            calls[key] = _Noted(part, *map_leaves((args, kwargs), self._taken))
            if name not in _RETURNING:
                return None
            if isinstance(part, MetricCollection):
                entries = [str(entry) for entry in part.keys(keep_base=False)]
                return {entry: self._promised(recorder, _Later(key, entry)) for entry in entries}
            return self._promised(recorder, _Later(key, None))

    def _inside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False

    def _taken(self, value: Any) -> Any:
        """Return a leaf of arguments as it is kept: nothing of the pass's graph, or of its level."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._later:
            return self._later[id(value)][1]
        return SampleRows(rows(value).detach()) if is_sample(value) else value.detach()

    def _promised(self, recorder: CallRecorder, later: _Later) -> Tensor:
        value = recorder.only_logged(torch.full((), torch.nan))
        self._later[id(value)] = value, later
        return value

    # -- after the pass ----------------------------------------------------------------------------

    def do(self, *, read_numbers: bool = False) -> None:
        """Make the noted calls, each once, in the order of the code.

        Args:
            read_numbers: samples ran in groups, since numbers were made of tensors.
        """
        results: dict[_Key, Any] = {}

        def now(value: Any) -> Any:
            if not isinstance(value, _Later):
                return value
            found = results[value.key]
            return found if value.entry is None else found[value.entry]

        for key in _in_order([list(group.calls) for group in self._groups]):
            groups = [group for group in self._groups if key in group.calls]
            calls, places = [g.calls[key] for g in groups], [g.places for g in groups]
            args, kwargs = calls[0].args, calls[0].kwargs
            if key[0] in _LOGS:
                kwargs = self._entry([call.kwargs for call in calls], places, read_numbers)
            else:
                given = [(call.args, call.kwargs) for call in calls]
                args, kwargs = map_leaves(joined(given, places), whole_batch)
            args, kwargs = map_leaves((args, kwargs), now)
            results[key] = getattr(calls[0].part, key[0])(*args, **kwargs)
        self.forget()

    def _entry(
        self, given: Sequence[dict[str, Any]], places: Sequence[Tensor], read_numbers: bool
    ) -> dict[str, Any]:
        """Return the arguments of one entry of the log for the whole batch."""
        entry = dict(given[0])
        if (size := entry.get("batch_size")) is not None:
            sizes = [
                each["batch_size"].rows.sum() if isinstance(size, SampleRows)
                else each["batch_size"] * len(at)
                for each, at in zip(given, places, strict=True)
            ]  # fmt: skip
            entry["batch_size"] = int(sum(sizes))
        if "value" in entry:
            values = [each["value"] for each in given]
            value = joined(values, places)
            if isinstance(value, SampleRows):
                if read_numbers and all(isinstance(each, int | float) for each in values):
                    self._warn_of_numbers(entry["name"])
                entry["value"] = _over_records(
                    whole_batch(value).flatten(), entry.get("reduce_fx", "mean")
                )
        return entry

    def _warn_of_numbers(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(_NUMBER.format(name), topic="metrics")


class SideEffects:
    """Does once, for the whole batch, what ``training_step`` does besides its loss.

    Samples run alone, in groups, some of them again in smaller ones. What they log and count is done
    once (:class:`NotedCalls`). Every group begins with the state of the module before the step, so that
    counters count steps.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._noted = module, NotedCalls(module)
        self._before: Snapshot | None = None
        self._of_first: Snapshot | None = None
        self._latest: Snapshot | None = None
        self._has_run = self._reads_numbers = False
        self.state_differs: str | None = None
        """The reason for which the step may not be released: records left different states; else None."""

    @contextmanager
    def of_step(self, *, are_done: bool = True) -> Iterator[Around]:
        """Yield what is entered around each group; afterwards do once what the samples did.

        After an exception the module is as it was before, and after a further pass over the same batch,
        which is not ``are_done``.
        """
        self._forget()
        self._before = self._latest = Snapshot.of(self._module)
        self.state_differs = None
        try:
            yield self._around
            if are_done:
                self._noted.do(read_numbers=self._reads_numbers)
            else:
                self._before.restore()
        except BaseException:
            self._before.restore()
            raise
        finally:
            self._forget()

    def count(self) -> None:
        """Do it now, inside of a further pass, whose end is looked at before it is undone."""
        self._noted.do()

    def _forget(self) -> None:
        self._noted.forget()
        self._before = self._of_first = None
        self._has_run = self._reads_numbers = False

    @contextmanager
    def _around(self, recorder: CallRecorder, places: Tensor) -> Iterator[None]:
        assert self._before is not None
        with _aside():
            if self._noted.has_groups and self._of_first is None:
                self._of_first = Snapshot.of(self._module)
            if self._has_run:
                self._before.restore()
        self._has_run = True
        try:
            with self._noted.noting(places, recorder):
                yield
        except DifferentPaths as paths:
            self._reads_numbers |= paths.are_numbers
            raise
        if self._of_first is not None:
            with _aside():
                now = Snapshot.of(self._module)
                found = self._of_first.differences(now)
            names = [each.name for each in found if each.kind != "random"]  # they may move on
            if names and self.state_differs is None:
                self.state_differs = _DIFFERS.format(", ".join(names))


@contextmanager
def _aside() -> Iterator[None]:
    """Leave the level and its recorder for a while."""
    with outside(), torch._C.DisableTorchFunction():
        yield


def _in_order(groups: Sequence[Sequence[_Key]]) -> list[_Key]:
    """Return the keys of all groups, each after those that come before it in its own group."""
    found: list[_Key] = []
    for keys in groups:
        place = 0
        for key in keys:
            if key not in found:
                found.insert(place, key)
            place = found.index(key) + 1
    return found


def _of_one(value: Any) -> Any:
    """Return a leaf of one sample's arguments as those of samples are kept."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number or isinstance(value, Tensor)):
        return value
    return SampleRows(torch.as_tensor(value).detach().unsqueeze(0))


def _over_records(values: Tensor, reduce_fx: Any) -> Tensor:
    """Return the one value that is logged of those of records, shape (n,), as ``reduce_fx`` says."""
    values = values if values.is_floating_point() else values.float()
    name = getattr(reduce_fx, "__name__", reduce_fx)
    return _OVER.get(name, torch.mean)(values, 0)
