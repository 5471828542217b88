"""Run the examples of this folder in Flower: in simulation, or as real processes on this machine.

    python examples/federated/run.py a9a                      # one command: simulation

    python examples/federated/run.py a9a --start              # two commands: SuperLink, SuperNodes,
    python examples/federated/run.py a9a --submit             # ... and, in another terminal, a run

Problems: a9a (logistic regression, 5 clients) and mnist (LeNet, 4 clients). Data: see problems.py.
Ends with the test accuracy and every client's ε; TensorBoard files, the model and the clients'
ledgers are in --output.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from lightning_dp.federated.loopback import LoopbackFederation

APP = Path(__file__).parent
CLIENTS = {"a9a": 5, "mnist": 4}
PORT = 9099


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", choices=CLIENTS)
    parser.add_argument("--start", action="store_true", help="start SuperLink and SuperNodes")
    parser.add_argument("--submit", action="store_true", help="run on what --start has started")
    parser.add_argument("--data", default="", help="folder with a9a.npz or mnist.npz")
    parser.add_argument("--output", type=Path, default=Path("outputs/federated"))
    parser.add_argument("--rounds", type=int, help="default: as in pyproject.toml")
    parser.add_argument("--port", type=int, default=PORT, help="of the SuperLink, with --start")
    arguments = parser.parse_args()
    output = (arguments.output / arguments.problem).absolute()
    output.mkdir(parents=True, exist_ok=True)
    if arguments.start:
        serve(arguments, output)
        return
    port = arguments.port if arguments.submit else None
    with tempfile.TemporaryDirectory() as scratch:
        federation = LoopbackFederation(
            output / "flower" if arguments.submit else scratch,
            CLIENTS[arguments.problem],
            simulation=not arguments.submit,
            environment=variables(arguments),
            port=port,
        )
        config = {"problem": arguments.problem, "output": str(output), "data": data(arguments)}
        if arguments.rounds is not None:
            config["rounds"] = arguments.rounds
        if arguments.submit:
            federation.run(APP, config)
        else:
            with federation:
                federation.run(APP, config)
    show(output / "federation.json")


def data(arguments: argparse.Namespace) -> str:
    return str(Path(arguments.data).absolute()) if arguments.data else ""


def variables(arguments: argparse.Namespace) -> dict[str, str]:
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def serve(arguments: argparse.Namespace, output: Path) -> None:
    """SuperLink and SuperNodes until Ctrl-C."""
    clients = CLIENTS[arguments.problem]
    with LoopbackFederation(
        output / "flower", clients, environment=variables(arguments), port=arguments.port
    ) as federation:
        print(f"SuperLink at {federation.address} with {clients} SuperNodes; Ctrl-C ends them.")
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            pass


def show(path: Path) -> None:
    summary = json.loads(path.read_text(encoding="utf-8"))
    accuracy = summary["metrics"]["accuracy"]
    print(f"{summary['rounds']} rounds ({summary['ended']}): test accuracy {accuracy:.3f}")
    for client, facts in summary["clients"].items():
        print(f"client {client}: {facts['num_records']} records, ε = {facts['epsilon']:.3f}")
    print(f"tensorboard --logdir {path.parent}")


if __name__ == "__main__":
    main()
