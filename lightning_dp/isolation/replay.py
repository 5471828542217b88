"""One run of some samples, from the ``collate_fn`` to their gradients, that leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_dp.boundary import Query
from lightning_dp.functional import full_precision
from lightning_dp.gradients import RecordPasses, Replay, UnsupportedModelError
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.batches import Singles, is_differentiable, loss_in
from lightning_dp.gradients.graph import WaitingLosses
from lightning_dp.gradients.parameter_sum import BookkeptGradients
from lightning_dp.gradients.side_effects import NotedCalls
from lightning_dp.gradients.snapshot import RandomState, Snapshot, ignore, restored, with_attributes
from lightning_dp.isolation.comparison import (
    Call,
    GradientSample,
    owners_in,
    rows_in,
    watch_calls,
)
from lightning_dp.isolation.state import Marks

__all__ = [
    "HOOKS_OF_STEP",
    "Pipeline",
    "PublicStep",
    "Run",
    "Runner",
    "StepAsRun",
    "without_dropout",
]

HOOKS_OF_STEP = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
)
"""The hooks of a module that each step calls behind ``training_step``, in their order.

``on_before_optimizer_step`` reads the private gradient, and runs before it does in earnest.
"""


@dataclass(frozen=True)
class Pipeline:
    """The way of samples through the user's code.

    Args:
        collate: makes a batch of a list of them, which stay as they are.
        transfer: the hooks through which a batch goes to the device.
        training_step: returns what the module's does for a batch.
        batch_idx: of the batch in its epoch.
        made_by: the user's code that makes a batch, in words.
        elsewhere: ``training_step`` for another physical batch of the step, in which the samples might
            have been if there were others before them; None where no others decide it.
    """

    collate: Callable[[list[Any]], Any]
    transfer: Callable[[Any], Any]
    training_step: Callable[[Any], Any]
    batch_idx: int = 0
    made_by: str = ""
    elsewhere: Callable[[Any], Any] | None = None


@dataclass
class Run:
    """The results of one run; sensitive.

    Args:
        batch: as ``training_step`` took it.
        samples: that it began with.
        gradients: what is compared of those of some samples; None if there are none.
        start, end: what the module keeps before, and behind the backward pass and the hooks; no end
            if a hook raised.
        drawn: the random states when the loss was there, or the private optimizer stepped by hand.
        has_drawn: random numbers were drawn.
        public_steps: of public optimizers.
        settings: of optimizers as the module leaves them, where it steps them itself or has hooks.
        given: what the module keeps when its batch is made, where records run alone.
        written: names of buffers and weights that it wrote to.
        calls: of modules, if they were watched.
        hook_failed: the hook of the module that raised, in words, or "".
    """

    batch: Any = field(repr=False)
    samples: Sequence[Any] = field(repr=False)
    gradients: GradientSample | None = field(default=None, repr=False)
    start: Snapshot | None = field(default=None, repr=False)
    end: Snapshot | None = field(default=None, repr=False)
    given: Snapshot | None = field(default=None, repr=False)
    drawn: RandomState | None = field(default=None, repr=False)
    has_drawn: bool = False
    public_steps: tuple[PublicStep, ...] = field(default=(), repr=False)
    settings: list[dict[str, Any]] = field(default_factory=list, repr=False)
    written: frozenset[str] = frozenset()
    calls: tuple[Call, ...] = field(default=(), repr=False)
    hook_failed: str = ""

    @property
    def rows(self) -> int:
        """The number of rows in its batch."""
        return len(rows_in(self.samples))

    def note_draws(self, begun: RandomState) -> None:
        """Note whether it has drawn numbers, from global generators or from the module's own."""
        if self.drawn is not None and self.end is not None and self.start is not None:
            moved = self.start.differences(self.end)
            own = any(each.kind == "random" for each in moved)
            self.has_drawn = own or not self.drawn.is_same(begun)

    def note_writes(self, since: Marks, module: nn.Module) -> None:
        """Note the names of buffers and weights that were written to."""
        self.written = frozenset(Marks.of(module, trained=True).changed_since(since))


