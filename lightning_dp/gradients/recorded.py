"""The recorder of layer calls, as engines hold it from attach() to detach()."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_dp._refusals import RefusedRun
from lightning_dp.gradients.base import AbstractGradientEngine
from lightning_dp.gradients.recording import Recorder

__all__ = ["AbstractRecordingEngine"]


class AbstractRecordingEngine(AbstractGradientEngine):
    """An engine that sees a model through a :class:`Recorder`, which ``attach`` makes."""

    runs_backward = True

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    @property
    def _attached(self) -> Recorder:
        if self._recorder is None:
            raise RefusedRun(
                "The engine watches no model: attach() must come first.", topic="out-of-order"
            )
        return self._recorder

    def outputs_of_layers(self) -> Collection[Any]:
        return self._attached.outputs()

    def drop(self) -> None:
        if self._recorder is not None:
            self._recorder.drop()

    def rest(self) -> None:
        if self._recorder is not None:
            self._recorder.take_off()

    def wake(self) -> None:
        if self._recorder is not None:
            self._recorder.put_on()

    def detach(self) -> None:
        self.rest()
        if self._recorder is not None:
            # Its hooks know it, so that it is freed late: not with the tensors of a forward pass.
            self._recorder.drop()
        self._recorder = None
