"""What observes a run from beside it: its page and trackers (processes that read its log), reports, its trace."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import queue
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.coordinator.fingerprints import KeptFingerprints
from rallypoint.coordinator.journal import kept_state
from rallypoint.core.cluster.terms import copies_of
from rallypoint.core.job import JobRecord
from rallypoint.errors import DataError, RallypointError, UsageError, to_install
from rallypoint.launch import environment
from rallypoint.launch.console import RunConsole
from rallypoint.launch.engines.cluster import Command, Exit
from rallypoint.launch.engines.local import LocalCluster, LocalProcess
from rallypoint.launch.folder import STACKS
from rallypoint.launch.observing.health import Targets
from rallypoint.launch.observing.redaction import KeptLines, secrets_among, secrets_in
from rallypoint.launch.observing.reports import AutomaticReports
from rallypoint.launch.plan import Launch, read_plan
from rallypoint.observe.lines import Allowance
from rallypoint.observe.trace import merge

_NEWEST = 8  # of so many versions one is looked for of which all shards have told their digests


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts of the run in `folder` for its page. A run by hand has no plan, and a plan may be one that this version
    cannot read: then there is only the name."""
    try:
        plan = read_plan(folder)
    except (RallypointError, OSError):
        return {"name": folder.resolve().name, "settings": {}}
    return {"name": folder.resolve().name, "settings": _settings(plan)}


def resolved_of(folder: Path) -> dict[str, str]:
    """All settings of the job in `folder`, by dotted name, as its members have agreed on them; none before that, and
    of a journal that cannot be read. Before them, in a job with `fingerprints`, the weights' hash so far."""
    try:
        state = kept_state(folder)
    except RallypointError:
        return {}
    if state is None or state.record is None:
        return {}
    settings = dict(_flat(state.record.config))
    own = settings.get("sync.own")  # the script's own optimizer: the one in the settings steps nothing
    shown = {name: one for name, one in settings.items() if not (own and name.startswith("optimizer."))}
    return _weights(folder, state.record) | shown


def _weights(folder: Path, record: JobRecord) -> dict[str, str]:
    """The hash of the newest version of which the digests of all shards are kept. Two runs with the same layout and the
    same weights have the same hash."""
    with contextlib.suppress(DataError), KeptFingerprints(folder) as kept:
        for version in reversed(kept.versions()[-_NEWEST:]):
            digests = kept.version(version)
            if len(digests) == len(record.layout.shards):
                whole = hashlib.sha256(b"".join(digests[shard] for shard in sorted(digests))).hexdigest()
                return {f"hash of the weights after {record.steps_at(version)} steps": whole}
    return {}


def _settings(plan: Launch) -> dict[str, str]:
    fewest, most = plan.workers
    said = {
        "command": shlex.join(plan.worker), "engine": plan.engine,
        "workers": str(most) if fewest == most else f"{most} (at least {fewest})", "servers": str(plan.servers),
        "replication": str(copies_of(plan.replication, plan.servers)),
        "snapshots": plan.snapshots or "none",
    }  # fmt: skip
    return {**said, **dict(_flat(plan.overrides))}


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)


_END_S = 3.0  # seconds in which it may tell others how the run has ended
_TRACKER_S = 20.0  # seconds in which a tracker may write what is left
_NEEDS = ("starlette", "uvicorn")
_POLL_S = 0.02
_MOST_WAITING, _LONGEST = 1000, 2000  # lines that were not asked for yet; characters of each
_BURST, _EVERY_S = 100, 5.0  # lines that are shown at once; seconds for each after that


