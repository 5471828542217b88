"""Sharded parameters (FSDP2), and the whole ones that stand in their places while a layer runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from lightning_dp._world import held_here, is_sharded
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients.base import UnsupportedModelError, is_flat_sharded, is_fully_sharded
from lightning_dp.gradients.bilinear import Rows, Uses
from lightning_dp.gradients.module_hooks import ModuleHooks
from lightning_dp.gradients.parameter_sum import at_least_float32

__all__ = [
    "WholeParameters",
    "is_unit",
    "refuse_other_shards",
    "run_again",
    "shards_at_point",
    "twin",
    "unit_rule",
]


def refuse_other_shards(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that are sharded otherwise than by ``fully_shard`` over data-parallel ranks."""
    trained = {id(param) for param in params}
    named = [(name, param) for name, param in module.named_parameters() if id(param) in trained]
    whole = [name for name, param in named if not is_sharded(param)]
    fully = {
        id(p) for part in module.modules() if is_fully_sharded(part) for p in part.parameters()
    }
    other = [
        name
        for name, param in named
        if is_sharded(param) and not (id(param) in fully and _is_one_shard(param))
    ]
    other += [name for name, part in module.named_modules() if is_flat_sharded(part)]
    if other:
        raise UnsupportedModelError(
            f"{other[:5]} of the model are sharded, and not by fully_shard() over one mesh of all "
            "data-parallel ranks (tensor parallelism, hybrid shards, FullyShardedDataParallel, "
            "another use of DTensor). Use fully_shard(layer, mesh=self.device_mesh['data_parallel']) in "
            "configure_model, or leave the model whole: strategy='ddp', or one device.",
            topic="sharded",
        )
    if whole and len(whole) < len(named):
        raise UnsupportedModelError(
            f"{whole[:5]} are trained and not sharded, next to others that are. Shard what is left with "
            "the root: fully_shard(self.model) after its blocks, in configure_model.",
            topic="sharded",
        )


def _is_one_shard(param: Any) -> bool:
    return len(param.placements) == 1 and param.placements[0].is_shard()


@contextmanager
def shards_at_point(
    module: nn.Module, params: Sequence[nn.Parameter], point: Tensor
) -> Iterator[None]:
    """Inside, the shards that are held here are those of a point; afterwards they are what they were.

    All processes enter and leave it together. Torch gathers whole parameters from the memory of the
    shards, so the point, of which this process holds a part, is written into it; whole ones that were
    gathered before are dropped.
    """
    held = held_here(params)
    kept = flatten(held)

    def hold(vector: Tensor) -> None:
        for part in module.modules():
            if is_fully_sharded(part):
                part.reshard()  # type: ignore[operator]
        for shard, values in zip(held, unflatten(vector, held), strict=True):
            shard.data.copy_(values)  # no version counts it: the weights were not changed

    hold(point)
    try:
        yield
    finally:
        hold(kept)


