"""How an end that comes from outside reaches a process: its launcher is gone, Ctrl-C, SIGTERM and other signals.

A launcher's child holds a pipe from it (the lifeline), which breaks however the launcher has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from rallypoint.launch.environment import LIFELINE
from rallypoint.observe.lenient import flush_output

LIFELINE_THREAD = "lifeline"  # it lives as long as the process, and runs nothing but a blocking read
# What batch systems send some time before they end a process: Slurm's `--signal`, LSF, Grid Engine.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *NOTICES)  # by default each ends the process without a word


def hold_lifeline() -> bool:
    """If the launcher gave this process a lifeline, exit at once when it breaks. Returns False without one."""
    text = os.environ.pop(LIFELINE, "")
    if not text.isdigit():
        return False
    threading.Thread(target=_watch, args=(int(text),), name=LIFELINE_THREAD, daemon=True).start()
    return True


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 1):
            continue
    except OSError:
        pass  # a broken pipe means the same as a closed one
    flush_output()
    os._exit(113)


class Interrupted(Exception):
    """A signal that asks for an end has arrived (its first argument is the number): end like after Ctrl-C."""


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """In the body, such a signal raises Interrupted in the main thread, like Ctrl-C raises KeyboardInterrupt."""
    with handled(_heeded(*_ENDS), _interrupt):
        yield


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """In the body, SIGINT and such a signal only append their number to the yielded list.

    An exception could be raised anywhere, for example between a lock's acquire and its release.
    """
    came: list[int] = []
    with handled(_heeded(signal.SIGINT, *_ENDS), lambda number, frame: came.append(number)):
        yield came


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """In the body this is what handles these signals; afterwards what did before does again."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore (by ``nohup``, or by a shell with ``&``). None
    outside of the main thread: only that one can set handlers."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
