"""A client's work: the bounded sum of a query over its own records, without a Trainer."""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import optional, whole
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.boundary import BoundedSum, Query, Term, bounded_sum
from lightning_dp.federated.client import fingerprint
from lightning_dp.functional import flat_dtype, flatten, is_finite, number_of_entries, unflatten
from lightning_dp.gradients import AbstractGradientEngine, RecordPasses, Replay
from lightning_dp.gradients.base import UNANSWERED, Around
from lightning_dp.gradients.batches import RowOwners, call_training_step
from lightning_dp.gradients.parameter_sum import MaterialisedGradients
from lightning_dp.gradients.passes import at_point
from lightning_dp.gradients.side_effects import SideEffects
from lightning_dp.gradients.snapshot import RandomState, apart, restored
from lightning_dp.isolation.check import Settings
from lightning_dp.isolation.comparison import own_copies
from lightning_dp.isolation.dry_run import DryRun
from lightning_dp.isolation.replay import Pipeline, Runner
from lightning_dp.isolation.requirements import (
    MisconfigurationError,
    check_loader,
    check_model,
    check_training_step,
)
from lightning_dp.isolation.state import TwinState
from lightning_dp.sampling import UserLevel

__all__ = ["LocalRecords"]

Unit: TypeAlias = Literal["record", "client"]

_log = logging.getLogger("lightning_dp.federated")

_CHUNK_SIZE = 64
_SYNTHETIC = 2  # records
_NOT_CHARGED = (
    "(Found on synthetic records of the shapes of this client's, before anything was charged. If "
    "only they are at fault, leave this out with LocalRecords(try_first=False).)"
)


