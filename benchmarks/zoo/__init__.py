"""The models of the table "models that work": small, random, made in place; nothing is fetched."""

from __future__ import annotations

import importlib.util
import os

from zoo import (
    adapters,
    diffusion,
    language,
    more_language,
    more_pictures,
    more_plain,
    more_recurrent,
    more_senses,
    pictures,
    plain,
    senses,
    tables,
)
from zoo.case import Case, Records, Training, row

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before a library is imported

__all__ = ["FAMILIES", "Case", "Records", "Training", "missing", "row"]

FAMILIES: dict[str, tuple[Case, ...]] = {
    "plain PyTorch": plain.CASES,
    "tables, graphs, series": tables.CASES,
    "language": language.CASES,
    "pictures and sound": senses.CASES,
    "picture libraries": pictures.CASES,
    "adapters": adapters.CASES,
    "diffusion": diffusion.CASES,
    "chosen unseen: own sequences and graphs": more_recurrent.CASES,
    "chosen unseen: own networks": more_plain.CASES,
    "chosen unseen: language": more_language.CASES,
    "chosen unseen: series, pictures, sound": more_senses.CASES,
    "chosen unseen: picture libraries, diffusion": more_pictures.CASES,
}
"""All cases, by the heading under which they stand."""

_NEEDS = {"peft": ("peft", "transformers"), "timm": ("timm", "torchvision")}


def missing(case: Case) -> list[str]:
    """Return the libraries that a case needs and that are not installed."""
    needed = _NEEDS.get(case.library, (case.library,))
    return [name for name in needed if importlib.util.find_spec(name) is None]
