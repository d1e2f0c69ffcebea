"""Makes the codec of a spec, for each shard, and moves its state as bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from rallypoint.codec.base import Codec, ErrorFeedback, Scratch, Stateful, all_finite
from rallypoint.codec.blocks import CastCodec, Int4Codec, Int8Codec, SignCodec
from rallypoint.codec.lowrank import LowRankCodec, worthwhile
from rallypoint.codec.sparse import DGCCodec, RandomKCodec, TopKCodec, largest_ratio
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int4, Int8, PowerSGD, RandomK, Raw, Sign, TopK, has_state
from rallypoint.config import JobConfig, codec_of
from rallypoint.core.layout import Layout, Shard
from rallypoint.errors import ProtocolError

# ---- Makes the codec of a spec: with state for a worker, without for a server ----

_CASTS = {Raw: torch.float32, Fp16: torch.float16, Bf16: torch.bfloat16}


def build(spec: CodecSpec, shape: tuple[int, ...], scratch: Scratch | None = None) -> Codec:
    """Return the codec that encodes one shard of one replica, with a residual if the spec asks for error feedback.

    `shape` is (words,), or (rows, columns) when the shard is exactly one matrix, which matters only to PowerSGD. Codecs
    of one thread may share `scratch`. Raises ConfigError on impossible settings.
    """
    words = math.prod(shape)
    if isinstance(spec, DGC):
        return DGCCodec(
            words, ratio=spec.ratio, momentum=spec.momentum, clip=spec.clip, warmup_steps=spec.warmup_steps,
            sampled=spec.sampled, scratch=scratch,
        )  # fmt: skip
    codec = build_stateless(spec, shape, scratch)
    if getattr(spec, "error_feedback", False) and not codec.lossless:
        return ErrorFeedback(codec, words, scratch)
    return codec


def build_stateless(spec: CodecSpec, shape: tuple[int, ...] = (), scratch: Scratch | None = None) -> Codec:
    """Return the codec that decodes the payloads of `build`'s codec, with the same `bytes_for`.

    It keeps nothing from step to step: it encodes without residual, momentum or warm-up.

    Only PowerSGD needs `shape`; the other codecs serve shards of any size.
    """
    match spec:
        case Raw() | Fp16() | Bf16():
            return CastCodec(_CASTS[type(spec)], scratch)
        case Int8():
            return Int8Codec(spec.block, stochastic=spec.stochastic, scratch=scratch)
        case Int4():
            return Int4Codec(spec.block, stochastic=spec.stochastic, scratch=scratch)
        case DGC():
            return TopKCodec(largest_ratio(spec.ratio, spec.warmup_steps), sampled=spec.sampled, scratch=scratch)
        case TopK():
            return TopKCodec(spec.ratio, sampled=spec.sampled, scratch=scratch)
        case RandomK():
            return RandomKCodec(spec.ratio, unbiased=not spec.error_feedback)
        case Sign():
            return SignCodec(spec.block, scratch)
        case PowerSGD():
            if len(shape) == 2 and worthwhile(shape, spec.rank):
                return LowRankCodec(shape, spec.rank)
            return CastCodec(torch.float32, scratch)


# ---- The codec of each shard: its group's from workers to servers, `down` from servers to workers ----


class ShardCodecs:
    """The codecs that decode contributions to a job's shards. One instance belongs to one thread.

    A shard that its codec would not make smaller goes raw. One exception: DGC holds the momentum on the worker, so all
    of its shards use it. Raises ConfigError on impossible settings.
    """

    def __init__(self, config: JobConfig, scratch: Scratch | None = None) -> None:
        self._config, self._scratch = config, scratch or Scratch()
        self._made: dict[tuple[int, tuple[int, ...]], Codec] = {}

    def of(self, shard: Shard) -> Codec | None:
        """Return the shard's codec, without state; None when it goes raw, like tables, which are sparse already."""
        if shard.role == "rows":
            return None
        spec = codec_of(self._config, shard.group)
        key = (shard.group, shard.shape if shard.columns else ())
        codec = self._made.get(key)
        if codec is None:
            codec = self._made[key] = build_stateless(spec, key[1], self._scratch)
        return codec if isinstance(spec, DGC) or _pays(codec, shard) else None


