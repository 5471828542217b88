"""Entries of convolutions' gradients: those of the whole gradient of each record."""

import pytest
import torch
from torch import nn

from lightning_dp.gradients.convolution import Convolution

# in, out, kernel, stride, padding, dilation, size of the input, rows of a record
SHAPES = [
    (8, 16, (3, 3), (1, 1), (1, 1), (1, 1), (5, 4), 1),
    (8, 16, (3, 2), (2, 1), (1, 0), (1, 2), (6, 7), 1),
    (4, 16, (3, 3), (2, 2), (1, 1), (1, 1), (6, 7), 3),
    (64, 64, (1, 1), (2, 2), (0, 0), (1, 1), (4, 5), 1),
    (2, 3, (3, 3), (1, 1), (1, 1), (1, 1), (9, 9), 1),  # so many positions that all are made
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [0, 3])
def test_entries_are_those_of_the_rows(shape, n):
    into, out, kernel, stride, padding, dilation, size, rows = shape
    layer = nn.Conv2d(into, out, kernel, stride, padding, dilation)
    torch.manual_seed(0)
    x = torch.randn(n, rows, into, *size)
    y = layer(x.flatten(0, 1))
    u = torch.randn(n, rows, *y.shape[1:])
    places = torch.randperm(layer.weight.numel())[:17]
    form = Convolution(tuple(layer.weight.shape), stride, padding, dilation, 1)
    found = form.entries(x, u, layer.weight.shape, places)
    assert found.shape == (n, 17)
    for i in range(n):
        layer.weight.grad = None
        layer(x[i]).backward(u[i])
        torch.testing.assert_close(
            found[i], layer.weight.grad.flatten()[places], rtol=1e-4, atol=1e-4
        )
