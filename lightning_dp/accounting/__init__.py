"""Events, accountants and calibration: the questions asked of the data, and their cost.

Each name is imported when it is first asked for: a training needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp._lazy import names_from

__all__ = [
    "ZCDP",
    "ApproximateDP",
    "Gaussian",
    "PLDAccountant",
    "PoissonGaussian",
    "StreamingRDPAccountant",
    "TradeOff",
    "calibrate",
    "delta",
    "epsilon",
    "epsilon_text",
    "recover_journal",
    "sweep_history",
    "to_dp_event",
    "trade_off",
]

if TYPE_CHECKING:
    from lightning_dp.accounting.base import epsilon_text
    from lightning_dp.accounting.calibration import calibrate
    from lightning_dp.accounting.events import (
        ZCDP,
        ApproximateDP,
        Gaussian,
        PoissonGaussian,
        to_dp_event,
    )
    from lightning_dp.accounting.ledger import recover_journal, sweep_history
    from lightning_dp.accounting.pld import PLDAccountant, TradeOff, delta, epsilon, trade_off
    from lightning_dp.accounting.rdp import StreamingRDPAccountant
else:
    homes = ("events", "base", "pld", "rdp", "calibration", "ledger")
    __getattr__ = names_from(__name__, *homes)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
