"""Every engine over grids of layer options, against one record at a time: right, or refused as said."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.gradients import RecordPasses, UnsupportedModelError
from lightning_dp.gradients.chunks import OtherRowsError
from tests.gradients.layer_grids import EVERY, GRIDS, Case, cases

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:Using padding='same'"
)

TOLERANCE = 1e-5  # of float32, relative


def losses(output: Tensor | list[Tensor], reduction: str) -> Tensor:
    """L1 of each record, over its entries."""
    if isinstance(output, list):
        return torch.stack([getattr(each.abs(), reduction)() for each in output])
    return getattr(output.abs().flatten(1), reduction)(1)


def one_by_one(module: nn.Module, batch: tuple, reduction: str) -> Tensor:
    module = copy.deepcopy(module).double()
    rows = []
    for i in range(len(batch[0])):
        record = [each[i : i + 1] for each in batch]
        record = [e.double() if torch.is_tensor(e) and e.is_floating_point() else e for e in record]
        (loss,) = losses(module(*record), reduction)
        parts = torch.autograd.grad(loss, list(module.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def by_engine(
    engine: str, module: nn.Module, batch: tuple, reduction: str, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The norms, and the sum of the records' gradients with these weights."""
    with RecordPasses(module, list(module.parameters()), engine) as passes:
        found = passes.run(lambda: losses(module(*batch), reduction).mean(), size=len(weights))
        if found is None or found.count != len(weights):
            raise OtherRowsError
        norms = found.norms()
        return norms, found.weighted_sum(weights).double()


def fault(engine: str, case: Case, reduction: str) -> str | None:
    """Tell where an engine and the loop over records differ; None where they agree."""
    torch.manual_seed(0)
    module, batch = case.make(), case.batch()
    said = case.refused.get(engine)
    try:
        weights = torch.rand(len(batch[0]), dtype=torch.float64) + 0.1
        norms, total = by_engine(engine, module, batch, reduction, weights)
    except UnsupportedModelError as refusal:
        if said is not None and re.search(said, str(refusal)):
            return None
        return f"{engine} {case}: refused: {refusal}"
    rows = one_by_one(module, batch, reduction)
    lengths, expected = rows.norm(dim=1), weights @ rows
    of_norms = float(((norms - lengths).abs() / lengths).max())
    of_sum = float((total - expected).norm() / expected.norm())
    if max(of_norms, of_sum) <= TOLERANCE:
        return None
    return f"{engine} {case}: norms differ by {of_norms:.1e}, the sum by {of_sum:.1e}"


@pytest.mark.parametrize("engine", EVERY)
@pytest.mark.parametrize("kind", GRIDS)
def test_a_sample_of_the_options_has_the_gradients_of_the_loop(kind, engine):
    if (kind, engine) == ("recurrent", "functional"):
        pytest.skip(
            "without a rule for linear layers, each step is traced: minutes, in the slow test"
        )
    faults = [fault(engine, case, "mean") for case in cases(kind, 5)]
    assert [each for each in faults if each] == []


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("engine", EVERY)
@pytest.mark.parametrize("kind", GRIDS)
def test_all_options_have_the_gradients_of_the_loop(kind, engine, reduction):
    faults = [fault(engine, case, reduction) for case in cases(kind, 120)]
    assert [each for each in faults if each] == []


def test_a_model_that_mixes_records_is_told_from_the_loop():
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - 0.01 * x.mean(0)

    mixing = Case(
        {}, lambda: nn.Sequential(Centred(), nn.Linear(3, 2)), lambda: (torch.randn(4, 3),)
    )
    assert "differ" in str(fault("bookkeeping", mixing, "mean"))
