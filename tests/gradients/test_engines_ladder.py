"""The ladder that an engine's name stands for: who answers where the engines above cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.boundary import Query, Term
from lightning_dp.gradients import (
    CoupledLossError,
    EngineChoice,
    RecordPasses,
    Replay,
    UnsupportedModelError,
    engines,
    records,
)
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.layer_calls import LayerCalls

QUERY = Query((Term(),), clip_norm=0.5, noise_multiplier=0.0)


class Fussy(LayerCalls):
    """Refuses batches of other than 4 records, at one of the places where an engine can refuse."""

    name, place = "fussy", "backward"

    def _refuse(self, place: str, rows: int) -> None:
        if place == self.place and rows != 4:
            raise UnsupportedModelError(f"0 (Linear) saw {rows} rows and not 4. Give it 4.")

    def __init__(self, module: nn.Module, params: Any, **how: Any) -> None:
        super().__init__(module, params, **how)
        self._refuse("made", 0)

    def backward(self, loss: Tensor, **how: Any) -> None:
        self._rows = len(self._calls[0].inputs._inputs[0])
        self._refuse("backward", self._rows)
        super().backward(loss, **how)

    def take(self, scale: float) -> AbstractPerSampleGradients:
        self._refuse("take", self._rows)
        return super().take(scale)


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put the fussy engine above book-keeping."""

    def make(place: str) -> None:
        monkeypatch.setattr(Fussy, "place", place)
        monkeypatch.setitem(engines._LADDERS, "auto", (Fussy, LayerCalls))  # type: ignore[arg-type]

    return make


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 2))


def chunk_of(model: nn.Module, rows: int, runs: list[int]) -> Replay:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))

    def forward(batch: Tensor) -> Tensor:
        runs.append(len(batch))
        return model(batch).square().mean()

    return Replay(forward, x, rows)


@pytest.mark.parametrize("place", ["made", "backward", "take"])
def test_the_next_engine_answers_from_the_same_records_and_random_numbers(place, ladder):
    ladder(place)
    answers, described, states, runs = [], [], [], list[int]()
    for name in ("layers", "auto"):
        model = net()
        torch.manual_seed(7)
        with RecordPasses(model, list(model.parameters()), name) as passes:
            answers.append(
                [passes.answer(QUERY, chunk_of(model, n, runs)).value for n in (4, 3, 4)]
            )
            described.append(passes.description)
        states.append(torch.get_rng_state())
    torch.testing.assert_close(*answers, rtol=0, atol=0)
    assert torch.equal(*states)  # a run that is repeated draws nothing
    assert described[1].startswith("layers, since fussy does not cover this model: 0 (Linear)")
    assert runs == [4, 3, 4] * 2 if place == "made" else [4, 3, 4, 4, 3, 3, 4]


def test_a_combination_is_of_one_engine(ladder):
    """The first part is known already, by the engine that refuses the second."""
    ladder("take")
    model = net()[::2]  # no dropout
    params = list(model.parameters())
    moved = nn.utils.parameters_to_vector(params).detach() + 0.1
    query = Query((Term(), Term(-1.0, moved)), clip_norm=0.1, noise_multiplier=0.0)
    found = []
    for name in ("layers", "auto"):
        with RecordPasses(model, params, name) as passes:
            found.append(passes.answer(query, chunk_of(model, 3, [])).value)
    assert found[0].norm() > 0
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_cannot_run_again_ends_there(ladder):
    ladder("none")
    model = net()
    with RecordPasses(model, list(model.parameters()), "auto") as passes:
        chunk = chunk_of(model, 4, [])
        first = [passes.run(chunk.forward, chunk.batch, 4) for _ in range(2)]
        assert passes.answer(QUERY, Replay(None, None, 4), first=first[0]) is not None
        with pytest.raises(UnsupportedModelError, match="more or fewer rows"):
            passes.answer(QUERY, Replay(None, None, 2), first=first[1])
        assert passes.description == "fussy"


def test_other_rows_are_tried_by_each_engine(ladder):
    ladder("none")
    model = net()
    with RecordPasses(model, list(model.parameters()), "auto") as passes:
        with pytest.raises(UnsupportedModelError, match="more or fewer rows than the batch"):
            passes.answer(QUERY, replace(chunk_of(model, 4, []), size=2))
        assert passes.description.startswith("layers, since fussy")


def test_a_loss_that_mixes_records_is_no_matter_of_engines(ladder):
    ladder("none")
    model = net()
    x = torch.randn(4, 6)
    with RecordPasses(model, list(model.parameters()), "auto") as passes:
        with pytest.raises(CoupledLossError):
            passes.answer(QUERY, Replay(lambda b: model(b).mean(1).std(), x, 4))
        assert passes.description == "fussy"


def test_a_choice_goes_down_for_all_who_share_it():
    choice = EngineChoice("auto")
    alone = EngineChoice("auto")
    alone.stay(())
    assert choice.can_fall and not alone.can_fall
    while choice.fall(UnsupportedModelError("The layer net.x saw rows of (3,). Give it more.")):
        pass
    assert choice.description.startswith("one_by_one, since ")
    assert choice.description.endswith(": The layer net.x saw rows of (3,).")
    assert alone.description == "layers"


def test_a_torch_that_lacks_private_names_goes_without_the_engine_that_needs_them(monkeypatch):
    monkeypatch.setattr(records, "MISSING", ("get_unwrapped",))
    choice = EngineChoice("records")
    choice.make(net(), list(net().parameters()))
    assert choice.description == (
        "one_by_one, since records does not cover this model: This torch lacks get_unwrapped of "
        "functorch, which running each record under vmap needs."
    )


def test_over_shards_only_engines_that_know_them_are_left_and_all_stay_with_the_same():
    choice = EngineChoice("ghost")
    choice.fall(UnsupportedModelError("Not here."))
    lead, other = choice.over_shards(), choice.over_shards()
    assert lead.description == "layers, since ghost does not cover this model: Not here."
    assert not lead.fall(UnsupportedModelError("The layer net.x saw rows of (3,)."))
    other.stay(lead.reasons)
    assert other.description == lead.description
    unprobed = choice.over_shards()
    unprobed.stay(unprobed.reasons)
    assert not unprobed.fall(UnsupportedModelError("A second process does not know of it."))
    assert "one_by_one" not in str(unprobed.refusal(UnsupportedModelError("No.")))
