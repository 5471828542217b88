"""Checks before a charge: the server's module, model and query are those that were agreed on.

All of it is public.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_dp._refusals import text_of
from lightning_dp.boundary import Query
from lightning_dp.estimators.base import AbstractEstimator, share_of_noise
from lightning_dp.federated.messages import MessageError
from lightning_dp.federated.protocol import Records
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.noise_plan import NoisePlan

__all__ = [
    "check_engine",
    "check_fingerprint",
    "check_point",
    "check_query",
    "fingerprint",
    "is_of_ordinary_size",
]


# Clip norms, and clip norm times noise multiplier. Squares of smaller or larger float32 numbers
# vanish or overflow, and a norm that is found to be 0 or infinite bounds nothing.
_SMALLEST, _LARGEST = 1e-15, 1e15
_TOLERANCE = 1e-6  # of the server's arithmetic
_ROUNDING = 1 - 1e-12

_Described: TypeAlias = list[tuple[str, str]]  # names, and what is compared of each

_log = logging.getLogger("lightning_dp.federated")
_SHOWN = 3
_CURE = (
    "Build the same module everywhere: load its frozen weights from one file, or seed its "
    "construction with torch.manual_seed."
)


def check_point(records: Records, point: Tensor, name: str = "The model") -> None:
    """Refuse what cannot be the trained parameters of the client's own model.

    Raises:
        MessageError: for another dtype or size, or numbers that are not finite in the model.
    """
    if not point.dtype.is_floating_point:
        raise MessageError(f"{name} is of {point.dtype}, not of floating-point numbers.")
    if not len(point) or not bool(torch.isfinite(point).all()):
        raise MessageError(f"{name} is not finite.")
    check = getattr(records, "check_point", None)  # records without a module have no more to say
    if check is None:
        return
    try:
        check(point)
    except ValueError as error:
        raise MessageError(f"{name}: {text_of(error)}") from None


def check_query(records: Records, plan: NoisePlan, query: Query, step: int, part: int) -> None:
    """Refuse a query that is not the plan's at this step.

    The client asks its own estimator about the points that it was sent: terms, weights,
    coordinates, clip norm and noise must be those.

    Raises:
        MessageError: naming what differs.
    """
    for number, term in enumerate(query.terms):
        assert term.point is not None  # messages write all points out
        check_point(records, term.point, f"point{number}")
        if term.direction is not None:
            _check_direction(records, term.direction, term.point, f"direction{number}")
    _check_alike(query)
    z = plan.noise_multiplier(step)
    least = share_of_noise(z, plan.estimator.traits.queries_per_step)
    _check_noise(query, step, least)
    if z > 0 and not is_of_ordinary_size(query):
        raise MessageError(
            f"clip_norm={query.clip_norm} with noise_multiplier={query.noise_multiplier} at step "
            f"{step}: records cannot be clipped to numbers that small or large."
        )
    state = plan.estimator.recall(query, step, part)
    if state is None:
        _check_weights(query, step)
        return
    try:
        expected = plan.estimator.ask(state, [query.terms[0].point], step, z)  # type: ignore[list-item]
    except (RuntimeError, ValueError, IndexError) as error:
        raise MessageError(f"The query of step {step} cannot be asked: {text_of(error)}") from None
    if expected is None:
        raise MessageError(
            f"At step {step} the plan asks nothing about these points, since they are the same."
        )
    _check_same(query, expected, step)


def is_of_ordinary_size(query: Query) -> bool:
    """Tell whether clipping and noising are arithmetic far from the ends of float32."""
    noise = query.clip_norm * query.noise_multiplier
    return _SMALLEST <= query.clip_norm <= _LARGEST and _SMALLEST <= noise <= _LARGEST


def check_engine(records: Records, estimator: AbstractEstimator) -> None:
    """Raise UnsupportedModelError if the records' model cannot answer the estimator's queries."""
    if estimator.traits.uses_hessian and not getattr(records, "has_products", True):
        raise UnsupportedModelError(
            f"{type(estimator).__name__} needs Hessian-vector products, which only the "
            "'layers' engine computes. Use LocalRecords(engine='layers') to see what it "
            "does not support in this model.",
            topic="hessian-products",
        )


def _check_direction(records: Records, direction: Tensor, point: Tensor, name: str) -> None:
    """Check a direction: noised answers, whose dtype may be wider than the model's."""
    if direction.dtype not in (point.dtype, torch.promote_types(point.dtype, torch.float32)):
        raise MessageError(f"{name} is of {direction.dtype}, and the model of {point.dtype}.")
    check_point(records, direction.to(point.dtype), name)


def _check_alike(query: Query) -> None:
    """Check that all vectors of a query belong to one model, with its coordinates."""
    first = query.terms[0].point
    assert first is not None
    vectors = [v for term in query.terms for v in (term.point, term.direction) if v is not None]
    if any(len(v) != len(first) for v in vectors):
        raise MessageError(f"The vectors of the query have {[len(v) for v in vectors]} numbers.")
    if len({term.point.dtype for term in query.terms if term.point is not None}) > 1:
        raise MessageError("The points of the query are of several dtypes.")
    if query.coordinates is not None and not int(query.coordinates[-1]) < len(first):
        raise MessageError(
            f"Coordinate {int(query.coordinates[-1])} of {len(first)} was asked for."
        )


