"""Print the table of the recipes from what their runs saved.

python examples/recipes/table.py                     # the runs kept in this folder's results
python examples/recipes/table.py outputs/recipes     # your own
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from lightning_dp.accounting import epsilon_text

FOLDER = "python examples/recipes/"
KEPT = Path(__file__).with_name("results")
ORDER = (
    *("mnist_linear", "mnist_linear_2", "mnist_linear_1", "mnist_network", "cifar10_linear"),
    *("a9a_linear", "california_network", "text_classifier"),
    *("public_to_private", "from_scratch", "federation"),
)
HEADER = (
    *("data and model", "records", "at the start", "private", "ε, δ"),
    *("without privacy", "CPU minutes / 2", "script"),
)


@dataclass(frozen=True)
class Measured:
    """A test metric at the start and with each seed, the largest ε, and what the first run cost."""

    start: float
    values: list[float] = field(default_factory=list)
    epsilon: float = 0.0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    metric: str
    command: str
    records: int
    target_delta: float
    private: Measured
    plain: Measured
    made_with: str = f"Python {platform.python_version()}, torch {torch.__version__}"

    def cells(self) -> list[str]:
        private = self.private
        return [
            self.title,
            f"{self.records:,}",
            shown(self.metric, [private.start]),
            f"**{shown(self.metric, private.values)}**",
            f"{epsilon_text(private.epsilon)}, {self.target_delta:g}",
            shown(self.metric, self.plain.values),
            f"{private.cpu_seconds / 120:.1f}",
            f"`{self.command.removeprefix(FOLDER)}`",
        ]


def shown(metric: str, values: list[float]) -> str:
    """The mean over the seeds, their range and number."""
    scale, digits, unit = (100, 1, " %") if metric == "accuracy" else (1, 3, "")
    low, high, mean = (scale * of(values) for of in (min, max, statistics.mean))
    spread = f" ({low:.{digits}f} to {high:.{digits}f}, {len(values)} runs)"
    return f"{mean:.{digits}f}{unit}{spread if len(values) > 1 else ''}"


def table(rows: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [list(HEADER), ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(row: Row, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(row), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path


def load(folder: Path) -> list[Row]:
    """The rows that are in a folder, in the order of the table."""
    rows = []
    for name in ORDER:
        if (path := folder / f"{name}.json").is_file():
            fields = json.loads(path.read_text("utf-8"))
            ways = {each: Measured(**fields.pop(each)) for each in ("private", "plain")}
            rows.append(Row(**fields, **ways))
    return rows


if __name__ == "__main__":
    print(table(load(Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT)))
