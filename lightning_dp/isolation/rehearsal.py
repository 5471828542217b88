"""Whole training steps of a copy of a model, with its own hooks and callbacks, in Lightning's order."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_dp._training_step import call_training_step
from lightning_dp._user_code import plain_function
from lightning_dp.gradients import RecordPasses
from lightning_dp.isolation.answers import Answer, answer_about
from lightning_dp.isolation.live_schedulers import LiveSchedulers
from lightning_dp.isolation.model_copies import empty
from lightning_dp.isolation.nesting import copied
from lightning_dp.isolation.overrides import (
    Deadline,
    backward_loss,
    configure_clipping,
    modes_of,
    moves_weights,
    optimize,
    schedule,
    zero_gradients,
)
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.prepared import NoLoss, begin, loss_of, prepared, show_trainer
from lightning_dp.isolation.randomness import seed
from lightning_dp.isolation.stand_in_optimizers import ByHand, Stills, give_optimizers
from lightning_dp.isolation.stand_ins import StandInTrainer

__all__ = ["Rehearsal", "rehearsal"]

_PERIOD = 4099  # of the random vector that stands for gradients: a prime, so that rows differ

_SECONDS = 2.0  # of validation

_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "lightning",
    "lightning_dp",
    "pytorch_lightning",
    "torchmetrics",
}


@contextlib.contextmanager
def rehearsal(passes: Passes) -> Iterator[Rehearsal]:
    """Make a copy of a model and of the user's callbacks, which is gone afterwards.

    Both are copied together, so that what they share, and what they hold of the Trainer, is the
    same in the copies.
    """
    trainer = StandInTrainer(passes.trainer, passes.now)
    stills = passes.stills_of(passes.module, moves=moves_weights(passes.module))
    module, callbacks, memo = _copies(passes, trainer, stills)
    schedulers = LiveSchedulers(passes.trainer, memo)
    module = show_trainer(prepared(module), trainer)
    try:
        yield Rehearsal(passes, module, trainer, stills, schedulers, callbacks)
    finally:
        empty(module)
        passes.put_back()


class Rehearsal:
    """Steps of one copy: gradients per record, then the hooks around them in Lightning's order.

    All that follows the backward pass is the same in each rehearsal, whatever the records: ``p.grad``
    holds a fixed random vector. Optimizers move weights only where ``optimizer_step`` is the
    module's own. A hook that raises here is left
    out, since not everything of a Trainer is there.

    Args:
        passes: whose model it is.
        module: the copy, which nobody else uses.
        trainer: what it sees of its Trainer.
        stills: what it sees of its optimizers, with its parameters.
        schedulers: copies that change what these hold.
        callbacks: copies of the user's own.
    """

    def __init__(
        self,
        passes: Passes,
        module: LightningModule,
        trainer: StandInTrainer,
        stills: Stills,
        schedulers: LiveSchedulers,
        callbacks: Sequence[Callback],
    ) -> None:
        self.module, self.trainer, self.callbacks = module, trainer, callbacks
        self._passes = passes
        self._batch_idx = passes.now.batch_idx
        parameters = dict(module.named_parameters())
        self._trained = [parameters[name] for name in passes.trained]
        self.optimizer = stills.optimizers[stills.private]
        self.scheduler = give_optimizers(module, trainer, stills.optimizers)
        self.scheduler.on_step, self._schedulers = schedulers.step, schedulers
        self.settings: list[str] = []  # of each step
        self.steering: list[str] = []  # the run, after each step
        self._used: list[Any] = []
        self._by_hand = ByHand(module, stills, self.scheduler)
        if passes.now.is_pretended:
            begin(module, passes.now)
            self._callback_hook("on_train_epoch_start")

    def step(self, batch: Any, n: int, engine: RecordPasses) -> Answer:
        """Make one step; as :meth:`Passes.run`, with all hooks."""
        answers: list[Answer] = []

        def run() -> Any:
            outputs: list[Any] = []

            def forward(batch: Any) -> Any:
                loss, output = self._forward(batch)
                return {**output, "loss": loss} if isinstance(output, Mapping) else loss

            with self._passes.valid_labels():
                gradients = engine.run(forward, batch, n, see=outputs.append)
            answers.append(answer_about(gradients, self._trained, n))
            return outputs[-1]

        self._make(batch, run)
        return answers[0]

    def forward_only(self, batch: Any) -> None:
        """Make a step without a backward pass."""

        def run() -> Any:
            with self._passes.valid_labels():
                return self._forward(batch)[1]

        self._make(batch, run)

    def engine(self) -> RecordPasses:
        """Attach the gradient engine to the copy, for all its steps."""
        return self._passes.attached(self.module, self._trained, loss_graph_check=False)

    def _make(self, batch: Any, run: Callable[[], Any]) -> None:
        """Make a step in Lightning's order, of which ``run`` is the forward and backward pass."""
        if not self.trainer.steps_made:
            seed()  # once: what a step draws may depend on its records, and moves the next
        if -1 in self._hook("on_train_batch_start", batch, self._batch_idx):
            raise NoLoss("on_train_batch_start leaves out the batch")
        if self.module.automatic_optimization:
            output = optimize(
                self.module,
                self.trainer,
                self._batch_idx,
                self.optimizer,
                lambda: self._with_gradients(run),
            )
        else:
            output = run()
        self._schedule("step")
        self.trainer.steps_made += 1
        self._hook("on_train_batch_end", output, batch, self._batch_idx)
        self._note()
        self._batch_idx += 1

    def _with_gradients(self, run: Callable[[], Any]) -> Any:
        """Run, then put known gradients where the optimizer finds them."""
        output = run()
        self._hook("on_after_backward")
        generator = torch.Generator().manual_seed(self.trainer.steps_made)
        numbers = torch.randn(_PERIOD, generator=generator)
        for param in self._trained:
            param.grad = _repeated(numbers, param)
        self._hook("on_before_optimizer_step", self.optimizer)
        configure_clipping(self.module, self.optimizer, self.trainer)
        looked_at = self._trained if self._may_edit else []
        self._used = [None if p.grad is None else _checksum(p.grad) for p in looked_at]
        return output

    def _forward(self, batch: Any) -> tuple[Tensor, Any]:
        """Run everything before the backward pass; return the loss and what a Trainer makes of it."""
        is_by_hand = not self.module.automatic_optimization
        self._by_hand.forget()
        output = call_training_step(self.module, batch, self._batch_idx)
        loss = loss_of(output, self._by_hand if is_by_hand else None)
        if not is_by_hand:
            self._hook("on_before_zero_grad", self.optimizer)
            zero_gradients(self.module, self.trainer, self._batch_idx, self.optimizer)
            self._hook("on_before_backward", loss)
        for param in self._trained:
            param.grad = None
        kept = dict(output) if isinstance(output, Mapping) else {}
        kept |= {} if is_by_hand else {"loss": loss.detach().clone()}
        return backward_loss(self.module, loss), kept

    def _note(self) -> None:
        """Remember what steers the run, and what the optimizer uses."""
        self.settings.append(self._settings())
        self.steering.append(self.trainer.steering())

    @property
    def _may_edit(self) -> bool:
        """True if there is code of the user's that could change gradients before the optimizer."""
        hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
        own = (getattr(self.module, name) for name in hooks)
        base = [getattr(LightningModule, name) for name in hooks]
        return bool(self.callbacks) or [getattr(f, "__func__", None) for f in own] != base

    def _settings(self) -> str:
        """Return all that the optimizer uses: checksums of gradients, rates, schedulers' inputs."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        asked = self.optimizer.steps, self.scheduler.steps, self._by_hand.clipped
        return repr((self._used, groups, asked, self.trainer.rules(), modes_of(self.module)))

    def _schedule(self, interval: str) -> None:
        """Step the schedulers that Lightning would step now."""
        if is_overridden("lr_scheduler_step", self.module):
            schedule(self.module, self.trainer)
        elif self.module.automatic_optimization:
            self._schedulers.step(interval)

    def new_epoch(self, batch: Any = None) -> None:
        """End the epoch and begin the next one.

        Args:
            batch: to validate on before, if the Trainer validates.
        """
        if batch is not None and self._passes.validates:
            self._validate(batch)
        with contextlib.suppress(Exception):  # a metric that cannot be averaged
            self.trainer.end_epoch()
        self._hook("on_train_epoch_end")
        self.trainer.epochs_made += 1
        self._batch_idx = 0
        self._schedule("epoch")
        self._hook("on_train_epoch_start")
        self._note()

    def _validate(self, batch: Any) -> None:
        """Validate on one batch, in Lightning's order; what takes long is broken off."""
        module = self.module
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        with torch.no_grad(), Deadline(_SECONDS):
            for name in ("on_validation_start", "on_validation_epoch_start"):
                self._hook(name)
            self._hook("on_validation_batch_start", batch, 0)
            output: Any = None
            with contextlib.suppress(Exception), self._passes.valid_labels():
                output = module.validation_step(copied(batch), 0)
            self._hook("on_validation_batch_end", output, batch, 0)
            for name in ("on_validation_epoch_end", "on_validation_end"):
                self._hook(name)
        for part, mode in modes:
            part.training = mode

    def _hook(self, name: str, *args: Any) -> list[Any]:
        """Call a hook of the callbacks and of the module; return what it returns."""
        self._callback_hook(name, *args)
        with contextlib.suppress(Exception), self._passes.valid_labels():
            return [value for value in [getattr(self.module, name)(*args)] if type(value) is int]
        return []

    def _callback_hook(self, name: str, *args: Any) -> None:
        for callback in self.callbacks:
            if not _is_users_own(callback, name):
                continue  # Lightning's save files, print and stop runs
            with contextlib.suppress(Exception), self._passes.valid_labels():
                getattr(callback, name)(self.trainer, self.module, *args)

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint after all of the user's code that adds to it; nothing if some raises."""
        try:
            for number, callback in enumerate(self.callbacks):
                if _is_users_own(callback, "on_save_checkpoint"):
                    callback.on_save_checkpoint(self.trainer, self.module, checkpoint)  # type: ignore[arg-type]
                if _is_users_own(callback, "state_dict"):
                    name = f"{type(callback).__name__} {number}"
                    checkpoint["callbacks"][name] = callback.state_dict()
            self.module.on_save_checkpoint(checkpoint)
        except Exception:  # it needs a real Trainer
            return {}
        return checkpoint


