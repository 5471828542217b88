"""Noise that remembers and batches that depend on each other, in a whole Trainer."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
from collections import deque
from collections.abc import Iterator
from itertools import chain, cycle, pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy.linalg import toeplitz
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_dp import (
    AdaptiveQuantile,
    BandedNoise,
    Checks,
    CubicNewton,
    CyclicPoisson,
    Diff2,
    Exponential,
    FixedOrder,
    FullBatch,
    LambdaCGD,
    Poisson,
    PrivacyConfig,
    RandomAllocation,
    Storm,
    TruncatedPoisson,
    UserLevel,
)
from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._world import World
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import (
    CyclicRound,
    FixedOrderPass,
    RandomAllocationEpoch,
    TruncatedGaussian,
    VoidedRunError,
)
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.rdp import OneOrderAccountant
from lightning_dp.audit import audit
from lightning_dp.sampling.loader import ChunkSampler, PrivateDataLoader
from lightning_dp.sampling.stream import _pickled, by_place
from lightning_dp.strategies.data import _checked_stream
from tests.zoo import flat, private

UNCHECKED = Checks(dry_run=False, comparisons=False)
CYCLIC = {"sampling": CyclicPoisson(4), "noise": BandedNoise(4)}
FIXED = {"sampling": FixedOrder(), "relation": "zero_out"}
LAMBDA = {**FIXED, "noise": LambdaCGD(0.8)}
BANDED = {**FIXED, "noise": BandedNoise(12)}
ALLOCATED = {"sampling": RandomAllocation()}
LIMITED = {"sampling": TruncatedPoisson(30)}
ALL = [CYCLIC, FIXED, LAMBDA, BANDED, ALLOCATED]
IDS = ["cyclic", "fixed", "lambda", "banded", "allocated"]
# A whole fit of each kind of block; what noise remembers is looked at in other tests.
SOME = [
    pytest.param(options, id=name, marks=[pytest.mark.slow] * (name in ("fixed", "banded")))
    for options, name in zip(ALL, IDS, strict=True)
]


class Flat(L.LightningModule):
    """Weights whose gradient is zero and whose learning rate is 1: what moves them is the noise."""

    def __init__(self, size: int = 50) -> None:
        super().__init__()
        self.net = nn.Linear(size, 10, bias=False)
        self.weights: list[Tensor] = []

    def on_fit_start(self) -> None:
        self.weights.append(flat(self.net).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(torch.zeros(len(batch[0]), self.net.in_features)).sum(1).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.weights.append(flat(self.net).double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    @property
    def noise(self) -> Tensor:
        return -torch.stack(self.weights).diff(dim=0)


@pytest.fixture
def classifier(classifier: type[Any], mlp: Any) -> Any:
    """Made without arguments."""
    return type("Small", (classifier,), {"__init__": lambda s, *_: classifier.__init__(s, mlp())})


@pytest.fixture
def ordered(blobs: TensorDataset) -> DataLoader[Any]:
    return DataLoader(blobs, batch_size=24)


class Stop(L.Callback):
    """Ends the fit, by an order to the Trainer or an error, within a step."""

    def __init__(self, step: int, error: type[Exception] | None = None) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and self.error is None:
            trainer.should_stop = True

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and self.error is not None:
            raise self.error("planted")


# -- whole fits -------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("options", SOME)
def test_a_fit_keeps_its_budget_and_counts_its_steps(
    options, classifier, fit, numbered, charges, recording
):
    model, privacy = recording(), private(target_epsilon=3.0, **options)
    loader = DataLoader(numbered(), batch_size=24)
    trainer = fit(model, privacy, loader, max_epochs=3)
    assert trainer.global_step == privacy.steps == 30
    assert 2.98 < privacy.epsilon <= 3.0
    assert sum(event.num_steps for event in charges()) == 30
    assert len(charges()) == (8 if options is CYCLIC else 3)
    least = {"CyclicPoisson": 4, "FixedOrder": 10}.get(type(options["sampling"]).__name__, 1)
    seen: dict[int, int] = {}
    for step, batch in enumerate(model.batches):
        for record in batch:
            assert step - seen.get(record, -99) >= least
            seen[record] = step
    report = privacy.report()
    assert (report.steps, report.epsilon) == (30, privacy.epsilon)
    assert ("BandedNoise" in str(report)) == (type(options.get("noise")) is BandedNoise)


@pytest.mark.parametrize(
    ("workers", "accumulate"), [pytest.param(0, 1, marks=pytest.mark.slow), (1, 2)]
)
def test_an_allocated_epoch_has_each_record_once(recording, fit, numbered, workers, accumulate):
    """Also where the loader reads ahead, and where epochs of the Trainer end early."""
    loader = DataLoader(numbered(), batch_size=24, num_workers=workers)
    model, privacy = recording(), private(**ALLOCATED)
    options = {"limit_train_batches": 8, "max_epochs": 5, "accumulate_grad_batches": accumulate}
    fit(model, privacy, loader, **options)
    steps = 10 // accumulate
    assert len(model.batches) == privacy.steps == 40 // accumulate
    epochs = [model.batches[first : first + steps] for first in range(0, 4 * steps, steps)]
    for epoch in epochs:
        assert sorted(record for batch in epoch for record in batch) == list(range(240))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[3]
    whole = [(RandomAllocationEpoch(1.0, steps, steps), 4)]
    assert privacy._run.ledger.history() == whole
    assert privacy.epsilon == PLDAccountant().epsilon(whole, 1e-5)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_batches_with_a_limit_take_no_more_and_the_report_names_it(
    recording, fit, numbered, charges, at_each_step, accumulate
):
    loader = DataLoader(numbered(), batch_size=24 // accumulate)
    model, privacy = recording(), private(target_epsilon=3.0, **LIMITED)
    sizes: list[int] = []
    look = at_each_step(lambda trainer, _: sizes.append(trainer.train_dataloader.current.size))
    options = {"max_epochs": 6, "accumulate_grad_batches": accumulate}
    fit(model, privacy, loader, callbacks=[look], **options)
    assert max(map(len, model.batches)) == 30
    assert max(sizes) <= -(-30 // accumulate)
    z = charges()[0].noise_multiplier
    assert charges() == 60 * [TruncatedGaussian(z, 0.1, 30, 240)]
    assert 2.98 < privacy.epsilon <= 3.0
    plain = PLDAccountant().epsilon([(PoissonGaussian(z, 0.1), 60)], 1e-5)
    assert plain < 0.95 * privacy.epsilon
    text = privacy.report().markdown()
    assert "TruncatedPoisson(limit=30)" in text and "num_records=240" in text


def test_a_limit_that_whole_batches_never_reach_takes_no_step_away(
    recording, fit, numbered, charges
):
    privacy = private(target_epsilon=3.0, sampling=TruncatedPoisson(300))
    fit(recording(), privacy, DataLoader(numbered(), batch_size=240), max_epochs=4)
    z = charges()[0].noise_multiplier
    assert charges() == 4 * [TruncatedGaussian(z, 1.0, 300, 240)]
    assert privacy.epsilon == pytest.approx(gdp_epsilon(2 / z, 1e-5), rel=1e-3)
    assert 2.98 < privacy.epsilon <= 3.0


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_fixed_order_has_the_batches_of_the_loader_or_one_that_repeats(
    recording, fit, numbered, shuffles
):
    reads_ahead = {"num_workers": 1, "persistent_workers": True}
    loader = DataLoader(numbered(100), batch_size=24, shuffle=shuffles, **reads_ahead)
    model, privacy = recording(), private(**{**FIXED, "sampling": FixedOrder(shuffle=shuffles)})
    fit(model, privacy, loader, max_epochs=2)
    assert model.batches[:5] == model.batches[5:]
    order = [record for batch in model.batches[:5] for record in batch]
    assert sorted(order) == list(range(100)) and (order != sorted(order)) == shuffles
    assert list(map(len, model.batches[:5])) == [24] * 4 + [4]
    assert privacy.epsilon == pytest.approx(gdp_epsilon(math.sqrt(2), 1e-5), rel=1e-9)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_band_is_dp_sgd_bit_for_bit(classifier, fit, ordered, accumulate):
    weights = []
    for options in ({}, {"sampling": CyclicPoisson(1), "noise": BandedNoise(1)}):
        model, privacy = classifier(), private(seed=7, **options)
        fit(model, privacy, ordered, max_epochs=2, accumulate_grad_batches=accumulate)
        weights.append((flat(model), privacy.epsilon))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize(
    ("options", "size"),
    [(CYCLIC, 50), (LAMBDA, 50), (BANDED, 20_000)],  # large sums begin with noise, in threads
    ids=["cyclic", "lambda", "banded"],
)
def test_released_noise_is_the_dense_product_of_fresh_noise(fit, ordered, options, size):
    """The noise of a fit with independent noise of the same seed, through C^-1."""
    fresh, found = Flat(size), Flat(size)
    fit(fresh, private(seed=3), ordered, max_epochs=2)
    privacy = private(seed=3, **options)
    fit(found, privacy, ordered, max_epochs=2)
    noise = privacy._run.mechanism.plan.noise
    column = noise.inverse(20)
    dense = noise.column_norm * toeplitz(column, np.zeros(20)) @ fresh.noise.numpy()
    assert np.abs(found.noise.numpy() - dense).max() < 1e-5 * np.abs(dense).max()
    assert float(fresh.noise.std()) == pytest.approx(1 / 24, rel=0.05)
    assert float(found.noise.sum(0).std()) < 0.7 * float(fresh.noise.sum(0).std())


def test_secure_noise_remembers_too(fit, ordered):
    """The matrix takes it apart into independent noise of the planned size."""
    found = Flat(500)
    privacy = private(secure_noise=True, **CYCLIC)
    fit(found, privacy, ordered, max_epochs=2)
    noise = privacy._run.mechanism.plan.noise
    c = toeplitz(np.pad(noise.coefficients, (0, 16)), np.zeros(20))
    fresh = c @ found.noise.numpy() / noise.column_norm
    assert fresh.std() == pytest.approx(1 / 24, rel=0.03)
    assert np.abs(np.corrcoef(fresh)[np.triu_indices(20, 1)]).max() < 6 / math.sqrt(5000)


# -- the end of a block ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "covered", "number"),
    [(CYCLIC, 8, 2), (LAMBDA, 10, 1), (ALLOCATED, 10, 1)],
    ids=["cyclic", "lambda", "allocated"],
)
@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_stop_inside_is_paid_in_full(
    classifier, fit, ordered, charges, options, covered, number, error
):
    privacy = private(noise_multiplier=2.0, **options)
    # an error comes between the charge and the release of the seventh step
    with pytest.raises(error, match="planted") if error else contextlib.nullcontext():
        fit(classifier(), privacy, ordered, max_epochs=3, callbacks=[Stop(6, error)])
    assert privacy.steps == covered
    assert len(charges()) == number
    whole = privacy._run.ledger.history()
    assert privacy.epsilon == PLDAccountant().epsilon(whole, 1e-5, privacy.config.relation) > 0


def test_training_stops_before_the_charge_that_would_exceed_the_budget(classifier, fit, ordered):
    privacy = private(target_epsilon=3.0, noise_multiplier=2.0, **FIXED)
    trainer = fit(classifier(), privacy, ordered, max_epochs=5)
    assert trainer.global_step == privacy.steps == 20
    assert privacy.epsilon == pytest.approx(gdp_epsilon(math.sqrt(2) / 2, 1e-5), rel=1e-9)


@pytest.mark.parametrize("options", SOME)
def test_a_resume_begins_a_new_block_and_pays_for_it(
    recording, fit, numbered, charges, tmp_path, options
):
    """Also for steps that were made after the checkpoint, and are made once more."""
    data, saved = DataLoader(numbered(), batch_size=24), tmp_path / "checkpoints"
    saver = ModelCheckpoint(saved, every_n_train_steps=6, save_top_k=-1)
    first = private(noise_multiplier=2.0, **options)
    stop, on = Stop(9), {"enable_checkpointing": True, "max_epochs": 2}
    fit(recording(), first, data, callbacks=[saver, stop], **on)
    before = len(charges())
    (path,) = saved.glob("*step=6*")

    again, model = private(noise_multiplier=2.0, **options), recording()
    trainer = fit(model, again, data, ckpt_path=path, **on)
    assert trainer.global_step == 20
    window = 4 if options is CYCLIC else 10
    assert len(charges()) == before + math.ceil(14 / window)
    assert again._run.mechanism.plan.start == 6
    assert again.epsilon > first.epsilon
    events = charges()
    if options is LAMBDA:  # the second block begins with the price of a first pass
        assert events[0] == FixedOrderPass(events[0].noise_multiplier, 10)
        assert [each.noise_multiplier for each in events[1:]] == [
            events[0].noise_multiplier,
            events[1].noise_multiplier if len(events) == 2 else pytest.approx(events[2].pair[0]),
        ]
        assert again.epsilon == pytest.approx(
            gdp_epsilon(math.sqrt(sum(1 / e.noise_multiplier**2 for e in events)), 1e-5), rel=1e-9
        )
    if "relation" in options:  # goes on where it was
        assert model.batches[0] == list(range(144, 168))


def test_a_second_fit_of_a_callback_is_another_block_and_ends_inside_a_round(
    classifier, fit, ordered
):
    privacy, model = private(**CYCLIC), classifier()
    fit(model, privacy, ordered, max_steps=6)
    first = privacy._run._fit.draw
    assert privacy.steps == 6  # no more steps than were made
    whole, rest = (CyclicRound(1.0, 0.4, 4), 1), (CyclicRound(1.0, 0.4, 2), 1)
    assert privacy._run.ledger.history() == [whole, rest]
    fit(model, privacy, ordered, max_steps=6)
    assert privacy._run.ledger.history() == [(whole[0], 2), (rest[0], 2)]
    assert privacy._run._fit.draw is not first


# -- what is secret ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [CYCLIC, LAMBDA, BANDED], ids=["cyclic", "lambda", "banded"])
def test_nothing_that_is_remembered_is_saved(
    fit, numbered, classifier, tmp_path, at_each_step, options
):
    found: dict[str, Any] = {}

    def look(trainer: L.Trainer, module: Any) -> None:
        if trainer.global_step == 9:
            mechanism = privacy._run.mechanism
            found["past"] = [past.clone() for past in mechanism.noise._past]
            found["part"] = privacy._run._fit.draw(0, 0.25, np.random.default_rng(0))
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            found["told"] = [
                pickle.dumps(mechanism.state_dict()),
                pickle.dumps((mechanism.noise, privacy._run.config)),
                pickle.dumps(privacy._run._fit.__getstate__()["draw"]),
                (repr(mechanism) + repr(privacy._run._fit)).encode(),
            ]

    data = TensorDataset(*numbered().tensors[:2])
    privacy = private(**options)
    loader = DataLoader(data, batch_size=24)
    fit(classifier(), privacy, loader, callbacks=[at_each_step(look)], max_epochs=2)
    assert len(found["past"]) == min(options["noise"].bands - 1, 9 if options is not LAMBDA else 1)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 3  # checkpoint, journal, report
    places = found["part"].astype(np.int64).tobytes()
    secrets = [past.numpy()[:4].tobytes() for past in found["past"]]
    secrets += [repr(float(past[0])).encode() for past in found["past"]]
    if options is CYCLIC:
        secrets += [places[:64], str(found["part"][:6].tolist()).encode()]
    for content in (*written, *found["told"]):
        assert not any(secret in content for secret in secrets)
    assert privacy._run.mechanism.noise._past == []  # forgotten with the fit


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": BandedNoise(4)}, r"Use sampling=CyclicPoisson\(4\) or sampling=FixedOrder\(\)"),
        ({"noise": BandedNoise(4), "sampling": FullBatch()}, r"a record may take part twice"),
        ({"noise": BandedNoise(8), "sampling": CyclicPoisson(4)}, r"CyclicPoisson\(8\)"),
        ({"noise": LambdaCGD(0.9)}, r"Use sampling=FixedOrder\(\), or noise=IndependentNoise"),
        ({**LAMBDA, "sampling": CyclicPoisson(4)}, r"noise=LambdaCGD\(lam=0\.9?8?\)"),
        ({"sampling": FixedOrder()}, r"Ask for relation='zero_out'"),
        ({**CYCLIC, "noise_schedule": Exponential(0.1)}, r"Exponential.*changes it. Use Constant"),
        ({**FIXED, "noise_schedule": Exponential(0.1)}, r"Use Constant\(\)"),
        ({**CYCLIC, "estimator": Diff2(4)}, r"Diff2\(.* asks otherwise"),
        ({**CYCLIC, "estimator": Storm(0.5)}, r"Storm\(.* asks otherwise"),
        ({**CYCLIC, "estimator": CubicNewton(1.0, 1.0, 2)}, "asks otherwise"),
        ({**CYCLIC, "clipping": AdaptiveQuantile()}, r"clipping=AdaptiveQuantile\(.* moves it"),
        ({**FIXED, "clipping": AdaptiveQuantile()}, r"clipping=AdaptiveQuantile\(.* moves it"),
        ({**CYCLIC, "count_clipped": True}, r"count_clipped=True with noise=BandedNoise"),
        ({**ALLOCATED, "noise": BandedNoise(4)}, r"a record may take part twice"),
        ({**ALLOCATED, "relation": "replace_one"}, r"no bound is known here"),
        ({**ALLOCATED, "noise_schedule": Exponential(0.1)}, r"Use Constant\(\)"),
        ({**LIMITED, "noise": BandedNoise(4)}, r"a record may take part twice"),
        ({**LIMITED, "relation": "zero_out"}, r"takes the place of another"),
        ({**LIMITED, "noise_schedule": Exponential(0.1)}, r"same noise and rate at every step"),
        ({**LIMITED, "estimator": Diff2(4)}, r"same noise and rate at every step"),
        ({**LIMITED, "accountant": OneOrderAccountant()}, r"in a trial of a search"),
        ({"noise": "banded"}, r"noise='banded' must be an object derived from AbstractNoise"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0, **options)


def test_what_goes_with_limits_and_allocations_is_accepted():
    for options in (
        {**ALLOCATED, "relation": "zero_out", "count_clipped": True},
        {**LIMITED, "relation": "replace_one", "clipping": AdaptiveQuantile()},
        {**LIMITED, "unit": UserLevel([0, 1], most_rows=2), "augmentations": 2},
    ):
        PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0, **options)


@pytest.mark.parametrize("options", [CYCLIC, FIXED], ids=["cyclic", "fixed"])
def test_an_optimizer_step_left_out_ends_the_run(classifier, fit, ordered, options):
    """Otherwise records would come back one step too soon."""

    class Leaving(classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            if batch_idx != 2:
                self.optimizers().step()

    checks = Checks(dry_run=False, comparisons=False, gradient_edits="leaves a batch out")
    privacy = private(checks=checks, **options)
    with pytest.warns(match="never released"), pytest.raises(RefusedRun, match="was left out"):
        fit(Leaving(), privacy, ordered, max_epochs=2)
    assert privacy.steps == (4 if options is CYCLIC else 10)


def test_a_run_refuses_a_step_on_an_unfinished_one_and_its_copy_any_batch(classifier, fit, ordered):
    asked: list[str] = []

    def ask(optimizer: Any) -> None:
        mechanism = privacy._run.mechanism
        if mechanism.is_begun:
            with pytest.raises(RefusedRun, match="was not finished"):
                mechanism.ask(list(model.parameters()))
            asked.append("again")

    model, privacy = classifier(), private(**CYCLIC)
    model.on_before_zero_grad = ask
    fit(model, privacy, ordered, max_steps=2)
    assert asked
    copied = pickle.loads(pickle.dumps(privacy._run))
    with pytest.raises(RefusedRun, match="A copy of a run draws no batches"):
        copied.draw(0, 0.1, np.random.default_rng())


def test_a_ledger_with_a_fixed_order_has_no_add_remove(classifier, fit, ordered):
    for relation in ("add_remove", "zero_out"):
        privacy = private(noise_multiplier=3.0, relation=relation)
        privacy._run.ledger.begin("another fit")
        privacy._run.ledger.charge(FixedOrderPass(3.0, 10))
        if relation == "add_remove":
            with pytest.raises(RefusedSetting, match=r"add_remove' has no bound.*zero_out"):
                fit(classifier(), privacy, ordered, max_epochs=1)
            continue
        fit(classifier(), privacy, ordered, max_epochs=1)
        assert privacy.steps == 20


@pytest.mark.parametrize("options", [CYCLIC, LIMITED], ids=["cyclic", "limited"])
def test_audits_are_refused(classifier, ordered, options):
    with pytest.raises(RefusedSetting, match="takes the steps of a run for independent"):
        audit(classifier(), ordered, private(**options).config, trainer={"max_steps": 3})


# -- streams ----------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """Records in the order in which they come; counts its passes."""

    def __init__(self, records: TensorDataset, length: int | None = None) -> None:
        self.records, self.length, self.passes = records, length, 0

    def __len__(self) -> int:
        return len(self.records) if self.length is None else self.length

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter([self.records[i] for i in range(len(self.records))])


class Parts(Numbers):
    """Numbers, of which each worker gives its own part; ``cut`` makes parts of other sizes."""

    def __init__(self, *args: Any, cut: Any = lambda records, i, n, turn: records[i::n]) -> None:
        super().__init__(*args)
        self.cut, self.turns = cut, multiprocessing.Value("i", 0)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        with self.turns.get_lock():
            self.turns.value += 1
        return iter(self.cut([*super().__iter__()], info.id, info.num_workers, self.turns.value))


def test_places_of_the_records_of_two_workers():
    assert _order([4, 4], 2) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert _order([1, 6], 2) == [0, 1, 2, 3, 4, 5, 6]


def _order(sizes: list[int], block: int) -> list[int]:
    """The order of numbers that workers give in turn, a block each, of parts one after the other."""
    starts = np.cumsum([0, *sizes])
    parts = [deque(range(a, b)) for a, b in pairwise(starts.tolist())]
    found: list[int] = []
    while any(parts):
        for part in parts:
            found += [part.popleft() for _ in range(min(block, len(part)))]
    return found


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("first", [50, 7])
def test_workers_give_each_record_once_in_one_order(recording, fit, numbered, persistent, first):
    """Also where the part of one worker is over long before the other's."""
    stream = Parts(
        numbered(100), cut=lambda records, i, n, turn: [records[:first], records[first:]][i]
    )
    model, privacy = recording(), private(**LAMBDA)
    loader = DataLoader(stream, batch_size=24, num_workers=2, persistent_workers=persistent)
    fit(model, privacy, loader, max_epochs=3)
    order = _order([first, 100 - first], 24)
    assert model.batches == 3 * [order[start : start + 24] for start in range(0, 100, 24)]
    assert sorted(order) == list(range(100))
    assert stream.turns.value == 2 * 4  # counted once, before the first charge
    assert not multiprocessing.active_children()
    assert sum(event.num_steps for event, _ in privacy._run.ledger.history()) == 15
    assert "two workers" in " ".join(privacy.report().not_covered)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def shuffled(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=24, shuffle=True)


