"""Layer by layer: norms and clipped sums of the book-keeping engine against one record at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients.adding_up import plain_gradients
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.rules import RULES

RECORDS = 5


def moved(module: nn.Module, by: float) -> nn.Module:
    """The same model at a nearby point."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(torch.randn(param.shape, generator=generator), alpha=by)
    return other


@cache
def nearby_rows(oracle: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda module, batch: oracle.one_by_one(moved(module, 0.1), batch)


@cache
def poisoned_rows(oracle: Any, poison: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def rows(module: nn.Module, batch: Tensor) -> Tensor:
        batch[2] = float(poison)
        return oracle.one_by_one(module, batch)

    return rows


def at(module: nn.Module, other: nn.Module) -> dict[str, Tensor]:
    kept = {name: param.detach().clone() for name, param in module.named_parameters()}
    module.load_state_dict(other.state_dict())
    return kept


@pytest.mark.usefixtures("memory")
def test_norms_and_clipped_sums_equal_the_loop(
    layer_engine, layer_case, model_and_batch, oracle, slow
):
    module, batch = model_and_batch
    expected = slow(oracle.one_by_one, layer_case)
    layer_engine.attach(module, oracle.trained(module))

    gradients = oracle.run(layer_engine, module, batch)

    assert gradients.count == oracle.records
    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-6, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = oracle.clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    "weights",
    [(1.0, -0.3), *(pytest.param(w, marks=pytest.mark.slow) for w in ((0.0, 2.0), (1.0, -1.0)))],
)
def test_combinations_at_two_points_equal_the_loop(
    layer_engine, layer_case, model_and_batch, weights, oracle, slow
):
    module, batch = model_and_batch
    other = moved(module, 0.1)
    rows, other_rows = slow(oracle.one_by_one, layer_case), slow(nearby_rows(oracle), layer_case)
    expected = weights[0] * rows + weights[1] * other_rows
    layer_engine.attach(module, oracle.trained(module))
    here = oracle.run(layer_engine, module, batch, combined=True)
    at(module, other)
    there = oracle.run(layer_engine, module, batch, combined=True)

    gradients = here.combine(weights[0], [(weights[1], there)])

    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-5, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = oracle.clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_record_that_is_not_finite_contributes_nothing(
    layer_engine, layer_case, model_and_batch, poison, oracle, slow
):
    module, batch = model_and_batch
    if not batch.is_floating_point():
        pytest.skip("tokens are finite")
    batch[2] = float(poison)
    expected = slow(poisoned_rows(oracle, poison), layer_case)
    if torch.isfinite(expected[2]).all():
        pytest.skip("the layer swallows it")
    finite = expected[torch.arange(oracle.records) != 2]
    layer_engine.attach(module, oracle.trained(module))

    clip_norm = float(finite.norm(dim=1).median())
    total = bounded_sum(oracle.run(layer_engine, module, batch), clip_norm).value.double()

    wanted = oracle.clipped(finite, clip_norm)
    assert (total - wanted).norm() <= 2e-6 * wanted.norm()


def test_an_empty_sum_is_zero(layer_engine, oracle):
    module = nn.Linear(6, 3)
    layer_engine.attach(module, oracle.trained(module))
    gradients = oracle.run(layer_engine, module, torch.full((oracle.records, 6), float("nan")))
    assert torch.equal(bounded_sum(gradients, 1.0).value, torch.zeros(21))


def test_a_table_with_sparse_gradients_is_as_any_other(oracle):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    batch, params = torch.randint(7, (oracle.records, 6)), oracle.trained(module)
    plain = plain_gradients(oracle.mean_loss(module(batch)), params)
    module[0].sparse = False
    rows = oracle.one_by_one(module, batch)
    module[0].sparse = True

    engine = LayerCalls()
    engine.attach(module, params)
    found = oracle.run(engine, module, batch)
    engine.detach()

    torch.testing.assert_close(plain.double(), rows.mean(0), rtol=1e-5, atol=1e-6)
    clip_norm = float(rows.norm(dim=1).median())
    total = bounded_sum(found, clip_norm).value.double()
    torch.testing.assert_close(total, oracle.clipped(rows, clip_norm), rtol=1e-5, atol=1e-6)


def test_every_rule_is_tested(layer_models):
    tested = {type(part) for make, _ in layer_models.values() for part in make().modules()}
    assert set(RULES) <= tested


def test_bfloat16_is_summed_in_float32(layer_engine, layer_models, oracle):
    torch.manual_seed(0)
    module, batch = (make() for make in layer_models["conv1d"])
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))
    with torch.autocast("cpu", torch.bfloat16):
        loss = oracle.mean_loss(module(batch))
    layer_engine.backward(loss)
    gradients = layer_engine.take(1.0, {})
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=0.05, atol=0)
    assert bounded_sum(gradients, 1.0).value.dtype == torch.float32
