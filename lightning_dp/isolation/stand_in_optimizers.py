"""Stand-ins for optimizers, in copies of a model: nothing acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._waiting_losses import WaitingLosses
from lightning_dp.isolation.stand_ins import StandInTrainer, StillScheduler, ignore

__all__ = ["ByHand", "PublicStep", "StillOptimizer", "Stills", "give_optimizers"]

_MOVE = 1e-3


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
        scheduler: what it gets for its schedulers; by default one that nobody looks at.
    """

    def __init__(
        self,
        module: LightningModule,
        stills: Stills | None = None,
        scheduler: StillScheduler | None = None,
    ) -> None:
        self._losses: list[Tensor] = []
        if stills is None:
            stills = Stills((StillOptimizer([{"params": list(module.parameters())}]),))
        _show(module, stills.optimizers, scheduler or StillScheduler(stills.optimizers))
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

    def in_place_of(self, real: Sequence[Optimizer]) -> dict[int, Any]:
        """Return a memo for ``copy.deepcopy``, in which they stand for optimizers and their groups."""
        memo: dict[int, Any] = {}
        for still, optimizer in zip(self.optimizers, real, strict=False):
            memo |= {id(optimizer): still, id(optimizer.param_groups): still.param_groups}
            pairs = zip(optimizer.param_groups, still.param_groups, strict=False)
            memo |= {id(group): own for group, own in pairs}
        return memo

    def exchange(self, memo: Mapping[int, Any]) -> None:
        """Hold the copies of parameters in their places.

        Args:
            memo: of ``copy.deepcopy``.
        """
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["params"] = [memo.get(id(param), param) for param in group["params"]]

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
