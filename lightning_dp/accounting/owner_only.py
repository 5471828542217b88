"""Files and folders that only their owner can read, whatever the umask says."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FILE_MODE", "create_file", "make_folder"]

FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def make_folder(folder: Path) -> None:
    """Make a folder for its owner alone; one that exists keeps its mode, missing parents get the usual.

    Raises:
        OSError: if it cannot be made, or is a file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(folder, _FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    if os.name == "posix":
        os.chmod(folder, _FOLDER_MODE)


def create_file(path: Path) -> int:
    """Return the descriptor, for writing, of a new file for its owner alone.

    Raises:
        OSError: if it exists, or cannot be made.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, FILE_MODE)
    if os.name == "posix":
        os.fchmod(descriptor, FILE_MODE)
    return descriptor
