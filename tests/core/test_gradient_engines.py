"""Gradient engines: the gradient of each record, against one record at a time in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn

from lightning_dp.clipping import bounded_sum
from lightning_dp.gradients import (
    AbstractGradientEngine,
    Bookkeeping,
    Functional,
    OpacusHooks,
    RawGradientGuard,
    UnsupportedModelError,
    attach_engine,
)

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

RECORDS = 5


class Recurrent(nn.Module):
    """Embedding, LSTM, last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = DPLSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = DPMultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        return self.head((x + self.mlp(x)).mean(1))


class Tied(nn.Module):
    """One weight matrix in two modules: input embedding and output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.middle(self.embedding(tokens).mean(1))))


class Reused(nn.Module):
    """One layer called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))[:, :3]


class Gain(nn.Module):
    """A layer without a rule in Opacus: vector and scalar parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 6))
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


def features() -> Tensor:
    return torch.randn(RECORDS, 6)


def images() -> Tensor:
    return torch.randn(RECORDS, 2, 8, 8)


def tokens() -> Tensor:
    return torch.randint(7, (RECORDS, 6))


def frozen_layer() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    net[2].requires_grad_(False)
    return net


def frozen_bias() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net[0].bias.requires_grad_(False)
    return net


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


@dataclass(frozen=True)
class Case:
    """A model, and what a batch for it looks like."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), features),
    "cnn_group_norm": Case(convolutional, images),
    "layer_norm": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
        features,
    ),
    "embedding_lstm": Case(Recurrent, tokens),
    "transformer_block": Case(TransformerBlock, tokens),
    "tied_weights": Case(Tied, tokens),
    "layer_used_twice": Case(Reused, features),
    "frozen_layer": Case(frozen_layer, features),
    "frozen_bias": Case(frozen_bias, features),
    "direct_parameters": Case(
        lambda: nn.Sequential(Gain(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), features
    ),
}
ENGINES: dict[str, Callable[[], AbstractGradientEngine]] = {
    "hooks": OpacusHooks,
    "bookkeeping": Bookkeeping,
    "functional": Functional,
}
LAYERS_OF_OPACUS = {"embedding_lstm", "transformer_block"}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[AbstractGradientEngine]:
    engine = ENGINES[request.param]()
    yield engine
    engine.detach()


@pytest.fixture
def hooks() -> Iterator[AbstractGradientEngine]:
    engine = OpacusHooks()
    yield engine
    engine.detach()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, engine: AbstractGradientEngine) -> Case:
    if isinstance(engine, Bookkeeping) and request.param in LAYERS_OF_OPACUS:
        pytest.skip("is left to Opacus' hooks")
    torch.manual_seed(0)
    return CASES[request.param]


