"""False alarms: comparisons of ordinary models on real records, of which none may find a coupling.

    python benchmarks/false_alarms.py                                # a few minutes
    python benchmarks/false_alarms.py --count 432 --workers 16       # over 10,000 comparisons
    python benchmarks/false_alarms.py --first 432 --count 432        # others

Fit number i trains one of the models on batches of 16, 64 or 256 records with C = 0.1, 1 or 10, in
float32 or bf16-mixed, with dropout, batches that are sorted, and sequences that are padded to the longest
one. Records are scikit-learn's digits and the lines of this project's documentation. "alarms" counts
fits that a comparison or the dry run has ended; "not compared" are those that could say nothing of the
gradients, with the reasons below the table.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from opacus.layers import DPLSTM
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from lightning_dp import DifferentialPrivacy

STEPS, BATCHES, LONGEST, WIDTH = 48, 2, 40, 32
SIZES, NORMS, PRECISIONS = (16, 64, 256), (0.1, 1.0, 10.0), ("32-true", "bf16-mixed")
_REASON = re.compile(r"(?:not compared: |\); )(.*?) \((\d+)(?=\))")


class Module(L.LightningModule):
    """Cross-entropy of what a network makes of a batch's first part."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Sorts(Module):
    """Sorts the records of a batch by their sum."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        order = batch[0].flatten(1).sum(1).argsort()
        return super().training_step([batch[0][order], batch[1][order]], batch_idx)


class Predicts(Module):
    """The next byte of a line; each line has the mean over its own."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        losses = F.cross_entropy(self.net(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
        real = x[:, 1:] != 0
        return ((losses * real).sum(1) / real.sum(1).clamp(min=1)).mean()


class Bytes(nn.Module):
    """An embedding, a body that may be given the mask of the padding, and a head."""

    def __init__(self, body: nn.Module, *, out: int = 2, masked: bool = False, each: bool = False):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(256, WIDTH), body, nn.Linear(WIDTH, out)
        self._masked, self._each = masked, each

    def forward(self, x: Tensor) -> Tensor:
        real = x != 0
        h = self.body(
            self.embedding(x), **({"src_key_padding_mask": ~real} if self._masked else {})
        )
        h = h[0] if isinstance(h, tuple) else h
        if self._each:
            return self.head(h)
        return self.head((h * real[:, :, None]).sum(1) / real.sum(1, keepdim=True))


