"""The settings of a private training: checked once, and as plain data in checkpoints.

As data a setting such as ``Diff2(restart_every=3)`` is ``{"class": "Diff2", "restart_every": 3, ...}``.
Equal values are equal however they were given (``1``, ``1.0`` and ``np.float64(1)``, also in parts
that users wrote), and a field that a later version adds does not make earlier files unreadable.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any, Literal, SupportsFloat, TypeAlias, cast, get_args

from lightning_dp._files import local_folder
from lightning_dp._noise import CipherStream
from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import (
    above_0,
    explained,
    flag,
    instance,
    listed,
    normalise,
    not_negative,
    one_line,
    one_of,
    optional,
    positive,
    probability,
    seed,
    whole,
    whole_from_0,
)
from lightning_dp.accounting.base import LEAST_EPSILON, AbstractAccountant, Relation
from lightning_dp.accounting.events import AbstractExternal
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.clipping import AdaptiveQuantile, Clipping, Flat, PerGroup, check_clipping
from lightning_dp.estimators import AbstractEstimator, MeanGradient
from lightning_dp.noise import AbstractNoise, IndependentNoise
from lightning_dp.postprocessing import AbstractPostProcessor
from lightning_dp.sampling import (
    AbstractSampling,
    BatchPlan,
    FixedOrder,
    Poisson,
    UserLevel,
)
from lightning_dp.sampling.blocks import AbstractBlockSampling
from lightning_dp.sampling.units import RowsOfUnits, name_by_user
from lightning_dp.schedules import AbstractSchedule, Constant

__all__ = [
    "About",
    "Checks",
    "EngineName",
    "PrivacyConfig",
    "check_engine_name",
    "check_same",
    "config_dict",
    "refuse_unknown",
]

EngineName: TypeAlias = Literal[
    "auto", "records", "layers", "bookkeeping", "ghost", "hooks", "one_by_one"
]


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The checks of a fit, and the user's declarations where no check is possible.

    Args:
        dry_run: before the first step, run a few synthetic samples, and refuse a model whose records
            always change what others contribute (:func:`lightning_dp.audit.check_isolation`). Types
            and shapes are those of a sample of the training set, values are not.
        loss_graph: at every step of an engine that runs the whole batch, refuse a loss whose autograd
            graph mixes records by more than sums with constant coefficients. Without it a mean of
            records in half precision, and a term that acts in few steps, may pass.
        comparisons: at public steps, compare runs of the batch with some records exchanged, and end
            the run if the clipped sum of the others moves by more than 0.05 C, or if the model keeps
            what it saw of them.
        gradient_edits: your declaration of what is done to the private gradient before the
            optimizer uses it ("centred per layer"), as a function of released values alone; the
            report prints it. Without it every edit but Lightning's own clipping is refused.
        public_state: your declaration of buffers and frozen weights that callbacks or validation
            write by weights and public numbers alone: their dotted names, or patterns
            ("teacher.*"). What else is written between steps and cannot be compared is not saved;
            the report prints these.

    Example:
        >>> Checks(public_state=["teacher.*"]).public_state
        ('teacher.*',)
    """

    dry_run: bool = True
    loss_graph: bool = True
    comparisons: bool = True
    gradient_edits: str | None = None
    public_state: Sequence[str] = ()

    def __post_init__(self) -> None:
        normalise(self, flag, "dry_run", "loss_graph", "comparisons", of="Checks")
        normalise(self, optional(one_line), "gradient_edits", of="Checks")
        normalise(self, _names, "public_state", of="Checks")


