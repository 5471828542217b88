"""``python -m lightning_dp.report PATH``."""

import sys

from lightning_dp.report.command import main

if __name__ == "__main__":
    sys.exit(main())
