"""Runs of cubic_newton.py: one through the package, and many settings at once for tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from cubic_newton_data import Problem, problem
from outer_products import NetworkGradients, Outer
from scratch_ledger import ScratchLedger
from torch import Tensor

from lightning_dp import CubicNewton
from lightning_dp.accounting import calibrate
from lightning_dp.boundary import BoundedSum, Query, State, Term, bounded_sum
from lightning_dp.estimators.cubic_newton import average_weight
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.functional import shared_mask
from lightning_dp.gradients.passes import passes_of

DELTA = 1e-5
MASK_SEED = 1000
# Seeds of the search, and how many noises each has: of all settings, of the best few, of the best.
ALL, FINALISTS, BEST = (101, 2), (102, 4), (103, 20)
FEW = 3


@dataclass(frozen=True)
class Setting:
    """The settings that are tuned.

    Args:
        inner: τ; 1 is Fed-SGD.
        rate: η, the step of the inner solver (of Fed-SGD: the learning rate).
        clip: C_g.
        curvature: C_H / C_g; the Hessian of one record's loss has norm at most 1/4.
        scale: α.
        cubic: M of the cubic term.
        is_local: plain local gradient steps instead of the quadratic model.
        whole: with k < d, the inner solver works in all coordinates.
    """

    inner: int
    rate: float
    clip: float
    curvature: float = 0.25
    scale: float = 1.0
    cubic: float = 0.0
    is_local: bool = False
    whole: bool = False

    def estimator(self, weight_decay: float, kept: float) -> CubicNewton:
        of = LocalSteps if self.is_local else CubicNewton
        return of(
            strong_convexity=min(1e-6, weight_decay),  # steps of constant size: max_step_size
            hessian_lipschitz=self.cubic,
            inner_steps=self.inner,
            max_grad_norm=self.clip,
            max_hessian_norm=self.clip * self.curvature,
            keep_fraction=kept,
            mask_seed=MASK_SEED,
            weight_decay=weight_decay,
            max_step_size=self.rate,
        )


class LocalSteps(CubicNewton):
    """Local gradient descent (DP local SGD): the gradient at x + v in place of g + H v."""

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        query = super().ask(state, params, step, noise_multiplier)
        bound = (
            math.sqrt(self.query_size(params[0].numel()) / params[0].numel()) * self.max_grad_norm
        )
        directions = [term.direction for term in query.terms if term.direction is not None]
        here = params[0] + directions[0] if directions else params[0]
        return replace(query, terms=(Term(1.0, here),), clip_norm=bound)


@lru_cache(maxsize=256)
def noise_multiplier(epsilon: float, rounds: int) -> float:
    """z of a round for a run of so many on full batches (add/remove)."""
    if math.isinf(epsilon):
        return 0.0
    return calibrate(lambda _: 1.0, 1.0, rounds, epsilon, DELTA)


# -- one run, through the package ------------------------------------------------------------------


class LogisticRecords:
    """One client's records, with clipped sums in closed form: no gradient is ever formed.

    With x_j = b_j a_j and s = σ(x_j·w): g_j = -(1 - s) x_j and H_j v = s (1 - s) (x_j·v) x_j, so each
    record's answer is a number times x_j, and its norm that number times ‖x_j‖.
    """

    unit = "record"

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._point: Tensor | None = None

    @property
    def num_records(self) -> int:
        return len(self._x)

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        assert len(records) == len(self._x), "written for full batches"
        numbers: Any = 0.0
        for run in passes_of(query):
            assert run.point is not None
            if run.point is not self._point:
                self._point = run.point
                self._values = torch.sigmoid(self._x @ run.point.to(self._x.dtype))
            numbers = numbers + run.gradient * (self._values - 1)
            if run.direction is not None:
                along = self._x @ run.direction.to(self._x.dtype)
                numbers = numbers + run.product * self._values * (1 - self._values) * along
        x = self._x if query.coordinates is None else self._x[:, query.coordinates]
        return bounded_sum(NetworkGradients([Outer(((numbers[None], x.T),))]), query.clip_norm)


@dataclass(frozen=True)
class Trace:
    """The course of a run.

    Args:
        suboptimality, accuracy: after 0, 1, ..., T rounds.
        epsilon: of the client that spent most, by the accountant from its ledger.
        evaluations: gradients and gradients with Hessian-vector products of one record, per record.
        uplink: bytes from one client in one round, at most.
    """

    suboptimality: Tensor
    accuracy: Tensor
    epsilon: float
    evaluations: int
    uplink: int


def execute(
    of: Problem, setting: Setting, epsilon: float, rounds: int, kept: float, seed: int
) -> Trace:
    """A federation of the package: every message as bytes, every client with its own ledger."""
    plan = CubicNewtonPlan(
        setting.estimator(of.weight_decay, kept),
        clients=of.clients,
        rounds=rounds,
        step_scale=setting.scale,
        whole_steps=setting.whole,
    )
    clients = [
        CubicNewtonClient(
            *(LogisticRecords(of.x[number]), plan, ScratchLedger()),
            run="paper",
            client=number,
            noise_multiplier=noise_multiplier(epsilon, rounds),
            target_epsilon=math.inf,
            target_delta=DELTA,
            seed=seed * of.clients + number,
        )
        for number in range(of.clients)
    ]
    server = AsyncServer("paper", plan, torch.zeros(of.size), of.clients)
    points, uplink = [server.point], 0
    while not server.is_done:
        for number, client in enumerate(clients):
            request = server.request(number)
            assert request is not None
            reply = client.answer(request)
            uplink = max(uplink, len(reply))
            server.receive(number, reply)
        points.append(server.point)
    columns = torch.stack(points, 1)
    return Trace(
        of.suboptimality(columns),
        of.accuracy(columns),
        clients[0].epsilon,
        rounds * setting.inner,
        uplink,
    )


# -- many settings at once, for tuning -------------------------------------------------------------


@torch.no_grad()
def sweep(
    of: Problem,
    settings: Sequence[Setting],
    noise: Sequence[float],
    rounds: int,
    kept: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Suboptimality after the last round of each setting, run side by side.

    The same arithmetic as :func:`execute` (a test compares them), on matrices with a column for
    each setting; ``settings`` agree in τ and in whether they are local or whole. Its noise is from
    torch's generator: what comes of it is not released to anybody.

    Args:
        noise: z of a round, for each setting.
    """
    generator = torch.Generator().manual_seed(seed)
    inner, is_local, whole = (getattr(settings[0], f) for f in ("inner", "is_local", "whole"))
    columns = {
        name: torch.tensor([getattr(s, name) for s in settings])
        for name in ("rate", "clip", "curvature", "scale", "cubic")
    }
    z = torch.tensor(noise, dtype=torch.float32) * math.sqrt(inner)
    x, n, m, d, count = of.x, of.clients, of.records, of.size, len(settings)
    estimator = settings[0].estimator(of.weight_decay, kept)
    keep = estimator.query_size(d)
    is_cut, lengths = keep < d and not whole, torch.ones(1)
    squares = x.square() if is_cut else x
    masks = torch.ones(n, d, 1)
    point = torch.zeros(d, count)
    for t in range(rounds):
        if keep < d:
            masks = torch.zeros(n, d, 1)
            for client in range(n):
                masks[client, shared_mask(MASK_SEED + client, t, d, keep)] = 1
        within = torch.ones(n, d, 1) if whole or keep == d else masks
        share = 1.0 if whole else math.sqrt(keep / d)
        if is_cut:
            lengths = torch.bmm(squares, masks).sqrt()
        margins = torch.matmul(x.reshape(n * m, d), point).reshape(n, m, count)
        s = torch.sigmoid(margins)
        first, second = s - 1, s * (1 - s)
        v, average = torch.zeros(n, d, count), torch.zeros(n, d, count)
        for step in range(inner):
            numbers = first
            norm = v.norm(dim=1, keepdim=True)
            bound = share * columns["clip"] * (1 + (0 if is_local else columns["curvature"] * norm))
            if step:
                along = torch.bmm(x, v)
                if is_local:
                    numbers = torch.sigmoid(margins + along) - 1
                else:
                    numbers = torch.addcmul(first, second, along)
            most = bound / lengths if is_cut else bound  # rows are of length 1, or shorter if cut
            numbers = torch.minimum(torch.maximum(numbers, -most), most)
            slope = torch.bmm(x.transpose(1, 2), numbers) * within
            drawn = torch.randn(n, d, count, generator=generator) * within
            slope = (slope + z * bound * drawn) / m
            slope = slope + of.weight_decay * (point * within + v)
            v = v - columns["rate"] * (slope + columns["cubic"] / 2 * norm * v)
            average = average + average_weight(step + 1, inner) * v
        point = point + columns["scale"] * (d / keep) * (average * masks).mean(0)
    return of.suboptimality(point)


