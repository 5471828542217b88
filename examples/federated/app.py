"""The Flower app of this folder: asynchronous DP-SGD with growing sample sizes, any problem.

Every client protects its own records: it clips, adds its own noise, keeps its own ledger, and
refuses what its budget does not allow. The server sees noised sums only.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from problems import PROBLEMS, Problem
from torch import Tensor, nn

from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    InverseRootSteps,
    PolynomialSizes,
)
from lightning_dp.federated.flower import client_app, server_app
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import Records

TARGET_DELTA = 1e-5
MAX_GRAD_NORM = 1.0
STEPS = {
    "a9a": InverseRootSteps(eta0=0.005, beta=0.005),
    "mnist": InverseRootSteps(eta0=0.004, beta=0.002),
}
LAG = 2


def problem(context: Context) -> Problem:
    return PROBLEMS[str(context.run_config["problem"])]


def plan(context: Context) -> AsyncPlan:
    """Round i uses about 100 + 20 i of a client's records."""
    rounds, name = int(context.run_config["rounds"]), problem(context).name
    return AsyncPlan(rounds, PolynomialSizes(a=20, b=100), STEPS[name], lag=LAG)


def output(context: Context) -> Path:
    return Path(str(context.run_config["output"])).expanduser()


# -- a client --------------------------------------------------------------------------------


def records(context: Context) -> LocalRecords:
    """The unchanged LightningModule and data set of this client."""
    client, count = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    mine = problem(context).records(client, count, str(context.run_config["data"]))
    return LocalRecords(problem(context).module(), mine)


def at_the_client(
    context: Context, run: str, records: Records, ledger: ReleaseLedger
) -> AsyncClient:
    privacy = ClientPrivacy(
        max_grad_norm=MAX_GRAD_NORM,
        noise_multiplier=float(context.run_config["noise-multiplier"]),
        target_epsilon=float(context.run_config["target-epsilon"]),
        target_delta=TARGET_DELTA,
    )
    return AsyncClient(records, plan(context), privacy, ledger, run=run)


client = client_app(records, at_the_client, ledger_dir=lambda context: output(context) / "ledgers")


# -- the server ------------------------------------------------------------------------------


def at_the_server(context: Context, run: str, start: Tensor) -> AsyncServer:
    return AsyncServer(run, plan(context), start, problem(context).num_clients)


def metrics(context: Context, module: nn.Module) -> dict[str, float]:
    return {"accuracy": problem(context).accuracy(module, str(context.run_config["data"]))}


server = server_app(
    lambda context: problem(context).module(),
    at_the_server,
    folder=output,
    evaluate=metrics,
    ttl=300.0,
)
