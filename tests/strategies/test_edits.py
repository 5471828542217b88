"""The optimizer uses what was released; every other gradient ends the run before a weight moves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from lightning_dp import Checks
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report import PrivacyReport

# -- code of a user that changes gradients, and the places where it can run ----------------------


pytestmark = pytest.mark.filterwarnings("ignore:.*already private")

REFUSED = r"(?s)not what was released.*gradient_edits="
Edit = Callable[[Any], None]


def trained(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def scales(model: Any) -> None:
    for param in trained(model):
        param.grad.mul_(0.5)


def adds_next_to_nothing(model: Any) -> None:
    trained(model)[1].grad[0] *= 1.001


def exchanges_the_memory(model: Any) -> None:
    trained(model)[0].grad.data = torch.ones_like(trained(model)[0])


def replaces(model: Any) -> None:
    trained(model)[0].grad = torch.ones_like(trained(model)[0])


def takes_one_away(model: Any) -> None:
    trained(model)[-1].grad = None


def makes_one_sparse(model: Any) -> None:
    trained(model)[0].grad = (2 * trained(model)[0].grad).to_sparse()


def clips_by_hand(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


EDITS = [
    adds_next_to_nothing,
    exchanges_the_memory,
    replaces,
    takes_one_away,
    makes_one_sparse,
    clips_by_hand,
]


@dataclass
class Setting:
    """Needs of a place in a fit."""

    model: Any
    callbacks: list[L.Callback]
    plugins: list[Any]


def in_the_module(setting: Setting, edit: Edit) -> None:
    setting.model.on_before_optimizer_step = lambda optimizer: edit(setting.model)


def between_steps(setting: Setting, edit: Edit) -> None:
    setting.model.on_train_batch_end = lambda *_: edit(setting.model)


def in_a_callback(setting: Setting, edit: Edit) -> None:
    class Edits(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            edit(pl_module)

    setting.callbacks.append(Edits())


def in_clipping(setting: Setting, edit: Edit) -> None:
    setting.model.configure_gradient_clipping = lambda optimizer, *_, **__: edit(setting.model)


def in_a_hook_of_the_optimizer(setting: Setting, edit: Edit) -> None:
    """It exchanges the closure."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs["closure"]

        def edited() -> Any:
            result = closure()
            edit(setting.model)
            return result

        return args, {**kwargs, "closure": edited}

    setting.model.on_train_start = lambda: register(setting.model, hook)


def in_a_hook_that_runs_the_closure(setting: Setting, edit: Edit) -> None:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        kwargs["closure"]()
        edit(setting.model)
        return args, {**kwargs, "closure": None}

    setting.model.on_train_start = lambda: register(setting.model, hook)


def register(model: Any, hook: Any) -> None:
    model.trainer.optimizers[0].register_step_pre_hook(hook)


def around_step(setting: Setting, edit: Edit) -> None:
    """Schedulers do it like this: the attribute of the instance wraps the method."""
    make = setting.model.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = make()
        scheduler = StepLR(optimizer, 5)
        step = optimizer.step

        def wrapped(closure: Any) -> Any:
            loss = closure()
            edit(setting.model)
            step()
            return loss

        optimizer.step = wrapped
        return [optimizer], [scheduler]

    setting.model.configure_optimizers = configure_optimizers


def in_a_precision_plugin(setting: Setting, edit: Edit) -> None:
    class Edits(Precision):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            self._wrap_closure(model, optimizer, closure)
            edit(model)
            return optimizer.step(**kwargs)

    setting.plugins.append(Edits())


def in_the_clipping_of_a_plugin(setting: Setting, edit: Edit) -> None:
    class Edits(Precision):
        def clip_gradients(self, optimizer: Any, *unused: Any, **also: Any) -> None:
            edit(setting.model)

    setting.plugins.append(Edits())


PLACES = [
    in_the_module,
    in_a_callback,
    in_clipping,
    in_a_hook_of_the_optimizer,
    in_a_hook_that_runs_the_closure,
    around_step,
    in_a_precision_plugin,
    in_the_clipping_of_a_plugin,
]


def by_hand(model: Any) -> None:
    model.automatic_optimization = False


# -- two steps of a small network with code of a user in between ---------------------------------


