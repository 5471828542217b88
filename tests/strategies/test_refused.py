"""Refusals of what cannot train privately: the place, the cure, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from lightning_dp import Checks, CubicNewton, LaplacianSmoothing, Momentum, PrivacyConfig
from lightning_dp.callbacks import PrivateSingleDeviceStrategy
from lightning_dp.strategies.checks import check_strategy
from tests.zoo import private

UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False)}


def sgd(model: Any) -> Any:
    return SGD(model.parameters(), lr=0.1)


class Line(L.LightningModule):
    """A layer, an optimizer, and what a manual step does with the loss."""

    def __init__(
        self, net: nn.Module | None = None, optimizer: Any = sgd, step: Any = None
    ) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3) if net is None else net
        self.make, self.step, self.learning_rate, self.batch_size = optimizer, step, 0.1, 24
        self.automatic_optimization = step is None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.step is None:
            return cross_entropy(self.net(batch[0]), batch[1])
        return self.step(
            self, self.optimizers(), lambda: cross_entropy(self.net(batch[0]), batch[1])
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return self.make(self)


class TakesIterator(Line):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise AssertionError


def with_(**attributes: Any) -> Callable[[], Line]:
    """A line with attributes of its own."""

    def make() -> Line:
        model = Line()
        for name, value in attributes.items():
            setattr(model, name, value)
        return model

    return make


def norm(layer: nn.Module) -> Callable[[], Line]:
    return lambda: Line(nn.Sequential(layer, nn.Linear(6, 3)))


@dataclass(frozen=True)
class Row:
    """A refused fit, the words of the refusal, and the other arguments of ``ends``."""

    match: str
    model: Callable[[], Any] = Line
    data: Callable[[TensorDataset], Any] | None = None
    callback: Callable[[], L.Callback] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    privacy: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)


# -- data ----------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Batches:
    """Batches that come from nowhere in particular."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.zeros(24, 6), torch.zeros(24).long()]])


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(239, -1, -1))

    def __len__(self) -> int:
        return 240


class Shuffling(RandomSampler):
    """A subclass may choose anything."""


class Bucketed(BatchSampler):
    """A subclass may choose anything."""