class Companion:
    """``rallypoint COMMAND RUN OPTIONS`` in a process (`wanted`: False: in none). `what`: what fails without it.

    It reads the run's log alone, so it cannot slow a step, and lives on when the coordinator dies. It ends with the
    launcher, however that ends. Only one thread may call it.
    """

    def __init__(
        self, command: str, run: str, *options: str, what: str, wanted: bool = True, end_s: float = _END_S
    ) -> None:
        """`end_s`: seconds in which it may end by itself, when the run is over."""
        self._arguments, self._wanted, self._what, self._end_s = (command, run, *options), wanted, what, end_s
        self._cluster: LocalCluster | None = None
        self._process: LocalProcess | None = None
        self._lines: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        self._shown = Allowance(_BURST, _EVERY_S, time.monotonic())
        self._left_out = 0  # lines for which there was no room; the reader's thread counts them

    def start(self) -> None:
        """Start it; the run's log must exist. Does nothing when it was started before: one that failed stays away."""
        if not self._wanted:
            return
        self._wanted = False
        argv = (sys.executable, "-P", "-m", "rallypoint.cli", *self._arguments)
        name = f"rallypoint {self._arguments[0]}"
        command = Command(name=name, role="observer", argv=argv, env={"OMP_NUM_THREADS": "1"})
        try:
            self._cluster = LocalCluster()
            self._process = self._cluster.start(command, self._keep)
        except (UsageError, OSError) as error:
            self._keep(f"{self._what}: {getattr(error, 'strerror', None) or error}")

    def said(self) -> list[str]:
        """Return the lines that it has printed meanwhile: where the page is, say, or why there is none.

        Not more of them than a person reads: of a flood it returns the first lines, then one now and then, and how many
        were left out.
        """
        now, lines = time.monotonic(), list[str]()
        for _ in range(self._lines.qsize()):
            line = self._lines.get()
            if self._shown.take(now):
                lines.append(line)
        if lines and (left_out := self._left_out + self._shown.omitted):
            self._left_out = self._shown.omitted = 0
            lines.append(f"({left_out} more lines of `rallypoint {self._arguments[0]}` were left out)")
        return lines

    def end(self) -> None:
        """Tell it to end, and do not wait: `close` does."""
        if self._process is not None:
            self._process.process.terminate()  # it alone: what it has started may write for it

    def close(self) -> None:
        """End it, after it has done what is left to do. May be called more than once."""
        self.end()
        until = time.monotonic() + self._end_s
        while self._process is not None and self._process.exit() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        if self._cluster is not None:
            self._cluster.end()

    def _keep(self, line: str) -> None:
        """Keep a line for `said`; who prints is never held up."""
        try:
            self._lines.put_nowait(line[:_LONGEST])
        except queue.Full:
            self._left_out += 1


def missing() -> str:
    """Return which package that serves the page is not installed; "": none."""
    return next((name for name in _NEEDS if importlib.util.find_spec(name) is None), "")


def check_page() -> None:
    """UsageError if what serves the page is not installed."""
    if name := missing():
        raise UsageError(f"the page needs {name}: {to_install('watch')}")


def merge_trace(plan: Launch, console: RunConsole) -> None:
    """Write what the processes have recorded to the file that the plan names, and say where it is."""
    parts = list(Path(plan.folder).glob("trace-*.json"))
    spans = merge(parts, Path(plan.trace))
    for part in parts:
        part.unlink()
    about = f"trace of {spans} spans in {plan.trace}: open it at https://ui.perfetto.dev"
    console.console.print(about, markup=False, soft_wrap=True)


class Observers:
    """The observers of one run. None of them can slow it. Only one thread may call it."""

    def __init__(self, plan: Launch) -> None:
        folder = Path(plan.folder)
        self._targets = Targets(folder, plan.metrics)
        self._page = Companion("watch", plan.folder, what="the page cannot be served", wanted=bool(plan.watch))
        self._trackers = [
            Companion("watch", plan.folder, "--track", to, what=f"nothing goes to {to}", end_s=_TRACKER_S)
            for to in plan.track
        ]
        self._lines = KeptLines(folder, [*secrets_among(os.environ), *secrets_in(plan.worker)])
        self._reports = AutomaticReports(folder)
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
        self._targets.gone(name)
        self._reports.ended(name, how)

    def look(self, console: RunConsole) -> list[str]:
        """Look at how the run gets on. Returns what is to be said."""
        state = console.state
        over = console.finished or console.holding or console.failure or state.view is None or state.of_sums
        self._reports.steps(-1 if over else state.step)
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
