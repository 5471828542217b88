"""Jobs of several processes with a sharded model."""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import (
    BandedNoise,
    Checks,
    CyclicPoisson,
    Diff2,
    FixedOrder,
    LambdaCGD,
    Momentum,
    RandomAllocation,
    Storm,
    TruncatedPoisson,
)
from lightning_dp._noise import NoiseSource
from lightning_dp._world import World, as_shard, held_here, is_sharded
from lightning_dp.boundary import Query, Term, add_noise, begin_with_noise, bounded_sum
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.clipping import Flat, ParameterGroups, Rescaling
from lightning_dp.functional import flatten
from lightning_dp.gradients.passes import RecordPasses, Replay
from lightning_dp.gradients.sharded import shards_at_point
from tests.zoo import WholeSet, records

# -- models that are sharded, each with its records ----------------------------------------------


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


CLIP_NORM, RECORDS, STEPS = 0.05, 51, 8


def chain() -> nn.Module:
    return Chain(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Small(L.LightningModule):
    """Sharded by two blocks and a root."""

    def __init__(self, net: Callable[[], nn.Module] = chain) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = net()
        self.begin: Tensor | None = None
        self.average: Tensor | None = None

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.shard(self.device_mesh["data_parallel"])

    def shard(self, mesh: Any) -> None:
        in_blocks(self.net, mesh)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.begin is None:
            self.begin = weights(self)
            states = self.trainer.strategy.private_run.mechanism.state_dict()["postprocessing"]
            self.average = states[0]["average"].clone() if states else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def weights(module: nn.Module) -> Tensor:
    """All weights, whole."""
    params = (param.detach() for param in module.parameters())
    return torch.cat([(p.full_tensor() if is_sharded(p) else p).flatten() for p in params])


def fit(
    folder: Path,
    processes: int,
    privacy: dict[str, Any],
    *,
    steps: int,
    model: Small | None = None,
    checks: bool = False,
    saves: bool = False,
    is_distributed: bool = True,
    shards: bool = True,
    precision: Any = "32-true",
    ckpt_path: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    batch_size: int | None = None,
) -> tuple[L.Trainer, DifferentialPrivacy]:
    """Make so many steps over all records, with or without the checks of isolation."""
    asked = {"checks": Checks(dry_run=checks, comparisons=checks), "advice": False}
    callback = DifferentialPrivacy(
        target_delta=1e-5, **asked, **{"sampling": WholeSet(), **privacy}
    )
    parallel = ModelParallelStrategy(processes, 1, save_distributed_checkpoint=is_distributed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=parallel if shards else "ddp",
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[callback, *callbacks],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch_size = batch_size or math.ceil(RECORDS / processes)
    loader = DataLoader(TensorDataset(*records(RECORDS)), batch_size=batch_size)
    trainer.fit(Small() if model is None else model, loader, ckpt_path=ckpt_path)
    if saves:
        trainer.save_checkpoint(folder / "last.ckpt")
    return trainer, callback


# -- clipped sums and noise ---------------------------------------------------------------------------


def whole(parts: Tensor, params: list[nn.Parameter]) -> Tensor:
    """All entries of a vector of which each process has its part."""
    held = held_here(params)
    cut = torch.split(parts, [each.numel() for each in held])
    shards = (as_shard(c.view(h.shape), p) for c, h, p in zip(cut, held, params, strict=True))
    return torch.cat([shard.full_tensor().flatten() for shard in shards])


def shares(rank: int, processes: int) -> slice:
    """The records of one process: of two the first has three, of four the second none."""
    ends = {1: [0, 8], 2: [0, 3, 8], 4: [0, 3, 3, 5, 8]}[processes]
    return slice(ends[rank], ends[rank + 1])


class Sums(L.LightningModule):
    """Asks for sums and releases in ``on_fit_start``, where Lightning has set up the processes."""

    def __init__(
        self, name: str, shard: Callable[[nn.Module, Any], object], *, is_mixed: bool = False
    ) -> None:
        super().__init__()
        self.name, self.shard, self.is_mixed = name, shard, is_mixed
        self.make, self.records = MODELS[name]
        self.net = self.make()
        self.found: dict[str, Any] = {}

    def configure_model(self) -> None:
        self.shard(self.net, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(self.records()[:1]).square().mean()

    def on_fit_start(self) -> None:
        rank, size = self.trainer.global_rank, self.trainer.world_size
        world = World(rank, size, is_sharded=True)
        params = [param for param in self.net.parameters() if param.requires_grad]
        mine = self.records()[shares(rank, size)]
        self.found["clipped"] = self.released(params, mine, world, 0.0)
        of_groups = ParameterGroups(tuple(i % 2 for i in range(len(params))), (0.6, 0.8))
        self.found["groups"] = self.released(params, mine, world, 0.0, clipping=of_groups)
        with_noise = self.released(params, mine, world, 2.0)
        self.found["noise"] = with_noise - self.found["clipped"]
        there = Term(-0.5, 0.9 * flatten(held_here(params)))
        self.found["difference"] = self.released(params, mine, world, 0.0, there)
        records, point = self.records(), 0.9 * flatten(held_here(params))
        with torch.no_grad():
            self.net(records)  # what was gathered for it stays, where no backward pass follows
            with shards_at_point(self.net, params, point):
                self.found["there"] = self.net(records)
            self.found["here"] = self.net(records)
        self.found["held"] = sum(each.numel() for each in held_here(params))
        self.found["all"] = sum(each.numel() for each in params)

    def loss(self, chunk: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_mixed):
            return self.net(chunk).float().square().mean()  # 1/n has 8 digits in bfloat16

    def released(
        self,
        params: list[nn.Parameter],
        mine: Tensor,
        world: World,
        noise_multiplier: float,
        *more: Term,
        clipping: Rescaling = Flat(),  # noqa: B008
    ) -> Tensor:
        query = Query((Term(), *more), CLIP_NORM, noise_multiplier)
        total = begin_with_noise(query, held_here(params), NoiseSource(), world)()
        with RecordPasses(self.net, params, "layers", clipping=clipping) as passes:
            # A process without records runs a stand-in with the others, and adds nothing.
            chunk = mine if len(mine) else self.records()[:1]
            if len(mine):
                found = passes.gradients(query, Replay(self.loss, chunk, len(chunk)))
                bounded_sum(clipping.rescale(found, CLIP_NORM), CLIP_NORM, total)
            else:
                passes.run(self.loss, chunk, 1, combined=len(query.terms) > 1)
                passes.go_along(query, Replay(self.loss, chunk, 0))
                passes.add_nothing(query, total)
        return whole(add_noise(total, noise_multiplier, NoiseSource(), world).value, params)


def sums(
    name: str,
    processes: int,
    shard: Callable[[nn.Module, Any], object] = in_blocks,
    *,
    is_mixed: bool = False,
) -> dict[str, Any]:
    """Clipped sums and noise of a model whose records are unevenly spread."""
    model = Sums(name, shard, is_mixed=is_mixed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=ModelParallelStrategy(processes, 1),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(processes, 1)))
    return model.found


def half(name: str, processes: int) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sums(name, processes, partial(in_blocks, policy=policy))


def trained(
    folder: Path, processes: int, estimator: Any = None, engine: str = "auto", **options: Any
) -> dict[str, Any]:
    """Some steps over all records without noise."""
    asks = {"max_grad_norm": math.inf} if estimator is None else {"estimator": estimator}
    privacy = {"noise_multiplier": 0.0, "engine": engine, **asks}
    trainer, callback = fit(folder, processes, privacy, steps=STEPS, **options)
    found = {"weights": weights(trainer.lightning_module), "steps": trainer.global_step}
    return {**found, "report": str(callback.report())}


def by_hand(folder: Path, processes: int, **options: Any) -> dict[str, Any]:
    """Try to train a model whose weights are used outside of their layer."""
    try:
        return trained(folder, processes, **{"model": Small(ByHand), **options})
    except (TypeError, MisconfigurationException) as error:
        return {"message": str(error)}


class Apart(Small):
    """Its last layer is whole on each process: a mesh of one."""

    def shard(self, mesh: Any) -> None:
        over_one_process(self.net.blocks[-1], mesh)
        in_blocks(self.net, mesh)


SAVED = {
    "noise_multiplier": 1.0,
    "estimator": Diff2(restart_every=5),
    "postprocessing": [Momentum(0.5)],
}
# Of these every difference is clipped; of those none is.
CLIPPED = {
    "diff2": Diff2(restart_every=4, max_grad_norm=0.3, diff_norm=0.2),
    "storm": Storm(momentum=0.5, max_grad_norm=0.3, diff_norm=0.2),
}
WHOLE = {
    "diff2": Diff2(restart_every=4, max_grad_norm=1e6, diff_norm=1e6),
    "storm": Storm(momentum=0.5, max_grad_norm=1e6, diff_norm=1e6),
}


def apart(folder: Path, processes: int) -> dict[str, Any]:
    """Try to train where groups of processes would train apart."""
    (folder / "apart").mkdir(exist_ok=True)
    try:
        fit(folder / "apart", processes, {"noise_multiplier": 1.0}, steps=2, model=Apart())
    except MisconfigurationException as error:
        return {"message": str(error)}
    return {"message": "trained"}


def saved(folder: Path, processes: int, **options: Any) -> dict[str, Any]:
    """Four private steps, of which the checkpoint holds momentum, an estimate and its point."""
    (folder / "run").mkdir(exist_ok=True)
    trainer, callback = fit(folder / "run", processes, SAVED, steps=4, saves=True, **options)
    return {"weights": weights(trainer.lightning_module), "epsilon": callback.epsilon}


def resumed(folder: Path, processes: int) -> dict[str, Any]:
    """Two more steps from the checkpoint, without other records: what momentum does shows."""
    model = Small()
    _, callback = fit(
        folder / "run", processes, SAVED, steps=6, model=model, ckpt_path=folder / "run/last.ckpt"
    )
    found = {"weights": weights(model), "begin": model.begin, "average": model.average}
    return {**found, "epsilon": callback.epsilon, "steps": callback.steps}


class Dies(Small):
    """One process ends in its third step: between the charge and the release, or by an exception."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.rank, self.how = rank, how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2 and self.trainer.global_rank == self.rank:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("of the user's code")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *unused: Any) -> None:
        (self.folder / f"steps-{self.trainer.global_rank}").write_text(str(self.global_step))


def dies(folder: Path, processes: int, how: str, rank: int, shards: bool) -> dict[str, Any]:
    model = Dies(rank, how)
    model.folder = folder
    privacy = {"noise_multiplier": 1.0}
    fit(folder, processes, privacy, steps=5, model=model, shards=shards)
    return {}


def peak(processes: int) -> dict[str, Any]:
    """The peak of this process's memory over three steps of AdamW, in MiB above its start."""
    model = Small()
    model.net = Chain(
        nn.Linear(6, 2000), *(nn.Linear(2000, 2000) for _ in range(6)), nn.Linear(2000, 3)
    )
    with tempfile.TemporaryDirectory() as folder:
        privacy = {"noise_multiplier": 1.0}
        watched = PeakMemory()
        fit(Path(folder), processes, privacy, steps=4, model=model, callbacks=[watched])
    return {"peak": watched.peak, "all": sum(p.numel() for p in model.parameters())}


class PeakMemory(L.Callback):
    """The peak of resident memory after the first step, in MiB: of weights, moments and a step."""

    def __init__(self) -> None:
        self.before = resident("VmRSS")
        self.peak = 0.0

    def on_train_batch_end(self, *unused: Any) -> None:
        if self.peak == 0.0:
            Path("/proc/self/clear_refs").write_text("5")
        self.peak = resident("VmHWM") - self.before


def resident(field: str) -> float:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


BLOCKS = {
    "cyclic": {
        "sampling": CyclicPoisson(3),
        "noise": BandedNoise(3, coefficients=(1.0, 0.7, 0.4)),
    },
    "allocated": {"sampling": RandomAllocation()},
    "fixed": {"sampling": FixedOrder(), "noise": LambdaCGD(0.8), "relation": "zero_out"},
    "limited": {"sampling": TruncatedPoisson(10), "relation": "replace_one"},
}


class Still(Small):
    """Two layers whose gradient is zero, at learning rate 1: what moves them is the noise."""

    def __init__(self) -> None:
        super().__init__(
            lambda: Chain(nn.Linear(60, 40, bias=False), nn.Linear(40, 60, bias=False))
        )
        self.path: list[Tensor] = []
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chunk = self.trainer.train_dataloader.current
        self.seen.append(list(chunk.records) if chunk.size else [])
        self.path.append(weights(self))
        return 0 * self.net(torch.ones(len(batch[0]), 60)).sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def blocks(folder: Path, processes: int, name: str) -> dict[str, Any]:
    """Twelve steps on shards, of an epoch of four, with batches and noise that depend on each other."""
    (folder / name).mkdir(exist_ok=True)
    model = Still()
    privacy = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, **BLOCKS[name]}
    _, callback = fit(folder / name, processes, privacy, steps=12, model=model, batch_size=7)
    history = callback._run.ledger.history()
    return {
        "moved": torch.stack([*model.path, weights(model)]).double().diff(dim=0),
        "seen": model.seen,
        "events": [event.to_dict() for event, count in history for _ in range(count)],
        "past": [len(past) for past in callback._run.mechanism.noise._past]
        if callback._run.config.noise.bands > 1
        else [],
    }


def in_order(folder: Path, processes: int) -> dict[str, Any]:
    """Three passes in a fixed order, without noise and clipping."""
    privacy = {
        "noise_multiplier": 0.0,
        "max_grad_norm": math.inf,
        "sampling": FixedOrder(),
        "relation": "zero_out",
    }
    trainer, _ = fit(folder, processes, privacy, steps=12, batch_size=7)
    return {"weights": weights(trainer.lightning_module)}


def scenarios(folder: Path, processes: int) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        **{name: partial(sums, name, processes) for name in MODELS},
        "half": lambda: half("mlp", processes),
        "autocast": lambda: sums("mlp", processes, is_mixed=True),
        "in_columns": lambda: sums("even", processes, in_columns),
        "kept": lambda: sums("tied", processes, partial(in_blocks, reshard=False)),
        "let go": lambda: sums("tied", processes, partial(in_blocks, reshard=True)),
        "mixed": lambda: trained(folder, processes, precision="bf16-mixed"),
        "apart": lambda: apart(folder, processes),
        "trained": lambda: trained(folder, processes),
        **{f"whole {name}": partial(trained, folder, processes, e) for name, e in WHOLE.items()},
        **{
            f"clipped {name}": partial(trained, folder, processes, e) for name, e in CLIPPED.items()
        },
        **{
            f"ddp {name}": partial(trained, folder, processes, e, shards=False)
            for name, e in CLIPPED.items()
        },
        "checked": lambda: trained(folder, processes, checks=True),
        "ghost": lambda: trained(folder, processes, engine="ghost"),
        "by hand": lambda: by_hand(folder, processes, checks=True),
        "by hand, unprobed": lambda: by_hand(folder, processes),
        "normed": lambda: trained(folder, processes, model=Small(Normed)),
        "by hand, records": lambda: by_hand(folder, processes, engine="records"),
        "saved": lambda: saved(folder, processes),
        "consolidated": lambda: saved(folder, processes, is_distributed=False),
        "resumed": lambda: resumed(folder, processes),
        "peak": lambda: peak(processes),
        **{f"block {name}": partial(blocks, folder, processes, name) for name in BLOCKS},
        "in order": lambda: in_order(folder, processes),
        **{
            f"{how}-{rank}-{shards}": partial(dies, folder, processes, how, rank, bool(shards))
            for how in ("killed", "raised")
            for rank in (0, 1)
            for shards in (0, 1)
        },
    }