def in_order(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=24)


def parts(cut: Any) -> Any:
    return lambda data: DataLoader(Parts(data, cut=cut), batch_size=24, num_workers=2)


RELOADED = {"reload_dataloaders_every_n_epochs": 1}
SHARED = r"240 records, of .* num_workers=2 .* gave {}\."
UNORDERED = {"sampling": FixedOrder(shuffle=True), "relation": "zero_out"}


@pytest.mark.parametrize(
    ("options", "data", "trainer", "message"),
    [
        (FIXED, shuffled, {}, "shuffle=True, which draws another order"),
        *((each, in_order, RELOADED, next(iter(RELOADED))) for each in (CYCLIC, FIXED, ALLOCATED)),
        (UNORDERED, lambda data: in_order(Numbers(data)), {}, "no order but its own"),
        (
            {"sampling": Poisson(), "relation": "zero_out"},
            lambda data: in_order(Numbers(data)),
            {},
            r"IterableDataset.*or sampling=FixedOrder\(\)",
        ),
        (FIXED, lambda data: in_order(Endless()), {}, "Endless .* without a length"),
        # workers that share records
        (LAMBDA, parts(lambda records, i, n, turn: records), {}, SHARED.format("more")),
        (LAMBDA, parts(lambda records, i, *_: records[i * 119 :][:121]), {}, SHARED.format("more")),
        (LAMBDA, parts(lambda records, i, n, turn: cycle(records)), {}, SHARED.format("more")),
        (LAMBDA, parts(lambda records, i, n, turn: records[i::3]), {}, SHARED.format("160")),
    ],
)
def test_data_that_do_not_keep_to_a_block_are_refused_before_a_charge(
    recording, numbered, ends, tmp_path, options, data, trainer, message
):
    model = recording()
    ends(model, message, data(numbered()), {"checks": UNCHECKED, **options}, **trainer)
    assert model.batches == [] and not [*tmp_path.rglob("*.journal")]


