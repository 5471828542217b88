"""A callback of the tests of callbacks."""

from __future__ import annotations

import pytest

from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import private


@pytest.fixture
def privacy() -> DifferentialPrivacy:
    """Little noise, so that training visibly works."""
    return private(noise_multiplier=0.5)
