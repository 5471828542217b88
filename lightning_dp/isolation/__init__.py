"""Isolation: what a record contributes to a sum depends on that record alone.

Every private run looks at it (:mod:`lightning_dp.strategies.isolation`). To look at a model yourself,
call :func:`lightning_dp.audit.check_isolation`.
"""

from lightning_dp.isolation.check import BY_CONSTRUCTION, Outcome
from lightning_dp.isolation.standalone import check_isolation

__all__ = ["BY_CONSTRUCTION", "Outcome", "check_isolation"]
