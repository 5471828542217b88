"""Protocols for several data holders, as pure state machines."""

from lightning_dp.federated.aggregator import Aggregator
from lightning_dp.federated.async_client import AsyncClient, ClientPrivacy
from lightning_dp.federated.asynchronous import AsyncPlan, AsyncServer, RoundPlan
from lightning_dp.federated.base import (
    AbstractClient,
    AbstractServer,
    Message,
    MessageError,
    Records,
)
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.cubic_newton import CubicNewtonPlan
from lightning_dp.federated.cubic_newton_client import CubicNewtonClient
from lightning_dp.federated.query_client import QueryClient
from lightning_dp.federated.release_ledger import ReleaseLedger
from lightning_dp.federated.sample_sizes import (
    AbstractSampleSizes,
    DelaySizes,
    LogarithmicSizes,
    PolynomialSizes,
    PowerSizes,
    delay_is_permissible,
    rounds_for,
)
from lightning_dp.federated.spending import Spending
from lightning_dp.federated.step_sizes import (
    AbstractStepSizes,
    ConstantSteps,
    InverseRootSteps,
    InverseSteps,
)
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
