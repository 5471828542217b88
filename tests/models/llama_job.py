"""A small Llama, trained over all records by one process or several; its weights are saved.

Usage: python llama_job.py FILE PROCESSES. Lightning starts the other processes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_dp import FullBatch
from lightning_dp.callbacks import DifferentialPrivacy

RECORDS = 8
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}


class Llama(L.LightningModule):
    """Checkpointed blocks, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
        self.net.gradient_checkpointing_enable({"use_reentrant": False})

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for block in self.net.model.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def weights(module: L.LightningModule) -> Tensor:
    held = (param.detach() for param in module.parameters())
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in held)
    return torch.cat([each.flatten() for each in whole])


def main(file: Path, processes: int) -> None:
    torch.set_num_threads(1)
    tokens = torch.randint(40, (RECORDS, 7), generator=torch.Generator().manual_seed(1))
    privacy = DifferentialPrivacy(
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        target_delta=1e-5,
        sampling=FullBatch(),
        advice=False,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=ModelParallelStrategy(processes, 1) if processes > 1 else "auto",
        max_steps=3,
        max_epochs=-1,
        callbacks=[privacy],
        default_root_dir=file.parent,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Llama()
    trainer.fit(model, DataLoader(TensorDataset(tokens), math.ceil(RECORDS / processes)))
    found = {"weights": weights(model), "steps": trainer.global_step}
    if trainer.is_global_zero:
        torch.save({**found, "report": str(privacy.report())}, file)
    if processes > 1:  # its threads would still run while Python ends
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
