"""Records whose sums are short to write down, a bad network, and each protocol with its slow twin."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dp import Constant, CubicNewton, Diff2, FullBatch, MeanGradient, Poisson
from lightning_dp._noise import random_generator
from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.boundary import BoundedSum, Query, bounded_sum
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.client import Client, noise_source
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import AbstractServer, Message, Quorum
from lightning_dp.federated.synchronous import BVRLSGD, QueryClient, SynchronousServer
from lightning_dp.functional import shared_mask
from lightning_dp.gradients.parameter_sum import MaterialisedGradients
from lightning_dp.noise_plan import NoisePlan

SIZE, CLIENTS, RECORDS, ROUNDS = 4, 3, 30, 6
Z, RATE, DELTA, SEED = 2.0, 0.2, 1e-5, 50
EVERYBODY = Quorum(CLIENTS, tries=10**6, patience=20.0)
START = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float64)


class LogCosh:
    """Records of the loss log cosh(x·w - y), in float64; remembers what it was asked."""

    unit = "record"

    def __init__(self, num_records: int = RECORDS, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_records, SIZE, generator=generator, dtype=torch.float64)
        self.y = self.x @ torch.arange(1.0, SIZE + 1, dtype=torch.float64) + 0.3
        self.asked: list[tuple[Query, list[int]]] = []

    @property
    def num_records(self) -> int:
        return len(self.y)

    def check_point(self, point: Tensor) -> None:
        if point.shape != (SIZE,) or point.dtype != torch.float64:
            raise ValueError(f"{tuple(point.shape)} of {point.dtype} was sent.")

    def rows(self, point: Tensor, direction: Tensor | None = None, records: Any = None) -> Tensor:
        """Each record's gradient, or its Hessian times the direction."""
        x, y = (part if records is None else part[list(records)] for part in (self.x, self.y))
        slope = torch.tanh(x @ point - y)
        if direction is not None:
            slope = (1 - slope.square()) * (x @ direction)
        return slope.unsqueeze(1) * x

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        self.asked.append((query, list(records)))
        rows = torch.zeros(len(records), SIZE, dtype=torch.float64)
        for t in query.terms:
            rows = rows + t.weight * self.rows(t.point, t.direction, records)
        return summed(rows, query)


def summed(rows: Tensor, query: Query) -> BoundedSum:
    rows = rows if query.coordinates is None else rows[:, query.coordinates]
    return bounded_sum(MaterialisedGradients([rows[:0].sum(0)], [rows], 1.0), query.clip_norm)


def through_a_bad_network(
    server: AbstractServer,
    make_client: Callable[[int], Client],
    seed: int,
    *,
    look: Callable[[], None] = lambda: None,
    faults: float = 0.2,
) -> int:
    """Run to the end; messages are lost, late, doubled, re-ordered, and clients restart.

    At most one request is in flight per client, but a client may get it twice and replies of all
    ages come back. Returns how often a client was asked.
    """
    rng, count = random.Random(seed), server.num_clients
    clients = {c: make_client(c) for c in range(count)}
    in_flight: list[tuple[int, bytes]] = []
    old: list[tuple[int, bytes]] = []
    asked = 0
    for _ in range(200_000):
        if server.is_done:
            return asked
        look()
        client = rng.choices(range(count), [4**c for c in range(count)])[0]  # 0 is slow
        if rng.random() < 0.6 and all(c != client for c, _ in in_flight):
            request = server.request(client)
            if request is None or rng.random() < faults:  # nothing to do, or lost on the way
                continue
            assert server.request(client) == request
            if rng.random() < faults:
                clients[client] = make_client(client)  # it died and came back
            reply = clients[client].answer(request)
            asked += 1
            if rng.random() < faults:
                assert clients[client].answer(request) == reply  # delivered twice
            (old if rng.random() < faults else in_flight).append((client, reply))
        elif in_flight and rng.random() < 0.7:
            client, reply = in_flight.pop(rng.randrange(len(in_flight)))
            server.receive(client, reply)
            if rng.random() < faults:
                old.append((client, reply))
        elif old:
            server.receive(*rng.choice(old))
    raise AssertionError("it never ended")


def play(
    server: AbstractServer,
    make: Callable[[int], Any],
    is_there: Callable[[int, int], bool] = lambda c, i: True,
    after: Callable[[], AbstractServer | None] = lambda: None,
) -> AbstractServer:
    """Ask who is there, and leave out the others, until it is done."""
    while not server.is_done:
        stage, late = server.stage, {c for c in server.awaited if not is_there(c, server.round)}
        for c in sorted(server.awaited - late):
            if server.stage == stage:
                assert server.receive(c, make(c).answer(server.request(c)))
                server = after() or server
        if server.stage == stage and not server.is_done:
            assert server.leave_out() == late
    return server


