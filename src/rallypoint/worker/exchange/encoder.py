"""A worker's side of compression: encodes gradients into payloads and decodes versions into slots."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from rallypoint.codec.base import Codec, NonFinitePayload, Scratch, Stateful
from rallypoint.codec.build import build, build_stateless
from rallypoint.codec.shards import ShardCodecs
from rallypoint.codec.state import CodecState, dump, load
from rallypoint.config import JobConfig, codec_of
from rallypoint.core.layout import Layout
from rallypoint.core.order import derive_seed
from rallypoint.core.worker.handover import Encoding, encoding_of
from rallypoint.errors import ProtocolError
from rallypoint.net.pool import Buffer, BufferPool


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded gradient: the codec's number, the bytes, and the pooled buffer that holds them."""

    code: int
    data: memoryview
    buffer: Buffer


class Encoder:
    """Encodes contributions with the codecs of their groups, and decodes versions. Shards of buffers go raw both ways.

    For a codec with a state (error feedback, DGC, PowerSGD) the encoder keeps each payload until the next step. So a
    contribution that is sent again has the same bytes, and its residual is updated only once.
    """

    def __init__(self, layout: Layout, config: JobConfig) -> None:
        self._layout, self._config = layout, config
        self._scratch = Scratch()
        self._lock = threading.Lock()  # guards the scratch memory and the codec states
        self._codecs: dict[tuple[int, int], Codec] = {}
        # (shard, replica) -> (step, payload); None: it went raw
        self._kept: dict[tuple[int, int], tuple[int, Payload | None]] = {}
        self._decoders = threading.local()
        self._pools = _pools(layout, ShardCodecs(config, self._scratch))

    def encode(self, shard: int, step: int, replica: int, values: torch.Tensor) -> Payload | None:
        """Encode `values` (the shard's words, 1-D fp32) as a payload. The caller releases its buffer.

        Returns None if the contribution goes raw: the group's codec is raw, or the values contain a NaN or an infinity
        that the codec cannot carry and that the servers must see.
        """
        pool = self._pools[shard]
        if pool is None:
            return None
        with self._lock:
            return self._encode((shard, replica), step, values, pool)

    def reset(self) -> None:
        """Drop all codec states: a roll-back has made them stale."""
        with self._lock:
            for codec in self._codecs.values():
                if isinstance(codec, Stateful):
                    codec.reset()
            for key in list(self._kept):
                self._let_go(key)

    def give(self, shard: int, replica: int) -> CodecState | None:
        """Remove the codec state of (shard, replica) from this encoder and return it; None if there is none."""
        key = (shard, replica)
        with self._lock:
            codec = self._codecs.pop(key, None)
            if key not in self._kept or not isinstance(codec, Stateful):
                return None
            codec_state = self._dump(key, codec)
            self._let_go(key)
            return codec_state

    def copy(self, shard: int, replica: int, step: int) -> CodecState | None:
        """Return a copy of the codec state of (shard, replica) after `step`; None if there is none of that step."""
        key = (shard, replica)
        with self._lock:
            codec = self._codecs.get(key)
            if self._kept.get(key, (-1, None))[0] != step or not isinstance(codec, Stateful):
                return None
            return self._dump(key, codec)

    def take(self, shard: int, replica: int, codec_state: CodecState | None) -> None:
        """Install a codec state that another worker had; None drops the one here.

        Raises ProtocolError if the bytes do not fit.
        """
        key, pool = (shard, replica), self._pools[shard]
        with self._lock:
            self._codecs.pop(key, None)
            self._let_go(key)
            if codec_state is None:
                return
            codec = self._codec(key)
            sent = load(codec, codec_state.code, codec_state.data)
            if pool is None or len(sent) > codec.bytes_for(self._layout.shards[shard].words):
                raise ProtocolError(f"a codec state of shard {shard} with a contribution of {len(sent)} bytes")
            payload = None
            if len(sent):
                buffer = pool.take()
                buffer.bytes[: len(sent)] = sent
                payload = Payload(codec.code, buffer.bytes[: len(sent)], buffer)
            self._keep(key, codec_state.step, payload)

    def decode(self, payload: memoryview, into: torch.Tensor) -> None:
        """Decode a version's payload, as a server sent it, into `into`.

        Raises ProtocolError if the payload is invalid.
        """
        codec = getattr(self._decoders, "codec", None)
        if codec is None:
            codec = self._decoders.codec = build_stateless(self._config.down)
        codec.decode(payload, into)

    def _dump(self, key: tuple[int, int], codec: Codec) -> CodecState:
        assert isinstance(codec, Stateful)
        step, payload = self._kept[key]
        data = dump(codec) + (bytes(payload.data) if payload is not None else b"")
        return CodecState(step, codec.code, memoryview(data))

    def _encode(self, key: tuple[int, int], step: int, values: torch.Tensor, pool: BufferPool) -> Payload | None:
        last, kept = self._kept.get(key, (None, None))
        match encoding_of(last, step, drops=self._config.quorum is not None):
            case Encoding.AGAIN:
                if kept is not None:
                    kept.buffer.retain()
                return kept
            case Encoding.OVER:
                return None
            case Encoding.ANEW:
                self._codecs.pop(key, None)
                self._let_go(key)
            case Encoding.NEXT:
                pass
        codec = self._codec(key)
        buffer = pool.take()
        seed = derive_seed(self._config.seed, "codec", step, key[1], key[0])
        try:
            used = codec.encode(values, buffer.bytes, seed=seed)
        except NonFinitePayload:
            buffer.release()
            if isinstance(codec, Stateful):
                self._keep(key, step, None)
            return None
        payload = Payload(codec.code, buffer.bytes[:used], buffer)
        if isinstance(codec, Stateful):
            buffer.retain()
            self._keep(key, step, payload)
        return payload

    def _keep(self, key: tuple[int, int], step: int, payload: Payload | None) -> None:
        self._let_go(key)
        self._kept[key] = (step, payload)

    def _let_go(self, key: tuple[int, int]) -> None:
        _, payload = self._kept.pop(key, (-1, None))
        if payload is not None:
            payload.buffer.release()

    def _codec(self, key: tuple[int, int]) -> Codec:
        if key not in self._codecs:
            shard = self._layout.shards[key[0]]
            self._codecs[key] = build(codec_of(self._config, shard.group), shard.shape, self._scratch)
        return self._codecs[key]


def _pools(layout: Layout, codecs: ShardCodecs) -> list[BufferPool | None]:
    """Buffer pools for the payloads, by shard: one pool for each group; None for shards that go raw."""
    bounds: dict[int, int] = {}
    for shard in layout.shards:
        if (codec := codecs.of(shard)) is not None:
            bounds[shard.group] = max(bounds.get(shard.group, 0), codec.bytes_for(shard.words))
    pools = {group: BufferPool(-(-nbytes // 4)) for group, nbytes in bounds.items()}
    return [pools[shard.group] if codecs.of(shard) is not None else None for shard in layout.shards]
