"""The loss graph: what takes more than sums of rows is refused, whatever the values are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.gradients import CoupledLossError, RecordPasses, UnsupportedModelError
from lightning_dp.gradients.graph import check_loss_graph

N, CLASSES, STEPS = 6, 5, 7
WEIGHTS = torch.arange(1.0, 1.0 + CLASSES)
OWNERS = torch.arange(N).repeat_interleave(STEPS)


@dataclass
class Batch:
    """Outputs of a model of shape (n, CLASSES), with classes, a mask of rows and one of (n, STEPS)."""

    out: Tensor
    y: Tensor
    mask: Tensor
    valid: Tensor

    @property
    def losses(self) -> Tensor:
        return F.cross_entropy(self.out, self.y, reduction="none")

    @property
    def mean(self) -> Tensor:
        return self.losses.mean()

    @property
    def steps(self) -> Tensor:
        """(n, STEPS, CLASSES)."""
        return self.out[:, None] * torch.linspace(0.5, 1.5, STEPS)[:, None]

    @property
    def folded(self) -> Tensor:
        return self.steps.reshape(-1, CLASSES)


Loss = Callable[[Batch], Tensor]


def two_heads(b: Batch, most: float = torch.inf) -> Tensor:
    terms = torch.zeros(2)
    terms[0], terms[1] = b.mean, b.out.pow(2).mean()
    if most < torch.inf:
        terms[0].clamp_(max=most)
    return terms.sum()


def loop_that_writes(b: Batch) -> Tensor:
    losses = torch.zeros(N)
    for i in range(N):
        losses[i] = b.losses[i].clamp(max=2.0)
    return losses.mean()


def dice(b: Batch, dim: int) -> Tensor:
    p, y = b.out.sigmoid(), F.one_hot(b.y, CLASSES)
    return 1 - ((2 * p * y).sum(dim) / (p.sum(dim) + y.sum(dim) + 1)).mean()


def vicreg(b: Batch) -> Tensor:
    z = b.out - b.out.mean(0)
    return F.relu(1 - z.var(0).sqrt()).mean() + (z.T @ z / (N - 1)).pow(2).sum()


COUPLED: dict[str, Loss] = {
    "flooding": lambda b: (b.mean - 2.1).abs() + 2.1,
    "clamp": lambda b: b.mean.clamp(max=2.1),
    "clamp_in_place": lambda b: b.mean.clamp_(max=2.1),
    "clamp_in_a_view": lambda b: two_heads(b, 2.1),
    "nan_to_num": lambda b: b.mean.nan_to_num(),
    "where_finite": lambda b: torch.where(b.mean.isfinite(), b.mean, 0 * b.out[:, 0].sum()),
    "minimum": lambda b: torch.minimum(b.mean, torch.tensor(2.1)),
    "rmse": lambda b: F.mse_loss(b.out, torch.zeros(N, CLASSES)).sqrt(),
    "psnr": lambda b: -10 * torch.log10(1 / F.mse_loss(b.out, torch.zeros(N, CLASSES))),
    "focal_of_the_mean": lambda b: (1 - (-b.mean).exp()) ** 2 * b.mean,
    "free_bits": lambda b: b.out.pow(2).mean(0).clamp(min=0.9).sum(),
    "product_of_means": lambda b: b.mean * b.out.pow(2).mean(),
    "moments": lambda b: F.mse_loss(b.out.mean(0), torch.ones(CLASSES)),
    "logsumexp": lambda b: b.losses.logsumexp(0),
    "largest": lambda b: b.losses.max(),
    "variance": lambda b: b.mean + b.losses.var(),
    "norm": lambda b: b.out.norm() ** 2 / N,
    "dice": lambda b: dice(b, 0),
    "vicreg": vicreg,
    "class_weights": lambda b: F.cross_entropy(b.out, b.y, WEIGHTS),
    "class_weights_of_pixels": lambda b: F.nll_loss(
        b.steps.mT, b.y[:, None].expand(N, STEPS), WEIGHTS
    ),
    "mean_of_chosen": lambda b: b.losses[b.mask].mean(),
    "mean_of_tokens": lambda b: b.steps[b.valid].pow(2).mean(),
    "cross_entropy_of_chosen": lambda b: F.cross_entropy(b.out[b.mask], b.y[b.mask]),
    "mean_of_hard": lambda b: b.losses[b.losses.argsort()[-2:]].mean(),
}

SEPARATE: dict[str, Loss] = {
    "cross_entropy": lambda b: F.cross_entropy(b.out, b.y, label_smoothing=0.1),
    "class_weights_summed": lambda b: F.cross_entropy(b.out, b.y, WEIGHTS, reduction="sum") / N,
    "class_weights_of_each": lambda b: (
        sum(F.cross_entropy(x, y.expand(STEPS), WEIGHTS) for x, y in zip(b.steps, b.y, strict=True))
        / N
    ),
    "smooth_l1": lambda b: F.smooth_l1_loss(b.out, torch.zeros(N, CLASSES)),
    "binary": lambda b: F.binary_cross_entropy_with_logits(b.out, torch.zeros(N, CLASSES)),
    "margin": lambda b: F.multi_margin_loss(b.out, b.y),
    "gaussian": lambda b: F.gaussian_nll_loss(b.out, torch.zeros(N, CLASSES), b.out.exp()),
    "dot": lambda b: b.losses.dot(torch.ones(N)) / N,
    "product_of_rows": lambda b: torch.einsum("ic,ic->", b.out, b.out.sigmoid()) / N,
    "two_heads": two_heads,
    "weighted_terms": lambda b: torch.stack([b.mean, b.out.exp().mean()]) @ torch.tensor([1, 0.1]),
    "mean_of_classes": lambda b: b.out.pow(2).mean(0).cumsum(0).sum(),
    "norm_of_order_one": lambda b: b.out.norm(p=1) / N,
    "uncertainty": lambda b: (-nn.Parameter(torch.ones(()))).exp() * b.mean,
    "weight_decay": lambda b: b.mean + nn.Parameter(torch.ones(N, 3)).pow(2).sum().sqrt(),
    "sum_of_chosen": lambda b: b.losses[b.mask].sum() / N,
    "sums_of_classes": lambda b: torch.zeros(CLASSES).index_add(0, b.y, b.losses).sum() / N,
    "clamp_of_each": lambda b: b.losses.clamp(max=2.1).mean(),
    "dice_of_each": lambda b: dice(b, 1),
    "mask_times": lambda b: (b.losses * b.mask).mean(),
    "row_top": lambda b: b.out.topk(2, 1)[0].pow(2).mean(),
    "labels": lambda b: b.out[torch.arange(N), b.y].exp().mean(),
    "loop_that_adds": lambda b: (
        sum(F.cross_entropy(b.out[i : i + 1], b.y[i : i + 1]).sqrt() for i in range(N)) / N
    ),
    "loop_that_writes": loop_that_writes,
    "loop_over_rows": lambda b: torch.stack([x.pow(2).mean().sqrt() for x in b.out]).mean(),
    "loop_over_masked": lambda b: (
        sum(x[m].pow(2).mean().sqrt() for x, m in zip(b.steps, b.valid, strict=True)) / N
    ),
    "loop_over_owners": lambda b: sum(b.folded[i == OWNERS].mean().abs() for i in range(N)) / N,
}


def batch(second: float | None = None) -> Batch:
    """Make records; the second one is another one, times a number, if that is given."""
    seeded = torch.Generator().manual_seed(0)
    out, other = torch.randn(2, N, CLASSES, generator=seeded)
    y, mask = torch.tensor([0, 1, 1, 0, 4, 2]), torch.tensor([True, True, False, True, True, False])
    valid = torch.rand(N, STEPS, generator=seeded) > 0.3
    if second is not None:
        out[1], y[1], mask[1], valid[1] = other[1] * second, 0, False, ~valid[1]
    return Batch(out.requires_grad_(), y, mask, valid)


def couples(loss: Loss) -> bool:
    """Return whether the second record moves the gradients of the others, seen by trying."""
    tried = [batch(second) for second in (None, 1.0, 0.0, 30.0, torch.nan)]
    found = [torch.autograd.grad(loss(each), each.out)[0][[0, 2, 3, 4, 5]] for each in tried]
    return not all(
        torch.allclose(found[0], each, rtol=1e-4, atol=1e-7, equal_nan=True) for each in found
    )


@pytest.mark.parametrize("name", [*COUPLED, *SEPARATE])
def test_losses_that_couple_are_refused_and_others_pass(name):
    loss, of = {**COUPLED, **SEPARATE}[name], batch()
    assert couples(loss) == (name in COUPLED)
    with pytest.raises(CoupledLossError) if name in COUPLED else nullcontext():
        check_loss_graph(loss(of), N, ())


@pytest.mark.parametrize(
    "loss",
    [
        lambda losses: losses.bfloat16().mean().float() * 3 + 1,
        lambda losses: losses.half().sum() / N,
        lambda losses: losses.mean() + 0.1 * losses.bfloat16().mean(),
    ],
)
def test_records_are_not_joined_in_half_precision(loss):
    with pytest.raises(UnsupportedModelError, match="in half precision") as raised:
        check_loss_graph(loss(batch().losses), N, ())

    assert not isinstance(raised.value, CoupledLossError)  # another engine may do better


@pytest.mark.parametrize("engine", ["layers", "hooks"])
@pytest.mark.parametrize("checked", [True, False])
def test_every_engine_is_guarded_unless_it_is_left_out(engine, checked):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES))
    x, y = torch.randn(N, 2, 5), torch.arange(N) % CLASSES
    params = list(net.parameters())
    with RecordPasses(net, params, engine, loss_graph_check=checked) as passes:
        found = passes.run(lambda b: F.cross_entropy(net(b[0]), b[1]), (x, y), N)
        assert found is not None and found.count == N
        with pytest.raises(CoupledLossError) if checked else nullcontext():
            passes.run(lambda b: F.cross_entropy(net(b[0]), b[1]).clamp(max=9.0), (x, y), N)


def test_the_message_names_the_node_and_what_was_there_before():
    out = torch.ones(N, CLASSES, requires_grad=True).exp()
    for records in (0, 1):
        check_loss_graph((out.mean() * 2).nan_to_num(), records, {out.grad_fn})
    with pytest.raises(
        CoupledLossError, match=r"^The loss takes nan_to_num \(NanToNumBackward0\) of what mean "
    ):
        check_loss_graph((out.mean() * 2).nan_to_num(), N, {out.grad_fn})


def weighted_by(records: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that a step defines for its own records."""

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out * records

        @staticmethod
        def backward(ctx, gradient):
            return gradient * records

    return Weighted.apply


def test_what_a_function_closes_over_is_free_after_the_step_that_defines_it():
    records, out = torch.ones(N, CLASSES), torch.ones(N, CLASSES, requires_grad=True).exp()
    check_loss_graph(weighted_by(records)(out).mean(), N, {out.grad_fn})
    left = weakref.ref(records)
    del records
    gc.collect()
    assert left() is None
