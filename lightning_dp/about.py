"""The user's own words about the data of a run, for its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lightning_dp._validate import normalise, one_line, optional

__all__ = ["About"]


@dataclass(frozen=True, kw_only=True)
class About:
    """The user's words about the data, printed in the report as stated and unchecked.

    They change nothing in the training, and a resumed run may state others.

    Args:
        data_set: name of the training data and, if it has several, its version. Journals of other
            trainings are added up with this one only under the same name; without one, if the
            number of records is the same.
        record: the meaning of one record outside of the program ("one visit of a patient"). Without
            it the report counts one row as a record.
        controller: who is responsible for the data.
        trained_by: who made the training, if that is somebody else.

    Raises:
        ValueError: if a text is empty or has several lines.
        TypeError: if one is not a string.

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
        """Return what is stated."""
        return {name: text for name, text in asdict(self).items() if text is not None}
