"""GPT-2 learns private text: all weights or LoRA, with privacy and without, side by side.

    python examples/recipes/language_model.py --small    # minutes on two cores
    python examples/recipes/language_model.py            # GPT-2's size: for a GPU

Nothing is downloaded. Public text is Python's documentation: tokens are made of it, and a network of
GPT-2's architecture learns it first. Private text are the functions of Python's standard library, in
whose place yours go. A record is one function, cut to its first tokens: ε protects one function, not all
that one author wrote. Needs ``transformers`` and ``peft``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from texts import documentation, functions
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_dp import Checks, DifferentialPrivacy, losses_of_records

EPSILON, DELTA, CLIP_NORM = 7.0, 1e-5, 0.5
IGNORED = -100  # a label that is padding
ENDS = "<|endoftext|>"
MEMORY = Path("/proc/self/status")  # of Linux


@dataclass(frozen=True)
class Form:
    """Sizes of the model, the texts and the training.

    Args:
        layers, heads, width, vocabulary: of GPT-2.
        merges: tokens that are made of the public text.
        length: tokens of a record, at most.
        records, test: how many of the private text.
        epochs, batch, chunk: of the private training; a batch is the sum of such chunks.
        public_epochs: over the public text.
        rates: learning rates of public training, of all weights, and of LoRA.
        precision: of the Trainer.
    """

    layers: int
    heads: int
    width: int
    vocabulary: int
    merges: int
    length: int
    records: int
    test: int
    epochs: int
    batch: int
    chunk: int
    public_epochs: int
    rates: tuple[float, float, float]
    precision: Any = "32-true"
    is_checked: bool = True


GPT2 = Form(
    layers=12, heads=12, width=768, vocabulary=50257, merges=8192, length=128,
    records=12000, test=900, epochs=20, batch=2048, chunk=32, public_epochs=10,
    rates=(3e-4, 1e-4, 1e-3), precision="bf16-mixed",
)  # fmt: skip
SMALL = Form(
    layers=2, heads=4, width=64, vocabulary=1024, merges=1024, length=32,
    records=4096, test=900, epochs=6, batch=512, chunk=128, public_epochs=6,
    rates=(3e-3, 1e-3, 5e-3),
)  # fmt: skip
SMALLEST = replace(
    SMALL, merges=300, length=16, records=96, test=16, epochs=1, batch=32, chunk=16, public_epochs=0,
    is_checked=False,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Results of one run.

    Args:
        loss: of a token of the test records, in nats.
        step: median seconds of an optimizer step; without a GPU, of the CPU.
        memory: that the training took at most, above what was there before it, in MiB; None off Linux.
        epsilon: that it spent.
    """

    loss: float
    step: float
    memory: float | None
    epsilon: float