class Prefetching(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(list(super().__iter__()))


def plain(data: Any, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=24, **arguments)


def sampled(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda data: plain(data, sampler=make(data))


def batched(kind: type[BatchSampler]) -> Callable[[Any], Any]:
    return lambda data: DataLoader(data, batch_sampler=kind(RandomSampler(data), 24, False))


SEVERAL = "several loaders.*ConcatDataset"
EQUALLY = "every record equally often"
OWN = r"its own batch_sampler.*DataLoader\(batch_size="
ONCE = "Name each record once"
DATA = {
    "IterableDataset": (lambda _: plain(Stream()), "IterableDataset.*map-style dataset"),
    "no DataLoader": (lambda _: Batches(), "Batches, not from a.*Use a DataLoader"),
    "list of one": (lambda d: [plain(d)], "several loaders.*return a single DataLoader"),
    "list": (lambda d: [plain(d), plain(d)], SEVERAL),
    "dict": (lambda d: {"a": plain(d), "b": plain(d)}, SEVERAL),
    "CombinedLoader": (lambda d: CombinedLoader([plain(d), plain(d)], "max_size_cycle"), SEVERAL),
    "weighted sampler": (
        sampled(lambda d: WeightedRandomSampler([1.0] * 240, 240)),
        "WeightedRandomSampler.*give shuffle=True and no sampler",
    ),
    "with replacement": (sampled(lambda d: RandomSampler(d, replacement=True)), EQUALLY),
    "of a part": (sampled(lambda d: RandomSampler(d, num_samples=120)), EQUALLY),
    "of other data": (sampled(lambda d: RandomSampler(range(100))), f"RandomSampler.*{EQUALLY}"),
    "in order, of other data": (
        sampled(lambda d: SequentialSampler(range(100))),
        f"SequentialSampler.*{EQUALLY}",
    ),
    "subset": (sampled(lambda d: SubsetRandomSampler(range(100))), f"SubsetRandom.*{EQUALLY}"),
    "own sampler": (sampled(lambda d: Backwards()), "Backwards.*shuffle=True"),
    "subclass of a sampler": (sampled(Shuffling), "Shuffling.*shuffle=True"),
    "batch_sampler": (batched(Bucketed), OWN),
    "plain BatchSampler": (batched(BatchSampler), OWN),
    "batch_size=None": (
        lambda d: DataLoader(d, batch_size=None),
        r"batch_size=None.*DataLoader\(batch_size=",
    ),
    "its own iteration": (
        lambda d: Prefetching(d, batch_size=24),
        "Prefetching overrides DataLoader.__iter__.*Use a plain DataLoader",
    ),
    "Subset that repeats": (
        lambda d: plain(Subset(d, [*range(1, 160), *[0] * 80])),
        f"Index 0 .* 80 times.*{ONCE}",
    ),
    "ConcatDataset that repeats": (
        lambda d: plain(ConcatDataset([d, *[Subset(d, [3])] * 79])),
        f"Index 3 of TensorDataset is reached 80 times.*{ONCE}",
    ),
    "nested repetition": (
        lambda d: plain(random_split(ConcatDataset([d, d]), [480, 0])[0]),
        f"of TensorDataset is reached 2 times.*{ONCE}",
    ),
    "nothing": (
        lambda d: plain(TensorDataset(torch.zeros(0, 6), torch.zeros(0).long())),
        "training set is empty",
    ),
}
ROWS = {f"data: {name}": Row(match, data=make) for name, (make, match) in DATA.items()}


# -- models and optimizers -----------------------------------------------------------------------

NORMS = {
    "BatchNorm1d": nn.BatchNorm1d(6),
    "BatchNorm2d": nn.BatchNorm2d(6),
    "frozen": nn.BatchNorm1d(6).requires_grad_(False),
    "not affine": nn.BatchNorm1d(6, affine=False),
    "without statistics": nn.BatchNorm1d(6, track_running_stats=False),
    "SyncBatchNorm": nn.SyncBatchNorm(6),
    "InstanceNorm": nn.InstanceNorm1d(6, track_running_stats=True),
    "frozen InstanceNorm": nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
}
NORMS["frozen InstanceNorm"].requires_grad_(False)
ROWS |= {
    f"norm: {name}": Row(r"\['net\.0'\] normalise.*lightning_dp\.fix\(model\)", norm(layer))
    for name, layer in NORMS.items()
}
ROWS |= {
    f"rescaled: {kind.__name__}": Row(
        r"\['net\.0'\] have max_norm set.*Leave max_norm out",
        norm(kind(10, 6, max_norm=1.0).requires_grad_(False)),
    )
    for kind in (nn.Embedding, nn.EmbeddingBag)
}


class Attending(nn.Module):
    """Attention, of which the hooks of Opacus see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Centred(Line):
    """Couples its records, and its forward pass is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend=lambda module, inputs: module.forward)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        return (output - output.detach().mean(0)).square().sum(1).mean()


ROWS |= {
    "constant statistics": Row(
        "normalise.*its statistics as constants",
        norm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)),
    ),
    "trained table": Row(
        r"max_norm set.*as lightning_dp\.fix\(model\) does", norm(nn.Embedding(9, 6, max_norm=1.0))
    ),
    "attention, hooks": Row(
        r"net\.attention \(MultiheadAttention\).*lightning_dp\.fix\(model, attention=True\)",
        lambda: Line(Attending()),
        privacy={"engine": "hooks", **UNCHECKED},
    ),
    "compiled": Row("couples the records of a batch", Centred),
}


def two(model: Any) -> Any:
    return [SGD([model.net.weight], lr=0.1), SGD([model.net.bias], lr=0.1)]


def optimized(make: Any, step: Any = None) -> Callable[[], Line]:
    return lambda: Line(optimizer=make, step=step)


