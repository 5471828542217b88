"""The same federation in process, in Flower's simulation and as processes: one model, one ledger."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import torch
from torch import Tensor, nn

from lightning_dp import Constant, Diff2, FullBatch
from lightning_dp._noise import random_generator
from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.client import noise_source
from lightning_dp.federated.flower import client_app, server_app
from lightning_dp.federated.flower.exchange import payload_of
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.synchronous import QueryClient, SynchronousServer
from lightning_dp.functional import flatten, unflatten
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import Poisson
from lightning_dp.testing import Faults, LoopbackFederation, LoopbackGrid

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

APP = Path(__file__).parent / "app"
GOOD_NETWORK = Faults()
BAD_NETWORK = Faults(late=0.4, lost=0.15, undelivered=0.1, duplicated=0.15, restarted=0.1)
DEFAULTS = {"clients": 2, "rounds": 3, "lag": 1, "epsilon": 1e9, "stuck": -1, "seeded": True}


@pytest.fixture(scope="module")
def app() -> ModuleType:
    """The Flower app of the folder `app`, in a hurry."""
    name = "small_federation"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_POLL_INTERVAL", "0.001")
        patch.setenv("TEST_PATIENCE", "20")
        return load(name)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, APP / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_process(app: ModuleType, tmp_path: Path) -> Callable[..., Tensor]:
    """Run the app on the loopback grid; its final model."""

    def run(
        faults: Faults = GOOD_NETWORK, seed: int = 0, folder: str = "run", **config: Any
    ) -> Tensor:
        config = {**DEFAULTS, "out": str(tmp_path / folder), **config}
        LoopbackGrid(app.client, int(config["clients"]), faults, config, seed=seed).start(
            app.server
        )
        return final(tmp_path / folder)

    return run


def final(folder: Path) -> Tensor:
    """The parameters of the model that a run has left."""
    state = torch.load(folder / "server" / "model.pt", weights_only=True)
    return flatten(list(state.values()))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "server" / "federation.json").read_text())


def history(folder: Path, client: int) -> dict[AbstractEvent, int]:
    return dict(ReleaseLedger(folder / "ledgers", f"client-{client}").history())


def events(app: ModuleType, rounds: int) -> dict[AbstractEvent, int]:
    """The events that one client is charged in so many rounds, written down by hand."""
    sizes = [2 * i + 10 for i in range(rounds)]
    assert max(sizes) <= app.RECORDS
    return {
        (PoissonGaussian(app.noise(i), size / 60) if size < 60 else Gaussian(app.noise(i))): 1
        for i, size in enumerate(sizes)
    }


def gradient(net: nn.Module, point: Tensor, record: tuple[Tensor, Tensor]) -> Tensor:
    """Of one record, by plain autograd."""
    params = list(net.parameters())
    for param, value in zip(params, unflatten(point, params), strict=True):
        param.data = value
    loss = nn.functional.cross_entropy(net(record[0][None]), record[1][None])
    return flatten(torch.autograd.grad(loss, params))


def by_hand(app: ModuleType, clients: int, rounds: int) -> Tensor:
    """The protocol as a loop over rounds, clients and records, with the same seeds."""
    net = app.Net().net
    x, before = flatten(list(net.parameters())), 0
    for i in range(rounds):
        rate, z = (2 * i + 10) / app.RECORDS, app.noise(i)
        moved = x.clone()
        for client in range(clients):
            data = app.records(client)
            drawn = Poisson().draw(app.RECORDS, rate, random_generator(client, 1, i))
            total = torch.zeros_like(x)
            for record in drawn.tolist():
                part = gradient(net, x, data[record])
                total += part * min(1.0, 0.5 / float(part.norm()))
            noise_source(client, i).add_normal(total, z * 0.5)
            moved -= 0.02 / (1 + 0.01 * before) * total
        x, before = moved, before + 2 * i + 10
    return x


def test_the_model_is_that_of_a_plain_loop(in_process, app):
    assert_same(in_process(clients=3, rounds=4), by_hand(app, 3, 4))


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=5e-10)
    assert float(wanted.norm()) > 1


@pytest.mark.parametrize("seed", range(2))
def test_a_bad_network_changes_neither_the_model_nor_the_ledgers(in_process, app, tmp_path, seed):
    model = in_process(BAD_NETWORK, seed, clients=4, rounds=5)

    assert_same(model, by_hand(app, 4, 5))
    assert summary(tmp_path / "run")["problems"] > 0
    for client in range(4):
        assert history(tmp_path / "run", client) == events(app, 5)


def test_32_client_rounds_take_about_a_second(in_process):
    in_process(clients=1, rounds=1)  # imports
    start = time.perf_counter()

    in_process(BAD_NETWORK, folder="measured", clients=4, rounds=8)

    assert time.perf_counter() - start < 5


def test_clients_that_run_ahead_are_charged_once_for_each_round(in_process, app, tmp_path):
    in_process(BAD_NETWORK, 5, clients=4, rounds=6, lag=3)

    for client in range(4):
        assert history(tmp_path / "run", client) == events(app, 6)


def test_the_server_is_told_the_epsilon_of_every_client(in_process, app, tmp_path):
    in_process(BAD_NETWORK, clients=2, rounds=4)

    clients = summary(tmp_path / "run")["clients"]
    truth = PLDAccountant().epsilon(list(events(app, 4).items()), app.DELTA)
    for client in ("0", "1"):
        assert clients[client]["epsilon"] == pytest.approx(truth, rel=1e-12)
        assert clients[client]["delta"] == app.DELTA
        assert clients[client]["unit"] == "record"
        assert clients[client]["seeded"] is True
        assert clients[client]["num_records"] == 60


def test_a_message_that_comes_twice_is_answered_with_the_same_bytes(app, tmp_path):
    """With noise from the operating system: a second draw would average the noise out."""
    sent: dict[str, list[bytes]] = {}

    def recorded(message: Any, context: Any) -> Any:
        reply = app.client(message, context)
        if message.metadata.message_type == "train":
            sent.setdefault(message.metadata.message_id, []).append(payload_of(reply))
        return reply

    config = {**DEFAULTS, "out": str(tmp_path / "run"), "seeded": False}
    LoopbackGrid(recorded, 2, Faults(duplicated=1.0), config).start(app.server)

    assert len(sent) == 6
    assert all(len(replies) == 2 and replies[0] == replies[1] for replies in sent.values())
    assert len({replies[0] for replies in sent.values()}) == 6
    assert summary(tmp_path / "run")["clients"]["0"]["seeded"] is False


def test_a_second_federation_over_the_same_data_adds_to_the_ledger(in_process, app, tmp_path):
    in_process(rounds=3)
    in_process(rounds=3)

    assert history(tmp_path / "run", 0) == dict.fromkeys(events(app, 3), 2)


def test_a_budget_is_kept_over_federations_and_the_run_ends(in_process, app, tmp_path):
    accountant = PLDAccountant()
    budget = accountant.epsilon(list(events(app, 4).items()), app.DELTA) * 1.001

    in_process(rounds=8, epsilon=budget)

    assert history(tmp_path / "run", 0) == events(app, 4)
    assert summary(tmp_path / "run")["ended"] == "no client has budget left"
    in_process(rounds=8, epsilon=budget)  # nothing is left
    assert history(tmp_path / "run", 0) == events(app, 4)


def test_a_server_that_died_goes_on_and_nothing_is_charged_twice(in_process, app, tmp_path):
    receive, count = AsyncServer.receive, 0

    def dies(self: AsyncServer, client: int, reply: bytes) -> None:
        nonlocal count
        count += 1
        if count == 10:  # some of round 2 is in, some is not
            raise KeyboardInterrupt
        receive(self, client, reply)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncServer, "receive", dies)
        with pytest.raises(KeyboardInterrupt):
            in_process(BAD_NETWORK, clients=4, rounds=5)
    assert sum(len(history(tmp_path / "run", client)) for client in range(4)) >= 10

    model = in_process(BAD_NETWORK, 1, clients=4, rounds=5)

    assert_same(model, by_hand(app, 4, 5))
    for client in range(4):
        assert history(tmp_path / "run", client) == events(app, 5)


def test_diff2_with_a_trusted_server_is_that_of_the_paper(app, tmp_path):
    """Full batches, differences clipped per record, noise once at the server; on a bad network."""
    plan = NoisePlan(1.5, Constant(), FullBatch(), 1.0, Diff2(3, 0.5, 0.4))
    clients, rounds, eta = 3, 5, 0.5
    total = clients * app.RECORDS
    client = client_app(
        app.build,
        lambda context, run, records, ledger: QueryClient(
            *(records, plan, ledger),
            **{"run": run, "rounds": rounds, "trusts_server": True},
            **{"target_epsilon": math.inf, "target_delta": app.DELTA},
        ),
        ledger_dir=tmp_path / "run" / "ledgers",
    )
    server = server_app(
        lambda context: app.Net(),
        lambda context, run, start: SynchronousServer(
            run, plan, start, rounds, clients, total, learning_rate=eta, seed=7
        ),
        num_clients=clients,
        folder=tmp_path / "run" / "server",
        poll_interval=0.001,
    )
    LoopbackGrid(client, clients, BAD_NETWORK, DEFAULTS, seed=2).start(server)

    net = app.Net().net
    data = [app.records(c)[i] for c in range(clients) for i in range(app.RECORDS)]
    x, before, v = flatten(list(net.parameters())), None, None
    for r in range(rounds):
        restart = r % 3 == 0
        radius = 0.5 if restart else 0.4 * float((x - before).norm())
        parts = [gradient(net, x, z) - (0 if restart else gradient(net, before, z)) for z in data]
        answer = sum(part * min(1.0, radius / float(part.norm())) for part in parts)
        z = plan.noise_multiplier(r)
        noise_source(7, r).add_normal(answer, z * radius)
        v = answer / total + (0 if restart else v)
        before, x = x, x - eta * v
    assert_same(final(tmp_path / "run"), x)
    charged = [plan.event(r) for r in range(rounds)]
    for number in range(clients):
        assert history(tmp_path / "run", number) == dict(Counter(charged))


# -- real engines ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_simulation_ends_at_the_same_model(app, tmp_path):
    pytest.importorskip("ray", reason="needs lightning-dp[federated-sim]")
    config = {"out": str(tmp_path / "run")}
    with LoopbackFederation(tmp_path / "flower", 2, simulation=True) as federation:
        federation.run(APP, config)

    assert_same(final(tmp_path / "run"), by_hand(app, 2, 3))
    for client in (0, 1):
        assert history(tmp_path / "run", client) == events(app, 3)


@pytest.mark.slow
def test_processes_end_at_the_same_model_though_a_supernode_is_killed(app, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    killed: list[dict[AbstractEvent, int]] = []

    def kill(federation: LoopbackFederation) -> None:
        """Kill client 1 while it computes round 1, which it has charged."""
        batches = folder / "batches"
        while not batches.exists() or batches.read_text().count("batch") < 3:
            time.sleep(0.05)
        federation.kill_node(1)
        killed.append(history(folder, 1))
        federation.start_node(1)

    with LoopbackFederation(tmp_path / "flower", 2) as federation:
        killer = Thread(target=kill, args=(federation,), daemon=True)
        killer.start()
        federation.run(APP, {"out": str(folder), "stuck": 1})
        killer.join(1)

    assert killed == [events(app, 2)]  # charged, and not released
    assert_same(final(folder), by_hand(app, 2, 3))
    for client in (0, 1):
        assert history(folder, client) == events(app, 3)


@pytest.mark.slow
def test_processes_end_at_the_same_model_though_a_client_sends_nonsense(app, tmp_path):
    folder = tmp_path / "run"
    with LoopbackFederation(tmp_path / "flower", 2) as federation:
        federation.run(APP, {"out": str(folder), "hostile": 1})

    assert_same(final(folder), by_hand(app, 2, 3))
    assert summary(folder)["problems"] == 4
    for client in (0, 1):
        assert history(folder, client) == events(app, 3)


def test_a_client_that_sends_nonsense_changes_neither_the_model_nor_the_ledgers(
    in_process, app, tmp_path
):
    assert_same(in_process(hostile=1), by_hand(app, 2, 3))
    assert summary(tmp_path / "run")["problems"] == 4
    for client in (0, 1):
        assert history(tmp_path / "run", client) == events(app, 3)


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path):
    with (
        LoopbackFederation(tmp_path / "flower", 1) as federation,
        pytest.raises(RuntimeError, match=r"did not end well[\s\S]*num_clients=0"),
    ):
        federation.run(APP, {"out": str(tmp_path / "run"), "clients": 0})


@pytest.mark.parametrize("bad", [0, -1, math.nan])
def test_a_loopback_federation_has_clients(tmp_path, bad):
    with pytest.raises(ValueError, match="num_clients="):
        LoopbackFederation(tmp_path, bad)
