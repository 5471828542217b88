"""Ten-line modules: some make ε false as plausible research code does, others must train unhindered.

Importing this fills ``isolation_zoo.cases.BAD`` and ``isolation_zoo.cases.ORDINARY``.
"""

from isolation_zoo import (  # noqa: F401
    bad_data,
    bad_edits,
    bad_losses,
    bad_mixing,
    bad_state,
    ordinary_architectures,
    ordinary_batches,
    ordinary_images,
    ordinary_losses,
    ordinary_objectives,
    ordinary_sequences,
    ordinary_steps,
)
from isolation_zoo.cases import BAD, ORDINARY

__all__ = ["BAD", "ORDINARY"]
