"""The cost of comparing the gradient that the optimizer uses with what was released.

    python benchmarks/edits.py

Processor microseconds a step for each model, beside one draw of its noise: two looks at the gradients,
and their comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from models import SMALL
from step import quiet
from torch import nn

from lightning_dp._noise import NoiseSource
from lightning_dp.functional import unflatten
from lightning_dp.strategies.update_guard import WriteCounts

TURNS = 15


def processor_seconds(function: Callable[[], object]) -> float:
    """The least of several runs: nothing makes one faster than it is."""
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def with_gradients(net: nn.Module) -> list[nn.Parameter]:
    """The parameters, whose gradients are parts of one vector."""
    parameters = list(net.parameters())
    released = torch.randn(sum(param.numel() for param in parameters))
    for param, gradient in zip(parameters, unflatten(released, parameters), strict=True):
        param.grad = gradient
    return parameters


def compare(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Do what one step does."""
    return WriteCounts([param.grad for param in parameters if param.grad is not None]).written()


def main() -> None:
    quiet()
    source = NoiseSource()
    for name, model in SMALL.items():
        parameters = with_gradients(model.make())
        values = sum(param.numel() for param in parameters)
        compared = 1e6 * processor_seconds(partial(compare, parameters))
        noise = 1e6 * processor_seconds(partial(source.add_normal, torch.zeros(values), 1.0))
        print(f"{name}, {values} values: {compared:.0f} µs a step, noise {noise:.0f} µs")


if __name__ == "__main__":
    main()
