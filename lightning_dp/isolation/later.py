"""Terms that begin later: the probe at pretended epochs, steps and numbers of batches."""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dp._user_code import is_library, own_functions, plain_function
from lightning_dp.gradients import CoupledLossError, UnsupportedModelError
from lightning_dp.isolation.calls_seen import CallsSeen
from lightning_dp.isolation.comparison import Comparisons
from lightning_dp.isolation.outcome import ISOLATED, Isolation, first_failure
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.positions import probe_one_position
from lightning_dp.isolation.public_steps import compare_public_steps
from lightning_dp.isolation.rehearsal import rehearsal
from lightning_dp.isolation.stand_ins import Now
from lightning_dp.isolation.synthetic import take_rows
from lightning_dp.isolation.two_steps import probe_steps

__all__ = ["probe_later", "probe_shortly"]

_MOMENTS = 40  # that are looked at
_FEW = 4  # the same, where passes take long
_PROBES = 6  # among them that do something new, and are probed
_BORDERS = 8  # numbers in the user's code that may be the number of an epoch or a step
_LARGEST = 10_000_000
_UNKNOWN_LAST = 100


def probe_shortly(passes: Passes, pool: Any, n: int) -> Isolation:
    """Probe with a few passes: one record left out, half of them exchanged, two steps."""
    try:
        found = probe_one_position(Comparisons(passes), pool, n)
    except CoupledLossError as error:
        reason = error.text.removesuffix(".")
        return Isolation("coupled", reason[0].lower() + reason[1:])
    except UnsupportedModelError as error:
        lower = passes.below(error)
        return ISOLATED if lower is None else probe_shortly(lower, pool, n)
    except Exception:  # not at this moment: the next checks will see
        return ISOLATED
    if found.outcome == "coupled":
        return found
    return first_failure(_of_steps(passes, pool, n))


def _of_steps(passes: Passes, pool: Any, n: int) -> Iterator[Isolation]:
    yield compare_public_steps(passes, pool, n)
    yield probe_steps(passes, pool, n, steps=2)


def probe_later(passes: Passes, pool: Any, n: int, *, in_short: bool = False) -> Isolation:
    """Probe at other moments of the run, of those in which a step does something new.

    The end of the run is one. Which others there are depends on what the code reads, here or there
    (the epoch, the step, the number of the batch, its counters); at each, two steps are run forward,
    and only if they call other operations than before, their gradients are compared.

    Args:
        pool: 2n records.
        in_short: look at the first moments only.
    """
    batches = [take_rows(pool, range(i, n, 2)) for i in (0, 1)]
    look = _look(passes, batches)
    if look is None:  # the model may need more records
        batches = [take_rows(pool, range(i, 2 * n, 2)) for i in (0, 1)]
        look = _look(passes, batches)
    if look is None:
        return ISOLATED
    known, probes = {look.signature}, 0
    end = _end(passes)
    last = None if end is None else _look(passes.at(end), batches)
    read = look.read | (set() if last is None else last.read)
    others = (now for now in _moments(passes, read, look.counters) if now != end)
    moments = [*([] if end is None else [end]), *others][:_MOMENTS]
    few = moments[:_FEW] if in_short else moments
    for now in few:
        there = passes.at(now)
        seen = last if now is end else _look(there, batches)
        if seen is None or seen.signature in known:
            continue
        known.add(seen.signature)
        found = probe_shortly(there, pool, n)
        if found.outcome != "isolated":
            return Isolation(found.outcome, f"{found.reason} (seen with {now})", found.modules)
        probes += 1
        if probes == (1 if in_short else _PROBES):
            break
    left_out = ("most epochs and steps to come",) if len(few) < len(moments) else ()
    return Isolation("isolated", left_out=left_out)


class _Look(CallsSeen):
    """A look at what two steps do.

    Args:
        read: names of what was read of the Trainer.
        counters: of the module's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.counters: tuple[tuple[str, str], ...] = ()


def _look(passes: Passes, batches: Sequence[Any]) -> _Look | None:
    """Run steps without a backward pass; None if they raise at this moment."""
    look = _Look()
    try:
        with rehearsal(passes) as copy, torch.enable_grad():
            before = dict(_numbers_of(copy.module))
            with look:
                for batch in batches:
                    copy.forward_only(batch)
                copy.new_epoch()
            after = dict(_numbers_of(copy.module))
            look.read = set(copy.trainer.read)
    except Exception:
        return None
    look.counters = tuple(name for name in after if before.get(name) != after[name])
    return look


def _numbers_of(module: nn.Module) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield whole numbers among public attributes and buffers, by the names of module and attribute."""
    for name, part in module.named_modules():
        for key, value in (*vars(part).items(), *part.named_buffers(recurse=False)):
            if isinstance(value, Tensor):
                if value.numel() == 1 and not (value.is_floating_point() or value.is_complex()):
                    yield (name, key), int(value)
            elif type(value) is int and not key.startswith("_"):
                yield (name, key), value


