"""California Housing: regression with a small network on scaled columns.

    python examples/recipes/california_network.py --data DIR

Every scale is a public constant, never a mean or a maximum of the records: counts enter as logarithms,
places relative to a map of California, prices in units of 100,000 dollars (the census stops at 500,000).
A record's error can be large, so its gradient is clipped; the last layer starts at zero, near the middle.
"""

from __future__ import annotations

import numpy as np
import torch
from common import Regressor, Way, compare, read_options
from data import california, data_sets
from torch import Tensor, nn

PRIVATE = Way(40, 1024, 0.005, 1.0, torch.optim.Adam)
PLAIN = Way(40, 256, 0.002, optimizer=torch.optim.Adam)
TEST_SHARE = 0.2
PLACE_WAVES, WIDTH = 32, 64


def columns(x: np.ndarray, waves: np.ndarray) -> np.ndarray:
    """Features (n, d) from the original columns and fixed random waves over the map."""
    west, north = (x[:, 0] + 119.5) / 2.5, (x[:, 1] - 35.5) / 2.5
    age, income = (x[:, 2] - 30) / 15, (x[:, 7] - 4) / 2
    rooms, bedrooms, people, homes = np.log1p(x[:, 3:7]).T
    ratios = [rooms - homes - 1.6, bedrooms - rooms + 1.6, people - homes - 1]
    place = np.stack([west, north], axis=1)
    phases = place @ waves
    basic = np.stack([west, north, age, income.clip(-2, 3), homes - 6, *ratios], axis=1)
    return np.concatenate([basic.clip(-3, 3), np.sin(phases), np.cos(phases)], axis=1)


def split(folder: str, limit: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """80 % of the records to train on, the others to test."""
    x, dollars = california(folder)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))[:limit]
    found = columns(np.asarray(x, np.float64)[order], 1.5 * rng.standard_normal((2, PLACE_WAVES)))
    prices = np.asarray(dollars, np.float64)[order].clip(0, 500_000) / 100_000 - 2
    features, target = (torch.tensor(part, dtype=torch.float32) for part in (found, prices))
    cut = int((1 - TEST_SHARE) * len(target))
    return features[:cut], target[:cut], features[cut:], target[cut:]


def network(inputs: int) -> nn.Module:
    last = nn.Linear(WIDTH, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), last)


def main() -> None:
    options = read_options(__file__, __doc__)
    data = data_sets(split(options.data, options.limit))
    inputs = data[0].tensors[0].shape[1]

    compare(
        "California Housing, network of 64 units, R²",
        "R²",
        lambda way: Regressor(network(inputs), way),
        data,
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
