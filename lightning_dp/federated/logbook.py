"""The record of a federation: who was there, what each client claims to have spent, and its report."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_dp._files import replaced
from lightning_dp.accounting import Gaussian, PLDAccountant
from lightning_dp.accounting.base import epsilon_text, float32_above
from lightning_dp.federated.protocol import AbstractServer
from lightning_dp.plotting import plot_federation, svg

_log = logging.getLogger("lightning_dp.federated")

_ROUNDING = 1 - 1e-3  # of claims: an accountant is about that accurate
_COLUMNS = ("round", "client", "answered", "epsilon")
_UNITS = {"record": "its records", "user": "its users", "client": "its data as a whole"}


class Problem(NamedTuple):
    """A message that is lost or cannot be used, of a client or of a node that is nobody's yet."""

    sender: str
    client: int | None
    text: str


class Presence(NamedTuple):
    """The presence of a client in a round, and the ε that it claimed then; NaN for none."""

    round: int
    client: int
    answered: bool
    epsilon: float


class Logbook:
    """The files about a run, of noised values and counts only, in a folder.

    - TensorBoard files, and ``rounds.csv``, a line for each client and round, while it goes on; those
      of earlier runs in the folder are ``rounds-1.csv``, ``rounds-2.csv``, ....
    - At its end, also of a run that fails, ``federation.json``, and for people ``federation.md`` with
      the picture ``federation.svg`` (where matplotlib is installed). ``epsilon`` of a client is what
      it claims, and ``epsilon_of_plan`` what the rounds cost by the plan, if it is known.

    Args:
        folder: made if it does not exist.
        run: the name of the federation.
        is_new: False for one that goes on in this folder.
        is_sampled: its clients are drawn in secret. Then only ``rounds.csv`` and the log, which are the
            server's own, name clients.
    """

    def __init__(self, folder: Path, run: str, is_new: bool, is_sampled: bool = False) -> None:
        from torch.utils.tensorboard import SummaryWriter  # clients need none

        self._writer = SummaryWriter(str(folder))
        self._rounds = folder / "rounds.csv"
        if is_new and self._rounds.exists():  # what clients claimed then may be nowhere else
            free = (folder / f"rounds-{n}.csv" for n in itertools.count(1))
            self._rounds.rename(next(path for path in free if not path.exists()))
        is_new = not self._rounds.exists()
        with open(self._rounds, "w" if is_new else "a", encoding="utf-8") as file:
            file.write((",".join(_COLUMNS) if is_new else "") + "\n")  # or ends half a line
        self._folder, self._run, self._is_sampled = folder, run, is_sampled
        self._clients: dict[int, dict[str, Any]] = {}
        self._metrics: dict[str, float] = {}
        self._counts: Counter[str] = Counter(replies=0, problems=0)
        self.problems: dict[str, str] = {}
        """The latest problem of each sender, since its reply was applied."""

    def add_client(self, client: int, facts: Mapping[str, Any]) -> None:
        """Note the facts of a client."""
        before = self._clients.get(client, {})
        self._clients[client] = {**before, **facts, "client": client}
        if facts.get("epsilon", math.inf) < before.get("epsilon", 0.0) * _ROUNDING:
            _log.warning(
                "Client %s claims epsilon %.4g after %.4g: its ledger was lost, or is another one.",
                *(client, facts["epsilon"], before["epsilon"]),
            )

    def add_reply(self, round_: int, client: int, facts: Mapping[str, Any], answered: bool) -> None:
        """Count the reply of a client that was applied, an answer or its refusal, and note its facts."""
        self.add_client(client, facts)
        self.problems.pop(f"Client {client}", None)
        self._counts["replies"] += 1
        if "epsilon" in facts and not self._is_sampled:
            epsilon = float32_above(facts["epsilon"])
            self._scalar(f"privacy/epsilon_client_{client}", epsilon, round_)
        self._add_line(Presence(round_, client, answered, facts.get("epsilon", math.nan)))

    def add_problem(self, problem: Problem) -> None:
        """Count and log a problem: each of a client, and those of a node that are new."""
        sender, client, text = problem
        if client is not None or self.problems.get(sender) != text:
            _log.warning("%s: %s. Asking again.", sender, text.rstrip("."))
        self.problems[sender] = text
        self._counts["problems"] += 1

    def add_absences(self, round_: int, clients: Iterable[int]) -> None:
        """Log each client that a round goes on without, and its latest problem."""
        for client in sorted(clients):
            problem = self.problems.get(f"Client {client}", "it has not replied")
            _log.warning("Round %d goes on without client %d: %s", round_, client, problem)
            self._counts["left out"] += 1
            self._add_line(Presence(round_, client, False, math.nan))

    def add_model(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a new global model."""
        self._metrics = {name: float(value) for name, value in metrics.items()}
        scalars = {f"global/{name}": value for name, value in self._metrics.items()}
        scalars |= {f"progress/{name}": count for name, count in self._counts.items()}
        if claims := self._claims:
            scalars["privacy/epsilon_max"] = float32_above(max(claims))
        for name, value in scalars.items():
            self._scalar(name, value, step)
        self._writer.flush()

    @property
    def _claims(self) -> list[float]:
        return [facts["epsilon"] for facts in self._clients.values() if "epsilon" in facts]

    def line(self, step: int) -> str:
        """Return one line for the console: the progress of the run."""
        parts = [f"{name} {value:.4g}" for name, value in self._metrics.items()]
        if claims := self._claims:
            parts.append(f"largest epsilon that a client claims {epsilon_text(max(claims))}")
        parts += [f"{count} {name}" for name, count in self._counts.items()]
        return f"Federation: {step} rounds are over; " + ", ".join(parts)

    def close(self, machine: AbstractServer, reason: str) -> None:
        """Write the summary of a run that is over or has failed, whatever the facts were."""
        clients = {
            str(client): _json({**facts, **_epsilon_of_plan(machine, facts)})
            for client, facts in sorted(self._clients.items())
            if not self._is_sampled
        }
        summary = {
            "run": self._run,
            "rounds": machine.round,
            "ended": reason,
            "seeded": getattr(machine, "seed", None) is not None,
            **_json(machine.facts),
            "metrics": _json(self._metrics),
            **self._counts,
            "clients": clients,
        }
        content = json.dumps(summary, allow_nan=False, indent=2) + "\n"
        self._write("federation.json", content.encode())
        self._writer.close()
        try:
            attendance = [] if self._is_sampled else read_rounds(self._rounds)
            if attendance:
                self._write("federation.svg", svg(lambda: plot_federation(attendance)))
            self._write("federation.md", federation_page(summary, attendance).encode())
        except Exception as error:  # the page is of what is in other files: no run fails for it
            _log.warning("No page about the run could be written: %s", error)

    def _write(self, name: str, content: bytes) -> None:
        with replaced(self._folder / name, mode=None) as file:
            file.write(content)

    def _add_line(self, presence: Presence) -> None:
        with open(self._rounds, "a", encoding="utf-8") as file:
            print(*presence[:2], int(presence.answered), presence.epsilon, sep=",", file=file)

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):  # TensorBoard draws no infinite ε; the summary has it
            self._writer.add_scalar(name, value, step)


def read_rounds(path: Path) -> list[Presence]:
    """Return the lines of ``rounds.csv``, the latest of each client and round, in their order."""
    found: dict[tuple[int, int], Presence] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                round_, client, answered = (int(row[name]) for name in _COLUMNS[:3])
                epsilon = float(row["epsilon"])
            except (TypeError, ValueError):
                continue  # a server died in this line
            found[round_, client] = Presence(round_, client, bool(answered), epsilon)
    return [found[place] for place in sorted(found)]


def federation_page(summary: Mapping[str, Any], attendance: Iterable[Presence]) -> str:
    """Return the report of a federation in Markdown, from ``federation.json`` and its rounds."""
    from lightning_dp.report.content import filled  # clients need none

    answered, absent = Counter[int](), dict[int, list[int]]()
    for presence in attendance:
        if presence.answered:
            answered[presence.client] += 1
        else:
            absent.setdefault(presence.client, []).append(presence.round)
    told = {int(name): facts for name, facts in summary["clients"].items()}
    numbers = [f"{count} {name}" for name, count in summary.items() if type(count) is int]
    numbers += [f"{name} {value}" for name, value in summary["metrics"].items()]
    clients = [
        (client, told.get(client, {}), answered[client], _ranges(absent.get(client, [])))
        for client in sorted({*told, *answered, *absent})
    ]
    units = sorted({_UNITS[facts["unit"]] for facts in told.values() if facts.get("unit")})
    return filled("federation.j2", summary=summary, numbers=numbers, clients=clients, units=units)


def _ranges(rounds: list[int]) -> str:
    """Return numbers in increasing order as text: 1–3, 7."""
    groups = (
        list(g) for _, g in itertools.groupby(enumerate(rounds), lambda pair: pair[1] - pair[0])
    )
    ends = ((group[0][1], group[-1][1]) for group in groups)
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in ends)


def _epsilon_of_plan(machine: AbstractServer, facts: Mapping[str, Any]) -> dict[str, float]:
    """Return ε of the rounds so far by the plan, at a client's own δ, relation and size."""
    try:
        is_whole, at = facts["unit"] == "client", (facts["delta"], facts["relation"])
        history = machine.spent(1 if is_whole else facts["num_records"], facts["client"])
        if history is not None and is_whole:  # no batch leaves out a whole client
            history = [(Gaussian(event.pair[0]), count) for event, count in history]
        return {} if history is None else {"epsilon_of_plan": PLDAccountant().epsilon(history, *at)}
    except (KeyError, ValueError, ArithmeticError):  # facts may be left out, or tell of N = 0
        return {}


def _json(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Write infinity as the text "inf", which JSON has no number for."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }
