"""Layers that cannot be trained privately, or only slowly, and their replacements."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp._validate import flag, one_of, whole
from lightning_dp.gradients.module_hooks import runs_forward_of

__all__ = ["FixedNorm", "fix", "is_constant", "normalises_over_the_batch"]

M = TypeVar("M", bound=nn.Module)
_Replaceable: TypeAlias = nn.RNNBase | nn.MultiheadAttention

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)

_SHOWN = 4  # names of layers in one line
_MANY = 1000  # items of a list that are looked into
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_GROUP = (
    "Each record is normalised alone. The parameters are the very same ones; running statistics are "
    "gone. The model computes something else than before, so it has to be trained."
)
_DROPPED = (
    " These layers had statistics of an earlier training. If its data were public, fix(model, "
    "norms='fixed') keeps them, and with them what the model computes in eval mode."
)
_FIXED = (
    "Statistics of an earlier training are constants now: the model computes what it computed in eval "
    "mode. ε does not cover them, so they must come from public data."
)
_CONSTANT = (
    "has one channel, and GroupNorm would make a constant of it. Leave the layer out, or standardise by "
    "public constants."
)
_INSTANCE = "It computes what it computed in train mode; running statistics are gone."
_SAME = (
    "The same function of the same values, by smaller steps. The parameters are new objects, so make "
    "optimizers afterwards."
)
_UNSCALED = (
    "max_norm is left out: the forward pass wrote into the weights. max_grad_norm bounds what a record "
    "does."
)


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
    """Return whether a subclass may compute something else."""
    known = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
    return type(layer).forward not in known and not _is_with_activation(layer)


def _is_with_activation(layer: BatchNorm) -> bool:
    """True for timm's BatchNorm that applies a dropout and an activation to what it has normalised."""
    kind = type(layer)
    return kind.__module__.startswith("timm.layers.") and "BatchNormAct" in kind.__name__


def has_seen_data(layer: BatchNorm) -> bool:
    """Return whether a layer has statistics, and other ones than it was made with."""
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool(mean.any()) or bool((var != 1).any())


