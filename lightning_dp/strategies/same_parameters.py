"""The trained parameters are those that the fit began with, at every step."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

__all__ = ["SameParameters"]


class SameParameters:
    """Remembers which parameters are trained, and refuses to go on with others.

    Args:
        module: the user's model.
        optimizer: its one optimizer.
    """

    def __init__(self, module: LightningModule, optimizer: Optimizer) -> None:
        self.trained = _trained(optimizer)
        """The parameters that the optimizer moves, in its order."""
        self._module = module
        self._all = tuple(module.parameters())
        self._trainable = [param.requires_grad for param in self._all]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that moves others.

        Raises:
            RuntimeError: naming the cure.
        """
        now = _trained(optimizer)
        changed = len(now) != len(self.trained) or any(
            a is not b for a, b in zip(now, self.trained, strict=True)
        )
        if changed or [param.requires_grad for param in self._all] != self._trainable:
            raise RuntimeError(
                "The set of trained parameters changed during fit (a fine-tuning callback, "
                "add_param_group or requires_grad_?): new ones would be trained without privacy. "
                "Decide before fit which parameters are trained."
            )

    def check_model(self) -> None:
        """Refuse a model that has others: a frozen part may be exchanged (a copy of a teacher).

        Raises:
            RuntimeError: naming the cure.
        """
        here = {id(p) for p in self._module.parameters() if p.requires_grad}
        known = {id(p) for p in self._all if p.requires_grad}
        if here == known:
            return
        named = self._module.named_parameters()
        new = [name for name, p in named if p.requires_grad and id(p) not in known]
        raise RuntimeError(
            f"Trainable parameters of the LightningModule were replaced during fit ({len(known - here)} "
            f"are gone, {len(new)} are new: {new[:5]}). The optimizer has those of before, and would "
            "train stale copies on noise alone. Wrap the model or add adapters in __init__ or "
            "configure_model; freeze a copy (a target network) with requires_grad_(False)."
        )


def _trained(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    return tuple(p for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
