"""Records of one step must not move the next one's gradients, wherever the model keeps them."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_dp.isolation import probe_isolation
from tests.isolation.carrying_state import (
    CARRIES,
    KEEPS,
    LIKE,
    SEEN,
    MeanInAClassAttribute,
    Plain,
    RateByTheLoss,
    Remembers,
    SetByACallback,
    SetsTheScale,
    StateOfACallback,
    StatisticsBeforeTheStep,
    ZeroesGradientsAfterASpike,
)
from tests.isolation.ordinary_state import ORDINARY, Collects

CALLBACKS: dict[type[Plain], tuple[type[L.Callback], ...]] = {
    StateOfACallback: (Remembers,),
    SetByACallback: (SetsTheScale,),
    Plain: (Collects,),
}


class Probes(L.Callback):
    """Probes at the first batch, as a private fit does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if isinstance(trainer, L.Trainer):  # not when it is rehearsed itself
            pl_module.on_train_batch_start(batch, batch_idx)  # it would come next
            self.found = probe_isolation(pl_module, LIKE, trainer=trainer)
            trainer.should_stop = True


@pytest.fixture
def probed(make_trainer):
    """Returns the outcome for a kind of model at its first batch."""

    def probe(kind):
        SEEN["mean"] = torch.zeros(6)
        MeanInAClassAttribute.mean = torch.zeros(6)
        probes = Probes()
        callbacks = [*(made() for made in CALLBACKS.get(kind, ())), probes]
        trainer = make_trainer(max_epochs=10, callbacks=callbacks)
        data = torch.utils.data.TensorDataset(torch.rand(8, 6), torch.arange(8) % 3)
        trainer.fit(kind(), torch.utils.data.DataLoader(data, batch_size=4))
        return probes.found

    return probe


class Watches(L.Callback):
    """Notes gradients and rates at each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *unused):
        grads = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]
        rate = torch.tensor([trainer.optimizers[0].param_groups[0]["lr"] * 1e9])
        self.seen.append(torch.cat([g.flatten() for g in [*grads, rate]]))


def steps_after(kind, first, make_trainer):
    """Fit in Lightning, without privacy, and return what each step but the first did."""
    generator = torch.Generator().manual_seed(3)
    others = torch.rand(8, 6, generator=generator), torch.arange(8) % 3
    batches = [first, tuple(leaf[:4] for leaf in others), tuple(leaf[4:] for leaf in others)]
    watch = Watches()
    callbacks = [watch, *(made() for made in CALLBACKS.get(kind, ()))]
    torch.manual_seed(1)
    SEEN["mean"] = torch.zeros(6)
    MeanInAClassAttribute.mean = torch.zeros(6)
    trainer = make_trainer(max_epochs=2, callbacks=callbacks)
    trainer.fit(kind(), torch.utils.data.DataLoader(batches, batch_size=None))
    return watch.seen


@pytest.mark.parametrize("kind", CARRIES, ids=lambda kind: kind.__name__)
def test_one_record_moves_what_later_batches_do_in_lightning(kind, make_trainer):
    x, y = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)), torch.arange(4) % 3
    other = x.clone()
    other[0] *= 20
    first, second = (
        steps_after(kind, (x, y), make_trainer),
        steps_after(kind, (other, y), make_trainer),
    )
    own = kind in (ZeroesGradientsAfterASpike, RateByTheLoss, StatisticsBeforeTheStep)
    moved = [not torch.allclose(a, b, rtol=1e-5) for a, b in zip(first, second, strict=True)]
    assert any(moved if own else moved[1:])


@pytest.mark.parametrize(
    "kind",
    [*CARRIES[::2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in CARRIES[1::2])],
    ids=lambda kind: kind.__name__,
)
def test_state_that_moves_gradients_is_refused(kind, probed):
    assert probed(kind).outcome == "coupled"


@pytest.mark.parametrize("kind", KEEPS, ids=lambda kind: kind.__name__)
def test_records_in_a_checkpoint_are_refused(kind, probed):
    assert probed(kind).outcome == "kept"


@pytest.mark.parametrize("kind", [Plain, *ORDINARY], ids=lambda kind: kind.__name__)
def test_ordinary_state_passes(kind, probed):
    found = probed(kind)

    assert found.outcome == "isolated", found