def trained(module: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(param for param in module.parameters() if param.requires_grad)


def mean_loss(output: Tensor) -> Tensor:
    """A different target for each record, so that no two gradients are alike."""
    target = torch.arange(len(output)) % output.shape[1]
    return nn.functional.cross_entropy(output, target)


def one_by_one(module: nn.Module, batch: Tensor) -> list[Tensor]:
    """The oracle: the flat gradient of each record's own loss, plain autograd in float64."""
    module = copy.deepcopy(module).double()
    batch = batch.double() if batch.is_floating_point() else batch
    gradients = []
    for position in range(len(batch)):
        output = module(batch[position : position + 1])
        target = torch.tensor([position % output.shape[1]])
        loss = nn.functional.cross_entropy(output, target)
        parts = torch.autograd.grad(loss, trained(module))
        gradients.append(torch.cat([part.reshape(-1) for part in parts]))
    return gradients


def clipped(gradients: list[Tensor], clip_norm: float) -> Tensor:
    return sum((g * min(1.0, clip_norm / float(g.norm())) for g in gradients), torch.tensor(0.0))


def run(
    engine: AbstractGradientEngine, module: nn.Module, batch: Tensor, divide_by: float = 1.0
) -> Any:
    """One watched forward and backward pass."""
    touched = back(engine, module, mean_loss(module(batch)) / divide_by)
    return engine.take(divide_by, touched)


def back(
    engine: AbstractGradientEngine, module: nn.Module, loss: Tensor
) -> dict[str, nn.Parameter]:
    """The backward pass as the engine wants it; the parameters that got a gradient."""
    if engine.runs_backward:
        engine.backward(loss)
        return {}
    loss.backward()
    touched = {n: p for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return touched


# -- values --------------------------------------------------------------------------------------


def test_clipped_sums_equal_a_loop_over_records(engine, case):
    module, batch = case.make(), case.batch()
    expected = one_by_one(module, batch)
    clip_norm = float(torch.stack([g.norm() for g in expected]).median())  # clips some, not all
    engine.attach(module, trained(module))

    gradients = run(engine, module, batch)

    assert gradients.count == RECORDS
    norms = torch.stack([g.norm() for g in expected])
    torch.testing.assert_close(gradients.norms(), norms, rtol=1e-5, atol=0)
    total = bounded_sum(gradients, clip_norm).value.double()
    error = (total - clipped(expected, clip_norm)).norm() / clipped(expected, clip_norm).norm()
    assert error <= 1e-5


def test_a_restriction_to_coordinates_comes_before_the_clipping(engine, case):
    module, batch = case.make(), case.batch()
    rows = one_by_one(module, batch)
    coordinates = torch.arange(len(rows[0]))[2::3]
    expected = [row[coordinates] for row in rows]
    clip_norm = float(torch.stack([g.norm() for g in expected]).median())
    engine.attach(module, trained(module))

    gradients = run(engine, module, batch, divide_by=4.0).restrict(coordinates)

    total = bounded_sum(gradients, clip_norm)
    wanted = clipped(expected, clip_norm)
    assert gradients.count == RECORDS and total.value.shape == coordinates.shape
    assert (total.value.double() - wanted).norm() <= 1e-5 * wanted.norm()


def test_the_division_of_the_loss_is_undone(engine, case):
    module, batch = case.make(), case.batch()
    expected = clipped(one_by_one(module, batch), 0.1)
    engine.attach(module, trained(module))

    total = bounded_sum(run(engine, module, batch, divide_by=4.0), 0.1).value.double()

    assert (total - expected).norm() / expected.norm() <= 1e-5


def test_a_second_batch_of_another_size_is_not_mixed_with_the_first(engine, case):
    module, batch = case.make(), case.batch()
    expected = clipped(one_by_one(module, batch[:2]), 0.1)
    engine.attach(module, trained(module))
    run(engine, module, batch)

    gradients = run(engine, module, batch[:2])

    assert gradients.count == 2
    total = bounded_sum(gradients, 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5


def test_the_loss_is_the_one_of_an_unwatched_model(engine, case):
    module, batch = case.make(), case.batch()
    before = mean_loss(module(batch)).item()
    engine.attach(module, trained(module))

    assert mean_loss(module(batch)).item() == before


def test_passes_without_gradients_do_not_count(engine, case):
    """Validation, metrics and predictions in the middle of training."""
    module, batch = case.make(), case.batch()
    engine.attach(module, trained(module))
    with torch.no_grad():
        module(batch)

    assert run(engine, module, batch[:3]).count == 3


def test_a_parameter_that_was_not_used_has_zeros_in_its_place(engine):
    torch.manual_seed(0)
    module = nn.ModuleDict({"unused": nn.Linear(2, 2), "used": nn.Linear(6, 3)})
    batch = features()
    expected = one_by_one(module["used"], batch)
    engine.attach(module, trained(module))
    touched = back(engine, module, mean_loss(module["used"](batch)))

    gradients = engine.take(1.0, touched)

    total = bounded_sum(gradients, 0.2).value.double()
    assert torch.equal(total[:6], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(total[6:], clipped(expected, 0.2), rtol=1e-5, atol=1e-7)


def test_a_record_that_is_not_finite_does_not_disturb_the_others(engine):
    torch.manual_seed(0)
    module, batch = CASES["mlp"].make(), features()
    expected = one_by_one(module, batch)
    del expected[2]
    batch[2] = float("nan")
    engine.attach(module, trained(module))

    total = bounded_sum(run(engine, module, batch), 0.1).value.double()

    # The record's loss is NaN, and so is the mean loss; the gradients of the others are not.
    torch.testing.assert_close(total, clipped(expected, 0.1), rtol=1e-5, atol=1e-7)


# -- what is left on the model -------------------------------------------------------------------


def anatomy(module: nn.Module) -> dict[str, Any]:
    """Everything an engine could leave on a model."""
    found: dict[str, Any] = {"state_dict": list(module.state_dict())}
    for name, part in module.named_modules():
        found[f"{name}: type"] = type(part)
        found[f"{name}: vars"] = sorted(vars(part))
        for hooks in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        ):
            found[f"{name}: {hooks}"] = len(getattr(part, hooks))
    for name, param in module.named_parameters():
        found[f"{name}: attributes"] = sorted(set(dir(param)) - {"grad"})
        found[f"{name}: hooks"] = len(param._backward_hooks or {})
        found[f"{name}: requires_grad"] = param.requires_grad
    return found


def test_detach_leaves_the_model_as_it_was(engine, case):
    module = case.make()
    before = anatomy(module)
    engine.attach(module, trained(module))
    run(engine, module, case.batch())

    engine.detach()
    engine.detach()  # may be called twice

    assert anatomy(module) == before


def test_attach_changes_neither_type_nor_state_dict(engine, case):
    module = case.make()
    kind, keys = type(module), list(module.state_dict())

    engine.attach(module, trained(module))

    assert type(module) is kind
    assert list(module.state_dict()) == keys


def test_detach_after_an_exception_in_the_middle_leaves_the_model_as_it_was(engine, case):
    module, batch = case.make(), case.batch()
    before = anatomy(module)
    engine.attach(module, trained(module))
    output = module(batch)  # the forward pass is under way ...
    with pytest.raises(ZeroDivisionError):
        mean_loss(output) / (1 // 0)  # ... and user code fails

    engine.detach()

    assert anatomy(module) == before


def test_a_model_can_be_attached_again(engine, case):
    module, batch = case.make(), case.batch()
    for _ in range(2):
        engine.attach(module, trained(module))
        mean_loss(module(batch))  # ends with a forward pass that is never back-propagated
        engine.detach()
    engine.attach(module, trained(module))

    assert run(engine, module, batch).count == RECORDS


def test_attaching_twice_replaces_the_first_watch(engine):
    module = CASES["mlp"].make()
    engine.attach(module, trained(module))
    engine.attach(module, trained(module))

    assert run(engine, module, features()).count == RECORDS


def test_a_dropped_forward_pass_is_not_mixed_with_the_next_batch(engine, case):
    """training_step may return None."""
    module, batch = case.make(), case.batch()
    before = anatomy(module)
    expected = clipped(one_by_one(module, batch[:3]), 0.1)
    engine.attach(module, trained(module))
    mean_loss(module(batch))
    engine.drop()

    total = bounded_sum(run(engine, module, batch[:3]), 0.1).value.double()

    assert (total - expected).norm() / expected.norm() <= 1e-5
    engine.detach()
    assert anatomy(module) == before


class NotCopyable(nn.Module):
    """Opacus copies a layer it has no rule for; this one cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.cached = self.gain * 2  # not a leaf, so deepcopy refuses

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), WithBuffer()),
        lambda: nn.Sequential(nn.Linear(6, 6), NotCopyable()),
    ],
    ids=["lstm", "buffer", "not_copyable"],
)
def test_an_attach_that_raises_leaves_the_model_as_it_was(engine, make):
    module = make()
    if isinstance(engine, Bookkeeping) and isinstance(module[1], NotCopyable):
        pytest.skip("nothing is copied")
    before = anatomy(module)

    with pytest.raises(UnsupportedModelError):
        engine.attach(module, trained(module))

    assert anatomy(module) == before
    engine.detach()
    assert anatomy(module) == before


# -- refusals ------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    """A trainable layer with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.weight


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LSTM(4, 3), r"1 \(LSTM\).*opacus\.layers\.DPLSTM"),
        (nn.GRU(4, 3), r"1 \(GRU\).*DPGRU"),
        (nn.MultiheadAttention(4, 2), r"1 \(MultiheadAttention\).*DPMultiheadAttention"),
        (nn.BatchNorm1d(4), r"1 \(BatchNorm1d\).*GroupNorm"),
        (nn.BatchNorm2d(4), r"1 \(BatchNorm2d\).*GroupNorm"),
        (WithBuffer(), r"buffers.*Freeze the layer, replace it"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_mix_records_are_refused_with_their_name_and_the_cure(layer, message):
    module = nn.Sequential(nn.Linear(6, 4), layer)
    with pytest.raises(UnsupportedModelError, match=message):
        OpacusHooks().attach(module, trained(module))


def test_a_frozen_layer_of_an_unsupported_kind_is_allowed(engine):
    module = nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 3).requires_grad_(False))
    engine.attach(module, trained(module))


def test_a_forward_pass_that_was_not_back_propagated_is_refused(hooks):
    module = CASES["mlp"].make()
    hooks.attach(module, trained(module))
    module(features())  # its gradient would be paired with the wrong records

    with pytest.raises(RuntimeError, match=r"was not back-propagated \(layers \['0', '2'\]\)"):
        run(hooks, module, features())


def test_bookkeeping_pairs_forward_and_backward_passes_by_the_graph():
    module, batch = CASES["mlp"].make(), features()
    engine = Bookkeeping()
    engine.attach(module, trained(module))
    expected = clipped(one_by_one(module, batch), 0.1)
    loss = mean_loss(module(batch))
    module(features())  # not part of the loss

    engine.backward(loss)

    total = bounded_sum(engine.take(1.0, {}), 0.1).value.double()
    assert (total - expected).norm() / expected.norm() <= 1e-5


def test_two_backward_passes_for_one_batch_are_refused(hooks):
    module = CASES["mlp"].make()
    hooks.attach(module, trained(module))
    mean_loss(module(features())).backward()

    with pytest.raises(RuntimeError, match="Two backward passes ran for one batch"):
        run(hooks, module, features())


class OutsideItsModule(nn.Module):
    """A parameter that is used while its owner's forward is not running."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def loss(self, x: Tensor) -> Tensor:
        return mean_loss(self.net(x) * self.temperature)


def test_a_parameter_used_outside_its_module_is_refused_by_name(engine):
    module = OutsideItsModule()
    engine.attach(module, trained(module))
    loss = module.loss(features())

    with pytest.raises(UnsupportedModelError, match=r"'temperature'.* no gradient per record"):
        engine.take(1.0, back(engine, module, loss))


def test_a_trainable_weight_used_through_a_function_is_refused_by_name(engine):
    """F.linear(x, layer.weight) goes past the hooks of the layer."""
    module = CASES["mlp"].make()
    engine.attach(module, trained(module))
    hidden = torch.tanh(nn.functional.linear(features(), module[0].weight))
    loss = mean_loss(module[2](hidden))

    with pytest.raises(UnsupportedModelError, match=r"\['0.weight'\]"):
        engine.take(1.0, back(engine, module, loss))


def test_a_layer_that_sees_more_rows_than_records_is_refused(engine):
    """Folding time into the batch makes one record many rows."""
    module = nn.ModuleList([nn.Linear(6, 4), nn.Linear(2, 3)])
    engine.attach(module, trained(module))
    hidden = module[0](features())
    loss = mean_loss(module[1](hidden.reshape(-1, 2)))

    with pytest.raises(UnsupportedModelError, match="first dimension"):
        engine.take(1.0, back(engine, module, loss))


def test_an_engine_is_made_by_its_name():
    module = CASES["mlp"].make()
    for name, kind in {
        "hooks": OpacusHooks,
        "bookkeeping": Bookkeeping,
        "auto": Bookkeeping,
    }.items():
        engine, description = attach_engine(name, module, trained(module))
        assert isinstance(engine, kind) and description == kind.name
        engine.detach()
    with pytest.raises(ValueError, match="engine='ghost' is not one of"):
        attach_engine("ghost", module, trained(module))


@pytest.mark.parametrize("name", sorted(LAYERS_OF_OPACUS))
def test_auto_falls_back_with_a_reason(name):
    module = CASES[name].make()
    engine, description = attach_engine("auto", module, trained(module))
    assert isinstance(engine, OpacusHooks)
    assert description.startswith("hooks, since book-keeping does not cover this model: ")
    engine.detach()
    with pytest.raises(UnsupportedModelError, match="Use engine='hooks'"):
        attach_engine("bookkeeping", module, trained(module))


# -- raw gradients -------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> tuple[nn.Module, torch.optim.Optimizer, RawGradientGuard]:
    torch.manual_seed(0)
    module = CASES["mlp"].make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, RawGradientGuard(module.named_parameters(), optimizer)


def test_raw_gradients_are_gone_after_backward(guarded):
    module, _, guard = guarded

    mean_loss(module(features())).backward()

    assert all(param.grad is None for param in module.parameters())
    assert guard.touched() == dict(module.named_parameters())
    assert guard.touched() == {}


def test_an_optimizer_step_that_was_not_allowed_raises_and_one_is_allowed_once(guarded):
    module, optimizer, guard = guarded
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    guard.allow_step()
    optimizer.step()

    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) ran with gradients that were not"):
        optimizer.step()


def test_a_removed_guard_leaves_gradients_and_steps_alone(guarded):
    module, optimizer, guard = guarded
    guard.remove()

    mean_loss(module(features())).backward()
    optimizer.step()

    assert all(param.grad is not None for param in module.parameters())


def test_frozen_parameters_are_not_guarded():
    module = frozen_layer()
    optimizer = torch.optim.SGD(trained(module), lr=0.1)
    guard = RawGradientGuard(module.named_parameters(), optimizer)

    mean_loss(module(features())).backward()

    assert set(guard.touched()) == {"0.weight", "0.bias", "4.weight", "4.bias"}
