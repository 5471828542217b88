"""Copies of a model share one memory for its weights, which are the model's in each new copy."""

import gc

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp import _lazy_copies
from lightning_dp._held import same_tensor
from lightning_dp._lazy_copies import addresses_of, is_one_memory
from lightning_dp.isolation import model_copies
from lightning_dp.isolation.model_copies import ModelCopies, empty
from lightning_dp.isolation.probe import probe_isolation

LARGE = {
    "torch's memory": 10,
    "NumPy's memory": 10,
    "NumPy's memory, small": 1 << 16,
    "a torch that shares nothing": 10,
}


@pytest.fixture(params=list(LARGE))
def model(request, monkeypatch):
    monkeypatch.setattr(model_copies, "_LARGE", LARGE[request.param])
    monkeypatch.setattr(model_copies, "_ENTRIES", 4)
    monkeypatch.setattr(_lazy_copies, "_SHARES", "nothing" not in request.param)
    module = LightningModule()
    module.layer = nn.Linear(7, 5)
    if "NumPy" in request.param:  # nothing but a copy of it can be had
        module.layer.weight.data = torch.from_numpy(np.random.rand(5, 7).astype("float32"))
    return module


def _write(weight):
    with torch.no_grad():
        weight[2, 3] += 1.0


def _write_uncounted(weight):
    weight.data.mul_(0.5)


def _write_uncounted_row(weight):
    weight.data[0] = 0.0


def _write_not_a_number(weight):
    with torch.no_grad():
        weight[1, 1] = float("nan")


def _write_by_numpy(weight):
    weight.detach().numpy()[:] = 2.0


def _write_through_a_view(weight):
    weight.detach().view(-1)[3:9].zero_()


def _step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


WRITES = [
    *(
        _write,
        _write_uncounted,
        _write_uncounted_row,
        _write_by_numpy,
        _write_through_a_view,
        _step,
    ),
    _write_not_a_number,
]


@pytest.mark.parametrize("write", WRITES)
def test_what_one_copy_writes_is_not_in_the_next(model, write):
    copies, expected = ModelCopies(model), model.layer.weight.detach().clone()
    write(copies.make().layer.weight)

    assert torch.equal(copies.make().layer.weight, expected)
    assert torch.equal(model.layer.weight, expected)


@pytest.mark.parametrize("write", WRITES)
def test_what_a_copy_writes_is_told_from_what_is_one_memory(model, write):
    copied, own = ModelCopies(model).make().layer.weight, model.layer.weight
    write(copied)

    assert not is_one_memory(own, copied)
    assert not same_tensor(own.detach(), copied.detach())


@pytest.mark.parametrize("write", WRITES[:-1])
def test_what_the_model_writes_is_in_the_next(model, write):
    copies = ModelCopies(model)
    copies.make()
    write(model.layer.weight)

    assert torch.equal(copies.make().layer.weight, model.layer.weight)


@pytest.mark.parametrize("write", WRITES)
def test_what_the_model_writes_is_not_in_a_copy_in_use(model, write):
    copied = ModelCopies(model).make().layer.weight
    expected = copied.detach().clone()
    write(model.layer.weight)

    assert torch.equal(copied, expected)


def _in_numpys_memory():
    return torch.from_numpy(np.zeros(40))


def _in_a_mapped_file(path):
    (path / "weight").write_bytes(bytes(160))
    return torch.from_file(str(path / "weight"), shared=True, size=40)


def _of_half_precision():
    return torch.zeros(40, dtype=torch.float16)


@pytest.mark.parametrize("of", [_in_numpys_memory, _in_a_mapped_file, _of_half_precision])
def test_weights_that_are_not_shared_are_copied_once(of, tmp_path, monkeypatch):
    monkeypatch.setattr(model_copies, "_LARGE", 10)
    monkeypatch.setattr(model_copies, "_ENTRIES", 4)
    model = LightningModule()
    model.weight = nn.Parameter(of(tmp_path) if of is _in_a_mapped_file else of())
    copies = ModelCopies(model)
    first = copies.make().weight
    (address,) = addresses_of([first])
    first.data[20] = 1.0  # where nobody looks

    again = copies.make().weight

    assert addresses_of([again]) == (address,)
    assert not again.any()
    assert not model.weight.any()


def test_weights_in_torch_s_memory_are_read_from_there_and_stay_where_they_are():
    model = LightningModule()
    model.layer, model.trained = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2)
    addresses = [param.data_ptr() for param in model.parameters()]
    copies = ModelCopies(model)

    twin = copies.make()
    twin.trained(twin.layer(torch.ones(3, 64))).sum().backward()

    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(is_one_memory(*pair) for pair in pairs)
    empty(twin)
    copies.release()
    assert [param.data_ptr() for param in model.parameters()] == addresses
    assert not any(map(torch._C._is_cow_tensor, model.parameters()))


def test_no_memory_is_one_where_shapes_or_kinds_of_numbers_differ():
    weight = torch.ones(4, 4)

    assert is_one_memory(weight, weight.detach())
    assert not is_one_memory(weight, weight.t())
    assert not is_one_memory(weight, weight.view(torch.int32))
    assert not is_one_memory(weight[:2], weight[2:])
    assert not is_one_memory(
        torch.view_as_complex(weight[:, :2]), torch.view_as_complex(weight[:, :2]).conj()
    )


def test_nothing_of_the_size_of_a_weight_stays_after_a_probe():
    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(577, 3)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

    model = Model()
    assert probe_isolation(model, [torch.zeros(8, 577)], expected=8).outcome == "isolated"

    gc.collect()
    # Not by isinstance(), which asks objects of other tests for their class.
    kept = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    assert sum(each.numel() == 3 * 577 for each in kept if each is not model.layer.weight) == 0
