"""van Dijk et al. (2020): asynchronous federated SGD with growing batches, private and not.

    python examples/papers/async_federated.py --data DIR [--part NAME ...] [--loss NAME ...] [--quick]

Parts: sizes (Table 3: accuracy for constant sample sizes), rounds (20 rounds against 9), growth
(figures 3 to 5), steps (figure 9), lag, biased (clients with one class each: figures 2 and 10),
biased-lenet (figure 11), lenet (figure 8), private (σ = 8 against the smallest valid σ at
(1, 5.5e-8) on w8a: figure 12), tuned (sizes, steps and clip norm, next to a model without privacy),
private-lenet (the same on MNIST: figure 13).
DIR holds a9a, covertype_subset, phishing, ijcnn1, w8a and mnist as .npz. Prints Markdown; the run
that was recorded is in results/async_federated.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from async_federated_data import TWO_DIGITS
from async_federated_private import private_lenet_part, private_part, tuned_part
from async_federated_run import (
    CLIENTS,
    GRADIENTS,
    LAG,
    LOSSES,
    MNIST_CLIENTS,
    LogSizes,
    clients_of,
    lenet_run,
    plain_run,
    strongly_convex,
)
from common import NOISES, TEST, Summary, finished_all, gains_text, table

from lightning_dp.federated import InverseRootSteps, PolynomialSizes
from lightning_dp.federated.asynchronous import (
    InverseSteps,
    SampleSizes,
    StepSizes,
    rounds_for,
)

OUTPUT = Path("outputs/async_federated")
SIZES = (50, 100, 200, 500, 700, 1000)
PAPER = {  # Table 3
    ("a9a", True): (0.8418, 0.8443, 0.8386, 0.8333, 0.8298, 0.7271),
    ("a9a", False): (0.8409, 0.8415, 0.8417, 0.8299, 0.8346, 0.7276),
    ("covertype_subset", True): (0.8429, 0.8402, 0.8408, 0.8360, 0.8278, 0.7827),
    ("covertype_subset", False): (0.8421, 0.8438, 0.8404, 0.8381, 0.8379, 0.7287),
    ("mnist", False): (0.9450, 0.9470, 0.9180, 0.8740, 0.8700, 0.7080),
}
# η0 of growing sizes: the paper's, and a smaller one, for strongly convex losses and for others
GROWING_RATES = {True: (0.1, 0.01), False: (0.1, 0.003)}
LOCAL_STEPS = ("diminishing1", "diminishing2")


def sizes_part(options: argparse.Namespace) -> None:
    """Table 3."""
    print("## Constant sample sizes, η = 0.0025, K = 20,000 (accuracy on a held-out fifth)\n")
    names = ["a9a"] if options.quick else ["a9a", "covertype_subset"]
    gradients = 2000 if options.quick else GRADIENTS
    print("| data | loss | " + " | ".join(f"s = {s}" for s in SIZES) + " |")
    print("|" + " --- |" * (len(SIZES) + 2))
    for name in names:
        for convex in strongly_convex(options):
            cells = [
                plain_cell(
                    *(name, options, PolynomialSizes(0, CLIENTS * s), InverseSteps(0.0025)),
                    *("diminishing2", convex, gradients),
                )
                for s in SIZES
            ]
            print(f"| {name} | {kind_of(convex)} | " + " | ".join(cells) + " |", flush=True)
            paper = " | ".join(f"{value:.4f}" for value in PAPER[name, convex])
            print(f"| | paper | {paper} |", flush=True)
    if not options.quick:
        mnist_sizes(options)


def rounds_part(options: argparse.Namespace) -> None:
    """20 rounds of 200 against 9 rounds of 89, 178, ..., 801."""
    growing = PolynomialSizes(a=CLIENTS * 89, first=1)
    print("\n## 20 rounds of constant size against 9 rounds of growing size, K = 20,000\n")
    print(f"{TEST}\n")
    head = ["constant 200, η = .0025"]
    head += [f"{local}, {rate}" for rate in ("η0 = .1", "smaller η0") for local in LOCAL_STEPS]
    print(f"| data | loss | {' | '.join(head)} | rounds |")
    print("|" + " --- |" * (len(head) + 3))
    names = ["a9a"] if options.quick else ["a9a", "covertype_subset", "phishing", "ijcnn1", "w8a"]
    gradients = 2000 if options.quick else GRADIENTS
    for name in names:
        for convex in strongly_convex(options):
            settings: list[tuple[SampleSizes, StepSizes, str]] = [
                (PolynomialSizes(0, CLIENTS * 200), InverseSteps(0.0025), "diminishing2")
            ]
            for eta0 in GROWING_RATES[convex]:
                steps = InverseSteps(eta0, 0.001) if convex else InverseRootSteps(eta0, 0.01)
                settings += [(growing, steps, local) for local in LOCAL_STEPS]
            found = [plain_runs(name, options, *each, convex, gradients) for each in settings]
            rounds = [rounds_for(sizes, gradients) for sizes, *_ in settings[:2]]
            print_rows(name, kind_of(convex), found, f"{rounds[0]}, {rounds[1]}")


def kind_of(convex: bool) -> str:
    return "strongly convex" if convex else "convex"


def print_rows(name: str, kind: str, found: Sequence[Sequence[float]], *more: str) -> None:
    """Print a row of accuracies, and one of their gains over the first."""
    cells = [Summary.of(values).text(4) for values in found]
    gains = gains_text([(values, found[0]) for values in found[1:]], 4)
    for row in ([name, kind, *cells, *more], ["", "gain over the first", "", *gains]):
        print(f"| {' | '.join(row)} |", flush=True)


def plain_runs(
    name: str,
    options: argparse.Namespace,
    sizes: SampleSizes,
    steps: StepSizes,
    local_steps: str,
    convex: bool,
    gradients: int = GRADIENTS,
    lag: int = LAG,
    biased: bool = False,
    auc: bool = False,
) -> list[float]:
    """The accuracy, or the AUC, with each seed."""
    what = (name, options.data, sizes, steps, local_steps, convex, gradients, lag, biased)
    runs = finished_all(plain_run, [(*what, seed) for seed in range(options.seeds)], options.jobs)
    return [run[auc] for run in runs]


def plain_cell(*what: Any, **more: Any) -> str:
    return Summary.of(plain_runs(*what, **more)).text(4)


def growth_part(options: argparse.Namespace) -> None:
    """The paper's figures 3 to 5: s_i = 50 i^c and 50 i / ln i, η0 = 0.01."""
    print(
        "\n## Growing sample sizes: 50 i^c and 50 i / ln i of each client, η0 = 0.01, K = 20,000\n"
    )
    print(f"{TEST}\n")
    gradients, each = (2000 if options.quick else GRADIENTS), CLIENTS * 50
    growths: dict[str, SampleSizes] = {
        f"c = {c:g}": PolynomialSizes(a=each, c=c, first=1) for c in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    growths["i / ln i"] = LogSizes(each)
    rounds = [str(rounds_for(sizes, gradients)) for sizes in growths.values()]
    print(table(["data", "loss", *growths], [["rounds", "", *rounds]]), flush=True)
    drawn: dict[str, list[Summary]] = {}
    for name in ["a9a"] if options.quick else ["a9a", "covertype_subset"]:
        for convex in strongly_convex(options):
            steps = InverseSteps(0.01, 0.001) if convex else InverseRootSteps(0.01, 0.01)
            found = [
                plain_runs(name, options, sizes, steps, "diminishing2", convex, gradients)
                for sizes in growths.values()
            ]
            print_rows(name, kind_of(convex), found)
            drawn[f"{name}, {kind_of(convex)}"] = [Summary.of(values) for values in found]
    draw_growths(list(growths), rounds, drawn, options.output)


def draw_growths(
    growths: Sequence[str], rounds: Sequence[str], drawn: dict[str, list[Summary]], folder: Path
) -> None:
    """Accuracies by the growth of the sizes, with the 95 % intervals of their means."""
    figure, axis = plt.subplots(figsize=(8, 4))
    for title, of in drawn.items():
        line = "--" if title.endswith(", convex") else "-"
        means, margins = [each.mean for each in of], [each.margin for each in of]
        axis.errorbar(range(len(of)), means, margins, fmt=f"o{line}", ms=4, capsize=3, label=title)
    names = [f"{growth}\n{count} rounds" for growth, count in zip(growths, rounds, strict=True)]
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="accuracy", title="Sizes 50 i^c and 50 i / ln i, 20,000 gradients")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "growth.png", dpi=80)
    plt.close(figure)


