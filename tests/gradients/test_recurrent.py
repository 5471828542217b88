"""Recurrent layers of torch where every sample runs alone: norms and sums against a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_dp.gradients.batches import SampleBatch
from lightning_dp.gradients.records import GroupedGradients, Records

N, STEPS, FEATURES, WIDTH = 4, 5, 3, 4
LENGTHS = torch.tensor([3, 5, 1, 3])
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Batch], Tensor]


def check(module: nn.Module, loss: Loss, *, groups: int = 1) -> None:
    """Compare norms and a weighted sum with gradients of one sample after another."""
    params = [param for param in module.parameters() if param.requires_grad]
    batch = torch.randn(N, STEPS, FEATURES, dtype=torch.float64), LENGTHS
    engine = Records(module, params)
    engine.backward(engine.run(loss, SampleBatch(batch, N)))
    found = engine.take(1.0)
    assert (len(found._groups) if isinstance(found, GroupedGradients) else 1) == groups
    expected = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss(alone), params)])
            for alone in zip(batch[0].split(1), batch[1].split(1), strict=True)
        ]
    )
    weights = torch.rand(N, dtype=torch.float64)
    torch.testing.assert_close(found.norms(), expected.norm(dim=1))
    torch.testing.assert_close(found.weighted_sum(weights), weights @ expected)


def total(output: Any) -> Tensor:
    """Return a number that depends on each entry of all tensors in its own way."""
    if isinstance(output, PackedSequence):
        output = output.data
    if isinstance(output, Tensor):
        return (output * torch.arange(1, output.numel() + 1).view(output.shape)).sin().sum()
    return sum((total(each) for each in output), torch.zeros(()))


def packed(module: nn.Module, *, is_sorted: bool = False) -> Callable[[Batch], Any]:
    first = bool(module.batch_first)

    def run(batch: Batch) -> Any:
        x = batch[0] if first else batch[0].transpose(0, 1)
        lengths = batch[1].cpu()
        out, state = module(
            pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=is_sorted)
        )
        return (*pad_packed_sequence(out, first, 0.5, STEPS), state)

    return run


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["LSTM", "GRU", "RNN", "relu", "projected"]),
    options=st.fixed_dictionaries(
        {"num_layers": st.integers(1, 2)}
        | {each: st.booleans() for each in ("bias", "bidirectional", "batch_first")}
    ),
    how=st.sampled_from(["whole", "unbatched", "packed", "sorted"]),
    frozen=st.sampled_from(["", "ih", "hh", "l0", "weight"]),
)
def test_norms_and_sums_are_those_of_a_loop(
    kind: str, options: dict[str, Any], how: str, frozen: str
) -> None:
    torch.manual_seed(0)
    own = {"relu": {"nonlinearity": "relu"}, "projected": {"proj_size": 2}}.get(kind, {})
    make = {"relu": nn.RNN, "projected": nn.LSTM}.get(kind) or getattr(nn, kind)
    module = make(FEATURES, WIDTH, **options, **own).double()
    for name, param in module.named_parameters():
        param.requires_grad_(not (frozen and frozen in name))
    if not any(param.requires_grad for param in module.parameters()):
        return
    if how in ("packed", "sorted"):
        run = packed(module, is_sorted=how == "sorted")
    elif how == "unbatched":
        run = lambda batch: module(batch[0].squeeze(0))  # noqa: E731
    else:
        run = lambda batch: module(batch[0] if module.batch_first else batch[0].transpose(0, 1))  # noqa: E731
    check(module, lambda batch: total(run(batch)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, DPLSTM, DPGRU, DPRNN])
def test_who_looks_into_a_packed_sequence_sees_each_length(kind: type[nn.Module]) -> None:
    module = kind(FEATURES, WIDTH, batch_first=True).double()

    def loss(batch: Batch) -> Tensor:
        out, _ = module(pack_padded_sequence(batch[0], batch[1], True, enforce_sorted=False))
        return out.data.square().mean() * len(out.batch_sizes)

    torch.set_default_dtype(torch.float64)  # states of Opacus' layers have it
    try:
        check(module, loss, groups=3)
    finally:
        torch.set_default_dtype(torch.float32)


class Started(nn.Module):
    """Trained initial states, and weights that a second layer shares; two sequences in a sample."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.lstm = kind(FEATURES, FEATURES, batch_first=True)
        count = 2 if kind is nn.LSTM else 1
        self.states = nn.ParameterList(torch.randn(1, 1, FEATURES) for _ in range(count))

    def forward(self, batch: Batch) -> Tensor:
        pair = torch.cat([batch[0], batch[0].flip(1)])
        states = [state.expand(1, 2, -1) for state in self.states]
        given = tuple(states) if len(states) == 2 else states[0]
        out, given = self.lstm(pair, given)
        both = torch.cat([batch[1], torch.full_like(batch[1], 2)])
        out, given = self.lstm(pack_padded_sequence(out, both, True, enforce_sorted=False), given)
        return total((*pad_packed_sequence(out, True, 0.0, STEPS), given))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_trained_states_shared_layers_and_two_sequences_in_a_sample(kind: type[nn.Module]) -> None:
    module = Started(kind).double()
    check(module, module, groups=3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_draws_the_masks_of_an_ordinary_batch(kind: type[nn.Module]) -> None:
    module = kind(FEATURES, WIDTH, 3, dropout=0.5, bidirectional=True, batch_first=True)
    params, x = list(module.parameters()), torch.randn(N, STEPS, FEATURES)
    engine = Records(module, params)
    torch.manual_seed(7)
    engine.backward(engine.run(lambda x: module(x)[0].square().sum(), SampleBatch(x, N)))
    found = engine.take(1.0).weighted_sum(torch.ones(N))
    torch.manual_seed(7)
    expected = torch.autograd.grad(module(x)[0].square().sum(), params)
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in expected]))
