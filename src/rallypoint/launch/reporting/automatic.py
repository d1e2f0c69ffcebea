"""Reports that a run leaves by itself in its folder: once of each stall, of each crash, and of its failure."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rallypoint.errors import RallypointError
from rallypoint.launch.engines.cluster import Exit
from rallypoint.launch.reporting.bundle import place_in, write_report
from rallypoint.launch.reporting.picture import picture_of

MOST = 8  # reports of one launcher
_USUAL = 10.0  # a stall takes so many times the longest of the last steps
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
_END_S = 5.0


class AutomaticReports:
    """Makes the reports, each on a thread of its own, so that nothing waits for them.

    A stall is a time without a step: more than `after` seconds (0: there are no reports), and more than ten times the
    longest of the steps before. Only one thread may call it.
    """

    def __init__(self, folder: Path, after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._after, self._clock = folder, after, clock
        self._made = 0
        self._steps, self._stepped = -1, 0.0
        self._longest = 0.0
        self._told = False  # this stall has its report
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def steps(self, done: int) -> None:
        """So many steps are done now (-1: the job has not begun, or is over). Makes a report of a stall."""
        now = self._clock()
        if done != self._steps:
            if self._steps >= 0 and done >= 0 and not self._told:
                self._longest = max(0.9 * self._longest, now - self._stepped)
            self._steps, self._stepped, self._told = done, now, False
        if done < 0 or self._told or not self._after or now - self._stepped <= max(self._after, _USUAL * self._longest):
            return
        self._told = True
        self._begin("stall", f"no step for {now - self._stepped:.0f} s", ask=True)

    def ended(self, name: str, how: Exit) -> None:
        """That process has ended. Makes a report if it has crashed."""
        if how.signal in _CRASHES:
            self._begin("crash", f"{name} {how}", ask=False)

    def failed(self) -> None:
        """The run has failed. Makes a report, and waits for it for a moment."""
        self._begin("failure", "", ask=False)
        self.close()

    def said(self) -> list[str]:
        """The sentences about reports that are complete since the last call."""
        lines = list[str]()
        while not self._said.empty():
            lines.append(self._said.get())
        return lines

    def close(self) -> None:
        """Wait for a report that is being made."""
        if self._thread is not None:
            self._thread.join(_END_S)

    def _begin(self, kind: str, why: str, *, ask: bool) -> None:
        if not self._after or self._made >= MOST or (self._thread is not None and self._thread.is_alive()):
            return
        self._made += 1
        self._thread = threading.Thread(target=self._make, args=(kind, why, ask), name="report", daemon=True)
        self._thread.start()

    def _make(self, kind: str, why: str, ask: bool) -> None:
        try:
            report = write_report(picture_of(self._folder, ask=ask), place_in(self._folder, kind))
        except (RallypointError, OSError) as error:
            self._said.put(f"no report could be made: {error}")
            return
        except Exception as error:  # of a torn file that no version has written: the run goes on
            self._said.put(f"no report could be made: {type(error).__name__}: {error}")
            return
        about = f"{why}. {report.sentence} " if why else ""
        self._said.put(f"{about}For others, a report: {report.path}")
