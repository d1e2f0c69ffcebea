"""`rallypoint.join`: joins the job of the launcher that started this process, or starts an embedded one."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType

import torch

from rallypoint.coordinator.service import JoinInfo
from rallypoint.errors import JobAborted, RallypointError, UsageError, how_it_ended
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.console import RunConsole
from rallypoint.launch.embedded import EmbeddedJob, import_job, replay_job
from rallypoint.launch.engines.discovery import enter, place_of
from rallypoint.launch.lifeline import hold_lifeline
from rallypoint.launch.observing.health import answering, health_at, of_process
from rallypoint.launch.observing.stacks import keep_stacks
from rallypoint.observe.lenient import flush_output, say
from rallypoint.observe.lines import printable_lines
from rallypoint.observe.trace import LOAD, Tracer
from rallypoint.parallel import RankGroup
from rallypoint.watch.metrics import of_worker
from rallypoint.worker.loop.session import Job
from rallypoint.worker.ranks.run import RankJob
from rallypoint.worker.ranks.watch import OTHER_RANK_S

IN_A_CHILD = (
    "this process is a child that multiprocessing has started (spawn or forkserver), and it imports the script anew: "
    "the script would join the job a second time, as its parent. Put all that the script does below "
    'if __name__ == "__main__":, and leave only imports, classes and functions above it'
)
JOINED = (
    "this process has joined the job of its launcher already (rp.join or rp.wrap), and a run is one job: for another "
    "stage start another run with a script of its own, which loads the model that the first one has saved; or use the "
    "job that rp.join has returned. Started alone, with python, a script may have several jobs, one after the other"
)
_joined: set[tuple[str, int]] = set()  # the coordinators that this process has joined, with its process id
_PHASES = ("wait", LOAD, "backward", "install", "evaluate")  # of a worker, for its metrics


def join() -> Job | RankJob:
    """Join the job of the launcher that started this process. Without one, get an embedded cluster in this process.

    Under ``torchrun`` and ``mpirun`` the processes make a cluster of their own: see `launch.engines.discovery`.

    The launcher gives the address in RALLYPOINT_COORDINATOR (``host:port``), with RALLYPOINT_ID, RALLYPOINT_TOKEN (or
    RALLYPOINT_TOKEN_FILE), RALLYPOINT_TLS (with TLS) and (where there are aggregators) RALLYPOINT_NEAR.
    The job's settings never come from the environment.

    Raises UsageError in a process that has joined its launcher's job before, and in a child process that is still
    importing the script (multiprocessing's spawn and forkserver).
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.excepthook = _one_sentence
        raise UsageError(IN_A_CHILD)
    coordinator = os.environ.get(environment.COORDINATOR)
    if os.environ.get(environment.REPLAY):
        sys.excepthook = _one_sentence
        return _closed_at_exit(replay_job(os.environ[environment.REPLAY]))
    if os.environ.get(environment.IMPORT):
        sys.excepthook = _one_sentence
        return _closed_at_exit(import_job(os.environ[environment.IMPORT]))
    if not coordinator:
        if (place := place_of(os.environ)) is not None:
            enter(place)  # this process becomes the supervisor of one that runs the script with an address
        return _closed_at_exit(EmbeddedJob(console=RunConsole(), about=JoinInfo(threads=torch.get_num_threads())))
    if (coordinator, os.getpid()) in _joined:
        raise UsageError(JOINED)
    by_hand = not hold_lifeline()
    keep_stacks("worker")
    sys.excepthook = _one_sentence
    group = _group()
    if group is not None:
        sys.excepthook = _of_the_leader if group.leads else _of_another_rank
        atexit.register(_exit_failed)  # it runs after `_closed_at_exit`'s
    if group is not None and not group.leads:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader is told too, and tells this rank
        _joined.add((coordinator, os.getpid()))
        return RankJob(group, id=os.environ.get(environment.ID) or f"worker-{os.getppid()}")
    access = access_of(role="worker")
    with contextlib.ExitStack() as until_exit:
        health = until_exit.enter_context(answering(health_at()))
        name = environment.own_name("worker")
        tracer = Tracer(name)
        job = (_JoinedByHand if by_hand else Job)(
            id=name, coordinator=coordinator, token=access.token, transport=access.transport,
            near=os.environ.get(environment.NEAR, ""), group=group, tracer=tracer,
        )  # fmt: skip
        if by_hand:
            say(f"{name} has joined the job at {coordinator}; it waits for the other members")
        health.joined()
        _joined.add((coordinator, os.getpid()))
        if health.address:
            tracer.count(*_PHASES)
            read = lambda: of_worker(job.step, tracer)  # noqa: E731
            health.metrics.read = of_process("worker", name, health.ready, access.transport, read)
        atexit.register(until_exit.pop_all().close)
    if threading.current_thread() is threading.main_thread():
        status = environment.left_status()
        signal.signal(signal.SIGTERM, lambda number, frame: job.leave(status))
        if status:
            atexit.register(_exit_as_left, job, status)  # it runs after `_closed_at_exit`'s
    return _closed_at_exit(job)


def _group() -> RankGroup | None:
    """Return the group of ranks that this process is one of; None if its worker is one process."""
    if int(os.environ.get(environment.RANKS) or 1) < 2:
        return None
    from rallypoint.parallel import Board, group_of_this_process, start_pulse

    if isinstance(sys.stdout, io.TextIOWrapper):  # whole lines: all ranks write to one pipe
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = Board(int(os.environ[environment.RANKS_BOARD]), rank, size)
    start_pulse(board)
    board.at("meeting the other ranks in rp.join()")
    group = group_of_this_process(int(os.environ[environment.RANKS_STORE]), board)
    board.at("" if group.leads else "in the script, before job.train")
    return group


def _exit_as_left(job: Job, status: int) -> None:
    """End this process with `status` if its worker was told to go before the job was over."""
    if job.left:
        flush_output()
        os._exit(status)


def _closed_at_exit(job: Job) -> Job:
    """Close the job when the script ends, if it has not been closed by then (it was joined without ``with``). A thread
    of a link that is inside of torch when the interpreter ends would abort the process (before CPython 3.14)."""
    atexit.register(job.close)
    return job


class _JoinedByHand(Job):
    """A worker that no launcher has started: it says itself how it gets on."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if error is None:
            say(f"{self.id}: the job is over")
        elif isinstance(error, JobAborted):
            say(f"{self.id}: {how_it_ended(str(error))}")
        elif isinstance(error, SystemExit) and not error.code and self._leaving:
            say(f"{self.id} has left the job")


def _of_the_leader(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as `_one_sentence` does, but for what follows from the end of another rank."""
    from rallypoint.parallel import is_of_another_rank

    _failed.set()
    if not is_of_another_rank(error):
        _one_sentence(kind, error, trace)


_failed = threading.Event()  # the script has ended with an error on this rank


def _exit_failed() -> None:
    """End this process, if it is one of several ranks and its script has failed: see `_of_another_rank`."""
    if _failed.is_set():
        flush_output()
        os._exit(1)


def _of_another_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as `_of_the_leader` does, but only if the leader has not the same: it ends this process then. Ends
    the process here: with a collective under way the interpreter's end may abort it, as if it had been killed."""
    time.sleep(OTHER_RANK_S)
    _of_the_leader(kind, error, trace)
    flush_output()
    os._exit(1)


def _one_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one of our own errors as one sentence, others with their traceback. The launcher reports aborts and
    interrupts."""
    if isinstance(error, JobAborted | KeyboardInterrupt):
        return
    if isinstance(error, RallypointError):
        say(f"error: {printable_lines(str(error))}", error=True)
        return
    traceback.print_exception(kind, error, trace)
