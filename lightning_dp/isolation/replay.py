"""One run of some samples, from the ``collate_fn`` to their gradients, that leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_dp._snapshot import RandomState, Snapshot, restored
from lightning_dp.boundary import Query
from lightning_dp.functional import full_precision
from lightning_dp.gradients import RecordPasses, Replay, UnsupportedModelError
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.batches import Singles, is_differentiable, loss_in
from lightning_dp.gradients.parameter_sum import BookkeptGradients
from lightning_dp.isolation.comparison import GradientSample
from lightning_dp.isolation.diagnosis import Call, watch_calls
from lightning_dp.isolation.manual import ByHand, PublicStep, without_dropout
from lightning_dp.isolation.state import Marks

__all__ = ["Pipeline", "Run", "Runner", "StepAsRun"]


@dataclass(frozen=True)
class Pipeline:
    """The way of samples through the user's code.

    Args:
        collate: makes a batch of a list of them, which stay as they are.
        transfer: the hooks through which a batch goes to the device.
        training_step: returns what the module's does for a batch.
        batch_idx: of the batch in its epoch.
        made_by: the user's code that makes a batch, in words.
    """

    collate: Callable[[list[Any]], Any]
    transfer: Callable[[Any], Any]
    training_step: Callable[[Any], Any]
    batch_idx: int = 0
    made_by: str = ""


@dataclass
class Run:
    """The results of one run; sensitive.

    Args:
        batch: as ``training_step`` took it.
        size: the number of samples.
        samples: that it began with.
        gradients: what is compared of those of some samples; None if there are none.
        start, end: what the module keeps before and afterwards; no end if a hook raised.
        drawn: the random states when the loss was there.
        has_drawn: random numbers were drawn.
        public_steps: of public optimizers.
        settings: of optimizers that the module steps itself.
        given: what the module keeps when its batch is made, where records run alone.
        written: names of buffers and weights that it wrote to.
        calls: of modules, if they were watched.
        hook_failed: the hook of the module that raised, in words, or "".
    """

    batch: Any = field(repr=False)
    size: int = 0
    samples: Sequence[Any] = field(default=(), repr=False)
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


def _has_drawn(run: Run, start: RandomState, end: Snapshot | None) -> bool:
    """Return True if a run has drawn numbers, from global generators or from the module's own."""
    if run.drawn is None or end is None or run.start is None:
        return False
    if not run.drawn.is_same(start):
        return True
    return any(each.kind == "random" for each in run.start.differences(end))


class Writes:
    """The buffers and weights that a run writes to.

    Args:
        module: the whole model.
        params: the trained parameters.
    """

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self._module, self._params = module, params
        self._marks, self._versions = Marks.of(module), [param._version for param in params]

    def names(self) -> frozenset[str]:
        """Return the dotted names of those that were written to since."""
        pairs = zip(self._params, self._versions, strict=True)
        moved = {id(param) for param, version in pairs if param._version != version}
        trained = (name for name, param in self._module.named_parameters() if id(param) in moved)
        return frozenset((*Marks.of(self._module).changed_since(self._marks), *trained))


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
        self._start, self._writes = RandomState(runner.device), Writes(runner.module, runner.params)
        self.run = Run(batch, len(samples), samples, start=runner.snapshot())
        """Complete when the gradients were seen."""

    def after_forward(self) -> None:
        """Note what the forward pass left."""
        run = self.run
        run.drawn, run.end = RandomState(self._runner.device), self._runner.snapshot()
        run.has_drawn = _has_drawn(run, self._start, run.end)
        run.written = self._writes.names()

    def after_backward(self, gradients: AbstractPerSampleGradients) -> None:
        """Look at the gradients, which stay as they are; if there are others than the records', not."""
        if isinstance(gradients, BookkeptGradients) and gradients.count == self.run.size:
            self.run.gradients = self._look(gradients)


