"""Queries, sums and releases: what they refuse and promise, and that there is no way round them."""

from __future__ import annotations

import ast
import itertools
import math
import re
from functools import cache
from pathlib import Path

import pytest
import scipy.stats
import torch
from torch import Tensor

import lightning_dp
import lightning_dp.callbacks
from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.boundary import BoundedSum, Query, Release, Term, add_noise, bounded_sum
from lightning_dp.clipping import CountedGradients, split_count
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.parameter_sum import MaterialisedGradients
from lightning_dp.gradients.passes import passes_of
from tests.zoo import random_gradients


def noised(clip_norm: float, multiplier: float) -> Release:
    return add_noise(BoundedSum(torch.zeros(2), clip_norm), multiplier, NoiseSource(), World())


NO_NUMBER = (math.nan, math.inf, -1.0)
MEANINGLESS = [
    *((lambda x: Term(weight=x), x, "Term(weight=") for x in (math.nan, math.inf, -math.inf)),
    *((lambda x: Query((Term(),), x, 1.0), x, "Query(clip_norm=") for x in (0.0, -1.0, math.nan)),
    *((lambda x: Query((Term(),), 1.0, x), x, "Query(noise_multiplier=") for x in NO_NUMBER),
    *(
        (lambda x: Query((Term(),), 1.0, 1.0, count_weight=x), x, "count_weight=")
        for x in NO_NUMBER
    ),
    *((lambda x: Release(torch.zeros(1), 1.0).mean(x), x, "batch_size=") for x in (0.0, math.nan)),
    *((lambda x: noised(1.0, x), x, "noise_multiplier=") for x in NO_NUMBER),
    (lambda x: noised(x, 1.0), math.inf, "clip norm "),
    *((lambda x: World(rank=x, size=2), x, "rank=") for x in (-1, 2)),
]


@pytest.mark.parametrize(("make", "value", "name"), MEANINGLESS)
def test_a_number_that_means_nothing_is_refused(make, value, name):
    with pytest.raises(ValueError, match=re.escape(f"{name}{value}")):
        make(value)
    with pytest.raises(ValueError, match=r"Query\(terms=\(\)\) asks nothing"):
        Query((), 1.0, 1.0)


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
    found = passes_of(Query(terms, 1.0, 1.0))
    assert [(each.gradient, each.product) for each in found] == [(5, 0.75), (-1, 1.5), (0, 1)]
    assert found[0].point is None
    assert found[1].point is found[2].point is point
    assert found[0].direction is found[2].direction is one
    assert found[1].direction is other


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
    assert callers("begin_share") == {"boundary.py"}
    assert callers("add_normal") == {"boundary.py"}
    for name in ("begin_normal", "fill_normal", "draw_into", "_begin_to", "_draw_on_device"):
        assert callers(name) == {"_noise.py"}


# -- clipping: what bounds a record's influence, against a slow loop in float64 ------------------


def params_like(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.zeros(gradient.shape[1:], dtype=gradient.dtype) for gradient in gradients]


def clipped_one_by_one(gradients: list[Tensor], clip_norm: float, scale: float = 1.0) -> Tensor:
    """The oracle: each finite record's flat gradient in float64, scaled down to the clip norm."""
    total = torch.zeros(sum(gradient[0].numel() for gradient in gradients), dtype=torch.float64)
    for record in zip(*gradients, strict=True):
        flat = torch.cat([part.double().reshape(-1) for part in record]) * scale
        norm = math.sqrt(sum(value * value for value in flat.tolist()))
        if math.isfinite(norm):
            total += flat * (1.0 if norm <= clip_norm else clip_norm / norm)
    return total


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 1e4, math.inf])
@pytest.mark.parametrize("scale", [1.0, 4.0, -0.5])
def test_bounded_sum_equals_a_loop_over_records(clip_norm, scale):
    gradients = random_gradients(9)

    total = bounded_sum(MaterialisedGradients(params_like(gradients), gradients, scale), clip_norm)

    expected = clipped_one_by_one(gradients, clip_norm, scale)
    torch.testing.assert_close(total.value.double(), expected, rtol=1e-5, atol=1e-6)
    assert total.clip_norm == clip_norm


@pytest.mark.parametrize("size", [1e15, 1e30])
def test_large_records_that_do_not_overflow_are_clipped_not_dropped(size):
    gradients = [torch.tensor([[3 * size, 4 * size], [0.3, 0.4]])]

    total = bounded_sum(MaterialisedGradients(params_like(gradients), gradients, 1.0), 1.0).value

    torch.testing.assert_close(total, torch.tensor([0.9, 1.2]))


