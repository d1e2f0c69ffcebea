"""One member's part of a snapshot: a thread stores the shards, each copied at the snapshot's version.

Copy-on-write: a shard is copied when its owner is idle and the store has caught up, at the latest right before the
shard's next update. Nobody waits for the store.
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
from rallypoint.store import closing
from rallypoint.store.manifest import Compression
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.staging import Staging

_NICE = 10  # compression for a snapshot must not take processor time from a step
AHEAD_BYTES = 64 << 20  # enough to keep the disk busy; more would be copied into fresh memory


class _Abandoned(RallypointError):
    """The snapshot is not needed any more."""


@dataclass(slots=True)
class _Job:
    """One snapshot in progress. `unwritten`: bytes of the records that wait or are being written."""

    snapshot: str
    shards: int
    records: queue.SimpleQueue[ShardRecord | None] = field(default_factory=queue.SimpleQueue)
    unwritten: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, nbytes: int) -> None:
        """Add `nbytes` (negative: subtract) to `unwritten`."""
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
        self._writing = ""  # the snapshot that the thread is about
        self._thread = threading.Thread(target=self._run, name="store snapshots", daemon=True)
        self._thread.start()

    def begin(self, snapshot: str, shards: int) -> None:
        """Begin a snapshot with `shards` shards of ours. Abandons one that is still in progress."""
        self.abandon()
        self._current = _Job(snapshot, shards)
        self._jobs.put(self._current)

    @property
    def wants_more(self) -> bool:
        """True if the store will soon have nothing to write."""
        return self._current is not None and self._current.unwritten < AHEAD_BYTES

    def copy(self, record: ShardRecord) -> ShardRecord:
        """Return a copy of the record, to be `put`, in memory that is reused afterwards."""
        return self._staging.copy(record)

    def put(self, record: ShardRecord) -> None:
        """Store one shard's record. The writer owns its arrays from now on."""
        if self._current is not None:
            self._current.count(record.nbytes)
            self._current.records.put(record)

    def abandon(self) -> None:
        """Stop storing the snapshot in progress."""
        if self._current is not None:
            self._current.records.put(None)
            self._current = None

    def close(self) -> None:
        """Abandon the snapshot in progress and end the thread. A store that hangs is waited for only a few seconds."""
        self.abandon()
        self._jobs.put(None)
        closing.end((self._thread, f"{self._part}'s part of snapshot {self._writing}"))

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := self._jobs.get()) is not None:
            snapshot = self._writing = job.snapshot
            try:
                part = self._store.write_part(snapshot, self._part, self._records_of(job), self._compression)
            except _Abandoned:
                continue
            # Remote filesystems raise exceptions of any type; without an answer the job would wait for ever
            except Exception as error:
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
            job.count(-record.nbytes)  # the next record is requested after this one has been written
            self._staging.give_back(record)
            self.caught_up()
