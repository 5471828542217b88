"""The model's side of a private step: from backward passes to a private ``p.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeGuard

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.clipping import AbstractPerSampleGradients, bounded_sum
from lightning_dp.estimators import AbstractEstimator
from lightning_dp.functional import unflatten
from lightning_dp.gradients import (
    AbstractGradientEngine,
    RawGradientGuard,
    attach_engine,
)
from lightning_dp.mechanism import Mechanism
from lightning_dp.query import Pass, Query
from lightning_dp.sampling.loader import Chunk
from lightning_dp.strategies.replay import RandomState, at_point, muted

__all__ = ["OTHER_ROWS", "UNANSWERED", "PrivateStep", "is_differentiable", "trained_parameters"]

UNANSWERED = (
    "{} gave no gradient for a chunk that has records (training_step returned no loss, nothing was "
    "back-propagated, or the loss does not depend on trained layers), and noise alone in its place "
    "would tell which records do that. Let the package zero records whose gradients are not finite: "
    "return the loss as it is, and don't skip batches."
)
OTHER_ROWS = (
    "the model saw more or fewer rows than the batch has records, so a record's gradient cannot be "
    "bounded. The collate_fn must make exactly one row of each record, and the model must keep "
    "records in the first dimension."
)
_TOO_EARLY = (
    "optimizer.step() was called before all chunks of the batch were there. A batch is handed out in "
    "accumulate_grad_batches chunks (with FullBatch(): in batches of the loader's batch_size); step "
    "once, after the last of them."
)


class _NoLoss(Exception):
    """A further pass gave nothing to go back from."""


@dataclass(frozen=True)
class _Replay:
    """What it takes to run a chunk again: its forward pass, the randomness of it, its records."""

    forward: Callable[[], Tensor | None]
    random_state: RandomState | None
    size: int


class PrivateStep:
    """Turns what Lightning does with a batch into answers to the mechanism's query.

    Raw gradients exist only inside the backward pass. Each chunk is answered once, each batch
    released once, and only for the parameters that were there when the fit began.

    Args:
        module: the user's model.
        optimizer: its one optimizer.
        engine: name of the gradient engine.
        device: where the model runs.
        wrap: what stands between the engine and the clipping, if anything.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizer: Optimizer,
        engine: str,
        device: torch.device,
        wrap: Callable[[AbstractGradientEngine], AbstractGradientEngine] = lambda engine: engine,
    ) -> None:
        self.params = trained_parameters(optimizer)
        self._module = module
        self._device = device
        self._engine_name, self._wrap = engine, wrap
        self._engine, self.engine_description = self._attach()
        try:
            self._raw = RawGradientGuard(module.named_parameters(), optimizer)
        except Exception:
            self._engine.detach()
            raise
        self._optimizer = optimizer
        self._all = tuple(module.parameters())
        self._trainable = [param.requires_grad for param in self._all]
        self._chunk: Chunk | None = None
        self._is_answered = False
        self._is_whole = False  # whether all chunks of the batch were handed out
        self._owed = 0  # records that were handed out and not answered for
        self._faults: list[str] = []
        self._suspicions: list[tuple[Tensor, str]] = []  # what is not known before a device is
        self._is_released = False
        self._random_state: RandomState | None = None
        self._kept: list[_Replay] = []  # the chunks of a step that asks several queries

    def _attach(self) -> tuple[AbstractGradientEngine, str]:
        with _without_trainer(self._module):
            engine, description = attach_engine(self._engine_name, self._module, self.params)
        engine.rest()
        return self._wrap(engine), description

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the engine's hooks are on the model; at no other time, so that copies have none."""
        self._engine.wake()
        try:
            yield
        finally:
            self._engine.rest()

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """The model without the engine, between two batches."""
        self._engine.detach()
        try:
            yield
        finally:
            self._engine, self.engine_description = self._attach()

    def begin(self, chunk: Chunk) -> None:
        """The next physical batch is this chunk."""
        if not self._is_answered:
            self._engine.drop()  # what a batch without a backward pass left
        self._chunk, self._is_answered = chunk, False
        if chunk.first:
            self._is_released = False
            self._kept, self._owed, self._faults, self._suspicions = [], 0, [], []
        self._owed += chunk.size
        self._is_whole = chunk.last

    def before_forward(self, mechanism: Mechanism) -> None:
        """Remember the randomness that further passes must share."""
        query = mechanism.query
        if (query is not None and query.runs_again) or _has_rounds(mechanism):
            self._random_state = RandomState(self._device)

    @property
    def runs_backward(self) -> bool:
        """Whether :meth:`backward` takes the place of ``loss.backward()``."""
        return self._engine.runs_backward

    def backward(self, loss: Tensor, query: Query | None, *, keep_graph: bool) -> None:
        """Run the backward pass as the engine does it."""
        is_alone = query is None or len(query.passes) == 1
        self._engine.backward(loss, keep_graph=keep_graph, may_fold=is_alone)

    def answer(
        self, mechanism: Mechanism, scale: float, forward_again: Callable[[], Tensor | None]
    ) -> None:
        """Bound what the backward pass left, and give it to the mechanism.

        Args:
            mechanism: has a step under way.
            scale: undoes a division of the loss.
            forward_again: runs the batch once more and returns its loss.
        """
        if self._is_answered or not mechanism.is_under_way or self._chunk is None:
            raise RuntimeError(
                "Backward ran more than once for one batch, or after its optimizer step: a record "
                "would count twice. Add the losses up and call backward once per batch."
            )
        self._is_answered, touched = True, self._raw.touched()
        if not self._engine.runs_backward and not touched:
            self._engine.drop()  # nothing was back-propagated, so the records stay without an answer
            return
        gradients = self._engine.take(scale, touched)
        if self._chunk.size == 0 or mechanism.query is None:
            return  # the gradient of a stand-in record, or one that nobody asked for, ends here
        if not self._is_of_all(gradients, self._chunk.size):
            return
        replay = _Replay(forward_again, self._random_state, self._chunk.size)
        if _has_rounds(mechanism):
            self._kept.append(replay)
        self._owed -= self._chunk.size
        self._give(mechanism, mechanism.query, replay, gradients)

    def note(self, fault: str) -> None:
        """Real records failed a check: nothing of this batch may be released.

        It is not raised here, since other ranks would wait for this one.
        """
        self._faults.append(fault)
        self._engine.drop()

    def suspect(self, mechanism: Mechanism, found: Sequence[Tensor], fault: str) -> None:
        """The same, if one of these is true: looked at when the step is to be released."""
        if self._chunk is not None and self._chunk.size and mechanism.query is not None:
            self._suspicions += [(each, fault) for each in found]

    def fault(self, mechanism: Mechanism) -> str | None:
        """Why what was answered so far may not be released; None if it may."""
        suspicions, self._suspicions = self._suspicions, []
        self._faults += [fault for found, fault in suspicions if found]
        if self._faults:
            return self._faults[0]
        if not mechanism.is_under_way or mechanism.query is None or not self._owed:
            return None
        return UNANSWERED.format(type(self._module).__name__)

    def is_unreleased(self, mechanism: Mechanism) -> bool:
        """Whether all chunks of the batch were handed out, and its optimizer step was left out."""
        return mechanism.is_under_way and self._is_whole

    def _is_of_all(self, gradients: AbstractPerSampleGradients, size: int) -> bool:
        """Whether each record has its gradient. None at all is found at the end of the step."""
        if gradients.count not in (0, size):
            self.note(OTHER_ROWS)
        return gradients.count == size

    def _give(
        self,
        mechanism: Mechanism,
        query: Query,
        replay: _Replay,
        here: AbstractPerSampleGradients | None = None,
    ) -> None:
        """Answer a query from one chunk; it stays owed if not each of its records has a gradient.

        Args:
            here: its gradients at the present parameters, where they are known already.
        """
        gradients = self._combination(query, replay, here)
        if gradients is None:
            self._owed += replay.size
            return
        if query.coordinates is not None:
            gradients = gradients.restrict(query.coordinates)
        mechanism.answer(bounded_sum(gradients, query.clip_norm))

    def _combination(
        self, query: Query, replay: _Replay, here: AbstractPerSampleGradients | None
    ) -> AbstractPerSampleGradients | None:
        """Each record's combination over the query's terms; the batch is run again for each pass."""
        parts: list[tuple[float, AbstractPerSampleGradients]] = []
        for each in query.passes:
            is_here = each.direction is None and each.point is None and here is not None
            gradients = here if is_here else self._again(each, replay)
            if gradients is None or not self._is_of_all(gradients, replay.size):
                return None
            parts.append((1.0 if each.direction is not None else each.gradient, gradients))
        (weight, first), *others = parts
        return first if weight == 1 and not others else first.combine(weight, others)

    def _again(self, each: Pass, replay: _Replay) -> AbstractPerSampleGradients | None:
        """The same records with the same randomness once more, leaving no trace."""
        if not self._module.automatic_optimization:
            raise MisconfigurationException(
                "An estimator that compares gradients at two points must run training_step again, "
                "which manual optimization does not allow. Use automatic optimization."
            )
        assert replay.random_state is not None
        now = RandomState(self._device)
        elsewhere = nullcontext() if each.point is None else at_point(self.params, each.point)
        with muted(self._module), elsewhere, torch.enable_grad():
            replay.random_state.restore()
            gradients = self._run(each, replay.forward)
        now.restore()
        return gradients

    def _run(
        self, each: Pass, forward: Callable[[], Tensor | None]
    ) -> AbstractPerSampleGradients | None:
        """One more pass; None if it gives no loss to go back from."""
        if each.direction is not None:
            return self._along(each.direction, (each.gradient, each.product), forward)
        with self.watching():
            loss = forward()
        if not is_differentiable(loss):
            self._engine.drop()
            return None
        if self._engine.runs_backward:
            self._engine.backward(loss, may_fold=False)
        else:
            self._module.backward(loss)
        return self._engine.take(1.0, self._raw.touched())

    def _along(
        self,
        direction: Tensor,
        weights: tuple[float, float],
        forward: Callable[[], Tensor | None],
    ) -> AbstractPerSampleGradients | None:
        def loss_of_records() -> Tensor:
            if not is_differentiable(loss := forward()):
                raise _NoLoss
            return loss

        try:
            with self.watching():
                return self._engine.along(loss_of_records, direction, weights)
        except _NoLoss:
            self._engine.drop()
            return None
        finally:
            self._raw.touched()

    def _answer_again(self, mechanism: Mechanism, agree: Callable[[str | None], None]) -> None:
        """Answer a further query from all chunks of the batch."""
        query = mechanism.query
        assert query is not None
        for replay in self._kept:
            self._give(mechanism, query, replay)
        agree(self.fault(mechanism))

    def check(self, estimator: AbstractEstimator) -> None:
        """Refuse what the estimator cannot train, before anything is charged.

        Raises:
            MisconfigurationException: naming the cure.
        """
        if estimator.uses_hessian and not self._engine.has_products:
            raise MisconfigurationException(
                f"{estimator} needs Hessian-vector products, which Opacus' hooks do not have (engine: "
                f"{self.engine_description}). Use engine='bookkeeping', and change a layer that it "
                "does not cover."
            )
        runs_again = estimator.uses_hessian or estimator.queries_per_step > 1
        if runs_again and not self._module.automatic_optimization:
            raise MisconfigurationException(
                f"{estimator} must run training_step several times on a batch, which manual "
                "optimization does not allow. Use automatic optimization."
            )
        estimator.check(self._optimizer)

    def release(
        self, mechanism: Mechanism, optimizer: Optimizer, agree: Callable[[str | None], None]
    ) -> None:
        """Give every trained parameter its private gradient.

        Args:
            agree: called with the fault of this process, if any, before anything is noised; it
                raises on all ranks if one of them has a fault.
        """
        if self._is_released or not mechanism.is_under_way:
            raise RuntimeError(
                "Two optimizer steps on one batch: the second would use the data without being "
                "charged. Step once per batch."
            )
        self.check_same_parameters(optimizer)
        if mechanism.query is not None and not self._is_whole:
            self.note(_TOO_EARLY)
        agree(self.fault(mechanism))
        try:
            estimate = mechanism.tell(self.params, lambda: self._answer_again(mechanism, agree))
        finally:
            self._kept = []
        for param, gradient in zip(self.params, unflatten(estimate, self.params), strict=True):
            param.grad = gradient
        self._is_released = True
        self._raw.allow_step()

    def check_same_parameters(self, optimizer: Optimizer) -> None:
        """Refuse to go on with other parameters than those that the fit began with.

        Raises:
            RuntimeError: naming the cure.
        """
        now = trained_parameters(optimizer)
        changed = len(now) != len(self.params) or any(
            a is not b for a, b in zip(now, self.params, strict=True)
        )
        if changed or [param.requires_grad for param in self._all] != self._trainable:
            raise RuntimeError(
                "The set of trained parameters changed during fit (a fine-tuning callback, "
                "add_param_group or requires_grad_?): new ones would be trained without privacy. "
                "Decide before fit which parameters are trained."
            )

    def check_still_in_the_model(self) -> None:
        """A frozen part may be exchanged (a new copy of a teacher), a trained one may not.

        Raises:
            RuntimeError: naming the cure.
        """
        here = {id(p) for p in self._module.parameters() if p.requires_grad}
        known = {id(p) for p in self._all if p.requires_grad}
        if here == known:
            return
        named = self._module.named_parameters()
        new = [name for name, p in named if p.requires_grad and id(p) not in known]
        raise RuntimeError(
            f"Trainable parameters of the LightningModule were replaced during fit ({len(known - here)} "
            f"are gone, {len(new)} are new: {new[:5]}). The optimizer has those of before, and would "
            "train stale copies on noise alone. Wrap the model or add adapters in __init__ or "
            "configure_model; freeze a copy (a target network) with requires_grad_(False)."
        )

    def detach(self) -> None:
        """Leave the model as it was."""
        self._engine.detach()
        self._raw.remove()
        self._kept = []


def is_differentiable(loss: object) -> TypeGuard[Tensor]:
    """Whether there is anything to go back from."""
    return isinstance(loss, Tensor) and loss.requires_grad


def _has_rounds(mechanism: Mechanism) -> bool:
    return mechanism.plan.estimator.queries_per_step > 1


def trained_parameters(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    """The parameters that the optimizer moves, in its order."""
    return tuple(p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)


@contextmanager
def _without_trainer(module: LightningModule) -> Iterator[None]:
    """Copies of the module that an engine makes must not copy the whole trainer."""
    trainer = module.trainer
    module.trainer = None
    try:
        yield
    finally:
        module.trainer = trainer
