"""The manifest: what it says comes back exactly; anything else is refused with a sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import JOB, LAYOUT

from rallypoint.core.view import EarlyEnd
from rallypoint.errors import DamagedSnapshot, SnapshotError, UsageError
from rallypoint.store.manifest import (
    Manifest,
    ShardEntry,
    age,
    checksum_of,
    decode_manifest,
    encode_manifest,
    snapshot_id,
)


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
    return checksum_of(body).encode() + b"\n" + body


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
    assert age(snapshot_id(version, attempt)) == (version, attempt)


@pytest.mark.parametrize("name", ["", "latest", "step-1-1", "step-00000001", "step-00000001-1/..", " step-00000001-1"])
def test_other_names_are_no_snapshots(name: str) -> None:
    assert age(name) is None
