"""Made-up records differ where the user's may, and CTC gets labels and lengths that it can take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import PrivacyConfig
from lightning_dp.audit.peak_memory import measure_memory
from lightning_dp.federated.local import LocalRecords
from lightning_dp.isolation import probe_isolation
from lightning_dp.isolation.synthetic import leaves_of, synthetic_pool


def test_every_record_has_a_partner_that_differs_everywhere():
    batch = {"x": torch.zeros(3, 2, 2), "y": (torch.zeros(3).long(), torch.zeros(3, 5).bool())}

    pool = synthetic_pool(batch, 8, classes=3)

    for leaf, given in zip(leaves_of(pool), leaves_of(batch), strict=True):
        assert leaf.dtype == given.dtype
        assert leaf.shape == (8, *given.shape[1:])
        assert all((leaf[i] != leaf[i + 4]).any() for i in range(4))
    assert set(pool["y"][0].tolist()) == {0, 1, 2}
    assert pool["y"][1].any(1).all()


STEPS, BLANK = 9, 5


class Speech(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.ctc = nn.Linear(4, 6), nn.CTCLoss(blank=BLANK)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, *rest = batch
        return self.ctc(self.net(x).log_softmax(2).transpose(0, 1), *rest)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Witness(TorchFunctionMode):
    """Notes the input lengths and labels that reach the loss."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.labels: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.ctc_loss:
            self.lengths += args[2].tolist()
            self.labels += args[1].flatten().tolist()
        return func(*args, **(kwargs or {}))


def records(n: int = 8) -> TensorDataset:
    lengths = torch.full((n,), STEPS), torch.full((n,), 3)
    return TensorDataset(torch.randn(n, STEPS, 4), torch.randint(5, (n, 3)), *lengths)


def probe() -> None:
    assert probe_isolation(Speech(), records()[:]).outcome == "isolated"


def measure() -> None:
    privacy = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-5)
    loader = DataLoader(records(), batch_size=4)
    measure_memory(Speech(), loader, privacy, trainer={"accelerator": "cpu"}, sizes=(2, 4))


def try_at_a_client() -> None:
    LocalRecords(Speech(), records()).try_once()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("run", [probe, measure, try_at_a_client], ids=lambda run: run.__name__)
def test_made_up_lengths_and_labels_never_reach_ctc(run: Callable[[], None]) -> None:
    with Witness() as seen:
        run()

    assert set(seen.lengths) == {STEPS}  # made-up ones are 0, 1, ...
    assert seen.labels and 0 <= min(seen.labels) <= max(seen.labels) < 6
    assert BLANK not in seen.labels


CTC = """
import sys, torch, lightning as L
from torch import nn
from lightning_dp.isolation import probe_isolation
kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
class Speech(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 6)
        self.ctc = nn.CTCLoss(blank=5)
    def training_step(self, batch, batch_idx):
        x, y, lengths, target_lengths = batch
        if kind == "concatenated":
            y = torch.cat([row[:n] for row, n in zip(y, target_lengths)])
        return self.ctc(self.net(x).log_softmax(2).transpose(0, 1), y, lengths, target_lengths)
n = 4
y = torch.zeros(n, 3, dtype=dtype)
ones = torch.ones(n, dtype=dtype)
print(probe_isolation(Speech(), (torch.zeros(n, 9, 5), y, 9 * ones, 3 * ones)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["padded", "concatenated"])
def test_ctc_does_not_end_the_process(kind, dtype):
    done = subprocess.run(
        [sys.executable, "-c", CTC, kind, dtype], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "probed, isolated" in done.stdout
