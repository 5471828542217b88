"""A GAN whose discriminator alone sees the records: one private optimizer next to public ones."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, rows_of_records
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.journal import read_journal
from lightning_dp.estimators import Diff2
from tests.zoo import private

FIXED = 8  # rows of noise for a step of the generator


def is_real(logits: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def is_fake(logits: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


class GAN(L.LightningModule):
    """Lightning's own example: toggled optimizers, the generator first."""

    order = "gd"
    toggles = True
    every = 1  # batches to a step of the generator

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = dict(zip("gd", self.optimizers(), strict=True))
        losses = {"g": self.generator_loss, "d": self.critic_loss}
        for name in self.order:
            if name == "g" and (batch_idx + 1) % self.every:
                continue
            optimizer = optimizers[name]
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = losses[name](batch[0])
            self.go_back_and_step(loss, optimizer)
            self.log(name, loss.detach())
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def generator_loss(self, x: Tensor) -> Tensor:
        return is_real(self.critic(self.generator(torch.randn(FIXED, 4))))

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(torch.randn(len(x), 4)).detach()
        return (is_real(self.critic(x)) + is_fake(self.critic(fake))) / 2

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ], []


@pytest.fixture
def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(48, 6, generator=generator)), batch_size=12)


@pytest.fixture
def fit(loader: DataLoader[Any], make_trainer: Any) -> Any:
    """``fit(model, ...)``: one private fit with little else looked at."""

    def run(model: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        trainer = {"max_epochs": 1, **settings.pop("trainer", {})}
        size = settings.pop("batch_size", 12)
        if budget := settings.pop("budget", None):
            settings |= {"target_epsilon": budget, "noise_multiplier": 1.0}
        privacy = private(**{"target_delta": 1e-3, "private_optimizer": "critic", **settings})
        run.trainer = make_trainer(callbacks=[privacy, *callbacks], **trainer)
        run.privacy = privacy
        data = DataLoader(loader.dataset, batch_size=size)
        run.trainer.fit(model, data, ckpt_path=ckpt_path)
        return privacy

    return run


# -- which optimizer is private ------------------------------------------------------------------


@pytest.mark.parametrize("named", [1, "critic", "critic.0"])
def test_the_private_optimizer_is_named_by_its_place_or_its_module(named, fit):
    privacy = fit(GAN(), private_optimizer=named, trainer={"max_steps": 2})

    report = str(privacy.report())
    assert "private optimizer: SGD of critic (number 1 of 2); public" in report
    assert "SGD of generator" in report


class Shared(GAN):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.parameters(), 0.1),
            torch.optim.SGD(self.critic.parameters(), 0.1),
        ]


class Moved(GAN):
    """Needs a closure of its own."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class MoreRows(GAN):
    """More generated rows than there are records."""

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(torch.randn(2 * len(x), 4)).detach()
        return softplus(self.critic(fake)).mean() + is_real(self.critic(x))


class Penalised(GAN):
    """WGAN-GP: the penalty differentiates the critic's gradient."""

    def critic_loss(self, x: Tensor) -> Tensor:
        mixed = (x + self.generator(torch.randn(len(x), 4))).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() - self.critic(x).mean()


class Mixes(GAN):
    def critic_loss(self, x: Tensor) -> Tensor:
        return is_real(self.critic(x) - self.critic(x).mean())


class Twice(GAN):
    order = "dd"


