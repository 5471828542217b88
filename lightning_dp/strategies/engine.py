"""The gradient engine of a fit, whose further passes leave no trace in the user's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp._module_state import apart, restored
from lightning_dp._shards import is_sharded
from lightning_dp._side_effects import SideEffects
from lightning_dp._world import World
from lightning_dp.config import PrivacyConfig
from lightning_dp.gradients import (
    AbstractGradientEngine,
    EngineChoice,
    RecordPasses,
    Replay,
    UnsupportedModelError,
)
from lightning_dp.gradients.base import Around
from lightning_dp.gradients.watched_model import WrapEngine
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.optimizers import Optimizers

__all__ = ["FitEngine", "engine_for"]

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


def engine_for(
    run: PrivateRun,
    trainer: Trainer,
    world: World,
    params: Sequence[nn.Parameter],
    optimizers: Optimizers,
    wrap: WrapEngine,
) -> FitEngine:
    """Attach the engine to the model, and tell the run which one it is.

    Args:
        run: says which engine is wanted.
        trainer: its model is set up.
        world: the processes of the job.
        params: the trained parameters.
        optimizers: which one is private.
        wrap: puts something between the engine and the clipping.
    """
    public = optimizers.public_parameters
    engine = FitEngine(
        trainer.lightning_module,
        params,
        _chosen(
            run.config,
            world,
            is_automatic=trainer.lightning_module.automatic_optimization and not public,
        ),
        public=public,
        wrap=wrap,
        loss_graph_check=run.config.loss_graph_check,
    )
    run.engine = engine.watched.description
    if engine.watched.compiled_note is not None:
        rank_zero_info(f"privacy: {engine.watched.compiled_note}.")
    return engine


def _chosen(config: PrivacyConfig, world: World, *, is_automatic: bool) -> EngineChoice:
    """Return the engines that can do what a run asks for, from the one that its name stands for on.

    Args:
        config: of the run.
        world: its processes.
        is_automatic: Lightning steps the only optimizer.
    """
    traits = config.resolved_estimator().traits
    choice = EngineChoice(config.engine)
    if config.engine == "ghost":
        _leave_ghost(
            choice, is_sharded=world.is_sharded, asks_one_gradient=traits.asks_one_gradient
        )
    if not is_automatic and config.engine != "one_by_one":
        choice = choice.whole_batch()  # which goes back, steps, and makes public rows
    return choice.over_shards() if world.is_sharded else choice


def _leave_ghost(choice: EngineChoice, *, is_sharded: bool, asks_one_gradient: bool) -> None:
    """Begin with the engine below, where norms alone are not enough; told before a batch is seen."""
    if not asks_one_gradient:
        choice.fall(UnsupportedModelError(_SEVERAL, topic="unsupported-model"))
    elif is_sharded:
        choice.fall(UnsupportedModelError(_SHARDS, topic="sharded"))


class FitEngine:
    """The engine on a module that a Trainer has, and the passes under it.

    Args:
        module: the user's model.
        params: the trained parameters.
        choice: of the gradient engine.
        public: parameters of other optimizers, which are trained on no records.
        wrap: puts something between the engine and the clipping.
        loss_graph_check: refuse losses that mix records, by their graph.
    """

    def __init__(
        self,
        module: LightningModule,
        params: Sequence[nn.Parameter],
        choice: EngineChoice,
        *,
        public: Sequence[nn.Parameter],
        wrap: WrapEngine,
        loss_graph_check: bool,
    ) -> None:
        self._module, self._trainer = module, module.trainer
        self.is_sharded = any(is_sharded(param) for param in params)
        """Each process has a part of each parameter, and all run the same passes together."""
        self.choice, self.effects = choice, SideEffects(module)
        self.passes = RecordPasses(
            module,
            params,
            choice,
            public=public,
            quietly=self._quietly,
            again=self.unchanged,
            wrap=wrap,
            loss_graph_check=loss_graph_check,
        )
        self.watched = self.passes.watched

    def off(self) -> AbstractContextManager[None]:
        """Leave the model without the engine, inside; between two batches."""
        return self.watched.without_engine()

    def detach(self) -> None:
        """Leave the model as it was."""
        self.watched.detach()

    def settle(self, world: World) -> None:
        """Go on with the engine that the lead process came to, and with no other, if there are shards.

        All processes make each pass together, so none of them may run a chunk again by itself.
        """
        if self.is_sharded:
            with self.off():
                self.choice.stay(world.broadcast(self.choice.reasons))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Leave the module as it is while a chunk runs once more, which other ranks do not do.

        Raises:
            UnsupportedModelError: if the model waits for other ranks.
        """
        is_alone = self._trainer.world_size > 1
        with (
            restored(self._module, global_random=False),
            NoCollectives() if is_alone else nullcontext(),  # type: ignore[no-untyped-call]
        ):
            yield

    def run_for_nothing(self, records: Sequence[Replay]) -> None:
        """Run records, each alone, of which nothing is asked: they log, as ever."""
        for each in records:
            assert each.randomness is not None and each.forward is not None
            with each.randomness.again():
                self.passes.run(each.forward, each.batch, 1)

    @contextmanager
    def _quietly(self, engine: AbstractGradientEngine) -> Iterator[Around | None]:
        """Leave no trace of a run in the module; passes see to the global random states."""
        module = self._module
        in_parts: AbstractContextManager[Around | None] = nullcontext()
        if engine.runs_parts:
            in_parts = self.effects.of_step(are_done=False)
        alone = apart(module) if engine.one_record else restored(module, global_random=False)
        with alone, in_parts as around:
            yield around


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
