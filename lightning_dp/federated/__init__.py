"""Protocols for several data holders, as pure state machines."""

from lightning_dp.federated.async_sgd import AsyncClient, AsyncPlan, ClientPrivacy
from lightning_dp.federated.asynchronous import Aggregator, AsyncServer, RoundPlan
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import (
    AbstractClient,
    AbstractServer,
    Message,
    MessageError,
    Records,
)
from lightning_dp.federated.query_client import QueryClient
from lightning_dp.federated.sequences import (
    AbstractSampleSizes,
    AbstractStepSizes,
    ConstantSteps,
    DelaySizes,
    InverseRootSteps,
    InverseSteps,
    LogarithmicSizes,
    PolynomialSizes,
    PowerSizes,
    delay_is_permissible,
    rounds_for,
)
from lightning_dp.federated.spending import Spending
from lightning_dp.federated.synchronous import SynchronousServer

__all__ = [
    "BVRLSGD",
    "AbstractClient",
    "AbstractSampleSizes",
    "AbstractServer",
    "AbstractStepSizes",
    "Aggregator",
    "AsyncClient",
    "AsyncPlan",
    "AsyncServer",
    "ClientPrivacy",
    "ConstantSteps",
    "CubicNewtonClient",
    "CubicNewtonPlan",
    "DelaySizes",
    "InverseRootSteps",
    "InverseSteps",
    "LogarithmicSizes",
    "Message",
    "MessageError",
    "PolynomialSizes",
    "PowerSizes",
    "QueryClient",
    "Records",
    "ReleaseLedger",
    "RoundPlan",
    "Spending",
    "SynchronousServer",
    "delay_is_permissible",
    "rounds_for",
]
