"""Modules that keep records apart: all of them train, with everything checked."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torchmetrics
from opacus.layers import DPGRU, DPLSTM
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Record, Records, Rows, Small, ordinary, points


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def targets(n: int) -> Records:
    return [(x, x.sum()) for x, _ in points(n)]


def images(n: int) -> Records:
    x = torch.rand(n, 3, 8, 8, generator=generator())
    return list(zip(x, torch.arange(n) % 3, strict=True))


def tokens(n: int) -> Records:
    x = torch.randint(1, 12, (n, 6), generator=generator())
    return list(zip(x, torch.arange(n) % 3, strict=True))


def padded(n: int) -> Records:
    """Sequences of 3 to 6 tokens, filled up with zeros."""
    return [(x * (torch.arange(6) < 3 + i % 4), y) for i, (x, y) in enumerate(tokens(n))]


# -- losses of torch.nn, as functions of output, features and label ---------------------------


def onehot(y: Tensor) -> Tensor:
    return F.one_hot(y, 3).float()


LOSSES = {
    "cross_entropy": lambda o, x, y: nn.CrossEntropyLoss()(o, y),
    "label_smoothing": lambda o, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(o, y),
    "soft_labels": lambda o, x, y: nn.CrossEntropyLoss()(o, onehot(y) * 0.9 + 0.1 / 3),
    "nll": lambda o, x, y: nn.NLLLoss()(o.log_softmax(1), y),
    "mse": lambda o, x, y: nn.MSELoss()(o, onehot(y)),
    "l1": lambda o, x, y: nn.L1Loss()(o, onehot(y)),
    "smooth_l1": lambda o, x, y: nn.SmoothL1Loss(beta=0.3)(o, onehot(y)),
    "huber": lambda o, x, y: nn.HuberLoss(delta=0.7)(o, onehot(y)),
    "bce": lambda o, x, y: nn.BCELoss()(o.sigmoid(), onehot(y)),
    "bce_with_logits": lambda o, x, y: nn.BCEWithLogitsLoss()(o, onehot(y)),
    "positive_weights": lambda o, x, y: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3]))(
        o, onehot(y)
    ),
    "kl_divergence": lambda o, x, y: nn.KLDivLoss(reduction="batchmean")(
        o.log_softmax(1), onehot(y) * 0.9 + 0.1 / 3
    ),
    "poisson": lambda o, x, y: nn.PoissonNLLLoss()(o[:, 0], y.float()),
    "gaussian": lambda o, x, y: nn.GaussianNLLLoss()(o[:, 0], x.sum(1), F.softplus(o[:, 1])),
    "hinge_embedding": lambda o, x, y: nn.HingeEmbeddingLoss()(o[:, 0], 1 - 2.0 * (y > 0)),
    "margin_ranking": lambda o, x, y: nn.MarginRankingLoss(0.5)(o[:, 0], o[:, 1], 1 - 2.0 * (y > 0)),
    "cosine_embedding": lambda o, x, y: nn.CosineEmbeddingLoss()(o, x[:, :3], 1 - 2.0 * (y > 0)),
    "multi_margin": lambda o, x, y: nn.MultiMarginLoss()(o, y),
    "multilabel_margin": lambda o, x, y: nn.MultiLabelMarginLoss()(
        o, torch.stack([y, -torch.ones_like(y), -torch.ones_like(y)], 1)
    ),
    "multilabel_soft_margin": lambda o, x, y: nn.MultiLabelSoftMarginLoss()(o, onehot(y)),
    "soft_margin": lambda o, x, y: nn.SoftMarginLoss()(o, 2 * onehot(y) - 1),
    "triplet_in_a_record": lambda o, x, y: nn.TripletMarginLoss()(o, x[:, :3], x[:, 1:]),
    "quantile": lambda o, x, y: torch.maximum(
        0.9 * (x.sum(1) - o[:, 0]), -0.1 * (x.sum(1) - o[:, 0])
    ).mean(),
    "log_cosh": lambda o, x, y: (o[:, 0] - x.sum(1)).cosh().log().mean(),
    "focal": lambda o, x, y: (
        (1 - torch.exp(-F.cross_entropy(o, y, reduction="none"))) ** 2
        * F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "ordinal": lambda o, x, y: F.binary_cross_entropy_with_logits(
        o[:, :2], (y[:, None] > torch.arange(2)).float()
    ),
    "hazard": lambda o, x, y: (o[:, 0].exp() * x.sum(1) - (y > 0) * o[:, 0]).mean(),
    "clamped_per_record": lambda o, x, y: F.cross_entropy(o, y, reduction="none").clamp(max=2).mean(),
    "weights_of_records": lambda o, x, y: (
        x[:, 0] * F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "weights_of_classes_per_record": lambda o, x, y: (
        torch.tensor([1.0, 2.0, 3.0])[y] * F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "sum_over_the_number": lambda o, x, y: (
        F.cross_entropy(o, y, reduction="sum") / len(y)
    ),
    "margin_of_logits": lambda o, x, y: (
        F.relu(1 + o - o.gather(1, y[:, None])).sum(1).mean() + 1e-3 * o.square().sum(1).mean()
    ),
    "penalty_of_weights_apart": lambda o, x, y: F.cross_entropy(o, y) + 0.0,
    "entropy_per_record": lambda o, x, y: (
        F.cross_entropy(o, y) + 0.1 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean()
    ),
    "evidential": lambda o, x, y: (
        onehot(y) * (torch.digamma((F.softplus(o) + 1).sum(1, True)) - torch.digamma(F.softplus(o) + 1))
    ).sum(1).mean(),
    "rank_within_a_record": lambda o, x, y: F.cross_entropy(
        o / o.detach().std(1, keepdim=True).clamp(min=0.1), y
    ),
    "nan_to_num_per_record": lambda o, x, y: torch.nan_to_num(
        F.cross_entropy(o, y, reduction="none")
    ).mean(),
    "root_per_record": lambda o, x, y: (o - onehot(y)).square().sum(1).add(1e-6).sqrt().mean(),
    "inverse_temperature": lambda o, x, y: F.cross_entropy(o / 0.5, y) * 3.0 - 0.1,
    "mean_of_dimensions_in_turn": lambda o, x, y: (o - onehot(y)).abs().mean(1).mean(0),
}  # fmt: skip


class WithLoss(Small):
    """A linear layer with one of the losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[self.name](out, x, y)


