"""The configuration: every bad argument is named with its value, and nothing is repaired."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dp import Checks, Constant, FullBatch, MeanGradient, Momentum, Poisson, PrivacyConfig
from lightning_dp.accounting import StreamingRDPAccountant
from lightning_dp.callbacks import DifferentialPrivacy, PrivateSingleDeviceStrategy
from lightning_dp.schedules import Exponential


def config(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(**{"target_delta": 1e-5, "target_epsilon": 3.0, **changes})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("target_delta", v, "must be between 0 and 1") for v in (0.0, 1.0, -1e-5, 2.0, math.nan)),
        *(("target_epsilon", v, "must be finite") for v in (0.0, -1.0, math.inf, math.nan)),
        *(("noise_multiplier", v, "must be finite") for v in (-0.1, math.inf, math.nan)),
        *(("max_grad_norm", v, "must be greater than 0") for v in (0.0, -1.0, math.nan)),
        ("relation", "swap", "must be one of 'add_remove', 'replace_one'"),
        ("engine", "fast", "must be one of 'auto', 'records', 'layers', 'bookkeeping', 'ghost'"),
        ("engine", "functional", "was an engine of 0.1: give engine='records'"),
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(name, value, message):
    with pytest.raises(ValueError, match=f"^{name}={value!r} {message}"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_schedule", lambda step: 1.0),
        ("noise_schedule", Constant),
        ("sampling", "poisson"),
        ("sampling", Poisson),
        ("accountant", "rdp"),
        ("estimator", "mean"),
        ("postprocessing", ("momentum",)),
        ("postprocessing", (Momentum(0.5), MeanGradient())),
    ],
)
def test_an_object_of_another_kind_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=f"^{name}=.* must be an object derived from Abstract"):
        config(**{name: value})


def test_neither_budget_nor_noise_is_refused():
    with pytest.raises(ValueError, match="Neither target_epsilon nor noise_multiplier is given"):
        PrivacyConfig(target_delta=1e-5)


@pytest.mark.parametrize("budget", [{"noise_multiplier": 1.0}, {"target_epsilon": 3.0}])
def test_an_infinite_clip_norm_is_for_training_without_noise_only(budget):
    for norm in ({"max_grad_norm": math.inf}, {"estimator": MeanGradient(math.inf)}):
        with pytest.raises(ValueError, match="max_grad_norm=inf bounds nothing"):
            PrivacyConfig(target_delta=1e-5, **budget, **norm)
        PrivacyConfig(target_delta=1e-5, noise_multiplier=0.0, **norm)


def test_a_clip_norm_given_in_two_places_is_refused():
    with pytest.raises(
        ValueError, match=r"max_grad_norm=1\.0 is given as well as estimator=MeanGr"
    ):
        config(max_grad_norm=1.0, estimator=MeanGradient(1.0))


def test_the_estimator_is_dp_sgd_with_the_clip_norm_unless_another_is_given():
    assert config().resolved_estimator() == MeanGradient(1.0)
    assert config(max_grad_norm=0.3).resolved_estimator() == MeanGradient(0.3)
    assert config(estimator=MeanGradient(0.7)).resolved_estimator() == MeanGradient(0.7)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_delta": 1e-6},
        {"relation": "replace_one"},
        {"max_grad_norm": 0.5},
        {"estimator": MeanGradient(0.5)},
        {"noise_schedule": Exponential(0.1)},
        {"postprocessing": (Momentum(0.5),)},
        {"sampling": FullBatch()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_a_release_changes_the_fingerprint(changes):
    before, after = config().fingerprint(), config(**changes).fingerprint()
    assert [name for name in before if before[name] != after[name]] == [
        "estimator" if "max_grad_norm" in changes else next(iter(changes))
    ]


@pytest.mark.parametrize(
    "changes",
    [{"target_epsilon": 9.0}, {"accountant": StreamingRDPAccountant()}, {"ledger_dir": "there"}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_no_release_does_not_change_the_fingerprint(changes):
    assert config(**changes).fingerprint() == config().fingerprint()


def test_the_fingerprint_survives_a_checkpoint_also_with_numpy_numbers():
    given = config(
        target_delta=np.float64(1e-5), max_grad_norm=np.float64(0.5), noise_multiplier=np.float64(1)
    )
    file = io.BytesIO()
    torch.save(given.fingerprint(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == given.fingerprint()


def test_equal_numbers_are_one_configuration_however_they_were_given():
    given = {"max_grad_norm": 1, "target_delta": 1e-5, "noise_schedule": Exponential(1)}
    same = {
        "max_grad_norm": np.float64(1.0),
        "target_delta": np.float64(1e-5),
        "noise_schedule": Exponential(np.float32(1)),
    }
    assert config(**given).fingerprint() == config(**same).fingerprint()
    config(**given).check_same(config(**same).fingerprint())


def test_an_argument_that_a_fingerprint_does_not_have_had_its_default():
    old = {k: v for k, v in config().fingerprint().items() if k != "postprocessing"}
    config().check_same(old)
    with pytest.raises(ValueError, match=r"postprocessing differs .* was \(\), now \(Momentum\("):
        config(postprocessing=[Momentum(0.5)]).check_same(old)


def test_an_argument_that_nobody_knows_is_refused_by_name():
    with pytest.raises(ValueError, match=r"has temperature=3 in its configuration, a field that"):
        config().check_same({**config().fingerprint(), "temperature": 3})


def test_a_folder_is_a_string_or_a_path():
    make = {"target_epsilon": 3.0, "target_delta": 1e-5}
    for bad in (3, b"folder", True, ["folder"], object()):
        with pytest.raises(TypeError, match=r"ledger_dir=.* must be a folder"):
            DifferentialPrivacy(**make, ledger_dir=bad)
    with pytest.raises(ValueError, match="ledger_dir='' must name a folder"):
        DifferentialPrivacy(**make, ledger_dir="")
    here = DifferentialPrivacy(**make, ledger_dir=Path("somewhere"))
    assert here.config.ledger_dir == "somewhere"


@pytest.mark.parametrize(
    "value",
    [{"target_epsilon": 3.0}, 3.0, DifferentialPrivacy(3.0, target_delta=1e-5)],
    ids=["a dict", "a number", "the callback"],
)
def test_a_strategy_takes_a_privacy_configuration_only(value):
    with pytest.raises(TypeError, match=r"^privacy=.* must be a PrivacyConfig"):
        PrivateSingleDeviceStrategy(privacy=value)


def test_a_budget_below_all_use_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"target_epsilon=1e-12 is below 1e-09.*Raise it"):
        PrivacyConfig(target_epsilon=1e-12, target_delta=1e-5)


@pytest.mark.parametrize("kind", [PrivacyConfig, DifferentialPrivacy])
def test_earlier_names_of_checks_are_taken_with_a_warning(kind):
    earlier = {"isolation_probe": False, "spot_checks": False, "public_state": ["teacher.*"]}
    with pytest.warns(
        FutureWarning, match=r"write checks=Checks\(dry_run=False, comparisons=False, p"
    ):
        made = kind(noise_multiplier=1.0, target_delta=1e-5, **earlier)

    config = getattr(made, "config", made)
    assert config.checks == Checks(dry_run=False, comparisons=False, public_state=["teacher.*"])
    assert dataclasses.replace(config, target_delta=1e-6).checks == config.checks
    with pytest.raises(ValueError, match=r"spot_checks and checks=.* are both given"):
        kind(
            noise_multiplier=1.0,
            target_delta=1e-5,
            spot_checks=False,
            checks=Checks(loss_graph=False),
        )
