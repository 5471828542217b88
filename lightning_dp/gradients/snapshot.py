"""Snapshots of random generators and of a module's state."""

from __future__ import annotations

import enum
import inspect
import io
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from operator import attrgetter, is_, is_not, methodcaller
from pathlib import PurePath
from typing import Any, Literal, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

__all__ = [
    "ABSENT",
    "OWN_GENERATORS",
    "Difference",
    "Path",
    "RandomState",
    "Snapshot",
    "apart",
    "held_in",
    "ignore",
    "restored",
    "with_attributes",
]

_IS_THERE = partial(is_not, None)
ABSENT: Any = object()
"""Stands for the value of an attribute that an object does not have."""
OWN_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class _OfDevice:
    """The global generator of an accelerator, which is not waited for.

    Args:
        device: where it draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def get_state(self) -> Tensor:
        """Return its state."""
        state: Tensor = self._call(self._module.get_rng_state)
        return state

    def set_state(self, state: Tensor) -> None:
        """Bring it to a state."""
        self._call(self._module.set_rng_state, state)

    def seed(self, seed: int) -> None:
        """Bring it to the state that a seed makes."""
        self.set_state(torch.Generator(self._device).manual_seed(seed).get_state())

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Name the device where there may be several."""
        takes_device = "device" in inspect.signature(function).parameters
        return function(*arguments, **({"device": self._device} if takes_device else {}))


class RandomState:
    """All global random states at one moment, so that a second pass draws the same dropout masks.

    Args:
        device: where the model runs; its generator is among them.
        torch_only: leave out Python's and NumPy's, which take ten times as long as the rest and
            draw nothing in most models.
        own: further generators, which objects of the user's hold.

    Example:
        >>> before = RandomState(torch.device("cpu"))
        >>> with RandomState.seeded(torch.device("cpu"), 3).again():
        ...     drawn = torch.rand(2)
        >>> bool((drawn == torch.rand(2, generator=torch.Generator().manual_seed(3))).all())
        True
        >>> before.is_same(RandomState(torch.device("cpu")))
        True
    """

    def __init__(
        self, device: torch.device, *, torch_only: bool = False, own: Iterable[Any] = ()
    ) -> None:
        self._device, self._torch_only = device, torch_only
        held: list[Any] = [torch.default_generator]
        held += [] if device.type == "cpu" else [_OfDevice(device)]
        held += own if torch_only else [random, np.random, *own]
        self._states = [(each, _state_of(each)) for each in held]

    @classmethod
    def seeded(cls, device: torch.device, seed: int) -> RandomState:
        """Return the states that a seed makes, from 0 to 2³² - 1; those of now stay."""
        now = cls(device)
        for each, _ in now._states:
            _seed_own(each, seed)
        there = cls(device)
        now.restore()
        return there

    @property
    def seed(self) -> int:
        """The seed of torch's generator on the host, which no drawing changes."""
        generator = torch.Generator()
        generator.set_state(self._states[0][1])
        return generator.initial_seed()

    def is_same(self, now: RandomState) -> bool:
        """Return whether as many random numbers were drawn by then as by another moment."""
        pairs = zip(self._states, now._states, strict=False)  # one of them may be torch's only
        return all(is_same_content(mine, its) for (_, mine), (_, its) in pairs)

    def restore(self) -> None:
        """Go back to that moment."""
        for generator, state in self._states:
            _put_back(generator, state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the random states begin as they were then; afterwards they are as they are now."""
        now = RandomState(self._device, torch_only=self._torch_only)
        self.restore()
        try:
            yield
        finally:
            now.restore()


# -- one generator: of an object of the user's program, or a global one ----------------------------


def _state_of(generator: Any) -> Any:
    """Return the state of a generator, for :func:`_put_back`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _put_back(generator: Any, state: Any) -> None:
    """Bring a generator to a state of :func:`_state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed_own(generator: Any, seed: int) -> None:
    """Let a generator begin with a seed, from 0 to 2³² - 1."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def held_in(module: nn.Module, *kinds: str) -> Iterator[Tensor]:
    """Return what a module and all in it hold, the shared ones at each place.

    ``named_parameters()`` takes much longer.

    Args:
        module: the whole model.
        kinds: "_buffers", "_parameters".
    """
    modules: list[Any] = [module]
    for each in modules:  # which grows; parts of a scripted one are in no ``dict``
        modules += filter(_IS_THERE, each._modules.values())
    held = chain.from_iterable(map(attrgetter(kind), modules) for kind in kinds)
    return filter(_IS_THERE, chain.from_iterable(map(methodcaller("values"), held)))


# -- what a module keeps ------------------------------------------------------------------------

Kind: TypeAlias = Literal["parameter", "buffer", "attribute", "setting", "random"]
Path: TypeAlias = tuple[Hashable, ...]
"""Keys from the module down to a value; the last one is ... for all items of a container."""

_DEPTH = 12  # of containers in containers
_LONG = 20_000  # items from which on a container is kept by reference
_MANY = 256  # last items of a container that are looked into
_LARGE = 64 << 20  # bytes from which on an attribute is kept by reference
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size}
)
_CODE = frozenset(
    {types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, partial}
)
_PLAIN = _ATOMS | _CODE
_VALUES = (*_ATOMS, enum.Enum, np.generic, frozenset)  # of the user's classes, too
_INNER: dict[Hashable, Kind] = {
    "_buffers": "buffer",
    "_modules": "attribute",
    "_parameters": "parameter",
}
# Torch's and Lightning's own attributes.
_HIDDEN = frozenset({*vars(LightningModule()), "log"}) - {"training", "_buffers", "_modules"}
_FROZEN = "frozen parameters"
_NO_STATE = (Dataset, DataLoader, Trainer)  # of a data module
_OF_TRAINER = frozenset({"should_stop", "callbacks", "datamodule"})  # other parts, or none


