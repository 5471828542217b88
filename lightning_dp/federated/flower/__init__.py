"""Protocols on Flower (``pip install "lightning-dp[federated]"``): the only place that imports it."""

from lightning_dp.federated.flower.client import client_app
from lightning_dp.federated.flower.server import server_app

__all__ = ["client_app", "server_app"]
