"""Copies and pickles of a model, made at any moment of a fit, are plain ones."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_dp.gradients import UnsupportedModelError
from tests.zoo import flat, private

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy twice": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "average": lambda module: AveragedModel(module).module,
    "deepcopy of a partial": lambda module: copy.deepcopy(functools.partial(module)).func,
    "clones": lambda module: nn.ModuleList([copy.deepcopy(module) for _ in range(2)])[1],
    "parameters": lambda module: nn.ParameterList(copy.deepcopy(list(module.parameters()))),
}
PLACES = (
    "on_fit_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
)


def of_ours(module: nn.Module, plain: nn.Module) -> list[str]:
    """What is on modules and parameters of a copy that a plain copy does not have."""
    found = []
    for part, twin in zip(module.modules(), plain.modules(), strict=True):
        found += sorted(set(vars(part)) - set(vars(twin)))
        found += [kind for kind in HOOKS if len(getattr(part, kind)) > len(getattr(twin, kind))]
    for param in module.parameters():
        found += sorted(vars(param))
        found += ["hook"] * len(param._backward_hooks or ())
        found += ["hook"] * len(param._post_accumulate_grad_hooks or ())
    return found


class Gain(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), Gain(), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture
def copying(classifier: Any) -> type[Any]:
    """Copies its network in every way at every place of a fit."""

    class Copying(classifier):  # type: ignore[misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            type(self).copies = []  # of the class: copies of the whole model do not copy them

        def copied(self, place: str) -> None:
            if self.trainer.global_step < 1:
                self.copies += [(place, name, way(self.net)) for name, way in WAYS.items()]
                self.copies.append((place, "the whole model", copy.deepcopy(self).net))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.copied("training_step")
            return loss

    for place in PLACES:
        if place != "training_step":

            def hook(self: Any, *args: Any, place: str = place) -> None:
                self.copied(place)

            setattr(Copying, place, hook)
    return Copying


ENGINES = ("auto", "records", "hooks")


@pytest.mark.parametrize("engine", ENGINES)
def test_copies_made_at_any_moment_have_nothing_of_the_engine(
    engine: str, copying: Any, loader: Any, make_trainer: Any
) -> None:
    model, plain = copying(network()), network()
    make_trainer(max_steps=1, callbacks=[private(engine=engine)]).fit(model, loader)

    seen = [place for place in PLACES if not place.endswith("_end")]
    if engine != "hooks":  # a record that runs alone leaves no copy of what it has behind
        seen.remove("training_step")
    assert {(place, way) for place, way, _ in model.copies} >= {
        (place, way) for place in seen for way in WAYS
    }
    x = torch.randn(4, 6)
    for place, way, twin in model.copies:
        if way == "parameters":
            assert of_ours(twin, nn.ParameterList(plain.parameters())) == [], (place, way)
            continue
        if (place, way) not in {("training_step", w) for w in ("pickle", "torch.save")}:
            assert of_ours(twin, plain) == [], (place, way)
        twin.zero_grad()
        twin(x).sum().backward()  # trained plainly, it does what a plain network does
        again = network()
        again.load_state_dict(twin.state_dict())
        again(x).sum().backward()
        for mine, its in zip(twin.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        assert of_ours(twin, plain) == [] or "pickle" in way or "save" in way
        pickle.dumps(twin)


def trained(loader: Any, make_trainer: Any, kind: type[Any], engine: str, steps: int = 2) -> Any:
    """The weights of two steps without noise."""
    torch.manual_seed(0)
    model = kind(network())
    ours = private(engine=engine, noise_multiplier=0.0, max_grad_norm=0.5, seed=1)
    make_trainer(max_steps=steps, callbacks=[ours]).fit(model, loader)
    assert ours.steps == steps
    return flat(model.net)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("in_the_loss", [False, True])
def test_a_shallow_copy_of_a_layer_is_not_taken_for_the_layer(
    in_the_loss: bool, engine: str, classifier: Any, loader: Any, make_trainer: Any
) -> None:
    """It has the parameters of the layer, and shares the dictionary that hooks are in."""

    class Shallow(classifier):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            twin = copy.copy(self.net[0])
            with torch.set_grad_enabled(in_the_loss):
                extra = twin(batch[0]).mean()
            return loss + extra

    if in_the_loss and engine == "hooks":  # which see no use that is not a layer's
        with pytest.raises(UnsupportedModelError, match=r"net\.0\.weight"):
            trained(loader, make_trainer, Shallow, engine)
    else:  # functions are followed: the use is seen
        trained(loader, make_trainer, Shallow, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_copy_behind_a_trained_layer_passes_its_gradients_on(
    engine: str, classifier: Any, loader: Any, make_trainer: Any
) -> None:
    """As a module that is not in the model and has no trained parameters."""

    class Behind(classifier):  # type: ignore[misc]
        makes: Callable[[nn.Module], nn.Module]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            twin = type(self).makes(self.net[3])
            hidden = self.net[2](self.net[1](self.net[0](batch[0])))
            return nn.functional.cross_entropy(self.net[3](hidden) + twin(hidden), batch[1])

    def detached(layer: nn.Linear) -> nn.Module:
        weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
        return lambda x: nn.functional.linear(x, weight, bias)  # type: ignore[return-value]

    found = []
    for makes in (copy.deepcopy, detached):
        Behind.makes = staticmethod(makes)
        found.append(trained(loader, make_trainer, Behind, engine))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("engine", ENGINES)
def test_copies_that_take_part_in_the_loss_do_not_disturb_the_step(
    engine: str, classifier: Any, loader: Any, make_trainer: Any
) -> None:
    class Using(classifier):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            for name, way in WAYS.items():
                if name not in ("parameters", "copy"):  # a shallow copy has the layers themselves
                    twin = way(self.net)
                    loss = loss + 0.1 * nn.functional.cross_entropy(twin(batch[0]), batch[1])
                    with torch.no_grad():
                        twin(batch[0])
            return loss

    kinds = (classifier, Using)
    torch.testing.assert_close(*(trained(loader, make_trainer, kind, engine) for kind in kinds))
