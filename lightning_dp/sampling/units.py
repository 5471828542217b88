"""Units of privacy that have several rows in a batch: users with their rows, records read again."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import normalise, whole

Integers = NDArray[np.int64]

# What a journal calls the data set of a run by user: its ε does not add up with one of records.
_BY_USER, _NAMELESS = ", by user", "a data set"


@dataclass(frozen=True)
class UserLevel:
    r"""Protect users (people, patients, devices), each with all of their rows, instead of rows.

    Every step samples *users*: each of U users with probability q = B/U, where B is the loader's
    logical batch size. Of a sampled user at most k rows are read, chosen uniformly at random
    each time by the run's own generator. The mean of their gradients,

    .. math:: g_u = \frac{1}{r_u} \sum_{j=1}^{r_u} \nabla \ell(x_{uj}), \qquad r_u \le k,

    is clipped *once*, to C. So all rows of a user together move the sum by at most C, and ε is the one
    of DP-SGD with (U, q): "add_remove" adds or removes a user with all rows, "replace_one" replaces a
    user's rows by any others (one row more or less of a user is such a replacement). With samplings of a
    block the users are what takes turns, is allocated or has a place: their proofs are about vectors of
    norm C at most, whatever these are made of, and which rows are read is drawn afresh at each step.

    Promises: a user is in one physical batch of a step at most; N, B, δ < 1/N, checks, report and
    journal speak of users; ids are in no log, checkpoint or message. Assumes that the ids are right,
    that each row is of one user, and that k was not chosen by looking at the rows. U is public.

    Charles et al., Fine-Tuning Large Language Models with User-Level Differential Privacy (2024,
    arXiv:2407.07737), whose user-level sampling this is.

    Args:
        ids: the user of each of the N rows. A sequence, array or tensor of N whole numbers or texts;
            or a function that makes it of the training set; or the name of an attribute or column of
            the data set, also of the one inside of ``Subset`` and ``ConcatDataset``.
        most_rows: k >= 1, rows of a user in one step. Public.

    Raises:
        ValueError: if ``most_rows`` is no whole number of at least 1; when training begins, if there
            are not as many ids as rows, or a row has none.

    Example:
        >>> UserLevel(ids=["ann", "bob", "ann"], most_rows=8)
        UserLevel(most_rows=8)

        Then ``DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5, unit=UserLevel(...))``.
    """

    ids: str | Callable[[Any], Any] | Sequence[Hashable] | Tensor | NDArray[Any] = field(
        repr=False, compare=False
    )
    most_rows: int

    def __post_init__(self) -> None:
        normalise(self, whole, "most_rows", of="UserLevel")
        if not (isinstance(self.ids, str) or callable(self.ids) or hasattr(self.ids, "__len__")):
            raise TypeError(
                "UserLevel(ids=...) must be the id of each row (a sequence or tensor), the name of an "
                "attribute or column of the data set, or a function of the data set."
            )

    def rows_of(self, dataset: Any, augmentations: int = 1) -> RowsOfUnits:
        """Return the rows of each user of a training set, and how often each is read."""
        size = len(dataset)
        if isinstance(self.ids, str):
            ids = _named(dataset, self.ids)
        else:
            ids = self.ids(dataset) if callable(self.ids) else self.ids
        users = _numbered(ids)
        if len(users) != size:
            raise RefusedSetting(
                f"UserLevel(ids=...) has {len(users)} ids, and the training set has {size} rows. Give "
                "the user of each row of the training set, in its order.",
                topic="user-level",
            )
        order = np.argsort(users, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(users))])
        return RowsOfUnits(order, starts, self.most_rows, augmentations)


@dataclass(frozen=True, eq=False)
class RowsOfUnits:
    """The rows of the training set that belong to each unit, and what a step reads of them.

    Example:
        >>> rows = RowsOfUnits.single(4, augmentations=2)
        >>> [each.tolist() for each in rows.draw(np.array([3, 1]), np.random.default_rng())]
        [[3, 3, 1, 1], [0, 0, 1, 1]]
    """

    rows: Integers = field(repr=False)  # one unit's after the other's
    starts: Integers = field(repr=False)  # where each unit's begin, and the end, shape (units + 1,)
    most_rows: int  # k, read at most of a unit
    augmentations: int  # times that each of them is read

    @classmethod
    def single(cls, size: int, augmentations: int) -> RowsOfUnits:
        """Return units of one row each."""
        return cls(np.arange(size), np.arange(size + 1), 1, augmentations)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def digest(self) -> str:
        """Name of which rows belong to which unit, the same in every process that agrees on it."""
        whole = hashlib.blake2b(self.rows.tobytes(), digest_size=16)
        whole.update(self.starts.tobytes())
        return whole.hexdigest()

    def split(self, rows: Sequence[int]) -> list[list[int]]:
        """Return these rows, those of each unit together."""
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(int(self._unit_of[row]), []).append(row)
        return list(found.values())

    @cached_property
    def _unit_of(self) -> Integers:
        """The unit of each row."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))[np.argsort(self.rows)]

    def draw(self, units: Integers, rng: np.random.Generator) -> tuple[Integers, Integers]:
        """Draw the rows to be read of some units: the rows, and the place of each one's unit."""
        parts = [self._some(unit, rng) for unit in units]
        owners = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        times = self.augmentations
        return np.repeat(np.concatenate(parts), times), np.repeat(owners, times)

    def _some(self, unit: int, rng: np.random.Generator) -> Integers:
        own = self.rows[self.starts[unit] : self.starts[unit + 1]]
        if len(own) <= self.most_rows:
            return own
        return rng.choice(own, self.most_rows, replace=False, shuffle=False)


