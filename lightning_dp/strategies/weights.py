"""Checks of the weights: the same parameters at every step, moved by the optimizer alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import NamedTuple, TypeAlias

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._fingerprint import fingerprint
from lightning_dp._lazy_copies import (
    addresses_of,
    are_shared,
    is_held_elsewhere,
    is_one_memory,
    is_plain,
    lazily_copied,
)
from lightning_dp._refusals import RefusedRun
from lightning_dp._shards import held_here

__all__ = ["FirstStep", "LaterSteps", "SameParameters", "checksums"]

_Seen: TypeAlias = Tensor | int  # a lazy copy of a parameter, or its checksum
_IS_TRAINED = attrgetter("requires_grad")

_WRITTEN = (
    "training_step changed the parameters {} itself (a codebook or statistic kept as a parameter, a "
    "layer that rescales its weights in forward). What it writes can come from the records, without "
    "noise, and ε would not hold: discard these weights. If it is a function of other weights only (a "
    "teacher that follows the student), write it in on_train_batch_end."
)


class SameParameters:
    """Remembers which parameters are trained, and refuses to go on with others.

    Args:
        module: the user's model.
        optimizer: its private optimizer.
        public: parameters of others, which they may switch off and on as they like.
    """

    def __init__(
        self, module: LightningModule, optimizer: Optimizer, public: Sequence[nn.Parameter] = ()
    ) -> None:
        self.trained = _trained(optimizer)
        """The parameters that the optimizer moves, in its order."""
        self._module = module
        self._all = tuple(module.parameters())
        others = {id(param) for param in public}
        self._fixed = [param for param in self._all if id(param) not in others]
        self._trainable = tuple(map(_IS_TRAINED, self._fixed))
        self._seen: tuple[list[nn.Parameter], tuple[bool, ...]] = [], ()  # the model's, as allowed

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that moves others.

        Raises:
            RuntimeError: naming the cure.
        """
        is_same = _are_the_same(_trained(optimizer), self.trained)
        if not is_same or tuple(map(_IS_TRAINED, self._fixed)) != self._trainable:
            raise RefusedRun(
                "The set of trained parameters changed during fit (a fine-tuning callback, "
                "add_param_group or requires_grad_?): new ones would be trained without privacy. "
                "Decide before fit which parameters are trained.",
                topic="changed-parameters",
            )

    def check_model(self) -> None:
        """Refuse a model that has others: a frozen part may be exchanged (a copy of a teacher).

        Raises:
            RuntimeError: naming the cure.
        """
        params = _parameters_of(self._module)
        are_trained = tuple(map(_IS_TRAINED, (*params, *self._all)))
        if _are_the_same(params, self._seen[0]) and are_trained == self._seen[1]:
            return  # as nearly always
        here = {id(p) for p in params if p.requires_grad}
        known = {id(p) for p in self._all if p.requires_grad}
        if here == known:
            self._seen = params, are_trained
            return
        named = self._module.named_parameters()
        new = [name for name, p in named if p.requires_grad and id(p) not in known]
        raise RefusedRun(
            f"Trainable parameters of the LightningModule were replaced during fit ({len(known - here)} "
            f"are gone, {len(new)} are new: {new[:5]}). The optimizer has those of before, and would "
            "train stale copies on noise alone. Wrap the model or add adapters in __init__ or "
            "configure_model; freeze a copy (a target network) with requires_grad_(False).",
            topic="changed-parameters",
        )


