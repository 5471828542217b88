"""The worked examples of CONTRIBUTING.md do what they say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.gradients.opacus_hooks import OpacusHooks


@pytest.fixture
def example(blocks, names):
    """The names that one block of CONTRIBUTING.md defines."""

    def run(word: str):
        (block,) = [
            block for block in blocks("CONTRIBUTING.md", "python") if f"class {word}" in block
        ]
        assert len([line for line in block.splitlines() if line]) <= 25
        scope = dict(names, __name__="example")
        exec(compile(block, "CONTRIBUTING.md", "exec", dont_inherit=True), scope)
        return scope

    return run


@pytest.mark.few(2)
@pytest.mark.parametrize("word", ["Linear", "SignOfGradient", "Threshold", "PoissonAtRate"])
def test_an_example_trains_within_its_budget(word, example, make_trainer):
    scope = example(word)
    before = scope["model"].layer.weight.detach().clone()
    trainer = make_trainer(max_epochs=1, callbacks=[scope["privacy"]])

    trainer.fit(scope["model"], scope["train_loader"])

    assert trainer.global_step == scope["privacy"].steps == 10
    assert 2.95 < scope["privacy"].epsilon <= 3.0
    report = scope["privacy"].report()
    assert f"{word}(" in str(report)
    if word == "SignOfGradient":  # every step moves every parameter by the learning rate
        steps = (scope["model"].layer.weight - before).abs() / 0.1
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
        assert 0 < steps.max() <= 10.001
    if word == "PoissonAtRate":  # it books the rate it draws with
        assert (report.sample_rate, report.expected_batch_size) == (0.05, 10)


def test_the_linear_schedule_is_a_line(example):
    schedule = example("Linear")["Linear"](last=0.5, steps=20)

    assert [schedule(t) for t in (0, 10, 20, 40)] == [1.0, 0.75, 0.5, 0.5]


def test_the_threshold_removes_small_values_only(example):
    threshold = example("Threshold")["Threshold"](level=0.1)

    estimate, _ = threshold.apply(threshold.init([]), torch.tensor([0.05, -0.2, 0.1]))

    assert estimate.tolist() == pytest.approx([0.0, -0.2, 0.1])


def test_the_engine_example_agrees_with_opacus(example):
    def sums(kind, layer: nn.Linear) -> torch.Tensor:
        engine = kind(layer, list(layer.parameters()))
        with engine.watching():
            loss = nn.functional.cross_entropy(layer(x), y)
        engine.backward(loss)
        taken = engine.take(2.0)
        assert not layer._forward_hooks
        return taken.weighted_sum(torch.arange(7.0))

    layer, x, y = nn.Linear(4, 3), torch.randn(7, 4), torch.arange(7) % 3
    torch.testing.assert_close(
        sums(example("OneLinearLayer")["OneLinearLayer"], layer), sums(OpacusHooks, layer)
    )
