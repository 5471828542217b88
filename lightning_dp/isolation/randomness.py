"""Random numbers of passes: the same for both of a pair, and those that take rare branches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EXTREME_SEEDS", "SameFirstRows", "random_state", "seed"]

# Seeds of Python's, NumPy's and torch's generators whose first three numbers between 0 and 1 are all
# small, all large, small and large in turn, or the first of which is very small or very large: what
# training_step does with some probability, it does for one of them, and for another not.
_SEEDS = (
    (0, 0, 0),
    (8916, 59792, 18381),
    (12024, 27421, 3844),
    (215, 417, 1002),
    (925, 2126, 186),
    (139, 742, 39),
    (526, 319, 326),
)
EXTREME_SEEDS = range(1, len(_SEEDS))


def seed(number: int = 0) -> tuple[Any, ...]:
    """Let all global generators begin alike; CUDA's are not touched. Return their states."""
    seeds = _SEEDS[number] if number < len(_SEEDS) else (number,) * 3
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])
    return random_state()


def random_state() -> tuple[Any, ...]:
    """Return the states of all global generators, to be compared."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


_ROWS = 32  # torch draws are made for so many rows at least


class SameFirstRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the first rows of all that torch draws are the same however many rows are drawn.

    So the last record of a batch can be left out, and the others still meet the same random numbers,
    where these stand in rows of records. Up to 32 rows; beyond, the numbers of rows must have the
    same power of two above them.

    Example:
        >>> def draw(n):
        ...     torch.manual_seed(0)
        ...     with SameFirstRows():
        ...         return torch.randn(n, 3), torch.bernoulli(torch.full((n,), 0.5))
        >>> [bool((a[:5] == b[:5]).all()) for a, b in zip(draw(5), draw(8))]
        [True, True]
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if "size" in names and names.index("size") < len(args):
            return _of_size(func, names.index("size"), args, kwargs)
        if args and isinstance(args[0], Tensor) and args[0].dim():
            return _of_tensor(func, args, kwargs)
        return func(*args, **kwargs)


def _rounded(rows: int) -> int:
    return max(_ROWS, 1 << max(rows - 1, 0).bit_length())


def _of_size(
    func: Callable[..., Any], place: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    size = list(args[place])
    if not size:
        return func(*args, **kwargs)
    drawn = func(*args[:place], [_rounded(size[0]), *size[1:]], *args[place + 1 :], **kwargs)
    return drawn[: size[0]].clone()


def _of_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    n = len(first)
    extra = _rounded(n) - n

    def longer(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dim() and len(value) == n and n):
            return value
        return torch.cat([value, value[:1].expand(extra, *value.shape[1:])])

    drawn = func(*(longer(arg) for arg in args), **{k: longer(v) for k, v in kwargs.items()})
    if func._schema.is_mutable:
        return first.copy_(drawn[:n])
    if isinstance(drawn, Tensor):
        return drawn[:n].clone()
    return type(drawn)(part[:n].clone() if isinstance(part, Tensor) else part for part in drawn)
