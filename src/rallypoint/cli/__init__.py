"""The command line: ``rallypoint run``, ``rallypoint train``, and the roles that they start."""

from __future__ import annotations

import inspect
import logging
import os
import sys

from typer.models import CommandInfo

# They register their commands:
from rallypoint.cli import by_hand, kubernetes, running, slurm, start, watching  # noqa: F401
from rallypoint.cli.app import FIRST, GONE, PANELS, app
from rallypoint.errors import RallypointError, UsageError
from rallypoint.observe.lenient import encode_all, open_standard_streams, say
from rallypoint.observe.lines import printable_lines


def main() -> None:
    """The entry point: errors of ours are one sentence."""
    open_standard_streams()
    encode_all()
    logging.basicConfig(level=os.environ.get("RALLYPOINT_LOG", "WARNING"), format="%(message)s")
    app.registered_commands.sort(key=_place)
    for command in [*app.registered_commands, *kubernetes.k8s.registered_commands]:
        text = inspect.getdoc(command.callback) or ""  # one line for each paragraph: a terminal's width is not ours
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    try:
        try:
            os.getcwd()  # what the user names is meant relative to it
        except FileNotFoundError:
            raise UsageError("the current folder has been deleted: change to another one (cd)") from None
        for word in sys.argv[1:2]:
            if word in GONE:  # (`given.refuse_option` does it for options)
                raise UsageError(f"there is no command {word}: {GONE[word]}")
        app(prog_name="rallypoint")
    except RallypointError as error:
        say(f"error: {printable_lines(str(error))}", error=True)  # names in it come from the network
        sys.exit(1)


def _place(command: CommandInfo) -> tuple[int, int]:
    """Where a command stands in the help: in its panel's part, the first ones of all first."""
    name = command.callback.__name__ if command.callback is not None else ""
    return PANELS.index(command.rich_help_panel), FIRST.index(name) if name in FIRST else len(FIRST)
