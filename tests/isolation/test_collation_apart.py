"""Collate functions that mix no samples pass, and padding to the longest one is told."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import default_collate

from lightning_dp.isolation.collation import check_collate_fn
from tests.isolation.samples import IMAGE, SAMPLE, SOURCE


def padded(samples):
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in samples])
    return x, torch.tensor([y for _, y in samples]), lengths


def padded_left(samples):
    longest = max(len(x) for x, _ in samples)
    x = torch.stack([torch.nn.functional.pad(x, (longest - len(x), 0)) for x, _ in samples])
    return x, x != 0


def sorted_by_length(samples):
    samples.sort(key=lambda sample: -len(sample[0]))
    return padded(samples)


def packed_sequence(samples):
    x = pack_sequence([x for x, _ in samples], enforce_sorted=False)
    return x, torch.tensor([y for _, y in samples])


def time_major(samples):
    return pad_sequence([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def causal_mask(samples):
    x, y, lengths = padded(samples)
    size = x.shape[1]
    key = torch.arange(size) < lengths[:, None]
    return x, key[:, None, :] & torch.ones(size, size, dtype=torch.bool).tril(), y


def multiple_of_eight(samples):
    x, y, _ = padded(samples)
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8)), y


def at_most_six(samples):
    x, y, _ = padded([(x[:6], y) for x, y in samples])
    return x, y


def dynamic_padding(samples):
    """Padding, done as data collators of transformers do it."""
    longest = max(len(s["input_ids"]) for s in samples)
    batch = collections.UserDict()
    for name in samples[0]:
        rows = [list(s[name]) + [0] * (longest - len(s[name])) for s in samples]
        batch[name] = torch.tensor(rows)
    return batch


def masked_tokens(samples):
    batch = dynamic_padding(samples)
    labels = batch["input_ids"].clone()
    chosen = torch.bernoulli(torch.full(labels.shape, 0.3)).bool()
    labels[~chosen] = -100
    batch["labels"], batch["input_ids"] = labels, batch["input_ids"].masked_fill(chosen, 1)
    return batch


def masked_word_by_word(samples):
    for sample in samples:
        sample["labels"] = [t if random.random() < 0.2 else -100 for t in sample["input_ids"]]
    return dynamic_padding(samples)


def trimmed_to_the_longest(samples):
    ids = torch.tensor([s["input_ids"] for s in samples])
    mask = torch.tensor([s["attention_mask"] for s in samples])
    return ids[:, : int(mask.sum(1).max()) + 1], mask[:, : int(mask.sum(1).max()) + 1]


def own_pops(samples):
    labels = [s.pop("label") for s in samples]
    return {**default_collate(samples), "label": torch.tensor(labels)}


def words(samples):
    lists = [[len(word) for word in s["text"].split()] for s in samples]
    longest = max(map(len, lists))
    ids = torch.tensor([each + [0] * (longest - len(each)) for each in lists])
    return ids, [s["text"] for s in samples]


def labels_by_name(samples):
    return torch.tensor([{"cat": 0, "dog": 1}[s["label"]] for s in samples]), torch.stack(
        [s["x"] for s in samples]
    )


def images(samples):
    arrays = [np.asarray(x.resize((8, 8)).convert("RGB"), np.float32) / 255 for x, _ in samples]
    return torch.from_numpy(np.stack(arrays)), torch.tensor([y for _, y in samples])


def raw_images(samples):
    return tuple(zip(*samples, strict=True))


def detection(samples):
    return torch.stack([x for x, _ in samples]), [target for _, target in samples]


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: int
    name: str = "a"


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


def dataclass(samples):
    return Batch(
        torch.stack([s.x for s in samples]),
        torch.tensor([s.y for s in samples]),
        [s.name for s in samples],
    )


def graphs(samples):
    """Nodes folded into the rows, edges with offsets, as torch_geometric does."""
    nodes = torch.cat([s["x"] for s in samples])
    starts = np.cumsum([0, *(len(s["x"]) for s in samples)])
    edges = [s["edges"] % len(s["x"]) + k for s, k in zip(samples, starts, strict=False)]
    owner = torch.cat([torch.full((len(s["x"]),), i) for i, s in enumerate(samples)])
    batch = types.SimpleNamespace(x=nodes, edges=torch.cat(edges, 1), batch=owner)
    batch.ptr, batch.num_nodes = torch.as_tensor(starts), len(nodes)
    return batch


def noisy(samples):
    x, y = default_collate(samples)
    return x + torch.randn_like(x), y


def one_flip_for_all(samples):
    x, y = default_collate(samples)
    return (x.flip(1) if random.random() < 0.5 else x), y


def two_views(samples):
    x, y = default_collate(samples)
    return torch.cat([x + torch.randn_like(x), x + torch.randn_like(x)]), y


def each_normalised(samples):
    x, y = default_collate(samples)
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), y


def log_only(samples):
    x, y = default_collate(samples)
    print(x.mean())
    return {"x": x, "y": y, "size": len(samples), "source": "train"}


class WithGenerator:
    """Draws from a generator of its own, counts its calls, and can't be pickled."""

    def __init__(self):
        self.generator, self.calls = torch.Generator().manual_seed(1), 0
        self.lock = threading.Lock()

    def __call__(self, samples):
        self.calls += 1
        x, y = default_collate(samples)
        return x + torch.rand(x.shape, generator=self.generator), y


