"""MNIST: a linear layer on fixed features, the best that a few minutes of CPU give.

    python examples/recipes/mnist_linear.py --data DIR

After Tramèr and Boneh, "Differentially private learning needs better features" (arXiv:2011.11660):
scattering features, a short clip norm, a large batch, many epochs, a high learning rate.
"""

from __future__ import annotations

from common import Classifier, Way, compare, read_options, zero_linear
from data import data_sets, mnist
from scattering import features

GROUPS = 27
PRIVATE = Way(epochs=20, batch_size=4096, learning_rate=8.0, max_grad_norm=0.1)
PLAIN = Way(epochs=5, batch_size=256, learning_rate=0.003)


def main() -> None:
    options = read_options(__file__, __doc__)
    x, y, x_test, y_test = mnist(options.data, options.limit)
    data = data_sets((features(x, GROUPS), y, features(x_test, GROUPS), y_test))
    inputs = data[0].tensors[0].shape[1]

    compare(
        "MNIST, linear on scattering features",
        "accuracy",
        lambda way: Classifier(zero_linear(inputs, 10), way),
        data,
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
