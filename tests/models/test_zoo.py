"""The models that people use, against plain autograd; all of them with ``-m slow``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from zoo import FAMILIES, Case, Records, missing
from zoo.oracle import compare

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.gradients.base import UnsupportedModelError

ROOT = Path(__file__).parents[2]
CORE = {
    "experts in one tensor",
    "in place, after a scale",
    "tied by weight.t()",
    "temperature in the loss",
    "matrix factorisation",
    "Llama, padded",
    "GPT-2, n = T",
    "BERT, classes",
    "T5",
    "ConvNeXt",
    "GPT-2, LoRA on Conv1D",
    "Llama, DoRA",
}
"""The models of the default run; one library that is imported is enough."""

KEPT = json.loads((ROOT / "benchmarks/models_that_work.json").read_text("utf-8"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _rows(core: set[str], is_refused: bool) -> list:
    """Return the cases as parameters; those that are not of the core are slow."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[] if case.name in core else [pytest.mark.slow],
        )
        for cases in FAMILIES.values()
        for case in cases
        if bool(case.refused) == is_refused
    ]


@pytest.fixture(autouse=True)
def _libraries(request):
    case = request.getfixturevalue("case")
    if lacking := missing(case):
        pytest.skip(f"not installed: {', '.join(lacking)} (the extra 'models')")


@pytest.mark.parametrize("case", _rows(CORE, False))
def test_gradients_are_those_of_plain_autograd(case: Case):
    found = compare(case)

    assert found.error < 1e-5, found
    assert found.rung == KEPT[case.name]["rung"], found


@pytest.mark.parametrize("case", _rows(set(), True))
def test_what_mixes_records_is_refused(case: Case, make_trainer):
    trainer = make_trainer(
        max_steps=1, callbacks=[DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)]
    )

    with pytest.raises((UnsupportedModelError, MisconfigurationException), match=case.refused):
        trainer.fit(case.training(), DataLoader(Records(case.batch(24)), 6))


@pytest.mark.parametrize("case", _rows({"experts in one tensor", "GPT-2, LoRA on Conv1D"}, False))
def test_a_trainer_trains_it_as_it_is(case: Case, make_trainer):
    torch.manual_seed(5)
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    trainer = make_trainer(max_steps=2, callbacks=[privacy])
    loader = DataLoader(Records(case.batch(24)), 6, shuffle=True)

    trainer.fit(case.training(dropout=0.1), loader)

    assert privacy.steps == 2
