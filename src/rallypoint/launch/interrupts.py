"""How Ctrl-C, SIGTERM and SIGHUP reach the launcher's loop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """SIGTERM, SIGHUP or a notice has arrived (its first argument is the signal's number): end like after Ctrl-C."""


@contextlib.contextmanager
def raised(notices: Sequence[signal.Signals] = ()) -> Iterator[None]:
    """In the body, SIGTERM and SIGHUP raise Interrupted in the main thread, like Ctrl-C raises KeyboardInterrupt.

    So do `notices`: signals by which an engine says that it will end this process soon.
    """
    numbers = _heeded(signal.SIGTERM, signal.SIGHUP, *notices)
    previous = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def noted(notices: Sequence[signal.Signals] = ()) -> Iterator[list[int]]:
    """In the body, SIGINT, SIGTERM, SIGHUP and `notices` only append their number to the yielded list.

    An exception could be raised anywhere, for example between a lock's acquire and its release.
    """
    came: list[int] = []
    numbers = _heeded(*_INTERRUPTS, *notices)
    previous = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return the signals that this process was not started to ignore (by ``nohup``, or by a shell with ``&``).

    None outside of the main thread: only that one can set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
