"""This server's part of a snapshot: the shards to copy, and the copies that wait for codec states.

Copy-on-write: a shard is copied when the owner thread is idle and the store has caught up, at the latest right before
the shard's next update.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.observe.trace import Tracer
from rallypoint.server.codec_states import CodecStates
from rallypoint.server.job import ServerJob
from rallypoint.store.record import ShardRecord
from rallypoint.store.writer import SnapshotWriter


class Capture:
    """The shards to copy for one snapshot. Not thread-safe: only the owner thread calls it.

    `state(shard, version)` returns a shard's state, in arrays that later updates change. `wake` is called, from any
    thread, when `due` may have become True.
    """

    def __init__(
        self, writer: SnapshotWriter, job: ServerJob, codec_states: CodecStates | None,
        state: Callable[[int, int], ShardRecord], tracer: Tracer, wake: Callable[[], None],
    ) -> None:  # fmt: skip
        writer.caught_up = wake
        self.snapshot = ""
        self._writer, self._job = writer, job
        self._codec_states, self._state, self._tracer = codec_states, state, tracer
        self._to_copy: dict[int, int] = {}

    @property
    def due(self) -> bool:
        """Is there a shard to copy now, if the owner thread is idle?"""
        return bool(self._to_copy) and self._writer.wants_more

    def begin(self, snapshot: str, shards: int) -> None:
        """A snapshot begins. It stores `shards` shards of this server."""
        self.snapshot = snapshot
        self._writer.begin(snapshot, shards)

    def wanted(self, shard: int, version: int) -> None:
        """The shard is at the snapshot's version now: copy it before its next update."""
        self._to_copy[shard] = version

    def copy_one(self) -> None:
        """Copy one of the shards that wait for it."""
        self._copy(next(iter(self._to_copy)))

    def before_update(self, shard: int) -> None:
        """The shard is about to change: copy it now if it waits for that."""
        if shard in self._to_copy:
            self._copy(shard)
        self._put_complete(shard, at_last=True)

    def codec_state_came(self, shard: int) -> None:
        """A worker's copy of a codec state arrived, perhaps after the shard was copied."""
        self._put_complete(shard, at_last=False)

    def disowned(self, shard: int) -> None:
        """This server no longer holds the shard."""
        self._to_copy.pop(shard, None)

    def abandon(self) -> None:
        """Stop the snapshot."""
        self._to_copy.clear()
        if self._codec_states is not None:
            self._codec_states.abandon()
        self._writer.abandon()

    def close(self) -> None:
        """Take no more snapshots."""
        self._writer.close()

    def _copy(self, shard: int) -> None:
        version = self._to_copy.pop(shard)
        if not self._writer.takes_records:  # the store has failed: the shards that are left need not be copied
            self.abandon()
            return
        with self._tracer.span("capture", shard=shard, version=version):
            record = self._writer.copy(self._state(shard, version))
        if not self._awaits_codec_states(shard, version, record):
            self._writer.put(record)

    def _awaits_codec_states(self, shard: int, version: int, record: ShardRecord) -> bool:
        """Keep the copy until the codec states come? Workers send them only at a version that all continue from."""
        goes_on = 0 < version < self._job.plan.rounds_of(shard) and self._job.versions_are_common
        states = self._codec_states
        return states is not None and goes_on and states.awaited(record, self._job.shards[shard])

    def _put_complete(self, shard: int, *, at_last: bool) -> None:
        """Store a copy whose codec states are complete. `at_last` (the next update): store it with those that came."""
        if self._codec_states is not None and (record := self._codec_states.complete(shard,
            at_last=at_last)) is not None:
            self._writer.put(record)
