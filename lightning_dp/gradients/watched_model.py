"""A model under its gradient engine: one watched pass at a time, with raw gradients kept inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._training_step import loss_in
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.base import (
    ALONE,
    AbstractGradientEngine,
    Around,
    Forward,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import DEFAULT_LAYOUT, SampleBatch
from lightning_dp.gradients.chunks import NoLoss, OtherRowsError, is_differentiable
from lightning_dp.gradients.compiled import CompiledParts, as_written
from lightning_dp.gradients.engines import EngineChoice
from lightning_dp.gradients.graph import CoupledLossError, check_loss_graph
from lightning_dp.gradients.random_state import RandomState
from lightning_dp.gradients.raw import RawGradientGuard

__all__ = ["WatchedModel", "WrapEngine"]

_INSIDE = (
    "Parameters {} got a gradient inside of an autograd Function of the model (an activation "
    "checkpoint that is not torch's own, say), where gradients per record cannot be seen. Use "
    f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave it out. {ALONE}"
)

WrapEngine: TypeAlias = Callable[[AbstractGradientEngine], AbstractGradientEngine]


class WatchedModel:
    """A model whose forward and backward passes its gradient engine watches.

    Raw gradients go to the engine and nowhere else. The engine's hooks are on the model while it runs
    forward, and at no other time.

    Args:
        module: the whole model.
        params: the trained parameters, in the order of flat vectors.
        choice: of the engine.
        optimizer: whose steps raise unless :meth:`allow_step` allowed them; None where nobody steps.
        public: parameters that are trained on no records; their gradients are let through.
        attaching: is entered around the attachment of an engine.
        wrap: puts something between the engine and the clipping.
        loss_graph_check: :meth:`check_loss` refuses losses that mix records, by their graph.

    Raises:
        UnsupportedModelError: if no engine can handle the model.
        RawGradientHookError: if somebody else's hook on a parameter would see raw gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        choice: EngineChoice,
        *,
        optimizer: Optimizer | None,
        public: Collection[nn.Parameter],
        attaching: Callable[[], AbstractContextManager[None]],
        wrap: WrapEngine,
        loss_graph_check: bool,
    ) -> None:
        self._module, self._params, self._choice = module, params, choice
        self._attaching, self._wrap, self._checks_graph = attaching, wrap, loss_graph_check
        self.engine = self._attached()
        """The engine in use."""
        try:
            others = {id(param) for param in public}
            watched = ((n, p) for n, p in module.named_parameters() if id(p) not in others)
            self._raw = RawGradientGuard(watched, optimizer)
        except Exception:
            self.engine.detach()
            raise

    def _attached(self) -> AbstractGradientEngine:
        with self._attaching():
            engine = self._choice.attach(self._module, self._params)
        engine.rest()
        self._compiled = CompiledParts(
            self._module, self._params, keeps_frozen=engine.keeps_compiled
        )
        return self._wrap(engine)

    @property
    def description(self) -> str:
        """The engine in use, why it is not another one, and what runs as written, in words."""
        note = self.compiled_note
        return self._choice.description if note is None else f"{self._choice.description}; {note}"

    @property
    def compiled_note(self) -> str | None:
        """The compiled parts that run as written, in words; None if there are none."""
        return None if self.one_record else self._compiled.note

    @property
    def randomness(self) -> RandomState | None:
        """Torch's random state of now, if another engine may have to run once more from here."""
        if not self._choice.can_fall:
            return None
        return RandomState(self._params[0].device, torch_only=True)

    def go_down(self, reason: UnsupportedModelError) -> None:
        """Go on with the next engine of the choice; what passes left is forgotten.

        Raises:
            UnsupportedModelError: if there is none.
        """
        self.drop()
        if not self._choice.fall(reason):
            is_told = isinstance(reason, CoupledLossError | OtherRowsError)
            raise reason if is_told else self._choice.refusal(reason)
        self.engine.detach()
        self.engine = self._attached()

    def take_engine_off(self) -> None:
        """Leave the model without the engine, until :meth:`put_engine_on`; the guard stays."""
        self.engine.detach()

    def put_engine_on(self) -> None:
        """Attach a new engine."""
        self.engine = self._attached()

    def detach(self) -> None:
        """Leave the model as it was."""
        self.engine.detach()
        self._raw.remove()

    @property
    def has_products(self) -> bool:
        """True if the engine can compute Hessian-vector products."""
        return self.engine.has_products

    @property
    def runs_backward(self) -> bool:
        """True if :meth:`backward` takes the place of ``loss.backward()``."""
        return self.engine.runs_backward

    @property
    def one_record(self) -> bool:
        """True if chunks must hold one record each."""
        return self.engine.one_record

    @property
    def isolates(self) -> bool:
        """True if records cannot mix in ``training_step``, by construction."""
        return self.engine.isolates

    def as_written(self) -> AbstractContextManager[None]:
        """Let compiled parts that the engine must see run their own code, inside.

        For forward passes that are watched and for their backward passes, which run parts of them
        again; an engine that sees no layers needs nothing of it.
        """
        return nullcontext() if self.engine.one_record else self._compiled.as_written()

    def repeating(self) -> AbstractContextManager[None]:
        """Let checkpoints run parts of the model again, in a backward pass of somebody else, inside."""
        return self.engine.repeating()

    def run(self, forward: Forward, batch: Any, size: int, around: Around | None = None) -> Any:
        """Run a forward pass under the engine, whose hooks are on the model then and at no other time.

        Args:
            forward: of a batch.
            batch: goes in.
            size: how many records it has.
            around: as for :meth:`AbstractGradientEngine.run`.
        """
        with self._watching():
            output = self.engine.run(forward, self._batch(batch, size), around)
        if self.engine.one_record:  # which goes back at once, where there are several
            self._refuse_inside()
        return output

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with self.as_written():
            self.engine.wake()
            try:
                yield
            finally:
                self.engine.rest()

    def _batch(self, batch: Any, size: int) -> SampleBatch:
        return SampleBatch(batch, size, self._choice.layout or DEFAULT_LAYOUT)

    def check_loss(self, loss: Tensor, size: int) -> None:
        """Refuse a loss that mixes records by more than sums, before its backward pass.

        Args:
            size: the number of records that it was computed from.

        Raises:
            CoupledLossError: naming the node of the graph, and the cure.
        """
        if self._checks_graph and not self.engine.isolates:
            check_loss_graph(loss, size, self.engine.outputs_of_layers())

    def backward(self, loss: Tensor, *, keep_graph: bool = False, combined: bool = False) -> None:
        """Run the backward pass of a loss as the engine does it.

        Args:
            keep_graph: the graph is going to be used once more.
            combined: the gradients will be combined with those of another pass.
        """
        with self.as_written():
            self._raw.touched()
            self.engine.backward(loss, keep_graph=keep_graph, combined=combined)
        self._refuse_inside()

    def _refuse_inside(self) -> None:
        if inside := self._raw.touched():
            raise UnsupportedModelError(_INSIDE.format(sorted(inside)[:5]), topic="unseen-use")

    def take(self, scale: float = 1.0) -> AbstractPerSampleGradients | None:
        """Take what the last backward pass left; None if nothing was back-propagated.

        Args:
            scale: undoes a division of the loss.
        """
        touched = self._raw.touched()
        if not self.engine.runs_backward and not touched:
            self.engine.drop()
            return None
        return self.engine.take(scale, touched)

    def drop(self) -> None:
        """Forget what passes left."""
        self._raw.touched()
        self.engine.drop()

    def expect_step(self) -> None:
        """Stand after all other hooks of the optimizer, whose step is next."""
        self._raw.expect_step()

    def without_guard(self) -> AbstractContextManager[None]:
        """Let any step of the optimizer pass, inside."""
        return self._raw.off()

    def allow_step(self, check: Callable[[], None] | None = None) -> None:
        """Let the next optimizer step pass: the gradients are private now.

        Args:
            check: is called once, right before the optimizer uses them.
        """
        self._raw.allow_step(check)

    def along(
        self,
        forward: Forward,
        batch: Any,
        size: int,
        direction: Tensor,
        weights: tuple[float, float],
        around: Around | None = None,
    ) -> AbstractPerSampleGradients:
        """Return w g_i + w' H_i u of each record, as :meth:`AbstractGradientEngine.along`.

        Args:
            forward, batch, size, around: as for :meth:`run`.
            direction, weights: see there.
        """

        def run_again() -> Tensor:
            loss = loss_in(self.engine.run(forward, self._batch(batch, size), around))
            if not is_differentiable(loss):
                raise NoLoss
            self.check_loss(loss, size)
            return loss

        try:
            with as_written(), self._watching():
                return self.engine.along(run_again, direction, weights)
        finally:
            self._raw.touched()
