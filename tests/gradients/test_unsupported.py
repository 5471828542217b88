"""Parameters that are sharded, or tensors of a class of their own, are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.utils import prune

from lightning_dp import Checks
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.gradients import EngineChoice, UnsupportedModelError
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.isolation.requirements import check_model
from tests.older_torch import fsdp_on_cpu


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """One process of gloo."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def fully_sharded(mesh: Any) -> nn.Module:
    module = net()
    fully_shard(module[0], mesh=mesh)
    return fully_shard(module, mesh=mesh)


def one_layer(mesh: Any) -> nn.Module:
    module = net()
    fully_shard(module[2], mesh=mesh)
    return module


def one_tensor(mesh: Any) -> nn.Module:
    module = net()
    module[2].weight = nn.Parameter(distribute_tensor(module[2].weight.data, mesh, [Replicate()]))
    return module


def flat(_: Any) -> nn.Module:
    return nn.Sequential(FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu")))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (one_layer, r"\['0\.weight', '0\.bias'\].* trained and not sharded.*with the root"),
        (one_tensor, r"\['2\.weight'\].* not by fully_shard\(\) over one mesh"),
        (flat, r"\['0'\].* not by fully_shard\(\) over one mesh"),
    ],
)
def test_parameters_that_are_sharded_otherwise_are_refused_by_name(make, says, mesh):
    module = make(mesh)
    for engine in ("auto", "bookkeeping"):
        with pytest.raises(UnsupportedModelError, match=says):
            EngineChoice(engine).make(module, list(module.parameters()))
    for engine in ("records", "hooks", "one_by_one"):
        with pytest.raises(UnsupportedModelError, match="sharded"):
            EngineChoice(engine).make(module, list(module.parameters()))
    with pytest.raises(UnsupportedModelError, match="sharded"):
        check_model(module)


def test_some_engines_know_sharded_parameters_and_others_name_one(mesh):
    module = fully_sharded(mesh)
    for engine in ("auto", "bookkeeping", "layers"):
        choice = EngineChoice(engine)
        choice.make(module, list(module.parameters()))
        assert choice.description == "layers"
    for engine in ("hooks", "one_by_one"):
        with pytest.raises(UnsupportedModelError, match=r"\['0.* sharded "):
            EngineChoice(engine).make(module, list(module.parameters()))
    check_model(module, may_be_sharded=True)


@fsdp_on_cpu
def test_a_sharded_parameter_that_is_used_outside_of_its_layer_is_refused(mesh):
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(6, 4), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.layer(x), self.other.weight)

    module = fully_shard(Outside(), mesh=mesh)
    engine = LayerCalls(module, list(module.parameters()))
    with engine.watching():
        loss = module(torch.randn(3, 6)).square().mean()
    with pytest.raises(UnsupportedModelError, match=r"used outside of its layer: .other\.weight. "):
        engine.backward(loss)


def test_a_sharded_model_is_refused_before_anything_is_charged(
    mesh, classifier, loader, make_trainer, tmp_path
):
    model = classifier(net())
    fully_shard(model.net, mesh=mesh)
    privacy = DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=1.0, checks=Checks(dry_run=False, comparisons=False)
    )
    with pytest.raises(UnsupportedModelError, match=r"'net\.0\.weight'.* sharded"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    assert not [*tmp_path.rglob("*.jsonl"), *tmp_path.rglob("*journal*")]


class Quantised(Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "hooks"])
def test_a_trained_parameter_of_a_class_of_its_own_is_refused(engine):
    module = net()
    special = torch.randn(3, 4).as_subclass(Quantised).requires_grad_()
    special._is_param = True
    module[2].weight = special
    with pytest.raises(UnsupportedModelError, match=r"'2.weight'.*Quantised.*LoRA"):
        EngineChoice(engine).make(module, list(module.parameters()))
    module[2].weight.requires_grad_(False)
    trained = [param for param in module.parameters() if param.requires_grad]
    EngineChoice(engine).make(module, trained)


class Swaps(nn.Module):
    """Puts another parameter into its layer's place while it runs, as sharding does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer.weight
        self.layer.weight = nn.Parameter(own.detach().clone())
        try:
            return self.head(self.layer(x))
        finally:
            self.layer.weight = own


def test_a_layer_whose_parameters_are_exchanged_while_it_runs_is_refused(oracle):
    module = Swaps()
    lean = LayerCalls(module, oracle.trained(module))
    with pytest.raises(
        UnsupportedModelError, match=r"layer \(Linear\) was called with other param"
    ):
        oracle.run(lean, module, oracle.features())


def pruned(layer: nn.Linear) -> None:
    for name in ("weight", "bias"):
        prune.l1_unstructured(layer, name, 1)


def shadowed(layer: nn.Linear) -> None:
    vars(layer)["weight"] = 2 * layer.weight


class Doubled(nn.Linear):
    @property
    def weight(self) -> Tensor:
        return 2 * self._parameters["weight"]


def of_another_type(layer: nn.Linear) -> None:
    layer.__class__ = Doubled


@pytest.mark.parametrize("computed", [pruned, shadowed, of_another_type])
def test_a_layer_whose_parameters_are_computed_by_now_is_refused(oracle, computed):
    module = net()
    lean = LayerCalls(module, oracle.trained(module))
    computed(module[0])
    with pytest.raises(UnsupportedModelError, match=r"0 \(\w+\) was called with other param"):
        oracle.run(lean, module, oracle.features())
