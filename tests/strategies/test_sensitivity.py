"""The release of one step: the sum of records that ran alone, bounded for each, with its noise."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    Checks,
    FullBatch,
    PerGroup,
    fix,
    rows_of_records,
)
from lightning_dp.functional import real
from tests.zoo import Classifier, flat, private, records

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

C, N = 0.3, 30
ENGINES = ("layers", "records", "ghost", "one_by_one", "hooks")
GROUPS = PerGroup({"*0.weight": 0.3, "*0.bias": 0.1, "*": 0.2})
RULES = {"flat": {}, "automatic": {"clipping": Automatic()}, "groups": {"clipping": GROUPS}}
NOISELESS = {"noise_multiplier": 0.0, "sampling": FullBatch()}


class OneStep(Classifier):
    """Learning rate 1, and a step that a case may change: an update times N is the released sum."""

    def __init__(self, net: nn.Module, step: Callable[..., Any] | None = None) -> None:
        super().__init__(net, lambda params: torch.optim.SGD(params, lr=1.0))
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch) if self.step else super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Case:
    """A network, and what is unusual about its step, its records or its settings."""

    net: Callable[[], nn.Module]
    privacy: dict[str, Any] = field(default_factory=dict)
    step: Callable[..., Any] | None = None
    data: Callable[[], Any] = lambda: TensorDataset(*records(N))
    collate: Callable[..., Any] | None = None
    engine: str = ""  # how its description in the report begins


@pytest.fixture
def released(make_trainer):
    """``released(model, data, ...)``: the sum of one step on all records, and the report."""

    def run(model, data, collate=None, **options):
        before = flat(model)
        privacy = private(**{**NOISELESS, **options})
        loader = DataLoader(data, batch_size=8, collate_fn=collate)
        make_trainer(max_steps=1, callbacks=[privacy]).fit(model, loader)
        return real(before - flat(model)).flatten().double() * len(data), privacy.report()

    return run


def alone(model: Any, data: Any, collate: Any, clipping: Any = None, max_grad_norm: float = 1.0):
    """Each record in a copy of the model, its gradient clipped by the rule, one after the other."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    total = 0.0
    for record in data:
        twin = copy.deepcopy(model)
        loss = twin.training_step((collate or default_collate)([record]), 0)
        if loss is not None:
            loss.backward()
        parts = dict(twin.named_parameters())
        row = {n: parts[n].grad if parts[n].grad is not None else 0 * parts[n] for n in names}
        of_all = [row.get(name, torch.zeros_like(param)) for name, param in parts.items()]
        gradient = torch.cat([part.detach().double().flatten() for part in of_all])
        if gradient.isfinite().all():
            total = total + gradient * scales(clipping, max_grad_norm, parts, gradient)
    return total


def scales(clipping: Any, norm: float, parts: dict[str, Tensor], gradient: Tensor) -> Any:
    if clipping is None:
        return min(1.0, norm / float(gradient.norm() + 1e-300))
    if isinstance(clipping, Automatic):
        return norm / float(gradient.norm() + clipping.gamma)
    patterns, groups = list(clipping.groups), []
    for name, part in parts.items():
        (first, *_) = (i for i, pattern in enumerate(patterns) if fnmatch(name, pattern))
        groups.append(torch.full((part.numel(),), first))
    owner = torch.cat(groups)
    found = torch.ones_like(gradient)
    for i, pattern in enumerate(patterns):
        mine = gradient[owner == i].norm()
        found[owner == i] = min(1.0, clipping.groups[pattern] / float(mine + 1e-300))
    return found


# -- networks ------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))


def linear() -> nn.Module:
    return nn.Linear(6, 3)


class Lambda(nn.Module):
    """Parts, and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def parts_as_they_are() -> nn.Module:
    """The first layer is frozen, and dropout does not drop."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    net[:2].eval()
    return net