class Attention(nn.Module):
    """A block with attention, made of linear layers, in which padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        seen = ~src_key_padding_mask[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.norm(x + self.dropout(self.out(attended.transpose(1, 2).flatten(2))))


def mlp() -> nn.Module:
    hidden = (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Dropout2d(0.2)),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.GELU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)


@cache
def digits() -> list[Any]:
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return list(zip(x, torch.tensor(y), strict=True))


@cache
def lines() -> list[Any]:
    """Lines of text as bytes, each with its own length; the classes: does it begin with a capital?"""
    folder = Path(__file__).resolve().parents[1] / "docs"
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.md"))]
    rows = [line.strip().encode()[:LONGEST] for text in texts for line in text.splitlines()]
    return [
        (torch.tensor(list(row)), torch.tensor(int(row[:1].isupper())))
        for row in rows
        if len(row) > 2
    ]


def padded(rows: list[Any]) -> Any:
    x, y = zip(*rows, strict=True)
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.stack(y)


def sorted_by_length(rows: list[Any]) -> Any:
    return padded(sorted(rows, key=lambda row: -len(row[0])))


def sorted_by_sum(rows: list[Any]) -> Any:
    return default_collate(sorted(rows, key=lambda row: float(row[0].sum())))


@dataclass(frozen=True)
class Ordinary:
    """A module that keeps records apart, its records, and how they become a batch."""

    make: Callable[[], Module]
    records: Callable[[], list[Any]] = digits
    collate: Callable[[list[Any]], Any] = default_collate


ORDINARY = {
    "MLP, dropout": Ordinary(lambda: Module(mlp())),
    "MLP, sorted by collate_fn": Ordinary(lambda: Module(mlp()), collate=sorted_by_sum),
    "MLP, sorted in training_step": Ordinary(lambda: Sorts(mlp())),
    "CNN, dropout": Ordinary(lambda: Module(cnn())),
    "bag of bytes, padded": Ordinary(
        lambda: Module(Bytes(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))), lines, padded
    ),
    "attention, padded": Ordinary(lambda: Module(Bytes(Attention(), masked=True)), lines, padded),
    "transformer, sorted by length": Ordinary(
        lambda: Module(Bytes(transformer(), masked=True)), lines, sorted_by_length
    ),
    "LSTM, padded": Ordinary(
        lambda: Module(Bytes(DPLSTM(WIDTH, WIDTH, batch_first=True))), lines, padded
    ),
    "language model, padded": Ordinary(
        lambda: Predicts(Bytes(DPLSTM(WIDTH, WIDTH, batch_first=True), out=256, each=True)),
        *(lines, padded),
    ),
}
CASES = [(name, precision) for precision in PRECISIONS for name in ORDINARY]


@dataclass
class Found:
    """Findings of the comparisons of one fit, or of several."""

    passed: int = 0
    alarms: list[str] = field(default_factory=list)
    not_compared: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def made(self) -> int:
        return self.passed + len(self.alarms) + self.not_compared.total()

    def add(self, other: Found) -> None:
        self.passed, self.seconds = self.passed + other.passed, self.seconds + other.seconds
        self.alarms += other.alarms
        self.not_compared += other.not_compared


def fit(number: int) -> Found:
    """Train once with all checks on, and count."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(number)
    turn, (name, precision) = number // len(CASES), CASES[number % len(CASES)]
    case, size = ORDINARY[name], SIZES[turn % 3]
    chosen = torch.randperm(len(case.records()))[: BATCHES * size].tolist()
    found, begin = Found(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        privacy = DifferentialPrivacy(
            noise_multiplier=1.0,
            max_grad_norm=NORMS[turn // 3 % 3],
            target_delta=1e-6,
            ledger_dir=folder,
        )
        trainer = L.Trainer(
            accelerator="cpu",
            precision=precision,
            max_steps=STEPS,
            callbacks=[privacy],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        data = [case.records()[i] for i in chosen]
        try:
            trainer.fit(case.make(), DataLoader(data, size, shuffle=True, collate_fn=case.collate))
        except Exception as error:
            found.alarms.append(f"fit {number}, {name}, {precision}: {error}"[:300])
        said = privacy.report().spot_checks
    found.passed = max(0, int(re.findall(r"passed at (\d+)", said)[0]) - len(found.alarms))
    found.not_compared = Counter({reason: int(n) for reason, n in _REASON.findall(said)})
    found.seconds = time.process_time() - begin
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first fit")
    parser.add_argument("--count", type=int, default=len(CASES), help="of fits")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.count)
    by_case: dict[tuple[str, str], Found] = {case: Found() for case in CASES}
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for number, found in zip(numbers, pool.imap(fit, numbers), strict=True):
            by_case[CASES[number % len(CASES)]].add(found)
    whole = Found()
    print(f"{'model':32s}{'precision':>12s}{'comparisons':>13s}{'not compared':>14s}{'alarms':>8s}")
    for (name, precision), found in [*by_case.items(), (("all", ""), whole)]:
        counts = f"{found.made:13d}{found.not_compared.total():14d}{len(found.alarms):8d}"
        print(f"{name:32s}{precision:>12s}{counts}")
        if found is not whole:
            whole.add(found)
    for reason, count in whole.not_compared.most_common():
        print(f"not compared, {count}: {reason}")
    print(f"{whole.seconds / max(whole.made, 1):.3f} s of one thread for each comparison")
    print(f"{len(whole.alarms)} false alarms", *whole.alarms, sep="\n")


if __name__ == "__main__":
    main()
