"""Hooks of an engine on a model while it watches, of which nothing is left behind."""

from __future__ import annotations

import pytest

from lightning_dp.boundary import bounded_sum

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_an_engine_leaves_nothing_on_the_model_whatever_came_in_between(
    engine, case, oracle, anatomy
):
    module, batch = case.make(), case.batch()
    before, kind, keys = anatomy(module), type(module), list(module.state_dict())
    expected = oracle.clipped(oracle.one_by_one(module, batch[:3]), 0.1)
    for detaches in (True, False):
        engine.attach(module, oracle.trained(module))
        assert (type(module), list(module.state_dict())) == (kind, keys)
        oracle.mean_loss(module(batch))  # a forward pass that is never back-propagated
        if detaches:
            engine.detach()
            engine.detach()  # may be called twice
            assert anatomy(module) == before
    engine.attach(module, oracle.trained(module))
    assert oracle.run(engine, module, batch).count == oracle.records

    oracle.mean_loss(module(batch))
    engine.drop()  # training_step may return None: the next batch is not mixed with this one
    total = bounded_sum(oracle.run(engine, module, batch[:3]), 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5

    output = module(batch)  # the forward pass is under way ...
    with pytest.raises(ZeroDivisionError):
        oracle.mean_loss(output) / (1 // 0)  # ... and user code fails
    engine.detach()
    assert anatomy(module) == before
