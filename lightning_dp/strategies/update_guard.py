"""Guards of the update: only the optimizer moves weights, by the gradient that was released."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dp._refusals import RefusedRun
from lightning_dp._world import held_here
from lightning_dp.gradients.snapshot import held_in
from lightning_dp.isolation.requirements import MisconfigurationError

__all__ = [
    "GradientGuard",
    "ParameterGuard",
    "StepGuard",
    "WriteCounts",
    "trained_by",
    "watched",
]

Clipping: TypeAlias = tuple[float, GradClipAlgorithmType]

_WRITTEN = (
    "training_step changed the parameters {} itself (a codebook or statistic kept as a parameter, a "
    "layer that rescales its weights in forward). What it writes can come from the records, without "
    "noise, and ε would not hold: discard these weights. If it is a function of other weights only (a "
    "teacher that follows the student), write it in on_train_batch_end."
)
_NOT_PRIVATE = (
    "optimizer.step() was called with gradients that were not made private. Call it through "
    "Lightning: automatic optimization, or self.optimizers().step() in training_step."
)
_TWICE = (
    "{} evaluated its closure twice; each evaluation would use the data again. Use an optimizer that "
    "evaluates it once."
)
_EDITED = (
    "What the optimizer is about to use is not what was released: {}. Between the two may write: {}. "
    "An edit that looks at the batch, its loss or a metric makes the step follow the "
    "records without noise, and ε would not hold. To clip the private gradient, {}. Another function "
    "of released values alone is to be declared, and is then printed in the report: "
    "DifferentialPrivacy(checks=Checks(gradient_edits='what is done'))."
)
_SKIPPED = (
    "optimizer.step() was called for some batches and not for others. Which ones can come from the "
    "records (a loss that spikes, a gradient that is not finite), and a step that is left out has no "
    "noise, so ε would not hold. Call it once for every batch, and take larger batches instead of "
    "accumulating by hand, or automatic optimization and Trainer(accumulate_grad_batches=...). If "
    "numbers of steps alone decide, it is to be declared, and is then printed in the report: "
    "DifferentialPrivacy(checks=Checks(gradient_edits='what is left out'))."
)
_FROZEN = (
    "it would move the frozen parameters {} by an old p.grad, or by one that a hook wrote (give it "
    "trainable ones only: [p for p in self.parameters() if p.requires_grad])"
)
_CLIP = {
    True: "set Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)",
    False: "call self.clip_gradients() with constants in training_step, before optimizer.step()",
}
_BEFORE_STEP = "on_before_optimizer_step"
_HOOKS = (_BEFORE_STEP, "configure_gradient_clipping", "optimizer_step")
_CLIPS = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "main_params")
_IS_TRAINED, _GRADIENT = attrgetter("requires_grad"), attrgetter("grad")
_VERSION, _SHAPE, _PARAMETERS = attrgetter("_version"), attrgetter("shape"), itemgetter("params")


class WriteCounts:
    """The memory of some tensors, and how often each was written to, as autograd counts it.

    What is written through ``.data`` or an array of NumPy is not counted.

    Args:
        tensors: whole, or sharded; then this process's part is looked at.

    Example:
        >>> weight, bias = torch.ones(2), torch.ones(1)
        >>> counts = WriteCounts([weight, bias])
        >>> bias.add_(1).item()
        2.0
        >>> counts.written()
        [1]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        here = held_here(tensors)
        # The memory is kept, so that its address stays its own.
        self._tensors, self._memory = tensors, list(map(Tensor.detach, here))
        self._marks = _marks(here)

    def written(self) -> list[int]:
        """Return the positions of those that were written to, or got memory with other values."""
        here = held_here(self._tensors)
        marks = _marks(here)
        if marks == self._marks:  # as nearly always
            return []
        each = zip(self._memory, here, self._marks, marks, strict=True)
        return [
            i
            for i, (memory, tensor, before, after) in enumerate(each)
            if before[0] != after[0]
            # Other memory may hold the same: an LSTM puts its weights together.
            or (before != after and not torch.equal(memory, tensor.detach().to(memory)))
        ]


def _marks(tensors: Sequence[Tensor]) -> list[tuple[int, int, torch.Size]]:
    """Return how often each was written to, its address and its shape."""
    versions: Iterable[int] = map(_VERSION, tensors)
    if any(map(Tensor.is_inference, tensors)):  # which count nothing
        versions = (0 if each.is_inference() else each._version for each in tensors)
    return list(zip(versions, map(Tensor.data_ptr, tensors), map(_SHAPE, tensors), strict=True))


