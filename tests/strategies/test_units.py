"""Users and augmented records through a whole Trainer: one clip a unit, and ε of units."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant as Oracle
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.linalg import toeplitz
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_dp import (
    BandedNoise,
    Checks,
    CyclicPoisson,
    Diff2,
    FixedOrder,
    FullBatch,
    LambdaCGD,
    RandomAllocation,
    UserLevel,
)
from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.accounting.events import RandomAllocationEpoch, VoidedRunError
from lightning_dp.accounting.gdp import gdp_epsilon
from tests.zoo import Classifier, flat, private, records

C = 2.2
USERS = [3, 0, 0, 1, 2, 2, 2, 2, 0, 3, 2, 4]  # 5 users of one to five rows
ENGINES = ["layers", "records", "ghost", "one_by_one"]
NOISELESS = {"noise_multiplier": 0.0, "max_grad_norm": C, "sampling": FullBatch()}


def net():
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def data():
    x, y = records(len(USERS))
    return TensorDataset(3 * x.double(), y)


@pytest.fixture
def fit(make_trainer):
    def run(dataset, batch_size=2, model=None, trainer=None, ckpt_path=None, **options):
        model = model or Classifier(net(), lambda params: torch.optim.SGD(params, lr=1.0))
        model.privacy = private(**options)
        settings = {"max_steps": 1, **(trainer or {})}
        model.used = make_trainer(callbacks=[model.privacy], **settings)
        model.used.fit(model, DataLoader(dataset, batch_size), ckpt_path=ckpt_path)
        return model

    return run


def released(fit, dataset, users, **options):
    """The sum of one step on all users: lr = 1, q = 1, and an update is the sum over B = U."""
    before, unit = flat(net()), UserLevel(users, most_rows=99)
    model = fit(dataset, **{**NOISELESS, "unit": unit, **options})
    return (before - flat(model)) * len({*users})


def gradient(x, y):
    module = net()
    loss = nn.functional.cross_entropy(module(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*module.parameters()])])


def loop(dataset, users):
    """Each user's mean gradient, clipped once."""
    x, y = dataset.tensors
    of_users = [torch.tensor([each == user for each in users]) for user in {*users}]
    return clipped([gradient(x[own], y[own]) for own in of_users])


