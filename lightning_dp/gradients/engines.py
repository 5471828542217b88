"""The table of gradient engines, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lightning_dp.gradients.base import ALONE, AbstractGradientEngine, UnsupportedModelError
from lightning_dp.gradients.unsupported import refuse_special

__all__ = ["attach_engine"]


def attach_engine(
    name: str, module: nn.Module, params: Sequence[nn.Parameter]
) -> tuple[AbstractGradientEngine, str]:
    """Return the engine of that name, watching the module, and a sentence about it for the report.

    "auto" is the book-keeping engine where it covers the model, else Opacus' hooks.

    Raises:
        ValueError: for a name that is not known.
        UnsupportedModelError: if the engine, or with "auto" neither, can handle the model.
    """
    # Opacus takes a second to import, and a command that only reads a report needs no engine.
    from lightning_dp.gradients.bookkeeping import Bookkeeping
    from lightning_dp.gradients.one_by_one import OneByOne
    from lightning_dp.gradients.opacus_hooks import OpacusHooks

    engines: dict[str, Callable[[], AbstractGradientEngine]] = {
        "auto": Bookkeeping,
        "bookkeeping": Bookkeeping,
        "functional": lambda: Bookkeeping(rules={}),
        "hooks": OpacusHooks,
        "one_by_one": OneByOne,
    }
    if name not in engines:
        raise ValueError(f"engine={name!r} is not one of {sorted(engines)}.")
    refuse_special(module, params)
    engine = engines[name]()
    try:
        engine.attach(module, params)
    except UnsupportedModelError as reason:
        if name != "auto":
            raise UnsupportedModelError(_or_alone(str(reason))) from reason
        engine = OpacusHooks()
        try:
            engine.attach(module, params)
        except UnsupportedModelError as error:
            message = f"{error} Book-keeping does not cover this model either: {reason}"
            raise UnsupportedModelError(_or_alone(message)) from reason
        return engine, f"{engine.name}, since book-keeping does not cover this model: {reason}"
    return engine, engine.name


def _or_alone(message: str) -> str:
    return message if ALONE in message else f"{message} {ALONE}"
