"""One member's part of a snapshot: a thread stores the shards, each copied at the snapshot's version.

Copy-on-write: a shard is copied when its owner is idle and the store has caught up, at the latest right before the
shard's next update. Nobody waits for the store.

A server copies a shard right before it changes the shard, and workers wait for that. Fresh memory would make the copy
several times as slow, because the system must find and clear each page first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import numpy as np

from rallypoint.core.protocol import NotStored, Stored
from rallypoint.errors import RallypointError, sentence_of
from rallypoint.store.files import end_threads
from rallypoint.store.manifest import Compression
from rallypoint.store.record import Array, ShardRecord
from rallypoint.store.snapshots import SnapshotPart, SnapshotStore

_NICE = 10  # compression for a snapshot must not take processor time from a step
AHEAD_BYTES = 64 << 20  # enough to keep the disk busy; more would be copied into fresh memory


class _NotWanted(RallypointError):
    """The part is not needed any more."""


@dataclass(slots=True)
class _InProgress:
    """This member's part of one snapshot, until it is stored, failed or abandoned.

    `records` wait to be written; `unwritten` counts their bytes and those of the one that is being written. `over`: the
    part takes no more records, and those that wait have been dropped.
    """

    snapshot: str
    shards: int
    records: deque[ShardRecord] = field(default_factory=deque)
    unwritten: int = 0
    over: bool = False


class SnapshotWriter:
    """Stores this member's part of one snapshot after the other; `tell` gets Stored for each file, or NotStored.

    Only one part holds records: the next one begins when the one before it is stored, failed or abandoned. A store that
    hangs keeps the one record that it is writing; the next part waits for it.

    `caught_up` is called, on the writer's thread, whenever a record has been written.
    """

    def __init__(
        self, url: str, compression: Compression, part: str, tell: Callable[[Stored | NotStored], None]
    ) -> None:
        self.caught_up: Callable[[], None] = lambda: None
        self._store = SnapshotStore(url)
        self._compression, self._name, self._tell = compression, part, tell
        self._staging = StagedCopies()
        self._changed = threading.Condition()  # guards the fields below, and those of the parts
        self._part: _InProgress | None = None  # the newest
        self._begun: _InProgress | None = None  # the newest if the thread has not taken it up yet
        self._closed = False
        self._writing = ""  # the snapshot that the thread is about
        self._thread = threading.Thread(target=self._run, name="store snapshots", daemon=True)
        self._thread.start()

    def begin(self, snapshot: str, shards: int) -> None:
        """Begin a snapshot with `shards` shards of ours. Abandons one that is still in progress."""
        self.abandon()
        with self._changed:
            self._part = self._begun = _InProgress(snapshot, shards)
            self._changed.notify_all()

    @property
    def takes_records(self) -> bool:
        """True from `begin` until the part has failed or is abandoned."""
        return self._part is not None and not self._part.over

    @property
    def wants_more(self) -> bool:
        """True if the store will soon have nothing to write."""
        return self._part is not None and not self._part.over and self._part.unwritten < AHEAD_BYTES

    def copy(self, record: ShardRecord) -> ShardRecord:
        return self._staging.copy(record)

    def put(self, record: ShardRecord) -> None:
        """Store one shard's record. The writer owns its arrays from now on."""
        with self._changed:
            if self._part is not None and not self._part.over:
                self._part.unwritten += record.nbytes
                self._part.records.append(record)
                self._changed.notify_all()
                return
        self._staging.give_back(record)

    def abandon(self) -> None:
        """Stop storing the snapshot in progress, and drop its records."""
        if self._part is not None:
            self._end(self._part)

    def close(self) -> None:
        """Abandon the snapshot in progress and end the thread. A store that hangs is waited for only a few seconds."""
        self.abandon()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end_threads((self._thread, f"{self._name}'s part of snapshot {self._writing}"))

    def _end(self, part: _InProgress) -> None:
        """The part takes no more records, and needs none of those that wait."""
        with self._changed:
            part.over = True
            dropped = list(part.records)
            part.records.clear()
            self._changed.notify_all()
        for record in dropped:
            self._staging.give_back(record)

    # ---- on the writer's thread ----

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (part := self._next()) is not None:
            self._writing = part.snapshot
            self._write(part)

    def _next(self) -> _InProgress | None:
        """Wait for the next part; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._begun is not None)
            part, self._begun = self._begun, None
        return part

    def _write(self, part: _InProgress) -> None:
        def stored(file: SnapshotPart) -> None:
            entries = {s: (e.file, e.offset, e.length, e.checksum) for s, e in file.shards.items()}
            self._tell(Stored(part.snapshot, file.files, entries))

        try:
            self._store.write_part(part.snapshot, self._name, self._records_of(part), self._compression, stored)
        except _NotWanted:
            pass
        # Remote filesystems raise exceptions of any type; without an answer the job would wait for ever
        except Exception as error:
            wanted = not part.over
            self._end(part)
            if wanted:
                self._tell(NotStored(part.snapshot, sentence_of(error)))

    def _records_of(self, part: _InProgress) -> Iterator[ShardRecord]:
        for _ in range(part.shards):
            with self._changed:
                self._changed.wait_for(lambda: part.over or bool(part.records))
                if part.over:
                    raise _NotWanted("a newer snapshot, or a new view, has come")
                record = part.records.popleft()
            yield record
            with self._changed:
                part.unwritten -= record.nbytes  # the next record is requested after this one has been written
            self._staging.give_back(record)
            self.caught_up()


KEPT_BYTES = 512 << 20


class StagedCopies:
    """Lends memory to copies and takes it back; any thread may do either. Keeps at most `KEPT_BYTES` unused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[str, int], list[Array]] = {}
        self._lent: WeakValueDictionary[int, Array] = WeakValueDictionary()  # what nobody gives back is freed
        self._kept = 0

    def copy(self, record: ShardRecord) -> ShardRecord:
        """Return the record with arrays of its own, valid until `give_back`."""
        return replace(
            record, arrays={name: self._copy(array) for name, array in record.arrays.items()},
            scalars=dict(record.scalars),
        )  # fmt: skip

    def give_back(self, record: ShardRecord) -> None:
        """Take back the memory of a copy that nobody reads any more.

        Does nothing for a record that is no copy from here.
        """
        with self._lock:
            for array in record.arrays.values():
                if self._lent.pop(id(array), None) is not None and self._kept + array.nbytes <= KEPT_BYTES:
                    self._free.setdefault((array.dtype.name, array.size), []).append(array)
                    self._kept += array.nbytes

    def _copy(self, array: Array) -> Array:
        copy = self._take(array)
        np.copyto(copy, array)
        return copy

    def _take(self, like: Array) -> Array:
        with self._lock:
            if free := self._free.get((like.dtype.name, like.size)):
                taken = free.pop()
                self._kept -= taken.nbytes
            else:
                taken = np.empty_like(like)
            self._lent[id(taken)] = taken
        return taken
