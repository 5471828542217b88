"""State that lives for a step: the records of one step must not move the gradients of the next."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp._held import same_tensor
from lightning_dp._user_code import is_library
from lightning_dp.isolation.answers import Answer
from lightning_dp.isolation.coupling import CURES, moved, reordered
from lightning_dp.isolation.model_copies import same_elsewhere
from lightning_dp.isolation.outcome import ISOLATED, Isolation, first_failure
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.prepared import NoLoss
from lightning_dp.isolation.rehearsal import Rehearsal, rehearsal
from lightning_dp.isolation.stand_ins import StandInTrainer
from lightning_dp.isolation.synthetic import leaves_of, replace_leaf, take_rows

__all__ = ["probe_steps"]

_KEPT = (
    "hooks or callbacks write what they see of the records into weights, buffers, a checkpoint or the "
    "training set, without noise. Leave it out, or keep it in a plain attribute of the module, for "
    "logging only"
)
# Factor of exchanged records, so that a maximum moves, and a minimum; step that begins an epoch.
_VARIANTS = ((1000.0, 2), (-300.0, 1))
_AGAIN, _SECONDS = (
    60,
    2.0,
)  # how often the first batch comes, where it leaves something, and how long
_PLAIN = (bool, int, float, complex, str, type(None))
_STOPS = "when training ends follows the records, which ε does not cover"
_FOLLOW = "attributes follow the records, and moved no gradient: {}"

_INTERNAL = frozenset(vars(LightningModule())) | {"log", "optimizers", "lr_schedulers"}
_INTERNAL |= {"manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"}

_Kept: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class _Run:
    """All that some steps of a copy left.

    Args:
        answers: of each step; for one that raised, the type of its exception.
        settings: of the optimizer, after the hooks of each step.
        kept: weights, buffers and entries of a checkpoint, by name; after the first step and the last.
        steering: what says when training ends, after each step.
        attributes: of the module's own, by name: plain ones after the first step, all at the end.
        seconds: of the fastest step.
    """

    answers: tuple[Answer | str, ...]
    settings: tuple[str, ...]
    kept: _Kept
    steering: tuple[str, ...]
    attributes: _Kept = field(repr=False)
    seconds: float


def probe_steps(passes: Passes, pool: Any, n: int, steps: int = 3) -> Isolation:
    """Make the same steps after two first batches that differ in half of their records.

    In both, the first step's other records and all records of later steps must have the same
    gradients, and nothing may be kept that differs. All later batches and all random numbers are
    the same; one of the later steps begins an epoch.

    Args:
        pool: 2n records.
        steps: how many, 2 or 3.
    """
    try:
        return _probe_steps(passes, pool, n, steps)
    except Exception:  # hooks need a real Trainer: the next checks will see
        return Isolation("isolated", left_out=("steps with their hooks, one after the other",))


def _probe_steps(passes: Passes, pool: Any, n: int, steps: int) -> Isolation:
    notes: tuple[str, ...] = ()
    for factor, border in _VARIANTS[: steps - 1]:
        plan = _Plan(passes, pool, n, steps, border)
        first = plan.run(None)
        found = plan.found(first, factor)
        if found.outcome == "isolated" and found.notes:  # may it matter later?
            times = max(1, min(_AGAIN, int(_SECONDS / max(first.seconds, 1e-6))))
            again = replace(plan, times=times)
            found = first_failure((found, again.found(again.run(None), factor)))
        if found.outcome != "isolated":
            return found
        notes += found.notes
    return Isolation("isolated", notes=tuple(dict.fromkeys(notes)))


@dataclass(frozen=True)
class _Plan:
    """Steps of a copy.

    Args:
        passes, pool, n, steps: as for :func:`probe_steps`.
        border: the step that begins an epoch.
        times: how often the first batch comes.
    """

    passes: Passes
    pool: Any
    n: int
    steps: int
    border: int
    times: int = 1

    def run(self, factor: float | None, *, everywhere: bool = True) -> _Run:
        """Make the steps; with a factor, after another first batch."""
        batches = _batches(self.pool, self.n, factor, self.steps, everywhere=everywhere)
        return _run(self.passes, batches, self.n, self.border, self.times)

    def found(self, first: _Run, factor: float) -> Isolation:
        """Compare steps with those after other records, of the first kind that the model takes."""
        for scale, everywhere in ((factor, True), (factor, False), (10.0, True), (1.0, True)):
            try:
                other = self.run(scale, everywhere=everywhere)
            except NoLoss:  # where the other records have one
                return Isolation("coupled", CURES["no loss"])
            except Exception:  # values out of range
                continue
            found = _compared(first, other)
            if found == ISOLATED:
                return found
            again = self.run(None)
            if _compared(first, again) == ISOLATED:
                return found
            return found if self._is_kept_outside(again, 100 * scale) else ISOLATED
        return ISOLATED

    def _is_kept_outside(self, one: _Run, factor: float) -> bool:
        """Tell whether records are remembered where no copy is (in files, in the environment).

        Then the same steps have the same answers, and others once larger records were there. What
        differs by itself (clocks) tells nothing of records.
        """
        two = self.run(None)
        if _compared(one, two) != ISOLATED:
            return False
        with contextlib.suppress(Exception):  # values out of range
            self.run(factor)
        three = self.run(None)
        return _compared(two, three) != ISOLATED == _compared(three, self.run(None))


def _batches(
    pool: Any, n: int, factor: float | None, steps: int, *, everywhere: bool = True
) -> list[Any]:
    """Return the batches of all steps; with a factor, half of the first is exchanged and scaled.

    Args:
        everywhere: real numbers in all tensors; else those in the largest one.
    """
    half = n // 2
    if factor is None:
        first = take_rows(pool, range(n))
    else:
        first = take_rows(pool, [*range(n, n + half), *range(half, n)])
        leaves = leaves_of(first)
        reals = [
            place
            for place, leaf in enumerate(leaves)
            if leaf.is_floating_point() and leaf.dim() and len(leaf) == n
        ]
        if not everywhere:
            reals = sorted(reals, key=lambda place: leaves[place].numel())[-1:]
        for place in reals:
            scaled = leaves[place].clone()
            scaled[:half] *= factor
            first = replace_leaf(first, place, scaled)
    return [first, *(take_rows(pool, range(1 - i, 2 * n, 2)) for i in range(steps - 1))]


def _run(passes: Passes, batches: Sequence[Any], n: int, border: int, times: int) -> _Run:
    """Make one step for each batch, with a new epoch at the border; steps after the first may raise."""
    with rehearsal(passes) as copy, copy.engine() as engine:
        clock = [time.perf_counter()]
        answers: list[Answer | str] = [copy.step(batches[0], n, engine)]
        clock.append(time.perf_counter())
        plain = {name: each for name, each in _attributes(copy.module) if type(each) in _PLAIN}
        kept = [dict(_kept(passes, copy))]
        for i, batch in enumerate([*[batches[0]] * (times - 1), *batches[1:]], 2 - times):
            try:
                if i < 1:
                    copy.forward_only(batch)
                    continue
                if i == border:
                    copy.new_epoch(batch)
                answers.append(copy.step(batch, n, engine))
                clock.append(time.perf_counter())
            except Exception as error:
                answers.append(type(error).__name__)
                break
        kept.append(dict(_kept(passes, copy)))
        settings, steering = tuple(copy.settings), tuple(copy.steering)
        attributes = plain, dict(_attributes(copy.module)) | copy.trainer.data.noted()
        seconds = min(b - a for a, b in pairwise(clock))
        return _Run(tuple(answers), settings, tuple(kept), steering, attributes, seconds)


def _compared(one: _Run, other: _Run) -> Isolation:
    (first, *then), (other_first, *other_then) = one.answers, other.answers
    if _others_moved(first, other_first):
        return Isolation("coupled", CURES["pairs"])
    if names := _differing(one.kept, other.kept):
        return Isolation("kept", f"{_KEPT}: {', '.join(names[:5])}", names)
    if len(then) != len(other_then) or any(
        _moved(a, b) for a, b in zip(then, other_then, strict=True)
    ):
        return Isolation("coupled", CURES["steps"])
    if one.settings != other.settings:
        return Isolation("coupled", CURES["settings"])
    return replace(ISOLATED, notes=tuple(_notes(one, other)))


def _notes(one: _Run, other: _Run) -> Iterator[str]:
    """Yield facts for the report: what follows records and does not move a gradient."""
    if one.steering != other.steering:
        yield _STOPS
    if names := _differing(one.attributes, other.attributes):
        yield _FOLLOW.format(", ".join(names[:5]))


def _attributes(module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Yield the user's own attributes of all parts that are not torch's, Lightning's or torchmetrics'."""
    for name, part in module.named_modules():
        if is_library(type(part)):
            continue
        for key, value in vars(part).items():
            if key not in _INTERNAL and not isinstance(value, nn.Module | Trainer | StandInTrainer):
                yield ".".join(filter(None, (name, key))), value


