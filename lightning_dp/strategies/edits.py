"""The gradient that the optimizer uses is the one that was released, or one that Lightning clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._shards import held_here
from lightning_dp.functional import real

__all__ = ["GradientEdits", "Gradients", "watched"]

Clipping: TypeAlias = tuple[float, GradClipAlgorithmType]

_EDITED = (
    "The gradient that the optimizer is about to use is not what was released: {}. Between the two "
    "may write: {}. An edit that looks at the batch, its loss or a metric makes the step follow the "
    "records without noise, and ε would not hold. To clip the private gradient, {}. Another function "
    "of released values alone is to be declared, and is then printed in the report: "
    "DifferentialPrivacy(gradient_edits='what is done')."
)
_FROZEN = (
    "{} is about to move the frozen parameters {}, which have a gradient (an old one that was left in "
    "p.grad, or one that a hook wrote). Give the optimizer trainable parameters only: "
    "[p for p in self.parameters() if p.requires_grad]."
)
_MOMENTS = (
    "The state of {} (momentum and other moments) was written to between two steps. Written by the "
    "batch, its loss or a metric, it makes the step follow the records without noise, and ε would "
    "not hold. Leave it to the optimizer; what is done by released values or step numbers alone is to "
    "be declared, and is then printed in the report: "
    "DifferentialPrivacy(gradient_edits='what is done')."
)
_SKIPPED = (
    "optimizer.step() was called for some batches and not for others. Which ones can come from the "
    "records (a loss that spikes, a gradient that is not finite), and a step that is left out has no "
    "noise, so ε would not hold. Call it once for every batch; accumulate with "
    "Trainer(accumulate_grad_batches=...). If numbers of steps alone decide, it is to be declared, and "
    "is then printed in the report: DifferentialPrivacy(gradient_edits='what is left out')."
)
_CLIP = {
    True: "set Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)",
    False: "call self.clip_gradients() with constants in training_step, before optimizer.step()",
}
_BEFORE_STEP = "on_before_optimizer_step"
_LATER = 32  # steps of which a device is asked at once
_ENTRIES = 2**16  # that are copied; of larger models only so many
_RUN = 64  # entries that are copied together
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
_SCALES = ("grad_scale", "found_inf")  # what fused optimizers read besides p.grad
_HOOKS = (_BEFORE_STEP, "configure_gradient_clipping", "optimizer_step")
_CLIPS = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "main_params")


class GradientEdits:
    """Compares ``p.grad``, when the optimizer is about to use it, with what was released.

    - It must be the same tensor, in the same memory, and nobody may have written to it: version
      counters tell. What they miss (``p.grad.data``, NumPy) the bits show, of which a copy is kept: of
      all entries, or of every k-th where there are more than 65,536, others at each step. A device
      is not waited for: what it says of the bits is read later (:meth:`written`).
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
        self._steps = 0
        self._expected: Gradients | None = None  # None where nothing is compared
        self._is_edited = False  # before it was clipped
        self._bits: list[Tensor] = []  # of releases: whether they changed, as their device will say
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
        self._steps += 1
        self._expected = None if self._is_declared else self._now()
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
        if self._expected is not None:
            self._is_edited = self._is_edited or self._differ(self._expected)
        clip()
        self._clipped.append(clipping)
        if self._expected is not None:
            self._expected = self._now()

    def _now(self) -> Gradients:
        return Gradients.of(self._parameters, self._steps)

    def _differ(self, expected: Gradients) -> bool:
        """Tell whether the gradients are not those; of their bits, only where that is no wait."""
        differ = expected.differ(self._parameters, self._steps)
        if isinstance(differ, bool):
            return differ
        self._bits.append(differ)
        return False

    def written(self, optimizer: Optimizer, *, at_once: bool = True) -> str | None:
        """Return why earlier steps hold an edit that only the bits show; None if none does.

        Args:
            optimizer: the private one.
            at_once: before anything is saved, and at the end. Else as soon as there are 32 of them.
        """
        if not self._bits or not (at_once or len(self._bits) >= _LATER):
            return None
        bits, self._bits = self._bits, []
        return self._edited("it was written to", optimizer) if torch.stack(bits).any() else None

    def _edited(self, what: str, optimizer: Optimizer) -> str:
        cure = _CLIP[self._trainer.lightning_module.automatic_optimization]
        return _EDITED.format(what, ", ".join(self._writers(optimizer)), cure)

    def skip(self) -> str | None:
        """Count a batch without its step; return why the run may not go on."""
        self.skipped += 1
        is_fault = self._usual is not None and not self._is_declared
        return _SKIPPED if is_fault else None

    def note_state(self, optimizer: Optimizer) -> None:
        """Remember the optimizer's moments: until it steps again, nobody else may write to them."""
        self._state = list(_versions(optimizer))

    def look_at_state(self, optimizer: Optimizer) -> None:
        """Compare them when a step begins: what a step itself does to them first is its own."""
        now = {id(tensor): version for tensor, version in _versions(optimizer)}
        if any(now.get(id(tensor)) != version for tensor, version in self._state):
            self._has_other_state = True

    def fault(self, optimizer: Optimizer) -> str | None:
        """Return why the optimizer may not use the gradients; None if it may. Once a release."""
        expected = self._expected
        found = None if expected is None else self._found(optimizer, expected)
        is_late = self._usual is None and self.skipped and not self._is_declared
        if self._usual is None:
            self._usual = self._clipped
        self._waits, self._expected = False, None
        if is_late:
            return _SKIPPED
        if found is None:
            earlier = self.written(optimizer, at_once=False)
            return earlier or self._of_frozen(optimizer) or self._of_state(optimizer)
        return self._edited(found, optimizer)

    def _found(self, optimizer: Optimizer, expected: Gradients) -> str | None:
        groups = [each for group in optimizer.param_groups for each in group["params"]]
        if not {id(param) for param in self._parameters} <= {id(param) for param in groups}:
            return "a parameter was taken out of the optimizer"
        if any(getattr(optimizer, name, None) is not None for name in _SCALES):
            return "the optimizer was told to scale it or to leave it out"
        if self._is_edited or self._differ(expected):
            return "it was written to, or replaced"
        if self._usual not in (None, self._clipped):
            return "clip_gradients() was called otherwise than in the first step"
        return None

    def _of_frozen(self, optimizer: Optimizer) -> str | None:
        """Return why frozen parameters would move."""
        trained = {id(param) for param in self._parameters}
        moved = {
            id(param)
            for param in (each for group in optimizer.param_groups for each in group["params"])
            if id(param) not in trained and param.grad is not None and bool(param.grad.any())
        }
        if not moved:
            return None
        module = self._trainer.lightning_module
        names = [name for name, param in module.named_parameters() if id(param) in moved]
        return _FROZEN.format(type(optimizer).__name__, names[:5])

    def _of_state(self, optimizer: Optimizer) -> str | None:
        """Return why the optimizer's moments are not its own."""
        self.look_at_state(optimizer)
        is_fault = self._has_other_state and not self._is_declared
        return _MOMENTS.format(type(optimizer).__name__) if is_fault else None

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


