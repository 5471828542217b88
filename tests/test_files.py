"""Files and folders that hold what was spent: local, absolute, for their owner, and whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_dp._files import fixed_folder, local_folder, make_folder, replaced


def test_a_relative_folder_stays_where_it_was_when_the_working_directory_changes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = local_folder("ledger_dir", "ledgers")
    monkeypatch.chdir("/")
    assert folder == tmp_path / "ledgers"


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_folder("ledger_dir", "~/x") == fixed_folder("f", Path("~/x")) == tmp_path / "x"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("", ValueError),
        ("a\0b", ValueError),
        ("s3://bucket/x", ValueError),
        ("memory://x", ValueError),
        ("file:///tmp/x", ValueError),
        (Path("gs://bucket/x"), ValueError),
        ("~nobody-has-this-name/x", ValueError),
        (os.fsdecode(b"/tmp/\xff"), ValueError),
        (b"/tmp/x", TypeError),
        (None, TypeError),
        (3, TypeError),
        (True, TypeError),
    ],
)
def test_what_is_no_local_folder_is_refused_by_the_name_of_its_argument(value, error):
    for check in (local_folder, fixed_folder):
        with pytest.raises(error, match="ledger_dir="):
            check("ledger_dir", value)


@pytest.mark.parametrize("value", ["ledgers", "./ledgers", "../x", Path("ledgers")])
def test_a_relative_folder_that_processes_share_is_refused_with_the_absolute_one(value):
    with pytest.raises(ValueError, match=r"folder='.*' is a relative path.*such as '/"):
        fixed_folder("folder", value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with replaced(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(OSError, match="full"), replaced(path) as file:
        file.write(b"ne")
        raise OSError("full")
    assert path.read_bytes() == b"old"
    with replaced(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_replaced_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    with replaced(tmp_path / "file") as file:
        file.write(b"x")
    assert calls == ["fsync", "replace", "fsync"]  # the content, and then its name


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_only_the_owner_reads_what_is_made_unless_told_otherwise(tmp_path):
    before = os.umask(0o022)
    try:
        for given, found in ((None, 0o644), (0o640, 0o640)):
            with replaced(tmp_path / "file", given) as file:
                file.write(b"x")
            assert mode(tmp_path / "file") == found
        with replaced(tmp_path / "file") as file:
            file.write(b"x")
        make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o600
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o755, 0o700)
