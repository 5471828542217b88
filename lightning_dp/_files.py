"""Files and folders that privacy depends on: on a disk of this machine, for their owner, and whole."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_dp._refusals import RefusedSetting

FILE_MODE = 0o600  # only the owner can read, whatever the umask says
_FOLDER_MODE = 0o700
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also as pathlib leaves it; C:/ is a drive


def file_of_checkpoint(path: Path) -> Path:
    """Return the file of a checkpoint's plain data; of a sharded one, in its folder."""
    inside = path / "meta.pt"
    return inside if inside.is_file() else path


def local_folder(
    argument_name: str, value: str | os.PathLike[str], base: Path | None = None
) -> Path:
    """Return the folder as an absolute path, which a later change of the working directory cannot move.

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
        raise RefusedSetting(
            f"{argument_name}={text!r} is a URL. What was spent must be on a disk of this machine, "
            "where it can be locked and synced: give a local folder.",
            topic="journal-folder",
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedSetting(
            f"{argument_name}={text!r} must be valid UTF-8, so that files can name it. Give a folder "
            "with another name.",
            topic="journal-folder",
        ) from None
    try:
        return (base or Path.cwd()) / Path(text).expanduser()
    except RuntimeError:
        raise RefusedSetting(
            f"{argument_name}={text!r}: this home folder is not known. Give an absolute path.",
            topic="journal-folder",
        ) from None


def fixed_folder(argument_name: str, value: str | os.PathLike[str]) -> Path:
    """Return what :func:`local_folder` does, for several processes: relative paths are refused.

    Each process may have its own working directory, where a relative path would be another folder,
    and an empty one.

    Raises:
        TypeError, ValueError: as :func:`local_folder` does.
        ValueError: for a relative path.
    """
    folder = local_folder(argument_name, value)
    if not Path(value).expanduser().is_absolute():
        raise RefusedSetting(
            f"{argument_name}={os.fspath(value)!r} is a relative path: a process that is started "
            f"elsewhere would use another folder. Give the absolute one, such as {str(folder)!r}.",
            topic="journal-folder",
        )
    return folder


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
    descriptor = os.open(path, _NEW, FILE_MODE)
    if os.name == "posix":
        os.fchmod(descriptor, FILE_MODE)
    return descriptor


@contextlib.contextmanager
def replaced(path: Path, mode: int | None = FILE_MODE) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the path's place once all of it is on the disk.

    At any moment, after a crash too, the path is the whole old file or the whole new one. If what
    is written fails, the old one stays.

    Args:
        path: of the file that is made or replaced.
        mode: of the new file; None for what the umask says.

    Raises:
        OSError: if the disk does not take it.
    """
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, _NEW, 0o666) if mode is None else create_file(partial)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode not in (None, FILE_MODE):
            partial.chmod(mode)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the name of a new file durable as well (POSIX; other systems have no such call)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