def one_hot(samples):
    x, y = default_collate(samples)
    return x, torch.nn.functional.one_hot(y, 8)


def weighted(samples):
    x, y = default_collate(samples)
    return x, y, torch.linspace(1, 2, 8)[y]


def numpy_batch(samples):
    return np.stack([np.asarray(x) for x, _ in samples]), np.array([y for _, y in samples])


def memoised():
    known = {}

    def collate(samples):
        x, y = default_collate(samples)
        return torch.stack([known.setdefault(float(r.sum()), r.sin()) for r in x]), y

    return collate


TOKENS = {"input_ids": [3, 1, 2, 5, 4], "attention_mask": [1, 1, 1, 1, 1]}
TARGET = {"boxes": torch.zeros(3, 4), "labels": torch.zeros(3, dtype=torch.int64)}
Pair = collections.namedtuple("Pair", "x y")

APART = [
    (default_collate, SAMPLE),
    (default_collate, IMAGE),
    (default_collate, {"x": {"a": torch.zeros(2)}, "y": 0.5, "id": "img0.png"}),
    (default_collate, ({"x": torch.zeros(2)}, {"y": np.float32(1)}, [1, 2])),
    (default_collate, Pair(np.zeros((2, 3), np.float32), np.int64(1))),
    (default_collate, (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64))),
    (default_collate, (torch.zeros(3, dtype=torch.bool), True)),
    (padded, SAMPLE), (padded_left, SAMPLE), (sorted_by_length, SAMPLE),
    (packed_sequence, SAMPLE), (time_major, SAMPLE), (causal_mask, SAMPLE),
    (multiple_of_eight, SAMPLE), (at_most_six, SAMPLE),
    (dynamic_padding, TOKENS), (masked_tokens, TOKENS), (masked_word_by_word, TOKENS),
    (trimmed_to_the_longest, TOKENS),
    (own_pops, {"x": torch.zeros(3), "label": 1}),
    (words, {"text": "a text of words"}),
    (labels_by_name, {"label": "dog", "x": torch.zeros(2)}),
    (images, (Image.new("RGB", (9, 7)), 3)), (images, (Image.new("L", (9, 7)), 3)),
    (raw_images, (Image.new("RGB", (4, 4)), 3)),
    (detection, (torch.zeros(3, 4, 4), TARGET)),
    (dataclass, Example(torch.zeros(3), 1)),
    (graphs, {"x": torch.zeros(4, 3), "edges": torch.zeros(2, 6, dtype=torch.int64)}),
    (noisy, SAMPLE), (one_flip_for_all, IMAGE), (two_views, SAMPLE), (each_normalised, SAMPLE),
    (log_only, SAMPLE), (WithGenerator(), SAMPLE), (one_hot, SAMPLE), (weighted, SAMPLE),
    (numpy_batch, SAMPLE), (memoised(), SAMPLE), (list, SAMPLE), (SOURCE.harmless, SAMPLE),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(APART)))
def test_what_mixes_nothing_passes(number):
    trial = check_collate_fn(*APART[number], 16)

    assert (trial.outcome, trial.reason, trial.drops) == ("apart", "", False)


def to_a_fixed_length(samples):
    x = torch.stack([torch.nn.functional.pad(x[:12], (0, max(0, 12 - len(x)))) for x, _ in samples])
    return x, torch.tensor([y for _, y in samples])


LONGEST = [padded, padded_left, time_major, sorted_by_length, dynamic_padding, causal_mask]


@pytest.mark.parametrize("collate", [*LONGEST, default_collate, to_a_fixed_length, list])
def test_padding_to_the_longest_sample_is_told(collate):
    sample = TOKENS if collate is dynamic_padding else SAMPLE
    trial = check_collate_fn(collate, sample, 16)
    assert (trial.outcome, trial.pads) == ("apart", collate in LONGEST)
