"""The two ways to a convolution's rows: the same numbers, and chosen by the shapes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.gradients.convolution import Convolution

# Channels in and out, size, kernel, stride, padding, dilation; and if products are chosen.
SHAPES = {
    "wide on a small map": ((12, 16, 4, 3, 1, 1, 1), True),
    "narrow on a large map": ((3, 2, 20, 3, 1, 1, 1), False),
    "strided": ((2, 3, 9, 3, 2, 0, 1), True),
    "dilated": ((3, 2, 19, 3, 1, 2, 2), False),
    "of one pixel": ((4, 6, 5, 1, 1, 0, 1), True),
}


def form_and_batch(shape: tuple[int, ...], records: int) -> tuple[Convolution, Tensor, Tensor]:
    inputs, outputs, size, kernel, stride, padding, dilation = shape
    form = Convolution(
        (outputs, inputs, kernel, kernel), (stride,) * 2, (padding,) * 2, (dilation,) * 2, 1
    )
    places = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(records, inputs, size, size, generator=generator)
    return form, v, torch.randn(records, outputs, places, places, generator=generator)


@pytest.mark.parametrize("way", ["_matrix_products", "_convolutions"])
@pytest.mark.parametrize("name", SHAPES)
def test_both_ways_give_the_gradients_of_single_records(name, way):
    form, v, u = form_and_batch(SHAPES[name][0], 40)  # more than are taken together
    found = torch.empty(len(v), *form.weight_shape)

    getattr(form, way)(v, u, found)

    for i, row in enumerate(found):
        weight = torch.zeros(form.weight_shape, dtype=torch.float64, requires_grad=True)
        output = F.conv2d(
            v[i : i + 1].double(), weight, None, form.stride, form.padding, form.dilation
        )
        (expected,) = torch.autograd.grad(output, weight, u[i : i + 1].double())
        torch.testing.assert_close(row.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_the_way_is_chosen_by_the_shapes_alone(name):
    """Not by the clock, nor by the number of records: all processes and batches do the same."""
    shape, products = SHAPES[name]
    for records in (1, 7, 64):
        form, v, u = form_and_batch(shape, records)
        for scale in (0.0, 1.0, float("nan")):
            assert form._prefers_products(v * scale, u * scale) == products
