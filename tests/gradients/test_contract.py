"""Every engine on every model: right to the last digits against a loop over records, or refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.boundary import BoundedSum, Query, Term
from lightning_dp.clipping import Automatic, Flat, PerGroup
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients import EngineChoice, RecordPasses, Replay, UnsupportedModelError
from lightning_dp.gradients.passes import at_point
from tests.gradients.models import EXAMPLES, Batch, Example

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing",
    "ignore:Using padding='same'",
    "ignore:There is a performance drop",
)

N = 4
ENGINES = ("records", "layers", "ghost", "hooks", "one_by_one")
APART = ("records", "one_by_one")


# -- the loop over records --------------------------------------------------------------------


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def double(part: Any) -> Any:
    return part.double() if _is_real(part) else part


def some(batch: Batch, places: Sequence[int]) -> Batch:
    """Return some records, by slices alone."""
    rows = {name: [part[i : i + 1] for i in places] for name, part in batch.items()}
    return {n: torch.cat(r) if isinstance(r[0], Tensor) else [*chain(*r)] for n, r in rows.items()}


def made(example: Example, n: int = N) -> tuple[nn.Module, Batch]:
    """The model and a batch in float64, the same at each call."""
    torch.manual_seed(0)
    module = example.make().double()
    return module, {name: double(part) for name, part in example.batch(n).items()}


def real(part: Tensor) -> Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def rows(example: Example, module: nn.Module, batch: Batch, along: Tensor | None = None) -> Tensor:
    """(n, d): each record's gradient, or its Hessian times a direction, by plain autograd."""
    params, found = trained(module), []
    for i in range(len(batch["y"])):
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            loss = example.loss(module, example.pack(some(batch, [i])))
            parts = torch.autograd.grad(
                loss, params, create_graph=along is not None, materialize_grads=True
            )
            if along is not None:
                pairs = zip(parts, unflatten(along, params), strict=True)
                products = [(real(p) * real(u)).sum() for p, u in pairs if p.requires_grad]
                parts = torch.autograd.grad(sum(products), params, materialize_grads=True)
        found.append(torch.cat([real(part.to_dense()).flatten() for part in parts]))
    return torch.stack(found).detach()


def near(module: nn.Module) -> Tensor:
    """A point 1e-4 away, where a difference of squares has lost eight digits."""
    here = flatten(trained(module)).detach()
    return here * (1 + 1e-4 * vector(module, 1))


def vector(module: nn.Module, seed: int) -> Tensor:
    """A random direction; without a part for padding, which has no gradient."""
    drawn, other = torch.Generator().manual_seed(seed), copy.deepcopy(module)
    for param in other.parameters():
        param.data = torch.randn(param.shape, generator=drawn, dtype=param.dtype)
    for part in other.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight.data[part.padding_idx] = 0
    return flatten(trained(other)).detach()


