"""A callback of the tests of callbacks."""

from __future__ import annotations

import pytest

from lightning_dp.callbacks import DifferentialPrivacy


@pytest.fixture
def privacy() -> DifferentialPrivacy:
    """Little noise, so that training visibly works."""
    return DifferentialPrivacy(
        noise_multiplier=0.5, target_delta=1e-5, isolation_probe=False, spot_checks=False
    )
