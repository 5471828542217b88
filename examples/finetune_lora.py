"""Fine-tune a small transformer privately: adapters beside a frozen backbone.

    python examples/finetune_lora.py

Rows of scikit-learn's digits are the tokens. The digits 0 to 4, turned and mirrored, are public and
train a transformer without privacy; the digits 5 to 9 are private. At the same ε it compares a
private training from scratch with three ways to fine-tune: all weights, low-rank adapters (LoRA, Hu
et al. 2021, https://arxiv.org/abs/2106.09685) with a new head, and the new head alone. Takes less
than two minutes on two cores and downloads nothing; a picture goes to ./outputs/finetune_lora.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting import epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy

TARGET_EPSILON = 1.0
TARGET_DELTA = 1e-4  # 7 times below 1 / N
MAX_GRAD_NORM = 1.0
BATCH_SIZE, EPOCHS = 128, 30
PUBLIC_EPOCHS, PUBLIC_LEARNING_RATE = 10, 0.003
WIDTH, LAYERS, CLASSES, RANK = 32, 2, 5, 4
OUTPUT = Path("outputs/finetune_lora")
# learning rate of Adam, the better of two (seed 0)
WAYS = {"from scratch": 0.01, "all weights": 0.01, "LoRA and head": 0.01, "head only": 0.03}


class Transformer(nn.Module):
    """Reads an image of 8 x 8 pixels row by row."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.position = nn.Embedding(8, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(8, device=x.device).expand(len(x), 8)  # of each record
        return self.head(self.encoder(self.embed(x) + self.position(rows)).mean(1))


class LoRA(nn.Module):
    """A frozen linear layer W x + b, plus B A x of low rank; B = 0 at the start."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Classifier(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows about privacy."""

    def __init__(self, net: Transformer, learning_rate: float) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate
        self.history: list[tuple[float, float]] = []  # ε and accuracy of each epoch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def on_validation_end(self) -> None:
        metrics = self.trainer.callback_metrics
        epsilon = float(metrics.get("privacy/epsilon", 0.0))
        self.history.append((epsilon, float(metrics["accuracy"])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.Adam(trained, lr=self.learning_rate)


def prepare(way: str, public: Transformer) -> Transformer:
    """The network to train privately: what is frozen before fit stays as it is."""
    if way == "from scratch":
        return Transformer(CLASSES)
    net = copy.deepcopy(public)
    if way != "all weights":
        net.requires_grad_(False)
    if way == "LoRA and head":
        for layer in net.encoder.layers:
            layer.linear1, layer.linear2 = LoRA(layer.linear1, RANK), LoRA(layer.linear2, RANK)
    net.head = nn.Linear(WIDTH, CLASSES)  # for other classes
    return net


def digits(classes: range, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """About 700 training and 200 test images of these classes."""
    data = load_digits()
    chosen = (data.target >= classes[0]) & (data.target <= classes[-1])
    images, labels = data.images[chosen], data.target[chosen] - classes[0]
    parts = train_test_split(images, labels, test_size=200, random_state=seed, stratify=labels)
    x_train, x_test = (torch.tensor(x / 8 - 1).float() for x in parts[:2])
    y_train, y_test = (torch.tensor(y) for y in parts[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def turned(data: TensorDataset) -> TensorDataset:
    """Each image in 8 positions; which one it is belongs to the class."""
    x, y = data.tensors
    images = [torch.rot90(flipped, k, (1, 2)) for flipped in (x, x.flip(2)) for k in range(4)]
    return TensorDataset(torch.cat(images), torch.cat([8 * y + position for position in range(8)]))


def pretrain(seed: int, epochs: int, folder: str) -> Transformer:
    """The public backbone: 8 positions of 5 digits are 40 classes."""
    public = Classifier(Transformer(8 * CLASSES), PUBLIC_LEARNING_RATE)
    train, test = digits(range(0, 5), seed)
    fit(public, (turned(train), turned(test)), epochs, [], folder)
    return public.net


def fit(
    model: Classifier,
    data: tuple[TensorDataset, TensorDataset],
    epochs: int,
    callbacks: list[L.Callback],
    folder: str,
) -> None:
    train, test = data
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    loader = DataLoader(train, batch_size=BATCH_SIZE, shuffle=True)
    trainer.fit(model, loader, DataLoader(test, batch_size=len(test)))


@dataclass
class Result:
    """All seeds of one way: number of trained weights, final ε, and (ε, accuracy) by epoch."""

    weights: int = 0
    epsilon: float = 0.0
    histories: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def accuracies(self) -> list[float]:
        return [history[-1][1] for history in self.histories]


def compare(target_epsilon: float, seeds: int, epochs: int, folder: str) -> dict[str, Result]:
    """Every way of WAYS, ``seeds`` times."""
    results = {way: Result() for way in WAYS}
    for seed in range(seeds):
        L.seed_everything(seed, verbose=False)  # weights and splits: noise never depends on it
        public = pretrain(seed, min(epochs, PUBLIC_EPOCHS), folder)
        for way, result in results.items():
            model = Classifier(prepare(way, public), WAYS[way])
            privacy = DifferentialPrivacy(
                target_epsilon=target_epsilon,
                target_delta=TARGET_DELTA,
                max_grad_norm=MAX_GRAD_NORM,
            )
            fit(model, digits(range(5, 10), seed), epochs, [privacy], folder)
            result.weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
            result.epsilon = privacy.epsilon
            result.histories.append(model.history)
    return results


def draw(results: dict[str, Result], path: Path) -> None:
    """Mean accuracy over the seeds, and its range, as ε is spent."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for way, result in results.items():
        epsilon = [epsilon for epsilon, _ in result.histories[0]]
        columns = zip(*result.histories, strict=True)
        of_epoch = [[accuracy for _, accuracy in column] for column in columns]
        axis.plot(epsilon, [statistics.mean(column) for column in of_epoch], label=way)
        low, high = map(min, of_epoch), map(max, of_epoch)
        axis.fill_between(epsilon, list(low), list(high), alpha=0.2)
    axis.set(xlabel=f"ε spent, at δ = {TARGET_DELTA:g}", ylabel="held-out accuracy", ylim=(0, 1))
    axis.set_title("Digits 5 to 9, private; digits 0 to 4 were public")
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=TARGET_EPSILON, help="budget of each fit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of each private fit")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the picture")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # a network this small runs slower on several cores
    # In evaluation the fused layer would read linear1.weight, and miss what LoRA adds to it.
    torch.backends.mha.set_fastpath_enabled(False)

    with tempfile.TemporaryDirectory() as folder:  # of the journals: to compare, not to publish all
        results = compare(options.epsilon, options.seeds, options.epochs, folder)
    print(f"accuracy on 200 private test images, ε = {options.epsilon:g} for each fit")
    for way, result in results.items():
        of_seeds = result.accuracies
        print(
            f"  {way:14} {result.weights:6,} weights   {statistics.mean(of_seeds):.1%} "
            f"({min(of_seeds):.1%} to {max(of_seeds):.1%})   at ε = {epsilon_text(result.epsilon)}"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / "finetune_lora.png"
    draw(results, picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
