"""Which engine a name stands for, and what ``auto`` falls back to."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dp.gradients import UnsupportedModelError, attach_engine
from lightning_dp.gradients.bookkeeping import Bookkeeping
from lightning_dp.gradients.opacus_hooks import OpacusHooks

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_an_engine_is_made_by_its_name(oracle, mlp):
    module = mlp()
    for name, kind in {
        "hooks": OpacusHooks,
        "bookkeeping": Bookkeeping,
        "functional": Bookkeeping,
        "auto": Bookkeeping,
    }.items():
        engine, description = attach_engine(name, module, oracle.trained(module))
        assert isinstance(engine, kind) and description == engine.name
        assert engine.name == ("bookkeeping" if name == "auto" else name)
        engine.detach()
    with pytest.raises(ValueError, match="engine='ghost' is not one of"):
        attach_engine("ghost", module, oracle.trained(module))


@pytest.mark.parametrize("name", ["embedding_lstm", "transformer_block"])
def test_auto_covers_layers_of_opacus(name, cases, oracle):
    module = cases[name].make()
    engine, description = attach_engine("auto", module, oracle.trained(module))
    assert isinstance(engine, Bookkeeping) and description == "bookkeeping"
    engine.detach()


def test_auto_falls_back_with_a_reason(oracle):
    module = nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), nn.Linear(4, 3))
    engine, description = attach_engine("auto", module, oracle.trained(module))
    assert isinstance(engine, OpacusHooks)
    assert description.startswith("hooks, since book-keeping does not cover this model: ")
    engine.detach()
    with pytest.raises(UnsupportedModelError, match="Use engine='hooks'"):
        attach_engine("bookkeeping", module, oracle.trained(module))