@dataclass(frozen=True)
class Difference:
    """A place where two snapshots differ.

    Args:
        name: dotted, of modules and attributes; never of keys or items of containers.
        kind: "parameter", "buffer", "setting" (of an optimizer), "random" (a generator), or "attribute".
    """

    name: str
    kind: Kind


class Snapshot:
    """The things that a module keeps from step to step, at one moment.

    It holds buffers and attributes of the module and its children, of the module's own class, of the
    data module and of the ``collate_fn``, the settings of optimizers, learning-rate schedulers, and the
    states of random generators in attributes. It looks into lists, tuples, dictionaries, sets, deques,
    tensors, arrays and objects of the user's own classes: those of the module's package, and of no
    installed library. Another object in the place of one that is not looked into is compared by its
    content, as it is pickled.
    Global variables, closures, callbacks and data sets are no part of it; neither is what changes inside
    a library's object, a tensor above 64 MiB that is no buffer, or a container of more than 20,000 items.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.seen = deque([1.0], maxlen=8)
        >>> model = Model()
        >>> before, seen = Snapshot.of(model), model.seen
        >>> model.seen.append(2.0)
        >>> before.differences(Snapshot.of(model))
        (Difference(name='seen', kind='attribute'),)
        >>> before.restore()
        >>> model.seen is seen, list(seen)
        (True, [1.0])
    """

    def __init__(self, still: _Still, moving: _Parts) -> None:
        self._still, self._moving = still, moving

    @classmethod
    def of(cls, module: nn.Module, *, parameters: bool = False) -> Snapshot:
        """Take a snapshot; modules that did not change since one that is still held are not walked again.

        Args:
            module: the whole model.
            parameters: also of the values of parameters.
        """
        hidden = _HIDDEN - ({"_parameters"} if parameters else set())
        place = id(module), hidden  # which the walk keeps alive
        still = _WALKED.get(place)
        if still is None or not still.is_current():
            still = _WALKED[place] = _Still.of(module, hidden, still)
        moving: _Parts = {}
        walk = _Walk.of(module)
        for path, (name, each) in still.moving.items():
            _add(moving, path, _Part(vars(each), name, "attribute", still.hidden, True), walk)
        for path, part in _parts_of_trainer(getattr(module, "_trainer", None), walk):
            _add(moving, path, part, walk)
        for path, part in _parts_of_classes(type(module)):
            _add(moving, path, part, walk)
        for name, param in () if parameters else _frozen(module):
            moving[(_FROZEN, name)] = _Part(param, name, "buffer")
        return cls(still, moving)

    @property
    def walk(self) -> object:
        """The walk through modules that do not change; while it is held, further snapshots are cheap."""
        return self._still

    def restore(self) -> None:
        """Restore everything into the same objects, as far as these can be changed."""
        still = () if self._still.is_current() else self._still.parts.values()
        for part in chain(still, self._moving.values()):
            with suppress(Exception):
                part.fill(part.content)

    def differences(self, other: Snapshot) -> tuple[Difference, ...]:
        """Return where two snapshots of one module differ, each name once; NaN is equal to itself."""
        return tuple(dict.fromkeys(self.differing_values(other).values()))

    def differing_values(self, other: Snapshot) -> dict[Path, Difference]:
        """Return the single values that differ, and whole containers where their keys do."""
        found: dict[Path, Difference] = {}
        mine, its = self._moving, other._moving
        if self._still is not other._still:
            mine, its = {**self._still.parts, **mine}, {**other._still.parts, **its}
        for path in [path for path in mine if path in its]:
            with suppress(Exception):  # of objects that do not let themselves be compared
                found |= mine[path].differing(its[path], path, mine.keys() & its.keys())
        return found

    def value_at(self, path: Path) -> Any:
        """Return a value as it was then; :data:`ABSENT` for an attribute that an object did not have.

        Raises:
            LookupError: if there was no such object, or item of a container.
        """
        part = self._part(path)
        if part is not None and not part.is_container:
            return part.content
        above = self._parent(path)
        if path[-1] is ... or (above.is_named and path[-1] not in above.content):
            return above.content if path[-1] is ... else ABSENT
        return above.content[path[-1]]

    def put(self, path: Path, value: Any) -> None:
        """Put another value into the module, in a place that it had then; or :data:`ABSENT`, none.

        Raises:
            LookupError: if there was none.
        """
        above = self._parent(path)
        if path[-1] is ...:
            above.fill(value)
        elif isinstance(above.owner, tuple):
            items = [value if i == path[-1] else each for i, each in enumerate(above.owner)]
            self.put(path[:-1], getattr(above.owner, "_make", tuple)(items))
        elif value is ABSENT:
            above.owner.pop(path[-1], None)
        else:
            above.owner[path[-1]] = value

    def reseed(self) -> None:
        """Give every generator in attributes a new seed, from torch's global one."""
        for part in self._moving.values():
            if isinstance(part.owner, OWN_GENERATORS):
                _seed_own(part.owner, int(torch.randint(2**32, ())))

    def _part(self, path: Path) -> _Part | None:
        return self._moving.get(path) or self._still.parts.get(path)

    def _parent(self, path: Path) -> _Part:
        if (part := self._part(path[:-1])) is None:
            raise KeyError(path)
        return part


