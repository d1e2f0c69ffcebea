"""The identity of a data set, which workers of one job compare: its length and shards, digests of some samples."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import torch

from rallypoint.core.job import DataIdentity
from rallypoint.core.order import derive_seed
from rallypoint.data.dataset import MapDataset, fetch, is_sharded
from rallypoint.data.randomness import seeded
from rallypoint.data.stream import Stream
from rallypoint.errors import DataError

SAMPLED = 8  # positions, spread over the whole data set


def identity_of(dataset: MapDataset | Stream) -> DataIdentity:
    """Return a data set's length, and the digests of a few samples at fixed positions.

    Reads these samples twice, with all global generators seeded by position. If a sample differs between the two reads
    (it uses a generator of its own), raises an error, or has a type without a digest, all digests are left out.

    A data set of shards that has a `fingerprint()` (bytes, the same on every worker) tells that instead: no shard is
    fetched from a store for a sample.

    Of a stream the first items of part 0 are read, twice. Raises DataError if it does
    not give the same ones again.
    """
    if isinstance(dataset, Stream):
        first, again = (_digest_of([dataset.parts, *dataset.first(SAMPLED)]) for _ in range(2))
        if first != again:
            raise DataError(
                "the stream gives other items when it is opened a second time, and whoever takes over a replica has to "
                "open it again: let its order follow from a seed, and let __iter__ begin anew"
            )
        return DataIdentity(stream=first)
    length = len(dataset)
    if is_sharded(dataset) and hasattr(dataset, "fingerprint"):
        return DataIdentity(length, (), _shards(dataset))
    last = max(1, SAMPLED - 1)
    positions = sorted({i * (length - 1) // last for i in range(SAMPLED)})
    found, once_more = (_digests(dataset, positions) for _ in range(2))
    return DataIdentity(length, found if found is not None and found == once_more else (), _shards(dataset))


def _digest_of(value: Any) -> str:
    """The digest; "" for a type without one."""
    digest = hashlib.blake2b(digest_size=8)
    return digest.hexdigest() if _add(digest, value) else ""


def _shards(dataset: object) -> str:
    if not is_sharded(dataset):
        return ""
    lengths = np.asarray(dataset.shard_lengths(), "<i8")
    told = dataset.fingerprint() if hasattr(dataset, "fingerprint") else b""
    return hashlib.blake2b(lengths.tobytes() + told, digest_size=8).hexdigest()


def _digests(dataset: MapDataset, positions: list[int]) -> tuple[tuple[int, str], ...] | None:
    digests = []
    for position in positions:
        with seeded(derive_seed(0, "identity", position)):
            try:
                (sample,) = fetch(dataset, [position])
            except Exception:
                return None  # training reads it again, and says what is wrong with it
        if not (digest := _digest_of(sample)):
            return None
        digests.append((position, digest))
    return tuple(digests)


def _add(digest: hashlib.blake2b, value: Any) -> bool:
    """Add the value to the digest; False for a type that cannot be digested."""
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
        return all(_add(digest, item) for item in value)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)}".encode())
        return all(_add(digest, key) and _add(digest, item) for key, item in value.items())
    else:
        return False
    return True
