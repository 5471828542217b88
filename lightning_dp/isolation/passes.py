"""Passes of batches through copies of a model, and the engine's answer about each record."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from lightning_dp._training_step import call_training_step, loss_in
from lightning_dp.gradients import RecordPasses
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.passes import is_differentiable
from lightning_dp.isolation.ignored import target_means

__all__ = ["Answer", "Call", "NotProbed", "Passes", "same"]


class NotProbed(RuntimeError):
    """Nothing can be said; the message holds no value of any data."""


@dataclass(frozen=True)
class Call:
    """One call of a module, with what went in and came out of it.

    Args:
        name, kind: of the module; "" is the LightningModule itself.
        inputs, outputs: tensors only.
    """

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True)
class Answer:
    """The answer of the gradient engine to one batch.

    Args:
        count: rows that the layers saw.
        norms: of the records that were asked for, shape (m,).
        parts: their weighted sum, one flat tensor per parameter.
        is_random: True if the pass drew random numbers.
        calls: of all modules in the order in which they ended, if they were asked for.
        means: number of means over targets that the loss is made from
            (:mod:`lightning_dp.isolation.ignored`).
        has_class_weights: True if one of them weighs its classes.
    """

    count: int
    norms: Tensor = field(repr=False)
    parts: tuple[Tensor, ...] = field(repr=False)
    is_random: bool = False
    calls: tuple[Call, ...] = field(default=(), repr=False)
    means: int = 0
    has_class_weights: bool = False


class Passes:
    """Runs batches through fresh copies of a model on the CPU, and leaves nothing anywhere.

    Every pass begins with a new deep copy of the model and the same random numbers, so it depends
    on its batch alone; buffers, metrics, attributes and hooks of the model itself are never
    touched. ``log`` and the loggers are mute, the output of ``print`` is dropped, and the global
    random states are put back. On the CPU, since there a number out of range raises an error (on a
    GPU it ends the process), and since products are not rounded to fewer digits.

    Args:
        module: the model, without an engine's hooks on it.
        engine: name of the gradient engine.
        trained: names of the trained parameters.
        trainer: whose public state ``training_step`` may read, or None.
    """

    def __init__(
        self, module: LightningModule, engine: str, trained: Sequence[str], trainer: Trainer | None
    ) -> None:
        self._module, self._engine, self._trained = module, engine, tuple(trained)
        self._trainer = trainer

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Keep all passes inside from printing, and put random states back after them.

        What is inside must catch its exceptions, or they keep the random states as they are.
        """
        with isolate_rng(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield

    def loss(self, batch: Any) -> None:
        """Run the forward pass only. Raises whatever the model raises."""
        with self._copy() as module:
            self._loss(module, batch)

    def written_by(self, batch: Any) -> dict[str, Tensor]:
        """Return the weights and buffers that a forward pass changes, as they are after it."""
        own = dict(_state_of(self._module))
        with self._copy() as module:
            _seed()
            self._loss(module, batch)
            return {
                name: after.detach().clone()
                for name, after in _state_of(module)
                if name not in own or not same(own[name].detach().cpu().to(after.dtype), after)
            }

    def run(self, batch: Any, weights: Tensor, *, watch_modules: bool = False) -> Answer:
        """Run one forward and backward pass.

        Args:
            batch: with n records.
            weights: shape (n,); of the records with weight 0 nothing is said.
            watch_modules: keep what goes in and out of every module.
        """
        with self._copy() as module:
            return self._run(module, batch, weights, watch_modules)

    def _run(
        self, module: LightningModule, batch: Any, weights: Tensor, watch_modules: bool
    ) -> Answer:
        params = [dict(module.named_parameters())[name] for name in self._trained]
        calls: list[Call] = []
        if watch_modules:
            _watch(module, calls)
        passes = RecordPasses(module, params, self._engine)
        noticed: list[tuple[bool, int, bool]] = []  # before the graph is freed
        before = _seed()

        def forward() -> Tensor:
            loss = self._loss(module, batch)
            means = target_means(loss)
            weighs = any(mean.has_class_weights for mean in means)
            noticed.append((before != _state(), len(means), weighs))
            return loss

        gradients = passes.run(forward)
        ((is_random, means, has_class_weights),) = noticed
        count = 0 if gradients is None else gradients.count
        if gradients is None or count != len(weights):
            return Answer(count, torch.zeros(0), (), is_random, tuple(calls))
        norms = gradients.norms().detach()
        total = gradients.weighted_sum(weights.to(norms.dtype)).detach()
        parts = torch.split(total, [param.numel() for param in params])
        return Answer(
            count,
            norms[weights != 0],
            parts,
            is_random,
            tuple(calls),
            means,
            has_class_weights,
        )

    @contextlib.contextmanager
    def _copy(self) -> Iterator[LightningModule]:
        module = copy.deepcopy(self._module).cpu()  # Lightning leaves the trainer out
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters()):
            module.float()
        for part in module.modules():
            if isinstance(part, _DropoutNd):
                part.p = 0.0  # the masks of a smaller batch would be others
        for param in module.parameters():
            param.grad = None
        module.log = _ignore  # type: ignore[method-assign]
        if self._trainer is not None:
            module.trainer = _Mute(self._trainer)  # type: ignore[assignment]
        try:
            yield module
        finally:  # modules are full of cycles: the memory of a dozen copies must not wait for gc
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.new_empty(0)

    def _loss(self, module: LightningModule, batch: Any) -> Tensor:
        by_hand = None if module.automatic_optimization else _ByHand(module)
        loss = loss_in(call_training_step(module, batch, 0))
        if by_hand is not None and (loss := by_hand.loss) is None:
            raise NotProbed(
                "manual optimization: training_step calls no self.manual_backward(loss)"
            )
        if not is_differentiable(loss):
            raise NotProbed("training_step returns no loss")
        return loss


