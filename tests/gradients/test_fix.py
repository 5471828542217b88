"""``fix``: what is replaced, by what, what stays the same object, and what is said of it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_dp import fix
from lightning_dp.gradients.fix import FixedNorm, number_of_groups


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch) -> Callable[[], str]:
    """Return the lines since the last call."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        caplog.set_level(logging.INFO, logger=name)
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)

    def text() -> str:
        found = "\n".join(each.getMessage() for each in caplog.records)
        caplog.clear()
        return found

    return text


def used(norm: Any, *size: int) -> Any:
    """The layer after batches of data that are far from standard, with weights that are not 1."""
    torch.manual_seed(0)
    for _ in range(30):
        norm(2 + 3 * torch.randn(16, norm.num_features, *size))
    if norm.affine:
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
    return norm


def normalised_alone(x: Tensor, norm: Any, groups: int) -> Tensor:
    """Each group of each record by its own mean and variance, in loops."""
    rows = []
    for record in x.double():
        parts = [
            (part - part.mean()) / (part.var(unbiased=False) + norm.eps).sqrt()
            for part in record.chunk(groups)
        ]
        shape = (-1, *[1] * (x.dim() - 2))
        scale, shift = (p.detach().double().view(shape) for p in (norm.weight, norm.bias))
        rows.append(torch.cat(parts) * scale + shift)
    return torch.stack(rows).float()


