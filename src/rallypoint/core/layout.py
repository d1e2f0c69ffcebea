"""Named parameters and buffers as one flat vector of 4-byte words, cut into shards.

The layout is a pure function of names, shapes, dtypes and optimizer groups: processes that build the same model have
the same layout, and compare `Layout.fingerprint`. Inside a group the parameters are in *backward order* (last
registered first), so that shards complete while the backward pass still runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from rallypoint.errors import ModelError

# Tables: embeddings whose rows are on the servers only. A table is cut into parts, each on one server.
#
# Row r is in part r modulo the number of parts, so that frequently used rows are spread evenly.

PART_BYTES = 16 << 20  # quick to move; with an optimizer's two moments far below the limit of a frame
_SPREAD = 8  # the least number of parts, where each has at least a shard's bytes: every server should have some


class TablePart(msgspec.Struct, frozen=True):
    """Every `parts`-th row of a table, beginning with row `part`: `rows` rows in all.

    `table` is the table's index in the layout. Row r of the table is row ``r // parts`` of part ``r % parts``.
    Example: parts = 8; row 19 of the table is row 2 of part 3.
    """

    table: int
    part: int
    parts: int
    rows: int


def parts_of(table: int, rows: int, columns: int, shard_bytes: int) -> list[TablePart]:
    """Cut table number `table` (`rows` x `columns`, fp32) into parts of at most about PART_BYTES.

    A small table has up to 8 parts, so that several servers share it. The result does not depend on the number of
    servers: it may change during the job.
    """
    nbytes = rows * columns * 4
    parts = min(rows, max(-(-nbytes // PART_BYTES), min(_SPREAD, -(-nbytes // shard_bytes))))
    return [TablePart(table, part, parts, len(range(part, rows, parts))) for part in range(parts)]


WORD_BYTES = 4
SHARD_BYTES = 1 << 20
MOST_SHARD_BYTES = 1 << 26  # what a frame carries
_BUFFER_BYTES = 8  # a buffer begins at a multiple of so many bytes; one of larger elements (complex128) at a group's
_GROUP_ALIGNMENT = 16  # words: a cache line, and enough for any buffer dtype to be viewed in place

Role = Literal["parameters", "buffers", "rows"]

_PARAMETER_DTYPES = {"float32", "float16", "bfloat16"}
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "complex32": 4, "uint64": 8, "uint32": 4, "uint16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True):
    """One trainable parameter, or one buffer, of the model; or one tensor of the state that a replica carries.

    `group` is the index of its optimizer group; -1: a buffer; -2 - r: of the state that replica r carries.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Entry(msgspec.Struct, frozen=True):
    """A tensor and its place: words [start, stop) of the flat vector."""

    spec: TensorSpec
    start: int
    stop: int


