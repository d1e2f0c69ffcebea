"""One member's part of a snapshot: its shards are copied at their version, and stored from a thread.

Copy-on-write: a shard is copied when its owner has nothing else to do and the store has caught up, or else right before
its next update; nobody waits for the store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rallypoint.errors import RallypointError
from rallypoint.net.messages import NotStored, Stored
from rallypoint.store.manifest import Compression
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.staging import Staging

_NICE = 10  # compressing for a snapshot shall not take the processor from a step
AHEAD_BYTES = 64 << 20  # enough that the disk is never idle; more would be copied into memory that nobody has used yet


class _Abandoned(RallypointError):
    """The snapshot is not wanted any more."""


@dataclass(slots=True)
class _Job:
    """One snapshot that is being stored. `unwritten` are the bytes of records that wait or are being written."""

    snapshot: str
    shards: int
    records: queue.SimpleQueue[ShardRecord | None] = field(default_factory=queue.SimpleQueue)
    unwritten: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, nbytes: int) -> None:
        """So many bytes more, or less."""
        with self.lock:
            self.unwritten += nbytes


class SnapshotWriter:
    """Stores this server's part of one snapshot after the other; `tell` gets Stored or NotStored.

    `caught_up` is called, on the writer's thread, whenever a record has been written.
    """

    def __init__(
        self, url: str, compression: Compression, part: str, tell: Callable[[Stored | NotStored], None]
    ) -> None:
        self.caught_up: Callable[[], None] = lambda: None
        self._store = SnapshotStore(url)
        self._compression, self._part, self._tell = compression, part, tell
        self._staging = Staging()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._current: _Job | None = None
        self._thread = threading.Thread(target=self._run, name="store snapshots", daemon=True)
        self._thread.start()

    def begin(self, snapshot: str, shards: int) -> None:
        """A snapshot of so many shards of ours begins; one that is still under way is abandoned."""
        self.abandon()
        self._current = _Job(snapshot, shards)
        self._jobs.put(self._current)

    @property
    def wants_more(self) -> bool:
        """Would the store soon have nothing to write?"""
        return self._current is not None and self._current.unwritten < AHEAD_BYTES

    def copy(self, record: ShardRecord) -> ShardRecord:
        """A record with arrays of its own, to be `put`: in memory that is used again for the next one."""
        return self._staging.copy(record)

    def put(self, record: ShardRecord) -> None:
        """One of the shards (its arrays are ours from now on)."""
        if self._current is not None:
            self._current.count(record.nbytes)
            self._current.records.put(record)

    def abandon(self) -> None:
        """What is under way is not wanted any more."""
        if self._current is not None:
            self._current.records.put(None)
            self._current = None

    def close(self) -> None:
        """End the thread."""
        self.abandon()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            snapshot = job.snapshot
            try:
                part = self._store.write_part(snapshot, self._part, self._records_of(job), self._compression)
            except _Abandoned:
                continue
            except Exception as error:  # a remote filesystem raises anything; unanswered, everybody would wait for it
                known = isinstance(error, (RallypointError, OSError))
                self._tell(NotStored(snapshot, str(error) if known else f"{type(error).__name__}: {error}"))
                continue
            entries = {s: (e.file, e.offset, e.length, e.checksum) for s, e in part.shards.items()}
            self._tell(Stored(snapshot, part.files, entries))

    def _records_of(self, job: _Job) -> Iterator[ShardRecord]:
        for _ in range(job.shards):
            record = job.records.get()
            if record is None:
                raise _Abandoned("a newer snapshot, or a new view, has come")
            yield record
            job.count(-record.nbytes)  # it has been written when the next one is asked for
            self._staging.give_back(record)
            self.caught_up()
