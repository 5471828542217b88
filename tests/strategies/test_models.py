"""Models of many kinds, in the Trainer: checkpointed, compiled, fixed, of sequences, of several rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks, Diff2, FullBatch, fix, rows_of_records
from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import clipped, gradient_rows, private

# -- activation checkpoints: the same weights as without them ------------------------------------


class WithCheckpoints(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            plain = self.reentrant is None
            x = x + (block(x) if plain else checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


@pytest.mark.parametrize("engine", ["auto", pytest.param("one_by_one", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"checks": Checks(dry_run=False, comparisons=False), "max_grad_norm": 0.5},
        pytest.param({"max_grad_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param(
            {
                "estimator": Diff2(restart_every=2),
                "sampling": FullBatch(),
                "checks": Checks(dry_run=False),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "probed", "two passes"],
)
def test_a_fit_is_the_same_with_checkpoints(options, engine, classifier, blobs, fit):
    weights = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        model = classifier(WithCheckpoints(reentrant))
        settings = {"noise_multiplier": 1.0, "seed": 3, "engine": engine}
        privacy = DifferentialPrivacy(target_delta=1e-5, **settings, **options)
        torch.manual_seed(1)
        accumulate = 1 if "sampling" in options else 2
        fit(model, privacy, DataLoader(blobs, 60), max_epochs=1, accumulate_grad_batches=accumulate)
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        assert all(
            param.grad is None or param.grad.isfinite().all() for param in model.parameters()
        )
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)


# -- compiled models train as the plain ones, and nothing of it stays behind ---------------------


RAN: list[bool] = []  # whether gradients were on


def graph(module: Any, inputs: Any) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        RAN.append(torch.is_grad_enabled())
        return module.forward(*tensors)

    return run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    RAN.clear()
    yield
    torch.compiler.reset()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def as_it_is(net: nn.Module) -> nn.Module:
    return net


def wrapped(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend=graph)


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend=graph)
    return net


@pytest.fixture
def fit_compiled(classifier, blobs, fit) -> Callable[..., tuple[Tensor, Any]]:
    """Train a compiled network, or a compiled LightningModule; return its weights and the report."""

    def run(
        of_net: Any = as_it_is, of_module: Any = as_it_is, **options: Any
    ) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        plain = classifier(of_net(Compiled()))
        privacy = private(**{"seed": 3, "max_grad_norm": 0.5, **options})
        torch.manual_seed(1)
        loader = DataLoader(blobs, 60)
        fit(of_module(plain), privacy, validate=loader, max_epochs=1, num_sanity_val_steps=0)
        weights = nn.utils.parameters_to_vector(plain.parameters()).detach()
        return weights, privacy.report()

    return run


@pytest.mark.parametrize(
    ("how", "whole"),
    [
        pytest.param(wrapped, True, marks=pytest.mark.slow),
        pytest.param(wrapped, False, marks=pytest.mark.slow),
        (in_place, True),
        (in_place, False),
    ],
)
def test_a_compiled_model_trains_as_the_plain_one(how, whole, fit_compiled, caplog):
    """Its validation is compiled, and its training says once that it is not."""
    expected, plain = fit_compiled()
    assert plain.mechanism["gradient engine"] == "layers"
    RAN.clear()
    with caplog.at_level(logging.INFO):
        found, report = fit_compiled(of_module=how) if whole else fit_compiled(of_net=how)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert RAN and not any(RAN)
    said = report.mechanism["gradient engine"]
    assert f"; {'the model' if whole else 'net'}: compiled, and run as written" in said
    lines = [each.message for each in caplog.records if "run as written" in each.message]
    assert len(lines) == 1 and lines[0].startswith("privacy: ")


def test_a_scripted_part_that_is_frozen_trains_as_the_plain_one(classifier, blobs, fit):
    """Torch keeps what is in a scripted module in no ``dict``."""
    weights = []
    for script in (as_it_is, torch.jit.script):
        torch.manual_seed(0)
        part, head = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()).requires_grad_(False),
            nn.Linear(8, 3),
        )
        fit(classifier(nn.Sequential(script(part), head)), private(seed=3), max_epochs=1)
        weights.append(nn.utils.parameters_to_vector(head.parameters()).detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_coupled_compiled_module_is_found_by_the_probe(blobs, classifier, fit):
    class Coupled(classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = self(batch[0])
            return (output - output.detach().mean(0)).square().sum(1).mean()

    privacy = DifferentialPrivacy(target_delta=1e-5, noise_multiplier=1.0)
    model = torch.compile(Coupled(Compiled()), backend=graph)
    with pytest.raises(Exception, match="couples the records of a batch"):
        fit(model, privacy, DataLoader(blobs, 60), max_epochs=1)


def test_a_compiled_module_is_resumed_and_loaded_under_its_own_names(
    classifier, blobs, fit, tmp_path
):
    def fit_compiled(epochs: int, path: Any) -> L.LightningModule:
        torch.manual_seed(0)
        model = classifier(wrapped(Compiled()))
        privacy = private()
        trainer = fit(model, privacy, DataLoader(blobs, 120), ckpt_path=path, max_epochs=epochs)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return model

    fit_compiled(1, None)
    model = fit_compiled(2, tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(model.state_dict())
    assert next(iter(state)).startswith("net._orig_mod.")


# -- models that were refused train after fix, as each record alone ------------------------------


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


class Attending(nn.Module):
    """Attention, of which Opacus' hooks see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.view(len(x), 3, 2))
        return self.head(self.attention(y, y, y, need_weights=False)[0].mean(1))