class StepAsRun:
    """The fit's own step as one of the runs: nothing is run for it.

    Args:
        runner: runs the others.
        batch: that ``training_step`` is about to take.
        samples: of the batch, read again.
        look: returns what is compared of the gradients.
    """

    def __init__(
        self,
        runner: Runner,
        batch: Any,
        samples: Sequence[Any],
        look: Callable[[BookkeptGradients], GradientSample],
    ) -> None:
        self._runner, self._look = runner, look
        self._start, self._marks = RandomState(runner.device), Marks.of(runner.module, trained=True)
        self.run = Run(batch, samples, start=runner.snapshot())
        """Complete when the gradients were seen."""

    def after_forward(self) -> None:
        """Note the random numbers that the forward pass left."""
        self.run.drawn = RandomState(self._runner.device)

    def after_backward(self, gradients: AbstractPerSampleGradients) -> None:
        """Note what the passes left, and look at the gradients, which stay as they are.

        Not if there are others than the records'.
        """
        run = self.run
        if isinstance(gradients, BookkeptGradients) and gradients.count == len(run.samples):
            run.end = self._runner.snapshot()
            run.note_draws(self._start)
            run.note_writes(self._marks, self._runner.module)
            run.gradients = self._look(gradients)


class Runner:
    """Runs variants of a batch, each from the same state of the module and of random numbers.

    Args:
        module: in training mode, with or without a Trainer.
        passes: its gradient engine.
        params: the trained parameters.
        pipeline: the user's code around it.
        device: where the model runs.
        count: does once what records that ran alone, but together, have logged and counted.
    """

    def __init__(
        self,
        module: LightningModule,
        passes: RecordPasses,
        params: Sequence[nn.Parameter],
        pipeline: Pipeline,
        device: torch.device,
        count: Callable[[], None] = ignore,
    ) -> None:
        self.module, self.passes, self.params = module, passes, params
        self.pipeline, self.device, self._count = pipeline, device, count
        self.has_drawn = False
        """The latest run drew random numbers."""
        self.without_dropout = False
        """Let no layer of torch drop anything, so that runs of fewer samples can be compared, too."""
        self._training_step = pipeline.training_step
        self.hooks: tuple[str, ...] = HOOKS_OF_STEP
        """The hooks of the module that follow ``training_step``, in their order."""

    @cached_property
    def _noted(self) -> NotedCalls:
        return NotedCalls(self.module)

    def run(
        self,
        samples: Sequence[Any],
        query: Query,
        start: RandomState,
        look: Callable[[AbstractPerSampleGradients], GradientSample],
        *,
        watched: bool = False,
    ) -> Run:
        """Run samples; afterwards all is as it was.

        Args:
            samples: are copied.
            query: says which gradients.
            start: the random numbers.
            look: returns what is compared of the gradients.
            watched: keep what goes in and out of modules.

        Raises:
            UnsupportedModelError: ours, about the model.
            Exception: what the user's code raises.
        """
        module, isolates, calls = self.module, self.passes.engine.isolates, list[Call]()
        watch = watch_calls(module, calls) if watched and not isolates else nullcontext()
        with self._traceless(start) as begun, watch:
            run = Run(self._batch(samples), samples, start=begun)
            run.given = Snapshot.of(module) if isolates else None
            marks = Marks.of(module, trained=True)
            self._differentiate(run, query, start, look)
            run.note_writes(marks, module)
            run.calls = tuple(calls)
        return run

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Run samples, inside, as in another physical batch of the step, if there is one."""
        self._training_step = self.pipeline.elsewhere or self._training_step
        try:
            yield
        finally:
            self._training_step = self.pipeline.training_step

    def has_plain_gradient(self, samples: Sequence[Any]) -> bool | None:
        """Return True if samples together have a gradient in ordinary training; None without a loss."""
        start = RandomState(self.device)
        with self._traceless(start), torch.enable_grad():
            batch = self._batch(samples)
            loss = loss_in(self._forward(batch, Run(batch, samples), [], start))
            if not is_differentiable(loss):
                return None
            found = torch.autograd.grad(loss, self.params, allow_unused=True)
        return any(each is not None and bool(each.any()) for each in found)

    def batch_of(self, samples: Sequence[Any], start: RandomState) -> Any:
        """Return the batch that a run of these samples begins with."""
        with self._traceless(start):
            return self._batch(samples)

    def _batch(self, samples: Sequence[Any]) -> Any:
        return self.pipeline.transfer(self.pipeline.collate(rows_in(samples)))

    def _dropout(self) -> AbstractContextManager[None]:
        """Return a context in which records that run alone, whatever their group, drop nothing."""
        is_off = self.passes.engine.isolates or self.without_dropout
        return without_dropout(self.module) if is_off else nullcontext()

    @contextmanager
    def _traceless(self, start: RandomState) -> Iterator[Snapshot]:
        begun = restored(self.module, parameters=self.runs_hooks, global_random=False)
        with begun as before, start.again():
            yield before

    def snapshot(self) -> Snapshot:
        """Return the state of now."""
        return Snapshot.of(self.module, parameters=self.runs_hooks)

    @property
    def runs_hooks(self) -> bool:
        """True if a hook of the module's own follows the step, which may write to weights."""
        return any(is_overridden(name, self.module) for name in self.hooks)

    def _differentiate(
        self,
        run: Run,
        query: Query,
        start: RandomState,
        look: Callable[[AbstractPerSampleGradients], GradientSample],
    ) -> None:
        """Fill in the gradients of a run, and what it leaves."""
        outputs: list[Any] = []
        met: dict[int, Any] = {}  # batches of records that run one after the other

        def forward(batch: Any) -> Any:
            run.drawn = None
            noting: AbstractContextManager[None] = nullcontext()
            if self.passes.engine.one_record and id(batch) not in met:
                if not met:  # what a run that raised has left
                    self._noted.forget()
                noting, met[id(batch)] = self._noted.noting(torch.tensor([len(met)])), batch
            with noting:
                output = self._forward(batch, run, outputs, start)
            run.drawn = run.drawn or RandomState(self.device)
            return output

        def see(output: Any) -> None:
            outputs[:] = outputs or [output]
            if self.passes.engine.runs_parts:
                self._count()
            run.end = self.snapshot()  # hooks of the backward pass may have written, too

        owners = owners_in(run.samples)
        replay = Replay(forward, run.batch, len(run.samples), see=see, owners=owners)
        try:
            # Batches of other sizes may be rounded by other kernels.
            with self._dropout(), full_precision(self.device):
                found = self._gradients(query, replay, run.samples)
            run.gradients = None if found is None else look(found)
        finally:
            self.passes.drop()
        if run.end and self.passes.engine.one_record:  # after each of which all is as before
            self._noted.do()
            run.drawn, run.end = start, self.snapshot()
        run.note_draws(start)
        self.has_drawn = run.has_drawn
        if run.end:
            none = torch.zeros((), device=self.device)
            start.restore()  # hooks draw alike, however many numbers the samples have drawn
            run.end = self._after_hooks(run, run.end, outputs[0] if outputs else none)

    def _gradients(
        self, query: Query, replay: Replay, samples: Sequence[Any]
    ) -> AbstractPerSampleGradients | None:
        """Return the gradients of samples; each in its own batch, where an engine wants that."""
        passes = self.passes
        if not passes.engine.one_record:
            try:
                return passes.gradients(query, replay)
            except UnsupportedModelError:
                if not passes.engine.one_record:  # to which it came just now
                    raise
        singles = Singles(self._batch([sample]) for sample in samples)
        return passes.gradients(query, replace(replay, batch=singles, owners=None))

    def _forward(self, batch: Any, run: Run, outputs: list[Any], start: RandomState) -> Any:
        """Return what ``training_step`` does; or the loss that it goes back from by hand."""
        module = self.module

        def begin_public() -> None:  # public steps draw alike, however many numbers records drew
            run.drawn = RandomState(self.device)
            start.restore()

        if module.automatic_optimization:
            return self._training_step(batch)
        by_hand = ByHand(module, module.trainer.optimizers, self.params, begin_public)
        with by_hand.in_place():
            outputs[:] = [self._training_step(batch)]
        run.public_steps, run.settings = tuple(by_hand.public_steps), by_hand.settings
        return by_hand.loss

    def _after_hooks(self, run: Run, end: Snapshot, output: Any) -> Snapshot | None:
        """Return the state behind the module's own hooks from ``training_step`` to the next step."""
        module = self.module
        hooks = [name for name in self.hooks if is_overridden(name, module)]
        if not hooks:
            return end
        end.restore()
        loss = loss_in(output)
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        outputs = {**(output if isinstance(output, Mapping) else {}), "loss": loss}
        loss = torch.zeros(()) if loss is None else loss
        batch_idx, epoch = self.pipeline.batch_idx, module.current_epoch
        optimizers = getattr(module._trainer, "optimizers", [])
        still = [StillOptimizer(each, ignore, module) for each in optimizers[:1]]
        given = {
            "on_before_backward": [loss],
            "on_train_batch_end": [outputs, run.batch, batch_idx],
        }
        of_optimizers: dict[str, list[Any]] = {
            "on_before_zero_grad": still,
            "optimizer_zero_grad": [epoch, batch_idx, *still],
            "configure_gradient_clipping": [*still, None, None],
            "optimizer_step": [epoch, batch_idx, *still, lambda: loss],
            "lr_scheduler_step": [_StillScheduler(still), None],
        }
        for name in hooks:
            if name in of_optimizers:  # which may not be able to take these
                with (
                    suppress(Exception),
                    with_attributes(module, optimizers=lambda *_, **__: still[0]),
                ):
                    getattr(module, name)(*of_optimizers[name])
                continue
            try:
                getattr(module, name)(*given.get(name, ()))
            except Exception as error:
                run.hook_failed = f"{name} raised {type(error).__name__}"
                return None
        run.settings = run.settings or _settings_of(still)
        return Snapshot.of(module, parameters=True)


