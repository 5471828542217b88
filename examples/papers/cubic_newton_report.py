"""Tables and pictures of cubic_newton.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from common import TEST, Summary, gains_text
from cubic_newton_data import Problem
from cubic_newton_paper import paper_rows

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    "Fed-SGD": "C0",
    "Newton": "C3",
    "local GD": "C2",
    "Newton, M = 0.1": "C4",
    "Newton, whole steps": "C6",
}


def print_set(found: Any, size: Any) -> None:
    of = found.problem
    print(
        f"\n## {found.title}: {of.clients} clients with m = {of.records}, d = {of.size}, "
        f"{len(of.test)} to test\n\nmin f = {of.optimum:.5f} (f(0) - min f = "
        f"{math.log(2) - of.optimum:.4f}), test accuracy there {100 * of.best_accuracy:.2f} %."
    )
    _print_rounds(found, size)
    _print_frontiers(found, size)
    _print_runs(found, size)
    _print_paper(of)


def _print_rounds(found: Any, size: Any) -> None:
    print(
        "\n### Rounds to be as good as Fed-SGD ever is (5 % allowed), each method tuned at every T\n"
        "\n| ε | suboptimality wanted | Fed-SGD, T | Newton, T | ratio | evaluations of a record, "
        "Fed-SGD | Newton |\n|---|---|---|---|---|---|---|"
    )
    rows = [(epsilon, "Fed-SGD", "Newton", "") for epsilon in size.epsilons]
    if ("DP-GD, central", 1.0, size.main) in found.frontiers:
        rows.append((size.main, "DP-GD, central", "Newton, central", ", central"))
        rows.append((size.main, "Fed-SGD", "local GD", ", local GD for Newton"))
        rows.append((size.main, "Fed-SGD", "Newton, M = 0.1", ", M = 0.1"))
    for epsilon, first, second, words in rows:
        target = found.target(epsilon, first)
        a = found.first((first, 1.0, epsilon), target)
        b = found.first((second, 1.0, epsilon), target)
        cells = [str(a.rounds), "never", "", str(a.rounds), ""]
        if b is not None:
            cells = [
                *(str(a.rounds), str(b.rounds), f"{a.rounds / b.rounds:.1f}"),
                *(str(a.rounds), str(b.rounds * b.setting.inner)),
            ]
        print(f"| {epsilon}{words} | {target:.5f} | {' | '.join(cells)} |")


def _print_frontiers(found: Any, size: Any) -> None:
    print(f"\n### Suboptimality after T rounds tuned for T, ε = {size.main}, 20 noises\n")
    keys = [key for key in found.frontiers if key[2] == size.main]
    rounds = sorted({point.rounds for key in keys for point in found.frontiers[key]})
    print(f"| | {' | '.join(f'T = {t}' for t in rounds)} |\n|---|{'---|' * len(rounds)}")
    for key in keys:
        by = {point.rounds: point for point in found.frontiers[key]}
        cells = [_spread(by[t].values) if t in by else "" for t in rounds]
        print(f"| {_label(key)} | {' | '.join(cells)} |")
    first, second = (found.frontiers[m, 1.0, size.main] for m in ("Fed-SGD", "Newton"))
    print(
        "\nThe fewest rounds of Newton that are as good as T rounds of Fed-SGD, both tuned for T: ",
        end="",
    )
    pairs = []
    for point in first:
        enough = next((p.rounds for p in second if p.mean <= point.mean), None)
        pairs.append(f"{point.rounds} → {enough or 'never'}")
    print(", ".join(pairs) + ".")


def _print_runs(found: Any, size: Any) -> None:
    seeds = max(len(traces) for _, traces in found.traces.values())
    print(
        f"\n### Runs through the package, {seeds} seeds\n\n{TEST} Gains are over Fed-SGD, or DP-GD, at "
        "the same ε.\n\n| ε by the ledger | | T | evaluations | suboptimality | gain | test accuracy, % "
        "| gain | uplink of a client: a round | in all | setting |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    gains = _gains(found)
    for key, (point, traces) in found.traces.items():
        last = torch.stack([trace.suboptimality[-1] for trace in traces])
        right = torch.stack([trace.accuracy[-1] for trace in traces])
        one = traces[0]
        print(
            f"| {one.epsilon:.4f} | {_label(key)} | {point.rounds} | {one.evaluations} | "
            f"{_spread(last)} | {gains.get((key, 0), '')} | "
            f"{Summary.of((100 * right).tolist()).text(2)} | {gains.get((key, 1), '')} | "
            f"{one.uplink:,} | {one.uplink * point.rounds:,} | {_setting(point.setting)} |"
        )


def _gains(found: Any) -> dict[tuple[Any, int], str]:
    """Differences to the first-order method, by key and measure (suboptimality, accuracy)."""

    def last(key: Any, measure: int) -> np.ndarray:
        traces = found.traces[key][1]
        ends = [(t.suboptimality[-1], 100 * t.accuracy[-1])[measure] for t in traces]
        return np.array([float(end) for end in ends])

    def base(key: Any) -> Any:
        return ("DP-GD, central" if "central" in key[0] else "Fed-SGD", 1.0, key[2])

    texts: dict[tuple[Any, int], str] = {}
    for measure, digits in ((0, 5), (1, 2)):
        keys = [key for key in found.traces if key != base(key)]
        pairs = [(last(key, measure), last(base(key), measure)) for key in keys]
        for key, text in zip(keys, gains_text(pairs, digits), strict=True):
            texts[key, measure] = text
    return texts


def _print_paper(of: Problem) -> None:
    print(
        "\n### The paper's noise (Theorem 1, one record a round, four epochs, δ0 = 0.01)\n\n"
        "| stated ε | k/d | τ by (10) | τ used | σ on one record's gradient | true ε at δ = 1e-5 | "
        "suboptimality |\n|---|---|---|---|---|---|---|"
    )
    for row in paper_rows(of):
        print(
            f"| {row.stated} | {row.kept} | {row.steps:.3g} | {row.inner} | {row.sigma:.3g} | "
            f"{row.true:.2f} | {_spread(row.values)} |"
        )


def _label(key: tuple[str, float, float]) -> str:
    method, kept, _ = key
    return method if kept == 1 else f"{method}, k/d = {kept:g}"


def _colour(method: str, kept: float) -> str:
    return COLOURS[method] if kept == 1 else {0.08: "C1", 0.1: "C5"}.get(kept, "C8")


def _spread(values: Any) -> str:
    if not bool(torch.isfinite(values).all()):
        return "diverged"
    return Summary.of(values.tolist()).text(5)


def _setting(s: Any) -> str:
    return f"τ {s.inner}, η {s.rate:g}, C {s.clip:g}, M {s.cubic:g}"


# -- pictures --------------------------------------------------------------------------------------


def draw(found: Any, size: Any, path: Path) -> None:
    """Rounds, curves, and what ε buys."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.5))
    _draw_frontiers(axes[0, 0], found, size)
    _draw_curves(axes[0, 1], found, size)
    _draw_epsilons(axes[1, 0], found, size)
    _draw_accuracy(axes[1, 1], found, size)
    figure.suptitle(
        f"{found.title}: {found.problem.clients} clients with {found.problem.records} records, "
        "δ = 1e-5; mean ± standard deviation"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_frontiers(axis: Any, found: Any, size: Any) -> None:
    for method, colour in COLOURS.items():
        points = found.frontiers.get((method, 1.0, size.main))
        if points:
            rounds = [point.rounds for point in points]
            _band(axis, rounds, [point.values for point in points], colour, method, "o-")
    axis.axhline(found.target(size.main), color="k", ls=":", lw=0.8)
    axis.set(xscale="log", yscale="log", xlabel="T, with the best setting for this T")
    axis.set(ylabel="suboptimality after T rounds", title=f"ε = {size.main}, k = d")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, which="both")


