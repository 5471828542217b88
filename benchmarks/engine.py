"""The cost of the engines by themselves: without the Trainer, the ledger and the noise.

    python benchmarks/engine.py [--quick] [--models MLP CNN ...]

Forward and backward pass, norms and clipped sum of one batch, by the engines that "auto" and "ghost"
come to, beside the forward and backward pass of the same batch with plain autograd; the same rows as 8
views of an eighth of the records, and those records alone; and the noise added to one sum, also as
``secure_noise=True`` draws, adds and rounds it. Runs alternate, on one thread, and times are those of
the processor, so that other work on the machine disturbs less. On an accelerator at hand a step ends
when the device is done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from at_hand import DEVICE, ON_CPU, named, now
from models import MODELS, SMALL, Model
from step import CLIP_NORM, WARM_UP, measure, quiet, ratios
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, Query, Term, add_noise, bounded_sum
from lightning_dp.gradients import EngineChoice
from lightning_dp.gradients.batches import RowOwners, SampleBatch

VIEWS = 8


def seconds(step: Callable[[], object], steps: int) -> float:
    """The median of processor seconds, the first few left out."""
    taken, clock = [], time.process_time if ON_CPU else now
    for _ in range(steps + WARM_UP):
        start = clock()
        step()
        taken.append(clock() - start)
    return statistics.median(taken[WARM_UP:])


def example(model: Model) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and one batch."""
    n = model.batch_size
    return model.make().to(DEVICE), model.records(n).to(DEVICE), torch.randint(10, (n,)).to(DEVICE)


def without_privacy(model: Model, steps: int) -> float:
    """The gradient of the mean loss."""
    net, x, y = example(model)

    def step() -> None:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()

    return seconds(step, steps)


def engine(
    model: Model, steps: int, name: str = "auto", *, share: int = 1, views: int = 1
) -> float:
    """The sum of the clipped gradients of a share of the batch, whose records have several views."""
    net, *whole = example(model)
    x, y = (rows[: len(rows) // share] for rows in whole)
    engine = EngineChoice(name).make(net, tuple(net.parameters()))
    owners = RowOwners(len(y) // views, torch.arange(len(y)) // views) if views > 1 else None
    batch = SampleBatch([x, y], len(y), owners=owners)

    def step() -> None:
        loss = engine.run(lambda batch: F.cross_entropy(net(batch[0]), batch[1]), batch)
        engine.backward(loss)
        bounded_sum(engine.take(1.0), CLIP_NORM)

    return seconds(step, steps)


def noise(model: Model, steps: int, *, secure: bool = False) -> float:
    """A noised sum of one value for each parameter."""
    source, query = NoiseSource(secure=secure), Query((Term(),), 1.0, 1.0)
    total = BoundedSum.received(torch.zeros(parameters(model), device=DEVICE), query)
    return seconds(lambda: add_noise(total, 1.0, source, World()), steps)


def parameters(model: Model) -> int:
    return sum(param.numel() for param in model.make().parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(SMALL))
    arguments = parser.parse_args()
    quiet()
    runs = {
        "without privacy": without_privacy,
        "engine": engine,
        "ghost": partial(engine, name="ghost"),
        "views": partial(engine, views=VIEWS),
        "share": partial(engine, share=VIEWS),
        "noise": noise,
        "secure noise": partial(noise, secure=True),
    }
    for name in arguments.models:
        model, slow = MODELS[name], MODELS[name].steps < 15
        steps = 4 if slow or arguments.quick else 15
        times = measure(runs, model, steps, 3 if arguments.quick else 9)
        plain, ours, ghost, views, share, drawn, secure = (
            1e3 * statistics.median(times[who]) for who in runs
        )
        to_plain, size = ratios(times, "without privacy"), parameters(model)
        found, lean = to_plain["engine"], to_plain["ghost"]
        print(
            f"{name}, batch {model.batch_size}, {named()}: "
            f"without privacy {plain:.2f} ms, engine {ours:.2f} ms, "
            f"{statistics.median(found):.2f} x ({found[0]:.2f} to {found[-1]:.2f}); ghost "
            f"{ghost:.2f} ms, {statistics.median(lean):.2f} x ({lean[0]:.2f} to {lean[-1]:.2f}); "
            f"{VIEWS} views of an {VIEWS}th of the records {views:.2f} ms, one {share:.2f} ms; "
            f"noise for {size:,} parameters {drawn:.2f} ms, {1e6 * drawn / size:.1f} ns a value, "
            f"from a cipher {1e6 * secure / size:.1f} ns",
            flush=True,
        )


if __name__ == "__main__":
    main()
