"""A ledger in a checkpoint, its journal moved, lost and recovered."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from lightning_dp.accounting import (
    ApproximateDP,
    Gaussian,
    PoissonGaussian,
    recover_journal,
    sweep_history,
)
from lightning_dp.accounting.events import PoissonRound, Voided
from lightning_dp.accounting.journal import JournalError
from lightning_dp.accounting.ledger import Ledger

A, B = PoissonGaussian(1.0, 0.01), PoissonGaussian(2.0, 0.01)
ROUND = PoissonRound((2.0, 3.0), 0.5)


def test_the_state_survives_a_checkpoint_of_plain_types(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, ROUND, Gaussian(3.0)))
    file = io.BytesIO()
    torch.save(ledger.state_dict(), file)
    file.seek(0)

    state = torch.load(file, weights_only=True)

    assert state == ledger.state_dict()
    assert books.counts(books.restored(state, tmp_path)) == books.counts(ledger)


def test_a_moved_journal_is_found_in_the_ledger_folder(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path / "old", A, A))
    state = ledger.state_dict()
    (tmp_path / "old").rename(tmp_path / "new")

    found = books.restored(state, tmp_path / "new")

    assert found.steps == 2
    assert books.journal_of(found) == tmp_path / "new" / f"{ledger.id}.journal"


def test_a_missing_journal_is_an_error_that_names_the_way_out(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A))
    books.journal_of(ledger).unlink()
    with pytest.raises(
        JournalError, match=r"is missing .* lightning_dp\.accounting\.\s?recover_jou"
    ):
        books.restored(ledger.state_dict(), tmp_path)


@pytest.mark.parametrize("kept_lines", [1, 2, 3])
def test_a_journal_that_knows_less_than_the_checkpoint_is_refused(tmp_path, kept_lines, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B))
    path = books.journal_of(ledger)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept_lines]))
    with pytest.raises(JournalError, match="knows less than the checkpoint"):
        books.restored(ledger.state_dict(), tmp_path)


def test_a_damaged_journal_does_not_restore(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B))
    path = books.journal_of(ledger)
    path.write_bytes(path.read_bytes().replace(b"1.0", b"9.0"))
    with pytest.raises(JournalError, match="line 2 fails its checksum"):
        books.restored(ledger.state_dict(), tmp_path)


def checkpoint_of(ledger: Ledger, folder: Path) -> Path:
    path = folder / "last.ckpt"
    torch.save({"lightning_dp": {"ledger": ledger.state_dict()}}, path)
    return path


@pytest.mark.parametrize("unrecorded", [0, 7])
def test_a_recovered_journal_charges_the_bound_on_what_was_lost(tmp_path, unrecorded, books):
    ledger = books.ended(books.ledger_with(tmp_path, A, A, B))
    checkpoint = checkpoint_of(ledger, tmp_path)
    books.journal_of(ledger).unlink()

    path = recover_journal(checkpoint, tmp_path / "new", unrecorded, costliest=B)

    again = books.restored(ledger.state_dict(), tmp_path / "new")
    assert books.journal_of(again) == path
    assert again.steps == 3 + unrecorded
    assert books.counts(again) == {A: 2, B: 1 + unrecorded}
    again.begin("run-2", tmp_path)
    again.charge(A)
    assert books.steps_in(path) == 4 + unrecorded
    again.end()


def test_recovering_does_not_overwrite_a_journal(tmp_path, books):
    ledger = books.ended(books.ledger_with(tmp_path, A))
    checkpoint = checkpoint_of(ledger, tmp_path)
    for directory in (tmp_path, tmp_path / "new"):
        with pytest.raises(JournalError, match=r"exists\. If it is damaged, move it away first"):
            recover_journal(checkpoint, directory, 0)


def test_recovering_from_nothing_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="not a checkpoint of a private run"):
        recover_journal(tmp_path / "plain.ckpt", tmp_path, 1)
    with pytest.raises(ValueError, match="unrecorded_steps=-1 must be a whole number"):
        recover_journal(tmp_path / "plain.ckpt", tmp_path, -1)


@pytest.mark.parametrize("content", [b"", b"garbage", [1], {"lightning_dp": 3}, None])
def test_recovering_from_what_is_no_checkpoint_is_refused_and_leaves_no_file(tmp_path, content):
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(
        ValueError, match=r"a\.ckpt (does not exist|cannot be read|is not a checkp)"
    ):
        recover_journal(path, tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", [None, 3, b"a.ckpt", [1]])
def test_paths_that_are_none_are_refused_by_name(tmp_path, path):
    with pytest.raises(TypeError, match="checkpoint_path="):
        recover_journal(path, tmp_path, 1)
    with pytest.raises(TypeError, match="paths="):
        sweep_history(path if isinstance(path, list) else [path])


@pytest.mark.parametrize(
    "event", [Voided("x"), ApproximateDP(1.0, 1e-6, "add_remove", "x"), A.pair]
)
def test_lost_steps_are_charged_as_steps_only(tmp_path, event):
    with pytest.raises(ValueError, match=r"costliest=.* must be an event of a step"):
        recover_journal(tmp_path / "a.ckpt", tmp_path, 1, costliest=event)


def test_a_constant_run_is_one_entry_in_a_checkpoint(books):
    ledger = books.ledger_with(None, *[A] * 5000)
    assert ledger.state_dict()["runs"] == {"run-1": [[A.to_dict(), 5000]]}


def test_a_field_that_is_not_known_may_change_what_was_spent(tmp_path, books):
    state = books.ended(books.ledger_with(None, A)).state_dict()
    with pytest.raises(JournalError, match="unknown field 'refunds'"):
        books.restored({**state, "refunds": 1}, tmp_path)


@pytest.mark.parametrize("field", ["id", "journal", "runs"])
def test_a_field_that_is_missing_is_damage(tmp_path, books, field):
    state = books.ended(books.ledger_with(None, A)).state_dict()
    del state[field]
    with pytest.raises(JournalError, match=f"ledger is damaged: KeyError.'{field}'"):
        books.restored(state, tmp_path)
