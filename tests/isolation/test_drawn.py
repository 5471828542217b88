"""Data sets whose samples depend on what else was drawn, and data sets whose samples do not."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_dp.isolation.drawn import NotRepeatable, mixes_samples

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


class Plain(Dataset):
    """Rows of X with their labels; state for those below."""

    def __init__(self):
        self.before, self.cursor, self.mean, self.total = None, 0, torch.zeros(3), 0
        self.counts, self.generator = [0] * 20, np.random.default_rng(1)
        self.torch_generator, self.cache = torch.Generator(), {}

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return X[i], Y[i]


class MixedWithTheOneBefore(Plain):
    def __getitem__(self, i):
        x, self.before = X[i] if self.before is None else (X[i] + self.before) / 2, X[i]
        return x, Y[i]


class ByCursor(Plain):
    def __getitem__(self, i):
        self.cursor += 1
        return X[self.cursor % 20], Y[self.cursor % 20]


class MinusTheMeanSoFar(Plain):
    def __getitem__(self, i):
        self.mean = 0.9 * self.mean + 0.1 * X[i]
        return X[i] - self.mean, Y[i]


class WeightedByUse(Plain):
    def __getitem__(self, i):
        self.counts[i] += 1
        return X[i], Y[i], self.counts[i] / sum(self.counts)


class MixedInACall(Plain):
    def __getitems__(self, indices):
        rows = X[indices]
        return list(zip((rows + rows.roll(1, 0)) / 2, Y[indices], strict=True))


class NormalisedInACall(Plain):
    def __getitems__(self, indices):
        rows = X[indices]
        return [(x - rows.mean(0), y) for x, y in zip(rows, Y[indices], strict=True)]


class FirstWins(Plain):
    """The first of a call is in all that follow."""

    def __getitems__(self, indices):
        return [(X[i] + X[indices[0]], Y[i]) for i in indices]


class KeptLabels(Plain):
    """Numbers its labels in the order in which they are seen."""

    def __getitem__(self, i):
        return X[i], self.cache.setdefault(float(X[i, 0]), len(self.cache))


class Nested(Dataset):
    def __init__(self, inner):
        self.parts = {"inner": inner}

    def __len__(self):
        return 20

    def __getitem__(self, i):
        x, *rest = self.parts["inner"][i]
        return {"x": x * 2, "rest": rest}


MIXED = [
    MixedWithTheOneBefore(),
    ByCursor(),
    MinusTheMeanSoFar(),
    WeightedByUse(),
    MixedInACall(),
    NormalisedInACall(),
    FirstWins(),
    KeptLabels(),
    Nested(MinusTheMeanSoFar()),
    Subset(MixedWithTheOneBefore(), range(20)),
    Subset(MixedInACall(), range(20)),
    ConcatDataset([ByCursor(), Plain()]),
]


@pytest.mark.parametrize("number", range(len(MIXED)))
def test_what_depends_on_others_is_seen(number):
    assert mixes_samples(MIXED[number], 4, [7, 12])


@pytest.mark.parametrize("last", [7, 9, 12])
def test_it_is_seen_whichever_record_training_has_drawn_last(last):
    dataset = MixedWithTheOneBefore()
    dataset[last]
    assert mixes_samples(dataset, 4, [7, 9, 12])


class GlobalNumbers(Plain):
    def __getitem__(self, i):
        x = X[i] + random.random() + torch.as_tensor(np.random.rand(3)) + torch.randn(3)
        return x.roll(int(torch.randint(3, ()))), Y[i]


class OwnGenerators(Plain):
    def __getitem__(self, i):
        return X[i] + self.generator.random() + torch.rand(3, generator=self.torch_generator), Y[i]


class NestedGenerator(Plain):
    def __init__(self):
        super().__init__()
        self.transforms = [OwnGenerators(), {"noise": random.Random(3)}]

    def __getitem__(self, i):
        return X[i] + self.transforms[1]["noise"].random(), self.transforms[0][i]


class Cached(Plain):
    def __getitem__(self, i):
        return self.cache.setdefault(i, X[i].sin()), Y[i]


class CountsItself(Plain):
    def __getitem__(self, i):
        self.total += 1
        self.counts[i] += 1
        return X[i], Y[i]


class Rejects(Plain):
    """Draws as many numbers as its record needs."""

    def __getitem__(self, i):
        while torch.rand(()) < abs(X[i, 0]) / 3:
            pass
        return X[i] + torch.rand(3), Y[i]

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Together(Plain):
    def __getitems__(self, indices):
        return list(zip(X[indices], Y[indices], strict=True))


class Files(Plain):
    """Opens its file when it is first asked, on each process."""

    def __init__(self, path):
        super().__init__()
        np.save(path, X.numpy())
        self.path, self.opened = path, None

    def __getitem__(self, i):
        if self.opened is None:
            self.opened = np.load(self.path, mmap_mode="r")
        return self.opened[i], Y[i]


class Images(Plain):
    def __getitem__(self, i):
        image = Image.new("L", (6, 6), i)
        left = random.randint(0, 2)
        return image.crop((left, 0, left + 4, 4)), f"name {i}", None, {"y": Y[i]}


class Locked(Plain):
    def __init__(self):
        super().__init__()
        self.handle = open(__file__)  # noqa: SIM115

    def __del__(self):
        self.handle.close()


class SecondRow(Plain):
    """Reads another row of the data: a fixed one, so it is no other draw's."""

    def __getitem__(self, i):
        return X[i] - X[(i + 1) % 20], Y[i]


