"""MosaicML's MDS files, read without their library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rallypoint.data.cache.cache import Cache
from rallypoint.data.sources.chunks import Chunk, ChunkedDataset, beside, parsed
from rallypoint.data.sources.remote import File
from rallypoint.data.sources.shards import Transform
from rallypoint.errors import DataError

Decoder = Callable[[memoryview], Any]

_DTYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MDS(ChunkedDataset):
    """Samples that mosaicml-streaming's ``MDSWriter`` wrote: ``rp.MDS("s3://bucket/c4/train")``.

    A sample is a dict of its columns. A number is a Python or a NumPy one, as its column says, an array a NumPy array,
    a text a `str`; images (``jpeg``, ``png``, and lists of them) are the bytes of their files, for `transform` to
    decode. The index is read once, when it is made; a shard is read whole, unpacked (zstd) and compared with the hash
    that the index has of it.

    Arguments:
        urls: a folder with an ``index.json`` (a split), or several; local, or any URL of fsspec.
        transform: makes a sample of the dict; what it draws from the global random generators is seeded.
        cache_bytes: of shards that each process keeps; the newest one is kept, whatever its size.
        threads: shards that are read at once.
        storage_options: what fsspec needs for the store: keys, endpoints.
        cache: a `Cache`, or a folder for one: what is read from a store is kept on this machine's disk.

    Raises DataError when there is no such index, for columns of pickled objects (nothing is unpickled) and other
    encodings that are not read, for other compression than zstd, and when a store fails five times in a row.
    """

    def __init__(
        self, urls: str | Path | Sequence[str | Path], transform: Transform | None = None, *,
        cache_bytes: int = 1 << 30, threads: int = 8, storage_options: Mapping[str, Any] | None = None,
        cache: Cache | str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(urls, transform, cache_bytes, threads, storage_options, cache)

    def _chunks_of(self, index: File, data: bytes) -> list[Chunk]:
        told = parsed(index, data, _Index)
        return [_chunk(index, shard) for shard in told.shards if shard.samples]


class _Info(msgspec.Struct):
    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class _Shard(msgspec.Struct):
    column_encodings: list[str]
    column_names: list[str]
    column_sizes: list[int | None]
    raw_data: _Info
    samples: int
    compression: str | None = None
    format: str = ""
    version: int = 0
    zip_data: _Info | None = None


class _Index(msgspec.Struct):
    shards: list[_Shard]


def _chunk(index: File, shard: _Shard) -> Chunk:
    if (shard.format, shard.version) != ("mds", 2):
        raise DataError(f"{index} is of format {shard.format!r}, version {shard.version}: MDS, version 2, is read")
    names, sizes = shard.column_names, shard.column_sizes
    odd = shard.samples < 0 or any(size is not None and size < 0 for size in sizes)
    if odd or not len(names) == len(sizes) == len(shard.column_encodings):
        raise DataError(f"{index} does not tell an encoding and a size for each column")
    decoders = [_decoder(index, *one) for one in zip(names, shard.column_encodings, strict=True)]
    kind = (shard.compression or "").partition(":")[0] if shard.zip_data is not None else ""
    if kind not in ("", "zstd"):
        raise DataError(f"{index} is of files compressed with {kind}: write them with zstd, or without compression")
    info = shard.zip_data if shard.zip_data is not None and kind else shard.raw_data
    mark = " ".join(f"{name} {digest}" for name, digest in sorted(info.hashes.items()))
    file = beside(index, info.basename, info.bytes, mark)
    decode = partial(_sample, names, [size or 0 for size in sizes], decoders)
    return Chunk(file, shard.samples, shard.raw_data.bytes, kind, decode, info.hashes)


def _sample(names: list[str], sizes: list[int], decoders: list[Decoder], data: memoryview) -> dict[str, Any]:
    """The sizes of columns without a fixed one, then the columns."""
    varying = sizes.count(0)
    told = iter(np.frombuffer(data[: 4 * varying], "<u4").tolist())
    at, found = 4 * varying, dict[str, Any]()
    for name, size, decode in zip(names, sizes, decoders, strict=True):
        end = at + (size or next(told))
        if end > len(data):
            raise ValueError(f"column {name} ends behind the sample's end")
        found[name] = decode(data[at:end])
        at = end
    return found


def _decoder(index: File, column: str, encoding: str) -> Decoder:
    kind, _, config = encoding.partition(":")
    if kind == "pkl":
        raise DataError(
            f"{index}: the column {column} holds pickled objects, and nothing is unpickled, because it could run any "
            "program: write the column as json, ndarray or bytes"
        )
    if kind == "ndarray":
        return _array_decoder(index, config)
    if kind in _SCALARS:
        return partial(_scalar, np.dtype(kind).newbyteorder("<"))
    if kind in _DECODERS:
        return _DECODERS[kind]
    known = ", ".join((*_DECODERS, "ndarray", *_SCALARS))
    raise DataError(f"{index}: the column {column} is encoded as {encoding}, which is not read: {known} are")


def _scalar(dtype: np.dtype[Any], data: memoryview) -> Any:
    return np.frombuffer(data, dtype)[0]


def _array_decoder(index: File, config: str) -> Decoder:
    """``ndarray``, ``ndarray:float32`` or ``ndarray:float32:2,3``: what is not said here is in each value."""
    dtype, _, shape = config.partition(":")
    if dtype and dtype not in _SCALARS:
        raise DataError(f"{index}: arrays of {dtype} are not read")
    try:
        fixed = tuple(int(one) for one in shape.split(",")) if shape else None
    except ValueError:
        raise DataError(f"{index}: arrays of shape {shape} are not read") from None
    return partial(_array, np.dtype(dtype).newbyteorder("<") if dtype else None, fixed)


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: memoryview) -> npt.NDArray[Any]:
    at = 0
    if dtype is None:
        dtype, at = np.dtype(_DTYPES[data[0]]), 1
    if shape is None:
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(np.frombuffer(data[at + 1 : at + 1 + axes * width], f"<u{width}").tolist())
        at += 1 + axes * width
    return np.frombuffer(data[at:], dtype).reshape(shape).copy()


def _list(data: memoryview, start: int = 4) -> list[bytes]:
    """Byte strings: how many, the size of each, and they. (`start` bytes before that are for later versions.)"""
    count = int.from_bytes(data[start : start + 4], "little")
    at = start + 4 + 4 * count
    found = []
    for size in np.frombuffer(data[start + 4 : at], "<u4").tolist():
        if at + size > len(data):
            raise ValueError("an item of a list ends behind the list's end")
        found.append(bytes(data[at : at + size]))
        at += size
    if len(found) != count:
        raise ValueError(f"a list of {count} items has {len(found)}")
    return found


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _int(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


def _digits(data: memoryview) -> int:
    return int(_text(data))


def _float(data: memoryview) -> float:
    return float(_text(data))


def _decimal(data: memoryview) -> Decimal:
    return Decimal(_text(data))


def _json(data: memoryview) -> Any:
    return msgspec.json.decode(data)


_DECODERS: dict[str, Decoder] = {
    "bytes": bytes, "str": _text, "int": _int, "str_int": _digits, "str_float": _float, "str_decimal": _decimal,
    "json": _json, "jpeg": bytes, "png": bytes, "list[jpeg]": _list, "list[png]": _list,
    "jpeg_array": partial(_list, start=0), "jpegarray": partial(_list, start=0),
}  # fmt: skip
