"""One worker three times slower than three others: what of the sum of their speeds is left?

    python benchmarks/uneven.py

Steps are padded by sleeping. The sum of the speeds is that of the padding alone, so whatever synchronisation, data
and Python cost counts against us. A lockstep design waits for the slow one: its best is shown beside.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rallypoint.launch.commands.chaos import ledger_of
from rallypoint.launch.console import RunConsole
from rallypoint.launch.plan import Launch
from rallypoint.launch.run import launch

_WORKERS = 4


def rate(replicas: int, seconds: float, slow: float, steps: int, backup_tasks: bool) -> float:
    """Replicas per second over the second half of a run."""
    with tempfile.TemporaryDirectory() as parent, (Path(parent) / "console.txt").open("w") as log:
        member = Path(__file__).with_name("recovery_member.py")
        folder = Path(parent) / "run"
        plan = Launch(
            worker=(sys.executable, str(member), str(steps), str(replicas), str(seconds), "worker3", str(slow)),
            workers=(1, _WORKERS), workers_start=_WORKERS, servers=1, folder=str(folder), backup_tasks=backup_tasks,
        )  # fmt: skip
        if launch(plan, RunConsole(Console(file=log, highlight=False))):
            raise SystemExit(f"the run failed: {(Path(parent) / 'console.txt').read_text()[-2000:]}")
        times = ledger_of(folder, steps, steps * replicas).times
    return replicas / statistics.median(b - a for a, b in itertools.pairwise(times[len(times) // 2 :]))


def command(
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the job.")] = 20,
    seconds: Annotated[float, typer.Option(help="Seconds of a replica on a fast worker.")] = 0.1,
    slow: Annotated[float, typer.Option(help="How many times slower one worker is.")] = 3.0,
    steps: Annotated[int, typer.Option(min=10, help="Steps of a run.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 3,
) -> None:
    """Measure how even the load becomes on uneven workers."""
    console = Console(highlight=False)
    speeds = (_WORKERS - 1) / seconds + 1 / (slow * seconds)
    table = Table("", "replicas/s [min..max]", "of the sum of the speeds")
    for name, backup in (("assigned by speed", False), ("and backup tasks", True)):
        found = sorted(rate(replicas, seconds, slow, steps, backup) for _ in range(rounds))
        middle = statistics.median(found)
        table.add_row(name, f"{middle:.1f} [{found[0]:.1f}..{found[-1]:.1f}]", f"{middle / speeds:.0%}")
    lockstep = replicas / (-(-replicas // _WORKERS) * slow * seconds)
    table.add_row("equal shares, at best", f"{lockstep:.1f}", f"{lockstep / speeds:.0%}")
    console.print(table)


if __name__ == "__main__":
    typer.run(command)
