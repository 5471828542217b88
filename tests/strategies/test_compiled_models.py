"""Fits of compiled models: the same weights as of the plain ones, and nothing of it stays behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.gradients import UnsupportedModelError
from tests.zoo import private

RAN: list[bool] = []  # whether gradients were on


def graph(module: Any, inputs: Any) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        RAN.append(torch.is_grad_enabled())
        return module.forward(*tensors)

    return run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    RAN.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def as_it_is(net: nn.Module) -> nn.Module:
    return net


def wrapped(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend=graph)


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend=graph)
    return net


@pytest.fixture
def fit(classifier, blobs, make_trainer) -> Callable[..., tuple[Tensor, Any]]:
    """Train a compiled network, or a compiled LightningModule; return its weights and the report."""

    def run(
        of_net: Any = as_it_is, of_module: Any = as_it_is, **options: Any
    ) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        plain = classifier(of_net(Block()))
        privacy = private(**{"seed": 3, "max_grad_norm": 0.5, **options})
        torch.manual_seed(1)
        trainer = make_trainer(max_epochs=1, callbacks=[privacy], num_sanity_val_steps=0)
        loader = DataLoader(blobs, 60)
        trainer.fit(of_module(plain), loader, loader)
        weights = nn.utils.parameters_to_vector(plain.parameters()).detach()
        return weights, privacy.report()

    return run


@pytest.mark.parametrize(
    ("how", "whole"),
    [
        pytest.param(wrapped, True, marks=pytest.mark.slow),
        pytest.param(wrapped, False, marks=pytest.mark.slow),
        (in_place, True),
        (in_place, False),
    ],
)
def test_a_compiled_model_trains_as_the_plain_one(how, whole, fit, caplog):
    """Its validation is compiled, and its training says once that it is not."""
    expected, plain = fit()
    assert plain.mechanism["gradient engine"] == "layers"
    RAN.clear()
    with caplog.at_level(logging.INFO):
        found, report = fit(of_module=how) if whole else fit(of_net=how)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert RAN and not any(RAN)
    said = report.mechanism["gradient engine"]
    assert f"; {'the model' if whole else 'net'}: compiled, and run as written" in said
    lines = [each.message for each in caplog.records if "run as written" in each.message]
    assert len(lines) == 1 and lines[0].startswith("privacy: ")


def test_frozen_compiled_parts_run_compiled_in_training(classifier, blobs, make_trainer):
    class Tuned(classifier):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 3))
            self.backbone = wrapped(Block().requires_grad_(False))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.backbone(x))

    privacy = private()
    trainer = make_trainer(max_steps=2, callbacks=[privacy])
    trainer.fit(Tuned(), DataLoader(blobs, 60))
    assert any(RAN)
    assert privacy.report().mechanism["gradient engine"] == "layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"of_net": wrapped}, {"of_module": wrapped}, {"of_net": in_place}],
    ids=["wrapped", "whole", "in place"],
)
def test_the_probe_sees_the_code_of_its_copies(options, fit):
    """Nothing is compiled for them, and the model itself is not run instead of one."""
    _, report = fit(**options, isolation_probe=True, spot_checks=True)
    assert not any(RAN)
    assert "isolated" in report.isolation


def test_a_coupled_compiled_module_is_found_by_the_probe(blobs, classifier, make_trainer):
    class Coupled(classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = self(batch[0])
            return (output - output.detach().mean(0)).square().sum(1).mean()

    privacy = DifferentialPrivacy(target_delta=1e-5, noise_multiplier=1.0)
    model = torch.compile(Coupled(Block()), backend=graph)
    with pytest.raises(Exception, match="couples the records of a batch"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, DataLoader(blobs, 60))


def test_a_compiled_module_is_resumed_and_loaded_under_its_own_names(
    classifier, blobs, make_trainer, tmp_path
):
    def fit(epochs: int, path: Any) -> L.LightningModule:
        torch.manual_seed(0)
        model = classifier(wrapped(Block()))
        privacy = private()
        trainer = make_trainer(max_epochs=epochs, callbacks=[privacy])
        trainer.fit(model, DataLoader(blobs, 120), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return model

    fit(1, None)
    model = fit(2, tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert list(state) == list(model.state_dict())
    assert next(iter(state)).startswith("net._orig_mod.")


@pytest.mark.parametrize("engine", ["auto", "one_by_one"])
def test_a_scripted_model_is_refused_by_name(engine, fit):
    with pytest.raises(UnsupportedModelError, match=r"net is a module of TorchScript"):
        fit(of_net=torch.jit.script, engine=engine)