def _differing(one: _Kept, other: _Kept) -> tuple[str, ...]:
    found = {
        name
        for a, b in zip(one, other, strict=True)
        for name in a.keys() | b.keys()
        if not _equal(a.get(name), b.get(name))
    }
    return tuple(sorted(found))


def _others_moved(a: Answer | str, b: Answer | str) -> bool:
    """Compare two batches that differ in the first half of their records."""
    if isinstance(a, str) or isinstance(b, str):
        return a != b
    half = len(a.norms) // 2
    others = range(half, len(a.norms))
    return moved(a.about(others), b.about(others)) and not reordered(a, b, half)


def _moved(a: Answer | str, b: Answer | str) -> bool:
    """Compare the same batch in both runs."""
    if isinstance(a, str) or isinstance(b, str):
        return a != b
    return moved(a, b)


def _kept(passes: Passes, copy: Rehearsal) -> Iterator[tuple[str, Any]]:
    """Yield what was written into weights and buffers, and what a checkpoint would hold."""
    module = copy.module
    own = dict(passes.module.named_parameters()) | dict(passes.module.named_buffers())
    metrics = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, Metric))
    for name, now in (*module.named_parameters(), *module.named_buffers()):
        if not name.startswith(metrics) and not _is_unchanged(own.get(name), now):
            yield name, now.detach().clone()
    for name, value in copy.trainer.data.written().items():
        if type(value) in _PLAIN:
            yield f"{name} of the training set", value
    checkpoint: dict[str, Any] = {
        "state_dict": dict(module.state_dict()),
        "hyper_parameters": dict(module.hparams),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "epoch": copy.trainer.current_epoch,
        "global_step": copy.trainer.global_step,
    }
    for name, value in copy.saved(checkpoint).items():
        if name != "state_dict":
            yield f"checkpoint[{name!r}]", value


def _is_unchanged(before: Tensor | None, now: Tensor) -> bool:
    return before is not None and same_elsewhere(before.detach(), now)


def _equal(a: Any, b: Any, depth: int = 8) -> bool:
    """Compare nested values, and objects by their attributes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, set | frozenset | bool | int | float | complex | str | bytes):
        return repr(a) == repr(b)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_equal(x, y, depth) for x, y in zip(a, b, strict=True))
    if not isinstance(a, Mapping):
        a, b = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
        depth -= 1
    return not depth or (a.keys() == b.keys() and all(_equal(a[key], b[key], depth) for key in a))
