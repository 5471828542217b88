"""MNIST: a small convolutional network from scratch.

    python examples/recipes/mnist_network.py --data DIR

The network of examples/mnist_cnn.py with tanh in the place of ReLU, which keeps gradients short
(Papernot et al., arXiv:2007.14191). Learning rate and clip norm follow Tramèr and Boneh
(arXiv:2011.11660), whose rate is proportional to the batch.
"""

from __future__ import annotations

from common import Classifier, Way, compare, read_options
from data import data_sets, mnist
from torch import nn

PRIVATE = Way(epochs=15, batch_size=2048, learning_rate=2.0, max_grad_norm=0.1)
PLAIN = Way(epochs=3, batch_size=128, learning_rate=0.02)


def network() -> nn.Module:
    from mnist_cnn import MnistCNN

    layers = MnistCNN().net
    return nn.Sequential(*(nn.Tanh() if isinstance(each, nn.ReLU) else each for each in layers))


def main() -> None:
    options = read_options(__file__, __doc__)
    x, y, x_test, y_test = mnist(options.data, options.limit)

    compare(
        "MNIST, convolutional network",
        "accuracy",
        lambda way: Classifier(network(), way),
        data_sets((2 * x - 1, y, 2 * x_test - 1, y_test)),
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
