"""Faults that outside tests found, on real Trainers, with neighbours of each kind on both sides."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_dp import Diff2, DifferentialPrivacy, Storm
from lightning_dp._refusals import Refusal
from lightning_dp.accounting.journal import read_journal
from tests.isolation.finding_cases import BAD, LAYERS, ORDINARY, Base, Case, points, wide

REFUSALS = (MisconfigurationException, Refusal)  # of which VoidedRunError is one
BESIDE_THE_POINT = ("unsupported-layer", "out-of-order")


@pytest.fixture
def fit(make_trainer, tmp_path):
    """Train a case as a user does, save it, and return its Trainer and its privacy."""

    def run(case, module=None):
        settings = {"noise_multiplier": 8.0, "target_delta": 1e-5, "advice": False}
        settings |= {"ledger_dir": str(tmp_path / "ledger"), **case.sampling, **case.privacy}
        privacy = DifferentialPrivacy(**settings)
        arguments = {"max_steps": case.steps, "max_epochs": -1, "num_sanity_val_steps": 0}
        trainer = make_trainer(callbacks=[privacy, *case.callbacks()], **(arguments | case.trainer))
        records = (case.data or points)(case.n if case.full else 4 * case.n)
        loader = DataLoader(records, case.n, collate_fn=case.collate, num_workers=case.workers)
        held_out = DataLoader(points(8), 8) if case.validate else None
        module = module or case.make()
        if case.data_module is None:
            trainer.fit(module, loader, held_out)
        else:
            data_module = case.data_module()
            data_module.train_dataloader = lambda: loader
            trainer.fit(module, datamodule=data_module)
        trainer.save_checkpoint(tmp_path / "model.ckpt")
        return trainer, privacy

    return run


def some(table, count):
    """Let some of each kind be tried each time, and the others with the slow tests."""
    kinds = Counter()
    for name, case in table.items():
        kinds[case.kind] += 1
        is_slow = kinds[case.kind] % 2 == 0 or kinds[case.kind] > 2 * count
        yield pytest.param(name, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(BAD, 2))
def test_it_is_refused_or_voided_and_no_file_is_written(fit, tmp_path, name):
    with pytest.raises(REFUSALS) as refusal:
        fit(BAD[name])

    assert getattr(refusal.value, "topic", "") not in BESIDE_THE_POINT, refusal.value
    assert not (tmp_path / "model.ckpt").exists()


@pytest.mark.few(7)
@pytest.mark.parametrize("name", some(ORDINARY, 2))
def test_its_ordinary_neighbour_trains_without_a_word(fit, tmp_path, name):
    trainer, privacy = fit(ORDINARY[name])

    assert trainer.global_step == privacy.steps == ORDINARY[name].steps
    assert (tmp_path / "model.ckpt").exists()


def test_there_are_five_of_each_kind_but_callbacks_on_both_sides():
    for table in (BAD, ORDINARY):
        counts = Counter(case.kind for case in table.values() if case.kind != "callback")
        assert min(counts.values()) >= 5
    assert {case.kind for case in BAD.values()} == {case.kind for case in ORDINARY.values()}


# -- further passes leave no trace -----------------------------------------------------------


class Draw(nn.Module):
    """A counter in a child, in a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return x


class Traces(Base):
    """Everything that counts the steps, by name."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Draw(), nn.Linear(8, 4))
        self.register_buffer("inplace", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.plain, self.list, self.table = 0, [], {"steps": 0}
        self.numpy, self.python = np.random.default_rng(3), random.Random(3)
        self.torch = torch.Generator().manual_seed(3)

    def training_step(self, batch, batch_idx):
        self.inplace += 1
        self.assigned = self.assigned + 1
        self.plain += 1
        self.list.append(self.plain)
        self.table["steps"] += 1
        noise = self.numpy.normal() + self.python.random()
        noise += float(torch.rand((), generator=self.torch))
        return super().training_step(batch, batch_idx) + 0 * noise

    def counted(self, name):
        """Return how many steps the thing of this name has seen."""
        if name in ("inplace", "assigned", "plain"):
            return int(getattr(self, name))
        if name in ("numpy", "python", "torch"):
            return draws(getattr(self, name))
        return {"list": len(self.list), "table": self.table["steps"]}.get(
            name, int(self.net[0].calls)
        )


def draws(generator):
    """Return how many draws a generator is behind its seed; -1 if none of the first sixty."""
    if isinstance(generator, np.random.Generator):
        fresh, draw = np.random.default_rng(3), lambda g: g.normal()
    elif isinstance(generator, random.Random):
        fresh, draw = random.Random(3), lambda g: g.random()
    else:
        fresh, draw = torch.Generator().manual_seed(3), lambda g: torch.rand((), generator=g)
    sequence = [float(draw(fresh)) for _ in range(60)]
    following = float(draw(generator))
    return sequence.index(following) if following in sequence else -1


TRACES = ("inplace", "assigned", "plain", "list", "table", "child", "numpy", "python", "torch")
ESTIMATORS = {
    "mean": lambda: {"max_grad_norm": 1.0},
    "diff2": lambda: {"estimator": Diff2(5, 1.0, 1.0)},
    "storm": lambda: {"estimator": Storm(0.5, 1.0, 1.0)},
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("engine", "estimator"), [*(("auto", name) for name in ESTIMATORS), ("layers", "diff2")]
)
def test_ten_steps_count_as_ten(fit, engine, estimator):
    privacy = {"engine": engine, **ESTIMATORS[estimator]()}
    module = Traces()

    fit(Case("traces", Traces, n=32, steps=10, full=False, privacy=privacy), module)

    assert {name: module.counted(name) for name in TRACES} == dict.fromkeys(TRACES, 10)


# -- no real value before the charge ---------------------------------------------------------

SECRET = 7.25


class Texts(Dataset):
    """Records of a number, a text and a label, all of which say that they are real."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"x": torch.full((8,), SECRET), "text": f"secret of {i}", "y": i % 4}


