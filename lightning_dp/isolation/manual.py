"""Stand-ins for optimizers, for a module that runs for a comparison: nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_dp.gradients.graph import WaitingLosses

__all__ = ["ByHand", "PublicStep", "without_dropout"]

_SDPA_DROPOUT = 4  # the place of dropout_p among the arguments
_DROP = (_DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)  # by chance, while they train


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing, whatever the arguments."""


class _NoDropout(TorchFunctionMode):
    """Lets functions of torch drop nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, name = kwargs or {}, func.__name__
        if name.endswith(("dropout", "dropout1d", "dropout2d", "dropout3d")):
            return args[0] if args else given["input"]
        if name == "scaled_dot_product_attention" and len(args) > _SDPA_DROPOUT:
            args = (*args[:_SDPA_DROPOUT], 0.0, *args[_SDPA_DROPOUT + 1 :])
        if "dropout_p" in given:
            given = {**given, "dropout_p": 0.0}
        return func(*args, **given)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Let no layer and no function of torch drop anything, inside."""
    active = [part for part in module.modules() if part.training and isinstance(part, _DROP)]
    try:
        for part in active:
            part.training = False
        with _NoDropout():
            yield
    finally:
        for part in active:
            part.training = True


class StillOptimizer(Optimizer):
    """An optimizer whose steps change nothing.

    Args:
        real: the optimizer whose parameters and settings it shows.
        on_step: called by each step.
    """

    def __init__(self, real: Optimizer, on_step: Callable[[], None], module: Any) -> None:
        groups = [dict(group) for group in real.param_groups]
        super().__init__([{"lr": 0.1, **group} for group in groups], {})
        self._on_step, self._module = on_step, module

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside, where LightningOptimizer has it."""
        return self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if there is one."""
        output = None if closure is None else closure()
        self._on_step()
        return output

    @contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Inside, no other optimizer's parameters have gradients."""
        self._module.toggle_optimizer(self)
        yield
        self._module.untoggle_optimizer(self)


class _StillScheduler:
    """A scheduler that does nothing.

    Args:
        optimizers: whose learning rates it tells.
    """

    last_epoch = 0
    step = staticmethod(_ignore)

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def get_last_lr(self) -> list[float]:
        """Return the rates as they are."""
        return [group["lr"] for each in self._optimizers for group in each.param_groups]


@dataclass(frozen=True)
class PublicStep:
    """A step of a public optimizer.

    Args:
        place: of the optimizer.
        gradients: what it stepped by, in the order of its parameters.
    """

    place: int
    gradients: tuple[Tensor | None, ...]


class ByHand:
    """Stand-in for the optimizers and the backward pass of a module with manual optimization.

    Args:
        module: what it calls to optimize is replaced on it, inside :meth:`in_place`.
        optimizers: the real ones, in the order of ``configure_optimizers``.
        trained: the parameters that are trained on records.
    """

    def __init__(
        self, module: LightningModule, optimizers: Sequence[Optimizer], trained: Sequence[Tensor]
    ) -> None:
        self._module, self._losses = module, list[Tensor]()
        self._stills = [
            StillOptimizer(each, partial(self._step, place), module)
            for place, each in enumerate(optimizers)
        ]
        wanted = set(map(id, trained))
        places = [i for i, each in enumerate(self._stills) if wanted & set(map(id, _of(each)))]
        self._private = places[0] if places else 0
        self._waiting: WaitingLosses | None = None
        if len(self._stills) > 1:
            public = [p for i, o in enumerate(self._stills) if i != self._private for p in _of(o)]
            self._waiting = WaitingLosses(
                [p for p in _of(self._stills[self._private]) if p.requires_grad],
                [p for p in public if p.requires_grad],
            )
        self._released: tuple[Tensor | None] | None = None  # the private one has stepped
        self.public_steps: list[PublicStep] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the module step and go back by these, inside."""
        own, module = vars(self._module), self._module
        shown = self._stills if len(self._stills) > 1 else self._stills[0]
        count = len(module.trainer.lr_scheduler_configs)
        still = _StillScheduler(self._stills)
        replaced: dict[str, Any] = {
            "optimizers": lambda use_pl_optimizer=True: shown,
            "lr_schedulers": lambda: [still] * count if count > 1 else still,
            "manual_backward": self._note,
            "clip_gradients": _ignore,
        }
        if len(self._stills) == 1:
            replaced |= {"toggle_optimizer": _ignore, "untoggle_optimizer": _ignore}
        before = {name: own[name] for name in replaced if name in own}
        own.update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                del own[name]
            own.update(before)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of all optimizers, as the module left them."""
        groups = [group for each in self._stills for group in each.param_groups]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def _step(self, place: int) -> None:
        if self._waiting is None:
            return
        if place == self._private:
            self._released = self._released or (self._waiting.take(),)
            return
        gradients = (p.grad for p in _of(self._stills[place]))
        found = tuple(None if each is None else each.detach().clone() for each in gradients)
        self.public_steps.append(PublicStep(place, found))

    def _note(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._waiting is None:
            self._losses.append(loss)
        elif loss.requires_grad:
            waits = self._released is None and self._waiting.reaches_private(loss)
            self._waiting.add(loss, waits=waits)

    @property
    def loss(self) -> Tensor | None:
        """The loss that the private optimizer steps by; None if there is none."""
        if self._waiting is not None:
            self._released = self._released or (self._waiting.take(),)
            return self._released[0]
        return sum(self._losses[1:], self._losses[0]) if self._losses else None


def _of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
