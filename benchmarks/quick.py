"""Six minutes: the ratios that must not get worse in silence, beside those that were kept last (`make bench-quick`).

    python benchmarks/quick.py            # nothing else may run; no root needed
    python benchmarks/quick.py --keep     # and keep what was found in benchmarks/quick.json, for the next ones

Each ratio is what a user would pick instead over Rallypoint, measured in turn in one run: more is better. Calls of
Python are less is better, and the same on every machine. A ratio got worse if all of its rounds are below the
kept median, and its own median is by more than the kept rounds differ among themselves. Ratios that were kept on
another machine are shown and not judged.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from cluster import machine_facts, table

HERE = Path(__file__).parent
KEPT = HERE / "quick.json"


class Found(msgspec.Struct, frozen=True):
    """One figure of each round."""

    rounds: list[float]
    more_is_better: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def got_worse(self, before: Found) -> bool:
        """Is it worse than `before` by more than the noise? Calls have none, but for a few."""
        if not self.more_is_better:
            return self.median > 1.02 * before.median
        noise = max(before.rounds) - min(before.rounds)
        return max(self.rounds) < before.median and before.median - self.median > noise


class Kept(msgspec.Struct, frozen=True):
    """What was kept last, and on what."""

    machine: dict[str, str | int]
    figures: dict[str, Found]


def synchronised(results: Any) -> dict[str, Found]:
    """2 + 1 on this machine, 100 MB, AdamW: `reduce.py` with one round."""
    seconds = {one["design"]: one["seconds"]["median"] for one in results["results"]}
    return {
        "all-reduce and AdamW over Gloo / ours": Found([seconds["gloo-step"] / seconds["rallypoint"]]),
        "the all-reduce alone / ours": Found([seconds["gloo"] / seconds["rallypoint"]]),
    }


def trained(results: Any) -> dict[str, Found]:
    """A GPT of 19 M, 2 + 1 on this machine: `train.py` with one round."""
    seconds = {one["design"]: one["step"]["median"] for one in results["results"]}
    return {"a GPT's step, DDP / ours": Found([seconds["ddp"] / seconds["rallypoint"]])}


def alone(results: Any) -> dict[str, Found]:
    """`alone.py` with one round."""
    seconds = {kind.split()[0]: one[0]["seconds"] for kind, one in results.items()}
    return {
        "plain PyTorch / python train.py": Found([seconds["plain"] / seconds["job"]]),
        "plain PyTorch / one worker and one server": Found([seconds["plain"] / seconds["run"]]),
    }


def walked(results: Any) -> dict[str, Found]:
    """`hot_path.py`."""
    kinds = ("in one process", "a worker and a server")
    calls = {f"own calls a shard and step, {kind}": [sum(results[kind]["files"].values())] for kind in kinds}
    return {name: Found(found, more_is_better=False) for name, found in calls.items()}


Read = Callable[[Any], dict[str, Found]]
ROUNDS = 3
NOISY: list[tuple[str, Read]] = [
    ("reduce.py --loopback --workers 2 --servers 1 --shard-kib 4096 --rounds 1", synchronised),
    ("train.py --loopback --workers 2 --servers 1 --rounds 1 --steps 5 --design ddp --design rallypoint", trained),
    ("alone.py --batch 4 --rounds 1 --steps 12", alone),
]
COUNTED: list[tuple[str, Read]] = [("hot_path.py", walked)]


def measured(command: str, read: Read) -> dict[str, Found]:
    """Run one benchmark to its end. CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "figures.json"
        script, *options = command.split()
        subprocess.run(
            [sys.executable, str(HERE / script), *options, "--json", str(to)], check=True, stdout=subprocess.DEVNULL
        )
        return read(msgspec.json.decode(to.read_bytes()))


def together(before: dict[str, Found], more: dict[str, Found]) -> dict[str, Found]:
    """The rounds of both."""
    return {
        **before, **{name: Found([*(before[name].rounds if name in before else []), *one.rounds], one.more_is_better)
        for name, one in more.items()},
    }  # fmt: skip


def row(name: str, found: Found, before: Found | None, *, worse: bool) -> list[str]:
    """A line of the table."""
    digits = 2 if found.more_is_better else 0
    now = f"{found.median:.{digits}f} [{min(found.rounds):.{digits}f}..{max(found.rounds):.{digits}f}]"
    return [name, now, "" if before is None else f"{before.median:.{digits}f}", "worse" if worse else ""]


def main(
    keep: Annotated[bool, typer.Option("--keep", help="Keep these figures for the next ones.")] = False,
) -> None:
    """Measure the ratios and compare them with the kept ones. Status 1 if one got worse."""
    console = Console(highlight=False)
    kept = msgspec.json.decode(KEPT.read_bytes(), type=Kept) if KEPT.exists() else None
    figures: dict[str, Found] = {}
    work = [*COUNTED, *(one for _ in range(ROUNDS) for one in NOISY)]
    for number, (command, read) in enumerate(work, 1):
        console.print(f"{number} of {len(work)}: {command}", style="dim")
        figures = together(figures, measured(command, read))
    machine = machine_facts()
    before = kept.figures if kept is not None else {}
    alike = kept is not None and kept.machine == machine
    worse = {
        name for name, found in figures.items()
        if name in before and (alike or not found.more_is_better) and found.got_worse(before[name])
    }  # fmt: skip
    rows = [row(name, found, before.get(name), worse=name in worse) for name, found in figures.items()]
    console.width = max(console.width, 110)
    console.print(table("more is better; of calls less", ("figure", "now", "kept", ""), rows))
    console.print(f"{machine}  load {os.getloadavg()[0]:.1f}", style="dim")
    if kept is not None and not alike:
        console.print(f"the kept ratios are of another machine, and not judged: {kept.machine}")
    if keep:
        KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(Kept(machine, figures))) + b"\n")
    raise typer.Exit(bool(worse))


if __name__ == "__main__":
    typer.run(main)