@pytest.fixture
def run(classifier, mlp, loader, make_trainer, weights):
    """``run(place, edit, ...)``: two steps of a small network, whose noise is always the same."""

    class Model(classifier):
        def __init__(self) -> None:
            super().__init__(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
            self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.loss = loss.detach()
            if self.automatic_optimization:
                return loss
            return self.by_hand(loss)

        def by_hand(self, loss: Tensor) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.before_step()
            optimizer.step()

        def before_step(self) -> None:
            pass

    def fit(
        place: Callable[[Setting, Edit], None] = lambda setting, edit: None,
        edit: Edit = lambda model: None,
        *,
        change: Callable[[Any], None] = lambda model: None,
        declared: str | None = None,
        trainer: dict[str, Any] | None = None,
        **privacy: Any,
    ) -> Tensor:
        setting = Setting(Model(), [], [])
        change(setting.model)
        place(setting, edit)
        run.model = setting.model
        run.start = weights(setting.model)
        checks = Checks(dry_run=False, comparisons=False, gradient_edits=declared)
        settings = {"noise_multiplier": 0.5, "target_delta": 1e-5, "checks": checks}
        run.privacy = DifferentialPrivacy(seed=1, **settings, **privacy)
        options = {"max_steps": 2, "plugins": setting.plugins, **(trainer or {})}
        run.trainer = make_trainer(callbacks=[*setting.callbacks, run.privacy], **options)
        torch.manual_seed(0)
        run.trainer.fit(setting.model, loader)
        return weights(setting.model)

    run = fit
    return run


@pytest.fixture
def plain(run) -> Tensor:
    """The weights after one step that nobody edits."""
    return run(trainer={"max_steps": 1})


@pytest.fixture
def assert_refused_at_once(run, weights) -> Callable[..., None]:
    """The first step is charged, nothing moves, and the message has the cure."""

    def check(*arguments: Any, match: str = REFUSED, **options: Any) -> None:
        with pytest.raises(MisconfigurationException, match=match):
            run(*arguments, **options)
        assert run.privacy.steps == 1
        assert math.isfinite(run.privacy.epsilon)
        assert torch.equal(weights(run.model), run.start)

    return check


@pytest.fixture
def assert_voided(run, weights) -> Callable[..., None]:
    """The second step does not reach the weights, and ε of the first one is withdrawn."""

    def check(*arguments: Any, match: str = REFUSED, **options: Any) -> None:
        after_one_step = run(*arguments, trainer={"max_steps": 1}, **options)
        with pytest.raises(VoidedRunError, match=match):
            run(*arguments, **options)
        assert run.privacy.steps == 2
        assert math.isinf(run.privacy.epsilon)
        assert torch.equal(weights(run.model), after_one_step)

    return check


# -- edits that are refused ----------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("place", "edit"),
    [(place, scales) for place in PLACES] + [(in_the_module, edit) for edit in EDITS],
)
def test_an_edit_changes_the_training_and_is_refused(
    place, edit, run, plain, assert_refused_at_once
):
    declared = run(place, edit, declared="some", trainer={"max_steps": 1})
    assert not torch.equal(declared, plain)

    assert_refused_at_once(place, edit)


def copies(model: Any) -> None:
    trained(model)[0].grad = trained(model)[0].grad.clone()


