"""Federations on one machine, to try Flower apps: in one process, or with all of Flower's processes.

Needs ``pip install "lightning-dp[federated]"``.
"""

from lightning_dp.testing.grid import Faults, LoopbackGrid
from lightning_dp.testing.processes import LoopbackFederation

__all__ = ["Faults", "LoopbackFederation", "LoopbackGrid"]
