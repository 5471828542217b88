"""Processor time and memory of a federation: of its server, of a client, and in Flower's simulation.

    python benchmarks/federated.py [--clients 5 20 100 1000] [--size 10000 1000000 10000000]
    python benchmarks/federated.py --part client
    python benchmarks/federated.py --part simulation --clients 5 100 --size 1000000

Times are of the processor, by one thread, so a machine that others use disturbs them less.

- server: each row is a process of its own: a server, and clients that are not there. A client's reply
  is the same vector of float32 noise each time, in a message of its own. Time is that of reading,
  checking and applying the replies and of making the requests. Memory is the peak of resident memory
  above that before the first round, over the size of the model (Linux only). Rows of more than 1e9
  clients x size are left out.
- client: a perceptron, one Poisson batch a round: whole rounds (request, ledger, gradients, noise,
  reply, ε) over clipped and noised gradients of as many records alone.
- simulation: whole rounds over Flower with Ray, of wall-clock time; clients have one record each.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, Diff2, FullBatch, Query, Term
from lightning_dp._noise import random_generator
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.client import draw, noise_source, noised_sum
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message
from lightning_dp.federated.synchronous import SynchronousServer
from lightning_dp.noise_plan import NoisePlan

BATCH = 100.0
PRODUCT = 10**9
PARTS = ("server", "client", "simulation")


def plan(rounds: int, batch: float = BATCH) -> AsyncPlan:
    limits = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    return AsyncPlan(rounds, PolynomialSizes(0, batch), InverseSteps(1e-3), **limits)


# -- the server --------------------------------------------------------------------------------


def asynchronous(start: torch.Tensor, clients: int, rounds: int) -> AsyncServer:
    return AsyncServer("benchmark", plan(rounds), start, clients)


def diff2(start: torch.Tensor, clients: int, rounds: int) -> SynchronousServer:
    warnings.simplefilter("ignore")
    noise = NoisePlan(1.0, Constant(), FullBatch(), 1.0, Diff2(1, 1.0, 1.0))
    count = int(BATCH) * clients
    return SynchronousServer(
        "benchmark", noise, start, rounds, clients, count, 1e-3, noise="client"
    )


SERVERS: dict[str, Callable[..., Any]] = {"asynchronous": asynchronous, "DIFF2": diff2}


def peak() -> int:
    """The peak of resident memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_server(name: str, clients: int, size: int, rounds: int) -> None:
    """Print one row."""
    generator = torch.Generator().manual_seed(0)
    server = SERVERS[name](torch.zeros(size), clients, rounds)
    noise = torch.randn(size, generator=generator) / 1000
    Message("warm up", {}, {"noise": noise}).to_bytes()
    before, seconds, requests = peak(), 0.0, dict[bytes, bytes]()
    while not server.is_done:
        for client in sorted(server.awaited):
            begin = time.process_time()
            request = server.request(client)
            seconds += time.process_time() - begin
            if request not in requests:  # the client's work is not the server's
                asked = Message.from_bytes(request)
                kind, vector = ("update", "update") if asked.kind == "round" else ("answer", "sum")
                place = {part: asked[part] for part in ("round", "part") if part in asked.facts}
                requests = {request: Message(kind, place, {vector: noise}).to_bytes()}
            reply = bytes(memoryview(requests[request]))
            begin = time.process_time()
            server.receive(client, reply)
            seconds += time.process_time() - begin
    seconds, memory = seconds / rounds, (peak() - before) / (4 * size)
    each = f"{seconds:.3f} | {1000 * seconds / clients:.2f}"
    print(f"| {name} | {clients} | {size:.0e} | {each} | {memory:.1f} |", flush=True)


# -- a client ----------------------------------------------------------------------------------