def _trained(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple([p for g in optimizer.param_groups for p in g["params"] if p.requires_grad])


def _are_the_same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters: at every step, and torch's own walk takes four times as long."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        return list(module.parameters())
    modules: list[nn.Module | None] = [module]
    found: list[nn.Parameter | None] = []
    for each in modules:  # grows
        if each is not None:
            modules += each._modules.values()
            found += each._parameters.values()
    return [param for param in found if param is not None]


class FirstStep:
    """Watches which parameters the first step changes, and who changes them.

    All it looks at is public: weights, learning rates and gradients after the noise.

    - ``training_step`` changes no parameter: what it writes comes from records, without noise.
    - The optimizer changes no frozen parameter.
    - It changes every trained one; one whose learning rate or private gradient is still zero (in
      warm-up, or in a step of a few coordinates) is checked later.
    - Nothing else changes a frozen one before the second step.

    Args:
        module: the user's model.
        optimizer: its private optimizer.
        public: parameters of others, which ``training_step`` moves by stepping them.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, public: Sequence[nn.Parameter] = ()
    ) -> None:
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._all = _without(module, public)
        # What each check still has to look at, and what it was then; empty when the check is over.
        self._unseen = self._all
        self._frozen = {name: p for name, p in self._all.items() if not p.requires_grad}
        self._waiting = {
            name: p for name, p in self._all.items() if p.requires_grad and id(p) in own
        }
        self._before_forward: dict[str, _Seen] = {}
        self._before_update: dict[str, _Seen] = {}
        self._after_update: dict[str, _Seen] = {}

    def enter_forward(self) -> None:
        """Look at all parameters as ``training_step`` begins, the first time."""
        if self._unseen:
            self._before_forward, self._unseen = _seen(self._unseen), {}

    @property
    def is_looking(self) -> bool:
        """True while ``training_step`` runs for the first time."""
        return bool(self._before_forward)

    def leave_forward(self) -> None:
        """Compare them when the loss is there: after ``training_step``, or in ``manual_backward``.

        Raises:
            MisconfigurationException: if a parameter is not what it was.
        """
        before, self._before_forward = self._before_forward, {}
        written = self._changed_since(before)
        if written:
            raise MisconfigurationError(_WRITTEN.format(_some(written)), topic="written-weights")

    def enter_update(self) -> None:
        """Look at what the optimizer is about to move, or must not move."""
        # Those that are going to be moved would be copied then: their checksums take no memory.
        self._before_update = {**_seen(self._frozen), **checksums(self._waiting)}

    def leave_update(self, optimizer: Optimizer) -> list[tuple[str, str]]:
        """Compare it after the step; return topics and texts of what the user should be warned of.

        Raises:
            MisconfigurationException: if it changed a frozen parameter.
        """
        before, self._before_update = self._before_update, {}
        if not before:
            return []
        moved = self._changed_since(before)
        frozen, self._frozen = self._frozen, {}
        _refuse_frozen([name for name in moved if name in frozen], optimizer)
        # None of them moved, so what they were is what they are.
        self._after_update = {name: before[name] for name in frozen if name in before}
        asked = [name for name in self._waiting if _is_asked(self._waiting[name], optimizer)]
        for name in asked:
            del self._waiting[name]
        stuck = [name for name in asked if name in before and name not in moved]
        if not stuck:
            return []
        warning = (
            f"{type(optimizer).__name__} did not move the parameters {_some(stuck)}, though their "
            "learning rate and private gradients are not zero: the step is too small for their "
            "precision, or the optimizer steps copies of them. They are charged for all the same: "
            "raise the learning rate, or freeze them with requires_grad_(False) before fit."
        )
        return [("optimizer", warning)]

    def between_steps(self) -> list[tuple[str, str]]:
        """Compare the frozen parameters at the second batch; return what to warn of, as above."""
        before, self._after_update = self._after_update, {}
        written = self._changed_since(before)
        if not written:
            return []
        warning = (
            f"The frozen parameters {_some(written)} changed between two steps, by a hook or a "
            "callback. ε covers them if they are computed from other weights (a teacher that "
            "follows the student); if they are computed from records, it does not hold."
        )
        return [("written-weights", warning)]

    def _changed_since(self, before: Mapping[str, _Seen]) -> tuple[str, ...]:
        """Return the names of the parameters that are not what they were."""
        return tuple(name for name in before if _is_changed(before[name], self._all[name]))


class _Mark(NamedTuple):
    """Facts about a parameter, of which one changes when it is written to, or gets other memory."""

    version: int  # autograd's count of writes
    address: int  # of its memory
    is_shared: bool  # with a snapshot: its address changes when anybody asks for it to write

    def is_written(self, now: _Mark) -> bool:
        """Tell whether it was surely written to since, or exchanged."""
        return now.version != self.version or (now.address != self.address and not self.is_shared)


@dataclass(frozen=True)
class _Marks:
    """The marks of parameters that can be looked at, taken for all at once: at every step, twice."""

    names: tuple[str, ...]
    versions: tuple[int, ...]
    addresses: tuple[int, ...]
    are_shared: tuple[bool, ...]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> _Marks:
        if {nn.Parameter}.union(map(type, params.values())) != {nn.Parameter}:
            params = {n: here for n, p in params.items() if (here := _plain(p)) is not None}
        if any(map(Tensor.is_inference, params.values())):
            params = {name: each for name, each in params.items() if not each.is_inference()}
        tensors = list(params.values())
        versions = tuple(map(attrgetter("_version"), tensors))
        return cls(tuple(params), versions, addresses_of(tensors), are_shared(tensors))

    def by_name(self) -> dict[str, _Mark]:
        marks = map(_Mark, self.versions, self.addresses, self.are_shared)
        return dict(zip(self.names, marks, strict=True))


class LaterSteps:
    """Watches whether ``training_step`` writes to a parameter that it let alone at the first batch.

    At every step, and so by version counters and addresses only: what is written to ``p.data`` is not
    seen, and what was written without a change at the first batch is no fault later.

    Args:
        module: the user's model.
        public: parameters that ``training_step`` moves by stepping their public optimizers.
    """

    def __init__(self, module: nn.Module, public: Sequence[nn.Parameter] = ()) -> None:
        self._all = _without(module, public)
        self._before: _Marks | None = None
        self._usual: frozenset[str] | None = None  # written to at the first batch
        self._moving: frozenset[str] = frozenset()  # that may have got other memory there

    def enter_forward(self, *, has_snapshot: bool = False) -> None:
        """Look at all parameters as ``training_step`` begins.

        Args:
            has_snapshot: somebody holds lazy copies of them.
        """
        self._before = _Marks.of(self._all)
        if not has_snapshot and any(self._before.are_shared):
            for param in self._all.values():
                if is_plain(param):
                    param.data_ptr()  # nobody has a copy any more: this only ends the sharing
            self._before = _Marks.of(self._all)

    def fault(self) -> str | None:
        """Compare them when the loss is there; return why the step may not be released."""
        seen, self._before = self._before, None
        if seen is None:
            return None
        marks = _Marks.of(self._all)
        if marks == seen and self._usual is not None:
            return None  # as nearly always
        before = seen.by_name()
        pairs = [(name, before[name], now) for name, now in marks.by_name().items()]
        if self._usual is None:
            self._usual = frozenset(name for name, then, now in pairs if then.is_written(now))
            self._moving = frozenset(n for n, then, now in pairs if then.address != now.address)
        new = sorted(
            name
            for name, then, now in pairs
            if then.is_written(now)
            and name not in self._usual
            and not (name in self._moving and then.version == now.version)
        )
        return _WRITTEN.format(_some(new)) if new else None


def _without(module: nn.Module, public: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
    others = {id(param) for param in public}
    return {name: param for name, param in module.named_parameters() if id(param) not in others}


def _refuse_frozen(moved: list[str], optimizer: Optimizer) -> None:
    if moved:
        raise MisconfigurationError(
            f"The step of {type(optimizer).__name__} changed the frozen parameters {_some(moved)} "
            "(weight decay without a gradient, an old gradient that was left in p.grad, or "
            "on_before_optimizer_step). Give the optimizer trainable parameters only: "
            "[p for p in self.parameters() if p.requires_grad].",
            topic="optimizer",
        )


def _is_asked(param: nn.Parameter, optimizer: Optimizer) -> bool:
    """True if a step must move it: neither its learning rate nor its private gradient is zero."""
    if param.grad is None or not bool(param.grad.any()):
        return False
    rates = [g.get("lr") for g in optimizer.param_groups if any(p is param for p in g["params"])]
    return any(rate is None or float(rate) != 0 for rate in rates)


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{list(names[:5])}{more}"


def _seen(tensors: Mapping[str, Tensor]) -> dict[str, _Seen]:
    """Return lazy copies, which tell at once that nobody wrote; checksums where none can be made.

    Or where they would not tell: an array of the same memory would write into both.
    """
    found: dict[str, _Seen] = {}
    for name, tensor in tensors.items():
        is_alone = is_plain(tensor) and not is_held_elsewhere(tensor)
        copied = lazily_copied(tensor) if is_alone else None
        found |= checksums({name: tensor}) if copied is None else {name: copied}
    return found


def _is_changed(before: _Seen, now: Tensor) -> bool:
    if isinstance(before, Tensor):
        return not is_one_memory(before, now) and _is_changed(int(fingerprint([before])), now)
    here = _plain(now)
    return here is None or before != int(fingerprint([here]))


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a fingerprint of each tensor; a change alters it, except with probability 2⁻³².

    A copy would double the memory of a frozen backbone, and version counters do not see what is
    written to ``p.data``. Tensors of special classes (quantised weights) and lazy ones are left out.

    Example:
        >>> import torch
        >>> weight = torch.ones(3)
        >>> before = checksums({"weight": weight})
        >>> weight[1] += 1e-7
        >>> before == checksums({"weight": weight})
        False
    """
    return {
        name: int(fingerprint([here]))
        for name, tensor in tensors.items()
        if (here := _plain(tensor)) is not None
    }


def _plain(tensor: Tensor) -> Tensor | None:
    """Return what this process holds of a tensor; None for tensors of special classes and lazy ones."""
    if type(tensor) is nn.Parameter:  # as nearly all
        return tensor
    if is_lazy(tensor):
        return None
    (here,) = held_here([tensor])
    return here if type(here.data) is Tensor else None
