"""`rallypoint.join`: into the job that a launcher started this process for, or into one of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from types import TracebackType

from rallypoint.errors import JobAborted, RallypointError
from rallypoint.launch import environment
from rallypoint.launch.console import RunConsole
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.worker.loop.session import Job


def join() -> Job:
    """Join the job of the launcher that started this process; alone, get an embedded cluster in this process.

    A launcher says where in RALLYPOINT_COORDINATOR (``host:port``), RALLYPOINT_ID and RALLYPOINT_TOKEN. What the job
    *does* never comes from the environment.
    """
    coordinator = os.environ.get(environment.COORDINATOR)
    if not coordinator:
        return EmbeddedJob(console=RunConsole())
    hold_lifeline()
    sys.excepthook = _one_sentence
    job = Job(
        id=os.environ.get(environment.ID) or f"worker-{os.getpid()}", coordinator=coordinator,
        token=os.environ.get(environment.TOKEN, ""),
    )  # fmt: skip
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: job.leave())
    return job


def _one_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Our own errors are sentences, the launcher says why a job was aborted or interrupted; the rest keeps its
    traceback."""
    if isinstance(error, JobAborted | KeyboardInterrupt):
        return
    if isinstance(error, RallypointError):
        print(f"error: {error}", file=sys.stderr)
        return
    traceback.print_exception(kind, error, trace)
