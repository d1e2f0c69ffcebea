"""Do audits find a worker that computes wrong, how soon, without false alarms, and what do they cost?

    python benchmarks/audits.py --json benchmarks/audits.json

Planted: `faults` errors of each of four kinds (`tests/support/wrong.py`), each in a job of its own with three
workers, on a random one of them, from a random step on. Found is an error whose worker, and no other, has lost. The
steps that this took should be near 1/`share` in the mean; the job ends after 10/`share`.

Honest: a job with ``audit=1`` long enough for `honest` contributions (of a replica to a shard), each sent by two
workers and compared. A false alarm is any mismatch.

Cost: jobs with and without audits of `cost_share` of the steps in turn; the figure of a run is its mean step. An
audited step computes and sends twice as much, so `cost_share` more is their share of compute. (A share of 0.01 is what
one uses, and less than runs differ by.)
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import audits_member.py by name

from audits_member import train
from rallypoint.core.audits import Audits
from rallypoint.core.cluster.terms import Terms
from rallypoint.testing.processes import ClusterFailed, ProcessCluster

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.wrong import KINDS

_LOST = re.compile(r"audit: step (\d+), .* agree, and (\S+) on \S+ has computed something else")


def run(workers: int, folder: str, *task: Any) -> tuple[list[float], str]:
    """Train with so many workers and two servers; return what they measured, and the sentence of a job that failed."""
    terms = Terms(workers_start=workers, workers_max=workers, servers=2, heartbeat=60.0)
    with ProcessCluster(workers, 2, terms=terms, folder=folder, timeout=3600.0) as cluster:
        try:
            return cluster.run(train, *task), ""
        except ClusterFailed as failed:
            return [], str(failed)


def settings_of(steps: int, audit: float, seed: int, **more: Any) -> dict[str, Any]:
    """The settings of a job of eight replicas."""
    return {
        "replicas": 8, "batch": 8, "steps": steps, "seed": seed, "network.shard_bytes": 512, "audit.share": audit,
        **more
    }


def planted(kind: str, seed: int, share: float) -> dict[str, Any]:
    """Plant one error. The job ends with the verdict, or after 10/share steps with the error."""
    rng = random.Random(seed)
    worker, first = f"worker{rng.randrange(3)}", rng.randrange(10)
    settings = settings_of(first + round(10 / share), share, seed, **{"audit.action": "stop"})
    with tempfile.TemporaryDirectory() as folder:
        _, failed = run(3, folder, {worker: kind}, first, 16, settings)
    lost = _LOST.search(failed)
    audits = Audits(seed, share, 8)
    due = next((step for step in range(first, first + round(10 / share)) if audits.audited(step)), None)
    return {
        "kind": kind, "worker": worker, "first": first, "due": due, "blamed": lost[2] if lost else None,
        "late": int(lost[1]) - first + 1 if lost else None, "found": lost is not None and lost[2] == worker,
    }  # fmt: skip


def honest(contributions: int) -> tuple[int, int]:
    """Audit everything of honest workers: how many contributions were compared, and how many alarms there were."""
    shards = -(-(32 * 16 + 16 + 16 * 8 + 8) // 128)
    steps = -(-contributions // (8 * shards))
    with tempfile.TemporaryDirectory() as folder:
        _, failed = run(3, folder, {}, 0, 16, settings_of(steps, 1.0, 1))
        if failed:
            raise SystemExit(failed)
        log = (Path(folder) / "events.jsonl").read_text()
    return steps * 8 * shards, log.count('"AuditFound"')


def cost(rounds: int, steps: int, hidden: int, share: float) -> list[tuple[float, float]]:
    """The mean step without and with audits, in each round."""
    pairs = []
    for number in range(rounds):
        both = {}
        for audit in (0.0, share) if number % 2 else (share, 0.0):
            with tempfile.TemporaryDirectory() as folder:
                measured, failed = run(
                    2, folder, {}, 0, hidden, settings_of(steps, audit, number, **{"network.shard_bytes": 1 << 20})
                )
            if failed:
                raise SystemExit(failed)
            both[audit] = statistics.mean(measured)
        pairs.append((both[0.0], both[share]))
    return pairs


def main(
    faults: Annotated[int, typer.Option(help="Errors of each kind.")] = 20,
    share: Annotated[float, typer.Option(help="audit.share= where errors are planted.")] = 0.1,
    contributions: Annotated[int, typer.Option("--honest", help="Honest contributions to compare.")] = 100_000,
    rounds: Annotated[int, typer.Option(help="Pairs of runs, to measure the cost.")] = 6,
    cost_share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="audit.share= in every other run of those.")
    ] = 0.2,
    steps: Annotated[int, typer.Option(help="Steps of each of those.")] = 600,
    hidden: Annotated[int, typer.Option(help="Width of the model of those.")] = 4096,
    to: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Plant errors, look for false alarms, measure the cost; print a table of each."""
    found = [planted(kind, 1000 * KINDS.index(kind) + n, share) for kind in KINDS for n in range(faults)]
    table = Table("error", "planted", "found", "another blamed", f"steps until found (1/p = {1 / share:.0f})", "most")
    for kind in KINDS if faults else ():
        own = [fault for fault in found if fault["kind"] == kind]
        late = [fault["late"] for fault in own if fault["found"]]
        blamed = sum(fault["blamed"] not in (None, fault["worker"]) for fault in own)
        mean = f"{statistics.mean(late):.1f}" if late else "-"
        table.add_row(kind, str(len(own)), str(len(late)), str(blamed), mean, str(max(late, default=0)))
    compared, alarms = honest(contributions) if contributions else (0, 0)
    pairs = cost(rounds, steps, hidden, cost_share) if rounds else []
    ratios = [on / off for off, on in pairs]
    console = Console()
    console.print(table)
    console.print(f"{compared} honest contributions, {alarms} false alarms")
    if pairs:
        off, on = (statistics.median(pair[side] for pair in pairs) * 1e3 for side in (0, 1))
        ratio = statistics.median(ratios)
        console.print(
            f"a step: {off:.2f} ms without, {on:.2f} ms with audit={cost_share:g}; ratio {ratio:.4f} "
            f"({min(ratios):.4f} to {max(ratios):.4f}), its share of compute {1 + cost_share:g}"
        )
    if to is not None:
        to.write_text(json.dumps({"faults": found, "compared": compared, "alarms": alarms, "steps_s": pairs}, indent=1))
    missed = [fault for fault in found if not fault["found"]]
    raise typer.Exit(1 if missed or alarms else 0)


if __name__ == "__main__":
    typer.run(main)
