"""The loss of each record of a language model: one number for each, of which the mean is taken."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp._validate import flag, instance, positive, whole

__all__ = ["losses_of_records"]


def losses_of_records(
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool,
    ignore_index: int = -100,
    tokens_per_record: float | None = None,
) -> Tensor:
    r"""Return the cross-entropy of each record, from its own tokens alone.

    .. math:: \ell_i = \frac{1}{m_i} \sum_{t:\, y_{i,t} \ne \mathrm{ignore\_index}}
        -\log \mathrm{softmax}(x_{i,t})_{y_{i,t}}

    with m_i the number of the record's labels that are not ignored, or ``tokens_per_record``. Take
    ``.mean()`` of it in ``training_step``. The mean over all tokens of a batch, which language models
    return as ``.loss``, weighs a record by how long the others are, so clipping its gradient would not
    bound what it does.

    - Each record counts alike, however many tokens it has. In a mean over all tokens long ones count
      more. For that, give ``tokens_per_record``: a public constant, about as many labels as a record has.
      ε covers no constant that is computed from the private records.
    - A record without a label has the loss 0 and the gradient 0.
    - For records of equally many labels it is the same as the mean over all tokens.
    - Computed in float32 at least, also for logits of half precision.

    Args:
        logits: x, shape (n, T, classes).
        labels: y, shape (n, T), whole numbers.
        shift: True for causal models, where the label of a position is its own token and the model
            predicts the next one: position t is compared with label t + 1. False where labels stand
            at their positions: masked words, sequence to sequence, tags.
        ignore_index: the label of positions that do not count.
        tokens_per_record: m for all records; None for the number of each one's own labels.

    Returns:
        Shape (n,).

    Raises:
        ValueError: if the shapes do not go together, or ``tokens_per_record`` is not above 0.

    Example:
        >>> logits = torch.zeros(3, 4, 5)
        >>> labels = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100], [1, -100, -100, -100]])
        >>> losses_of_records(logits, labels, shift=True)  # log(5), and 0 where no next token is
        tensor([1.6094, 1.6094, 0.0000])
        >>> losses_of_records(logits, labels, shift=True, tokens_per_record=3)
        tensor([1.6094, 0.5365, 0.0000])
    """
    instance("logits", logits, Tensor, of="losses_of_records")
    instance("labels", labels, Tensor, of="losses_of_records")
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            "losses_of_records(logits, labels) needs shapes (n, T, classes) and (n, T), not "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    ignored = whole("ignore_index", ignore_index, -(2**63), of="losses_of_records")
    if flag("shift", shift, of="losses_of_records"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_tokens = F.cross_entropy(
        precise.transpose(1, 2), labels, ignore_index=ignored, reduction="none"
    )
    total = of_tokens.sum(1)
    if tokens_per_record is not None:
        return total / positive("tokens_per_record", tokens_per_record, of="losses_of_records")
    return total / (labels != ignored).sum(1).clamp(min=1)
