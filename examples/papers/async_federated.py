"""van Dijk et al. (2020): asynchronous federated SGD with growing batches, private and not.

    python examples/papers/async_federated.py --data DIR [--part NAME ...] [--seeds N] [--quick]

Parts: sizes (Table 3: accuracy for constant sample sizes), rounds (20 rounds against 9), lag, biased
(clients with one digit each), private (σ = 8 against the smallest valid σ at (1, 5.5e-8) on w8a).
DIR holds a9a, covertype_subset, phishing, ijcnn1, w8a and mnist as .npz. Prints Markdown; the run
that was recorded is in results/async_federated.md.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from async_federated_data import LeNetRecords, LogisticRecords, binary, lenet, load, mnist
from sklearn.metrics import roc_auc_score
from torch import Tensor

from lightning_dp.accounting import AbstractEvent, PLDAccountant, PoissonGaussian, calibrate
from lightning_dp.federated import (
    AbstractSampleSizes,
    AbstractStepSizes,
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    ConstantSteps,
    InverseRootSteps,
    InverseSteps,
    PolynomialSizes,
    Records,
    ReleaseLedger,
    Spending,
    rounds_for,
)
from lightning_dp.functional import flatten
from lightning_dp.noise import random_generator

CLIENTS, MNIST_CLIENTS = 5, 4
GRADIENTS = 20_000  # K of the experiments without privacy, over all clients
LAG = 1  # 2 is in the part `lag`
TEST_SHARE = 0.2
SIZES = (50, 100, 200, 500, 700, 1000)
PAPER = {  # Table 3
    ("a9a", True): (0.8418, 0.8443, 0.8386, 0.8333, 0.8298, 0.7271),
    ("a9a", False): (0.8409, 0.8415, 0.8417, 0.8299, 0.8346, 0.7276),
    ("covertype_subset", True): (0.8429, 0.8402, 0.8408, 0.8360, 0.8278, 0.7827),
    ("covertype_subset", False): (0.8421, 0.8438, 0.8404, 0.8381, 0.8379, 0.7287),
    ("mnist", False): (0.9450, 0.9470, 0.9180, 0.8740, 0.8700, 0.7080),
}
TARGET, DELTA, CLIP = 1.0, 5.5e-8, 0.1
PRIVATE_GRADIENTS = 25_000  # K of one client
PRIVATE_RECORDS = 8_000  # N_c; the paper has 10,000, w8a has not enough for that
RATES = (0.15, 0.05, 0.5, 1.5)  # the paper's first
# η0 of growing sizes: the paper's, and a smaller one, for strongly convex losses and for others
GROWING_RATES = {True: (0.1, 0.01), False: (0.1, 0.003)}
LOCAL_STEPS = ("diminishing1", "diminishing2")


def federate(
    records: Sequence[Records],
    start: Tensor,
    plan: AsyncPlan,
    privacy: ClientPrivacy,
    seed: int,
    local_steps: str | None = None,
    share: float = 1.0,
) -> tuple[Tensor, float]:
    """The model at the end and the largest ε of a client; clients answer in a random order."""
    server = AsyncServer("paper", plan, start, len(records))
    clients = [
        AsyncClient(
            each,
            plan,
            privacy,
            ScratchLedger() if privacy.is_private else None,
            run="paper",
            share=share,
            local_steps=local_steps,  # type: ignore[arg-type]
        )
        for each in records
    ]
    rng = random.Random(seed)
    while not server.is_done:
        c = rng.randrange(len(records))
        if (request := server.request(c)) is not None:
            server.receive(c, clients[c].answer(request))
    spent = max(client.epsilon for client in clients) if privacy.is_private else math.inf
    return server.point, spent


class ScratchLedger(ReleaseLedger):
    """Books an experiment on public data, in memory: nothing of it may outlive the process."""

    def __init__(self) -> None:
        super().__init__("/nowhere", "an experiment")
        self._events: list[AbstractEvent] = []

    def history(self) -> list[tuple[AbstractEvent, int]]:
        return [(event, 1) for event in self._events]

    def find(self, spending: Spending, round_: int, part: int) -> bytes | None:
        return None

    def note(self, spending: Spending) -> bytes:
        return b""

    def release(
        self,
        spending: Spending,
        round_: int,
        part: int,
        make: Callable[[np.random.Generator], bytes],
        *,
        keep: bool = True,
        note: bytes = b"",
    ) -> bytes:
        self._events += spending.events(round_)
        return make(random_generator(None))


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{np.mean(values):.4f} ± {deviation:.4f}"


# -- logistic regression ---------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A data set dealt out to clients, and the rest for testing."""

    clients: list[tuple[Tensor, Tensor]]
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, name: str, folder: str, seed: int, *, biased: bool = False) -> Split:
        x, y = binary(name, folder)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
        held, train = order[: int(TEST_SHARE * len(y))], order[int(TEST_SHARE * len(y)) :]
        if biased:
            train = train[torch.argsort(y[train], stable=True)]
        return cls([(x[part], y[part]) for part in train.chunk(CLIENTS)], x[held], y[held])

    def records(self, *, strongly_convex: bool) -> list[LogisticRecords]:
        decay = 1 / sum(len(y) for _, y in self.clients) if strongly_convex else 0.0
        return [LogisticRecords(x, y, decay) for x, y in self.clients]

    def start(self) -> Tensor:
        return torch.zeros(self.x.shape[1])

    def accuracy(self, point: Tensor) -> float:
        return float(((self.x @ point > 0) == (self.y > 0)).float().mean())

    def auc(self, point: Tensor) -> float:
        return float(roc_auc_score(self.y.numpy() > 0, (self.x @ point).numpy()))


