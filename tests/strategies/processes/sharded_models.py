"""Models that are sharded, each with its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from lightning_dp._shards import is_sharded


def in_blocks(
    net: nn.Module,
    mesh: Any,
    policy: MixedPrecisionPolicy | None = None,
    reshard: bool | int | None = None,
) -> None:
    """Shard the blocks of a network, then the rest with the root."""
    policy = MixedPrecisionPolicy() if policy is None else policy
    after = {} if reshard is None else {"reshard_after_forward": reshard}
    for block in getattr(net, "blocks", ()):
        if any(not is_sharded(param) for param in block.parameters()):
            fully_shard(block, mesh=mesh, mp_policy=policy, **after)
    fully_shard(net, mesh=mesh, mp_policy=policy, **after)


def in_columns(net: nn.Module, mesh: Any) -> None:
    """Shard columns, each block over a mesh that nobody else has, from the last process to the first."""
    for block in [*getattr(net, "blocks", ()), net]:
        mesh = DeviceMesh("cpu", [1, 0])
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))


def over_one_process(net: nn.Module, mesh: Any) -> None:
    """Shard over a mesh of one process for each of two."""
    both = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("apart", "one"))
    fully_shard(net, mesh=both["one"])


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """Attention and a feed-forward layer, over tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpointed(Block):
    """Runs once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Transformer(nn.Module):
    """A language model whose head has the weights of its embedding; 11 tokens are an uneven shard."""

    def __init__(self, block: type[Block] = Block, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RMSNorm(nn.Module):
    """Written by hand, as language models have it: its weight is in no layer of torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class OwnBlock(nn.Module):
    """Parameters of a block itself next to layers: a matrix, and a scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = RMSNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Parameter(0.3 * torch.randn(2 * width, width))
        self.scale = nn.Parameter(torch.full((1,), 0.5))  # torch shards no scalars

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (torch.tanh(self.up(self.norm(x))) @ self.down)


class OwnParameters(nn.Module):
    """Blocks with parameters of their own; the root has none."""

    def __init__(self, block: Callable[[int], nn.Module], width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        self.norm = RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ByHand(nn.Module):
    """The weights of a layer that is never called: nothing of its type tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.up(x)), self.down.weight, self.down.bias)


class Normed(nn.Module):
    """A matrix whose columns are brought to length one."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.matrix / self.matrix.norm(dim=0))


class LoRA(nn.Module):
    """A frozen layer with a trained one of low rank next to it."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(4)
        return make()

    return made


def lora() -> nn.Module:
    layers = (LoRA(nn.Linear(6, 7)), nn.Tanh(), LoRA(nn.Linear(7, 3)))
    return Chain(*layers)


def convolutional() -> nn.Module:
    first = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
    return Chain(*first, nn.Linear(4 * 16, 5))


def features() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(2))


def images() -> Tensor:
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(2))


def tokens() -> Tensor:
    return torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (seeded(lambda: Chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))), features),
    "cnn": (seeded(convolutional), images),
    "tied": (seeded(Transformer), tokens),
    "checkpointed": (seeded(lambda: Transformer(Checkpointed)), tokens),
    "own": (seeded(lambda: OwnParameters(OwnBlock)), tokens),
    "lora": (seeded(lora), features),
    "even": (seeded(lambda: Chain(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))), features),
    "wide": (seeded(lambda: Chain(nn.Linear(6, 4000, bias=False))), features),
}