def steps_part(options: argparse.Namespace) -> None:
    """The paper's figure 9b: constant steps with growing sizes, on w8a."""
    print("\n## Constant steps with growing sizes, w8a, strongly convex, 9 rounds, K = 20,000\n")
    print(f"{TEST}\n")
    growing, gradients = PolynomialSizes(a=CLIENTS * 89, first=1), GRADIENTS
    settings = {"η0 = 0.1, diminishing2": InverseSteps(0.1, 0.001)}
    settings |= {f"η = {eta:g}": InverseSteps(eta) for eta in (0.1, 0.03, 0.01, 0.005, 0.001)}
    if options.quick:
        settings, gradients = dict(list(settings.items())[:2]), 2000
    print(table(["data", "measure", *settings], []), flush=True)
    for measure in ("accuracy", "AUC"):
        found = [
            plain_runs(
                *("w8a", options, growing, steps, "diminishing2", True, gradients),
                auc=measure == "AUC",
            )
            for steps in settings.values()
        ]
        print_rows("w8a", measure, found)


def lag_part(options: argparse.Namespace) -> None:
    """Print losses by the lag that clients may have, with constant sizes."""
    print("\n## Lag d, a9a, strongly convex, constant sizes, η = 0.0025\n")
    print("| d | " + " | ".join(f"s = {s}" for s in SIZES[:3]) + " |")
    print("| --- | --- | --- | --- |")
    gradients = 2000 if options.quick else GRADIENTS
    for lag in (1, 2, 4):
        cells = [
            plain_cell(
                *("a9a", options, PolynomialSizes(0, CLIENTS * s), InverseSteps(0.0025)),
                *("diminishing2", True, gradients, lag),
            )
            for s in SIZES[:3]
        ]
        print(f"| {lag} | {' | '.join(cells)} |", flush=True)