NO_PRIVACY = ClientPrivacy(math.inf, noise_multiplier=0.0)


def plain_run(
    split: Split,
    sizes: AbstractSampleSizes,
    steps: AbstractStepSizes,
    seed: int,
    *,
    strongly_convex: bool,
    local_steps: str,
    gradients: int = GRADIENTS,
    lag: int = LAG,
) -> float:
    """Accuracy without privacy: the model moves inside a round, as in the paper.

    ``sizes`` are those of all clients together, as is t in the step sizes.
    """
    plan = AsyncPlan(rounds_for(sizes, gradients), sizes, steps, lag=lag)
    records = split.records(strongly_convex=strongly_convex)
    start = split.start()
    point, _ = federate(records, start, plan, NO_PRIVACY, seed, local_steps, 1 / CLIENTS)
    return split.accuracy(point)


def sizes_part(options: argparse.Namespace) -> None:
    """Table 3."""
    print("## Constant sample sizes, η = 0.0025, K = 20,000 (accuracy on a held-out fifth)\n")
    names = ["a9a"] if options.quick else ["a9a", "covertype_subset"]
    print("| data | loss | " + " | ".join(f"s = {s}" for s in SIZES) + " |")
    print("|" + " --- |" * (len(SIZES) + 2))
    for name in names:
        for convex in (True, False):
            cells = []
            for s in SIZES:
                found = [
                    plain_run(
                        Split.of(name, options.data, seed),
                        *(PolynomialSizes(0, CLIENTS * s), ConstantSteps(0.0025), seed),
                        strongly_convex=convex,
                        local_steps="diminishing2",
                        gradients=2000 if options.quick else GRADIENTS,
                    )
                    for seed in range(options.seeds)
                ]
                cells.append(spread(found))
            kind = "strongly convex" if convex else "convex"
            print(f"| {name} | {kind} | " + " | ".join(cells) + " |", flush=True)
            paper = " | ".join(f"{value:.4f}" for value in PAPER[name, convex])
            print(f"| | paper | {paper} |", flush=True)
    if not options.quick:
        mnist_sizes(options)


