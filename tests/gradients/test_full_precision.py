"""Norms and sums keep the digits of float32 where the model's own products are rounded to fewer."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients.batches import SampleBatch
from lightning_dp.gradients.engines import EngineChoice

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"),
    reason="Before 2.9, torch has no such setting of CPUs.",
)

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "convolution_backward")


def settings() -> set[str]:
    return {torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision}


@pytest.fixture(autouse=True)
def lowered() -> Iterator[None]:
    """The settings of users who want speed."""
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    yield
    assert settings() == {"bf16"}  # as the user left them
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.conv.fp32_precision = "none"


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the settings of each product: of those of the model, and of those of norms and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.of_model: list[set[str]] = []
        self.of_sums: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::").rstrip("_") in PRODUCTS:
            files = [frame.filename for frame in traceback.extract_stack()]
            is_sum = any(each.endswith("/parameter_sum.py") for each in files)
            (self.of_sums if is_sum else self.of_model).append(settings())
        return func(*args, **(kwargs or {}))


MODELS = [  # norms of inner products, rows, one position, a convolution, products of patches
    (lambda: nn.Linear(40, 40), (3, 4, 40)),
    (lambda: nn.Linear(4, 3), (3, 50, 4)),
    (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (3, 5)),
    (lambda: nn.Conv2d(3, 4, 3), (3, 3, 9, 9)),
    (lambda: nn.Conv2d(40, 50, 3), (3, 40, 4, 4)),
]


@pytest.mark.parametrize("engine", ["bookkeeping", "records", "ghost", "hooks"])
def test_products_of_norms_and_sums_are_not_rounded(engine: str) -> None:
    for make, shape in MODELS:
        torch.manual_seed(0)
        check(engine, make(), torch.randn(shape))


def check(engine: str, net: nn.Module, x: torch.Tensor) -> None:
    attached = EngineChoice(engine).make(net, list(net.parameters()))
    products = Products()
    with products:
        loss = attached.run(
            lambda b: net(b).square().flatten(1).sum(1).mean(), SampleBatch(x, len(x))
        )
        attached.backward(loss)
        bounded_sum(attached.take(1.0), 0.5)
    assert products.of_model and all(each == {"bf16"} for each in products.of_model)
    assert products.of_sums and all(each == {"ieee"} for each in products.of_sums)
