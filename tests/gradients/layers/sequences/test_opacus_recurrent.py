"""DPLSTM, DPGRU and DPRNN of Opacus, called with tensors and with packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import DPGRUCell, DPLSTMCell, DPRNNBase
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.bookkeeping import Bookkeeping

WIDTH, HIDDEN = 6, 3
LENGTHS = torch.tensor([2, 4, 1, 3, 4])


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones; only the linear ones see the order of the batch."""

    def __init__(self, kind: Any = DPLSTM, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer, self.is_packed = kind(WIDTH, HIDDEN, **options), packed
        self.before = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(HIDDEN * self.layer.num_directions, 2)
        self.double()

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        if state == "of each record":
            first = x[:, 0, :HIDDEN]
            state = tuple(f(first).expand(2, -1, -1) for f in (torch.sin, torch.cos))
        x = torch.tanh(self.before(x))
        is_first = self.layer.batch_first
        x = x if is_first else x.transpose(0, 1)
        if self.is_packed:
            options = {"batch_first": is_first, "enforce_sorted": False}
            packed = self.layer(pack_padded_sequence(x, LENGTHS, **options), state)[0]
            return self.head(pad_packed_sequence(packed, batch_first=True)[0])
        output = self.layer(x, state_init=state)[0]
        return self.head(output if is_first else output.transpose(0, 1))


def skip_without_rules(engine: Bookkeeping, why: str) -> None:
    """The engine that knows functions alone refuses it."""
    if engine.name == "functional":
        pytest.skip(why)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
def test_gradients_of_two_layers_with_dropout_equal_the_loop(
    layer_engine, loop, x, kind, packed, batch_first, bidirectional
):
    if packed:
        skip_without_rules(layer_engine, "packed")
    options = {"batch_first": batch_first, "bidirectional": bidirectional}
    module = Recurrent(kind, packed, num_layers=2, dropout=0.3, **options)
    loop.equals(layer_engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{"bias": False}, {"batch_first": True}])