KINDS = {
    "1d": (lambda: nn.BatchNorm1d(32, eps=1e-2), (), 2),
    "1d-of-sequences": (lambda: nn.BatchNorm1d(48), (5,), 3),
    "2d": (lambda: nn.BatchNorm2d(64, eps=1e-2), (3, 4), 4),
    "3d": (lambda: nn.BatchNorm3d(20), (2, 3, 2), 1),
    "sync": (lambda: nn.SyncBatchNorm(32).eval(), (3, 3), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_normalised_alone_with_the_weights_that_were_there(kind, said):
    make, size, groups = KINDS[kind]
    norm = used(make(), *size)
    model = nn.Sequential(norm, nn.Flatten())
    weight, bias = norm.weight, norm.bias

    assert fix(model) is model

    new = model[0]
    assert type(new) is nn.GroupNorm
    assert new.weight is weight
    assert new.bias is bias
    assert new.training is norm.training
    x = torch.randn(5, norm.num_features, *size)
    expected = normalised_alone(x, norm, groups).flatten(1)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    text = said()
    assert f"{type(norm).__name__} -> GroupNorm (0)" in text
    assert ("norms='fixed'" in text) == norm.training  # since there were statistics


@pytest.mark.parametrize(
    ("channels", "per_group", "groups"),
    [(1, 16, 1), (7, 4, 1), (16, 16, 1), (24, 8, 3), (64, 16, 4), (64, 2, 32), (2048, 16, 32)],
)
def test_groups_are_equal_and_never_too_small(channels, per_group, groups):
    assert number_of_groups(channels, per_group) == groups
    new = fix(nn.Sequential(nn.BatchNorm2d(channels)), channels_per_group=per_group)[0]
    assert (new.num_groups, new.num_channels) == (groups, channels)


def test_options_stay():
    old = nn.BatchNorm2d(32, eps=0.3, affine=False, dtype=torch.float64).eval()
    frozen = nn.BatchNorm2d(32, dtype=torch.bfloat16).requires_grad_(False)
    net = fix(nn.Sequential(old, frozen))
    assert (net[0].eps, net[0].affine, net[0].weight, net[0].training) == (0.3, False, None, False)
    assert net[1].weight.dtype == torch.bfloat16
    assert not net[1].weight.requires_grad


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_an_instance_norm_computes_what_it_did_in_train_mode(kind, affine):
    size = {nn.InstanceNorm1d: (6,), nn.InstanceNorm2d: (3, 4), nn.InstanceNorm3d: (2, 3, 2)}[kind]
    old = used(kind(3, eps=1e-2, affine=affine, track_running_stats=True), *size)
    x = torch.randn(5, 3, *size)
    expected = old(x)
    new = fix(nn.Sequential(old))[0]
    assert type(new) is kind
    assert new.running_mean is None
    assert new.weight is old.weight
    for mode in (True, False):
        torch.testing.assert_close(new.train(mode)(x), expected, rtol=0, atol=0)


def test_what_keeps_no_statistics_is_left_alone(said):
    net = nn.Sequential(
        nn.InstanceNorm1d(3),
        nn.GroupNorm(1, 3),
        nn.LayerNorm(3),
        nn.Embedding(3, 3),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(3, 3).requires_grad_(False),
    )
    layers = list(net)
    fix(net)
    assert all(a is b for a, b in zip(net, layers, strict=True))
    assert said() == "lightning_dp.fix: nothing in Sequential has to be replaced."


# -- statistics of an earlier training ----------------------------------------------------------


def test_a_frozen_backbone_computes_what_it_did_in_eval_mode(said):
    net = nn.Sequential(used(nn.BatchNorm2d(6), 3, 3).requires_grad_(False), nn.Conv2d(6, 2, 3))
    x = torch.randn(5, 6, 3, 3)
    expected = copy.deepcopy(net).eval()(x)
    fix(net)
    assert type(net[0]) is FixedNorm
    before = copy.deepcopy(net.state_dict())
    assert torch.equal(net.train()(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert "ε does not cover them, so they must come from public data" in said()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.BatchNorm2d(4).requires_grad_(False), nn.GroupNorm),  # has seen nothing
        (lambda: used(nn.BatchNorm2d(4), 3, 3), nn.GroupNorm),  # is trained
        (lambda: used(nn.BatchNorm2d(4, affine=False), 3, 3), nn.GroupNorm),  # beside what is
        (
            lambda: nn.Sequential(
                nn.Conv2d(4, 4, 1).requires_grad_(False),
                used(nn.BatchNorm2d(4, affine=False), 3, 3),
            ),
            FixedNorm,
        ),
    ],
)
def test_only_frozen_statistics_become_constants_unasked(make, kind):
    net = fix(nn.Sequential(make(), nn.Conv2d(4, 2, 1)))
    first = net[0][1] if isinstance(net[0], nn.Sequential) else net[0]
    assert type(first) is kind


def test_on_request_trained_layers_keep_their_statistics_and_frozen_ones_lose_them():
    trained, frozen = used(nn.BatchNorm1d(4)), used(nn.BatchNorm1d(4)).requires_grad_(False)
    fixed = fix(nn.Sequential(trained, nn.BatchNorm1d(4, track_running_stats=False)), norms="fixed")
    assert (type(fixed[0]), type(fixed[1])) == (FixedNorm, nn.GroupNorm)
    assert fixed[0].weight is trained.weight
    assert type(fix(nn.Sequential(frozen), norms="group")[0]) is nn.GroupNorm


def test_constants_are_saved_and_loaded_as_batch_norm_was():
    old = used(nn.BatchNorm1d(4)).eval()
    fixed = fix(nn.Sequential(nn.BatchNorm1d(4)), norms="fixed")
    fixed.load_state_dict(nn.Sequential(old).state_dict())
    x = torch.randn(3, 4)
    torch.testing.assert_close(fixed(x), old(x), rtol=0, atol=0)
    again = copy.deepcopy(fixed)
    again.load_state_dict(fixed.state_dict())
    assert "4, eps=1e-05, affine=True" in repr(again)
    with pytest.raises(ValueError, match="no running statistics"):
        FixedNorm(nn.BatchNorm1d(4, track_running_stats=False))


# -- where layers are ---------------------------------------------------------------------------


def test_one_layer_under_two_names_is_one_layer_afterwards(said):
    norm = nn.BatchNorm1d(16)
    net = nn.ModuleDict({"a": norm, "list": nn.ModuleList([norm, nn.Sequential(norm)])})
    fix(net)
    new = net["a"]
    assert type(new) is nn.GroupNorm
    assert net["list"][0] is new
    assert net["list"][1][0] is new
    assert "changed 1 layer of ModuleDict" in said()


def test_layers_that_share_parameters_share_them_afterwards():
    one, other = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    other.weight = one.weight
    net = fix(nn.Sequential(one, other))
    assert net[0].weight is net[1].weight
    assert net[0].bias is not net[1].bias


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OwnState(nn.LSTM):
    def permute_hidden(self, state: Any, order: Tensor | None) -> Any:
        return tuple(torch.tanh(each) for each in state)


def hooked() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.register_forward_hook(lambda *_: None)
    return norm


LEFT = {
    "own forward": (lambda: Own(4), "Own.*its own forward pass"),
    "own method": (lambda: OwnState(3, 4), "OwnState.*its own forward pass"),
    "hooks": (hooked, "has hooks.*Remove them first"),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"),
        "computed from others.*Remove its parametrizations",
    ),
    "not made yet": (lambda: nn.LazyBatchNorm1d(), "no size yet.*synthetic inputs"),
    "one channel": (lambda: nn.BatchNorm1d(1), "one channel.*constant of it"),
    "projected": (lambda: nn.LSTM(3, 4, proj_size=2), "proj_size"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_replaced_is_left_and_named(name, said):
    make, words = LEFT[name]
    layer = make()
    net = fix(nn.Sequential(layer))
    assert net[0] is layer
    text = said()
    assert "changed 0 layers of Sequential" in text
    assert "NOT CHANGED" in text
    assert re.search(words, text)


def test_max_norm_is_left_out(said):
    net = fix(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.EmbeddingBag(4, 2, max_norm=1.0)))
    weight = net[0].weight.data.mul_(100).clone()
    net[0](torch.arange(4))
    assert torch.equal(net[0].weight, weight)
    assert net[1].max_norm is None
    assert "changed 2 layers" in said()


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"norms": "layer"}, "norms='layer' must be one of 'auto', 'group', 'fixed'"),
        ({"channels_per_group": 0}, "channels_per_group=0"),
        ({"attention": 1}, "attention=1 must be True or False"),
    ],
)
def test_arguments_are_checked_before_anything_is_changed(options, match):
    net = nn.Sequential(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=match):
        fix(net, **options)
    assert type(net[0]) is nn.BatchNorm1d


