"""Run the examples of this folder in Flower: in simulation, or as real processes on this machine.

    python examples/federated/run.py a9a                      # one command: simulation

    python examples/federated/run.py a9a --start              # two commands: SuperLink, SuperNodes,
    python examples/federated/run.py a9a --submit             # ... and, in another terminal, a run

Problems: a9a (logistic regression, 5 clients) and mnist (LeNet, 4 clients). Data: see problems.py.
Ends with the test accuracy and every client's ε; TensorBoard files, the model and the clients'
ledgers are in --output; TensorBoard follows a run while it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

from problems import PROBLEMS
from processes import LoopbackFederation

from lightning_dp.accounting import epsilon_text

APP = Path(__file__).parent
PORT = 9099


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--start", action="store_true", help="start SuperLink and SuperNodes")
    parser.add_argument("--submit", action="store_true", help="run on what --start has started")
    parser.add_argument("--data", default="", help="folder with a9a.npz or mnist.npz")
    parser.add_argument("--output", type=Path, default=Path("outputs/federated"))
    parser.add_argument("--rounds", type=int, help="default: as in pyproject.toml")
    parser.add_argument("--port", type=int, default=PORT, help="of the SuperLink, with --start")
    arguments = parser.parse_args()
    output = (arguments.output / arguments.problem).absolute()
    federation = LoopbackFederation(
        output / "flower",
        PROBLEMS[arguments.problem].num_clients,
        simulation=not (arguments.start or arguments.submit),
        environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        port=arguments.port if arguments.start or arguments.submit else None,
    )
    if arguments.start:
        serve(federation)
        return
    config: dict[str, str | int] = {"problem": arguments.problem, "output": str(output)}
    if arguments.data:
        config["data"] = str(Path(arguments.data).absolute())
    if arguments.rounds is not None:
        config["rounds"] = arguments.rounds
    print(f"Progress: tensorboard --logdir {output}", flush=True)
    with nullcontext() if arguments.submit else federation:
        federation.run(APP, config)
    show(output / "federation.json")


def serve(federation: LoopbackFederation) -> None:
    """SuperLink and SuperNodes until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with federation:
        count = federation.num_clients
        print(
            f"SuperLink at {federation.address}, {count} SuperNodes; Ctrl-C ends them", flush=True
        )
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
        print(
            f"client {client}: {facts['num_records']} records, ε = {epsilon_text(facts['epsilon'])}"
        )


if __name__ == "__main__":
    main()