class Alternates(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.order = "gd"[(batch_idx + 1) % 2]
        super().training_step(batch, batch_idx)


class FeatureMatching(GAN):
    def generator_loss(self, x: Tensor) -> Tensor:
        fake = self.critic[0](self.generator(torch.randn(FIXED, 4))).mean(0)
        return (fake - self.critic[0](x).mean(0).detach()).square().sum()


class FromEpoch1(GAN):
    def generator_loss(self, x: Tensor) -> Tensor:
        matching = FeatureMatching.generator_loss(self, x)
        return super().generator_loss(x) + (self.current_epoch > 0) * matching


class CountsRecords(GAN):
    def generator_loss(self, x: Tensor) -> Tensor:
        return is_real(self.critic(self.generator(torch.randn(len(x), 4))))


class CountsLast(CountsRecords):
    order = "dg"  # the random numbers of its loss are those behind the critic's


class ByEarlierLosses(GAN):
    """Weighs the generator's loss by the critic's at earlier batches."""

    balance = 1.0

    def generator_loss(self, x: Tensor) -> Tensor:
        return self.balance * super().generator_loss(x)

    def critic_loss(self, x: Tensor) -> Tensor:
        loss = super().critic_loss(x)
        self.balance = float(loss)
        return loss


class ClipsByRecords(GAN):
    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        self.manual_backward(loss)
        if optimizer is self.optimizers()[0]:
            self.clip_gradients(optimizer, 1e-3 * float(self.mean.abs()), "norm")
        optimizer.step()
        optimizer.zero_grad()

    def generator_loss(self, x: Tensor) -> Tensor:
        self.mean = x.mean()
        return super().generator_loss(x)


class Encoder(GAN):
    """An autoencoder whose encoder is called public."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        encoder, decoder = self.optimizers()
        encoder.zero_grad()
        decoder.zero_grad()
        self.manual_backward(self.critic(self.generator(batch[0][:, :4])).square().mean())
        encoder.step()
        decoder.step()


PENALTY = "a penalty on it: clip the weights"
FOLLOWS = "public optimizer"
CHECKED, DRY = {"checks": Checks()}, {"checks": Checks(comparisons=False)}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (GAN, {"private_optimizer": None}, r"gives 2 optimizers.*private_optimizer=1\).*'critic'"),
        (GAN, {"private_optimizer": 2}, "=2: configure_optimizers returned 2 .*0 to 1"),
        (GAN, {"private_optimizer": "net"}, r"name a module of GAN.*\['generator', 'critic'\]"),
        (Shared, {"private_optimizer": 1}, r"both hold the parameters \['critic.0.bias'"),
        (Shared, {}, "2 hold some of them.*private_optimizer=0"),
        (GAN, {"engine": "hooks"}, "generated rows.*engine='layers'"),
        (GAN, {"engine": "records"}, "whole batch.*engine='records'.*at 'auto'"),
        (GAN, {"engine": "one_by_one"}, "runs training_step once for each record"),
        (GAN, {"estimator": Diff2(2)}, "must run training_step again"),
        (Moved, {}, r"leave backward\(\) of the LightningModule"),
        (MoreRows, {}, "more rows than there are records"),
        (Penalised, {}, PENALTY),
        (Penalised, DRY, PENALTY),
        (Mixes, DRY, "couples the records of a batch"),
        (Twice, {}, "Two optimizer steps on one batch"),
        (Alternates, {}, r"no gradient for a chunk.*don't skip batches"),
        # Steps of public optimizers follow no record.
        *((kind, CHECKED, FOLLOWS) for kind in (FeatureMatching, FromEpoch1)),
        *((kind, CHECKED, FOLLOWS) for kind in (CountsRecords, CountsLast)),
        (Encoder, CHECKED, FOLLOWS),
        (ClipsByRecords, CHECKED, FOLLOWS),
        (ByEarlierLosses, CHECKED, r"depend on self\.balance"),
    ],
)
def test_what_cannot_be_trained_ends_with_the_cure(model, settings, message, fit):
    with pytest.raises(Exception, match=f"(?s){message}") as ended:
        fit(model(), **settings, trainer={"max_epochs": 2})

    assert fit.privacy.steps <= (2 if settings is not CHECKED else 8)
    assert "one_by_one" not in str(ended.value) or settings  # which manual optimization has not


@pytest.mark.parametrize("named", [0, "net"])
def test_private_optimizer_of_a_single_one(named, classifier, mlp, make_trainer, blobs):
    privacy = private(private_optimizer=named)
    trainer = make_trainer(max_steps=2, callbacks=[privacy])
    trainer.fit(classifier(mlp()), DataLoader(blobs, batch_size=12))
    assert privacy.steps == 2


# -- what a step does ------------------------------------------------------------------------------


class Watched(GAN):
    """Keeps what a plain twin needs: weights before and after each step, records and noise inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, dict[str, Tensor], Tensor, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        before = {name: value.clone() for name, value in self.state_dict().items()}
        self.go_back(loss, optimizer)
        optimizer.step()
        self.steps.append((self.last, before, self.records, self.noise))
        self.after.append({name: value.clone() for name, value in self.state_dict().items()})

    def go_back(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)

    def generator_loss(self, x: Tensor) -> Tensor:
        self.last, self.records, self.noise = "g", x, torch.randn(FIXED, 4)
        return is_real(self.critic(self.generator(self.noise)))

    def critic_loss(self, x: Tensor) -> Tensor:
        self.last, self.records, self.noise = "d", x, torch.randn(len(x), 4)
        fake = self.generator(self.noise).detach()
        return (is_real(self.critic(x)) + is_fake(self.critic(fake))) / 2


def plain_update(kind: str, before: dict[str, Tensor], x: Tensor, z: Tensor) -> dict[str, Tensor]:
    """One step by the obvious loop: a record and its row of noise at a time."""
    model = GAN()
    model.load_state_dict(before)
    if kind == "g":
        is_real(model.critic(model.generator(z))).backward()
        part, total = model.generator, {n: p.grad for n, p in model.generator.named_parameters()}
    else:
        part = model.critic
        total = {name: torch.zeros_like(p) for name, p in part.named_parameters()}
        for record, noise in zip(x, z, strict=True):
            real, fake = record[None], model.generator(noise[None]).detach()
            loss = (is_real(model.critic(real)) + is_fake(model.critic(fake))) / 2
            gradients = torch.autograd.grad(loss, list(part.parameters()))
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for name, gradient in zip(total, gradients, strict=True):
                total[name] += gradient * min(1.0, 0.3 / float(norm)) / 12
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter -= 0.1 * total[name]
    return model.state_dict()


def check_updates(model: Any) -> None:
    """Compare the weights after each step with those of the obvious loop."""
    for (kind, *step), after in zip(model.steps, model.after, strict=True):
        for name, expected in plain_update(kind, *step).items():
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("order", "toggles"), [("gd", True), ("gd", False), ("dg", False)])
def test_each_step_is_that_of_the_obvious_loop(order, toggles, fit):
    model = Watched()
    model.order, model.toggles = order, toggles

    fit(model, noise_multiplier=0.0, max_grad_norm=0.3, engine="layers", seed=3)

    assert [kind for kind, *_ in model.steps] == [*order] * 4
    check_updates(model)