class Shard(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """Words [start, stop) of the flat vector, inside one optimizer group; or a part of a table.

    What follows from its fields is computed once (I13): it is asked at each step.

    Attributes:
        index: the shard's number.
        group: the index of its optimizer group; -1 for buffers, -2 - r for the state that replica r carries.
        start, stop: its range in words; empty for a part of a table, which is not in the vector.
        columns: if not 0, the shard is whole rows of one parameter, as a matrix of so many columns.
        part: the part of a table that the shard is; None for a range of the vector.
    """

    index: int
    group: int
    start: int
    stop: int
    columns: int = 0
    part: TablePart | None = None

    @cached_property
    def words(self) -> int:
        """The fp32 words that a server keeps for one version of it."""
        return self.stop - self.start if self.part is None else self.part.rows * self.columns

    @cached_property
    def nbytes(self) -> int:
        return self.words * WORD_BYTES

    @cached_property
    def slot_bytes(self) -> int:
        """Its bytes in the flat vector; 0 for a part of a table."""
        return (self.stop - self.start) * WORD_BYTES

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns) if it is rows of a matrix, else (words,)."""
        return (self.words // self.columns, self.columns) if self.columns else (self.words,)

    @property
    def replica(self) -> int | None:
        """The replica that carries it from step to step, and alone contributes to it; None: it is no such state."""
        return -2 - self.group if self.group < -1 else None

    @cached_property
    def role(self) -> Role:
        """What it is for servers. The state that a replica carries is to them like buffers."""
        return "buffers" if self.group < 0 else "parameters" if self.part is None else "rows"


class Layout(msgspec.Struct, frozen=True):
    """The flat vector of a model, and its shards.

    Attributes:
        entries: the tensors, in memory order.
        shards: the shards, in memory order; the parts of tables are the last.
        words: the length of the vector in 4-byte words.
        fingerprint: a hash that is equal for equal layouts.
        tables: the parameters whose rows only the servers keep; they are not in the vector.
    """

    entries: tuple[Entry, ...]
    shards: tuple[Shard, ...]
    words: int
    fingerprint: str
    tables: tuple[TensorSpec, ...] = ()

    @property
    def largest_shard(self) -> int:
        """The words of the largest shard of the vector; 0 if it has none."""
        return max((shard.words for shard in self.shards if shard.part is None), default=0)

    def name_at(self, shard: int, word: int) -> str:
        """The name of the tensor that holds this word of the shard; "" between two tensors."""
        place = self.shards[shard]
        if place.part is not None:
            return self.tables[place.part.table].name
        position = place.start + word
        return next((entry.spec.name for entry in self.entries if entry.start <= position < entry.stop), "")

    def shards_touching(self, start: int, stop: int) -> list[int]:
        """The indices of the shards that share at least one word with [start, stop)."""
        return [shard.index for shard in self.shards if shard.start < stop and start < shard.stop]


def carried_by(replica: int) -> int:
    return -2 - replica


def carried_in(shards: Iterable[Shard]) -> dict[int, int]:
    """For each shard of carried state: the replica that carries it."""
    return {shard.index: shard.replica for shard in shards if shard.replica is not None}


def words_of(spec: TensorSpec) -> int:
    """The words of a tensor: one per element for a parameter (fp32); a buffer's bytes, rounded up to 8, over 4."""
    if spec.group >= 0:
        return spec.numel
    return 2 * math.ceil(spec.numel * DTYPE_BYTES[spec.dtype] / _BUFFER_BYTES)


def factors_pay(rows: int, columns: int, rank: int) -> bool:
    """True if two factors of `rank` are smaller than their product, a matrix of `rows` by `columns`."""
    return rank <= min(rows, columns) and rank * (rows + columns) < rows * columns


