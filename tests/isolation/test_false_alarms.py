"""Comparisons of ordinary models on many batches find nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from lightning_dp.audit import check_isolation
from tests.isolation.conftest import BatchStatistics, Model, network
from tests.isolation.test_check import LastReal, MeanOfAll, Pools, padded, sequences

LOOKS = 6  # of each check


def batch(seed, n):
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-3, 3, (n, 1), generator=generator)
    x = size * torch.randn(n, 6, generator=generator)
    return list(zip(x, torch.randint(3, (n,), generator=generator), strict=True))


def in_bf16(samples):
    return [(x.bfloat16(), y) for x, y in samples]


def in_float32(output, y):
    return F.cross_entropy(output.float(), y)


def noisy(output, y):
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), y)


class Sorts(Model):
    def training_step(self, batch, batch_idx):
        order = batch[0].sum(1).argsort()
        return super().training_step((batch[0][order], batch[1][order]), batch_idx)


def sorting(samples):
    return default_collate(sorted(samples, key=lambda sample: float(sample[0].sum())))


KINDS = {
    "float32": (lambda: Model(network(nn.LayerNorm(8)), F.cross_entropy), {}),
    "bf16": (lambda: Model(network().bfloat16(), in_float32), {"change": in_bf16}),
    "dropout": (lambda: Model(network(nn.Dropout(0.5)), F.cross_entropy), {}),
    "noise": (lambda: Model(network(), noisy), {}),
    "sorts": (lambda: Sorts(network(), F.cross_entropy), {}),
    "sorted": (lambda: Model(network(), F.cross_entropy), {"collate_fn": sorting}),
}


def coupled_in(make, checks, change=list, **arguments):
    torch.manual_seed(0)
    kinds = [
        check_isolation(
            make(), change(batch(seed, (8, 16, 64)[seed % 3])), engine="layers", **arguments
        ).kind
        for seed in range(checks)
    ]
    return kinds.count("coupled")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", KINDS)
def test_no_false_alarm_in_some(name):
    make, arguments = KINDS[name]
    assert coupled_in(make, 2, **arguments) == 0  # of 8 and 16 samples


@pytest.mark.parametrize(("kind", "collate"), [(Sorts, default_collate), (Model, sorting)])
@pytest.mark.parametrize("n", [12, 45])
def test_an_order_is_no_fault_though_a_batch_of_another_size_is_rounded_otherwise(n, kind, collate):
    x = torch.randn(n, 64, generator=torch.Generator().manual_seed(1))
    samples = in_bf16(zip(x, torch.arange(n) % 3, strict=True))

    def kind_of(*middle):
        torch.manual_seed(0)
        net = nn.Sequential(
            *middle, nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 3)
        )
        module = kind(net.bfloat16(), in_float32)
        return check_isolation(module, samples, engine="layers", collate_fn=collate).kind

    assert kind_of() != "coupled"
    assert kind_of(BatchStatistics()) == "coupled"


def test_a_factor_for_all_is_no_rounding_though_each_record_moves_by_little():
    class FollowsTheFirst(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1.04 if batch[1][0] == 0 else 1.0)

    for change in (list, in_bf16):
        samples = change(batch(0, 16))
        net = network().to(samples[0][0].dtype)
        found = [
            check_isolation(
                kind(net, F.cross_entropy), samples, loss_graph_check=False, engine="layers"
            )
            for kind in (Model, FollowsTheFirst)
        ]
        assert [each.kind for each in found] == ["isolated", "coupled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_false_alarm_in_many(name):
    make, arguments = KINDS[name]
    assert coupled_in(make, 1700 // LOOKS, **arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Pools, LastReal])
def test_no_false_alarm_behind_padding(kind):
    kinds = [
        check_isolation(kind(), sequences(n), collate_fn=padded, engine="layers").kind
        for n in range(3, 100)
    ]
    assert kinds.count("coupled") == 0
    assert check_isolation(MeanOfAll(), sequences(24), collate_fn=padded, engine="layers").kind == (
        "coupled"
    )