def number_of_groups(channels: int, channels_per_group: int) -> int:
    """Return the largest number of equal groups with at least this many channels; at most 32.

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


# -- fix ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """One layer and its replacement.

    Args:
        name: of the layer in the model.
        kind: its type.
        became: the type of the new one; "" if it is still there.
        words: what that means, or why it is still there.
    """

    name: str
    kind: str
    became: str
    words: str


def fix(
    model: M, *, norms: Norms = "auto", channels_per_group: int = 16, attention: bool = False
) -> M:
    """Replace layers that cannot be trained privately, in place; print the changes, return the model.

    - BatchNorm and SyncBatchNorm become GroupNorm, or constants (see ``norms``); InstanceNorm loses
      its running statistics.
    - ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` that are trained become Opacus' ``DPLSTM``, ``DPGRU`` and
      ``DPRNN``: the same function. Only ``engine="hooks"`` needs it: those of torch train as they are.
    - ``nn.MultiheadAttention`` becomes ``DPMultiheadAttention`` with ``attention=True``, for
      ``engine="hooks"`` as well.
    - ``max_norm`` of embeddings becomes None.

    Everything else is left alone. A layer that has two names has both afterwards. Call it before
    optimizers are made and before ``torch.compile``, best in ``__init__`` of a LightningModule, as
    ``self.net = fix(resnet18())``: checkpoints load as ever then.

    Args:
        model: a LightningModule or any other module, which is changed itself. Of a model that is such
            a layer itself, what is returned is the new one.
        norms: what replaces layers that normalise over the batch. ``"group"``: GroupNorm, with
            weights and biases taken over. ``"fixed"``: the statistics of an earlier training as
            constants; only for statistics of public data, ε does not cover them. ``"auto"``: constants
            for frozen layers that have such statistics, as in a pretrained backbone, GroupNorm for all
            others.
        channels_per_group: of GroupNorm, at least; there are at most 32 groups, all of one size. Groups
            of one channel make a constant of it where a layer sees one position of each record.
        attention: replace ``nn.MultiheadAttention`` as well.

    Returns:
        The model. Lightning's logger (INFO) lists the changes, and what must be changed by hand.

    Raises:
        TypeError: if it is not a module.
        ValueError: if an argument is out of its range.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
        >>> fix(model)[1].num_groups
        2
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}.")
    checked = one_of(get_args(Norms))("norms", norms)
    per_group = whole("channels_per_group", channels_per_group)
    fixing = _Fixing(model, checked, per_group, flag("attention", attention))
    fixed = fixing.run()
    rank_zero_info(_in_words(type(model).__name__, fixing.changes))
    return cast(M, fixed)


class _Fixing:
    """One run over a model.

    Args:
        model, norms, per_group, attention: the arguments of :func:`fix`.
    """

    def __init__(self, model: nn.Module, norms: Norms, per_group: int, attention: bool) -> None:
        self._model, self._norms, self._per_group = model, norms, per_group
        self._slow = (nn.RNNBase, nn.MultiheadAttention) if attention else (nn.RNNBase,)
        self._new: dict[nn.Module, nn.Module] = {}
        self._users = Counter(
            param for layer in model.modules() for param in set(layer.parameters(recurse=False))
        )
        self.changes: list[_Change] = []

    def run(self) -> nn.Module:
        """Replace the layers under all their names; return the model, or its replacement."""
        for name, layer in list(self._model.named_modules()):
            self._drop_max_norm(name, layer)
            if normalises_over_the_batch(layer):
                self._replace_norm(name, cast(BatchNorm, layer))
            elif isinstance(layer, self._slow) and any(p.requires_grad for p in layer.parameters()):
                self._replace_slow(name, layer)
        for name, layer in list(self._model.named_modules(remove_duplicate=False)):
            if name and layer in self._new:
                self._model.set_submodule(name, self._new[layer])
        for name, part in self._model.named_modules():
            self._look_into(name, part)
        return self._new.get(self._model, self._model)

    def _drop_max_norm(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            layer.max_norm = None
            self._note(name, layer, "without max_norm", _UNSCALED)

    def _replace_norm(self, name: str, layer: BatchNorm) -> None:
        reason = _unreplaceable(layer)
        if has_own_forward(layer):
            reason = "has its own forward pass. Write one without statistics of the batch."
        if reason:
            return self._note(name, layer, "", reason)
        new: nn.Module
        if self._is_fixed(name, layer):
            new, words = FixedNorm(layer), _FIXED
        elif isinstance(layer, _InstanceNorm):
            new, words = without_statistics(layer), _INSTANCE
        elif isinstance(layer, nn.BatchNorm1d) and layer.num_features == 1:
            return self._note(name, layer, "", _CONSTANT)
        else:
            new = group_norm(layer, self._per_group)
            words = _GROUP + (_DROPPED if has_seen_data(layer) else "")
        self._put(name, layer, with_what_followed(layer, new.train(layer.training)), words)

    def _is_fixed(self, name: str, layer: BatchNorm) -> bool:
        """Return whether statistics become constants."""
        if self._norms == "auto":
            return has_seen_data(layer) and self._is_frozen(name, layer)
        return self._norms == "fixed" and layer.running_mean is not None

    def _is_frozen(self, name: str, layer: BatchNorm) -> bool:
        """Return whether nothing of it is trained; of a layer without parameters, what is next to it."""
        params = list(layer.parameters())
        if not params:
            params = list(self._model.get_submodule(name.rpartition(".")[0]).parameters())
        return bool(params) and not any(param.requires_grad for param in params)

    def _replace_slow(self, name: str, layer: _Replaceable) -> None:
        reason = _unreplaceable(layer) or _why_not(layer)
        if any(self._users[param] > 1 for param in layer.parameters()):
            reason = (
                reason or "shares parameters with another layer. It trains as it is, only slowly."
            )
        if reason:
            self._note(name, layer, "", reason)
        else:
            self._put(name, layer, _opacus_layer(layer), _SAME)

    def _put(self, name: str, layer: nn.Module, new: nn.Module, words: str) -> None:
        self._new[layer] = new
        self._note(name, layer, _kind_of(new), words)

    def _look_into(self, name: str, part: nn.Module) -> None:
        """Note where a replaced layer is still held outside of ``named_modules``."""
        for attribute, value in vars(part).items():
            if _holds(value, self._new, depth=3):
                reason = (
                    f"still holds a replaced layer in its attribute {attribute!r}. Take "
                    "nn.ModuleList or nn.ModuleDict."
                )
                self._note(name, part, "", reason)

    def _note(self, name: str, layer: nn.Module, became: str, words: str) -> None:
        change = _Change(name or "the model itself", type(layer).__name__, became, words)
        self.changes.append(change)


def _unreplaceable(layer: nn.Module) -> str | None:
    """Return why a layer cannot be replaced; None if it can."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return "has no size yet. Call the model once on synthetic inputs, then fix(model)."
    if is_parametrized(layer):
        return "has a weight that is computed from others. Remove its parametrizations first."
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        return "has hooks, which would be lost. Remove them first."
    return None


def _holds(value: object, replaced: Mapping[nn.Module, nn.Module], depth: int) -> bool:
    if isinstance(value, nn.Module):
        return value in replaced
    if not depth or not isinstance(value, list | tuple | set | dict):
        return False
    values = value.values() if isinstance(value, dict) else value
    return any(_holds(each, replaced, depth - 1) for each in islice(values, _MANY))


def _kind_of(new: nn.Module) -> str:
    first = next(new.children()) if isinstance(new, nn.Sequential) else new
    return type(first).__name__


def _in_words(model: str, changes: Sequence[_Change]) -> str:
    """Return the changes as text, a paragraph for each kind."""
    if not changes:
        return f"lightning_dp.fix: nothing in {model} has to be replaced."
    fates: dict[_Change, list[str]] = {}
    for change in changes:
        fates.setdefault(replace(change, name=""), []).append(change.name)
    number = sum(bool(change.became) for change in changes)
    lines = [f"lightning_dp.fix changed {number} layer{'s' * (number != 1)} of {model}."]
    for fate, names in fates.items():
        shown = ", ".join(names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = f"{fate.kind} -> {fate.became}" if fate.became else f"NOT CHANGED, {fate.kind}"
        lines.append(f"  {what} ({shown}{more}): {fate.words}")
    return "\n".join(lines)


# -- layers of Opacus, which keep records apart ---------------------------------------------------


def _why_not(layer: _Replaceable) -> str | None:
    """Return why Opacus has no such layer; None if it has one."""
    known: tuple[type[nn.Module], ...] = (*_RECURRENT, nn.MultiheadAttention)
    kind = next((each for each in known if isinstance(layer, each)), None)
    if kind is None or not runs_forward_of(layer, kind):
        return "has its own forward pass"
    if getattr(layer, "proj_size", 0):
        return "has proj_size, which Opacus' layer has not"
    trained = {param.requires_grad for param in layer.parameters()}
    if isinstance(layer, nn.MultiheadAttention) and len(trained) > 1:
        return "is trained in parts, which Opacus' layer has otherwise"
    return None


def _opacus_layer(layer: _Replaceable) -> nn.Module:
    """Return Opacus' layer with the options of one that :func:`_why_not` has nothing against.

    Values, devices, types of numbers, and which parameters are trained, are the layer's as well.
    """
    from opacus.validators import multihead_attention  # takes a second to import

    new: nn.Module
    if isinstance(layer, nn.MultiheadAttention):
        new = multihead_attention.fix(layer)
    else:
        new = _recurrent(layer)
    first = next(layer.parameters())
    new.to(first.device, first.dtype).load_state_dict(dict(layer.state_dict()))
    is_trained = {name: param.requires_grad for name, param in layer.named_parameters()}
    # Attention has other names, and is trained as a whole.
    for name, param in new.named_parameters():
        param.requires_grad_(is_trained.get(name, first.requires_grad))
    replaced: nn.Module = new.train(layer.training)
    return replaced


def _recurrent(layer: nn.RNNBase) -> nn.Module:
    from opacus.layers import dp_rnn

    new: type[nn.Module] = getattr(dp_rnn, f"DP{layer.mode.partition('_')[0]}")
    options = {"nonlinearity": layer.nonlinearity} if isinstance(layer, nn.RNN) else {}
    return new(
        layer.input_size,
        layer.hidden_size,
        num_layers=layer.num_layers,
        bias=layer.bias,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        **options,
    )