def test_an_unused_parameter_has_a_zero_sum_in_its_place():
    gradients = random_gradients(5)
    params = params_like(gradients)
    unused: list[Tensor | None] = [gradients[0], None, gradients[2]]

    total = bounded_sum(MaterialisedGradients(params, unused, 1.0), 0.5).value

    first, middle, last = unflatten(total, params)
    expected = clipped_one_by_one([gradients[0], gradients[2]], 0.5)
    torch.testing.assert_close(flatten([first, last]).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(middle, torch.zeros(5))


def test_bfloat16_gradients_are_summed_in_float32():
    """256 equal records: a bfloat16 running sum would stop growing at 2^8 units."""
    gradients = [torch.full((1024, 4), 0.25, dtype=torch.bfloat16)]
    params = [torch.zeros(4, dtype=torch.bfloat16)]

    total = bounded_sum(MaterialisedGradients(params, gradients, 1.0), 0.3).value

    assert total.dtype == torch.float32
    # Added up one after the other, as some processors do, 1,024 equal terms round by some 1e-5.
    torch.testing.assert_close(total, torch.full((4,), 1024 * 0.15), rtol=3e-5, atol=0.0)


def test_float64_gradients_are_summed_in_float64():
    gradients = [gradient.double() for gradient in random_gradients(5)]

    total = bounded_sum(MaterialisedGradients(params_like(gradients), gradients, 1.0), 0.5).value

    torch.testing.assert_close(total, clipped_one_by_one(gradients, 0.5), rtol=1e-12, atol=1e-14)


def test_layers_that_see_different_numbers_of_records_are_refused():
    with pytest.raises(UnsupportedModelError, match="more rows than there are records"):
        MaterialisedGradients(
            [torch.zeros(2), torch.zeros(2)], [torch.zeros(4, 2), torch.zeros(8, 2)], 1.0
        )


def sum_with_count(gradients, clip_norm: float, kappa: float, onto: BoundedSum | None = None):
    query = Query((Term(),), clip_norm, 0.0, count_weight=kappa)
    counted = CountedGradients(gradients, clip_norm, kappa) if kappa else gradients
    return bounded_sum(counted, query.sensitivity, onto)


@pytest.mark.parametrize("count_weight", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.3, 1.0, 1e5])
def test_chunks_are_added_up_in_one_vector(clip_norm, count_weight):
    """They equal one sum over all their records, with no record twice."""
    gradients = [5 * clip_norm * gradient for gradient in random_gradients(9)]
    params = params_like(gradients)

    def sum_of(records: slice, onto: BoundedSum | None = None) -> BoundedSum:
        chunk = MaterialisedGradients(params, [each[records] for each in gradients], 1.0)
        return sum_with_count(chunk, clip_norm, count_weight, onto)

    whole, first = sum_of(slice(None)), sum_of(slice(4))
    both = sum_of(slice(4, None), first)

    assert both.value is first.value
    assert both.clip_norm == whole.clip_norm
    torch.testing.assert_close(both.value, whole.value, rtol=1e-5, atol=1e-6 * clip_norm)
    assert first.plus(both).value is both.value  # holds both already: nothing is added again
    torch.testing.assert_close(both.value, whole.value, rtol=1e-5, atol=1e-6 * clip_norm)


def test_a_sum_of_another_bound_is_not_added_to():
    gradients = random_gradients(3)
    params = params_like(gradients)
    before = bounded_sum(MaterialisedGradients(params, gradients, 1.0), 0.5)
    for clip_norm, count_weight in ((0.4, 0.0), (0.5, 0.1), (math.inf, 0.0)):
        with pytest.raises(ValueError, match="different clip norms"):
            chunk = MaterialisedGradients(params, gradients, 1.0)
            sum_with_count(chunk, clip_norm, count_weight, before)


# -- the noise of a release: its scale and its place ---------------------------------------------


DIMENSION = 20_000
MULTIPLIER, CLIP_NORM = 1.7, 0.4


def p_value(noise: Tensor, standard_deviation: float) -> float:
    normal = scipy.stats.norm(scale=standard_deviation)
    return float(scipy.stats.kstest(noise.numpy(), normal.cdf).pvalue)


