"""LitData's chunks, read without its library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rallypoint.data.cache.cache import Cache
from rallypoint.data.sources.chunks import INDEX, Chunk, ChunkedDataset, beside, parsed
from rallypoint.data.sources.remote import File
from rallypoint.data.sources.shards import Transform
from rallypoint.errors import DataError

Decoder = Callable[[memoryview], Any]

_TORCH = (
    torch.float32, torch.float32, torch.float64, torch.float64, torch.complex64, torch.complex64, torch.complex128,
    torch.complex128, torch.float16, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int16,
    torch.int32, torch.int32, torch.int64, torch.int64, torch.bool, torch.uint16,
)  # fmt: skip
_NUMPY = ("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "?")
_MOST_AXES = 64


class LitData(ChunkedDataset):
    """Samples that LitData's ``optimize`` wrote: ``rp.LitData("s3://bucket/train")``.

    A sample has the structure that was written: dicts, lists and tuples of numbers, texts, bytes, tensors and arrays;
    images (``jpeg``) and files are their bytes, for `transform` to decode. The index is read once, when it is made; a
    chunk is read whole, and unpacked (zstd).

    Arguments:
        urls: a folder with an ``index.json``, or several; local, or any URL of fsspec.
        transform: makes a sample of what was written; what it draws from the global random generators is seeded.
        cache_bytes: of chunks that each process keeps; the newest one is kept, whatever its size.
        threads: chunks that are read at once.
        storage_options: what fsspec needs for the store: keys, endpoints.
        cache: a `Cache`, or a folder for one: what is read from a store is kept on this machine's disk.

    Raises DataError when there is no such index, for pickled objects (nothing is unpickled) and other types that are
    not read, for encrypted chunks, chunks of tokens, rows kept as Arrow tables and compression other than zstd of
    whole chunks, and when a store fails five times in a row.
    """

    def __init__(
        self, urls: str | Path | Sequence[str | Path], transform: Transform | None = None, *,
        cache_bytes: int = 1 << 30, threads: int = 8, storage_options: Mapping[str, Any] | None = None,
        cache: Cache | str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(urls, transform, cache_bytes, threads, storage_options, cache)

    def _chunks_of(self, index: File, data: bytes) -> list[Chunk]:
        told = parsed(index, data, _Index)
        config = told.config
        _check(index, config)
        decoders = [_decoder(index, name) for name in config.data_format]
        shape = parsed(index, config.data_spec.encode(), tuple[int, _Spec])[1] if config.data_spec else _Spec()
        if _leaves(index, shape) != len(decoders):
            raise DataError(f"{index} tells {len(decoders)} types for {_leaves(index, shape)} values of a sample")
        decode = partial(_sample, shape, decoders)
        packed = "zstd" if config.compression else ""
        listed = self._listed(index) if packed else {}
        found = list[Chunk]()
        for one in told.chunks:
            if packed and one.filename not in listed:
                raise DataError(f"{index} names a file {one.filename}, which is not there")
            about = listed.get(one.filename)
            size, mark = (one.chunk_bytes, "") if about is None else (about.size, about.mark)
            file = beside(index, one.filename, size, mark)
            found.append(Chunk(file, one.chunk_size, one.chunk_bytes, packed, decode))
        return found

    def _listed(self, index: File) -> dict[str, File]:
        """The files beside an index, which tells only how large chunks were before they were compressed."""
        return {file.name: file for file in self._store.found(str(index)[: -len(INDEX)], ".bin")}


class _Told(msgspec.Struct):
    chunk_bytes: int
    chunk_size: int
    filename: str


class _Config(msgspec.Struct):
    data_format: list[str]
    data_spec: str | None = None
    compression: str | None = None
    compression_level: str | None = None
    ipc_compression: str | None = None
    encryption: Any = None
    item_loader: str | None = None


class _Index(msgspec.Struct):
    chunks: list[_Told]
    config: _Config


class _Spec(msgspec.Struct):
    """torch's TreeSpec, as JSON: a leaf has no type."""

    type: str | None = None
    context: Any = None
    children_spec: list[_Spec] = []


