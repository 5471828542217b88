"""Stand-ins for a Trainer, its optimizers and schedulers, in copies of a model: nothing acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.loop import _Loop as LightningLoop
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_dp.gradients.waiting import WaitingLosses

__all__ = [
    "RUN",
    "ByHand",
    "NoCollectives",
    "NotProbed",
    "Now",
    "PublicStep",
    "StandInTrainer",
    "StillOptimizer",
    "Stills",
    "give_optimizers",
    "ignore",
]


_STOPS = ("should_stop", "limit_train_batches")
_MOVE = 1e-3
_RULES = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


class NotProbed(RuntimeError):
    """Nothing can be said; the message holds no value of any data."""


@dataclass(frozen=True)
class Now:
    """The moment of a run that a pass takes place in.

    Args:
        epoch, step: ``current_epoch`` and ``global_step``; None for the Trainer's own.
        batch_idx: the number of the batch in its epoch.
        counters: values of the module's own counters, by the dotted names of module and attribute.
    """

    epoch: int | None = None
    step: int | None = None
    batch_idx: int = 0
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def is_pretended(self) -> bool:
        """True if it is another moment than the run's own."""
        return self != RUN

    def __str__(self) -> str:
        pretended = {"current_epoch": self.epoch, "global_step": self.step}
        pretended |= {"batch_idx": self.batch_idx or None}
        pretended |= {".".join(filter(None, name)): n for name, n in self.counters.items()}
        return ", ".join(f"{name} = {n}" for name, n in pretended.items() if n is not None)


RUN = Now()  # the run's own moment


