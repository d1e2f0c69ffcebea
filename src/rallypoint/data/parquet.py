"""Parquet files, read by row groups."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from rallypoint.data.cache import Cache, cache_of
from rallypoint.data.files import File, StoredFiles
from rallypoint.data.shards import Rows, ShardedDataset, Transform
from rallypoint.errors import DataError, UsageError, to_install

if TYPE_CHECKING:
    import pyarrow

END_BYTES = 64 << 10  # of a file that are read for its footer; more if it is longer
HOLE_BYTES, RANGE_BYTES = 8192, 32 << 20  # pyarrow reads chunks at once that are so near, and together so short
FOOTER_BYTES = 64 << 20  # of footers that are kept, for files to be opened without asking for them again


class Parquet(ShardedDataset):
    """The rows of Parquet files as dicts: ``rp.Parquet("s3://bucket/clicks/*.parquet", columns=["user", "item"])``.

    A number is a NumPy scalar of the column's type, a list of numbers a NumPy array, a text a `str`, what is missing
    None; anything else is what pyarrow makes of it. Footers are read once, when it is made. A row group is read whole,
    and kept until others need its room: give the job ``reading=rp.Reading(order="windowed")``, which reads few row
    groups at a time.

    Arguments:
        urls: a local path or any URL of fsspec; a pattern; a folder, of which the files `.parquet` are taken in the
            order of their names; or several of these.
        columns: those to read, also parts of nested ones (``user.id``); None: all.
        transform: makes a sample of a row's dict; what it draws from the global random generators is seeded.
        cache_bytes: of row groups that each process keeps; the newest one is kept, whatever its size.
        threads: row groups, or footers, that are read at once.
        storage_options: what fsspec needs for the store: keys, endpoints.
        cache: a `Cache`, or a folder for one: what is read from a store is kept on this machine's disk.

    Raises DataError when there are no such files, when one is no Parquet file or lacks a column, and when a store fails
    five times in a row; UsageError when pyarrow is not installed.
    """

    def __init__(
        self, urls: str | Path | Sequence[str | Path], columns: Sequence[str] | None = None, *,
        transform: Transform | None = None, cache_bytes: int = 1 << 30, threads: int = 8,
        storage_options: Mapping[str, Any] | None = None, cache: Cache | str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache_bytes=cache_bytes, threads=threads, transform=transform)
        self._columns = None if columns is None else list(columns)
        self._store = StoredFiles(storage_options, cache=cache_of(cache))
        self._files = self._store.found(urls, ".parquet")
        self._footers: dict[int, Any] = {}
        _parquet()  # with its sentence, if it is not installed
        numbers = range(len(self._files))
        digest = hashlib.blake2b(digest_size=16)
        footers, self._ends = list[Any](), list[bytes]()
        with ThreadPoolExecutor(threads, "reading footers") as pool:
            for file, end in zip(self._files, pool.map(self._end, numbers), strict=True):
                footers.append(self._parsed(len(footers), end))
                self._ends.append(hashlib.sha256(end).digest())
                _add(digest, file.name.encode(), str(file.size).encode(), end)
        for number, footer in zip(numbers, footers, strict=True):
            self._check_columns(number, footer.schema)
        _add(digest, *(name.encode() for name in sorted(self._names if self._columns is None else self._columns)))
        self._digest = digest.digest()
        groups = [(number, group) for number in numbers for group in range(footers[number].num_row_groups)]
        self._groups = groups
        self._index(footers[number].row_group(group).num_rows for number, group in groups)
        if not len(self):
            raise DataError(f"there are no rows in {self._files[0]}" + (" and the other files" * (len(groups) > 1)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_footers": {}}

    def fingerprint(self) -> bytes:
        """Return a digest of the files' names, sizes and footers (row groups, types, statistics), and the columns."""
        return self._digest

    def ranges(self, shard: int) -> list[tuple[File, int, int]]:
        """Return the chunks of the columns of a row group as the one range in which pyarrow reads them.

        Nothing, if it would read several: bytes that were kept in other pieces would be fetched twice.
        """
        number, group = self._groups[shard]
        about = self._footer(number).row_group(group)
        chunks = [about.column(column) for column in range(about.num_columns)]
        wanted = [
            chunk for chunk in chunks if self._columns is None  # else a leaf is one of these columns, or inside one
            or any(f"{chunk.path_in_schema}.".startswith(f"{column}.") for column in self._columns)
        ]  # fmt: skip
        spans = sorted((_begin(chunk), _begin(chunk) + chunk.total_compressed_size) for chunk in wanted)
        near = all(after - stop <= HOLE_BYTES for (_, stop), (after, _) in pairwise(spans))
        if not spans or not near or spans[-1][1] - spans[0][0] > RANGE_BYTES:
            return []
        return [(self._files[number], spans[0][0], spans[-1][1])]

    def _read(self, shard: int) -> Rows:
        number, group = self._groups[shard]
        file = self._files[number]
        try:
            source = self._store.here(file) or self._store.open(file)
            touched = isinstance(source, str) and f"mtime {os.stat(source).st_mtime}" != file.mark
            if touched and hashlib.sha256(self._end(number)).digest() != self._ends[number]:
                raise DataError(f"{file} was written again after the job had begun: its footer is another one")
            opened = _parquet().ParquetFile(source, metadata=self._footer(number))
            table = opened.read_row_group(group, columns=self._columns, use_threads=False)
        except (OSError, ValueError) as error:
            raise DataError(f"row group {group} of {file} cannot be read: {error}") from error
        # To pyarrow "user.id" is the column of that name, and also the part "id" of a column "user"
        return TableRows(table.select([i for i, name in enumerate(table.column_names) if name in self._names]))

    def _footer(self, number: int) -> Any:
        found = self._footers.get(number)
        return self._parsed(number, self._end(number)) if found is None else found

    def _end(self, number: int) -> bytes:
        """The end of a file from its footer on."""
        file = self._files[number]
        begin = max(0, file.size - END_BYTES)
        end = self._store.read(file, begin, file.size)
        size = int.from_bytes(end[-8:-4], "little") + 8
        if size > len(end) and size <= file.size:
            end = self._store.read(file, file.size - size, begin) + end
        return end[-size:]

    def _parsed(self, number: int, end: bytes) -> Any:
        import pyarrow

        try:
            found = _parquet().read_metadata(pyarrow.BufferReader(end))
        except (OSError, ValueError) as error:
            raise DataError(f"{self._files[number]} cannot be read as a Parquet file: {error}") from error
        if sum(footer.serialized_size for footer in list(self._footers.values())) < FOOTER_BYTES:
            self._footers[number] = found
        return found

    def _check_columns(self, number: int, schema: Any) -> None:
        names = schema.to_arrow_schema().names
        if number == 0:
            wanted = names if self._columns is None else self._columns
            self._names = {name if name in names else name.partition(".")[0] for name in wanted}
        nested = set(self._columns or ()) - set(names)
        parts = [f"{schema.column(i).path}." for i in range(len(schema))] if nested else []
        missing = {name for name in nested if not any(part.startswith(f"{name}.") for part in parts)}
        for name in sorted(missing | (self._names - set(names))):
            raise DataError(f"{self._files[number]} has no column {name}: it has {', '.join(names)}")
        if self._columns is None and set(names) != self._names:
            raise DataError(
                f"{self._files[number]} has columns that {self._files[0]} has not "
                f"({', '.join(sorted(set(names) - self._names))}): say which to read, with columns="
            )


