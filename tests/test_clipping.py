"""Clipping rules: one record moves the sum by at most C, and C follows released values alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    CubicNewton,
    Diff2,
    Flat,
    MeanGradient,
    PerGroup,
    PrivacyConfig,
    Storm,
)
from lightning_dp.audit import audit
from lightning_dp.boundary import bounded_sum
from lightning_dp.clipping import ParameterGroups, Rescaling
from lightning_dp.gradients.base import AbstractPerSampleGradients, UnsupportedModelError
from lightning_dp.gradients.parameter_sum import MaterialisedGradients
from lightning_dp.gradients.records import GroupedGradients

NAMES = ["body.weight", "body.bias", "head.weight"]
SHAPES = ((2, 3), (2,), (3,))
PARAMS = [torch.zeros(shape) for shape in SHAPES]
GROUPS = PerGroup({"head.*": 2.0, "*.bias": 0.1, "*": 1.0})
RULES = [
    (Flat(), 0.7),
    (Automatic(), 0.7),
    (Automatic(1e-6), 1e-20),
    (Automatic(100.0), 1e20),
    (GROUPS, GROUPS.sensitivity),
    (PerGroup({"*.bias": 1e-20, "*": 3.0}), 3.0),
    (AdaptiveQuantile(), 0.7),
]


def made(rows: Tensor) -> MaterialisedGradients:
    """Gradients of the parameters above, one row for each record."""
    parts = torch.split(rows, [p.numel() for p in PARAMS], dim=1)
    shaped = [part.reshape(-1, *p.shape) for part, p in zip(parts, PARAMS, strict=True)]
    return MaterialisedGradients(PARAMS, shaped, 1.0)


def total(rule, rows: Tensor, clip_norm: float) -> Tensor:
    return bounded_sum(rule.bind(NAMES).rescale(made(rows), clip_norm), clip_norm).value.double()


SIZES = st.sampled_from([0.0, 1e-42, 1e-30, 1e-12, 1e-3, 1.0, 3.0, 1e4, 1e18, 3e37, math.nan])
NUMBERS = st.one_of(SIZES, st.floats(-10, 10), st.just(math.inf), st.just(-math.inf))
RECORD = st.lists(NUMBERS, min_size=11, max_size=11)


@pytest.mark.parametrize(("rule", "clip_norm"), RULES, ids=lambda x: repr(x)[:30])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(record=RECORD, scale=st.sampled_from([1.0, 1e-3, -1e3]), half=st.booleans())
def test_one_record_moves_the_sum_by_at_most_c(rule, clip_norm, record, scale, half):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if half else torch.float32
    others = (torch.randn(5, 11, generator=generator) * scale).to(dtype)
    row = torch.tensor([record], dtype=torch.float64).to(dtype)

    alone = total(rule, row, clip_norm)
    moved = total(rule, torch.cat([others, row]), clip_norm) - total(rule, others, clip_norm)

    assert float(alone.norm()) <= clip_norm * (1 + 1e-5)
    assert float(moved.norm()) <= clip_norm * (1 + 1e-4)
    if not row.isfinite().all():
        assert not alone.any()


def expected(rule, row: Tensor, clip_norm: float) -> Tensor:
    """The rule for one record, written out."""
    if isinstance(rule, Automatic):
        return row * clip_norm / (row.norm() + rule.gamma)
    if isinstance(rule, PerGroup):
        head, bias, rest = (rule.groups[key] for key in ("head.*", "*.bias", "*"))
        parts = zip(torch.split(row, [6, 2, 3]), (rest, bias, head), strict=True)
        return torch.cat([part * min(1.0, norm / float(part.norm())) for part, norm in parts])
    return row * min(1.0, clip_norm / float(row.norm()))


@pytest.mark.parametrize(("rule", "clip_norm"), [RULES[i] for i in (0, 1, 4, 6)], ids=str)
def test_the_sum_is_that_of_a_loop_over_records(rule, clip_norm):
    rows = torch.randn(9, 11, dtype=torch.float64) * torch.logspace(-2, 2, 9).unsqueeze(1)
    loop = sum(expected(rule, row, clip_norm) for row in rows)
    torch.testing.assert_close(total(rule, rows, clip_norm), loop, rtol=1e-5, atol=1e-6)
    groups = [made(rows[[4, 1, 8]]), made(rows[[0, 2, 3, 5, 6, 7]])]
    grouped = GroupedGradients(groups, [torch.tensor([4, 1, 8]), torch.tensor([0, 2, 3, 5, 6, 7])])
    bound = rule.bind(NAMES)
    torch.testing.assert_close(bound.norms(grouped), bound.norms(made(rows)))
    found = bounded_sum(bound.rescale(grouped, clip_norm), clip_norm).value.double()
    torch.testing.assert_close(found, loop, rtol=1e-5, atol=1e-6)


def test_flat_clipping_gives_the_bounded_sum_its_gradients_as_they_are():
    gradients = made(torch.randn(3, 11))
    assert Flat().rescale(gradients, 1.0) is gradients
    assert AdaptiveQuantile().bind(NAMES) == Flat()


def test_groups_that_each_reach_their_norm_reach_the_sensitivity_together():
    """The bound is the root of the squares, no less: this record is as long as any can be."""
    found = total(GROUPS, torch.full((1, 11), 1e4), GROUPS.sensitivity)
    assert float(found.norm()) == pytest.approx(math.sqrt(4 + 0.01 + 1), rel=1e-6)
    assert GROUPS.sensitivity == math.sqrt(4 + 0.01 + 1)


def test_a_rule_that_is_wrong_is_clipped_to_the_sensitivity_all_the_same():
    class Wrong(Rescaling):
        def factors(self, norms, clip_norm):
            return torch.full_like(norms, 1e6)

        def relative_norms(self, norms, clip_norm):
            return norms

    found = bounded_sum(Wrong().rescale(made(torch.randn(1, 11)), 0.5), 0.5)
    assert float(found.value.norm()) <= 0.5 * (1 + 1e-5)


def test_a_parameter_without_a_pattern_and_a_pattern_without_a_parameter_are_named():
    with pytest.raises(ValueError, match=r"trained parameter 'head.weight'"):
        PerGroup({"body.*": 1.0}).bind(NAMES)
    with pytest.raises(ValueError, match=r"pattern 'tail.\*' matches no"):
        PerGroup({"*": 1.0, "tail.*": 1.0}).bind(NAMES)
    with pytest.raises(ValueError, match=r"pattern '\*.bias' matches no trained parameter that an"):
        PerGroup({"*": 1.0, "*.bias": 1.0}).bind(NAMES)  # the first one has them all
    with pytest.raises(ValueError, match="must sum to 1"):
        ParameterGroups((0, 1), (1.0, 0.5))
    with pytest.raises(UnsupportedModelError, match="WholeOnly has norms of whole gradients only"):
        GROUPS.bind(NAMES).norms(WholeOnly(PARAMS, [torch.zeros(1, *s) for s in SHAPES], 1.0))


class WholeOnly(MaterialisedGradients):
    def norms_by_parameter(self):
        return AbstractPerSampleGradients.norms_by_parameter(self)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Automatic(0.0), "gamma=0.0"),
        (lambda: PerGroup({}), "groups={}"),
        (lambda: PerGroup(["*"]), "groups="),
        (lambda: PerGroup({"*": 0.0}), "groups['*']=0.0"),
        (lambda: PerGroup({"*": math.inf}), "groups['*']=inf"),
        (lambda: AdaptiveQuantile(1.0), "target=1.0"),
        (lambda: AdaptiveQuantile(rate=0.0), "rate=0.0"),
        (lambda: AdaptiveQuantile(least=0.0), "least=0.0"),
        (lambda: AdaptiveQuantile(least=2.0, most=1.0), "least=2.0"),
        (lambda: AdaptiveQuantile(most=math.inf), "most=inf"),
    ],
)
def test_a_bad_argument_is_named(make, named):
    with pytest.raises(ValueError) as error:
        make()
    assert named in str(error.value)


# -- the configuration ---------------------------------------------------------------------------


def config(**options):
    return PrivacyConfig(**{"target_delta": 1e-5, "noise_multiplier": 1.0, **options})


@pytest.mark.parametrize("rule", [Automatic(), GROUPS, AdaptiveQuantile()], ids=repr)
@pytest.mark.parametrize(
    "estimator", [Diff2(3), Storm(0.5), CubicNewton(1.0, 1.0, 2)], ids=lambda x: type(x).__name__
)
def test_estimators_with_bounds_of_their_own_take_no_other_rule(estimator, rule):
    with pytest.raises(ValueError, match="has other bounds"):
        config(estimator=estimator, clipping=rule)


def test_what_makes_no_sense_together_is_refused():
    for options, words in [
        ({"clipping": GROUPS, "max_grad_norm": 1.0}, "has the clip norms of its groups"),
        ({"clipping": GROUPS, "estimator": MeanGradient()}, "has the clip norms of its groups"),
        ({"clipping": GROUPS, "count_clipped": True}, "above one clip norm"),
        ({"clipping": Automatic(), "count_clipped": True}, "above one clip norm"),
        ({"clipping": AdaptiveQuantile(), "max_grad_norm": 2e3}, "from its least to its most"),
        (
            {"clipping": Automatic(), "max_grad_norm": math.inf, "noise_multiplier": 0},
            "needs a finite",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            config(**options)
    for wrong in (Automatic, GROUPS.bind(NAMES), "flat", None):
        with pytest.raises(TypeError, match="clipping="):
            config(clipping=wrong)
    for rule in (GROUPS, AdaptiveQuantile(), Automatic()):
        with pytest.raises(ValueError, match="is not audited"):
            audit(None, None, config(clipping=rule), trainer={})


def test_the_noise_of_groups_is_made_for_all_of_them_together():
    estimator = config(clipping=GROUPS).resolved_estimator()
    assert estimator == MeanGradient(GROUPS.sensitivity)
    assert config(clipping=AdaptiveQuantile()).counts_clipped
    assert not config(clipping=Automatic()).counts_clipped
    assert [rule.is_constant for rule in (Flat(), Automatic(), GROUPS, AdaptiveQuantile())] == [
        *[True] * 3, False
    ]  # fmt: skip


def test_a_run_goes_on_with_its_rule_and_one_without_it_with_flat_clipping():
    before = config(clipping=PerGroup({"*": 1})).fingerprint()
    config(clipping=PerGroup({"*": 1.0})).check_same(before)
    for other in (Flat(), PerGroup({"*": 1.5}), PerGroup({"*": 1.0, "a": 1.0})):
        with pytest.raises(ValueError, match=r"(clipping|estimator) differs"):
            config(clipping=other).check_same(before)
    earlier = {k: v for k, v in config().fingerprint().items() if k != "clipping"}
    config().check_same(earlier)
    with pytest.raises(ValueError, match="clipping differs"):
        config(clipping=Automatic()).check_same(earlier)
    with pytest.raises(ValueError, match="clipping differs"):
        config(clipping=AdaptiveQuantile(0.6)).check_same(
            config(clipping=AdaptiveQuantile()).fingerprint()
        )


# -- the norm that moves -------------------------------------------------------------------------


def test_the_clip_norm_comes_to_the_quantile():
    rule = AdaptiveQuantile(target=0.8, rate=0.2)
    norms = torch.distributions.LogNormal(1.0, 0.7).icdf((torch.arange(5000) + 0.5) / 5000)
    rng = torch.Generator().manual_seed(0)
    clip_norm, path = 0.01, []
    for _ in range(400):
        batch = norms[torch.randperm(5000, generator=rng)[:200]]
        share = float((batch > clip_norm).double().mean())
        clip_norm = rule.next_norm(clip_norm, share + 0.05 * float(torch.randn(1, generator=rng)))
        path.append(clip_norm)
    wanted = float(norms.quantile(0.8))
    assert torch.tensor(path[100:]).log().mean().exp() == pytest.approx(wanted, rel=0.03)


def test_the_clip_norm_stays_between_its_bounds_whatever_the_noise_is():
    rule = AdaptiveQuantile(least=0.5, most=2.0)
    assert rule.next_norm(1.0, 1e9) == 2.0
    assert rule.next_norm(1.0, -1e9) == 0.5
    step = replace(rule, least=1e-3, most=1e3).next_norm(1.5, 0.75)
    assert step == 1.5 * math.exp(-0.2 * (0.25 - 0.5))
