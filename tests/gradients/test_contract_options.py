"""Options of layers, random numbers and precisions: engines against a loop, or torch.func."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dp.gradients import RecordPasses, bilinear, parameter_sum, rules
from tests.gradients.models import Example, Net, features, net, sequences, weight
from tests.gradients.test_contract import EXAMPLES, N, alone, made, replay, rows, trained

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing",
    "ignore:Using padding='same'",
    "ignore:There is a performance drop",
    "ignore:enable_nested_tensor",
)

FEW = settings(derandomize=True, deadline=None, max_examples=12)
WHOLE = ("layers", "ghost", "hooks")


def run(passes: RecordPasses, example: Example, module: nn.Module, batch: Any) -> Any:
    chunk = replay(example, module, batch)
    found = passes.run(chunk.forward, chunk.batch, chunk.size)
    assert found is not None and found.count == N
    return found


def check(example: Example, engines: tuple[str, ...]) -> None:
    """Assert that norms and a weighted sum are those of the loop."""
    weights = torch.linspace(0.5, 2.0, N, dtype=torch.float64)
    for engine in engines:
        module, batch = made(example)
        expected = rows(example, module, batch)
        with alone(engine, module) as passes:
            found = run(passes, example, module, batch)
            torch.testing.assert_close(found.norms(), expected.norm(dim=1), rtol=1e-8, atol=1e-12)
            places = torch.arange(expected.shape[1])[::5]
            wanted = expected[:, places].norm(dim=1)
            if engine != "ghost":
                norms = run(passes, example, module, batch).restrict(places).norms()
                torch.testing.assert_close(norms, wanted, rtol=1e-8, atol=1e-12)
                found = run(passes, example, module, batch)
            found.norms()
            wanted, total = weights @ expected, found.weighted_sum(weights)
            assert (total - wanted).norm() <= 1e-8 * wanted.norm(), engine


def pooled(make: Any) -> Any:
    """A model of one layer between a linear one and a mean over positions."""
    return net(lambda m, x: m.layer(m.body(x)).tanh().flatten(2).mean(2)[:, :3],
               body=lambda: nn.Identity(), layer=make)  # fmt: skip


# -- shapes and options -----------------------------------------------------------------------


@FEW
@given(st.data())
def test_convolutions(data):
    def each(numbers: Any) -> Any:
        return data.draw(st.one_of(numbers, st.tuples(*[numbers] * dims)))

    dims = data.draw(st.integers(1, 3))
    groups = data.draw(st.sampled_from([1, 2]))
    padding = data.draw(st.sampled_from(["same", "valid", 0, 1, 2]))
    options = {
        "kernel_size": each(st.integers(1, 3)),
        "stride": 1 if padding == "same" else each(st.integers(1, 2)),
        "dilation": each(st.integers(1, 2)),
        "padding": padding,
        "padding_mode": data.draw(st.sampled_from(["zeros", "zeros", "circular", "replicate"])),
        "groups": groups,
        "bias": data.draw(st.booleans()),
    }
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    size = data.draw(st.tuples(*[st.integers(5, 7)] * dims))
    into, out = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(2, 4))
    assume(out >= 3)
    batch = lambda n: {"x": torch.randn(n, into, *size), "y": torch.arange(n) % 3}  # noqa: E731
    example = Example(pooled(lambda: kind(into, out, **options)), batch)
    plain = options["padding_mode"] == "zeros"
    bound = data.draw(st.sampled_from([0, bilinear._PATCHES_PER_CHANNEL, 1 << 40]))
    with mock.patch.object(bilinear, "_PATCHES_PER_CHANNEL", bound):  # convolutions, or products
        check(example, ("records", "layers", "ghost", *(["hooks"] if plain and dims < 3 else [])))


@FEW
@given(
    length=st.integers(1, 9),
    width=st.integers(1, 9),
    out=st.integers(3, 40),
    bias=st.booleans(),
    norm=st.sampled_from([nn.LayerNorm, nn.RMSNorm, nn.Identity]),
)
def test_linear_layers_and_norms_on_positions(length, width, out, bias, norm):
    layers = lambda: nn.Sequential(nn.Linear(width, out, bias=bias), norm(out))  # noqa: E731
    make = net(lambda m, x: m.layers(x).sin().mean(1)[:, :3], layers=layers)
    batch = lambda n: {"x": torch.randn(n, length, width), "y": torch.arange(n) % 3}  # noqa: E731
    check(Example(make, batch), ("records", "layers", "ghost", "hooks"))


@FEW
@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from([None, 0, 3, -2]), st.booleans())
def test_embeddings(rows_of_table, length, padding, sparse):
    rows_of_table += 3
    table = lambda: nn.Embedding(rows_of_table, 3, padding, sparse=sparse)  # noqa: E731
    make = net(
        lambda m, x: m.head(m.table(x).sum(1).sin()), table=table, head=lambda: nn.Linear(3, 3)
    )
    batch = lambda n: {"x": torch.randint(rows_of_table, (n, length)), "y": torch.arange(n) % 3}  # noqa: E731
    check(Example(make, batch), ("records", "layers", "ghost"))


@FEW
@given(
    st.sampled_from(["sum", "mean", "max"]), st.sampled_from([None, 0, -2]), st.integers(1, 6),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_bags(mode, padding, length, weighted, is_long, sparse):
    sparse = sparse and mode != "max"  # torch has none

    def forward(m: Net, x: Tensor) -> Tensor:
        offsets = torch.arange(0, x.numel(), x.shape[1]) if is_long else None
        x = x.flatten() if is_long else x
        weights = m.gain[x] if weighted and mode == "sum" else None
        return m.head(m.bag(x, offsets, weights))

    parts = {
        "bag": lambda: nn.EmbeddingBag(7, 6, mode=mode, padding_idx=padding, sparse=sparse),
        "gain": lambda: nn.Parameter(torch.randn(7)),
        "head": lambda: nn.Linear(6, 3),
    }
    batch = lambda n: {"x": torch.randint(7, (n, length)), "y": torch.arange(n) % 3}  # noqa: E731
    check(Example(net(forward, **parts), batch), ("records", "one_by_one"))


@FEW
@given(st.data())
def test_multi_head_attention(data):
    flag = lambda: data.draw(st.booleans())  # noqa: E731
    self_attention, batch_first = flag(), flag()
    sizes = {} if self_attention else {"kdim": data.draw(st.sampled_from([4, 6])), "vdim": 4}
    options = {
        "bias": flag(), "add_bias_kv": flag(), "add_zero_attn": flag(), "batch_first": batch_first,
        **sizes,
    }  # fmt: skip
    mask = data.draw(st.sampled_from([None, "bool", "float", "each head"]))
    padded, causal = flag(), mask is not None and flag()
    weights = flag()

    def forward(m: Net, x: Tensor) -> Tensor:
        k = x if self_attention else x[..., : sizes["kdim"]]
        v = x if self_attention else x[..., :4]
        hidden = x[:, :, 0] > 1.0
        hidden[:, 0] = False
        attn = torch.ones(5, 5).triu(1).bool() if mask else None
        if mask == "float":
            attn = torch.zeros(5, 5, dtype=x.dtype).masked_fill(attn, -1.5)
        if mask == "each head":
            attn = attn.expand(2 * len(x), 5, 5)
        q, k, v = (e if batch_first else e.transpose(0, 1) for e in (x, k, v))
        if self_attention:
            q = k = v
        out, shares = m.attention(
            q, k, v, key_padding_mask=hidden if padded else None, need_weights=weights,
            attn_mask=attn, is_causal=causal and mask == "bool" and not padded,
            average_attn_weights=flag_of_average,
        )  # fmt: skip
        out = out if batch_first else out.transpose(0, 1)
        return m.head(out.mean(1)) + (0.0 if shares is None else shares.square().mean())

    flag_of_average = flag()
    attention = lambda: nn.MultiheadAttention(6, 2, **options)  # noqa: E731
    example = Example(net(forward, attention=attention, head=lambda: nn.Linear(6, 3)), sequences)
    check(example, ("records", "one_by_one"))


@settings(FEW, max_examples=5)
@given(
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["relu", "gelu"]), st.booleans()
)
def test_transformers(batch_first, norm_first, bias, activation, masked):
    def forward(m: Net, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(5) if masked else None
        hidden = (x[:, :, 0] > 1.0) & (torch.arange(5) > 0) if masked else None
        if hidden is not None:  # of one type, as torch wants them
            hidden = torch.zeros(hidden.shape, dtype=mask.dtype).masked_fill(hidden, -torch.inf)
        y = x if batch_first else x.transpose(0, 1)
        out = m.layers(y, y.sin(), src_key_padding_mask=hidden, tgt_mask=mask,
                       tgt_is_causal=masked)  # fmt: skip
        return m.head(out.mean(1 if batch_first else 0))

    layers = lambda: nn.Transformer(  # noqa: E731
        6, 2, 1, 1, 8, 0.0, activation, batch_first=batch_first, norm_first=norm_first, bias=bias
    )
    make = net(forward, layers=layers, head=lambda: nn.Linear(6, 3))
    check(Example(make, sequences), ("records",))


@pytest.mark.parametrize(
    "name", ["cnn", "conv on small maps", "positions", "transformer block", "embedding",
             "tied embedding", "raw parameters"],
)  # fmt: skip
def test_gradients_that_are_too_large_to_be_kept_are_made_in_slices(name, monkeypatch):
    monkeypatch.setattr(parameter_sum, "_KEEP_BYTES", 0)
    monkeypatch.setattr(bilinear, "_SLICE_BYTES", 200)
    monkeypatch.setattr(bilinear, "_PRODUCT_BYTES", 40)
    monkeypatch.setattr(bilinear, "_CACHED_BYTES", 100)
    monkeypatch.setattr(bilinear, "_PATCHES_PER_CHANNEL", 0)  # convolutions, not products
    monkeypatch.setattr(bilinear, "_ENTRIES", 200)
    check(EXAMPLES[name], ("records",) if name == "raw parameters" else ("records", "layers"))


# -- functions by the arguments of torch ------------------------------------------------------

FUNCTIONS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {  # with the shapes of x and w
    "linear by name": (lambda x, w, b: F.linear(input=x, bias=b, weight=w), (5,), (4, 5)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (5,), (5, 4)),
    "mm": (lambda x, w, b: torch.mm(x, w), (5,), (5, 4)),
    "matmul": (lambda x, w, b: torch.matmul(x, w), (2, 3, 5), (5, 4)),
    "@": (lambda x, w, b: x @ w + b, (3, 5), (5, 4)),
    "embedding": (lambda x, w, b: F.embedding(x.long() % 7, w, padding_idx=-3), (6,), (7, 4)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, padding=1, groups=2), (4, 9), (4, 2, 3)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, (1, 2), [1]), (3, 7, 6), (4, 3, 3, 2)),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b), (2, 3, 4, 4), (4, 2, 2, 2, 2)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3, 4), w, b.expand(3, 4)), (2, 3, 4), (3, 4)),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, [4], weight=w) + b, (3, 4), (4,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3), (4, 5), (4,)),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (4, 5, 3), (4,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_parameters_of_the_model(name):
    function, of_x, of_w = FUNCTIONS[name]
    make = net(
        lambda m, x: m.head(function(x, m.w, m.b).sin().reshape(len(x), -1, 4).mean(1)),
        w=weight(*of_w), b=weight(4), head=lambda: nn.Linear(4, 3),
    )  # fmt: skip
    batch = lambda n: {"x": 3 * torch.randn(n, *of_x), "y": torch.arange(n) % 3}  # noqa: E731
    check(Example(make, batch), ("records",))


X, W, TABLE = torch.ones(2, 5), torch.ones(4, 5), torch.ones(7, 3)
TOKENS = torch.zeros(2, 3, dtype=torch.long)


def test_where_no_rule_holds_there_is_none():
    for name, args, kwargs in (
        ("linear", (X, W[0]), {}),
        ("linear", (X, W, torch.ones(1)), {}),
        ("linear", (X.to(torch.cfloat), W.to(torch.cfloat)), {}),
        ("addmm", (torch.ones(2, 4), X, W.T), {}),
        ("addmm", (torch.ones(4), X, W.T), {"beta": 2}),
        ("mm", (X, W.T), {"out": torch.empty(2, 4)}),
        ("addmm", (), {"input": torch.ones(4), "mat1": X, "mat2": W.T}),  # other names of torch's
        ("matmul", (X, W[0]), {}),
        ("embedding", (TOKENS, TABLE), {"max_norm": 1.0}),
        ("embedding", (TOKENS, TABLE), {"scale_grad_by_freq": True}),
        ("embedding", (TABLE, TOKENS), {}),  # torch.embedding has the table first
        ("layer_norm", (X, (5,)), {}),
        ("rms_norm", (X, (5,)), {}),
        ("group_norm", (X, 1), {}),
        ("instance_norm", (X, torch.ones(5), torch.ones(5), W[0]), {}),
        ("instance_norm", (X, None, None, W[0], None, False), {}),
    ):
        assert rules.FUNCTIONS[name](*args, **kwargs) is None


def test_the_rules_are_those_of_the_layers():
    use = rules.FUNCTIONS["linear"](X, weight=W)
    assert use is not None and use.rule is rules.linear and use.layer.weight is W and use.input is X


# -- random numbers ---------------------------------------------------------------------------


def masked(m: Net, x: Tensor) -> Tensor:
    """A mask that is made by hand."""
    y = m.body(x)
    return m.head(y * (torch.rand_like(y) < 0.5) + 0.1 * torch.randn(y.shape, dtype=y.dtype))


LINEAR = {"body": lambda: nn.Linear(6, 6), "head": lambda: nn.Linear(6, 3)}
RANDOM = {
    "dropout": (net(lambda m, x: m.head(F.dropout(m.body(x).tanh(), 0.5)), **LINEAR), features),
    "a mask of each": (net(masked, **LINEAR), features),
    "channels": (
        net(lambda m, x: m.head(F.dropout1d(m.body(x), 0.5).mean(1)), **LINEAR), sequences),
    "fused attention": (
        net(lambda m, x: m.head(F.scaled_dot_product_attention(*[m.body(x)] * 3, dropout_p=0.5)
            .mean(1)), **LINEAR), sequences),
    "attention": (
        net(lambda m, x: m.head(m.a(*[m.body(x)] * 3)[0].mean(1)), **LINEAR,
            a=lambda: nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)), sequences),
    "transformer": (
        net(lambda m, x: m.head(m.a(m.body(x)).mean(1)), **LINEAR,
            a=lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.5, batch_first=True)), sequences),
}  # fmt: skip


def plain(example: Example, module: nn.Module, batch: Any) -> Tensor:
    loss = example.loss(module, batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained(module))])


def of_torch_func(example: Example, module: nn.Module, batch: Any) -> Tensor:
    """(n, d), by ``torch.func.vmap`` of the same step."""
    params = dict(module.named_parameters())

    def loss(params: Any, record: Any) -> Tensor:
        record = {name: part.unsqueeze(0) for name, part in record.items()}
        with torch.nn.utils.stateless._reparametrize_module(module, params):
            return example.loss(module, record)

    per_record = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    found = per_record(params, batch)
    return torch.cat([part.flatten(1) for part in found.values()], 1)


@pytest.mark.parametrize("engine", ["records", *WHOLE])
@pytest.mark.parametrize("name", RANDOM)
def test_each_record_draws_its_own_numbers(engine, name):
    """Those of the plain batch, where all draw in one order; those of torch.func where not."""
    example = Example(*RANDOM[name])
    module, batch = made(example)
    if engine != "records" and name in ("attention", "transformer"):
        return  # refused: they have layers without a rule
    twin, seed = copy.deepcopy(module), 3
    torch.manual_seed(seed)
    if engine == "records":
        expected = of_torch_func(example, twin, batch).detach()
        assert len({round(float(norm), 9) for norm in expected.norm(dim=1)}) == N
        expected, of_each = expected.mean(0), expected.norm(dim=1)
    else:
        expected, of_each = plain(example, twin, batch), None
    with alone(engine, module) as passes:
        torch.manual_seed(seed)
        found = run(passes, example, module, batch)
        if of_each is not None:
            torch.testing.assert_close(found.norms(), of_each)
        total = found.weighted_sum(torch.ones(N, dtype=torch.float64)) / N
    torch.testing.assert_close(total, expected)


def test_two_records_that_are_equal_have_two_masks():
    example = Example(*RANDOM["dropout"])
    module, batch = made(example)
    batch = {name: part[:1].expand(N, *part.shape[1:]) for name, part in batch.items()}
    with alone("records", module) as passes:
        assert len(set(run(passes, example, module, batch).norms().tolist())) > 1


# -- precisions -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["records", *WHOLE, "one_by_one"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer block", "tied embedding", "embedding"])
def test_autocast_is_the_same_for_each_record(engine, name):
    example = EXAMPLES[name]
    module, batch = made(example)
    module.float()
    batch = {n: p.float() if p.is_floating_point() else p for n, p in batch.items()}

    def loss(module: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return example.loss(module, batch).float()

    lower = Example(example.make, example.batch, loss)
    expected = rows(lower, module, batch)
    with alone(engine, module) as passes:
        found = run(passes, lower, module, batch)
        torch.testing.assert_close(
            found.norms().float(), expected.norm(dim=1), rtol=2e-2, atol=1e-4
        )
        total = found.weighted_sum(torch.ones(N)).float()
    assert (total - expected.sum(0)).norm() <= 2e-2 * expected.sum(0).norm()