class Runner:
    """Runs variants of a batch, each from the same state of the module and of random numbers.

    Args:
        module: in training mode, with or without a Trainer.
        passes: its gradient engine.
        params: the trained parameters.
        pipeline: the user's code around it.
        device: where the model runs.
    """

    def __init__(
        self,
        module: LightningModule,
        passes: RecordPasses,
        params: Sequence[nn.Parameter],
        pipeline: Pipeline,
        device: torch.device,
    ) -> None:
        self.module, self.passes, self.params = module, passes, params
        self.pipeline, self.device = pipeline, device
        self._earlier: Snapshot | None = None  # of the latest run's beginning
        self.has_drawn = False
        """The latest run drew random numbers."""
        self.without_dropout = False
        """Let no layer of torch drop anything, so that runs of fewer samples can be compared, too."""
        self.hooks: tuple[str, ...] = ("on_train_batch_end",)
        """The hooks of the module that follow the step, in their order."""

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
        module = self.module
        with self._traceless(start) as begun, ExitStack() as stack:
            run = Run(self._batch(samples), len(samples), samples, start=begun)
            run.given = Snapshot.of(module) if self.passes.watched.engine.isolates else None
            writes, calls = Writes(module, self.params), list[Call]()
            if watched and not self.passes.watched.engine.isolates:
                stack.callback(watch_calls(module, calls).take_off)
            self._differentiate(run, query, start, look)
            run.written = writes.names()
            run.calls = tuple(calls)
        return run

    def has_plain_gradient(self, samples: Sequence[Any]) -> bool:
        """Return True if samples together have a gradient in ordinary training."""
        with self._traceless(RandomState(self.device)), torch.enable_grad():
            loss = loss_in(self.pipeline.training_step(self._batch(samples)))
            if not is_differentiable(loss):
                return False
            found = torch.autograd.grad(loss, self.params, allow_unused=True)
        return any(each is not None and bool(each.any()) for each in found)

    def batch_of(self, samples: Sequence[Any], start: RandomState) -> Any:
        """Return the batch that a run of these samples begins with."""
        with self._traceless(start):
            return self._batch(samples)

    def _batch(self, samples: Sequence[Any]) -> Any:
        return self.pipeline.transfer(self.pipeline.collate(list(samples)))

    def _dropout(self) -> AbstractContextManager[None]:
        """Return a context in which records that run alone, whatever their group, drop nothing."""
        is_off = self.passes.watched.engine.isolates or self.without_dropout
        return without_dropout(self.module) if is_off else nullcontext()

    @contextmanager
    def _traceless(self, start: RandomState) -> Iterator[Snapshot]:
        earlier = self._earlier
        with (
            restored(self.module, parameters=self.runs_hooks, earlier=earlier) as begun,
            start.again(),
        ):
            self._earlier = begun
            yield begun

    def snapshot(self) -> Snapshot:
        """Return the state of now; what did not change since the latest run is not walked again."""
        return Snapshot.of(self.module, parameters=self.runs_hooks, earlier=self._earlier)

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
        ends: list[Snapshot] = []
        begun = RandomState(self.device)

        def forward(batch: Any) -> Any:
            output = self._forward(batch, run, outputs)
            run.drawn = RandomState(self.device)
            ends[:] = [self.snapshot()]
            return output

        def see(output: Any) -> None:
            outputs[:] = outputs or [output]

        replay = Replay(forward, run.batch, run.size, begun, see)
        try:
            # Batches of other sizes may be rounded by other kernels.
            with self._dropout(), full_precision(self.device):
                found = self._gradients(query, replay, run.samples)
            run.gradients = None if found is None else look(found)
        finally:
            self.passes.watched.drop()
        if ends and self.passes.watched.engine.one_record:  # after each of which all is as before
            run.drawn = start
            ends[:] = [self.snapshot()]
        run.has_drawn = _has_drawn(run, start, ends[0] if ends else None)
        self.has_drawn = run.has_drawn
        if ends:
            none = torch.zeros((), device=self.device)
            run.end = self._after_hooks(run, ends[0], outputs[0] if outputs else none)

    def _gradients(
        self, query: Query, replay: Replay, samples: Sequence[Any]
    ) -> AbstractPerSampleGradients | None:
        """Return the gradients of samples; each in its own batch, where an engine wants that."""
        watched = self.passes.watched
        if not watched.engine.one_record:
            try:
                return self.passes.gradients(query, replay)
            except UnsupportedModelError:
                if not watched.engine.one_record:  # to which it came just now
                    raise
        singles = Singles(self._batch([sample]) for sample in samples)
        return self.passes.gradients(query, replace(replay, batch=singles))

    def _forward(self, batch: Any, run: Run, outputs: list[Any]) -> Any:
        """Return what ``training_step`` does; or the loss that it goes back from by hand."""
        module = self.module
        if module.automatic_optimization:
            return self.pipeline.training_step(batch)
        by_hand = ByHand(module, module.trainer.optimizers, self.params)
        with by_hand.in_place():
            outputs[:] = [self.pipeline.training_step(batch)]
        run.public_steps, run.settings = tuple(by_hand.public_steps), by_hand.settings
        return by_hand.loss

    def _after_hooks(self, run: Run, end: Snapshot, output: Any) -> Snapshot | None:
        """Return the state behind the module's own hooks between this step and the next."""
        module = self.module
        hooks = [name for name in self.hooks if is_overridden(name, module)]
        if not hooks:
            return end
        end.restore()
        loss = loss_in(output)
        loss = loss.detach() if isinstance(loss, Tensor) else loss
        outputs = {**(output if isinstance(output, Mapping) else {}), "loss": loss}
        for name in hooks:
            of_batch = (outputs, run.batch, self.pipeline.batch_idx)
            try:
                getattr(module, name)(*(of_batch if name == "on_train_batch_end" else ()))
            except Exception as error:
                run.hook_failed = f"{name} raised {type(error).__name__}"
                return None
        return Snapshot.of(module, parameters=True)