def name_by_user(name: str | None) -> str:
    """Return the name of a data set, of which users are protected, in journals."""
    return f"{name or _NAMELESS}{_BY_USER}"


def is_by_user(name: str | None) -> bool:
    """Tell whether a journal's name of a data set is one of :func:`name_by_user`."""
    return name is not None and name.endswith(_BY_USER)


def is_named(name: str | None) -> bool:
    """Tell whether the user gave a name that stands in a journal."""
    return name not in (None, name_by_user(None))


def _named(dataset: Any, name: str) -> Any:
    """Return the attribute or column of a data set, or of those that it is made of."""
    if isinstance(dataset, Subset):
        inner = _as_array(_named(dataset.dataset, name))
        return inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_as_array(_named(each, name)) for each in dataset.datasets])
    if hasattr(dataset, name):
        return getattr(dataset, name)
    if name in (getattr(dataset, "column_names", None) or ()):
        return dataset[name]
    raise RefusedSetting(
        f"UserLevel(ids={name!r}): {type(dataset).__name__} has no such attribute or column. Give the id "
        "of each row: ids=[...], or a function of the data set.",
        topic="user-level",
    )


def _as_array(ids: Any) -> NDArray[Any]:
    """Return ids as an array of one dimension; objects where they are of several types."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    elif not isinstance(ids, np.ndarray):
        found = np.empty(len(ids), dtype=object)  # np.asarray would turn 1 into "1" next to a text
        found[:] = [x.item() if isinstance(x, Tensor) and not x.dim() else x for x in ids]
        ids = found
    if ids.ndim != 1:
        raise RefusedSetting(
            f"UserLevel(ids=...) has {ids.ndim} dimensions. Give one id for each row.",
            topic="user-level",
        )
    return ids  # type: ignore[no-any-return]


def _numbered(ids: Any) -> Integers:
    """Return the number of each row's user, from 0 on; a row without an id is refused."""
    array = _as_array(ids)
    if array.dtype != object:
        has_none = array.dtype.kind in "fcmM" and bool((array != array).any())
        users = np.unique(array, return_inverse=True)[1]
    else:
        known: dict[Hashable, int] = {}
        try:
            users = np.array([known.setdefault(each, len(known)) for each in array], dtype=np.int64)
            if any(copy.deepcopy(each) not in known for each in known):
                raise TypeError  # it is equal to nothing but itself
            has_none = any(each is None or each != each for each in known)
        except TypeError:
            raise RefusedSetting(_UNHASHABLE, topic="user-level") from None
    if has_none:
        raise RefusedSetting(_NO_ID, topic="user-level")
    return users.astype(np.int64).reshape(-1)


_UNHASHABLE = "UserLevel(ids=...) holds ids that cannot be compared. Give whole numbers or texts."
_NO_ID = (
    "UserLevel(ids=...): a row has no id (None or NaN), so that nobody knows whose it is. Leave such "
    "rows out of the training set, or give each the id of its user."
)