@dataclass(frozen=True, kw_only=True)
class About:
    """Names and owners of the data, printed in the report as stated and unchecked.

    They change nothing in the training, and a resumed run may state others.

    Args:
        data_set: name of the training data and, if it has several, its version. Journals of other
            trainings are added up with this one only under the same name; without one, if the
            number of records is the same.
        record: the meaning of one record outside of the program ("one visit of a patient"). Without
            it the report counts one row as a record.
        controller: who is responsible for the data.
        trained_by: who made the training, if that is somebody else.

    Example:
        >>> About(data_set="MNIST, training part", record="one picture of a digit").to_dict()
        {'data_set': 'MNIST, training part', 'record': 'one picture of a digit'}

        Then ``DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5, about=About(...))``.
    """

    data_set: str | None = None
    record: str | None = None
    controller: str | None = None
    trained_by: str | None = None

    def __post_init__(self) -> None:
        normalise(self, optional(one_line), *asdict(self), of="About")

    def to_dict(self) -> dict[str, str]:
        """Return the texts that are given."""
        return {name: text for name, text in asdict(self).items() if text is not None}


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The privacy of one training run.

    Give ``target_epsilon`` (the noise is calibrated for the steps the Trainer will make), or
    ``noise_multiplier`` (ε is reported, without a limit), or both (training stops before the step
    that would exceed the target).

    The arguments are those of :class:`lightning_dp.DifferentialPrivacy`, which explains them.

    Example:
        >>> PrivacyConfig(target_epsilon=3.0, target_delta=1e-5).resolved_estimator()
        MeanGradient(max_grad_norm=1.0)
    """

    target_delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    clipping: Clipping = field(default_factory=Flat)
    noise_schedule: AbstractSchedule = field(default_factory=Constant)
    estimator: AbstractEstimator | None = None
    postprocessing: Sequence[AbstractPostProcessor] = ()
    sampling: AbstractSampling = field(default_factory=Poisson)
    noise: AbstractNoise = field(default_factory=IndependentNoise)
    unit: UserLevel | None = None
    augmentations: int = 1
    relation: Relation = "add_remove"
    accountant: AbstractAccountant = field(default_factory=PLDAccountant)
    engine: EngineName = "auto"
    ledger_dir: str | None = None
    checks: Checks = field(default_factory=Checks)
    private_optimizer: int | str | None = None
    advice: bool = True
    count_clipped: bool = False
    other_releases: Sequence[AbstractExternal] = ()
    about: About | None = None
    secure_noise: bool = False
    seed: int | None = None
    isolation_probe: InitVar[bool | None] = None  # this and the next four as _EARLIER says
    loss_graph_check: InitVar[bool | None] = None
    spot_checks: InitVar[bool | None] = None
    gradient_edits: InitVar[str | None] = None
    public_state: InitVar[Sequence[str] | None] = None

    def __post_init__(self, *earlier: Any) -> None:
        self._take_earlier_names(dict(zip(_EARLIER, earlier, strict=True)))
        self._check_types()
        self._check_schedule()
        self._check_estimator()
        self._check_block()
        self._check_sampling()
        for release in self.other_releases:
            release.costs(self.relation)  # refuses one that says nothing about the relation

    def _take_earlier_names(self, given: dict[str, Any]) -> None:
        """Move arguments of 0.2.0 into ``checks``, with a warning; they go with the next version."""
        moved = {_EARLIER[name]: value for name, value in given.items() if value is not None}
        if not moved:
            return
        earlier = ", ".join(name for name, value in given.items() if value is not None)
        now = f"checks=Checks({', '.join(f'{name}={value!r}' for name, value in moved.items())})"
        if self.checks != Checks():
            raise ValueError(f"{earlier} and checks={self.checks} are both given: write {now}.")
        warnings.warn(
            f"{earlier}: write {now}. The earlier spelling goes with the next version.",
            FutureWarning,
            stacklevel=4,
        )
        object.__setattr__(self, "checks", Checks(**moved))

    def _check_types(self) -> None:
        """Refuse values of another type, and normalise the rest."""
        normalise(self, explained(probability, "Choose it well below 1 / N."), "target_delta")
        no_privacy = "For training without privacy, leave it out and give noise_multiplier=0."
        normalise(self, explained(optional(positive), no_privacy), "target_epsilon")
        if self.target_epsilon is not None and self.target_epsilon < LEAST_EPSILON:
            raise ValueError(
                f"target_epsilon={self.target_epsilon} is below {LEAST_EPSILON:g}, the smallest "
                "supported budget. Raise it."
            )
        normalise(self, optional(not_negative), "noise_multiplier")
        normalise(self, optional(above_0), "max_grad_norm")
        normalise(self, optional(seed), "seed")
        normalise(self, check_clipping, "clipping")
        normalise(self, whole, "augmentations")
        normalise(self, flag, "advice", "count_clipped", "secure_noise")
        if self.secure_noise and self.seed is not None:
            raise ValueError(
                f"secure_noise=True draws noise that cannot be repeated, and seed={self.seed} is "
                "for repeatable noise. Leave one of them out."
            )
        if self.secure_noise:
            CipherStream()  # or it raises
        normalise(self, optional(_place), "private_optimizer")
        normalise(self, optional(_folder), "ledger_dir")
        normalise(self, _postprocessors, "postprocessing")
        normalise(self, _releases, "other_releases")
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                "Neither target_epsilon nor noise_multiplier is given: give the budget "
                "(target_epsilon), or the noise (noise_multiplier)."
            )
        for name, kind in _KINDS.items():
            instance(name, getattr(self, name), kind)
        estimator: type = AbstractEstimator
        instance("estimator", self.resolved_estimator(), estimator)
        if self.about is not None:
            instance("about", self.about, About)
        normalise(self, one_of(get_args(Relation)), "relation")
        normalise(self, check_engine_name, "engine")
        if self.unit is not None and not isinstance(self.unit, UserLevel):
            raise TypeError(
                f"unit={type(self.unit).__name__} must be a UserLevel(ids=..., most_rows=...)."
            )
        if self.has_several_rows and self.engine == "hooks":
            raise ValueError(
                "engine='hooks' has a gradient for each row, and with unit or augmentations a unit has "
                "several rows. Leave the engine at 'auto'."
            )

    def _check_schedule(self) -> None:
        if self.is_adaptive and self.target_epsilon is None:
            raise ValueError(
                f"noise_schedule={self.noise_schedule} chooses the noise at run time, so ε is only "
                "bounded by a budget: give target_epsilon."
            )
        if not self.accountant.is_its_own_guard:
            return
        if self.is_adaptive:
            raise ValueError(
                f"noise_schedule={self.noise_schedule} chooses the noise at run time, and a trial of a "
                "search declares it in advance. Use a schedule that is fixed in advance."
            )
        if self.other_releases:
            raise ValueError(
                f"other_releases={self.other_releases} in a trial of a search, where each trial would "
                "take their δ from the same budget. Give them to Search(spent=[(release, 1), ...])."
            )
        if not self.sampling.has_pairs:
            raise RefusedSetting(
                f"sampling={self.sampling} in a trial of a search, whose share of the budget is declared "
                "in Poisson steps. Use sampling=Poisson() there.",
                topic="batch-limit",
            )

    def _check_estimator(self) -> None:
        """Refuse what acts on gradients, norms or counts where the estimator releases none."""
        estimator, rule, norm = self.resolved_estimator(), self.clipping, self.max_grad_norm
        traits = estimator.traits
        is_finite, is_one = math.inf not in traits.clip_norms, traits.queries_per_step == 1
        if self.postprocessing and not traits.estimates_gradient:
            raise ValueError(
                f"postprocessing={self.postprocessing} acts on private gradients, and {estimator} "
                "makes its own step. Leave it out."
            )
        if self.noise_schedule.chosen != "in advance" and not traits.estimates_gradient:
            raise ValueError(
                f"noise_schedule={self.noise_schedule} looks at private gradients, and {estimator} "
                "releases none. Use a schedule that is fixed in advance."
            )
        if self.count_clipped and not isinstance(rule, Flat | AdaptiveQuantile):
            raise ValueError(
                f"count_clipped=True counts gradients above one clip norm, and clipping={rule} has none. "
                "Leave one of them out."
            )
        if self.count_clipped and not (traits.estimates_gradient and is_finite and is_one):
            raise ValueError(
                f"count_clipped=True counts records whose gradient is clipped, and {estimator} clips "
                "none. Leave it out."
            )
        if not isinstance(rule, Flat) and not (traits.asks_one_gradient and is_one):
            raise ValueError(
                f"clipping={rule} bounds plain gradients, and {estimator} has other bounds. Leave "
                "clipping out, or the estimator."
            )
        if isinstance(rule, PerGroup) and (norm or self.estimator) is not None:
            raise ValueError(
                f"clipping={rule} has the clip norms of its groups. Leave out max_grad_norm and "
                "estimator."
            )
        if not (is_finite or isinstance(rule, Flat)):
            raise ValueError(f"clipping={rule} needs a finite max_grad_norm.")
        if isinstance(rule, AdaptiveQuantile) and not all(
            rule.least <= each <= rule.most for each in traits.clip_norms
        ):
            raise ValueError(
                f"max_grad_norm={traits.clip_norms[0]} is where clipping={rule} begins, and must be "
                "from its least to its most."
            )
        if norm is not None and self.estimator is not None:
            raise ValueError(
                f"max_grad_norm={norm} is given as well as estimator={self.estimator}, "
                "which has its own clip norms: give it in one place."
            )
        if not is_finite and self.noise_multiplier != 0:
            raise ValueError(
                "max_grad_norm=inf bounds nothing and is allowed only with noise_multiplier=0 "
                f"(no privacy); here noise_multiplier={self.noise_multiplier}."
            )

    def _check_block(self) -> None:
        """Refuse settings that correlated noise or dependent batches do not support."""
        noise, sampling = self.noise, self.sampling
        if not noise.bands <= sampling.separation:
            cures = ["sampling=FixedOrder()"]
            if math.isfinite(noise.bands):
                cures.insert(0, f"sampling=CyclicPoisson({noise.bands:g})")
            raise RefusedSetting(
                f"noise={noise} with sampling={sampling}: noise is taken away again over "
                f"{noise.bands:g} steps, and a record may take part twice in them, so z would not be its "
                f"protection. Use {' or '.join(cures)}, or noise=IndependentNoise().",
                topic="correlated-noise",
            )
        if noise.bands == 1 and not isinstance(sampling, AbstractBlockSampling):
            return
        together = f"noise={noise} with sampling={sampling}"
        # The rows of another user may stand elsewhere, and others would move to other steps.
        in_order = isinstance(sampling, FixedOrder) and self.relation == "replace_one"
        if in_order and self.unit is not None:
            raise RefusedSetting(
                f"{together} and unit=UserLevel(...): the order of the users follows from their rows, so "
                "relation='replace_one' has no bound. Ask for relation='zero_out'.",
                topic="user-level",
            )
        if type(self.noise_schedule) is not Constant:
            raise RefusedSetting(
                f"{together} needs the same noise at every step, and noise_schedule="
                f"{self.noise_schedule} changes it. Use Constant().",
                topic="correlated-noise",
            )
        estimator = self.resolved_estimator()
        traits = estimator.traits
        is_plain = traits.period == traits.queries_per_step == len(traits.clip_norms) == 1
        if not (is_plain and traits.asks_one_gradient and traits.longest_silence == 0):
            raise RefusedSetting(
                f"{together} needs one query of one clip norm at every step, and {estimator} asks "
                "otherwise. Use max_grad_norm alone (MeanGradient).",
                topic="correlated-noise",
            )
        if not self.clipping.is_constant:
            raise RefusedSetting(
                f"{together} needs one clip norm for all steps, and clipping={self.clipping} moves it. "
                "Use Flat(), Automatic() or PerGroup({...}).",
                topic="correlated-noise",
            )
        if self.count_clipped and noise.bands > 1:
            raise RefusedSetting(
                f"count_clipped=True with noise={noise}: averages of the count take its noise for "
                "independent. Leave it out.",
                topic="correlated-noise",
            )

    def _check_sampling(self) -> None:
        """Refuse a limit where steps differ, and a relation under which an event has no bound."""
        sampling, estimator = self.sampling, self.resolved_estimator()
        is_alike = type(self.noise_schedule) is Constant and estimator.traits.period == 1
        if not (sampling.has_pairs or is_alike):
            raise RefusedSetting(
                f"sampling={sampling} needs the same noise and rate at every step, and noise_schedule="
                f"{self.noise_schedule} with {estimator} changes them. Use Constant() and MeanGradient, "
                "or sampling=Poisson().",
                topic="batch-limit",
            )
        if sampling.has_pairs and not isinstance(sampling, AbstractBlockSampling):
            return
        event = sampling.among(BatchPlan(1, 1.0, 1, 1), 1).event(1.0, 1.0)  # of any numbers
        if (reason := event.no_bound.get(self.relation)) is not None:
            raise RefusedSetting(f"sampling={sampling}: {reason}", topic="fixed-order")

    @property
    def counts_clipped(self) -> bool:
        """True if the number of clipped records is released with each gradient."""
        return self.count_clipped or not self.clipping.is_constant

    @property
    def is_adaptive(self) -> bool:
        """True if the noise is chosen at run time, without a plan that bounds it."""
        return self.noise_schedule.chosen == "at run time"

    @property
    def has_several_rows(self) -> bool:
        """True if a unit of privacy may have several rows in a batch."""
        return self.unit is not None or self.augmentations > 1

    @property
    def unit_word(self) -> str:
        """The word for one unit of privacy."""
        return "record" if self.unit is None else "user"

    @property
    def data_set(self) -> str | None:
        """The name of the training data in journals; None without one."""
        name = None if self.about is None else self.about.data_set
        return name if self.unit is None else name_by_user(name)

    def rows_of_units(self, dataset: Any) -> RowsOfUnits | None:
        """Return the rows of each unit of a training set; None where each row is one, read once."""
        if self.unit is not None:
            return self.unit.rows_of(dataset, self.augmentations)
        if self.augmentations > 1:
            return RowsOfUnits.single(len(dataset), self.augmentations)
        return None

    @property
    def runs_each_record_alone(self) -> bool:
        """True if the user's code is given batches of one record each."""
        return self.engine == "one_by_one"

    def resolved_estimator(self) -> AbstractEstimator:
        """The estimator that is used."""
        if self.estimator is not None:
            return self.estimator
        if isinstance(self.clipping, PerGroup):
            return MeanGradient(self.clipping.sensitivity)
        return MeanGradient(1.0 if self.max_grad_norm is None else self.max_grad_norm)

    def _identity(self) -> dict[str, object]:
        """Return the arguments that a resumed run must share with the run it continues.

        ``target_epsilon`` is not one of them: a budget may be changed, since the ledger knows what
        was spent. Neither are the accountant, the engine and ``ledger_dir``, which change no release.
        """
        return {
            "target_delta": self.target_delta,
            "relation": self.relation,
            "estimator": self.resolved_estimator(),
            "noise_schedule": self.noise_schedule,
            "postprocessing": self.postprocessing,
            "sampling": self.sampling,
            "unit": self.unit if self.unit is None else repr(self.unit),  # without the ids
            "augmentations": self.augmentations,
            "noise": self.noise,
            "private_optimizer": self.private_optimizer,
            "count_clipped": self.count_clipped,
            "clipping": self.clipping,
        }

    def fingerprint(self) -> dict[str, Data]:
        """Return, as plain data, the arguments that a resumed run must share."""
        return {name: config_dict(value) for name, value in self._identity().items()}

    def check_same(self, fingerprint: Mapping[str, Data]) -> None:
        """Refuse to continue a run whose :meth:`fingerprint` is another one.

        What the fingerprint does not have, it had by default.
        """
        default = PrivacyConfig(target_delta=self.target_delta, noise_multiplier=0.0)._identity()
        check_same(fingerprint, self._identity(), default.__getitem__)