ROWS |= {
    "two optimizers": Row("multiple optimizers is only supported with manual", optimized(two)),
    "two, manual": Row(
        "2 optimizers.*groups of one optimizer", optimized(two, lambda *unused: None)
    ),
    "no optimizer": Row("no optimizer.*[Rr]eturn one", optimized(lambda m: None)),
    "empty list": Row("no optimizer.*[Rr]eturn one", optimized(lambda m: [])),
    "LBFGS": Row(
        "LBFGS evaluates the loss several times.*Use SGD",
        optimized(lambda m: LBFGS(m.parameters())),
    ),
    "a parameter from elsewhere": Row(
        "not a parameter of the LightningModule.*Register it on the module",
        optimized(lambda m: SGD([*m.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)),
    ),
    "frozen parameters": Row(
        "no trainable parameter.*requires_grad", optimized(lambda m: sgd(m.requires_grad_(False)))
    ),
    "dataloader_iter": Row(r"dataloader_iter.*training_step\(batch", TakesIterator),
}


# -- steps that the ledger would not see ---------------------------------------------------------


class Greedy(SGD):
    """Evaluates its closure twice, as line searches do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


def greedy(model: Any) -> Any:
    return Greedy(model.parameters(), lr=0.1)


def gives_a_closure(model: Any, optimizer: Any, loss: Any) -> None:
    optimizer.step(closure=lambda: model.manual_backward(loss()))


def steps_twice(model: Any, optimizer: Any, loss: Any) -> None:
    model.manual_backward(loss())
    optimizer.step()
    optimizer.step()


def steps_on_two_losses(model: Any, optimizer: Any, loss: Any) -> None:
    for _ in range(2):
        model.manual_backward(loss())
        optimizer.step()


def backward_twice(model: Any, optimizer: Any, loss: Any) -> None:
    model.manual_backward(loss())
    model.manual_backward(loss())


def steps_the_bare_optimizer(model: Any, optimizer: Any, loss: Any) -> None:
    model.manual_backward(loss())
    optimizer.optimizer.step()


def bare_backward_and_step(model: Any, optimizer: Any, loss: Any) -> None:
    loss().backward()
    optimizer.optimizer.step()


TWICE = "Greedy evaluated its closure twice.*Use an optimizer that evaluates it once"
AT_ONCE = {"charged": 1}
AFTER_ONE = {"charged": 1, "released": 1, "gradient_left": True}
ROWS |= {
    "closure twice": Row(TWICE, optimized(greedy), expected={**AT_ONCE, "gradient_left": True}),
    "closure twice, manual": Row(
        TWICE, optimized(greedy, gives_a_closure), expected={**AT_ONCE, "gradient_left": True}
    ),
    **{
        step.__name__: Row(match, optimized(sgd, step), expected=expected)
        for step, match, expected in (
            (steps_twice, "Two optimizer steps on one batch.*Step once per batch", AFTER_ONE),
            (steps_on_two_losses, "Backward ran more than once.*backward once per", AFTER_ONE),
            (backward_twice, "Backward ran more than once.*backward once per batch", AT_ONCE),
            (steps_the_bare_optimizer, r"not made private.*self.optimizers\(\).step", AT_ONCE),
            (bare_backward_and_step, "not made private", AT_ONCE),
        )
    },
}


# -- Trainers, callbacks and tuners --------------------------------------------------------------


class OwnPrecision(MixedPrecision):
    """May scale the loss as it likes."""


def half(kind: type[MixedPrecision]) -> dict[str, Any]:
    return {"plugins": [kind("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


CALLBACKS: dict[str, tuple[Callable[[], L.Callback], str]] = {
    "LearningRateFinder": (LearningRateFinder, "outside the ledger.*learning rate"),
    "BatchSizeFinder": (BatchSizeFinder, "outside the ledger.*physical one that fits"),
    "GradientAccumulationScheduler": (
        lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "sampling rate.*accumulate_grad_batches",
    ),
    "StochasticWeightAveraging": (
        lambda: StochasticWeightAveraging(swa_lrs=0.1),
        "extra pass.*EMAWeightAveraging",
    ),
    "BackboneFinetuning": (
        lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1),
        "changes which parameters.*before fit",
    ),
}
CONFIG = PrivacyConfig(noise_multiplier=2.0, target_delta=1e-5)
TWO_CONFIGURATIONS = "configured twice.*Keep one of them"
ROWS |= {
    "overfit_batches": Row(
        "overfit_batches=2.*limit_train_batches", trainer={"overfit_batches": 2}
    ),
    "half overfit": Row("overfit_batches=0.5.*limit_train", trainer={"overfit_batches": 0.5}),
    "anomalies": Row("detect_anomaly=True.*public data", trainer={"detect_anomaly": True}),
    "own precision": Row("16-mixed.*bf16-mixed", trainer=half(OwnPrecision)),
    # Opacus adds records up in float16, where the sum of good ones may overflow.
    "float16 of Opacus": Row(
        "16-mixed.*'hooks'.*bf16-mixed",
        trainer=half(MixedPrecision),
        privacy={"engine": "hooks", **UNCHECKED},
    ),
    **{
        name: Row(
            f"{name} cannot be used.*{why}", with_(backbone=nn.Linear(2, 2)), callback=callback
        )
        for name, (callback, why) in CALLBACKS.items()
    },
    "behind another": Row("cannot be used", callback=CALLBACKS["StochasticWeightAveraging"][0]),
    "a callback of the model": Row(
        "StochasticWeightAveraging cannot be used",
        with_(configure_callbacks=CALLBACKS["StochasticWeightAveraging"][0]),
    ),
    **{
        method: Row(
            "Finder cannot be used.*ledger",
            expected={"act": lambda t, m, method=method: getattr(Tuner(t), method)(m)},
        )
        for method in ("lr_find", "scale_batch_size")
    },
    "two callbacks": Row(TWO_CONFIGURATIONS, callback=private),
    "forked": Row("spawn or fork.*strategy='ddp' in a script", trainer={"strategy": "ddp_fork"}),
}


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*returned `None`")
@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused_with_the_cure(name, ends, blobs, loader):
    row = ROWS[name]
    model, data = row.model(), row.data and row.data(blobs)
    model.train_dataloader = lambda: loader  # which finders and tuners make anew
    first, behind = [], [row.callback()] if row.callback else []
    if name == "StochasticWeightAveraging":
        first, behind = behind, []
    expected = {"act": lambda trainer, model: trainer.fit(model, data), **row.expected}
    ends(
        model,
        row.match,
        None,
        row.privacy,
        first=first,
        callbacks=behind,
        **expected,
        **row.trainer,
    )


class Changes(L.Callback):
    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.change(trainer.optimizers[0], pl_module.net)


def adds_a_group(optimizer: Any, net: Any) -> None:
    optimizer.add_param_group({"params": [net[2].bias.requires_grad_(True)]})


def replaces_in_the_optimizer(optimizer: Any, net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = net[0].weight


@pytest.mark.parametrize(
    "change",
    [
        adds_a_group,
        lambda optimizer, net: net[0].bias.requires_grad_(True),
        lambda optimizer, net: net[2].bias.requires_grad_(True),  # in no optimizer
        lambda optimizer, net: net[0].weight.requires_grad_(False),
        replaces_in_the_optimizer,
    ],
)
def test_another_set_of_trained_parameters_during_fit_is_refused(change, mlp, ends):
    model = Line(mlp(), lambda m: SGD(list(m.parameters())[:3], lr=0.1))  # not the last bias
    for bias in (model.net[0].bias, model.net[2].bias):
        bias.requires_grad_(False)
    match = "set of trained parameters changed during fit.*before fit"
    ends(model, match, callbacks=[Changes(change)])


def exchanges(net: Any) -> None:
    net[2] = copy.deepcopy(net[2])


def removes(net: Any) -> None:
    net[2].bias = None


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start"])
@pytest.mark.parametrize(
    ("act", "match"),
    [
        (exchanges, r"2 are gone, 2 are new: \['net\.2\.weight'"),
        (lambda net: net.append(nn.Linear(3, 3)), r"0 are gone, 2 are new: \['net\.3\.weight'"),
        (removes, r"1 are gone, 0 are new"),
    ],
)
def test_parameters_that_are_replaced_are_refused_before_a_charge(act, match, hook, mlp, ends):
    acting = L.Callback()
    setattr(acting, hook, lambda trainer, module, *_: act(module.net))
    match = rf"replaced during fit \({match}.*configure_model"
    ends(Line(mlp()), match, privacy=UNCHECKED, callbacks=[acting], error=RuntimeError)


def test_a_trainer_of_pytorch_lightning_is_refused(loader, tmp_path):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Model(pytorch_lightning.LightningModule):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError

        def configure_optimizers(self) -> None:
            pass

    quiet = {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", callbacks=[private()], enable_progress_bar=False, **quiet
    )
    match = "'pytorch_lightning'.*Import everything from lightning.pytorch"
    with pytest.raises(MisconfigurationException, match=match):
        trainer.fit(Model(), loader)


def test_somebody_elses_hook_on_a_gradient_is_refused(fit, privacy):
    model, seen = Line(), list[Tensor]()
    model.net.weight.register_hook(seen.append)
    with pytest.raises(Exception, match=r"gradient hooks.*Remove them before fit"):
        fit(model, privacy, max_epochs=1)
    assert privacy.steps == 0 and seen == []


# -- strategies and processes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [FSDPStrategy, DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy]
)
def test_strategies_that_shard_or_compile_are_refused(kind):
    cures = r"strategy='ddp'.*ModelParallelStrategy\(data_parallel_size"
    strategy = object.__new__(kind)  # whose own package may not be installed
    with pytest.raises(Exception, match=f"(?s)strategy {kind.__name__} is not supported.*{cures}"):
        check_strategy(strategy)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("ddp_fork", 1),
        ("ddp_notebook", 2),
        pytest.param("ddp_spawn", 2, marks=pytest.mark.slow),
        ("auto", 2),  # in a notebook
    ],
)
def test_the_refusal_of_a_copied_process_comes_from_the_parent(
    strategy, devices, fit, privacy, monkeypatch
):
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE"
    monkeypatch.setattr(connector, strategy == "auto")
    with pytest.raises(MisconfigurationException, match=r"(?s)spawn or fork.*devices=1") as refused:
        fit(Line(), privacy, strategy=strategy, devices=devices, max_epochs=1)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__


def test_a_strategy_without_or_with_a_second_configuration_is_refused(fit, privacy):
    twice, none = PrivateSingleDeviceStrategy(privacy=CONFIG), PrivateSingleDeviceStrategy()
    with pytest.raises(Exception, match=TWO_CONFIGURATIONS):
        fit(Line(), privacy, strategy=twice, max_epochs=1)
    with pytest.raises(Exception, match=r"no privacy configuration.*privacy=PrivacyConfig"):
        fit(Line(), None, strategy=none, max_epochs=1)
    assert privacy.steps == 0


class OneShardedLayer(Line):
    """One network, sharded as a function says, over one process."""

    def __init__(self, shard: Callable[[nn.Module, Any], object]) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
        self.shard = shard

    def configure_model(self) -> None:
        self.shard(self.net, self.device_mesh["data_parallel"])


WHOLE = r"does not work on sharded parameters.*strategy='ddp'"


@pytest.mark.parametrize(
    ("options", "match", "is_sharded"),
    [
        ({"estimator": CubicNewton(1.0, 1.0, 3)}, f"CubicNewton.* {WHOLE}", True),
        (
            {"postprocessing": [Momentum(0.5), LaplacianSmoothing(1.0)]},
            f"LaplacianSmoothing.* {WHOLE}",
            True,
        ),
        ({"count_clipped": True}, f"count_clipped=True.* {WHOLE}", True),
        ({"engine": "one_by_one"}, f"engine='one_by_one'.* {WHOLE}", True),
        ({}, r"\['net\.0\.weight', .* are trained and not sharded.*fully_shard\(self\.m", False),
    ],
)
def test_what_shards_do_not_allow_is_refused_by_name(options, match, is_sharded, fit, tmp_path):
    shard = (lambda net, mesh: fully_shard(net, mesh=mesh)) if is_sharded else lambda *_: None
    try:
        with pytest.raises(MisconfigurationException, match=match):
            strategy = ModelParallelStrategy(1, 1)
            fit(OneShardedLayer(shard), private(**options), max_steps=3, strategy=strategy)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert not list(tmp_path.rglob("*.journal"))


# -- the private loader serves the training steps alone; whoever else asks it reads no record ----


def loader_of(trainer: L.Trainer) -> Any:
    return trainer.train_dataloader


ASKERS: dict[str, Callable[[L.Trainer], Any]] = {
    "for": lambda trainer: [len(batch) for batch in loader_of(trainer)],
    "list": lambda trainer: list(loader_of(trainer)),
    "next": lambda trainer: next(iter(loader_of(trainer))),
    "two iterators": lambda trainer: next(
        zip(iter(loader_of(trainer)), iter(loader_of(trainer)), strict=True)
    ),
    "a CombinedLoader over it": lambda trainer: list(CombinedLoader(loader_of(trainer))),
    "Lightning's CombinedLoader": lambda trainer: next(iter(trainer.fit_loop._combined_loader)),
    "the loop's iterator": lambda trainer: next(trainer.fit_loop._combined_loader),
    "the loop's fetcher": lambda trainer: next(trainer.fit_loop._data_fetcher),
    "a shallow copy": lambda trainer: list(copy.copy(loader_of(trainer))),
}
HOOKS = (
    *("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_end"),
    *("on_before_optimizer_step", "on_validation_start", "on_validation_batch_end"),
    "on_train_epoch_end",
)


class Asks(L.Callback):
    """Asks the training loader at a moment of the fit."""

    def __init__(self, hook: str, ask: Callable[[L.Trainer], Any], data: Any) -> None:
        self.ask, self.data, self.read = ask, data, 0
        setattr(self, hook, self._asked)

    def _asked(self, trainer: L.Trainer, *_: Any) -> None:
        before = len(self.data.asked)
        try:
            self.ask(trainer)
        finally:
            self.read += len(self.data.asked) - before


@pytest.mark.parametrize(
    ("hook", "asker", "workers"),
    [
        *(("on_train_start", asker, 0) for asker in ASKERS),
        *((hook, "next", 0) for hook in HOOKS),
        ("on_train_start", "next", 1),
    ],
)
def test_a_hook_that_asks_the_training_loader_reads_no_record(
    hook, asker, workers, blobs, recorded, make_trainer
):
    data = recorded(*blobs.tensors)
    asks, options = Asks(hook, ASKERS[asker], data), {"num_sanity_val_steps": 0}
    trainer = make_trainer(max_epochs=1, callbacks=[private(), asks], **options)
    forked = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    match = r"(?s)test_refused.*from the Trainer's training loader.*Use public data"
    with pytest.raises(Exception, match=match):
        trainer.fit(Line(), DataLoader(data, 24, **forked), DataLoader(data, 240))
    assert asks.read == 0
    if hook == "on_train_start":
        assert data.asked == []
    if workers:  # which do not read ahead for whoever is refused
        assert trainer.train_dataloader._iterator is None


def test_the_loader_is_refused_after_the_fit_too(blobs, recorded, fit, privacy):
    data, model = recorded(*blobs.tensors), Line()
    trainer = fit(model, privacy, DataLoader(data, 24), max_steps=2)
    data.asked.clear()
    ours = trainer.train_dataloader
    for use in (
        lambda: list(ours),
        lambda: trainer.validate(model, ours, verbose=False),
        lambda: trainer.predict(model, ours),  # Lightning itself cannot give it to predict
    ):
        with pytest.raises(Exception, match=r"from the Trainer|PrivateDataLoader"):
            use()
    assert data.asked == []
