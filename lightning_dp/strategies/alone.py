"""Records that run alone through ``training_step``, and what Lightning is shown of them together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_dp._checks import MisconfigurationError
from lightning_dp.gradients.batches import loss_in
from lightning_dp.gradients.side_effects import over_records

__all__ = ["RecordsAlone"]

_Over: TypeAlias = Callable[[Tensor, int], Tensor]

_JOINED: dict[Any, _Over] = {
    dim_zero_sum: torch.sum,
    dim_zero_max: torch.amax,
    dim_zero_min: torch.amin,
}


class RecordsAlone:
    """The batch of one step as its records: each runs alone, and what they leave is put together.

    The loss that Lightning goes on with is the mean of theirs, cut off from any parameter. What they
    log becomes one log entry, their mean (or sum, maximum or minimum, as ``reduce_fx`` says). Their
    updates of torchmetrics are all counted. No record sees any of it.

    Args:
        module: the user's model. While a record runs, it is kept apart
            (:func:`lightning_dp._snapshot.apart`).
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._logged: dict[str, list[dict[str, Any]]] = {}
        self._counted: dict[str, list[dict[str, Any]]] = {}  # by names of metrics
        self._outputs: list[Any] = []

    def forwards(
        self, forward: Callable[[Any], Any], batches: Sequence[Any]
    ) -> list[tuple[Callable[[Any], Tensor | None], Any]]:
        """Return, for each record, what runs it and returns its loss, and its batch; a first run counts.

        Args:
            forward: runs ``training_step`` on a batch.
            batches: of one record each.
        """
        self._logged, self._counted, self._outputs = {}, {}, []
        return [(partial(self._run, forward, []), batch) for batch in batches]

    def _run(self, forward: Callable[[Any], Any], earlier: list[None], batch: Any) -> Tensor | None:
        if earlier:
            loss: Tensor | None = loss_in(forward(batch))
            return loss
        earlier.append(None)
        with self._noting():
            output = forward(batch)
        for name, metric in self._metrics().items():
            if metric.update_called:
                self._counted.setdefault(name, []).append(_state_of(metric))
        self._outputs.append(recursive_detach(output) if isinstance(output, Mapping) else output)
        loss = loss_in(output)
        if isinstance(output, Tensor):
            self._outputs[-1] = output.detach()
        return loss

    def _metrics(self) -> dict[str, Metric]:
        named = self._module.named_modules()
        return {name: part for name, part in named if isinstance(part, Metric)}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep what is logged, inside."""
        module, mute = self._module, vars(self._module).get("log")
        signature = inspect.signature(LightningModule.log)

        def note(*args: Any, **kwargs: Any) -> None:
            given = dict(signature.bind(module, *args, **kwargs).arguments)
            given.pop("self")
            if isinstance(given["value"], Tensor):
                given["value"] = given["value"].detach()
            self._logged.setdefault(given["name"], []).append(given)

        module.log = note  # type: ignore[method-assign]
        try:
            yield
        finally:
            if mute is None:
                del module.log
            else:
                module.log = mute  # type: ignore[method-assign]

    def together(self, device: torch.device) -> Any:
        """Count and log what the records left, and return their outputs as one of the whole batch."""
        metrics = self._metrics()
        for name, states in self._counted.items():
            _count(metrics[name], states)
        for entries in self._logged.values():
            self._module.log(**_one_entry(entries))
        outputs, self._outputs = self._outputs, []
        self._logged, self._counted = {}, {}
        losses = [loss for each in outputs if isinstance(loss := loss_in(each), Tensor)]
        mean = torch.stack([each.detach().mean() for each in losses]).mean() if losses else None
        loss = torch.zeros((), device=device) if mean is None else mean
        loss = loss.requires_grad_()
        names = dict.fromkeys(n for each in outputs if isinstance(each, Mapping) for n in each)
        if not names:
            return loss
        of_each = [each if isinstance(each, Mapping) else {} for each in outputs]
        return {**{name: [each.get(name) for each in of_each] for name in names}, "loss": loss}


def _one_entry(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of ``log`` for the whole batch, from those for the records."""
    entry = dict(entries[-1])
    values = [each["value"] for each in entries]
    if all(isinstance(value, int | float | Tensor) for value in values):
        numbers = [torch.as_tensor(value) for value in values]
        if all(number.numel() == 1 for number in numbers):
            of_each = torch.cat([number.reshape(1) for number in numbers])
            entry["value"] = over_records(of_each, entry.get("reduce_fx", "mean"))
    if entry.get("batch_size") is not None:
        entry["batch_size"] = sum(each["batch_size"] for each in entries)
    return entry


# -- torchmetrics ---------------------------------------------------------------------------------


def _state_of(metric: Metric) -> dict[str, Any]:
    """Return the states, which no later update may change, and the value of the last update."""
    states = {
        name: list(value) if isinstance(value, list) else value
        for name, value in metric.metric_state.items()
    }
    return {"states": states, "value": metric._forward_cache, "updates": metric._update_count}


def _count(metric: Metric, of_records: Sequence[dict[str, Any]]) -> None:
    """Add to a metric what records counted, each in a metric without any other update."""
    for name, reduction in metric._reductions.items():
        parts = [getattr(metric, name), *(each["states"][name] for each in of_records)]
        setattr(metric, name, _joined(metric, name, reduction, parts))
    values = [each["value"] for each in of_records]
    if all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        shapes = {value.shape for value in values}
        metric._forward_cache = torch.stack(values).mean(0) if len(shapes) == 1 else None  # type: ignore[assignment]
    metric._computed = None
    metric._update_count += sum(each["updates"] for each in of_records)


def _joined(metric: Metric, name: str, reduction: Any, parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [each for part in parts for each in part]
    if reduction is dim_zero_cat:
        return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
    if reduction not in _JOINED:
        raise MisconfigurationError(
            f"The state {name!r} of {type(metric).__name__} must be a sum, maximum, minimum or list to "
            "combine records that run alone (engine='one_by_one'). Update this metric in "
            "on_train_batch_end.",
            topic="one-by-one",
        )
    return _JOINED[reduction](torch.stack(parts), 0)
