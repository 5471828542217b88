"""Checks of what no proof on paper can check: the user's own model, and the run as it ran.

- :mod:`lightning_dp.audit.isolation`: does each record's gradient depend on that record alone?
- :mod:`lightning_dp.audit.canaries`: how much does an attacker with planted records really learn?
- :mod:`lightning_dp.audit.memory`: how much memory does a private step take?
- :mod:`lightning_dp.audit.physical_batch`: which physical batch fits, for the same logical one?
"""

__all__: list[str] = []
