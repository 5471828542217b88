"""Fine-tune GPT-2 privately with low-rank adapters (LoRA), by LightningCLI.

    python examples/gpt2/train.py fit --config examples/gpt2/lora.yaml
    python examples/gpt2/train.py fit --config examples/gpt2/lora.yaml --model.name gpt2

The first line takes half a minute and downloads nothing: a network of GPT-2's shape with random weights,
which stand for those of the hub. The second one loads GPT-2 itself. The sequences of tokens are made
here, of different lengths; yours take their place in ``Sequences``. Needs ``transformers`` and ``peft``.

A record is one sequence, and its loss is the mean over its own tokens. The loss that transformers
computes from ``labels`` is a mean over all tokens of the batch: how much a record counts in it depends on
how long the others are, so clipping its gradient would not bound what it does,
unless each record runs alone.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lightning_dp import losses_of_records
from lightning_dp.callbacks import DifferentialPrivacy

IGNORED = -100  # a label that is padding
VOCABULARY = 64


def backbone(name: str | None) -> nn.Module:
    """GPT-2 from the hub, or a small one whose weights are always the same random ones."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)


class LanguageModel(L.LightningModule):
    """A frozen network, and adapters beside its attention and feed-forward layers.

    Args:
        name: of a GPT-2 on the hub; None for a small one with random weights.
        rank: of the adapters.
    """

    def __init__(self, name: str | None = None, rank: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = ["c_attn", "c_proj", "c_fc"]
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=2 * rank,
            target_modules=layers,
            fan_in_fan_out=True,
        )
        self.net = get_peft_model(backbone(name), config)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of each record: the mean over its own tokens."""
        logits = self.net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return losses_of_records(logits, batch["labels"], shift=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.losses(batch).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch).mean(), prog_bar=True)


class Sequences(L.LightningDataModule):
    """Sequences of tokens, each of which follows from the one before with few exceptions.

    Args:
        batch_size: the expected number of records in a batch.
        records: in the training set.
    """

    def __init__(self, batch_size: int = 64, records: int = 1024) -> None:
        super().__init__()
        self.batch_size, self.records = batch_size, records

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        successor = torch.randperm(VOCABULARY, generator=generator)
        sequences = [_sequence(successor, generator) for _ in range(self.records + 128)]
        self.train, self.held_out = sequences[: self.records], sequences[self.records :]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=padded)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.held_out, 128, collate_fn=padded)


def _sequence(successor: Tensor, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(
        VOCABULARY, (int(torch.randint(8, 25, (), generator=generator)),), generator=generator
    )
    for i in range(1, len(tokens)):
        if torch.rand((), generator=generator) < 0.9:
            tokens[i] = successor[tokens[i - 1]]
    return tokens


def padded(sequences: list[Tensor]) -> dict[str, Tensor]:
    """One row for each sequence."""
    mask = pad_sequence([torch.ones_like(each) for each in sequences], batch_first=True)
    return {
        "input_ids": pad_sequence(sequences, batch_first=True),
        "attention_mask": mask,
        "labels": pad_sequence(sequences, batch_first=True, padding_value=IGNORED),
    }


class PrivateCLI(LightningCLI):
    """LightningCLI; after a fit it prints what was spent, and saves the adapters and loads them again."""

    def after_fit(self) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, DifferentialPrivacy):
                print(callback.report())
        print(f"checkpoint: {self.trainer.checkpoint_callback.best_model_path}")
        folder = Path(self.trainer.log_dir) / "adapters"
        self.model.net.save_pretrained(folder)  # what was trained; the rest is public
        self.model.net = PeftModel.from_pretrained(backbone(self.model.hparams.name), folder)
        (result,) = self.trainer.validate(self.model, self.datamodule, verbose=False)
        print(f"loss on held-out sequences with the adapters in {folder}: {result['val_loss']:.3f}")


def main(args: ArgsType = None) -> PrivateCLI:
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # a network this small runs slower on several cores
    return PrivateCLI(
        LanguageModel,
        Sequences,
        args=args,
        seed_everything_default=0,  # adapters only: noise and batches never depend on it
        trainer_defaults={
            "accelerator": "auto",
            "devices": 1,
            "default_root_dir": "outputs/gpt2",
            "enable_model_summary": False,
        },
    )


if __name__ == "__main__":
    main()
