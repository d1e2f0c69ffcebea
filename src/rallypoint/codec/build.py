"""Makes the codec of a spec: with state for a worker, without for a server."""

from __future__ import annotations

import math

from rallypoint.codec.base import Codec, Scratch
from rallypoint.codec.blocks import Int4Codec, Int8Codec
from rallypoint.codec.cast import bf16_codec, fp16_codec, raw_codec
from rallypoint.codec.dgc import DGCCodec, largest_ratio
from rallypoint.codec.feedback import ErrorFeedback
from rallypoint.codec.lowrank import LowRankCodec, worthwhile
from rallypoint.codec.sign import SignCodec
from rallypoint.codec.sparse import RandomKCodec, TopKCodec
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int4, Int8, PowerSGD, RandomK, Raw, Sign, TopK


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
        case Raw():
            return raw_codec(scratch)
        case Fp16():
            return fp16_codec(scratch)
        case Bf16():
            return bf16_codec(scratch)
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
            return raw_codec(scratch)