def test_differences_at_two_points_equal_the_loop(layer_engine, loop, x, packed, options):
    if packed:
        skip_without_rules(layer_engine, "packed")
    module = Recurrent(packed=packed, num_layers=2, bidirectional=True, **options)
    loop.equals_in_differences(layer_engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
def test_hessian_vector_products_equal_the_loop(layer_engine, loop, x, kind):
    skip_without_rules(
        layer_engine, "the first state goes through a layer, which is no linear part"
    )
    module = Recurrent(kind, num_layers=2, bidirectional=True, dropout=0.3)
    loop.equals_in_products(layer_engine, module, loop.losses_of(module, lambda m: m(x)))


def test_products_of_packed_data_equal_the_loop_and_of_packed_features_are_refused(engine, loop, x):
    """Packing has no derivative in forward mode: what is packed must not depend on parameters."""
    module = Recurrent(packed=True)
    losses = loop.losses_of(module, lambda m: m(x))
    with pytest.raises(UnsupportedModelError, match=r"second derivative.*_pack_padded_sequence"):
        loop.equals_in_products(engine, module, losses)
    module.before.requires_grad_(False)
    engine.drop()
    loop.equals_in_products(engine, module, losses)


@pytest.mark.parametrize(("records", "steps"), [(5, 1), (1, 4), (5, 5), (1, 1)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_as_many_steps_as_records_or_one_of_them_mixes_nothing_up(
    layer_engine, loop, batch_first, records, steps
):
    x = torch.randn(records, steps, WIDTH, dtype=torch.float64)
    module = Recurrent(batch_first=batch_first)
    loop.equals(layer_engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("lengths", [[1], [4], [1, 1, 1], [3, 3, 3], [1, 2, 3, 4], [4, 3, 2, 1]])
def test_packed_sequences_of_all_lengths_equal_the_loop(layer_engine, loop, lengths, monkeypatch):
    if len(set(lengths)) > 1:
        skip_without_rules(layer_engine, "packed")
    monkeypatch.setitem(globals(), "LENGTHS", torch.tensor(lengths))
    x = torch.randn(len(lengths), max(lengths), WIDTH, dtype=torch.float64)
    module = Recurrent(packed=True, bidirectional=True)
    loop.equals(layer_engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_state_for_each_record_goes_with_it(layer_engine, loop, x, packed):
    if packed:
        skip_without_rules(layer_engine, "packed")
    module = Recurrent(packed=packed, num_layers=2)
    loop.equals(layer_engine, module, loop.losses_of(module, lambda m: m(x, "of each record")))


def test_the_last_state_and_the_state_of_the_cell_may_be_used(layer_engine, loop, x):
    module = DPLSTM(WIDTH, HIDDEN, num_layers=2, bidirectional=True, batch_first=True).double()

    def states(module: nn.Module) -> Tensor:
        hidden, cell = module(x)[1]
        return torch.cat([hidden, torch.tanh(cell)]).transpose(0, 1)

    loop.equals(layer_engine, module, loop.losses_of(module, states))


class OwnLoop(nn.Module):
    """Cells that are called by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.other = DPLSTMCell(WIDTH, HIDDEN, True), DPGRUCell(HIDDEN, HIDDEN, True)

    def forward(self, x: Tensor) -> Tensor:
        state, hidden = None, None
        for each in x.unbind(1):
            state = self.cell(each, state)
            hidden = self.other(state[0], hidden)
        return hidden


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = DPGRU(WIDTH, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda t: self.layer(t)[0], x, use_reentrant=False))


@pytest.mark.parametrize("make", [OwnLoop, Checkpointed])
def test_in_a_model_the_gradients_equal_the_loop(layer_engine, loop, x, make):
    module = make().double()
    loop.equals(layer_engine, module, loop.losses_of(module, lambda m: m(x)))


@pytest.mark.parametrize("names", [["weight_ih_l0"], ["weight_hh_l1"], ["bias_hh_l0_reverse"]])
def test_frozen_parts_change_nothing(engine, loop, x, names):
    module = Recurrent(packed=True, num_layers=2, bidirectional=True)
    for name, param in module.layer.named_parameters():
        param.requires_grad_(name in names)
    loop.equals(engine, module, loop.losses_of(module, lambda m: m(x)))


def test_a_failed_call_and_one_without_gradients_leave_nothing(engine, loop, x):
    module = Recurrent(packed=True)
    engine.attach(module, loop.trained(module))
    losses = loop.losses_of(module, lambda m: m(x))
    expected = loop.one_by_one(losses, loop.trained(module)).norm(dim=1)
    with torch.no_grad():
        module.layer(pack_padded_sequence(x, [4] * 5, batch_first=True))
    with pytest.raises(RuntimeError):
        module.layer(torch.randn(4, 5, WIDTH + 1, dtype=torch.float64))
    engine.drop()
    engine.backward(losses().mean())
    torch.testing.assert_close(engine.take(1.0, {}).norms(), expected)


def test_sequences_packed_in_an_order_that_nobody_knows_are_refused(refuses, x):
    """The user may have sorted the batch after another layer had seen it."""
    module = Recurrent(batch_first=True)

    def sorted_by_hand(module: Any) -> Tensor:
        lengths, order = LENGTHS.sort(descending=True)
        packed = pack_padded_sequence(module.before(x)[order], lengths, batch_first=True)
        output = pad_packed_sequence(module.layer(packed)[0], batch_first=True)[0]
        return module.head(output[order.argsort()])

    refuses(module, sorted_by_hand, UnsupportedModelError, r"DPLSTM .*Use enforce_sorted=False")


def test_a_state_that_records_share_is_refused(refuses, x):
    state = (torch.ones(1, 1, HIDDEN).double(), torch.ones(1, 5, HIDDEN).double())
    match = "does not keep the records apart"
    refuses(Recurrent(), lambda m: m(x, state), UnsupportedModelError, match)


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_called_by_itself_for_all_records_is_refused(refuses, x, packed):
    """The gradient of its bias is a sum over the records, and must not be added to theirs."""

    def run(module: Any) -> Tensor:
        return module(x) + module.layer.l0.hh(torch.ones(1, HIDDEN).double()).sum()

    refuses(Recurrent(packed=packed), run, UnsupportedModelError, "more rows than there are")


def test_a_sequence_without_records_is_refused(refuses):
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    module = DPRNN(WIDTH, HIDDEN).double()
    run = lambda m: m(x)[0].sum(1)  # noqa: E731
    refuses(module, run, UnsupportedModelError, "does not keep the records apart")


class OwnForward(DPLSTM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnCell(DPLSTMCell):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_own_parameter() -> nn.Module:
    layer = DPLSTM(WIDTH, HIDDEN)
    layer.gain = nn.Parameter(torch.ones(1))
    return layer


def with_another_part() -> nn.Module:
    layer = DPLSTM(WIDTH, HIDDEN)
    layer.l0.ih = nn.Sequential(nn.Linear(WIDTH, 4 * HIDDEN))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnForward(WIDTH, HIDDEN),
        lambda: DPRNNBase(OwnCell, WIDTH, HIDDEN),
        with_own_parameter,
        with_another_part,
    ],
)
def test_the_rules_alone_refuse_a_changed_layer(loop, make):
    module, engine = nn.Sequential(make()), Bookkeeping()
    with pytest.raises(UnsupportedModelError, match=r"0.* is a layer of Opacus that was changed"):
        engine.attach(module, loop.trained(module))


def test_norms_of_many_steps_are_not_too_small_in_float32(loop):
    """Fifty outer products per record and weight, summed in another way than the rows."""
    torch.manual_seed(1)
    x = torch.randn(4, 50, WIDTH, dtype=torch.float64)
    module = Recurrent(num_layers=2, batch_first=True)
    losses = loop.losses_of(module, lambda m: m(x.to(m.head.weight.dtype)).double())
    expected = loop.one_by_one(losses, loop.trained(module)).norm(dim=1)
    module.float()
    engine = Bookkeeping()
    engine.attach(module, loop.trained(module))
    engine.backward(losses().mean())
    norms = engine.take(1.0, {}).norms()
    engine.detach()
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
