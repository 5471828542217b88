"""Ten-line modules: some make ε false as plausible research code does, others must train unhindered.

Importing this fills ``zoo.cases.BAD`` and ``zoo.cases.ORDINARY``.
"""

from zoo import bad_data, bad_edits, bad_losses, bad_mixing, bad_state, ordinary  # noqa: F401
from zoo.cases import BAD, ORDINARY

__all__ = ["BAD", "ORDINARY"]
