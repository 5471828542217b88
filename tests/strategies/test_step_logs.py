"""Logs, counts and state of training_step, where samples run alone together, are as in any fit."""

import csv
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall
from torchmetrics.functional import accuracy
from torchmetrics.text import WordErrorRate

from lightning_dp import FullBatch
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.gradients.batches import SampleBatch
from lightning_dp.gradients.records import Records
from lightning_dp.gradients.side_effects import SideEffects
from tests.zoo import private


class Model(LightningModule):
    """Runs ``body`` as its training_step, ordinarily or for samples alone."""

    def __init__(self, body, is_alone):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.body = nn.Linear(6, 8), nn.Linear(8, 3), body
        self.acc = MulticlassAccuracy(3, average="micro")
        self.mean, self.bounds = MeanMetric(), MinMaxMetric(MulticlassAccuracy(3))
        self.rows, self.words = CatMetric(), WordErrorRate()
        several = [MulticlassAccuracy(3), MulticlassF1Score(3), MulticlassRecall(3)]
        self.several = MetricCollection(several, prefix="m_")
        self.count, self.seen = 0, []
        self.register_buffer("steps", torch.zeros(()))
        self.engine, self.effects = Records(self, list(self.parameters())), SideEffects(self)
        self.is_alone = is_alone

    def forward(self, x):
        return self.last(self.first(x).relu())

    def training_step(self, batch, batch_idx):
        if not self.is_alone:
            return self.body(self, batch, batch_idx)
        samples = SampleBatch(batch, len(batch["x"]))
        with self.effects.of_step() as around:
            return self.engine.run(lambda b: self.body(self, b, batch_idx), samples, around)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)  # both fits see the same weights


class Watching(Callback):
    """Keeps what other callbacks could read."""

    def __init__(self):
        self.read = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        shown = {name: float(x) for name, x in trainer.progress_bar_metrics.items()}
        self.read += [{k: torch.as_tensor(v).tolist() for k, v in outputs.items()}, shown]


class Bar(ProgressBar):
    def get_metrics(self, trainer, module):
        self.last = super().get_metrics(trainer, module)
        return self.last

    def on_train_batch_end(self, trainer, module, *args):
        self.get_metrics(trainer, module)

    def disable(self):
        pass


def fit(body, folder, *, is_alone, logger=CSVLogger, n=24, batch_size=8, callbacks=()):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)
    data = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    model, watching, bar = Model(body, is_alone), Watching(), Bar()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=logger(folder, name=str(is_alone)),
        callbacks=[watching, bar, *callbacks],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(does not have many workers|GPU available).*")
        trainer.fit(model, DataLoader(data, batch_size=batch_size))
    return model, trainer, watching, bar


def loss_of(self, batch):
    return F.cross_entropy(self(batch["x"]), batch["y"])