class TableRows:
    """The rows of one table, as dicts."""

    def __init__(self, table: pyarrow.Table) -> None:
        self.nbytes = int(table.nbytes)
        self._readers = {name: _reader(column) for name, column in zip(table.column_names, table.columns, strict=True)}

    def row(self, number: int) -> dict[str, Any]:
        """Return one row, with values of its own."""
        return {name: read(number) for name, read in self._readers.items()}


def _reader(column: pyarrow.ChunkedArray) -> Callable[[int], Any]:
    """The function that returns the value of a row: numbers as NumPy has them, others as pyarrow makes them. A row's
    type follows from its own value alone: None where there is none, whatever the rows around it are."""
    readers = [_reader_of(chunk) for chunk in column.chunks]
    if len(readers) == 1:
        return readers[0]
    starts = list(accumulate((len(chunk) for chunk in column.chunks), initial=0))

    def value(row: int) -> Any:
        chunk = bisect_right(starts, row) - 1
        return readers[chunk](row - starts[chunk])

    return value


def _reader_of(array: pyarrow.Array) -> Callable[[int], Any]:
    import pyarrow as pa

    if _is_number(array.type):
        values = _numbers(array)
        return _or_none(array, lambda row: values[row])
    lists = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    if not (lists or pa.types.is_fixed_size_list(array.type)) or not _is_number(array.type.value_type):
        return lambda row: array[row].as_py()
    inside = array.values  # of all rows, also of those that are missing, and of those before a slice
    flat, whole = _numbers(inside), _valid(inside)
    ends = array.offsets.to_numpy() if lists else (np.arange(len(array) + 1) + array.offset) * array.type.list_size

    def numbers(row: int) -> Any:
        first, last = ends[row], ends[row + 1]
        if whole is not None and not whole[first:last].all():
            return array[row].as_py()
        return flat[first:last].copy()  # else one row would keep the whole table

    return _or_none(array, numbers)


def _is_number(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _numbers(array: pyarrow.Array) -> npt.NDArray[Any]:
    """The values, with any numbers where they are missing: pyarrow would make floats of integers."""
    import pyarrow as pa

    if array.null_count:
        array = pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], offset=array.offset)
    return cast(npt.NDArray[Any], array.to_numpy(zero_copy_only=False))


def _valid(array: pyarrow.Array) -> npt.NDArray[np.bool_] | None:
    """Where there are values; None: everywhere."""
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def _or_none(array: pyarrow.Array, value: Callable[[int], Any]) -> Callable[[int], Any]:
    """`value`, and None for the rows that are missing."""
    valid = _valid(array)
    return value if valid is None else lambda row: value(row) if valid[row] else None


def _begin(chunk: Any) -> int:
    """Where the chunk of a column begins: with its dictionary, if it has one."""
    first = int(chunk.data_page_offset)
    return min(first, chunk.dictionary_page_offset) if chunk.dictionary_page_offset else first


def _add(digest: hashlib.blake2b, *parts: bytes) -> None:
    """Add these, each after its length: no two lists of parts are the same bytes."""
    for part in (len(parts).to_bytes(8, "little"), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)


def _parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError(f"rp.Parquet needs pyarrow ({error}): {to_install('data')}") from None
    return parquet