# -- biased clients, LeNet -------------------------------------------------------------------


def lenet_runs(
    options: argparse.Namespace,
    clients: int,
    sizes: SampleSizes,
    steps: StepSizes,
    *,
    biased: bool = False,
) -> list[float]:
    """The accuracy with each seed."""
    what = (options.data, clients, sizes, steps, biased, 400 if options.quick else GRADIENTS)
    return finished_all(lenet_run, [(*what, seed) for seed in range(options.seeds)], options.jobs)


def mnist_sizes(options: argparse.Namespace) -> None:
    """Table 3 for LeNet."""
    steps = InverseSteps(0.0025)
    cells = [
        Summary.of(
            lenet_runs(options, MNIST_CLIENTS, PolynomialSizes(0, MNIST_CLIENTS * s), steps)
        ).text(4)
        for s in SIZES
    ]
    print(f"| mnist | LeNet, {MNIST_CLIENTS} clients | " + " | ".join(cells) + " |")
    paper = " | ".join(f"{value:.4f}" for value in PAPER["mnist", False])
    print(f"| | paper | {paper} |", flush=True)


def biased_part(options: argparse.Namespace) -> None:
    """Clients whose records are all of one class: figures 2 and 10, and other data."""
    print("\n## Biased clients, growing sizes, diminishing2, η0 = 0.01\n")
    print(f"{TEST}\n")
    print(table(["data, rounds", "loss", "mixed", "one class each"], []), flush=True)
    names = {"a9a": 89} if options.quick else {TWO_DIGITS: 50, "a9a": 89, "covertype_subset": 89}
    for name, size in names.items():
        sizes = PolynomialSizes(a=clients_of(name) * size, first=1)
        gradients = 10_000 if name == TWO_DIGITS else GRADIENTS
        for convex in strongly_convex(options):
            steps = InverseSteps(0.01, 0.001) if convex else InverseRootSteps(0.01, 0.01)
            found = [
                plain_runs(
                    *(name, options, sizes, steps, "diminishing2", convex, gradients),
                    biased=biased,
                )
                for biased in (False, True)
            ]
            print_rows(f"{name}, {rounds_for(sizes, gradients)}", kind_of(convex), found)


def biased_lenet_part(options: argparse.Namespace) -> None:
    """The paper's figure 11, as printed and with other sizes: ten clients with one digit each."""
    print("\n## Biased clients, LeNet, 10 clients, K = 20,000\n")
    print(f"{TEST}\n")
    print(table(["data", "rounds", "mixed", "one digit each"], []), flush=True)
    for sizes, rates, words in (
        (PolynomialSizes(a=50, first=1), InverseRootSteps(0.01, 0.01), "28 of 5, 10, ..."),
        (PolynomialSizes(a=100, first=1), InverseRootSteps(0.01, 0.01), "20 of 10, 20, ..."),
        (PolynomialSizes(0, 200), InverseSteps(0.0025), "100 of 20, η = .0025"),
    ):
        found = [lenet_runs(options, 10, sizes, rates, biased=biased) for biased in (False, True)]
        print_rows("mnist", words, found)


def lenet_part(options: argparse.Namespace) -> None:
    """The paper's figure 8: LeNet with growing sizes."""
    print(f"\n## LeNet with growing sizes, {MNIST_CLIENTS} clients, K = 20,000\n")
    print(f"{TEST}\n")
    growing = PolynomialSizes(a=50, first=1)
    settings: dict[str, tuple[SampleSizes, StepSizes]] = {
        f"constant {s}, η = .0025": (PolynomialSizes(0, s * MNIST_CLIENTS), InverseSteps(0.0025))
        for s in (50, 200)
    }
    settings |= {
        f"growing, η0 = {eta:g}": (growing, InverseRootSteps(eta, 0.01)) for eta in (0.1, 0.01)
    }
    if options.quick:
        settings = dict(list(settings.items())[:2])
    rounds = [str(rounds_for(sizes, GRADIENTS)) for sizes, _ in settings.values()]
    print(table(["data", "rounds", *settings], [["", "", *rounds]]), flush=True)
    found = [lenet_runs(options, MNIST_CLIENTS, *each) for each in settings.values()]
    print_rows("mnist", "accuracy", found)


PARTS = {
    "sizes": sizes_part,
    "rounds": rounds_part,
    "growth": growth_part,
    "steps": steps_part,
    "lag": lag_part,
    "biased": biased_part,
    "biased-lenet": biased_lenet_part,
    "lenet": lenet_part,
    "private": private_part,
    "tuned": tuned_part,
    "private-lenet": private_lenet_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="", help="folder with the .npz files")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seeds", type=int, default=NOISES)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="one small run of each part")
    options = parser.parse_args()
    if not options.seeds >= 1:
        parser.error(f"--seeds {options.seeds} must be at least 1.")
    torch.set_num_threads(1)
    for part in options.part:
        PARTS[part](options)


if __name__ == "__main__":
    main()