def enter_losses() -> None:
    for name in LOSSES:

        def make(name: str = name) -> Small:
            return WithLoss(name)

        make.__name__ = f"loss_{name}"
        ordinary(make)


enter_losses()


# -- what a training_step may look like -------------------------------------------------------


@ordinary
class LogsAndMeasures(Small):
    """Metrics, logs, and lists for the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out.softmax(1), y)
        self.losses.append(float(loss))
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"loss": loss, "largest": out.max()}, prog_bar=True)
        return {"loss": loss, "out": out.detach()}

    def on_train_epoch_end(self) -> None:
        self.print(len(self.losses), end="")
        self.losses.clear()


@ordinary
class CountsItsSteps(Small):
    """Counters of steps and of records, in attributes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.records = 0, 0
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.passes, self.records = self.passes + 1, self.records + len(x)
        self.seen += 1
        return F.cross_entropy(out, y)


@ordinary
class LogsAtTheEndOfABatch(Small):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = float(outputs["loss"])
        self.log("last", self.last)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.size = len(batch[0])


@ordinary
class KeepsItsOutputsForTheEpoch(Small):
    """A list of outputs that is emptied when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.outputs.append({"out": out.detach(), "y": y})
        return F.cross_entropy(out, y)

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.cat([each["out"] for each in self.outputs]).mean())
        self.outputs.clear()


@ordinary
class RunningAverageOfTheLossForTheScreen(Small):
    """A smoothed loss that nothing but the progress bar reads."""

    smooth = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        self.smooth = 0.9 * self.smooth + 0.1 * loss.item()
        self.log("smooth", self.smooth, prog_bar=True)
        return loss


@ordinary(trainer={"max_epochs": 3})
class WarmUpByEpoch(Small):
    """The weight of a penalty grows with the epoch."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + self.current_epoch / 3 * out.square().mean()