def clipped(means):
    """The bound reaches some and not others."""
    lengths = [float(mean.norm()) for mean in means]
    assert min(lengths) < C < max(lengths)
    return sum(mean * min(1.0, C / size) for mean, size in zip(means, lengths, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_that_of_a_loop_over_users(fit, engine):
    """In physical batches of two users."""
    found = released(fit, data(), USERS, engine=engine)
    torch.testing.assert_close(found, loop(data(), USERS), rtol=0, atol=1e-9)


def test_all_rows_of_a_user_move_the_sum_by_at_most_c(fit):
    """Rows of one more user, of any length: clipped one by one, five would move it by 5 C."""
    x, y = data().tensors
    without = released(fit, data(), USERS)
    for size, scale in ((1, 1.0), (5, 1e-3), (5, 10.0), (9, math.nan)):
        more = scale * torch.ones(size, 6).double() * torch.tensor([1, -2, 0.5, 3, 0, -1])
        whole = TensorDataset(torch.cat([x, more]), torch.cat([y, y.new_full((size,), 2)]))
        moved = (released(fit, whole, [*USERS, *[7] * size]) - without).norm()
        assert float(moved) <= C + 1e-9, (size, scale)
        if scale == 10.0:
            assert float(moved) == pytest.approx(C, rel=1e-9)


def test_more_rows_of_a_user_move_their_part_alone(fit):
    """A replacement of the user: by 2 C at most, and nobody else's part moves."""
    x, y = data().tensors
    whole = TensorDataset(torch.cat([x, x[3:4].repeat(20, 1)]), torch.cat([y, y[3:4].repeat(20)]))
    users = [*USERS, *[1] * 20]  # copies of user 1's only row: the mean stays
    torch.testing.assert_close(
        released(fit, whole, users), released(fit, data(), USERS), rtol=0, atol=1e-9
    )
    other = TensorDataset(torch.cat([x, -9 * x[:7]]), torch.cat([y, y[:7]]))
    moved = released(fit, other, [*USERS, *[1] * 7]) - released(fit, data(), USERS)
    assert 0 < float(moved.norm()) <= 2 * C + 1e-9


class Seen(Classifier):
    """Writes down the rows of each chunk."""

    def __init__(self, **options):
        super().__init__(net(), **options)
        self.steps = []

    def training_step(self, batch, batch_idx):
        x, y, row = batch
        chunk = self.trainer.train_dataloader.current
        if chunk.first:
            self.steps.append([])
        if chunk.size:
            self.steps[-1].append(row.tolist())
        return super().training_step((x, y), batch_idx)


def test_a_step_reads_k_rows_of_a_user_who_is_never_cut(fit):
    x, y = records(60)
    users = [0] * 30 + [1 + row // 3 for row in range(30)]
    dataset = TensorDataset(x.double(), y, torch.arange(60))
    trainer = {"max_steps": 30, "accumulate_grad_batches": 3}
    model = fit(dataset, 1, Seen(), trainer=trainer, unit=UserLevel(users, most_rows=2))
    assert len(model.steps) == 30
    for step in model.steps:
        of_chunks = [Counter(users[row] for row in chunk) for chunk in step]
        assert all(counts.most_common(1)[0][1] <= 2 for counts in of_chunks)
        met = [user for counts in of_chunks for user in counts]
        assert len(met) == len({*met})
    assert model.privacy.report().sample_rate == pytest.approx(3 / 11)


def test_epsilon_is_that_of_users(fit):
    x, y = records(400)
    users = [row % 40 for row in range(400)]
    unit = UserLevel(users, most_rows=4)
    model = fit(TensorDataset(x.double(), y), 10, trainer={"max_steps": 12}, unit=unit)
    oracle = Oracle(value_discretization_interval=5e-4).compose(
        SelfComposedDpEvent(PoissonSampledDpEvent(10 / 40, GaussianDpEvent(1.0)), 12)
    )
    epsilon = oracle.get_epsilon(1e-5)
    assert model.privacy.epsilon == pytest.approx(epsilon, rel=2e-3)
    report = model.privacy.report()
    assert (report.unit, report.num_records, report.expected_batch_size) == ("user", 40, 10)


class Views(Dataset):
    """Another view of a record each time that it is read."""

    def __init__(self, spread=1.0):
        self.x, self.y = data().tensors
        self.spread, self.read = spread, []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        self.read.append(row)
        return self.x[row] + self.spread * torch.randn(6).double(), self.y[row]


@pytest.mark.parametrize("engine", ["layers", "records", "ghost"])
def test_the_mean_over_views_of_a_record_is_clipped(fit, engine):
    batches, model = [], Classifier(net(), lambda params: torch.optim.SGD(params, lr=1.0))
    model.on_train_batch_start = lambda batch, batch_idx: batches.append(batch)
    before, dataset = flat(net()), Views()
    fit(dataset, 5, model, engine=engine, augmentations=4, **NOISELESS)
    rows = {row: dataset.read.count(row) for row in range(12)}
    assert set(rows.values()) == {4}
    means = []
    for x, y in batches:
        for start in range(0, len(x), 4):
            assert len({*y[start : start + 4].tolist()}) == 1
            means.append(gradient(x[start : start + 4], y[start : start + 4]))
    torch.testing.assert_close((before - flat(model)) * 12, clipped(means), rtol=0, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "unit", [{}, {"unit": UserLevel(USERS, most_rows=99)}], ids=["rows", "users"]
)
def test_equal_views_are_one_view_and_cost_no_epsilon(fit, engine, unit):
    plain, viewed = (
        flat(fit(data(), 5, engine=engine, augmentations=k, **unit, **NOISELESS)) for k in (1, 5)
    )
    torch.testing.assert_close(plain, viewed, rtol=0, atol=1e-12)
    spent = [fit(data(), 3, augmentations=k, **unit).privacy.epsilon for k in (1, 8)]
    assert spent[0] == spent[1]


def test_two_points_of_users(fit):
    """DIFF2 compares each user's mean at two points; noiseless and unclipped it is full descent."""
    options = {"noise_multiplier": 0.0, "sampling": FullBatch(), "unit": UserLevel(USERS, 99)}
    steps, model = {"max_steps": 4}, Classifier(net(), lambda p: torch.optim.SGD(p, lr=0.1))
    fit(data(), 2, model, trainer=steps, estimator=Diff2(3, 1e6, 1e6), **options)
    plain, (x, y) = net(), data().tensors
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        for user in {*USERS}:
            own = torch.tensor([each == user for each in USERS])
            (nn.functional.cross_entropy(plain(x[own]), y[own]) / len({*USERS})).backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-9)


# -- what others see -------------------------------------------------------------------------------

SECRET = ["ann-of-cleves", "catherine-parr", "jane-seymour"]


def test_reports_and_journals_speak_of_users_and_name_none(fit, tmp_path, capfd):
    x, y = records(90)
    ids = [SECRET[row % 3] if row < 60 else f"{SECRET[2]}-{row}" for row in range(90)]
    options = {"max_steps": 6, "enable_checkpointing": True}
    unit = UserLevel(ids, most_rows=5)
    model = fit(TensorDataset(x.double(), y), 4, trainer=options, unit=unit, target_epsilon=9.0)
    report = model.privacy.report()
    people, annex = report.markdown("people"), report.markdown("engineers")
    for text in ("the data of 33 users", "certain user was in", "One user is", "Number of users"):
        assert text in people
    assert "The promise is about one record" not in people
    assert "of whom a step reads at most 5 rows" in annex and "4 of 33 users" in annex
    assert "33 users a step" in str(report)
    (journal,) = (tmp_path / "privacy").glob("*.journal")
    assert b"a data set, by user" in journal.read_bytes()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    out = "".join(capfd.readouterr()).encode()
    for content in [out, repr(model.privacy.config).encode(), *(p.read_bytes() for p in files)]:
        assert not any(name.encode() in content for name in SECRET)
    again = type(report).from_dict(json.loads(json.dumps(report.to_dict())))
    assert again.unit == "user"


def test_a_resumed_run_protects_the_same_units(fit, tmp_path):
    unit, path = {"unit": UserLevel(USERS, most_rows=2)}, tmp_path / "at.ckpt"
    options = {"max_steps": 2, "enable_checkpointing": True}
    fit(data(), 2, trainer=options, **unit).used.save_checkpoint(path)
    on = {"trainer": {"max_steps": 4}, "ckpt_path": path}
    for other in ({"unit": UserLevel(USERS, most_rows=3)}, {**unit, "augmentations": 2}, {}):
        with pytest.raises(ValueError, match=r"most_rows|augmentations|unit"):
            fit(data(), 2, **on, **other)
    assert fit(data(), 2, **on, **unit).used.global_step == 4


# -- batches that depend on each other -------------------------------------------------------------


LAM, SLOW = 0.6, 1e-7  # so slow that weights, and so gradients, stay
BLOCKS = {
    "cyclic": {"sampling": CyclicPoisson(3), "noise": BandedNoise(3)},
    "allocated": {"sampling": RandomAllocation()},
    "fixed": {"sampling": FixedOrder(), "noise": LambdaCGD(LAM), "relation": "zero_out"},
}
MANY = [(7 * row) % 18 for row in range(60)]  # 18 users of three or four rows, in batches of 3


class Steps(Seen):
    """Writes down each step's sum of clipped gradients, too."""

    def on_fit_start(self):
        self.weights = [flat(self.net)]

    def on_train_batch_end(self, *unused):
        self.weights.append(flat(self.net))

    @property
    def sums(self):
        return -torch.stack(self.weights).diff(dim=0) * 3 / SLOW


@pytest.fixture
def blocks(fit):
    def run(name, left_out=None, **options):
        """Three epochs of six steps; of one user all rows may have no gradient."""
        x, y = records(60)
        x = 3 * x.double()
        x[[row for row, user in enumerate(MANY) if user == left_out]] = math.nan
        model = Steps(optimizer=lambda params: torch.optim.SGD(params, lr=SLOW))
        unit = {"unit": UserLevel(MANY, most_rows=2), **BLOCKS[name], "max_grad_norm": C}
        trainer = {"max_steps": 18}
        dataset = TensorDataset(x, y, torch.arange(60))
        return fit(dataset, 3, model, trainer=trainer, **unit, **options)

    return run


@pytest.mark.parametrize("name", BLOCKS)
def test_users_take_part_as_seldom_as_a_block_promises_and_are_clipped_once(blocks, name):
    model = blocks(name, noise_multiplier=0.0)
    steps = [[MANY[row] for chunk in step for row in chunk] for step in model.steps]
    assert len(steps) == 18
    assert all(most <= 2 for step in steps for _, most in Counter(step).most_common(1))
    of_users = {user: [t for t in range(18) if user in steps[t]] for user in range(18)}
    for taken in of_users.values():
        if name == "cyclic":
            assert len({t % 3 for t in taken}) <= 1
        else:  # once in each epoch
            assert [t // 6 for t in taken] == [0, 1, 2]
        if name == "fixed":
            assert len({t % 6 for t in taken}) == 1
    assert sum(map(len, of_users.values())) > 30

    x, y = records(60)
    for step, found in zip(model.steps, model.sums, strict=True):
        rows = [row for chunk in step for row in chunk]
        total = torch.zeros_like(found)
        for user in {MANY[row] for row in rows}:
            own = [row for row in rows if MANY[row] == user]
            mean = gradient(3 * x[own].double(), y[own])
            total += mean * min(1.0, C / float(mean.norm()))
        torch.testing.assert_close(found, total, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_user_moves_a_block_by_what_its_charges_say(blocks, name):
    """By the dense matrix C of the noise: row t of C x is Gaussian with standard deviation z ‖c‖ C."""
    options = {"noise_multiplier": 0.0, "seed": 1}  # the same draws
    whole, without = (blocks(name, left_out=user, **options) for user in (None, 5))
    plan = whole.privacy._run.mechanism.plan
    inverse = toeplitz(plan.noise.inverse(18), np.zeros(18))
    moved = np.linalg.solve(inverse, (whole.sums - without.sums).numpy())
    spent = np.linalg.norm(moved) / (C * plan.noise.column_norm)  # μ of all steps at z = 1
    taken = sum(any(MANY[row] == 5 for chunk in step for row in chunk) for step in whole.steps)
    assert taken == 3 if name != "cyclic" else taken >= 1
    events = [plan.event_of(1.0, t) for t in range(0, 18, plan.window)]
    charged = math.sqrt(sum(event.pair[0] ** -2 for event in events))
    assert 0 < spent <= charged * (1 + 1e-4)
    if name == "fixed":  # where the user is at the bound in each pass, as in the worst case
        alone = np.linalg.norm(moved, axis=1)
        assert spent > 0.5 * charged and (alone > 0).sum() > 3


@pytest.mark.parametrize("name", BLOCKS)
def test_epsilon_of_a_block_is_that_of_users(blocks, name):
    privacy = blocks(name).privacy
    history = {
        "cyclic": [(PoissonGaussian(1.0, 3 * 3 / 18), 6)],
        "allocated": [(RandomAllocationEpoch(1.0, 6, 6), 3)],
    }
    if name == "fixed":
        c = toeplitz(LAM ** np.arange(18), np.zeros(18)) * math.sqrt(1 - LAM**2)
        expected = gdp_epsilon(np.linalg.norm(c[:, ::6].sum(1)), 1e-5)
        assert privacy.epsilon == pytest.approx(expected, rel=1e-3)
    else:
        assert privacy.epsilon == pytest.approx(epsilon(history[name], 1e-5), rel=1e-6)
    report = privacy.report()
    assert (report.unit, report.num_records, report.expected_batch_size) == ("user", 18, 3)


def test_augmented_records_take_part_in_blocks(fit):
    dataset = TensorDataset(*data().tensors, torch.arange(len(USERS)))
    for name, options in BLOCKS.items():
        model = fit(dataset, 3, Seen(), trainer={"max_steps": 8}, augmentations=2, **options)
        assert len(model.steps) == 8, name
        read = [Counter(row for chunk in step for row in chunk) for step in model.steps]
        assert {times for step in read for times in step.values()} == {2}
        if name != "cyclic":
            assert sum(read[:4], Counter()) == Counter(dict.fromkeys(range(len(USERS)), 2))


# -- users do not meet -----------------------------------------------------------------------------


class Contrastive(Classifier):
    """Every row of the batch repels all others."""

    def training_step(self, batch, batch_idx):
        found = self(batch[0])
        return (found @ found.T).logsumexp(1).mean()


@pytest.mark.few(4)
@pytest.mark.parametrize("options", [{}, {"augmentations": 2}], ids=str)
@pytest.mark.parametrize("name", [None, *BLOCKS])
def test_units_that_do_not_meet_pass_all_comparisons(fit, options, name):
    options = options or {"unit": UserLevel([row // 4 for row in range(96)], most_rows=3)}
    layers = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    options |= {"checks": Checks(), **BLOCKS.get(name, {})}
    rows, trainer = TensorDataset(*records(96)), {"max_steps": 6}
    report = fit(rows, 8, Classifier(layers), trainer=trainer, **options).privacy.report()
    assert report.isolation == "compared on synthetic samples"
    assert report.steps_compared, report.spot_checks


def test_users_that_meet_are_refused_and_rows_of_one_user_may_meet(fit):
    unit, trainer = UserLevel([row // 4 for row in range(96)], most_rows=3), {"max_steps": 8}

    def run(**options):
        rows, model = TensorDataset(*records(96)), Contrastive(nn.Linear(6, 3))
        return fit(rows, 6, model, trainer=trainer, unit=unit, **options).privacy

    with pytest.raises(MisconfigurationException, match="couples the records"):
        run(checks=Checks(), engine="layers")
    with pytest.raises(VoidedRunError):
        run(checks=Checks(dry_run=False), engine="layers")
    assert run(checks=Checks(), engine="one_by_one").steps == 8


class Stream(IterableDataset):
    def __len__(self):
        return len(USERS)

    def __iter__(self):
        return iter(data())


class Two(Classifier):
    """Two optimizers, by hand."""

    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2:])]


BY_ROW = {"unit": UserLevel(USERS, most_rows=2)}, {"augmentations": 2}
IN_ORDER = {"sampling": FixedOrder(), "relation": "zero_out"}


@pytest.mark.parametrize("options", BY_ROW, ids=["users", "views"])
def test_what_reads_rows_otherwise_is_refused(fit, options):
    with pytest.raises(ValueError, match="engine='hooks'"):
        private(engine="hooks", **options)
    with pytest.raises(MisconfigurationException, match="unit and augmentations put several rows"):
        fit(data(), 2, Two(net()), private_optimizer=0, **options)
    with pytest.raises(MisconfigurationException, match="need rows at any place"):
        fit(Stream(), 3, **IN_ORDER, **options)


def test_an_order_of_users_that_follows_their_rows_is_refused():
    replaced = {"sampling": FixedOrder(), "relation": "replace_one"}
    with pytest.raises(ValueError, match="order of the users follows from their rows"):
        private(**replaced, **BY_ROW[0])
    private(**replaced, **BY_ROW[1])
