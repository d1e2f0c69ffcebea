"""``rallypoint plan``: what a job would take on machines that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import START, app
from rallypoint.launch.commands.costing import CostOptions
from rallypoint.launch.options import with_options


@app.command(rich_help_panel=START)
@with_options(CostOptions)
def plan(
    options: CostOptions,
    run: Annotated[Path | None, typer.Argument(
        help="The folder of a run: its own model, settings and times are taken.", show_default=False,
    )] = None,
) -> None:  # fmt: skip
    """Say what a job would cost on some machines: how long a step takes, with how many servers, and would they pay?

    For each layout: seconds a step and the part of it in which GPUs wait, memory, traffic; with --mtbf also what
    failures leave of the time and how often to take snapshots. The last line recommends one, DDP or FSDP included.

    64 GPUs on 8 hosts: [bold]rallypoint plan --model 7B --gpus 8x8 --link 100Gbit --compute 1.7s[/bold]

    Eight workers on slow links, with failures: [bold]rallypoint plan --model 350M --gpus 8 --link 10Gbit
    --compute 600ms --mtbf 30d[/bold]

    What would a finished run, or one that goes on, gain from more servers or bf16? [bold]rallypoint plan
    runs/20260131-235959 --link 10Gbit --codec bf16[/bold]
    """
    from rallypoint.launch.commands.costing import answer
    from rallypoint.launch.console import Screen

    answer(options, run, Screen(highlight=False))
