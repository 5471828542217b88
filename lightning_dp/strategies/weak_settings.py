"""Settings that are allowed and promise little: a warning that says the consequence."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_dp.config import PrivacyConfig
from lightning_dp.sampling import BatchPlan, Poisson

__all__ = ["weak_settings"]


def weak_settings(config: PrivacyConfig, batches: BatchPlan) -> Iterator[str]:
    """A sentence for each setting of a run under which ε says less than its user may think."""
    delta, records = config.target_delta, batches.num_records
    if not delta * records < 1:
        yield (
            f"target_delta={delta:g} is not below 1/N = {1 / records:.3g} for the N = {records} "
            "records of the training set. At such a δ, a mechanism that publishes a record of one "
            "person in clear, chosen at random, is called private, whatever ε is. Choose δ well "
            f"below 1/N, {_well_below(records):g} say."
        )
    if isinstance(config.sampling, Poisson) and not batches.sample_rate < 1:
        yield (
            f"The batch size (batch_size · accumulate_grad_batches · processes) reaches the {records} "
            "records of the training set, so each step uses all of them: sampling hides nobody, and a "
            "step costs as much ε as it can. If that is meant, say sampling=FullBatch(); else give "
            "the DataLoader a smaller batch_size."
        )


def _well_below(records: int) -> float:
    """A power of ten that is at most a tenth of 1/N."""
    return float(f"1e-{len(str(records)) + 1}")
