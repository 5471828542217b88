"""Gradients of the records of a case: through an engine, and by plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lightning_dp.boundary import Query, Term, bounded_sum
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.passes import RecordPasses, Replay
from zoo.case import Batch, Case, Training, row

__all__ = ["Found", "compare", "rung_of", "trained"]

SMALL = 0.1
"""A part of the gradient shorter than this share of the whole is measured against that share."""


ORDER = 1e-4
"""A sum with dropout that is further from the batch's had its masks in another order."""

STEP = 1e-6
SAME = 1e-3
"""The gradient of a batch that is further from the mean over its records couples them."""


@dataclass(frozen=True)
class Found:
    """The distance of an engine from plain autograd.

    Args:
        engine: that answered, in its own words.
        clipped: error of the clipped sum, against one record at a time; NaN where a step draws
            random numbers by itself, so that records alone draw others.
        total: error of the sum of all gradients, with dropout, against the batch's gradient; NaN
            where the two cannot be compared: the engine drew its masks in another order, or the
            loss of the batch is not the mean of the losses of its records.
    """

    engine: str
    clipped: float
    total: float

    @property
    def rung(self) -> str:
        """The name of the rung."""
        return rung_of(self.engine)

    @property
    def error(self) -> float:
        """The larger of both; NaN where nothing could be compared."""
        return max((e for e in (self.clipped, self.total) if e == e), default=float("nan"))


def compare(case: Case, engine: str = "auto", dropout: float = 0.1) -> Found:
    """Return the errors of an engine on a case.

    Raises:
        UnsupportedModelError: if it refuses the model.
    """
    total, name = _error_of_total(case, engine, dropout)
    if _is_random(case):
        return Found(name, float("nan"), total)
    clipped, is_coupled = _error_of_clipped(case, engine)
    return Found(name, clipped, float("nan") if is_coupled else total)


def rung_of(engine: str) -> str:
    """Return the name of a rung, the first word of its description."""
    return engine.split(maxsplit=1)[0].rstrip(",.:;")


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def _is_random(case: Case) -> bool:
    """Return whether the loss is random without dropout."""
    module, batch = case.training(), case.batch()
    buffers = [each.clone() for each in module.buffers()]
    losses = []
    for seed in (2, 3):
        _restore(module, buffers)
        torch.manual_seed(seed)
        losses.append(module.training_step(batch, 0))
    return not torch.equal(*losses)


@torch.no_grad()
def _restore(module: nn.Module, buffers: Sequence[Tensor]) -> None:
    for buffer, kept in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(kept)


def _error_of_clipped(case: Case, engine: str) -> tuple[float, bool]:
    """Return the error, and whether the loss of the batch couples its records."""
    module, batch = case.training(), case.batch()
    rows = _one_by_one(module, batch, case.n)
    whole = case.n * _gradient(module, batch)
    is_coupled = _distance(whole, rows.sum(0), trained(module)) > SAME
    expected, clip_norm = _clipped(rows)
    module = case.training()
    gradients, _ = _through(module, batch, case.n, engine)
    found = bounded_sum(gradients, clip_norm).value.double()
    return _distance(found, expected, trained(module)), is_coupled


def _error_of_total(case: Case, engine: str, dropout: float) -> tuple[float, str]:
    module, batch = case.training(dropout=dropout), case.batch()
    buffers = [each.clone() for each in module.buffers()]
    torch.manual_seed(4)
    expected = case.n * _gradient(module, batch)
    drawn = torch.get_rng_state()
    _restore(module, buffers)
    torch.manual_seed(4)
    gradients, name = _through(module, batch, case.n, engine)
    if name.startswith("one_by_one") or not torch.equal(torch.get_rng_state(), drawn):
        return float("nan"), name
    norms = gradients.norms()
    found = gradients.weighted_sum(torch.ones_like(norms)).double()
    error = _distance(found, expected, trained(module))
    if error > ORDER and name.startswith("records"):  # as many draws, for other places
        error = _error_of_slopes(case, engine, dropout)
    return error, name


