"""A report as data and in nine lines, of what ran, and as a picture."""

from __future__ import annotations

from dataclasses import replace

import lightning as L
import matplotlib
import numpy as np
import pytest

from lightning_dp import Checks
from lightning_dp.accounting import PLDAccountant, PoissonGaussian, epsilon, epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report import PrivacyReport
from lightning_dp.report.files import read_report, write_report
from lightning_dp.schedules import Exponential
from tests.zoo import private

matplotlib.use("Agg")

DELTA = 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": "two"}, "epsilon='two' must be a real number"),
        ({"delta": "nan"}, "delta='nan' must be a real number"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"seeded": 0}, "seeded=0 must be True or False"),
        ({"versions": {"torch": 2}}, r"versions\['torch'\]=2 must be a string"),
        ({"events": []}, r"events=\[\] must be a dictionary"),
        ({"public_state": "a"}, "public_state='a' must be a list"),
        ({"clip_norms": {"C": None}}, r"clip_norms\['C'\]=None must be a real number"),
        ({"format": "other"}, "not a privacy report of this version"),
        ({"more": 1}, r"unknown fields: \['more'\]"),
        ({"relation": "x"}, r"relation=.* must be"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_its_field(
    report_of, tmp_path, edit_json, change, message
):
    path = write_report(report_of(), tmp_path)
    edit_json(path, lambda content: content.update(change))

    with pytest.raises(ValueError, match=message):
        read_report(path)


def test_a_field_that_is_absent_has_its_default_if_it_has_one(report_of, tmp_path, edit_json):
    report = report_of(stop_reason="x", versions={"torch": "2"}, journal=None)
    path = write_report(report, tmp_path)
    assert read_report(path) == report
    edit_json(path, lambda content: [content.pop(name) for name in ("stop_reason", "versions")])

    assert read_report(path) == replace(report, stop_reason=None, versions={})
    edit_json(path, lambda content: content.pop("seeded"))
    with pytest.raises(ValueError, match=r"lacks fields: \['seeded'\]"):
        read_report(path)


def test_report_tells_what_ran(classifier, mlp, loader, make_trainer):
    privacy = DifferentialPrivacy(
        target_epsilon=3.0, noise_multiplier=1.5, max_grad_norm=0.4, target_delta=DELTA
    )
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)

    report = privacy.report()

    assert report.private and not report.seeded
    assert (report.steps, report.delta, report.target_epsilon) == (10, DELTA, 3.0)
    assert report.epsilon == report.epsilon_of_plan == privacy.epsilon
    assert (report.sample_rate, report.expected_batch_size, report.num_records) == (0.1, 24, 240)
    assert report.noise_multiplier == 1.5
    assert report.mechanism["estimator"] == "MeanGradient(max_grad_norm=0.4)"
    assert report.accountant == PLDAccountant().name
    assert any("validation" in item for item in report.not_covered)
    assert report.to_dict()["versions"]["lightning"] == L.__version__
    lines = str(report).splitlines()
    claim = f"ε = {epsilon_text(report.epsilon)} at δ = 1e-05 (add_remove), 10 steps, target ε = 3"
    assert lines[0] == claim and len(lines) == 9
    assert str(report.epsilon) not in str(report) and str(report.ledger_id) in lines[-1]


