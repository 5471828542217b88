"""DPAdamW: AdamW without noise, an unbiased second moment with it, behind every chain that is known."""

from __future__ import annotations

import copy
import io
import math

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import (
    AbstractPostProcessor,
    AdaptiveQuantile,
    BandedNoise,
    Checks,
    CubicNewton,
    CyclicPoisson,
    Diff2,
    DPAdamW,
    Exponential,
    FullBatch,
    LaplacianSmoothing,
    MeanGradient,
    Momentum,
    Storm,
)
from lightning_dp.postprocessing import NoiseFilter
from tests.zoo import Classifier, flat, private, records


def weights(seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]


def stepped(optimizer, params, steps, *, variance=0.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            if "noise_variance" in group:
                group["noise_variance"] = variance
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-3}])
def test_without_noise_it_is_adamw_bit_for_bit(options):
    mine, other = weights(), weights()
    own = DPAdamW([{"params": mine[:1], "lr": 0.3}, {"params": mine[1:]}], lr=0.01, **options)
    torchs = torch.optim.AdamW(
        [{"params": other[:1], "lr": 0.3}, {"params": other[1:]}], lr=0.01, **options
    )
    for optimizer, params in ((own, mine), (torchs, other)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(4):
            stepped(optimizer, params, 5)
            schedule.step()
    assert all(map(torch.equal, mine, other))


def test_a_step_is_that_of_the_formula():
    params = weights()
    optimizer = DPAdamW(params, lr=0.1, betas=(0.7, 0.9), eps=1e-4, weight_decay=0.2, floor=0.3)
    theta = [p.detach().double().clone() for p in params]
    m, v, phi = [0.0, 0.0], [0.0, 0.0], 0.0
    generator = torch.Generator().manual_seed(0)
    for t, variance in enumerate((0.5, 2.0, 0.0, 1.0), 1):
        optimizer.param_groups[0]["noise_variance"] = variance
        phi = 0.9 * phi + 0.1 * variance
        for i, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=generator)
            g = param.grad.double()
            m[i], v[i] = 0.7 * m[i] + 0.3 * g, 0.9 * v[i] + 0.1 * g**2
            left = torch.clamp((v[i] - phi) / (1 - 0.9**t), min=0.3 * phi / (1 - 0.9**t))
            theta[i] = theta[i] * (1 - 0.1 * 0.2)
            theta[i] = theta[i] - 0.1 * m[i] / (1 - 0.7**t) / (left.sqrt() + 1e-4)
        optimizer.step()
        for param, expected in zip(params, theta, strict=True):
            torch.testing.assert_close(param.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_its_state_goes_on_from_a_file_and_from_adamw():
    params = weights()
    optimizer = DPAdamW(params, lr=0.1)
    stepped(optimizer, params, 3, variance=0.5)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    twins = copy.deepcopy(params)
    resumed = DPAdamW(twins, lr=0.5, floor=0.9)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    for each, of in ((optimizer, params), (resumed, twins)):
        stepped(each, of, 3, variance=0.7, seed=2)
    assert all(map(torch.equal, params, twins))

    plain, others = weights(), weights()
    adamw = torch.optim.AdamW(plain, lr=0.1)
    stepped(adamw, plain, 3)
    with torch.no_grad():
        for mine, other in zip(others, plain, strict=True):
            mine.copy_(other)
    continued = DPAdamW(others)
    continued.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for each, of in ((adamw, plain), (continued, others)):
        stepped(each, of, 3, seed=2)
    assert all(map(torch.equal, plain, others))


# -- the variance of the noise -------------------------------------------------------------------


CHAINS = [
    (MeanGradient(), []),
    (MeanGradient(), [Momentum(0.9), LaplacianSmoothing(2.0)]),
    (MeanGradient(), [LaplacianSmoothing(2.0), Momentum(0.5), Momentum(0.9)]),
    (Diff2(4), [Momentum(0.7)]),
    (Storm(0.2), [Momentum(0.9), Momentum(0.3)]),
]


@pytest.mark.parametrize(("estimator", "chain"), CHAINS, ids=repr)
def test_the_variance_is_that_of_the_response_to_each_release(estimator, chain):
    """h by the parts themselves: each release once an impulse, the others zero."""
    size, steps, stds = 7, 9, [1.0 + 0.3 * t for t in range(9)]
    noises = NoiseFilter(estimator, chain)
    found = [noises.advance(t, stds[t], size) for t in range(steps)]
    expected = [0.0] * steps
    for at in range(steps):
        for entry in range(size):
            states = [part.init([torch.zeros(size)]) for part in chain]
            v = torch.zeros(size, dtype=torch.float64)
            for t in range(steps):
                impulse = torch.zeros(size, dtype=torch.float64)
                if t == at:
                    impulse[entry] = stds[t]
                v = estimator.memory(t) * v + impulse if t else impulse
                out = v
                for i, part in enumerate(chain):
                    out, states[i] = part.apply(states[i], out)
                expected[t] += float(out[3]) ** 2
    assert found == pytest.approx(expected, rel=1e-5)


class Still(L.LightningModule):
    """Weights whose gradient is zero: what the optimizer sees is the noise alone."""

    def __init__(self, betas=(0.9, 0.8)):
        super().__init__()
        self.net, self.betas = nn.Linear(200, 100, bias=False), betas
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.net(torch.zeros(len(batch[0]), 200)).sum(1).mean()

    def configure_optimizers(self):
        return DPAdamW(self.parameters(), lr=1e-3, betas=self.betas, weight_decay=0.0)

    def on_train_batch_end(self, *_):
        optimizer = self.optimizers().optimizer
        (group,) = optimizer.param_groups
        second = optimizer.state[self.net.weight]["exp_avg_sq"]
        self.seen.append(
            (
                float(self.net.weight.grad.square().mean()) / group["noise_variance"],
                float(second.mean()) / group["noise_average"],
            )
        )


SEEN = {
    "plain": {},
    "schedule": {"noise_schedule": Exponential(0.2)},
    "momentum": {"postprocessing": [Momentum(0.8)], "noise_schedule": Exponential(0.2)},
    "smoothing": {"postprocessing": [LaplacianSmoothing(1.0)]},
    "both": {"postprocessing": [LaplacianSmoothing(1.0), Momentum(0.8)]},
    "diff2": {"estimator": Diff2(3, 1.0, 1.0), "postprocessing": [Momentum(0.5)]},
    "storm": {"estimator": Storm(0.3, 1.0, 1.0)},
    "adaptive": {"clipping": AdaptiveQuantile()},
    "full batch": {"sampling": FullBatch(), "max_grad_norm": 0.2},
}


@pytest.mark.filterwarnings("ignore:Diff2")
@pytest.mark.parametrize("kind", SEEN)
def test_of_zero_gradients_the_second_moment_is_the_noise_that_is_subtracted(kind, make_trainer):
    torch.manual_seed(0)
    model = Still()
    make_trainer(max_steps=10, max_epochs=-1, callbacks=[private(**SEEN[kind])]).fit(
        model,
        DataLoader(TensorDataset(torch.zeros(80)), batch_size=80 if kind == "full batch" else 40),
    )
    assert len(model.seen) == 10
    entries = 2000 if "smoothing" in repr(SEEN[kind]).lower() else 20_000
    tolerance = 5 * math.sqrt(2 / entries)  # of one step; entries that were smoothed are not alone
    for gradient, _ in model.seen:
        assert gradient == pytest.approx(1.0, abs=tolerance)
    means = torch.tensor(model.seen).mean(0)
    assert means.tolist() == pytest.approx([1.0, 1.0], abs=0.7 * tolerance)  # steps are alike


class OwnPart(AbstractPostProcessor):
    is_entrywise = True

    def __repr__(self):
        return "OwnPart()"

    def init(self, params):
        return {}

    def apply(self, state, estimate):
        return estimate.sign(), state


class Clips(Still):
    def configure_gradient_clipping(self, *args, **kwargs):
        pass


@pytest.mark.parametrize(
    ("options", "trainer", "named"),
    [
        ({"postprocessing": [OwnPart()]}, {}, r"OwnPart\(\)"),
        ({"postprocessing": [LaplacianSmoothing(1.0, per_parameter=True)]}, {}, "per_parameter"),
        ({"postprocessing": [LaplacianSmoothing(1.0), LaplacianSmoothing(2.0)]}, {}, "sigma=2.0"),
        ({"checks": Checks(gradient_edits="centred")}, {}, "gradient_edits='centred'"),
        ({"noise": BandedNoise(4), "sampling": CyclicPoisson(4)}, {}, r"BandedNoise\(.* not indep"),
        ({}, {"gradient_clip_val": 1.0}, r"gradient_clip_val=1\.0"),
        ({}, {"model": Clips}, "clipping of the private gradient"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_clip_val")
def test_a_chain_whose_noise_is_not_known_is_named_before_a_charge(
    options, trainer, named, make_trainer
):
    model, privacy = trainer.pop("model", Still)(), private(**options)
    with pytest.raises(MisconfigurationException, match=named):
        make_trainer(max_steps=1, callbacks=[privacy], **trainer).fit(
            model, DataLoader(TensorDataset(torch.zeros(40)), batch_size=8)
        )
    assert privacy.steps == 0
    assert NoiseFilter(CubicNewton(1.0, 1.0, 2), []).part_without_variance.startswith("CubicNewton")


# -- in a Trainer --------------------------------------------------------------------------------


def data():
    return DataLoader(TensorDataset(*records(240)), batch_size=24, shuffle=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", ["both", "plain"])
def test_a_private_run_learns_and_goes_on_as_if_it_had_not_stopped(kind, make_trainer, tmp_path):
    def fit(steps, **options):
        torch.manual_seed(0)
        model = Classifier(network(), lambda params: DPAdamW(params, lr=0.1))
        settings = {**SEEN[kind], "noise_multiplier": 0.2}
        trainer = make_trainer(max_steps=steps, max_epochs=-1, callbacks=[private(**settings)])
        trainer.fit(model, data(), **options)
        return trainer, model

    whole, model = fit(60)
    x, y = records(240)
    assert float((model(x).argmax(1) == y).double().mean()) > 0.5
    first, _ = fit(40)
    first.save_checkpoint(path := tmp_path / "first.ckpt")
    resumed, _ = fit(60, ckpt_path=path, weights_only=False)
    groups = [each.optimizers[0].param_groups[0] for each in (whole, resumed)]
    for name in ("noise_variance", "noise_average"):
        assert groups[0][name] == pytest.approx(groups[1][name], rel=1e-9)
        assert groups[0][name] > 0


# -- optimizers of torch ---------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_steps_on_the_private_gradient_as_it_is(make_trainer):
    released = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            released.append([param.grad.clone() for param in pl_module.parameters()])

    def matrices():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))

    model, alone = Classifier(matrices(), lambda p: torch.optim.Muon(p, lr=0.02)), matrices()
    callback = private()
    trainer = make_trainer(max_steps=5, callbacks=[Watch(), callback])
    trainer.fit(model, DataLoader(TensorDataset(*records(60)), 12))

    optimizer = torch.optim.Muon(alone.parameters(), lr=0.02)
    for gradients in released:
        for param, gradient in zip(alone.parameters(), gradients, strict=True):
            param.grad = gradient
        optimizer.step()
    assert callback.steps == len(released) == 5
    assert torch.equal(flat(model), flat(alone))