class Tutorial(Watched):
    """PyTorch's tutorial: two backward passes for the discriminator, modules zeroed."""

    order, toggles = "dg", False

    def go_back(self, loss: Tensor, optimizer: Any) -> None:
        if self.last == "g":
            self.generator.zero_grad()
            return self.manual_backward(loss)
        self.critic.zero_grad(set_to_none=False)
        self.manual_backward(is_real(self.critic(self.records)) / 2)
        fake = self.generator(self.noise).detach()
        return self.manual_backward(is_fake(self.critic(fake)) / 2)


def test_two_backward_passes_for_the_private_optimizer_are_one_gradient_per_record(fit):
    model = Tutorial()

    fit(model, noise_multiplier=0.0, max_grad_norm=0.3, seed=3)

    check_updates(model)


class Wasserstein(GAN):
    """Five steps of the critic to one of the generator; weights are clipped after the step."""

    order, toggles, every = "dg", False, 2

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(torch.randn(len(x), 4)).detach()
        return self.critic(fake).mean() - self.critic(x).mean()

    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        super().go_back_and_step(loss, optimizer)
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("checked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_critic_with_clipped_weights_that_steps_more_often(checked, fit):
    model = Wasserstein()
    before = copy.deepcopy(model.generator.state_dict())

    checks = {"checks": Checks(dry_run=checked, comparisons=checked)}
    privacy = fit(model, trainer={"max_epochs": 2}, **checks)

    assert privacy.steps == 8
    assert fit.trainer.global_step == 8 + 4
    assert all(float(p.detach().abs().max()) < 0.0501 for p in model.critic.parameters())
    assert any(not torch.equal(v, before[n]) for n, v in model.generator.state_dict().items())


class InOneCall(GAN):
    """Real and generated rows go through the critic together."""

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(torch.randn(len(x), 4)).detach()
        with rows_of_records(torch.arange(len(x)).repeat(2), len(x)):
            real, fake = self.critic(torch.cat([x, fake])).chunk(2)
        return (is_real(real) + is_fake(fake)) / 2


def test_real_and_generated_rows_in_one_call_are_pairs_by_a_hint(fit):
    models = []
    for kind in (InOneCall, GAN):
        torch.manual_seed(5)
        models.append(kind())
        torch.manual_seed(5)
        fit(models[-1], noise_multiplier=0.0, max_grad_norm=0.3, seed=3)

    one, two = (model.state_dict() for model in models)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "toggles"),
    [
        ("gd", False),
        ("dg", False),
        pytest.param("gd", True, marks=pytest.mark.slow),
        pytest.param("dg", True, marks=pytest.mark.slow),
    ],
)
def test_an_ordinary_gan_passes_all_checks(order, toggles, fit):
    model = GAN()
    model.order, model.toggles = order, toggles

    privacy = fit(model, checks=Checks())

    assert privacy.steps == 4
    assert privacy._run.isolation == "compared on synthetic samples"


