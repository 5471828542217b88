"""Does Laplacian smoothing of the noisy gradient make private training better?

    python examples/papers/laplacian_smoothing.py --data DIR [--quick] [--only PART] [--settled]

Reproduces the experiments of "DP-LSSGD: A Stochastic Optimization Method to Lift the Utility in
Privacy-Preserving ERM" (Wang et al. 2019, arXiv:1906.12056, section 4) with this package's own
pieces, and then goes beyond them:

1. "paper", "curves", "rates" and "tuned": multiclass logistic regression on MNIST, ε from 0.1 to 0.3, σ
   from 0 to 3: the paper's protocol as its authors programmed it, the same with a bound on each record;
   its losses on the way (figures 1 and 3) and rates a/t (figure 4); and with tight accounting, larger
   batches and tuned learning rates.
2. "mnist": the paper's CNN at noise multipliers 2, 5, 8 and 10; SGD, LSSGD, Adam and LSAdam.
3. "long": noise multiplier 10 for 60 epochs, over σ and learning rates.
4. "cifar": the CNN of TensorFlow's CIFAR-10 tutorial, clip norm 3, noise multiplier 2.
5. "budgets": the best accuracy at a budget over the settings and epochs of 2 and 3 (figure 7, right).

--whole makes 2 to 5 (figures 5, 7 and 6) at the paper's size, with three noises: 60 epochs of all digits
(22 runs a noise), 20 epochs of half of CIFAR-10. Run it part by part with --only, --jobs and --device.

DIR holds mnist.npz or torchvision's MNIST/raw, and CIFAR-10 in one of several layouts (part 4 says
which; it is left out without them); LIGHTNING_DP_DATA does the same. Pictures go to
./outputs/laplacian_smoothing. A script that was stopped goes on where it was: finished runs lie in
./outputs/finished_runs (LIGHTNING_DP_RUNS). Learning rates are chosen on validation data, which ε
does not cover: these are experiments on public data. Seeds are fixed so that the tables can be made
again, which no private run may do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import laplacian_smoothing_cnn as cnn
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from archives import DATA_VARIABLE, folder_of, mnist
from common import NOISES, TEST, Summary, finished_all, gains_text, print_heading, table
from laplacian_smoothing_data import CIFAR10_LAYOUTS, has_cifar10
from laplacian_smoothing_logistic import (
    DELTA,
    DEVIATION,
    Cell,
    Protocol,
    curves,
    paper_noise,
    right,
    splits,
    tight_noise,
)

OUTPUT = Path("outputs/laplacian_smoothing")
PARTS = ("paper", "curves", "rates", "tuned", "mnist", "long", "cifar", "budgets")
TUNING_SEED = 100  # and the following ones; the reported seeds are 0, 1, ...

EPSILONS = (0.3, 0.25, 0.2, 0.15, 0.1)
PAPER_TABLE = (  # its table 2, mean accuracy in percent, σ = 0 to 3 down
    (81.74, 81.45, 78.92, 77.03, 73.49),
    (84.21, 83.27, 81.56, 79.46, 76.29),
    (84.23, 83.65, 82.15, 80.77, 76.31),
    (85.11, 82.97, 82.22, 80.81, 77.13),
)
PAPER = {
    (e, s): value
    for s, row in enumerate(PAPER_TABLE)
    for e, value in zip(EPSILONS, row, strict=True)
}
AUTHORS_NOISE = {0.3: 0.1162, 0.25: 0.1393, 0.2: 0.1739, 0.15: 0.2316, 0.1: 0.3471}  # on the mean
PAPER_BATCH, PAPER_EPOCHS, AUTHORS_RATE = 128, 50, 2.0
FIGURES = (0.3, 0.2, 0.1), (0.2, 0.1)  # ε in the figures 1, and 3 and 4
TUNED_BATCH, TUNED_STEPS = 2048, 200
SETTLED = (  # the rates that tuning chose (results/laplacian_smoothing.md): ε across, σ down
    ((8, 8, 4, 4, 2), (12, 12, 8, 8, 4), (16, 16, 12, 8, 4), (16, 16, 12, 8, 4)),
    ((8, 8, 4, 4, 2), (16, 12, 12, 8, 4), (16, 16, 12, 8, 8), (16, 16, 16, 12, 8)),
    ((8, 4, 4, 2, 2), (12, 8, 8, 4, 2), (12, 12, 8, 4, 4), (16, 12, 8, 4, 4)),
)

NoiseOf = Callable[[float], float]
Results = Mapping[tuple[float, int], np.ndarray]  # (ε, σ) -> accuracies of all seeds


@dataclass(frozen=True)
class Size:
    """Amount of computation in part 1."""

    epsilons: tuple[float, ...]
    sigmas: tuple[int, ...]
    epochs: int
    seeds: int
    tuning_seeds: int
    rates: tuple[float, ...]
    is_settled: bool = False
    jobs: int = 1

    def runs(
        self,
        folder: str,
        protocol: Protocol,
        cells: Sequence[Cell],
        *,
        part: str = "test",
        divisor: float = DEVIATION,
        is_mixed: bool = False,
        seeds: range | None = None,
    ) -> list[np.ndarray]:
        """The accuracies of the cells with each seed."""
        where = (part, divisor, is_mixed)
        seeds = range(self.seeds) if seeds is None else seeds
        arguments = [(folder, protocol, cells, seed, *where) for seed in seeds]
        return finished_all(right, arguments, self.jobs)


FULL = Size(EPSILONS, (0, 1, 2, 3), 5, NOISES, 3, (2, 4, 8, 12, 16))
QUICK = Size((0.3, 0.1), (0, 1), 1, 2, 1, (4, 8))


# -- part 1: logistic regression -------------------------------------------------------------------


def by_cell(cells: Iterable[Cell], found: list[np.ndarray]) -> Results:
    return {
        (cell.epsilon, int(cell.sigma)): column
        for cell, column in zip(cells, np.array(found).T, strict=True)
    }


def paper_protocol(folder: str, size: Size, _: Path) -> None:
    """The paper's protocol: as programmed, and with a bound on each record."""
    records = len(splits(folder, DEVIATION)["training"].y)
    planned = Protocol(
        records, PAPER_BATCH, PAPER_EPOCHS * -(-records // PAPER_BATCH), "1/t by epoch"
    )
    shown = replace(planned, steps=size.epochs * -(-records // PAPER_BATCH))

    def tight(budget: float) -> float:
        return tight_noise(records, PAPER_BATCH, planned.steps, budget)

    variants = [
        ("As programmed: the mean gradient clipped, not each record's (no guarantee)",
         replace(shown, clips_mean=True), lambda e: AUTHORS_NOISE[e] * PAPER_BATCH),
        ("Each record clipped, noise of Theorem 1",
         shown, lambda e: paper_noise(planned, e)),
        ("Each record clipped, noise of Theorem 1, rate 1/t at every step as in the text",
         replace(shown, rate="1/t"), lambda e: paper_noise(planned, e)),
        ("Each record clipped, tight noise", shown, tight),
    ]  # fmt: skip
    print(
        f"\n### The paper's protocol\n\nExpected batch {PAPER_BATCH}, noise for {PAPER_EPOCHS} epochs, "
        f"of which {size.epochs} are run (the rate has fallen to 1/{shown.steps} by then), "
        f"L2 {planned.weight_decay:g}, clip 1, δ = {DELTA:g}, {size.seeds} seeds, test accuracy in "
        "percent."
    )
    for name, protocol, noise_of in variants:
        cells = [
            Cell(e, s, noise_of(e), 1.0 if protocol.rate == "1/t" else AUTHORS_RATE)
            for s in size.sigmas
            for e in size.epsilons
        ]
        found = size.runs(folder, protocol, cells)
        noise = {e: noise_of(e) for e in size.epsilons}
        print(f"\n{name}:\n")
        print_table(by_cell(cells, found), size, show_paper=protocol.clips_mean)
        multipliers = ", ".join(f"{z:.4g}" for z in noise.values())
        print(f"\nNoise multiplier (noise on the sum over the clip norm): {multipliers}.", end="")
        if protocol.clips_mean:
            print(" One record is not bounded, so there is no ε.")
        else:
            spent = ", ".join(f"{planned.spent(z):.4f}" for z in noise.values())
            print(f" Its ε over {PAPER_EPOCHS} epochs, Poisson batches, add/remove: {spent}.")
        sys.stdout.flush()


def figures_protocols(folder: str, epochs: int) -> list[tuple[str, Protocol, NoiseOf]]:
    """The authors' program, and the same with a bound on each record and its tight noise."""
    records = len(splits(folder, DEVIATION)["training"].y)
    epoch = -(-records // PAPER_BATCH)
    shown = Protocol(records, PAPER_BATCH, epochs * epoch, "1/t by epoch")

    def tight(budget: float) -> float:
        if math.isinf(budget):
            return 0.0
        return tight_noise(records, PAPER_BATCH, PAPER_EPOCHS * epoch, budget)

    return [
        ("As programmed: the mean gradient clipped (no guarantee)",
         replace(shown, clips_mean=True), lambda e: AUTHORS_NOISE.get(e, 0.0) * PAPER_BATCH),
        ("Each record clipped, tight noise for 50 epochs", shown, tight),
    ]  # fmt: skip


def curves_part(folder: str, size: Size, output: Path) -> None:
    """Figures 1 and 3: losses on the way."""
    of_figure_1, of_figure_3 = ([e for e in size.epsilons if e in some] for some in FIGURES)
    wanted = [(e, 0) for e in (math.inf, *of_figure_1)]
    wanted += [(e, s) for e in of_figure_3 for s in size.sigmas if s in (1, 3)]
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    for row, (name, protocol, noise_of) in zip(
        axes, figures_protocols(folder, size.epochs), strict=True
    ):
        cells = [Cell(e, s, noise_of(e), AUTHORS_RATE) for e, s in wanted]
        at = np.unique(np.geomspace(10, protocol.steps, 16).round().astype(int)).tolist()
        arguments = [(folder, protocol, cells, seed, at) for seed in range(size.seeds)]
        found = np.array(finished_all(curves, arguments, size.jobs))  # (seeds, steps, cells, parts)
        print(f"\n### Losses after {protocol.steps} steps: {name}\n\n{size.seeds} seeds.\n")
        base = {e: i for i, (e, s) in enumerate(wanted) if not s}
        compared = [i for i, (_, s) in enumerate(wanted) if s]
        pairs = [
            (found[:, -1, i, k], found[:, -1, base[wanted[i][0]], k])
            for i in compared
            for k in (0, 1)
        ]
        gains = dict(
            zip([(i, k) for i in compared for k in (0, 1)], gains_text(pairs, 3), strict=True)
        )
        rows = []
        for i, (e, s) in enumerate(wanted):
            cells_of_row = [f"{e:g}", f"{s}"]
            for k in (0, 1):
                cells_of_row += [Summary.of(found[:, -1, i, k]).text(3), gains.get((i, k), "")]
            rows.append(cells_of_row)
        header = ("ε", "σ", "training loss", "over σ = 0", "validation loss", "over σ = 0")
        print(table(header, rows), flush=True)
        for k, ax in enumerate(row):
            for i, (e, s) in enumerate(wanted):
                name_of = f"ε = {e:g}, σ = {s}"
                ax.plot(at, found[:, :, i, k].mean(0), "-" if s else "--", label=name_of, lw=1.2)
            ax.set(xscale="log", yscale="log", xlabel="step")
            ax.set_title(name, fontsize=9)
            ax.set_ylabel(("training loss", "validation loss")[k])
            ax.grid(alpha=0.3, which="both")
    axes[1, 0].legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 0.14), ncols=2)
    figure.tight_layout()
    figure.savefig(output / "curves.png", dpi=90)
    plt.close(figure)


def rates_part(folder: str, size: Size, _: Path) -> None:
    """Figure 4: rates a/t, at ε = 0.1 and 0.2."""
    rates = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)[: 6 if size.epochs > 1 else 2]
    budgets = [e for e in size.epsilons if e in FIGURES[1]]
    sigmas = [s for s in size.sigmas if s != 2]  # the paper's table has no difference to 3
    for name, protocol, noise_of in figures_protocols(folder, min(size.epochs, 2)):
        cells = [Cell(e, s, noise_of(e), a) for e in budgets for s in sigmas for a in rates]
        found = size.runs(folder, protocol, cells)
        shape = (size.seeds, len(budgets), len(sigmas), len(rates))
        results = np.array(found).reshape(shape)
        print(
            f"\n### Rates a/t: {name}\n\n{protocol.steps} steps, {size.seeds} seeds, accuracy, %.\n"
        )
        header = ["ε", "σ", *(f"a = {a:g}" for a in rates)]
        rows = [
            [
                f"{e:g}",
                f"{s}",
                *(Summary.of(results[:, i, j, k]).text(2) for k in range(len(rates))),
            ]
            for i, e in enumerate(budgets)
            for j, s in enumerate(sigmas)
        ]
        print(table(header, rows) + "\n\nGain over σ = 0 in percentage points:\n")
        places = list(
            itertools.product(range(len(budgets)), range(1, len(sigmas)), range(len(rates)))
        )
        texts = gains_text([(results[:, i, j, k], results[:, i, 0, k]) for i, j, k in places], 2)
        width = len(rates)
        print(
            table(
                header,
                [
                    [f"{budgets[i]:g}", f"{sigmas[j]}", *texts[n : n + width]]
                    for n, (i, j, _) in list(enumerate(places))[::width]
                ],
            ),
            flush=True,
        )


def tuned_protocol(folder: str, size: Size, _: Path) -> None:
    """Tight accounting, large batches, the learning rate of each cell chosen on validation data."""
    records = len(splits(folder)["training"].y)
    linear = Protocol(records, min(TUNED_BATCH, records // 2), TUNED_STEPS, "linear")
    averaged = replace(linear, rate="constant", is_averaged=True)
    kinds = (
        ("rate falling linearly to 0, the last iterate", linear, False),
        ("the pixels in a random order, rate falling linearly, the last iterate", linear, True),
        ("constant rate, the mean of the iterates of the second half", averaged, False),
    )
    for (name, protocol, is_mixed), settled in zip(kinds, SETTLED, strict=True):
        print(
            f"\n### Tight accounting and tuned learning rates: {name}\n\nExpected batch "
            f"{protocol.batch_size}, {protocol.steps} steps, clip {protocol.clip_norm:g}, "
            f"L2 {protocol.weight_decay:g}, δ = {DELTA:g}, {size.seeds} seeds. The rate of each cell is "
            f"the best of {', '.join(f'{r:g}' for r in size.rates)} on validation data and "
            f"{size.tuning_seeds} other seeds.\n"
        )
        grid = [
            Cell(e, s, tight_noise(records, protocol.batch_size, protocol.steps, e), rate)
            for s in size.sigmas
            for e in size.epsilons
            for rate in size.rates
        ]
        if size.is_settled:
            best = [size.rates.index(rate) for row in settled for rate in row]
        else:
            seeds = range(TUNING_SEED, TUNING_SEED + size.tuning_seeds)
            where = {"part": "validation", "divisor": 1.0, "is_mixed": is_mixed}
            tried = size.runs(folder, protocol, grid, **where, seeds=seeds)
            best = np.mean(tried, axis=0).reshape(-1, len(size.rates)).argmax(1).tolist()
        cells = [grid[i * len(size.rates) + k] for i, k in enumerate(best)]
        found = size.runs(folder, protocol, cells, divisor=1.0, is_mixed=is_mixed)
        results = by_cell(cells, found)
        print_table(results, size, show_paper=False)
        rates = {(cell.epsilon, int(cell.sigma)): cell.learning_rate for cell in cells}
        for s in size.sigmas:
            print(
                f"\nRates at σ = {s}: " + ", ".join(f"{rates[e, s]:g}" for e in size.epsilons),
                end="",
            )
        noise = {cell.epsilon: cell.noise_multiplier for cell in cells}
        print(
            "\n\nNoise multipliers: " + ", ".join(f"{noise[e]:.3f}" for e in size.epsilons), end=""
        )
        print("; ε spent: " + ", ".join(f"{protocol.spent(noise[e]):.4f}" for e in size.epsilons))
        sys.stdout.flush()


def print_table(results: Results, size: Size, *, show_paper: bool) -> None:
    """Mean ± standard deviation and the interval of the mean, ε across and σ down."""
    rows = [
        [
            f"σ = {s}",
            *(
                Summary.of(results[e, s]).text(2)
                + (f", paper {PAPER[e, s]:.2f}" if show_paper else "")
                for e in size.epsilons
            ),
        ]
        for s in size.sigmas
    ]
    print(table(header(size), rows))
    print_gains(results, size)


def print_gains(results: Results, size: Size) -> None:
    """The difference to σ = 0, paired by seed."""
    print("\nGain over σ = 0 in percentage points:\n")
    pairs = [(results[e, s], results[e, 0]) for s in size.sigmas[1:] for e in size.epsilons]
    texts, columns = gains_text(pairs, 2), len(size.epsilons)
    rows = [
        [f"σ = {s}", *texts[i * columns : (i + 1) * columns]] for i, s in enumerate(size.sigmas[1:])
    ]
    print(table(header(size), rows))
    worse = sum(bool(some.mean() < others.mean()) for some, others in pairs)
    print(f"\nSmoothing is not worse than none in {len(pairs) - worse} of {len(pairs)} cells.")
    sys.stdout.flush()


def header(size: Size) -> list[str]:
    return ["ε", *(f"{e:g}" for e in size.epsilons)]


# -- parts 2 to 4: convolutional networks ----------------------------------------------------------

CnnRuns = Mapping[
    cnn.Run, Sequence[cnn.Outcome]
]  # outcomes with each noise; a run's seed is the first


def run_cnns(
    runs: Sequence[cnn.Run], folder: str, size: cnn.Size, jobs: int, device: str
) -> CnnRuns:
    """Each run with every noise."""
    seeds = range(size.seeds)
    arguments = [(replace(run, seed=seed), folder, device) for run in runs for seed in seeds]
    found = iter(finished_all(cnn.fit, arguments, jobs))
    return {run: [next(found) for _ in seeds] for run in runs}


def middle(outcomes: Sequence[cnn.Outcome]) -> cnn.Outcome:
    """The means over the noises."""
    columns = [[getattr(each, name) for each in outcomes] for name in ("last", "average")]
    seconds = sum(each.seconds for each in outcomes) / len(outcomes)
    return cnn.Outcome(*(np.mean(column, axis=0).tolist() for column in columns), seconds)


def print_spread(found: CnnRuns) -> None:
    """The end of each run over its noises, and the gain over the same without smoothing."""
    ends = {run: np.array([each.last[-1] for each in outcomes]) for run, outcomes in found.items()}
    rows = []
    for run, values in ends.items():
        gain = ""
        if run.sigma and (base := replace(run, sigma=0.0)) in ends:
            of = Summary.of(values - ends[base])
            gain = f"{of.mean:+.1f} ± {of.margin:.1f}"
        rows.append(
            [
                *(f"{run.noise_multiplier:g}", run.method, f"{run.sigma:g}"),
                *(f"{run.learning_rate:g}", Summary.of(values).text(1), gain),
            ]
        )
    print(
        "\nAccuracy at the end over the noises; gains over σ = 0, paired by seed, ± half their 95 % "
        "interval (Student: with three noises it is wide, and no rank test can tell).\n"
    )
    header = ("z", "method", "σ", "rate", "end", "gain")
    print(table(header, rows), flush=True)


BUDGETS = (0.2, 0.3, 0.4, 0.6, 0.8, 1.0)


def best_of(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The best of all settings and epochs: of each noise, and as the other noises choose it.

    Args:
        curves: of each setting the accuracies by noise (rows) and epoch.
    """
    columns = np.concatenate(curves, axis=1)
    others = columns.sum(0) - columns
    return columns.max(1), columns[np.arange(len(columns)), others.argmax(1)]


def budgets_part(folder: str, size: cnn.Size, jobs: int, device: str) -> None:
    """Figure 7, right: the best accuracy at a budget, over rates, epochs and noise multipliers."""
    runs = list(dict.fromkeys([*cnn.mnist_runs(size), *cnn.long_runs(size)]))
    found = run_cnns(runs, folder, size, jobs, device)
    print(
        f"\n## 5. The best accuracy at a budget\n\nOver {len(runs)} settings and all epochs, "
        f"{size.seeds} noises, %: as in the paper of each noise the best that it reached; then of each "
        "noise what the mean of the others chooses. Gains of LSSGD over SGD, paired by seed.\n"
    )
    rows = []
    for budget in BUDGETS:
        curves: dict[str, list[np.ndarray]] = {method: [] for method in cnn.METHODS}
        for run, outcomes in found.items():
            if epochs := run.affordable(budget):
                last = np.array([each.last[:epochs] for each in outcomes])
                curves[run.method].append(last)
        if not all(curves.values()):
            rows.append([f"{budget:g}", "no run affords an epoch", *[""] * len(cnn.METHODS)])
            continue
        shown = slice(1 + (size.seeds > 1))  # one noise has no others
        best = {method: best_of(of_method)[shown] for method, of_method in curves.items()}
        cells = [
            " / ".join(Summary.of(values).text(1) for values in best[method])
            for method in cnn.METHODS
        ]
        gains = [Summary.of(a - b) for a, b in zip(best["LSSGD"], best["SGD"], strict=True)]
        cells.append(" / ".join(f"{of.mean:+.1f} ± {of.margin:.1f}" for of in gains))
        rows.append([f"{budget:g}", *cells])
    print(table(("ε", *cnn.METHODS, "LSSGD - SGD"), rows), flush=True)


def print_runs(done: Mapping[cnn.Run, cnn.Outcome]) -> None:
    """Accuracy on the way and at the end, and how much it moved over the last third."""
    rows = []
    for run, outcome in done.items():
        last, third = np.array(outcome.last), max(1, run.epochs // 3)
        tail, two = last[-third:], last[min(2 * third, len(last)) - 1]
        cells = [f"{run.noise_multiplier:g}", f"{run.spent(run.epochs):.3f}", run.method]
        cells += [f"{run.sigma:g}", f"{run.learning_rate:g}"]
        cells += [f"{value:.1f}" for value in (last[third - 1], two, last[-1])]
        cells += [f"{tail.mean():.1f} ± {tail.std():.1f}", f"{last.max():.1f}"]
        rows.append([*cells, f"{outcome.average[-1]:.1f}"])
    header = ("z", "ε at the end", "method", "σ", "rate", "a third", "two thirds", "end")
    tail = ("mean and std of the last third", "best", "end, mean of the epoch's iterates")
    print(f"\n{table((*header, *tail), rows)}", flush=True)


def plot_runs(ax: plt.Axes, done: Mapping[cnn.Run, cnn.Outcome], label: str, title: str) -> None:
    """Validation accuracy after each epoch, ε on the right. ``label`` formats a run's name."""
    for run, outcome in done.items():
        dashes = "-" if run.sigma else "--"
        name = label.format(run=run)
        ax.plot(range(1, run.epochs + 1), outcome.last, dashes, label=name, linewidth=1.3)
    spent = [run.spent(epoch) for epoch in range(1, run.epochs + 1)]
    right = ax.twinx()
    right.plot(range(1, run.epochs + 1), spent, ":", color="grey", linewidth=1)
    right.set_ylabel("ε (dotted)", color="grey")
    right.set_ylim(bottom=0)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("epoch")
    ax.set_ylabel("validation accuracy, %")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=7, loc="lower right", ncols=2, framealpha=0.6)


def convolutional(
    part: str, folder: str, output: Path, size: cnn.Size, jobs: int, device: str
) -> None:
    """One of the parts 2 to 4: table and picture."""
    runs = {"mnist": cnn.mnist_runs, "long": cnn.long_runs, "cifar": cnn.cifar_runs}[part](size)
    records, epochs = runs[0].records, runs[0].epochs
    titles = {
        "mnist": "2. The paper's CNN on MNIST",
        "long": "3. MNIST at noise multiplier 10, over σ and learning rates",
        "cifar": "4. TensorFlow's tutorial CNN on CIFAR-10",
    }
    print(
        f"\n## {titles[part]}\n\n{records} records, {epochs} epochs of {runs[0].steps_per_epoch} "
        f"steps, expected batch {cnn.BATCH_SIZE}, clip {runs[0].clip_norm:g}, δ = "
        f"{cnn.TARGET_DELTA:g}, {size.seeds} seeds, accuracy in percent on {size.test_records} test "
        "records, mean over the seeds. The runs of a noise multiplier share batches and noise."
    )
    sys.stdout.flush()
    found = run_cnns(runs, folder, size, jobs, device)
    done = {run: middle(outcomes) for run, outcomes in found.items()}
    print_runs(done)
    if size.seeds > 1:
        print_spread(found)
    if part == "mnist":
        figure, grid = plt.subplots(2, 2, figsize=(10, 7))
        for ax, (noise, sigma) in zip(grid.flat, cnn.SIGMA_OF_NOISE.items(), strict=True):
            chosen = {r: o for r, o in done.items() if r.noise_multiplier == noise}
            plot_runs(ax, chosen, "{run.method}", f"noise multiplier {noise:g}, σ = {sigma:g}")
    elif part == "long":
        figure, grid = plt.subplots(1, 2, figsize=(10, 4))
        rate = cnn.RATES["SGD"]
        over_sigma = {r: o for r, o in done.items() if r.learning_rate == rate}
        plot_runs(grid[0], over_sigma, "σ = {run.sigma:g}", f"learning rate {rate:g}")
        over_rates = {r: o for r, o in done.items() if r.sigma in (0, 1)}
        name = "{run.method}, rate {run.learning_rate:g}"
        plot_runs(grid[1], over_rates, name, "σ = 0 and 1")
    else:
        figure, ax = plt.subplots(figsize=(5.5, 4))
        plot_runs(ax, done, "{run.method}", "CIFAR-10, noise multiplier 2")
    figure.tight_layout()
    figure.savefig(output / f"{part}.png", dpi=110)
    plt.close(figure)


LOGISTIC: dict[str, Callable[[str, Size, Path], None]] = {
    "paper": paper_protocol,
    "curves": curves_part,
    "rates": rates_part,
    "tuned": tuned_protocol,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help=f"folder of the data (or set {DATA_VARIABLE})")
    parser.add_argument("--quick", action="store_true", help="a small part, in about 2 minutes")
    parser.add_argument("--only", choices=PARTS, help="one part only")
    parser.add_argument("--settled", action="store_true", help="part tuned: do not tune again")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--whole", action="store_true", help="CNNs at the paper's size: days")
    parser.add_argument("--device", default="cpu", help="of the CNNs")
    options = parser.parse_args()
    folder = folder_of(options.data)
    mnist(folder)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    print_heading("Laplacian smoothing", sys.argv[1:], options.data)
    sizes = (cnn.TINY, cnn.PAPER) if options.whole else (cnn.QUICK, cnn.FULL)
    size_of_cnn = sizes[not options.quick]
    for part in [options.only] if options.only else PARTS:
        start = time.perf_counter()
        if part in LOGISTIC:
            print(f"\n## 1. Multiclass logistic regression on MNIST\n\n{TEST}")
            size = QUICK if options.quick else replace(FULL, is_settled=options.settled)
            LOGISTIC[part](folder, replace(size, jobs=options.jobs), options.output)
        elif part == "cifar" and not has_cifar10(folder):
            print(f"\n## 4. CIFAR-10 is left out: {folder} does not hold {CIFAR10_LAYOUTS}.")
            continue
        elif part == "budgets":
            budgets_part(folder, size_of_cnn, options.jobs, options.device)
        else:
            where = folder, options.output, size_of_cnn, options.jobs, options.device
            convolutional(part, *where)
        print(f"\n({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"\nPictures are in {options.output}.")


if __name__ == "__main__":
    main()