class Perceptron(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def measure_client(width: int, batch: int, rounds: int) -> None:
    """Print one row."""
    module, count = Perceptron(width), 20_000
    data = TensorDataset(torch.randn(count, 784), torch.randint(10, (count,)))
    records = LocalRecords(module, data, chunk_size=256)
    rounds += 2  # to warm up
    agreed, point = plan(rounds, batch), records.point
    privacy = ClientPrivacy(1.0, 1.0, target_epsilon=100.0, target_delta=1e-5)
    server, rng = AsyncServer("benchmark", agreed, point, 1), random_generator(None)
    alone, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            begin = time.process_time()
            query = Query((Term(1.0, point),), 1.0, 1.0)
            noised_sum(records, query, draw(records, batch / count, rng), noise_source(None))
            alone.append(time.process_time() - begin)
            request = server.request(0)
            begin = time.process_time()
            ledger = ReleaseLedger(folder, "client-0")
            client = AsyncClient(records, agreed, privacy, ledger, run="benchmark")
            reply = client.answer(request or b"")
            assert client.facts["epsilon"] > 0
            whole.append(time.process_time() - begin)
            server.receive(0, reply)
    a, b = (sorted(each[2:])[(rounds - 2) // 2] * 1000 for each in (alone, whole))
    print(f"| {len(point):.1e} | {batch} | {a:.0f} | {b:.0f} | {b / a:.2f} |", flush=True)


# -- Flower's simulation -----------------------------------------------------------------------


class Linear(L.LightningModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] * self.x.sum()).mean()


def measure_simulation(clients: int, size: int, rounds: int) -> None:
    """Print one row."""
    from flwr.simulation import run_simulation

    from lightning_dp.federated.flower import client_app, server_app

    agreed, privacy = plan(rounds, 1), ClientPrivacy(1.0, 1.0, target_epsilon=1e6)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        client = client_app(
            lambda context: LocalRecords(Linear(size), TensorDataset(torch.ones(1, 1))),
            lambda context, run, records, ledger: AsyncClient(
                records, agreed, privacy, ledger, run=run
            ),
            ledger_dir=Path(folder, "ledgers"),
        )
        server = server_app(
            lambda context: Linear(size),
            lambda context, run, start: AsyncServer(run, agreed, start, clients),
            num_clients=clients,
            folder=Path(folder, "results"),
            evaluate=lambda context, module: times.append(time.perf_counter()) or {},
        )
        warnings.simplefilter("ignore")
        run_simulation(
            server, client, clients, backend_config={"client_resources": {"num_cpus": 1}}
        )
    seconds = (times[-1] - times[1]) / (rounds - 1)  # the first round starts processes
    print(
        f"| {clients} | {size:.0e} | {seconds:.2f} | {1000 * seconds / clients:.0f} |", flush=True
    )


HEADS = {
    "server": "| server | clients | parameters | s a round | ms a client | memory / model |",
    "client": "| parameters | records | ms of gradients and noise | ms of a round | ratio |",
    "simulation": "| clients | parameters | s a round | ms a client |",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="server")
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 100, 1000])
    parser.add_argument("--size", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=SERVERS, help="a row of this server only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.server:
        measure_server(options.server, options.clients[0], options.size[0], options.rounds)
        return
    head = HEADS[options.part]
    print(f"{head}\n|{' --- |' * (head.count('|') - 1)}", flush=True)
    pairs = [(c, d) for d in options.size for c in options.clients if c * d <= PRODUCT]
    if options.part == "client":
        for width, batch in ((64, 256), (512, 256), (512, 1024), (2048, 1024)):
            measure_client(width, batch, max(options.rounds, 5))
    elif options.part == "simulation":
        for clients, size in pairs:
            measure_simulation(clients, size, max(options.rounds, 2))
    else:
        for name in SERVERS:
            for clients, size in pairs:
                numbers = ["--clients", clients, "--size", size, "--rounds", options.rounds]
                row = [sys.executable, __file__, "--server", name, *map(str, numbers)]
                subprocess.run(row, check=True)


if __name__ == "__main__":
    main()
