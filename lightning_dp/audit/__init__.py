"""Checks of the user's own model and of the run as it ran.

- :func:`check_isolation`: does what a record contributes depend on that record alone?
- :func:`audit`: how much does an attacker with planted records learn from a run?
"""

from lightning_dp.audit.canaries import audit
from lightning_dp.isolation import check_isolation

__all__ = ["audit", "check_isolation"]
