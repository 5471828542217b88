"""Hooks of an engine on a model while it watches, of which nothing is left behind."""

from __future__ import annotations

import pytest

from lightning_dp.boundary import bounded_sum

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_an_engine_leaves_nothing_on_the_model_whatever_came_in_between(
    kind, case, oracle, anatomy
):
    module, batch = case.make(), case.batch()
    before, type_of, keys = anatomy(module), type(module), list(module.state_dict())
    expected = oracle.clipped(oracle.one_by_one(module, batch[:3]), 0.1)
    engine = kind(module, oracle.trained(module))
    with engine.watching(), engine.watching():  # one may stand inside another
        oracle.mean_loss(module(batch))  # a forward pass that is never back-propagated
        assert (type(module), list(module.state_dict())) == (type_of, keys)
    assert anatomy(module) == before
    engine.drop()  # training_step may return None: the next batch is not mixed with this one
    total = bounded_sum(oracle.run(engine, module, batch[:3]), 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5

    with pytest.raises(ZeroDivisionError), engine.watching():  # the forward pass is under way ...
        oracle.mean_loss(module(batch)) / (1 // 0)  # ... and user code fails
    assert anatomy(module) == before
