"""Layers that normalise over the batch, and what can stand in their place."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = [
    "BatchNorm",
    "FixedNorm",
    "Norms",
    "group_norm",
    "has_own_forward",
    "has_seen_data",
    "is_constant",
    "normalises_over_the_batch",
    "number_of_groups",
    "with_what_followed",
    "without_statistics",
]

BatchNorm: TypeAlias = _BatchNorm | _InstanceNorm  # they share all attributes that are used here
Norms: TypeAlias = Literal["auto", "group", "fixed"]

MOST_GROUPS = 32  # the number of Wu and He, 2018 (arXiv:1803.08494), for the widest layers


def normalises_over_the_batch(layer: nn.Module) -> bool:
    """Return whether a layer mixes records, or keeps statistics of them, when it trains.

    Example:
        >>> [normalises_over_the_batch(each) for each in (nn.BatchNorm1d(2), nn.GroupNorm(1, 2))]
        [True, False]
    """
    if isinstance(layer, _InstanceNorm):
        return layer.track_running_stats
    return isinstance(layer, _BatchNorm)


def is_constant(layer: nn.Module) -> bool:
    """Return whether a normalising layer is frozen and in eval(): its statistics stay."""
    has_statistics = getattr(layer, "running_mean", None) is not None
    is_frozen = not any(param.requires_grad for param in layer.parameters())
    return has_statistics and is_frozen and not layer.training


def has_own_forward(layer: BatchNorm) -> bool:
    """Tell whether a subclass computes something that nobody here knows."""
    known = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
    return type(layer).forward not in known and not _is_with_activation(layer)


def _is_with_activation(layer: BatchNorm) -> bool:
    """True for timm's BatchNorm that applies a dropout and an activation to what it has normalised."""
    kind = type(layer)
    return kind.__module__.startswith("timm.layers.") and "BatchNormAct" in kind.__name__


def has_seen_data(layer: BatchNorm) -> bool:
    """Tell whether a layer has statistics, and other ones than it was made with."""
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool(mean.any()) or bool((var != 1).any())


def number_of_groups(channels: int, channels_per_group: int) -> int:
    """Return the largest number of equal groups of at least so many channels; at most 32.

    One group, if there are fewer channels. A group of one channel would make a constant of it
    wherever a layer sees one position for each record, as after a linear layer.

    Example:
        >>> [number_of_groups(channels, 16) for channels in (7, 24, 48, 64, 1024)]
        [1, 1, 3, 4, 32]
    """
    fits = (n for n in range(MOST_GROUPS, 1, -1) if channels % n == 0)
    return next((n for n in fits if channels // n >= channels_per_group), 1)


def group_norm(layer: BatchNorm, channels_per_group: int) -> nn.GroupNorm:
    """Return a GroupNorm with the very parameters of a layer."""
    groups = number_of_groups(layer.num_features, channels_per_group)
    new = nn.GroupNorm(groups, layer.num_features, layer.eps, affine=False)
    new.affine, new.weight, new.bias = layer.affine, layer.weight, layer.bias
    return new


def without_statistics(layer: _InstanceNorm) -> _InstanceNorm:
    """Return an InstanceNorm that keeps none, with the very parameters of a layer."""
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    kind = next(each for each in kinds if isinstance(layer, each))
    new = kind(layer.num_features, layer.eps, affine=False)
    new.affine, new.weight, new.bias = layer.affine, layer.weight, layer.bias
    return new


def with_what_followed(layer: BatchNorm, new: nn.Module) -> nn.Module:
    """Return the new layer, with the dropout and the activation that were inside of the old one."""
    if not _is_with_activation(layer):
        return new
    inside = OrderedDict(layer.named_children())
    return nn.Sequential(OrderedDict(norm=new, **inside))


class FixedNorm(nn.Module):
    r"""A normalisation with constants, :math:`\gamma (x - \mu) / \sqrt{\sigma^2 + \epsilon} + \beta`.

    It is what BatchNorm computes in eval mode, here in train mode as well. Nothing is written to μ and
    σ², and a record moves its own output only. They were computed from data without noise, so ε says
    nothing about these data: they must be public.

    Args:
        layer: has running statistics; its parameters are used, its statistics are copied.

    Shape:
        (n, channels, ...), as the layer's.

    Raises:
        ValueError: if the layer has no statistics.

    Example:
        >>> import torch
        >>> old, x = nn.BatchNorm1d(3).eval(), torch.randn(4, 3)
        >>> torch.equal(FixedNorm(old)(x), old(x))
        True
    """

    running_mean: Tensor
    running_var: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layer: BatchNorm) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(f"layer={layer} has no running statistics.")
        self.num_features, self.eps = layer.num_features, layer.eps
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        self.register_buffer("running_mean", layer.running_mean.detach().clone())
        self.register_buffer("running_var", layer.running_var.detach().clone())

    def normalised(self, x: Tensor) -> Tensor:
        """Return the part without parameters, (x - μ)/√(σ² + eps): shape of x."""
        return F.batch_norm(x, self.running_mean, self.running_var, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised: shape of x."""
        mean, var, weight, bias = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        return f"{self.num_features}, eps={self.eps}, affine={self.weight is not None}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load what a BatchNorm has saved as well: its count of batches is left out."""
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