class ModuleRecords(ABC):
    """The records of a client, and the module that they go through; left as they were."""

    def __init__(
        self,
        module: LightningModule,
        records: Dataset[Any] | DataLoader[Any],
        unit: Unit | UserLevel,
        chunk_size: int | None,
        device: str | torch.device,
        try_first: bool,
    ) -> None:
        users = unit if isinstance(unit, UserLevel) else None
        if users is None and unit not in get_args(Unit):
            raise ValueError(f"unit={unit!r} must be one of {get_args(Unit)}, or a UserLevel(...).")
        chunk_size = optional(whole)("chunk_size", chunk_size)
        if not isinstance(records, DataLoader):
            records = DataLoader(records, batch_size=chunk_size or _CHUNK_SIZE)
        self._loader = check_loader(records)
        self._chunk_size = chunk_size or self._loader.batch_size or _CHUNK_SIZE
        _check_module(module)
        self.unit = "user" if isinstance(unit, UserLevel) else unit
        self.users = None if users is None else users.rows_of(self._loader.dataset)
        """The rows of each user, where users are protected."""
        self._module = module.to(device)
        self._device = torch.device(device)
        self._try_first = try_first
        self.params = tuple(param for param in module.parameters() if param.requires_grad)

    @property
    def num_records(self) -> int:
        """N of this client, of its users where they are protected."""
        return len(self._loader.dataset if self.users is None else self.users)  # type: ignore[arg-type]

    @property
    def point(self) -> Tensor:
        """A copy of the module's trained parameters as a flat vector, of float32 at least."""
        return flatten(self.params).to(flat_dtype(self.params))

    @cached_property
    def fingerprint(self) -> str:
        """The description of the module that the server must have, besides the trained numbers."""
        return fingerprint(self._module)

    def check_point(self, point: Tensor) -> None:
        """Raise ValueError for a vector that cannot be the trained parameters: dtype, size, range."""
        dtype, size = flat_dtype(self.params), number_of_entries(self.params)
        if point.dtype != dtype or point.shape != (size,):
            raise RefusedSetting(
                f"{tuple(point.shape)} of {point.dtype} was sent, and this client's model has "
                f"{size} trained numbers of {dtype}. Build the same module everywhere.",
                topic="federated-messages",
            )
        parts = unflatten(point, self.params)
        if not all(is_finite(part) for part in parts):
            raise RefusedSetting(
                "some numbers are not finite in this client's module.", topic="federated-messages"
            )

    def try_once(self) -> None:
        """Run a copy of the module on synthetic records: an error of the user's costs nothing yet.

        Of the records themselves, only the shapes and dtypes of the first ones are used.

        Raises:
            MisconfigurationException: if there is no loss, or it couples records.
            UnsupportedModelError: if the rows that the model sees are not records.
            Exception: whatever ``training_step`` and the data set raise.
        """
        if not self._try_first:
            return
        copied = copy.copy(self)
        copied._module = copy.deepcopy(self._module)
        copied.params = tuple(p for p in copied._module.parameters() if p.requires_grad)
        dry = DryRun(self._loader.dataset[0], in_units=self.unit == "user")
        with RandomState(self._device).again(), torch.enable_grad():
            try:
                samples = dry.samples(_SYNTHETIC, are_longer=False)[: self._chunk_size]
            except ValueError:
                return  # such samples have no synthetic ones
            try:
                is_answered = copied._answers(samples, dry)
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(_NOT_CHARGED)
                raise
            if not is_answered:
                raise MisconfigurationError(
                    "training_step gives no loss that depends on the trained parameters. "
                    f"{_NOT_CHARGED}",
                    topic="no-loss",
                )

    @abstractmethod
    def _answers(self, samples: list[Any], dry: DryRun) -> bool:
        """Answer about synthetic samples; return False if they give no gradient."""

    def _chunks(self, units: Sequence[list[int]]) -> Iterator[tuple[Any, list[int]]]:
        """Yield batches on the device as the user's code makes them, and the rows of each unit."""
        starts = range(0, len(units), self._chunk_size)
        chunks = [units[start : start + self._chunk_size] for start in starts]
        loader: DataLoader[Any] = DataLoader(
            self._loader.dataset,
            batch_sampler=[[row for unit in chunk for row in unit] for chunk in chunks],
            collate_fn=self._loader.collate_fn,
        )
        for chunk, batch in zip(chunks, loader, strict=True):
            if batch is None:
                raise TypeError(
                    "The collate_fn returned None. Records cannot be left out on the way: return a "
                    "batch for every list of records."
                )
            yield self._on_device(batch), [len(unit) for unit in chunk]

    def _on_device(self, batch: Any) -> Any:
        """Return a batch behind the user's hooks of transfer."""
        module = self._module
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, self._device, 0)
        return module.on_after_batch_transfer(batch, 0)

    def _clipped_whole(self, total: Tensor, clip_norm: float) -> BoundedSum:
        """Return a vector of the whole client, the only "record" of a sum with this bound."""
        return bounded_sum(MaterialisedGradients([total], [total.unsqueeze(0)], 1.0), clip_norm)


