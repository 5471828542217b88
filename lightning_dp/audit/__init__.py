"""Checks of what no proof on paper can check: the user's own model, and the run as it ran.

- :func:`check_isolation`: does each record's gradient depend on that record alone?
- :func:`check_collate_fn`: does each row of a batch depend on one sample alone?
- :func:`audit`: how much does an attacker with planted records learn from a run?
- :func:`measure_memory`: how much memory does a private step take?
- :func:`suggest_physical_batch`: which physical batch fits, for the same logical one?
"""

from lightning_dp.audit.canaries import audit
from lightning_dp.audit.peak_memory import measure_memory, suggest_physical_batch
from lightning_dp.isolation import check_isolation
from lightning_dp.isolation.collation import check_collate_fn

__all__ = [
    "audit",
    "check_collate_fn",
    "check_isolation",
    "measure_memory",
    "suggest_physical_batch",
]
