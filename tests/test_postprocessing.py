"""Post-processors: one contract for all, and the closed form of each."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, FullBatch, Momentum, postprocessing
from lightning_dp._noise import NoiseSource
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.postprocessing import AbstractPostProcessor, LaplacianSmoothing
from lightning_dp.schedules import Exponential
from tests.zoo import private

# One line for each post-processor.
CASES: dict[str, AbstractPostProcessor] = {
    "momentum": Momentum(0.9),
    "momentum_identity": Momentum(0.0),
    "laplacian_smoothing": LaplacianSmoothing(1.0),
    "laplacian_smoothing_per_parameter": LaplacianSmoothing(1.0, per_parameter=True),
}
PARAMS = [torch.zeros(2, 2), torch.zeros(3)]
SIZE = 7  # entries of them all


@pytest.fixture(params=CASES)
def processor(request: pytest.FixtureRequest) -> AbstractPostProcessor:
    return CASES[request.param]


def releases(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator).to(dtype) for _ in range(steps)]


def apply_all(processor: AbstractPostProcessor, estimates: list[Tensor]) -> list[Tensor]:
    state, results = processor.init(PARAMS), []
    for estimate in estimates:
        result, state = processor.apply(state, estimate)
        results.append(result)
    return results


class TestContract:
    """Promises of every post-processor."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_it_keeps_length_and_type(self, processor, dtype):
        for result in apply_all(processor, releases(3, dtype)):
            assert result.shape == (SIZE,)
            assert result.dtype == dtype

    def test_it_is_a_pure_function_of_its_arguments(self, processor):
        first, second = (torch.stack(apply_all(processor, releases(4))) for _ in range(2))
        assert torch.equal(first, second)

    def test_it_changes_none_of_its_arguments(self, processor):
        state = processor.init(PARAMS)
        for estimate in releases(3):
            before = copy.deepcopy((state, estimate))
            _, following = processor.apply(state, estimate)
            assert repr((state, estimate)) == repr(before)
            state = following

    def test_it_is_linear_in_the_releases(self, processor):
        once = torch.stack(apply_all(processor, releases(4)))
        doubled = torch.stack(apply_all(processor, [2 * release for release in releases(4)]))
        torch.testing.assert_close(doubled, 2 * once)

    @pytest.mark.parametrize("saved_after", [0, 2])
    def test_it_resumes_from_a_checkpoint(self, processor, saved_after):
        expected = apply_all(processor, releases(5))
        state = processor.init(PARAMS)
        for number, estimate in enumerate(releases(5)):
            if number == saved_after:
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
            result, state = processor.apply(state, estimate)
            assert torch.equal(result, expected[number])

    def test_it_is_frozen_configuration(self, processor):
        for name in [f.name for f in dataclasses.fields(processor)]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(processor, name, 0)

    def test_its_repr_is_the_call_that_made_it(self, processor):
        assert eval(repr(processor), vars(postprocessing)) == processor


def test_every_postprocessor_is_tested():
    public = {getattr(postprocessing, name) for name in postprocessing.__all__}
    assert public - {AbstractPostProcessor} == {type(processor) for processor in CASES.values()}


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.999])
def test_momentum_is_the_weighted_average_of_all_releases(beta):
    """m_t = sum_s beta^(t-s) g_s / sum_s beta^(t-s), all releases at hand."""
    given = releases(12, torch.float64)

    results = apply_all(Momentum(beta), given)

    for t, result in enumerate(results):
        weights = torch.tensor([beta ** (t - s) for s in range(t + 1)], dtype=torch.float64)
        average = (weights[:, None] * torch.stack(given[: t + 1])).sum(0) / weights.sum()
        torch.testing.assert_close(result, average, rtol=1e-9, atol=1e-12)


def test_momentum_of_equal_releases_is_the_release():
    for result in apply_all(Momentum(0.9), [torch.full((SIZE,), 0.7)] * 20):
        torch.testing.assert_close(result, torch.full((SIZE,), 0.7))


def test_momentum_with_beta_0_is_the_identity():
    for result, release in zip(apply_all(Momentum(0.0), releases(5)), releases(5), strict=True):
        assert torch.equal(result, release)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2.0, math.nan])
def test_a_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ValueError, match=rf"Momentum\(beta={beta}\) must be in \[0, 1\)"):
        Momentum(beta)


# -- laplacianSmoothing as a post-processor: of the whole flat vector, or of each parameter ------


SMOOTHED = [torch.zeros(4, 3), torch.zeros(1), torch.zeros(2), torch.zeros(5)]
SIZES = [12, 1, 2, 5]


def estimate(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(0)).to(dtype)


def smoothed(processor: LaplacianSmoothing, v: torch.Tensor) -> torch.Tensor:
    result, _ = processor.apply(processor.init(SMOOTHED), v)
    return result


