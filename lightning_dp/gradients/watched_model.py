"""A model under its gradient engine: one watched pass at a time, with raw gradients kept inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_dp._refusals import Refusal
from lightning_dp._snapshot import RandomState
from lightning_dp.gradients.base import (
    ALONE,
    AbstractGradientEngine,
    AbstractPerSampleGradients,
    Around,
    Forward,
    OtherRowsError,
    UnsupportedModelError,
)
from lightning_dp.gradients.batches import (
    DEFAULT_LAYOUT,
    RowOwners,
    SampleBatch,
    is_differentiable,
    loss_in,
)
from lightning_dp.gradients.compiled import CompiledParts, as_written
from lightning_dp.gradients.engines import EngineChoice
from lightning_dp.gradients.graph import CoupledLossError, check_loss_graph
from lightning_dp.gradients.unit_means import UnitMeans

__all__ = ["NoLoss", "RawGradientGuard", "RawGradientHookError", "WatchedModel", "WrapEngine"]

_INSIDE = (
    "Parameters {} got a gradient inside of an autograd Function of the model (an activation "
    "checkpoint that is not torch's own, say), where gradients per record cannot be seen. Use "
    f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave it out. {ALONE}"
)

WrapEngine: TypeAlias = Callable[[AbstractGradientEngine], AbstractGradientEngine]


class RawGradientHookError(Refusal, RuntimeError):
    """A hook that is not ours would be shown un-noised gradients."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="gradient-hooks")


