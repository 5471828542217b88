"""One private optimizer next to public ones: what each step does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

from lightning_dp import rows_of_records
from tests.strategies.several_optimizers.gan import FIXED, GAN, is_fake, is_real
from tests.zoo import private

# -- what a step does ------------------------------------------------------------------------------


class Watched(GAN):
    """Keeps what a plain twin needs: weights before and after each step, records and noise inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, dict[str, Tensor], Tensor, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        before = {name: value.clone() for name, value in self.state_dict().items()}
        super().go_back_and_step(loss, optimizer)
        self.steps.append((self.last, before, self.records, self.noise))
        self.after.append({name: value.clone() for name, value in self.state_dict().items()})

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


@pytest.mark.parametrize(
    ("engine", "order", "toggles"),
    [
        ("layers", "gd", True),
        ("layers", "gd", False),
        ("layers", "dg", False),
    ],
)
def test_each_step_is_that_of_the_obvious_loop(engine, order, toggles, fit):
    model = Watched()
    model.order, model.toggles = order, toggles

    fit(model, noise_multiplier=0.0, max_grad_norm=0.3, engine=engine, seed=3)

    assert [kind for kind, *_ in model.steps] == [*order] * 4
    for (kind, *step), after in zip(model.steps, model.after, strict=True):
        for name, expected in plain_update(kind, *step).items():
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)


class Tutorial(Watched):
    """As PyTorch's tutorial: two backward passes for the discriminator, modules zeroed."""

    order, toggles = "dg", False

    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        before = {name: value.clone() for name, value in self.state_dict().items()}
        if self.last == "d":
            self.critic.zero_grad(set_to_none=False)
            self.manual_backward(is_real(self.critic(self.records)) / 2)
            fake = self.generator(self.noise).detach()
            self.manual_backward(is_fake(self.critic(fake)) / 2)
        else:
            self.generator.zero_grad()
            self.manual_backward(loss)
        optimizer.step()
        self.steps.append((self.last, before, self.records, self.noise))
        self.after.append({name: value.clone() for name, value in self.state_dict().items()})


def test_two_backward_passes_for_the_private_optimizer_are_one_gradient_per_record(fit):
    model = Tutorial()

    fit(model, noise_multiplier=0.0, max_grad_norm=0.3, seed=3)

    for (kind, *step), after in zip(model.steps, model.after, strict=True):
        for name, expected in plain_update(kind, *step).items():
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)


class Closures(Watched):
    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            return loss

        before = {name: value.clone() for name, value in self.state_dict().items()}
        optimizer.step(closure=closure)
        self.steps.append((self.last, before, self.records, self.noise))
        self.after.append({name: value.clone() for name, value in self.state_dict().items()})


def test_closures(fit):
    model = Closures()

    fit(model, noise_multiplier=0.0, max_grad_norm=0.3, seed=3)

    for (kind, *step), after in zip(model.steps, model.after, strict=True):
        for name, expected in plain_update(kind, *step).items():
            torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)


def test_the_generators_step_leaves_no_gradient_of_the_discriminator(fit):
    seen = []

    class Looks(GAN):
        toggles = False

        def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
            super().go_back_and_step(loss, optimizer)
            if optimizer.optimizer is self.trainer.optimizers[0]:
                own = [p.grad for p in self.critic.parameters() if p.grad is not None]
                seen.append(max((float(g.abs().max()) for g in own), default=0.0))

    model = Looks()
    fit(model, trainer={"max_steps": 1}, noise_multiplier=0.0)

    assert seen == [0.0]


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

    checks = {"isolation_probe": checked, "spot_checks": checked}
    privacy = fit(model, trainer={"max_epochs": 2}, **checks)

    assert privacy.steps == 8
    assert fit.trainer.global_step == 8 + 4
    assert all(float(p.detach().abs().max()) < 0.0501 for p in model.critic.parameters())
    assert any(not torch.equal(v, before[n]) for n, v in model.generator.state_dict().items())


class Rows(GAN):
    """Real and generated rows in one call of the discriminator."""

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(torch.randn(2 * len(x), 4)).detach()
        return softplus(self.critic(fake)).mean() + is_real(self.critic(x))


def test_more_generated_rows_than_records_are_refused(fit):
    with pytest.raises(TypeError, match="more rows than there are records"):
        fit(Rows())


# -- the rest --------------------------------------------------------------------------------------


def test_clipping_of_a_public_gradient_is_the_users_own(fit):
    norms = []

    class Clips(GAN):
        def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1e-3, "norm")
            held = [p.grad for g in optimizer.param_groups for p in g["params"]]
            if held[0] is not None and optimizer.optimizer is self.trainer.optimizers[0]:
                norms.append(float(torch.stack([g.norm() for g in held]).norm()))
            optimizer.step()

    fit(Clips())

    assert norms == pytest.approx([1e-3] * 4, rel=1e-2)


def test_schedulers_of_both(fit):
    class Scheduled(GAN):
        def configure_optimizers(self) -> Any:
            optimizers, _ = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    model = Scheduled()
    fit(model, trainer={"max_epochs": 2})

    assert [o.param_groups[0]["lr"] for o in fit.trainer.optimizers] == [0.025, 0.025]


def test_hooks_run_for_each_backward_pass_and_step(fit):
    calls = []
    noting = LambdaCallback(
        on_after_backward=lambda *a: calls.append("back"),
        on_before_optimizer_step=lambda *a: calls.append("step"),
    )

    fit(GAN(), noting, trainer={"max_steps": 2})

    assert calls == ["back", "step"] * 2


class Penalised(GAN):
    """WGAN-GP: the penalty differentiates the critic's gradient."""

    def critic_loss(self, x: Tensor) -> Tensor:
        mixed = (x + self.generator(torch.randn(len(x), 4))).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() - self.critic(x).mean()


@pytest.mark.parametrize("probed", [True, False])
def test_a_gradient_penalty_is_refused_with_the_cure(probed, fit):
    with pytest.raises(TypeError, match="a penalty on it: clip the weights") as refusal:
        fit(Penalised(), isolation_probe=probed)

    assert "one_by_one" not in str(refusal.value)  # which manual optimization does not have


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


# -- public data -----------------------------------------------------------------------------------


def test_the_gradient_of_public_data_is_added_by_a_declared_edit(
    classifier, mlp, make_trainer, blobs
):
    """As the refusal of several loaders says."""
    public = [tensor[:12] for tensor in blobs.tensors]

    class Mixed(classifier):  # type: ignore[misc]
        weight = 0.5

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            loss = self.weight * nn.functional.cross_entropy(self(public[0]), public[1])
            parameters = list(self.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            self.private = [p.grad.clone() for p in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad += gradient
            self.before = [p.detach().clone() for p in parameters]
            self.total = [p.grad.clone() for p in parameters]

    model = Mixed(mlp())
    privacy = private(gradient_edits="adds the gradient of public data")
    make_trainer(max_steps=3, callbacks=[privacy]).fit(model, DataLoader(blobs, batch_size=24))

    assert privacy.steps == 3
    for now, before, total in zip(model.parameters(), model.before, model.total, strict=True):
        torch.testing.assert_close(now.detach(), before - 0.1 * total)
    assert any((a != b).any() for a, b in zip(model.total, model.private, strict=True))
