"""The codecs that every contract test runs against, and values to give them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rallypoint.codec.base import PIECE_WORDS, Codec
from rallypoint.codec.build import build, build_stateless
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int4, Int8, PowerSGD, RandomK, Raw, Sign, TopK
from rallypoint.net.pool import bytes_of

Shape = tuple[int, ...]

SPECS: dict[str, CodecSpec] = {
    "raw": Raw(), "fp16": Fp16(), "bf16": Bf16(), "int8": Int8(error_feedback=False),
    "int8-stochastic": Int8(stochastic=True, error_feedback=False), "int8-feedback": Int8(),
    "int4": Int4(error_feedback=False), "int4-stochastic": Int4(stochastic=True, error_feedback=False),
    "int4-feedback": Int4(), "topk": TopK(error_feedback=False),
    "topk-exact": TopK(sampled=False, error_feedback=False),
    "topk-half": TopK(ratio=0.5, sampled=False, error_feedback=False), "topk-feedback": TopK(),
    "randomk": RandomK(error_feedback=False), "randomk-feedback": RandomK(), "sign": Sign(error_feedback=False),
    "sign-feedback": Sign(block=256), "dgc": DGC(ratio=0.01, warmup_steps=3, clip=10.0),
    "powersgd": PowerSGD(error_feedback=False), "powersgd-feedback": PowerSGD(),
}

FINITE_ONLY = [name for name in SPECS if name not in ("raw", "fp16", "bf16")]
STATEFUL = [name for name in SPECS if name.startswith(("dgc", "powersgd")) or name.endswith("feedback")]

# As vectors; PowerSGD gets the matrix that has as many words, or else a vector, which goes raw.
MATRIX = {48 * 80: (48, 80), 300 * 500: (300, 500)}
SIZES = [0, 1, 2, 63, 255, 256, 257, 1000, 48 * 80, 65536, 300 * 500, PIECE_WORDS, 3 * PIECE_WORDS + 77]


def shape_for(spec: CodecSpec, words: int) -> Shape:
    return MATRIX.get(words, (words,)) if isinstance(spec, PowerSGD) else (words,)


def encoder_of(name: str, words: int) -> Codec:
    return build(SPECS[name], shape_for(SPECS[name], words))


def decoder_of(name: str, words: int) -> Codec:
    return build_stateless(SPECS[name], shape_for(SPECS[name], words))


def gradient(words: int, seed: int = 0, scale: float = 1e-3) -> torch.Tensor:
    """Heavy-tailed values."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(words, generator=source)
    return scale * values * torch.exp(torch.randn(words, generator=source))


def encoded(codec: Codec, values: torch.Tensor, seed: int = 7) -> memoryview:
    """The payload alone, in memory of its own."""
    room = bytes_of(torch.full((codec.bytes_for(values.numel()) // 4 + 1,), -1.0))
    used = codec.encode(values, room, seed=seed)
    return room[:used]


def decoded(codec: Codec, payload: memoryview, words: int) -> torch.Tensor:
    into = torch.full((words,), 123.0)
    codec.decode(payload, into)
    return into


def there_and_back(codec: Codec, values: torch.Tensor, seed: int = 7) -> torch.Tensor:
    return decoded(codec, encoded(codec, values, seed), values.numel())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.view(torch.int32), b.view(torch.int32)))


Fill = Callable[[int], torch.Tensor]

EDGES: dict[str, Fill] = {
    "zeros": torch.zeros,
    "negative zeros": lambda n: torch.full((n,), -0.0),
    "all equal": lambda n: torch.full((n,), -0.125),
    "denormals": lambda n: gradient(n) * 1e-37,
    "one word in many": lambda n: torch.nn.functional.one_hot(torch.tensor(n // 3), n).float() * -4.0,
    "large": lambda n: gradient(n).sign() * torch.linspace(1e29, 1e30, n),
    "two magnitudes": lambda n: torch.where(torch.arange(n) % 97 == 0, 5.0, 1e-6),
    "near the end of the range": lambda n: gradient(n).sign() * 3e38,
}