def check_engine_name(name: str, value: object, *, of: str | None = None) -> str:
    """Return the name of an engine.

    Example:
        >>> check_engine_name("engine", "ghost")
        'ghost'
    """
    if isinstance(value, str) and value == "functional":
        raise ValueError(
            f"{name}='functional' was an engine of 0.1: give engine='records', which needs no layer "
            "types either and is faster, or leave it out."
        )
    return str(one_of(get_args(EngineName))(name, value, of=of))


def _folder(name: str, value: Any, *, of: str | None = None) -> str:
    local_folder(name, value)  # or it raises
    return str(os.fspath(value))


def _place(name: str, value: object, *, of: str | None = None) -> int | str:
    """Return the place of an optimizer, or the dotted path of a module."""
    if isinstance(value, str):
        if not value or not all(part.isidentifier() or part.isdigit() for part in value.split(".")):
            raise ValueError(f"{name}={value!r} must be the dotted path of a module.")
        return value
    return whole_from_0(name, value, of=of)


def _names(name: str, value: object, *, of: str | None = None) -> tuple[str, ...]:
    """Return dotted names or patterns, each a line."""
    found = listed(name, value, "the names of buffers and frozen weights", of=of)
    return tuple(one_line(f"{name}[{i}]", each, of=of) for i, each in enumerate(found))


