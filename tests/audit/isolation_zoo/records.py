"""Records of several kinds for the modules of this folder."""

from __future__ import annotations

import torch

from isolation_zoo.cases import Records, points


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def targets(n: int) -> Records:
    return [(x, x.sum()) for x, _ in points(n)]


def images(n: int) -> Records:
    x = torch.rand(n, 3, 8, 8, generator=generator())
    return list(zip(x, torch.arange(n) % 3, strict=True))


def tokens(n: int) -> Records:
    x = torch.randint(1, 12, (n, 6), generator=generator())
    return list(zip(x, torch.arange(n) % 3, strict=True))


def padded(n: int) -> Records:
    """Sequences of 3 to 6 tokens, filled up with zeros."""
    return [(x * (torch.arange(6) < 3 + i % 4), y) for i, (x, y) in enumerate(tokens(n))]
