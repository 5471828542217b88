"""The isolation probe: does each record's gradient depend on that record alone?

Every private run probes its model at the first batch (``isolation_probe=True``). To look at a model
yourself, import :func:`lightning_dp.audit.check_isolation`.
"""

from lightning_dp.isolation.outcome import BY_CONSTRUCTION, Isolation
from lightning_dp.isolation.probe import check_isolation, probe_isolation

__all__ = ["BY_CONSTRUCTION", "Isolation", "check_isolation", "probe_isolation"]
