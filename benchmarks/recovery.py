"""What a kill costs: the time without a finished step, beside the same kill under torchft and torchrun elastic.

    python benchmarks/recovery.py                      # 20 kills of a worker, 8 of a server, 8 of the coordinator
    python benchmarks/recovery.py --peers              # and of the peers (pip install -e '.[peers]'; minutes)

Steps are padded by sleeping, so that two cores are enough for all processes: what is measured is finding out, handing
over and going on. A worker's death costs its replica of the step once more in any case: that is shown apart.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rallypoint.launch.commands.chaos import Chaos, MeasuredFault, ledger_of, measure, typical_gap
from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import launch
from recovery_peers import PeerTrial, measure_torchft, measure_torchrun, why_not_torchft

BATCH = 8


@dataclass(frozen=True)
class Row:
    """A kind of kill: every stall beyond a usual step, in seconds, ascending."""

    what: str
    stalls: list[float]
    step: float

    @property
    def p50(self) -> float:
        """The median."""
        return self.stalls[len(self.stalls) // 2]


def kill(what: str, count: int, workers: int, step_seconds: float, console: Console) -> Row:
    """Kill `count` processes of a role, one after the other has been made good."""
    steps = int((count + 2) * 7.0 / step_seconds)  # a new process takes some seconds to import torch
    with _folder() as folder:
        plan = Launch(
            worker=(sys.executable, str(Path(__file__).with_name("recovery_member.py")), str(steps), str(workers),
                    str(step_seconds)),
            workers=(1, workers), workers_start=workers, standby=1, servers=2, replication=2, folder=str(folder),
            snapshots=str(folder / "snapshots"), snapshot_seconds=10.0,
        )  # fmt: skip
        driver = Chaos([f"kill {what}"] * count, steps, seed=1)
        with (folder.parent / "console.txt").open("w") as log:
            status = launch(plan, RunConsole(Console(file=log, highlight=False)), driver.intervene)
        if status:
            raise SystemExit(f"the run failed: {(folder.parent / 'console.txt').read_text()[-2000:]}")
        ledger = ledger_of(folder, steps, steps * workers * BATCH)
    if not ledger.exact:
        raise SystemExit(f"the ledger is not exact: {ledger.missing} {ledger.wrong}")
    usual = typical_gap(ledger.times)
    found = measure(driver.events, ledger)
    console.print(f"killed {len(found)} x {what} in {steps} steps of {usual:.3f} s")
    return Row(what, sorted(max(0.0, _stall(event) - usual) for event in found), usual)


def _stall(event: MeasuredFault) -> float:
    return event.stall


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "run"


def table(rows: list[Row], peers: list[PeerTrial]) -> Table:
    """All figures."""
    shown = Table("killed", "kills", "stall p50", "p99 (max)", "steps lost", "outcome", title="beyond a usual step")
    for row in rows:
        recomputed = " (of it the replica again)" if row.what == "worker" else ""
        shown.add_row(
            f"rallypoint: {row.what}", str(len(row.stalls)), f"{row.p50:.2f} s{recomputed}", f"{row.stalls[-1]:.2f} s",
            "0", "went on",
        )  # fmt: skip
    for trial in peers:
        stall = "-" if trial.stall_s is None else f"{trial.stall_s:.2f} s"
        lost = "-" if trial.steps_lost is None else str(trial.steps_lost)
        shown.add_row(f"{trial.tool} {trial.version}", "1", stall, stall, lost, trial.outcome)
    return shown


def command(
    worker_kills: Annotated[int, typer.Option(min=1, help="Kills of a worker.")] = 20,
    server_kills: Annotated[int, typer.Option(min=1, help="Kills of a server.")] = 8,
    coordinator_kills: Annotated[int, typer.Option(min=1, help="Kills of the coordinator.")] = 8,
    workers: Annotated[int, typer.Option(min=2, help="Workers, and one standing by.")] = 4,
    step: Annotated[float, typer.Option(min=0.02, help="Seconds of a replica's step.")] = 0.25,
    peers: Annotated[bool, typer.Option(help="Measure torchft and torchrun elastic too.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="Kills of each peer.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure what a kill costs."""
    console = Console(highlight=False)
    kills = {"worker": worker_kills, "server": server_kills, "coordinator": coordinator_kills}
    rows = [kill(what, count, workers, step, console) for what, count in kills.items()]
    found: list[PeerTrial] = []
    if peers:
        if (why := why_not_torchft()) is None:
            found += measure_torchft(trials, workers, step) + measure_torchft(trials, workers, step, timeout_s=1.0)
        else:
            console.print(f"torchft is left out: {why}")
        found += measure_torchrun(trials, workers, step)
    console.print(table(rows, found))
    if json is not None:
        content: dict[str, Any] = {"rallypoint": [asdict(row) for row in rows], "peers": [asdict(t) for t in found]}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


if __name__ == "__main__":
    typer.run(command)
