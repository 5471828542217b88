"""Searches for hyper-parameters: trials that keep to one budget, or of which only the best is seen."""

from lightning_dp.search.joint import Search, Trial
from lightning_dp.search.selection import Attempt, Selection

__all__ = ["Attempt", "Search", "Selection", "Trial"]