class Gated(nn.Module):
    """A layer of two inputs that no engine has a rule of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(self.gate) * x + y


def gated() -> nn.Module:
    return Lambda(
        lambda m, x: m.two(m.gate(h := m.one(x).tanh(), h.square())),
        one=nn.Linear(6, 8), gate=Gated(), two=nn.Linear(8, 3),
    )  # fmt: skip


def scaled() -> nn.Module:
    """A parameter next to the layers."""
    scale = nn.Parameter(torch.linspace(0.5, 2, 6))
    return Lambda(lambda m, x: m.net(x * m.scale), net=linear(), scale=scale)


def recurrent() -> nn.Module:
    lstm, head = DPLSTM(2, 4, batch_first=True), nn.Linear(4, 3)
    return Lambda(lambda m, x: m.head(m.lstm(x.view(-1, 3, 2))[0][:, -1]), lstm=lstm, head=head)


def time_first() -> nn.Module:
    """An ordinary LSTM with the records in the second dimension."""
    return Lambda(
        lambda m, x: m.head(m.lstm(x.view(-1, 3, 2).transpose(0, 1))[0][-1]),
        lstm=nn.LSTM(2, 5), head=nn.Linear(5, 3),
    )  # fmt: skip


def packed() -> nn.Module:
    """Sequences of one to three tokens, by the sign of what is in them."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 2)
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        tokens = pack_padded_sequence(m.embed(x), lengths.cpu(), True, enforce_sorted=False)
        return m.head(pad_packed_sequence(m.lstm(tokens)[0], batch_first=True)[0].sum(1))

    lstm = DPLSTM(4, 2, num_layers=2, bidirectional=True, batch_first=True)
    return Lambda(run, embed=nn.Linear(2, 4), head=nn.Linear(4, 3), lstm=lstm)


def checkpointed() -> nn.Module:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    run = lambda m, x: m.head(checkpoint(m.block, m.first(x), use_reentrant=False))  # noqa: E731
    return Lambda(run, first=nn.Linear(6, 8), block=block, head=nn.Linear(8, 3))


def scripted() -> nn.Module:
    """Torch keeps what is in a scripted module in no ``dict``."""
    part = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(torch.jit.script(part), nn.Linear(8, 3))


class Residual(nn.Module):
    """A residual block as torchvision's, on pictures of 6 values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32)
        self.relu, self.again = nn.ReLU(inplace=True), nn.BatchNorm1d(32)
        self.down, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(x.unsqueeze(1))))
        y = self.relu(self.again(self.down(y)) + y)
        return self.head(y.mean(2))


def backbone() -> nn.Module:
    """A frozen backbone with statistics, and a head."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net(3 * torch.randn(50, 6) + 1)
    net[:2].requires_grad_(False)
    return net


def rescaled() -> nn.Module:
    table = nn.Embedding(2, 8, max_norm=1.0)
    add = Lambda(lambda m, x: x + m.table((x[:, 0] > 0).long()), table=table)
    return nn.Sequential(nn.Linear(6, 8), add, nn.Linear(8, 3))


def attending() -> nn.Module:
    """Attention, of which Opacus' hooks see nothing."""
    return Lambda(
        lambda m, x: m.head(m.attention(y := m.embed(x.view(-1, 3, 2)), y, y)[0].mean(1)),
        embed=nn.Linear(2, 4), head=nn.Linear(4, 3),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
    )  # fmt: skip


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(torch.stack([x, -x, x.flip(1)], 1)).mean(1))


def adapted(targets: list[str], *, wrapped: bool) -> nn.Module:
    """LoRA, in peft's wrapper or injected; B is not zero, so A has a gradient."""
    peft = pytest.importorskip("peft", reason="adapters of the library peft")
    saved = ["head"] if wrapped else None
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=saved)
    make = peft.get_peft_model if wrapped else lambda net, c: peft.inject_adapter_in_model(c, net)
    net: nn.Module = make(Tokens(), config)
    for name, param in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    assert sum("lora" in n for n, p in net.named_parameters() if p.requires_grad) == 8
    return net


# -- records with several rows, and steps of other kinds -------------------------------------------


def bags() -> list[tuple[Tensor, Tensor, int]]:
    """Nodes and words, 1 to 6 of each, and a label."""
    torch.manual_seed(0)
    counts = [1 + i * i % 6 for i in range(N)]
    return [(torch.randn(k, 6), torch.randint(9, (k,)), i % 3) for i, k in enumerate(counts)]


