"""A Flower app that ends at the same model wherever it runs: float64, seeded, synchronous."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp.federated import AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import AsyncClient, ClientPrivacy, InverseSteps
from lightning_dp.federated.flower import client_app, server_app
from lightning_dp.federated.local import LocalRecords

DELTA = 1e-5
RECORDS = 60


class Net(L.LightningModule):
    """Where it is given a file to count in, it is stuck in its second batch: to be killed there.

    Before the first one, it is tried on made-up records.
    """

    def __init__(self, batches: Path | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        generator = torch.Generator().manual_seed(3)
        for param in self.net.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator) / 2)
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.batches is not None:
            with open(self.batches, "a") as file:
                file.write("batch\n")
            if self.batches.read_text().count("batch") == 3:
                time.sleep(600)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss


def plan(context: Context) -> AsyncPlan:
    rounds, lag = int(context.run_config["rounds"]), int(context.run_config["lag"])
    return AsyncPlan(rounds, PolynomialSizes(a=2, b=10), InverseSteps(0.02, beta=0.01), lag=lag)


def noise(i: int) -> float:
    return 2.0 + 0.1 * i


def records(client: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(100 + client)
    x = torch.randn(RECORDS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.arange(RECORDS) % 3)


def out(context: Context) -> Path:
    return Path(str(context.run_config["out"]))


def build(context: Context) -> LocalRecords:
    client = int(context.node_config["partition-id"])
    stuck = out(context) / "batches" if client == context.run_config["stuck"] else None
    return LocalRecords(Net(stuck), records(client))


def protocol(context: Context, run: str, data: Any, ledger: Any) -> AsyncClient:
    privacy = ClientPrivacy(
        max_grad_norm=0.5,
        noise_multiplier=noise,
        target_epsilon=float(context.run_config["epsilon"]),
        target_delta=DELTA,
        seed=int(context.node_config["partition-id"]) if context.run_config["seeded"] else None,
    )
    return AsyncClient(data, plan(context), privacy, ledger, run=run)


def server_protocol(context: Context, run: str, start: Tensor) -> AsyncServer:
    return AsyncServer(run, plan(context), start, int(context.run_config["clients"]))


honest = client_app(build, protocol, ledger_dir=lambda context: out(context) / "ledgers")
client = ClientApp()
client.query()(lambda message, context: honest(message, context))


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Honestly; the client that is hostile sends four replies that make no sense first."""
    reply = honest(message, context)
    if context.node_config["partition-id"] != context.run_config.get("hostile", -1):
        return reply
    counter = out(context) / "spoilt"
    number = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (number + 1))
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (4611686018427387904, 4), }\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    overflowing = ArrayRecord({"bytes": Array("uint8", (4,), "numpy.ndarray", data)})
    bad: list[dict[str, Any]] = [
        {},
        {"payload": overflowing, "facts": reply.content["facts"]},
        {"payload": reply.content["payload"], "facts": ConfigRecord({"client": 0})},
        {"payload": reply.content["payload"], "facts": ConfigRecord({"epsilon": b"much"})},
    ]
    return Message(RecordDict(bad[number]), reply_to=message) if number < len(bad) else reply


server = server_app(
    lambda context: Net(),
    server_protocol,
    num_clients=lambda context: int(context.run_config["clients"]),
    folder=lambda context: out(context) / "server",
    poll_interval=float(os.environ.get("TEST_POLL_INTERVAL", "0.2")),
    ttl=120.0,
    patience=float(os.environ.get("TEST_PATIENCE", "600")),
)