def test_a_stream_that_is_shorter_than_it_says_ends_the_run(classifier, fit, blobs):
    loader = DataLoader(Numbers(blobs, length=300), batch_size=24)
    with pytest.raises(RefusedRun, match=r"Numbers gave 240 records, and its len\(\) is 300"):
        fit(classifier(), private(**FIXED), loader, max_epochs=1)


def test_workers_that_share_records_in_a_later_pass_void_the_run(recording, fit, numbered):
    def cut(records: list[Any], i: int, n: int, turn: int) -> list[Any]:
        return records if turn > 4 else records[i::n]  # counted, and one pass

    model, privacy, saved = recording(), private(**LAMBDA), list[int]()
    model.on_save_checkpoint = lambda checkpoint: saved.append(len(model.batches))
    loader = DataLoader(Parts(numbered(96), cut=cut), batch_size=24, num_workers=2)
    with pytest.raises(VoidedRunError, match="workers of Parts gave more than its len\\(\\) of 96"):
        fit(model, privacy, loader, max_epochs=3, enable_checkpointing=True)
    assert privacy.epsilon == math.inf
    assert len(model.batches) == 8 and saved == [4]  # not what the pass led to


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fit_that_ends_within_a_pass_leaves_no_workers(recording, fit, numbered, workers):
    loader = DataLoader(
        Parts(numbered(100)), batch_size=8, num_workers=workers, persistent_workers=True
    )
    fit(recording(), private(**LAMBDA), loader, max_steps=3)
    assert not multiprocessing.active_children()


