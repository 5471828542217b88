"""Losses that divide by the number of targets that are not ignored, as the autograd graph shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["CURE", "TargetMean", "target_means"]

CURE = (
    "Take the loss of each record first, with reduction='none' and the record's own denominator, and "
    "then its mean over the records. Of the tokens of a language model that is "
    "lightning_dp.losses_of_records(output.logits, labels, shift=True).mean() in place of output.loss; "
    "shift=False, if labels stand at their own positions (masked words, sequence to sequence)"
)

_MEAN = 1  # torch's number of reduction="mean"


@dataclass(frozen=True)
class TargetMean:
    """One mean over targets: of cross_entropy or nll_loss, as a function or a module.

    Args:
        node: of the graph; it holds the targets until the backward pass.
    """

    node: Any

    def ignored(self, n: int, seen: Callable[[Tensor], Tensor] = lambda target: target) -> Tensor:
        """Return how many targets of each of n records are ignored, records first.

        It is one number for all of them where the targets are not n rows. Where numbers differ,
        others decide what a record's sum is divided by.

        Args:
            n: the number of records.
            seen: returns what stands for the targets: themselves, or the same ones elsewhere.
        """
        is_ignored = self._is_ignored(seen)
        rows = n if is_ignored.numel() % n == 0 else 1
        return is_ignored.reshape(rows, -1).sum(1)

    def ignores_other_than(self, number: int, n: int, seen: Callable[[Tensor], Tensor]) -> Tensor:
        """Tell whether one of n records ignores more or fewer than a number of its targets.

        Args:
            number: of targets.
            n: the number of records.
            seen: as in :meth:`ignored`.
        """
        return (self.ignored(n, seen) != number if number else self._is_ignored(seen)).any()

    def _is_ignored(self, seen: Callable[[Tensor], Tensor]) -> Tensor:
        index = int(self.node._saved_ignore_index)
        index -= 2**64 if index >= 2**63 else 0  # torch shows it without its sign
        return seen(self.node._saved_target) == index

    def ignored_alike(self, n: int) -> int | None:
        """Return how many targets every one of n records ignores; None where that differs.

        Causal language models ignore one: the last word has no next one.
        """
        found = self.ignored(n)
        if len(found) == 1 < n:
            return None if bool(found.any()) else 0
        return int(found[0]) if bool((found == found[0]).all()) else None

    @property
    def has_class_weights(self) -> bool:
        """True if classes weigh differently; then the labels of others decide."""
        weight = self.node._saved_weight
        return weight is not None and not bool((weight == weight.flatten()[0]).all())


def target_means(loss: Tensor) -> list[TargetMean]:
    """Find all means over targets that a loss is made from; nothing below them is looked at.

    Example:
        >>> import torch
        >>> output, y = torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
        >>> [m.ignored(3).tolist() for m in target_means(torch.nn.functional.cross_entropy(output, y))]
        [[0, 0, 1]]
    """
    found, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("NllLoss") and hasattr(node, "_saved_reduction"):
            if node._saved_reduction == _MEAN:
                found.append(TargetMean(node))
        else:
            stack.extend(child for child, _ in node.next_functions)
    return found
