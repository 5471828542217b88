"""The gradient engine of a fit, whose further passes leave no trace in the user's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp._snapshot import apart, restored
from lightning_dp._world import World, is_sharded
from lightning_dp.config import PrivacyConfig
from lightning_dp.gradients import (
    AbstractGradientEngine,
    EngineChoice,
    RecordPasses,
    UnsupportedModelError,
)
from lightning_dp.gradients.base import Around
from lightning_dp.gradients.side_effects import SideEffects
from lightning_dp.gradients.watched_model import WrapEngine

__all__ = ["FitEngine"]

_SEVERAL = (
    "The estimator may ask for more than each record's gradient at the present parameters, and of a pass "
    "nothing but norms is kept."
)
_SHARDS = "Its sums do not go into shards of parameters."

_WAITS = (
    "A batch has shapes that the gradient engine cannot tell records apart in, and training_step must "
    "not run again for the next engine, since it waits for other processes (all_gather, all_reduce). "
    "Leave that out of training_step, or choose engine='one_by_one'."
)


class FitEngine:
    """The gradient engine on the model of a fit, and the passes under it.

    Args:
        module: the user's model.
        config: of the run, with the engine that is wanted.
        world: the processes of the job.
        params: the trained parameters.
        public: parameters of other optimizers, which are trained on no records.
        wrap: puts something between the engine and the clipping.
    """

    def __init__(
        self,
        module: LightningModule,
        config: PrivacyConfig,
        world: World,
        params: Sequence[nn.Parameter],
        public: Sequence[nn.Parameter],
        wrap: WrapEngine,
    ) -> None:
        self._module, self._world = module, world
        self.is_sharded = any(is_sharded(param) for param in params)
        """Each process has a part of each parameter, and all run the same passes together."""
        is_automatic = module.automatic_optimization and not public
        self.choice = _choice_for(config, world, is_automatic=is_automatic)
        self.effects = SideEffects(module)
        self.passes = RecordPasses(
            module,
            params,
            self.choice,
            public=public,
            quietly=self._quietly,
            again=self.unchanged,
            wrap=wrap,
            loss_graph_check=config.checks.loss_graph,
        )
        self.watched = self.passes.watched

    def settle(self) -> None:
        """Go on with the engine that the lead process came to, and with no other, if there are shards.

        All processes make each pass together, so none of them may run a chunk again by itself.
        """
        if self.is_sharded:
            with self.watched.without_engine():  # between two batches
                self.choice.stay(self._world.broadcast(self.choice.reasons))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Leave the module as it is while a chunk runs once more, which other ranks do not do.

        Raises:
            UnsupportedModelError: if the model waits for other ranks.
        """
        alone = _NoCollectives() if self._world.size > 1 else nullcontext()  # type: ignore[no-untyped-call]
        with restored(self._module, global_random=False), alone:
            yield

    @contextmanager
    def _quietly(self, engine: AbstractGradientEngine) -> Iterator[Around | None]:
        """Leave no trace of a run in the module; passes see to the global random states."""
        one, module = engine.one_record, self._module
        alone = apart(module) if one else restored(module, global_random=False)
        in_parts = self.effects.of_step(are_done=False) if engine.runs_parts else nullcontext()
        with alone, in_parts as around:
            yield around


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations over several processes raise: the others do not make them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation of this process."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UnsupportedModelError(_WAITS, topic="manual-optimization")
        return func(*args, **(kwargs or {}))


def _choice_for(config: PrivacyConfig, world: World, *, is_automatic: bool) -> EngineChoice:
    """Return the engines that can do what a run asks for, from the one that its name stands for on.

    Args:
        config: of the run.
        world: its processes.
        is_automatic: Lightning steps the only optimizer.
    """
    choice = EngineChoice(config.engine)
    if config.engine == "ghost":  # norms alone may not be enough; told before a batch is seen
        if not config.resolved_estimator().traits.asks_one_gradient:
            choice.fall(UnsupportedModelError(_SEVERAL, topic="unsupported-model"))
        elif world.is_sharded:
            choice.fall(UnsupportedModelError(_SHARDS, topic="sharded"))
    if not is_automatic and config.engine != "one_by_one":
        choice = choice.whole_batch()  # which goes back, steps, and makes public rows
    return choice.over_shards() if world.is_sharded else choice