def clips_at_a_norm_that_is_never_reached(model: Any) -> None:
    """Else a clipping by hand would end the run at the first step whose norm it bounds."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def takes_a_parameter_out(model: Any) -> None:
    model.trainer.optimizers[0].param_groups[0]["params"].pop(-1)


def scales_in_the_optimizer(model: Any) -> None:
    model.trainer.optimizers[0].grad_scale = torch.tensor(2.0)


@pytest.mark.parametrize(
    "edit",
    [copies, clips_at_a_norm_that_is_never_reached, takes_a_parameter_out, scales_in_the_optimizer],
)
def test_so_is_one_that_changes_nothing_yet_or_what_the_optimizer_is_told(
    edit, assert_refused_at_once
):
    assert_refused_at_once(in_the_module, edit, match="Model.on_before_optimizer_step")


def test_a_gradient_of_a_frozen_parameter_is_refused(assert_refused_at_once):
    def gives(model: Any) -> None:
        model.frozen.grad = torch.ones_like(model.frozen)

    match = r"would move the frozen parameters \['frozen'\]"
    assert_refused_at_once(in_the_module, gives, match=match)
    assert_refused_at_once(in_the_module, gives, match=match, declared="others")


def test_an_edit_in_manual_optimization_is_refused(assert_refused_at_once):
    assert_refused_at_once(
        in_the_module, scales, change=by_hand, match=r"call self.clip_gradients\(\) with constants"
    )


def test_an_edit_of_a_later_step_voids_the_run(assert_voided):
    def later(model: Any) -> None:
        if model.global_step == 1:
            scales(model)

    assert_voided(in_a_callback, later)


def test_an_edit_is_not_hidden_by_the_clipping_after_it(assert_refused_at_once):
    assert_refused_at_once(in_the_module, scales, trainer={"gradient_clip_val": 1e-3})


def test_an_error_that_was_caught_does_not_let_the_next_step_pass(run, weights):
    def change(model: Any) -> None:
        by_hand(model)
        original = model.by_hand

        def stubborn(loss: Tensor) -> None:
            with contextlib.suppress(MisconfigurationException):
                original(loss)
            model.optimizers().optimizer.step()

        model.by_hand = stubborn

    with pytest.raises(RuntimeError, match="gradients that were not made private"):
        run(in_the_module, scales, change=change)
    assert torch.equal(weights(run.model), run.start)


# -- reading, clipping and declared edits --------------------------------------------------------


def reads_the_norm(model: Any) -> None:
    model.norm = torch.stack([param.grad.norm() for param in trained(model)]).norm()


def test_reading_the_gradients_is_no_edit(run, plain):
    assert torch.equal(run(in_the_module, reads_the_norm, trainer={"max_steps": 1}), plain)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_lightnings_clipping_passes_and_clips_the_private_gradient(algorithm, run, plain):
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}

    automatic = run(trainer=clip)

    moved = (automatic - run.start).abs()
    assert 0 < moved.max() <= 2 * 0.5 * 1e-3 * (1 + 1e-5)  # two steps of lr 0.5
    assert torch.equal(run(in_clipping, clips_as_documented, trainer=clip), automatic)


def clips_as_documented(model: Any) -> None:
    trainer = model.trainer
    algorithm = trainer.gradient_clip_algorithm or "norm"
    model.clip_gradients(trainer.optimizers[0], trainer.gradient_clip_val or 1e-3, algorithm)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clip_gradients_clips_the_private_gradient_in_manual_optimization(algorithm, run):
    """It is called when there is no gradient yet, since the release is part of the step."""

    def change(model: Any) -> None:
        by_hand(model)
        model.before_step = lambda: model.clip_gradients(model.optimizers(), 1e-3, algorithm)

    clipped = run(change=change)

    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    assert torch.equal(clipped, run(trainer=clip))


def clips_at_the_loss(model: Any) -> None:
    model.clip_gradients(model.trainer.optimizers[0], 1e-3 * float(model.loss), "norm")


def clips_at_the_second_step(model: Any) -> None:
    if model.global_step:
        model.clip_gradients(model.trainer.optimizers[0], 1e-3, "norm")


@pytest.mark.parametrize("clips", [clips_at_the_loss, clips_at_the_second_step])
def test_clipping_that_is_not_that_of_the_first_step_voids_the_run(clips, assert_voided):
    assert_voided(in_clipping, clips, match="otherwise than in the first step")


def test_a_clipping_that_the_module_leaves_out_all_along_passes(run, plain):
    clip = {"gradient_clip_val": 1e-3, "max_steps": 1}

    assert torch.equal(run(in_clipping, lambda model: None, trainer=clip), plain)


def test_a_declared_edit_is_printed_by_the_report(run):
    run(in_the_module, scales, declared="halved", trainer={"max_steps": 1})

    report = run.privacy.report()

    line = "gradient edits: halved (declared by the user, not checked)"
    assert line in str(report)
    assert "halved (declared by the user, not checked)" in report.markdown()
    assert report.to_dict()["gradient_edits"] == "halved"
    assert PrivacyReport.from_dict(report.to_dict()) == report


# -- moments of the optimizer, and steps that are left out ---------------------------------------


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def damps_moments(model: Any) -> None:
    for state in model.trainer.optimizers[0].state.values():
        state["exp_avg"].mul_(0.5)


def forgets_moments(model: Any) -> None:
    model.trainer.optimizers[0].state.clear()


def replaces_moments(model: Any) -> None:
    for state in model.trainer.optimizers[0].state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


@pytest.mark.parametrize("edit", [damps_moments, forgets_moments, replaces_moments])
@pytest.mark.parametrize("place", [between_steps, in_the_module])
def test_an_edit_of_the_moments_of_the_optimizer_voids_the_run(place, edit, run, assert_voided):
    def change(model: Any) -> None:
        model.make_optimizer = adam

    assert_voided(place, edit, change=change, match=r"its state.*between two steps")
    run(place, edit, change=change, declared="moments are damped")


def steps_if(model: Any, condition: Callable[[Any], bool]) -> None:
    """In manual optimization."""
    by_hand(model)

    def step(loss: Tensor) -> None:
        model.manual_backward(loss)
        if condition(model):
            model.optimizers().step()

    model.by_hand = step


SKIPPED = r"some batches and not for others.*gradient_edits="


def test_a_step_that_is_left_out_voids_the_run(run, weights):
    only_the_first = {"change": lambda m: steps_if(m, lambda model: model.global_step == 0)}

    with pytest.raises(VoidedRunError, match=SKIPPED):
        run(trainer={"max_steps": -1, "max_epochs": 1}, **only_the_first)
    assert run.privacy.steps == 2


def test_a_step_left_out_of_optimizer_step_voids_the_run(run):
    def change(model: Any) -> None:
        def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            closure()
            if batch_idx != 1:
                optimizer.step()

        model.optimizer_step = optimizer_step

    with pytest.raises(VoidedRunError, match=SKIPPED):
        run(change=change)


def test_a_first_step_after_batches_without_one_is_refused(run, weights):
    def change(model: Any) -> None:
        model.batches = 0

        def every_third(model: Any) -> bool:
            model.batches += 1
            return model.batches % 3 == 0

        steps_if(model, every_third)

    whole = {"trainer": {"max_steps": -1, "max_epochs": 1}, "change": change}
    with (
        pytest.raises(MisconfigurationException, match=SKIPPED),
        pytest.warns(PrivacyWarning, match="charged and never released"),
    ):
        run(**whole)
    assert run.privacy.steps == 3
    assert math.isfinite(run.privacy.epsilon)
    assert torch.equal(weights(run.model), run.start)

    with pytest.warns(PrivacyWarning, match="charged and never released"):
        run(declared="every third batch is stepped for", **whole)
    assert not torch.equal(weights(run.model), run.start)


class CountsFirst(torch.optim.SGD):
    """Writes to its state before it evaluates its closure, and edits gradients after it."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("count", torch.zeros(())).add_(1)
        loss = closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)
        super().step()
        return loss


