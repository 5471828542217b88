"""Draw the picture of planning.md: ``python docs/pictures.py`` writes docs/_static/planning.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from lightning_dp.plan import TrainingPlan, plan_training, suggest
from lightning_dp.plan.suggestion import ENOUGH

RECORDS, EPSILON, DELTA = 22_000, 3.0, 1e-5
# Test accuracy of three runs each: python examples/first_hour.py --data DIR
AS_SET, AS_ADVISED = (54.5, 58.8, 63.4), (90.7, 91.7, 90.4)


def draw(path: Path) -> None:
    """Draw the noise of all choices, and the accuracy of two of them."""
    found = suggest(RECORDS, EPSILON, target_delta=DELTA)
    yours = plan_training(RECORDS, 128, epochs=2, target_epsilon=EPSILON, target_delta=DELTA)
    figure, (noise, accuracy) = plt.subplots(
        1, 2, figsize=(7.5, 3.2), width_ratios=[3, 1.2], layout="constrained"
    )
    noise.axhspan(1, ENOUGH, color="C2", alpha=0.12, linewidth=0)
    noise.text(115, 1.02, "little to gain below 1.5", color="C2", fontsize=8)
    for epochs, shade in zip((2, 8, 32), ("0.65", "0.4", "0.1"), strict=True):
        sizes = [128, *(row[0].batch_size for row in found.table[:-1])]
        plans = [yours.changed(batch_size=size, epochs=epochs) for size in sizes]
        noise.plot(sizes, [each.excess for each in plans], color=shade, label=f"{epochs} epochs")

    def words(plan: TrainingPlan) -> str:
        return f"{plan.epochs:.0f} epochs of {plan.batch_size:,}"

    def mark(plan: TrainingPlan, color: str, text: str, place: tuple[float, float]) -> None:
        noise.plot(plan.batch_size, plan.excess, "o", color=color, zorder=3)
        line = {"arrowstyle": "-", "color": color}
        at = (plan.batch_size, plan.excess)
        noise.annotate(text, at, place, color=color, arrowprops=line, verticalalignment="center")

    mark(yours, "C3", words(yours), (220, 4.2))
    mark(found.best, "C0", f"advised: {words(found.best)}", (1500, 2.5))
    noise.set(xscale="log", xlabel="batch size", ylabel="noise over the run, full batches = 1")
    noise.set_xticks(sizes[::2], [f"{size:,}" for size in sizes[::2]])
    noise.minorticks_off()
    noise.legend(frameon=False)
    for place, points, color in ((0, AS_SET, "C3"), (1, AS_ADVISED, "C0")):
        accuracy.plot([place] * 3, points, "o", color=color)
    accuracy.set(xlim=(-0.6, 1.6), ylim=(40, 100), ylabel="test accuracy (%), same ε")
    names = [words(plan).replace(" of", "\nof") for plan in (yours, found.best)]
    accuracy.set_xticks([0, 1], names)
    for axes in (noise, accuracy):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).parent / "_static" / "planning.png")
