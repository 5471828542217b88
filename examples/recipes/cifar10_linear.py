"""CIFAR-10: a linear layer on fixed features.

    python examples/recipes/cifar10_linear.py --data DIR

As mnist_linear.py, with three colours. A network from scratch would need hours of CPU to come as far;
features learnt from public pictures would come further.
"""

from __future__ import annotations

from common import Classifier, Way, compare, read_options, zero_linear
from data import cifar10, data_sets
from scattering import features

GROUPS, DIRECTIONS = 15, 4
PRIVATE = Way(epochs=20, batch_size=8192, learning_rate=8.0, max_grad_norm=0.1)
PLAIN = Way(epochs=4, batch_size=256, learning_rate=0.001)


def main() -> None:
    options = read_options(__file__, __doc__)
    x, y, x_test, y_test = cifar10(options.data, options.limit)
    found = [features(images, GROUPS, DIRECTIONS) for images in (x, x_test)]
    inputs = found[0].shape[1]

    compare(
        "CIFAR-10, linear on scattering features",
        "accuracy",
        lambda way: Classifier(zero_linear(inputs, 10), way),
        data_sets((found[0], y, found[1], y_test)),
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
