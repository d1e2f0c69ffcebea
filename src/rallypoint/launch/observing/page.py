"""The page of a run that is under way: ``rallypoint watch`` in a process that the launcher starts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import queue
import subprocess
import sys
import threading

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.engines.lines import Lines

_NEEDS = ("starlette", "uvicorn")
_END_S = 3.0  # seconds in which it may tell browsers how the run has ended
_CHUNK = 64 << 10


class PageProcess:
    """The process that serves the page of the run in the folder `run` (`wanted`: False: nothing does).

    It makes the page from the run's log alone, so it cannot slow a step, and lives on when the coordinator dies. It
    ends with the launcher, however that ends. Only one thread may call it.
    """

    def __init__(self, run: str, *, wanted: bool) -> None:
        self._run, self._wanted = run, wanted
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lifeline = -1  # the end of it that breaks when this process ends

    def start(self) -> None:
        """Start it; the run's log must exist. Does nothing when it was started before: a page that failed stays away.
        """
        if not self._wanted:
            return
        self._wanted = False
        argv = [sys.executable, "-m", "rallypoint.cli", "watch", self._run]
        held, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(held,),
                env={**os.environ, environment.LIFELINE: str(held), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the launcher, which ends it at last
            )  # fmt: skip
        except OSError as error:
            self._lines.put(f"the page cannot be served: {error.strerror}")
            return
        finally:
            os.close(held)
        of_it = (self._process,)
        self._reader = threading.Thread(target=self._read, args=of_it, name="output of the page", daemon=True)
        self._reader.start()

    def said(self) -> list[str]:
        """Return the lines that it has printed meanwhile: where the page is, or why there is none."""
        lines = list[str]()
        while not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def close(self) -> None:
        """End it, after it has told browsers what it knows. May be called more than once."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reader is not None:
            self._reader.join()
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._process, self._reader, self._lifeline = None, None, -1

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert isinstance(process.stdout, io.BufferedReader)
        lines = Lines()
        with process.stdout as stream, contextlib.suppress(OSError):
            while data := stream.read1(_CHUNK):
                for line in lines.feed(data):
                    self._lines.put(line)
            for line in lines.rest():
                self._lines.put(line)


def check_page() -> None:
    """UsageError if what serves the page is not installed."""
    for name in _NEEDS:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"the page needs {name}: pip install 'rallypoint[watch]'")
