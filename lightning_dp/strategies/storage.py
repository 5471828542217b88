"""A fit's privacy record on disk: the folder of its journal, and the record in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_dp._files import local_folder
from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp._shards import gathered
from lightning_dp.run import PrivateRun

if TYPE_CHECKING:
    from lightning_dp.report import PrivacyReport

__all__ = ["default_folder", "record_in", "write_record"]


def default_folder(trainer: Trainer) -> Path:
    """Return ``<default_root_dir>/privacy``, absolute.

    Raises:
        ValueError: if the Trainer's folder is not one of this machine, or has no name in UTF-8.
    """
    try:
        return local_folder("default_root_dir", trainer.default_root_dir) / "privacy"
    except ValueError as error:
        raise RefusedSetting(
            f"{text_of(error)} Or say where the privacy journal goes: "
            "DifferentialPrivacy(ledger_dir=...), a local folder; everything else stays in "
            "default_root_dir.",
            topic="journal-folder",
        ) from None


def write_record(
    checkpoint: dict[str, Any],
    run: PrivateRun,
    *,
    is_writer: bool,
    sharded: Sequence[Tensor] = (),
) -> PrivacyReport | None:
    """Put the record into a checkpoint that is about to be saved.

    Args:
        checkpoint: what Lightning saves.
        run: whose state it will hold.
        sharded: the trained parameters, where each process has a part of them; the record has whole
            vectors, for any number of processes.
        is_writer: on the process that writes the file the record has the report in it.

    Returns:
        The report there; None on other processes.
    """
    from lightning_dp.report.files import CHECKPOINT_KEY, in_checkpoint
    from lightning_dp.report.of_run import report

    record = run.state_dict()
    if sharded:
        record["mechanism"] = gathered(record["mechanism"], sharded)
    checkpoint[CHECKPOINT_KEY] = record
    if not is_writer:
        return None
    content = report(run)
    checkpoint[CHECKPOINT_KEY]["report"] = in_checkpoint(content)
    return content


def record_in(checkpoint: Any, path: Any) -> dict[str, Any]:
    """Return the record of a checkpoint that a private run goes on from.

    Raises:
        ValueError: if it holds none.
    """
    from lightning_dp.report.files import CHECKPOINT_KEY

    if not isinstance(checkpoint, Mapping) or CHECKPOINT_KEY not in checkpoint:
        raise RefusedSetting(
            f"The checkpoint {path} holds no privacy ledger: what it has spent is "
            "unknown, so training cannot go on from it privately. If its weights never saw "
            "private data, load them into the model and fit without ckpt_path.",
            topic="checkpoint-without-ledger",
        )
    record: dict[str, Any] = checkpoint[CHECKPOINT_KEY]
    return record
