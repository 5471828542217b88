"""The private parts of async_federated.py: σ = 8 against the smallest valid σ at (1, 5.5e-8)."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from async_federated_data import LeNetRecords, binary, lenet, mnist
from async_federated_run import CLIENTS, LAG, Split, federate, right, strongly_convex
from common import (
    TEST,
    TUNING_SEED,
    Group,
    Outcome,
    Summary,
    design,
    finished_all,
    gains_text,
    table,
    tuning,
)
from sklearn.linear_model import LogisticRegression

from lightning_dp.accounting import PLDAccountant, PoissonGaussian, calibrate
from lightning_dp.federated import AsyncPlan, ClientPrivacy, InverseRootSteps, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps, SampleSizes, rounds_for
from lightning_dp.functional import flatten

TARGET, DELTA, CLIP = 1.0, 5.5e-8, 0.1
PRIVATE_GRADIENTS = 25_000  # K of one client
PRIVATE_RECORDS = 8_000  # N_c; the paper has 10,000, w8a has not enough for that
RATES = (0.15, 0.05, 0.5, 1.5)  # the paper's first
LENET_RECORDS, LENET_RATES = 10_000, (0.15, 0.05, 0.015, 0.005)  # of a client; the paper's first


@dataclass(frozen=True)
class Setting:
    name: str
    sizes: SampleSizes
    sigma: float | None  # None: the smallest that is valid; 0: no noise


GROWING = PolynomialSizes(1.322, 16)
SETTINGS = (
    Setting("growing 16 + ⌈1.322 i⌉, the paper's σ", GROWING, 8.0),
    Setting("growing 16 + ⌈1.322 i⌉, smallest σ", GROWING, None),
    Setting("constant 16, smallest σ", PolynomialSizes(0, 16), None),
    Setting("constant 137, smallest σ", PolynomialSizes(0, 137), None),
    Setting("growing, clipped, no noise", GROWING, 0.0),
)


def smallest_sigma(sizes: Callable[[int], int], rounds: int, num_records: int) -> float:
    """σ for (TARGET, DELTA) with Poisson batches of these sizes."""
    return calibrate(
        lambda i: 1.0, lambda i: sizes(i) / num_records, rounds, epsilon=TARGET, delta=DELTA
    )


def true_epsilon(sizes: Callable[[int], int], sigma: float, rounds: int, n: int) -> float:
    events = [(PoissonGaussian(sigma, sizes(i) / n), 1) for i in range(rounds)]
    return PLDAccountant().epsilon(events, DELTA)


def private_split(folder: str, seed: int) -> tuple[Split, Split]:
    """Clients with 8000 records each; of the rest, one half to choose η0 and one to report."""
    x, y = binary("w8a", folder)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    train, held = order[: CLIENTS * PRIVATE_RECORDS], order[CLIENTS * PRIVATE_RECORDS :]
    clients = [(x[part], y[part]) for part in train.chunk(CLIENTS)]
    choose, report = held.chunk(2)
    return Split(clients, x[choose], y[choose]), Split(clients, x[report], y[report])


def private_part(options: argparse.Namespace) -> None:
    print(f"\n## w8a, (ε, δ) = ({TARGET}, {DELTA}), C = {CLIP}, {CLIENTS} clients of N_c records\n")
    print("N_c = 10,000 (accounting only)\n")
    print("| batches | rounds | σ | √T σ | true ε |\n| --- | --- | --- | --- | --- |")
    for setting in SETTINGS[:4]:
        print(accounting_row(setting, 10_000), flush=True)
    print(f"\nN_c = {PRIVATE_RECORDS}\n")
    print("| batches | rounds | σ | √T σ | true ε |\n| --- | --- | --- | --- | --- |")
    for setting in SETTINGS[:4]:
        print(accounting_row(setting, PRIVATE_RECORDS), flush=True)
    for convex in strongly_convex(options)[:1] if options.quick else strongly_convex(options):
        kind = "strongly convex, β = .001" if convex else "convex, β = .01"
        print(f"\n{kind}\n")
        print("| batches | ε by the ledgers | η0 | accuracy | AUC | chosen η0 | accuracy | AUC |")
        print("|" + " --- |" * 8)
        for setting in SETTINGS:
            print(private_row(setting, options, convex), flush=True)


def sigma_of(setting: Setting, num_records: int) -> tuple[int, float]:
    rounds = rounds_for(setting.sizes, PRIVATE_GRADIENTS)
    if setting.sigma is not None:
        return rounds, setting.sigma
    return rounds, smallest_sigma(setting.sizes, rounds, num_records)


def accounting_row(setting: Setting, n: int) -> str:
    rounds, sigma = sigma_of(setting, n)
    spent = true_epsilon(setting.sizes, sigma, rounds, n)
    total = math.sqrt(rounds) * sigma
    return f"| {setting.name} | {rounds} | {sigma:.3f} | {total:.1f} | {spent:.4f} |"


def private_run(
    folder: str, plan: AsyncPlan, sigma: float, convex: bool, seed: int
) -> tuple[float, float, float, float]:
    """AUC on records to choose by; accuracy and AUC on those to report on; ε by the ledgers."""
    choose, report = private_split(folder, seed)
    point, spent = federate(
        *(choose.records(strongly_convex=convex), choose.start(), plan),
        *(ClientPrivacy(CLIP, sigma, math.inf, DELTA), seed),
    )
    return choose.auc(point), report.accuracy(point), report.auc(point), spent


def private_row(setting: Setting, options: argparse.Namespace, convex: bool) -> str:
    """At the paper's η0, and at the one that is best on other held-out records, mean over seeds."""
    rounds, sigma = sigma_of(setting, PRIVATE_RECORDS)
    rounds = 20 if options.quick else rounds
    rates = RATES[:1] if options.quick else RATES
    runs = []
    for eta0 in rates:
        steps = InverseSteps(eta0, 0.001) if convex else InverseRootSteps(eta0, 0.01)
        what = (options.data, AsyncPlan(rounds, setting.sizes, steps, lag=LAG), sigma, convex)
        runs += [(*what, seed) for seed in range(options.seeds)]
    results = np.array(finished_all(private_run, runs, options.jobs))
    found = dict(zip(rates, results.reshape(len(rates), options.seeds, -1), strict=True))
    best = max(found, key=lambda eta0: found[eta0][:, 0].mean())
    cells = [setting.name, f"{found[RATES[0]][0, 3]:.4f}"]
    for eta0 in (RATES[0], best):
        cells += [f"{eta0:g}", *(Summary.of(found[eta0][:, k]).text(4) for k in (1, 2))]
    return "| " + " | ".join(cells) + " |"


