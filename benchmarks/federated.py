"""Time of a round and memory of a federation's server, by its number of clients.

    python benchmarks/federated.py [--clients 5 20 100] [--size 1000000] [--rounds 3]

Each row is a process of its own: a server, and clients that are not there. Every client's reply is the
same vector of float32 noise, in a message of its own; no network and no client is in the numbers. Time
is that of reading, checking and applying the replies and of making the requests. Memory is the peak
of resident memory above that before the first round, over the size of the model (Linux only).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings

import torch

from lightning_dp import Constant, Diff2, FullBatch
from lightning_dp.federated import AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.protocol import Message
from lightning_dp.federated.synchronous import SynchronousServer
from lightning_dp.noise_plan import NoisePlan

BATCH = 100.0


def asynchronous(start: torch.Tensor, clients: int, rounds: int) -> AsyncServer:
    limits = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    plan = AsyncPlan(rounds, PolynomialSizes(0, BATCH), InverseSteps(1e-3), **limits)
    return AsyncServer("benchmark", plan, start, clients)


def diff2(start: torch.Tensor, clients: int, rounds: int) -> SynchronousServer:
    warnings.simplefilter("ignore")
    plan = NoisePlan(1.0, Constant(), FullBatch(), 1.0, Diff2(1, 1.0, 1.0))
    count = int(BATCH) * clients
    return SynchronousServer("benchmark", plan, start, rounds, clients, count, 1e-3, noise="client")


SERVERS = {"asynchronous": asynchronous, "DIFF2": diff2}


def peak() -> int:
    """The peak of resident memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, clients: int, size: int, rounds: int) -> None:
    """Print one row."""
    generator = torch.Generator().manual_seed(0)
    server = SERVERS[name](torch.zeros(size), clients, rounds)
    noise = torch.randn(size, generator=generator) / 1000
    Message("warm up", {}, {"noise": noise}).to_bytes()
    before, begin = peak(), time.perf_counter()
    while not server.is_done:
        for client in sorted(server.awaited):
            asked = Message.from_bytes(server.request(client) or b"")
            kind, vector = ("update", "update") if asked.kind == "round" else ("answer", "sum")
            place = {part: asked[part] for part in ("round", "part") if part in asked.facts}
            server.receive(client, Message(kind, place, {vector: noise}).to_bytes())
    seconds, memory = (time.perf_counter() - begin) / rounds, (peak() - before) / (4 * size)
    print(f"| {name} | {clients} | {seconds:.2f} | {1000 * seconds / clients:.0f} | {memory:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=SERVERS)
    arguments = parser.parse_args()
    if arguments.server:
        measure(arguments.server, arguments.clients[0], arguments.size, arguments.rounds)
        return
    print("| server | clients | s a round | ms a client | memory / model |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    numbers = ["--size", str(arguments.size), "--rounds", str(arguments.rounds)]
    for name in SERVERS:
        for clients in arguments.clients:
            command = [sys.executable, __file__, "--server", name, "--clients", str(clients)]
            subprocess.run([*command, *numbers], check=True)


if __name__ == "__main__":
    main()