def _draw_curves(axis: Any, found: Any, size: Any) -> None:
    for key, (_, traces) in found.traces.items():
        method, kept, epsilon = key
        if epsilon != size.main or method not in ("Fed-SGD", "Newton"):
            continue
        curves = torch.stack([trace.suboptimality for trace in traces])
        rounds = range(curves.shape[1])
        _band(axis, rounds, list(curves.T), _colour(method, kept), _label(key), "-")
    axis.set(yscale="log", xlabel="round", ylabel="suboptimality", title=f"Runs, ε = {size.main}")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, which="both")


def _band(
    axis: Any, x: Sequence[int], values: Sequence[torch.Tensor], colour: str, label: str, line: str
) -> None:
    means = np.array([float(v.mean()) for v in values])
    spread = np.array([float(v.std()) for v in values])
    axis.plot(x, means, line, color=colour, label=label, lw=1.2, ms=3)
    low = np.maximum(means - spread, means / 10)
    axis.fill_between(x, low, means + spread, color=colour, alpha=0.15)


def _draw_epsilons(axis: Any, found: Any, size: Any) -> None:
    for method, kept in [("Fed-SGD", 1.0), ("Newton", 1.0), ("Newton", 0.1)]:
        points = [found.best((method, kept, epsilon)) for epsilon in size.epsilons]
        axis.errorbar(
            size.epsilons,
            [point.mean for point in points],
            [float(point.values.std()) for point in points],
            fmt="o-" if kept == 1 else "s--",
            label=_label((method, kept, 0.0)),
            color=_colour(method, kept),
            capsize=2,
            lw=1.2,
            ms=3,
        )
    axis.set(yscale="log", xlabel="ε", ylabel="suboptimality", title="At the best T")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, which="both")


def _draw_accuracy(axis: Any, found: Any, size: Any) -> None:
    for key, (_, traces) in found.traces.items():
        method, kept, epsilon = key
        if epsilon != size.main or method not in ("Fed-SGD", "Newton"):
            continue
        total = [trace.uplink * t / 1e3 for trace in traces[:1] for t in range(len(trace.accuracy))]
        curves = 100 * torch.stack([trace.accuracy for trace in traces]).mean(0)
        axis.plot(
            total[1:],
            curves[1:],
            "o-",
            ms=3,
            lw=1.2,
            color=_colour(method, kept),
            label=_label(key),
        )
    axis.axhline(100 * found.problem.best_accuracy, color="k", ls=":", lw=0.8)
    axis.set(xscale="log", xlabel="uplink of one client so far, kB", ylabel="test accuracy, %")
    axis.set(title=f"What is sent, ε = {size.main}")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, which="both")