# -- tuned ---------------------------------------------------------------------------------------

TUNED: dict[str, Sequence[Any]] = {
    "step": (
        0.3,
        1.0,
        3.0,
        10.0,
        30.0,
        100.0,
    ),  # η0 s C: the longest that one client's first can be
    "size": (137, 500, 2000, PRIVATE_RECORDS),
    "clip": (0.1, 0.3, 1.0),
    "gradients": (PRIVATE_GRADIENTS, 4 * PRIVATE_GRADIENTS),
    "decay": (0.0, 0.01),
}


def tuned_part(options: argparse.Namespace) -> None:
    """Sizes, steps and clip norm tuned: how far from a model without privacy?"""
    print(f"\n## w8a at ({TARGET}, {DELTA}): sizes, steps and clip norm tuned\n\n{TEST}\n")
    settings = design(TUNED)
    group, results = Group("w8a", "tuned", TARGET, settings), {}
    winner: int | None = 0
    while not options.quick:
        runs, winner = tuning(group, results, lambda outcome: outcome.validation[1])
        if winner is not None:
            break
        arguments = [(options.data, settings[run.setting], run.seed) for run in runs]
        found = finished_all(tuned_run, arguments, options.jobs)
        results |= dict(zip(runs, found, strict=True))
    assert winner is not None
    seeds = range(options.seeds)
    arguments = [(options.data, settings[winner], seed) for seed in seeds]
    outcomes = finished_all(tuned_run, arguments, options.jobs)
    plain = finished_all(plain_model, [(options.data, seed) for seed in seeds], options.jobs)
    private = np.array([(100 * each.test[1], each.test[0]) for each in outcomes])
    reference = np.array(plain) * (100, 1)
    chosen = ", ".join(f"{name} {value:g}" for name, value in settings[winner].items())
    rows = [
        ["not private", "inf", *(Summary.of(reference[:, k]).text(3) for k in (0, 1)), ""],
        [
            *("private", f"{max(each.spent for each in outcomes):.4f}"),
            *(Summary.of(private[:, k]).text(3) for k in (0, 1)),
            gains_text([(private[:, 0], reference[:, 0])], 3)[0],
        ],
    ]
    header = ("", "ε by the ledgers", "accuracy, %", "AUC", "accuracy - that without privacy")
    print(table(header, rows))
    print(f"\nChosen among {len(settings)} settings by the accuracy on other records: {chosen}.")


