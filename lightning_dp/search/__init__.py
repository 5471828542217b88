"""Searches for hyper-parameters: trials that share one budget."""

from lightning_dp.search.joint import Search, Trial

__all__ = ["Search", "Trial"]
