"""Kinds of synthetic records say what stands in them, and take the place of rows of any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dp.isolation import probe_isolation
from lightning_dp.isolation.kinds import (
    Part,
    SyntheticKind,
    Values,
    base_kind,
    exchange_rows,
    parts_of,
)

NAN = float("nan")


def batch(n=6):
    return {
        "x": torch.full((n, 3), 7.0),
        "y": torch.full((n,), 7),
        "mask": torch.ones(n, 4, dtype=torch.bool),
        "image": torch.full((n, 2, 2), 7, dtype=torch.uint8),
        "weight": np.full(n, 7.0, np.float32),
        "name": [f"img{i}.png" for i in range(n)],
        "boxes": [torch.full((i, 4), 7.0) for i in range(n)],
        "anchors": torch.full((9, 2), 7.0),
    }


def generator():
    return torch.Generator().manual_seed(0)


def test_parts_are_what_has_numbers_and_one_row_a_record():
    assert parts_of(batch()) == (
        Part(torch.float32, (3,)),
        Part(torch.int64, ()),
        Part(torch.bool, (4,)),
        Part(torch.uint8, (2, 2)),
        Part(torch.float32, ()),
    )


def test_exchanged_rows_are_of_the_kind_and_the_others_as_they_were():
    minus, last = Values(-1, -1, 1), Values(41, 41, 1)
    given = batch()

    new = exchange_rows(given, [1, 4], SyntheticKind((minus, last)), generator())

    for name in ("x", "y", "mask", "image", "weight"):
        kept = [0, 2, 3, 5]
        assert (new[name][kept] == given[name][kept]).all()
        assert new[name].dtype == given[name].dtype
        assert (given[name][1] == batch()[name][1]).all()  # the batch itself is unchanged
    assert (new["x"][[1, 4]] == -1).all() and (new["y"][[1, 4]] == 41).all()
    assert new["image"][[1, 4]].max() <= 1  # where the kind says nothing, what fits all models
    assert (new["weight"][[1, 4]] < 1).all()
    assert new["name"] == ["img0.png", "img2.png", "img2.png", "img3.png", "img5.png", "img5.png"]
    assert new["anchors"] is given["anchors"]


def test_no_value_of_the_exchanged_rows_has_a_part_in_it():
    poison = batch()
    poison["x"][1], poison["y"][1], poison["weight"][1] = NAN, -(10**9), NAN

    one, other = (
        exchange_rows(each, [1], SyntheticKind(), generator()) for each in (batch(), poison)
    )

    for name in ("x", "y", "mask", "image", "weight"):
        assert (one[name] == other[name]).all()


def test_whole_numbers_hold_no_reals_and_no_numbers_out_of_their_range():
    assert not Values(0, 255).fit(torch.int64)
    assert not Values(NAN, NAN, 1).fit(torch.int64)
    assert not Values(-1, -1, 1).fit(torch.uint8)
    assert not Values(0, 2, 3).fit(torch.bool)
    assert Values(0, 255, 256).fit(torch.uint8)
    assert Values(NAN, NAN, 1).fit(torch.float16)


def test_the_tamest_kind_has_class_numbers_where_there_is_one_a_record():
    kind = base_kind(parts_of(batch()), classes=3, first_class=1)

    drawn = exchange_rows(batch(64), range(64), kind, generator())

    assert set(drawn["y"].tolist()) == {1, 2, 3}
    assert 0 < drawn["x"].min() < drawn["x"].max() < 1
    assert set(drawn["image"].unique().tolist()) == {0, 1}


@pytest.mark.parametrize("classes", [3, 2])
def test_the_probe_tells_the_classes_that_the_model_took(classes, model_class):
    net = torch.nn.Linear(6, classes)
    model = model_class(net, torch.nn.functional.cross_entropy)

    found = probe_isolation(model, (torch.zeros(4, 6), torch.zeros(4).long()))

    assert found.kinds.ran[0].values == (Values(), Values(0, classes - 1, classes))
