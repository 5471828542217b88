"""The tables and pictures of dynamic_noise.py."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from dynamic_noise_run import Cell

NAMES = ("uniform", "exponential", "dynamic")
U = ("exact", "uniform")


def relative(other: np.ndarray, base: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard deviation and standard error of the paired relative difference, in percent."""
    difference = 100 * (other - base) / base.mean()
    spread = float(difference.std(ddof=1))
    return float(difference.mean()), spread, spread / math.sqrt(len(difference))


def sign(small: np.ndarray, large: np.ndarray) -> str:
    """<, > or = (within two standard errors of the paired difference, or 0.05 %)."""
    mean, _, error = relative(small, large)
    return "=" if abs(mean) <= 2 * error + 0.05 else "<" if mean < 0 else ">"


def order(losses: dict[str, np.ndarray]) -> tuple[str, bool]:
    """The three in the claimed order with the signs between them, and whether it holds."""
    first = sign(losses["dynamic"], losses["exponential"])
    second = sign(losses["exponential"], losses["uniform"])
    return f"dyn {first} exp {second} uni", ">" not in (first, second)


def percent(value: float) -> str:
    """With a sign; by its power of ten where it is beyond all bounds."""
    return f"{value:+.1f}" if abs(value) < 1000 else f"{value:+.0e}"


def print_table(name: str, cells: list[Cell], budget: str, repeats: int) -> None:
    print(f"\n### {name}: final training loss relative to uniform noise, {repeats} repeats\n")
    print(
        "| data scale | Var(√q)/E q | T uni/exp/dyn | uniform | exponential | dynamic | order "
        "| T = 100: uniform | exponential | dynamic | order |\n" + "|---" * 11 + "|"
    )
    for cell in cells:
        steps = "/".join(str(cell.best_steps[budget, n]) for n in NAMES)
        row = f"| {cell.data_scale:g} | {cell.spread:.3f} | {steps} "
        for results in (cell.best, cell.same):
            losses = {n: results[budget, n] for n in NAMES}
            base = losses["uniform"]
            row += f"| {base.mean():.4f} ± {base.std(ddof=1):.4f} "
            for other in NAMES[1:]:
                mean, spread, _ = relative(losses[other], base)
                row += f"| {percent(mean)} ± {percent(spread)[1:]} % "
            row += f"| {order(losses)[0]} "
        print(row + "|")


def print_verdict(cells: list[Cell], budget: str) -> None:
    """Print how often the claim held, by how much the influence varies."""
    print(f"\n### The claim dynamic <= exponential <= uniform ({budget} budget, 2 SE per cell)\n")
    columns = "claim holds | dyn < uni | dyn > uni | median gain of dyn"
    print(f"| Var(√q)/E q | cells | best T: {columns} | T = 100: {columns} |")
    print("|---" * 10 + "|")
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 1)):
        inside = [cell for cell in cells if low <= cell.spread < high]
        if not inside:
            continue
        row = f"| {low:g} to {high:g} | {len(inside)} "
        for results in ("best", "same"):
            by_cell = [{n: getattr(c, results)[budget, n] for n in NAMES} for c in inside]
            held = sum(order(losses)[1] for losses in by_cell)
            signs = [sign(losses["dynamic"], losses["uniform"]) for losses in by_cell]
            gains = [-relative(losses["dynamic"], losses["uniform"])[0] for losses in by_cell]
            row += f"| {held} | {signs.count('<')} | {signs.count('>')} "
            row += f"| {percent(float(np.median(gains)))} % "
        print(row + "|")


def draw(cells: list[Cell], path: Path) -> None:
    """Relative losses over data scales with Var(√q)/E q, and the influences below."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    figure, axes = plt.subplots(2, len(names), figsize=(3.4 * len(names), 6), squeeze=False)
    for column, name in enumerate(names):
        of_name = [cell for cell in cells if cell.name == name]
        scales = [cell.data_scale for cell in of_name]
        top, bottom = axes[:, column]
        for color, other in (("C1", "exponential"), ("C2", "dynamic")):
            for style, results in (("-", "best"), (":", "same")):
                rows = [
                    relative(getattr(c, results)["exact", other], getattr(c, results)[U])
                    for c in of_name
                ]
                means, errors = [r[0] for r in rows], [2 * r[2] for r in rows]
                label = f"{other}, {'best T' if results == 'best' else 'T = 100'}"
                top.errorbar(scales, means, errors, color=color, ls=style, marker=".", label=label)
        top.axhline(0, color="grey", lw=0.8)
        low, high = top.get_ylim()
        top.set_ylim(max(low, -15), min(max(high, 1), 10))  # some go through the ceiling
        top.set(title=name, xlabel="data scale")
        right = top.twinx()
        right.plot(scales, [c.spread for c in of_name], color="k", ls="--", lw=0.8)
        right.set_ylim(0, 1)
        right.set_yticks([] if column < len(names) - 1 else [0, 0.5, 1])
        for cell in of_name:
            bottom.semilogy(
                cell.influence / cell.influence.sum(), label=f"scale {cell.data_scale:g}"
            )
        bottom.set(xlabel="step t")
        bottom.set_ylim(bottom=max(bottom.get_ylim()[0], 1e-12))
    axes[0, 0].set_ylabel("loss relative to uniform, % (2 SE)")
    axes[1, 0].set_ylabel("influence q_t (sum 1)")
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    figure.suptitle("(4, 1e-8)-DP, full batches; dashed: Var(√q)/E q (right axis, 0 to 1)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