@ordinary
class AnnealedTemperature(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        temperature = max(0.5, math.exp(-0.1 * self.global_step))
        soft = F.gumbel_softmax(out, tau=temperature, dim=1)
        return F.cross_entropy(out, y) + 0.1 * (soft * out).sum(1).mean()


@ordinary
class UsesTheNumberOfTheBatch(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx % 3 == 0:
            self.log("third", float(batch_idx))
        return F.cross_entropy(self(x), y) * (1.0 if batch_idx % 2 else 0.5)


@ordinary
class OneArgument(Small):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        x, y = batch
        return F.cross_entropy(self(x), y)


@ordinary
class TermsInADictionary(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        losses = {"ce": F.cross_entropy(out, y), "l2": 1e-2 * out.square().mean()}
        self.log_dict(losses)
        return {"loss": sum(losses.values()), **{k: v.detach() for k, v in losses.items()}}


@ordinary
class ManualOptimization(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


@ordinary
class ManualWithScheduler(ManualOptimization):
    """A schedule that the module steps itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@ordinary
class CosineSchedule(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@ordinary
class WarmUpByHand(Small):
    """The learning rate grows with the step, in the module's own ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 5)
        optimizer.step(closure)


@ordinary
class LearningRatePrinted(Small):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.log("norm", torch.stack(norms).norm())


@ordinary(trainer={"gradient_clip_val": 0.5})
class ClippedByNorm(Small):
    pass


@ordinary(trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"})
class ClippedByValue(Small):
    pass


@ordinary(trainer={"accumulate_grad_batches": 2})
class Accumulates(Small):
    pass


@ordinary(trainer={"precision": "bf16-mixed"})
class MixedPrecision(Small):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


@ordinary(trainer={"precision": "64-true"})
class DoublePrecision(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)


@ordinary
class Momentum(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, nesterov=True)


@ordinary
class GroupsOfParameters(Small):
    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.net.weight], "weight_decay": 0.1}, {"params": [self.net.bias]}]
        return torch.optim.AdamW(groups, lr=1e-2)


@ordinary
class WeightAverageOfTheModel(Small):
    """An exponential average of released weights, for validation."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


@ordinary
class MeanTeacher(WeightAverageOfTheModel):
    """The averaged weights teach."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.averaged(x + 0.01 * torch.randn_like(x)).softmax(1)
        return F.cross_entropy(out, y) + (out.softmax(1) - taught).square().sum(1).mean()


@ordinary
class FrozenTeacher(Small):
    """Distillation with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(
            False
        )

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            taught = (self.teacher(x) / 2).softmax(1)
        soft = F.kl_div((out / 2).log_softmax(1), taught, reduction="batchmean") * 4
        return 0.5 * F.cross_entropy(out, y) + 0.5 * soft


@ordinary
class AugmentsWithNumpy(Small):
    """One draw for the whole batch, from three libraries."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if np.random.rand() < 0.5:
            x = x.flip(1)
        if random.random() < 0.5:
            x = x * float(np.random.uniform(0.9, 1.1))
        return F.cross_entropy(self(x + 0.05 * torch.randn_like(x)), y)


@ordinary
class RDrop(Small):
    """Two passes with dropout are pulled together."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p, q = out.log_softmax(1), self(x).log_softmax(1)
        both = F.kl_div(p, q.exp(), reduction="none").sum(1) + F.kl_div(
            q, p.exp(), reduction="none"
        ).sum(1)
        return F.nll_loss(p, y) + F.nll_loss(q, y) + 0.5 * both.mean()


@ordinary
class ContrastsWithinARecord(Small):
    """InfoNCE among crops of one record."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        crops = torch.stack([self(x * m) for m in (1.0, 0.5, 1.5)], 1)
        likeness = F.normalize(crops, dim=2) @ F.normalize(crops, dim=2).transpose(1, 2)
        return F.cross_entropy(
            likeness.flatten(0, 1).view(len(x), 3, 3), torch.arange(3).expand(len(x), 3)
        )


def pairs(n: int) -> Records:
    x = torch.rand(n, 2, 4, generator=generator())
    return list(zip(x, (torch.arange(n) % 2).float(), strict=True))


@ordinary(records=pairs)
class SiamesePairs(Small):
    """A record is a pair."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pair, same = batch
        distance = (self(pair[:, 0]) - self(pair[:, 1])).norm(dim=1)
        return (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()


@ordinary(records=lambda n: [(x,) for x in torch.rand(n, 3, 4, generator=generator())])
class TripletsInARecord(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        a, p, q = (self(batch[0][:, i]) for i in range(3))
        return F.triplet_margin_loss(a, p, q, margin=0.5)


class Auto(Small):
    """Encoder and decoder."""

    def make(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "in": nn.Linear(4, 6),
                "mu": nn.Linear(6, 2),
                "sd": nn.Linear(6, 2),
                "out": nn.Linear(2, 4),
            }
        )

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.net["in"](x))
        return self.net["mu"](h), self.net["sd"](h)


@ordinary
class Vae(Auto):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        mu, log_variance = self.encode(x)
        z = mu + torch.randn_like(mu) * (log_variance / 2).exp()
        rebuilt = (self.net["out"](z) - x).square().sum(1)
        kl = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(1)
        return (rebuilt + self.beta() * kl).mean()

    def beta(self) -> float:
        return 1.0


@ordinary(trainer={"max_epochs": 3})
class BetaVaeWithWarmUp(Vae):
    def beta(self) -> float:
        return min(4.0, 0.5 * self.global_step)


@ordinary
class VaeWithDistributions(Auto):
    """The same by ``torch.distributions``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        mu, s = self.encode(x)
        q = torch.distributions.Normal(mu, F.softplus(s) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
        kl = torch.distributions.kl_divergence(q, prior).sum(1)
        return ((self.net["out"](q.rsample()) - x).square().sum(1) + kl).mean()


@ordinary
class DenoisingAutoencoder(Auto):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        z, _unused = self.encode(x * (torch.rand_like(x) > 0.3))
        return F.mse_loss(self.net["out"](z), x) + 0.0 * _unused.mean()


@ordinary
class SparseAutoencoder(Auto):
    """The penalty is per record."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        z, s = self.encode(x)
        return F.mse_loss(self.net["out"](z), x) + 0.01 * (z.abs() + s.abs()).sum(1).mean()


@ordinary
class Diffusion(Small):
    """Noise is predicted at a random time."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        t = torch.rand(len(x), 1, device=x.device)
        noise = torch.randn_like(x)
        noisy = (1 - t).sqrt() * x + t.sqrt() * noise
        return F.mse_loss(self(torch.cat([noisy, t], 1)), noise)


@ordinary
class DiffusionWithATable(Diffusion):
    """Discrete times, a table of noise levels in a buffer, weights by level."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        t = torch.randint(10, (len(x),), device=x.device)
        kept = self.kept[t][:, None]
        noise = torch.randn_like(x)
        found = self(torch.cat([kept.sqrt() * x + (1 - kept).sqrt() * noise, t[:, None] / 10], 1))
        return ((found - noise).square().mean(1) / (1 - kept[:, 0])).mean()


@ordinary
class FlowMatching(Diffusion):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        t, start = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(self(torch.cat([(1 - t) * start + t * x, t], 1)), x - start)


@ordinary
class ScoreMatching(Diffusion):
    """Denoising, with one level for each record."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        sigma = torch.exp(torch.randn(len(x), 1))
        noise = torch.randn_like(x)
        score = self(torch.cat([x + sigma * noise, sigma.log()], 1))
        return (score * sigma + noise).square().sum(1).mean()


@ordinary
class NormalisingFlow(Small):
    """One affine coupling."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        shift, scale = self(x[:, :2]).chunk(2, 1)
        z = torch.cat([x[:, :2], (x[:, 2:] - shift) * torch.exp(-torch.tanh(scale))], 1)
        return (0.5 * z.square().sum(1) + torch.tanh(scale).sum(1)).mean()


@ordinary
class MixtureOfExperts(Small):
    """A soft gate; each expert sees each record."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 3), *(nn.Linear(4, 3) for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        gate, *experts = self.net
        return sum(
            g[:, None] * expert(x)
            for g, expert in zip(gate(x).softmax(1).unbind(1), experts, strict=True)
        )


@ordinary
class MixtureWithMasks(MixtureOfExperts):
    """Only the best expert counts, by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        gate, *experts = self.net
        scores = gate(x).softmax(1)
        mask = F.one_hot(scores.argmax(1), 3)
        outs = torch.stack([expert(x) for expert in experts], 1)
        return (outs * (mask * scores)[:, :, None]).sum(1)


@ordinary
class MixtureDensity(Small):
    def make(self) -> nn.Module:
        return nn.Linear(4, 9)

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        weight, mean, scale = out.chunk(3, 1)
        normal = torch.distributions.Normal(mean, F.softplus(scale) + 0.1)
        return -torch.logsumexp(
            weight.log_softmax(1) + normal.log_prob(x.sum(1, keepdim=True)), 1
        ).mean()


@ordinary
class TwoHeads(Small):
    """Fixed weights of two tasks."""

    def make(self) -> nn.Module:
        return nn.ModuleDict({"trunk": nn.Linear(4, 8), "a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = F.relu(self.net["trunk"](x))
        return F.cross_entropy(self.net["a"](h), y) + 0.3 * F.mse_loss(
            self.net["b"](h)[:, 0], x.sum(1)
        )


class Scale(nn.Module):
    """A learned scale as a layer that sees each record."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(2))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * torch.exp(-self.log_scale) + self.log_scale).sum(1)


@ordinary
class LearnedUncertaintyPerRecord(TwoHeads):
    """Kendall's weights of tasks, applied to each record's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = F.relu(self.net["trunk"](x))
        first = F.cross_entropy(self.net["a"](h), y, reduction="none")
        second = (self.net["b"](h)[:, 0] - x.sum(1)).square()
        return self.scale(torch.stack([first, second], 1)).mean()


@ordinary
class GatedUnits(Small):
    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.GLU(), nn.LayerNorm(8), nn.SELU(), nn.Linear(8, 3)
        )


@ordinary
class StochasticDepth(Small):
    """A record skips a block with its own coin."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        first, block, last = self.net
        h = F.relu(first(x))
        coin = (torch.rand(len(x), 1) < 0.8) / 0.8 if self.training else 1.0
        return last(h + coin * F.relu(block(h)))


@ordinary
class LayerDrop(StochasticDepth):
    """One coin for all records: public randomness."""

    def forward(self, x: Tensor) -> Tensor:
        first, block, last = self.net
        h = F.relu(first(x))
        share = 0.0 if self.training and random.random() < 0.3 else 1.0
        return last(h + share * F.relu(block(h)))


# -- images -----------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n, n, 3, padding=1),
            nn.GroupNorm(2, n),
            nn.ReLU(),
            nn.Conv2d(n, n, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


@ordinary(records=images)
class SmallResNet(Small):
    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        )


@ordinary(records=images)
class AugmentedImages(SmallResNet):
    """Flips, crops and noise in the step, a draw for each record; values between 0 and 255."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        flip = torch.rand(len(x)) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(3), x)
        x = (x - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.25
        return F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), y)


@ordinary(records=images)
class VisionTransformer(Small):
    """Patches, a class token by padding, blocks of torch's encoder."""

    def make(self) -> nn.Module:
        return nn.ModuleDict({
            "patch": nn.Conv2d(3, 8, 4, 4),
            "blocks": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            "head": nn.Linear(8, 3),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.net["patch"](x).flatten(2).transpose(1, 2)
        return self.net["head"](self.net["blocks"](h).mean(1))


@ordinary(records=lambda n: [(x, (x.mean(0) > 0.5).long()) for x, _ in images(n)])
class Segmentation(Small):
    """A loss for each pixel, all images of one size."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


@ordinary(records=lambda n: [(x, (x.mean(0) > 0.5).float()) for x, _ in images(n)])
class DicePerRecord(Small):
    def make(self) -> nn.Module:
        return nn.Conv2d(3, 1, 3, padding=1)

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p = out[:, 0].sigmoid()
        dice = 2 * (p * y).sum((1, 2)) / (p.sum((1, 2)) + y.sum((1, 2)) + 1)
        return F.binary_cross_entropy_with_logits(out[:, 0], y) + (1 - dice).mean()


@ordinary(records=lambda n: [(x, (x.mean(0) > 0.5).long() - 1) for x, _ in images(n)])
class IgnoredPixelsPerRecord(Segmentation):
    """Pixels of -1 are unknown; each image divides by its own number."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        known = (y >= 0).float()
        losses = F.cross_entropy(out, y.clamp(min=0), reduction="none") * known
        return (losses.sum((1, 2)) / known.sum((1, 2)).clamp(min=1)).mean()


@ordinary(records=images)
class UNet(Small):
    def make(self) -> nn.Module:
        return nn.ModuleDict({
            "down": nn.Conv2d(3, 4, 3, 2, 1), "deep": nn.Conv2d(4, 4, 3, padding=1),
            "up": nn.ConvTranspose2d(4, 4, 2, 2), "out": nn.Conv2d(7, 3, 1),
        })  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        h = F.relu(self.net["down"](x + 0.1 * torch.randn_like(x)))
        h = F.relu(self.net["up"](F.relu(self.net["deep"](h))))
        return F.l1_loss(self.net["out"](torch.cat([h, x], 1)), x)


@ordinary(
    records=lambda n: [(x, torch.stack([y == 0, y > 0, y > 1]).float()) for x, y in points(n)]
)
class MultiLabel(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y)


# -- sequences --------------------------------------------------------------------------------


class Sequences(Small):
    """An embedding of 12 tokens, a net, a head."""

    classes = 3

    def make(self) -> nn.Module:
        return nn.ModuleDict({
            "embedding": nn.Embedding(12, 8), "body": self.body(), "head": nn.Linear(8, self.classes)
        })  # fmt: skip

    def body(self) -> nn.Module:
        return nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](F.relu(self.net["body"](self.net["embedding"](x))).mean(1))


@ordinary(records=tokens)
class BagOfWords(Sequences):
    pass


@ordinary(records=padded)
class MaskedMean(Sequences):
    """Zeros are padding; a record's mean is over its own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0)[:, :, None]
        h = torch.tanh(self.net["body"](self.net["embedding"](x))) * mask
        return self.net["head"](h.sum(1) / mask.sum(1).clamp(min=1))


@ordinary(records=padded)
class TransformerWithPaddingMask(Sequences):
    def body(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = x == 0
        mask = mask & ~mask.all(1, keepdim=True)  # a record of padding alone sees itself
        h = self.net["body"](self.net["embedding"](x), src_key_padding_mask=mask)
        return self.net["head"](h.masked_fill(mask[:, :, None], 0).sum(1) / 6)


@ordinary(records=tokens)
class CausalLanguageModel(Sequences):
    classes = 12

    def body(self) -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        h = self.net["body"](self.net["embedding"](x[:, :-1]), src_mask=mask, is_causal=True)
        return F.cross_entropy(self.net["head"](h).transpose(1, 2), x[:, 1:])


@ordinary(records=tokens)
class MaskedLanguageModel(CausalLanguageModel):
    """Random masks; each record divides by its own number of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        hidden = torch.rand(x.shape) < 0.3
        out = self.net["head"](self.net["body"](self.net["embedding"](x.masked_fill(hidden, 0))))
        losses = F.cross_entropy(out.transpose(1, 2), x, reduction="none") * hidden
        return (losses.sum(1) / hidden.sum(1).clamp(min=1)).mean()


@ordinary(records=padded)
class NextTokenWithPadding(CausalLanguageModel):
    """Padding is left out by each record's own mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        out = self.net["head"](torch.tanh(self.net["embedding"](x[:, :-1])))
        real = (x[:, 1:] != 0).float()
        losses = F.cross_entropy(out.transpose(1, 2), x[:, 1:], reduction="none") * real
        extra = self.net["body"](self.net["embedding"](x)).square().mean()
        return (losses.sum(1) / real.sum(1).clamp(min=1)).mean() + 1e-3 * extra


@ordinary(records=tokens)
class LongShortTerm(Sequences):
    def body(self) -> nn.Module:
        return DPLSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["body"](self.net["embedding"](x))[0][:, -1])


@ordinary(records=tokens)
class GatedRecurrent(LongShortTerm):
    def body(self) -> nn.Module:
        return DPGRU(8, 8, batch_first=True)


@ordinary(records=padded)
class SequenceToSequence(Sequences):
    """Encoder, decoder, teacher forcing, masks for padding, a mean for each record."""

    classes = 12

    def body(self) -> nn.Module:
        return nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        embedded = self.net["embedding"](x)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        h = self.net["body"](embedded, embedded[:, :-1], tgt_mask=mask)
        real = (x[:, 1:] != 0).float()
        losses = F.cross_entropy(self.net["head"](h).transpose(1, 2), x[:, 1:], reduction="none")
        return ((losses * real).sum(1) / real.sum(1).clamp(min=1)).mean()


class Reads(nn.Module):
    """Learned queries read a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(1, 16, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries(x.new_ones(len(x), 1)).view(len(x), 2, 8)
        return self.attention(queries, x, x, need_weights=False)[0]


@ordinary(records=tokens)
class Perceiver(Sequences):
    def body(self) -> nn.Module:
        return Reads()


@ordinary(
    records=lambda n: [
        (torch.rand(12, 5, generator=generator()), torch.tensor([1 + i % 3, 2]), torch.tensor(2))
        for i in range(n)
    ]
)
class Ctc(Small):
    """torch's mean divides each record by its own number of targets."""

    def make(self) -> nn.Module:
        return nn.Linear(5, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, lengths = batch
        log_probs = self(x).log_softmax(2).transpose(0, 1)
        steps = torch.full((len(x),), 12)
        return F.ctc_loss(log_probs, y, steps, lengths, zero_infinity=True)


@ordinary(records=lambda n: [(torch.rand(4, 20, generator=generator()), y) for _, y in points(n)])
class Signals(Small):
    """Convolutions over time."""

    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(4, 8, 3),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )


# -- batches ----------------------------------------------------------------------------------


@ordinary(records=lambda n: [({"in": {"x": x, "again": [x, x]}, "y": y},) for x, y in points(n)])
class NestedDictionaries(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch[0]
        return F.cross_entropy(self(batch["in"]["x"]) + self(batch["in"]["again"][1]), batch["y"])


@ordinary(
    records=lambda n: [{"x": x, "y": y, "id": f"img{i}.png"} for i, (x, y) in enumerate(points(n))]
)
class StringsInTheBatch(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert all(each.endswith(".png") for each in batch["id"])
        return F.cross_entropy(self(batch["x"]), batch["y"])


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@ordinary(records=lambda n: [Pair(x, y) for x, y in points(n)])
class NamedTuples(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch.x), batch.y)


@dataclass
class Sample:
    x: Tensor
    y: Tensor


def as_sample(rows: list[Any]) -> Sample:
    x, y = zip(*rows, strict=True)
    return Sample(torch.stack(x), torch.stack(y))


@ordinary(collate=as_sample)
class DataClasses(Small):
    """A batch is an object."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch.x), batch.y)


@ordinary(
    records=lambda n: [
        (x, y, torch.tensor(i), float(i), x[0] > 0.5) for i, (x, y) in enumerate(points(n))
    ]
)
class ManyTypes(Small):
    """Numbers of records, floats, flags."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _, age, flag = batch
        weight = torch.where(flag, 1.0, 0.5)
        losses = F.cross_entropy(self(x), y, reduction="none")
        return (losses * weight * torch.sigmoid(age.float() / 100)).mean()


@ordinary(records=lambda n: [((255 * x).to(torch.uint8), y) for x, y in images(n)])
class BytesAsImages(SmallResNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x.float() / 255), y)


def padded_to_the_longest(rows: list[Any]) -> Any:
    x, y = zip(*rows, strict=True)
    lengths = torch.tensor([int((each != 0).sum()) for each in x])
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), lengths, torch.stack(y)


@ordinary(records=padded, collate=padded_to_the_longest)
class LengthsInTheBatch(MaskedMean):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, lengths, y = batch
        real = (torch.arange(x.shape[1]) < lengths[:, None])[:, :, None]
        h = torch.tanh(self.net["body"](self.net["embedding"](x))) * real
        return F.cross_entropy(self.net["head"](h.sum(1) / lengths.clamp(min=1)[:, None]), y)


class Augmented(Rows):
    """Random numbers in ``__getitem__``."""

    def __getitem__(self, index: int) -> Record:
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(4) + random.gauss(0, 0.01) + np.random.randn() * 0.01, y


@ordinary(data=Augmented)
class AugmentedInTheDataSet(Small):
    pass


class Counting(Rows):
    """A cache and a counter in the data set."""

    def __init__(self, records: Records) -> None:
        super().__init__(records)
        self.cache: dict[int, Record] = {}
        self.calls = 0

    def __getitem__(self, index: int) -> Record:
        self.calls += 1
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


@ordinary(data=Counting)
class CachedInTheDataSet(Small):
    pass


@ordinary(records=targets)
class Quantiles(Small):
    """Three quantiles at once."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        error = y[:, None] - out
        q = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(q * error, (q - 1) * error).sum(1).mean()


@ordinary(
    records=lambda n: [
        (x, x.sum() if i % 5 else x.sum() * math.nan) for i, (x, _) in enumerate(points(n))
    ]
)
class MissingTargetsPerRecord(Small):
    """A missing target counts as zero loss; the denominator stays that of all records."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        known = ~torch.isnan(y)
        return ((out[:, 0] - torch.where(known, y, 0.0)).square() * known).mean()


@ordinary
class CosineClassifier(Small):
    """Outputs of a layer are normalised, each record alone."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(8 * F.normalize(out, dim=1), y)


@ordinary
class ArcFace(Small):
    """An angular margin at each record's own class."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.normalize(out, dim=1).clamp(-0.99, 0.99)
        margin = torch.cos(cosine.acos() + 0.2 * onehot(y))
        return F.cross_entropy(8 * margin, y)


@ordinary
class PolicyGradient(Small):
    """Rewards with a fixed baseline, entropy, clipped ratios."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=out)
        ratio = (policy.log_prob(y) - math.log(1 / 3)).exp()
        reward = x[:, 0] - 0.5
        best = torch.minimum(ratio * reward, ratio.clamp(0.8, 1.2) * reward)
        return -(best + 0.01 * policy.entropy()).mean()


@ordinary
class Preferences(Small):
    """Direct preference optimisation with a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = copy.deepcopy(self.net).requires_grad_(False).eval()

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            old = self.reference(x).log_softmax(1)
        gain = out.log_softmax(1) - old
        return -F.logsigmoid(0.5 * (gain[:, 0] - gain[:, 1])).mean()


@ordinary
class StraightThrough(Small):
    """Rounding in the forward pass."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        hard = out + (out.round() - out).detach()
        return F.mse_loss(hard, onehot(y))


@ordinary
class VectorQuantised(Small):
    """A fixed codebook, with a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.eye(3))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        nearest = self.codes[torch.cdist(out, self.codes).argmin(1)]
        code = out + (nearest - out).detach()
        return F.cross_entropy(code, y) + 0.25 * F.mse_loss(out, nearest)


@ordinary
class Backbone(Small):
    """A frozen backbone under ``no_grad``, a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.net(x)


@ordinary
class RefinedSeveralTimes(Small):
    """One layer is used three times."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.1 * torch.tanh(self.net[0](x))
        return self.net[1](x)


@ordinary
class DeepSupervision(RefinedSeveralTimes):
    """A loss at each depth, with falling weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = x.new_zeros(())
        for depth in range(3):
            x = x + 0.1 * torch.tanh(self.net[0](x))
            loss = loss + 0.5 ** (2 - depth) * F.cross_entropy(self.net[1](x), y)
        return loss / 3


@ordinary
class AdversarialInputs(Small):
    """The fast gradient sign: each record is moved by its own gradient."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            twin = F.linear(x, self.net.weight.detach(), self.net.bias.detach())
            slope = torch.autograd.grad(F.cross_entropy(twin, y, reduction="sum"), x)[0]
        return F.cross_entropy(self((x + 0.05 * slope.sign()).detach()), y)


@ordinary
class HooksThatDoNothing(Small):
    """All hooks of a batch, as a template has them."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x - 0.5, y

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zeroed = getattr(self, "zeroed", 0) + 1

    def on_after_backward(self) -> None:
        self.backwards = getattr(self, "backwards", 0) + 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last_batch = batch_idx
