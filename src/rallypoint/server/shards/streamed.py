"""A dense shard whose versions workers do not follow: they hear that one exists, and pull the words that they need."""

from __future__ import annotations

from rallypoint.codec.base.scratch import Scratch
from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.server.shards.owned import OwnedShard


class StreamedShard(OwnedShard):
    """Like OwnedShard; what it sends to followers is empty."""

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch, nothing: Buffer) -> None:
        """`nothing` is an empty buffer."""
        super().__init__(shard, config, pool, scratch)
        self._nothing = nothing
        self.raw = self.encoded = self._empty

    def _empty(self, version: int) -> tuple[int, Buffer, int]:
        """An empty payload: followers only hear that the version exists."""
        return 0, self._nothing, 0

    def words(self, version: int, first: int, count: int) -> tuple[Buffer, memoryview]:
        """Words [first, first + count) of a kept version, and the buffer to release when they are not needed any more.

        It is the version's own, or, for less than half of it, one with a copy: a slow worker's backlog counts the words
        alone, so they may not keep a whole version.
        """
        _, buffer, _ = self._wire.raw(version)
        words = buffer.bytes[4 * first : 4 * (first + count)]
        if 2 * len(words) >= len(buffer.bytes):
            return buffer.retain(), words
        copy = BufferPool(count, keeps=False).take()
        copy.bytes[:] = words
        return copy, copy.bytes
