"""Folders that hold what was spent: local, absolute, and named by their argument when they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dp._files import fixed_folder, local_folder


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
