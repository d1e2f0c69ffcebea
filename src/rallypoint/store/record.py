"""One shard's state as bytes and back, bit for bit: a small head that describes the arrays, then the arrays.

    magic "RPS1", length of the head (u32, little-endian), head (msgpack), every array as stored, in that order

Everything is little-endian. Nothing in a record can run code: dtypes come from a fixed table and every length is
checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import msgspec
import numpy as np
import zstandard

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.errors import ConfigError, DamagedSnapshot, Explained, ProtocolError, UsageError
from rallypoint.optim import state_names
from rallypoint.store.manifest import Compression, most_bytes

MAX_ARRAY_BYTES = 1 << 30  # far above any shard
_MAX_RECORD_BYTES = 2 << 30  # of a record whose shard is not known
AVERAGE, AVERAGED = "average", "averaged"  # the array and the number of an average of the parameters
_MAGIC = b"RPS1"
_STATE = "memory-"  # the prefix on disk of codec states
_PREFIX = struct.Struct("<4sI")
_ZSTD_LEVEL = 1  # trained weights are nearly noise: higher levels cost time and save nothing more
_DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "|i1", "uint8": "|u1",
}  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRecord:
    """The state of one shard at one version.

    Attributes:
        shard: its index in the layout.
        version: updates it has had.
        arrays: contiguous 1-D arrays by name: "master", and the optimizer's ("exp_avg", ...).
        scalars: numbers of the optimizer, such as {"step": 12.0}.
        clocks: the next step of each replica, in a streaming job.
        codec_states: replica -> its codec state for this shard at this version (`codec/build.py`), uint8.
        ahead: the replicas whose codec state is the one after the contribution computed from this version.
    """

    shard: int
    version: int
    arrays: dict[str, Array]
    scalars: dict[str, float]
    clocks: tuple[int, ...] = ()
    codec_states: dict[int, Array] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.arrays.values(), *self.codec_states.values()))


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    elements: _Count
    nbytes: _Count  # as stored


class _RecordHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    shard: _Count
    version: _Count
    compression: Compression
    scalars: dict[str, float]
    arrays: list[_Stored]
    clocks: tuple[_Count, ...] = ()
    memories: tuple[_Count, ...] = ()  # the replicas whose codec states are the last arrays
    ahead: tuple[_Count, ...] = ()


_heads = msgspec.msgpack.Decoder(_RecordHead)


def encode_record(record: ShardRecord, compression: Compression) -> bytes:
    """Return the record as bytes; see `encode_chunks`."""
    return b"".join(encode_chunks(record, compression))


def encode_chunks(record: ShardRecord, compression: Compression) -> list[bytes | memoryview]:
    """Return the record as bytes in several pieces. Pieces of uncompressed arrays are the record's own memory.

    `zstd-planes` first groups bytes of equal weight: sign and exponent compress well, the noisy mantissa does not.
    Raises ConfigError for an unknown compression, UsageError for an array that cannot be written.
    """
    if compression not in get_args(Compression):
        raise ConfigError(f"compression {compression!r} is unknown: use one of {', '.join(get_args(Compression))}")
    named = record.arrays | {f"{_STATE}{replica}": array for replica, array in record.codec_states.items()}
    payloads = [_store(_little_endian(name, array), compression) for name, array in named.items()]
    arrays = [
        _Stored(name, array.dtype.name, array.size, len(payload))
        for (name, array), payload in zip(named.items(), payloads, strict=True)
    ]
    described = _RecordHead(
        record.shard, record.version, compression, record.scalars, arrays, record.clocks, tuple(record.codec_states),
        record.ahead,
    )  # fmt: skip
    head = msgspec.msgpack.encode(described)
    return [_PREFIX.pack(_MAGIC, len(head)) + head, *payloads]


def decode_record(data: bytes, most: int = _MAX_RECORD_BYTES) -> ShardRecord:
    """Return the record in `data`, in new writable arrays.

    Raises DamagedSnapshot when it is not exactly one record, or its arrays would have more than `most` bytes: a few
    compressed bytes can claim to be any number of zeros. That is checked before memory is allocated.
    """
    view = memoryview(data)
    head, position = _read_head(view)
    if (nbytes := sum(map(_nbytes, head.arrays))) > most:
        raise DamagedSnapshot(f"a shard record claims to have {nbytes} bytes of arrays: its shard has at most {most}")
    if sum(stored.nbytes for stored in head.arrays) != len(view) - position:
        raise DamagedSnapshot(f"a shard record of {len(view)} bytes is longer or shorter than its head says")
    if len({stored.name for stored in head.arrays}) != len(head.arrays):
        raise DamagedSnapshot("a shard record has two arrays of one name")
    arrays = {}
    for stored in head.arrays:
        payload = view[position : position + stored.nbytes]
        arrays[stored.name] = _restore(stored, payload, head.compression)
        position += stored.nbytes
    try:
        states = {replica: arrays.pop(f"{_STATE}{replica}") for replica in head.memories}
    except KeyError as error:
        raise DamagedSnapshot(f"a shard record lacks the array {error}") from None
    if any(array.dtype != np.uint8 for array in states.values()):
        raise DamagedSnapshot("a shard record has a codec state that is not of bytes")
    return ShardRecord(head.shard, head.version, arrays, head.scalars, head.clocks, states, head.ahead)


def _read_head(view: memoryview) -> tuple[_RecordHead, int]:
    """Return the head, and the position where the payload begins."""
    if len(view) < _PREFIX.size:
        raise DamagedSnapshot(f"a shard record of {len(view)} bytes is too short to be one")
    magic, length = _PREFIX.unpack_from(view)
    stop = _PREFIX.size + length
    if magic != _MAGIC or stop > len(view):
        raise DamagedSnapshot("these bytes do not begin as a shard record does")
    errors = (msgspec.DecodeError, UnicodeDecodeError)
    with Explained(DamagedSnapshot, "the head of a shard record cannot be read", of=errors):
        return _heads.decode(view[_PREFIX.size : stop]), stop


def _little_endian(name: str, array: Array) -> Array:
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None or array.ndim != 1 or not array.flags.c_contiguous or array.nbytes > MAX_ARRAY_BYTES:
        raise UsageError(
            f"array {name} ({array.dtype.name}, {array.ndim} dimensions, {array.nbytes} bytes) cannot be stored: it "
            f"must be 1-D and contiguous, of at most {MAX_ARRAY_BYTES} bytes and one of {', '.join(_DTYPES)}"
        )
    return array.astype(dtype, copy=False)


def _store(array: Array, compression: Compression) -> bytes | memoryview:
    raw = array.view(np.uint8)
    if compression == "none":
        return raw.data
    if compression == "zstd-planes":
        raw = np.ascontiguousarray(raw.reshape(-1, array.itemsize).T)
    # A new compressor per call: threads must not share one. Our own checksum covers the result.
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False).compress(raw.data)


def _nbytes(stored: _Stored) -> int:
    """The bytes of an array when it is restored."""
    if stored.dtype not in _DTYPES:
        raise DamagedSnapshot(f"array {stored.name} of a shard record has the unknown dtype {stored.dtype!r}")
    return stored.elements * np.dtype(_DTYPES[stored.dtype]).itemsize


def _restore(stored: _Stored, payload: memoryview, compression: Compression) -> Array:
    dtype, nbytes = np.dtype(_DTYPES[stored.dtype]), _nbytes(stored)
    raw = np.frombuffer(payload if compression == "none" else _inflate(stored.name, payload, nbytes), np.uint8)
    if raw.size != nbytes:
        raise DamagedSnapshot(f"array {stored.name} of a shard record has {raw.size} bytes instead of {nbytes}")
    restored = np.empty(stored.elements, dtype)
    if compression == "zstd-planes":
        by_element = restored.view(np.uint8).reshape(-1, dtype.itemsize)
        for plane, values in enumerate(raw.reshape(dtype.itemsize, -1)):
            by_element[:, plane] = values  # three times as fast as one transposed copy
    else:
        restored.view(np.uint8)[:] = raw
    return restored.astype(dtype.newbyteorder("="), copy=False)


def _inflate(name: str, payload: memoryview, nbytes: int) -> bytes:
    """Decompress one zstd frame of exactly `nbytes`: checked before memory is allocated for it."""
    cannot = f"array {name} of a shard record cannot be decompressed"
    with Explained(DamagedSnapshot, cannot, of=(zstandard.ZstdError,)):
        promised = zstandard.get_frame_parameters(payload).content_size
        if promised != nbytes or nbytes > MAX_ARRAY_BYTES:
            raise DamagedSnapshot(f"array {name} of a shard record would have {promised} bytes instead of {nbytes}")
        return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)


MASTER = "master"
OWN = "own"  # the prefix of array names that belong to a user's own optimizer


def read_state(data: bytes | bytearray | memoryview, shard: Shard, version: int, config: JobConfig) -> ShardRecord:
    """Return the record in `data`: the state of that shard at that version.

    It holds parameters and moments as fp32, one value for each word; for a user's own optimizer its state as bytes.
    Raises ProtocolError when the data is anything else (I9).
    """
    with Explained(ProtocolError, "a shard's state that cannot be read", of=(DamagedSnapshot,)):
        record = decode_record(bytes(data), most_bytes(shard.words, 0))
    if (record.shard, record.version) != (shard.index, version):
        raise ProtocolError(
            f"a state of shard {record.shard} at version {record.version} under the name of {shard.index} at {version}"
        )
    kept = {name: array for name, array in record.arrays.items() if name != MASTER}
    if config.own_optimizer:
        right = all(name.startswith(OWN) and array.dtype == np.uint8 for name, array in kept.items())
        known = not record.scalars
    else:
        right = all(len(array) == shard.words and array.dtype == np.float32 for array in kept.values())
        known = (set(kept), set(record.scalars)) in state_names(config.applied)
    master = record.arrays.get(MASTER)
    whole = master is not None and len(master) == shard.words and master.dtype == np.float32
    if not whole or not known or not right or record.clocks or record.codec_states:
        raise ProtocolError(f"a state of shard {shard.index} that does not fit this job's layout and optimizer")
    return record
