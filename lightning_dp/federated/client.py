"""The client of every protocol: requests are checked, charged, answered from the records, and kept."""

from __future__ import annotations

import itertools
import json
import logging
import math
import reprlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._refusals import RefusedRun, text_of
from lightning_dp._validate import instance, optional
from lightning_dp._validate import seed as check_seed
from lightning_dp._world import World
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.boundary import BoundedSum, Query, Release, add_noise
from lightning_dp.estimators.base import AbstractEstimator, share_of_noise
from lightning_dp.federated.ledger import Budget, Claims, ReleaseLedger, Spending
from lightning_dp.federated.protocol import (
    REFUSED,
    Fact,
    Message,
    MessageError,
    Records,
)
from lightning_dp.functional import is_finite
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import AbstractSampling, Poisson
from lightning_dp.sampling.units import RowsOfUnits

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
        make: makes it, once it is charged, with the generator of the batch and the noise.
        keep: False for what must not be written to disk (a sum that a trusted server will noise).
    """

    round: int
    part: int
    place: Mapping[str, Fact]
    make: Callable[[np.random.Generator, NoiseSource], Message]
    keep: bool = True


class Client(ABC):
    """The client of a protocol: requests in, replies out, one at a time.

    For each request, in this order: it is checked; the first time, the model is tried on synthetic
    records; the round is charged to the ledger, on disk; the records are asked, and the answer is
    noised; the reply is kept, on disk, and sent. So a refused request charges nothing, and one that is
    made again, also of a new process on the same ledger, gets the same bytes and no second noise.

    A protocol adds ``kinds``, the requests that it has, and :meth:`events` and :meth:`read`. These
    hold no state: what a round needs comes with the request.
    """

    kinds: ClassVar[tuple[str, ...]]

    records: Records
    ledger: ReleaseLedger
    run: str
    spending: Spending
    """The whole plan and the budget."""

    _seed: int | None  # for tests only: the same batches and noise each time

    def _declare(self, rounds: int, budget: Budget, seed: int | None) -> None:
        """Check what all clients have, and declare the whole plan and the budget."""
        instance("records", self.records, Records)  # type: ignore[type-abstract]
        instance("ledger", self.ledger, ReleaseLedger)
        self._seed = optional(check_seed)("seed", seed)
        self.spending = Spending(*(self.run, rounds, self.events, *budget), unit=self.records.unit)
        self._claims = Claims(self.ledger, self.spending)

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
        """Public numbers about this client, among them ``epsilon``, spent so far."""
        return {
            "unit": self.records.unit,
            "seeded": self._seed is not None,
            "epsilon": self._claims.epsilon(),
            "delta": self.spending.target_delta,
            "relation": self.spending.relation,
        }

    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request; if the budget does not allow it, :data:`REFUSED`, uncharged.

        Raises:
            MessageError: for bytes that are no request of this protocol, or too old a one.
            JournalError: if the ledger cannot be trusted, or another process uses it.
        """
        message = Message.from_bytes(request)
        if message.kind not in self.kinds or message["run"] != self.spending.run:
            raise MessageError(
                f"This client answers rounds of run {self.spending.run!r}, not "
                f"{reprlib.repr(dict(message.facts))}."
            )
        planned = self.read(message)

        def charged(rng: np.random.Generator) -> bytes:
            if self._seed is not None:  # batches and noise are different streams of it
                rng = random_generator(self._seed, 1, planned.round)
            source = noise_source(self._seed, planned.round, planned.part)
            return planned.make(rng, source).to_bytes()

        place = (self.spending, planned.round, planned.part)
        try:
            try_first = getattr(self.records, "try_once", None)
            return self.ledger.release(
                *place, charged, keep=planned.keep, try_first=try_first, request=request
            )
        except BudgetExhausted as error:  # made of plans and charges
            _log.warning("The client leaves: %s", text_of(error))
            return Message(REFUSED, planned.place).to_bytes()


# -- what clients do with their records --------------------------------------------------------


def draw(
    records: Records,
    rate: float,
    rng: np.random.Generator,
    sampling: AbstractSampling = _POISSON,
) -> list[int]:
    """Sample the records of a batch, or users with rows of theirs: each with probability ``rate``."""
    drawn = sampling.draw(records.num_records, rate, rng)
    users = getattr(records, "users", None)
    rows = users.draw(drawn, rng)[0] if isinstance(users, RowsOfUnits) and len(drawn) else drawn
    return [int(row) for row in rows]


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
    if not len(point) or not is_finite(point):
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
            f"{type(estimator).__name__} needs Hessian-vector products, which the engine of these "
            "records does not have. Use LocalRecords(engine='auto').",
            topic="hessian-products",
        )


def is_of_ordinary_size(query: Query) -> bool:
    """Return True where clipping and noising are arithmetic far from the ends of float32."""
    noise = query.clip_norm * query.noise_multiplier
    return _SMALLEST <= query.clip_norm <= _LARGEST and _SMALLEST <= noise <= _LARGEST


