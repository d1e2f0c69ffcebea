"""Data sets with an ``index.json`` that tells their files: samples one after the other, with their offsets in front.

Both MosaicML's MDS and LitData write such files: the number of samples, then where each begins and the last one ends,
all as uint32 (little-endian), then the samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
import zstandard

from rallypoint.data.cache.cache import Cache, cache_of
from rallypoint.data.sources.remote import File, Files
from rallypoint.data.sources.shards import Rows, ShardedDataset, Transform
from rallypoint.errors import DataError

INDEX = "index.json"
_HASHES: dict[str, Callable[[bytes], str]] = {  # the fastest first
    "xxh3_128": lambda data: xxhash.xxh3_128_hexdigest(data), "xxh3_64": lambda data: xxhash.xxh3_64_hexdigest(data),
    "xxh128": lambda data: xxhash.xxh128_hexdigest(data), "xxh64": lambda data: xxhash.xxh64_hexdigest(data),
    "xxh32": lambda data: xxhash.xxh32_hexdigest(data), "blake2b": lambda data: hashlib.blake2b(data).hexdigest(),
    "blake2s": lambda data: hashlib.blake2s(data).hexdigest(), "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "sha1": lambda data: hashlib.sha1(data).hexdigest(), "md5": lambda data: hashlib.md5(data).hexdigest(),
}  # fmt: skip
_MOST = 1 << 32  # offsets and numbers of samples are uint32
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One file of samples.

    Attributes:
        file: its file, as it is in the store.
        samples: how many it has.
        nbytes: its bytes, unpacked.
        compression: "" or "zstd".
        hashes: digests of the file, by their names.
        decode: makes a sample of its bytes.
    """

    file: File
    samples: int
    nbytes: int
    compression: str
    decode: Callable[[memoryview], Any]
    hashes: dict[str, str] = field(default_factory=dict)


class ChunkedDataset(ShardedDataset):
    """Samples of such files. Each file is a shard, and is read whole."""

    def __init__(
        self, urls: str | Path | Sequence[str | Path], transform: Transform | None, cache_bytes: int, threads: int,
        storage_options: Mapping[str, Any] | None, cache: Cache | str | Path | None,
    ) -> None:  # fmt: skip
        super().__init__(cache_bytes=cache_bytes, threads=threads, transform=transform)
        self._store = Files(storage_options, cache=cache_of(cache))
        folders = [str(url) for url in ([urls] if isinstance(urls, (str, Path)) else urls)]
        names = [folder if folder.endswith(INDEX) else f"{folder.rstrip('/')}/{INDEX}" for folder in folders]
        indexes = self._store.found(names, INDEX)
        with ThreadPoolExecutor(threads, "reading indexes") as pool:
            read = pool.map(lambda file: (file, self._store.fetch(file, 0, file.size)), indexes)
            self._chunks = [chunk for file, data in read for chunk in self._chunks_of(file, data)]
        for one in self._chunks:
            if not (0 <= one.samples < _MOST and 0 < one.nbytes <= _MOST and one.file.size <= 2 * _MOST):
                raise DataError(f"the {INDEX} of {one.file} tells sizes that no such file can have")
        self._files = [chunk.file for chunk in self._chunks]
        self._index(chunk.samples for chunk in self._chunks)
        if not len(self):
            raise DataError(f"there are no samples in {indexes[0]}")

    def _chunks_of(self, index: File, data: bytes) -> list[Chunk]:
        """The files of one index. Raises DataError for what cannot be read."""
        raise NotImplementedError

    def fingerprint(self) -> bytes:
        """Return a digest of the files' names, sizes, numbers of samples and hashes, as the indexes tell them."""
        told = [
            (one.file.name, one.file.size, one.samples, one.nbytes, one.compression, sorted(one.hashes.items()))
            for one in self._chunks
        ]
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16).digest()

    def ranges(self, shard: int) -> list[tuple[File, int, int]]:
        """Return the whole file."""
        file = self._chunks[shard].file
        return [(file, 0, file.size)]

    def _read(self, shard: int) -> Rows:
        chunk = self._chunks[shard]
        data = self._store.read(chunk.file, 0, chunk.file.size)
        name = next((name for name in _HASHES if name in chunk.hashes), None)
        if name is not None and _HASHES[name](data) != chunk.hashes[name]:
            raise DataError(f"{chunk.file} is not the file that its {INDEX} tells of: its {name} is another one")
        return ChunkRows(chunk, _unpacked(chunk, data))


class ChunkRows:
    """The samples of one file, in memory. DataError if its offsets are not those of so many samples."""

    def __init__(self, chunk: Chunk, data: bytes) -> None:
        self.nbytes, self._chunk, self._data = len(data), chunk, memoryview(data)
        first = 4 * (chunk.samples + 2)
        offsets = np.frombuffer(data[4:first] if len(data) >= first else b"", "<u4").astype(np.int64)
        told = int.from_bytes(data[:4], "little") == chunk.samples == len(offsets) - 1
        if not told or offsets[0] < first or (np.diff(offsets) < 0).any() or offsets[-1] > len(data):
            raise DataError(f"{chunk.file} is damaged: its offsets are not those of {chunk.samples} samples")
        self._offsets = offsets

    def row(self, number: int) -> Any:
        """Return one sample, with values of its own. DataError if its bytes are none."""
        try:
            return self._chunk.decode(self._data[int(self._offsets[number]) : int(self._offsets[number + 1])])
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, StopIteration) as error:
            raise DataError(f"sample {number} of {self._chunk.file} cannot be decoded: {error}") from error


def beside(index: File, name: str, size: int, mark: str) -> File:
    """Return the file that an index names, in its own folder or below. DataError for a name that leads elsewhere."""
    parts = name.replace("\\", "/").split("/")
    if not name or name.startswith("/") or ".." in parts or "" in parts:
        raise DataError(f"{index} names a file {name!r}: it must be in the folder of the index, or below")
    if size < 1:
        raise DataError(f"{index} says that {name} has {size} bytes")
    folder = index.path[: -len(INDEX)]
    return File(index.url, folder + name, name, size, mark or index.mark)


def parsed(index: File, data: bytes, kind: type[_T]) -> _T:
    """Return an index. DataError if it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{index} is no index of such files: {error}") from None


def _unpacked(chunk: Chunk, data: bytes) -> bytes:
    if not chunk.compression:
        return data
    try:
        if zstandard.frame_content_size(data) > chunk.nbytes:
            raise DataError(f"{chunk.file} unpacks to more than the {chunk.nbytes} bytes that its {INDEX} tells")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=chunk.nbytes)
    except zstandard.ZstdError as error:
        raise DataError(f"{chunk.file} cannot be unpacked: {error}") from error