def test_workers_write_what_a_record_shows_of_a_tensor():
    large = torch.arange(1e6)
    records = [(large[3:5], "text", None), (torch.zeros(2, dtype=torch.bfloat16), {"a": 1})]
    (first, *others), second = pickle.loads(content := _pickled(records))
    assert first.tolist() == [3, 4] and others == ["text", None]
    assert second[0].dtype == torch.bfloat16 and second[1] == {"a": 1}
    assert len(content) < 3000


def test_two_ranks_of_two_workers_each_share_out_the_records(numbered):
    loader, found = DataLoader(Parts(numbered(101)), batch_size=8, num_workers=2), []
    plan = FixedOrder().plan(
        num_records=101, batch_size=8, accumulate=1, world_size=2, loader_length=13
    )
    for rank in range(2):
        draw = FixedOrder().begin(plan, range(rank, 101, 2), np.random.default_rng())
        sampler = ChunkSampler(
            plan, FixedOrder(), rank=rank, world_size=2, limit=7, seed=None, draw=draw
        )
        found += [batch[2].tolist() for batch in PrivateDataLoader(by_place(loader), sampler)]
    assert sorted(chain(*found)) == list(range(101)) and len(found) == 14


def test_ranks_with_other_workers_are_refused(numbered):
    lead = World(1, 2, broadcast=lambda workers: 3)
    loader = DataLoader(Parts(numbered(10)), num_workers=2)
    with pytest.raises(
        MisconfigurationException, match=r"num_workers=2 \(on rank 0: 3\) gave 10\."
    ):
        _checked_stream(loader, private(**FIXED).config, FixedOrder(), lead)


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_a_stream_trains_in_its_own_order(recording, fit, numbered, workers):
    model, privacy = recording(), private(**LAMBDA)
    stream = Numbers(numbered(100))
    fit(model, privacy, DataLoader(stream, batch_size=24, **workers), max_epochs=2)
    order = [list(range(start, min(start + 24, 100))) for start in range(0, 100, 24)]
    assert model.batches == order + order
    assumed = " ".join(privacy.report().not_covered)
    assert "gives twice in a pass" in assumed and "not the same in every pass" in assumed
    assert stream.passes == (0 if workers else 2)
    assert sum(event.num_steps for event, _ in privacy._run.ledger.history()) == 10


