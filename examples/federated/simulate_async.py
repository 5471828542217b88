"""The time that asynchronous and synchronous rounds would take, on a virtual clock.

    python examples/federated/simulate_async.py [--clients 10000] [--lag 4]

No model and no data: clients of very different speeds, messages that take time, stalls now and
then. Counts rounds, messages, waiting and wall-clock time until every client has made K gradients.
10,000 clients take seconds. What it printed is in simulate_async.md.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dp.federated import PolynomialSizes
from lightning_dp.federated.asynchronous import SampleSizes, rounds_for

GRADIENTS = 25_000  # K of each client
CONSTANT = PolynomialSizes(a=0, b=16)
CONSTANT_LARGE = PolynomialSizes(a=0, b=137)
GROWING = PolynomialSizes(a=1.322, b=16)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Speeds of clients and of the network; times in seconds.

    Args:
        num_clients: n.
        gradient: median time of one gradient.
        gradient_spread: σ of its logarithm over clients: 0.7 puts a factor 4 between quartiles'
            ends.
        latency: median time of one message, either way, with the model or an update in it.
        latency_spread: σ of its logarithm, per message.
        stall: in a round, a client is held up with this probability ...
        stall_length: ... for this long on average.
        seed: of all of it.
    """

    num_clients: int = 10_000
    gradient: float = 0.05
    gradient_spread: float = 0.7
    latency: float = 5.0
    latency_spread: float = 0.5
    stall: float = 0.01
    stall_length: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.num_clients >= 1:
            raise ValueError(f"num_clients={self.num_clients} must be at least 1.")
        if not 0 <= self.stall <= 1:
            raise ValueError(f"stall={self.stall} must be a probability.")

    def speeds(self) -> Floats:
        """Seconds per gradient, of each client."""
        rng = np.random.default_rng([self.seed, 0])
        return self.gradient * rng.lognormal(0.0, self.gradient_spread, self.num_clients)

    def latencies(self, i: int, way: int) -> Floats:
        """Of the messages of round i, down (0) or up (1)."""
        rng = np.random.default_rng([self.seed, 1, i, way])
        return self.latency * rng.lognormal(0.0, self.latency_spread, self.num_clients)

    def stalls(self, i: int) -> Floats:
        """By how much each client is held up in round i."""
        rng = np.random.default_rng([self.seed, 2, i])
        happens = rng.random(self.num_clients) < self.stall
        return happens * rng.exponential(self.stall_length, self.num_clients)


@dataclass(frozen=True)
class Outcome:
    """Rounds, messages per client, mean share of the time that a client waits, and seconds."""

    rounds: int
    messages: int
    waiting: float
    seconds: float


def asynchronous(world: World, sizes: SampleSizes, lag: int) -> Outcome:
    """Client c begins round i when it is done with i - 1 and has heard that round i - d is over.

    Round i is over when the last update of it is at the server. ``lag`` = 1 is synchronous.
    A client sends at the end of each round and goes on; the server sends at the end of each.
    """
    if not lag >= 1:
        raise ValueError(f"lag={lag} must be at least 1.")
    rounds, speeds = rounds_for(sizes, GRADIENTS), world.speeds()
    free = world.latencies(0, 0)  # when a client may begin: it has the model
    heard: list[Floats] = []  # when each client heard that round j is over
    busy, over = np.zeros(world.num_clients), 0.0
    for i in range(rounds):
        begin = np.maximum(free, heard[i - lag]) if i >= lag else free
        work = sizes(i) * speeds + world.stalls(i)
        free, busy = begin + work, busy + work
        over = max(over, float((free + world.latencies(i, 1)).max()))
        heard.append(over + world.latencies(i + 1, 0))
        if i >= lag:
            heard[i - lag] = np.empty(0)
    # one update up and one model down for each round
    return Outcome(rounds, 2 * rounds, float(1 - (busy / over).mean()), over)


def sampled(world: World, sizes: SampleSizes, fraction: float) -> Outcome:
    """FedAvg with a random fraction of the clients in each round, until each did K on average."""
    rounds = round(rounds_for(sizes, GRADIENTS) / fraction)
    speeds, now, busy = world.speeds(), 0.0, 0.0
    rng = np.random.default_rng([world.seed, 3])
    count = max(1, round(fraction * world.num_clients))
    for i in range(rounds):
        chosen = rng.choice(world.num_clients, count, replace=False)
        work = sizes(0) * speeds[chosen] + world.stalls(i)[chosen]
        there = world.latencies(i, 0)[chosen] + work + world.latencies(i, 1)[chosen]
        now, busy = now + float(there.max()), busy + float(work.sum())
    return Outcome(
        *(rounds, round(2 * rounds * fraction), 1 - busy / (now * world.num_clients), now)
    )


def row(name: str, outcome: Outcome) -> str:
    return (
        f"| {name} | {outcome.rounds} | {outcome.messages} | {outcome.waiting:.0%} | "
        f"{outcome.seconds / 3600:.1f} |"
    )


def table(world: World, lags: Sequence[int]) -> str:
    """Markdown: every way to make K gradients per client."""
    lines = [
        "| way | rounds | messages per client | time waiting | hours |",
        "| --- | --- | --- | --- | --- |",
        row("FedAvg-style, constant 16, all clients", asynchronous(world, CONSTANT, 1)),
        row("FedAvg-style, constant 16, a tenth per round", sampled(world, CONSTANT, 0.1)),
        row("FedAvg-style, constant 137, all clients", asynchronous(world, CONSTANT_LARGE, 1)),
    ]
    for (name, sizes), lag in itertools.product(
        (("constant 16", CONSTANT), ("growing 16 + ⌈1.322 i⌉", GROWING)), lags
    ):
        lines.append(row(f"asynchronous, {name}, d = {lag}", asynchronous(world, sizes, lag)))
    lines.append(row("no waiting at all: the slowest client alone", _slowest(world)))
    return "\n".join(lines)


def _slowest(world: World) -> Outcome:
    slowest = float(world.speeds().max()) * GRADIENTS
    return Outcome(1, 2, 0.0, slowest)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--lag", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    world = World(num_clients=options.clients, seed=options.seed)
    print(f"{world}\n\n{table(world, options.lag)}")


if __name__ == "__main__":
    main()
