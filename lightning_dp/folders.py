"""Folders that privacy depends on: on this machine's disk, and the same from any working directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["fixed_folder", "local_folder"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also as pathlib leaves it; C:/ is a drive


def local_folder(
    argument_name: str, value: str | os.PathLike[str], base: Path | None = None
) -> Path:
    """The folder as an absolute path, so that a later change of the working directory moves nothing.

    Args:
        argument_name: of the argument that the folder was given as, for error messages.
        value: ``~`` stands for a home folder.
        base: where a relative path begins; by default in the present working directory.

    Raises:
        TypeError: for what is no path.
        ValueError: for an empty path, a URL, an unknown home folder, or a name that is not text.

    Example:
        >>> local_folder("ledger_dir", "/var/lib/ledgers").as_posix()
        '/var/lib/ledgers'
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"{argument_name}={value!r} must be a folder: a str or a pathlib.Path.")
    if not text or "\0" in text:
        raise ValueError(f"{argument_name}={text!r} must name a folder.")
    if _URL.match(text):
        raise ValueError(
            f"{argument_name}={text!r} is a URL. What was spent must be on a disk of this machine, "
            "where it can be locked and synced: give a local folder."
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{argument_name}={text!r} is not text in UTF-8, so files could not tell where they "
            "are. Give a folder with another name."
        ) from None
    try:
        return (base or Path.cwd()) / Path(text).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{argument_name}={text!r}: this home folder is not known. Give an absolute path."
        ) from None


def fixed_folder(argument_name: str, value: str | os.PathLike[str]) -> Path:
    """Return what :func:`local_folder` does, for several processes: relative paths are refused.

    Each process may have a working directory of its own, so a relative path would be another
    folder, and an empty one, there.

    Raises:
        TypeError, ValueError: as :func:`local_folder` does.
        ValueError: for a relative path.
    """
    folder = local_folder(argument_name, value)
    if not Path(value).expanduser().is_absolute():
        raise ValueError(
            f"{argument_name}={os.fspath(value)!r} is a relative path: a process that is started "
            f"elsewhere would use another folder. Give the absolute one, such as {str(folder)!r}."
        )
    return folder