# -- fix puts layers of Opacus in the places of recurrent ones and, on request, of attention -----


RECURRENT = {
    "LSTM": (lambda: nn.LSTM(3, 4, 2, bidirectional=True), DPLSTM),
    "GRU": (lambda: nn.GRU(3, 4, batch_first=True, bias=False), DPGRU),
    "RNN": (lambda: nn.RNN(3, 4, nonlinearity="relu"), DPRNN),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_becomes_opacus_one_with_the_same_function(name, said):
    make, kind = RECURRENT[name]
    torch.manual_seed(0)
    old = make().double().eval()
    old.weight_hh_l0.requires_grad_(False)
    net = fix(nn.Sequential(old))
    new, x = net[0], torch.randn(5, 6, 3, dtype=torch.float64)
    assert (type(new), new.training) == (kind, False)
    for a, b in zip(leaves(old(x)), leaves(new(x)), strict=True):
        torch.testing.assert_close(a, b)
    trained = {name for name, param in new.named_parameters() if param.requires_grad}
    assert trained == {name for name, param in old.named_parameters() if param.requires_grad}
    assert "make optimizers afterwards" in said()


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [leaf for each in output for leaf in leaves(each)]


def test_a_layer_with_shared_parameters_stays(said):
    one, other = nn.GRU(3, 3), nn.GRU(3, 3)
    other.weight_hh_l0 = one.weight_hh_l0
    net = nn.Sequential(one, other)
    fix(net)
    assert net[0] is one
    assert net[1] is other
    assert "It trains as it is" in said()


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True}])
def test_attention_is_replaced_on_request(options):
    torch.manual_seed(0)
    old = nn.MultiheadAttention(4, 2, **options)
    net = nn.Sequential(copy.deepcopy(old))
    assert type(fix(net)[0]) is nn.MultiheadAttention
    new = fix(net, attention=True)[0]
    assert type(new) is DPMultiheadAttention
    query = torch.randn(3, 5, 4)
    key, value = torch.randn(6, 5, old.kdim), torch.randn(6, 5, old.vdim)
    for a, b in zip(old(query, key, value), new(query, key, value), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    half = nn.MultiheadAttention(4, 2)
    half.in_proj_weight.requires_grad_(False)
    assert type(fix(nn.Sequential(half), attention=True)[0]) is nn.MultiheadAttention