def at_point(query: Query, point: Tensor) -> Query:
    """Return a query whose terms name their points, the present one being ``point``."""
    terms = (t if t.point is not None else replace(t, point=point) for t in query.terms)
    return replace(query, terms=tuple(terms))


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
            f"{step}: records cannot be clipped to numbers that small or large. Use numbers between "
            f"{_SMALLEST:g} and {_LARGEST:g}."
        )
    state = plan.estimator.recall(query, step, part)
    if state is None:
        for term in query.terms:
            if term.weight and not _SMALLEST <= abs(term.weight) <= _LARGEST:
                raise MessageError(
                    f"A term of step {step} has the weight {term.weight}. Use 0, or sizes between "
                    f"{_SMALLEST:g} and {_LARGEST:g}."
                )
        return
    here = cast("Tensor", query.terms[0].point)
    try:
        expected = plan.estimator.ask(state, [here], step, z)
    except (RuntimeError, ValueError, IndexError) as error:
        raise MessageError(f"The query of step {step} cannot be asked: {text_of(error)}") from None
    if expected is None:
        raise MessageError(
            f"At step {step} the plan asks nothing about these points, since they are the same."
        )
    theirs, ours = parts(query), parts(at_point(expected, here))
    for name in {**theirs, **ours}:
        if not _equal(theirs.get(name), ours.get(name)):
            raise MessageError(
                f"The server's {name} of step {step} is not the plan's. {_PLAN_CURE}"
            )
    if not math.isclose(query.clip_norm, expected.clip_norm, rel_tol=_TOLERANCE):
        raise MessageError(
            f"The server asks for clip_norm={query.clip_norm} at step {step}, and the plan has "
            f"{expected.clip_norm}. {_PLAN_CURE}"
        )


def parts(query: Query) -> dict[str, float | Tensor | None]:
    """Return the parts of a query that must be the plan's exactly, by their names in a message."""
    named: dict[str, float | Tensor | None] = {"coordinates": query.coordinates}
    for number, term in enumerate(query.terms):
        named[f"weight{number}"] = float(term.weight)
        named[f"point{number}"], named[f"direction{number}"] = term.point, term.direction
    return named


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a is b or (isinstance(a, float) and a == b)


def _check_vectors(records: Records, query: Query) -> None:
    """Check that all vectors of a query belong to the client's model, with its coordinates."""
    first = cast("Tensor", query.terms[0].point)  # messages write all points out
    for name, vector in parts(query).items():
        if not isinstance(vector, Tensor) or name == "coordinates":
            continue
        # Directions are noised answers, whose dtype may be wider than the model's.
        is_wider = vector.dtype == torch.promote_types(first.dtype, torch.float32)
        if vector.dtype != first.dtype and not (is_wider and name.startswith("direction")):
            raise MessageError(f"{name} is of {vector.dtype}, and the model of {first.dtype}.")
        check_point(records, vector.to(first.dtype), name)
        if len(vector) != len(first):
            raise MessageError(f"{name} has {len(vector)} numbers, and point0 {len(first)}.")
    if query.coordinates is not None and not int(query.coordinates[-1]) < len(first):
        raise MessageError(
            f"Coordinate {int(query.coordinates[-1])} of {len(first)} was asked for."
        )


# -- the server's module is the client's -------------------------------------------------------


def fingerprint(module: nn.Module) -> str:
    """Describe a module: names, shapes and dtypes of what is trained, checksums of what is not."""
    found: dict[str, dict[str, str]] = {"trained": {}, "frozen": {}, "buffers": {}}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        kind, part = f"{tensor.dtype} {list(tensor.shape)}", "trained"
        if not tensor.requires_grad:
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            kind = f"{kind} {zlib.crc32(values.numpy().tobytes()):08x}"
            part = "frozen" if isinstance(tensor, nn.Parameter) else "buffers"
        found[part][name] = kind
    return json.dumps(found)


def check_fingerprint(of_the_server: str, here: str) -> None:
    """Raise MessageError, naming parameters that differ, for a server with another module.

    What is trained must agree in kind and order; other names are no matter. Buffers that differ are
    logged only: some are computed, and machines round.
    """
    try:
        theirs, ours = (
            {part: {**json.loads(text)[part]} for part in ("trained", "frozen", "buffers")}
            for text in (of_the_server, here)
        )
    except (ValueError, TypeError, KeyError):
        raise MessageError("The server's description of its module cannot be read.") from None
    trained, there = ours["trained"], theirs["trained"]
    pairs = itertools.zip_longest(trained.items(), there.items(), fillvalue=("nothing", "none"))
    for (name, kind), (name_there, kind_there) in pairs:
        if kind != kind_there or (trained.keys() == there.keys() and name != name_there):
            raise MessageError(
                f"The trained parameters are not the server's: {name} ({kind}), where the server has "
                f"{name_there} ({kind_there}). {_MODULE_CURE}"
            )
    frozen, buffers = (
        ", ".join([n for n in {**a, **b} if a.get(n) != b.get(n)][:_SHOWN])
        for a, b in ((ours[part], theirs[part]) for part in ("frozen", "buffers"))
    )
    if frozen:
        raise MessageError(
            f"The frozen parameters {frozen} are not those of the server's module, so what it trains "
            f"means something else here. {_MODULE_CURE}"
        )
    if buffers:
        _log.warning(
            "The buffers %s are not those of the server's module. %s", buffers, _MODULE_CURE
        )
