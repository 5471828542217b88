"""Train the modules of the zoo as a user does, and print of each: refused, voided, or trained.

    python tests/isolation/zoo_report.py bad|ordinary [names] [--log FILE] [--fits N]

Each fit is a real one with default checks: 40 steps of a bad module, in ten epochs (10 of an ordinary
one), on Poisson batches of about 16 records. A bad module is trained on both of its neighbouring data
sets, without and with the odd record, with it up to N times until it is refused or voided: an odd
record that is in no batch that is looked at shows nothing. The line has the outcome of each fit.
With ``--log`` a run that was cut off goes on behind the last line of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "audit"), str(Path(__file__).parents[2])]

import isolation_zoo as zoo  # noqa: E402
import torch  # noqa: E402
from isolation_zoo.cases import Bad, Ordinary, Records, checked_fit  # noqa: E402
from isolation_zoo.not_seen import NOT_SEEN  # noqa: E402
from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402

from lightning_dp._refusals import Refusal  # noqa: E402
from lightning_dp.accounting.events import VoidedRunError  # noqa: E402


def outcome(case: Bad | Ordinary, records: Records) -> tuple[str, str]:
    """Return what a fit came to in a word, and the reason or the report's line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _, privacy = checked_fit(case, records)
            return "trained", privacy.report().isolation
    except VoidedRunError as error:
        return "voided", str(error)
    except (MisconfigurationException, Refusal) as error:
        return "refused", str(error)
    except Exception as error:  # the model's own, or ours: neither is a refusal
        return "error", f"{type(error).__name__}: {error}"


def verdicts(case: Bad | Ordinary, fits: int) -> Iterator[tuple[str, str]]:
    """Yield the outcome of each fit of the case: of two or more, if it is a bad one."""
    if isinstance(case, Ordinary):
        yield outcome(case, case.records(80))
        return
    plain, odd = case.neighbours(64)
    case = replace(case, epochs=10)
    yield outcome(case, plain)
    for _ in range(fits):
        found = outcome(case, odd)
        yield found
        if found[0] != "trained":
            return


def line(name: str, case: Bad | Ordinary, fits: int) -> str:
    """Return a line of the report: name, overall verdict, each fit's, seconds, and the first reason."""
    start = time.perf_counter()
    found = list(verdicts(case, fits))
    words = [word for word, _ in found]
    whole = next((word for word in ("refused", "voided", "error") if word in words), "trained")
    reason = next(text for word, text in found if word == whole)
    listed = " (on the list of what is not seen)" if name in NOT_SEEN else ""
    return (
        f"{name:32} {whole:8} {'/'.join(words):16} {time.perf_counter() - start:5.1f} s  "
        f"{' '.join(reason.split())[:150]}{listed}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("bad", "ordinary"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--log", type=Path, help="append to this file, and leave out what it has")
    parser.add_argument("--fits", type=int, default=1, help="with the odd record, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    log = arguments.log or Path(os.devnull)
    lines = log.read_text("utf-8").splitlines() if log.is_file() else []
    done = {text.split()[0]: text for text in lines if text.strip()}
    cases: dict[str, Bad | Ordinary] = dict(zoo.BAD if arguments.kind == "bad" else zoo.ORDINARY)
    counts: Counter[str] = Counter()
    for name in arguments.names or cases:
        if name not in done:
            done[name] = line(name, cases[name], arguments.fits)
            with log.open("a", encoding="utf-8") as file:
                file.write(done[name] + "\n")
        print(done[name], flush=True)
        counts[done[name].split()[1]] += 1
    print(arguments.kind, dict(counts), "of", len(cases))


if __name__ == "__main__":
    main()