def rounds_part(options: argparse.Namespace) -> None:
    """20 rounds of 200 against 9 rounds of 89, 178, ..., 801."""
    growing = PolynomialSizes(a=CLIENTS * 89, first=1)
    print("\n## 20 rounds of constant size against 9 rounds of growing size, K = 20,000\n")
    head = ["constant 200, η = .0025"]
    head += [f"{local}, {rate}" for rate in ("η0 = .1", "smaller η0") for local in LOCAL_STEPS]
    print(f"| data | loss | {' | '.join(head)} | rounds |")
    print("|" + " --- |" * (len(head) + 3))
    names = ["a9a"] if options.quick else ["a9a", "covertype_subset", "phishing", "ijcnn1", "w8a"]
    gradients = 2000 if options.quick else GRADIENTS
    for name in names:
        for convex in (True, False):
            settings: list[tuple[AbstractSampleSizes, AbstractStepSizes, str]] = [
                (PolynomialSizes(0, CLIENTS * 200), ConstantSteps(0.0025), "diminishing2")
            ]
            for eta0 in GROWING_RATES[convex]:
                steps = InverseSteps(eta0, 0.001) if convex else InverseRootSteps(eta0, 0.01)
                settings += [(growing, steps, local) for local in LOCAL_STEPS]
            cells = [plain_cell(name, options, *each, convex, gradients) for each in settings]
            rounds = [rounds_for(sizes, gradients) for sizes, *_ in settings[:2]]
            kind = "strongly convex" if convex else "convex"
            print(
                f"| {name} | {kind} | {' | '.join(cells)} | {rounds[0]}, {rounds[1]} |", flush=True
            )


def plain_cell(
    name: str,
    options: argparse.Namespace,
    sizes: AbstractSampleSizes,
    steps: AbstractStepSizes,
    local_steps: str,
    convex: bool,
    gradients: int,
    lag: int = LAG,
) -> str:
    return spread(
        [
            plain_run(
                Split.of(name, options.data, seed),
                *(sizes, steps, seed),
                strongly_convex=convex,
                local_steps=local_steps,
                gradients=gradients,
                lag=lag,
            )
            for seed in range(options.seeds)
        ]
    )


def lag_part(options: argparse.Namespace) -> None:
    """How far clients may be ahead, with constant sizes."""
    print("\n## Lag d, a9a, strongly convex, constant sizes, η = 0.0025\n")
    print("| d | " + " | ".join(f"s = {s}" for s in SIZES[:3]) + " |")
    print("| --- | --- | --- | --- |")
    gradients = 2000 if options.quick else GRADIENTS
    for lag in (1, 2, 4):
        cells = [
            plain_cell(
                *("a9a", options, PolynomialSizes(0, CLIENTS * s), ConstantSteps(0.0025)),
                *("diminishing2", True, gradients, lag),
            )
            for s in SIZES[:3]
        ]
        print(f"| {lag} | {' | '.join(cells)} |", flush=True)


# -- biased clients, LeNet -------------------------------------------------------------------


def lenet_run(
    parts: Sequence[tuple[Tensor, Tensor]],
    test: tuple[Tensor, Tensor],
    sizes: AbstractSampleSizes,
    steps: AbstractStepSizes,
    seed: int,
) -> float:
    plan = AsyncPlan(rounds_for(sizes, GRADIENTS), sizes, steps, lag=LAG)
    model = lenet()
    records = [LeNetRecords(images, digits) for images, digits in parts]
    start = flatten(list(model.parameters()))
    point, _ = federate(records, start, plan, NO_PRIVACY, seed, "diminishing2", 1 / len(parts))
    load(list(model.parameters()), point)
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).float().mean())


def dealt(
    images: Tensor, digits: Tensor, clients: int, seed: int, *, biased: bool
) -> list[tuple[Tensor, Tensor]]:
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(digits)))
    if biased:
        order = order[torch.argsort(digits[order], stable=True)]
    return [(images[part], digits[part]) for part in order.chunk(clients)]