@cache
def known(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients here, those near, and the products along a direction."""
    example = EXAMPLES[name]
    module, batch = made(example)
    here = rows(example, module, batch)
    products = rows(example, module, batch, vector(module, 2)) if example.products else here
    with at_point(trained(module), near(module)):
        return here, rows(example, module, batch), products


def clipped(found: Tensor, clip_norm: float) -> Tensor:
    norms = found.norm(dim=1, keepdim=True)
    return (found * (clip_norm / norms).clamp(max=1)).sum(0)


# -- the engines ------------------------------------------------------------------------------


def only(engine: str) -> EngineChoice:
    """That engine, and no other of its ladder."""
    choice = EngineChoice(engine)
    choice.stay(())
    return choice


@contextmanager
def alone(engine: str, module: nn.Module) -> Iterator[RecordPasses]:
    """Passes under that engine, and no other of its ladder."""
    with RecordPasses(module, trained(module), only(engine)) as passes:
        yield passes


def replay(example: Example, module: nn.Module, batch: Batch, **options: Any) -> Replay:
    packed = example.pack(batch)
    return Replay(lambda b: example.loss(module, b), packed, len(batch["y"]), **options)


def ask(passes: RecordPasses, chunk: Replay, *terms: Term, rows: Tensor, **options: Any) -> None:
    """Assert that a query's answer is that of the loop's rows, with some of them clipped."""
    keep = options.get("coordinates")
    rows = rows if keep is None else rows[:, keep]
    clip_norm = float(rows.norm(dim=1).median())
    query = Query(terms, clip_norm=max(clip_norm, 1e-20), noise_multiplier=0.0, **options)
    answer = passes.answer(query, chunk)
    assert answer is not None
    expected = clipped(rows, query.clip_norm)
    assert (answer.value - expected).norm() <= 1e-8 * max(expected.norm(), 1e-9)


@pytest.mark.few(40)
@pytest.mark.parametrize("name", EXAMPLES)
def test_engines_are_right_about_a_model_or_refuse_it(name):
    """All but whole batches of which a record sees others: what refuses those are other checks."""
    for engine in APART if EXAMPLES[name].mixes else ENGINES:
        check_engine(engine, name)


def check_engine(engine: str, name: str) -> None:
    example = EXAMPLES[name]
    module, batch = made(example)
    state = copy.deepcopy(module.state_dict())
    if engine not in example.by.split():
        refusal = (
            (UnsupportedModelError, RuntimeError) if engine == "hooks" else UnsupportedModelError
        )
        with pytest.raises(refusal), alone(engine, module) as passes:
            passes.run(*_arguments(example, module, batch))
        return
    here, there, products = known(name)
    keep = torch.arange(here.shape[1])[1::3]
    with alone(engine, module) as passes:
        chunk = replay(example, module, batch)
        found = passes.run(*_arguments(example, module, batch))
        assert found is not None and found.count == N
        torch.testing.assert_close(found.norms(), here.norm(dim=1), rtol=1e-8, atol=1e-12)
        found.discard()
        ask(passes, chunk, Term(), rows=here)
        ask(passes, chunk, Term(-0.5), rows=-0.5 * here, coordinates=keep)
        check_rules(passes, chunk, here, module)
        difference = Term(), Term(-1.0, near(module))
        if engine == "ghost":
            with pytest.raises(UnsupportedModelError, match="compares each record's gradients"):
                ask(passes, chunk, *difference, rows=here)
        else:
            ask(passes, chunk, *difference, rows=here - there)
            ask(passes, chunk, *difference, rows=here - there, coordinates=keep)
        along = Term(0.3), Term(2.0, direction=vector(module, 2))
        if engine in example.products.split():
            ask(passes, chunk, *along, rows=0.3 * here + 2.0 * products)
        else:
            with pytest.raises(UnsupportedModelError):
                ask(passes, chunk, *along, rows=here)
    assert all(param.grad is None for param in module.parameters())
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    check_chunks_in_float32(engine, name)


def check_rules(passes: RecordPasses, chunk: Replay, rows: Tensor, module: nn.Module) -> None:
    """Assert that the sums of other clipping rules are those of the loop's rows."""
    sizes = [real(param).numel() for param in trained(module)]
    even = PerGroup({"0": 0.4, "1": 0.3} if len(sizes) > 1 else {"*": 0.5})
    groups = even.bind([str(i % 2) for i in range(len(sizes))])
    own = torch.tensor(groups.of_parameter).repeat_interleave(torch.tensor(sizes))
    factors = torch.zeros_like(rows)
    for k, norm in enumerate(even.groups.values()):
        lengths = (rows * (own == k)).norm(dim=1, keepdim=True)
        factors += (own == k) * (norm / lengths).clamp(max=1).nan_to_num(posinf=1.0)
    norms = rows.norm(dim=1, keepdim=True)
    try:
        for rule, expected in (
            (groups, rows * factors),
            (Automatic(0.1), rows * even.sensitivity / (norms + 0.1)),
        ):
            passes.clipping = rule
            answer = passes.answer(Query((Term(),), even.sensitivity, 0.0), chunk)
            assert answer is not None
            torch.testing.assert_close(answer.value, expected.sum(0), rtol=1e-7, atol=1e-9)
    finally:
        passes.clipping = Flat()


def _arguments(example: Example, module: nn.Module, batch: Batch) -> tuple[Any, Any, int]:
    chunk = replay(example, module, batch)
    return chunk.forward, chunk.batch, chunk.size


def check_chunks_in_float32(engine: str, name: str) -> None:
    """Assert that sums over chunks of any size add up, and that a record that is none counts zero."""
    example, here = EXAMPLES[name], known(name)[0]
    module, batch = made(example)
    module.float()
    batch = {n: p.float() if _is_real(p) else p for n, p in batch.items()}
    if _is_real(batch["x"]) and name != "positions, selected":
        batch["x"][1] = torch.nan
        here = here[[0, 2, 3]]
    clip_norm = float(here.norm(dim=1).median())
    query = Query((Term(),), clip_norm, 0.0)
    with alone(engine, module) as passes:
        total = BoundedSum.empty(query, trained(module))
        for places in ([0, 1, 2], [3]):
            total = passes.answer(query, replay(example, module, some(batch, places)), onto=total)
        assert passes.answer(query, Replay(None, batch, 0)) is None
    expected = clipped(here, clip_norm)
    assert (total.value.double() - expected).norm() <= 2e-5 * expected.norm()


def _is_real(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()
