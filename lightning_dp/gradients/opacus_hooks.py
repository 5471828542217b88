"""Per-sample gradients from Opacus' hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from opacus.grad_sample.functorch import prepare_layer
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, DPRNNBase
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

from lightning_dp.gradients.base import (
    AbstractGradientEngine,
    UncoveredParameterError,
    UnsupportedModelError,
    as_unsupported,
)
from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.opacus_limits import (
    is_trained,
    refuse_call,
    refuse_in_place,
    refuse_layers,
    refuse_packed,
)

__all__ = ["OpacusCapture", "OpacusHooks"]

# The first layer's input never requires a gradient, and torch warns of it in every run.
_FIRST_LAYER = "Full backward hook is firing when gradients are computed"


class OpacusHooks(AbstractGradientEngine):
    """Opacus' ``GradSampleHooks`` on the unwrapped model.

    Every layer Opacus has a rule for, and through ``torch.func`` any other layer without buffers.
    Materialises one gradient per record and parameter: memory is B times the parameters.

    Of Opacus' own layers two would be given the gradients of other records, which are refused:
    ``DPMultiheadAttention`` with ``batch_first=False`` or ``add_bias_kv=True``, and recurrent layers
    called with packed sequences, whose rows are in the order of the lengths. The book-keeping engine
    covers both.
    """

    name = "hooks"

    def __init__(self) -> None:
        self._capture: OpacusCapture | None = None
        self._hooks = ModuleHooks()
        self._params: Sequence[nn.Parameter] = ()
        self._all_modules: list[tuple[str, nn.Module]] = []

    def attach(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        self.detach()
        refuse_layers(module)
        for name, part in module.named_modules():
            if isinstance(part, DPRNNBase) and is_trained(part):
                register = partial(part.register_forward_pre_hook, with_kwargs=True)
                self._hooks.add(part, register, refuse_packed)
            if getattr(part, "inplace", False):
                refuse = partial(refuse_in_place, name)
                self._hooks.add(part, part.register_forward_pre_hook, refuse)
        warnings.filterwarnings("ignore", message=_FIRST_LAYER)
        self._params, self._all_modules = params, list(module.named_modules())
        try:
            self._capture = OpacusCapture(module)
        except Exception as error:  # NotImplementedError for buffers, others from copying a layer
            self.detach()
            raise UnsupportedModelError(
                f"Opacus cannot compute per-sample gradients for this model: {error} Freeze the "
                "layer, replace it, or keep its buffers in a module without trainable parameters."
            ) from error

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> MaterialisedGradients:
        if self._capture is None:
            raise RuntimeError("The engine watches no model: attach() must come first.")
        self._refuse_unfinished(self._capture)
        taken = self._capture.take(self._params)
        if any(isinstance(gradient, list) for gradient in taken):
            raise RuntimeError(
                "Two backward passes ran for one batch: a record would count twice. "
                "Add the losses up and call backward once."
            )
        self._refuse_uncovered(touched, taken)
        return MaterialisedGradients(self._params, taken, scale)

    def _refuse_uncovered(
        self, touched: Mapping[str, nn.Parameter], taken: Sequence[Tensor | None]
    ) -> None:
        covered = {id(p) for p, g in zip(self._params, taken, strict=True) if g is not None}
        trained = {id(param) for param in self._params}
        missing = [n for n, p in touched.items() if id(p) in trained and id(p) not in covered]
        if missing:
            raise UncoveredParameterError(missing)

    def _refuse_unfinished(self, capture: OpacusCapture) -> None:
        """Refuse a lone forward pass: Opacus pairs passes last-in-first-out, and it would shift them."""
        lone = [name for name, module in self._all_modules if capture.is_waiting(module)]
        if lone:
            raise UnsupportedModelError(
                f"A forward pass in training mode was not back-propagated (layers {lone[:5]}): its "
                "records would be mistaken for others. Put it under torch.no_grad(), or use all of "
                "its output in the loss."
            )

    def drop(self) -> None:
        if self._capture is not None:
            self._capture.drop()

    def rest(self) -> None:
        for hooks in self._all_hooks():
            hooks.take_off()

    def wake(self) -> None:
        for hooks in self._all_hooks():
            hooks.put_on()

    def _all_hooks(self) -> list[ModuleHooks]:
        return [self._hooks, *([] if self._capture is None else [self._capture.hooks])]

    def detach(self) -> None:
        self._hooks.take_off()
        if self._capture is not None:
            self._capture.remove()
        self._capture, self._hooks = None, ModuleHooks()
        self._params, self._all_modules = (), []
        _warn_again()


def _warn_again() -> None:
    """Take the engine's filter out of those of the process, which other code shares."""
    filters = cast(list[Any], warnings.filters)
    filters[:] = [each for each in filters if getattr(each[1], "pattern", "") != _FIRST_LAYER]


