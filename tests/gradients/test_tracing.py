"""Parameters that meet records in functions: each model beside one record at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients import UncoveredParameterError, UnsupportedModelError
from lightning_dp.gradients.tensor_roles import TensorRoles
from lightning_dp.gradients.tracing import FunctionTracer


class Tokens(nn.Module):
    """A class token, a table of positions, and as many times as records."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 3)), nn.Embedding(6, 3)
        self.mix, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :3] * x[:, :5, None]  # (n, 5, 3), and n is 5
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(torch.tanh(self.mix(x + self.places(torch.arange(6)))).mean(1))


class Queries(nn.Module):
    """A table that is repeated for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.keys = nn.Embedding(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.table.weight.unsqueeze(0).repeat(len(x), 1, 1)
        return (torch.tanh(queries) * self.keys(x)[:, None]).sum(2)


class Written(nn.Module):
    """Parameters are written into tensors of records."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1] = self.row[1]
        x += self.row
        return self.head(torch.tanh(x))


class Started(nn.Module):
    """A recurrent layer whose first state is trained."""

    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool) -> None:
        super().__init__()
        self.layer = kind(2, 3, batch_first=batch_first)
        self.start = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(-1, len(x), -1).contiguous()
        x = x.view(len(x), 3, 2)
        x = x if self.layer.batch_first else x.transpose(0, 1)
        is_lstm = isinstance(self.layer, nn.LSTM)
        output = self.layer(x, (state, state) if is_lstm else state)[0]
        return output[:, -1] if self.layer.batch_first else output[-1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "class token and places": Tokens,
    "queries": Queries,
    "written in place": Written,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 5)),
    "lstm": lambda: Started(nn.LSTM, batch_first=True),
    "lstm, time first": lambda: Started(nn.LSTM, batch_first=False),
    "gru": lambda: Started(nn.GRU, batch_first=True),
    "gru, time first": lambda: Started(nn.GRU, batch_first=False),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_record_at_a_time(layer_engine, name, oracle):
    torch.manual_seed(0)
    assert oracle.is_equal(layer_engine, MODELS[name](), oracle.features())


class Sigma(nn.Module):
    """A scale of the loss is trained with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.3))


LOSSES: dict[str, Callable[[Sigma, Tensor], Tensor]] = {
    "before the mean": lambda m, x: (m.net(x).square().sum(1) * m.log.exp() + m.log).mean(),
    "after the mean": lambda m, x: m.net(x).square().sum(1).mean() * m.log.exp() + m.log,
    "penalty": lambda m, x: m.net(x).square().mean() + m.net.weight.square().sum() + m.log**2,
    "tied": lambda m, x: (torch.tanh(m.net(x)) @ m.net.weight).square().mean() * m.log,
    "cross entropy": lambda m, x: F.cross_entropy(m.net(x) * m.log, x.argmax(1) % 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parameters_in_the_loss_have_each_records_share(layer_engine, name, oracle):
    torch.manual_seed(0)
    module, batch, loss_of = Sigma(), oracle.features(), LOSSES[name]
    params = oracle.trained(module)
    alone = [torch.autograd.grad(loss_of(module, x[None]), params) for x in batch]
    rows = torch.stack([torch.cat([each.flatten() for each in row]) for row in alone])
    layer_engine.attach(module, params)
    with layer_engine.following(batch, len(batch)):
        loss = loss_of(module, batch)
    layer_engine.backward(loss)
    found = layer_engine.take(1.0, {})
    norms = rows.double().norm(dim=1)
    torch.testing.assert_close(found.norms(), norms, rtol=1e-5, atol=0)
    total = found.weighted_sum(torch.ones(len(batch)))
    torch.testing.assert_close(total, rows.sum(0), rtol=1e-4, atol=1e-5)


def test_records_in_an_unknown_place_are_refused(layer_engine, oracle, monkeypatch):
    """Taken for constants, they would make of every record the whole batch."""
    monkeypatch.setattr(TensorRoles, "layout_of", lambda self, tensor: None)
    module = Queries()
    layer_engine.attach(module, oracle.trained(module))
    records = oracle.features()
    with pytest.raises(UnsupportedModelError, match="record by record") as raised:
        oracle.run(layer_engine, module, records)
    assert str(len(records)) not in str(raised.value)  # how many were drawn is private


def test_a_use_that_was_not_recorded_is_refused(layer_engine, oracle, monkeypatch):
    monkeypatch.setattr(FunctionTracer, "_call", lambda self, *given: None)
    monkeypatch.setattr(FunctionTracer, "_after", lambda self, *given: None)
    module = Written()
    layer_engine.attach(module, oracle.trained(module))
    with pytest.raises(UncoveredParameterError, match="row"):
        oracle.run(layer_engine, module, oracle.features())
