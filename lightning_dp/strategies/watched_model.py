"""The model under its gradient engine: raw gradients go to the engine, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients import AbstractGradientEngine, RawGradientGuard, attach_engine

__all__ = ["WatchedModel", "WrapEngine"]

WrapEngine = Callable[[AbstractGradientEngine], AbstractGradientEngine]


class WatchedModel:
    """A module with an engine and the guard of its raw gradients attached, until :meth:`detach`.

    Args:
        module: the user's model.
        optimizer: its one optimizer.
        params: the trained parameters.
        engine: name of the gradient engine.
        wrap: puts something between the engine and the clipping.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        engine: str,
        wrap: WrapEngine,
    ) -> None:
        self.module = module
        self._params, self._engine_name, self._wrap = params, engine, wrap
        self._engine, self.engine_description = self._attach()
        try:
            self._raw = RawGradientGuard(module.named_parameters(), optimizer)
        except Exception:
            self._engine.detach()
            raise

    def _attach(self) -> tuple[AbstractGradientEngine, str]:
        with _without_trainer(self.module):
            engine, description = attach_engine(self._engine_name, self.module, self._params)
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

    @property
    def has_products(self) -> bool:
        """True if the engine can compute Hessian-vector products."""
        return self._engine.has_products

    @property
    def runs_backward(self) -> bool:
        """True if :meth:`backward` takes the place of ``loss.backward()``."""
        return self._engine.runs_backward

    def backward(self, loss: Tensor, *, keep_graph: bool = False, may_fold: bool = False) -> None:
        """Run the backward pass as the engine does it."""
        self._engine.backward(loss, keep_graph=keep_graph, may_fold=may_fold)

    def take(self, scale: float) -> AbstractPerSampleGradients | None:
        """Take what the backward pass left; None if nothing was back-propagated.

        Args:
            scale: undoes a division of the loss.
        """
        touched = self._raw.touched()
        if not self._engine.runs_backward and not touched:
            self._engine.drop()
            return None
        return self._engine.take(scale, touched)

    def along(
        self, loss: Callable[[], Tensor], direction: Tensor, weights: tuple[float, float]
    ) -> AbstractPerSampleGradients:
        """Run a pass of the engine that combines gradients with products along a direction."""
        try:
            with self.watching():
                return self._engine.along(loss, direction, weights)
        finally:
            self._raw.touched()

    def drop(self) -> None:
        """Forget what passes left."""
        self._engine.drop()

    def allow_step(self) -> None:
        """The gradients are private now: let the next optimizer step pass."""
        self._raw.allow_step()

    def detach(self) -> None:
        """Leave the model as it was."""
        self._engine.detach()
        self._raw.remove()


@contextmanager
def _without_trainer(module: LightningModule) -> Iterator[None]:
    """Copies of the module that an engine makes must not copy the whole trainer."""
    trainer = module.trainer
    module.trainer = None
    try:
        yield
    finally:
        module.trainer = trainer