class ParameterGuard:
    """Refuses to train other parameters than at first, and to let ``training_step`` write to any.

    Args:
        module: the user's model.
        optimizer: its private optimizer.
        public: parameters of others, which ``training_step`` may switch off and on, and move.
    """

    def __init__(
        self, module: LightningModule, optimizer: Optimizer, public: Sequence[nn.Parameter] = ()
    ) -> None:
        self.trained = trained_by(optimizer)
        """The parameters that the optimizer moves, in its order."""
        self._module = module
        self._all = tuple(module.parameters())
        others = {id(param) for param in public}
        self._fixed = [param for param in self._all if id(param) not in others]
        self._trainable = tuple(map(_IS_TRAINED, self._fixed))
        fixed = set(map(id, self._fixed))
        self._plain = {
            n: p for n, p in module.named_parameters() if id(p) in fixed and _is_plain(p)
        }
        self._before: WriteCounts | None = None
        self._is_first = True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that moves others.

        Raises:
            RuntimeError: naming the cure.
        """
        is_same = _are_the_same(trained_by(optimizer), self.trained)
        if not is_same or tuple(map(_IS_TRAINED, self._fixed)) != self._trainable:
            raise RefusedRun(
                "The set of trained parameters changed during fit (a fine-tuning callback, "
                "add_param_group or requires_grad_?): new ones would be trained without privacy. "
                "Decide before fit which parameters are trained.",
                topic="changed-parameters",
            )

    def check_model(self) -> None:
        """Refuse a model that has others: a frozen part may be exchanged (a copy of a teacher).

        Raises:
            RuntimeError: naming the cure.
        """
        here = set(map(id, filter(_IS_TRAINED, held_in(self._module, "_parameters"))))
        known = set(map(id, filter(_IS_TRAINED, self._all)))
        if here == known:
            return
        named = self._module.named_parameters()
        new = [name for name, p in named if p.requires_grad and id(p) not in known]
        raise RefusedRun(
            f"Trainable parameters of the LightningModule were replaced during fit ({len(known - here)} "
            f"are gone, {len(new)} are new: {new[:5]}). The optimizer has those of before, and would "
            "train stale copies on noise alone. Wrap the model or add adapters in __init__ or "
            "configure_model; freeze a copy (a target network) with requires_grad_(False).",
            topic="changed-parameters",
        )

    def enter_forward(self) -> None:
        """Look at the parameters as ``training_step`` begins: what it writes comes from records."""
        self._before = WriteCounts(list(self._plain.values()))

    def leave_forward(self) -> str | None:
        """Return why the step may not be released: at the end of ``training_step``, or in backward.

        Raises:
            MisconfigurationException: instead, in the first step.
        """
        before, self._before = self._before, None
        if before is None:  # backward has asked
            return None
        is_first, self._is_first = self._is_first, False
        if not (places := before.written()):
            return None
        names = list(self._plain)
        written = [names[i] for i in places]
        more = f" and {len(written) - 5} more" if len(written) > 5 else ""
        text = _WRITTEN.format(f"{written[:5]}{more}")
        if is_first:
            raise MisconfigurationError(text, topic="written-weights")
        return text


def trained_by(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    """Return the parameters that an optimizer moves, in its order."""
    return tuple(filter(_IS_TRAINED, _moved(optimizer)))


def _moved(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return chain.from_iterable(map(_PARAMETERS, optimizer.param_groups))


def _are_the_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_plain(param: nn.Parameter) -> bool:
    """Return False for lazy parameters and those of special classes (quantised weights)."""
    return not is_lazy(param) and type(held_here([param])[0].data) is Tensor


class StepGuard:
    """Raises at an optimizer step that :meth:`allow` did not allow, before it moves anything.

    Args:
        optimizer: whose steps are watched.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_allowed = self._is_off = False
        self._check: Callable[[], None] | None = None  # before the step that is allowed
        self._depth = 0  # of step() calls: a subclass that calls super().step() has two
        self._exit: RemovableHandle = optimizer.register_step_post_hook(self._leave)
        self._entry: RemovableHandle = optimizer.register_step_pre_hook(self._enter)

    def expect(self) -> None:
        """Stand after all other hooks of the optimizer, which may exchange its closure."""
        self._entry.remove()
        self._entry = self._optimizer.register_step_pre_hook(self._enter)
        self._depth = 0  # also after a step that ended in an error

    def allow(self, check: Callable[[], None] | None = None) -> None:
        """Let the next step pass: the gradients are private now.

        Args:
            check: is called once, after everything else that runs before the optimizer reads them.
        """
        self._is_allowed, self._check = True, check

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let any step pass, inside, as if the optimizer were not watched."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def remove(self) -> None:
        """Take the guard's hooks off."""
        self._entry.remove()
        self._exit.remove()

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at the gradients when the optimizer is about to use them: after its closure ran."""
        if self._is_off:
            return None
        self._depth += 1
        is_positional = len(args) > 1  # the first one is the optimizer
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            self._before_update()
            return None
        is_evaluated = False

        def looked_at() -> Any:
            nonlocal is_evaluated
            if is_evaluated:
                raise RefusedRun(_TWICE.format(type(optimizer).__name__), topic="optimizer")
            is_evaluated = True
            result = closure()
            self._before_update()
            return result

        if is_positional:
            return (args[0], looked_at, *args[2:]), kwargs
        return args, {**kwargs, "closure": looked_at}

    def _before_update(self) -> None:
        if not self._is_allowed:
            self._depth -= 1  # it is over: of a step inside another, whose error somebody caught
            raise RefusedRun(_NOT_PRIVATE, topic="raw-gradients")
        check, self._check = self._check, None
        if check is not None:
            self._is_allowed = False  # if it raises
            check()
            self._is_allowed = True

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_off:
            return
        self._depth -= 1
        if not self._is_allowed:  # a closure was given and not called
            raise RefusedRun(_NOT_PRIVATE, topic="raw-gradients")
        self._is_allowed = self._depth > 0


class GradientGuard:
    """Compares ``p.grad``, when the optimizer is about to use it, with what was released.

    - It must be the same tensor, in the same memory, and must not have been written to.
    - Lightning's own clipping, done at each step as at the first one, is no edit. Where it is asked
      for before the release, as in manual optimization, it is done after it.
    - The moments of the optimizer are its own, and it steps for each batch, or for none.
    - Declared edits are not looked for.

    Args:
        trainer: whose hooks run between release and step.
        parameters: the trained ones.
        is_declared: the user has said which edits are made.
    """

    def __init__(
        self, trainer: Trainer, parameters: Sequence[nn.Parameter], *, is_declared: bool
    ) -> None:
        self._trainer = trainer
        self._parameters = parameters
        self._is_declared = is_declared
        self._waits = False  # a release for its step
        self._released: list[Tensor | None] = []
        self._marks = WriteCounts([])  # of what was released
        self._is_edited = False  # before it was clipped
        self._asked: dict[Clipping, Callable[[], None]] = {}  # before the release
        self._clipped: list[Clipping] = []  # since the release
        self._usual: list[Clipping] | None = None  # what the first step clipped
        self._state: list[tuple[Tensor, int]] = []  # of the optimizer, with versions
        self._has_other_state = False
        self.skipped = 0
        """Batches that were charged and answered, and not stepped for."""

    def begin(self) -> None:
        """Remember what was put into ``p.grad``, and clip it if that was asked for."""
        self._waits, self._is_edited, self._clipped = True, False, []
        self._look()
        asked, self._asked = self._asked, {}
        for clipping, clip in asked.items():
            self.clip(clipping, clip)

    def clip(self, clipping: Clipping, clip: Callable[[], None]) -> None:
        """Clip as Lightning does, and expect what it gives; before a release, wait for it."""
        if clipping[0] <= 0:
            return  # asks for nothing
        if not self._waits:
            self._asked[clipping] = clip
            return
        self._is_edited = self._is_edited or self._differ()
        clip()
        self._clipped.append(clipping)
        self._look()

    def _look(self) -> None:
        self._released = self._gradients()
        self._marks = WriteCounts([each for each in self._released if each is not None])

    def _differ(self) -> bool:
        is_same = _are_the_same(self._gradients(), self._released)
        return not is_same or bool(self._marks.written())

    def _gradients(self) -> list[Tensor | None]:
        return list(map(_GRADIENT, self._parameters))

    def skip(self) -> str | None:
        """Count a batch without its step; return why the run may not go on."""
        self.skipped += 1
        is_fault = self._usual is not None and not self._is_declared
        return _SKIPPED if is_fault else None

    def note_state(self, optimizer: Optimizer) -> None:
        """Remember the optimizer's moments: until it steps again, nothing else may write to them."""
        self._state = _state_of(optimizer)

    def look_at_state(self, optimizer: Optimizer) -> None:
        """Compare them when a step begins: what a step itself does to them first is its own."""
        before = self._state
        if not before:  # as of SGD without momentum
            return
        now = {id(each): version for each, version in _state_of(optimizer)}
        self._has_other_state |= any(now.get(id(each)) != version for each, version in before)

    def fault(self, optimizer: Optimizer) -> str | None:
        """Return why the optimizer may not use the gradients; None if it may. Once a release."""
        found = self._fault(optimizer)
        self._released, self._marks = [], WriteCounts([])  # free when the next step zeroes them
        return found

    def _fault(self, optimizer: Optimizer) -> str | None:
        is_first, self._waits = self._usual is None, False
        if is_first:
            self._usual = self._clipped
        if is_first and self.skipped and not self._is_declared:
            return _SKIPPED
        own, moved = set(map(id, self._parameters)), set(map(id, _moved(optimizer)))
        what = self._frozen(moved - own)
        if what is None and not self._is_declared:
            what = self._edit(optimizer, is_smaller=not own <= moved)
        if what is None:
            return None
        cure = _CLIP[self._trainer.lightning_module.automatic_optimization]
        return _EDITED.format(what, ", ".join(self._writers(optimizer)), cure)

    def _edit(self, optimizer: Any, *, is_smaller: bool) -> str | None:
        """Name a difference between what was released and what is used."""
        if is_smaller:
            return "a parameter was taken out of the optimizer"
        # What fused optimizers read besides p.grad.
        if not (
            getattr(optimizer, "grad_scale", None) is getattr(optimizer, "found_inf", None) is None
        ):
            return "the optimizer was told to scale it or to leave it out"
        if self._is_edited or self._differ():
            return "it was written to, or replaced"
        if self._usual != self._clipped:
            return "clip_gradients() was called otherwise than in the first step"
        self.look_at_state(optimizer)
        if self._has_other_state:
            return "its state (momentum and other moments) was written to between two steps"
        return None

    def _frozen(self, others: set[int]) -> str | None:
        """Name the frozen parameters that would move, of those with these ids."""
        if not others:
            return None
        named = self._trainer.lightning_module.named_parameters()
        frozen = [(name, p.grad) for name, p in named if id(p) in others]
        moved = [name for name, grad in frozen if grad is not None and bool(grad.any())]
        return _FROZEN.format(moved[:5]) if moved else None

    def _writers(self, optimizer: Optimizer) -> Iterator[str]:
        """Yield, by the model's public structure, whatever can write to it in between."""
        module, trainer = self._trainer.lightning_module, self._trainer
        for hook in _HOOKS:
            if is_overridden(hook, module):
                yield f"{type(module).__name__}.{hook}"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if is_overridden(_BEFORE_STEP, callback):
                yield f"{type(callback).__name__}.{_BEFORE_STEP}"
        if not _is_lightnings(kind := type(trainer.precision_plugin)):
            yield f"{kind.__name__}"
        yield f"hooks of {type(optimizer).__name__}.step"


