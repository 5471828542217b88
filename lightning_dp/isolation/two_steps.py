"""State that lives for a step: the records of one step must not move the gradients of the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor
from torchmetrics import Metric

from lightning_dp.isolation.answers import Answer
from lightning_dp.isolation.coupling import CURES, moved
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.passes import Passes, same
from lightning_dp.isolation.rehearsal import Rehearsal, rehearsal
from lightning_dp.isolation.synthetic import leaves_of, replace_leaf, take_rows

__all__ = ["probe_steps"]

_KEPT = (
    "hooks or callbacks write what they see of the records into weights, buffers or a checkpoint, "
    "without noise. Leave it out, or keep it in a plain attribute, for logging only"
)
# Factor of exchanged records, so that a maximum moves, and a minimum; step that begins an epoch.
_VARIANTS = ((10.0, 2), (-3.0, 1))

_Kept: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class _Run:
    """All that some steps of a copy left.

    Args:
        answers: of each step; for one that raised, the type of its exception.
        settings: of the optimizer, after the hooks of each step.
        kept: weights, buffers and entries of a checkpoint, by name; after the first step and the last.
    """

    answers: tuple[Answer | str, ...]
    settings: tuple[str, ...]
    kept: _Kept


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
        return ISOLATED


def _probe_steps(passes: Passes, pool: Any, n: int, steps: int) -> Isolation:
    for factor, border in _VARIANTS[: steps - 1]:
        first = _run(passes, _batches(pool, n, None, steps), n, border)
        found = ISOLATED
        for scale in (factor, 1.0):
            try:
                other = _run(passes, _batches(pool, n, scale, steps), n, border)
            except Exception:  # values out of range
                continue
            found = _compared(first, other)
            break
        if found != ISOLATED:
            again = _run(passes, _batches(pool, n, None, steps), n, border)
            # What differs by itself (clocks) tells nothing of records.
            return ISOLATED if _compared(first, again) != ISOLATED else found
    return ISOLATED


def _batches(pool: Any, n: int, factor: float | None, steps: int) -> list[Any]:
    """Return the batches of all steps; with a factor, half of the first is exchanged and scaled."""
    half = n // 2
    if factor is None:
        first = take_rows(pool, range(n))
    else:
        first = take_rows(pool, [*range(n, n + half), *range(half, n)])
        for place, leaf in enumerate(leaves_of(first)):
            if leaf.is_floating_point() and leaf.dim() and len(leaf) == n:
                scaled = leaf.clone()
                scaled[:half] *= factor
                first = replace_leaf(first, place, scaled)
    return [first, *(take_rows(pool, range(1 - i, 2 * n, 2)) for i in range(steps - 1))]


def _run(passes: Passes, batches: Sequence[Any], n: int, border: int) -> _Run:
    """Make one step for each batch, with a new epoch at the border; steps after the first may raise."""
    answers: list[Answer | str] = []
    with rehearsal(passes) as copy:
        engine = copy.engine()
        answers.append(copy.step(batches[0], n, engine).about(range(n // 2, n)))
        kept = [dict(_kept(passes, copy))]
        for i, batch in enumerate(batches[1:], 1):
            try:
                if i == border:
                    copy.new_epoch()
                answers.append(copy.step(batch, n, engine))
            except Exception as error:
                answers.append(type(error).__name__)
                break
        kept.append(dict(_kept(passes, copy)))
        return _Run(tuple(answers), tuple(copy.settings), tuple(kept))


def _compared(one: _Run, other: _Run) -> Isolation:
    (first, *then), (other_first, *other_then) = one.answers, other.answers
    if _moved(first, other_first):
        return Isolation("coupled", CURES["pairs"])
    if names := _differing(one.kept, other.kept):
        return Isolation("kept", f"{_KEPT}: {', '.join(names[:5])}", names)
    if len(then) != len(other_then) or any(
        _moved(a, b) for a, b in zip(then, other_then, strict=True)
    ):
        return Isolation("coupled", CURES["steps"])
    if one.settings != other.settings:
        return Isolation("coupled", CURES["settings"])
    return ISOLATED


def _differing(one: _Kept, other: _Kept) -> tuple[str, ...]:
    found = {
        name
        for a, b in zip(one, other, strict=True)
        for name in a.keys() | b.keys()
        if not _equal(a.get(name), b.get(name))
    }
    return tuple(sorted(found))


def _moved(a: Answer | str, b: Answer | str) -> bool:
    """Compare the same records in batches that are the same, or differ in others."""
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
    checkpoint: dict[str, Any] = {
        "state_dict": dict(module.state_dict()),
        "hyper_parameters": dict(module.hparams),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "epoch": copy.trainer.current_epoch,
        "global_step": copy.trainer.global_step,
    }
    try:
        module.on_save_checkpoint(checkpoint)
    except Exception:  # it needs a real Trainer
        return
    del checkpoint["state_dict"]
    for name, value in checkpoint.items():
        yield f"checkpoint[{name!r}]", value


def _is_unchanged(before: Tensor | None, now: Tensor) -> bool:
    return before is not None and same(before.detach().cpu().to(now.dtype), now)


def _equal(a: Any, b: Any, depth: int = 8) -> bool:
    """Compare nested values, and objects by their attributes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same(a, b)
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
