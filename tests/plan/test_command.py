"""The command prints what the functions say, and refuses by name."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from lightning_dp import suggest_batches
from lightning_dp.plan import suggest
from lightning_dp.plan.__main__ import main
from lightning_dp.plan.suggestion import duration, settings, text

SMALL = ["--records", "4", "--epsilon", "1", "--least-steps", "2"]


def test_it_runs_as_a_module_without_torch():
    code = (
        "import sys; from lightning_dp.plan.__main__ import main; "
        f"main({SMALL!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "* choose: " in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_each_budget_has_a_table(capsys):
    assert (
        main([*SMALL, "--epsilon", "1", "2", "--delta", "1e-3", "--relation", "replace_one"]) == 0
    )
    options = {"target_delta": 1e-3, "relation": "replace_one", "least_steps": 2}
    tables = (text(suggest(4, epsilon, **options)) for epsilon in (1.0, 2.0))
    assert capsys.readouterr().out == "\n\n".join(tables) + "\n"


def test_the_table_shows_each_plan_and_marks_the_best(quick):
    found = suggest(22_000, 3.0, target_delta=1e-5, records_per_second=400)
    shown = text(found, num_parameters=10_000)

    for row in found.table:
        for plan in row:
            assert f"{plan.excess:.2f} ({plan.steps:,})" in shown
    best = found.best
    assert f"{best.excess:.2f} ({best.steps:,})*" in shown
    assert f"* choose: {settings(best)}" in shown
    assert f"{best.noise_length(10_000):.3g}*" in shown
    assert "all records" in shown
    assert duration(best.seconds(400)) in shown


def test_a_plan_of_ones_own_is_compared(quick):
    found = suggest(22_000, 3.0, target_delta=1e-5)
    yours = found.best.changed(batch_size=128, epochs=2)
    times = yours.noise_of_the_run / found.best.noise_of_the_run
    assert f"{times:.2g} times more noise over the run than the suggestion" in text(
        found, yours=yours
    )


def test_batches_and_noise_are_compared_for_both_plans(capsys):
    """One line of each kind, the choice first; the other lines are those without it."""
    asked = ["--records", "400", "--epsilon", "3", "--batch-size", "20", "--epochs", "3"]
    assert main(asked) == 0
    without = capsys.readouterr().out
    assert main([*asked, "--batches"]) == 0
    blocks = capsys.readouterr().out.removeprefix(without).strip().split("\n\n")
    for (heading, *lines), plan in zip(
        map(str.splitlines, blocks), (suggest(400, 3.0).best, None), strict=True
    ):
        size, steps = (20, 60) if plan is None else (plan.batch_size, plan.steps)
        found = suggest_batches(
            400, size, steps / -(-400 // size), target_epsilon=3.0, target_delta=1e-4
        )
        assert heading.startswith(f"batches of {size} in {steps} steps: ")
        best, *others = (re.match(r" *(\S+) +([\d.]+)(.) (\S+)\(.*noise=(\w+)", x) for x in lines)
        assert best[3] == "*" and {each[3] for each in others} == {" "}
        assert best[1] == f"{found.best.noise_multiplier:.3g}"
        kinds = [(each[4], each[5]) for each in (best, *others)]
        assert len({*kinds}) == len(kinds) == 6
        assert ("sampling=FixedOrder", "LambdaCGD") in kinds
        assert all(("zero_out" in line) == ("FixedOrder" in line) for line in lines)


def test_a_fixed_order_may_be_chosen_where_its_relation_is_asked_for(capsys):
    asked = ["--records", "400", "--epsilon", "8", "--batch-size", "20", "--epochs", "1"]
    assert main([*asked, "--batches", "--relation", "zero_out"]) == 0
    out = capsys.readouterr().out
    assert "* sampling=FixedOrder(), noise=LambdaCGD(" in out and "relation=" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon", "nan"], "argument --epsilon: nan must be finite and greater than 0."),
        (["--epsilon", "1", "0"], "argument --epsilon: 0 must be finite and greater than 0."),
        (["--records", "0"], "argument --records: 0 must be a whole number of at least 1."),
        (["--records", "1.5"], "argument --records: 1.5 must be a whole number of at least 1."),
        (["--delta", "nan"], "argument --delta: nan must be between 0 and 1."),
        (["--hours", "nan"], "argument --hours: nan must be finite"),
        (
            ["--hours", "1"],
            "--hours needs --records-per-second (time a short run on synthetic data).",
        ),
        (["--hours", "1e-9", "--records-per-second", "1"], "--hours=1e-09 affords no gradient"),
        (["--batch-size", "3"], "--batch-size and --epochs: give both, or neither."),
        (
            ["--layer-inputs", "x"],
            "argument --layer-inputs: could not convert string to float: 'x'",
        ),
    ],
)
def test_what_cannot_be_used_is_named_by_its_option(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *arguments])
    assert stopped.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err