def mnist_sizes(options: argparse.Namespace) -> None:
    x, y, *test = mnist(options.data)
    cells = []
    for s in SIZES:
        found = [
            lenet_run(
                dealt(x, y, MNIST_CLIENTS, seed, biased=False),
                (test[0], test[1]),
                *(PolynomialSizes(0, MNIST_CLIENTS * s), ConstantSteps(0.0025), seed),
            )
            for seed in range(min(2, options.seeds))
        ]
        cells.append(spread(found))
    print(f"| mnist | LeNet, {MNIST_CLIENTS} clients | " + " | ".join(cells) + " |")
    paper = " | ".join(f"{value:.4f}" for value in PAPER["mnist", False])
    print(f"| | paper | {paper} |", flush=True)


def biased_part(options: argparse.Namespace) -> None:
    """Clients whose records are all of one class, or of few."""
    print("\n## Biased clients: 9 rounds of growing size, diminishing2\n")
    print("| data | clients | mixed | one class each |\n| --- | --- | --- | --- |")
    for name in ["a9a"] if options.quick else ["a9a", "covertype_subset"]:
        cells = [
            spread(
                [
                    plain_run(
                        Split.of(name, options.data, seed, biased=biased),
                        *(
                            PolynomialSizes(a=CLIENTS * 89, first=1),
                            InverseSteps(GROWING_RATES[1], 0.001),
                            seed,
                        ),
                        strongly_convex=True,
                        local_steps="diminishing2",
                    )
                    for seed in range(options.seeds)
                ]
            )
            for biased in (False, True)
        ]
        print(f"| {name}, strongly convex | {CLIENTS} | {' | '.join(cells)} |", flush=True)
    if options.quick:
        return
    x, y, *test = mnist(options.data)
    cells = [
        spread(
            [
                lenet_run(
                    dealt(x, y, 10, seed, biased=biased),
                    (test[0], test[1]),
                    *(PolynomialSizes(a=100, first=1), InverseRootSteps(0.01, 0.01), seed),
                )
                for seed in range(min(2, options.seeds))
            ]
        )
        for biased in (False, True)
    ]
    print(f"| mnist, LeNet | 10, 20 rounds of 10, 20, ... | {' | '.join(cells)} |", flush=True)


# -- private ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    name: str
    sizes: AbstractSampleSizes
    sigma: float | None  # None: the smallest that is valid; 0: no noise


GROWING = PolynomialSizes(1.322, 16)
SETTINGS = (
    Setting("growing 16 + ⌈1.322 i⌉, the paper's σ", GROWING, 8.0),
    Setting("growing 16 + ⌈1.322 i⌉, smallest σ", GROWING, None),
    Setting("constant 16, smallest σ", PolynomialSizes(0, 16), None),
    Setting("constant 137, smallest σ", PolynomialSizes(0, 137), None),
    Setting("growing, clipped, no noise", GROWING, 0.0),
)


def smallest_sigma(sizes: Callable[[int], int], rounds: int, num_records: int) -> float:
    """σ for (TARGET, DELTA) with Poisson batches of these sizes."""
    return calibrate(
        lambda i: 1.0, lambda i: sizes(i) / num_records, rounds, epsilon=TARGET, delta=DELTA
    )


def true_epsilon(sizes: Callable[[int], int], sigma: float, rounds: int, n: int) -> float:
    events = [(PoissonGaussian(sigma, sizes(i) / n), 1) for i in range(rounds)]
    return PLDAccountant().epsilon(events, DELTA)


def private_split(folder: str, seed: int) -> tuple[Split, Split]:
    """Clients with 8000 records each; of the rest, one half to choose η0 and one to report."""
    x, y = binary("w8a", folder)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    train, held = order[: CLIENTS * PRIVATE_RECORDS], order[CLIENTS * PRIVATE_RECORDS :]
    clients = [(x[part], y[part]) for part in train.chunk(CLIENTS)]
    choose, report = held.chunk(2)
    return Split(clients, x[choose], y[choose]), Split(clients, x[report], y[report])