# -- what a script asks for ------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A method at one number of rounds: its best setting, on other noise."""

    rounds: int
    setting: Setting
    values: Tensor

    @property
    def mean(self) -> float:
        return float(self.values.mean())


def searched(
    place: tuple[str, str, int],
    method: str,
    settings: Sequence[Setting],
    epsilon: float,
    rounds: int,
    kept: float,
) -> Point:
    """The best setting at a number of rounds, on noise that it was not chosen on."""
    of, where = problem_of(place, method), (epsilon, rounds, kept)
    first = values(of, settings, *where, ALL)
    few = first.mean(1).argsort()[:FEW].tolist()
    again = values(of, [settings[i] for i in few], *where, FINALISTS)
    best = settings[few[int(torch.cat([first[few], again], 1).mean(1).argmin())]]
    return Point(rounds, best, values(of, [best], *where, BEST)[0])


def values(
    of: Problem,
    settings: Sequence[Setting],
    epsilon: float,
    rounds: int,
    kept: float,
    noises: tuple[int, int],
) -> Tensor:
    """The last suboptimality of each setting (rows) with each noise (columns)."""
    seed, count = noises
    found = torch.full((len(settings), count), torch.inf, dtype=torch.float64)
    z = noise_multiplier(epsilon, rounds)
    for inner in sorted({setting.inner for setting in settings}):
        places = [i for i, setting in enumerate(settings) if setting.inner == inner]
        together = [settings[i] for i in places for _ in range(count)]
        done = sweep(of, together, [z] * len(together), rounds, kept, seed)
        found[places] = done.reshape(-1, count)
    return found


def problem_of(place: tuple[str, str, int], method: str) -> Problem:
    """The problem that a method has: its records may lie with one trusted holder."""
    of = problem(*place)
    return of.as_one() if "central" in method else of


def run(
    place: tuple[str, str, int],
    method: str,
    setting: Setting,
    epsilon: float,
    rounds: int,
    kept: float,
    seed: int,
) -> Trace:
    """One federation, on its own problem."""
    return execute(problem_of(place, method), setting, epsilon, rounds, kept, seed)
