"""A client's work in federated averaging: the clipped update of some epochs over its own records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_dp._validate import whole
from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.federated.local import ModuleRecords, Unit
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients.batches import call_training_step, is_differentiable, loss_in
from lightning_dp.gradients.snapshot import restored
from lightning_dp.isolation.dry_run import DryRun
from lightning_dp.sampling import UserLevel

__all__ = ["LocalUpdates"]


class LocalUpdates(ModuleRecords):
    r"""One client's records, answered for by the update of a model that is trained on them.

    Where :class:`~lightning_dp.federated.local.LocalRecords` has gradients, this has updates
    u(x) = x - x', where x' is the model after some epochs of an optimizer from x on the chosen records.
    A query is answered with :math:`\mathrm{clip}_R(P_c \sum_k w_k\, u(x_k))`. With
    :class:`~lightning_dp.MeanGradient`, ``SynchronousServer(noise="server")``, a learning rate of 1
    and the number of clients for ``num_records`` this is DP-FedAvg (McMahan, Ramage, Talwar and Zhang,
    2018, Algorithm 1). In both cases of R the noise is z times what the unit moves:

    - unit="client", R = C. The client takes part or counts as zero, so it moves the sum over all
      clients by at most C.
    - unit="record", R = C/2. With other records u may have nothing in common with what it was, but
      ‖clip_R(u) - clip_R(u')‖ <= 2 R = C, for each order of the records. If the batch of the round is
      a Poisson sample at rate q, then, the others fixed, one record is in it with probability q: a
      mixture of two Gaussians at most C apart, which is what is charged.
    - unit=UserLevel(...), R = C/2. The same, with users and their rows in the place of records.

    An update that is not finite counts as zero. There is no Trainer, as in ``LocalRecords``; the
    optimizer begins anew in each round, and nothing of a round stays on the module. The loss may mix
    records.

    Args:
        module, records, device, try_first: as in ``LocalRecords``.
        optimizer: makes the optimizer of a round from the parameters.
        epochs: E >= 1, over the batch of the round.
        unit: see above.
        chunk_size: records of a local step; default the loader's batch size, else 64.

    Raises:
        MisconfigurationException: for a module without a loss of its own, or data without a length.
        ValueError: for an unknown ``unit``, or a number below 1.

    Example:
        >>> import lightning as L
        >>> from functools import partial
        >>> from lightning_dp import Term
        >>> from torch.utils.data import TensorDataset
        >>> class Mean(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(1, 1, bias=False)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch[0]).mean()
        >>> sgd, data = partial(torch.optim.SGD, lr=0.1), TensorDataset(torch.tensor([[1.0], [3.0]]))
        >>> local = LocalUpdates(Mean(), data, sgd, epochs=2, unit="client")
        >>> query = Query((Term(),), clip_norm=5.0, noise_multiplier=1.0)
        >>> local.bounded_sum(query, [0, 1]).value
        tensor([0.4000])
    """

    has_products = False

    def __init__(
        self,
        module: LightningModule,
        records: Dataset[Any] | DataLoader[Any],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        epochs: int = 1,
        unit: Unit | UserLevel,
        chunk_size: int | None = None,
        device: str | torch.device = "cpu",
        try_first: bool = True,
    ) -> None:
        super().__init__(module, records, unit, chunk_size, device, try_first)
        self._optimizer, self._epochs = optimizer, whole("epochs", epochs)

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        """Return the clipped update of these records. Sensitive until it is noised."""
        total = torch.zeros_like(self.point)
        for term in query.terms:
            point = self.point if term.point is None else term.point
            total += term.weight * self._update(point, list(records))
        if query.coordinates is not None:
            total = total[query.coordinates]
        if self.unit == "client":
            return self._clipped_whole(total, query.clip_norm)
        half = self._clipped_whole(total, query.clip_norm / 2)
        return BoundedSum.received(half.value, query)  # two of these are C apart at most

    def _update(self, point: Tensor, records: list[int]) -> Tensor:
        """Return u(x) of a point, before it is clipped."""
        with restored(self._module, parameters=True, global_random=False), torch.enable_grad():
            for param, value in zip(self.params, unflatten(point, self.params), strict=True):
                param.data.copy_(value)
            optimizer = self._optimizer(self.params)
            for _ in range(self._epochs):
                order = [records[place] for place in torch.randperm(len(records)).tolist()]
                for number, (batch, _) in enumerate(self._chunks([[row] for row in order])):
                    self._step(optimizer, batch, number)
            return point - flatten(self.params).to(point.dtype)

    def _step(self, optimizer: Optimizer, batch: Any, number: int) -> bool:
        """Make a step; a batch without a loss is left out."""
        loss = loss_in(call_training_step(self._module, batch, number))
        if is_differentiable(loss):
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        return is_differentiable(loss)

    def _answers(self, samples: list[Any], dry: DryRun) -> bool:
        with restored(self._module, parameters=True, global_random=False):
            batch = self._on_device(self._loader.collate_fn(samples))
            return self._step(self._optimizer(self.params), batch, 0)