class RawGradientGuard:
    """Drops the gradient that autograd accumulates into a trainable parameter, at once.

    Args:
        parameters: name and parameter, every one that can get a gradient from records.

    Raises:
        RawGradientHookError: if somebody else's hook on a parameter would see raw gradients.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._touched: dict[str, nn.Parameter] = {}
        parameters = list(parameters)
        _refuse_foreign_hooks(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._dropper(name, parameter)
            )
            for name, parameter in parameters
            if parameter.requires_grad
        ]

    def _dropper(self, name: str, parameter: nn.Parameter) -> Any:
        def drop(_: Tensor) -> None:
            self._touched[name] = parameter
            parameter.grad = None

        return drop

    def touched(self) -> dict[str, nn.Parameter]:
        """Return the parameters that got a raw gradient since the last call, by name."""
        touched, self._touched = self._touched, {}
        return touched

    def remove(self) -> None:
        """Take the guard's hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _refuse_foreign_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks on parameters: they run before a gradient can be dropped."""
    hooked = [
        name
        for name, parameter in parameters
        if getattr(parameter, "_backward_hooks", None)
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise RawGradientHookError(
            f"Parameters {hooked[:5]} carry gradient hooks, which would see gradients without noise "
            "(WandbLogger.watch() sets such hooks by default). Remove them before fit; "
            "watch(log='parameters') is fine."
        )


class NoLoss(Exception):
    """A run gave nothing to go back from."""


class WatchedModel:
    """A model whose forward and backward passes its gradient engine watches.

    Raw gradients go to the engine and nowhere else. The engine's hooks are on the model while it runs
    forward, and at no other time.

    Args:
        module: the whole model.
        params: the trained parameters, in the order of flat vectors.
        choice: of the engine.
        public: parameters that are trained on no records; their gradients are let through.
        wrap: puts something between the engine and the clipping.
        loss_graph_check: :meth:`check_loss` refuses losses that mix records, by their graph.
        loss_scale: multiplies each record's loss during its backward pass, and is divided out after
            it: of the record itself, so neither how many others there are nor how the loss was
            divided decides what becomes too large or too small for a type of 16 bits.

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
        public: Collection[nn.Parameter],
        wrap: WrapEngine,
        loss_graph_check: bool,
        loss_scale: float,
    ) -> None:
        self._module, self._params, self._choice = module, params, choice
        self._wrap, self._checks_graph = wrap, loss_graph_check
        self._owners: RowOwners | None = None  # of the latest pass
        self._loss_scale, self._rows, self._factor = loss_scale, 1, 1.0
        self.engine = self._attached()
        """The engine in use."""
        others = {id(param) for param in public}
        watched = ((n, p) for n, p in module.named_parameters() if id(p) not in others)
        try:
            self._raw = RawGradientGuard(watched)
        except Exception:
            self.engine.detach()
            raise

    def _attached(self) -> AbstractGradientEngine:
        engine = self._choice.attach(self._module, self._params)
        engine.rest()
        self._compiled = CompiledParts(
            self._module, self._params, keeps_frozen=engine.keeps_compiled
        )
        return self._wrap(engine)

    def detach(self) -> None:
        """Leave the model as it was."""
        self.engine.detach()
        self._raw.remove()

    @contextmanager
    def without_engine(self) -> Iterator[None]:
        """Leave the model without the engine, inside; the guard stays, and a new engine comes."""
        self.engine.detach()
        try:
            yield
        finally:
            self.engine = self._attached()

    # -- the engine in use -------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """The engine in use, why it is not another one, and what runs as written, in words."""
        note = self.compiled_note
        return self._choice.description if note is None else f"{self._choice.description}; {note}"

    @property
    def compiled_note(self) -> str | None:
        """The compiled parts that run as written, in words; None if there are none."""
        return None if self.engine.one_record else self._compiled.note

    @property
    def randomness(self) -> RandomState | None:
        """Torch's random state of now, if another engine may have to run once more from here."""
        if not self._choice.can_fall:
            return None
        return RandomState(self._params[0].device, torch_only=True)

    def go_down(self, reason: UnsupportedModelError) -> None:
        """Go on with the next engine of the choice, if there is one; what passes left is forgotten."""
        self.drop()
        if not self._choice.fall(reason):
            is_told = isinstance(reason, CoupledLossError | OtherRowsError)
            raise reason if is_told else self._choice.refusal(reason)
        self.engine.detach()
        self.engine = self._attached()

    # -- a pass ------------------------------------------------------------------------------------

    def run(
        self,
        forward: Forward,
        batch: Any,
        size: int,
        around: Around | None = None,
        owners: RowOwners | None = None,
    ) -> Any:
        """Run a forward pass of a batch of ``size`` rows, of these units, under the engine."""
        with self._watching():
            output = self.engine.run(forward, self._batch(batch, size, owners), around)
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

    def as_written(self) -> AbstractContextManager[None]:
        """Let compiled parts that the engine must see run their own code, inside.

        For forward passes that are watched and for their backward passes, which run parts of them
        again; an engine that sees no layers needs nothing of it.
        """
        return nullcontext() if self.engine.one_record else self._compiled.as_written()

    def _batch(self, batch: Any, size: int, owners: RowOwners | None) -> SampleBatch:
        self._owners, self._rows = owners, size
        return SampleBatch(batch, size, self._choice.layout or DEFAULT_LAYOUT, owners)

    def check_loss(self, loss: Tensor, size: int) -> None:
        """Refuse a loss that mixes so many records by more than sums, before its backward pass."""
        if self._checks_graph and not self.engine.isolates:
            check_loss_graph(loss, size, self.engine.outputs_of_layers())

    def _scale(self, rows: int, divisor: float = 1.0) -> float:
        """Return what makes each row's part of a loss its own loss times the scale."""
        return 1.0 if self._loss_scale == 1 else self._loss_scale * max(1, rows) * divisor

    def backward(
        self,
        loss: Tensor,
        *,
        keep_graph: bool = False,
        combined: bool = False,
        divisor: float = 1.0,
    ) -> None:
        """Run the backward pass of a loss, as :meth:`AbstractGradientEngine.backward`.

        Args:
            divisor: the loss was divided by it.
        """
        with self.as_written():
            self._raw.touched()
            self._factor = self._scale(self._rows, divisor)
            scaled = _times(loss, self._factor)
            self.engine.backward(scaled, keep_graph=keep_graph, combined=combined)
        self._refuse_inside()

    def _refuse_inside(self) -> None:
        if inside := self._raw.touched():
            raise UnsupportedModelError(_INSIDE.format(sorted(inside)[:5]), topic="unseen-use")

    def take(self, scale: float = 1.0) -> AbstractPerSampleGradients:
        """Take what the last backward pass left; ``scale`` undoes a division of the loss."""
        self._raw.touched()
        return self._of_units(self.engine.take(scale / self._factor))

    def _of_units(self, found: AbstractPerSampleGradients) -> AbstractPerSampleGradients:
        """Return the mean of each unit's rows, of engines that give scaled sums over them."""
        if self._owners is None or self.engine.one_record:
            return found
        return UnitMeans.of(found, self._owners)

    def along(
        self,
        forward: Forward,
        batch: Any,
        size: int,
        direction: Tensor,
        weights: tuple[float, float],
        around: Around | None = None,
        owners: RowOwners | None = None,
    ) -> AbstractPerSampleGradients:
        """Return w g_i + w' H_i u of each record, as :meth:`AbstractGradientEngine.along`.

        Raises:
            NoLoss: if there is nothing to go back from.
        """

        def run_again() -> Tensor:
            loss = loss_in(self.engine.run(forward, self._batch(batch, size, owners), around))
            if not is_differentiable(loss):
                raise NoLoss
            self.check_loss(loss, size)
            return _times(loss, factor)

        factor = self._scale(size)
        own = weights[0] / factor, weights[1] / factor
        try:
            with as_written(), self._watching():
                return self._of_units(self.engine.along(run_again, direction, own))
        finally:
            self._raw.touched()

    def drop(self) -> None:
        """Forget what passes left."""
        self._raw.touched()
        self.engine.drop()


def _times(loss: Tensor, factor: float) -> Tensor:
    return loss if factor == 1 else loss.float() * factor
