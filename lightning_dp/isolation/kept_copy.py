"""The copy that a pass leaves to the next one, where it is still as a new one would be."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_dp.gradients import RecordPasses
from lightning_dp.isolation.model_copies import empty, is_much
from lightning_dp.isolation.module_state import ModuleState
from lightning_dp.isolation.untouched import Untouched, is_shared, keeps_results

__all__ = ["AttachedCopy", "KeptCopy", "may_be_kept"]

# Each pass gives a copy new ones of these.
_RENEWED = frozenset({"_trainer", "log", "optimizers", "lr_schedulers"})


@dataclass(frozen=True)
class AttachedCopy:
    """A copy of a model with an engine on it.

    Args:
        key: what it was made for.
        module: the copy.
        engine: runs it.
        before: what it held when it was new; None if nobody will ask.
    """

    key: Hashable
    module: LightningModule
    engine: RecordPasses
    before: Untouched | None = None

    def free(self) -> None:
        """Free its memory."""
        self.engine.detach()
        empty(self.module)


class KeptCopy:
    """Holds one copy of a model, with the engine attached, from one pass to the next.

    It is handed out only if nothing of it was changed, in no way that could be seen: no attribute, no
    item of a container, no value or form of a tensor, no hook. So the next pass begins as with a new
    copy. After a pass that changed something, no copies are kept any more.
    """

    def __init__(self) -> None:
        self._held: AttachedCopy | None = None
        self._is_off = False

    def take(self, key: Hashable) -> AttachedCopy | None:
        """Hand out the copy, if there is one that was made for the same and is as new."""
        if (held := self._held) is None:
            return None
        if held.key == key and held.before is not None:
            if held.before.is_so():
                self._held = None
                return held
            self._is_off = True
        self.drop()
        return None

    def new(self, key: Hashable, module: LightningModule, engine: RecordPasses) -> AttachedCopy:
        """Return a new copy with what tells later whether it was changed."""
        before = None if self._is_off else Untouched(module, _RENEWED)
        self._is_off = before is None or not before.is_whole
        return AttachedCopy(key, module, engine, None if self._is_off else before)

    def keep(self, copy: AttachedCopy) -> None:
        """Take in a copy after a pass."""
        self._held = copy
        if copy.before is None:
            self.drop()

    def drop(self) -> None:
        """Free the copy, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            held.free()


def may_be_kept(module: LightningModule, outside: ModuleState) -> bool:
    """Tell whether nothing outside of a model's copies can tell one from another, and they are small.

    What a function remembers of its calls by the object (``functools.cache``) would be found again by
    the next pass. So all that the model's code reaches must be such as can be put back.

    Args:
        module: the model itself.
        outside: the state of it, with that of its classes and functions.
    """
    if is_much(module) or not module.automatic_optimization:
        return False
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    return not keeps_results(kinds) and all(map(is_shared, outside.left_outside()))
