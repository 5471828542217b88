"""a9a (Adult): logistic regression on 123 columns of 0 and 1.

    python examples/recipes/a9a_linear.py --data DIR

Nothing is scaled: each record has at most 14 ones, and that is public.
"""

from __future__ import annotations

from common import Classifier, Way, compare, read_options, zero_linear
from data import a9a, data_sets

PRIVATE = Way(epochs=20, batch_size=2048, learning_rate=2.0, max_grad_norm=0.5)
PLAIN = Way(epochs=10, batch_size=256, learning_rate=0.05)


def main() -> None:
    options = read_options(__file__, __doc__)

    compare(
        "a9a, logistic regression",
        "accuracy",
        lambda way: Classifier(zero_linear(123, 2), way),
        data_sets(a9a(options.data, options.limit)),
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
