"""The identity of a data set, which workers of one job compare: its length and shards, digests of some samples."""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from rallypoint.core.job import DataIdentity
from rallypoint.core.order import derive_seed
from rallypoint.data.dataset import MapDataset, fetch, is_sharded
from rallypoint.data.randomness import seeded
from rallypoint.data.stream import Stream
from rallypoint.errors import DataError

log = logging.getLogger("rallypoint")

SAMPLED = 8  # positions, spread over the whole data set


def identity_of(dataset: MapDataset | Stream) -> DataIdentity:
    """Return a data set's length, and the digests of a few samples at fixed positions.

    Reads these samples twice, with all global generators seeded by position. If one raises an error, all digests are
    left out; so they are, with a warning, if one differs between the two reads (it uses a generator of its own), or
    holds something that cannot be compared.

    A data set of shards that has a `fingerprint()` (bytes, the same on every worker) tells that instead: no shard is
    fetched from a store for a sample.

    Of a stream the first items of part 0 are read, twice. Raises DataError if it does
    not give the same ones again.
    """
    try:
        return DataIdentity(stream=_of_stream(dataset)) if isinstance(dataset, Stream) else _of_map(dataset)
    except _Incomparable as why:
        log.warning("workers cannot compare samples that hold a %s: see that all read the same ones", why)
    return DataIdentity() if isinstance(dataset, Stream) else DataIdentity(len(dataset), (), _shards(dataset))


class _Incomparable(Exception):
    """Holds the name of a type."""


def _of_map(dataset: MapDataset) -> DataIdentity:
    length = len(dataset)
    if is_sharded(dataset) and hasattr(dataset, "fingerprint"):
        return DataIdentity(length, (), _shards(dataset))
    last = max(1, SAMPLED - 1)
    positions = sorted({i * (length - 1) // last for i in range(SAMPLED)})
    first, again = (_digests(dataset, positions) for _ in range(2))
    if first != again:
        log.warning(
            "the data set gives other samples when it is read again, as with a random generator of its own: so the "
            "result depends on which worker reads what. Draw from torch's, numpy's or Python's global generators, "
            "which are seeded for each sample"
        )
    return DataIdentity(length, first if first == again else (), _shards(dataset))


def _of_stream(stream: Stream) -> str:
    first, again = (_digest_of([stream.parts, *stream.first(SAMPLED)]) for _ in range(2))
    if first != again:
        raise DataError(
            "the stream gives other items when it is opened a second time, and whoever takes over a replica has to "
            "open it again: let its order follow from a seed, and let __iter__ begin anew"
        )
    return first


def _digest_of(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, value)
    return digest.hexdigest()


def _shards(dataset: object) -> str:
    if not is_sharded(dataset):
        return ""
    lengths = np.asarray(dataset.shard_lengths(), "<i8")
    told = dataset.fingerprint() if hasattr(dataset, "fingerprint") else b""
    return hashlib.blake2b(lengths.tobytes() + told, digest_size=8).hexdigest()


def _digests(dataset: MapDataset, positions: list[int]) -> tuple[tuple[int, str], ...]:
    digests = []
    for position in positions:
        with seeded(derive_seed(0, "identity", position)):
            try:
                digests.append((position, _digest_of(*fetch(dataset, [position]))))
            except _Incomparable:
                raise
            except Exception:
                return ()  # training reads it again, and says what is wrong with it
    return tuple(digests)


def _add(digest: hashlib.blake2b, value: Any) -> None:
    """Add the value to the digest; _Incomparable if there is no way to."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        raw = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"tensor {value.dtype} {list(value.shape)}".encode())
        if raw.numel():
            digest.update(raw.view(torch.uint8).numpy().data)
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        digest.update(f"array {value.dtype} {list(value.shape)}".encode())
        digest.update(value.tobytes())
    elif value is None or isinstance(value, (bool, int, str)):
        digest.update(f"{type(value).__name__} {value!r}\0".encode())
    elif isinstance(value, float):
        digest.update(b"float" + struct.pack("<d", value))
    elif isinstance(value, (bytes, bytearray)):
        digest.update(b"bytes %d " % len(value) + value)
    elif isinstance(value, (list, tuple)):
        digest.update(f"list {len(value)}".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, Mapping):  # or a tokenizer's BatchEncoding
        digest.update(f"dict {len(value)}".encode())
        for item in itertools.chain.from_iterable(value.items()):
            _add(digest, item)
    elif is_dataclass(value):
        _add(digest, [type(value).__qualname__, *(getattr(value, field.name) for field in fields(value))])
    elif hasattr(value, "__array_interface__") and not isinstance(value, (np.ndarray, np.generic)):  # a PIL image
        _add(digest, np.asarray(value))
    else:
        raise _Incomparable(type(value).__qualname__)
