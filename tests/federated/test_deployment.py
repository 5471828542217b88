"""The page on several machines: its scripts and commands, each machine a home folder on this one."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import torch

from lightning_dp.federated.logbook import read_rounds
from tests.federated.zoo import FIVE_CLIENTS, history

APP = Path(__file__).parent / "app"
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "federated" / "deployment"
PAGE = (SCRIPTS / "README.md").read_text(encoding="utf-8")
CLIENTS = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").exists(), reason="the page is for Linux"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machine:
    """A home folder with the page's environment, and the services that its commands have enabled.

    There is no systemd here: ``systemctl`` and ``loginctl`` leave a note, and this class does what
    the unit files on the page ask for: %h, EnvironmentFile, ExecStart, Restart=always.
    """

    def __init__(self, home: Path, **environment: str) -> None:
        self.home, self.folder = home, home / "federation"
        self.folder.mkdir(parents=True)
        (self.folder / "venv").symlink_to(sys.prefix)
        tools = home / "tools"
        tools.mkdir()
        for name in ("systemctl", "loginctl"):
            (tools / name).write_text(f'#!/bin/sh\necho "$@" >> {home}/{name}.txt\n')
            (tools / name).chmod(0o755)
        self.environment = {
            **{
                name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ
            },
            **{"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            **{"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", **environment},
        }
        self.starts, self._is_over = 0, False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def run(self, commands: str, seconds: float = 900.0) -> subprocess.CompletedProcess[str]:
        """Run commands of the page in a shell of their own."""
        return subprocess.run(
            ["/bin/bash", "-e", "-c", commands],
            cwd=self.home,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )

    def check(self, commands: str) -> None:
        done = self.run(commands)
        assert done.returncode == 0, done.stdout

    def start_services(self) -> None:
        assert "enable-linger" in (self.home / "loginctl.txt").read_text()
        assert "--user enable --now" in (self.home / "systemctl.txt").read_text()
        self._thread.start()

    def _serve(self) -> None:
        name = (self.home / "systemctl.txt").read_text().split()[-1]
        unit = configparser.ConfigParser(interpolation=None, delimiters=("=",))
        unit.optionxform = str  # type: ignore[assignment]
        text = (self.home / ".config/systemd/user" / f"{name}.service").read_text()
        unit.read_string(text.replace("\\\n", "").replace("%h", str(self.home)))
        service = unit["Service"]
        assert (service["Restart"], unit["Install"]["WantedBy"]) == ("always", "default.target")
        given = dict(each.split("=", 1) for each in shlex.split(service["Environment"]))
        lines = Path(service["EnvironmentFile"]).read_text().split()
        given |= dict(line.split("=", 1) for line in lines)
        command = [re.sub(r"\$\{(\w+)\}", lambda found: given[found[1]], part)
                   for part in shlex.split(service["ExecStart"])]  # fmt: skip
        while not self._is_over:
            with open(self.home / "service.log", "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=service["WorkingDirectory"],
                    env={**self.environment, **given},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.starts += 1
            self._process.wait()
            self.kill()  # systemd ends what is left of a service's processes
            if not self._is_over:
                time.sleep(float(service["RestartSec"]))

    def kill(self) -> None:
        """SIGKILL for the service and what it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._is_over = True
        self.kill()
        if self._thread.is_alive():
            self._thread.join(20)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """The server, and the clients."""
    port = str(free_port())
    found = [Machine(tmp_path / "server", HOST="localhost", PORT=port)]
    for c in range(CLIENTS):
        place = tmp_path / f"client-{c}"
        found.append(Machine(place, CLIENT=f"{c}", NODE_PORT=f"{free_port()}"))
    yield found
    for machine in found:
        machine.close()


def wait_until(is_true: Callable[[], bool], seconds: float = 900.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.1)


def test_the_commands_of_the_page_survive_a_killed_supernode_and_a_killed_superlink(machines):
    """Client 1 is killed while it computes round 1, and then the SuperLink with its run."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    a_run, a_backup = blocks
    at_the_server, at_a_client, registration = (
        (SCRIPTS / f"{name}.sh").read_text("utf-8") for name in ("server", "client", "register")
    )
    server, *clients = machines
    server.check(at_the_server)
    server.start_services()
    for c, client in enumerate(clients):
        for name in ("env", "server.crt"):
            shutil.copy(server.folder / name, client.folder)
        client.check(at_a_client)
        shutil.copy(client.folder / "key.pub", server.folder / f"client-{c}.pub")
        client.start_services()
    port = int(server.environment["PORT"])
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    done = server.run(registration)
    assert done.returncode == 0 and done.stdout.count("registered successfully") == CLIENTS
    app = server.folder / "app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    settings = (app / "pyproject.toml").read_text()
    for old, new in (('out = ""', 'out = "~/federation"'), ("clients = 3", "clients = 5")):
        assert old in settings
        settings = settings.replace(old, new)
    (app / "pyproject.toml").write_text(settings.replace("stuck = -1", "stuck = 1"))
    code = app / "small_federation.py"
    code.write_text(code.read_text().replace("ttl=40.0", "ttl=600.0"))  # no message is waited for

    logs: list[subprocess.CompletedProcess[str]] = []
    first = threading.Thread(target=lambda: logs.append(server.run(a_run)), daemon=True)
    first.start()
    batches = clients[1].folder / "batches"
    wait_until(lambda: batches.exists() and batches.read_text().count("batch") == 2)
    before = clients[1].starts  # some: a SuperNode ends until its key is registered
    clients[1].kill()
    assert sum(n for _, n in history(clients[1].folder / "ledgers", "client-1")) == 2
    wait_until(lambda: clients[1].starts > before)
    assert (server.folder / "server" / "server.pt").exists()
    server.kill()
    first.join(100)
    wait_until(lambda: server.starts == 2)  # it has died once
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    done = server.run(a_run)
    results = server.folder / "server"
    assert (results / "model.pt").exists(), done.stdout

    end = torch.load(results / "model.pt", weights_only=True)["x"]
    torch.testing.assert_close(end, FIVE_CLIENTS.twin(), rtol=0, atol=5e-10)
    for c, client in enumerate(clients):
        name, charged = f"client-{c}", dict(FIVE_CLIENTS.events(c))
        assert dict(history(client.folder / "ledgers", name)) == charged
        client.check(a_backup)
        with tarfile.open(client.folder / "ledgers.tgz") as backup:
            backup.extractall(client.home / "restored", filter="data")
        assert dict(history(client.home / "restored" / "ledgers", name)) == charged
    attendance = read_rounds(results / "rounds.csv")
    assert [each[:3] for each in attendance] == [(i, c, True) for i in (0, 1) for c in range(5)]
    page = (results / "federation.md").read_text()
    assert all(f"\n| {c} | 30 | " in page for c in range(CLIENTS))
    assert (results / "federation.svg").exists()
