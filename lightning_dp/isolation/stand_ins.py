"""Stand-ins for a Trainer, its schedulers and other processes, in copies of a model: nothing acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.loop import _Loop as LightningLoop
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_dp.isolation.copies import Copies

__all__ = ["RUN", "NoCollectives", "NotProbed", "Now", "StandInTrainer", "StillScheduler", "ignore"]


_STOPS = ("should_stop", "limit_train_batches")
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
        self.shown_to: Any = None  # the module whose Trainer it is
        self.data = _Data(real)
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
    def lightning_module(self) -> Any:
        """The module whose Trainer it is."""
        self.read.add("lightning_module")
        if self.shown_to is None and self._real is not None:
            return self._real.lightning_module
        return self.shown_to

    @property
    def model(self) -> Any:
        """The same."""
        return self.lightning_module

    @property
    def strategy(self) -> Any:
        """The Trainer's to read from, with the stand-ins for optimizers; it saves nothing."""
        self.read.add("strategy")
        return None if self._real is None else _Strategy(self._real.strategy, self)

    @property
    def datamodule(self) -> Any:
        """A copy of the Trainer's, which shares the data; what is written to it stays there."""
        self.read.add("datamodule")
        return self.data.module(self)

    @property
    def train_dataloader(self) -> Any:
        """The loader without its records, which are for charged steps only."""
        self.read.add("train_dataloader")
        return None if self._real is None else _Unread(self._real.train_dataloader, self.data)

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


class _Strategy:
    """A Trainer's strategy to read from; what is written to it stays here, and it saves nothing."""

    def __init__(self, real: Any, trainer: StandInTrainer) -> None:
        vars(self)["_real"], vars(self)["_trainer"] = real, trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_real" not in vars(self):
            raise AttributeError(name)
        if name in ("optimizers", "lightning_module", "model"):
            return getattr(self._trainer, name)
        if name in ("save_checkpoint", "remove_checkpoint"):
            return ignore
        return getattr(self._real, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Strategy:
        return self


class _Data:
    """Copies of what hands out the data, which share the data; made when somebody asks for them.

    Args:
        real: the Trainer whose they are; None if there is none.
    """

    def __init__(self, real: Trainer | None) -> None:
        self._real = real
        self._module: Any = None
        self._dataset: Any = None

    def module(self, trainer: StandInTrainer) -> Any:
        """Return the copy of the data module, which sees this Trainer; None if there is none."""
        real = getattr(self._real, "datamodule", None)
        if self._module is None and real is not None:
            self._module = Copies(real).fresh()
            if self._module is not real:
                self._module.trainer = trainer
        return self._module

    def dataset(self, loader: Any) -> Any:
        """Return the copy of a loader's data set."""
        if self._dataset is None:
            self._dataset = Copies(loader.dataset).fresh()
        return self._dataset

    def written(self) -> dict[str, Any]:
        """Return the attributes of the copied data set; nothing if nobody asked for it."""
        return dict(getattr(self._dataset, "__dict__", {}))

    def noted(self) -> dict[str, Any]:
        """Return the same of the data module."""
        own = getattr(self._module, "__dict__", {})
        return {f"datamodule.{name}": own[name] for name in own if name != "trainer"}


class _Unread:
    """A loader without its records."""

    def __init__(self, loader: Any, data: _Data) -> None:
        self._loader, self._data = loader, data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def dataset(self) -> Any:
        """A copy of the data set, which shares the data."""
        return self._data.dataset(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        raise NotProbed(
            "the model iterates the training loader, whose records are for charged steps"
        )


class StillScheduler:
    """A learning rate scheduler that does nothing but remember what it is stepped with.

    Args:
        optimizers: one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.last_epoch = 0
        self.steps: list[str] = []
        self.on_step: Callable[[], None] = ignore

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Remember the arguments."""
        self.steps.append(repr((args, kwargs)))
        self.on_step()

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
