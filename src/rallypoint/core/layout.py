"""Named parameters and buffers as one flat vector of 4-byte words, cut into shards.

The vector is a pure function of names, shapes, dtypes and optimizer groups, so two processes that build the same
model agree on it without talking; `Layout.fingerprint` is what they compare. Inside a group the parameters lie in
*backward order* (last registered first), so shards complete while the backward pass still runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from rallypoint.core.table import Part, parts_of
from rallypoint.errors import ModelError

WORD_BYTES = 4
SHARD_BYTES = 1 << 20
_GROUP_ALIGNMENT = 16  # words: a cache line, and enough for any buffer dtype to be viewed in place

Role = Literal["parameters", "buffers", "rows"]

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


class Shard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A contiguous range of words inside one optimizer group (or of the buffers: `group` is -1).

    With `columns` it is whole rows of one parameter, seen as a matrix of that many columns; 0: it is just words.
    With `part` it is that part of a table instead, and no range: the vector has nothing of a table.
    """

    index: int
    group: int
    start: int
    stop: int
    columns: int = 0
    part: Part | None = None

    @property
    def words(self) -> int:
        """fp32 words that a server keeps of it at one version."""
        return self.stop - self.start if self.part is None else self.part.rows * self.columns

    @property
    def nbytes(self) -> int:
        return self.words * WORD_BYTES

    @property
    def slot_bytes(self) -> int:
        """Its bytes in the flat vector: none of a table's part."""
        return (self.stop - self.start) * WORD_BYTES

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns) of a matrix's rows, else (words,)."""
        return (self.words // self.columns, self.columns) if self.columns else (self.words,)

    @property
    def role(self) -> Role:
        return "buffers" if self.group < 0 else "parameters" if self.part is None else "rows"


class Layout(msgspec.Struct, frozen=True):
    """The flat vector: `entries` in memory order, `shards` in memory order, `words` in all (fp32 or raw bytes).

    `tables` lie beside it: their parts are the last of the shards.
    """

    entries: tuple[Entry, ...]
    shards: tuple[Shard, ...]
    words: int
    fingerprint: str
    tables: tuple[TensorSpec, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        """K: the bytes of gradient that one replica pushes in a step (fp32), tables aside."""
        return sum(shard.slot_bytes for shard in self.shards if shard.group >= 0)

    @property
    def largest_shard(self) -> int:
        """Words of the largest shard of the vector."""
        return max((shard.words for shard in self.shards if shard.part is None), default=0)

    def shards_touching(self, start: int, stop: int) -> list[int]:
        """Indices of the shards that share at least one word with `start..stop`."""
        return [shard.index for shard in self.shards if shard.start < stop and start < shard.stop]


def words_of(spec: TensorSpec) -> int:
    """Words a tensor takes: one per element for a parameter (fp32 on the wire), its bytes in pairs for a buffer."""
    if spec.group >= 0:
        return spec.numel
    return 2 * math.ceil(spec.numel * _ITEM_BYTES[spec.dtype] / (2 * WORD_BYTES))


def factors_pay(rows: int, columns: int, rank: int) -> bool:
    """Are two factors of `rank` smaller than their product, a matrix of `rows` by `columns`?"""
    return rank <= min(rows, columns) and rank * (rows + columns) < rows * columns


def build_layout(
    specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES, ranks: Mapping[int, int] | None = None,
    tables: Sequence[TensorSpec] = (),
) -> Layout:  # fmt: skip
    """Lay `specs` (in registration order) out as one vector and cut it into shards of at most `shard_bytes`.

    `ranks` are the groups whose matrices are sent as factors of that rank (PowerSGD). There, each parameter of two or
    more dimensions, seen as a matrix of shape[0] rows, is cut into whole rows of about equal number, and shares no
    shard; except where so few rows fit into a shard that their factors would save nothing.

    `tables` are the parameters (of two dimensions) whose rows only the servers keep.

    Raises ModelError when there is nothing to train, a name repeats, or a dtype cannot be carried.
    """
    if shard_bytes < WORD_BYTES or shard_bytes % WORD_BYTES:
        raise ModelError(f"a shard of {shard_bytes} bytes is impossible: use a positive multiple of {WORD_BYTES}")
    _check_specs(specs, tables)
    entries: list[Entry] = []
    shards: list[Shard] = []
    shard_words, position = shard_bytes // WORD_BYTES, 0
    for group in _groups_in_order(specs):
        position = -(-position // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT
        start, rank = position, (ranks or {}).get(group, 0)
        for spec in reversed([s for s in specs if s.group == group]):
            entries.append(Entry(spec, position, position + words_of(spec)))
            if edges := _row_edges(spec, shard_words, rank):
                shards.extend(_cut(group, start, position, shard_words, first=len(shards)))
                shards.extend(_rows(entries[-1], edges, first=len(shards)))
                start = entries[-1].stop
            position += words_of(spec)
        shards.extend(_cut(group, start, position, shard_words, first=len(shards)))
    for index, table in enumerate(tables):
        rows, columns = table.shape
        for part in parts_of(index, rows, columns, shard_bytes):
            shards.append(Shard(len(shards), table.group, position, position, columns, part))
    return Layout(tuple(entries), tuple(shards), position, _fingerprint(entries, shards, tables), tuple(tables))


def first_difference(ours: Layout, theirs: Layout) -> str | None:
    """The first tensor in which two layouts differ, as a phrase; None when they are equal."""
    here, there = ([*(entry.spec for entry in layout.entries), *layout.tables] for layout in (ours, theirs))
    for a, b in zip(here, there, strict=False):
        if a != b:
            return f"{_phrase(a)} here, {_phrase(b)} there"
    if len(here) != len(there):
        longer, where = (here, "here") if len(here) > len(there) else (there, "there")
        return f"{_phrase(longer[min(len(here), len(there))])} exists only {where}"
    return None if ours.fingerprint == theirs.fingerprint else "the shards are cut differently"


def _phrase(spec: TensorSpec) -> str:
    kind = "buffer" if spec.group < 0 else "parameter"
    return f"{kind} {spec.name} {list(spec.shape)} {spec.dtype} (group {spec.group})"


def _check_specs(specs: Sequence[TensorSpec], tables: Sequence[TensorSpec]) -> None:
    if not any(spec.group >= 0 and spec.numel for spec in (*specs, *tables)):
        raise ModelError("the model has no trainable parameter: set requires_grad=True on what should learn")
    seen: set[str] = set()
    for spec in (*specs, *tables):
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


def _row_edges(spec: TensorSpec, shard_words: int, rank: int) -> list[int]:
    """The rows at which to cut a matrix that is sent as factors of `rank`, both ends included; [] if it is not."""
    if rank < 1 or len(spec.shape) < 2 or not spec.numel:
        return []
    rows, columns = spec.shape[0], spec.numel // spec.shape[0]
    if not (fitting := min(rows, shard_words // columns)):
        return []
    parts = math.ceil(rows / fitting)
    return [rows * part // parts for part in range(parts + 1)] if factors_pay(rows // parts, columns, rank) else []


def _rows(entry: Entry, edges: Sequence[int], first: int) -> list[Shard]:
    columns = entry.spec.numel // entry.spec.shape[0]
    cuts = [entry.start + row * columns for row in edges]
    return [Shard(first + i, entry.spec.group, cuts[i], cuts[i + 1], columns) for i in range(len(cuts) - 1)]


def _fingerprint(entries: Sequence[Entry], shards: Sequence[Shard], tables: Sequence[TensorSpec]) -> str:
    encoded = msgspec.json.encode([entries, shards, *([tables] if tables else [])])
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
