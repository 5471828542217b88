"""Protocols for several data holders, as pure state machines."""

from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.cubic_newton import (
    CubicNewtonClient,
    CubicNewtonServer,
    FederatedCubicNewton,
)

__all__ = ["BVRLSGD", "CubicNewtonClient", "CubicNewtonServer", "FederatedCubicNewton"]
