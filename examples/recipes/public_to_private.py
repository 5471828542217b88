"""Fine-tuning: a network learns digits from MNIST (public), then scikit-learn's digits (private).

    python examples/recipes/public_to_private.py --data DIR

The private set has 1,437 records, too few to learn much from at ε = 1: what comes from public data costs
nothing. The second row is the same network without them. All weights are trained, in both rows.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import lightning as L
import torch
from common import Classifier, Way, compare, read_options, train_and_test
from data import data_sets, mnist
from torch import Tensor, nn

PUBLIC = Way(3, 128, 0.003, optimizer=torch.optim.Adam)
PRIVATE = Way(30, 256, 0.003, 1.0, torch.optim.Adam)
FROM_SCRATCH = Way(30, 256, 0.01, 1.0, torch.optim.Adam)
PLAIN = Way(30, 64, 0.003, optimizer=torch.optim.Adam)


def as_small(images: Tensor) -> Tensor:
    """MNIST's pictures as those of scikit-learn: the digit alone, 8 x 8 pixels in [-1, 1]."""
    return 2 * nn.functional.interpolate(images[:, :, 4:24, 4:24], size=(8, 8), mode="area") - 1


def main() -> None:
    options = read_options(__file__, __doc__, epsilon=1.0)
    from quickstart import DigitsCNN, digits

    x, y, x_test, y_test = mnist(options.data, options.limit)
    public = data_sets((as_small(x), y, as_small(x_test), y_test))
    L.seed_everything(0, verbose=False)
    teacher = Classifier(DigitsCNN().net, PUBLIC)
    train_and_test(teacher, public, PUBLIC, None)

    compare(
        "digits, network pre-trained on MNIST",
        "accuracy",
        lambda way: Classifier(copy.deepcopy(teacher.net), way),
        digits(),
        (PRIVATE, PLAIN),
        options,
        delta=1e-4,
    )
    compare(
        "digits, the same network from scratch",
        "accuracy",
        lambda way: Classifier(DigitsCNN().net, way),
        digits(),
        (FROM_SCRATCH, PLAIN),
        replace(options, cpu_begin=time.process_time(), wall_begin=time.perf_counter()),
        delta=1e-4,
        name="from_scratch",
    )


if __name__ == "__main__":
    main()
