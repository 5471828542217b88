"""The rules of functions whose gradients per record are known without running them once more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_unflatten

from lightning_dp.gradients.bilinear import Folded, Rows, Use
from lightning_dp.gradients.function_call import FunctionCall, Given
from lightning_dp.gradients.layouts import Layout, name_of_function
from lightning_dp.gradients.matrices import Lookup, OuterProduct
from lightning_dp.gradients.parts import sum_to

__all__ = ["uses_by_rule"]

PartUses = list[tuple[Given, list[Use]]]

# (call, its arguments as given, the gradient of its output) -> each part with its uses by n records;
# None where the rule does not hold.
_Rule = Callable[[FunctionCall, list[Any], Tensor], PartUses | None]


def uses_by_rule(call: FunctionCall, gradient: Tensor) -> PartUses | None:
    """Return each part of a call with its uses; None if no rule is known of it.

    Args:
        call: has one output, which holds the records.
        gradient: of the output.
    """
    rule = _RULES.get(name_of_function(call.function))
    if rule is None or len(call.outputs) != 1 or call.layouts[0] is None:
        return None
    if any(each.total is not None for each in call.given):
        return None
    if gradient.is_complex() or any(each.tensor.is_complex() for each in call.given):
        return None  # gradients of products take conjugates there, and of real factors real parts
    given = {each.place: each for each in call.given}
    leaves = [given.get(place, leaf) for place, leaf in enumerate(call.leaves)]
    args, kwargs = tree_unflatten(leaves, call.spec)
    names = _parameters_of(call.function)
    if kwargs and names is None:
        return None
    arguments = list(args)
    for name in names[len(args) :] if names is not None and kwargs else ():
        arguments.append(kwargs.get(name))
    call.check_unchanged()
    return rule(call, arguments, gradient)


@cache
def _parameters_of(function: Callable[..., Any]) -> list[str] | None:
    if function is F.linear:
        return ["input", "weight", "bias"]
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def _place_of_rows(each: object) -> Layout | None:
    """Return where an argument holds the records, if not in its last dimension."""
    if not isinstance(each, Given) or each.layout is None:
        return None
    return each.layout if each.layout.dim < each.tensor.dim() - 1 else None


def _vectors(tensor: Tensor, layout: Layout, n: int) -> Tensor:
    """Return shape (rows, positions, features) of a tensor with features last."""
    rows = layout.rows_first(tensor, n)
    return rows.reshape(len(rows), -1, rows.shape[-1])


def _products(
    call: FunctionCall, given: Any, weight: Any, gradient: Tensor, *, is_transposed: bool
) -> tuple[Tensor, PartUses] | None:
    """Return u and the use of a matrix that features are multiplied with."""
    here, there = _place_of_rows(given), call.layouts[0]
    is_matrix = isinstance(weight, Given) and weight.layout is None and weight.tensor.dim() == 2
    if here is None or there is None or there.dim >= gradient.dim() - 1 or not is_matrix:
        return None
    v = _vectors(given.tensor.to(gradient.dtype), here, call.n)
    u = _vectors(gradient, there, call.n)
    if v.shape[:2] != u.shape[:2]:
        return None
    use = Use(OuterProduct(), v, u) if is_transposed else Use(OuterProduct(), u, v)
    return u, [(weight, _of_records(call, use, here))]


def _of_records(call: FunctionCall, use: Use, layout: Layout) -> list[Use]:
    if layout.rows == 1:
        return [use]
    # The rows of a record follow each other, since they were brought first (``rows_first``).
    return use.form.of_records(use, Folded(call.n, inner=layout.rows))


def _with_bias(
    call: FunctionCall, bias: Any, given: Given, u: Tensor, uses: PartUses
) -> PartUses | None:
    assert given.layout is not None
    if isinstance(bias, Given):
        if bias.layout is not None or bias.tensor.dim() != 1:
            return None
        uses = [*uses, (bias, _of_records(call, Rows.use(u.sum(1)), given.layout))]
    return [(each, use) for each, use in uses if each.part is not None]


def _linear(call: FunctionCall, args: list[Any], gradient: Tensor) -> PartUses | None:
    given, weight, *bias = args
    found = _products(call, given, weight, gradient, is_transposed=True)
    if found is None:
        return None
    return _with_bias(call, bias[0] if bias else None, given, *found)


def _addmm(call: FunctionCall, args: list[Any], gradient: Tensor) -> PartUses | None:
    if len(args) != 3:
        return None  # with factors
    bias, given, weight = args
    found = _products(call, given, weight, gradient, is_transposed=False)
    return None if found is None else _with_bias(call, bias, given, *found)


def _matmul(call: FunctionCall, args: list[Any], gradient: Tensor) -> PartUses | None:
    given, weight = args[:2]
    found = _products(call, given, weight, gradient, is_transposed=False)
    return None if found is None or len(args) > 2 else _with_bias(call, None, given, *found)


def _embedding(call: FunctionCall, args: list[Any], gradient: Tensor) -> PartUses | None:
    tokens, table, padding, *others = [*args, None, None]
    layout, there = getattr(tokens, "layout", None), call.layouts[0]
    if layout is None or there is None or table.part is None or any(others):
        return None
    v = layout.rows_first(tokens.tensor, call.n)
    v = v.reshape(len(v), -1)
    u = there.rows_first(gradient, call.n).reshape(*v.shape, -1)
    if padding is not None and padding >= 0:
        u = u.masked_fill((v == padding).unsqueeze(2), 0.0)
    use = Use(Lookup(len(table.tensor)), v, u)
    return [(table, _of_records(call, use, layout))]


def _entries(
    call: FunctionCall, args: list[Any], gradient: Tensor, factor: Tensor | None
) -> PartUses | None:
    """Return the use of the one part that meets records entry by entry."""
    layout = call.layouts[0]
    (part,) = call.parts or (None,)
    if len(args) != 2 or layout is None or part is None:
        return None
    place = layout.dim - (gradient.dim() - part.tensor.dim())
    if place >= 0 and part.tensor.shape[place] != 1:
        return None  # it may have entries for each record
    back = gradient if factor is None else gradient * factor.to(gradient.dtype)
    rows = sum_to(layout.records_first(back, call.n), part.tensor.shape)
    return [(part, [Rows.use(rows)])]


def _sum(call: FunctionCall, args: list[Any], gradient: Tensor) -> PartUses | None:
    return _entries(call, args, gradient, None) if len(call.parts) == 1 else None


def _product(call: FunctionCall, args: list[Any], gradient: Tensor) -> PartUses | None:
    others = [each for each in args if isinstance(each, Given) and each.part is None]
    if len(others) != 1 or len(call.parts) != 1:
        return None
    return _entries(call, args, gradient, others[0].tensor)


_RULES: Mapping[str, _Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    "embedding": _embedding,
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__"), _sum),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "mul_", "__imul__"), _product),
}
