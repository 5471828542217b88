"""A whole federation as processes on this machine, on the loopback interface only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_HOST = "127.0.0.1"
_CONNECTION = "loopback"
# A shell that becomes the command. A child that it leaves in the command's process group reads from
# a pipe that the starting process holds open: when that is gone, however it ended, so is the group.
_GUARDED = 'exec 3<&0; (read -r line <&3; kill -KILL 0) & exec "$@" 3<&- </dev/null'
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray listens on all interfaces
}


class LoopbackFederation:
    """Flower's processes for a trial on one machine: the same apps as in a deployment.

    As a context manager it starts a SuperLink and one SuperNode per client (or, with
    ``simulation``, a SuperLink that runs all clients in Flower's simulation engine) and ends them;
    they also end if this process is killed.
    Connections are not encrypted, and nothing listens outside of 127.0.0.1. Without starting it,
    :meth:`run` uses the SuperLink that another process has started at ``port``.

    Args:
        folder: for Flower's files and the logs ``superlink.log``, ``supernode-0.log``, ...
        num_clients: SuperNodes, with ``partition-id`` 0, 1, ... in their ``node_config``.
        simulation: with the simulation engine (needs ``flwr[simulation]``).
        environment: variables that the apps see besides those of this process.
        port: of the SuperLink; default one that is free.

    Raises:
        FileNotFoundError: if Flower's commands are not installed.
        RuntimeError: if the SuperLink does not start; its log is in the message.
    """

    def __init__(
        self,
        folder: str | Path,
        num_clients: int,
        *,
        simulation: bool = False,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.num_clients = num_clients
        self.simulation = simulation
        self.address = f"{_HOST}:{port or _free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        commands = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            **_QUIET,
            "FLWR_HOME": str(self.folder),
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
            **(environment or {}),
        }
        if not (commands / "flower-superlink").exists():
            raise FileNotFoundError(
                f"Flower's commands are not in {commands}: pip install 'lightning-dp[federated]' "
                "(for a simulation 'lightning-dp[federated-sim]')."
            )

    def __enter__(self) -> LoopbackFederation:
        self.folder.mkdir(parents=True, exist_ok=True)
        host, port = self.address.split(":")
        arguments = ["--insecure", "--host", host, "--port", port]
        arguments += ["--disable-runtime-dependency-installation"]  # apps use what is installed
        arguments += ["--simulation"] if self.simulation else []
        try:
            self._start("superlink", "flower-superlink", *arguments)
            self._wait_for_superlink()
            if not self.simulation:
                for client in range(self.num_clients):
                    self.start_node(client)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start_node(self, client: int) -> None:
        """Start the SuperNode of a client; one that was killed gets a new node id."""
        config = f"partition-id={client} num-partitions={self.num_clients}"
        self._start(
            *(f"supernode-{client}", "flower-supernode", "--insecure"),
            *("--superlink", self.address, "--port", str(_free_port()), "--node-config", config),
        )

    def kill_node(self, client: int) -> None:
        """Kill a SuperNode and whatever it runs, at once and without a warning (SIGKILL)."""
        _end(self._processes.pop(f"supernode-{client}"), signal.SIGKILL)

    def run(self, app: str | Path, config: Mapping[str, bool | int | float | str]) -> str:
        """Run a Flower app to its end.

        Args:
            app: its folder, with a ``pyproject.toml``.
            config: of this run; overrides ``[tool.flwr.app.config]``.

        Returns:
            what the run logged.

        Raises:
            RuntimeError: if the app did not end well; its log is in the message.
        """
        process = self.submit(app, config, stdout=subprocess.PIPE)
        log = process.communicate()[0].decode()
        if process.returncode == 0:
            listed = self._flwr("ls", _CONNECTION, "--format", "json").communicate()[0]
            if json.loads(listed)["runs"][0]["status"] == "finished:completed":
                return log
        raise RuntimeError(f"The run of {app} did not end well:\n{log}")

    def submit(
        self,
        app: str | Path,
        config: Mapping[str, bool | int | float | str],
        stdout: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a run; the process shows its log (``flwr run --stream``) and ends with it."""
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        arguments = ["run", str(app), _CONNECTION, "--stream"]
        arguments += ["--run-config", overrides] if overrides else []
        if self.simulation:
            sizes = f"num-supernodes={self.num_clients} client-resources-num-cpus=1"
            arguments += ["--federation-config", sizes]
        return self._flwr(*arguments, stdout=stdout)

    def close(self) -> None:
        """End all processes."""
        while self._processes:
            _, process = self._processes.popitem()
            _end(process, signal.SIGTERM)

    # -- processes ---------------------------------------------------------------------------

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    _GUARDED,
                    command,
                    Path(sys.executable).parent / command,
                    *arguments,
                ],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,
                start_new_session=True,  # to be ended with what it starts itself
            )

    def _flwr(
        self, *arguments: str, stdout: int | None = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n'
            f'[superlink.{_CONNECTION}]\naddress = "{self.address}"\ninsecure = true\n',
            encoding="utf-8",
        )
        return subprocess.Popen(
            [Path(sys.executable).parent / "flwr", *arguments],
            env=self._environment,
            stdout=stdout,
            stderr=None if stdout is None else subprocess.STDOUT,
        )

    def _wait_for_superlink(self, seconds: float = 60.0) -> None:
        host, port = self.address.split(":")
        end = time.monotonic() + seconds
        while self._processes["superlink"].poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            time.sleep(0.1)
        log = (self.folder / "superlink.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"The SuperLink at {self.address} did not start:\n{log}")


def _end(process: subprocess.Popen[bytes], how: signal.Signals, patience: float = 10.0) -> None:
    """End a process with everything it started."""
    for attempt in (how, signal.SIGKILL):
        try:
            os.killpg(process.pid, attempt)
            process.wait(patience)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
