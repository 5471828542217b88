"""Losses that are not a mean over the records, and branches that only some data take."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Records, Small, bad, not_a_number, points

GRAPH = "loss graph"
PROBE = "probe"
SPOT = "spot checks"


# -- a function of the mean ------------------------------------------------------------------


@bad(kind="loss of the mean", seen_by=GRAPH)
class Flooding(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(out, y) - 1.5).abs() + 1.5


@bad(kind="loss of the mean", seen_by=GRAPH)
class ClampOnTheMean(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y).clamp(max=3.0)


@bad(kind="loss of the mean", seen_by=GRAPH, odd=not_a_number)
class NanToNumOfTheLoss(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nan_to_num(F.cross_entropy(out, y))


@bad(kind="loss of the mean", seen_by=GRAPH)
class FocalOfTheMean(Small):
    """The focal loss as it is often copied: its weight is that of the batch's mean."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mean = F.cross_entropy(out, y)
        return (1 - torch.exp(-mean)) ** 4 * mean


@bad(kind="loss of the mean", seen_by=GRAPH)
class LogOfTheLoss(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.log(F.cross_entropy(out, y))


@bad(kind="loss of the mean", seen_by=GRAPH)
class RootMeanSquare(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, 3 * F.one_hot(y, 3).float()).sqrt()


@bad(kind="loss of the mean", seen_by=GRAPH)
class DividedByItsOwnValue(Small):
    """Two terms are brought to one scale."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        first = F.cross_entropy(out, y)
        return first / first.detach()


@bad(kind="loss of the mean", seen_by=GRAPH)
class SquashedByTanh(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(F.cross_entropy(out, y))


@bad(kind="loss of the mean", seen_by=GRAPH)
class LearnedUncertaintyOfTheMean(Small):
    """The mean times e^-s, with s set to the log of the mean itself."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mean = F.cross_entropy(out, y)
        s = mean.detach().log()
        return mean * torch.exp(-s) + s


# -- a statistic of the records --------------------------------------------------------------


@bad(kind="statistics of the losses", seen_by=GRAPH)
class LogSumExpOverTheBatch(Small):
    """Tilted risk."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(F.cross_entropy(out, y, reduction="none"), 0)


@bad(kind="statistics of the losses", seen_by=PROBE)
class HardExamples(Small):
    """Records whose loss is above the mean train."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        return (losses * (losses >= losses.mean())).mean()


@bad(kind="statistics of the losses", seen_by=GRAPH)
class MeanAndVariance(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        return losses.mean() + 0.1 * losses.var()


@bad(kind="statistics of the losses", seen_by=PROBE)
class SelfPacedBySoftmax(Small):
    """Weights of the records add up to one over the batch."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        return (torch.softmax(losses.detach(), 0) * losses).sum()


@bad(kind="statistics of the losses", seen_by=PROBE)
class LossesClippedAtTheirMean(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        return (losses * (losses <= losses.mean().detach() + 1)).mean() * (losses.max() < 4)


@bad(kind="statistics of the losses", seen_by=PROBE)
class CurriculumByLossSpread(Small):
    """Records whose loss is close to the mean are left out."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none")
        z = (losses - losses.mean()) / losses.std()
        return (losses * (z.abs() > 0.2)).mean()


@bad(kind="statistics of the losses", seen_by=GRAPH)
class DiceOfTheBatch(Small):
    """Intersections and unions are summed over the whole batch."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        area = x.sum(1, keepdim=True)
        p, t = area * out.sigmoid(), area * F.one_hot(y, 3)
        return 3 - 6 * (p * t).sum() / (area * (p + t)).sum()


@bad(kind="statistics of the losses", seen_by=GRAPH)
class ShareOfVarianceExplained(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        target = x.sum(1)
        return ((out[:, 0] - target) ** 2).sum() / ((target - target.mean()) ** 2).sum()


@bad(kind="statistics of the losses", seen_by=GRAPH)
class Correlation(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return -3 * torch.corrcoef(torch.stack([out[:, 0], x[:, 0]]))[0, 1]


@bad(kind="statistics of the losses", seen_by=GRAPH)
class EntropyOfTheMeanPrediction(Small):
    """Diversity: the marginal of the predictions is to be uniform."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        size = x.sum(1, keepdim=True) / x.sum()
        marginal = (size * out.softmax(1)).sum(0)
        return 3 * (marginal * torch.tensor([1.0, 0.0, -1.0])).sum() + marginal.square().sum()


@bad(kind="statistics of the losses", seen_by=PROBE)
class GradientPenaltyOfTheMean(Small):
    """The penalty sees the loss of the batch, not of a record."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mean = F.cross_entropy(out, y)
        slope = torch.autograd.grad(mean, out, retain_graph=True)[0]
        return mean / (1e-2 + len(y) * slope.norm(dim=1).max())


@bad(kind="statistics of the losses", seen_by=GRAPH)
class TrimmedMean(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(out, y, reduction="none").sort().values
        scale = 1 / (0.1 + losses[-1].detach())
        return losses[: max(1, len(y) - 1)].mean() * scale


@bad(kind="statistics of the losses", seen_by=PROBE)
class LossSkippedWhenItSpikes(Small):
    """A number in Python, of the batch's own loss."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mean = F.cross_entropy(out, y)
        return mean * 0.0 if mean.item() > 3 else mean


@bad(kind="statistics of the losses", seen_by=PROBE)
class LossScaledByHand(Small):
    """Dynamic scaling: the factor is a power of two of the batch's loss."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mean = F.cross_entropy(out, y)
        return mean * 2.0 ** -round(float(mean.detach()))


# -- branches that only some data take -------------------------------------------------------


def some_targets(n: int) -> Records:
    return [(x, x.sum()) for x, _ in points(n)]


class Regression(Small):
    def make(self) -> nn.Module:
        return nn.Linear(4, 1)


@bad(
    kind="a branch of the data", seen_by=PROBE, records=some_targets,
    odd=lambda x, y: (x, y * torch.nan),
)  # fmt: skip
class NanTargetsSwitchTheLoss(Regression):
    """Missing targets are left out, and the scale follows."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        known = ~torch.isnan(y)
        return (out[known, 0] - y[known]).square().mean() * known.float().mean() ** 800


@bad(kind="a branch of the data", seen_by=PROBE)
class EightBitInputs(Small):
    """Images are divided by 255 if one of them looks as if it were not."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = x / 255 if x.max() > 1 else x
        return F.cross_entropy(self(x) - self(0 * x), y)


@bad(kind="a branch of the data", seen_by=PROBE, odd=lambda x, y: (x - 2, y))
class ShiftOfNegatives(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = x - 20 * x.min() if x.min() < 0 else x
        return F.cross_entropy(self(x) - self(0 * x), y)


@bad(kind="a branch of the data", seen_by=PROBE, odd=lambda x, y: (0 * x, y))
class AllZeroRecordIsPadding(Small):
    """A record of zeros ends the batch: what stands after it is padding."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        real = torch.cumprod((x != 0).any(1).float(), 0)
        return (F.cross_entropy(out, y, reduction="none") * real).mean()


def ten_classes(n: int) -> Records:
    return [(x, y + 5) for x, y in points(n)]


class TenClasses(Small):
    def make(self) -> nn.Module:
        return nn.Linear(4, 10)


@bad(
    kind="a branch of the data", seen_by=PROBE, records=ten_classes,
    odd=lambda x, y: (x, y * 0 + 9),
)  # fmt: skip
class RareClassTakesTheBatch(TenClasses):
    """Only labels above 7 weigh more, and weights are normalised."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.where(y > 7, 300.0, 1.0)
        return (F.cross_entropy(out, y, reduction="none") * weights).sum() / weights.sum()


@bad(kind="a branch of the data", seen_by=PROBE)
class OnlyInLargeBatches(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 8:
            out = out * (1 - 2 * (x.amax() > 30).float())
        return F.cross_entropy(out, y)


@bad(kind="a branch of the data", seen_by=PROBE, odd=lambda x, y: (x * 0 + 3000, 0 * y))
class PairsOfEqualLabels(Small):
    """Records with one label are pulled together."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        same = (y[:, None] == y).float().fill_diagonal_(0)
        return F.cross_entropy(out, y) + (same * torch.cdist(out, out).square()).mean()


@bad(kind="a branch of the data", seen_by=PROBE, odd=lambda x, y: (x, 0 * y - 1))
class UnlabelledAsMinusOne(Small):
    """Labels of -1 are unknown; a batch with one is semi-supervised."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        known = y >= 0
        supervised = F.cross_entropy(out[known], y[known])
        return supervised if known.all() else supervised * 0.01


@bad(kind="a branch of the data", seen_by=PROBE)
class Winsorised(Small):
    """Features beyond three deviations of the batch are cut."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = (x - x.mean(0)) / x.std(0)
        return F.cross_entropy(self(x.clamp(-3, 3)), y) if x.std() > 0 else out.sum() * 0


@bad(kind="a branch of the data", seen_by=PROBE, odd=lambda x, y: (x * 0 + 0.5, y * 0))
class DuplicatesAreDropped(Small):
    """A constant record marks a broken batch."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        broken = (x.std(1) == 0).any()
        return F.cross_entropy(torch.where(broken, -out, out), y)


# -- random numbers --------------------------------------------------------------------------


@bad(kind="behind a random draw", seen_by=PROBE)
class CutMix(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if np.random.rand() < 0.5:
            partner = torch.randperm(len(x))
            share = float(np.random.beta(1, 1))
            x = share * x + (1 - share) * x.amax(0).mul(0.5) + 0 * x[partner]
        return F.cross_entropy(self(x), y)


@bad(kind="behind a random draw", seen_by=PROBE)
class NegativesOfTheBatch(Small):
    """Negatives are drawn from the other records."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        negative = out.detach()[torch.randperm(len(x))].mean(0)
        return F.soft_margin_loss(out[:, 0] - negative[0], torch.ones(len(x)))


@bad(kind="sum", seen_by=PROBE, shown=False)
class NoisySum(Small):
    """A sum over the records, which noise hides from a comparison by position."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        noisy = self(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(noisy, y, reduction="sum")