APART = [
    Plain(), TensorDataset(X, Y), Subset(TensorDataset(X, Y), list(range(5, 20))),
    ConcatDataset([Plain(), Plain()]), GlobalNumbers(), OwnGenerators(), NestedGenerator(),
    Cached(), CountsItself(), Rejects(), Together(), Images(), Locked(), SecondRow(),
    Nested(GlobalNumbers()), Subset(OwnGenerators(), range(20)), [(x, 1) for x in X],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(APART)))
def test_what_does_not_passes(number):
    assert not mixes_samples(APART[number], 4, [7, 12])


def test_memory_mapped_files(tmp_path):
    assert not mixes_samples(Files(tmp_path / "x.npy"), 4, [7])


class Queue(Plain):
    def __init__(self):
        super().__init__()
        self.left = [1]

    def __getitem__(self, i):
        return self.left.pop()


class Unrepeatable(Plain):
    def __getitem__(self, i):
        return X[i] + secrets.randbelow(1000), Y[i]


@pytest.mark.parametrize("kind", [Queue, Unrepeatable])
def test_of_what_cannot_be_read_again_nothing_is_said(kind):
    with pytest.raises(NotRepeatable):
        mixes_samples(kind(), 4, [7, 12])


def test_nothing_is_left_behind():
    dataset = NestedGenerator()
    states = [
        lambda: random.getstate(),
        lambda: np.random.get_state()[1].tolist(),
        lambda: torch.get_rng_state().tolist(),
        lambda: dataset.transforms[0].generator.bit_generator.state,
        lambda: dataset.transforms[1]["noise"].getstate(),
    ]
    before = [state() for state in states]
    counted = CountsItself()

    mixes_samples(dataset, 4, [7])
    mixes_samples(counted, 4, [7])

    assert [state() for state in states] == before
    assert counted.total == 0
    assert sum(counted.counts) == 0


def test_data_are_not_copied():
    class Large(Plain):
        def __init__(self):
            super().__init__()
            self.x = torch.zeros(20, 100_000)

        def __getitem__(self, i):
            self.address = self.x.data_ptr()
            addresses.append(self.address)
            return self.x[i]

    addresses = []
    dataset = Large()

    assert not mixes_samples(dataset, 4, [7])
    assert set(addresses) == {dataset.x.data_ptr()}
    assert "address" not in vars(dataset)
