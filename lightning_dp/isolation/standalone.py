"""The check of a model by hand, on samples of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import default_collate

from lightning_dp._validate import above_0, flag, instance
from lightning_dp.boundary import Query, Term
from lightning_dp.gradients import EngineChoice, RecordPasses
from lightning_dp.gradients.batches import call_training_step
from lightning_dp.gradients.module_hooks import as_written
from lightning_dp.gradients.snapshot import RandomState
from lightning_dp.isolation.check import Check, Outcome, Schedule, Settings, outcome_of
from lightning_dp.isolation.comparison import own_copies
from lightning_dp.isolation.dry_run import DryRun, find_layout, mean_or_sum, same_places, size_of
from lightning_dp.isolation.replay import Pipeline, Runner
from lightning_dp.isolation.state import TwinState

__all__ = ["check_isolation"]

_LOOKS = 6


@as_written()
def check_isolation(
    module: LightningModule,
    samples: Sequence[Any],
    *,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    engine: str = "auto",
    max_grad_norm: float = 1.0,
    loss_graph_check: bool = True,
) -> Outcome:
    r"""Compare runs of samples that you give: of their batch, with some exchanged, and without these.

    Through ``collate_fn``, the hooks of transfer, ``training_step`` and the engine, the clipped sum of
    those that stay must move by no more than 0.05 C in the whole batch, and what the module keeps must
    be the same. ``lightning_dp/isolation/comparison.py`` has the formula. The kept samples are drawn
    six times, the last time among the smaller half, so that no largest one is there to pad them.

    If the samples are private, so is the outcome (it is computed without noise): look at it yourself,
    and do not publish it.

    Args:
        module: in training mode; it is run in place, and is afterwards as it was.
        samples: at least 2, as the data set gives them: tensors, lists, dictionaries, graphs.
        collate_fn: makes a batch of a list of them.
        engine: the gradient engine whose answers are compared.
        max_grad_norm: the clip norm C.
        loss_graph_check: look at the loss's graph too, as a run does at every step.

    Returns:
        "isolated", "coupled" with the reason and the cure, or "not compared" with the reason.

    Raises:
        UnsupportedModelError: if no engine takes the model, or its loss's graph mixes records.
        ValueError: for fewer than two samples.

    Example:
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(3, 2)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return torch.nn.functional.cross_entropy(self.layer(x - self.centre(x)), y)
        ...     def centre(self, x):
        ...         return 0.0
        >>> samples = [(x, i % 2) for i, x in enumerate(torch.eye(8)[:, :3])]
        >>> check_isolation(Model(), samples).kind
        'isolated'
        >>> Model.centre = lambda self, x: x.mean(0)
        >>> check_isolation(Model(), samples).kind
        'coupled'
    """
    flag("loss_graph_check", loss_graph_check, of="check_isolation")
    instance("module", module, LightningModule, of="check_isolation")
    clip_norm = above_0("max_grad_norm", max_grad_norm)
    samples = list(samples)
    if len(samples) < 2:
        raise ValueError(
            f"check_isolation(samples=...) has {len(samples)} samples; give 8, such as "
            "[dataset[i] for i in range(8)]."
        )
    params = [param for param in module.parameters() if param.requires_grad]
    choice = EngineChoice(engine)
    transfer = partial(_transferred, module)
    pipeline = Pipeline(
        lambda few: collate_fn(own_copies(few)),
        transfer,
        lambda batch: call_training_step(module, batch, 0),
    )
    if collate_fn is not default_collate:
        choice.layout = find_layout(DryRun(samples[0]), lambda few: transfer(pipeline.collate(few)))
    with RecordPasses(module, params, choice, loss_graph_check=loss_graph_check) as passes:
        runner = Runner(module, passes, params, pipeline, module.device)
        found = outcome_of(_checks(runner, samples, clip_norm))
        if found.kind != "isolated" or passes.engine.isolates:
            return found
        return mean_or_sum(runner, samples)


def _checks(runner: Runner, samples: list[Any], clip_norm: float) -> Iterator[Check]:
    query, schedule = Query((Term(),), clip_norm, 0.0), Schedule("by hand")
    eps = max(torch.finfo(param.dtype).eps for param in runner.params)
    twins, smaller = TwinState(runner.module), _smaller_half(samples)
    for look in range(_LOOKS):
        kept = partial(schedule.kept, look, 0, len(samples), first=look)
        if look == _LOOKS - 1 and smaller:
            kept = partial(same_places, smaller)
        settings = Settings(query, len(samples), eps, seed=look)
        start = RandomState.seeded(runner.device, look)
        yield Check(runner, samples, settings, kept, twins, start)


def _smaller_half(samples: list[Any]) -> list[int]:
    """Return the places of the smaller half of samples; of the largest size there is none."""
    sizes = list(map(size_of, samples))
    order = sorted(range(len(samples)), key=sizes.__getitem__)
    return sorted(place for place in order[: len(samples) // 2] if sizes[place] < max(sizes))


def _transferred(module: LightningModule, batch: Any) -> Any:
    batch = module.on_before_batch_transfer(batch, 0)
    return module.on_after_batch_transfer(
        module.transfer_batch_to_device(batch, module.device, 0), 0
    )
