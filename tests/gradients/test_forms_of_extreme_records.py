"""No record adds more than its bound, however large or small what its gradient is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import parameter_sum
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.bilinear import (
    AbstractForm,
    Convolution,
    Lookup,
    OuterProduct,
    Rows,
    Scale,
    Use,
)
from lightning_dp.gradients.parameter_sum import (
    BookkeptGradients,
    MaterialisedGradients,
    ParameterGradients,
)
from tests.gradients.test_contract import alone

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:There is a performance drop"
)

POWERS = range(-30, 31, 10)
ONES = ((1, 1), (1, 1), (1, 1), 1)


@dataclass(frozen=True)
class Kind:
    """A form, the shapes of a record's v and u, and the shape of the parameter."""

    form: AbstractForm
    v: tuple[int, ...]
    u: tuple[int, ...]
    shape: tuple[int, ...]

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Records with every pair of powers of ten in v and u, and the norms of their gradients."""
        pairs = torch.tensor([(a, b) for a in POWERS for b in POWERS if abs(a + b) <= 24])
        v, u = (
            torch.randn(len(pairs), *shape, dtype=torch.float64)
            * (10.0 ** pairs[:, i].double()).view(-1, *[1] * len(shape))
            for i, shape in enumerate((self.v, self.u))
        )
        is_lookup = isinstance(self.form, Lookup)
        v = torch.randint(5, v.shape) if is_lookup else v
        norms = len(pairs) * self.form.rows(v, u).flatten(1).norm(dim=1)
        return v if is_lookup else v.float(), u.float(), norms

    def answer(self, v: Tensor, u: Tensor) -> BookkeptGradients:
        gradients = ParameterGradients([Use(self.form, v, u)], torch.Size(self.shape))
        return BookkeptGradients([torch.zeros(self.shape)], [gradients], 1.0)


KINDS = {
    "linear": Kind(OuterProduct(), (1, 5), (1, 4), (4, 5)),
    "short sequence": Kind(OuterProduct(), (3, 12), (3, 9), (9, 12)),
    "long sequence": Kind(OuterProduct(), (40, 5), (40, 4), (4, 5)),
    "small map": Kind(Convolution((20, 16, 3, 3), *ONES), (16, 3, 3), (20, 3, 3), (20, 16, 3, 3)),
    "large map": Kind(Convolution((4, 3, 3, 3), *ONES), (3, 9, 9), (4, 9, 9), (4, 3, 3, 3)),
    "lookup": Kind(Lookup(30), (6,), (6, 4), (30, 4)),
    "scale": Kind(Scale((1,)), (6, 5), (6, 5), (5,)),
    "rows": Kind(Rows(), (7, 5), (7, 5), (7, 5)),
}


class Alone(AbstractPerSampleGradients):
    """The part of one record of a batch in the sum."""

    def __init__(self, all_of_them: AbstractPerSampleGradients, record: int) -> None:
        self.all, self.record = all_of_them, record

    @property
    def count(self) -> int:
        return self.all.count

    def norms(self) -> Tensor:
        return self.all.norms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.all.weighted_sum(weights * (torch.arange(len(weights)) == self.record))

    def combine(self, *_: object) -> AbstractPerSampleGradients:
        raise NotImplementedError


def added(answer: Callable[[], AbstractPerSampleGradients], clip_norm: float) -> Tensor:
    """The norm of what each record adds, measured one by one, in units of the bound."""
    sums = [
        bounded_sum(Alone(answer(), record), clip_norm).value.double()
        for record in range(answer().count)
    ]
    return torch.stack(sums).norm(dim=1) / clip_norm


@pytest.fixture
def flushed() -> Iterator[None]:
    """Numbers below 1.2e-38 are read as zero."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("kept", [32 << 20, 0])