class LanguageModel(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows about privacy."""

    def __init__(self, net: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate

    def losses(self, batch: list[Tensor]) -> Tensor:
        """The loss of each record: the mean over its own tokens."""
        tokens, labels = batch  # padding on the right changes nothing that comes before it
        return losses_of_records(self.net(input_ids=tokens).logits, labels, shift=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.losses(batch).mean()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        weight = (batch[1][:, 1:] != IGNORED).sum(1)
        loss = (self.losses(batch) * weight).sum() / weight.sum()
        self.log("loss", loss, batch_size=int(weight.sum()))  # of a token, over all batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.learning_rate, weight_decay=0.0)


class Watch(L.Callback):
    """Times optimizer steps, from one to the next."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *unused: Any) -> None:
        if trainer.global_step > len(self.times):
            is_gpu = torch.cuda.is_available()
            self.times.append(time.perf_counter() if is_gpu else time.process_time())

    @property
    def step(self) -> float:
        return statistics.median(map(float.__sub__, self.times[1:], self.times[:-1]))


def network(form: Form) -> nn.Module:
    config = GPT2Config(
        vocab_size=form.vocabulary, n_positions=form.length, n_embd=form.width,
        n_layer=form.layers, n_head=form.heads, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def adapted(net: nn.Module) -> nn.Module:
    """The network with frozen weights, and trained adapters next to them."""
    layers = ["c_attn", "c_proj", "c_fc"]
    return get_peft_model(
        net, LoraConfig(r=8, lora_alpha=16, target_modules=layers, fan_in_fan_out=True)
    )


def token_maker(form: Form) -> ByteLevelBPETokenizer:
    """Learned from public text alone: tokens of private text would be a release without noise."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        documentation().splitlines(), form.merges, special_tokens=[ENDS], show_progress=False
    )
    return made


def padded(rows: list[list[int]], length: int) -> TensorDataset:
    """Tokens (n, length), and labels that ignore the padding."""
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    for i, row in enumerate(rows):
        found = torch.tensor(row[:length])
        tokens[i, : len(found)] = labels[i, : len(found)] = found
    return TensorDataset(tokens, labels)


def private_text(form: Form, maker: ByteLevelBPETokenizer) -> tuple[TensorDataset, TensorDataset]:
    """Training and test records."""
    size = form.records + form.test
    texts = list(functions() if size > 1000 else islice(functions(), size))
    order = np.random.default_rng(0).permutation(len(texts))[:size]
    rows = [each.ids for each in maker.encode_batch([texts[i] for i in order])]
    return padded(rows[form.test :], form.length), padded(rows[: form.test], form.length)


def public_text(form: Form, maker: ByteLevelBPETokenizer) -> TensorDataset:
    ids, size = maker.encode(documentation()).ids, form.length
    return padded([ids[i : i + size] for i in range(0, len(ids) - size, size)], size)


def trainer(
    form: Form, epochs: int, folder: str, *callbacks: L.Callback, chunks: int = 1
) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs, accelerator="auto", devices=1, precision=form.precision,
        accumulate_grad_batches=chunks, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        default_root_dir=folder,
    )  # fmt: skip


def pretrained(form: Form, maker: ByteLevelBPETokenizer) -> dict[str, Tensor]:
    """Weights that know the public text."""
    L.seed_everything(0, verbose=False)
    net = network(form)
    with tempfile.TemporaryDirectory() as folder:
        loader = DataLoader(public_text(form, maker), min(32, form.chunk), shuffle=True)
        trainer(form, form.public_epochs, folder).fit(LanguageModel(net, form.rates[0]), loader)
    return net.cpu().state_dict()


def prepare() -> None:
    """Be quiet; and leave CPUs to others, so that a table says the same next to other work."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def run(
    form: Form,
    data: str,
    *,
    lora: bool,
    epsilon: float | None,
    seed: int,
    epochs: int | None = None,
) -> Outcome:
    """Train once; on a CPU in a separate process, so that its memory can be measured."""
    prepare()
    L.seed_everything(seed, verbose=False)  # not of noise and batches
    weights, train, test = torch.load(data, weights_only=False)
    net = network(form)
    net.load_state_dict(weights)
    del weights
    model = LanguageModel(adapted(net) if lora else net, form.rates[2 if lora else 1]).train()
    checks = {} if form.is_checked else {"checks": Checks(dry_run=False, comparisons=False)}
    privacy = DifferentialPrivacy(
        epsilon or EPSILON, target_delta=DELTA, max_grad_norm=CLIP_NORM, **checks
    )
    watch = Watch()
    callbacks = [watch] if epsilon is None else [watch, privacy]
    with tempfile.TemporaryDirectory() as folder:
        chunks = form.batch // form.chunk
        fitting = trainer(
            form, form.epochs if epochs is None else epochs, folder, *callbacks, chunks=chunks
        )
        begun = peak_memory(begin=True)
        fitting.fit(model, DataLoader(train, form.chunk, shuffle=True))
        took = peak_memory()
        (found,) = fitting.test(model, DataLoader(test, form.chunk), verbose=False)
    memory = None if begun is None or took is None else took - begun
    spent = 0.0 if epsilon is None else privacy.epsilon
    return Outcome(found["loss"], watch.step if watch.times[1:] else 0.0, memory, spent)


def peak_memory(*, begin: bool = False) -> float | None:
    """Memory that was in use at most since the beginning, in MiB: of the GPU, or of this process."""
    if torch.cuda.is_available():
        if begin:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**20
    if not MEMORY.exists():
        return None
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (each for each in MEMORY.read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def alone(*args: Any, **kwargs: Any) -> Outcome:
    if torch.cuda.is_available():  # whose allocator counts
        return run(*args, **kwargs)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *args, **kwargs).result()


def table(start: float, runs: dict[str, list[Outcome]]) -> str:
    """Markdown: means over the runs, and ranges."""
    lines = [
        "| trained | ε | test loss | perplexity | s / step | memory, MiB |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| on public text only | 0 | {start:.3f} | {math.exp(start):.1f} | | |",
    ]
    for name, found in runs.items():
        losses = [each.loss for each in found]
        mean, spread = statistics.mean(losses), f"{min(losses):.3f} to {max(losses):.3f}"
        memory = [each.memory for each in found if each.memory is not None]
        cells = [
            name,
            f"{found[0].epsilon:.3f}" if found[0].epsilon else "∞",
            f"{mean:.3f} ({spread})",
            f"{math.exp(mean):.1f}",
            f"{statistics.median(each.step for each in found):.2f}",
            f"{statistics.median(memory):.0f}" if memory else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_const", const=SMALL, dest="form", default=GPT2)
    size.add_argument("--smallest", action="store_const", const=SMALLEST, dest="form")
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="budget of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--precision", help="of the Trainer; 16-mixed for a GPU without bfloat16")
    parser.add_argument("--epochs", type=int, help="of the private training")
    parser.add_argument("--public-epochs", type=int, help="over the public text")
    parser.add_argument("--chunk", type=int, help="records that go through the model together")
    parser.add_argument("--output", type=Path, default=Path("outputs/recipes"))
    options = parser.parse_args()
    given = {
        key: getattr(options, key) for key in ("precision", "epochs", "public_epochs", "chunk")
    }
    form = replace(options.form, **{key: each for key, each in given.items() if each is not None})
    prepare()
    maker = token_maker(form)
    runs: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "data.pt"))
        torch.save((pretrained(form, maker), *private_text(form, maker)), data)
        start = alone(form, data, lora=False, epsilon=None, seed=0, epochs=0).loss
        print(f"before the private text: {start:.3f}", flush=True)
        for name, lora in (("all weights", False), ("LoRA", True)):
            for way, epsilon in (("private", options.epsilon), ("plain", None)):
                key = f"{name}, {way}"
                for seed in range(options.seeds):
                    found = alone(form, data, lora=lora, epsilon=epsilon, seed=seed)
                    runs.setdefault(key, []).append(found)
                    print(f"{key}, seed {seed}: {found}", flush=True)
    print(table(start, runs))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "language_model.json"
    saved = {key: [asdict(each) for each in found] for key, found in runs.items()}
    path.write_text(json.dumps({"start": start, "runs": saved}, indent=1), "utf-8")
    print(f"saved: {path}")


if __name__ == "__main__":
    main()