class StandInTrainer:
    """A Trainer to read from, which acts on nothing; it notes what is read of it.

    What a copy logs can be read back from ``callback_metrics`` and its kin, as in a Trainer.

    Args:
        real: whose public state is shown; None if there is none.
        now: the moment that it shows.
    """

    def __init__(self, real: Trainer | None, now: Now) -> None:
        self._real = real
        self._now = now
        self._logged: dict[str, Any] = {}
        self._of_epoch: dict[str, list[tuple[bool, Any]]] = {}
        self.read: set[str] = set()
        self.steps_made = 0
        self.epochs_made = 0
        self.optimizers: list[Any] = []
        self.scheduler: Any = None
        self.copied_callbacks: dict[int, Any] = {}  # by the id of the real ones
        self._loop: Any = None
        self._own = {*vars(self), "_own"}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_real" not in vars(self):  # under construction
            raise AttributeError(name)
        self.read.add(name)
        if self._real is None:
            raise RuntimeError("The module is not attached to a Trainer.")
        return getattr(self._real, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandInTrainer:
        return self  # copies of a copy see the same Trainer

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the place of ``LightningModule.log``."""
        on_step = not on_epoch if on_step is None else on_step
        value = value.detach() if isinstance(value, Tensor) else value
        if on_step:
            self._logged |= {name: value, f"{name}_step": value}
        if on_epoch:
            self._of_epoch.setdefault(name, []).append((on_step, value))

    def end_epoch(self) -> None:
        """End the epoch; what was logged for it can be read from now on."""
        for name, values in self._of_epoch.items():
            mean = sum(_as_logged(value) for _, value in values) / len(values)
            self._logged |= {f"{name}_epoch": mean} if values[0][0] else {name: mean}
        self._of_epoch.clear()

    @property
    def current_epoch(self) -> int:
        """The pretended epoch, or the Trainer's."""
        self.read.add("current_epoch")
        first = self._now.epoch
        if first is None:
            first = 0 if self._real is None else self._real.current_epoch
        return first + self.epochs_made

    @property
    def global_step(self) -> int:
        """The pretended step, or the Trainer's."""
        self.read.add("global_step")
        first = self._now.step
        if first is None:
            first = 0 if self._real is None else self._real.global_step
        return first + self.steps_made

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The metrics of the Trainer, and those that the copy logged."""
        return self._metrics("callback_metrics")

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The same."""
        return self._metrics("logged_metrics")

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The same."""
        return self._metrics("progress_bar_metrics")

    def _metrics(self, name: str) -> dict[str, Any]:
        self.read.add(name)
        known = {} if self._real is None else dict(getattr(self._real, name))
        return known | {key: _as_logged(value) for key, value in self._logged.items()}

    @property
    def callbacks(self) -> list[Any]:
        """The copies of the user's own, and the others as they are."""
        self.read.add("callbacks")
        real = [] if self._real is None else self._real.callbacks  # type: ignore[attr-defined]
        return [self.copied_callbacks.get(id(each), each) for each in real]

    @property
    def loggers(self) -> list[Any]:
        """Mute loggers, as many as the Trainer has."""
        return [DummyLogger() for _ in (self._real.loggers if self._real else ())]

    @property
    def logger(self) -> Any:
        """The first of them."""
        return next(iter(self.loggers), None)

    @property
    def train_dataloader(self) -> Any:
        """The loader without its records, which are for charged steps only."""
        self.read.add("train_dataloader")
        return None if self._real is None else _Unread(self._real.train_dataloader)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """One scheduler that does nothing for each of the Trainer's."""
        configs = self._real.lr_scheduler_configs if self._real else ()
        still = self.scheduler or StillScheduler(self.optimizers)
        return [SimpleNamespace(scheduler=still, monitor=each.monitor) for each in configs]

    @property
    def fit_loop(self) -> Any:
        """The Trainer's loop to read from; what is written stays here."""
        self.read.add("fit_loop")
        if self._loop is None and self._real is not None:
            self._loop = _Loop(self._real.fit_loop)
        return self._loop

    def steering(self) -> str:
        """Return what says when training stops."""
        written = {name: value for name, value in self._written().items() if name in _STOPS}
        return repr((written, None if self._loop is None else self._loop.written()))

    def rules(self) -> str:
        """Return what says how a step is made."""
        written = self._written()
        return repr({name: written[name] for name in _RULES if name in written})

    def _written(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._own}

    @property
    def progress_bar_callback(self) -> None:
        """None, so that nothing is printed."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing."""


def _as_logged(value: Any) -> Any:
    if isinstance(value, Metric):
        value = value.compute()
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing, whatever the arguments."""
    return None


class _Loop:
    """A Trainer's loop to read from; what is written to it stays here."""

    def __init__(self, real: Any) -> None:
        vars(self)["_real"], vars(self)["_inner"] = real, {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_real" not in vars(self):
            raise AttributeError(name)
        value = getattr(self._real, name)
        if isinstance(value, LightningLoop):
            return self._inner.setdefault(name, _Loop(value))
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loop:
        return self

    def written(self) -> dict[str, Any]:
        """Return what was written, by names."""
        own = {name: value for name, value in vars(self).items() if name not in ("_real", "_inner")}
        return own | {name: loop.written() for name, loop in self._inner.items()}


class _Unread:
    """A loader without its records."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        raise NotProbed(
            "the model iterates the training loader, whose records are for charged steps"
        )


def give_optimizers(
    module: LightningModule, trainer: StandInTrainer, optimizers: Sequence[Optimizer]
) -> StillScheduler:
    """Give a copy and its Trainer stand-ins for optimizers and schedulers; return the latter."""
    scheduler = StillScheduler(optimizers)
    trainer.optimizers, trainer.scheduler = list(optimizers), scheduler
    _show(module, optimizers, scheduler)
    return scheduler


def _show(
    module: LightningModule, optimizers: Sequence[Optimizer], scheduler: StillScheduler
) -> None:
    """Let a copy see stand-ins, each alone or in a list as Lightning shows them."""
    trainer: Any = module._trainer
    count = len(trainer.lr_scheduler_configs) if len(optimizers) > 1 else 1
    shown = list(optimizers) if len(optimizers) > 1 else optimizers[0]
    schedulers = [scheduler] * count if count > 1 else scheduler
    module.optimizers = lambda use_pl_optimizer=True: shown  # type: ignore[method-assign,assignment]
    module.lr_schedulers = lambda: schedulers  # type: ignore[method-assign,assignment,return-value]


class ByHand:
    """Stand-in for the optimizer and the backward pass in manual optimization of a copy of a module.

    Args:
        module: a copy; what it calls to optimize is replaced on it.
        stills: what it gets for its optimizers; by default one that does nothing.
    """

    def __init__(self, module: LightningModule, stills: Stills | None = None) -> None:
        self._losses: list[Tensor] = []
        if stills is None:
            stills = Stills((StillOptimizer([{"params": list(module.parameters())}]),))
        _show(module, stills.optimizers, StillScheduler(stills.optimizers))
        module.manual_backward = self._note  # type: ignore[method-assign]
        module.clip_gradients = self._note_clipping  # type: ignore[method-assign]
        self.clipped: list[str] = []
        self._stills = stills
        self._waiting: WaitingLosses | None = None  # where there are several optimizers
        self._released: tuple[Tensor | None] | None = None  # the private one has stepped
        self.public_steps: list[PublicStep] = []
        if len(stills.optimizers) == 1:
            for name in ("toggle_optimizer", "untoggle_optimizer"):
                setattr(module, name, ignore)
            return
        self._waiting = WaitingLosses(stills.parameters(private=True), stills.parameters())
        for place, still in enumerate(stills.optimizers):
            still.on_step = partial(self._stepped, place)
            still.owner = module

    def forget(self) -> None:
        """Begin another step."""
        self._losses.clear()
        self._released, self.public_steps = None, []
        if self._waiting is not None:
            self._waiting.drop()

    def _stepped(self, place: int) -> None:
        """Note the losses that the private optimizer steps by, or the gradients of a public one."""
        assert self._waiting is not None
        if place == self._stills.private:
            self._released = self._released or (self._waiting.take(),)
            return
        held = [p for g in self._stills.optimizers[place].param_groups for p in g["params"]]
        found = tuple(None if p.grad is None else p.grad.detach().clone() for p in held)
        self.public_steps.append(PublicStep(place, found))

    def _note_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clipped.append(repr((args, kwargs)))

    def _note(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._waiting is None:
            self._losses.append(loss)
        elif loss.requires_grad:
            waits = self._released is None and self._waiting.reaches_private(loss)
            self._waiting.add(loss, waits=waits)

    @property
    def loss(self) -> Tensor | None:
        """The loss that was given to ``manual_backward``; None if none was.

        With several optimizers, that of the private one.
        """
        if self._waiting is not None:
            self._released = self._released or (self._waiting.take(),)
            return self._released[0]
        return sum(self._losses[1:], self._losses[0]) if self._losses else None


class StillOptimizer(Optimizer):
    """An optimizer whose steps change nothing, or everything a little by its gradient.

    Args:
        groups: with parameters, and settings that a module may read and write.
        moves: whether weights move.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], *, moves: bool = False) -> None:
        super().__init__([{"lr": 0.1, **group} for group in groups], {})
        self._moves = moves
        self.steps = 0
        self.on_step: Callable[[], None] | None = None
        self.owner: LightningModule | None = None  # where it can be toggled

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside, where LightningOptimizer has it."""
        return self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if there is one."""
        output = None if closure is None else closure()
        self.steps += 1
        if self.on_step is not None:
            self.on_step()
        for group in self.param_groups if self._moves else ():
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=_MOVE)
        return output

    @contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Inside, no other optimizer's parameters have gradients; of a single one, nothing changes."""
        if self.owner is not None:
            self.owner.toggle_optimizer(self)
        yield
        if self.owner is not None:
            self.owner.untoggle_optimizer(self)