def as_dictionary(rows):
    return default_collate(rows)


def as_tuple(rows):
    batch = default_collate(rows)
    return batch["x"], batch["text"], batch["y"]


def nested(rows):
    batch = default_collate(rows)
    return {"inputs": {"x": batch["x"], "text": tuple(batch["text"])}, "y": batch["y"]}


def as_samples(rows):
    return rows


def as_letters(rows):
    """A tokenizer's work: the texts as numbers."""
    batch = default_collate(rows)
    letters = [torch.tensor(list(text.ljust(12)[:12].encode())) for text in batch["text"]]
    return {"x": batch["x"], "letters": torch.stack(letters), "y": batch["y"]}


class Reads(L.LightningModule):
    """Writes down whether it was given real values before anything was charged."""

    def __init__(self, folder):
        super().__init__()
        self.net, self.folder = nn.Linear(8, 4), str(folder)

    def leaves(self, batch):
        if isinstance(batch, dict):
            return [leaf for part in batch.values() for leaf in self.leaves(part)]
        if isinstance(batch, list | tuple):
            return [leaf for part in batch for leaf in self.leaves(part)]
        return [batch]

    def training_step(self, batch, batch_idx):
        leaves = self.leaves(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        text = any("secret" in leaf for leaf in leaves if isinstance(leaf, str))
        letters = [leaf for leaf in tensors if leaf.shape[-1:] == (12,)]
        text |= any("secret" in bytes(row.tolist()).decode() for t in letters for row in t % 128)
        if (text or any((leaf == SECRET).any() for leaf in tensors)) and not charged(self.folder):
            kind = "a text" if text else "a number"
            (Path(self.folder) / "early").write_text(f"{kind} of {len(tensors)} tensors")
        x = torch.stack([t.reshape(8) for each in tensors for t in self.rows(each)])
        labels = torch.zeros(len(x), dtype=torch.int64)
        return F.cross_entropy(self.net(x), labels)

    def rows(self, tensor):
        """Yield the rows of features of a tensor, if it holds any."""
        if tensor.is_floating_point():
            yield from tensor.reshape(-1, 8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def charged(folder):
    """Return how many steps the journals of a folder have charged."""
    journals = [read_journal(path)[1] for path in Path(folder).rglob("*.journal")]
    return sum(n for runs in journals for run in runs.values() for _, n in run)


FORMS = (as_dictionary, as_tuple, nested, as_samples, as_letters, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("collate", FORMS, ids=lambda form: getattr(form, "__name__", "default"))
def test_no_real_text_or_number_is_used_before_the_charge(fit, tmp_path, collate):
    engine = {} if collate is as_samples else LAYERS
    case = Case("texts", Base, 16, lambda n: Texts(), collate, steps=2, privacy=engine)
    try:
        fit(case, Reads(tmp_path))
    except REFUSALS as error:  # lists of texts may be beyond an engine, but never a reason to peek
        print(error)

    early = tmp_path / "early"
    assert not early.exists(), early.read_text()


# -- the user's code is not rehearsed --------------------------------------------------------

HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "setup",
    "teardown",
]


class Watches(L.Callback):
    """Writes down its own hooks, in a file: so do copies, and nothing puts it back."""

    def __init__(self, path):
        for hook in HOOKS:
            setattr(self, hook, lambda *a, hook=hook, **n: note(path, hook))


def note(path, line):
    with open(path, "a") as file:
        file.write(line + "\n")


class Called(Base):
    """Notes each call: on synthetic values, or on real ones, which are above 2 somewhere."""

    def __init__(self, kind, path):
        super().__init__()
        self.kind, self.path = kind, str(path)
        layers = [nn.Linear(8, 16), nn.Dropout(0.1 if kind == "dropout" else 0), nn.Linear(16, 4)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        note(self.path, "real" if (x > 2).any() else "made up")
        if self.kind == "noise":
            batch = (x + 0.01 * torch.randn_like(x), batch[1])
        if self.kind == "branch":
            self.log("largest", float(x.max()))
        if self.kind == "one by one":  # a penalty of the gradient
            x = x.detach().requires_grad_()
            loss = super().training_step((x, batch[1]), batch_idx)
            return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return super().training_step(batch, batch_idx)


VARIANTS = ("plain", "noise", "dropout", "branch", "one by one", "own collate", "poisson")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", VARIANTS)
def test_training_step_runs_thirty_times_at_most_on_made_up_values(fit, tmp_path, kind):
    case = Case(
        "calls", Base, n=16, steps=4, data=wide, full=kind != "poisson",
        collate=default_collate if kind != "own collate" else lambda rows: default_collate(rows),
    )  # fmt: skip
    path = tmp_path / "calls"

    fit(case, Called(kind, path))

    calls = path.read_text().split("\n")
    assert calls.index("real") <= 30
    assert calls.count("made up") <= (4 if kind == "plain" else 30)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", VARIANTS[:-1])
def test_callbacks_are_called_as_in_a_plain_fit(fit, make_trainer, tmp_path, kind):
    plain, private = tmp_path / "plain hooks", tmp_path / "private hooks"
    trainer = make_trainer(
        callbacks=[Watches(plain)], max_steps=4, max_epochs=-1, num_sanity_val_steps=0
    )
    trainer.fit(
        Called(kind, tmp_path / "plain"), DataLoader(wide(16), 16), DataLoader(points(8), 8)
    )
    case = Case(
        "calls", Base, n=16, steps=4, data=wide, callbacks=lambda: [Watches(private)], validate=True
    )

    fit(case, Called(kind, tmp_path / "calls"))

    assert Counter(private.read_text().split()) == Counter(plain.read_text().split())


# -- one process releases --------------------------------------------------------------------


class Forks(Base):
    """Forks once, in its second step; the child goes on as if nothing had happened."""

    def __init__(self, where, once):
        super().__init__()
        self.where, self.once = where, str(once)

    def fork(self, where):
        """Fork if no process has: a file remembers it, since state that is put back would not."""
        if where == self.where and self.global_step == 1:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
                child = os.fork()
                if child:
                    Path(self.once).write_text(str(child))
                else:
                    signal.alarm(20)  # whatever it does, it ends

    def training_step(self, batch, batch_idx):
        self.fork("training_step")
        return super().training_step(batch, batch_idx)

    def losses(self, x, y):
        self.fork("forward")
        return super().losses(x, y)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.fork("on_after_batch_transfer")
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        self.fork("on_train_batch_start")

    def on_before_optimizer_step(self, optimizer):
        self.fork("on_before_optimizer_step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.fork("on_train_batch_end")


PLACES = [
    "training_step",
    "forward",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_optimizer_step",
]
REFUSED, TRAINED, FAILED = 3, 4, 5


@pytest.fixture
def one_thread():
    """Else a child waits for ever for the threads of torch that earlier tests began in its parent."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", PLACES)
def test_a_child_that_was_forked_releases_nothing(fit, tmp_path, where):
    parent, end, model = os.getpid(), FAILED, Forks(where, tmp_path / "child")
    made = 2 if where == "on_before_optimizer_step" else 1  # there its parent had released it
    try:
        _, privacy = fit(Case("fork", Base, n=16, steps=6), model)
        end = TRAINED
    except REFUSALS:
        end = REFUSED if model.global_step == made else FAILED
    finally:
        if os.getpid() != parent:
            os._exit(end)  # the child ends here, before pytest learns of it

    assert end == TRAINED
    status = os.waitpid(int((tmp_path / "child").read_text()), 0)[1]
    # Or it waits inside of torch, for threads or locks that a fork leaves behind, and releases nothing.
    assert os.waitstatus_to_exitcode(status) in (REFUSED, -signal.SIGALRM)
    assert privacy.steps == charged(tmp_path) == 6


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.parametrize("how", ["leaves at once", "another program", "workers", "forks a loader"])
def test_processes_that_release_nothing_are_welcome(fit, how):
    class Starts(Base):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if how == "leaves at once":
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)
            elif how == "another program":
                subprocess.run(["true"], check=True)
            elif how == "forks a loader":
                list(DataLoader(points(8), 4, num_workers=1))

    trainer, privacy = fit(Case("fork", Starts, n=16, steps=4, workers=2 * (how == "workers")))
    assert privacy.steps == trainer.global_step == 4
