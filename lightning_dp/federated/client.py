"""The client of every protocol: requests are checked, charged, answered from the records, and kept."""

from __future__ import annotations

import json
import logging
import math
import reprlib
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._refusals import RefusedRun, text_of
from lightning_dp._validate import instance
from lightning_dp._world import World
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.boundary import BoundedSum, Query, Release, add_noise
from lightning_dp.estimators.base import AbstractEstimator, share_of_noise
from lightning_dp.federated.ledger import Budget, ReleaseLedger, Spending
from lightning_dp.federated.protocol import (
    LOST,
    REFUSED,
    AbstractClient,
    Fact,
    Message,
    MessageError,
    Records,
)
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import AbstractSampling, Poisson

__all__ = ["Client", "PlannedRelease", "draw", "noise_source", "noised_sum"]

# Clip norms, and clip norm times noise multiplier. Squares of smaller or larger float32 numbers
# vanish or overflow, and a norm that is found to be 0 or infinite bounds nothing.
_SMALLEST, _LARGEST = 1e-15, 1e15
_TOLERANCE = 1e-6  # of the server's arithmetic
_ROUNDING = 1 - 1e-12

_POISSON = Poisson()
_PLAN_CURE = "Give the server this client's plan."
_MODULE_CURE = (
    "Build the same module everywhere: load its frozen weights from one file, or seed its "
    "construction with torch.manual_seed."
)
_SHOWN = 3
_log = logging.getLogger("lightning_dp.federated")


@dataclass(frozen=True)
class PlannedRelease:
    """One release that a server asks for, public and checked.

    Args:
        round, part: its place in the ledger.
        place: its place as the server calls it, for a reply that has no other content.
        make: makes it, once it is charged, with the generator of the batch and the noise; None if
            the client no longer has the model that it was to be made at, and can only repeat it.
        keep: False for what must not be written to disk (a sum that a trusted server will noise).
        note: what a new process must know to go on after it; public.
    """

    round: int
    part: int
    place: Mapping[str, Fact]
    make: Callable[[np.random.Generator, NoiseSource], Message] | None
    keep: bool = True
    note: bytes = b""