def _check_noise(query: Query, step: int, least: float) -> None:
    if not query.noise_multiplier >= least * _ROUNDING:
        raise MessageError(
            f"The server asks for noise_multiplier={query.noise_multiplier} at step {step}, below "
            f"the planned {least}. Give the server this client's plan."
        )
    if not query.noise_multiplier <= least * (1 + _TOLERANCE):
        raise MessageError(
            f"The server asks for noise_multiplier={query.noise_multiplier} at step {step}, and "
            f"the plan has {least}. Give the server this client's plan."
        )


def _check_weights(query: Query, step: int) -> None:
    for term in query.terms:
        if term.weight and not _SMALLEST <= abs(term.weight) <= _LARGEST:
            raise MessageError(f"A term of step {step} has the weight {term.weight}.")


def _check_same(query: Query, expected: Query, step: int) -> None:
    """Raise MessageError, naming what differs, unless the server asks what the client would."""
    here = query.terms[0].point
    asked = [(term.weight, term.point, term.direction) for term in query.terms]
    planned = [
        (term.weight, here if term.point is None else term.point, term.direction)
        for term in expected.terms
    ]
    cure = "Give the server this client's plan."
    weights, own = ([weight for weight, _, _ in terms] for terms in (asked, planned))
    if weights != own:
        raise MessageError(
            f"The server asks for terms of weights {weights} at step {step}, and the plan has "
            f"{own}. {cure}"
        )
    for number, (ours, theirs) in enumerate(zip(planned, asked, strict=True)):
        for name, a, b in (("point", ours[1], theirs[1]), ("direction", ours[2], theirs[2])):
            if not _equal(a, b):
                raise MessageError(f"{name}{number} of step {step} is not the plan's. {cure}")
    if not _equal(expected.coordinates, query.coordinates):
        raise MessageError(f"The coordinates of step {step} are not the plan's. {cure}")
    if not math.isclose(query.clip_norm, expected.clip_norm, rel_tol=_TOLERANCE):
        raise MessageError(
            f"The server asks for clip_norm={query.clip_norm} at step {step}, and the plan has "
            f"{expected.clip_norm}. {cure}"
        )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


# -- modules -----------------------------------------------------------------------------------


def fingerprint(module: nn.Module) -> str:
    """Describe a module: names, shapes and dtypes of what is trained, check sums of what is not."""
    params = list(module.named_parameters())
    described = {
        "trained": [[name, _kind(p)] for name, p in params if p.requires_grad],
        "frozen": [[name, _check_sum(p)] for name, p in params if not p.requires_grad],
        "buffers": [[name, _check_sum(buffer)] for name, buffer in module.named_buffers()],
    }
    return json.dumps(described)


def check_fingerprint(of_the_server: str, here: str) -> None:
    """Refuse a server whose module is another one.

    Buffers that differ are said in the log only: some are computed, and machines round.

    Raises:
        MessageError: naming parameters that differ.
    """
    theirs, ours = _read(of_the_server), _read(here)
    if other := _other_order(theirs["trained"], ours["trained"]):
        raise MessageError(f"The trained parameters are not the server's: {other}. {_CURE}")
    if other := _differing(theirs["frozen"], ours["frozen"]):
        raise MessageError(
            f"The frozen parameters {other} are not those of the server's module, so what it trains "
            f"means something else here. {_CURE}"
        )
    if other := _differing(theirs["buffers"], ours["buffers"]):
        _log.warning("The buffers %s are not those of the server's module. %s", other, _CURE)


def _read(text: str) -> dict[str, _Described]:
    try:
        found: Any = json.loads(text)
        return {
            part: [(str(name), str(value)) for name, value in found[part]]
            for part in ("trained", "frozen", "buffers")
        }
    except (ValueError, TypeError, KeyError):
        raise MessageError("The server's description of its module cannot be read.") from None


def _other_order(theirs: _Described, ours: _Described) -> str:
    """Return where two lists of parameters differ in kind or order; other names are no matter."""
    if len(theirs) != len(ours):
        return f"{len(ours)} tensors, and {len(theirs)} at the server"
    is_permuted = sorted(name for name, _ in theirs) == sorted(name for name, _ in ours)
    for (name, kind), (there, kind_there) in zip(ours, theirs, strict=True):
        if kind != kind_there or (is_permuted and name != there):
            return f"{name} ({kind}), where the server has {there} ({kind_there})"
    return ""


def _differing(theirs: _Described, ours: _Described) -> str:
    here, there = dict(ours), dict(theirs)
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _check_sum(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{_kind(tensor)} {zlib.crc32(values.numpy().tobytes()):08x}"
