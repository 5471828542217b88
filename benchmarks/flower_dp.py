"""Flower's own differential privacy and this package's at the same ε, on one small task.

    python benchmarks/flower_dp.py [--epsilon 8] [--rounds 10] [--seeds 3]
    python benchmarks/flower_dp.py --pfl    # pfl-research alone: pip install pfl

Logistic regression on scikit-learn's digits, 50 clients with 28 records each; ε hides a whole client
(add or remove one), at δ = 1e-3. Both run in one process over the messages of Flower. Noise is
calibrated by this package's accountant for all; Flower's (RDP) computes ε of the same releases.

- central: the server is trusted, clips (Flower) or has the clients clip (here), and noises the sum
  once. Flower: DP-FedAvg, with local epochs. Here: SynchronousServer(noise="server"), with one
  gradient (LocalRecords) or local epochs (LocalUpdates).
- local: each client noises what it sends. Flower's LocalDpMod takes the noise of one message from
  the classical formula and composes nothing: it gets ε / T and δ / T for each of T rounds.
- pfl-research: FederatedAveraging with its GaussianMechanism, central or local, without messages:
  its SimulatedBackend trains the clients in one process, from one model in memory.

Each row takes the best of four learning rates: an exploration that its ε does not cover.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore import privacy_accounting as flower
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "federated"))
from federated import Logistic, accuracy, digits
from local_updates import LocalUpdates
from loopback import LoopbackGrid

from lightning_dp import Constant, FullBatch, MeanGradient
from lightning_dp.accounting import Gaussian, PLDAccountant, calibrate
from lightning_dp.federated.flower import client_app, server_app
from lightning_dp.federated.local import LocalRecords, ModuleRecords
from lightning_dp.federated.synchronous import QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan

CLIENTS, DELTA, CLIP_NORM = 50, 1e-3, 0.5
RATES = (0.1, 0.3, 1.0, 3.0)


TRAIN, TEST = digits(CLIENTS)


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


# -- Flower ------------------------------------------------------------------------------------


def trained(message: Message, context: Context, rate: float, epochs: int) -> Message:
    """Full-batch gradient descent on a client's records."""
    module = Logistic()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), rate)
    for _ in range(epochs):
        optimizer.zero_grad()
        module.training_step(TRAIN[partition(context)].tensors, 0).backward()
        optimizer.step()
    arrays, count = ArrayRecord(module.state_dict()), MetricRecord({"num-examples": 28})
    return Message(RecordDict({"arrays": arrays, "metrics": count}), reply_to=message)


def with_flower(
    kind: str, epochs: int, rounds: int, epsilon: float, z: float, rate: float
) -> tuple[float, float]:
    """Return the accuracy, and ε by Flower's accountant (NaN where it has none)."""
    local = LocalDpMod(CLIP_NORM, CLIP_NORM, epsilon / rounds, DELTA / rounds)
    app = ClientApp(mods=[local] if kind == "local" else [])
    app.train()(lambda message, context: trained(message, context, rate, epochs))
    relation = flower.NeighboringRelation.ADD_OR_REMOVE_ONE
    method = flower.SamplingMethod.NO_AMPLIFICATION
    config = flower.PrivacyConfig(DELTA, CLIENTS, relation, method)
    accountant, strategy = RdpAccountant(config), FedAvg(fraction_evaluate=0.0)
    if kind == "central":
        strategy = DifferentialPrivacyServerSideFixedClipping(
            strategy, z, CLIP_NORM, CLIENTS, accountant=accountant
        )
    grid = LoopbackGrid(app, CLIENTS)
    result = strategy.start(grid, ArrayRecord(Logistic().state_dict()), rounds)
    module = Logistic()
    module.load_state_dict(result.arrays.to_torch_state_dict())
    return accuracy(module, TEST), accountant.get_epsilon(DELTA) if kind == "central" else float(
        "nan"
    )


# -- pfl-research ------------------------------------------------------------------------------


