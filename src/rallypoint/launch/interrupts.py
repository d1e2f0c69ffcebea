"""Ctrl-C, SIGTERM and SIGHUP: how they reach the launcher's loop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """SIGTERM or SIGHUP came: end as on Ctrl-C."""


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Interrupted in the main thread, as Ctrl-C raises KeyboardInterrupt."""
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def noted() -> Iterator[Sequence[int]]:
    """Inside, Ctrl-C and its like are only appended to the list that is yielded.

    An exception could be raised anywhere, also between a lock's acquire and its release.
    """
    came: list[int] = []
    numbers = [n for n in _INTERRUPTS if signal.getsignal(n) is not signal.SIG_IGN]  # as a shell wants it
    previous = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted
