"""Asks the cost model, and says what it answers."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console

from rallypoint.core.cost.candidates import candidates_for
from rallypoint.core.cost.pipeline import step_cost
from rallypoint.core.cost.site import Servers, Site, Workers
from rallypoint.core.cost.verdict import verdict_of
from rallypoint.launch.costing.chart import check_chart, draw
from rallypoint.launch.costing.measured import MeasuredRun, measured_run
from rallypoint.launch.costing.question import CostOptions, Question, question_of
from rallypoint.launch.costing.shown import as_json, compared, shown, told


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
    if options.json:
        sys.stdout.write(as_json(question, candidates, verdict).decode() + "\n")
    else:
        console.print(told(question, candidates, verdict, options.rows))
    if options.plot is not None:
        draw(shown(candidates, verdict, options.rows), verdict.why.partition(":")[0], options.plot)


def _own_seconds(question: Question, run: MeasuredRun) -> float:
    """What the model says of the run's own layout."""
    machines = question.machines
    workers = Workers(run.workers, machines.rate, 1, 1.0, question.replicas)
    site = Site(
        workers=(workers,), servers=(Servers(run.servers, machines.server_rate or machines.rate),),
        replication=min(run.replication, run.servers), uneven=machines.uneven, speeds=machines.speeds,
    )  # fmt: skip
    return step_cost(msgspec.structs.replace(question.workload), site).seconds