def _releases(name: str, value: object, *, of: str | None = None) -> tuple[AbstractExternal, ...]:
    """Return declared guarantees as a tuple, no two of which have the same words."""
    releases = listed(name, value, "ApproximateDP(...) and ZCDP(...)")
    for each in releases:
        if not isinstance(each, AbstractExternal):
            raise TypeError(
                f"{name} holds {each!r}: state each release as ApproximateDP(...) or ZCDP(...)."
            )
    words = [each.what for each in releases]
    if twice := sorted({each for each in words if words.count(each) > 1}):
        raise ValueError(
            f"{name} has two releases with what={twice[0]!r}, and a release is identified by its words: "
            "add the difference."
        )
    return releases


def _postprocessors(name: str, value: object, *, of: str | None = None) -> tuple[object, ...]:
    found, kind = listed(name, value, "post-processors, in their order"), AbstractPostProcessor
    return tuple(instance(name, each, kind) for each in found)  # type: ignore[type-abstract]


_KINDS: dict[str, type] = {
    "noise_schedule": AbstractSchedule,
    "sampling": AbstractSampling,
    "noise": AbstractNoise,
    "accountant": AbstractAccountant,
    "checks": Checks,
}
_EARLIER = {
    "isolation_probe": "dry_run",
    "loss_graph_check": "loss_graph",
    "spot_checks": "comparisons",
    "gradient_edits": "gradient_edits",
    "public_state": "public_state",
}