def backbone() -> nn.Module:
    """A frozen backbone with statistics, and a head."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net(3 * torch.randn(50, 6) + 1)
    for layer in net[:2]:
        layer.requires_grad_(False)
    return net


def rescaled() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Table(), nn.Linear(8, 3))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long())


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    # the model, arguments of fix, the engine, the refusal without fix
    "residual block": (
        Residual,
        {},
        "auto",
        r"\['net\.norm', 'net\.again'\] normalise.*fix\(model\)",
    ),
    "kept statistics": (
        Residual,
        {"norms": "fixed"},
        "auto",
        r"normalise.*lightning_dp\.fix\(model\)",
    ),
    "frozen backbone": (backbone, {}, "auto", r"normalise.*its statistics as constants"),
    "max_norm": (rescaled, {}, "auto", r"max_norm set.*as lightning_dp\.fix\(model\) does"),
    "attention, hooks": (
        Attending,
        {"attention": True},
        "hooks",
        r"net\.attention \(MultiheadAttention\).*lightning_dp\.fix\(model, attention=True\)",
    ),
}


@pytest.fixture(params=MODELS)
def case(
    request: pytest.FixtureRequest,
) -> tuple[Callable[[], nn.Module], dict[str, Any], str, str]:
    return MODELS[request.param]


def test_a_refused_model_trains_after_the_cure_of_the_refusal(case, blobs, classifier, fit):
    make, options, engine, match = case
    torch.manual_seed(0)
    model = classifier(make())
    privacy = private(engine=engine)
    with pytest.raises(Exception, match=f"{match}"):
        fit(model, privacy, max_epochs=1)
    assert privacy.steps <= 1

    assert fix(model, **options) is model

    privacy = private(engine=engine, target_epsilon=8.0)
    fit(model, privacy, max_epochs=1)
    assert privacy.steps == 10
    assert 0 < privacy.epsilon <= 8.0


def test_it_takes_the_steps_of_each_record_alone(case, blobs, classifier, fit):
    make, options, engine, _ = case
    torch.manual_seed(0)
    model = fix(classifier(make()), **options)
    records = blobs[:20]
    expected = stepped(copy.deepcopy(model), *records, clip_norm=0.5)
    privacy = private(engine=engine, noise_multiplier=0.0, max_grad_norm=0.5, sampling=FullBatch())
    fit(model, privacy, DataLoader(TensorDataset(*records), 20), max_epochs=1)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=2e-6)


def stepped(model: Any, x: Tensor, y: Tensor, clip_norm: float) -> dict[str, Tensor]:
    """The parameters after one step of SGD with clipped gradients, one record at a time."""
    params = [param for param in model.parameters() if param.requires_grad]
    moved = 0.1 * clipped(gradient_rows(model, x, y), clip_norm) / len(x)
    start = nn.utils.parameters_to_vector(params).detach()
    nn.utils.vector_to_parameters(start - moved, params)
    return dict(model.named_parameters())


# -- models of sequences, unchanged --------------------------------------------------------------


class PackedLSTM(L.LightningModule):
    """An LSTM on sequences of one to three tokens, by the sign of what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.lstm = DPLSTM(4, 2, num_layers=2, bidirectional=True, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].view(-1, 3, 2), batch[1]
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return cross_entropy(self.head(output.sum(1)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_without_noise_and_clipping_a_sequence_model_trains_as_ever(blobs, make_trainer):
    results = []
    for is_private in (False, True):
        torch.manual_seed(0)
        model = PackedLSTM()
        privacy = private(noise_multiplier=0.0, max_grad_norm=1e6, sampling=FullBatch())
        callbacks = [privacy] if is_private else []
        make_trainer(max_epochs=3, callbacks=callbacks).fit(model, DataLoader(blobs, 240))
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert privacy.report().mechanism["gradient engine"].startswith("records, since layers")
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


# -- records with several rows: graphs with their nodes in one tensor, bags of words -------------


GRAPHS = 24


def samples() -> list[tuple[Tensor, Tensor, int]]:
    """Nodes and tokens, 1 to 6 of each, and a label."""
    torch.manual_seed(0)
    counts = [1 + i * i % 6 for i in range(GRAPHS)]
    return [(torch.randn(k, 4), torch.randint(9, (k,)), i % 2) for i, k in enumerate(counts)]


def collate(given: list[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    counts = torch.tensor([len(nodes) for nodes, _, _ in given])
    return {
        "x": torch.cat([nodes for nodes, _, _ in given]),
        "words": torch.cat([words for _, words, _ in given]),
        "offsets": counts.cumsum(0) - counts,
        "owners": torch.arange(len(given)).repeat_interleave(counts),
        "y": torch.tensor([label for _, _, label in given]),
    }


class Nodes(L.LightningModule):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.turned, self.words = turned, nn.Embedding(9, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        n, owners = len(batch["y"]), batch["owners"]
        with rows_of_records(n - 1 - owners if self.turned else owners, n):
            nodes = torch.cat([self.layers(batch["x"]), self.words(batch["words"])], 1)
        pooled = nodes.new_zeros(n, 8).index_add(0, owners, nodes)
        return cross_entropy(self.head(pooled), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Bags(Nodes):
    """Bags of words, by their starts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 2)
        del self.layers

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.head(self.words(batch["words"], batch["offsets"])), batch["y"])


def fitted(
    fit: Any, model: Any, data: Any = None, **options: Any
) -> tuple[Any, DifferentialPrivacy]:
    privacy = DifferentialPrivacy(
        noise_multiplier=1e-6, max_grad_norm=0.3, target_delta=1e-5, seed=0, **options
    )
    loader: Any = DataLoader(samples(), batch_size=GRAPHS, collate_fn=collate)  # type: ignore[arg-type]
    if data is not None:
        loader = DataLoader(data, batch_size=GRAPHS)
    fit(model, privacy, loader, max_epochs=2)
    return model, privacy


@pytest.mark.parametrize(("make", "engine"), [(Nodes, "layers"), (Bags, "records, since layers")])
def test_a_fit_equals_each_record_alone(make, engine, fit):
    unchecked = Checks(dry_run=False, comparisons=False)
    slow, _ = fitted(fit, make(), engine="one_by_one", sampling=FullBatch(), checks=unchecked)
    fast, privacy = fitted(fit, make(), sampling=FullBatch())
    report = privacy.report()
    assert report.mechanism["gradient engine"].startswith(engine)
    assert "compared on synthetic samples" in report.isolation
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