@contextmanager
def restored(
    module: LightningModule, *, parameters: bool = False, global_random: bool = True
) -> Iterator[Snapshot]:
    """Restore the module on exit; yields the snapshot of the beginning.

    State, metrics and random states are as before, gradients and ``requires_grad`` too. Nothing is
    logged or printed. Inside, parameters begin without gradients.

    Args:
        module: the whole model.
        parameters: also put the values of parameters back.
        global_random: also put the global random states back.
    """
    before = Snapshot.of(module, parameters=parameters)
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    drawn = RandomState(device) if global_random else None
    gradients = [(param, param.grad, param.requires_grad) for param in module.parameters()]
    toggled = module._param_requires_grad_state  # in the midst of a step of manual optimization
    try:
        with _muted(module):
            for param, *_ in gradients:
                param.grad = None
            yield before
    finally:
        before.restore()
        if drawn is not None:
            drawn.restore()
        module._param_requires_grad_state = toggled
        for param, gradient, requires_grad in gradients:
            param.grad = gradient
            if param.requires_grad is not requires_grad:
                param.requires_grad_(requires_grad)


@contextmanager
def apart(module: LightningModule) -> Iterator[None]:
    """Let one record run alone inside, and leave no trace of it.

    torchmetrics have counted nothing yet, and generators in attributes begin with seeds from torch's
    global one, which moves on from record to record.
    """
    with restored(module, global_random=False) as before:
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
        before.reseed()
        yield


def ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing, whatever the arguments."""


@contextmanager
def with_attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """Give a module itself these attributes inside, before those of its class."""
    own = vars(module)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)


@contextmanager
def _muted(module: LightningModule) -> Iterator[None]:
    """Log and print nothing inside; ``log_dict`` goes through ``log``."""
    trainer = module._trainer
    loggers = getattr(trainer, "loggers", [])
    if trainer is not None and loggers:
        trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with with_attributes(module, log=ignore), redirect_stdout(io.StringIO()):
            yield
    finally:
        if trainer is not None and loggers:
            trainer.loggers = loggers


# -- parts of a snapshot --------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """The content of one object at one moment.

    Args:
        owner: the object; of one with attributes, the dictionary of them.
        name: dotted.
        kind: of what it holds.
        hidden: keys that are left out.
        is_named: its keys are names, not data.
    """

    owner: Any
    name: str
    kind: Kind
    hidden: frozenset[str] = frozenset()
    is_named: bool = False
    content: Any = field(init=False)

    def __post_init__(self) -> None:
        self.content = _copied(self.owner)

    @property
    def is_container(self) -> bool:
        """False for a tensor, an array or a generator."""
        return isinstance(self.owner, dict | list | tuple | deque | set)

    def items(self) -> list[tuple[Hashable, Any]]:
        """Return keys and values inside."""
        if isinstance(self.content, dict):
            return [(key, each) for key, each in self.content.items() if key not in self.hidden]
        return list(enumerate(self.content)) if isinstance(self.content, list) else []

    def fill(self, content: Any) -> None:
        """Give the object this content."""
        owner = self.owner
        if isinstance(owner, _Fields):
            owner = owner.now()
        if isinstance(owner, Tensor):
            _write(owner, content)
        elif isinstance(owner, np.ndarray):
            np.copyto(owner, content)
        elif isinstance(owner, OWN_GENERATORS):
            _put_back(owner, content)
        elif isinstance(owner, tuple) or _are_same_objects(owner, content):
            return
        elif isinstance(owner, dict):
            for key in [key for key in owner if key not in self.hidden]:
                del owner[key]
            for key, value in content.items():
                if key not in self.hidden:
                    owner[key] = value
        else:
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(content)

    def differing(
        self, other: _Part, path: Path, parts: Collection[Path]
    ) -> dict[Path, Difference]:
        """Return the paths of values that differ, without what differs inside of these parts."""
        a, b = self.content, other.content
        whole = Difference(self.name, self.kind)
        if not self.is_container or isinstance(self.owner, set):
            key = (...,) if self.is_container else ()
            return {} if _is_alike(a, b) else {(*path, *key): whole}
        if a is b or _are_same_objects(a, b):
            return {}
        mine, its = dict(self.items()), dict(other.items())
        if not self.is_named and list(mine) != list(its):
            return {(*path, ...): whole}
        return {
            (*path, key): Difference(self.name_of(key), self.kind)
            for key in dict.fromkeys([*mine, *its])
            if not _is_same(mine.get(key, ...), its.get(key, ...), (*path, key) in parts)
        }

    def name_of(self, key: Hashable) -> str:
        """Return the dotted name of a value inside."""
        if not self.is_named or key in _INNER:
            return self.name
        return f"{self.name}.{key}" if self.name else str(key)


_Parts: TypeAlias = dict[Path, _Part]


class _Still:
    """The parts of the modules that do not change from one snapshot to the next, in ordinary models.

    They hold nothing but plain values, and are looked at all at once.

    Args:
        parts: of modules whose attributes are plain, and which modules are in which.
        moving: the paths, names and objects of all other modules.
        hidden: attributes that are left out.
    """

    def __init__(
        self, parts: _Parts, moving: dict[Path, tuple[str, nn.Module]], hidden: frozenset[str]
    ) -> None:
        self.parts, self.moving, self.hidden = parts, moving, hidden
        owners = [part.owner for part in parts.values()]  # of a dictionary the keys, and the values
        self._views = [*owners, *(each.values() for each in owners if isinstance(each, dict))]
        self._lengths = list(map(len, self._views))  # else an item could move to the next one
        self._values = list(chain.from_iterable(self._views))

    @classmethod
    def of(cls, module: nn.Module, hidden: frozenset[str], earlier: _Still | None) -> _Still:
        """Walk through all modules; what changed since an earlier walk counts as moving."""
        parts: _Parts = {}
        moving: dict[Path, tuple[str, nn.Module]] = {}
        packages = _Walk.of(module).packages
        for path, name, each in _modules_in((), "", module, set()):
            found: _Parts = {}
            _add(found, path, _Part(vars(each), name, "attribute", hidden, True), _Walk(packages))
            children = (*path, "_modules")
            parts[children] = found.pop(children)
            known = {} if earlier is None else earlier.parts
            has_changed = any(
                p in known and not _are_same_objects(known[p].content, part.content)
                for p, part in found.items()
            )
            was_moving = earlier is not None and path in earlier.moving
            is_plain = all(_is_seen(part.owner) for part in found.values())
            if path and is_plain and not has_changed and not was_moving:
                parts |= found
            else:
                moving[path] = name, each
        return cls(parts, moving, hidden)

    def is_current(self) -> bool:
        """Return whether no module of these changed."""
        return list(map(len, self._views)) == self._lengths and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )


_WALKED: WeakValueDictionary[tuple[int, frozenset[str]], _Still] = WeakValueDictionary()


def _modules_in(
    path: Path, name: str, module: nn.Module, met: set[int]
) -> Iterator[tuple[Path, str, nn.Module]]:
    """Yield a module and those in it, each once, with paths and names."""
    if id(module) not in met:
        met.add(id(module))
        yield path, name, module
        for key, inner in module._modules.items():
            if inner is not None:
                dotted = f"{name}.{key}" if name else key
                yield from _modules_in((*path, "_modules", key), dotted, inner, met)


def _is_seen(owner: Any) -> bool:
    """Return whether an object shows what is put into it, by its items."""
    return isinstance(owner, dict | list) and not isinstance(owner, _Fields)


class _Fields(dict[str, Any]):
    """The values that all objects of a class share, or that an object has in slots and attributes.

    ``vars`` of a class cannot be written to, and of an object with slots it has not all.

    Args:
        of: the class, or the object.
    """

    def __init__(self, of: Any) -> None:
        self.of, held = of, getattr(of, "__dict__", {})
        if isinstance(of, type):
            super().__init__((n, v) for n, v in held.items() if not _is_of_code(n, v))
            return
        slots = (vars(each).get("__slots__", ()) for each in type(of).__mro__)
        names = chain.from_iterable((s,) if isinstance(s, str) else s for s in slots)
        in_slots = {name: getattr(of, name) for name in names if hasattr(of, name)}
        super().__init__({**held, **in_slots})

    def now(self) -> _Fields:
        """Return the values of now."""
        return _Fields(self.of)

    def __setitem__(self, name: str, value: Any) -> None:
        kind: Any = type if isinstance(self.of, type) else object  # also of a frozen dataclass
        kind.__setattr__(self.of, name, value)

    def __delitem__(self, name: str) -> None:
        kind: Any = type if isinstance(self.of, type) else object
        kind.__delattr__(self.of, name)

    def pop(self, name: str, *default: Any) -> Any:
        """Delete a value, if it is there."""
        with suppress(AttributeError):
            del self[name]


def _is_of_code(name: str, value: Any) -> bool:
    return name.startswith("__") or callable(value) or hasattr(value, "__get__")


def _parts_of_classes(kind: type) -> Iterator[tuple[Path, _Part]]:
    """Yield what all objects of the user's classes share."""
    for each in kind.__mro__[: -len(LightningModule.__mro__)]:
        yield (each.__qualname__,), _Part(_Fields(each), "", "attribute", is_named=True)


