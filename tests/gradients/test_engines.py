"""Every engine: the gradient of each record, against one record at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UnsupportedModelError, attach_engine
from lightning_dp.gradients.bookkeeping import Bookkeeping
from lightning_dp.gradients.ghost import GhostClipping
from lightning_dp.gradients.opacus_hooks import OpacusHooks

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_clipped_sums_equal_a_loop_over_records(engine, case, oracle):
    module, batch = case.make(), case.batch()
    expected = oracle.one_by_one(module, batch)
    clip_norm = float(expected.norm(dim=1).median())  # clips some, not all
    engine.attach(module, oracle.trained(module))

    gradients = oracle.run(engine, module, batch)

    assert gradients.count == oracle.records
    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=1e-5, atol=0)
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = oracle.clipped(expected, clip_norm)
    assert (total - wanted).norm() / wanted.norm() <= 1e-5


def test_a_restriction_to_coordinates_comes_before_the_clipping(engine, case, oracle):
    module, batch = case.make(), case.batch()
    rows = oracle.one_by_one(module, batch)
    coordinates = torch.arange(rows.shape[1])[2::3]
    expected = rows[:, coordinates]
    clip_norm = float(expected.norm(dim=1).median())
    engine.attach(module, oracle.trained(module))

    gradients = oracle.run(engine, module, batch, divide_by=4.0).restrict(coordinates)

    total = bounded_sum(gradients, clip_norm)
    wanted = oracle.clipped(expected, clip_norm)
    assert gradients.count == oracle.records and total.value.shape == coordinates.shape
    assert (total.value.double() - wanted).norm() <= 1e-5 * wanted.norm()


def test_the_division_of_the_loss_is_undone(engine, case, oracle):
    module, batch = case.make(), case.batch()
    expected = oracle.clipped(oracle.one_by_one(module, batch), 0.1)
    engine.attach(module, oracle.trained(module))

    total = bounded_sum(oracle.run(engine, module, batch, divide_by=4.0), 0.1).value.double()

    assert (total - expected).norm() / expected.norm() <= 1e-5


def test_a_second_batch_of_another_size_is_not_mixed_with_the_first(engine, case, oracle):
    module, batch = case.make(), case.batch()
    expected = oracle.clipped(oracle.one_by_one(module, batch[:2]), 0.1)
    engine.attach(module, oracle.trained(module))
    oracle.run(engine, module, batch)

    gradients = oracle.run(engine, module, batch[:2])

    assert gradients.count == 2
    total = bounded_sum(gradients, 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5


def test_the_loss_is_the_one_of_an_unwatched_model(engine, case, oracle):
    module, batch = case.make(), case.batch()
    before = oracle.mean_loss(module(batch)).item()
    engine.attach(module, oracle.trained(module))

    assert oracle.mean_loss(module(batch)).item() == before


def test_passes_without_gradients_do_not_count(engine, case, oracle):
    """Validation, metrics and predictions in the middle of training."""
    module, batch = case.make(), case.batch()
    engine.attach(module, oracle.trained(module))
    with torch.no_grad():
        module(batch)

    assert oracle.run(engine, module, batch[:3]).count == 3


def test_a_parameter_that_was_not_used_has_zeros_in_its_place(engine, oracle):
    torch.manual_seed(0)
    module = nn.ModuleDict({"unused": nn.Linear(2, 2), "used": nn.Linear(6, 3)})
    batch = oracle.features()
    expected = oracle.one_by_one(module["used"], batch)
    engine.attach(module, oracle.trained(module))
    with engine.following(batch, len(batch)):
        loss = oracle.mean_loss(module["used"](batch))
    touched = oracle.back(engine, module, loss)

    gradients = engine.take(1.0, touched)

    total = bounded_sum(gradients, 0.2).value.double()
    assert torch.equal(total[:6], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(total[6:], oracle.clipped(expected, 0.2), rtol=1e-5, atol=1e-7)


def test_a_record_that_is_not_finite_does_not_disturb_the_others(engine, oracle, mlp):
    torch.manual_seed(0)
    module, batch = mlp(), oracle.features()
    expected = oracle.one_by_one(module, batch)[[0, 1, 3, 4]]
    batch[2] = float("nan")
    engine.attach(module, oracle.trained(module))

    total = bounded_sum(oracle.run(engine, module, batch), 0.1).value.double()

    # The record's loss is NaN, and so is the mean loss; the gradients of the others are not.
    torch.testing.assert_close(total, oracle.clipped(expected, 0.1), rtol=1e-5, atol=1e-7)


def test_an_engine_is_made_by_its_name(oracle, mlp):
    module = mlp()
    for name, kind in {
        "hooks": OpacusHooks,
        "bookkeeping": Bookkeeping,
        "ghost": GhostClipping,
        "auto": Bookkeeping,
    }.items():
        engine, description = attach_engine(name, module, oracle.trained(module))
        assert isinstance(engine, kind) and description == engine.name
        assert engine.name == ("bookkeeping" if name == "auto" else name)
        engine.detach()
    with pytest.raises(ValueError, match="engine='phantom' must be one of"):
        attach_engine("phantom", module, oracle.trained(module))


@pytest.mark.parametrize("name", ["embedding_lstm", "transformer_block"])
def test_auto_covers_layers_of_opacus(name, cases, oracle):
    module = cases[name].make()
    engine, description = attach_engine("auto", module, oracle.trained(module))
    assert isinstance(engine, Bookkeeping) and description == "bookkeeping"
    engine.detach()


def test_auto_falls_back_with_a_reason(oracle):
    module = nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
    engine, description = attach_engine("auto", module, oracle.trained(module))
    assert isinstance(engine, Bookkeeping)
    assert description.startswith("bookkeeping, with the functions where parameters meet records, ")
    assert "since bookkeeping does not cover this model: 0 (Embedding) has scale_" in description
    engine.detach()
    with pytest.raises(UnsupportedModelError, match="Use engine='hooks'"):
        Bookkeeping().attach(module, oracle.trained(module))
