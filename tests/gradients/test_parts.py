"""Tensors computed from parameters alone, and the way back from them for every record."""

from __future__ import annotations

import torch
from torch import nn

from lightning_dp.gradients.layouts import Layout
from lightning_dp.gradients.parts import Part, PartGradients, sum_to

N = 3


def test_gradients_are_pulled_back_for_each_record():
    param = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    tensor = torch.tanh(param).t()
    rows = torch.randn(N, 3, 2, dtype=torch.float64)
    parts = PartGradients()
    part = Part(tensor, frozenset(["param"]))
    parts.add(part, rows)
    parts.add(part, rows)
    ((found, pulled),) = parts.pull_back([(param, param)])
    expected = [torch.autograd.grad(tensor, param, 2 * row, retain_graph=True)[0] for row in rows]
    assert found is param
    torch.testing.assert_close(pulled, torch.stack(expected))


def test_entries_of_each_records_own_go_back_to_what_was_repeated():
    param = nn.Parameter(torch.randn(1, 4))
    names = frozenset(["param"])
    source = Part(param, names, param)
    rows = torch.randn(N, 1, 4)
    for repeated in (source, None):  # known, and found through the graph
        parts = PartGradients()
        parts.add_rows(Part(param.expand(N, -1), names, repeated=repeated), Layout(0), rows)
        ((found, pulled),) = parts.pull_back([(param, param)])
        assert found is param
        torch.testing.assert_close(pulled, rows)


def test_only_what_is_known_to_be_linear_passes_for_linear():
    param = nn.Parameter(torch.randn(2, 3))
    for tensor, is_linear in ((param.t()[0], True), (param.exp(), False), (param * param, False)):
        assert Part(tensor, frozenset()).is_linear is is_linear


def test_sums_over_what_was_repeated():
    assert sum_to(torch.ones(N, 5, 2, 4), (1, 4)).tolist() == [[[10.0] * 4]] * N


def test_entries_of_all_records_one_frame_after_another_are_placed_in_that_order():
    frames = 2
    param = nn.Parameter(torch.randn(4, dtype=torch.float64))
    scale = torch.randn(frames * N, 1, dtype=torch.float64)
    tensor = scale * param  # row f * N + i is the one of record i in frame f
    rows = torch.randn(N, frames, 4, dtype=torch.float64)
    parts = PartGradients()
    parts.add_rows(Part(tensor, frozenset(["param"])), Layout(0, outer=frames), rows)
    ((_, pulled),) = parts.pull_back([(param, param)])
    own = scale.reshape(frames, N, 1).transpose(0, 1)
    torch.testing.assert_close(pulled, (own * rows).sum(1))
