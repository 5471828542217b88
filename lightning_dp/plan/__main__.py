"""``python -m lightning_dp.plan --records N --epsilon E``."""

import sys

from lightning_dp.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
