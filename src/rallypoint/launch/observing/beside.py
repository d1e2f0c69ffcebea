"""What observes a run from beside it: its page, a tracker, where its metrics are, its kept lines, its reports."""

from __future__ import annotations

import os
from pathlib import Path

from rallypoint.launch import environment
from rallypoint.launch.console import RunConsole
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.folder import STACKS
from rallypoint.launch.observing.companion import Companion
from rallypoint.launch.observing.page import PageProcess
from rallypoint.launch.observing.targets import Targets
from rallypoint.launch.plan import Launch
from rallypoint.launch.reporting.automatic import AutomaticReports
from rallypoint.launch.reporting.kept_lines import KeptLines
from rallypoint.launch.reporting.redaction import secrets_among, secrets_in

_TRACKER_S = 20.0  # seconds in which a tracker may write what is left


class Beside:
    """The observers of one run. None of them can slow it. Only one thread may call it."""

    def __init__(self, plan: Launch) -> None:
        folder = Path(plan.folder)
        self._targets = Targets(folder, plan.metrics)
        self._page = PageProcess(plan.folder, wanted=bool(plan.watch))
        self._trackers = [
            Companion("track", plan.folder, "--track", to, what=f"nothing goes to {to}", end_s=_TRACKER_S)
            for to in plan.track
        ]
        self._lines = KeptLines(folder, [*secrets_among(os.environ), *secrets_in(plan.worker)])
        self._reports = AutomaticReports(folder, plan.report_after)
        here = {environment.STACKS: str(folder.resolve() / STACKS)} if plan.engine == "local" else {}
        self.environment = {**self._targets.environment, **here}

    def start(self) -> None:
        """The coordinator listens, and the run has a log."""
        self._page.start()
        for tracker in self._trackers:
            tracker.start()

    def takes(self, command: Command, line: str) -> bool:
        """A process has printed a line. True if nobody else needs to see it."""
        if self._targets.takes(command.name, command.role, line):
            return True
        self._lines.add(command.name, line)
        return False

    def ended(self, name: str, how: Exit) -> None:
        """A process has ended."""
        self._targets.gone(name)
        self._reports.ended(name, how)

    def look(self, console: RunConsole) -> list[str]:
        """Look at how the run gets on. Returns what is to be said."""
        over = console.finished or console.holding or console.failure or console.members is None or console.of_sums
        self._reports.steps(-1 if over else console.steps_done)
        tracked = [line for tracker in self._trackers for line in tracker.said()]
        return [*self._page.said(), *tracked, *self._reports.said()]

    def failed(self) -> list[str]:
        """The run has failed. Returns what is to be said."""
        self._lines.close()
        self._reports.failed()
        return self._reports.said()

    def close(self) -> None:
        """The run is over. May be called more than once."""
        self._targets.close()
        self._page.close()
        for tracker in self._trackers:
            tracker.end()  # they finish at the same time
        for tracker in self._trackers:
            tracker.close()
        self._lines.close()
        self._reports.close()
