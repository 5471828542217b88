"""Data modules, workers, collate functions and reloaded loaders go on working."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader


def test_data_module(privacy, classifier, mlp, loader, blobs, make_trainer, assert_trained):
    class Blobs(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(blobs, batch_size=24, shuffle=True)

        def val_dataloader(self):
            return DataLoader(blobs, batch_size=60)

    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, datamodule=Blobs())

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


def test_workers(privacy, classifier, mlp, blobs, loader, make_trainer, assert_trained):
    with_workers = DataLoader(
        blobs, batch_size=24, shuffle=True, num_workers=2, persistent_workers=True
    )
    model = classifier(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=3, callbacks=[privacy])

    trainer.fit(model, with_workers)

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=30)


def test_custom_collate_with_strings(
    privacy, classifier, mlp, blobs, loader, make_trainer, assert_trained
):
    def collate(records):
        x, y = zip(*records, strict=True)
        names = [f"class {int(label)}" for label in y]
        return {"x": torch.stack(x), "names": names, "meta": {"source": "blobs"}}

    class Strings(classifier):
        def training_step(self, batch, batch_idx):
            assert batch["meta"] == {"source": "blobs"}
            y = torch.tensor([int(name.removeprefix("class ")) for name in batch["names"]])
            return nn.functional.cross_entropy(self(batch["x"]), y)

    model = Strings(mlp(), lambda params: torch.optim.SGD(params, lr=0.5))
    trainer = make_trainer(max_epochs=2, callbacks=[privacy])

    trainer.fit(model, DataLoader(blobs, batch_size=24, collate_fn=collate))

    assert_trained(trainer, model, privacy, loader, classifier(mlp()), steps=20)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_reloading_the_loader_every_epoch(
    accumulate, privacy, classifier, mlp, blobs, make_trainer
):
    made = []

    class Reloads(L.LightningDataModule):
        def train_dataloader(self):
            made.append(DataLoader(blobs, batch_size=24, shuffle=True))
            return made[-1]

    trainer = make_trainer(
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[privacy],
    )

    trainer.fit(classifier(mlp()), datamodule=Reloads())

    assert len(made) == 3
    assert trainer.global_step == privacy.steps == 3 * math.ceil(10 / accumulate)


def test_a_reloaded_loader_of_another_size_is_refused(
    privacy, classifier, mlp, blobs, make_trainer
):
    sizes = iter([24, 12])

    class Grows(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(blobs, batch_size=next(sizes))

    trainer = make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=[privacy])

    with pytest.raises(ValueError, match="batches changed during the run"):
        trainer.fit(classifier(mlp()), datamodule=Grows())

    assert privacy.steps == 10