def _copies(
    passes: Passes, trainer: StandInTrainer, stills: Stills
) -> tuple[LightningModule, list[Callback], dict[int, Any]]:
    """Copy a model and the user's callbacks; return also what else stands for what.

    Args:
        stills: stand for the optimizers wherever these are held; they get the copy's parameters.
    """
    real = passes.trainer
    own = [each for each in passes.callbacks if _is_users(each)]
    memo: dict[int, Any] = {}
    if real is not None:
        shared = (real.train_dataloader, *real.loggers)
        memo = {id(each): each for each in shared} | {id(real): trainer}
        memo |= {id(real.strategy): trainer.strategy} | stills.in_place_of(real.optimizers)
    twin = passes.copied(memo)
    stills.exchange(memo)
    for callback in own:
        if id(callback) not in memo and passes.shares(callback):
            trainer.copied_callbacks[id(callback)] = callback  # put back afterwards
        else:
            trainer.copied_callbacks[id(callback)] = _copied(callback, memo)
    return twin, list(trainer.copied_callbacks.values()), memo


def _copied(callback: Callback, memo: dict[int, Any]) -> Callback:
    """Return a deep copy of a callback, which shares what cannot be copied: a file, a lock."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(callback, memo)
    twin = memo[id(callback)] = copy.copy(callback)
    for name, value in vars(callback).items():
        with contextlib.suppress(Exception):
            vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


def _repeated(numbers: Tensor, like: Tensor) -> Tensor:
    """Return the same few numbers over and over, in the shape of a parameter."""
    times = -(-like.numel() // len(numbers))
    return numbers.to(like.dtype).repeat(times)[: like.numel()].view(like.shape)


def _checksum(gradient: Tensor) -> tuple[complex, float]:
    return complex(gradient.sum()), float(torch.linalg.vector_norm(gradient))


def _is_users(callback: Callback) -> bool:
    """Tell whether a callback, or what it makes of one of Lightning's, is the user's."""
    if isinstance(callback, LambdaCallback):
        return True
    kinds = type(callback).__mro__
    is_apart = isinstance(callback, Checkpoint) or any(
        _root(kind) == "lightning_dp" for kind in kinds
    )
    return _root(kinds[0]) not in _LIBRARIES and not is_apart


def _is_users_own(callback: Callback, hook: str) -> bool:
    """Tell whether the user wrote what a hook of a callback calls."""
    function = plain_function(getattr(callback, hook, None))
    return function is not None and _root(function) not in _LIBRARIES


def _root(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]
