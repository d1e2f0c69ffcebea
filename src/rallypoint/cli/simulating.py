"""``rallypoint simulate``."""

from __future__ import annotations

from rallypoint.cli.app import START, app
from rallypoint.launch.options import with_options
from rallypoint.testing.scale.question import ScaleOptions


@app.command(rich_help_panel=START)
@with_options(ScaleOptions)
def simulate(options: ScaleOptions) -> None:
    """Play a job on thousands of machines that are not there: how long are its steps, and what do failures cost?

    The real coordinator decides about the members; how long a step takes is the arithmetic of [bold]plan[/bold].

    [bold]rallypoint simulate --workers 10000 --servers 1000 --standby 20 --mtbf 2111d --model 1B --compute 2s[/bold]
    """
    from rallypoint.launch.console import Screen
    from rallypoint.testing.scale.answer import answer

    answer(options, Screen(highlight=False))