# -- settings as plain data ------------------------------------------------------------------------

Data: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of them

_CLASS = "class"


def config_dict(value: object) -> Data:
    """Return a value as plain data.

    Dataclasses are described by their fields that count for ``==``, other objects by their
    attributes, or by their own ``repr`` if they have one.

    Example:
        >>> from lightning_dp.schedules import Exponential
        >>> config_dict([Exponential(0.5), 3.0])
        [{'class': 'Exponential', 'rate': 0.5}, 3.0]
    """
    return _as_data(value, ())


def _as_data(value: object, within: tuple[object, ...]) -> Data:
    """Describe a value; ``within``: the objects that it is a part of."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(cast(SupportsFloat, value))
    if isinstance(value, Mapping):
        return {_key(name): _as_data(item, within) for name, item in value.items()}
    if isinstance(value, Set):
        return sorted((_as_data(item, within) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_as_data(item, within) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _object(value, within)


def _object(value: object, within: tuple[object, ...]) -> Data:
    """Describe an object by its class and its fields, or attributes."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return _definition(value)
    of: dict[str, Data] = {_CLASS: type(value).__qualname__}
    if any(value is outer for outer in within):
        return {**of, "repr": "a part that holds this one"}
    if isinstance(value, enum.Enum):
        return {**of, "name": value.name}
    if dataclasses.is_dataclass(value):
        fields = {field.name: _get(value, field) for field in _fields(value)}
        return {**of, **_as_data(fields, (*within, value))}
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array or a tensor
        values = config_dict(value.tolist())
        is_vector = isinstance(values, list)
        return {**of, "dtype": str(value.dtype), "values": values} if is_vector else values
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return {**of, **_as_data(vars(value), (*within, value))}
    return {**of, "repr": repr(value)}