def history(folder: Path, name: str = "data") -> list[tuple[AbstractEvent, int]]:
    return ReleaseLedger(folder, name).history()


def files(folder: Path) -> dict[str, bytes]:
    """The content of a ledger's folder."""
    found = folder.glob("*") if folder.exists() else ()
    return {path.name: path.read_bytes() for path in found if path.suffix != ".lock"}


def clipped(rows: Tensor, radius: float) -> Tensor:
    return (rows * (radius / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


# -- one client, asked by hand -----------------------------------------------------------------

EVENT = PoissonGaussian(Z, RATE)
ROUTINE = BVRLSGD(0.2, 3, 0.5, noise_multiplier=Z, sample_rate=RATE)


def sgd(records: Any, ledger: ReleaseLedger, *, run: str, seed: int | None, **budget: Any):
    plan = AsyncPlan(ROUNDS, PolynomialSizes(0, RATE * RECORDS), InverseSteps(0.1, 0.01))
    return AsyncClient(records, plan, ClientPrivacy(1.0, Z, **budget, seed=seed), ledger, run=run)


def queries(records: Any, ledger: ReleaseLedger, **settings: Any):
    plan = NoisePlan(Z, Constant(), Poisson(), RATE, MeanGradient(0.7))
    return QueryClient(records, plan, ledger, rounds=ROUNDS, **settings)


def walks(records: Any, ledger: ReleaseLedger, **settings: Any):
    return queries(records, ledger, local_routine=ROUTINE, **settings)


def newton(records: Any, ledger: ReleaseLedger, **settings: Any):
    step = CubicNewton(1.0, 0.0, 1, max_grad_norm=0.5, max_step_size=0.5)
    plan = CubicNewtonPlan(step, clients=1, rounds=ROUNDS)
    own = {"client": 0, "noise_multiplier": Z, "sample_rate": RATE}
    return CubicNewtonClient(records, plan, ledger, **own, **settings)


@dataclass(frozen=True)
class Protocol:
    """A protocol: its client, and what a server asks it in a round.

    Args:
        client: from records, ledger, run, seed and budget.
        kind: of its requests.
        points: the tensors of a request that are models.
        facts: of a request, besides run and round.
        events: how many a round costs one record.
    """

    client: Callable[..., Client]
    kind: str
    points: tuple[str, ...]
    facts: dict[str, Any]
    events: int = 1

    def make(self, records: Any, folder: Path, **changes: Any) -> Client:
        """A new process of the client whose ledger is in the folder."""
        settings = {"run": "trial", "seed": None, "target_epsilon": math.inf, "target_delta": DELTA}
        return self.client(records, ReleaseLedger(folder, "data"), **{**settings, **changes})

    def request(self, i: int = 0, model: Tensor = START, **changes: Any) -> bytes:
        facts = {"run": "trial", "round": i, **self.facts, **changes}
        return Message(self.kind, facts, dict.fromkeys(self.points, model)).to_bytes()


_ASKED = {"noise": "client", "weight0": 1.0, "clip_norm": 0.7, "noise_multiplier": Z}
PROTOCOLS = {
    "sgd": Protocol(sgd, "round", ("model",), {}),
    "queries": Protocol(queries, "query", ("point0",), {"part": 0, **_ASKED}),
    "walks": Protocol(walks, "local", ("x", "v"), {"part": 0}, 2),
    "newton": Protocol(newton, "round", ("model",), {}),
}


# -- whole federations, and the same as loops --------------------------------------------------


def batch(c: int, i: int, rate: float) -> list[int]:
    """The batch of client c in the ledger's round i."""
    return Poisson().draw(RECORDS, rate, random_generator(SEED + c, 1, i)).tolist()


IsThere = Callable[[int, int], bool]  # of a client and a round


def always(c: int, i: int) -> bool:
    return True


def noised(total: Tensor, std: float, source: Any) -> Tensor:
    source.add_normal(total, std)
    return total


@dataclass(frozen=True)
class Federation:
    """Server and clients of a run, what each client is charged, and the model at its end.

    Args:
        server: with the name of the run, the first model and the quorum.
        client: with records, number, ledger and further settings: run, seed, budget.
        events: of client c, over the whole run.
        twin: the end of the run as a loop over rounds, clients and records, of those who are there.
    """

    server: Callable[..., AbstractServer]
    client: Callable[..., Client]
    events: Callable[[int], list[tuple[AbstractEvent, int]]]
    twin: Callable[..., Tensor]

    def begin(self, quorum: Quorum = EVERYBODY) -> AbstractServer:
        return self.server("trial", START, quorum)

    def clients(self, folder: Path, **changes: Any) -> Callable[[int], Client]:
        """Makes client c again, on the ledger that it had."""
        settings = {"run": "trial", "target_epsilon": math.inf, "target_delta": DELTA, **changes}

        def make(c: int) -> Client:
            ledger = ReleaseLedger(folder, f"client-{c}")
            return self.client(LogCosh(seed=c), c, ledger, **{"seed": SEED + c, **settings})

        return make


ASYNC = AsyncPlan(ROUNDS, PolynomialSizes(1.5, 3), InverseSteps(0.05, beta=0.01))


def asynchronous(
    plan: AsyncPlan, noise: float = Z, clip_norm: float = 1.0, clients: int = CLIENTS
) -> Federation:
    def client(records: Any, c: int, ledger: Any, *, run: str, **privacy: Any) -> AsyncClient:
        return AsyncClient(
            records, plan, ClientPrivacy(clip_norm, noise, **privacy), ledger, run=run
        )

    def twin(is_there: IsThere = always) -> Tensor:
        x, before = START, 0
        for i in range(plan.rounds):
            size = plan.sizes(i)
            mask = slice(None) if plan.keep is None else plan.coordinates(i, SIZE)
            moved = x.clone()
            for c in (c for c in range(clients) if is_there(c, i)):
                rows = LogCosh(seed=c).rows(x, records=batch(c, i, size / RECORDS))[:, mask]
                total = noised(clipped(rows, 1.0), noise * 1.0, noise_source(SEED + c, i, 0))
                moved[mask] -= 0.05 / (1 + 0.01 * before) * total * SIZE / len(total)
            x, before = moved, before + size
        return x

    events = [(PoissonGaussian(noise, plan.sizes(i) / RECORDS), 1) for i in range(plan.rounds)]

    def server(run: str, start: Tensor, quorum: Quorum = EVERYBODY) -> AsyncServer:
        return AsyncServer(run, plan, start, clients, quorum)

    return Federation(server, client, lambda c: events, twin)


NEWTON = CubicNewton(
    **{"strong_convexity": 0.1, "hessian_lipschitz": 0.7, "inner_steps": 4, "box": 1.5},
    **{"max_grad_norm": 0.5, "max_hessian_norm": 0.3, "keep": 3, "mask_seed": 17},
    **{"weight_decay": 0.02, "max_step_size": 1.5},
)


def fcrn(plan: CubicNewtonPlan, noise: float = 0.8, rate: float = 0.5) -> Federation:
    """Algorithms 1 and 2 of DP-FCRN and the rules for noise, with dense Hessians in the twin."""

    def client(records: Any, c: int, ledger: Any, **settings: Any) -> CubicNewtonClient:
        own = {"client": c, "noise_multiplier": noise, "sample_rate": rate}
        return CubicNewtonClient(records, plan, ledger, **own, **settings)

    def step(c: int, t: int, x: Tensor, mask: Tensor) -> Tensor:
        n, data, source = plan.newton, LogCosh(seed=c), noise_source(SEED + c, t, 0)
        rng, tau = random_generator(SEED + c, 1, t), n.inner_steps
        eye = torch.eye(SIZE, dtype=torch.float64)
        g = data.rows(x)[:, mask]
        h = torch.stack([data.rows(x, e) for e in eye], 2)[:, mask][:, :, mask]
        v, average = g.new_zeros(len(mask)), g.new_zeros(len(mask))
        for s in range(tau):
            if s == 0 or n.fresh_batches:
                drawn = range(RECORDS) if rate == 1 else Poisson().draw(RECORDS, rate, rng)
            length = float(v.norm())
            bound = math.sqrt(len(mask) / SIZE) * (n.max_grad_norm + n.max_hessian_norm * length)
            total = clipped((g + h @ v)[list(drawn)], bound)
            if noise:
                z = noise * (1 if n.fresh_batches else math.sqrt(tau))
                total = noised(total, z * bound, source)
            slope = total / (rate * RECORDS) + n.weight_decay * (x[mask] + v)
            slope = slope + n.hessian_lipschitz / 2 * length * v
            eta = min(2 / (n.strong_convexity * (s + 2)), n.max_step_size or math.inf)
            box = n.box or math.inf
            v = (x[mask] + v - eta * slope).clamp(-box, box) - x[mask]
            average = average + 2 * (s + 1) / (tau * (tau + 1)) * v
        return average

    def twin(is_there: IsThere = always) -> Tensor:
        x = START
        for t in range(plan.rounds):
            moves = torch.zeros_like(x)
            for c in (c for c in range(CLIENTS) if is_there(c, t)):
                newton, moved = plan.newton, torch.zeros_like(x)
                mask = shared_mask(newton.mask_seed + c, t, SIZE, newton.query_size(SIZE))
                solved = torch.arange(SIZE) if plan.whole_steps else mask
                moved[solved] = step(c, t, x, solved)
                moves[mask] += SIZE / len(mask) * moved[mask]
            x = x + plan.step_scale * moves / CLIENTS
        return x

    each = plan.newton.inner_steps if plan.newton.fresh_batches else 1
    event = Gaussian(noise) if rate == 1 else PoissonGaussian(noise, rate)

    def server(run: str, start: Tensor, quorum: Quorum = EVERYBODY) -> AsyncServer:
        return AsyncServer(run, plan, start, CLIENTS, quorum)

    return Federation(server, client, lambda c: [(event, each * plan.rounds)], twin)


DIFF2 = Diff2(3, 1.0, 0.6, split=2.0)


def diff2(
    noise_at: str, noise: float = Z, routine: BVRLSGD | None = None, rate: float = 0.2
) -> Federation:
    """DIFF2 with P workers (Murata and Suzuki, Algorithm 1), and BVR-L-SGD (Algorithm 4)."""
    plan = NoisePlan(noise, Constant(), FullBatch(), 1.0, DIFF2)
    data = [LogCosh(seed=c) for c in range(CLIENTS)]
    total, ratio = CLIENTS * RECORDS, DIFF2.relative_noise(1)

    def server(run: str, start: Tensor, quorum: Quorum = EVERYBODY) -> SynchronousServer:
        return SynchronousServer(
            *(run, plan, start, ROUNDS, CLIENTS, total, rate),
            **{"noise": noise_at, "local_routine": routine, "seed": 3, "quorum": quorum},
        )

    def client(records: Any, c: int, ledger: Any, **settings: Any) -> QueryClient:
        own = {"rounds": ROUNDS, "trusts_server": noise_at == "server", "local_routine": routine}
        return QueryClient(records, plan, ledger, client=c, num_clients=CLIENTS, **own, **settings)

    def twin(is_there: IsThere = always) -> Tensor:
        x, before, v = START, START, START * 0
        for r in range(ROUNDS):
            restart = r % 3 == 0
            radius = 1.0 if restart else 0.6 * float((x - before).norm())
            std, answer = noise * (1 if restart else ratio) * radius, START * 0
            for c in (c for c in range(CLIENTS) if is_there(c, r)):
                rows = data[c].rows(x) - (0 if restart else data[c].rows(before))
                part = clipped(rows, radius)
                if noise_at == "client":
                    part = noised(part, std, noise_source(SEED + c, 2 * r, 0))
                answer = answer + part
            if noise_at == "server":
                answer = noised(answer, std, noise_source(3, r))
            v = answer / total + (0 if restart else v)
            before, x = x, x - rate * v
            if routine is not None and is_there((r + 1) % CLIENTS, r):
                x = walk((r + 1) % CLIENTS, r, before, x, v)
        return x

    def walk(c: int, r: int, a: Tensor, b: Tensor, u: Tensor) -> Tensor:
        rng, source = random_generator(SEED + c, 1, 2 * r + 1), noise_source(SEED + c, 2 * r + 1, 0)
        for _ in range(routine.local_steps - 1):
            drawn = Poisson().draw(RECORDS, routine.sample_rate, rng)
            radius = routine.diff_norm * float((b - a).norm())
            rows = (data[c].rows(b) - data[c].rows(a))[list(drawn)]
            part = noised(clipped(rows, radius), routine.noise_multiplier * radius, source)
            u = u + part / (routine.sample_rate * RECORDS)
            a, b = b, b - rate * u
        return b

    def events(c: int) -> list[tuple[AbstractEvent, int]]:
        found = [(Gaussian(noise), 2), (Gaussian(noise * ratio), 4)]
        turns = sum(r % CLIENTS == c for r in range(1, ROUNDS + 1))
        if routine is not None:
            event = PoissonGaussian(routine.noise_multiplier, routine.sample_rate)
            found.append((event, turns * (routine.local_steps - 1)))
        return found

    return Federation(server, client, events, twin)


WALK = BVRLSGD(0.2, 4, 0.5, noise_multiplier=3.0, sample_rate=0.4)
TWO_ROUNDS = asynchronous(replace(ASYNC, rounds=2))
FIVE_CLIENTS = asynchronous(replace(ASYNC, rounds=2), clients=5)
FEDERATIONS = {
    "asynchronous": asynchronous(ASYNC),
    "asynchronous, sparse": asynchronous(replace(ASYNC, keep=3)),
    "DIFF2, trusted server": diff2("server"),
    "DIFF2, noisy clients": diff2("client"),
    "BVR-L-SGD, trusted server": diff2("server", routine=WALK),
    "BVR-L-SGD, noisy clients": diff2("client", routine=WALK),
    "DP-FCRN": fcrn(CubicNewtonPlan(NEWTON, clients=CLIENTS, rounds=4, step_scale=0.7)),
}