@pytest.mark.parametrize("sigma", [0.2, 1.0, 3.0, 50.0])
def test_the_whole_vector_is_one_circle(sigma, dense):
    exact = np.linalg.solve(dense(20, sigma), estimate().numpy())
    found = smoothed(LaplacianSmoothing(sigma), estimate())
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.2, 1.0, 3.0, 50.0])
def test_per_parameter_each_one_is_a_circle(sigma, dense):
    parts = np.split(estimate().numpy(), np.cumsum(SIZES)[:-1])
    exact = [np.linalg.solve(dense(len(part), sigma), part) for part in parts]
    found = smoothed(LaplacianSmoothing(sigma, per_parameter=True), estimate())
    np.testing.assert_allclose(found.numpy(), np.concatenate(exact), rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, smoothed(LaplacianSmoothing(sigma), estimate()), atol=0.05)


@pytest.mark.parametrize("sigma", [-0.5, math.nan, math.inf])
def test_a_sigma_that_is_negative_or_not_finite_is_refused_by_name(sigma):
    with pytest.raises(ValueError, match=rf"LaplacianSmoothing\(sigma={sigma}\) must be finite"):
        LaplacianSmoothing(sigma)


# -- dP-LSSGD and DP-LSAdam through the real Trainer, against a twin written out in numpy --------


RECORDS, FEATURES, CLASSES, CLIP = 60, 6, 3, 0.8
Array = NDArray[np.float64]
Update = Callable[[Array, int], Array]


@dataclass(frozen=True)
class Noted(AbstractPostProcessor):
    """Changes nothing, and writes down what comes by."""

    calls: list[Any] = field(default_factory=list, repr=False)

    def init(self, params: Any) -> dict[str, Any]:
        return {}

    def apply(self, state: dict[str, Any], estimate: Tensor) -> tuple[Tensor, dict[str, Any]]:
        self.calls.append(estimate.numpy().copy())
        return estimate, state