class Client(AbstractClient):
    """A client, of whichever protocol.

    For each request, in this order: it is checked; the first time, the model is tried on synthetic
    records; the round is charged to the ledger, on disk; the records are asked, and the answer is
    noised; the reply is kept, on disk, and sent. So

    - asked again, also as a new process on the same ledger, the client sends the same bytes, and no
      second noise is drawn;
    - a refused request, or a round that the budget does not allow, charges nothing.

    A protocol adds ``kinds``, the requests that it has, and :meth:`events` and :meth:`read`. These
    hold no state: what a round needs comes with the request, or with the latest release.
    """

    kinds: ClassVar[tuple[str, ...]]

    records: Records
    ledger: ReleaseLedger
    run: str
    spending: Spending
    """The whole plan and the budget."""

    _seed: int | None  # for tests only: the same batches and noise each time

    def _declare(self, rounds: int, budget: Budget, seed: int | None, retain: int) -> None:
        """Declare the whole plan and the budget."""
        instance("ledger", self.ledger, ReleaseLedger)
        self._seed = seed
        self.spending = Spending(self.run, rounds, self.events, *budget, retain=retain)

    @abstractmethod
    def events(self, i: int) -> Sequence[AbstractEvent]:
        """Return the privacy events of the ledger's round i, charged before its first release.

        Of a whole client, whose presence is not a matter of chance, sampling amplifies nothing.
        """

    @abstractmethod
    def read(self, request: Message) -> PlannedRelease:
        """Check a request of this run, before anything is charged.

        Raises:
            MessageError: for one that does not keep to the plan.
        """

    @property
    def epsilon(self) -> float:
        """ε at ``target_delta`` spent so far on this data set, by all runs."""
        return self.ledger.epsilon(self.spending.target_delta, self.spending.relation)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "unit": self.records.unit,
            "seeded": self._seed is not None,
            "epsilon": self.epsilon,
            "delta": self.spending.target_delta,
            "relation": self.spending.relation,
        }

    def answer(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        if message.kind not in self.kinds or message["run"] != self.spending.run:
            raise MessageError(
                f"This client answers rounds of run {self.spending.run!r}, not "
                f"{reprlib.repr(dict(message.facts))}."
            )
        planned = self.read(message)
        make = planned.make
        if make is None:
            sent = self.ledger.find(self.spending, planned.round, planned.part)
            return sent or Message(LOST, planned.place).to_bytes()
        # A mistake in the client's module costs nothing before the first charge.
        try_once = getattr(self.records, "try_once", None)
        if try_once is not None and not self.ledger.has_begun(self.spending):
            try_once()

        def charged(rng: np.random.Generator) -> bytes:
            if self._seed is not None:  # batches and noise are different streams of it
                rng = random_generator(self._seed, 1, planned.round)
            return make(rng, noise_source(self._seed, planned.round, planned.part)).to_bytes()

        place = (self.spending, planned.round, planned.part)
        try:
            return self.ledger.release(*place, charged, keep=planned.keep, note=planned.note)
        except BudgetExhausted:
            return Message(REFUSED, planned.place).to_bytes()


# -- what clients do with their records --------------------------------------------------------


def draw(
    records: Records,
    rate: float,
    rng: np.random.Generator,
    sampling: AbstractSampling = _POISSON,
) -> list[int]:
    """Sample the records of a batch: each with probability ``rate``, by default."""
    return [int(record) for record in sampling.draw(records.num_records, rate, rng)]


def noise_source(seed: int | None, *stream: int) -> NoiseSource:
    """Return noise that the operating system seeds; with a ``seed``, for tests, repeatable noise."""
    if seed is None:
        return NoiseSource()
    return NoiseSource(int(random_generator(seed, 2, *stream).integers(2**62)))


def bounded(records: Records, query: Query, batch: list[int]) -> BoundedSum:
    """Return the answer of the records, checked to have the bound that was asked for."""
    total = records.bounded_sum(query, batch)
    if total.clip_norm != query.clip_norm:
        raise RefusedRun(
            f"The answer is bounded by {total.clip_norm}, the query asked for {query.clip_norm}.",
            topic="out-of-order",
        )
    return total


def noised_sum(records: Records, query: Query, batch: list[int], source: NoiseSource) -> Release:
    """Return the sum over the records of a batch, with the noise of the query."""
    return add_noise(bounded(records, query, batch), query.noise_multiplier, source, World())


# -- the server's model and query are those of the plan ----------------------------------------


def check_point(records: Records, point: Tensor, name: str = "The model") -> None:
    """Raise MessageError for what cannot be the trained parameters of the client's model."""
    if not point.dtype.is_floating_point:
        raise MessageError(f"{name} is of {point.dtype}, not of floating-point numbers.")
    if not len(point) or not bool(torch.isfinite(point).all()):
        raise MessageError(f"{name} is not finite.")
    check = getattr(records, "check_point", None)  # records without a module check no more
    if check is None:
        return
    try:
        check(point)
    except ValueError as error:
        raise MessageError(f"{name}: {text_of(error)}") from None


def check_engine(records: Records, estimator: AbstractEstimator) -> None:
    """Raise UnsupportedModelError if the records' model cannot answer the estimator's queries."""
    if estimator.traits.uses_hessian and not getattr(records, "has_products", True):
        raise UnsupportedModelError(
            f"{type(estimator).__name__} needs Hessian-vector products, which only the "
            "'layers' engine computes. Use LocalRecords(engine='layers') to see what it "
            "does not support in this model.",
            topic="hessian-products",
        )


def is_of_ordinary_size(query: Query) -> bool:
    """Return True where clipping and noising are arithmetic far from the ends of float32."""
    noise = query.clip_norm * query.noise_multiplier
    return _SMALLEST <= query.clip_norm <= _LARGEST and _SMALLEST <= noise <= _LARGEST


def check_query(records: Records, plan: NoisePlan, query: Query, step: int, part: int) -> None:
    """Raise MessageError, naming what differs, for a query that is not the plan's at this step.

    The client asks its own estimator about the points that it was sent: terms, weights,
    coordinates, clip norm and noise must be those.
    """
    _check_vectors(records, query)
    z = plan.noise_multiplier(step)
    least = share_of_noise(z, plan.estimator.traits.queries_per_step)
    if not least * _ROUNDING <= query.noise_multiplier <= least * (1 + _TOLERANCE):
        below = "below" if query.noise_multiplier < least else "not"
        raise MessageError(
            f"The server asks for noise_multiplier={query.noise_multiplier} at step {step}, {below} "
            f"the planned {least}. {_PLAN_CURE}"
        )
    if z > 0 and not is_of_ordinary_size(query):
        raise MessageError(
            f"clip_norm={query.clip_norm} with noise_multiplier={query.noise_multiplier} at step "
            f"{step}: records cannot be clipped to numbers that small or large."
        )
    state = plan.estimator.recall(query, step, part)
    if state is None:
        for term in query.terms:
            if term.weight and not _SMALLEST <= abs(term.weight) <= _LARGEST:
                raise MessageError(f"A term of step {step} has the weight {term.weight}.")
        return
    try:
        expected = plan.estimator.ask(state, [query.terms[0].point], step, z)  # type: ignore[list-item]
    except (RuntimeError, ValueError, IndexError) as error:
        raise MessageError(f"The query of step {step} cannot be asked: {text_of(error)}") from None
    if expected is None:
        raise MessageError(
            f"At step {step} the plan asks nothing about these points, since they are the same."
        )
    _check_same(query, expected, step)


def _check_vectors(records: Records, query: Query) -> None:
    """Check that all vectors of a query belong to the client's model, with its coordinates."""
    first = query.terms[0].point
    assert first is not None  # messages write all points out
    for number, term in enumerate(query.terms):
        point, direction = term.point, term.direction
        assert point is not None
        check_point(records, point, f"point{number}")
        if direction is not None:  # noised answers, whose dtype may be wider than the model's
            if direction.dtype not in (
                point.dtype,
                torch.promote_types(point.dtype, torch.float32),
            ):
                raise MessageError(
                    f"direction{number} is of {direction.dtype}, and the model of {point.dtype}."
                )
            check_point(records, direction.to(point.dtype), f"direction{number}")
        for vector in (point, direction):
            if vector is not None and len(vector) != len(first):
                raise MessageError(f"A vector of {len(vector)} numbers is next to {len(first)}.")
        if point.dtype != first.dtype:
            raise MessageError("The points of the query are of several dtypes.")
    if query.coordinates is not None and not int(query.coordinates[-1]) < len(first):
        raise MessageError(
            f"Coordinate {int(query.coordinates[-1])} of {len(first)} was asked for."
        )


def _check_same(query: Query, expected: Query, step: int) -> None:
    """Raise MessageError, naming what differs, unless the server asks what the client would."""
    weights, own = ([term.weight for term in each.terms] for each in (query, expected))
    if weights != own:
        raise MessageError(
            f"The server asks for terms of weights {weights} at step {step}, and the plan has "
            f"{own}. {_PLAN_CURE}"
        )
    here = query.terms[0].point
    for number, (ours, theirs) in enumerate(zip(expected.terms, query.terms, strict=True)):
        if not _equal(here if ours.point is None else ours.point, theirs.point):
            raise MessageError(f"point{number} of step {step} is not the plan's. {_PLAN_CURE}")
        if not _equal(ours.direction, theirs.direction):
            raise MessageError(f"direction{number} of step {step} is not the plan's. {_PLAN_CURE}")
    if not _equal(expected.coordinates, query.coordinates):
        raise MessageError(f"The coordinates of step {step} are not the plan's. {_PLAN_CURE}")
    if not math.isclose(query.clip_norm, expected.clip_norm, rel_tol=_TOLERANCE):
        raise MessageError(
            f"The server asks for clip_norm={query.clip_norm} at step {step}, and the plan has "
            f"{expected.clip_norm}. {_PLAN_CURE}"
        )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


# -- the server's module is the client's -------------------------------------------------------

_Tensors: TypeAlias = list[tuple[str, str]]  # names, and what is compared of each


def fingerprint(module: nn.Module) -> str:
    """Describe a module: names, shapes and dtypes of what is trained, checksums of what is not."""
    params = list(module.named_parameters())
    described = {
        "trained": [[name, _kind(p)] for name, p in params if p.requires_grad],
        "frozen": [[name, _checksum(p)] for name, p in params if not p.requires_grad],
        "buffers": [[name, _checksum(buffer)] for name, buffer in module.named_buffers()],
    }
    return json.dumps(described)


def check_fingerprint(of_the_server: str, here: str) -> None:
    """Raise MessageError, naming parameters that differ, for a server with another module.

    Buffers that differ are logged only: some are computed, and machines round.
    """
    theirs, ours = _read_fingerprint(of_the_server), _read_fingerprint(here)
    if other := _other_order(theirs["trained"], ours["trained"]):
        raise MessageError(f"The trained parameters are not the server's: {other}. {_MODULE_CURE}")
    if other := _differing(theirs["frozen"], ours["frozen"]):
        raise MessageError(
            f"The frozen parameters {other} are not those of the server's module, so what it trains "
            f"means something else here. {_MODULE_CURE}"
        )
    if other := _differing(theirs["buffers"], ours["buffers"]):
        _log.warning("The buffers %s are not those of the server's module. %s", other, _MODULE_CURE)


def _read_fingerprint(text: str) -> dict[str, _Tensors]:
    try:
        found: Any = json.loads(text)
        return {
            part: [(str(name), str(value)) for name, value in found[part]]
            for part in ("trained", "frozen", "buffers")
        }
    except (ValueError, TypeError, KeyError):
        raise MessageError("The server's description of its module cannot be read.") from None


def _other_order(theirs: _Tensors, ours: _Tensors) -> str:
    """Return where two lists of parameters differ in kind or order; other names are no matter."""
    if len(theirs) != len(ours):
        return f"{len(ours)} tensors, and {len(theirs)} at the server"
    is_permuted = sorted(name for name, _ in theirs) == sorted(name for name, _ in ours)
    for (name, kind), (there, kind_there) in zip(ours, theirs, strict=True):
        if kind != kind_there or (is_permuted and name != there):
            return f"{name} ({kind}), where the server has {there} ({kind_there})"
    return ""


def _differing(theirs: _Tensors, ours: _Tensors) -> str:
    here, there = dict(ours), dict(theirs)
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _checksum(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{_kind(tensor)} {zlib.crc32(values.numpy().tobytes()):08x}"
