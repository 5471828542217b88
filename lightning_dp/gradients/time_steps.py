"""Calls of a linear layer, one for each time step, as one call on the sequence of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_dp.gradients.bilinear import Uses
from lightning_dp.gradients.function_call import FunctionCall
from lightning_dp.gradients.layer_call import Call, LayerCall
from lightning_dp.gradients.rules import linear

__all__ = ["TimeSteps"]

_AT_ONCE = 8  # time steps that stand in memory twice


@dataclass
class _Steps:
    call: LayerCall  # one of them
    # The place in the order of calls, input and output gradient, as they arrive.
    tensors: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


# Output gradients in order, and the layers that they came to, each with its inputs.
_Alike: TypeAlias = tuple[list[Tensor], list[tuple[LayerCall, list[Tensor]]]]


class TimeSteps:
    """Calls of linear layers that are called often, until the backward pass is over.

    A linear layer treats positions alike, so that T calls with (n, width) tensors are one call with
    (n, T, width). The layers of a recurrent cell are handed the same gradients, which are joined once.
    """

    def __init__(self) -> None:
        self._times = Counter[nn.Module]()
        self._order: dict[int, int] = {}  # of the calls, by ``id``: gradients arrive in others
        self._steps: dict[tuple[object, ...], _Steps] = {}

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
        for gradients, layers in self._of_the_same_gradients():
            u = _stacked(gradients)
            for call, inputs in layers:
                layer = cast(nn.Linear, call.layer)
                yield call, linear(layer, _stacked(inputs), u)

    def _of_the_same_gradients(self) -> list[_Alike]:
        """Return lists of output gradients, each with the calls and inputs of layers that had these."""
        steps, self._steps = self._steps, {}
        found: dict[object, _Alike] = {}
        for each in steps.values():
            each.tensors.sort(key=itemgetter(0))
            # All are held until here, so that what stands in one place is one tensor.
            place = tuple([(u.shape, u.data_ptr(), u.stride()) for _, _, u in each.tensors])
            _, layers = found.setdefault(place, ([u for _, _, u in each.tensors], []))
            layers.append((each.call, [v for _, v, _ in each.tensors]))
        return list(found.values())


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Stack time steps in the second dimension, and let go of each where that is done."""
    (n, width), count = tensors[0].shape, len(tensors)
    stacked = tensors[0].new_empty(n, count, width)
    for start in range(0, count, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        torch.stack(tensors[:_AT_ONCE], dim=1, out=stacked[:, part])
        del tensors[:_AT_ONCE]
    return stacked