_SDPA_DROPOUT = 4  # the place of dropout_p among the arguments
_DROP = (_DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)  # by chance, while they train


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
    """A scheduler that does nothing, and gives the optimizers' learning rates."""

    last_epoch = 0

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self.given: list[Any] = []

    def step(self, *args: Any) -> None:
        """Note the metric that it is given."""
        self.given += [x.detach().clone() if isinstance(x, Tensor) else x for x in args]

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
        after_private: is called when their optimizer has stepped, if there are public ones.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        trained: Sequence[Tensor],
        after_private: Callable[[], None],
    ) -> None:
        self._module, self._losses, self._after_private = module, list[Tensor](), after_private
        self._stills = [
            StillOptimizer(each, partial(self._step, place), module)
            for place, each in enumerate(optimizers)
        ]
        wanted = set(map(id, trained))
        places = [i for i, each in enumerate(self._stills) if wanted & set(map(id, _of(each)))]
        self._private = places[0] if places else 0
        self._waiting: WaitingLosses | None = None  # one optimizer's losses are answered at once
        if len(self._stills) > 1:
            public = [p for i, o in enumerate(self._stills) if i != self._private for p in _of(o)]
            self._waiting = WaitingLosses(
                [p for p in _of(self._stills[self._private]) if p.requires_grad],
                [p for p in public if p.requires_grad],
            )
        self._scheduler = _StillScheduler(self._stills)
        self._released: tuple[Tensor | None] | None = None  # the private one has stepped
        self.public_steps: list[PublicStep] = []

    def in_place(self) -> AbstractContextManager[None]:
        """Let the module step and go back by these, inside."""
        module = self._module
        shown = self._stills if len(self._stills) > 1 else self._stills[0]
        count = len(module.trainer.lr_scheduler_configs)
        still = self._scheduler
        replaced: dict[str, Any] = {
            "optimizers": lambda use_pl_optimizer=True: shown,
            "lr_schedulers": lambda: [still] * count if count > 1 else still,
            "manual_backward": self._note,
            "clip_gradients": self._clip,
        }
        if len(self._stills) == 1:
            replaced |= {"toggle_optimizer": ignore, "untoggle_optimizer": ignore}
        return with_attributes(module, **replaced)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of all optimizers, as the module left them, and what schedulers were given."""
        return [*_settings_of(self._stills), {"given": self._scheduler.given}]

    def _step(self, place: int) -> None:
        if self._waiting is None:
            return
        if place == self._private:
            if self._released is None:
                self._released = (self._waiting.take(),)
                self._after_private()
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

    def _clip(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip what a public optimizer steps by; the private one has no gradients here."""
        if self._waiting is not None and optimizer is not self._stills[self._private]:
            clip: Any = type(self._module).clip_gradients
            clip(self._module, optimizer, gradient_clip_val, gradient_clip_algorithm)

    @property
    def loss(self) -> Tensor | None:
        """The loss that the private optimizer steps by; None if there is none."""
        if self._waiting is not None:
            self._released = self._released or (self._waiting.take(),)
            return self._released[0]
        return sum(self._losses[1:], self._losses[0]) if self._losses else None


def _settings_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    groups = [group for each in optimizers for group in each.param_groups]
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
