"""What tests of threads and connections need: a call on a second thread, a wait for what another thread does, bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rallypoint.errors import LinkError
from rallypoint.net.transport import Connection, Listener, Transport

PATIENCE_S = 60.0  # a test fails after so long; no test should come near it


class Beside:
    """A call on a second thread. Leaving the ``with`` joins it; `outcome` waits for its result."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="beside the test")

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._thread.join(PATIENCE_S)
        if kind is None:
            assert not self._thread.is_alive(), "the thread beside the test is still blocked"

    def is_running(self) -> bool:
        """Has the call neither returned nor raised yet?"""
        return self._thread.is_alive()

    def outcome(self) -> BaseException | None:
        """Wait for the call. Returns what it raised, None when it returned."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the thread beside the test is still blocked"
        return self._error

    def raise_if_failed(self) -> None:
        """Raise here what the call raised on its thread."""
        if (error := self.outcome()) is not None:
            raise error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A call that raises this, whatever it is given."""

    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


class Hanging:
    """A call that hangs, once it has been made, until a test has seen that nobody waits for it."""

    def __init__(self) -> None:
        self._entered, self._answers = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self._entered.set()
        self._answers.wait()
        raise OSError("at last")

    def keeps_nobody(self, close: Callable[[], object]) -> None:
        """The call has been made, and `close` returns although it hangs."""
        assert self._entered.wait(PATIENCE_S)
        with Beside(close) as closing:
            closing._thread.join(PATIENCE_S)
            ended = not closing.is_running()
            self._answers.set()
        assert ended, "the end of the job waits for the store"


def until(
    happened: Callable[[], bool], what: str | Callable[[], object] = "it has not happened", *,
    running: Callable[[], bool] = lambda: True, within: float = PATIENCE_S, pause: float = 0.005,
) -> None:  # fmt: skip
    """Wait until `happened` returns True: for what tells nobody. It is asked again after each `pause`.

    AssertionError that says `what` after so many seconds, or once nothing is `running` that could make it happen.
    """
    deadline = time.monotonic() + within
    while not happened():
        assert running() and time.monotonic() < deadline, what if isinstance(what, str) else what()  # noqa: PT018
        time.sleep(pause)


def connected(transport: Transport, listener: Listener) -> tuple[Connection, Connection]:
    """Both ends of a new connection that has been used: a transport may shake hands at its first use."""
    near = transport.connect(listener.address, PATIENCE_S)
    far = listener.accept()
    for end in (near, far):
        end.set_timeout(PATIENCE_S)  # a broken transport then fails the test instead of blocking it
    with Beside(lambda: near.send(b"?")) as asking:
        assert receive(far, 1) == b"?"
        asking.raise_if_failed()
    return near, far


def trickle(step: Callable[[], object], beside: Beside) -> None:
    """Make a little progress again and again, as long as the other thread runs."""
    while beside.is_running():
        with contextlib.suppress(LinkError):
            step()
        time.sleep(0.02)


def receive(connection: Connection, count: int) -> bytes:
    """Return the next `count` bytes of a connection."""
    room = bytearray(count)
    connection.recv_into(memoryview(room))
    return bytes(room)


def send_for_ever(connection: Connection) -> None:
    """Send until the connection raises. Blocks soon when nobody reads."""
    megabyte = memoryview(bytes(1 << 20))
    while True:
        connection.send(b"", megabyte)
