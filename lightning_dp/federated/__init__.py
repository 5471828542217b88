"""Protocols for several data holders, as pure state machines."""

from lightning_dp.federated.asynchronous import AsyncPlan, AsyncServer
from lightning_dp.federated.base import (
    AbstractClient,
    AbstractServer,
    Message,
    MessageError,
    Records,
)
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.release_ledger import ReleaseLedger, Spending
from lightning_dp.federated.sample_sizes import (
    AbstractSampleSizes,
    DelaySizes,
    LogarithmicSizes,
    PolynomialSizes,
    PowerSizes,
    delay_is_permissible,
    rounds_for,
)
from lightning_dp.federated.step_sizes import (
    AbstractStepSizes,
    ConstantSteps,
    InverseRootSteps,
    InverseSteps,
)

__all__ = [
    "BVRLSGD",
    "AbstractClient",
    "AbstractSampleSizes",
    "AbstractServer",
    "AbstractStepSizes",
    "AsyncPlan",
    "AsyncServer",
    "ConstantSteps",
    "DelaySizes",
    "InverseRootSteps",
    "InverseSteps",
    "LogarithmicSizes",
    "Message",
    "MessageError",
    "PolynomialSizes",
    "PowerSizes",
    "Records",
    "ReleaseLedger",
    "Spending",
    "delay_is_permissible",
    "rounds_for",
]
