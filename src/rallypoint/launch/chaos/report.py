"""The report of a chaos run: each fault's stall, the ledger of contributions, the verdict."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

_WINDOW_S = 20.0  # seconds after a fault in which its stall is searched


class Event(msgspec.Struct, frozen=True):
    """A fault: when (unix time), what, which process, and how much was done by then."""

    at: float
    what: str
    whom: str
    step: int
    again: int


class Measured(msgspec.Struct, frozen=True):
    """A fault and its cost: the longest time without a finished step after it, and the replicas computed again."""

    event: Event
    stall: float
    again: int


class Ledger(msgspec.Struct, frozen=True):
    """Every round of the run, as the holders of the first shard recorded it: how often, with how many contributions.

    A round is one step, or several under local steps. `samples` is the number that all rounds use. `times`: when each
    round was finished (unix time), ascending: once for each time that it was made, however many servers report it.
    """

    rounds: int
    samples: int
    missing: list[int]
    wrong: list[int]
    times: list[float]

    @property
    def exact(self) -> bool:
        """True if every round was applied, each with all of its contributions."""
        return not self.missing and not self.wrong


class Report(msgspec.Struct, frozen=True):
    """The whole report.

    `hashes`: of the undisturbed run's weights and of this run's; they must be equal if `comparable`.
    """

    events: list[Measured]
    undone: int
    hashes: tuple[str, str]
    ledger: Ledger
    comparable: bool = True

    @property
    def same(self) -> bool:
        """True if both runs ended with the same bytes."""
        return self.hashes[0] == self.hashes[1]


class _Entry(msgspec.Struct):
    type: str
    step: int = -1
    replicas: int = 0
    at: float = 0.0
    generation: Any = None


def ledger_of(folder: Path, rounds: int, samples: int) -> Ledger:
    """Read the ledger of a run from its event log."""
    applied: dict[int, set[int]] = {}
    times: dict[tuple[int, str], float] = {}  # by round and generation: a roll-back makes a round once more
    replicas = 0
    for line in (folder / "events.jsonl").read_bytes().splitlines():
        entry = msgspec.json.decode(line, type=_Entry)
        if entry.type == "Planned":
            replicas = entry.replicas
        elif entry.type == "Applied":
            applied.setdefault(entry.step, set()).add(entry.replicas)
            made = (entry.step, str(entry.generation))
            times[made] = min(entry.at, times.get(made, entry.at))  # the backup of the first shard reports it later
    return Ledger(
        rounds=rounds, samples=samples, missing=[r for r in range(rounds) if r not in applied],
        wrong=[r for r in range(rounds) if r in applied and applied[r] != {replicas}], times=sorted(times.values()),
    )  # fmt: skip


def measure(events: Sequence[Event], ledger: Ledger) -> list[Measured]:
    """Return the cost of every fault, measured until the next one."""
    measured = []
    for event, following in zip(events, [*events[1:], None], strict=True):
        end = min(event.at + _WINDOW_S, following.at if following is not None else float("inf"))
        again = (following.again if following is not None else event.again) - event.again
        measured.append(Measured(event, longest_gap(ledger.times, event.at, end), max(0, again)))
    return measured


def longest_gap(times: Sequence[float], start: float, end: float) -> float:
    """Return the longest time without a finished step that ends between `start` and `end`, in seconds.

    A longer stall, which lasts until the next fault at `end`, belongs to that fault.
    """
    first = max(0, bisect.bisect_left(times, start) - 1)
    reaching = itertools.takewhile(lambda gap: gap[1] <= end, itertools.pairwise(times[first:]))
    return max((b - a for a, b in reaching), default=0.0)


def typical_gap(times: Sequence[float]) -> float:
    """Return the median time between two finished steps, in seconds."""
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 0.0


def show(report: Report, console: Console) -> None:
    """Print the table, the ledger and the verdict."""
    table = Table("", "step", "fault", "to", "stall", "computed again")
    for number, measured in enumerate(report.events, 1):
        event = measured.event
        table.add_row(
            str(number), str(event.step), event.what, event.whom, f"{measured.stall:.2f} s", str(measured.again)
        )
    console.print(table)
    usual = typical_gap(report.ledger.times)
    console.print(f"longest time without a step, beside the {usual:.2f} s that a step usually takes:")
    for what in sorted({measured.event.what for measured in report.events}):
        stalls = sorted(m.stall for m in report.events if m.event.what == what)
        console.print(f"  {what} ({len(stalls)}): p50 {stalls[len(stalls) // 2]:.2f} s, max {stalls[-1]:.2f} s")
    if report.comparable:
        _show_ledger(report.ledger, console)
    mine, theirs = report.hashes
    verdict = "[bold green]same bytes: yes[/bold green]" if report.same else "[bold red]same bytes: NO[/bold red]"
    if not report.comparable:
        verdict = f"same bytes: {'yes' if report.same else 'no'} (this mode does not promise them when workers die)"
    if report.undone:
        verdict += f"; [yellow]but {report.undone} faults were not made: the run was over, give it more steps[/yellow]"
    console.print(f"undisturbed sha256 {mine}\nthis run    sha256 {theirs}\n{verdict}")


def _show_ledger(ledger: Ledger, console: Console) -> None:
    if ledger.exact:
        console.print(
            f"ledger: {ledger.rounds} updates, each applied with all of its contributions; "
            f"{ledger.samples:,} sample positions, each used once"
        )
        return
    console.print(
        f"[bold red]ledger: updates missing {ledger.missing[:10]}, "
        f"with other contributions than they should {ledger.wrong[:10]}[/bold red]"
    )
