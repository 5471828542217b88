"""The optimizer uses what was released; every other gradient ends the run before a weight moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
from lightning_dp.report import PrivacyReport
from tests.zoo import Classifier, flat, mlp, private

pytestmark = pytest.mark.filterwarnings("ignore:.*already private")

REFUSED = "not what was released.*gradient_edits="
SKIPPED = "some batches and not for others.*gradient_edits="
AT_ONCE = {"charged": 1, "gradient_left": True}
LATER = {"charged": 2, "released": 1, "voids": True, "gradient_left": True}
EPOCH = {"max_steps": -1, "max_epochs": 1}
Edit = Callable[[Any], None]


class Model(Classifier):
    """Two steps of a small network, by hand or not, with code of a user in between."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.callbacks: list[L.Callback] = []
        self.plugins: list[Any] = []
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.loss = loss.detach()
        return loss if self.automatic_optimization else self.by_hand(loss)

    def by_hand(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.before_step()
        optimizer.step()

    def before_step(self) -> None:
        pass


def trained(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@pytest.fixture
def run(fit):
    """``run(model, ...)``: the weights after a fit whose noise is always the same."""

    def train(model: Any, declared: str | None = None, **options: Any) -> Tensor:
        checks = Checks(dry_run=False, comparisons=False, gradient_edits=declared)
        train.privacy = private(noise_multiplier=0.5, seed=1, checks=checks)
        options = {"max_steps": 2, "plugins": model.plugins, **options}
        fit(model, train.privacy, callbacks=model.callbacks, **options)
        return flat(model)

    return train


@pytest.fixture
def stops(ends):
    def check(model: Any, match: str, declared: str | None = None, **options: Any) -> None:
        checks = Checks(dry_run=False, comparisons=False, gradient_edits=declared)
        settings = {"noise_multiplier": 0.5, "checks": checks}
        options = {"max_steps": 2, "plugins": model.plugins, **options}
        ends(model, match, privacy=settings, first=model.callbacks, **options)

    return check


# -- code of a user that changes gradients, and the places where it can run ----------------------


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


def in_the_module(model: Any, edit: Edit) -> None:
    model.on_before_optimizer_step = lambda optimizer: edit(model)


def between_steps(model: Any, edit: Edit) -> None:
    model.on_train_batch_end = lambda *_: edit(model)


def in_a_callback(model: Any, edit: Edit) -> None:
    callback = L.Callback()
    callback.on_before_optimizer_step = lambda trainer, module, optimizer: edit(module)
    model.callbacks.append(callback)


def in_clipping(model: Any, edit: Edit) -> None:
    model.configure_gradient_clipping = lambda optimizer, *_, **__: edit(model)


def in_a_hook_of_the_optimizer(model: Any, edit: Edit) -> None:
    """It exchanges the closure."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs["closure"]

        def edited() -> Any:
            result = closure()
            edit(model)
            return result

        return args, {**kwargs, "closure": edited}

    model.on_train_start = lambda: model.trainer.optimizers[0].register_step_pre_hook(hook)


def in_a_hook_that_runs_the_closure(model: Any, edit: Edit) -> None:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        kwargs["closure"]()
        edit(model)
        return args, {**kwargs, "closure": None}

    model.on_train_start = lambda: model.trainer.optimizers[0].register_step_pre_hook(hook)


def around_step(model: Any, edit: Edit) -> None:
    """Schedulers do it like this: the attribute of the instance wraps the method."""
    make = model.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = make()
        scheduler = StepLR(optimizer, 5)
        step = optimizer.step

        def wrapped(closure: Any) -> Any:
            loss = closure()
            edit(model)
            step()
            return loss

        optimizer.step = wrapped
        return [optimizer], [scheduler]

    model.configure_optimizers = configure_optimizers


def in_a_precision_plugin(model: Any, edit: Edit) -> None:
    class Edits(Precision):
        def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
            self._wrap_closure(model, optimizer, closure)
            edit(model)
            return optimizer.step(**kwargs)

    model.plugins.append(Edits())


def in_the_clipping_of_a_plugin(model: Any, edit: Edit) -> None:
    class Edits(Precision):
        def clip_gradients(self, optimizer: Any, *unused: Any, **also: Any) -> None:
            edit(model)

    model.plugins.append(Edits())


PLACES = [
    *(in_the_module, in_a_callback, in_clipping, in_a_hook_of_the_optimizer),
    *(in_a_hook_that_runs_the_closure, around_step, in_a_precision_plugin),
    in_the_clipping_of_a_plugin,
]
EDITS = [
    *(adds_next_to_nothing, exchanges_the_memory, replaces, takes_one_away, makes_one_sparse),
    clips_by_hand,
]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("place", "edit"),
    [*((place, scales) for place in PLACES), *((in_the_module, edit) for edit in EDITS)],
)
def test_an_edit_changes_the_training_and_is_refused(place, edit, run, stops):
    edited = Model()
    place(edited, edit)
    assert not torch.equal(run(edited, "some", max_steps=1), run(Model(), max_steps=1))

    edited = Model()
    place(edited, edit)
    stops(edited, REFUSED, **AT_ONCE)


def copies(model: Any) -> None:
    trained(model)[0].grad = trained(model)[0].grad.clone()


def clips_at_a_norm_that_is_never_reached(model: Any) -> None:
    """Else a clipping by hand would end the run at the first step whose norm it bounds."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def takes_a_parameter_out(model: Any) -> None:
    model.trainer.optimizers[0].param_groups[0]["params"].pop(-1)


def scales_in_the_optimizer(model: Any) -> None:
    model.trainer.optimizers[0].grad_scale = torch.tensor(2.0)


def gives_to_a_frozen_one(model: Any) -> None:
    model.frozen.grad = torch.ones_like(model.frozen)


def scales_later(model: Any) -> None:
    if model.global_step == 1:
        scales(model)


NAMED = "Model.on_before_optimizer_step"
FROZEN = r"would move the frozen parameters \['frozen'\]"


@pytest.mark.parametrize(
    ("place", "edit", "match", "options"),
    [
        # what changes nothing yet, or what the optimizer is told
        (in_the_module, copies, NAMED, AT_ONCE),
        (in_the_module, clips_at_a_norm_that_is_never_reached, NAMED, AT_ONCE),
        (in_the_module, takes_a_parameter_out, NAMED, AT_ONCE),
        (in_the_module, scales_in_the_optimizer, NAMED, AT_ONCE),
        # a gradient of a frozen parameter, also where edits are declared
        (in_the_module, gives_to_a_frozen_one, FROZEN, AT_ONCE),
        (in_the_module, gives_to_a_frozen_one, FROZEN, {"declared": "others", **AT_ONCE}),
        # hidden by the clipping after it, in a later step, in manual optimization
        (in_the_module, scales, REFUSED, {"gradient_clip_val": 1e-3, **AT_ONCE}),
        (in_a_callback, scales_later, REFUSED, LATER),
    ],
)
def test_edits_of_other_kinds_end_the_run(place, edit, match, options, stops):
    model = Model()
    place(model, edit)
    stops(model, match, **options)


def test_an_edit_in_manual_optimization_is_refused_also_where_the_error_is_caught(run, stops):
    model = Model(by_hand=True)
    in_the_module(model, scales)
    stops(model, r"call self.clip_gradients\(\) with constants", **AT_ONCE)

    model = Model(by_hand=True)
    in_the_module(model, scales)
    before, by_hand = flat(model), model.by_hand

    def stubborn(loss: Tensor) -> None:
        with contextlib.suppress(MisconfigurationException):
            by_hand(loss)
        model.optimizers().optimizer.step()

    model.by_hand = stubborn
    with pytest.raises(RuntimeError, match="gradients that were not made private"):
        run(model)
    assert torch.equal(flat(model), before)


# -- reading, clipping and declared edits --------------------------------------------------------


def reads_the_norm(model: Any) -> None:
    model.norm = torch.stack([param.grad.norm() for param in trained(model)]).norm()


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


def counts_first(model: Any, edit: Edit) -> None:
    model.make_optimizer = lambda params: CountsFirst(params, lr=1.0)


@pytest.mark.parametrize(
    ("place", "edit", "options"),
    [
        (in_the_module, reads_the_norm, {}),
        (counts_first, reads_the_norm, {}),  # what an optimizer does in its own step is its own
        # a clipping that the module leaves out all along
        (in_clipping, lambda model: None, {"gradient_clip_val": 1e-3}),
    ],
)
def test_what_is_no_edit_changes_nothing(place, edit, options, run):
    model = Model()
    place(model, edit)
    found = run(model, max_steps=1, **options)
    assert torch.equal(found, run(Model(), max_steps=1))


def clips_as_documented(model: Any) -> None:
    trainer = model.trainer
    algorithm = trainer.gradient_clip_algorithm or "norm"
    model.clip_gradients(trainer.optimizers[0], trainer.gradient_clip_val or 1e-3, algorithm)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_by_lightning_passes_and_clips_the_private_gradient(algorithm, run):
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    start, automatic = flat(Model()), run(Model(), **clip)
    assert 0 < (automatic - start).abs().max() <= 2 * 0.5 * 1e-3 * (1 + 1e-5)  # two steps of 0.5

    documented, manual = Model(), Model(by_hand=True)
    in_clipping(documented, clips_as_documented)
    assert torch.equal(run(documented, **clip), automatic)
    # Called when there is no gradient yet, since the release is part of the step.
    manual.before_step = lambda: manual.clip_gradients(manual.optimizers(), 1e-3, algorithm)
    assert torch.equal(run(manual), automatic)


def clips_at_the_loss(model: Any) -> None:
    model.clip_gradients(model.trainer.optimizers[0], 1e-3 * float(model.loss), "norm")


def clips_at_the_second_step(model: Any) -> None:
    if model.global_step:
        model.clip_gradients(model.trainer.optimizers[0], 1e-3, "norm")


@pytest.mark.parametrize("clips", [clips_at_the_loss, clips_at_the_second_step])
def test_clipping_that_is_not_that_of_the_first_step_voids_the_run(clips, stops):
    model = Model()
    in_clipping(model, clips)
    stops(model, "otherwise than in the first step", **LATER)


def test_a_declared_edit_is_printed_by_the_report(run):
    model = Model()
    in_the_module(model, scales)
    run(model, "halved", max_steps=1)
    report = run.privacy.report()
    assert "gradient edits: halved (declared by the user, not checked)" in str(report)
    assert "halved (declared by the user, not checked)" in report.markdown()
    assert report.to_dict()["gradient_edits"] == "halved"
    assert PrivacyReport.from_dict(report.to_dict()) == report


# -- moments of the optimizer, and steps that are left out ---------------------------------------


def damps_moments(model: Any) -> None:
    for state in model.trainer.optimizers[0].state.values():
        state["exp_avg"].mul_(0.5)


def forgets_moments(model: Any) -> None:
    model.trainer.optimizers[0].state.clear()


def replaces_moments(model: Any) -> None:
    for state in model.trainer.optimizers[0].state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


@pytest.mark.parametrize(
    ("place", "edit"),
    [
        (between_steps, damps_moments),
        (between_steps, forgets_moments),
        (in_the_module, replaces_moments),
        (in_the_module, damps_moments),
    ],
)
def test_an_edit_of_the_moments_of_the_optimizer_voids_the_run(place, edit, run, stops):
    for declared in (None, "moments are damped"):
        model = Model()
        model.make_optimizer = lambda params: torch.optim.Adam(params, lr=0.1)
        place(model, edit)
        if declared is None:
            stops(model, "its state.*between two steps", **LATER)
        else:
            run(model, declared)


def steps_if(condition: Callable[[Any], bool]) -> Any:
    model = Model(by_hand=True)

    def step(loss: Tensor) -> None:
        model.manual_backward(loss)
        if condition(model):
            model.optimizers().step()

    model.by_hand = step
    return model


def leaves_out_a_step() -> Any:
    model = Model()

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if batch_idx != 1:
            optimizer.step()

    model.optimizer_step = optimizer_step
    return model


def test_a_step_that_is_left_out_voids_the_run(stops):
    stops(steps_if(lambda model: model.global_step == 0), SKIPPED, **{**LATER, **EPOCH})
    counted = {**LATER, "released": 2}  # by Lightning: its loop called optimizer_step
    stops(leaves_out_a_step(), SKIPPED, **counted)


def test_a_first_step_after_batches_without_one_is_refused(run, stops):
    def every_third() -> Any:
        batches: list[int] = []
        return steps_if(lambda model: bool(batches.append(1)) or len(batches) % 3 == 0)

    with pytest.warns(PrivacyWarning, match="charged and never released"):
        stops(every_third(), SKIPPED, charged=3, gradient_left=True, **EPOCH)
    with pytest.warns(PrivacyWarning, match="charged and never released"):
        found = run(every_third(), "every third batch is stepped for", **EPOCH)
    assert not torch.equal(found, flat(Model()))


# -- a backward pass of the module's own -----------------------------------------------------------


def backward_by(how: Callable[[Tensor], Any]) -> Any:
    def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        how(loss)

    model = Model()
    model.__class__ = type("Own", (Model,), {"backward": backward})
    return model


@pytest.mark.parametrize("engine", ["auto", "hooks", "records", "one_by_one"])
def test_a_backward_of_ones_own_starts_from_the_loss(fit, engine):
    weights = []
    for model in (Model(), backward_by(lambda loss: loss.backward())):
        fit(model, private(seed=1, engine=engine), max_steps=2)
        weights.append(flat(model))
    assert torch.equal(*weights)


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
def test_a_backward_from_something_else_is_refused(fit, how, engine):
    refused = (MisconfigurationException, VoidedRunError)
    with pytest.raises(refused, match="scale it in training_step"):
        fit(backward_by(how), private(engine=engine), max_steps=2)
