"""The contract of `rallypoint.launch.engines.cluster.Cluster` (Ray, Slurm, ssh, ...) as tests to inherit.

Test a cluster of your own like this (pytest collects names that begin with ``Test``)::

    class TestMyCluster(ClusterContract):
        @pytest.fixture
        def cluster(self) -> Cluster:
            return MyCluster()

The processes run ``sys.executable``, so the machines of the cluster need this Python under that path.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.engines.cluster import Cluster, Command, Exit, Handle

PATIENCE_S = 60.0  # a test fails after so long; no test should come near it
_POLL_S = 0.01
_SLEEP = "import time; print('here', flush=True); time.sleep(1000)"
# A worker that has started a child, which holds its output open, like a data loader or a dashboard.
_PARENT = (
    "import subprocess, sys, time; argv = [sys.executable, '-c', 'import time; time.sleep(1000)']; "
    "print(subprocess.Popen(argv).pid, flush=True); time.sleep(1000)"
)


class Started:
    """A process and its output so far."""

    def __init__(self, cluster: Cluster, code: str, *, name: str = "worker0", **env: str) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        command = Command(name=name, role="worker", argv=(sys.executable, "-c", code), env=env)
        self.handle: Handle = cluster.start(command, self._lines.put)

    def line(self) -> str:
        """Wait for the next line that it prints."""
        return self._lines.get(timeout=PATIENCE_S)

    def lines(self) -> list[str]:
        """Return the lines that have arrived and were not taken."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def exit(self) -> Exit:
        """Wait until it has ended, and return how."""
        return _exit_of(self.handle)


def _exit_of(handle: Handle) -> Exit:
    deadline = time.monotonic() + PATIENCE_S
    while (how := handle.exit()) is None:
        assert time.monotonic() < deadline, f"{handle.command.name} does not end"
        time.sleep(_POLL_S)
    return how


class ClusterContract:
    """Inherit this class and give it a `cluster` fixture."""

    @pytest.fixture
    def cluster(self) -> Cluster:
        """The cluster under test."""
        raise NotImplementedError

    @pytest.fixture
    def running(self, cluster: Cluster) -> Iterator[Cluster]:
        """The cluster, ended after the test."""
        yield cluster
        cluster.end()

    def test_a_process_gets_its_arguments_and_environment_and_its_lines_come_in_order(self, running: Cluster) -> None:
        code = "import os, sys; print('a'); print('b', file=sys.stderr, flush=True); print(os.environ['MINE'])"
        started = Started(running, f"import sys; sys.stdout.reconfigure(line_buffering=True); {code}", MINE="c d")
        assert started.exit() == Exit(0)
        assert started.lines() == ["a", "b", "c d"]

    def test_a_handle_names_what_was_started(self, running: Cluster) -> None:
        handle = Started(running, "pass", name="worker7").handle
        assert (handle.command.name, handle.command.role) == ("worker7", "worker")

    def test_a_running_process_has_no_exit(self, running: Cluster) -> None:
        started = Started(running, _SLEEP)
        assert started.line() == "here"
        assert started.handle.exit() is None

    def test_a_status_is_passed_on_and_is_no_death(self, running: Cluster) -> None:
        how = Started(running, "raise SystemExit(3)").exit()
        assert how.status == 3
        assert not how.died

    def test_all_lines_have_come_when_there_is_an_exit(self, running: Cluster) -> None:
        started = Started(running, "for n in range(2000): print(n)")
        started.exit()
        assert started.lines() == [str(n) for n in range(2000)]

    def test_an_output_that_fails_holds_no_process_up_and_ends_none(self, running: Cluster) -> None:
        def fails(line: str) -> None:
            raise UnicodeEncodeError("ascii", line, 0, 1, "a line that cannot be shown")

        lines = "for n in range(20_000): print('a line that is longer than most', n)"
        command = Command(name="worker0", role="worker", argv=(sys.executable, "-c", lines))
        assert _exit_of(running.start(command, fails)) == Exit(0)

    def test_a_killed_process_has_died_by_that_signal(self, running: Cluster) -> None:
        started = Started(running, _SLEEP)
        started.line()
        started.handle.signal(signal.SIGKILL)
        how = started.exit()
        assert (how.died, how.signal, how.status) == (True, "SIGKILL", 137)

    def test_a_signal_without_a_name_is_a_death_too(self, running: Cluster) -> None:
        """Real-time signals have numbers only: a scheduler may send them."""
        how = Started(running, f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 6})").exit()
        assert (how.died, how.signal, how.status) == (True, "signal 40", 168)

    def test_a_process_may_answer_a_signal(self, running: Cluster) -> None:
        code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + _SLEEP
        started = Started(running, code)
        started.line()
        started.handle.signal(signal.SIGTERM)
        assert started.exit() == Exit(0)

    def test_a_signal_to_a_process_that_has_ended_does_nothing(self, running: Cluster) -> None:
        started = Started(running, "pass")
        started.exit()
        started.handle.signal(signal.SIGKILL)
        assert started.exit() == Exit(0)

    def test_what_a_killed_process_had_started_does_not_hold_its_exit_up(self, running: Cluster) -> None:
        """Like the out-of-memory killer, which kills one process and not its group."""
        started = Started(running, _PARENT)
        started.line()
        started.handle.signal(signal.SIGKILL)
        assert started.exit().died

    def test_a_program_that_does_not_exist_is_an_error_or_an_exit(self, running: Cluster) -> None:
        command = Command(name="worker0", role="worker", argv=("/no/such/program",))
        try:
            handle = running.start(command, lambda line: None)
        except RallypointError:
            return
        assert _exit_of(handle).status != 0

    def test_the_end_is_the_end_of_every_process_and_nothing_can_be_started_then(self, running: Cluster) -> None:
        started = [Started(running, _SLEEP, name=f"worker{n}") for n in range(2)]
        for one in started:
            one.line()
        running.end()
        assert all(one.handle.exit() is not None for one in started)
        running.end()
        with pytest.raises(UsageError, match="ended"):
            Started(running, "pass")
