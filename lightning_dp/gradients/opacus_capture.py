"""Opacus' hooks, with what they remember kept beside the model instead of on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from opacus.grad_sample.functorch import prepare_layer
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from opacus.utils.module_utils import has_trainable_params
from torch import Tensor, nn

from lightning_dp.gradients.base import as_unsupported
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.opacus_limits import refuse_call

__all__ = ["OpacusCapture"]

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
        """Put what is remembered of a module and its parameters, inside, where Opacus looks for it."""
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
        """Leave the model as it was; passes that are under way find nothing."""
        self.disable_hooks()
        self.hooks.take_off()
        self._kept = {}


def _taken(owner: nn.Module | nn.Parameter, names: Sequence[str]) -> dict[str, Any]:
    return {name: vars(owner).pop(name) for name in names if name in vars(owner)}
