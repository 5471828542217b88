"""Queries, sums and releases: what they refuse and promise, and that there is no way round them."""

from __future__ import annotations

import ast
import dataclasses
import math
from functools import cache
from pathlib import Path

import pytest
import torch

import lightning_dp
import lightning_dp.callbacks
from lightning_dp.boundary import BoundedSum, Pass, Query, Release, Term


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(ValueError, match=rf"Term\(weight={weight}\) must be a finite number"):
        Term(weight=weight)


def test_a_query_without_terms_is_refused():
    with pytest.raises(ValueError, match=r"Query\(terms=\(\)\) asks nothing"):
        Query((), 1.0, 1.0)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan])
def test_a_clip_norm_that_is_not_positive_is_refused(clip_norm):
    with pytest.raises(ValueError, match=rf"Query\(clip_norm={clip_norm}\) must be greater than 0"):
        Query((Term(),), clip_norm, 1.0)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf])
def test_a_noise_multiplier_that_means_nothing_is_refused(noise):
    with pytest.raises(
        ValueError, match=rf"Query\(noise_multiplier={noise}\) must be finite and at least 0"
    ):
        Query((Term(),), 1.0, noise)


def test_an_infinite_clip_norm_is_allowed_without_noise_only():
    assert Query((Term(),), math.inf, 0.0).clip_norm == math.inf
    with pytest.raises(ValueError, match=r"infinite clip norm bounds nothing.*0\.1"):
        Query((Term(),), math.inf, 0.1)


@pytest.mark.parametrize(
    ("coordinates", "message"),
    [
        (torch.tensor([2, 1]), "sorted, distinct"),
        (torch.tensor([1, 1]), "sorted, distinct"),
        (torch.tensor([-1, 1]), "not negative"),
        (torch.tensor([], dtype=torch.int64), "at least one"),
        (torch.tensor([1.0]), "int64"),
        (torch.tensor([[1]]), "vector"),
    ],
)
def test_coordinates_that_are_no_sorted_set_are_refused(coordinates, message):
    with pytest.raises(ValueError, match=message):
        Query((Term(),), 1.0, 1.0, coordinates)


def test_a_gradient_and_a_product_at_one_point_are_one_pass():
    point, one, other = torch.zeros(2), torch.ones(2), torch.ones(2)
    terms = (
        Term(2.0),
        Term(0.5, direction=one),
        Term(-1.0, point),
        Term(3.0),
        Term(1.5, point, other),
        Term(1.0, point, one),
        Term(0.25, direction=one),
    )
    found = Query(terms, 1.0, 1.0).passes
    assert [(each.gradient, each.product) for each in found] == [(5, 0.75), (-1, 1.5), (0, 1)]
    assert found[0].point is None
    assert found[1].point is found[2].point is point
    assert found[0].direction is found[2].direction is one
    assert found[1].direction is other


def test_a_query_for_the_gradient_here_needs_no_further_pass():
    assert not Query((Term(), Term(2.0)), 1.0, 1.0).runs_again
    assert Query((Term(), Term(2.0)), 1.0, 1.0).passes == (Pass(None, None, 3.0, 0.0),)
    assert Query((Term(), Term(1.0, torch.zeros(1))), 1.0, 1.0).runs_again
    assert Query((Term(direction=torch.zeros(1)),), 1.0, 1.0).runs_again


@pytest.mark.parametrize("kind", [Term, Query, BoundedSum, Release])
def test_the_types_of_the_privacy_boundary_are_frozen(kind):
    assert kind.__dataclass_params__.frozen
    values = {
        Term: Term(),
        Query: Query((Term(),), 1.0, 1.0),
        BoundedSum: BoundedSum(torch.zeros(1), 1.0),
        Release: Release(torch.zeros(1), 1.0),
    }
    for name in (f.name for f in dataclasses.fields(kind)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(values[kind], name, 0)


def test_sums_over_chunks_add_up_and_keep_their_bound():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])

    total = BoundedSum(first, 0.5).plus(BoundedSum(second, 0.5))

    assert total.value.tolist() == [11.0, 22.0]
    assert total.clip_norm == 0.5  # chunks hold different records, so the bound does not add up
    assert second.tolist() == [10.0, 20.0]
    assert total.value is first  # no other vector of the model's size


