"""The memory of a private step is a line in the records of a physical batch, and it is found."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Diff2, FullBatch
from lightning_dp.audit.peak_memory import measure_memory, suggest_physical_batch
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.sampling.schemes import largest_chunk

CPU = {"accelerator": "cpu"}
MIB = 2**20


class CNN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 49, 10)),
        )

    def training_step(self, batch, batch_idx):
        assert not torch.isnan(batch[0]).any(), "a value of the data was used"
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def loader(batch_size=256, records=4096):
    """Images that are NaN: no value may be used."""
    data = TensorDataset(torch.full((records, 1, 28, 28), math.nan), torch.arange(records) % 10)
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def config(**arguments):
    return DifferentialPrivacy(3.0, target_delta=1e-6, **arguments).config


@functools.cache
def line(**arguments):
    """Measured with small batches."""
    return measure_memory(CNN(), loader(), config(**arguments), trainer=CPU, sizes=(8, 32))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"engine": "hooks"}, marks=pytest.mark.slow),
        pytest.param({"estimator": Diff2(restart_every=2)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_a_line_from_small_batches_predicts_a_large_one_within_a_tenth(arguments):
    small = line(**arguments)
    large = measure_memory(CNN(), loader(), config(**arguments), trainer=CPU, sizes=(2, 128))

    _, measured = large.measured[-1]
    assert small.at(128) == pytest.approx(measured, rel=0.1)
    assert all(small.at(size) >= peak * (1 - 1e-9) for size, peak in small.measured)


def test_gradients_per_record_take_more_than_book_keeping():
    # One gradient is 82 KiB.
    assert line(engine="hooks").per_record - line().per_record > 82 * 1024


def test_the_suggestion_fits_keeps_q_and_is_the_largest_that_fits():
    memory = 20 * MIB
    found = suggest_physical_batch(
        CNN(), loader(128), config(), memory=memory, accumulate_grad_batches=2, trainer=CPU
    )
    assert found.batch_size * found.accumulate_grad_batches == 256
    assert found.sample_rate == 256 / 4096
    assert found.batch_size < found.chunk < 2 * found.batch_size
    assert found.predicted == found.line.at(found.chunk) <= memory
    assert found.chunk == largest_chunk(256, found.accumulate_grad_batches, 1, 4096)
    # One with half as many chunks does not fit.
    larger = largest_chunk(256, found.accumulate_grad_batches // 2, 1, 4096)
    assert found.line.at(larger) > memory
    text = str(found)
    for part in (
        f"DataLoader(..., batch_size={found.batch_size})",
        f"Trainer(..., accumulate_grad_batches={found.accumulate_grad_batches})",
        "q = 0.0625 of 4096 records, as before",
        "of 20 MiB",
        f"with {found.chunk} records",
        "measured on cpu with 8, 16, 32",
    ):
        assert part in text


def test_everything_fits_into_much_and_the_batch_stays():
    found = suggest_physical_batch(
        CNN(), loader(), config(), memory=2**40, trainer=CPU, sizes=(2, 4)
    )
    assert (found.batch_size, found.accumulate_grad_batches) == (256, 1)


def test_where_nothing_fits_the_numbers_are_told():
    with pytest.raises(
        ValueError, match=r"memory=300 KiB is too little: .* need .*[KM]iB with 2 records"
    ):
        suggest_physical_batch(
            CNN(), loader(), config(), memory=300 * 1024, trainer=CPU, sizes=(2, 4)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": math.nan}, "memory=nan"),
        ({"memory": 0.0}, "memory=0.0"),
        ({"memory": None}, "memory must be given"),
        ({"sizes": (8,)}, "at least two different"),
        ({"sizes": (0, 8)}, "at least two different"),
        ({"trainer": {**CPU, "devices": 2}}, r"trainer holds \['devices'\]"),
        ({"privacy": config(sampling=FullBatch())}, "measure_memory"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
    ],
)
def test_illegal_arguments_are_refused(change, message):
    usual = {"privacy": config(), "memory": 20.0 * MIB, "trainer": CPU, "sizes": (2, 4)}
    with pytest.raises(ValueError, match=message):
        suggest_physical_batch(CNN(), loader(), **{**usual, **change})


def test_a_model_that_synthetic_records_break_is_refused_without_its_words():
    class Picky(CNN):
        def training_step(self, batch, batch_idx):
            raise KeyError("a secret")

    with pytest.raises(ValueError, match="module raised KeyError on synthetic") as caught:
        measure_memory(Picky(), loader(), config(), trainer=CPU)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = CNN()
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(5)
    state = torch.get_rng_state()

    measure_memory(model, loader(), config(), trainer=CPU, sizes=(2, 4))

    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


RESIDENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_peak_memory as t
import torch
torch.set_num_threads(1)

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(field)).split()[1])

def fit(size):
    x = torch.zeros(2 * size, 1, 28, 28)
    data = t.TensorDataset(x, torch.zeros(2 * size, dtype=torch.int64))
    privacy = t.DifferentialPrivacy(
        target_delta=1e-6, noise_multiplier=1.0, sampling=t.FullBatch(), isolation_probe=False
    )
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = t.L.Trainer(max_epochs=3, callbacks=[privacy], enable_model_summary=False, **quiet, **t.CPU)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    trainer.fit(t.CNN(), t.DataLoader(data, batch_size=size))
    return resident("VmHWM") - before

fit(4)
print("resident", fit(512))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_the_prediction_is_the_resident_memory_of_a_real_fit_within_a_quarter(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(Path(__file__).parent)],
        cwd=tmp_path,
        env={"PATH": "", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = int(done.stdout.rsplit("resident", 1)[1])
    assert line().at(512) == pytest.approx(measured, rel=0.25)
