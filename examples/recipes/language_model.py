"""A small causal language model: pre-trained on public text, fine-tuned privately with LoRA.

    python examples/recipes/language_model.py

GPT-2's architecture with characters as tokens learns from Python's documentation, which is public here.
Low-rank adapters then learn from the source code of its standard library, which stands for private text.
A record is a piece of 32 characters: ε protects one piece, not all that one author wrote. Needs
``transformers`` and ``peft``.
"""

from __future__ import annotations

import copy
import math

import lightning as L
import numpy as np
import torch
from common import Learner, Way, compare, read_options, train_and_test
from data import data_sets
from peft import LoraConfig, get_peft_model
from texts import PACKAGES, documentation, source_lines
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, CHARACTERS, UNKNOWN = 32, 128, 0
RECORDS, TEST_RECORDS = 4096, 1000
PUBLIC = Way(1, 32, 0.003, optimizer=torch.optim.AdamW)
PRIVATE = Way(6, 512, 0.005, 0.5, torch.optim.AdamW)
PLAIN = Way(2, 64, 0.005, optimizer=torch.optim.AdamW)


class NextCharacter(nn.Module):
    """Scores (n, CHARACTERS, LENGTH) of what follows each character (n, LENGTH)."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt(input_ids=x).logits.transpose(1, 2)


def losses(scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each record: the mean over its characters."""
    return nn.functional.cross_entropy(scores, y, reduction="none").mean(1)


class LanguageModel(Learner):
    """The mean over records, and on test records in bits per character."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return losses(self(x), y).mean()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("bits", losses(self(x), y).mean() / math.log(2))


def network() -> NextCharacter:
    config = GPT2Config(
        vocab_size=CHARACTERS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return NextCharacter(GPT2LMHeadModel(config))


def adapted(public: NextCharacter) -> NextCharacter:
    """A copy whose weights are frozen, with trained adapters next to them."""
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )
    return NextCharacter(get_peft_model(copy.deepcopy(public.gpt), lora))


def windows(text: str) -> tuple[Tensor, Tensor]:
    """Pieces of a text in a random order, and the same one character later (n, LENGTH)."""
    codes = np.array([ord(c) if ord(c) < CHARACTERS else UNKNOWN for c in text])
    count = (len(codes) - 1) // LENGTH
    order = np.random.default_rng(0).permutation(count)
    found = [codes[at : at + count * LENGTH].reshape(count, LENGTH)[order] for at in (0, 1)]
    return torch.tensor(found[0]), torch.tensor(found[1])


def main() -> None:
    options = read_options(__file__, __doc__, seeds=1)
    code = "\n".join(line for package in PACKAGES for line in source_lines(package))
    x, y = windows(code)
    at = options.limit or RECORDS
    private = data_sets((x[:at], y[:at], x[-TEST_RECORDS:], y[-TEST_RECORDS:]))
    x, y = (part[: options.limit] for part in windows(documentation()))
    L.seed_everything(0, verbose=False)
    teacher = LanguageModel(network(), PUBLIC)
    train_and_test(teacher, data_sets((x, y, x[:100], y[:100])), PUBLIC, None)

    compare(
        "code, small GPT-2 with LoRA, bits per character (less is better)",
        "bits",
        lambda way: LanguageModel(adapted(teacher.net), way),
        private,
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