class Softmax(L.LightningModule):
    """Softmax regression in float64; notes which records each step used."""

    def __init__(self, configure: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.configure = configure
        self.batches: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, number = batch
        self.batches.append(number.tolist())
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return self.configure(self.layer)

    def flat(self) -> Array:
        return np.concatenate([p.detach().numpy().ravel().copy() for p in self.parameters()])


@pytest.fixture
def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(RECORDS) % CLASSES
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    x = x + 2 * nn.functional.one_hot(y, FEATURES)
    return TensorDataset(x, y, torch.arange(RECORDS))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Every vector of noise that is drawn, in order."""
    vectors: list[Array] = []
    true_normal = NoiseSource.add_normal

    def add_normal(self: NoiseSource, vector: Tensor, std: float) -> None:
        values = torch.zeros(len(vector), dtype=torch.float64)
        true_normal(self, values, 1.0)
        vectors.append(values.numpy())
        vector += std * values

    monkeypatch.setattr(NoiseSource, "add_normal", add_normal)
    return vectors


def clipped_sum(flat: Array, records: TensorDataset, chosen: list[int]) -> Array:
    """Σ clip(g_i), one record at a time: g_i = (p - e_y) ⊗ (x, 1), the bias last."""
    weight = flat[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)
    bias = flat[CLASSES * FEATURES :]
    total = np.zeros_like(flat)
    for i in chosen:
        x, y = records.tensors[0][i].numpy(), int(records.tensors[1][i])
        scores = weight @ x + bias
        delta = np.exp(scores - scores.max())
        delta /= delta.sum()
        delta[y] -= 1
        gradient = np.concatenate([np.outer(delta, x).ravel(), delta])
        total += gradient * min(1.0, CLIP / np.linalg.norm(gradient))
    return total


def sgd(rate: float = 0.7) -> Update:
    return lambda gradient, step: -rate * gradient


def adam(rate: float = 0.05) -> Update:
    first, second = 0.0, 0.0

    def update(gradient: Array, step: int) -> Array:
        nonlocal first, second
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        scale = np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8
        return -rate * first / (1 - 0.9 ** (step + 1)) / scale

    return update


def twin(
    start: Array,
    records: TensorDataset,
    batches: list[list[int]],
    expected_batch_size: float,
    smooth: Callable[[Array], Array],
    update: Update,
    noise: Callable[[int], Array | float] = lambda step: 0.0,
) -> Array:
    """The run again: clip, sum, noise, divide, smooth, update."""
    flat = start
    for step, chosen in enumerate(batches):
        released = (clipped_sum(flat, records, chosen) + noise(step)) / expected_batch_size
        flat = flat + update(smooth(released), step)
    return flat


def train(make_trainer: Any, records: TensorDataset, configure: Any, **arguments: Any) -> Any:
    """Two epochs; the model, its first weights and the callback."""
    options: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "seed": 5}
    options |= {"checks": Checks(dry_run=False, comparisons=False)}
    privacy = DifferentialPrivacy(**{**options, "target_delta": 1e-5, **arguments})
    model = Softmax(configure)
    start = model.flat()
    full = isinstance(arguments.get("sampling"), FullBatch)
    loader = DataLoader(records, batch_size=RECORDS if full else 20, shuffle=not full)
    make_trainer(max_epochs=8 if full else 4, callbacks=[privacy]).fit(model, loader)
    return model, start, privacy


OPTIMIZERS: dict[str, tuple[Callable[[nn.Linear], Any], Callable[[], Update]]] = {
    "DP-LSSGD": (lambda net: torch.optim.SGD(net.parameters(), lr=0.7), sgd),
    "DP-LSAdam": (lambda net: torch.optim.Adam(net.parameters(), lr=0.05), adam),
}


@pytest.mark.parametrize("sampling", [None, FullBatch()], ids=["Poisson", "full batch"])
@pytest.mark.parametrize(("name", "sigma"), [("DP-LSSGD", 0.2), ("DP-LSAdam", 3.0)])
def test_without_noise_it_is_the_numpy_twin(name, sigma, sampling, records, make_trainer, dense):
    configure, update = OPTIMIZERS[name]
    more = {} if sampling is None else {"sampling": sampling}
    model, start, _ = train(
        make_trainer, records, configure, postprocessing=[LaplacianSmoothing(sigma)], **more
    )

    matrix = dense(len(start), sigma)
    size = 20 if sampling is None else RECORDS
    expected = twin(
        start, records, model.batches, size, lambda v: np.linalg.solve(matrix, v), update()
    )

    assert len(model.batches) == (12 if sampling is None else 8)
    np.testing.assert_allclose(model.flat(), expected, rtol=1e-9, atol=1e-11)
    plain = twin(start, records, model.batches, size, lambda v: v, update())
    assert np.abs(plain - expected).max() > 0.02


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_noise_and_a_schedule_it_is_the_numpy_twin(name, records, make_trainer, dense, drawn):
    configure, update = OPTIMIZERS[name]
    schedule = Exponential(rate=0.2)
    model, start, _ = train(
        *(make_trainer, records, configure),
        noise_multiplier=3.0,
        noise_schedule=schedule,
        postprocessing=[LaplacianSmoothing(1.0)],
    )

    matrix = dense(len(start), 1.0)
    expected = twin(
        *(start, records, model.batches, 20),
        lambda v: np.linalg.solve(matrix, v),
        update(),
        lambda step: 3.0 * CLIP * schedule(step) * drawn[step],
    )

    assert len(drawn) == 12
    np.testing.assert_allclose(model.flat(), expected, rtol=1e-8, atol=1e-10)


def test_noise_is_added_before_smoothing(records, make_trainer, dense, drawn):
    """Clipped mean + noise goes in, its dense solve comes out; noise is drawn once, and before."""
    sigma, multiplier = 2.0, 4.0
    before, after = Noted(), Noted()
    counts: list[int] = []

    @dataclass(frozen=True)
    class Counting(Noted):
        def apply(self, state, estimate):
            counts.append(len(drawn))
            return estimate, state

    model, start, _ = train(
        *(make_trainer, records, OPTIMIZERS["DP-LSSGD"][0]),
        noise_multiplier=multiplier,
        postprocessing=[Counting(), before, LaplacianSmoothing(sigma), after, Counting()],
    )

    steps = len(model.batches)
    assert counts == [n for step in range(steps) for n in (step + 1, step + 1)]
    matrix = dense(len(start), sigma)
    total = clipped_sum(start, records, model.batches[0])
    np.testing.assert_allclose(
        before.calls[0], (total + multiplier * CLIP * drawn[0]) / 20, rtol=1e-9
    )
    for given, made in zip(before.calls, after.calls, strict=True):
        np.testing.assert_allclose(made, np.linalg.solve(matrix, given), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("momentum_first", [True, False])
def test_it_composes_with_momentum_in_either_order(momentum_first, records, make_trainer, dense):
    """Both are linear and one acts on steps, the other on entries: the order makes no difference."""
    chain = [Momentum(0.7), LaplacianSmoothing(1.0)]
    model, start, _ = train(
        *(make_trainer, records, OPTIMIZERS["DP-LSSGD"][0]),
        postprocessing=chain if momentum_first else chain[::-1],
    )

    matrix, given = dense(len(start), 1.0), []

    def smooth(v: Array) -> Array:
        given.append(v)
        weights = 0.7 ** np.arange(len(given))[::-1]
        return np.linalg.solve(matrix, weights @ np.array(given) / weights.sum())

    expected = twin(start, records, model.batches, 20, smooth, sgd())
    np.testing.assert_allclose(model.flat(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("per_parameter", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    name, per_parameter, records, make_trainer, tmp_path
):
    loader = DataLoader(records, batch_size=RECORDS)

    def fit(epochs: int, **more: Any) -> tuple[Softmax, L.Trainer]:
        privacy = private(
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            sampling=FullBatch(),
            postprocessing=[Momentum(0.5), LaplacianSmoothing(1.0, per_parameter)],
        )
        model = Softmax(OPTIMIZERS[name][0])
        trainer = make_trainer(max_epochs=epochs, callbacks=[privacy])
        trainer.fit(model, loader, **more)
        return model, trainer

    whole, _ = fit(9)
    _, trainer = fit(4)
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    resumed, _ = fit(9, ckpt_path=tmp_path / "mid.ckpt", weights_only=True)

    np.testing.assert_allclose(resumed.flat(), whole.flat(), rtol=0, atol=1e-12)