@pytest.mark.parametrize(
    ("kind", "workers", "left"),
    [(Numbers, 0, [48, 72, 96]), (Numbers, 1, [48, 72, 96]), (Parts, 2, [48, 49, 96])],
)
def test_a_stream_is_checked_like_other_data_and_resumes(
    recording, fit, numbered, tmp_path, kind, workers, left
):
    options, settings = {**LAMBDA, "checks": Checks()}, {"batch_size": 24, "num_workers": workers}
    data, on = kind(TensorDataset(*numbered(100).tensors)), {"enable_checkpointing": True}
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=7, save_top_k=-1)
    model, privacy = recording(), private(**options)
    fit(model, privacy, DataLoader(data, **settings), max_epochs=2, callbacks=[saver], **on)
    assert "passed at" in str(privacy.report())
    (path,) = (tmp_path / "saved").glob("*step=7*")
    model, on["ckpt_path"] = recording(), path
    fit(model, private(**options), DataLoader(data, **settings), max_epochs=2, **on)
    assert [batch[0] for batch in model.batches[-3:]] == left


@pytest.mark.parametrize("options", [CYCLIC, LAMBDA], ids=["cyclic", "lambda"])
def test_what_is_logged_at_each_step_is_the_price_of_its_charges(
    classifier, fit, ordered, at_each_step, options
):
    logged: list[tuple[float, float]] = []

    def look(trainer: L.Trainer, module: Any) -> None:
        metrics = trainer.callback_metrics
        logged.append((float(metrics["privacy/epsilon"]), privacy.epsilon))
        assert metrics["privacy/steps_left"] == 20 - trainer.global_step

    privacy = private(noise_multiplier=2.0, **options)
    on = {"max_epochs": 2, "log_every_n_steps": 1}
    fit(classifier(), privacy, ordered, callbacks=[at_each_step(look)], **on)
    assert len(logged) == 20
    assert [shown for shown, _ in logged] == pytest.approx([exact for _, exact in logged], rel=1e-3)
    assert all(shown >= exact * (1 - 1e-9) for shown, exact in logged)
    assert len({exact for _, exact in logged}) == (5 if options is CYCLIC else 2)
    assert f"{privacy._run.setting.noise_norm:.3g}" in str(privacy.report().to_dict())
