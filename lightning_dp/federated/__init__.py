"""Protocols for several data holders, as pure state machines.

Asynchronous rounds start here. Further protocols are in :mod:`lightning_dp.federated.synchronous`
and :mod:`~lightning_dp.federated.cubic_newton`; parts for your own protocol in
:mod:`~lightning_dp.federated.protocol` and :mod:`~lightning_dp.federated.client`.
"""

from lightning_dp.federated.asynchronous import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    InverseRootSteps,
    PolynomialSizes,
)
from lightning_dp.federated.protocol import Quorum

__all__ = [
    "AsyncClient",
    "AsyncPlan",
    "AsyncServer",
    "ClientPrivacy",
    "InverseRootSteps",
    "PolynomialSizes",
    "Quorum",
]
