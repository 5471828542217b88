"""Protocols for several data holders, as pure state machines.

Asynchronous rounds start here. Further protocols are in :mod:`lightning_dp.federated.synchronous`,
:mod:`~lightning_dp.federated.query_client`, :mod:`~lightning_dp.federated.cubic_newton` and
:mod:`~lightning_dp.federated.bvr_l_sgd`; further sequences of sizes in
:mod:`~lightning_dp.federated.sequences`; parts for your own protocol in
:mod:`~lightning_dp.federated.protocol` and :mod:`~lightning_dp.federated.client`.
"""

from lightning_dp.federated.async_sgd import AsyncClient, AsyncPlan, ClientPrivacy
from lightning_dp.federated.asynchronous import AsyncServer
from lightning_dp.federated.sequences import InverseRootSteps, PolynomialSizes

__all__ = [
    "AsyncClient",
    "AsyncPlan",
    "AsyncServer",
    "ClientPrivacy",
    "InverseRootSteps",
    "PolynomialSizes",
]
