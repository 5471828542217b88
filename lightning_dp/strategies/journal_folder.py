"""The folder of a fit's journal if the user does not say it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer

from lightning_dp._files import local_folder

__all__ = ["default_folder"]


def default_folder(trainer: Trainer) -> Path:
    """Return ``<default_root_dir>/privacy``, absolute.

    Raises:
        ValueError: if the Trainer's folder is not one of this machine, or has no name in UTF-8.
    """
    try:
        return local_folder("default_root_dir", trainer.default_root_dir) / "privacy"
    except ValueError as error:
        raise ValueError(
            f"{error} Or say where the privacy journal goes: DifferentialPrivacy(ledger_dir=...), a "
            "local folder; everything else stays in default_root_dir."
        ) from None