def _definition(value: Any) -> Data:
    """Return a class, a function or a method by its name."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        return {_CLASS: "method", "name": value.__name__, "of": config_dict(owner)}
    # Functions without a proper name have an address here: they equal nothing later.
    name = f"{value.__module__}.{value.__qualname__}"
    return repr(value) if "<lambda>" in name or "<locals>" in name else name


def _key(name: object) -> str:
    return name if isinstance(name, str) else repr(config_dict(name))


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that count for ``==``."""
    return [f for f in dataclasses.fields(value) if f.compare]


def check_same(
    before: Mapping[str, Data],
    now: Mapping[str, object],
    default: Callable[[str], object] = lambda name: None,
) -> None:
    """Refuse a configuration that is not the one of a checkpoint.

    Args:
        before: of the checkpoint, described.
        now: the present one, by the names of its arguments.
        default: returns the value of an argument that the checkpoint lacks.
    """
    refuse_unknown("its configuration", before, set(now))
    for name, value in now.items():
        was = before[name] if name in before else config_dict(default(name))
        if not _is_same(was, value):
            raise RefusedSetting(
                f"{name} differs from the checkpoint's: it was {_text(was)}, now "
                f"{_text(config_dict(value))}. A private run is continued with the configuration it "
                "was started with.",
                topic="other-settings",
            )