def test_the_release_says_how_much_noise_it_has():
    release = add_noise(BoundedSum(torch.zeros(3), 0.4), 1.7, NoiseSource(), World())
    assert release.noise_std == pytest.approx(0.68, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_release_is_in_the_memory_of_the_sum_which_is_gone(dtype):
    total = BoundedSum(torch.ones(5, dtype=dtype), 1.0)
    memory = total.value.data_ptr()

    release = add_noise(total, 1.0, NoiseSource(), World())

    assert release.value.dtype == dtype
    assert release.value.data_ptr() == release.mean(7.0).value.data_ptr() == memory
    assert (total.value != 1).all()


@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_without_noise_the_sum_is_released_exactly(clip_norm):
    total = torch.randn(50)
    release = add_noise(BoundedSum(total, clip_norm), 0.0, NoiseSource(), World())
    assert torch.equal(release.value, total)
    assert release.noise_std == 0


# -- several processes ---------------------------------------------------------------------------


def release_on_ranks(totals: list[Tensor], multiplier: float) -> tuple[list[Tensor], Tensor]:
    """Summands of the all-reduce, and the release: the ranks one after the other."""
    handed: list[Tensor] = []

    def all_reduce(vector: Tensor) -> Tensor:
        handed.append(vector)
        return torch.stack(handed).sum(0)

    for rank, total in reversed(list(enumerate(totals))):
        world = World(rank=rank, size=len(totals), all_reduce=all_reduce)
        own = BoundedSum(total.clone(), CLIP_NORM)
        release = add_noise(own, multiplier, NoiseSource(rank), world)
    return handed[::-1], release.value


def test_each_rank_noises_its_share_alone_and_before_the_sums_are_added_up():
    totals = [torch.randn(DIMENSION) for _ in range(3)]

    handed, released = release_on_ranks(totals, MULTIPLIER)

    shares = [World(rank, 3).share(DIMENSION) for rank in range(3)]
    assert [each.stop - each.start for each in shares] == [6666, 6667, 6667]
    for vector, total, share in zip(handed, totals, shares, strict=True):
        own = torch.zeros(DIMENSION, dtype=torch.bool)
        own[share] = True
        assert torch.equal(vector != total, own)
    # Twice the noise in one entry, or none, would not be the same at all of them.
    assert p_value(released - sum(totals), MULTIPLIER * CLIP_NORM) > 0.01
    torch.testing.assert_close(release_on_ranks(totals, 0.0)[1], sum(totals))


def test_ranks_of_one_seed_draw_other_values():
    vectors = [torch.zeros(40_000) for _ in range(2)]
    for rank, vector in enumerate(vectors):
        NoiseSource(5, rank).add_normal(vector, 1.0)
    assert abs(float(torch.corrcoef(torch.stack(vectors))[0, 1])) < 0.03


@pytest.mark.parametrize(("size", "ranks"), [(0, 2), (1, 4), (8, 3), (101, 7), (6, 6)])
def test_every_entry_is_in_the_share_of_one_rank(size, ranks):
    shares = [World(rank, ranks).share(size) for rank in range(ranks)]
    assert [i for share in shares for i in range(size)[share]] == list(range(size))


def test_noise_is_drawn_in_double_precision_and_added_in_that_of_the_sum():
    size = 200_001
    total = BoundedSum(torch.randn(size, generator=torch.Generator().manual_seed(0)), 0.5)
    before = total.value.clone()
    noise = torch.zeros(size, dtype=torch.float64)
    NoiseSource(seed=1).add_normal(noise, 1.0)
    release = add_noise(total, 3.0, NoiseSource(seed=1), World())
    assert torch.equal(release.value, before.add(noise.float(), alpha=1.5))


# -- clipped records are counted beside the gradient as one Gaussian: its exact shift, and it ----


C, KAPPA, Z, SIZE = 0.7, 0.1, 1.3, 6
CLIPPED = 50 * torch.eye(SIZE)[0]
SHORT = 0.01 * torch.eye(SIZE)[1]
AT_THE_NORM = C * torch.eye(SIZE)[2]
OTHERS = [SHORT, CLIPPED, AT_THE_NORM, -CLIPPED]


def total_of(records, kappa=KAPPA):
    gradients = torch.stack(records) if records else torch.zeros(0, SIZE)
    return sum_with_count(MaterialisedGradients([torch.zeros(SIZE)], [gradients], 1.0), C, kappa)


def shift(before, after):
    """Distance of the two releases' means, in standard deviations of their noise: 1/z at most."""
    a, b = total_of(before), total_of(after)
    assert a.clip_norm == b.clip_norm
    moved = float((a.value.double() - b.value.double()).norm())
    return moved / add_noise(a, Z, NoiseSource(0), World()).noise_std


def exact_delta(mu, epsilon):
    normal = scipy.stats.norm.cdf
    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


def test_a_record_moves_gradient_and_count_together_by_exactly_the_gaussian_that_is_charged():
    # The worst record is clipped, or has just the length C: both parts are as long as they can be.
    for worst in (CLIPPED, AT_THE_NORM):
        mu = shift(OTHERS, [*OTHERS, worst])
        assert mu == pytest.approx(1 / Z, rel=1e-5)
        epsilon = PLDAccountant().epsilon([(PoissonGaussian(Z, 1.0), 1)], 1e-3)
        assert exact_delta(mu, epsilon) == pytest.approx(1e-3, rel=1e-2)


def test_no_record_moves_them_further():
    generator = torch.Generator().manual_seed(0)
    records = [
        torch.randn(SIZE, generator=generator) * 10.0**power for power in (-9, -2, -1, 0, 1, 20)
    ]
    for record in [*records, torch.zeros(SIZE)]:
        assert shift(OTHERS, [*OTHERS, record]) <= (1 + 1e-6) / Z
    for a, b in itertools.product([*records, CLIPPED, SHORT, AT_THE_NORM, -CLIPPED], repeat=2):
        assert shift([*OTHERS, a], [*OTHERS, b]) <= 2 * (1 + 1e-6) / Z


def test_a_record_that_is_not_finite_counts_for_nothing():
    for value in (math.nan, math.inf, 1e36):
        broken = torch.full((SIZE,), value)
        torch.testing.assert_close(total_of([*OTHERS, broken]).value, total_of(OTHERS).value)


@pytest.mark.parametrize("clip_norm", [1e-12, 0.7, 1e9])
def test_the_count_is_of_clipped_records_less_the_others(clip_norm):
    lengths = [0.5, 0.999, 1.001, 3.0, 4.0]
    gradients = torch.eye(SIZE)[0] * clip_norm * torch.tensor(lengths).view(-1, 1)
    held = MaterialisedGradients([torch.zeros(SIZE)], [gradients], 1.0)
    total = sum_with_count(held, clip_norm, KAPPA)
    assert total.value.shape == (SIZE + 1,)
    assert float(total.value[-1]) == pytest.approx(KAPPA * clip_norm * (3 - 2), rel=1e-5)
    query = Query((Term(),), clip_norm, 0.0, count_weight=KAPPA)
    gradient, count = split_count(add_noise(total, 0.0, NoiseSource(0), World()), query)
    assert float(count.value) == pytest.approx(1.0, rel=1e-5)
    assert gradient.value.shape == (SIZE,)
    assert float(gradient.value[0]) == pytest.approx(clip_norm * (0.5 + 0.999 + 3), rel=1e-5)


def test_the_noise_of_both_is_that_of_the_longer_vector():
    query = Query((Term(),), C, Z, count_weight=KAPPA)
    assert query.sensitivity == pytest.approx(C * math.sqrt(1 + KAPPA**2), rel=1e-12)
    size = 20_000
    empty = BoundedSum.empty(query, [torch.zeros(size)])
    assert empty.value.shape == (size + 1,) == (query.size(size),)

    gradient, count = split_count(add_noise(empty, Z, NoiseSource(0), World()), query)

    std = Z * C * math.sqrt(1 + KAPPA**2)
    assert gradient.noise_std == pytest.approx(std, rel=1e-12)
    assert float(gradient.value.std()) == pytest.approx(std, rel=0.03)
    assert count.noise_std == pytest.approx(std / (KAPPA * C), rel=1e-12)


def test_without_a_count_nothing_is_longer():
    query = Query((Term(),), C, Z)
    assert query.sensitivity == C and query.size(SIZE) == SIZE
    assert total_of(OTHERS, kappa=0.0).value.shape == (SIZE,)
    release = add_noise(total_of(OTHERS, kappa=0.0), Z, NoiseSource(0), World())
    assert split_count(release, query) == (release, None)


def test_a_count_beside_coordinates_or_unclipped_gradients_is_refused():
    for query in ((C, Z, torch.tensor([0])), (math.inf, 0.0, None)):
        with pytest.raises(ValueError, match="counts clipped records next to a whole gradient"):
            Query((Term(),), *query, count_weight=KAPPA)
