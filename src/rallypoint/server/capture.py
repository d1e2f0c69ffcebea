"""This server's part of a snapshot: which shards are still to be copied, and copies that wait for workers' memories.

Copy-on-write: a shard is copied when its owner has nothing else to do and the store has caught up, or else right before
its next update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.shard.server import Plan
from rallypoint.observe.trace import Tracer
from rallypoint.server.codec_states import CodecStates
from rallypoint.store.record import ShardRecord
from rallypoint.store.writer import SnapshotWriter


class Capture:
    """The reducer's thread owns it; `state(shard, version)` is a shard's state, whose arrays still change. `wake` is
    called, from any thread, when `due` may have become true."""

    def __init__(
        self, writer: SnapshotWriter, config: JobConfig, plan: Plan, shards: Sequence[Shard],
        codec_states: CodecStates | None, state: Callable[[int, int], ShardRecord], tracer: Tracer,
            wake: Callable[[], None],
    ) -> None:  # fmt: skip
        writer.caught_up = wake
        self.snapshot = ""
        self._writer, self._streaming, self._plan, self._shards = writer, config.streaming, plan, shards
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
        """A worker's copy of what it remembers has come, perhaps after the state was copied."""
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
        goes_on = not self._streaming and 0 < version < self._plan.rounds_of(shard)
        if self._codec_states is None or not goes_on or not self._codec_states.awaited(record, self._shards[shard]):
            self._writer.put(record)

    def _put_complete(self, shard: int, *, at_last: bool) -> None:
        """With the next update, at last, all memories are here that were sent."""
        if self._codec_states is not None and (record := self._codec_states.complete(shard,
            at_last=at_last)) is not None:
            self._writer.put(record)
