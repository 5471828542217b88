"""The parts of one fit's private steps, from setup to teardown."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.strategies.first_step import FirstStep
from lightning_dp.strategies.private_step import PrivateStep
from lightning_dp.strategies.probe import Probe
from lightning_dp.strategies.together import Agreement

__all__ = ["FitUnderWay"]


@dataclass(frozen=True)
class FitUnderWay:
    """A fit's parts; they exist together or not at all.

    Args:
        step: the accounts of the step under way, and the model under its engine.
        first: watches which parameters the first step changes.
        probe: watches batches for what couples records.
        agree: ends the fit on all ranks, or on none.
    """

    step: PrivateStep
    first: FirstStep
    probe: Probe
    agree: Agreement