@pytest.mark.parametrize("other", [0.4, 0.6, math.inf, math.nan])
def test_sums_with_different_bounds_do_not_add_up(other):
    with pytest.raises(ValueError, match=rf"\(0\.5 and {other}\)"):
        BoundedSum(torch.zeros(1), 0.5).plus(BoundedSum(torch.zeros(1), other))


def test_a_mean_divides_by_the_expected_batch_size():
    mean = Release(torch.tensor([3.0]), noise_std=1.0).mean(4.0)
    assert (mean.value.tolist(), mean.noise_std) == ([0.75], 0.25)


@pytest.mark.parametrize("size", [0.0, -1.0, math.nan])
def test_a_batch_size_that_is_not_positive_is_refused(size):
    with pytest.raises(ValueError, match=f"expected_batch_size={size} must be greater than 0"):
        Release(torch.zeros(1), 1.0).mean(size)


def test_a_sum_does_not_print_its_values():
    assert "7" not in repr(BoundedSum(torch.tensor([7777.0]), 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_answer_of_no_records_is_zeros_in_at_least_float32(dtype):
    params = [torch.ones(2, 3, dtype=dtype), torch.ones((), dtype=dtype)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    total = BoundedSum.empty(Query((Term(),), 0.5, 1.0), params)
    part = BoundedSum.empty(Query((Term(),), 0.5, 1.0, torch.tensor([1, 4])), params)

    assert (total.value.tolist(), total.value.dtype, total.clip_norm) == ([0.0] * 7, wide, 0.5)
    assert part.value.tolist() == [0.0, 0.0]
    nothing = Release.of_nothing(params)
    assert (nothing.value.tolist(), nothing.value.dtype, nothing.noise_std) == ([0.0] * 7, wide, 0)


def test_a_sum_of_another_party_has_the_bound_that_was_asked_for():
    value = torch.ones(3)
    total = BoundedSum.received(value, Query((Term(),), 0.25, 1.0))
    assert total.value is value
    assert total.clip_norm == 0.25


# -- no way round it -----------------------------------------------------------------------------


def calls(source: str) -> set[str]:
    """The names of the functions that some code calls: ``f`` of ``f()``, and of ``x.f()``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            found.add(node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
    return found


@cache
def calls_of_the_package() -> dict[str, set[str]]:
    """The names of the functions that each file of the package calls."""
    folders = [Path(str(each.__file__)).parent for each in (lightning_dp, lightning_dp.callbacks)]
    files = [(folder, file) for folder in folders for file in folder.rglob("*.py")]
    return {file.relative_to(folder).as_posix(): calls(file.read_text()) for folder, file in files}


def callers(name: str) -> set[str]:
    """The files of the package in which a function of this name is called."""
    return {file for file, names in calls_of_the_package().items() if name in names}


@pytest.mark.parametrize("name", ["BoundedSum", "Release"])
def test_only_the_boundary_constructs_sums_and_releases(name):
    assert callers(name) == {"boundary.py"}


def test_only_the_boundary_draws_noise():
    assert callers("begin_normal") == {"boundary.py"}
    assert callers("add_normal") == {"boundary.py"}
    for name in ("fill_normal", "draw_into", "_begin_to", "_draw_on_device"):
        assert callers(name) == {"_noise.py"}


def test_a_constructor_call_would_be_found():
    source = "x = [boundary.BoundedSum(v, 1.0)]\ndef f(): return Release(v, 0.0).mean(3)"
    assert {"BoundedSum", "Release"} <= calls(source)