def test_the_first_line_is_the_claim(report_of):
    """The claims that hold whatever ended the run; and a warning word where it promises nothing."""

    def first(**changes):
        report = report_of(**changes)
        assert len(str(report).splitlines()) == 9
        return str(report).splitlines()[0], report.summary("x.json")

    made = epsilon_text(report_of().epsilon)
    line, end = first()
    assert line == f"ε = {made} at δ = 1e-05 (add_remove), 129 steps, target ε = 3"
    assert end == f"privacy: ε = {made} of 3 at δ = 1e-05 (add_remove) after 129 noised steps; " + (
        "isolation of records was not checked; report: x.json"
    )
    line, end = first(delta=1.2345644e-5)  # no smaller δ is claimed either
    assert "at δ = 1.23457e-05 (" in line and "at δ = 1.23457e-05 (" in end
    line, end = first(epsilon_of_plan=2.9988)
    assert (
        line.startswith("ε = 2.999 at")
        and f"counts whole if a result chose when to stop; else ε = {made}" in line
    )
    assert end.index(f"ε = {made}") < end.index(
        "ε = 2.999 for the whole plan, to be claimed if a result"
    )
    line, end = first(epsilon=4e6, target_epsilon=None)
    assert line.endswith("so large an ε promises next to nothing") and "next to nothing" in end
    line, end = first(private=False, seeded=True)
    assert line.startswith("NOT PRIVATE (a seed was set): ε = ")
    assert end.startswith("privacy: NOT PRIVATE (a seed was set): ε = ")
    line, _ = first(claims_budget=True, epsilon=3.0)
    assert "the whole budget since noise is chosen at run time" in line


def fitted(classifier, mlp, loader, make_trainer, **arguments):
    privacy = DifferentialPrivacy(noise_multiplier=1.5, target_delta=DELTA, **arguments)
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(mlp()), loader)
    return privacy


def test_a_batch_that_ran_whole_has_epsilon_under_the_tolerance_of_comparisons(
    classifier, mlp, loader, make_trainer
):
    whole = fitted(classifier, mlp, loader, make_trainer, engine="layers").report()
    alone = fitted(classifier, mlp, loader, make_trainer, engine="records").report()

    weaker = [(PoissonGaussian(1.5 / 1.05, 0.1), 10)]
    exact = PLDAccountant().epsilon(weaker, DELTA)
    assert whole.epsilon < whole.epsilon_at_tolerance() == exact
    assert f"with noise multipliers z / 1.05: ε = {epsilon_text(exact)}" in whole.markdown()
    assert "1.05 C" not in alone.markdown() and "by construction" in alone.isolation


def test_steps_that_were_not_compared_are_counted_as_such_with_the_reason(
    classifier, mlp, loader, make_trainer
):
    privacy = fitted(
        classifier, mlp, loader, make_trainer, checks=Checks(public_state=["teacher.*"])
    )
    run = privacy._run
    looked = run.spot_checks
    assert privacy.report().spot_checks == f"passed at {looked} of 10 steps"

    run.not_compared = {"it is coarse": 2, "an error": 1}

    report = privacy.report()
    assert report.spot_checks == (
        f"passed at {looked - 3} of 10 steps; not compared: an error (1); it is coarse (2)"
    )
    assert "public state: teacher.* (declared by the user, not checked)" in str(report)
    assert PrivacyReport.from_dict(report.to_dict()).public_state == ("teacher.*",)


# -- as a picture ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def closed():
    from matplotlib import pyplot

    yield
    pyplot.close("all")


@pytest.fixture
def report(fit):
    """Of 12 steps with falling noise."""
    falling = {"noise_multiplier": 3.0, "noise_schedule": Exponential(0.1)}
    return fit(privacy=private(target_epsilon=8.0, **falling)).privacy.report()


def line(ax, label):
    (found,) = [line for line in ax.get_lines() if line.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def test_it_shows_epsilon_of_the_charges_in_their_order_against_the_budget(report):
    ax = report.plot()

    steps, values = line(ax, r"$\epsilon_t$")
    events = [event for run in report.events.values() for event, _ in run]
    assert (steps[0], values[0], steps[-1]) == (0, 0.0, 12)
    for t in (1, 4, 12):
        expected = epsilon(events[:t], DELTA)
        assert values[list(steps).index(t)] == pytest.approx(expected, rel=5e-4)
    _, budget = line(ax, r"budget: $\epsilon$ = 8")
    assert set(budget) == {8.0} and ax.get_ylim()[1] > 8
    steps, sigmas = line(ax.figure.axes[-1], r"$\sigma_t$")
    np.testing.assert_array_equal(steps, range(1, 13))
    np.testing.assert_allclose(sigmas, [3.0 * Exponential(0.1)(t) for t in range(12)])
