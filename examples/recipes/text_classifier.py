"""Text classification: from which package of Python's standard library do four lines of code come?

    python examples/recipes/text_classifier.py

Words are hashed into a fixed number of columns, so that no vocabulary is learnt from private text: which
words it holds would be a release. A vocabulary from public text would serve as well.
"""

from __future__ import annotations

import numpy as np
import torch
from common import Classifier, Way, compare, read_options, zero_linear
from data import data_sets
from sklearn.feature_extraction.text import HashingVectorizer
from texts import PACKAGES, pieces, source_lines
from torch import Tensor

LINES, COLUMNS, TEST_SHARE = 4, 4096, 0.2
PRIVATE = Way(epochs=40, batch_size=1024, learning_rate=8.0, max_grad_norm=0.3)
PLAIN = Way(epochs=20, batch_size=128, learning_rate=1.0)


def split(limit: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of length 1 and package numbers, 80 % to train on."""
    texts, packages = [], []
    for number, package in enumerate(PACKAGES):
        found = pieces(source_lines(package), LINES)
        texts += found
        packages += [number] * len(found)
    order = np.random.default_rng(0).permutation(len(texts))[:limit]
    hashed = HashingVectorizer(
        n_features=COLUMNS, token_pattern=r"[A-Za-z_]{2,}|\d+|[^\w\s]", ngram_range=(1, 2)
    )
    x = torch.tensor(hashed.transform([texts[i] for i in order]).toarray(), dtype=torch.float32)
    y = torch.tensor(packages)[order]
    cut = int((1 - TEST_SHARE) * len(order))
    return x[:cut], y[:cut], x[cut:], y[cut:]


def main() -> None:
    options = read_options(__file__, __doc__)

    compare(
        f"code of {len(PACKAGES)} packages, linear on hashed words",
        "accuracy",
        lambda way: Classifier(zero_linear(COLUMNS, len(PACKAGES)), way),
        data_sets(split(options.limit)),
        (PRIVATE, PLAIN),
        options,
    )


if __name__ == "__main__":
    main()
