"""This server's part of a snapshot: which shards are still to be copied, and copies that wait for codec states.

Copy-on-write: a shard is copied when its owner has nothing else to do and the store has caught up, or else right before
its next update.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.observe.trace import Tracer
from rallypoint.server.codec_states import CodecStates
from rallypoint.server.intake.job import ServerJob
from rallypoint.store.record import ShardRecord
from rallypoint.store.writer import SnapshotWriter


class Capture:
    """The owner's thread owns it; `state(shard, version)` is a shard's state, whose arrays still change. `wake` is
    called, from any thread, when `due` may have become true."""

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
        """Is there anything to be copied now, if there is time?"""
        return bool(self._to_copy) and self._writer.wants_more

    def begin(self, snapshot: str, shards: int) -> None:
        """A snapshot of so many shards of ours begins."""
        self.snapshot = snapshot
        self._writer.begin(snapshot, shards)

    def wanted(self, shard: int, version: int) -> None:
        """The shard is at the snapshot's version now."""
        self._to_copy[shard] = version

    def copy_one(self) -> None:
        """Copy any shard that is to be copied."""
        self._copy(next(iter(self._to_copy)))

    def before_update(self, shard: int) -> None:
        """The shard is about to be changed."""
        if shard in self._to_copy:
            self._copy(shard)
        self._put_complete(shard, at_last=True)

    def codec_state_came(self, shard: int) -> None:
        """A worker's copy of a codec state has come, perhaps after the state was copied."""
        self._put_complete(shard, at_last=False)

    def disowned(self, shard: int) -> None:
        """The shard is not ours any more."""
        self._to_copy.pop(shard, None)

    def abandon(self) -> None:
        """The snapshot is not wanted any more."""
        self._to_copy.clear()
        if self._codec_states is not None:
            self._codec_states.abandon()
        self._writer.abandon()

    def close(self) -> None:
        """No more snapshots."""
        self._writer.close()

    def _copy(self, shard: int) -> None:
        version = self._to_copy.pop(shard)
        with self._tracer.span("capture", shard=shard, version=version):
            record = self._writer.copy(self._state(shard, version))
        if not self._awaits_codec_states(shard, version, record):
            self._writer.put(record)

    def _awaits_codec_states(self, shard: int, version: int, record: ShardRecord) -> bool:
        """Workers send copies of their codec states at a version that all of them go on from, and at no other."""
        goes_on = 0 < version < self._job.plan.rounds_of(shard) and self._job.versions_are_common
        states = self._codec_states
        return states is not None and goes_on and states.awaited(record, self._job.shards[shard])

    def _put_complete(self, shard: int, *, at_last: bool) -> None:
        """With the next update, at last, all codec states are here that were sent."""
        if self._codec_states is not None and (record := self._codec_states.complete(shard,
            at_last=at_last)) is not None:
            self._writer.put(record)