class LocalRecords(ModuleRecords):
    r"""One client's records, and the model that it is asked about.

    Answers a :class:`~lightning_dp.boundary.Query` with
    :math:`\sum_i \mathrm{clip}_C(P_c \sum_k w_k h_{ik})` over chosen records, where h_ik is the
    gradient (or a Hessian-vector product) of the loss that ``training_step`` returns for record i.
    The module and the data set are those of an ordinary Lightning training, and are left as they
    were.

    There is no Trainer: ``training_step`` may use ``self.log``, ``self.device``, and the hooks of
    batch transfer, but neither ``self.trainer`` nor ``self.optimizers()``; no other hook runs, and
    nothing that it logs, counts or keeps in buffers is kept. Its loss must be the mean over the batch,
    whose memory is that of one chunk. A record whose gradient is not finite contributes zero.

    Args:
        module: trained in its parameters with ``requires_grad``; their order in ``parameters()``
            is that of flat vectors.
        records: a map-style data set, or the training loader, whose ``collate_fn`` is used and
            whose batch size is the chunk size. Both must make one row of each record; of users, in
            their order: a row in another place would be another user's.
        unit: the part whose presence is hidden. "record": each record's part is clipped to C.
            "client": the un-clipped sum over the records is clipped to C as a whole, so that
            nothing but the noise tells whether the client took part. Sampling records amplifies
            nothing then. A :class:`~lightning_dp.UserLevel`: as with a Trainer, users are drawn, each
            with at most k rows, and the mean of a user's gradients is clipped, once. N counts users.
            Assumed: a user is at one client only.
        engine: the computation of gradients per record; as in ``PrivacyConfig``.
        chunk_size: records, or users, at a time; default the loader's batch size, else 64. Under
            engine="one_by_one" it is 1.
        device: where the module runs.
        try_first: before the first charge, run a copy of the module on synthetic records: a mistake in
            ``training_step`` costs nothing, and one that couples records is refused
            (``docs/isolation.md``). False for a module that such records break.
        loss_graph_check: refuse a loss whose autograd graph mixes records by more than sums with
            constant coefficients; of a whole client, they may be mixed.

    Raises:
        MisconfigurationException: for a model or data whose records cannot be told apart.
        UnsupportedModelError: if no engine can handle the model.
        ValueError: for an unknown ``unit`` or ``engine``, or a ``chunk_size`` below 1.

    Example:
        >>> import lightning as L
        >>> from torch.utils.data import TensorDataset
        >>> class Mean(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(1, 1, bias=False)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch[0]).mean()
        >>> local = LocalRecords(Mean(), TensorDataset(torch.tensor([[1.0], [2.0], [9.0]])))
        >>> from lightning_dp import Term
        >>> query = Query((Term(),), clip_norm=3.0, noise_multiplier=1.0)
        >>> local.bounded_sum(query, [0, 2]).value
        tensor([4.])
    """

    def __init__(
        self,
        module: LightningModule,
        records: Dataset[Any] | DataLoader[Any],
        *,
        unit: Unit | UserLevel = "record",
        engine: str = "auto",
        chunk_size: int | None = None,
        device: str | torch.device = "cpu",
        try_first: bool = True,
        loss_graph_check: bool = True,
    ) -> None:
        super().__init__(module, records, unit, chunk_size, device, try_first)
        self._engine_name, self._one_record = engine, engine == "one_by_one"
        if self._one_record:
            self._chunk_size = 1
        if engine == "hooks" and self.users is not None:
            raise ValueError("engine='hooks' has gradients of rows, not users. Use engine='auto'.")
        self._checks_graph = loss_graph_check and unit != "client"
        with self._passes() as passes:
            self.engine = passes.description
            self.has_products = passes.engine.has_products
            """True if queries with Hessian-vector products can be answered."""

    def _answers(self, samples: list[Any], dry: DryRun) -> bool:
        query = Query((Term(),), clip_norm=1.0, noise_multiplier=1.0)
        with self._passes() as passes, self._muted():
            batch = self._on_device(self._loader.collate_fn(samples))
            found = self._answer(passes, query, batch, [1] * len(samples))
        if found is not None and self.unit != "client":
            self._refuse_coupled(dry)
        return found is not None

    def _refuse_coupled(self, dry: DryRun) -> None:
        """Compare runs of synthetic records, as a fit does before its first charge."""
        module, eps = self._module, max(torch.finfo(param.dtype).eps for param in self.params)
        pipeline = Pipeline(
            lambda few: self._loader.collate_fn(own_copies(few)),
            self._on_device,
            lambda batch: call_training_step(module, batch, 0),
        )
        with RecordPasses(
            module, self.params, self._engine_name, loss_graph_check=self._checks_graph
        ) as passes:
            runner = Runner(module, passes, self.params, pipeline, self._device)
            outcome = dry.run(runner, partial(Settings, eps=eps), 1.0, TwinState(module))
        if outcome.kind == "coupled":
            raise MisconfigurationError(
                f"{type(module).__name__} couples the records of a batch: {outcome.reason}. Clipping "
                "does not bound what a record does then, and ε would not hold. LocalRecords("
                f"engine='one_by_one') runs each record alone. {_NOT_CHARGED}",
                topic="coupled-records",
            )
        if outcome.kind == "not compared":
            _log.warning("Synthetic records of the client were not compared: %s", outcome.reason)

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        """Return the sum of the query over these records, none of which may occur twice.

        Sensitive until it is noised. An empty choice gives zeros.

        Args:
            query: its points are flat vectors in the order of :attr:`params`.
            records: positions in the data set; of users, all their rows that are read.

        Raises:
            UnsupportedModelError: if the rows that the model sees are not records.
            VoidedRunError: if a chunk of records gives no gradient.
            ValueError: if a record occurs twice.
        """
        records = [int(record) for record in records]
        if len(set(records)) != len(records):
            raise RefusedSetting(
                "A record occurs twice in one batch, so it would count twice.",
                topic="repeated-records",
            )
        # Of a whole client, the records have no bound: their sum gets one, as the client's part.
        of_all = replace(query, clip_norm=math.inf, noise_multiplier=0.0)
        asked = of_all if self.unit == "client" else query
        units = [[each] for each in records] if self.users is None else self.users.split(records)
        total = BoundedSum.empty(asked, [self.point])
        with self._passes() as passes, torch.enable_grad():
            for batch, sizes in self._chunks(units):
                with self._muted():
                    found = self._answer(passes, asked, batch, sizes, total)
                if found is not None:
                    total = found
                elif not self._one_record:  # alone, a record without a loss contributes zero
                    raise VoidedRunError(UNANSWERED.format(type(self._module).__name__))
        if self.unit != "client":
            return total
        return self._clipped_whole(total.value, query.clip_norm)

    def _answer(
        self,
        passes: RecordPasses,
        query: Query,
        batch: Any,
        sizes: list[int],
        onto: BoundedSum | None = None,
    ) -> BoundedSum | None:
        """Answer a query from a batch of units of so many rows, onto a sum; None without gradient."""

        def forward(batch: Any) -> Any:
            # No number of the chunk: it is that of the records before, and batch_idx may be used.
            return call_training_step(self._module, batch, 0)

        replay = Replay(forward, batch, len(sizes))
        if self.users is not None and not self._one_record:
            places = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            replay = replace(replay, owners=RowOwners(len(sizes), places))
        return passes.answer(query, replay, onto=onto)

    def _passes(self) -> RecordPasses:
        """Watch the module, until the result is detached: nothing of it is left there then."""
        return RecordPasses(
            self._module,
            self.params,
            self._engine_name,
            quietly=self._quietly,
            loss_graph_check=self._checks_graph,
        )

    def _muted(self) -> AbstractContextManager[object]:
        """Leave no trace of a chunk, which the next could read; records that run alone are apart."""
        return nullcontext() if self._one_record else restored(self._module, global_random=False)

    @contextmanager
    def _quietly(self, engine: AbstractGradientEngine) -> Iterator[Around | None]:
        alone: AbstractContextManager[Around | None] = nullcontext()
        if self._one_record:
            alone = apart(self._module)
        elif engine.runs_parts:
            alone = SideEffects(self._module).of_step(are_done=False)
        # Weights that training_step changes in place are copies.
        with at_point(self.params, self.point), alone as around:
            yield around


def _check_module(module: nn.Module) -> None:
    """Refuse what cannot be answered for record by record, as the Trainer's path does."""
    if not isinstance(module, LightningModule):
        raise MisconfigurationError(
            f"The model is a {type(module).__name__} and not a lightning.pytorch.LightningModule.",
            topic="federated-data",
        )
    if not module.automatic_optimization:
        raise MisconfigurationError(
            "The module uses manual optimization, but a client makes no optimizer steps: the server "
            "does. Use automatic optimization: training_step returns the loss.",
            topic="manual-optimization",
        )
    if not any(param.requires_grad for param in module.parameters()):
        raise MisconfigurationError(
            "The module has no trainable parameter (requires_grad is False everywhere).",
            topic="optimizer",
        )
    check_training_step(module)
    check_model(module)