def in_one_tensor(given: list[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    counts = torch.tensor([len(nodes) for nodes, _, _ in given])
    return {
        "x": torch.cat([nodes for nodes, _, _ in given]),
        "words": torch.cat([words for _, words, _ in given]),
        "offsets": counts.cumsum(0) - counts,
        "owners": torch.arange(len(given)).repeat_interleave(counts),
        "y": torch.tensor([label for _, _, label in given]),
    }


def pools(module: Any, batch: dict[str, Tensor]) -> Tensor:
    nodes = module.net(batch["x"]).tanh()
    pooled = nodes.new_zeros(len(batch["y"]), 3).index_add(0, batch["owners"], nodes)
    return cross_entropy(pooled, batch["y"])


def pools_with_owners(module: Any, batch: dict[str, Tensor]) -> Tensor:
    with rows_of_records(batch["owners"], len(batch["y"])):
        return pools(module, batch)


def looks_up(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(module.net[1](module.net[0](batch["words"], batch["offsets"])), batch["y"])


def pops(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """A collate_fn that empties its samples."""
    return torch.stack([s.pop("x") for s in samples]), torch.stack([s.pop("y") for s in samples])


class Emptied(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return dict(super().__getitem__(index))

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))


def dictionaries() -> Any:
    return Emptied({"x": x, "y": y} for x, y in TensorDataset(*records(N)))


def couples(module: Any, batch: Any) -> Tensor:
    """A loss over the batch, which any other engine refuses."""
    losses = cross_entropy(module(batch[0]), batch[1], reduction="none")
    return (losses.sum() - 0.2).abs() + 0.2 + losses.max()


def skips(module: Any, batch: Any) -> Tensor | None:
    return None if batch[0][0, 0] > 0 else cross_entropy(module(batch[0]), batch[1])


def looks_beside(module: Any, batch: Any) -> Tensor:
    module(torch.ones_like(batch[0]))
    return cross_entropy(module(batch[0]), batch[1])


def with_nan() -> TensorDataset:
    x, y = records(N)
    x[3] = math.nan
    return TensorDataset(x, y)


ALONE, CHECKED = {"engine": "one_by_one"}, {"checks": Checks()}
CASES = {
    **{
        f"{engine}, {rule}": Case(mlp, {"engine": engine, **options})
        for engine in ENGINES
        for rule, options in RULES.items()
    },
    "parts as they are": Case(parts_as_they_are),
    "own parameter": Case(scaled),
    "two inputs": Case(gated),
    "two inputs, hooks": Case(gated, {"engine": "hooks"}),
    "recurrent": Case(recurrent, engine="records, since layers does not cover this model: net.l"),
    "time first": Case(time_first, ALONE),
    "packed": Case(packed, engine="records, since layers"),
    "checkpointed": Case(checkpointed),
    "checkpointed, alone": Case(checkpointed, ALONE),
    "scripted": Case(scripted),
    "residual block": Case(lambda: fix(Residual())),
    "kept statistics": Case(lambda: fix(Residual(), norms="fixed")),
    "frozen backbone": Case(lambda: fix(backbone())),
    "max_norm": Case(lambda: fix(rescaled())),
    "attention, hooks": Case(lambda: fix(attending(), attention=True), {"engine": "hooks"}),
    # Of attention, peft adds a product of adapters to its weights, outside of any layer of theirs.
    **{
        f"peft {targets[0]} {wrapped}": Case(partial(adapted, targets, wrapped=wrapped))
        for targets in (["linear1", "linear2"], ["self_attn"])
        for wrapped in (True, False)
    },
    "graphs": Case(linear, {**ALONE, **CHECKED}, pools, bags, in_one_tensor),
    "rows with owners": Case(
        linear, CHECKED, pools_with_owners, bags, in_one_tensor, "layers"
    ),
    "bags of words": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 3)),
        CHECKED, looks_up, bags, in_one_tensor, "records, since layers",
    ),
    "emptied samples": Case(mlp, {**ALONE, **CHECKED}, None, dictionaries, pops),
    "coupled, alone": Case(mlp, {**ALONE, **CHECKED}, couples),
    "no loss, alone": Case(mlp, {**ALONE, **CHECKED}, skips),
    "a pass beside": Case(mlp, {"engine": "records"}, looks_beside),
    "a pass beside, layers": Case(mlp, {"engine": "layers"}, looks_beside),
    "nan": Case(mlp, {}, None, with_nan),
    "nan, alone": Case(mlp, ALONE, None, with_nan),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_that_of_records_that_run_alone(name, released):
    case = CASES[name]
    torch.manual_seed(0)
    model, data = OneStep(case.net(), case.step), case.data()
    rule = {} if "clipping" in case.privacy else {"max_grad_norm": C}
    rule |= case.privacy
    chosen = {key: rule[key] for key in ("clipping", "max_grad_norm") if key in rule}
    expected = alone(model, data, case.collate, **chosen)
    found, report = released(model, data, case.collate, **rule)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
    assert expected.norm() > C
    assert report.mechanism["gradient engine"].startswith(case.engine)


# -- compiled models -----------------------------------------------------------------------------

RAN: list[bool] = []  # whether gradients were on


def graph(module: Any, inputs: Any) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        RAN.append(torch.is_grad_enabled())
        return module.forward(*tensors)

    return run


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_trains_as_the_plain_one_and_says_so_once(whole, blobs, fit, caplog):
    torch.compiler.reset()
    weights = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Classifier(Lambda(lambda m, x: m.net(x), net=mlp()))
        if compiles:
            (model if whole else model.net).compile(backend=graph)
        privacy, options = private(seed=3), {"max_epochs": 1, "num_sanity_val_steps": 0}
        RAN.clear()
        with caplog.at_level(logging.INFO):
            fit(model, privacy, validate=DataLoader(blobs, 60), **options)
        weights.append(flat(model))
    torch.compiler.reset()
    assert torch.equal(*weights)
    assert RAN and not any(RAN)  # its validation is compiled
    named = f"; {'the model' if whole else 'net'}: compiled, and run as written"
    assert named in privacy.report().mechanism["gradient engine"]
    lines = [each.message for each in caplog.records if "run as written" in each.message]
    assert len(lines) == 1 and lines[0].startswith("privacy: ")


def test_a_compiled_module_is_resumed_under_its_own_names(loader, fit, tmp_path):
    for epochs, path in ((1, None), (2, tmp_path / "last.ckpt")):
        model = Classifier(torch.compile(mlp(), backend=graph))
        trainer = fit(model, private(), ckpt_path=path, max_epochs=epochs)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(model.state_dict())
    assert next(iter(state)).startswith("net._orig_mod.")


# -- bounds --------------------------------------------------------------------------------------

RECORDS = {
    "small": [0.01] * 6,
    "ordinary": [1.0, -2.0, 0.5, 3.0, 0.0, -1.0],
    "huge": [1e20, -1e20, 0.0, 1e20, 1.0, 1.0],
    "overflowing": [1e38, 1e38, -1e38, 1e38, 1e38, 1e38],
    "nan": [math.nan, 1.0, 1.0, 1.0, 1.0, 1.0],
    "all nan": [math.nan] * 6,
    "inf": [math.inf, 1.0, 1.0, 1.0, 1.0, 1.0],
    "minus inf": [1.0, 1.0, 1.0, 1.0, 1.0, -math.inf],
}


class Magnitudes(nn.Module):
    """Complex weights; the length of each output is what the loss sees."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, outputs, dtype=torch.complex64))

    def to(self, dtype: torch.dtype) -> Magnitudes:
        self.weight.data = self.weight.data.to(dtype.to_complex())
        return self

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


SINGLE, DOUBLE = torch.float32, torch.float64
BOUNDED = {
    **{
        f"{make.__name__}, {dtype}": (make, dtype, {}, C)
        for make in (linear, mlp, Magnitudes)
        for dtype in (SINGLE, DOUBLE)
    },
    **{
        f"automatic, {each}": (mlp, SINGLE, {"engine": each, **RULES["automatic"]}, C)
        for each in ENGINES
    },
    **{
        f"groups, {each}": (mlp, SINGLE, {"engine": each, **RULES["groups"]}, GROUPS.sensitivity)
        for each in ENGINES
    },
    "alone": (time_first, SINGLE, ALONE, C),
    "coupled, alone": (mlp, SINGLE, ALONE, C),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_one_more_record_moves_the_sum_by_at_most_the_sensitivity(name, released):
    """A record that is not finite by nothing at all, and a large gradient by exactly that."""
    make, dtype, options, bound = BOUNDED[name]
    rounding, (x, y) = 1e-12 if dtype == DOUBLE else 1e-4, records(N)
    x, settings = x.to(dtype), {"max_grad_norm": C} | options
    if options.get("clipping") is GROUPS:
        del settings["max_grad_norm"]

    def total(x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(0)
        step = couples if name.startswith("coupled") else None
        return released(OneStep(make().to(dtype), step), TensorDataset(x, y), **settings)[0]

    without = total(x, y)
    assert without.isfinite().all()
    for record in ("huge", "nan", "small") if options else RECORDS:
        row = torch.tensor([RECORDS[record]], dtype=DOUBLE).to(dtype)
        moved = total(torch.cat([x, row]), torch.cat([y, y[1:2]])) - without
        assert float(moved.norm()) <= bound + rounding, record
        if "nan" in record or "inf" in record:
            assert float(moved.abs().max()) < 1e-5, record
        if record in ("ordinary", "huge") and make is not mlp and dtype == DOUBLE:
            assert float(moved.norm()) == pytest.approx(bound, rel=1e-9), record
    for place in () if options else (0, 7, 8, N - 1):  # at the ends of chunks
        others = torch.arange(N) != place
        assert 0 < float((without - total(x[others], y[others])).norm()) <= bound + rounding


# -- noise ---------------------------------------------------------------------------------------


class Still(Classifier):
    """20,000 weights in two groups, with the same gradient of this size in every entry."""

    def __init__(self, size: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        a, b = (nn.Linear(100, 100, bias=False, dtype=dtype) for _ in range(2))
        super().__init__(nn.ModuleDict({"a": a, "b": b}), lambda p: torch.optim.SGD(p, lr=1.0))
        self.size = size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total = sum(part.weight.real.sum() for part in self.net.values())
        return (self.size * total * (1 + batch[0])).mean()


@pytest.mark.parametrize(
    ("options", "bound", "model"),
    [
        ({"max_grad_norm": 0.6}, 0.6, {}),
        ({"max_grad_norm": 0.6, "secure_noise": True}, 0.6, {}),
        ({"max_grad_norm": 0.6, "engine": "one_by_one"}, 0.6, {}),
        ({"clipping": Automatic(), "max_grad_norm": 0.4}, 0.4, {}),
        ({"clipping": PerGroup({"*a.*": 3.0, "*": 4.0})}, 5.0, {}),
        ({"clipping": AdaptiveQuantile(), "max_grad_norm": 0.4}, 0.4 * math.sqrt(1.01), {}),
        # each part of a complex number has that of a real one
        ({"max_grad_norm": 0.6}, 0.6, {"dtype": torch.complex64}),
        # beside a sum of gradients, each of which is clipped
        ({"max_grad_norm": 0.6, "sampling": FullBatch()}, 0.6, {"size": 3.0}),
    ],
    ids=str,
)
def test_the_noise_in_every_entry_is_made_for_the_sensitivity(options, bound, model, make_trainer):
    module, privacy = Still(**model), private(noise_multiplier=1.5, **options)
    before, loader = flat(module), DataLoader(TensorDataset(torch.zeros(40)), batch_size=8)
    make_trainer(max_steps=1, callbacks=[privacy]).fit(module, loader)
    moved = real(flat(module) - before).flatten().double()
    std = 1.5 * bound / (40 if "sampling" in options else 8)
    if "size" in model:
        moved += bound / math.sqrt(20_000)
    halves = moved.view(-1, 2).unbind(1) if "dtype" in model else moved.split(10_000)
    for part in halves:
        for factor in (1, 2 / 3, 3 / 2):
            found = stats.kstest(part.numpy(), stats.norm(scale=factor * std).cdf).pvalue
            assert (found > 1e-6) == (factor == 1), factor
