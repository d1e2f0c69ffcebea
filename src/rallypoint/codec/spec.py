"""Which codec a job uses, as data in its configuration. `codec.build` makes the codec of a spec."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Raw(msgspec.Struct, frozen=True, tag="raw", kw_only=True, forbid_unknown_fields=True):
    """fp32 as it is: 4 bytes a word, nothing lost."""


class Fp16(msgspec.Struct, frozen=True, tag="fp16", kw_only=True, forbid_unknown_fields=True):
    """IEEE half precision: 2 bytes a word; a value beyond 65504 becomes an infinity."""


class Bf16(msgspec.Struct, frozen=True, tag="bf16", kw_only=True, forbid_unknown_fields=True):
    """bfloat16: 2 bytes a word, fp32's range, 8 bits of precision."""


class Int8(msgspec.Struct, frozen=True, tag="int8", kw_only=True, forbid_unknown_fields=True):
    """8-bit integers with a scale for each `block` words (a power of two from 32): 1 byte a word and 4 a block.

    `stochastic` rounds randomly so that the mean is right, which needs no error feedback.
    """

    block: int = 256
    stochastic: bool = False
    error_feedback: bool = True


class Int4(msgspec.Struct, frozen=True, tag="int4", kw_only=True, forbid_unknown_fields=True):
    """4-bit integers with a scale for each `block` words: half a byte a word and 4 a block. `stochastic`: see Int8."""

    block: int = 64
    stochastic: bool = False
    error_feedback: bool = True


class TopK(msgspec.Struct, frozen=True, tag="topk", kw_only=True, forbid_unknown_fields=True):
    """The `ratio` largest words, at 6 bytes each. `sampled` finds them faster, by a threshold from a sample."""

    ratio: _Share = 0.01
    sampled: bool = True
    error_feedback: bool = True


class RandomK(msgspec.Struct, frozen=True, tag="randomk", kw_only=True, forbid_unknown_fields=True):
    """Random words, `ratio` of all, at 4 bytes each; without error feedback scaled so that the mean is right."""

    ratio: _Share = 0.01
    error_feedback: bool = True


class Sign(msgspec.Struct, frozen=True, tag="sign", kw_only=True, forbid_unknown_fields=True):
    """One bit a word, and the mean magnitude of each `block` words (a power of two from 32)."""

    block: int = 1024
    error_feedback: bool = True


class DGC(msgspec.Struct, frozen=True, tag="dgc", kw_only=True, forbid_unknown_fields=True):
    """Deep Gradient Compression: top-k with momentum on the worker, for plain SGD on the servers.

    `clip` bounds the 2-norm of each shard's gradient. Over `warmup_steps` steps the ratio falls from 0.25 to `ratio`.
    """

    ratio: _Share = 0.001
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    clip: Annotated[float, msgspec.Meta(gt=0)] | None = None
    warmup_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    sampled: bool = True


class PowerSGD(msgspec.Struct, frozen=True, tag="powersgd", kw_only=True, forbid_unknown_fields=True):
    """Factors of `rank` for every shard of a parameter of two or more dimensions; others are sent in fp32.

    Such a parameter, as a matrix of shape[0] rows, has shards of its own: each has as many whole rows as `shard_bytes`
    holds.
    """

    rank: Annotated[int, msgspec.Meta(ge=1)] = 4
    error_feedback: bool = True


CodecSpec = Raw | Fp16 | Bf16 | Int8 | Int4 | TopK | RandomK | Sign | DGC | PowerSGD


def has_state(spec: CodecSpec) -> bool:
    """Return True if a worker keeps codec state from step to step (a residual, a velocity, PowerSGD's Q)."""
    return isinstance(spec, DGC | PowerSGD) or getattr(spec, "error_feedback", False)