@dataclass(frozen=True)
class Stills:
    """Stand-ins for all optimizers of a module.

    Args:
        optimizers: in the order of ``configure_optimizers``.
        private: the place of the one that is trained on records.
    """

    optimizers: tuple[StillOptimizer, ...]
    private: int = 0

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Mapping[str, Any]]],
        trained: Iterable[Tensor],
        **settings: Any,
    ) -> Stills:
        """Make one for each list of groups; the private one holds a trained parameter."""
        stills = tuple(StillOptimizer(each, **settings) for each in groups)
        wanted = {id(param) for param in trained}
        found = [i for i, each in enumerate(stills) if wanted & set(map(id, _held_by(each)))]
        return cls(stills, found[0] if found else 0)

    def parameters(self, *, private: bool = False) -> tuple[nn.Parameter, ...]:
        """Return those of the public optimizers, or of the private one."""
        return tuple(
            param
            for place, each in enumerate(self.optimizers)
            if (place == self.private) == private
            for param in _held_by(each)
            if param.requires_grad
        )


def _held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@dataclass(frozen=True)
class PublicStep:
    """A step of a public optimizer.

    Args:
        place: of the optimizer.
        gradients: what it stepped by, in the order of its parameters.
    """

    place: int
    gradients: tuple[Tensor | None, ...]


class StillScheduler:
    """A learning rate scheduler that does nothing but remember what it is stepped with.

    Args:
        optimizers: one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.last_epoch = 0
        self.steps: list[str] = []

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Remember the arguments."""
        self.steps.append(repr((args, kwargs)))

    def get_last_lr(self) -> list[float]:
        """Return the rates as they are."""
        return [group["lr"] for each in self._optimizers for group in each.param_groups]


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations over several processes raise: the others are not there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation of this process."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise NotProbed("the model asks other processes")
        return func(*args, **(kwargs or {}))
