"""The global random states at one moment, to which a further pass over the same records goes back."""

from lightning_dp._generators import RandomState

__all__ = ["RandomState"]