def _frozen(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are not trained, with names; none if they are large."""
    found = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
    return found if sum(param.nbytes for _, param in found) <= _LARGE else []


def _parts_of_trainer(trainer: Any, walk: _Walk) -> Iterator[tuple[Path, _Part]]:
    """Yield the settings of optimizers, their schedulers, what makes the batches, and the stop."""
    for i, optimizer in enumerate(getattr(trainer, "optimizers", ())):
        for j, group in enumerate(optimizer.param_groups):
            name = f"optimizers.{i}.param_groups.{j}"
            yield (name,), _Part(group, name, "setting", frozenset({"params"}), True)
    for i, config in enumerate(getattr(trainer, "lr_scheduler_configs", ())):
        name = f"lr_schedulers.{i}"
        yield (name,), _Part(vars(config.scheduler), name, "attribute", is_named=True)
    if hasattr(trainer, "should_stop"):
        names = frozenset(vars(trainer))
        hidden = names - {"should_stop"}
        yield ("trainer",), _Part(vars(trainer), "trainer", "setting", hidden, True)
        # For what the user's code puts there; of Lightning's own these are settings, or of no matter.
        private = _OF_TRAINER | {name for name in names if name.startswith("_")}
        yield ("trainer", "fields"), _Part(_Fields(trainer), "trainer", "attribute", private, True)
    collate = getattr(getattr(trainer, "train_dataloader", None), "collate_of_user", None)
    owners = {
        "trainer.datamodule": getattr(trainer, "datamodule", None),
        "trainer.train_dataloader.collate_fn": getattr(collate, "__self__", collate),
    }
    for name, owner in owners.items():
        if owner is not None and isinstance(kept := walk.owner_in(owner, "attribute"), dict):
            hidden = frozenset(k for k, v in kept.items() if isinstance(v, _NO_STATE))
            yield (name,), _Part(kept, name, "attribute", hidden, True)


@dataclass
class _Walk:
    """A walk through what objects hold.

    Args:
        packages: of the module's own classes, whose objects are the user's also where it is installed.
        met: ids of objects that a part has.
    """

    packages: frozenset[str]
    met: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> _Walk:
        """Begin one at a module."""
        theirs = {_package(each) for each in LightningModule.__mro__}
        return cls(frozenset(map(_package, type(module).__mro__)) - theirs)

    def owner_in(self, value: Any, kind: Kind) -> Any:
        """Return the part of an object that a snapshot has: it, its attributes, or None."""
        if isinstance(value, Tensor | np.ndarray):
            is_else = isinstance(value, nn.Parameter) and kind != "parameter"
            return None if is_else or (value.nbytes > _LARGE and kind == "attribute") else value
        if isinstance(value, dict | list | tuple | deque | set):
            return value if len(value) <= _LONG else None
        if isinstance(value, OWN_GENERATORS):
            return value
        return self.attributes_in(value)

    def attributes_in(self, value: Any) -> Any:
        """Return the attributes of an object of the user's; of others None."""
        is_known = isinstance(value, LRScheduler | types.SimpleNamespace)
        kind: Any = type(value)
        if not (is_known or _is_of_user(kind, self.packages)):
            return None
        return _Fields(value) if _has_slots(kind) else vars(value)


def _add(parts: _Parts, path: Path, part: _Part, walk: _Walk, depth: int = 0) -> None:
    """Add a part, and those inside it, each object once; registered modules are for others.

    A tensor or an array in two attributes is in both: a twin is put into one without the other.
    """
    place = id(part.owner.of if isinstance(part.owner, _Fields) else part.owner)
    is_known = place in walk.met
    is_value = part.kind == "attribute" and not part.is_container
    if depth > _DEPTH or (is_known and not is_value):
        return
    walk.met.add(place)
    parts[path] = part
    if is_known or path[-1:] == ("_modules",):
        return
    inside = [(key, value) for key, value in part.items() if not _is_plain(value)]
    for key, value in inside if part.is_named else inside[-_MANY:]:
        name, kind = part.name_of(key), _INNER.get(key, part.kind)
        with suppress(Exception):  # of objects that nobody may look at
            if isinstance(value, nn.Module):
                for at, dotted, each in _modules_in((*path, key), name, value, set()):
                    found = _Part(vars(each), dotted, kind, _HIDDEN, True)
                    _add(parts, at, found, walk, depth + 1)
            elif (owner := walk.owner_in(value, kind)) is not None:
                is_named = key in _INNER or owner is not value
                kind = "random" if isinstance(value, OWN_GENERATORS) else kind
                found = _Part(owner, name, kind, is_named=is_named)
                _add(parts, (*path, key), found, walk, depth + 1)
                own = walk.attributes_in(value) if owner is value else None  # of a list, say
                if own is not None:
                    found = _Part(own, name, kind, is_named=True)
                    _add(parts, (*path, key, "__dict__"), found, walk, depth + 1)


@cache
def _is_of_user(kind: type, packages: frozenset[str]) -> bool:
    """Return whether a class is from no installed library; FSDP's objects, say, hold freed memory."""
    package = _package(kind)
    if package == "__main__" or package in packages:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or package == "lightning_dp" or package in sys.stdlib_module_names:
        return False
    return not {"site-packages", "dist-packages"} & set(PurePath(file).parts)


@cache
def _has_slots(kind: type) -> bool:
    return any(vars(each).get("__slots__") for each in kind.__mro__)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _copied(owner: Any) -> Any:
    """Return a copy of an object's content."""
    if isinstance(owner, Tensor):
        return owner.detach().clone()
    if isinstance(owner, OWN_GENERATORS):
        return _state_of(owner)
    if isinstance(owner, np.ndarray):
        return owner.copy()
    if isinstance(owner, dict | set):
        return dict(owner.items()) if isinstance(owner, dict) else set(owner)
    return list(owner)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor these values; if it has them it is left alone: for autograd, writing is a change."""
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        tensor.data = values.clone()
    elif not is_same_content(tensor.detach(), values):
        tensor.detach().copy_(values)


def is_same_content(a: Any, b: Any) -> bool:
    """Compare tensors, arrays, sets, lists, or states of generators; NaN is equal to itself."""
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(map(is_same_content, a.values(), b.values()))
    if isinstance(a, list) or (isinstance(a, tuple) and any(isinstance(i, np.ndarray) for i in a)):
        return len(a) == len(b) and all(map(is_same_content, a, b))
    return bool(a == b or (a != a and b != b))


def _are_same_objects(a: Collection[Any], b: Collection[Any]) -> bool:
    """True if two containers hold the same objects in one order."""
    if len(a) != len(b) or not all(map(is_, a, b)):
        return False
    return not (isinstance(a, dict) and isinstance(b, dict)) or all(
        map(is_, a.values(), b.values())
    )


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(map(_is_plain, value)))


def _is_same(a: Any, b: Any, is_part: bool) -> bool:
    """Compare two values; of those that are compared as parts, only the type."""
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) in _CODE:
        return _is_same_code(a, b)
    if type(a) is tuple and _is_plain(a) and _is_plain(b):
        return len(a) == len(b) and all(_is_same(*pair, False) for pair in zip(a, b, strict=True))
    if isinstance(a, _VALUES):
        with suppress(Exception):  # of the user's class
            return bool(a == b or (a != a and b != b))
        is_part = False
    return is_part or _is_alike(a, b)


def _is_same_code(a: Any, b: Any) -> bool:
    """Compare functions by the values that they and functions in them hold, and methods by objects."""
    with suppress(ValueError):  # of a cell that is empty
        mine, its = list(_held_by(a, set())), list(_held_by(b, set()))
        return len(mine) == len(its) and all(map(_is_alike, mine, its))
    return True


def _held_by(code: Any, met: set[int]) -> Iterator[Any]:
    met.add(id(code))
    if isinstance(code, partial):
        values = [code.func, *code.args, *code.keywords.values()]
    elif isinstance(code, types.FunctionType):
        cells = [each.cell_contents for each in code.__closure__ or ()]
        given = (*(code.__kwdefaults__ or {}).values(), *(code.__defaults__ or ()))
        values = [id(code.__code__), *cells, *given]
    else:
        values = [getattr(code, name, None) for name in ("__func__", "__name__", "__self__")]
    for value in values:
        if type(value) not in _CODE:
            yield value
        elif id(value) not in met:
            yield from _held_by(value, met)


def _is_alike(a: Any, b: Any) -> bool:
    """Compare contents, as they are pickled if need be; what nobody can compare is alike."""
    with suppress(Exception):
        if a is b or is_same_content(a, b):
            return True
    with suppress(Exception):
        return _pickled(a) == _pickled(b)
    return True


class _ByContent(pickle.Pickler):
    """Writes equal tensors alike, which torch's own way does not, and no models or data sets."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a dense tensor is written; others hold dense ones."""
        if isinstance(value, nn.Module | Dataset | DataLoader):
            raise TypeError
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return NotImplemented
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return tuple, ([value.shape, value.dtype, content],)


def _pickled(value: Any) -> bytes:
    written = io.BytesIO()
    _ByContent(written).dump(value)
    return written.getvalue()
