"""Time, memory and accuracy of a federation, and what Flower's SecAgg+ hides.

    python benchmarks/federated.py [--clients 5 20 100 1000] [--size 10000 1000000 10000000]
    python benchmarks/federated.py --part client
    python benchmarks/federated.py --part simulation --clients 5 100 --size 1000000
    python benchmarks/federated.py --part trust --clients 5 20 50 100
    python benchmarks/federated.py --part masks

Times are of the processor, by one thread, so a machine that others use disturbs them less.

- server: each row is a process of its own: a server, and clients that are not there. A client's reply
  is the same vector of float32 noise each time, in a message of its own. Time is that of reading,
  checking and applying the replies and of making the requests. Memory is the peak of resident memory
  above that before the first round, over the size of the model (Linux only). Rows of more than 1e9
  clients x size are left out.
- client: a perceptron, one Poisson batch a round: whole rounds (request, ledger, gradients, noise,
  reply, ε) over clipped and noised gradients of as many records alone.
- simulation: whole rounds over Flower with Ray, of wall-clock time, each row a process of its own;
  clients have one record each. Memory is of the process that has Flower's server and the messages
  of its clients, from after the first round on.
- trust: test accuracy at equal ε, of logistic regression on scikit-learn's digits, whose 1,400
  training records are split among the clients: of a record (ε = 2, δ = 1e-5) and of a whole client
  (ε = 8, δ = 1e-3), with noise at each client, or once at a server that is trusted. Ten full-batch
  rounds; three noises; the best of three learning rates, an exploration that ε does not cover.
- masks: an attack on the masks of Flower's SecAgg+: the bits that the seeds of pairwise masks have,
  and a masked vector that is read by trying seeds, a window of them around the right one.
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
from statistics import mean
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, Diff2, FullBatch, MeanGradient, Query, Term
from lightning_dp._noise import random_generator
from lightning_dp.accounting import calibrate
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.client import bounded, draw, noise_source, noised_sum
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Message
from lightning_dp.federated.synchronous import SynchronousServer
from lightning_dp.noise_plan import NoisePlan

BATCH = 100.0
PRODUCT = 10**9
PARTS = ("server", "client", "simulation", "trust", "masks")


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
        ledger = ReleaseLedger(folder, "client-0")
        client = AsyncClient(records, agreed, privacy, ledger, run="benchmark")
        for _ in range(rounds):
            begin = time.process_time()
            query = Query((Term(1.0, point),), 1.0, 1.0)
            noised_sum(records, query, draw(records, batch / count, rng), noise_source(None))
            alone.append(time.process_time() - begin)
            request = server.request(0)
            begin = time.process_time()
            reply = client.answer(request or b"")
            assert client.facts["epsilon"] > 0
            whole.append(time.process_time() - begin)
            server.receive(0, reply)
    a, b = (mean(each[2:]) * 1000 for each in (alone, whole))
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
    peaks: list[int] = []

    def look(context: Any, module: nn.Module) -> dict[str, float]:
        times.append(time.perf_counter())
        peaks.append(peak())
        return {}

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
            folder=Path(folder, "results"),
            evaluate=look,
        )
        warnings.simplefilter("ignore")
        run_simulation(
            server, client, clients, backend_config={"client_resources": {"num_cpus": 1}}
        )
    seconds = (times[-1] - times[1]) / (rounds - 1)  # the first round starts processes
    memory = (peaks[-1] - peaks[0]) / (4 * size)
    each = f"{seconds:.2f} | {1000 * seconds / clients:.0f}"
    print(f"| {clients} | {size:.0e} | {each} | {memory:.1f} |", flush=True)


# -- which trust gives which noise ---------------------------------------------------------------

RECORDS, RATES, SEEDS, ROUNDS = 1400, (0.3, 1.0, 3.0), 3, 10
BUDGETS: dict[Literal["record", "client"], tuple[float, float]] = {
    "record": (2.0, 1e-5),
    "client": (8.0, 1e-3),
}


class Logistic(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])


def digits(clients: int) -> tuple[list[TensorDataset], TensorDataset]:
    """Return the records of each client, and the test data."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    size = RECORDS // clients
    parts = [slice(c * size, (c + 1) * size) for c in range(clients)]
    rest = slice(RECORDS, None)
    return [TensorDataset(x[p], y[p]) for p in parts], TensorDataset(x[rest], y[rest])


def accuracy(module: Logistic, test: TensorDataset) -> float:
    x, y = test.tensors
    return float((module.layer(x).argmax(1) == y).float().mean())