def private_part(options: argparse.Namespace) -> None:
    print(f"\n## w8a, (ε, δ) = ({TARGET}, {DELTA}), C = {CLIP}, {CLIENTS} clients of N_c records\n")
    print("N_c = 10,000 (accounting only)\n")
    print("| batches | rounds | σ | √T σ | true ε |\n| --- | --- | --- | --- | --- |")
    for setting in SETTINGS[:4]:
        print(accounting_row(setting, 10_000), flush=True)
    print(f"\nN_c = {PRIVATE_RECORDS}\n")
    print("| batches | rounds | σ | √T σ | true ε |\n| --- | --- | --- | --- | --- |")
    for setting in SETTINGS[:4]:
        print(accounting_row(setting, PRIVATE_RECORDS), flush=True)
    for convex in [True] if options.quick else [True, False]:
        kind = "strongly convex, β = .001" if convex else "convex, β = .01"
        print(f"\n{kind}\n")
        print("| batches | ε by the ledgers | η0 | accuracy | AUC | chosen η0 | accuracy | AUC |")
        print("|" + " --- |" * 8)
        for setting in SETTINGS:
            print(private_row(setting, options, convex), flush=True)


def sigma_of(setting: Setting, num_records: int) -> tuple[int, float]:
    rounds = rounds_for(setting.sizes, PRIVATE_GRADIENTS)
    if setting.sigma is not None:
        return rounds, setting.sigma
    return rounds, smallest_sigma(setting.sizes, rounds, num_records)


def accounting_row(setting: Setting, n: int) -> str:
    rounds, sigma = sigma_of(setting, n)
    spent = true_epsilon(setting.sizes, sigma, rounds, n)
    total = math.sqrt(rounds) * sigma
    return f"| {setting.name} | {rounds} | {sigma:.3f} | {total:.1f} | {spent:.4f} |"


def private_row(setting: Setting, options: argparse.Namespace, convex: bool) -> str:
    """At the paper's η0, and at the one that is best on other held-out records, mean over seeds."""
    rounds, sigma = sigma_of(setting, PRIVATE_RECORDS)
    rounds = 20 if options.quick else rounds
    found: dict[float, list[tuple[float, float, float, float]]] = {}
    for eta0 in RATES[:1] if options.quick else RATES:
        steps = InverseSteps(eta0, 0.001) if convex else InverseRootSteps(eta0, 0.01)
        plan = AsyncPlan(rounds, setting.sizes, steps, lag=LAG)
        found[eta0] = []
        for seed in range(options.seeds):
            choose, report = private_split(options.data, seed)
            point, spent = federate(
                *(choose.records(strongly_convex=convex), choose.start(), plan),
                *(ClientPrivacy(CLIP, sigma, target_delta=DELTA), seed),
            )
            row = (choose.auc(point), report.accuracy(point), report.auc(point), spent)
            found[eta0].append(row)
    best = max(found, key=lambda eta0: np.mean([row[0] for row in found[eta0]]))
    cells = [setting.name, f"{found[RATES[0]][0][3]:.4f}"]
    for eta0 in (RATES[0], best):
        cells += [f"{eta0:g}", *(spread([row[k] for row in found[eta0]]) for k in (1, 2))]
    return "| " + " | ".join(cells) + " |"


PARTS = {
    "sizes": sizes_part,
    "rounds": rounds_part,
    "lag": lag_part,
    "biased": biased_part,
    "private": private_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="", help="folder with the .npz files")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one small run of each part")
    options = parser.parse_args()
    if not options.seeds >= 1:
        parser.error(f"--seeds {options.seeds} must be at least 1.")
    torch.set_num_threads(1)
    for part in options.part:
        PARTS[part](options)


if __name__ == "__main__":
    main()