def test_what_an_optimizer_does_in_its_own_step_is_its_own(run, plain):
    def change(model: Any) -> None:
        model.make_optimizer = lambda params: CountsFirst(params, lr=1.0)

    assert torch.equal(run(change=change, trainer={"max_steps": 1}), plain)
    run(change=change)


# -- a backward pass of the module's own -----------------------------------------------------------


def backward_by(how: Callable[[Tensor], None]) -> Callable[[Any], None]:
    """Let the model go back by a function of its own."""

    def change(model: Any) -> None:
        def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            how(loss)

        model.__class__ = type("Own", (type(model),), {"backward": backward})

    return change


@pytest.mark.parametrize("engine", ["auto", "hooks", "records", "one_by_one"])
def test_a_backward_of_ones_own_starts_from_the_loss(run, engine):
    plain = run(engine=engine)
    own = run(engine=engine, change=backward_by(lambda loss: loss.backward()))
    assert torch.equal(own, plain)


@pytest.mark.parametrize("engine", ["auto", "records"])
@pytest.mark.parametrize(
    "how",
    [
        lambda loss: (0.5 * loss).backward(),
        lambda loss: (loss / loss.detach()).backward(),
        lambda loss: [loss.backward(retain_graph=True) for _ in range(2)],
        lambda loss: None,
    ],
    ids=["scaled", "by_itself", "twice", "not_at_all"],
)
def test_a_backward_from_something_else_is_refused(run, how, engine):
    with pytest.raises(
        (MisconfigurationException, VoidedRunError), match="scale it in training_step"
    ):
        run(engine=engine, change=backward_by(how))
