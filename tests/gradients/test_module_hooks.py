"""Hooks of an engine on a model while it watches, of which nothing is left behind."""

from __future__ import annotations

import pytest

from lightning_dp.boundary import bounded_sum

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_attach_keeps_type_and_state_dict_and_detach_leaves_the_model_as_it_was(
    engine, case, oracle, anatomy
):
    module = case.make()
    before, kind, keys = anatomy(module), type(module), list(module.state_dict())
    engine.attach(module, oracle.trained(module))
    assert (type(module), list(module.state_dict())) == (kind, keys)
    oracle.run(engine, module, case.batch())

    engine.detach()
    engine.detach()  # may be called twice

    assert anatomy(module) == before


def test_detach_after_an_exception_in_the_middle_leaves_the_model_as_it_was(
    engine, case, oracle, anatomy
):
    module, batch = case.make(), case.batch()
    before = anatomy(module)
    engine.attach(module, oracle.trained(module))
    output = module(batch)  # the forward pass is under way ...
    with pytest.raises(ZeroDivisionError):
        oracle.mean_loss(output) / (1 // 0)  # ... and user code fails

    engine.detach()

    assert anatomy(module) == before


@pytest.mark.parametrize("detaches", [True, False])
def test_a_model_can_be_attached_again(detaches, engine, case, oracle):
    module, batch = case.make(), case.batch()
    for _ in range(2):
        engine.attach(module, oracle.trained(module))
        oracle.mean_loss(module(batch))  # ends with a forward pass that is never back-propagated
        if detaches:
            engine.detach()
    engine.attach(module, oracle.trained(module))

    assert oracle.run(engine, module, batch).count == oracle.records


def test_a_dropped_forward_pass_is_not_mixed_with_the_next_batch(engine, case, oracle, anatomy):
    """training_step may return None."""
    module, batch = case.make(), case.batch()
    before = anatomy(module)
    expected = oracle.clipped(oracle.one_by_one(module, batch[:3]), 0.1)
    engine.attach(module, oracle.trained(module))
    oracle.mean_loss(module(batch))
    engine.drop()

    total = bounded_sum(oracle.run(engine, module, batch[:3]), 0.1).value.double()

    assert (total - expected).norm() / expected.norm() <= 1e-5
    engine.detach()
    assert anatomy(module) == before