def logs_in_many_ways(self, batch, batch_idx):
    loss = loss_of(self, batch)
    self.log("loss", loss, prog_bar=True, batch_size=len(batch["x"]), on_step=True, on_epoch=True)
    self.log("one", 1.0, reduce_fx="sum", on_epoch=True)
    self.log("rate", torch.tensor(0.1), prog_bar=True, rank_zero_only=True)
    self.log_dict({"square": loss.detach() ** 2 * 0 + 3, "twice": 2 * loss}, on_epoch=True)
    right = self(batch["x"]).argmax(1) == batch["y"]
    self.log("right", right.sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
    self.log("least", batch["x"].min(), reduce_fx="min", on_step=False, on_epoch=True)
    self.log("quiet", right.float().mean(), logger=False, sync_dist=True, add_dataloader_idx=False)
    return loss


def updates(self, batch, batch_idx):
    out = self(batch["x"])
    self.acc.update(out, batch["y"])
    self.log("acc", self.acc, on_step=True, on_epoch=True)
    self.log("so_far", self.acc.compute())
    self.mean.update(F.cross_entropy(out, batch["y"]), weight=len(batch["y"]))
    self.log("mean", self.mean, metric_attribute="mean")
    return F.cross_entropy(out, batch["y"])


def calls(self, batch, batch_idx):
    out = self(batch["x"])
    self.log("acc", self.acc(out.argmax(1), batch["y"]), prog_bar=True)
    self.log("again", self.acc(out, target=batch["y"]), on_epoch=True, on_step=True)
    self.log_dict(self.bounds(out, batch["y"]))
    return F.cross_entropy(out, batch["y"])


def collection_updates(self, batch, batch_idx):
    out = self(batch["x"])
    self.several.update(out, batch["y"])
    self.log_dict(self.several, on_step=True, on_epoch=True)
    return F.cross_entropy(out, batch["y"])


def collection_calls(self, batch, batch_idx):
    out = self(batch["x"])
    found = self.several(out, batch["y"])
    self.log("recall", found["m_MulticlassRecall"])
    self.log_dict(found, on_epoch=True)
    return F.cross_entropy(out, batch["y"])


def functional_metric(self, batch, batch_idx):
    out = self(batch["x"])
    self.log("acc", accuracy(out, batch["y"], task="multiclass", num_classes=3))
    return F.cross_entropy(out, batch["y"])


def keeps(self, batch, batch_idx):
    self.count += 1
    self.seen.append(self.global_step)
    self.steps += 1
    loss = loss_of(self, batch)
    self.log("count", self.count)
    return {"loss": loss, "numbers": batch["y"]}


def rows_and_texts(self, batch, batch_idx):
    names = [f"{'abc'[i]} word" for i in batch["y"].tolist()]
    self.words.update(names, ["a word"] * len(names))
    self.log("words", self.words, on_epoch=True)
    self.rows.update(batch["x"][:, 0])
    return loss_of(self, batch)


BODIES = [
    rows_and_texts,
    logs_in_many_ways,
    updates,
    calls,
    collection_updates,
    collection_calls,
    keeps,
    functional_metric,
]


def splitting(body):
    """Return the body after a branch in the middle of what it would do."""

    def split(self, batch, batch_idx):
        self.count += 1
        self.steps += 1
        loss = loss_of(self, batch)
        self.log("early", loss)
        self.acc.update(self(batch["x"]), batch["y"])
        self.log("early_acc", self.acc, on_epoch=True)
        if loss > 1.1:
            pass
        return body(self, batch, batch_idx)

    return split


def whole(value):
    is_rows = isinstance(value, list) and bool(value) and isinstance(value[0], torch.Tensor)
    return torch.cat(value) if is_rows else torch.as_tensor(value)


def assert_alike(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(whole(found[name]), whole(value))


def rows_of(trainer):
    with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("body", "is_split"),
    [*((body, False) for body in BODIES), (logs_in_many_ways, True), (calls, True), (keeps, True)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_samples_do_alone_is_seen_as_what_the_batch_does(tmp_path, body, is_split):
    body = splitting(body) if is_split else body
    model, trainer, watching, bar = fit(body, tmp_path, is_alone=True)
    plain, wanted, was_read, shown = fit(body, tmp_path, is_alone=False)
    assert_alike(trainer.callback_metrics, wanted.callback_metrics)
    assert_alike(trainer.logged_metrics, wanted.logged_metrics)
    for found, row in zip(rows_of(trainer), rows_of(wanted), strict=True):
        assert_alike(found, row)
    for found, read in zip(watching.read, was_read.read, strict=True):
        assert_alike(found, read)
    assert_alike({**bar.last, "v_num": 0}, {**shown.last, "v_num": 0})
    for name in ("acc", "mean", "bounds", "rows", "words", "m_MulticlassRecall"):
        mine, its = (
            dict(x.named_modules()).get(name) or x.several["MulticlassRecall"]
            for x in (model, plain)
        )
        assert mine._update_count == its._update_count
        assert_alike(mine.metric_state, its.metric_state)
    kept = [(x.count, x.seen, x.steps.item()) for x in (model, plain)]
    assert kept[0] == kept[1]
    assert model.effects.state_differs is None
    assert_nothing_is_left(model)


def assert_nothing_is_left(model):
    assert "log" not in vars(model)
    assert "log_dict" not in vars(model)
    for part in (model.acc, model.mean, model.bounds, model.several):
        assert not {"forward", "compute", "reset", "update"} & {
            name for name, value in vars(part).items() if "_note" in repr(value)
        }


def events_of(trainer):
    events = EventAccumulator(trainer.logger.log_dir)
    events.Reload()
    ours = ("privacy/", "hp_metric")
    names = [name for name in events.Tags()["scalars"] if not name.startswith(ours)]
    return {name: [each.value for each in events.Scalars(name)] for name in names}


@pytest.mark.parametrize("body", [logs_in_many_ways, collection_calls, keeps])
def test_a_private_fit_shows_what_a_plain_one_shows(tmp_path, body):
    """In steps of all records, without noise."""
    options = {"is_alone": False, "logger": TensorBoardLogger, "batch_size": 24}
    privacy = private(noise_multiplier=0.0, sampling=FullBatch(), engine="records")
    model, trainer, *_ = fit(body, tmp_path / "private", callbacks=[privacy], **options)
    plain, wanted, *_ = fit(body, tmp_path / "plain", **options)
    assert privacy.report().mechanism["gradient engine"] == "records"
    assert_alike(events_of(trainer), events_of(wanted))
    kept = [(x.count, x.seen, x.steps.item()) for x in (model, plain)]
    assert kept[0] == kept[1]


def test_a_number_made_of_the_loss_is_logged_as_its_mean_and_warned_of_once(tmp_path):
    def body(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.log("number", loss.item())
        return loss

    with pytest.warns(PrivacyWarning, match=r"self.log\(.number., loss\)") as caught:
        _, trainer, *_ = fit(body, tmp_path, is_alone=True)
    assert sum(issubclass(each.category, PrivacyWarning) for each in caught) == 1
    _, wanted, *_ = fit(body, tmp_path, is_alone=False)
    assert_alike(trainer.callback_metrics, wanted.callback_metrics)


@pytest.mark.parametrize("place", ["attribute", "list", "buffer", "optimizer"])
def test_groups_that_leave_other_states_are_told_by_its_name(tmp_path, place):
    def body(self, batch, batch_idx):
        loss = loss_of(self, batch)
        mark = 1.0 if loss > 1.1 else 2.0
        if place == "attribute":
            self.count = mark
        elif place == "list":
            self.seen.append(mark)
        elif place == "buffer":
            self.steps.fill_(mark)
        else:
            self.optimizers().param_groups[0]["momentum"] = mark
        return loss

    model, *_ = fit(body, tmp_path, is_alone=True)
    names = {"attribute": "count", "list": "seen", "buffer": "steps", "optimizer": "momentum"}
    assert names[place] in model.effects.state_differs
    assert not any(value in model.effects.state_differs for value in ("1.0", "2.0"))


def test_a_further_pass_leaves_no_trace():
    model = Model(splitting(keeps), is_alone=True)
    batch = {"x": torch.randn(4, 6), "y": torch.zeros(4, dtype=torch.int64)}
    model.trainer = Trainer(logger=False, accelerator="cpu")
    with model.effects.of_step(are_done=False) as around:
        model.engine.run(lambda b: model.body(model, b, 0), SampleBatch(batch, 4), around)
    assert (model.count, model.seen, model.acc._update_count) == (0, [], 0)
