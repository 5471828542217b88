"""Tables and pictures of diff2.py."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from common import FEWEST_PAIRS, paired_p
from diff2_data import Split
from diff2_run import DELTA, EVERY, Setting, plan_of
from scipy.stats import ttest_rel

if TYPE_CHECKING:
    from diff2 import Method

CRITERIA = ("train loss", "‖∇f‖²", "test loss", "test error")
CHOSEN_FOR = (0, 1, 0, 0)  # test records: of the setting with the best train loss


def criteria_of(methods: Sequence[Method]) -> range:
    """All four for classes, the first three for numbers."""
    return range(3 + any(np.isfinite(trace.values[3, 0]) for trace in methods[0].traces[0]))


def values(method: Method, criterion: int, *, as_paper: bool = False) -> np.ndarray:
    """The last value of each seed; infinite if it diverged.

    As in the paper's tests: the least over all rounds, of the runs that the settings were chosen
    for.
    """
    traces = (method.tuned if as_paper else method.traces)[CHOSEN_FOR[criterion]]
    if as_paper:
        return np.array([np.nanmin(trace.values[criterion]) for trace in traces])
    return np.array(
        [trace.values[criterion, -1] if trace.is_finished else np.inf for trace in traces]
    )


def p_value(low: np.ndarray, high: np.ndarray) -> float:
    """Of the one-sided paired t-test that ``low`` is lower on average."""
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return float("nan")
    return float(ttest_rel(low, high, alternative="less").pvalue)


def by_rank(low: np.ndarray, high: np.ndarray) -> str:
    """Medians, how often ``low`` is lower, Wilcoxon's two-sided p; nothing for few pairs."""
    if len(low) < FEWEST_PAIRS:
        return ""
    median = 100 * (np.median(low) / np.median(high) - 1)
    often = f"{(low < high).sum()} of {len(low)}"
    return f"; medians {median:+.2g} %, lower in {often}, Wilcoxon p = {paired_p(low, high):.2g}"


def describe(setting: Setting) -> str:
    parts = [f"η {setting.rate:.3g}"]
    if np.isfinite(setting.clip):
        parts.append(f"C1 {setting.clip:g}")
    if setting.interval > 1:
        parts += [f"T {setting.interval}", f"C2 {setting.diff:.3g}"]
    if setting.u is not None:
        parts.append(f"u {setting.u:.3g}")
    return ", ".join(parts)