class WholeParameters:
    """Knows which sharded parameter a whole one stands for.

    The optimizer has shards. While a layer runs, torch puts the whole parameter in the place of the
    shard, and that is what autograd's graph ends in. It is one object for the whole fit, so what was
    seen in its place once tells it in every later graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self._shards: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for layer in module.modules():
            own = {
                name: param
                for name, param in layer._parameters.items()
                if param is not None and is_sharded(param)
            }
            if own:
                self._shards[layer] = own
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._shard_of: dict[int, nn.Parameter] = {}
        self._seen: list[Tensor] = []  # so that ids stay theirs

    def hang_on(self, hooks: ModuleHooks) -> None:
        """Look at each of these layers when it has run."""
        for layer in self._shards:  # before torch's own hook, which puts the shards back
            register = partial(layer.register_forward_hook, prepend=True)
            hooks.add(layer, register, self._look)

    def _look(self, layer: nn.Module, args: Any, output: Any) -> None:
        for part in layer.modules():  # one may use parameters of those inside without a call
            self.look(part)

    def look(self, layer: nn.Module) -> None:
        """See which tensors are in the places of a layer's parameters now."""
        for name, shard in self._shards.get(layer, {}).items():
            now = layer._parameters.get(name)
            if now is None or now is shard or id(now) in self._shard_of:
                continue
            if isinstance(now, nn.Parameter) and now.is_leaf and now.shape == shard.shape:
                self._shard_of[id(now)] = shard
                self._seen.append(now)

    def trained(self, param: Any) -> Any:
        """Return the parameter that a tensor is, or stands for."""
        return self._shard_of.get(id(param), param)

    def translated(self, uses: Counter[int]) -> Counter[int]:
        """Return uses of parameters, by ``id``, as those of the parameters that are trained."""
        if not self._shard_of:
            return uses
        found = Counter[int]()
        for key, count in uses.items():
            shard = self._shard_of.get(key)
            found[key if shard is None else id(shard)] += count
        return found

    def refuse_unknown(self, leaves: Iterable[Any], known: Iterable[nn.Parameter]) -> None:
        """Refuse a graph that ends in a parameter nobody knows: it was used outside of its layer."""
        if not self._shards:
            return
        ids = {id(param) for param in known} | self._shard_of.keys()
        for variable in leaves:
            if id(variable) not in ids and isinstance(variable, nn.Parameter):
                raise UnsupportedModelError(
                    f"A sharded parameter is used outside of its layer: {self._like(variable)} "
                    "(F.linear(x, layer.weight), say), where it cannot be told which one it is. Call "
                    "the layer that has it.",
                    topic="sharded",
                )

    def _like(self, whole: Tensor) -> str:
        """Name the parameters of the same shape of layers that have not run."""
        seen = set(map(id, self._shard_of.values()))
        shards = [shard for own in self._shards.values() for shard in own.values()]
        names = [
            repr(self._names[id(each)])
            for each in shards
            if id(each) not in seen and each.shape == whole.shape
        ]
        return " or ".join(names[:5]) or f"one of shape {tuple(whole.shape)}"


def is_unit(layer: nn.Module) -> bool:
    """Return whether a layer of no known type holds shards itself, and none of its parts does.

    No other engine takes shards.
    """
    own = list(layer.parameters(recurse=False))
    inside = list(layer.modules())[1:]
    return bool(own) and all(map(is_sharded, own)) and not any(map(is_fully_sharded, inside))


class _Forward(nn.Module):
    """Runs the forward pass of a layer without the hooks on it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.layer.forward(*inputs)
        return output


def unit_rule(layer: nn.Module, before: nn.Module) -> Callable[..., Uses]:
    """Return the rule of one call of such a layer, with the whole parameters of now.

    They are kept, since torch lets go of them; ``before`` is the layer as the call found it.
    """
    own = {name: p.detach().clone() for name, p in layer._parameters.items() if p is not None}
    return lambda _, *tensors: run_again(before, *tensors, held=own)


def run_again(layer: nn.Module, *tensors: Tensor, held: Mapping[str, Tensor] | None = None) -> Uses:
    """Return the uses of a layer's parameters from its forward pass again, for each record alone.

    Args:
        layer: was called with the tensors but the last, the gradient of its output.
        tensors: have records first.
        held: its parameters by name; None if they are what the layer has.
    """
    named = dict(layer.named_parameters()) if held is None else held
    values = {
        f"layer.{name}": at_least_float32(p.detach()) for name, p in named.items()
    }  # as inputs

    def of_record(*parts: Tensor) -> dict[str, Tensor]:
        *inputs, gradient = (part.unsqueeze(0) for part in parts)
        run = partial(functional_call, _Forward(twin(layer)), args=tuple(inputs))
        pulled: Any = vjp(run, values)
        output, back = pulled
        (found,) = back(gradient.to(output.dtype))
        return dict(found)

    rows = torch.vmap(of_record)(*tensors)
    uses = [(name, Rows.use(at_least_float32(rows[f"layer.{name}"]))) for name in named]
    return [(layer.get_parameter(name), use) for name, use in uses]


def twin(module: nn.Module) -> nn.Module:
    """Return a copy with the same parameters, which keeps for itself what it writes, and logs nothing."""
    found = object.__new__(type(module))  # fully_shard's classes have another __new__
    for name, kept in vars(module).items():
        vars(found)[name] = copy(kept) if isinstance(kept, dict | list | set | deque) else kept
    if "_trainer" in vars(module):  # a LightningModule
        vars(found)["log"] = lambda *args, **kwargs: None
    for name, part in module._modules.items():
        found._modules[name] = part and twin(part)
    return found
