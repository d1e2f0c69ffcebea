"""A state that comes over the wire is what the job has of that shard at that version, or the link ends (I9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rallypoint as rp
from rallypoint.config import JobConfig, resolve, with_own_optimizer
from rallypoint.core.layout import Shard, TensorSpec, build_layout
from rallypoint.errors import ProtocolError
from rallypoint.store.record import ShardRecord, encode_record, read_state

SHARD = build_layout([TensorSpec("w", (20,), "float32", 0)], shard_bytes=256).shards[0]
VERSION = 7
CONFIG = resolve({"steps": 50, "sync": rp.AllReduce(), "optimizer": rp.AdamW(lr=1e-2)})
OWN = with_own_optimizer(CONFIG, "mine")
PURE = settings(max_examples=300)


def _words(count: int = SHARD.words, dtype: str = "float32") -> np.ndarray:
    return np.arange(count).astype(dtype)


def _moments() -> dict[str, np.ndarray]:
    return {"master": _words(), "exp_avg": _words(), "exp_avg_sq": _words()}


GOOD = ShardRecord(SHARD.index, VERSION, _moments(), {"step": 7.0})
GOOD_OWN = ShardRecord(SHARD.index, VERSION, {"master": _words(), "own.packed.w": _words(11, "uint8")}, {})


def _read(record: ShardRecord, config: JobConfig = CONFIG, shard: Shard = SHARD) -> ShardRecord:
    return read_state(encode_record(record, "none"), shard, VERSION, config)


@pytest.mark.parametrize(
    ("record", "config"),
    [(GOOD, CONFIG), (replace(GOOD, arrays={"master": _words()}, scalars={}), CONFIG), (GOOD_OWN, OWN)],
)
def test_what_the_job_has_is_taken(record: ShardRecord, config: JobConfig) -> None:
    read = _read(record, config)
    assert read.scalars == record.scalars
    assert {name: array.tolist() for name, array in read.arrays.items()} == {
        name: array.tolist() for name, array in record.arrays.items()
    }


FORGED: dict[str, Callable[[ShardRecord], ShardRecord]] = {
    "another shard": lambda r: replace(r, shard=r.shard + 1),
    "another version": lambda r: replace(r, version=r.version - 1),
    "no parameters": lambda r: replace(r, arrays={k: v for k, v in r.arrays.items() if k != "master"}),
    "too few parameters": lambda r: replace(r, arrays=r.arrays | {"master": _words(SHARD.words - 1)}),
    "parameters of another type": lambda r: replace(r, arrays=r.arrays | {"master": _words(dtype="float64")}),
    "a moment that the optimizer has not": lambda r: replace(r, arrays=r.arrays | {"momentum_buffer": _words()}),
    "a moment of the wrong type": lambda r: replace(r, arrays=r.arrays | {"own.exp_avg": _words(dtype="int64")}),
    "a number that the optimizer has not": lambda r: replace(r, scalars=r.scalars | {"lr": 1e9}),
    "clocks": lambda r: replace(r, clocks=(1, 2)),
    "codec states": lambda r: replace(r, codec_states={0: _words(4, "uint8")}),
}


@pytest.mark.parametrize(("record", "config"), [(GOOD, CONFIG), (GOOD_OWN, OWN)], ids=["the job's", "its own"])
@pytest.mark.parametrize("forged", FORGED)
def test_anything_else_is_refused(forged: str, record: ShardRecord, config: JobConfig) -> None:
    with pytest.raises(ProtocolError, match="state of shard"):
        _read(FORGED[forged](record), config)


@pytest.mark.parametrize("lacking", ["exp_avg", "exp_avg_sq"])
def test_half_of_the_moments_is_refused(lacking: str) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        _read(replace(GOOD, arrays={name: array for name, array in GOOD.arrays.items() if name != lacking}))


@given(st.data())
@PURE
def test_bytes_that_were_tampered_with_are_refused_or_fit(data: st.DataObject) -> None:
    own = data.draw(st.booleans())
    encoded = bytearray(encode_record(GOOD_OWN if own else GOOD, "none"))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded))) if data.draw(st.booleans()) else len(encoded)
    try:
        read = read_state(encoded[:cut], SHARD, VERSION, OWN if own else CONFIG)
    except ProtocolError:
        return
    assert (read.shard, read.version, len(read.arrays["master"])) == (SHARD.index, VERSION, SHARD.words)
    assert own or set(read.arrays) in ({"master"}, set(GOOD.arrays))


@given(st.binary(max_size=200))
@PURE
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_state(noise, SHARD, VERSION, CONFIG)
