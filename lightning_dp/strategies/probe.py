"""The isolation probe at the start of a fit, and what follows from its outcome."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from lightning_dp.audit.isolation import Isolation, probe_isolation
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.strategies.private_step import PrivateStep
from lightning_dp.warnings import warn

__all__ = ["heed", "probe"]

_SYNTHETIC = (
    "(Found on a synthetic batch. If it is wrong, leave the check out with isolation_probe=False.)"
)


def probe(module: LightningModule, batch: Any, step: PrivateStep, engine: str) -> Isolation:
    """Probe the model with synthetic records of the batch's shapes; nothing of it is changed."""
    trained = {id(param) for param in step.params}
    with step.put_aside():
        return probe_isolation(
            module,
            batch,
            engine=engine,
            trained=[name for name, p in module.named_parameters() if id(p) in trained],
            trainer=module.trainer,
        )


def heed(found: Isolation, *, may_warn: bool) -> None:
    """Go on, with a warning where the data decide, or raise.

    Raises:
        UnsupportedModelError: if no gradient engine handles the model.
        MisconfigurationException: if it couples records, keeps what it saw of them, or could not
            be probed.
    """
    if found.is_doubtful and may_warn:
        warn(
            "The loss divides by the number of targets that are not ignored (-100) in the whole "
            "batch, so an ignored target of one record changes the gradients of the others. If "
            "your data has such targets, the run ends at the first batch that has one, and its ε "
            "is withdrawn: take the mean of each record first, then the mean over the records."
        )
    if found.outcome == "refused":
        raise UnsupportedModelError(found.reason)
    if found.outcome == "coupled":
        raise MisconfigurationException(
            f"Records of one batch change each other's gradients: {found.reason}. Clipping "
            f"does not bound what a record does then, and ε would not hold. {_SYNTHETIC}"
        )
    if found.outcome == "not probed":
        raise MisconfigurationException(
            f"Isolation could not be probed: {found.reason}. Whether records of one batch change each "
            "other's gradients (a contrastive loss, statistics of the batch) is unknown, and if they "
            "do, ε does not hold. Look at it with lightning_dp.audit.isolation.check_isolation() on "
            "records that are not private; then leave the probe out with isolation_probe=False, "
            "which the report says."
        )
    if found.outcome == "kept":
        raise MisconfigurationException(f"ε would not hold: {found.reason}. {_SYNTHETIC}")
