"""Modules that keep records apart train with everything checked, and without a word about isolation."""

from __future__ import annotations

import isolation_zoo as zoo
import pytest
from isolation_zoo.cases import ORDINARY, checked_fit

from lightning_dp.accounting.events import VoidedRunError

QUICK = (
    "loss_gaussian",
    "loss_sum_over_the_number",
    "loss_clamped_per_record",
    "LogsAndMeasures",
    "ManualOptimization",
    "MeanTeacher",
    "Diffusion",
    "MixtureWithMasks",
    "MaskedLanguageModel",
    "LongShortTerm",
    "SmallResNet",
    "Ctc",
    "StringsInTheBatch",
    "ClippedByNorm",
    "AugmentedInTheDataSet",
)

TOLD = ("by construction", "compared on synthetic samples", "synthetic samples were not compared")


@pytest.mark.few(6)
@pytest.mark.filterwarnings("ignore:.*number of training batches")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in sorted(zoo.ORDINARY)],
)
def test_it_trains_without_a_refusal(name):
    case = ORDINARY[name]

    try:
        _, privacy = checked_fit(case, case.records(80))
    except VoidedRunError as error:
        pytest.fail(f"voided: {error}")

    assert privacy.steps >= 5
    assert privacy.report().isolation.startswith(TOLD)


def test_each_quick_one_is_in_the_list():
    assert set(QUICK) <= set(ORDINARY)
