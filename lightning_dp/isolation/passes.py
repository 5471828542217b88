"""Passes of batches through copies of a model, and the engine's answer about each record."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lightning_dp._side_effects import SideEffects
from lightning_dp._training_step import call_training_step
from lightning_dp.gradients import (
    EngineChoice,
    OtherRowsError,
    RecordPasses,
    UnsupportedModelError,
)
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.isolation.answers import Answer, Call, answer_about, watch_calls
from lightning_dp.isolation.copies import quiet
from lightning_dp.isolation.ignored import target_means
from lightning_dp.isolation.kept_copy import KeptCopy, may_be_kept
from lightning_dp.isolation.model_copies import ModelCopies, empty, may_be_written
from lightning_dp.isolation.module_state import ModuleState
from lightning_dp.isolation.nesting import copied
from lightning_dp.isolation.operations import OperationCounter
from lightning_dp.isolation.overrides import backward_loss
from lightning_dp.isolation.prepared import begin, is_half, loss_of, prepared, show_trainer
from lightning_dp.isolation.randomness import SameFirstRows, random_state, seed
from lightning_dp.isolation.stand_in_optimizers import ByHand, Stills, give_optimizers
from lightning_dp.isolation.stand_ins import RUN, Now, StandInTrainer
from lightning_dp.isolation.synthetic import NoHalfPrecision, ValidLabels

__all__ = ["Passes"]

_FEW = 16  # records of passes that leave their copy to the next: an engine keeps memory by their number


class Passes:
    """Runs batches through fresh copies of a model on the CPU, and leaves nothing anywhere.

    Every pass begins with a new copy of the model and known random numbers, so it depends on its
    batch alone; buffers, metrics, attributes and hooks of the model itself are never
    touched. ``log`` and the loggers are mute, the output of ``print`` is dropped, and the global
    random states are put back. On the CPU, since there a number out of range raises an error (on a
    GPU it ends the process), and since products are not rounded to fewer digits.

    Args:
        module: the model, without an engine's hooks on it.
        engine: name of the gradient engine, or a choice that is shared with others. Passes use the
            engine that it has come to, and no other.
        trained: names of the trained parameters.
        trainer: whose public state ``training_step`` may read, or None.
        now: the moment of the run that each pass takes place in.
        loss_graph_check: refuse losses that mix records, by their graph.
        made_up: labels are, so that not every loss can take them as they are.
        is_count_public: each batch of the run has the same number of records.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: str | EngineChoice,
        trained: Sequence[str],
        trainer: Trainer | None,
        now: Now = RUN,
        *,
        loss_graph_check: bool = True,
        made_up: bool = False,
        is_count_public: bool = False,
    ) -> None:
        self._made_up = made_up
        self.is_count_public = is_count_public
        self._checks_graph = loss_graph_check
        self.module, self.trained = module, tuple(trained)
        self.choice = EngineChoice(engine) if isinstance(engine, str) else engine
        self.trainer, self.now = trainer, now
        self._copies = ModelCopies(module)
        self._kept = KeptCopy()
        self._may_keep: bool | None = None
        self._innermost: TorchFunctionMode | None = None  # of those that valid_labels() entered
        self._added_up: set[str] = set()  # engines whose sum was compared
        self._is_half = is_half(module)
        self._counted: tuple[Any, float] | None = None  # a batch, and its operations
        self._outside: ModuleState | None = None
        self._reached: ModuleState | None = None

    def at(self, now: Now) -> Passes:
        """Return passes of the same model that take place at another moment of its run."""
        other = copy.copy(self)
        other.now = now
        return other

    def without_graph(self) -> Passes:
        """Return passes of the same model that do not look at the loss's graph."""
        other = copy.copy(self)
        other._checks_graph = False
        return other

    def below(self, reason: UnsupportedModelError) -> Passes | None:
        """Return passes of the same model with the next engine, where the others keep theirs."""
        other = copy.copy(self)
        other.choice = copy.copy(self.choice)
        return other if other.choice.fall(reason) else None

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Keep all passes inside from printing, and put random states back after them.

        What is inside must catch its exceptions, or they keep the random states as they are.
        """
        with quiet():
            self._outside = ModuleState.of(self.module, self.callbacks)
            try:
                yield
            finally:
                self._kept.drop()
                self._copies.release()

    @property
    def callbacks(self) -> list[Any]:
        """The Trainer's."""
        return [] if self.trainer is None else list(self.trainer.callbacks)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def valid_labels(self) -> Iterator[None]:
        """Keep made-up labels as losses need them, and numbers in float32, in the user's code inside."""
        innermost = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if innermost is not None and innermost is self._innermost:
            yield  # so they are already, and nobody stands in between
            return
        with contextlib.ExitStack() as stack:
            before = self._innermost
            if self._made_up:
                self._innermost = stack.enter_context(ValidLabels())
            if self._is_half:
                self._innermost = stack.enter_context(NoHalfPrecision())
            try:
                yield
            finally:
                self._innermost = before

    def copied(self, memo: dict[int, Any] | None = None) -> LightningModule:
        """Return a deep copy of the model; those of before must not be used any more."""
        self._kept.drop()
        return self._copies.make(memo)

    def shares(self, thing: object) -> bool:
        """Tell whether the model reaches an object, by a closure or a global variable for instance."""
        if self._reached is None:
            self._reached = ModuleState.of(self.module, copies=False)
        return self._reached.holds(thing)

    @property
    def has_public_optimizers(self) -> bool:
        """True if the Trainer has several optimizers."""
        return self.trainer is not None and len(self.trainer.optimizers) > 1

    @property
    def validates(self) -> bool:
        """True if the Trainer validates the model while it trains."""
        return self.trainer is not None and bool(self.trainer.enable_validation)

    def stills_of(self, module: LightningModule, *, moves: bool = False) -> Stills:
        """Return stand-ins for the real optimizers, with a copy's parameters.

        Args:
            moves: whether their steps move weights.
        """
        real = [] if self.trainer is None else self.trainer.optimizers
        names = {id(p): name for name, p in self.module.named_parameters()}
        own = dict(module.named_parameters())
        groups = [
            [
                {key: copy.copy(value) for key, value in group.items() if key != "params"}
                | {"params": [own[names[id(p)]] for p in group["params"] if id(p) in names]}
                for group in optimizer.param_groups
            ]
            for optimizer in real
        ]
        trained = [own[name] for name in self.trained]
        if not any(group["params"] for each in groups for group in each):
            groups = [[{"params": trained}]]
        return Stills.of(groups, trained, moves=moves)

    def put_back(self) -> None:
        """Put back what copies share with the model: globals, closures, attributes of classes."""
        if self._outside is not None:
            self._outside.restore()

    def loss(self, batch: Any) -> None:
        """Run the forward pass only. Raises whatever the model raises."""
        with self.on_copy() as module:
            self.forward(module, batch)

    def operations_of(self, batch: Any) -> float:
        """Run the forward pass only, and count its operations; those of the same batch once."""
        if self._counted is None or self._counted[0] is not batch:
            counter = OperationCounter()
            try:
                with counter:
                    self.loss(batch)
            except RuntimeError:  # some tensors know no modes
                self.loss(batch)
            self._counted = batch, float(counter.total)
        return self._counted[1]

    def run(
        self,
        batch: Any,
        n: int,
        *,
        seed_number: int = 0,
        same_first_rows: bool = False,
        watch_modules: bool = False,
    ) -> Answer:
        """Run one forward and backward pass.

        Args:
            batch: with n records.
            n: how many there are.
            seed_number: of the random numbers that it begins with.
            same_first_rows: the first rows of what torch draws do not depend on the number of rows.
            watch_modules: keep what goes in and out of every module.

        Raises:
            NoLoss: if training_step gives nothing to go back from.
            UnsupportedModelError: if the engine cannot tell the records apart.
        """
        draws: Any = contextlib.nullcontext()
        if same_first_rows:
            draws = SameFirstRows()  # type: ignore[no-untyped-call]
        with self._copy_with_engine(is_own=watch_modules or n > _FEW) as (module, passes):
            calls: list[Call] = []
            hooks = watch_calls(module, calls) if watch_modules else ModuleHooks()
            with draws:
                answer = self._run(module, passes, batch, n, seed_number)
            hooks.take_off()  # the copy goes with the garbage, the calls need not wait for it
            return replace(answer, calls=tuple(calls))

    def _run(
        self,
        module: LightningModule,
        passes: RecordPasses,
        batch: Any,
        n: int,
        seed_number: int,
    ) -> Answer:
        own = dict(module.named_parameters())
        params = [own[name] for name in self.trained]
        noticed: list[
            tuple[bool, list[bool], list[int | None], bool]
        ] = []  # before the graph is freed
        before, own_before = seed(seed_number), self._own_generators(module)

        def forward(batch: Any) -> Tensor:
            loss = self.forward(module, batch)
            own_after = self._own_generators(module)
            has_drawn = before != random_state() or (
                own_before is not None and own_after is not None and own_before.drew(own_after)
            )
            means = target_means(loss)
            weighs = [mean.has_class_weights for mean in means]
            ignores = [mean.ignored_alike(n) for mean in means]
            noticed.append((has_drawn, weighs, ignores, may_be_written(self.module, module)))
            return loss

        with self.valid_labels():
            gradients = passes.run(forward, batch, n)
        self._added_up.add(self.choice.description)
        if gradients is not None and gradients.count not in (0, n) and self.choice.can_fall:
            raise OtherRowsError
        answer = answer_about(gradients, params, n)
        is_random, weighs, ignores, may_write = noticed[-1]
        return replace(
            answer,
            is_random=is_random,
            means=len(weighs),
            has_class_weights=any(weighs),
            ignored=tuple(ignores),
            may_write=may_write,
        )

    def attached(
        self,
        module: LightningModule,
        params: Sequence[nn.Parameter],
        *,
        loss_graph_check: bool,
        adds_up: bool = False,
    ) -> RecordPasses:
        """Attach the engine that the choice has come to to a copy."""
        public = self.stills_of(module).parameters()
        return RecordPasses(
            module,
            params,
            self.choice.here(),
            public=public,
            loss_graph_check=loss_graph_check,
            adds_up=adds_up,
            around=SideEffects(module).of_step,
        )

    def _own_generators(self, module: LightningModule) -> ModuleState | None:
        """Return the state of a copy, if the model keeps random generators."""
        if self._outside is None or not self._outside.has_generators:
            return None
        return ModuleState.of(module, copies=False)

    @contextlib.contextmanager
    def on_copy(self) -> Iterator[LightningModule]:
        """Enter with a new copy of the model, which is empty afterwards."""
        module = self._dressed(prepared(self._copies.make()))
        try:
            if self.now.is_pretended:
                with self.valid_labels():
                    begin(module, self.now)
            yield module
        finally:
            empty(module)
            self.put_back()

    def _dressed(self, module: LightningModule) -> LightningModule:
        """Give a copy new stand-ins for its Trainer and its optimizers."""
        trainer = StandInTrainer(self.trainer, self.now)
        show_trainer(module, trainer)
        give_optimizers(module, trainer, self.stills_of(module).optimizers)
        return module

    @contextlib.contextmanager
    def _copy_with_engine(self, *, is_own: bool) -> Iterator[tuple[LightningModule, RecordPasses]]:
        """Enter with a copy to which the engine is attached: that of the pass before, if it is as new.

        Args:
            is_own: it must be one of no other pass.
        """
        adds_up = self.choice.description not in self._added_up
        if adds_up or is_own or self.now.is_pretended or not self._keeps_copies:
            self._kept.drop()
            with self.on_copy() as module, self._engine_on(module, adds_up=adds_up) as passes:
                yield module, passes
            return
        key = self.choice.description, self._checks_graph
        if (each := self._kept.take(key)) is None:
            module = self._dressed(prepared(self._copies.make()))
            each = self._kept.new(key, module, self._engine_on(module))
        else:
            self._dressed(each.module)
        try:
            yield each.module, each.engine
        except BaseException:
            each.free()
            raise
        else:
            self._kept.keep(each)
        finally:
            self.put_back()

    @property
    def _keeps_copies(self) -> bool:
        if self._may_keep is None:
            outside = self._outside
            self._may_keep = (
                outside is not None
                and not self.has_public_optimizers
                and may_be_kept(self.module, outside)
            )
        return self._may_keep

    def _engine_on(self, module: LightningModule, *, adds_up: bool = False) -> RecordPasses:
        own = dict(module.named_parameters())
        params = [own[name] for name in self.trained]
        return self.attached(module, params, loss_graph_check=self._checks_graph, adds_up=adds_up)

    def forward(self, module: LightningModule, batch: Any) -> Tensor:
        """Run the forward pass of a copy; return its loss."""
        is_automatic = module.automatic_optimization
        by_hand = None if is_automatic else ByHand(module, self.stills_of(module))
        with self.valid_labels():
            output = call_training_step(module, copied(batch), self.now.batch_idx)
        return backward_loss(module, loss_of(output, by_hand))