@dataclass(frozen=True)
class Gradients:
    """All that tells whether gradients are the same, without a whole copy of them.

    Args:
        marks: ids, places in memory, and how often each was written to.
        bits: of some of their entries, on their device.
        held: the tensors, so that ids stay theirs.
    """

    marks: tuple[tuple[int, ...], ...]
    bits: tuple[Tensor, ...]
    held: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], step: int) -> Gradients:
        """Look at the gradients of a step; over some steps, all entries have their turn."""
        found = _gradients(parameters)
        dense = _dense(found)
        bits = tuple([each.clone() for each in _sample(dense, step)])
        return cls(_marks(found, dense), bits, found)

    def differ(self, parameters: Sequence[nn.Parameter], step: int) -> bool | Tensor:
        """Tell whether gradients of the same step are others now; of bits that a device holds, there."""
        found = _gradients(parameters)
        dense = _dense(found)
        if _marks(found, dense) != self.marks:
            return True
        pairs = list(zip(_sample(dense, step), self.bits, strict=True))
        if all(then.is_cpu for _, then in pairs):
            return not all(torch.equal(now, then) for now, then in pairs)
        return torch.stack([(now != then).any() for now, then in pairs]).any()


def _gradients(parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
    return tuple([param.grad for param in parameters])


def _dense(found: Sequence[Tensor | None]) -> list[Tensor]:
    given = held_here([gradient for gradient in found if gradient is not None])
    return [here for here in given if here.layout is torch.strided]


def _marks(found: Sequence[Tensor | None], dense: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return ids of all; of the dense ones places in memory, and how often each was written to."""
    counted = [each for each in dense if not each.is_inference()]
    versions = tuple(map(attrgetter("_version"), counted))
    return tuple(map(id, found)), tuple(map(Tensor.data_ptr, dense)), versions


def _sample(gradients: Sequence[Tensor], step: int) -> Iterator[Tensor]:
    """Yield bits of the gradients, evenly spread; at once of those that share their memory.

    Of a long vector every k-th run of entries: single ones, as of its rest, would have all of it read.
    """
    bases = map(attrgetter("_base"), gradients)
    wholes = [each if base is None else base for each, base in zip(gradients, bases, strict=True)]
    vectors = {id(whole): whole for whole in wholes}
    stride = max(1, sum(each.numel() for each in vectors.values()) // _ENTRIES)
    for each in vectors.values():
        entries = real(each.detach()).reshape(-1)
        bits = entries.view(_INTEGERS[entries.itemsize])
        if stride == 1:
            yield bits
            continue
        whole = len(bits) // (stride * _RUN) * (stride * _RUN)
        rest = bits[whole:]
        if whole:
            yield bits[:whole].view(-1, stride, _RUN)[:, step % stride]
        yield rest[step % stride % max(1, len(rest)) :: stride]


def _versions(optimizer: Optimizer) -> Iterator[tuple[Tensor, int]]:
    """Yield the tensors of an optimizer's state, with the numbers of times they were written to."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and not value.is_inference():
                yield value, value._version


def watched(plugin: Precision, edits: GradientEdits, private: Optimizer) -> Precision:
    """Return the plugin with a ``clip_gradients`` that tells of its calls for the private optimizer.

    It is of a subclass, with the attributes of the plugin, not copies of them. A plugin that clips in
    its own way is returned as it is: what it does is an edit.
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
            edits.clip((clip_val, gradient_clip_algorithm), clip)
        else:
            clip()

    names = {"__module__": kind.__module__, "clip_gradients": clip_gradients}
    seen: Precision = object.__new__(type(kind.__name__, (kind,), names))
    seen.__dict__ = vars(plugin)
    return seen


def _is_lightnings(part: Any) -> bool:
    return str(part.__module__).partition(".")[0] == "lightning"
