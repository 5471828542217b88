"""A Flower app of asynchronous rounds that ends at its twin's model wherever it runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from torch import nn

from lightning_dp.federated.flower import client_app, server_app
from tests.federated.zoo import (
    CLIENTS,
    DELTA,
    EVERYBODY,
    FIVE_CLIENTS,
    SEED,
    START,
    TWO_ROUNDS,
    LogCosh,
)

OF = {CLIENTS: TWO_ROUNDS, 5: FIVE_CLIENTS}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(START.clone())


class Stuck(LogCosh):
    """Is stuck in its second batch, once: to be killed there."""

    def __init__(self, client: int, file: Path) -> None:
        super().__init__(seed=client)
        self.file = file

    def bounded_sum(self, query: Any, records: Any) -> Any:
        with open(self.file, "a") as file:
            file.write("batch\n")
        if self.file.read_text().count("batch") == 2:
            time.sleep(600)
        return super().bounded_sum(query, records)


def number(context: Context) -> int:
    return int(context.node_config["partition-id"])


def out(context: Context) -> Path:
    return Path(str(context.run_config["out"])).expanduser()


def clients(context: Context) -> int:
    return int(context.run_config["clients"])


def build(context: Context) -> LogCosh:
    client = number(context)
    if client == context.run_config["stuck"]:
        return Stuck(client, out(context) / "batches")
    return LogCosh(seed=client)


def protocol(context: Context, run: str, records: Any, ledger: Any) -> Any:
    client = number(context)
    settings = {"target_epsilon": 1e9, "target_delta": DELTA, "seed": SEED + client}
    return TWO_ROUNDS.client(records, client, ledger, run=run, **settings)


client = client_app(build, protocol, ledger_dir=lambda context: out(context) / "ledgers")


def machine(context: Context, run: str, start: Any) -> Any:
    count = clients(context)
    return OF[count].server(run, start, replace(EVERYBODY, clients=count, patience=300.0))


server = server_app(
    lambda context: Weights(),
    machine,
    folder=lambda context: out(context) / "server",
    poll_interval=0.2,
    ttl=40.0,
)
