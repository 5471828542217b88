"""Page one of a report: what was promised, in the words of somebody who is no engineer.

A new section is a function here and a line in :func:`sections`. Every number is an upper bound of what
can go wrong, and is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

from lightning_dp.accounting.events import History
from lightning_dp.accounting.hypothesis_tests import TradeOff, up_to
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.render import Block, Fact, Table

if TYPE_CHECKING:
    from lightning_dp.report.facts import AbstractReport

__all__ = ["Known", "sections", "warnings"]

_NOT_STATED = "not stated"
_STATED = "{} (stated, not checked)"
_RATES = ((0.1, "10 in 100"), (0.01, "1 in 100"), (0.001, "1 in 1,000"), (0.0001, "1 in 10,000"))


@dataclass(frozen=True, kw_only=True)
class Known:
    """Facts that are known when a page is made, and are not in the report.

    Args:
        about: the user's words about the data; they go before those of the report.
        problems: what was found not to agree.
        epsilon, history: of all that the journal knows, if it was read.
        others: what else ran on the data, each a sentence.
        checked: what was checked, each a sentence.
    """

    about: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()
    epsilon: float | None = None
    history: History | None = None
    others: Sequence[str] = ()
    checked: Sequence[str] = ()


def warnings(report: AbstractReport, known: Known) -> list[str]:
    """Return what must be read first: why nothing is promised, or what does not agree."""
    found = [_nothing(report)] if report.why_not_private else []
    return found + [
        f"This does not agree, so do not rely on this page: {p}" for p in known.problems
    ]


def _nothing(report: AbstractReport) -> str:
    """Return the words for a run that promises nothing."""
    start = f"Nothing is promised about this model. {report.why_not_private}."
    if report.events.voided is not None:
        why = (
            "A check found during the training that records could influence more than their share. "
            "The promise is withdrawn for all that this training has put out, also for what was "
            "put out before the check."
        )
    elif report.seeded:
        why = (
            "The random noise can be repeated by anybody who knows or guesses the seed, and then be "
            "taken away. This was a test run."
        )
    else:
        why = "The training added no noise, or far too little of it to promise anything."
    return f"{start} {why} Do not hand its weights on as private."


def sections(report: AbstractReport, known: Known) -> Mapping[str, Sequence[Block]]:
    """Return page one by title, in its order."""
    if report.private:
        claim = _Claim.of(report, known)
        promise = {
            "What is promised": _promise(report, claim),
            "To whom, and against whom": _TO_WHOM,
        }
        short, weaker = _limit(report, claim), _several_rows(claim)
    else:
        promise = {"What is promised": ["Nothing."]}
        short, weaker = "This page says why nothing is promised about them.", ""
    return {
        "In short": [f"{_short(report)} {short}"],
        **promise,
        "About which data": _data(report, weaker),
        "When, by whom, and with which software": _when(report),
        "What else ran on these data": _others(report, known),
        "What it rests on": [*_trust(report), *map(Fact, known.checked)],
        "What is not promised": [*_NOT_PROMISED, *map(Fact, report.not_covered)],
    }


# -- the promise -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claim:
    """The claim: the largest ε that may have to be, and what follows from it for tests.

    Args:
        epsilon, delta: the claim.
        why: of an ε that is larger than the report's, in words.
        tests: bounds on everybody who tries to tell whether a record was used.
    """

    epsilon: float
    delta: float
    why: str
    tests: TradeOff

    @classmethod
    def of(cls, report: AbstractReport, known: Known) -> _Claim:
        epsilon, why = report.epsilon, ""
        history: History = report.history()
        if known.epsilon is not None and known.epsilon > epsilon:
            epsilon, history = known.epsilon, known.history or history
            why = (
                f"The report says ε = {epsilon_text(report.epsilon)}. The journal knows of more "
                "training from the same ledger, and all of it is counted here."
            )
        only_the_pair = report.claims_budget
        if (of_plan := report.epsilon_of_plan) is not None and of_plan > epsilon:
            why = (
                f"The training stopped before its plan had ended. A result may have decided when, so "
                "the whole plan counts here. If nothing that was learnt from the data decided it, "
                f"ε = {epsilon_text(epsilon)} may be claimed."
            )
            epsilon, only_the_pair = of_plan, True
        pair = (epsilon, report.delta)
        if only_the_pair or not math.isfinite(epsilon):
            return cls(*pair, why, TradeOff((pair,)))
        judge = report.known_accountant() or PLDAccountant()
        return cls(*pair, why, up_to(pair, history, report.relation, judge))


def _question(report: AbstractReport) -> str:
    return (
        "whether one certain record was in the training data or not"
        if report.relation == "add_remove"
        else "whether one certain record was in the training data, or another one in its place"
    )


def _limit(report: AbstractReport, claim: _Claim) -> str:
    """Return the promise in two sentences."""
    return (
        "Random noise was added during the training. It limits what anybody can learn from the model "
        f"about {_question(report)}: who has to guess it, at even odds, is right in at most "
        f"{_right(claim)} of 100 cases, instead of 50. This page says what that means, and what it does "
        "not cover."
    )


def _right(claim: _Claim) -> str:
    return _in_100((1 + claim.tests.advantage) / 2)


def _promise(report: AbstractReport, claim: _Claim) -> list[Block]:
    besides = ", and the other results that are counted here" if report.events.external else ""
    return [
        f"Somebody wants to find out {_question(report)}. They may know all the other records, the "
        "program and all its settings, and the weights of the model (the numbers that it learnt) "
        f"after every step of the training{besides}. They may use any method and any computer. They "
        "do not know the random numbers of the training.",
        "If a fair coin decided it, and they have to guess, they are right in at most "
        f"{_right(claim)} of 100 cases. Without the model they would be right in 50.",
        "Somebody who says “it was in” only when quite sure is wrong less often, and finds fewer. "
        "These are the limits:",
        Table(
            (
                "Of the records that were not in, they name by mistake",
                "Of the records that were in, they find",
            ),
            [
                (f"{words}", f"at most {_in_100(claim.tests.true_positive_rate(rate))} in 100")
                for rate, words in _RATES
            ],
        ),
        "These are limits for every method, also for those that nobody knows yet. They are computed, "
        "not measured.",
        _short_form(claim),
        *([claim.why] if claim.why else []),
    ]


def _short_form(claim: _Claim) -> str:
    factor = (
        f"{epsilon_text(math.exp(claim.epsilon), 3)} times" if claim.epsilon < 700 else "any factor"
    )
    delta = Decimal(repr(claim.delta))
    return (
        f"Engineers write the promise as ε = {epsilon_text(claim.epsilon)} (epsilon) at δ = {delta:f} "
        "(delta): whether the record is in or not makes each possible outcome of the training at most "
        f"{factor} as likely, plus a probability of {delta:f} (1 in {int(1 / delta):,}). Smaller "
        "numbers are stronger promises; ε = 0 and δ = 0 would be no trace of the record at all."
    )


def _in_100(probability: float) -> str:
    return epsilon_text(min(100.0, 100 * probability), 3)


_TO_WHOM: Sequence[Block] = (
    "It is made to those whom the records are about, for each record by itself, whatever it says: an "
    "unusual record is protected no less than a common one.",
    "It holds against everybody who sees the weights of the model: the finished ones, those that were "
    "saved on the way, and those after every single step. It holds as well for all that is made from "
    "the weights alone, such as answers of the model. Nothing that is done with them later can weaken "
    "it, unless the data are used again.",
    "It does not hold against those who see the training data, or the computer during the training.",
)


# -- the data ----------------------------------------------------------------------------------


def _short(report: AbstractReport) -> str:
    about = report.about
    of = f" of “{about['data_set']}”" if "data_set" in about else ""
    count = "records" if report.num_records is None else f"{report.num_records:,} records"
    return f"A model was trained on {count}{of}."


def _data(report: AbstractReport, weaker: str) -> list[Block]:
    about = report.about
    count = _NOT_STATED if report.num_records is None else f"{report.num_records:,}"
    one_row = "one row: one item of the training data as the program read them"
    blocks: list[Block] = [
        Fact(_stated(about, "data_set"), "Data set"),
        Fact(_stated(about, "controller"), "Responsible for the data"),
        Fact(count, "Number of records"),
        Fact(_stated(about, "record", one_row), "One record is"),
        f"The promise is about one record, which need not be one person. {weaker}".strip(),
        _WHO_STATED,
        "The number of records is not protected, nor is the average number of them that a step uses.",
    ]
    return blocks


_WHO_STATED = (
    "What is marked as stated are words of those who trained the model; no program can check them."
)


def _stated(about: Mapping[str, str], name: str, otherwise: str = _NOT_STATED) -> str:
    return _STATED.format(about[name]) if name in about else otherwise


def _several_rows(claim: _Claim) -> str:
    """Return what holds for a person with several records: by the definition, applied twice."""
    start = "Whoever has several records in the data is protected less"
    if not claim.epsilon < 350:
        return f"{start}."
    delta = (1 + math.exp(claim.epsilon)) * claim.delta
    with_two = (
        f": with two of them, ε = {epsilon_text(2 * claim.epsilon)} at δ = {epsilon_text(delta, 3)}"
        if delta < 1
        else ": with two of them, next to nothing is promised"
    )
    return f"{start}{with_two}; with more, less again."


# -- the run -----------------------------------------------------------------------------------


def _when(report: AbstractReport) -> list[Block]:
    times = (
        f"{report.started} to {report.ended}"
        if report.started is not None and report.ended is not None
        else "not recorded"
    )
    runs, steps = report.runs, report.steps
    facts: list[Block] = [
        Fact(times, "Training"),
        Fact(_stated(report.about, "trained_by"), "Trained by"),
        Fact(
            f"{steps:,} (a step changes the weights once, with noise), in {runs} "
            f"run{'' if runs == 1 else 's'} of the program",
            "Steps",
        ),
    ]
    if report.stop_reason is not None:
        facts.append(Fact(report.stop_reason, "Stopped early"))
    software = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return [
        *facts,
        Fact(software or "not recorded", "Software"),
        Fact(_LEDGER.format(report.ledger_id), "Number of the ledger"),
    ]


_LEDGER = (
    "{} (the ledger is the list in which each step was written down before it was made; every saved "
    "model of this training has the same number in it)"
)


def _others(report: AbstractReport, known: Known) -> list[Block]:
    blocks: list[Block] = []
    if report.runs > 1:
        blocks.append(f"All {report.runs} runs of the program that share this ledger are counted.")
    blocks += [f"Counted as well: {_STATED.format(e.declared)}." for e, _ in report.events.external]
    none = (
        f"This page knows of no {'further' if blocks else 'other'} use of the data, and did not look for "
        "one."
    )
    return [*blocks, *(known.others or [none]), _ADDS]


_ADDS = (
    "Every other training, statistic or publication from the same records weakens the promise: what "
    "was promised each time adds up. Whoever keeps the data must keep count."
)


def _trust(report: AbstractReport) -> list[Block]:
    """Return what was checked, and what rests on somebody's word."""
    facts = [
        Fact(_isolation(report), "Checked before the training"),
        Fact(_spot_checks(report), "Checked during the training"),
    ]
    if report.gradient_edits is not None:
        facts.append(
            Fact(_STATED.format(report.gradient_edits), "What the program did to private results")
        )
    if report.public_state:
        written = ", ".join(report.public_state)
        facts.append(
            Fact(_STATED.format(written), "Parts of the model said to hold nothing of the records")
        )
    return [
        "The promise is mathematics about the program. It rests on the program being what it says, and "
        "on good random numbers. An engineer can compute all numbers again from the annex of this "
        "report.",
        "It also rests on each record having its own part in a step: no record may change what another "
        "one adds.",
        *facts,
    ]


def _isolation(report: AbstractReport) -> str:
    """Return the outcome of the dry run in plain words; the annex has its own."""
    said = report.isolation
    if said.startswith("by construction"):
        return "not needed: the program worked on each record by itself"
    if said.startswith(("compared on", "probed, isolated")):  # the words of earlier versions, too
        return "yes, with made-up records, and it was so; the annex says under which conditions"
    if said == "opted out":
        return "no, those who trained the model switched the check off"
    return "not with this result; the annex says why"


def _spot_checks(report: AbstractReport) -> str:
    said = report.spot_checks
    if said.startswith("not needed"):
        return "not needed: the program worked on each record by itself"
    if said == "opted out":
        return "no, those who trained the model switched the check off"
    if report.steps_compared:
        return "yes, at some steps; the annex says at how many"
    return "no step was checked"


_NOT_PROMISED: Sequence[Block] = (
    "The model may say much about people in general: if it learnt that smokers fall ill more often, "
    "this can be used about every smoker, whether their record was in or not. This is what it is for.",
    "The promise does not make the data anonymous. It does not say who may use or see them, nor that "
    "the model is right or fair. It is no legal opinion. Not covered are also:",
)
