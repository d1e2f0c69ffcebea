"""A worker's side of compression: gradients leave their slots as payloads, encoded versions become slots again."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from rallypoint.codec.build import build, build_stateless
from rallypoint.codec.protocol import Codec, NonFinitePayload, Stateful
from rallypoint.codec.spec import Raw
from rallypoint.config import JobConfig
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
    """Encodes contributions with the job's codec, and decodes versions. Buffers' shards go raw both ways.

    What a codec with a memory (error feedback, DGC) has sent of a step is kept until the next one: a contribution that
    has to be sent again is the same, and its residual is not moved twice. Encoding belongs to one thread at a time.
    """

    def __init__(self, layout: Layout, config: JobConfig) -> None:
        self._layout, self._config = layout, config
        self._raw = isinstance(config.codec, Raw)
        self._stateless = None if self._raw else build_stateless(config.codec)
        self._codecs: dict[tuple[int, int], Codec] = {}
        self._kept: dict[tuple[int, int], tuple[int, Payload]] = {}
        self._decoders = threading.local()
        words = 1
        if self._stateless is not None:
            words = -(-max(self._stateless.bytes_for(s.words) for s in layout.shards) // 4) + 1
        self._pool = BufferPool(words)

    def encode(self, shard: int, step: int, replica: int, values: torch.Tensor) -> Payload | None:
        """The contribution `values` (the shard's words, fp32) as a payload of which the caller releases the buffer.

        None: it is to go raw, because that is the codec, or because the codec cannot carry a NaN or an infinity that is
        in it: the servers must see that.
        """
        if self._raw or self._layout.shards[shard].role == "buffers":
            return None
        key = (shard, replica)
        kept = self._kept.get(key)
        if kept is not None and kept[0] == step:
            kept[1].buffer.retain()
            return kept[1]
        codec = self._codec(key, values.numel())
        buffer = self._pool.take()
        seed = derive_seed(self._config.seed, "codec", step, replica, shard)
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

    def reset(self) -> None:
        """After a roll-back: what codecs remember belongs to a past that is void."""
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

    def _codec(self, key: tuple[int, int], words: int) -> Codec:
        if key not in self._codecs:
            self._codecs[key] = build(self._config.codec, (words,))
        return self._codecs[key]
