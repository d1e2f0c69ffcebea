"""Parquet files, read by row groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint.data.sources.remote import Files
from rallypoint.data.sources.shards import Rows, ShardedDataset, Transform
from rallypoint.errors import DataError, UsageError

if TYPE_CHECKING:
    import pyarrow

FOOTER_BYTES = 64 << 20  # of footers that are kept, for files to be opened without asking for them again


class Parquet(ShardedDataset):
    """The rows of Parquet files as dicts: ``rp.Parquet("s3://bucket/clicks/*.parquet", columns=["user", "item"])``.

    A number is a NumPy scalar of the column's type, a list of numbers a NumPy array, a text a `str`; anything else is
    what pyarrow makes of it. Footers are read once, when it is made. A row group is read whole, and kept until others
    need its room: give the job ``order="windowed"``, which reads few row groups at a time.

    Arguments:
        urls: a local path or any URL of fsspec; a pattern; a folder, of which the files `.parquet` are taken in the
            order of their names; or several of these.
        columns: those to read; None: all.
        transform: makes a sample of a row's dict; what it draws from the global random generators is seeded.
        cache_bytes: of row groups that each process keeps; the newest one is kept, whatever its size.
        threads: row groups, or footers, that are read at once.
        storage_options: what fsspec needs for the store: keys, endpoints.

    Raises DataError when there are no such files, when one is no Parquet file or lacks a column, and when a store fails
    five times in a row; UsageError when pyarrow is not installed.
    """

    def __init__(
        self, urls: str | Path | Sequence[str | Path], columns: Sequence[str] | None = None, *,
        transform: Transform | None = None, cache_bytes: int = 1 << 30, threads: int = 8,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache_bytes=cache_bytes, threads=threads, transform=transform)
        self._columns = None if columns is None else list(columns)
        self._store = Files(storage_options)
        self._files = self._store.found(urls, ".parquet")
        self._footers: dict[int, Any] = {}
        _parquet()  # with its sentence, if it is not installed
        numbers = range(len(self._files))
        with ThreadPoolExecutor(threads, "reading footers") as pool:
            self._sizes = list(pool.map(self._store.size, self._files))
            footers = list(pool.map(self._footer, numbers))
        for number, footer in zip(numbers, footers, strict=True):
            self._check_columns(number, footer.schema.to_arrow_schema().names)
        groups = [(number, group) for number in numbers for group in range(footers[number].num_row_groups)]
        self._groups = groups
        self._index(footers[number].row_group(group).num_rows for number, group in groups)
        if not len(self):
            raise DataError(f"there are no rows in {self._files[0]}" + (" and the other files" * (len(groups) > 1)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_footers": {}}

    def _read(self, shard: int) -> Rows:
        number, group = self._groups[shard]
        file = self._files[number]
        try:
            opened = _parquet().ParquetFile(self._source(number), metadata=self._footer(number))
            return TableRows(opened.read_row_group(group, columns=self._columns, use_threads=False))
        except (OSError, ValueError) as error:
            raise DataError(f"row group {group} of {file} cannot be read: {error}") from error

    def _footer(self, number: int) -> Any:
        found = self._footers.get(number)
        if found is None:
            try:
                found = _parquet().read_metadata(self._source(number))
            except (OSError, ValueError) as error:
                raise DataError(f"{self._files[number]} cannot be read as a Parquet file: {error}") from error
            if sum(footer.serialized_size for footer in list(self._footers.values())) < FOOTER_BYTES:
                self._footers[number] = found
        return found

    def _source(self, number: int) -> Any:
        file = self._files[number]
        return self._store.here(file) or self._store.open(file, self._sizes[number])

    def _check_columns(self, number: int, names: list[str]) -> None:
        wanted = names if self._columns is None else [column.partition(".")[0] for column in self._columns]
        if number == 0:
            self._names = wanted
        for missing in sorted(set(self._names) - set(names)):
            raise DataError(f"{self._files[number]} has no column {missing}: it has {', '.join(names)}")
        if self._columns is None and set(names) != set(self._names):
            raise DataError(
                f"{self._files[number]} has columns that {self._files[0]} has not "
                f"({', '.join(sorted(set(names) - set(self._names)))}): say which to read, with columns="
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
    """The function that returns the value of a row: numbers as NumPy has them, others as pyarrow makes them."""
    import pyarrow as pa

    def number(kind: pa.DataType) -> bool:
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))

    if column.null_count or (column.num_chunks > 1 and (column := _joined(column)).num_chunks != 1):
        return lambda row: column[row].as_py()
    array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    if number(column.type):
        values = array.to_numpy(zero_copy_only=False)
        return lambda row: values[row]
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not (lists or pa.types.is_fixed_size_list(column.type)) or not number(column.type.value_type):
        return lambda row: array[row].as_py()
    flat = array.flatten()
    if flat.null_count:
        return lambda row: array[row].as_py()
    values = flat.to_numpy(zero_copy_only=False)
    if not lists:
        length = column.type.list_size
        return lambda row: values[row * length : (row + 1) * length].copy()  # else one row would keep the whole table
    offsets = array.offsets.to_numpy() - array.offsets[0].as_py()
    return lambda row: values[offsets[row] : offsets[row + 1]].copy()


def _joined(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """The column in one piece, where it fits in one."""
    import pyarrow as pa

    array = column.combine_chunks()
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def _parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UsageError(f"rp.Parquet needs pyarrow ({error}): pip install 'rallypoint[data]'") from None
    return parquet