def _state_of(optimizer: Optimizer) -> list[tuple[Tensor, int]]:
    return [
        (each, 0 if each.is_inference() else each._version)
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for each in state.values()
        if isinstance(each, Tensor)
    ]


def watched(plugin: Precision, guard: GradientGuard, private: Optimizer) -> Precision:
    """Return the plugin with a ``clip_gradients`` that notes its calls for the private optimizer.

    It is of a subclass, with the attributes of the plugin, not copies of them. A plugin that clips in
    its own way is returned as it is: what it does is an edit. It has no loss scaler, whose factor and
    skipped steps would follow overflows; the passes have a constant one.
    """
    kind: Any = type(plugin)
    if not all(_is_lightnings(getattr(kind, name)) for name in _CLIPS):
        return plugin

    def clip_gradients(
        self: Precision,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        clip = partial(plugin.clip_gradients, optimizer, clip_val, gradient_clip_algorithm)
        if getattr(optimizer, "optimizer", optimizer) is private:  # in Lightning's wrapper, or bare
            guard.clip((clip_val, gradient_clip_algorithm), clip)
        else:
            clip()

    names = {"__module__": kind.__module__, "clip_gradients": clip_gradients}
    seen: Precision = object.__new__(type(kind.__name__, (kind,), names))
    seen.__dict__ = vars(plugin)
    if getattr(plugin, "scaler", None) is not None:
        seen.__dict__ = {**vars(plugin), "scaler": None}
    return seen


def _is_lightnings(part: Any) -> bool:
    return str(part.__module__).partition(".")[0] == "lightning"
