"""Protocols for several data holders, as pure state machines.

Here is what runs them. Their parts, for protocols of your own, are in
:mod:`lightning_dp.federated.protocol` and :mod:`lightning_dp.federated.client`; further sequences
of sample sizes in :mod:`lightning_dp.federated.sequences`.
"""

from lightning_dp.federated.async_sgd import AsyncClient, AsyncPlan, ClientPrivacy
from lightning_dp.federated.asynchronous import Aggregator, AsyncServer
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.query_client import QueryClient
from lightning_dp.federated.sequences import (
    ConstantSteps,
    InverseRootSteps,
    InverseSteps,
    PolynomialSizes,
    PowerSizes,
)
from lightning_dp.federated.spending import Spending
from lightning_dp.federated.synchronous import SynchronousServer

__all__ = [
    "BVRLSGD",
    "Aggregator",
    "AsyncClient",
    "AsyncPlan",
    "AsyncServer",
    "ClientPrivacy",
    "ConstantSteps",
    "CubicNewtonClient",
    "CubicNewtonPlan",
    "InverseRootSteps",
    "InverseSteps",
    "PolynomialSizes",
    "PowerSizes",
    "QueryClient",
    "ReleaseLedger",
    "Spending",
    "SynchronousServer",
]