def write_tried(methods: Sequence[Method], path: Path) -> None:
    """Everything that was tried: the means of the last ten values on the first noise."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["method", "seed", "rate", "C1", "T", "C2", "u", "train loss", "gradient"])
        for method in methods:
            for seed, tried in enumerate(method.tried):
                for s, trace in tried.items():
                    what = (seed, s.rate, s.clip, s.interval, s.diff, s.u)
                    levels = [f"{trace.level(criterion):.6g}" for criterion in (0, 1)]
                    table.writerow([method.title, *what, *levels])


def print_noise(title: str, data: Split, epsilon: float, rounds: int) -> None:
    """Print the noise that the two accountings ask for."""
    records = data.train.count
    print(
        f"\n## {title}: n = {records}, {len(data.test.y.flatten())} to test, ε = {epsilon:g}, "
        f"δ = {DELTA:g}, R = {rounds}\n\n### Noise over C on the sum, restart / difference (u = 1.25)\n"
    )
    print("| T | paper's | exact, replace-one | exact, add/remove |\n|---|---|---|---|")
    for interval in (1, 6, 20, 60, 200):
        cells = []
        for noise in ("paper", "exact", "add/remove"):
            plan = plan_of(Setting(1.0, 1.0, interval), noise, epsilon, rounds, records)
            kinds = [plan.noise_multiplier(step) for step in range(1 if interval == 1 else 2)]
            cells.append(" / ".join(f"{z:.1f}" for z in kinds))
        print(f"| {interval} | {' | '.join(cells)} |")


def print_results(methods: Sequence[Method]) -> None:
    seeds = len(methods[0].traces[0])
    print(f"\n### After the last round, mean ± standard deviation over {seeds} seeds\n")
    criteria = criteria_of(methods)
    columns = " | ".join(CRITERIA[criterion] for criterion in criteria)
    print(
        f"| | ε, replace-one | {columns} | chosen most often for the loss | for the gradient |\n"
        + "|---" * (4 + len(criteria))
        + "|"
    )
    for method in methods:
        cells = []
        for criterion in criteria:
            final = values(method, criterion)
            diverged = int((~np.isfinite(final)).sum())
            mean, std = (f"{f(final):.4g}" for f in (np.mean, lambda v: np.std(v, ddof=1)))
            cells.append(f"diverged {diverged} of {seeds}" if diverged else f"{mean} ± {std}")
        for chosen in method.chosen:
            setting, times = Counter(replace(s, u=None) for s in chosen).most_common(1)[0]
            cells.append(f"{describe(setting)} ({times} of {seeds})")
        spent = method.traces[0][0].spent["replace-one"]
        print(f"| {method.title} | {spent:.3f} | {' | '.join(cells)} |")
    print_tests(methods)


def print_tests(methods: Sequence[Method]) -> None:
    """p-values, of the last round and as in the paper."""
    print("\n### One-sided paired t-tests: is the first lower? p (difference of the means in %)\n")
    criteria = criteria_of(methods)
    whens = ("last round", "as the paper")
    rows = [f"{when}: {CRITERIA[criterion]}" for when in whens for criterion in criteria]
    print(f"| | {' | '.join(rows)} |\n" + "|---" * (1 + len(rows)) + "|")
    by = {name: m for m in methods for name in [m.title.split(",")[0] + m.title[-3:]]}
    pairs = [
        ("DIFF2-GD(a)", "DP-GD(a)"),
        ("DIFF2-GD(b)", "DP-GD(b)"),
        ("DIFF2-GD(c)", "DP-GD(b)"),
        ("DIFF2-GD(c)", "DP-GD(a)"),
        ("DP-GD(b)", "DP-GD(a)"),
        ("DIFF2-GD(b)", "DIFF2-GD(a)"),
        ("DIFF2-GD(c)", "DIFF2-GD(a)"),
        ("DIFF2-GD(c)", "DIFF2-GD(b)"),
        ("Diff2.recommend()(d)", "DP-GD(b)"),
        ("DIFF2-GD(f)", "DP-GD(f)"),
    ]
    for first, second in pairs:
        if first not in by or second not in by:
            continue
        cells = []
        for as_paper in (False, True):
            if as_paper and not (by[first].tuned and by[second].tuned):
                cells += [""] * len(criteria)
                continue
            for criterion in criteria:
                low, high = (values(by[m], criterion, as_paper=as_paper) for m in (first, second))
                change = 100 * (low.mean() / high.mean() - 1)
                cells.append(f"{p_value(low, high):.2g} ({change:+.2g} %{by_rank(low, high)})")
        print(f"| {first} < {second} | {' | '.join(cells)} |")


def draw(title: str, methods: Sequence[Method], epsilon: float, path: Path) -> None:
    """The paper's figure: each criterion over the rounds, mean and standard deviation."""
    criteria = criteria_of(methods)
    figure, axes = plt.subplots(1, len(criteria), figsize=(13, 4))
    styles = {
        "GD, no privacy": ("k", "--", "GD (ref)"),
        "DP-GD, paper's noise (a)": ("C0", "-", None),
        "DIFF2-GD, paper's noise (a)": ("C1", "-", None),
        "DP-GD, exact noise (b)": ("C0", ":", None),
        "DIFF2-GD, best split (c)": ("C3", "-", None),
    }
    by = {method.title: method for method in methods}
    for criterion, axis in enumerate(axes):
        ends = []
        for name, (color, line, label) in styles.items():
            if name not in by:
                continue
            traces = by[name].traces[CHOSEN_FOR[criterion]]
            curves = np.stack([trace.values[criterion] for trace in traces])
            rounds = np.arange(curves.shape[1]) * EVERY
            mean, std = curves.mean(0), curves.std(0, ddof=1)
            axis.plot(rounds, mean, color=color, ls=line, lw=1.2, label=label or name)
            if name != "GD, no privacy":
                axis.fill_between(
                    rounds, np.maximum(mean - std, mean / 10), mean + std, color=color, alpha=0.15
                )
            ends.append((np.nanmin(mean), np.nanmedian(mean), mean[len(mean) // 10]))
        axis.set_yscale("log")
        if criterion != 1:  # what differs at the end, not how it begins
            low, high = min(e[0] for e in ends), max(e[2] for e in ends)
            if np.isfinite(high):
                axis.set_ylim(0.98 * low, 1.05 * high)
        pair = [by[f"{m}-GD, paper's noise (a)"] for m in ("DIFF2", "DP")]
        p = p_value(*(values(m, criterion, as_paper=bool(m.tuned)) for m in pair))
        axis.set(title=f"{CRITERIA[criterion]} (a: p = {p:.2g})", xlabel="round")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{title}, ε = {epsilon:g}, δ = {DELTA:g}: mean ± standard deviation")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