def with_pfl(kind: str, epochs: int, rounds: int, z: float, rate: float) -> tuple[float, float]:
    """Return the accuracy; pfl calibrates noise, and computes no ε of given noise."""
    import pfl.model.pytorch as pytorch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    class Theirs(Logistic):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return self.training_step((x, y), 0)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    module = Theirs()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)  # adds the mean of the updates
    model = pytorch.PyTorchModel(module, torch.optim.SGD, optimizer)
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))  # each once in a round
    data = FederatedDataset(lambda c: PyTorchTensorDataset(TRAIN[c].tensors), sampler)
    noise = GaussianMechanism(CLIP_NORM, z)
    mechanism = CentrallyAppliedPrivacyMechanism(noise) if kind == "central" else noise
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, rounds, CLIENTS, None),
        backend=SimulatedBackend(data, data, postprocessors=[mechanism]),
        model=model,
        model_train_params=NNTrainHyperParams(None, epochs, rate),
        model_eval_params=NNEvalHyperParams(None),
    )
    return accuracy(module, TEST), float("nan")


# -- here --------------------------------------------------------------------------------------


def with_lightning_dp(kind: str, epochs: int, rounds: int, z: float, rate: float) -> float:
    """Return the accuracy; 0 epochs are one gradient."""
    is_central = kind == "central"

    def records(context: Context) -> ModuleRecords:
        module, data = Logistic(), TRAIN[partition(context)]
        if not epochs:
            return LocalRecords(module, data, unit="client")
        sgd = partial(torch.optim.SGD, lr=rate)
        return LocalUpdates(module, data, sgd, epochs=epochs, unit="client")

    plan = NoisePlan(z, Constant(), FullBatch(), 1.0, MeanGradient(CLIP_NORM))
    budget = {"target_epsilon": 100.0, "target_delta": DELTA, "trusts_server": is_central}
    scores: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        client = client_app(
            records,
            lambda context, run, records, ledger: QueryClient(
                records, plan, ledger, run=run, rounds=rounds, **budget
            ),
            ledger_dir=Path(folder, "ledgers"),
        )
        server = server_app(
            lambda context: Logistic(),
            lambda context, run, start: SynchronousServer(
                *(run, plan, start, rounds, CLIENTS, CLIENTS, 1.0 if epochs else rate),
                noise="server" if is_central else "client",
            ),
            folder=Path(folder, "results"),
            evaluate=lambda context, module: scores.append(accuracy(module, TEST)) or {},
            poll_interval=0.001,
        )
        LoopbackGrid(client, CLIENTS).start(server)
    return scores[-1]


def row(name: str, run: Callable[[float], tuple[float, float]], seeds: int, epsilon: float) -> None:
    """Print the best rate's mean accuracy, ε by both accountants, and the time of one run."""
    begin, found = time.process_time(), []
    for rate in RATES:
        scores = [run(rate) for _ in range(seeds)]
        found.append((mean(score for score, _ in scores), rate, scores[0][1]))
    seconds = (time.process_time() - begin) / (seeds * len(RATES))
    best, rate, flowers = max(found)
    print(f"| {name} | {best:.3f} | {rate} | {epsilon:.2f} | {flowers:.2f} | {seconds:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pfl", action="store_true", help="the rows of pfl-research only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("flwr", "lightning_dp.federated"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rounds, seeds = options.rounds, options.seeds
    z = calibrate([1.0] * rounds, 1.0, rounds, options.epsilon, DELTA)
    epsilon, nan = PLDAccountant().epsilon([(Gaussian(z), rounds)], DELTA), float("nan")
    print(f"{rounds} rounds with noise multiplier {z:.3f}\n")
    print(
        "| | accuracy | rate | ε | ε by Flower | s a run |\n| --- | --- | --- | --- | --- | --- |"
    )
    for kind in ("central", "local"):
        for epochs in (1, 5) if options.pfl else ():
            here = partial(with_pfl, kind, epochs, rounds, z)
            row(f"{kind}: pfl-research, local epochs {epochs}", here, seeds, epsilon)
        if options.pfl:
            continue
        for epochs in (1, 5):
            name = f"{kind}: Flower, local epochs {epochs}"
            settings = (kind, epochs, rounds, options.epsilon, z)
            row(name, lambda rate, s=settings: with_flower(*s, rate), seeds, epsilon)
        for epochs in (0, 5):
            here = f"{kind}: lightning-dp, " + (
                f"local epochs {epochs}" if epochs else "one gradient"
            )
            given = (kind, epochs, rounds, z)
            row(here, lambda rate, g=given: (with_lightning_dp(*g, rate), nan), seeds, epsilon)


if __name__ == "__main__":
    main()