def tuned_run(folder: str, setting: Mapping[str, Any], seed: int) -> Outcome:
    """AUC and accuracy on records to choose by, and on those to report on."""
    begin = time.process_time()
    choose, report = private_split(folder, seed)
    sizes, clip = PolynomialSizes(0, setting["size"]), setting["clip"]
    rounds = rounds_for(sizes, setting["gradients"])
    steps = InverseRootSteps(setting["step"] / (setting["size"] * clip), setting["decay"])
    sigma = smallest_sigma(sizes, rounds, PRIVATE_RECORDS)
    point, spent = federate(
        *(choose.records(strongly_convex=False), choose.start()),
        *(AsyncPlan(rounds, sizes, steps, lag=LAG), ClientPrivacy(clip, sigma, math.inf, DELTA)),
        seed,
    )
    found = [(split.auc(point), split.accuracy(point)) for split in (choose, report)]
    passes = setting["gradients"] / PRIVATE_RECORDS
    return Outcome(found[0], found[1], spent, passes, time.process_time() - begin)


def plain_model(folder: str, seed: int) -> tuple[float, float]:
    """Accuracy and AUC of scikit-learn's logistic regression on all clients' records."""
    _, report = private_split(folder, seed)
    x, y = (torch.cat(parts) for parts in zip(*report.clients, strict=True))
    model = LogisticRegression(C=1.0, fit_intercept=False, max_iter=1000).fit(x.numpy(), y.numpy())
    point = torch.from_numpy(model.coef_[0].astype(np.float32))
    return report.accuracy(point), report.auc(point)


# -- LeNet ---------------------------------------------------------------------------------------


def private_lenet_part(options: argparse.Namespace) -> None:
    """The paper's figure 13: five clients with 10,000 digits each."""
    print(f"\n## LeNet on MNIST, (ε, δ) = ({TARGET}, {DELTA}), C = {CLIP}, η0/(1 + .01 √t)\n")
    print(f"{TEST}\n\nη0 is the best of {LENET_RATES} on 10,000 other digits and another noise.\n")
    settings = SETTINGS[:2] if options.quick else SETTINGS
    plans = [sigma_of(setting, LENET_RECORDS) for setting in settings]
    if options.quick:
        plans = [(3, sigma) for _, sigma in plans]
    whats = [
        (options.data, setting.sizes, *plan) for setting, plan in zip(settings, plans, strict=True)
    ]
    trials = [(*what, rate, TUNING_SEED) for what in whats for rate in LENET_RATES]
    tried = np.array(finished_all(private_lenet_run, trials, options.jobs))
    tried = tried.reshape(len(settings), len(LENET_RATES), -1)
    best = [LENET_RATES[place] for place in tried[:, :, 0].argmax(1)]
    reported = [
        (*what, rate, seed)
        for what, rate in zip(whats, best, strict=True)
        for seed in range(options.seeds)
    ]
    runs = np.array(finished_all(private_lenet_run, reported, options.jobs))
    runs = runs.reshape(len(settings), options.seeds, -1)
    found = list(100 * runs[:, :, 1])
    rows = [
        [
            *(setting.name, str(rounds), f"{sigma:.3f}", f"{runs[i, 0, 2]:.4f}", f"{best[i]:g}"),
            *(f"{100 * tried[i, 0, 1]:.1f}", Summary.of(found[i]).text(2)),
        ]
        for i, (setting, (rounds, sigma)) in enumerate(zip(settings, plans, strict=True))
    ]
    gains = gains_text([(found[1], other) for other in found if other is not found[1]], 2)
    gains.insert(1, "")
    header = ("batches", "rounds", "σ", "ε by the ledgers", "η0", "%, at η0 = 0.15", "accuracy, %")
    rows = [[*row, gain] for row, gain in zip(rows, gains, strict=True)]
    print(table((*header, "gain of the second row over it"), rows), flush=True)


def private_lenet_run(
    folder: str, sizes: SampleSizes, rounds: int, sigma: float, eta0: float, seed: int
) -> tuple[float, float, float]:
    """Accuracy on digits to choose by and on the test set; ε by the ledgers."""
    images, digits, *test = mnist(folder)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(digits)))
    train, held = order[: CLIENTS * LENET_RECORDS], order[CLIENTS * LENET_RECORDS :]
    records = [LeNetRecords(images[part], digits[part]) for part in train.chunk(CLIENTS)]
    plan = AsyncPlan(rounds, sizes, InverseRootSteps(eta0, 0.01), lag=LAG)
    privacy = ClientPrivacy(CLIP, sigma, math.inf, DELTA)
    start = flatten(list(lenet().parameters()))
    point, spent = federate(records, start, plan, privacy, seed)
    return right(point, images[held], digits[held]), right(point, *test), spent