def down_codec(config: JobConfig, shard: Shard, scratch: Scratch) -> Codec | None:
    """Return the codec for the versions of a shard; None when they go raw."""
    codec = build_stateless(config.down, (), scratch)
    return codec if shard.role == "parameters" and _pays(codec, shard) else None


def _pays(codec: Codec, shard: Shard) -> bool:
    return codec.bytes_for(shard.words) < shard.nbytes


# ---- Codec state as bytes: the state of one shard of one replica, for another worker and for snapshots ----
#
# It is the state after a step's contribution was encoded, together with that contribution's payload. The worker that
# takes the replica over may have to send the contribution again (I2), with the same bytes. First come the state's
# tensors, in the order of their names, little-endian; then the payload, empty if that contribution went raw.


@dataclass(frozen=True, slots=True)
class CodecState:
    """The codec state after `step` (counted by the shard). `code` is the codec's number."""

    step: int
    code: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class StateLimits:
    """The possible codec states of one shard: the codec's number, and the smallest and largest size in bytes."""

    code: int
    least: int
    most: int

    def check(self, code: int, nbytes: int) -> None:
        """Raise ProtocolError when a state of codec `code` and `nbytes` bytes is impossible for the shard."""
        if code != self.code or not self.least <= nbytes <= self.most:
            raise ProtocolError(
                f"a codec state of {nbytes} bytes in codec {code}: {self.least} to {self.most} in codec "
                f"{self.code} are possible"
            )


def limits_of(codec: Codec, words: int) -> StateLimits:
    """Return the limits for a codec that serves a shard of `words` words."""
    state = state_bytes(codec)
    return StateLimits(codec.code, state, state + codec.bytes_for(words))


def state_bytes(codec: Codec) -> int:
    """Return the bytes of the codec's state; 0 for a codec without state."""
    return sum(t.numel() * t.element_size() for t in codec.state().values()) if isinstance(codec, Stateful) else 0


def dump(codec: Stateful) -> bytes:
    parts = (tensor.numpy() for _, tensor in sorted(codec.state().items()))
    return b"".join(part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes() for part in parts)


def load(codec: Codec, code: int, data: memoryview) -> memoryview:
    """Load into `codec`, of number `code`, the state that `dump` wrote. Returns what follows the state in `data`.

    Raises ProtocolError when the bytes are invalid, or hold a NaN or an infinity; the codec is then unchanged.
    """
    size = state_bytes(codec)
    if not isinstance(codec, Stateful) or code != codec.code or len(data) < size:
        raise ProtocolError(f"{len(data)} bytes of codec {code} are no state of codec {codec.code}, which has {size}")
    state, position = {}, 0
    for name, own in sorted(codec.state().items()):
        dtype = own.numpy().dtype
        nbytes = own.numel() * own.element_size()
        values = np.frombuffer(data[position : position + nbytes], dtype.newbyteorder("<")).astype(dtype)
        state[name] = torch.from_numpy(values).view(own.shape)
        position += nbytes
        if not (all_finite(state[name].view(-1)) if own.dtype.is_floating_point else (values >= 0).all()):
            raise ProtocolError(f"the state of codec {code} has a {name} that no codec comes to")
    codec.load_state(state)
    return data[size:]


class ShardCodecStates:
    """Which shards of a job have codec states, and their possible sizes. Threads may share it."""

    def __init__(self, config: JobConfig) -> None:
        self._config, self._codecs = config, ShardCodecs(config)
        self._limits: dict[tuple[int, tuple[int, ...]], StateLimits] = {}

    def has(self, shard: Shard) -> bool:
        return has_state(codec_of(self._config, shard.group)) and self._codecs.of(shard) is not None

    def of(self, shard: Shard) -> StateLimits:
        """Return the limits of this shard's codec state. Raises ProtocolError when it has none."""
        if not self.has(shard):
            raise ProtocolError(f"a codec state of shard {shard.index}, whose codec has none in this job")
        key = (shard.group, shard.shape)
        if key not in self._limits:
            self._limits[key] = limits_of(build(codec_of(self._config, shard.group), shard.shape), shard.words)
        return self._limits[key]

    def among(self, layout: Layout) -> tuple[int, ...]:
        """Return the shards that have codec states, ascending."""
        return tuple(shard.index for shard in layout.shards if self.has(shard))
