"""Events of the coordinator's shell: from connections, from the snapshot keeper, from outside.

What the keeper finds, and what it cannot write, are the machine's events as they stand.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec

from rallypoint.core.cluster.state import Origin
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.protocol import Aborted, Hello, Message, NotStored, Say, Snapshotted
from rallypoint.errors import sentence_of

Connection = Hashable  # a channel, or a simulated wire: the shell only compares it


class End(enum.Enum):
    """How a connection ended."""

    CLOSED = "closed"  # the other process closed it or has ended, or broke the protocol
    RESET = "reset"  # the other machine reset it: see `core.cluster.events.Unlinked`
    LOST = "lost"  # the network did not carry for too long


class Opened(msgspec.Struct, frozen=True):
    """A worker, server or observer has connected and said hello."""

    connection: Connection
    hello: Hello


class Received(msgspec.Struct, frozen=True):
    """A message has arrived; `coordinator.connections` has accepted it."""

    connection: Connection
    hello: Hello
    message: Message


class Closed(msgspec.Struct, frozen=True):
    """A connection ended; `reason` says why, as far as known."""

    connection: Connection
    hello: Hello
    reason: str
    how: End = End.CLOSED


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed: the owner's thread sends it at a fixed interval."""


class Barrier(msgspec.Struct, frozen=True):
    """Call `reached`, on the owner's thread, when all events before it have been handled."""

    reached: Callable[[], None]


# (`Say`: a sentence for the observers. `Aborted`: the job ends for a reason outside the machine: a user, a child
# process that died, an error of the coordinator.)
Event = Opened | Received | Closed | Ticked | Snapshotted | NotStored | Origin | Say | Aborted


# ---- The one thread that owns the shell: it takes events from an inbox and handles them one at a time ----


TICKS = 8  # in one heartbeat, the time after which a silent member is given up
_SLOWEST_TICK_S = 0.5  # also with a long heartbeat: the machine's clock moves with the ticks


def tick_seconds(terms: Terms) -> float:
    """The time between two ticks, in seconds."""
    return min(_SLOWEST_TICK_S, terms.heartbeat / TICKS)


class Owner:
    """Calls `handle(event)` for each event, one at a time, and with `Ticked` every `tick_s` seconds.

    When a tick is due, the events that are in the inbox by then are handled first, so that their signs of life count.
    Later events wait for the tick, so that many events cannot stop the clock.

    If `handle` raises, it is called with `Ended`, so that members learn why the job ends. Any thread may call `put`.
    """

    def __init__(self, handle: Callable[[Event], None], tick_s: float) -> None:
        self._handle, self._tick_s = handle, tick_s
        self._looked = time.monotonic()  # into the inbox, the last time
        self._inbox: queue.SimpleQueue[Event | Barrier | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="coordinate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event | Barrier) -> None:
        """Queue an event; it is handled after all that were put before. Any thread may call it."""
        self._inbox.put(event)

    def stop(self) -> None:
        """End the thread, if it was started, after the events that were put before; block until it has ended."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def busy_s(self) -> float:
        """Seconds since the thread looked into the inbox. It does so at least with every tick."""
        return time.monotonic() - self._looked

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        due, before_tick = time.monotonic(), 0
        while True:
            self._looked = time.monotonic()
            left = due - self._looked
            if left > 0:
                before_tick = -1
            elif before_tick < 0:
                before_tick = self._inbox.qsize()
            event: Event | Barrier | None = Ticked()
            if before_tick != 0:
                with contextlib.suppress(queue.Empty):
                    event = self._inbox.get(timeout=max(0.0, left))
                before_tick -= before_tick > 0
            if event is None:
                return
            if isinstance(event, Barrier):
                event.reached()
                continue
            if isinstance(event, Ticked):
                due, before_tick = time.monotonic() + self._tick_s, -1
            try:
                self._handle(event)
            except Exception as error:
                self._handle(Aborted(f"the coordinator failed: {sentence_of(error)}"))


# The time without pauses of this process.

_LATE_TICK = 2  # time between two ticks beyond so many tick intervals was a pause of this process


@dataclass(slots=True)
class AwakeTime:
    """Counts seconds, without the pauses of this process (stopped, or a slow disk): nobody is silent in those.

    It begins at `seconds`, and was looked at last at the time `looked_at`. Members beat every `heartbeat` seconds.
    """

    seconds: float
    looked_at: float
    heartbeat: float

    def at(self, now: float) -> float:
        """What it shows at the time `now`. Ask often: what is longer than usual counts as a pause."""
        self.seconds += min(now - self.looked_at, _LATE_TICK * self.heartbeat / TICKS)
        self.looked_at = now
        return self.seconds
