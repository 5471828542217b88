"""The Lightning side: one mixin over Lightning's strategies, through public methods only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_dp.clipping import AbstractPerSampleGradients, bounded_sum
from lightning_dp.functional import unflatten
from lightning_dp.gradients import (
    AbstractGradientEngine,
    RawGradientGuard,
    UnsupportedModelError,
    make_engine,
)
from lightning_dp.private_run import PrivateRun
from lightning_dp.query import Query
from lightning_dp.sampling.loader import Chunk, ChunkSampler, PrivateDataLoader
from lightning_dp.strategies.checks import (
    check_loader,
    check_model,
    check_optimizers,
    check_single_loader,
    check_trainer,
)
from lightning_dp.strategies.publish import Publisher
from lightning_dp.strategies.replay import RandomState, at_point, muted
from lightning_dp.warnings import warn
from lightning_dp.world import World

__all__ = ["CHECKPOINT_KEY", "DifferentialPrivacyStrategy"]

CHECKPOINT_KEY = "lightning_dp"


class DifferentialPrivacyStrategy(Strategy):
    """Makes the strategy it is mixed into train privately; its methods say what happens where.

    The order of one step: ``on_train_batch_start`` charges the ledger, ``backward`` bounds each
    chunk's gradients, ``optimizer_step`` noises the sum and hands the optimizer an ordinary
    ``p.grad``. Raw gradients exist nowhere outside ``backward``.
    """

    global_rank: int
    world_size: int

    _run: PrivateRun | None = None
    _engine: AbstractGradientEngine | None = None
    _raw: RawGradientGuard | None = None
    _loader: PrivateDataLoader | None = None
    _publisher: Publisher | None = None
    _chunk: Chunk | None = None
    _params: tuple[nn.Parameter, ...] = ()
    _is_answered = False
    _is_released = False
    _accumulate_before: int | None = None
    _replay: tuple[Any, Any, RandomState] | None = None

    # -- set-up ----------------------------------------------------------------------------

    def use_privacy(self, run: PrivateRun) -> None:
        """Train under this configuration and charge this ledger."""
        if self._run is not None and self._run is not run:
            raise ValueError(
                "Privacy is configured twice: on the strategy (privacy=...) and by a "
                "DifferentialPrivacy callback, or by two callbacks. Keep one of them."
            )
        self._run = run

    @property
    def private_run(self) -> PrivateRun:
        """Ledger, ε and report of this strategy."""
        if self._run is None:
            raise ValueError(
                f"{type(self).__name__} has no privacy configuration: give it "
                "privacy=PrivacyConfig(...), or add the DifferentialPrivacy callback."
            )
        return self._run

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        run = self.private_run
        check_trainer(trainer)
        super().setup(trainer)
        assert self.lightning_module is not None
        check_optimizers(self.optimizers, self.lightning_module)
        check_model(self.lightning_module)
        self._params = _trained(self.optimizers[0])
        self._engine = make_engine(run.config.engine)
        with _without_trainer(self.lightning_module):
            self._engine.attach(self.lightning_module, self._params)
        self._raw = RawGradientGuard(self.lightning_module.named_parameters(), self.optimizers[0])
        self._publisher = Publisher(trainer, run)

    def configure_ddp(self) -> None:
        """No DDP wrapper: its reducer would all-reduce raw gradients. Rank 0's weights for all."""
        assert self.lightning_module is not None
        for tensor in self.lightning_module.state_dict().values():
            if isinstance(tensor, Tensor):
                torch.distributed.broadcast(tensor, 0)

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not (trainer.training and trainer.state.fn == TrainerFn.FITTING):
            return dataloader
        loader = check_loader(dataloader)
        self._check_same_size_everywhere(loader)
        run, config = self.private_run, self.private_run.config
        plan = config.sampling.plan(
            num_records=len(loader.dataset),  # type: ignore[arg-type]
            batch_size=loader.batch_size or 0,
            accumulate=self._accumulation(trainer),
            world_size=self.world_size,
            loader_length=len(loader),
        )
        run.use_batches(plan)
        self._set_accumulation(trainer, plan.chunks_per_step)
        sampler = ChunkSampler(
            plan,
            config.sampling,
            rank=self.global_rank,
            world_size=self.world_size,
            limit=_limit(plan.chunks_per_epoch, trainer.limit_train_batches),
            seed=config.seed,
        )
        self._loader = PrivateDataLoader(loader, sampler)
        return self._loader

    def _check_same_size_everywhere(self, loader: DataLoader[Any]) -> None:
        here = len(loader.dataset)  # type: ignore[arg-type]
        first = self.broadcast(here)
        if here != first:
            raise ValueError(
                f"Rank {self.global_rank} has a training set of {here} records, rank 0 one of "
                f"{first}. Every rank must see the same data set; each draws from its own shard."
            )

    def _accumulation(self, trainer: Trainer) -> int:
        """The user's accumulate_grad_batches, also after FullBatch() has set its own."""
        return self._accumulate_before or trainer.accumulate_grad_batches

    def _set_accumulation(self, trainer: Trainer, chunks: int) -> None:
        if self._accumulate_before is None:
            self._accumulate_before = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = chunks

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        trainer, run = self.lightning_module.trainer, self.private_run
        check_single_loader(trainer.train_dataloader, self._loader)
        run.start(
            planned_steps=max(0, trainer.estimated_stepping_batches - trainer.global_step),
            world=self._world(),
            directory=self._journal_folder(trainer),
        )
        assert self._publisher is not None
        self._publisher.publish(exact=True)
        if run.exhausted:
            self._stop(
                f"the budget (ε = {run.config.target_epsilon} at δ = {run.config.target_delta}, "
                f"{run.epsilon:.4g} of it spent) does not allow one step with noise multiplier "
                f"{run.noise_multiplier:.4g}; raise target_epsilon or the noise"
            )
            if self.is_global_zero:
                warn(f"No training step was made: {run.stop_reason}.")

    def _world(self) -> World:
        return World(
            rank=self.global_rank,
            size=self.world_size,
            all_reduce=lambda vector: self.reduce(vector, reduce_op="sum"),
            broadcast=self.broadcast,
        )

    def _journal_folder(self, trainer: Trainer) -> Path:
        given = self.private_run.config.ledger_dir
        return Path(trainer.default_root_dir) / "privacy" if given is None else Path(given)

    # -- one step --------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        run = self.private_run
        assert self._loader is not None and run.mechanism is not None
        chunk = self._loader.current
        if chunk is None or chunk.index != batch_idx:
            raise RuntimeError(
                f"Batch {batch_idx} of the epoch does not match the loader's ({chunk}). Something "
                "fetches batches ahead or skips them; private batches must be used one by one."
            )
        self._chunk, self._is_answered = chunk, False
        if not chunk.first:
            return
        if run.exhausted:
            self._stop(_budget_reached(run))
            raise StopIteration  # what Lightning raises itself to leave the epoch
        if run.mechanism.query is not None:
            warn(
                "A batch was charged and never released: optimizer.step() was not called for it. "
                "Call it once per batch; accumulate with Trainer(accumulate_grad_batches=...)."
            )
        run.mechanism.ask(self._params)
        self._is_released = False
        self.barrier("privacy charge")  # on the disk before any rank touches the batch

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        mechanism, engine, raw, chunk = self._run_parts()
        if self._is_answered or mechanism.query is None:
            raise RuntimeError(
                "Backward ran more than once for one batch, or after its optimizer step: a record "
                "would count twice. Add the losses up and call backward once per batch."
            )
        gradients = engine.take(self._undo_loss_division(), raw.touched())
        gradients = self._at_all_points(mechanism.query, gradients)
        self._is_answered = True
        if chunk.size == 0:
            return loss  # the stand-in record's gradient ends here
        if gradients.count not in (0, chunk.size):
            raise UnsupportedModelError(
                "The model saw more or fewer rows than the batch has records, so a record's "
                "gradient cannot be bounded. The collate_fn must make exactly one row of each "
                "record, and the model must keep records in the first dimension."
            )
        if gradients.count:
            mechanism.answer(bounded_sum(gradients, mechanism.query.clip_norm))
        return loss

    def _run_parts(self) -> Any:
        assert self._run is not None
        return self._run.mechanism, self._engine, self._raw, self._chunk

    def _undo_loss_division(self) -> float:
        """Lightning divides the loss by accumulate_grad_batches in automatic optimization."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return 1.0
        return float(self.lightning_module.trainer.accumulate_grad_batches)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        mechanism = self.private_run.mechanism
        if mechanism is not None and mechanism.query is not None and mechanism.query.other_points:
            self._replay = (args, kwargs, RandomState(self.root_device))
        return super().training_step(*args, **kwargs)

    def _at_all_points(
        self, query: Query, here: AbstractPerSampleGradients
    ) -> AbstractPerSampleGradients:
        """Each record's combination over the query's points; the batch is run again at each."""
        if query.other_points == 0 and query.weight_here == 1:
            return here
        others = [
            (term.weight, self._again_at(term.point))
            for term in query.terms
            if term.point is not None
        ]
        return here.combine(query.weight_here, others)

    def _again_at(self, point: Tensor) -> AbstractPerSampleGradients:
        """The same batch with the same randomness at another point, leaving no trace."""
        module, engine, raw = self.lightning_module, self._engine, self._raw
        assert module is not None and engine is not None and raw is not None
        assert self._replay is not None
        if not module.automatic_optimization:
            raise MisconfigurationException(
                "An estimator that compares gradients at two points must run training_step again, "
                "which manual optimization does not allow. Use automatic optimization."
            )
        args, kwargs, random_state = self._replay
        now = RandomState(self.root_device)
        with muted(module), at_point(self._params, point):
            random_state.restore()
            output = super().training_step(*args, **kwargs)
            module.backward(output["loss"] if isinstance(output, Mapping) else output)
            gradients = engine.take(1.0, raw.touched())
        now.restore()
        return gradients

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        evaluated = False

        def private_closure() -> Any:
            nonlocal evaluated
            if evaluated:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluated its closure twice; each evaluation would "
                    "use the data again. Use an optimizer that evaluates it once."
                )
            evaluated = True
            result = closure()
            self._release(optimizer)
            return result

        output = super().optimizer_step(optimizer, private_closure, model, **kwargs)
        self._after_step()
        return output

    def _release(self, optimizer: Optimizer) -> None:
        """Give every trained parameter its private gradient."""
        mechanism, _, raw, _ = self._run_parts()
        if self._is_released or mechanism.query is None:
            raise RuntimeError(
                "Two optimizer steps on one batch: the second would use the data without being "
                "charged. Step once per batch."
            )
        self._check_same_parameters(optimizer)
        estimate = mechanism.tell(self._params)
        for param, gradient in zip(self._params, unflatten(estimate, self._params), strict=True):
            param.grad = gradient
        self._is_released = True
        raw.allow_step()

    def _check_same_parameters(self, optimizer: Optimizer) -> None:
        now = _trained(optimizer)
        if len(now) != len(self._params) or any(
            a is not b for a, b in zip(now, self._params, strict=True)
        ):
            raise RuntimeError(
                "The set of trained parameters changed during fit (a fine-tuning callback, "
                "add_param_group or requires_grad_?): new ones would be trained without privacy. "
                "Decide before fit which parameters are trained."
            )

    def _after_step(self) -> None:
        run, publisher = self.private_run, self._publisher
        assert publisher is not None
        if run.exhausted and run.planned_steps > run.steps:
            self._stop(_budget_reached(run))
        publisher.publish(exact=run.stop_reason is not None)

    def _stop(self, reason: str) -> None:
        """End training as EarlyStopping does; no minimum of epochs or steps overrides a budget."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        if self.private_run.stop_reason is None:
            self.private_run.stop_reason = reason
            rank_zero_info(f"Training stops: {reason}.")

    def on_validation_start(self) -> None:
        if self._publisher is not None:
            self._publisher.publish(exact=True)
        super().on_validation_start()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._publisher is not None:
            self._publisher.publish(exact=True, to_loggers=True)

    # -- checkpoints and the end -----------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        checkpoint[CHECKPOINT_KEY] = self.private_run.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if not isinstance(checkpoint, Mapping) or CHECKPOINT_KEY not in checkpoint:
            raise ValueError(
                f"The checkpoint {checkpoint_path} holds no privacy ledger: what it has spent is "
                "unknown, so training cannot go on from it privately. If its weights never saw "
                "private data, load them into the model and fit without ckpt_path."
            )
        self.private_run.load_state_dict(
            checkpoint[CHECKPOINT_KEY], self._journal_folder(trainer), self._world()
        )
        return checkpoint

    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.detach()
        if self._raw is not None:
            self._raw.remove()
        if self._run is not None:
            self._run.stop()
        if self._accumulate_before is not None and self.lightning_module is not None:
            self.lightning_module.trainer.accumulate_grad_batches = self._accumulate_before
        self._engine, self._raw, self._loader, self._publisher = None, None, None, None
        self._chunk, self._replay, self._params = None, None, ()
        self._accumulate_before = None
        super().teardown()


def _trained(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    """The parameters that the optimizer moves, in its order."""
    return tuple(p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)


def _limit(chunks: int, limit_train_batches: float | int | None) -> int:
    """How many chunks of an epoch Lightning will use."""
    if isinstance(limit_train_batches, int):
        return min(chunks, limit_train_batches)
    return chunks if limit_train_batches is None else int(chunks * limit_train_batches)


def _budget_reached(run: PrivateRun) -> str:
    return (
        f"privacy budget reached: ε = {run.epsilon:.4g} of {run.config.target_epsilon} at "
        f"δ = {run.config.target_delta} after {run.steps} steps"
    )


@contextmanager
def _without_trainer(module: LightningModule) -> Iterator[None]:
    """Copies of the module that an engine makes must not copy the whole trainer."""
    trainer = module.trainer
    module.trainer = None
    try:
        yield
    finally:
        module.trainer = trainer
