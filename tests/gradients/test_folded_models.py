"""Models that fold frames, patches, choices or nodes into the batch, against one record at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients.bookkeeping import Bookkeeping

RECORDS = 4


class Backbone(nn.Sequential):
    """A network for one image."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5)
        )


class Video(nn.Module):
    """Frames through a network for images, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.backbone(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head(torch.tanh(frames).mean(1))


class VideoFramesFirst(Video):
    """The same with the first frames of all records first."""

    def forward(self, x: Tensor) -> Tensor:
        frames = self.backbone(x.transpose(0, 1).flatten(0, 1))
        return self.head(torch.tanh(frames.view(x.shape[1], len(x), -1)).mean(0))


class VideoByReshape(Video):
    """With sizes written out, as most people do."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c, h, w = x.shape
        frames = self.backbone(x.reshape(b * t, c, h, w))
        return self.head(torch.tanh(frames).view(b, t, -1).mean(dim=1))


class VideoOfLists(Video):
    """Stacks single frames before the network, and takes its outputs apart again."""

    def forward(self, x: Tensor) -> Tensor:
        frames = self.backbone(torch.cat(list(x.unbind(1))))
        return self.head(torch.tanh(torch.stack(frames.chunk(x.shape[1]))).mean(0))


class Attentive(Video):
    """Attention between frames, of which each was looked at alone; then a position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.backbone(x.flatten(0, 1)).view(len(x), -1, 5)
        frames = self.norm(frames)
        return self.head(self.attention(frames, frames, frames)[0].mean(1))


class Patches(nn.Module):
    """Patches cut out by unfold, each through the same layers with attention inside of a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 6)
        self.inside = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2)  # (n, c, h/2, w/2, 2, 2)
        pixels = patches.permute(0, 2, 3, 4, 5, 1).reshape(-1, 4, c)
        hidden = self.inside(self.embed(pixels)).mean(1)
        return self.head(hidden.view(n, h * w // 4, -1)).mean(1)


class MultipleChoice(nn.Module):
    """As in transformers: choices as rows, one score each, and a softmax over a record's choices."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 6), nn.Embedding(5, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(6, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        choices = input_ids.shape[1]
        flat = input_ids.view(-1, input_ids.size(-1))
        positions = torch.arange(flat.shape[1]).unsqueeze(0)
        hidden = self.block(self.words(flat) + self.positions(positions))
        return self.classifier(hidden[:, 0]).view(-1, choices)


class DenseGraph(nn.Module):
    """Two rounds of messages: linear layers see all nodes, a dense adjacency each graph's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, nodes, _ = x.shape
        adjacency = torch.softmax(x @ x.transpose(1, 2), -1)
        hidden = torch.relu(self.first(x.reshape(n * nodes, -1)))
        hidden = (adjacency @ hidden.view(n, nodes, -1)).reshape(n * nodes, -1)
        hidden = torch.relu(self.second(hidden)).view(n, nodes, -1)
        return self.head(hidden.sum(1))


class Crops(Video):
    """Two crops of each image, joined along the batch as in SimSiam and DINO."""

    def forward(self, x: Tensor) -> Tensor:
        joined = self.backbone(torch.cat([x[:, :, :4, :4], x[:, :, 1:, 1:]]))
        one, other = joined.chunk(2)
        return self.head(torch.tanh(one * other))


class FewAndMany(Video):
    """One weight with two numbers of rows a record: each frame, pairs of frames, and their mean."""

    def forward(self, x: Tensor) -> Tensor:
        single = self.backbone(x.flatten(0, 1)).view(*x.shape[:2], -1).mean(1)
        pairs = (x[:, 1:] - x[:, :-1]).flatten(0, 1)
        double = self.backbone(pairs).view(len(x), -1, 5).mean(1)
        return self.head(torch.tanh(single + double + self.backbone(x.mean(1))))


def video(frames: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(RECORDS, frames, 2, 4, 4)


MODELS: dict[str, tuple[type[nn.Module], Callable[[], Tensor]]] = {
    "video": (Video, video(5)),
    "video of one frame": (Video, video(1)),
    "video of as many frames as records": (Video, video(RECORDS)),
    "frames first": (VideoFramesFirst, video(3)),
    "frames first, as many as records": (VideoFramesFirst, video(RECORDS)),
    "reshape": (VideoByReshape, video(3)),
    "lists": (VideoOfLists, video(3)),
    "attention over frames": (Attentive, video(3)),
    "patches": (Patches, lambda: torch.randn(RECORDS, 2, 6, 4)),
    "multiple choice": (MultipleChoice, lambda: torch.randint(9, (RECORDS, 3, 5))),
    "graph": (DenseGraph, lambda: torch.randn(RECORDS, 5, 4)),
    "crops": (Crops, lambda: torch.randn(RECORDS, 2, 5, 5)),
    "several numbers of rows": (FewAndMany, video(3)),
}


@pytest.fixture
def engine() -> Iterator[Bookkeeping]:
    engine = Bookkeeping(traces=True)
    yield engine
    engine.detach()


@pytest.mark.parametrize("name", MODELS)
def test_folded_rows_equal_one_record_at_a_time(name, engine, oracle):
    torch.manual_seed(0)
    kind, make = MODELS[name]
    model, batch = kind(), make()
    slow = oracle.one_by_one(copy.deepcopy(model), batch)
    engine.attach(model, oracle.trained(model))
    with engine.following(batch, RECORDS):
        output = model(batch)
    found = oracle.run_loss(engine, lambda: oracle.mean_loss(output))
    assert found.count == RECORDS
    torch.testing.assert_close(found.norms(), slow.norm(dim=1), rtol=1e-5, atol=1e-9)
    clip_norm = float(slow.norm(dim=1).median())
    total: Any = bounded_sum(found, clip_norm).value.double()
    wanted = oracle.clipped(slow, clip_norm)
    assert (total - wanted).norm() <= 1e-5 * wanted.norm()
