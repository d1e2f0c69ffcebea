"""What a person sees of a job of sums: how many there are, how fast they come, how long ago the last one was."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from rallypoint.launch.showing.phrases import count_of, size_of
from rallypoint.net.messages import Planned
from rallypoint.net.summing.messages import Summed

_PLAIN_EVERY_S = 5.0
_RATE_OVER_S = 10.0


class SumsShown:
    """The live line in a terminal, or a plain line now and then in a file; and the last line."""

    def __init__(self, console: Console, plan: Planned, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._start = self._at = self._printed = clock()
        self._now = Summed()
        self._recent = deque([(self._start, 0)])
        self._closed = False
        console.print(
            f"the script has a loop of its own: {count_of(len(plan.servers), 'server')} add up what "
            f"{count_of(len(plan.workers), 'worker')} ask for, until the scripts end",
            soft_wrap=not console.is_terminal,
        )  # fmt: skip
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(_Line(self.line), console=console, transient=True)
            self._progress.add_task("sums", total=None)
            self._progress.start()

    def take(self, message: Summed) -> None:
        """So many sums are here now."""
        if message.sums == self._now.sums:
            return  # only a sign of life
        self._now, self._at = message, self._clock()
        self._recent.append((self._at, message.nbytes))
        while len(self._recent) > 2 and self._recent[1][0] < self._at - _RATE_OVER_S:
            self._recent.popleft()
        if self._progress is None and self._at - self._printed >= _PLAIN_EVERY_S:
            self._printed = self._at
            self._console.print(self.line())

    def line(self) -> str:
        """Return ``1,234 sums, 56.7 MB/s, last 0.2 s ago``."""
        if not self._now.sums:
            return "no sum so far"
        (began, before), (at, nbytes) = self._recent[0], self._recent[-1]
        rate = size_of(int((nbytes - before) / max(at - began, 1e-9)))
        ago = self._clock() - self._at
        return f"{_sums(self._now.sums)}, {rate}/s, last {ago:.1f} s ago"

    def close(self, *, done: bool) -> None:
        """Remove the live line; `done`: the job has ended well, so say what it did."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if done and not self._closed:
            self._closed = True
            seconds = self._clock() - self._start
            self._console.print(
                f"[bold]done[/bold]: the scripts have ended, {_sums(self._now.sums)} of {size_of(self._now.nbytes)} "
                f"for each worker in {seconds:.1f} s", soft_wrap=not self._console.is_terminal,
            )  # fmt: skip


class _Line(ProgressColumn):
    """One text, made anew each time."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self._line = line

    def render(self, task: Task) -> Text:
        return Text(self._line())


def _sums(number: int) -> str:
    return f"{number:,} sum{'s' * (number != 1)}"
