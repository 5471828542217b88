"""Several data holders and a server that they trust, over ``torch.distributed``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._noise import random_generator
from lightning_dp._refusals import RefusedRun, RefusedSetting, text_of
from lightning_dp._validate import number, whole
from lightning_dp._world import World
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.config import PrivacyConfig
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.messages import Message
from lightning_dp.federated.protocol import draw
from lightning_dp.federated.synchronous import QUERY, query_from, query_message
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.mechanism import Mechanism
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan

__all__ = ["TrustedServer"]

_SERVER = 0
_STOP, _NOTHING, _FAILED = "stop", "nothing", "failed"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TrustedServer:
    """Private training over ranks that trust rank 0, and not each other.

    Each rank holds its own records. At every step rank 0 asks all ranks for the bounded sum of
    a query over their records, *gathers* the sums, noises the total once, takes the optimizer's
    step and broadcasts the new weights. So a rank other than 0 sees its own records and noised
    values only. (``reduce`` would leave sums without noise on ranks in between, and ``all_reduce``
    would give them to everyone.)

    Any estimator of one query per step works; with :class:`~lightning_dp.Diff2` and
    ``FullBatch()`` this is DIFF2 of Murata and Suzuki (2023), Algorithm 1, whose server is trusted.

    The ledger on rank 0 holds for every record of every rank. Rank 0 checks that models are alike
    before anything is charged, and that each sum is finite before it is added; if not, all ranks
    raise. A rank that fails by itself makes the others wait until the process group's timeout.

    Args:
        local: this rank's records and model, the same model on every rank.
        optimizer: over the model's trained parameters; used on rank 0 only.
        privacy: the configuration, the same on every rank. Its ``sampling`` draws each rank's part
            of a batch; ``ledger_dir`` is where rank 0 keeps the journal.
        sample_rate: q in (0, 1], of every rank's records.

    Raises:
        ValueError: for a ``sample_rate`` out of range, client-level ``local`` records, an optimizer
            over other parameters, or an estimator that it does not run.
        RuntimeError: without an initialised process group.

    Example (on every rank, started with ``torchrun``)::

        dist.init_process_group("gloo")
        local = LocalRecords(module, records_of_this_rank)
        privacy = PrivacyConfig(target_epsilon=3.0, target_delta=1e-6,
                                estimator=Diff2(20, 1.0, 1.0), sampling=FullBatch())
        training = TrustedServer(local, module.configure_optimizers(), privacy)
        training.fit(rounds=100)
        print(training.epsilon)
    """

    def __init__(
        self,
        local: LocalRecords,
        optimizer: Optimizer,
        privacy: PrivacyConfig,
        *,
        sample_rate: float = 1.0,
    ) -> None:
        if not 0 < number("sample_rate", sample_rate) <= 1:
            raise ValueError(f"sample_rate={sample_rate} must be in (0, 1].")
        if local.unit != "record":
            raise ValueError(
                f"unit={local.unit!r}: the ledger of a trusted server speaks of records. Use "
                "LocalRecords(unit='record')."
            )
        estimator = privacy.resolved_estimator()
        if estimator.traits.queries_per_step > 1:
            raise ValueError(
                f"estimator={estimator} asks several queries on one batch, which a trusted server "
                "does not. Use MeanGradient, Diff2 or Storm."
            )
        estimator.check(optimizer)
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if stepped != {id(param) for param in local.params}:
            raise ValueError(
                "The optimizer is not over exactly the trained parameters (requires_grad) of the "
                "module in `local`."
            )
        if not dist.is_initialized():
            raise RefusedRun(
                "Call torch.distributed.init_process_group() first.", topic="out-of-order"
            )
        self.epsilon = 0.0
        """ε spent at ``target_delta``; the same on every rank."""
        self.private_run = PrivateRun(privacy)
        """Ledger and report; filled on rank 0."""
        self._local, self._optimizer, self._sample_rate = local, optimizer, sample_rate
        self._is_server = dist.get_rank() == _SERVER
        self._rng = random_generator(privacy.seed, 1, dist.get_rank(), 0)
        self._dtype = torch.promote_types(local.point.dtype, torch.float32)

    def fit(self, rounds: int, directory: str | Path = ".") -> None:
        """Make this many steps, or as many as the budget allows; all ranks end with one model.

        Args:
            rounds: R, their number.
            directory: where rank 0 makes the folder ``privacy`` of the journal, without a
                ``ledger_dir``.

        Raises:
            ValueError: on every rank, if a rank has another model.
            VoidedRunError: on every rank, if a rank's sum is not finite.
        """
        rounds = whole("rounds", rounds)
        run = self.private_run
        num_records = self._agree()
        if self._is_server:
            folder = run.config.ledger_dir or Path(directory) / "privacy"
            run.use_batches(BatchPlan(num_records, self._sample_rate, 1, 1))
            run.start(rounds, World(), Path(folder))
        try:
            made = 0
            while (made < rounds or not self._is_server) and self._step():
                made += 1
            if self._is_server and made == rounds:
                self._share(Message(_STOP))  # the others wait for the next question
        finally:
            run.stop()
        self._share_model()
        self.epsilon = float(self._broadcast(torch.tensor([run.epsilon], dtype=torch.float64)))

    def _step(self) -> bool:
        """Make one step; return False if the budget is at its end."""
        message = self._share(self._ask() if self._is_server else None)
        if message.kind == _FAILED:
            raise VoidedRunError("rank 0 has refused the sum of a rank, which its error names.")
        if message.kind == _STOP:
            return False
        if message.kind == QUERY:
            query = query_from(message)
            self._gather(query, self._answer_together(query, message["sample_rate"]))
        if self._is_server:
            self._take_step()
        return True

    # -- rank 0 ------------------------------------------------------------------------------

    @property
    def _mechanism(self) -> Mechanism:
        """The mechanism of the fit that goes on; rank 0 alone has one."""
        mechanism = self.private_run.mechanism
        assert mechanism is not None
        return mechanism

    def _ask(self) -> Message:
        """Charge the next step and form its query."""
        mechanism = self._mechanism
        if mechanism.exhausted:
            self.private_run.stop_reason = "privacy budget reached"
            return Message(_STOP)
        rate = mechanism.plan.rate(mechanism.step)
        query = mechanism.ask(self._local.params)
        if query is None:
            return Message(_NOTHING)
        return query_message(query, self._local.point, {"sample_rate": rate})

    def _take_step(self) -> None:
        mechanism, params = self._mechanism, self._local.params
        estimate = mechanism.tell(params)
        for param, gradient in zip(params, unflatten(estimate, params), strict=True):
            param.grad = gradient
        self._optimizer.step()
        for param in params:
            param.grad = None

    # -- every rank --------------------------------------------------------------------------

    def _answer(self, query: Query, sample_rate: float) -> BoundedSum:
        """Return the bounded sum over this rank's part of the batch."""
        sampling = self.private_run.config.sampling
        drawn = draw(self._local, sample_rate, self._rng, sampling)
        return self._local.bounded_sum(query, drawn)

    def _answer_together(self, query: Query, sample_rate: float) -> BoundedSum:
        """Return the same, or raise on every rank if the records of one of them failed a check."""
        part, reason = None, ""
        try:
            part = self._answer(query, sample_rate)
        except (VoidedRunError, UnsupportedModelError) as error:
            reason = getattr(error, "reason", text_of(error))
        if not self._sum_over_ranks(part is None) and part is not None:
            return part
        reason = reason or "the records of another rank failed a check, which its error names."
        if self._is_server:
            self.private_run.void(reason)
        raise VoidedRunError(reason)

    def _gather(self, query: Query, part: BoundedSum) -> None:
        """Bring the ranks' sums to rank 0, and to no other, and give them to the mechanism."""
        if not self._is_server:
            dist.gather(part.value, dst=_SERVER)
            return
        values = [torch.empty_like(part.value) for _ in range(dist.get_world_size())]
        dist.gather(part.value, values, dst=_SERVER)
        mechanism = self._mechanism
        for rank, value in enumerate(values):
            if not bool(torch.isfinite(value).all()):
                self._share(Message(_FAILED))
                reason = f"the sum of rank {rank} is not finite, as clipped sums are."
                self.private_run.void(reason)
                raise VoidedRunError(reason)
        for value in values:
            mechanism.answer(BoundedSum.received(value, query))

    def _share(self, message: Message | None) -> Message:
        """Return rank 0's message on every rank."""
        content = b"" if message is None else message.to_bytes()
        length = int(self._broadcast(torch.tensor([len(content)])))
        raw = torch.frombuffer(bytearray(content or length), dtype=torch.uint8)
        return Message.from_bytes(self._broadcast(raw).numpy().tobytes())

    def _share_model(self) -> None:
        params = self._local.params
        point = self._broadcast(flatten(params))
        with torch.no_grad():
            for param, value in zip(params, unflatten(point, params), strict=True):
                param.copy_(value)

    @staticmethod
    def _broadcast(value: Tensor) -> Tensor:
        value = value.contiguous()
        dist.broadcast(value, _SERVER)
        return value

    def _agree(self) -> int:
        """Return N over all ranks; raise ValueError on each if their models are not of one kind."""
        here = self._local.point
        mine = [self._local.num_records, len(here), _DTYPES.index(here.dtype)]
        answers = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(answers, torch.tensor(mine))
        counts = [each.tolist() for each in answers]
        for rank, (_, size, dtype) in enumerate(counts):
            if [size, dtype] != counts[_SERVER][1:]:
                raise RefusedSetting(
                    f"Rank {rank} trains {size} numbers of {_DTYPES[dtype]}, and rank {_SERVER} trains "
                    f"{counts[_SERVER][1]} of {_DTYPES[counts[_SERVER][2]]}. Give every rank the same "
                    "model.",
                    topic="ranks-differ",
                )
        return sum(num_records for num_records, _, _ in counts)

    @staticmethod
    def _sum_over_ranks(value: int) -> float:
        total = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)
