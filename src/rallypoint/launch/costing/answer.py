"""Asks the cost model, and says what it answers."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console

from rallypoint.core.plan.candidates import Candidate, as_paced, candidates_for
from rallypoint.core.plan.pipeline import step_cost
from rallypoint.core.plan.site import PACED, Servers, Site, Workers
from rallypoint.core.plan.verdict import Verdict, called, verdict_of
from rallypoint.launch.costing.measured import MeasuredRun, measured_run
from rallypoint.launch.costing.question import CostOptions, Question, question_of
from rallypoint.launch.costing.shown import as_json, check_chart, compared, draw, shown, told

_LEAST_SHARD, _WORTH = 16 << 10, 1.05  # smaller ones cost more time than they save; less is not worth a note


def answer(options: CostOptions, folder: Path | None, console: Console) -> None:
    """Print what a job would cost, and which layout to use. Errors are those of `question_of` and `measured_run`."""
    if options.plot is not None:
        check_chart(options.plot)
    run = None if folder is None else measured_run(folder)
    question = question_of(options, run)
    if run is not None and not options.gpus:
        question.notes.append(compared(run, _own_seconds(question, run)))
    candidates = candidates_for(question.workload, question.machines, question.encodings, question.replicas)
    verdict = verdict_of(candidates)
    question.notes.extend(_quicker(question, verdict))
    if options.json:
        sys.stdout.write(as_json(question, candidates, verdict).decode() + "\n")
    else:
        console.print(told(question, candidates, verdict))
    if options.plot is not None:
        draw(shown(candidates, verdict), verdict.why.partition(":")[0], options.plot)


def _quicker(question: Question, verdict: Verdict) -> list[str]:
    """A note for each setting that would make the best layout with servers quicker: shards of a quarter of the size
    (the last one comes down alone), and pacing."""
    ours = verdict.best if verdict.ours else verdict.other
    if ours is None:
        return []
    workload, machines = question.workload, question.machines
    size, pace = workload.shard_bytes // 4, round(PACED * machines.rate * 8 / 1e6)
    tried = [
        (f"shards of {size >> 10} KiB (shard_bytes={size})", size >= _LEAST_SHARD,
         msgspec.structs.replace(workload, shard_bytes=size), machines),
        (f"pace_mbit={pace}", not machines.paced, workload, msgspec.structs.replace(machines, paced=True)),
    ]  # fmt: skip
    notes = []
    for words, possible, other, there in tried:
        there = msgspec.structs.replace(there, servers=(ours.servers,))
        again = candidates_for(other, there, question.encodings, question.replicas)
        same = [one for one in again if _key(one) == _key(ours)]
        if possible and same and same[0].step.seconds * _WORTH < ours.step.seconds:
            seconds = f"{same[0].step.seconds:.3g} s instead of {ours.step.seconds:.3g}"
            notes.append(f"with {words} {called(ours)} would take {seconds}")
    return notes


def _key(one: Candidate) -> tuple[str, int, str]:
    return one.name, one.replication, one.codec


def _own_seconds(question: Question, run: MeasuredRun) -> float:
    """What the model says of the run's own layout."""
    machines = question.machines
    workers = Workers(run.workers, machines.rate, replicas=question.replicas)
    site = Site(
        workers=(workers,), servers=(Servers(run.servers, machines.rate),),
        replication=min(run.replication, run.servers), speeds=machines.speeds,
    )  # fmt: skip
    return step_cost(question.workload, as_paced(site, question.workload, machines)).seconds