def build_layout(
    specs: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES, ranks: Mapping[int, int] | None = None,
    tables: Sequence[TensorSpec] = (), matrices: Container[str] = (),
) -> Layout:  # fmt: skip
    """Lay out `specs` (in registration order) as one vector and cut it into shards of at most `shard_bytes`.

    Args:
        specs: the parameters and buffers.
        shard_bytes: the largest size of a shard; a positive multiple of 4.
        ranks: optimizer group -> rank, for groups whose matrices are sent as two factors (PowerSGD). There, each
            parameter of two or more dimensions is seen as a matrix of shape[0] rows. It gets shards of its own, of
            whole rows; except where so few rows fit into a shard that the factors would not be smaller.
        tables: the parameters (of two dimensions) whose rows only the servers keep.
        matrices: the names of parameters of two dimensions each of which is one shard, whatever its size.

    Raises ModelError when there is nothing to train, when two tensors have the same name, for an unsupported dtype, and
    for a table with rows that no frame carries.
    """
    if shard_bytes < WORD_BYTES or shard_bytes % WORD_BYTES:
        raise ModelError(f"a shard of {shard_bytes} bytes is impossible: use a positive multiple of {WORD_BYTES}")
    _check_specs(specs, tables)
    entries: list[Entry] = []
    shards: list[Shard] = []
    shard_words, position = shard_bytes // WORD_BYTES, 0
    present = {spec.group for spec in specs}
    for group in sorted(g for g in present if g >= 0) + sorted((g for g in present if g < 0), reverse=True):
        position = -(-position // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT
        start, rank = position, (ranks or {}).get(group, 0)
        for spec in reversed([s for s in specs if s.group == group]):
            if group < 0 and DTYPE_BYTES[spec.dtype] > _BUFFER_BYTES:
                position = -(-position // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT
            entries.append(Entry(spec, position, position + words_of(spec)))
            whole = spec.name in matrices and spec.numel
            if edges := [0, spec.shape[0]] if whole else _row_edges(spec, shard_words, rank):
                shards.extend(_cut(group, start, position, shard_words, first=len(shards)))
                shards.extend(_rows(entries[-1], edges, first=len(shards)))
                start = entries[-1].stop
            position += words_of(spec)
        shards.extend(_cut(group, start, position, shard_words, first=len(shards)))
    for index, table in enumerate(tables):
        rows, columns = table.shape
        _check_row(table)
        for part in parts_of(index, rows, columns, shard_bytes):
            shards.append(Shard(len(shards), table.group, position, position, columns, part))
    encoded = msgspec.json.encode([entries, shards, *([tables] if tables else [])])
    fingerprint = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    return Layout(tuple(entries), tuple(shards), position, fingerprint, tuple(tables))


def forward_ranks(layout: Layout) -> list[int]:
    """The rank of each shard in the order in which a forward pass is expected to need them; 0 is first.

    Each group is laid out in backward order, so its last shard is needed first. Groups are interleaved by depth: a
    group's last word belongs to its first layer, and its first word to its last one. Buffers are small and come first.
    """
    ends: dict[int, list[int]] = {}
    for shard in layout.shards:
        first, last = ends.setdefault(shard.group, [shard.start, shard.stop])
        ends[shard.group] = [min(first, shard.start), max(last, shard.stop)]

    def depth(shard: Shard) -> tuple[bool, float]:
        first, last = ends[shard.group]
        return shard.group >= 0, (last - shard.stop) / max(1, last - first)

    order = sorted(layout.shards, key=depth)
    ranks = {shard.index: rank for rank, shard in enumerate(order)}
    return [ranks[shard.index] for shard in layout.shards]


def first_difference(ours: Layout, theirs: Layout) -> str | None:
    """A phrase for the first tensor in which two layouts differ; None when they are equal."""
    here, there = ([*(entry.spec for entry in layout.entries), *layout.tables] for layout in (ours, theirs))
    for a, b in zip(here, there, strict=False):
        if a != b:
            return f"{_phrase(a)} here, {_phrase(b)} there"
    if len(here) != len(there):
        longer, where = (here, "here") if len(here) > len(there) else (there, "there")
        return f"{_phrase(longer[min(len(here), len(there))])} exists only {where}"
    return None if ours.fingerprint == theirs.fingerprint else "the shards are cut differently"


def _phrase(spec: TensorSpec) -> str:
    kind = "parameter" if spec.group >= 0 else "buffer" if spec.group == -1 else "carried state"
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
        if spec.group < 0 and spec.dtype not in DTYPE_BYTES:
            raise ModelError(f"buffer {spec.name} is {spec.dtype}, which cannot be shared: make it persistent=False")


def _check_row(table: TensorSpec) -> None:
    """A part of a table has one row at least, and the gradient of a row is sent with its number."""
    if (nbytes := WORD_BYTES * (2 + table.shape[1])) > MOST_SHARD_BYTES:
        raise ModelError(
            f"a row of {table.name} has {nbytes / (1 << 20):.1f} MiB, and at most {MOST_SHARD_BYTES >> 20} MiB go in "
            "one piece: a table is for many short rows; make this one a parameter (sparse=False)"
        )


def _cut(group: int, start: int, stop: int, shard_words: int, first: int) -> list[Shard]:
    edges = [*range(start, stop, shard_words), stop]
    return [Shard(first + i, group, edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def _row_edges(spec: TensorSpec, shard_words: int, rank: int) -> list[int]:
    """The rows at which to cut a matrix that is sent as factors of `rank`, first and last included; [] if it is not."""
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