def same(a: Tensor, b: Tensor) -> bool:
    """True if all entries are equal; NaN is equal to itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class _Mute:
    """A Trainer to read from, whose loggers do nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._real = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def loggers(self) -> list[Any]:
        return [DummyLogger() for _ in self._real.loggers]

    @property
    def logger(self) -> Any:
        return DummyLogger() if self._real.loggers else None


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _seed() -> tuple[Any, ...]:
    """Begin with the same random numbers in every pass; CUDA's generators are not touched."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    return _state()


def _state() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


def _watch(module: nn.Module, calls: list[Call]) -> None:
    def tensors(values: Any) -> list[Tensor]:
        if isinstance(values, Mapping):
            values = list(values.values())
        values = values if isinstance(values, list | tuple) else [values]
        return [each.detach().clone() for each in values if isinstance(each, Tensor)]

    def hook(name: str) -> Callable[..., None]:
        def keep(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(
                Call(name, type(part).__name__, tensors(args) + tensors(kwargs), tensors(output))
            )

        return keep

    hooks = ModuleHooks()  # copies that training_step makes are other modules
    for name, part in module.named_modules():
        hooks.add(part, partial(part.register_forward_hook, with_kwargs=True), hook(name))


class _ByHand:
    """Stand-in for the optimizer and the backward pass in manual optimization of a copy of a module.

    Args:
        module: a copy; what it calls to optimize is replaced on it.
    """

    def __init__(self, module: LightningModule) -> None:
        self._losses: list[Tensor] = []
        still = _Still(module.parameters(), {"lr": 0.1})
        module.optimizers = lambda use_pl_optimizer=True: still  # type: ignore[method-assign,assignment]
        module.lr_schedulers = lambda: _Nothing()  # type: ignore[method-assign,assignment,return-value]
        module.manual_backward = self._note  # type: ignore[method-assign]
        for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
            setattr(module, name, _ignore)

    def _note(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._losses.append(loss)

    @property
    def loss(self) -> Tensor | None:
        """The loss that was given to ``manual_backward``; None if none was."""
        return sum(self._losses[1:], self._losses[0]) if self._losses else None


class _Still(Optimizer):
    """An optimizer whose steps change nothing."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside, where LightningOptimizer has it."""
        return self

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()

    def toggle_model(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()


class _Nothing:
    """A learning rate scheduler, or a context, that does nothing."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *unused: object) -> None: ...
