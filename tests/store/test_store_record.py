"""A shard record comes back bit for bit, or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import tracemalloc
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from samples import JOB, LAYOUT, same

from rallypoint.core.view import EarlyEnd
from rallypoint.errors import ConfigError, DamagedSnapshot, SnapshotError, UsageError
from rallypoint.store import manifest as manifests
from rallypoint.store.manifest import Compression, Manifest, ShardEntry, age, decode_manifest, encode_manifest
from rallypoint.store.record import MAX_ARRAY_BYTES, ShardRecord, decode_record, encode_record

COMPRESSIONS = get_args(Compression)
DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"]
AWKWARD = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0], np.uint32)


@st.composite
def shard_records(draw: st.DrawFn) -> ShardRecord:
    arrays = {}
    for name in draw(st.lists(st.text(max_size=12), unique=True, max_size=4)):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        raw = draw(st.binary(max_size=512))
        arrays[name] = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
    scalars = draw(st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=3))
    clocks = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=5)))
    codec_states = draw(st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=64), max_size=3))
    kept_state = {replica: np.frombuffer(data, np.uint8) for replica, data in codec_states.items()}
    return ShardRecord(draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40)), arrays, scalars, clocks, kept_state)


@given(shard_records(), st.sampled_from(COMPRESSIONS))
def test_a_record_comes_back_bit_for_bit(record: ShardRecord, compression: Compression) -> None:
    assert same([decode_record(encode_record(record, compression))], [record])


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_nan_payloads_negative_zero_and_denormals_survive(compression: Compression) -> None:
    record = ShardRecord(3, 7, {"master": AWKWARD.view(np.float32), "none": np.empty(0, np.float32)}, {"step": 7.0})
    back = decode_record(encode_record(record, compression))
    assert back.arrays["master"].view(np.uint32).tolist() == AWKWARD.tolist()
    assert back.arrays["none"].size == 0
    back.arrays["master"][:] = 0  # its own memory, and writable


@given(shard_records(), st.sampled_from(COMPRESSIONS), st.data())
def test_what_is_cut_or_longer_is_refused(record: ShardRecord, compression: Compression, data: st.DataObject) -> None:
    encoded = encode_record(record, compression)
    for wrong in (encoded[: data.draw(st.integers(0, len(encoded) - 1))], encoded + b"\0"):
        with pytest.raises(DamagedSnapshot):
            decode_record(wrong)


@given(shard_records(), st.sampled_from(COMPRESSIONS), st.data())
def test_no_changed_byte_ends_in_anything_but_a_record_or_our_error(
    record: ShardRecord, compression: Compression, data: st.DataObject
) -> None:
    encoded = bytearray(encode_record(record, compression))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DamagedSnapshot):
        decode_record(bytes(encoded))  # the checksum in the manifest is what detects a change; this must only be safe


@pytest.mark.parametrize("clocks", [(), (0,), (7, 9, 7, 2**32 - 1)])
def test_the_clocks_of_a_streaming_job_come_back(clocks: tuple[int, ...]) -> None:
    record = ShardRecord(3, 23, {"master": AWKWARD.view(np.float32)}, {}, clocks)
    assert decode_record(encode_record(record, "none")).clocks == clocks


def test_a_clock_below_zero_is_damage() -> None:
    with pytest.raises(DamagedSnapshot, match="the head of a shard record cannot be read"):
        decode_record(encode_record(ShardRecord(3, 23, {}, {}, (4, -1)), "none"))


@pytest.mark.parametrize(
    ("codec_states", "why"), [([0], "lacks the array"), ([1, 1], "lacks the array"), ([2], "not of bytes")]
)
def test_codec_states_that_are_not_there_or_not_bytes_are_damage(codec_states: list[int], why: str) -> None:
    arrays = [{"name": f"memory-{r}", "dtype": d, "elements": 0, "nbytes": 0} for r, d in ((1, "uint8"), (2, "int8"))]
    head = {"shard": 0, "version": 1, "compression": "none", "scalars": {}, "arrays": arrays, "memories": codec_states}
    packed = msgspec.msgpack.encode(head)
    with pytest.raises(DamagedSnapshot, match=why):
        decode_record(struct.pack("<4sI", b"RPS1", len(packed)) + packed)


def test_a_record_without_codec_states_or_clocks_is_written_as_it_always_was() -> None:
    data = encode_record(ShardRecord(0, 3, {}, {}), "none")
    (length,) = struct.unpack("<I", data[4:8])
    known = {"shard", "version", "compression", "scalars", "arrays"}
    assert msgspec.msgpack.decode(data[8 : 8 + length]).keys() == known


@pytest.mark.parametrize("compression", ["zstd", "zstd-planes"])
def test_a_forged_size_takes_no_memory(compression: Compression) -> None:
    stored = zstandard.ZstdCompressor().compress(bytes(64))
    array = {"name": "master", "dtype": "float32", "elements": MAX_ARRAY_BYTES, "nbytes": len(stored)}
    head = {"shard": 0, "version": 0, "compression": compression, "scalars": {}, "arrays": [array]}
    packed = msgspec.msgpack.encode(head)
    with pytest.raises(DamagedSnapshot, match="would have 64 bytes"):
        decode_record(struct.pack("<4sI", b"RPS1", len(packed)) + packed + stored, most=1 << 40)


@pytest.mark.parametrize("compression", ["zstd", "zstd-planes"])
def test_a_few_compressed_bytes_that_claim_to_be_gigabytes_take_no_memory(compression: Compression) -> None:
    """A snapshot of 197 KB took 7.2 GB: each array is within the limit of one, and there are many."""
    zeros = np.zeros(64 << 20, np.uint8)
    data = encode_record(ShardRecord(0, 1, {f"moment{n}": zeros for n in range(40)}, {}), compression)
    assert len(data) < 1 << 20
    del zeros
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSnapshot, match=r"claims to have 2684354560 bytes of arrays: its shard has at most"):
            decode_record(data)
        with pytest.raises(DamagedSnapshot, match=r"its shard has at most 17039360$"):
            decode_record(data, manifests.most_bytes(words=1024, replicas=0))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.float32), np.zeros(8, np.float32)[::2], np.zeros(2, np.complex64)]
)
def test_an_array_that_cannot_be_stored_is_named(array: np.ndarray) -> None:
    with pytest.raises(UsageError, match="array exp_avg"):
        encode_record(ShardRecord(0, 0, {"exp_avg": array}, {}), "none")


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="'lz4' is unknown: use one of none, zstd, zstd-planes"):
        encode_record(ShardRecord(0, 0, {}, {}), "lz4")  # type: ignore[arg-type]


def test_byte_planes_find_what_plain_zstd_does_not() -> None:
    weights = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    sizes = {how: len(encode_record(ShardRecord(0, 0, {"master": weights}, {}), how)) for how in COMPRESSIONS}
    assert sizes["zstd-planes"] < sizes["zstd"] < sizes["none"]


# ---- The manifest: what it says comes back exactly; anything else is refused with a sentence ----


def manifest(**changes: Any) -> Manifest:
    length = 10
    shards = {s.index: ShardEntry("a-0.shards", length * s.index, length, "0" * 32) for s in LAYOUT.shards}
    plain = Manifest(
        id="step-00000042-1", version=42, record=json.loads(msgspec.json.encode(JOB)), created=1e9,
        metrics={"loss": 0.1}, compression="none", shards=shards, files={"a-0.shards": length * len(shards)},
    )
    return msgspec.structs.replace(plain, **changes)


def forged(data: dict[str, Any]) -> bytes:
    """Any content under a right checksum."""
    body = json.dumps(data).encode()
    return manifests.checksum_of(body).encode() + b"\n" + body


@pytest.mark.slow
@given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)), st.floats(0, 1e12))
def test_a_manifest_comes_back_exactly(metrics: dict[str, float], created: float) -> None:
    written = manifest(metrics=metrics, created=created, stop=EarlyEnd(45, "enough", "worker1"))
    read = decode_manifest(encode_manifest(written))
    assert read == written
    assert read.job == JOB
    assert read.missing() == []


def test_the_missing_shards_are_known() -> None:
    assert manifest(shards={}).missing() == [shard.index for shard in LAYOUT.shards]


def test_a_metric_that_is_no_number_is_left_out() -> None:
    read = decode_manifest(encode_manifest(manifest(metrics={"loss": math.nan, "best": math.inf, "accuracy": 0.5})))
    assert read.metrics == {"accuracy": 0.5}


def test_a_setting_that_json_cannot_hold_is_refused_when_writing() -> None:
    with pytest.raises(UsageError, match="NaN or infinite"):
        encode_manifest(manifest(record={"config": {"eps": math.nan}}))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: data + b" "])
def test_other_bytes_are_refused(change: Any) -> None:
    with pytest.raises(DamagedSnapshot, match="not what was written"):
        decode_manifest(change(encode_manifest(manifest())))


def test_another_format_gets_its_own_sentence() -> None:
    with pytest.raises(
        SnapshotError, match=r"of format 3, and this version .* reads format 2: use the version"
    ) as raised:
        decode_manifest(forged({"format": 3, "what": "ever"}))
    assert not isinstance(raised.value, DamagedSnapshot)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 41}, "is not that of version 41"),
        ({"id": "../step-00000042-1"}, "is not that of version 42"),
        ({"files": {"../a.shards": 50}}, "no file of a snapshot"),
        ({"files": {"a-0.shards": 51}}, "do not cover file a-0.shards"),
        ({"files": {}}, "do not cover file a-0.shards"),
        ({"shards": {"0": {"file": "a-0.shards", "offset": -1, "length": 1, "checksum": ""}}}, "do not cover"),
        ({"shards": {"x": {}}}, "cannot be read"),
        ({"shards": None}, "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], sentence: str) -> None:
    plain = msgspec.to_builtins(manifest(), str_keys=True)
    with pytest.raises(DamagedSnapshot, match=sentence):
        decode_manifest(forged(plain | change))


def test_a_job_record_that_is_none_is_named() -> None:
    with pytest.raises(DamagedSnapshot, match="snapshot step-00000042-1 is damaged: its job record"):
        _ = manifest(record={"config": {}}).job


@given(st.integers(0, 10**12), st.integers(0, 1000))
def test_names_sort_by_version_then_attempt(version: int, attempt: int) -> None:
    assert age(manifests.snapshot_id(version, attempt)) == (version, attempt)


@pytest.mark.parametrize("name", ["", "latest", "step-1-1", "step-00000001", "step-00000001-1/..", " step-00000001-1"])
def test_other_names_are_no_snapshots(name: str) -> None:
    assert age(name) is None
