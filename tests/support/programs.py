"""Python programs for tests, forked from a warm process: a whole job through the command line without its slow imports.

Importing torch costs each process seconds. `Program` runs ``python -m rallypoint.cli run ...`` in a process that has
already imported torch. So do the Python programs that it starts in turn: coordinator, servers and workers. Everything
else is as in a normal start: pids, signals, exit statuses, arguments, environment, open files.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from rallypoint.launch import environment
from rallypoint.testing.processes import fork_server

_COMM = Path("/proc/self/comm")
_COMM_BYTES = 15  # the kernel keeps only so many bytes of a process's name
_start_cold: Any = subprocess.Popen.__dict__["_execute_child"]


class Program:
    """``python ARGUMENTS``, forked from a warm process, with the methods of Popen that tests of whole programs need.

    arguments: what follows ``python``: ``-m MODULE ...``, ``-c CODE ...`` or ``SCRIPT ...``.
    output: the file to which stdout and stderr are appended.
    A child that the launcher names (RALLYPOINT_ID) also has that name for the system: ``psutil.Process(pid).name()``.
    """

    def __init__(self, arguments: Sequence[str], output: Path, env: Mapping[str, str], cwd: Path | None = None) -> None:
        given = (list(arguments), str(output.resolve()), dict(env), str(cwd or Path.cwd()))
        process = fork_server().Process(target=_begin, args=given)
        process.start()
        self._process = process
        self.pid: int = process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        self._process.join()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run_program(
    arguments: Sequence[str], output: Path, *, env: Mapping[str, str], cwd: Path | None = None, timeout: float = 240.0
) -> tuple[int, str]:
    """Run ``python ARGUMENTS`` to its end. Returns its exit status, and what it wrote to stdout and stderr.

    Raises subprocess.TimeoutExpired after `timeout` seconds. Then the program is killed, and the processes that it
    started end with it.
    """
    output.unlink(missing_ok=True)
    program = Program(arguments, output, env, cwd)
    try:
        return program.wait(timeout), output.read_text()
    finally:
        program.kill()
        program.wait()


class _ForkedPopen(subprocess.Popen[Any]):
    """Popen inside a warm program: forks another Python program from this one, starts anything else normally."""

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(_start_cold).bind(self, *given).arguments
        if not _is_program(call["args"]) or call["preexec_fn"] is not None:
            _start_cold(self, *given)
            return
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold nothing that the child needs
            pid = os.fork()
        if pid == 0:
            _become(list(call["args"])[1:], call)
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]


def _is_program(argv: Any) -> bool:
    """True for ``python [-P] -m ...``, ``python -c ...`` or ``python SCRIPT ...`` without any other option."""
    given = [] if isinstance(argv, (str, bytes, os.PathLike)) else [os.fspath(word) for word in argv]
    if given[1:2] == ["-P"]:
        del given[1]
    return len(given) > 1 and given[0] == sys.executable and (given[1] in ("-m", "-c") or given[1][:1] != "-")


def _begin(arguments: list[str], output: str, env: dict[str, str], cwd: str) -> None:
    """In the fork server's child: run the program, and fork the programs that it starts."""
    os.chdir(cwd)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    subprocess.Popen = _ForkedPopen  # type: ignore[misc]
    run_program_here(arguments, env)


def _become(arguments: list[str], call: Mapping[str, Any]) -> None:
    """In a child just forked, which has one thread: do what an exec would do, then run the program."""
    try:
        for number, given in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if call[given] not in (-1, number):
                os.dup2(call[given], number)
        keep = sorted({0, 1, 2, *call["pass_fds"]})
        for after, before in zip(keep, [*keep[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(after + 1, before)
        if call["start_new_session"]:
            os.setsid()
        if call["cwd"] is not None:
            os.chdir(call["cwd"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        env = os.environ if call["env"] is None else call["env"]
        run_program_here(arguments, {os.fsdecode(key): os.fsdecode(value) for key, value in env.items()})
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(70)  # `run_program_here` does not return


def run_program_here(arguments: list[str], env: dict[str, str]) -> None:
    """Run ``python ARGUMENTS`` in this process, a fork, with this environment, and end the process like the interpreter
    would: it does not return. Descriptors 0, 1 and 2 are the program's already."""
    os.environ.clear()
    os.environ.update(env)
    if (name := env.get(environment.ID)) and _COMM.exists():
        _COMM.write_text(name[:_COMM_BYTES])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()
    atexit._clear()
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    status = _status(arguments)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _status(arguments: list[str]) -> int:
    """Run the program. Returns the exit status, negative for the signal that the process must end by."""
    safe = arguments[0] == "-P"
    first, *rest = arguments[safe:]
    try:
        if first == "-m":
            sys.argv = rest
            sys.path[:0] = [] if safe else [os.getcwd()]
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
