"""The wire copies of one dense shard: its last versions, as they are sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rallypoint.codec.base import NonFinitePayload, Scratch
from rallypoint.codec.shards import down_codec
from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.order import derive_seed
from rallypoint.net.pool import Buffer, BufferPool


class WireCopies:
    """Buffers by version. Each version is encoded once for all followers."""

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch) -> None:
        self._shard, self._seed, self._pool = shard, config.seed, pool
        self._codec = down_codec(config, shard, scratch)
        self._raw: dict[int, Buffer] = {}
        self._encoded: dict[int, tuple[int, Buffer, int]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._raw

    def __iter__(self) -> Iterator[int]:
        return iter(self._raw)

    def values(self, version: int) -> torch.Tensor:
        """A kept version: fp32, shape (words,)."""
        return self._raw[version].tensor[: self._shard.words]

    def keep(self, version: int, buffer: Buffer, oldest: int, pinned: int = -1) -> None:
        """Keep `buffer` as a version, and release the versions before `oldest`, but not `pinned`."""
        self._raw[version] = buffer
        for old in [v for v in self._raw if v < oldest and v != pinned]:
            self._raw.pop(old).release()
            if old in self._encoded:
                self._encoded.pop(old)[1].release()

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version, raw: codec number 0, buffer (not retained), number of bytes."""
        return 0, self._raw[version], self._shard.nbytes

    def encoded(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version, encoded for followers; raw if the codec refuses it because of a NaN."""
        if self._codec is None:
            return self.raw(version)
        if version not in self._encoded:
            buffer = self._pool.take()
            try:  # the seed does not depend on the server, so a backup writes the same bytes
                seed = derive_seed(self._seed, "down", version, self._shard.index)
                used = self._codec.encode(self.values(version), buffer.bytes, seed=seed)
            except NonFinitePayload:
                buffer.release()
                return self.raw(version)
            self._encoded[version] = (self._codec.code, buffer, used)
        return self._encoded[version]

    def release(self) -> None:
        """Release every buffer."""
        for buffer in (*self._raw.values(), *(encoded for _, encoded, _ in self._encoded.values())):
            buffer.release()
        self._raw.clear()
        self._encoded.clear()