def _end(passes: Passes) -> Now | None:
    """Return the beginning of the last epoch; None if there is but one."""
    epoch = _epochs(passes)
    return Now(epoch=epoch, step=epoch * (_batches(passes) + 1)) if epoch else None


def _epochs(passes: Passes) -> int:
    return _last(lambda: passes.trainer.max_epochs)  # type: ignore[union-attr]


def _batches(passes: Passes) -> int:
    return _last(lambda: int(passes.trainer.num_training_batches))  # type: ignore[union-attr]


def _moments(
    passes: Passes, read: Collection[str], counters: tuple[tuple[str, str], ...]
) -> Iterator[Now]:
    """Yield moments at which what is read, or counted, has other values.

    Where the step is read, the epoch is tried too: who asks for the one first may then ask for the
    other.
    """
    trainer, borders = passes.trainer, _borders(passes.module)
    epochs, batches = _epochs(passes), _batches(passes)
    steps = _last(lambda: int(trainer.estimated_stepping_batches))  # type: ignore[union-attr]
    read = set(read)
    if read & {"current_epoch", "global_step", "fit_loop"}:
        for epoch in _around((1, 2, epochs // 2, epochs), borders, epochs):
            yield Now(epoch=epoch, step=epoch * (batches + 1))
    if read & {"global_step", "fit_loop"}:
        for step in _around((1, 10, 100, steps // 2, steps), borders, steps):
            yield Now(step=step)
    if _uses_batch_idx(passes.module):
        for batch_idx in _around((1, 99, batches), borders, max(batches, 99)):
            yield Now(batch_idx=batch_idx)
    if counters:
        for number in _around((2, 10, 99, 100, 1000, 10_000), borders, _LARGEST):
            yield Now(counters=dict.fromkeys(counters, number))


def _last(number: Callable[[], int | None]) -> int:
    try:
        found = number() or 0
    except Exception:  # there is no Trainer, or it does not know
        found = 0
    return min(found, _LARGEST) - 1 if found > 0 else _UNKNOWN_LAST


def _around(first: Sequence[int], borders: Sequence[int], last: int) -> list[int]:
    near = [number for border in borders for number in (border, border + 1, border - 1)]
    return [n for n in dict.fromkeys((*first, *near)) if 0 < n <= last]


def _borders(module: LightningModule) -> list[int]:
    """Return whole numbers in the user's classes, attributes and hyperparameters."""
    found: dict[int, None] = {}
    for part in module.modules():
        kinds = [kind for kind in type(part).__mro__ if not is_library(kind)]
        if not kinds:
            continue
        values = [*vars(part).values(), *(v for kind in kinds for v in vars(kind).values())]
        codes = [function.__code__ for kind in kinds for function in own_functions(kind)]
        values += [value for code in codes for value in _constants(code)]
        found |= dict.fromkeys(v for v in values if type(v) is int and 2 <= v <= _LARGEST)
    values = list(module.hparams.values())
    found |= dict.fromkeys(v for v in values if type(v) is int and 2 <= v <= _LARGEST)
    return list(found)[:_BORDERS]


def _constants(code: CodeType) -> Iterator[Any]:
    for value in code.co_consts:
        yield from _constants(value) if isinstance(value, CodeType) else (value,)


def _uses_batch_idx(module: LightningModule) -> bool:
    """Tell whether the code of a step or of its hooks may look at the number of the batch."""
    for name in ("training_step", "on_train_batch_start", "on_train_batch_end"):
        method = getattr(type(module), name)
        if method is getattr(LightningModule, name):
            continue
        function = plain_function(method)
        if function is None or hasattr(method, "__wrapped__"):
            return True
        code = function.__code__
        own = code.co_varnames[: code.co_argcount][2 if name != "on_train_batch_end" else 3 :]
        loads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD")]
        if any(argument in _names(each) for each in loads for argument in own):
            return True
    return False


def _names(argval: Any) -> tuple[Any, ...]:
    return argval if isinstance(argval, tuple) else (argval,)