# Where Opacus 1.6.0 remembers inputs, functions and gradients of records.
_ON_MODULES = ("activations", "max_batch_len", "ft_compute_sample_grad")
_ON_PARAMETERS = ("grad_sample", "_current_grad_sample", "_forward_counter")


class OpacusCapture(GradSampleHooks):  # type: ignore[misc]
    """``GradSampleHooks`` of which a model, its copies and its pickles hold nothing.

    Opacus writes to attributes of modules and parameters. Here they are there while a hook of
    Opacus runs and at no other time, so nobody else sees inputs or gradients without noise.

    Args:
        module: the whole model.

    Raises:
        NotImplementedError: if a trained layer has buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.hooks = ModuleHooks()
        self._names = {part: name for name, part in module.named_modules()}
        self._kept: dict[nn.Module | nn.Parameter, dict[str, Any]] = {}
        try:
            super().__init__(module, strict=True, loss_reduction="mean")
        except Exception:
            self.hooks.take_off()
            raise
        finally:
            self._take_back(module)

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Hang the hooks on, as Opacus does, but so that no copy has them."""
        back = partial(self._back, loss_reduction=loss_reduction, batch_first=batch_first)
        for part in self.iterate_submodules(self._module):
            if type(part) in (DPRNN, DPLSTM, DPGRU):  # theirs are on the layers inside
                continue
            if force_functorch or type(part) not in self.GRAD_SAMPLERS:
                prepare_layer(part, batch_first=batch_first)
            before = partial(part.register_forward_pre_hook, with_kwargs=True)
            self.hooks.add(part, before, self._before)
            self.hooks.add(part, part.register_forward_hook, self._forward)
            self.hooks.add(part, part.register_full_backward_hook, back)
        self.enable_hooks()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if has_trainable_params(module):
            refuse_call(self._names[module], module, args, kwargs)

    def _forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        with self._lent_to(module), as_unsupported(self._names[module], module):
            self.capture_activations_hook(module, inputs, output)

    def _back(
        self, module: nn.Module, before: Any, after: Any, *, loss_reduction: str, batch_first: bool
    ) -> None:
        with self._lent_to(module), as_unsupported(self._names[module], module):
            self.capture_backprops_hook(module, before, after, loss_reduction, batch_first)

    def rearrange_grad_samples(self, **arguments: Any) -> tuple[Any, Tensor]:
        """Do as Opacus does, in plain memory: its rules read inputs as if they lay there in order."""
        activations, back = super().rearrange_grad_samples(**arguments)
        return [each.contiguous() for each in activations], back.contiguous()

    @contextmanager
    def _lent_to(self, module: nn.Module) -> Iterator[None]:
        """Inside, what is remembered of a module and its parameters is where Opacus looks for it."""
        owners: list[nn.Module | nn.Parameter] = [module, *module.parameters()]
        for each in owners:
            vars(each).update(self._kept.get(each, {}))
        try:
            yield
        finally:
            self._take_back(module, recurse=False)

    def _take_back(self, module: nn.Module, *, recurse: bool = True) -> None:
        for part in module.modules() if recurse else [module]:
            self._kept[part] = _taken(part, _ON_MODULES)
        for param in module.parameters():
            self._kept[param] = _taken(param, _ON_PARAMETERS)

    def take(self, params: Sequence[nn.Parameter]) -> list[Any]:
        """Hand over, once, each parameter's gradients per record; a list if there are several."""
        taken = [self._kept.get(param, {}).get("grad_sample") for param in params]
        for kept in self._kept.values():
            if "grad_sample" in kept:
                kept["grad_sample"] = None
        return taken

    def is_waiting(self, module: nn.Module) -> bool:
        """Tell whether a forward pass of the module was not back-propagated yet."""
        return bool(self._kept.get(module, {}).get("activations"))

    def drop(self) -> None:
        """Forget all passes."""
        for each, kept in self._kept.items():
            if isinstance(each, Tensor):
                kept.pop("_current_grad_sample", None)
                kept.update(grad_sample=None, _forward_counter=0)
            else:
                kept.pop("activations", None)
                kept.pop("max_batch_len", None)

    def remove(self) -> None:
        """Leave the model as it was; running passes find nothing."""
        self.disable_hooks()
        self.hooks.take_off()
        self._kept = {}


def _taken(owner: nn.Module | nn.Parameter, names: Sequence[str]) -> dict[str, Any]:
    return {name: vars(owner).pop(name) for name in names if name in vars(owner)}
