"""A worker's side of compression: gradients leave their slots as payloads, encoded versions become slots again."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from rallypoint.codec.build import build, build_stateless
from rallypoint.codec.protocol import Codec, NonFinitePayload, Stateful
from rallypoint.codec.scratch import Scratch
from rallypoint.codec.shards import ShardCodecs
from rallypoint.config import JobConfig, codec_of
from rallypoint.core.layout import Layout
from rallypoint.core.order import derive_seed
from rallypoint.net.pool import Buffer, BufferPool


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded gradient: its codec's number, its bytes, and the buffer they are in."""

    code: int
    data: memoryview
    buffer: Buffer


class Encoder:
    """Encodes contributions with the codecs of their groups, and decodes versions. Buffers' shards go raw both ways.

    What a codec with a memory (error feedback, DGC, PowerSGD) has sent of a step is kept until the next one: a
    contribution that has to be sent again is the same, and its residual is not moved twice.
    """

    def __init__(self, layout: Layout, config: JobConfig) -> None:
        self._layout, self._config = layout, config
        self._scratch = Scratch()
        self._lock = threading.Lock()  # of the scratch, and of what codecs remember
        self._codecs: dict[tuple[int, int], Codec] = {}
        self._kept: dict[tuple[int, int], tuple[int, Payload]] = {}
        self._decoders = threading.local()
        self._pools = _pools(layout, ShardCodecs(config, self._scratch))

    def encode(self, shard: int, step: int, replica: int, values: torch.Tensor) -> Payload | None:
        """The contribution `values` (the shard's words, fp32) as a payload of which the caller releases the buffer.

        None: it is to go raw, because that is the codec, or because the codec cannot carry a NaN or an infinity that is
        in it: the servers must see that.
        """
        pool = self._pools[shard]
        if pool is None:
            return None
        with self._lock:
            return self._encode((shard, replica), step, values, pool)

    def reset(self) -> None:
        """After a roll-back: what codecs remember belongs to a past that is void."""
        with self._lock:
            for codec in self._codecs.values():
                if isinstance(codec, Stateful):
                    codec.reset()
            for _, payload in self._kept.values():
                payload.buffer.release()
            self._kept.clear()

    def decode(self, payload: memoryview, into: torch.Tensor) -> None:
        """A version as it came from a server. ProtocolError when it is none."""
        codec = getattr(self._decoders, "codec", None)
        if codec is None:
            codec = self._decoders.codec = build_stateless(self._config.down)
        codec.decode(payload, into)

    def _encode(self, key: tuple[int, int], step: int, values: torch.Tensor, pool: BufferPool) -> Payload | None:
        kept = self._kept.get(key)
        if kept is not None and kept[0] == step:
            kept[1].buffer.retain()
            return kept[1]
        codec = self._codec(key)
        buffer = pool.take()
        seed = derive_seed(self._config.seed, "codec", step, key[1], key[0])
        try:
            used = codec.encode(values, buffer.bytes, seed=seed)
        except NonFinitePayload:
            buffer.release()
            return None
        payload = Payload(codec.code, buffer.bytes[:used], buffer)
        if isinstance(codec, Stateful):
            if kept is not None:
                kept[1].buffer.release()
            buffer.retain()
            self._kept[key] = (step, payload)
        return payload

    def _codec(self, key: tuple[int, int]) -> Codec:
        if key not in self._codecs:
            shard = self._layout.shards[key[0]]
            self._codecs[key] = build(codec_of(self._config, shard.group), shard.shape, self._scratch)
        return self._codecs[key]


def _pools(layout: Layout, codecs: ShardCodecs) -> list[BufferPool | None]:
    """Where each shard's payloads are written: one pool for each group, for its largest; None for what goes raw."""
    bounds: dict[int, int] = {}
    for shard in layout.shards:
        if (codec := codecs.of(shard)) is not None:
            bounds[shard.group] = max(bounds.get(shard.group, 0), codec.bytes_for(shard.words))
    pools = {group: BufferPool(-(-nbytes // 4)) for group, nbytes in bounds.items()}
    return [pools[shard.group] if codecs.of(shard) is not None else None for shard in layout.shards]
