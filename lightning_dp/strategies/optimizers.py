"""One optimizer is private, others are public: which is which, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._refusals import warn
from lightning_dp.strategies.update_guard import trained_by

__all__ = ["Optimizers", "find_optimizers"]

_WHICH = (
    "configure_optimizers gives {} optimizers. Say which one is trained on the records, by its place "
    "among them, DifferentialPrivacy(private_optimizer={}), or by a module whose parameters it holds: "
    "private_optimizer={!r}. The others are public, and may use released and synthetic values only (a "
    "generator's optimizer next to a private discriminator's). If all are trained on the records, put "
    "all parameters into parameter groups of one optimizer."
)
_DISJOINT = (
    "The private optimizer and a public one both hold the parameters {}. What a public optimizer "
    "moves must be no part of what is trained on the records: give each parameter to one optimizer."
)
_SEVERAL_PROCESSES = (
    "configure_optimizers gives {} optimizers, and there are {} processes. Each of them would step the "
    "public ones on other random numbers, so that their weights would drift apart. Use one process: "
    "Trainer(devices=1)."
)


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of a fit.

    Args:
        private: its gradients are clipped per record and noised; each of its steps is charged.
        public: the others, in their order.
        description: for the report; None if there are no others.
    """

    private: Optimizer
    public: tuple[Optimizer, ...] = ()
    description: str | None = None

    @property
    def public_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the public ones move."""
        return tuple(p for each in self.public for p in trained_by(each))


def find_optimizers(
    optimizers: Sequence[Optimizer],
    module: LightningModule,
    named: int | str | None,
    processes: int = 1,
) -> Optimizers:
    """Find the private optimizer among them; refuse what cannot be trained.

    Args:
        optimizers: what ``configure_optimizers`` gave.
        module: whose parameters they hold.
        named: ``private_optimizer``: the place, or the dotted path of a module.
        processes: of the job.

    Raises:
        MisconfigurationException: with the cure.
    """
    if not optimizers or not optimizers[0].param_groups:
        raise MisconfigurationError(
            "configure_optimizers gives no optimizer, so nothing would be trained. Return one "
            "optimizer over the parameters to train.",
            topic="optimizer",
        )
    place = _place(optimizers, module, named)
    private = optimizers[place]
    public = tuple(each for each in optimizers if each is not private)
    if public and processes > 1:
        raise MisconfigurationError(
            _SEVERAL_PROCESSES.format(len(optimizers), processes), topic="several-optimizers"
        )
    _check(private, module)
    for each in public:
        _check_held(each, module)
    names = {id(p): name for name, p in module.named_parameters()}
    mine = {id(p) for group in private.param_groups for p in group["params"]}
    theirs = {id(p) for each in public for group in each.param_groups for p in group["params"]}
    if both := sorted(names.get(each, "?") for each in mine & theirs):
        raise MisconfigurationError(_DISJOINT.format(both[:5]), topic="several-optimizers")
    _warn_of_left(module, mine | theirs)
    return Optimizers(private, public, _described(optimizers, place, module) if public else None)


def _place(
    optimizers: Sequence[Optimizer], module: LightningModule, named: int | str | None
) -> int:
    if named is None:
        if len(optimizers) > 1:
            last = len(optimizers) - 1
            held = _parts_held(optimizers[last], module)
            raise MisconfigurationError(
                _WHICH.format(len(optimizers), last, held[0] if held else "net"),
                topic="several-optimizers",
            )
        return 0
    if isinstance(named, int):
        if not 0 <= named < len(optimizers):
            raise MisconfigurationError(
                f"private_optimizer={named} is no place among the {len(optimizers)} of "
                f"configure_optimizers: use 0 to {len(optimizers) - 1}.",
                topic="several-optimizers",
            )
        return named
    try:
        part = module.get_submodule(named)
    except AttributeError:
        raise MisconfigurationError(
            f"private_optimizer={named!r} is no module of {type(module).__name__}. It has "
            f"{[name for name, _ in module.named_children()]}.",
            topic="several-optimizers",
        ) from None
    wanted = {id(p) for p in part.parameters() if p.requires_grad}
    places = [i for i, each in enumerate(optimizers) if wanted & {id(p) for p in trained_by(each)}]
    moved = {id(p) for i in places for p in trained_by(optimizers[i])}
    if len(places) != 1 or not wanted <= moved:
        raise MisconfigurationError(
            f"private_optimizer={named!r} must be a module all of whose trainable parameters are in "
            f"one optimizer; {len(places)} hold some of them. Give the optimizer's place in "
            f"configure_optimizers: private_optimizer={places[0] if places else 0}.",
            topic="several-optimizers",
        )
    return places[0]


def _check(optimizer: Optimizer, module: LightningModule) -> None:
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationError(
            "LBFGS evaluates the loss several times per step, each time on the data. "
            "Use SGD, Adam or another optimizer that evaluates it once.",
            topic="optimizer",
        )
    _check_held(optimizer, module)
    if not trained_by(optimizer):
        raise MisconfigurationError(
            "The optimizer holds no trainable parameter (requires_grad is False everywhere).",
            topic="optimizer",
        )


def _check_held(optimizer: Optimizer, module: LightningModule) -> None:
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(parameter) not in own for parameter in trained_by(optimizer)):
        raise MisconfigurationError(
            "The optimizer holds a parameter that is not a parameter of the LightningModule, so its "
            "per-record gradients cannot be computed. Register it on the module.",
            topic="optimizer",
        )


def _warn_of_left(module: LightningModule, held: set[int]) -> None:
    left = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        warn(
            f"{len(left)} trainable parameters are in no parameter group of the optimizer and will "
            f"never move: {left[:5]}. Give them to the optimizer, or freeze them with "
            "requires_grad_(False), which also makes the steps cheaper.",
            topic="optimizer",
        )


def _described(optimizers: Sequence[Optimizer], place: int, module: LightningModule) -> str:
    """Return which of them is private, in words."""

    def words(optimizer: Optimizer) -> str:
        return f"{type(optimizer).__name__} of {', '.join(_parts_held(optimizer, module)) or '?'}"

    others = "; ".join(words(each) for i, each in enumerate(optimizers) if i != place)
    return (
        f"{words(optimizers[place])} (number {place} of {len(optimizers)}); public, on released and "
        f"synthetic values alone as far as the isolation probe sees: {others}"
    )


def _parts_held(optimizer: Optimizer, module: LightningModule) -> list[str]:
    """Return the names of the module's children that the optimizer holds parameters of."""
    held = {id(p) for p in trained_by(optimizer)}
    named = module.named_parameters()
    return list(dict.fromkeys(name.partition(".")[0] for name, p in named if id(p) in held))