def _error_of_slopes(case: Case, engine: str, dropout: float) -> float:
    """Return the error of the sum's slopes along random directions, in float64.

    Against differences of the engine's own loss, under one seed: whatever order its masks come in.
    NaN for a model that computes its loss in float32 whatever its parameters are.
    """
    module = case.training(dropout=dropout).double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch().items()}
    params, buffers = trained(module), [each.clone() for each in module.buffers()]
    query, errors = Query((Term(),), clip_norm=1.0, noise_multiplier=0.0), []
    with RecordPasses(module, params, engine) as passes:
        chunk = Replay(lambda b: module.training_step(b, 0), batch, case.n)

        def loss() -> Tensor:
            _restore(module, buffers)
            torch.manual_seed(4)
            return passes.forward(lambda b: module.training_step(b, 0), batch, case.n).detach()

        for _ in range(2):  # from its second pass on, a model may run on another rung or way
            _restore(module, buffers)
            torch.manual_seed(4)
            found = passes.gradients(query, chunk)
        if loss().dtype != torch.float64:
            return float("nan")
        assert found is not None
        slopes = found.weighted_sum(torch.ones_like(found.norms())).double() / case.n
        for seed in range(3):
            direction = torch.randn(
                len(slopes), generator=torch.Generator().manual_seed(seed)
            ).double()
            ends = []
            for step in (STEP, -STEP):
                kept = [param.detach().clone() for param in params]
                moved = unflatten(step * direction, params)
                with torch.no_grad():
                    for param, part in zip(params, moved, strict=True):
                        param += part
                ends.append(float(loss()))
                with torch.no_grad():
                    for param, value in zip(params, kept, strict=True):
                        param.copy_(value)
            slope = (ends[0] - ends[1]) / (2 * STEP)
            scale = float(slopes.norm())
            errors.append(abs(slope - float(slopes @ direction)) / scale)
    return max(errors)


def _gradient(module: Training, batch: Batch) -> Tensor:
    """Return it as ``backward`` leaves it: some layers write it there by themselves."""
    module.zero_grad()
    module.training_step(batch, 0).backward()
    params = trained(module)
    found = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in params])
    module.zero_grad()
    return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return one real vector in float64."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return parameters_to_vector([t.contiguous() for t in real]).double()


def _one_by_one(module: Training, batch: Batch, n: int) -> Tensor:
    """Return a row for each record."""
    buffers = [each.clone() for each in module.buffers()]
    rows = []
    for index in range(n):
        rows.append(_gradient(module, row(batch, index)))
        _restore(module, buffers)
    return torch.stack(rows)


def _clipped(rows: Tensor) -> tuple[Tensor, float]:
    """Return the clipped sum, and the clip norm: between the norms, so that some are clipped."""
    norms = rows.norm(dim=1)
    middle, n = norms.sort().values, len(rows)
    clip_norm = float((middle[n // 2 - 1] + middle[n // 2]) / 2)
    factors = (clip_norm / norms).clamp(max=1.0)
    return (rows * factors.unsqueeze(1)).sum(0), clip_norm


def _through(
    module: Training, batch: Batch, n: int, engine: str
) -> tuple[AbstractPerSampleGradients, str]:
    query = Query((Term(),), clip_norm=1.0, noise_multiplier=0.0)
    with RecordPasses(module, trained(module), engine) as passes:
        chunk = Replay(lambda records: module.training_step(records, 0), batch, n)
        found = passes.gradients(query, chunk)
        assert found is not None, "the step gave no gradient"
        return found, passes.description


def _distance(found: Tensor, expected: Tensor, params: Sequence[nn.Parameter]) -> float:
    """Return the largest relative error over the parameters."""
    whole, start, errors = float(expected.norm()), 0, []
    for param in params:
        size = param.numel() * (2 if param.is_complex() else 1)
        there, here = expected[start : start + size], found[start : start + size]
        errors.append(float((here - there).norm()) / max(float(there.norm()), SMALL * whole))
        start += size
    return max(errors)
