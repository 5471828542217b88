"""The private loader serves the fit loop alone: whoever else asks is refused, before a record is read."""

from __future__ import annotations

import inspect

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops import fetchers, training_epoch_loop
from lightning.pytorch.utilities import combined_loader

__all__ = ["check_asker"]

_NAMELESS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
_ON_THE_WAY = (combined_loader.__name__, fetchers.__name__)


def check_asker() -> None:
    """Refuse to hand out a batch but to Lightning's training epoch; call it where one is made.

    Only there is every batch charged before it is used. No state of the Trainer tells its request
    from one of a hook that runs between two batches, so this looks at who called.

    Raises:
        MisconfigurationException: naming the function that asked.
    """
    asked = inspect.currentframe()
    loader = asked and asked.f_back  # the iteration that calls this
    caller = loader and loader.f_back
    while caller is not None and caller.f_globals.get("__name__") in _ON_THE_WAY:
        caller = caller.f_back
    name = None if caller is None else caller.f_globals.get("__name__")
    if caller is not None and name == training_epoch_loop.__name__:
        return
    while caller is not None and caller.f_code.co_name in _NAMELESS:
        caller = caller.f_back
    where = "Somebody" if caller is None else f"{name}.{caller.f_code.co_name}"
    raise MisconfigurationException(
        f"{where} asks the Trainer's training loader for a batch. It serves the training steps of "
        "fit alone: there each batch is charged before it is used, and whatever else is computed "
        "of its records (a centre, statistics, a prediction) would carry no noise and not be in "
        "epsilon. Use public data for it, in a DataLoader of your own."
    )
