"""Post-processors: what is done to the gradient estimate after the noise."""

from lightning_dp.postprocessing.base import AbstractPostProcessor
from lightning_dp.postprocessing.laplacian_smoothing import LaplacianSmoothing
from lightning_dp.postprocessing.momentum import Momentum

__all__ = ["AbstractPostProcessor", "LaplacianSmoothing", "Momentum"]
