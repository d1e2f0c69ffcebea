"""Reads shards from a snapshot in a thread of its own, and puts them into the owner's inbox as events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rallypoint.core.view import ViewNumber
from rallypoint.errors import RallypointError
from rallypoint.server.reducer.inbox import Event, Restored, RestoreFailed, StateRecalled
from rallypoint.store.files import end_threads, patiently
from rallypoint.store.manifest import located
from rallypoint.store.snapshots import SnapshotStore

READ_AHEAD = 2  # records that are read but not loaded; each is a shard with its optimizer state


class _Cancelled(RallypointError):
    """A new generation began: these shards are no longer wanted."""


class _Reading:
    """One restore and its thread, which ends soon after `cancel`."""

    def __init__(self, doing: str, run: Callable[[_Reading], None]) -> None:
        self._doing = doing
        self._cancelled = threading.Event()
        self._room = threading.Semaphore(READ_AHEAD)
        self._thread = threading.Thread(target=run, args=(self,), name="restore", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()
        self._room.release()  # the thread may wait for room

    @property
    def thread(self) -> tuple[threading.Thread, str]:
        """The thread, and what it does."""
        return self._thread, self._doing

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def pause(self, seconds: float) -> None:
        """Sleep before the next attempt. Raises _Cancelled as soon as the restore is cancelled."""
        if self._cancelled.wait(seconds):
            raise _Cancelled

    def wait_for_room(self) -> None:
        """Block until few enough records wait in the inbox. Raises _Cancelled: see `pause`."""
        self._room.acquire()
        self.pause(0.0)

    def make_room(self) -> None:
        """A record has left the inbox."""
        self._room.release()


class Restores:
    """At most one restore counts: that of the current generation. Only the owner's thread calls its methods.

    ```
       begin(generation 1.5) --> a thread reads --> Restored(record, 1.5) into the inbox, one for each shard
                                                 +-> RestoreFailed(error, 1.5)
    ```

    The owner's thread never waits for the store. While the reading thread retries after an error, the owner can adopt a
    view, even one that rolls back again. `put` puts an event into the inbox. `say` gets a sentence for each error; the
    reading thread calls it.
    """

    def __init__(self, me: str, url: str, put: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._me, self._url, self._put, self._say = me, url, put, say
        self._readings: list[_Reading] = []  # the last one is current; earlier ones are cancelled
        self._missing: set[int] = set()
        self._recalls: dict[int, list[StateRecalled]] = {}

    def begin(self, shards: Sequence[int], origin: str, generation: ViewNumber) -> None:
        """Begin to read these shards from the snapshot `origin`. Cancels an earlier restore."""
        self.cancel()
        self._missing = set(shards)
        doing = f"{self._me} restores {len(shards)} shard{'s' * (len(shards) != 1)} from snapshot {origin}"

        def run(reading: _Reading) -> None:
            try:
                self._read(reading, doing, shards, origin, generation)
            except _Cancelled:
                return
            except Exception as error:  # the owner's thread handles it, or ignores it in a new generation
                self._put(RestoreFailed(error, generation))

        self._readings.append(_Reading(doing, run))

    def cancel(self) -> None:
        """The generation is over: stop the restore."""
        for reading in self._readings:
            reading.cancel()
        self._readings = [reading for reading in self._readings if reading.runs]
        self._missing.clear()
        self._recalls.clear()

    def close(self) -> None:
        """Cancel, and wait for the threads; for a store that hangs only a few seconds."""
        readings = list(self._readings)
        self.cancel()
        end_threads(*(reading.thread for reading in readings))

    def left_the_inbox(self) -> None:
        """The owner's thread took a record of the current restore out of the inbox."""
        self._readings[-1].make_room()

    def postpones(self, event: StateRecalled) -> bool:
        """A worker asks for a codec state. Is its shard still being read?

        If so, keeps the event until `loaded` and returns True.
        """
        if event.header.shard not in self._missing:
            return False
        self._recalls.setdefault(event.header.shard, []).append(event)
        return True

    def loaded(self, shard: int) -> list[StateRecalled]:
        """The shard is loaded. Returns the events that `postpones` kept for it."""
        self._missing.discard(shard)
        return self._recalls.pop(shard, [])

    def _read(
        self, reading: _Reading, doing: str, shards: Sequence[int], origin: str, generation: ViewNumber
    ) -> None:
        url, name = located(origin, self._url)
        store = SnapshotStore(url)
        manifest = patiently(lambda: store.load(name), self._say, doing, reading.pause)
        for index in shards:
            reading.wait_for_room()
            record = patiently(
                lambda index=index: next(store.read(manifest, (index,))), self._say, doing, reading.pause  # type: ignore[misc]
            )
            self._put(Restored(record, generation))
