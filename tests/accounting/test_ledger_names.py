"""What a checkpoint, a report or a journal says never becomes another file's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dp import PrivacyConfig
from lightning_dp.accounting import Gaussian, recover_journal, sweep_history
from lightning_dp.accounting.journal import JournalError
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.report.files import read_document, write_report
from lightning_dp.report.of_run import report
from lightning_dp.run import PrivateRun

GOOD = "0123456789abcdef"
BAD_IDS: list[Any] = [
    "../../evil",
    "/tmp/evil",
    "..",
    "",
    "a" * 10_000,
    "0123456789ABCDEF",
    "0123456789abcdef\n",
    "０１２３４５６７８９abcdef",
    "0123456789abcde\0",
    "*" * 16,
    None,
    17,
    b"0123456789abcdef",
    ["0123456789abcdef"],
]
BAD_JOURNALS: list[Any] = [
    "../../evil",
    f"/tmp/{GOOD}.journal/..",
    "/etc/passwd",
    "/dev/zero",
    f"a\0/{GOOD}.journal",
    f"{GOOD[::-1]}.journal",
    "*.journal",
    "",
    3,
    [f"{GOOD}.journal"],
]


def ids(value: object) -> str:
    return repr(value)[:30]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def edited(**changes: Any) -> dict[str, Any]:
    return {"id": GOOD, "journal": None, "runs": {}, **changes}


@pytest.mark.parametrize("state", [
    *({"id": bad} for bad in BAD_IDS),
    *({"journal": bad} for bad in BAD_JOURNALS),
    {"runs": None},
    {"runs": {"r": 3}},
    {"runs": {"r": [[Gaussian(1.0).to_dict(), -5]]}},
    {"runs": {"r": [[Gaussian(1.0).to_dict(), 2.5]]}},
    {"runs": {"r": [[Gaussian(1.0).to_dict(), True]]}},
    {"runs": {"r": [[{"event": "Gaussian"}, 1]]}},
], ids=ids)  # fmt: skip
def test_a_ledger_that_somebody_edited_is_refused_and_makes_no_file(tmp_path, state):
    folder = tmp_path / "a" / "b"
    ledger = Ledger()
    before = ledger.id
    with pytest.raises(JournalError, match="privacy ledger is damaged"):
        ledger.restore(edited(**state), folder)
    with pytest.raises(JournalError, match="privacy ledger is damaged"):
        ledger.mirror(edited(**state))
    assert (ledger.id, ledger.steps) == (before, 0)
    content = {"ledger": edited(**{"journal": f"{GOOD}.journal", **state})}
    torch.save({"lightning_dp": content}, tmp_path / "x.ckpt")
    with pytest.raises(JournalError, match="privacy ledger is damaged"):
        recover_journal(tmp_path / "x.ckpt", folder, 0)
    with pytest.raises(JournalError, match="privacy ledger is damaged"):
        sweep_history(tmp_path / "x.ckpt")
    assert files(tmp_path) == [tmp_path / "x.ckpt"]


@pytest.mark.parametrize("bad", BAD_IDS, ids=ids)
def test_no_report_is_written_under_a_name_that_is_no_ledgers(tmp_path, bad, report_of_nothing):
    with pytest.raises(ValueError, match=r"ledger_id=.* is not one of 16 hexadecimal digits"):
        write_report(replace(report_of_nothing, ledger_id=bad), tmp_path / "a")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "bad", ["../../evil", "/dev/zero", f"a\0/{GOOD}.journal", "*.journal", ""], ids=ids
)
def test_a_report_that_names_another_file_is_refused(tmp_path, bad, report_of_nothing):
    path = tmp_path / "privacy_report-x.json"
    path.write_text(json.dumps({**report_of_nothing.to_dict(), "journal": bad}))
    with pytest.raises(ValueError, match="names a file that is not a journal"):
        read_document(path)


@pytest.fixture
def report_of_nothing() -> Any:
    return report(PrivateRun(PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0)))