# -- private steps alone are charged -------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_private_steps_alone_are_charged(every, fit, tmp_path):
    model = GAN()
    model.every = every

    privacy = fit(model, trainer={"max_epochs": 3})

    (path,) = (tmp_path / "privacy").glob("*.journal")
    _, runs = read_journal(path)
    assert sum(count for run in runs.values() for _, count in run) == privacy.steps == 12
    events = [event for run in runs.values() for event in run]
    assert privacy.epsilon == pytest.approx(PLDAccountant().epsilon(events, 1e-3, "add_remove"))
    assert fit.trainer.global_step == 12 + 12 // every


def test_training_stops_before_the_step_that_would_exceed_the_budget(fit):
    affords_4 = fit(GAN()).epsilon + 1e-6

    privacy = fit(GAN(), budget=affords_4, trainer={"max_epochs": 5})

    assert privacy.steps == 4
    assert fit.trainer.global_step == 8
    assert "budget reached" in str(privacy.report())


@pytest.mark.parametrize("at_end", [True, False], ids=["epoch's end", "in the epoch"])
def test_a_resumed_run_goes_on_with_both_optimizers_and_the_same_plan(at_end, fit, tmp_path):
    class WithAdam(GAN):
        every = 2

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.generator.parameters(), lr=0.01),
                torch.optim.Adam(self.critic.parameters(), lr=0.01),
            ], []

    every = {"every_n_epochs": 1} if at_end else {"every_n_train_steps": 3}
    saver = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, filename="{step}", **every)
    options = {"max_epochs": 3, "enable_checkpointing": True}
    whole = fit(WithAdam(), saver, target_epsilon=3.0, trainer=options)
    noise = whole.noise_multiplier
    path = sorted((tmp_path / "saved").glob("*.ckpt"))[0]
    saved = torch.load(path, weights_only=False)
    assert len(saved["optimizer_states"]) == 2

    model = WithAdam()
    resumed = fit(model, target_epsilon=9.0, trainer=options, ckpt_path=path)

    assert fit.trainer.current_epoch == 3
    assert resumed.noise_multiplier == noise
    assert resumed.steps == whole.steps + (12 - saved["lightning_dp"]["mechanism"]["step"])
    assert resumed._run.mechanism.step == 12


def test_a_second_fit_of_the_same_trainer_goes_on_in_the_plan(fit, loader):
    model = GAN()
    privacy = fit(model)
    fit.trainer.fit_loop.max_epochs = 2
    fit.trainer.fit(model, loader)

    assert privacy.steps == 8
    assert privacy._run.mechanism.step == 8
