"""Named parameters and buffers as one flat vector of 4-byte words, cut into shards.

The vector is a pure function of names, shapes, dtypes and optimizer groups, so two processes that build the same
model agree on it without talking; `Layout.fingerprint` is what they compare. Inside a group the parameters lie in
*backward order* (last registered first), so shards complete while the backward pass still runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from rallypoint.errors import ModelError

WORD_BYTES = 4
SHARD_BYTES = 1 << 20
_GROUP_ALIGNMENT = 16  # words: a cache line, and enough for any buffer dtype to be viewed in place

Role = Literal["parameters", "buffers"]

_PARAMETER_DTYPES = {"float32", "float16", "bfloat16"}
_ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True):
    """One trainable parameter, or one buffer, as the model declares it.

    `group` is the index of its optimizer group; buffers carry -1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Entry(msgspec.Struct, frozen=True):
    """Where a tensor lies: words `start` to `stop` of the flat vector."""

    spec: TensorSpec
    start: int
    stop: int


class Shard(msgspec.Struct, frozen=True):
    """A contiguous range of words inside one optimizer group (or of the buffers: `group` is -1)."""

    index: int
    group: int
    start: int
    stop: int

    @property
    def words(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.words * WORD_BYTES

    @property
    def role(self) -> Role:
        return "buffers" if self.group < 0 else "parameters"


class Layout(msgspec.Struct, frozen=True):
    """The flat vector: `entries` in memory order, `shards` in memory order, `words` in all (fp32 or raw bytes)."""

    entries: tuple[Entry, ...]
    shards: tuple[Shard, ...]
    words: int
    fingerprint: str

    @property
    def parameter_bytes(self) -> int:
        """K: the bytes of gradient that one replica pushes in a step (fp32)."""
        return sum(shard.nbytes for shard in self.shards if shard.group >= 0)

    @property
    def largest_shard(self) -> int:
        """Words of the largest shard."""
        return max(shard.words for shard in self.shards)

    def shards_touching(self, start: int, stop: int) -> list[int]:
        """Indices of the shards that share at least one word with `start..stop`."""
        return [shard.index for shard in self.shards if shard.start < stop and start < shard.stop]


def words_of(spec: TensorSpec) -> int:
    """Words a tensor takes: one per element for a parameter (fp32 on the wire), its bytes in pairs for a buffer."""
    if spec.group >= 0:
        return spec.numel
    return 2 * math.ceil(spec.numel * _ITEM_BYTES[spec.dtype] / (2 * WORD_BYTES))


def build_layout(specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> Layout:
    """Lay `specs` (in registration order) out as one vector and cut it into shards of at most `shard_bytes`.

    Raises ModelError when there is nothing to train, a name repeats, or a dtype cannot be carried.
    """
    if shard_bytes < WORD_BYTES or shard_bytes % WORD_BYTES:
        raise ModelError(f"a shard of {shard_bytes} bytes is impossible: use a positive multiple of {WORD_BYTES}")
    _check_specs(specs)
    entries: list[Entry] = []
    shards: list[Shard] = []
    position = 0
    for group in _groups_in_order(specs):
        position = -(-position // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT
        start = position
        for spec in reversed([s for s in specs if s.group == group]):
            entries.append(Entry(spec, position, position + words_of(spec)))
            position += words_of(spec)
        shards.extend(_cut(group, start, position, shard_bytes // WORD_BYTES, first=len(shards)))
    return Layout(tuple(entries), tuple(shards), position, _fingerprint(entries, shards))


def first_difference(ours: Layout, theirs: Layout) -> str | None:
    """The first tensor in which two layouts differ, as a phrase; None when they are equal."""
    for a, b in zip(ours.entries, theirs.entries, strict=False):
        if a.spec != b.spec:
            return f"{_phrase(a.spec)} here, {_phrase(b.spec)} there"
    if len(ours.entries) != len(theirs.entries):
        longer, where = (ours, "here") if len(ours.entries) > len(theirs.entries) else (theirs, "there")
        extra = longer.entries[min(len(ours.entries), len(theirs.entries))]
        return f"{_phrase(extra.spec)} exists only {where}"
    return None if ours.fingerprint == theirs.fingerprint else "the shards are cut differently"


def _phrase(spec: TensorSpec) -> str:
    kind = "buffer" if spec.group < 0 else "parameter"
    return f"{kind} {spec.name} {list(spec.shape)} {spec.dtype} (group {spec.group})"


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    if not any(spec.group >= 0 and spec.numel for spec in specs):
        raise ModelError("the model has no trainable parameter: set requires_grad=True on what should learn")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ModelError(f"two tensors of the model are both named {spec.name}")
        seen.add(spec.name)
        if spec.group >= 0 and spec.dtype not in _PARAMETER_DTYPES:
            raise ModelError(f"parameter {spec.name} is {spec.dtype}: servers keep fp32; cast the model to float32")
        if spec.group < 0 and spec.dtype not in _ITEM_BYTES:
            raise ModelError(f"buffer {spec.name} is {spec.dtype}, which cannot be shared: make it persistent=False")


def _groups_in_order(specs: Iterable[TensorSpec]) -> list[int]:
    present = {spec.group for spec in specs}
    return sorted(g for g in present if g >= 0) + ([-1] if -1 in present else [])


def _cut(group: int, start: int, stop: int, shard_words: int, first: int) -> list[Shard]:
    edges = [*range(start, stop, shard_words), stop]
    return [Shard(first + i, group, edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def _fingerprint(entries: Sequence[Entry], shards: Sequence[Shard]) -> str:
    encoded = msgspec.json.encode([entries, shards])
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
