"""The record of a server's run: TensorBoard, a summary, the model. Noised values and counts only."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from lightning_dp._files import replaced
from lightning_dp.report.content import plain

__all__ = ["Logbook", "save"]


class Logbook:
    """Writes progress to TensorBoard, and a summary to ``federation.json``.

    Args:
        folder: where both go.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "federation.json"
        self._writer = SummaryWriter(str(folder))
        self._clients: dict[int, dict[str, Any]] = {}
        self._metrics: dict[str, float] = {}
        self._counts: Counter[str] = Counter(replies=0, problems=0)

    def heard(self, client: int, facts: Mapping[str, Any], step: int) -> None:
        """Count a client's reply; its facts hold ε and where it comes from."""
        self._counts["replies"] += 1
        self.introduced(client, facts)
        if "epsilon" in facts:
            self._scalar(f"privacy/epsilon_client_{client}", facts["epsilon"], step)

    def introduced(self, client: int, facts: Mapping[str, Any]) -> None:
        """Note the facts of a client."""
        self._clients[client] = {**self._clients.get(client, {}), **facts, "client": client}

    def problem(self) -> None:
        """Count a message that was lost, or whose client failed."""
        self._counts["problems"] += 1

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a new global model."""
        self._metrics = {name: float(value) for name, value in metrics.items()}
        for name, value in self._metrics.items():
            self._scalar(f"global/{name}", value, step)
        for name, count in self._counts.items():
            self._scalar(f"progress/{name}", count, step)
        if self._spent:
            self._scalar("privacy/epsilon_max", max(self._spent), step)
        self._writer.flush()

    @property
    def _spent(self) -> list[float]:
        return [facts["epsilon"] for facts in self._clients.values() if "epsilon" in facts]

    def line(self, step: int) -> str:
        """Return one line for the console: the progress of the run."""
        parts = [f"{name} {value:.4g}" for name, value in self._metrics.items()]
        if self._spent:
            parts.append(f"largest epsilon of a client {max(self._spent):.4g}")
        parts += [f"{count} {name}" for name, count in self._counts.items()]
        return f"Federation: {step} rounds are over; " + ", ".join(parts)

    def close(self, step: int, reason: str) -> None:
        """Write the summary of a run that is over or has failed, whatever the facts were."""
        summary = {
            "rounds": step,
            "ended": reason,
            "metrics": self._metrics,
            **self._counts,
            "clients": {str(client): facts for client, facts in sorted(self._clients.items())},
        }
        content = json.dumps(plain(summary), allow_nan=False, indent=2) + "\n"
        with replaced(self._path, mode=None) as file:
            file.write(content.encode())
        self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):  # TensorBoard draws no infinite ε; the summary has it
            self._writer.add_scalar(name, value, step)


def save(value: Any, path: Path) -> None:
    """Write with torch, so that the file is whole at any moment, and durable on return."""
    with replaced(path, mode=None) as file:
        torch.save(value, file)
