"""Protocols for several data holders, as pure state machines."""

from lightning_dp.federated.bvr_l_sgd import BVRLSGD

__all__ = ["BVRLSGD"]
