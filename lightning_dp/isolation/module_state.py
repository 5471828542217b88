"""Snapshots of what a module keeps: buffers, attributes, global variables, closures, callbacks."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dp._held import Held, HeldRandom, HeldTensor, Kind
from lightning_dp._kept import Walk
from lightning_dp._user_code import is_library

__all__ = ["Difference", "ModuleState"]

_FEW_BYTES = 64 << 20  # of frozen parameters that are copied in any case


@dataclass(frozen=True)
class Difference:
    """A place where two states differ.

    Args:
        name: dotted, of modules, attributes and variables; never of keys or items of containers.
        kind: "parameter", "buffer", "metric" (anything in a torchmetrics part), "random" (a random
            generator) or "attribute" (of a module, a class, an object or a callback; a global
            variable, or a variable of a closure).
        is_resized: True for a tensor of another shape.
    """

    name: str
    kind: Kind
    is_resized: bool = False


class ModuleState:
    """A snapshot of what a module keeps, to be compared with another, or to go back to.

    It holds buffers and attributes of all submodules, and what is inside them, however nested;
    attributes of the user's own classes; global variables and variables of closures that their
    methods use; callbacks. None of the user's code runs while it is taken. What cannot be copied, or
    is too large to (data sets, containers of more than 20,000 items, tensors above 64 MiB that are
    no buffers), is kept by reference.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.seen = deque([1.0], maxlen=8)
        >>> model = Model()
        >>> before, seen = ModuleState.of(model), model.seen
        >>> model.seen.append(2.0)
        >>> [difference.name for difference in before.differences(ModuleState.of(model))]
        ['seen']
        >>> before.restore()
        >>> model.seen is seen, list(seen)
        (True, [1.0])
    """

    def __init__(self, roots: Mapping[str, tuple[str, Held]], parts: Iterable[Held]) -> None:
        self._roots, self._parts = dict(roots), list(parts)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        callbacks: Iterable[object] = (),
        *,
        parameters: bool = False,
        copies: bool = True,
        sharded: bool = False,
    ) -> ModuleState:
        """Take a snapshot.

        Args:
            module: the whole model.
            callbacks: of its Trainer; those that are Lightning's own are left out.
            parameters: also of the values of parameters. Frozen ones are kept by reference where
                they are many times those that are trained.
            copies: of buffers and parameters; without them the snapshot is good for comparing at
                once, not for going back to.
            sharded: parameters are left out: in their places torch puts whole ones and shards by turns,
                and it frees the memory of whole ones.
        """
        values = _copied(module) if parameters and not sharded else frozenset()
        walk = Walk(values, copies, left_out="_parameters" if sharded else None)
        walk.take("", "", module)
        for number, callback in enumerate(callbacks):
            if not is_library(type(callback)):
                walk.take(f"callback {number}", type(callback).__name__, callback)
        walk.finish()
        return cls(walk.roots, walk.known.values())

    def holds(self, thing: object) -> bool:
        """Tell whether an object is among what the module keeps."""
        return any(part.owner is thing for part in self._parts)

    def drop_parameters(self) -> None:
        """Keep the values of parameters by reference only, from now on: they take memory."""
        for part in self._parts:
            if isinstance(part, HeldTensor) and part.kind == "parameter":
                part.drop()

    def restore(self) -> None:
        """Put everything back into the same objects: containers, values of tensors, names.

        What cannot be put back stays as it is; nothing is raised.
        """
        for part in self._parts:
            try:
                part.put_back()
            except Exception:  # an object that does not let itself be changed
                continue

    def left_outside(self) -> Iterator[Any]:
        """Yield what is kept by reference only, of what classes, global variables and closures hold."""
        outside = (held for _, held in self._roots.values())
        work = [held for held in outside if isinstance(held.owner, type | types.FunctionType)]
        met = set(map(id, work))
        while work:
            held = work.pop()
            yield from (thing for key, thing in held.inside() if key not in held.parts)
            new = [part for part in held.parts.values() if id(part) not in met]
            met.update(map(id, new))
            work += new

    def reseed(self) -> None:
        """Give every random generator among it a new seed, from torch's global one."""
        for part in self._parts:
            if isinstance(part, HeldRandom):
                part.reseed()

    @property
    def has_generators(self) -> bool:
        """True if a random generator is among what the module keeps."""
        return any(isinstance(part, HeldRandom) for part in self._parts)

    def drew(self, other: ModuleState) -> bool:
        """Tell whether a random generator is elsewhere in another state."""
        return any(each.kind == "random" for each in self.differences(other))

    def differences(self, other: ModuleState) -> tuple[Difference, ...]:
        """Return where this state and another one differ, of the same module or of a copy of it.

        Numbers and entries are compared exactly; NaN is equal to itself. Of what is kept by
        reference only the type counts.
        """
        found: dict[Difference, None] = {}
        met: set[tuple[int, int]] = set()
        pairs = [
            (held, other._roots[key][1], name)
            for key, (name, held) in self._roots.items()
            if key in other._roots
        ]
        work = deque(pairs)
        while work:
            mine, its, name = work.popleft()
            if (id(mine), id(its)) in met:
                continue
            met.add((id(mine), id(its)))
            for each in _differing(mine, its, name):
                found[Difference(each, mine.kind, _is_resized(mine, its))] = None
            work += [
                (part, its.parts[key], mine.name_of(name, key))
                for key, part in mine.parts.items()
                if key in its.parts
            ]
        return tuple(found)


def _differing(mine: Held, its: Held, name: str) -> list[str]:
    if type(mine) is not type(its) or type(mine.owner) is not type(its.owner):
        return [name]
    try:
        return mine.differing(its, name)
    except Exception:  # nothing can be said of objects that do not compare
        return []


def _is_resized(mine: Held, its: Held) -> bool:
    if not (isinstance(mine, HeldTensor) and isinstance(its, HeldTensor)):
        return False
    return mine.shape != its.shape


def _copied(module: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters whose values are copied.

    A teacher has the size of the model, and training_step may move it; a frozen backbone under a few
    trained weights is larger, and nobody does.
    """
    trained = [param for param in module.parameters() if param.requires_grad]
    frozen = [param for param in module.parameters() if not param.requires_grad]
    room = 2 * sum(param.nbytes for param in trained) + _FEW_BYTES
    is_small = sum(param.nbytes for param in frozen) <= room
    return frozenset(map(id, [*trained, *(frozen if is_small else ())]))