@pytest.mark.parametrize("name", KINDS)
def test_records_add_their_clipped_gradient_over_60_orders_of_magnitude(name, kept, monkeypatch):
    monkeypatch.setattr(parameter_sum, "_KEEP_BYTES", kept)
    torch.manual_seed(0)
    kind = KINDS[name]
    v, u, norms = kind.batch()
    held = norms < 1e32  # float32 cannot hold more
    for clip_norm in (1.0, 1e-30, 1e38):
        found = added(lambda: kind.answer(v, u), clip_norm)
        assert found.max() <= 1 + 1e-5
        expected = (norms / clip_norm).clamp(max=1)
        torch.testing.assert_close(found[held], expected[held], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_extremes_inside_of_one_record_stay_within_the_bound(name):
    """A position with a huge input and a tiny gradient, beside one with the opposite."""
    torch.manual_seed(0)
    kind, records = KINDS[name], 40
    v, u = (
        torch.randn(records, *shape)
        * 10.0 ** torch.randint(-15, 16, (records, *shape)).float()
        * 10.0 ** torch.randint(-15, 16, (records, *[1] * len(shape))).float()
        for shape in (kind.v, kind.u)
    )
    v = torch.randint(5, v.shape) if name == "lookup" else v
    assert added(lambda: kind.answer(v, u), 1.0).max() <= 1 + 1e-5


@pytest.mark.parametrize("name", ["linear", "short sequence", "small map", "scale"])
def test_numbers_at_the_end_of_float32_stay_within_the_bound(name, flushed):
    torch.manual_seed(0)
    kind = KINDS[name]
    for of_v, of_u in product([1e-40, 3e38], [1e-45, 1e-40, 1.0, 1e34, 3e38]):
        v = torch.full((8, *kind.v), of_v) * torch.randn(8, *kind.v).sign()
        u = torch.full((8, *kind.u), of_u)
        v[4:], u[4:] = torch.randn(4, *kind.v), torch.randn(4, *kind.u)  # they must not suffer
        torch.set_flush_denormal(True)
        total = bounded_sum(kind.answer(v, u), 1.0).value
        torch.set_flush_denormal(False)  # the sum reads what the norms did not
        found = added(lambda v=v, u=u: kind.answer(v, u), 1.0)
        assert torch.isfinite(total).all() and found.max() <= 1 + 1e-5
        torch.testing.assert_close(found[4:], torch.ones(4, dtype=torch.float64), rtol=1e-4, atol=0)


class Sequences(nn.Module):
    """Attention and recurrence, on sequences of three."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = DPMultiheadAttention(4, 2, batch_first=True)
        self.norm, self.lstm = nn.RMSNorm(4), DPLSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 3, 4)
        return self.lstm(self.norm(x + self.attention(x, x, x)[0]))[0].flatten(1)


NETS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Flatten()
    ),
    "sequences": Sequences,
    "own": lambda: nn.Sequential(nn.PReLU(), nn.Linear(12, 4)),
}
CASES = [(name, each) for name in NETS for each in ("records", "hooks")]
CASES += [(name, each) for name in ("layer norm", "convolution") for each in ("layers", "ghost")]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "engine"), CASES)
def test_no_engine_lets_a_record_of_any_size_pass_its_bound(name, engine, dtype):
    torch.manual_seed(0)
    net = NETS[name]().to(dtype)
    batch = torch.randn(8, 12)
    for i, power in enumerate([-30, -15, 5, 10, 17, 25, 30]):
        batch[i] = batch[i] * 10.0**power

    def loss(x: Tensor) -> Tensor:
        return 1e-3 * net(x.to(dtype)).float().square().sum(1).mean()

    with alone(engine, net) as passes:
        for clip_norm in (1.0, 1e-12):
            found = added(lambda: passes.run(loss, batch, len(batch)), clip_norm)
            assert found.max() <= 1 + 1e-5


@pytest.mark.parametrize("clip_norm", [1e-45, 9e-31, float("nan"), 0.0, -1.0])
def test_bounds_that_float32_sums_cannot_keep_are_refused(clip_norm):
    gradients = MaterialisedGradients([torch.zeros(2)], [torch.ones(3, 2)], 1.0)
    with pytest.raises(ValueError, match="clip_norm="):
        bounded_sum(gradients, clip_norm)
