"""Files that each version wrote stay readable: absent fields have defaults, unknown ones are named."""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import zlib
from collections.abc import Callable
from importlib.metadata import version
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dp.accounting import PLDAccountant, sweep_history
from lightning_dp.accounting.events import event_from_dict
from lightning_dp.accounting.journal import JournalError, read_journal, read_release_file
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.report.__main__ import main
from lightning_dp.report.files import read_report

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = sorted(path.parent.name for path in FIXTURES.glob("*/made_by.py"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Diff2. the noise"),
    pytest.mark.parametrize("of", VERSIONS, indirect=True),
]


class Written:
    """A copy of the files of a version, and the module that wrote them."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(source, folder))
        spec = importlib.util.spec_from_file_location("made_by", source / "made_by.py")
        assert spec is not None and spec.loader is not None
        self.by: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.by)

    def one(self, pattern: str) -> Path:
        (path,) = self.folder.glob(pattern)
        return path


@pytest.fixture
def of(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return Written(FIXTURES / request.param, tmp_path / "files")


def edit_record(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the privacy record of a checkpoint."""
    content = torch.load(path, weights_only=True)
    change(content["lightning_dp"])
    torch.save(content, path)


def edit_line(path: Path, number: int, change: Callable[[Any], object]) -> None:
    """Change a line of a file whose lines end with their check sum."""
    lines = path.read_bytes().split(b"\n")
    content = json.loads(lines[number][:-9])
    change(content)
    text = json.dumps(content).encode()
    lines[number] = text + f" {zlib.crc32(text):08x}".encode()
    path.write_bytes(b"\n".join(lines))


def test_the_present_version_has_its_files(of):
    cure = (
        "copy made_by.py of the latest folder in tests/fixtures into one of that name, and run it"
    )
    assert version("lightning-dp") in VERSIONS, cure


def test_a_checkpoint_resumes(of):
    events = read_journal(of.one("*.journal"))[1].history()

    trainer, privacy = of.by.fit(of.folder, of.by.STEPS + 2, of.one("run.ckpt"))

    assert trainer.global_step == privacy.steps == of.by.STEPS + 2
    spent = privacy.report().history()
    assert spent[: len(events)] == events
    assert privacy.epsilon == pytest.approx(PLDAccountant().epsilon(spent, 1e-5))


def test_fields_of_a_checkpoint_have_defaults(of):
    path = of.one("run.ckpt")
    edit_record(path, lambda record: record["config"].pop("sampling"))
    edit_record(path, lambda record: record["config"]["estimator"].pop("split"))
    assert of.by.fit(of.folder, of.by.STEPS + 1, path)[1].steps == of.by.STEPS + 1


@pytest.mark.parametrize(
    ("of_what", "within"),
    [
        ("its privacy record", ()),
        ("its mechanism", ("mechanism",)),
        ("its batches", ("batches",)),
        ("its configuration", ("config",)),
        ("Diff2", ("config", "estimator")),
    ],
)
def test_an_unknown_field_of_a_checkpoint_is_refused_by_its_name(of, of_what, within):
    path = of.one("run.ckpt")
    edit_record(path, lambda record: functools.reduce(getitem, within, record).update(more=1))

    with pytest.raises(ValueError, match=f"more=1 in {of_what}, a field that this version lacks"):
        of.by.fit(of.folder, of.by.STEPS + 1, path)


def test_a_ledger_of_a_later_version_is_refused_also_by_the_command(of, capsys):
    path = of.one("run.ckpt")
    edit_record(path, lambda record: record["ledger"].update(more=1))

    with pytest.raises(JournalError, match="unknown field 'more'"):
        of.by.fit(of.folder, of.by.STEPS + 1, path)
    with pytest.raises(SystemExit, match="2"):
        main([str(path)])
    assert "unknown field 'more'" in capsys.readouterr().err


def test_the_command_finds_that_all_agrees(of, capsys):
    assert main([str(of.folder), "--delta", "1e-5", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [each["steps"] for each in found["documents"]] == [of.by.STEPS] * 2
    assert [each["steps"] for each in found["journals"]] == [of.by.MADE]


def test_a_report_reads_back(of):
    path = of.one("privacy_report-*.json")
    report = read_report(path)
    assert report.steps == of.by.STEPS and report.private
    assert path.with_suffix(".md").read_text("utf-8").startswith("# Privacy report")

    content = json.loads(path.read_text("utf-8"))
    del content["guard"]
    path.write_text(json.dumps(content), "utf-8")
    assert read_report(path).guard == "unknown"
    path.write_text(json.dumps({**content, "more": 1}), "utf-8")
    with pytest.raises(ValueError, match=r"unknown fields: \['more'\]"):
        read_report(path)


def test_events_read_back(of):
    written = json.loads(of.one("events.json").read_text("utf-8"))
    written = [each for each in written if each["event"] != "RepeatAndSelect"]  # see below
    assert [event_from_dict(each) for each in written] == list(of.by.EVENTS)
    for each in written:
        with pytest.raises(ValueError, match="unknown field 'more'"):
            event_from_dict({**each, "more": 1})


def test_an_event_without_a_reader_is_refused_by_its_name_wherever_it_is(of):
    written = json.loads(of.one("events.json").read_text("utf-8"))
    (gone,) = (each for each in written if each["event"] == "RepeatAndSelect")
    named = r"RepeatAndSelect.*ApproximateDP"
    with pytest.raises(ValueError, match=named):
        event_from_dict(gone)

    report = of.one("privacy_report-*.json")
    content = json.loads(report.read_text("utf-8"))
    content["events"] = {"run": [[gone, 1]]}
    report.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ValueError, match=named):
        read_report(report)

    checkpoint = of.one("run.ckpt")
    edit_record(checkpoint, lambda record: record["ledger"]["runs"].update(search=[[gone, 1]]))
    with pytest.raises((JournalError, ValueError), match=named):
        of.by.fit(of.folder, of.by.STEPS + 1, checkpoint)

    journal = of.one("*.journal")
    edit_line(journal, 1, lambda line: line.__setitem__(2, gone))
    for read in (read_journal, sweep_history):
        with pytest.raises(JournalError, match=named):
            read(journal)
    with pytest.raises(SystemExit, match="2"):
        main([str(journal), "--delta", "1e-5"])


def test_a_journal_reads_back(of):
    path = of.one("*.journal")
    ledger_id, charges = read_journal(path)
    assert (ledger_id, charges.steps) == (path.stem, of.by.STEPS)
    assert charges == read_report(of.one("privacy_report-*.json")).events

    edit_line(path, 1, lambda line: line[2].update(more=1))
    with pytest.raises(JournalError, match="unknown field 'more'"):
        read_journal(path)


def test_a_federation_goes_on(of):
    folder = of.folder / "federated"
    state = torch.load(folder / "server.pt", weights_only=True)
    server, client = of.by.server(), of.by.client(folder)
    server.load_state_dict(state)
    assert server.round == of.by.MADE
    while not server.is_done:
        server.receive(0, client.answer(server.request(0)))

    events = ReleaseLedger(folder, "hospital").history()
    assert sum(count for _, count in events) == server.round == of.by.ROUNDS

    state["configuration"]["more"] = 1
    with pytest.raises(ValueError, match="more"):
        of.by.server().load_state_dict(state)


def test_a_release_file_reads_back(of):
    (path,) = (of.folder / "federated").glob("*.release")
    progress, kept = read_release_file(path)
    assert (progress.run, progress.charged) == ("trial", of.by.MADE)
    assert len(kept) == 1  # the latest, which may be asked for again

    edit_line(path, 0, lambda header: header[1].pop("dataset"))
    assert read_release_file(path)[0].dataset is None
    edit_line(path, 0, lambda header: header[1].update(more=1))
    with pytest.raises(JournalError, match=r"unknown fields: \['more'\]"):
        read_release_file(path)