def trained(
    clients: int,
    unit: Literal["record", "client"],
    noise: Literal["server", "client"],
    z: float,
    rate: float,
) -> float:
    """Return the test accuracy of a server whose clients answer without ledgers."""
    clip_norm, (train, test) = 0.5, digits(clients)
    agreed = NoisePlan(z, Constant(), FullBatch(), 1.0, MeanGradient(clip_norm))
    holders = [LocalRecords(Logistic(), part, unit=unit, chunk_size=RECORDS) for part in train]
    count = RECORDS if unit == "record" else clients
    start = holders[0].point
    server = SynchronousServer("trust", agreed, start, ROUNDS, clients, count, rate, noise=noise)
    while not server.is_done:
        query = Query((Term(1.0, server.point),), clip_norm, z)
        for c in sorted(server.awaited):
            batch = list(range(RECORDS // clients))
            if noise == "server":
                value = bounded(holders[c], query, batch).value
            else:
                value = noised_sum(holders[c], query, batch, noise_source(None)).value
            place = {"round": server.round, "part": 0}
            server.receive(c, Message("answer", place, {"sum": value}).to_bytes())
    module = Logistic()
    nn.utils.vector_to_parameters(server.point, module.parameters())
    return accuracy(module, test)


def measure_trust(clients: int) -> None:
    """Print one row."""
    found = []
    for unit, (epsilon, delta) in BUDGETS.items():
        z = calibrate([1.0] * ROUNDS, 1.0, ROUNDS, epsilon, delta)
        for noise in ("client", "server"):
            scores = [
                mean(trained(clients, unit, noise, z, rate) for _ in range(SEEDS)) for rate in RATES
            ]
            found.append(f"{max(scores):.2f}")
    print(f"| {clients} | {' | '.join(found)} |", flush=True)


# -- the masks of SecAgg+ ------------------------------------------------------------------------


def measure_masks(pairs: int = 2000, window: int = 100_000, size: int = 1000) -> None:
    """Print the bits of a mask's seed, and what trying them costs and finds."""
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.supercore.primitives.asymmetric import generate_key_pairs

    def seed_of(key: bytes) -> int:  # as pseudo_rand_gen folds it
        return int(np.bitwise_xor.reduce(np.frombuffer(key, "<u4")))

    keys = [(generate_key_pairs()[0], generate_key_pairs()[1]) for _ in range(pairs)]
    seeds = [seed_of(generate_shared_key(*pair)) for pair in keys]
    ones, zeros = (
        np.bitwise_or.reduce(np.array(s, np.uint32)) for s in (seeds, [~s % 2**32 for s in seeds])
    )
    bits = int(ones & zeros).bit_count()
    modulus, weight = 2**32, 1000
    update = np.random.default_rng(0).integers(0, 2**22, size)
    shared = generate_shared_key(*keys[0])
    weights, values = pseudo_rand_gen(shared, modulus, [(), (size,)])
    sent = (weight + int(weights)) % modulus, (update + values) % modulus
    begin, right, recovered = time.process_time(), seeds[0], []
    for guess in range(max(0, right - window // 2), right + window // 2):
        (first,) = pseudo_rand_gen(guess.to_bytes(4, "little"), modulus, [()])
        if (sent[0] - int(first)) % modulus == weight:  # which is public
            _, mask = pseudo_rand_gen(guess.to_bytes(4, "little"), modulus, [(), (size,)])
            vector = (sent[1] - mask) % modulus
            if int(vector.max()) < 2**22:
                recovered.append(vector)
    each = (time.process_time() - begin) / window
    is_read = len(recovered) == 1 and bool((recovered[0] == update).all())
    print(f"{bits} of the 32 bits of a seed vary over {pairs} pairs of keys")
    print(f"{1000 * each:.3f} ms a guess: {each * 2**bits / 3600:.1f} hours of one core for all")
    print(f"the vector of {size} numbers was read: {is_read}")


HEADS = {
    "server": "| server | clients | parameters | s a round | ms a client | memory / model |",
    "client": "| parameters | records | ms of gradients and noise | ms of a round | ratio |",
    "simulation": "| clients | parameters | s a round | ms a client | memory / model |",
    "trust": "| clients | a record: at clients | at the server | a client: at clients | at the server |",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="server")
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 100, 1000])
    parser.add_argument("--size", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", choices=SERVERS, help="a row of this server only")
    parser.add_argument("--row", action="store_true", help="a row of the simulation only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "masks":
        measure_masks()
        return
    if options.row:
        measure_simulation(options.clients[0], options.size[0], options.rounds)
        return
    if options.server:
        measure_server(options.server, options.clients[0], options.size[0], options.rounds)
        return
    head = HEADS[options.part]
    print(f"{head}\n|{' --- |' * (head.count('|') - 1)}", flush=True)
    pairs = [(c, d) for d in options.size for c in options.clients if c * d <= PRODUCT]
    if options.part == "client":
        for width, batch in ((64, 256), (512, 256), (512, 1024), (2048, 1024)):
            measure_client(width, batch, max(options.rounds, 40))
    elif options.part == "trust":
        for clients in options.clients:
            measure_trust(clients)
    else:
        is_real = options.part == "simulation"
        for kind in (
            [["--part", "simulation", "--row"]] if is_real else [["--server", n] for n in SERVERS]
        ):
            for clients, size in pairs:
                numbers = ["--clients", clients, "--size", size, "--rounds", options.rounds]
                subprocess.run([sys.executable, __file__, *kind, *map(str, numbers)], check=True)


if __name__ == "__main__":
    main()