def _check(index: File, config: _Config) -> None:
    refused = {
        "encrypted": config.encryption is not None,
        f"written for {config.item_loader}": config.item_loader not in (None, "PyTreeLoader"),
        f"compressed with {config.compression}": (config.compression or "zstd").partition(":")[0] != "zstd",
        f"compressed by {config.compression_level}": config.compression_level not in (None, "chunk"),
        "kept as Arrow tables": config.ipc_compression is not None,
    }
    if what := next((what for what, is_so in refused.items() if is_so), ""):
        raise DataError(f"{index} is of chunks that are {what}: those of optimize(...) are read, plain or with "
                        'compression="zstd", compression_level="chunk"')  # fmt: skip


def _leaves(index: File, spec: _Spec) -> int:
    if spec.type is None:
        return 1
    if spec.type not in ("builtins.dict", "builtins.list", "builtins.tuple"):
        raise DataError(f"{index} is of samples with a {spec.type}: dicts, lists and tuples are read")
    return sum(_leaves(index, child) for child in spec.children_spec)


def _sample(spec: _Spec, decoders: list[Decoder], data: memoryview) -> Any:
    """The sizes of all values, then the values."""
    at = 4 * len(decoders)
    sizes = np.frombuffer(data[:at], "<u4").tolist()
    if at + sum(sizes) > len(data) or len(sizes) != len(decoders):
        raise ValueError("its values end behind its end (rows that are kept as an Arrow table are not read)")
    values = []
    for size, decode in zip(sizes, decoders, strict=True):
        values.append(decode(data[at : at + size]))
        at += size
    return _built(spec, iter(values))


def _built(spec: _Spec, values: Any) -> Any:
    if spec.type is None:
        return next(values)
    children = [_built(child, values) for child in spec.children_spec]
    if spec.type == "builtins.dict":
        keys = msgspec.json.decode(spec.context) if isinstance(spec.context, str) else spec.context
        return dict(zip(keys, children, strict=True))
    return tuple(children) if spec.type == "builtins.tuple" else children


def _decoder(index: File, name: str) -> Decoder:
    kind, _, number = name.partition(":")
    if kind == "pickle":
        raise DataError(
            f"{index} is of samples with pickled objects, and nothing is unpickled, because it could run any program: "
            "write them as numbers, texts, bytes, tensors, arrays, or lists and dicts of those"
        )
    if kind in ("no_header_tensor", "no_header_numpy"):
        types: Sequence[Any] = _TORCH if kind == "no_header_tensor" else _NUMPY
        if not number.isdigit() or int(number) >= len(types):
            raise DataError(f"{index} is of samples with a {name}, whose type of numbers is not read")
        chosen = types[int(number)]
        return partial(_flat, chosen) if kind == "no_header_tensor" else partial(_array, np.dtype(chosen))
    if kind in _DECODERS:
        return _DECODERS[kind]
    raise DataError(f"{index} is of samples with a {name}, which is not read: {', '.join(_DECODERS)} are")


def _flat(dtype: torch.dtype, data: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype, device="cpu")


def _array(dtype: np.dtype[Any], data: memoryview) -> Any:
    return np.frombuffer(data, dtype).copy()


def _tensor(data: memoryview) -> torch.Tensor:
    kind, axes = np.frombuffer(data[:8], ">u4").tolist()
    if axes > _MOST_AXES or kind >= len(_TORCH):
        raise ValueError("the header of a tensor is none: it may be of an old LitData: write it again with a new one")
    shape = np.frombuffer(data[8 : 8 + 4 * axes], ">u4").tolist()
    return _flat(_TORCH[kind], data[8 + 4 * axes :]).reshape(shape)


def _shaped(data: memoryview) -> Any:
    kind, axes = np.frombuffer(data[:8], "<u4").tolist()
    if axes > _MOST_AXES or kind >= len(_NUMPY):
        raise ValueError("the header of an array is none")
    shape = np.frombuffer(data[8 : 8 + 4 * axes], "<u4").tolist()
    return _array(np.dtype(_NUMPY[kind]), data[8 + 4 * axes :]).reshape(shape)


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


def _true(data: memoryview) -> bool:
    return data[0] != 0


def _int(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


def _float(data: memoryview) -> float:
    return float(np.frombuffer(data, "<f8")[0])


_DECODERS: dict[str, Decoder] = {
    "str": _text, "text": _text, "bool": _true, "int": _int, "float": _float, "bytes": bytes, "jpeg": bytes,
    "file": bytes, "tensor": _tensor, "numpy": _shaped,
}  # fmt: skip