def _is_same(was: Data, value: object) -> bool:
    """Compare field by field; a field that is absent has its default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not isinstance(was, dict) or was.get(_CLASS) != type(value).__qualname__:
            return False
        fields = _fields(value)
        refuse_unknown(type(value).__qualname__, was, {_CLASS, *(f.name for f in fields)})
        return all(
            _is_same(was[f.name] if f.name in was else config_dict(_default(f)), _get(value, f))
            for f in fields
        )
    if isinstance(value, list | tuple):
        same_length = isinstance(was, list) and len(was) == len(value)
        return same_length and all(map(_is_same, was, value))
    return _is_equal(was, config_dict(value))


def _get(value: object, field: dataclasses.Field[Any]) -> object:
    return getattr(value, field.name)


def _default(field: dataclasses.Field[Any]) -> object:
    """Return the default of a field, or a value that nothing equals."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_equal(was: Data, now: Data) -> bool:
    """Compare plain data; a number that is NaN equals itself, which ``==`` denies."""
    if isinstance(was, float) and isinstance(now, float):
        return was == now or (was != was and now != now)
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_is_equal, was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(_is_equal(was[name], now[name]) for name in was)
    return bool(was == now)


def refuse_unknown(of: str, was: Mapping[str, Data], known: Set[str]) -> None:
    """Refuse an unknown field of a checkpoint: it may change what was spent."""
    if unknown := sorted(set(was) - known):
        raise RefusedSetting(
            f"The checkpoint has {unknown[0]}={_text(was[unknown[0]])} in {of}, a field that "
            "this version lacks. Resume it with the version of lightning_dp, and of your own classes, "
            "that wrote it.",
            topic="other-version",
        )


def _text(data: Data) -> str:
    """Return data as the call that would make it."""
    if isinstance(data, list):
        return f"({', '.join(map(_text, data))})"
    if not isinstance(data, dict):
        return repr(data)
    if set(data) == {_CLASS, "repr"}:
        return str(data["repr"])
    fields = ", ".join(f"{name}={_text(item)}" for name, item in data.items() if name != _CLASS)
    return f"{data[_CLASS]}({fields})" if _CLASS in data else f"{{{fields}}}"
