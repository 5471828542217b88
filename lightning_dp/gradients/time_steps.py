"""Calls of a linear layer, one for each time step, as one call on the sequence of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor, nn

from lightning_dp.gradients.forms import Uses
from lightning_dp.gradients.function_call import FunctionCall
from lightning_dp.gradients.layers import linear, uses_of_positions
from lightning_dp.gradients.parameter_gradients import ScratchPool
from lightning_dp.gradients.recording import Call, LayerCall

__all__ = ["TimeSteps"]


@dataclass
class _Steps:
    call: LayerCall  # one of them
    # The place in the order of calls, input and output gradient, as they arrive.
    tensors: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


class TimeSteps:
    """Calls of linear layers that are called often, until the backward pass is over.

    A linear layer treats positions alike, so that T calls with (n, width) tensors are one call with
    (n, T, width). The layers of a recurrent cell are handed the same gradients, which are joined once.
    """

    def __init__(self, memory: ScratchPool) -> None:
        self._memory = memory
        self._times = Counter[nn.Module]()
        self._order: dict[int, int] = {}  # of the calls, by ``id``: gradients arrive in others
        self._steps: dict[tuple[object, ...], _Steps] = {}
        self._borrowed: list[Tensor] = []

    def expect(self, calls: Iterable[Call]) -> None:
        """Count calls that the backward pass is going to come to."""
        for call in calls:
            if not isinstance(call, FunctionCall):
                self._times[call.layer] += 1
                self._order[id(call)] = len(self._order)

    def takes(self, call: LayerCall, tensors: list[Tensor]) -> bool:
        """Keep input and output gradient of a call, if it is one of several; tell whether it is."""
        is_step = call.rule is linear and call.folding is None and self._times[call.layer] > 1
        if not is_step or tensors[0].dim() != 2:
            return False
        v, u = tensors
        steps = self._steps.setdefault((call.layer, v.shape, u.shape, u.dtype), _Steps(call))
        steps.tensors.append((self._order[id(call)], v, u))
        return True

    def joined(self) -> Iterator[tuple[LayerCall, Uses]]:
        """Hand over one call of each layer, with the uses of its parameters in all of them."""
        steps, self._steps = self._steps, {}
        known: dict[object, tuple[Tensor, Tensor]] = {}
        for each in steps.values():
            _, inputs, gradients = zip(*sorted(each.tensors, key=itemgetter(0)), strict=True)
            # All are held until the end, so that what stands in one place is one tensor.
            place = gradients[0].shape, *((u.data_ptr(), u.stride()) for u in gradients)
            if place not in known:
                u = self._stacked(gradients)
                known[place] = u, u.sum(1)
            layer = cast(nn.Linear, each.call.layer)
            yield each.call, uses_of_positions(layer, self._stacked(inputs), *known[place])

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        n, width = tensors[0].shape
        memory = self._memory.take(n, torch.Size((len(tensors), width)), tensors[0])
        self._borrowed.append(memory)
        return torch.stack(list(tensors), dim=1, out=memory[:n])

    def give_back(self, held: Iterable[Tensor]) -> None:
        """Let others use the memory of what was handed over, where nobody holds a part of it."""
        if not self._borrowed:
            return
        places = {each.untyped_storage().data_ptr() for each in held}
        while self._borrowed:
            memory = self._borrowed.pop()
            if memory.untyped_storage().data_ptr() not in places:
                self._memory.give_back(memory)
