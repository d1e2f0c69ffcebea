"""A codec state goes through bytes unharmed, and bytes that the codec cannot have written are refused."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from codec_cases import SPECS, STATEFUL, encoded, encoder_of, gradient, shape_for

import rallypoint as rp
from rallypoint.codec.base import Codec, Scratch, Stateful
from rallypoint.codec.build import ShardCodecs, ShardCodecStates, build, down_codec, dump, limits_of, load, state_bytes
from rallypoint.codec.spec import DGC, Bf16, CodecSpec, Fp16, Int8, PowerSGD, Raw, Sign, TopK, has_state
from rallypoint.config import codec_of, overrides_from, ranks_of, resolve
from rallypoint.core.layout import Shard, TensorSpec, build_layout
from rallypoint.errors import ConfigError, ProtocolError
from rallypoint.net.frames import Header, Kind, pack, unpack

WORDS = 48 * 80
every = pytest.mark.parametrize("name", STATEFUL)


def practised(name: str, steps: int = 5) -> Codec:
    """A codec with a state."""
    codec = encoder_of(name, WORDS)
    for step in range(steps):
        encoded(codec, gradient(WORDS, seed=step), seed=step)
    return codec


def state_of(codec: Codec) -> bytes:
    assert isinstance(codec, Stateful)
    return dump(codec)


@every
def test_whoever_takes_a_codec_state_over_goes_on_as_its_owner_would_have(name: str) -> None:
    owner, heir = practised(name), encoder_of(name, WORDS)
    data = state_of(owner)
    rest = load(heir, owner.code, memoryview(data + b"and what was sent"))
    assert bytes(rest) == b"and what was sent"
    assert state_of(heir) == data
    for step in range(5, 10):
        values = gradient(WORDS, seed=step)
        assert bytes(encoded(heir, values, seed=step)) == bytes(encoded(owner, values, seed=step))
    assert state_of(heir) == state_of(owner) != data


@every
def test_a_codec_state_is_as_long_as_its_limits_say(name: str) -> None:
    codec = practised(name)
    limits = limits_of(encoder_of(name, WORDS), WORDS)
    assert len(state_of(codec)) == state_bytes(codec) == limits.least
    assert limits.most == limits.least + codec.bytes_for(WORDS)
    limits.check(codec.code, limits.least)
    limits.check(codec.code, limits.most)
    for code, nbytes in ((codec.code, limits.least - 1), (codec.code, limits.most + 1), (codec.code + 1, limits.most)):
        with pytest.raises(ProtocolError, match=r"a codec state of .* are possible"):
            limits.check(code, nbytes)


@every
def test_bytes_that_are_no_state_of_this_codec_are_refused_and_change_nothing(name: str) -> None:
    codec = practised(name)
    data = state_of(codec)
    nan = struct.pack("<f", math.nan)
    for code, bad in [
        (codec.code, data[:-1]), (codec.code, b""), (codec.code + 1, data),
        (codec.code, nan + data[4:]) if not name.startswith("dgc") else (codec.code, b"\xff" * 8 + data[8:]),
        (codec.code, data[:-4] + struct.pack("<f", math.inf)),
    ]:  # fmt: skip
        with pytest.raises(ProtocolError, match="state of codec"):
            load(codec, code, memoryview(bad))
        assert state_of(codec) == data


@pytest.mark.parametrize("name", [name for name in SPECS if name not in STATEFUL])
def test_a_codec_without_a_state_takes_none_over(name: str) -> None:
    assert not has_state(SPECS[name])
    with pytest.raises(ProtocolError, match="no state of codec"):
        load(build(SPECS[name], shape_for(SPECS[name], WORDS)), 0, memoryview(b""))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(Int8(), {0, 1}), (TopK(), {0, 1}), (DGC(), {0, 1}), (PowerSGD(), {0}), (Raw(), set()),
     (Int8(error_feedback=False), set())],
)  # fmt: skip
def test_there_are_codec_states_of_the_shards_whose_codec_has_one(spec: CodecSpec, expected: set[int]) -> None:
    config = resolve({"codec": spec, "network.shard_bytes": 64 << 10, "optimizer": rp.SGD(lr=0.1)})
    specs = [
        TensorSpec("mean", (3000,), "float32", -1), TensorSpec("body", (400, 200), "float32", 0),
        TensorSpec("bias", (400,), "float32", 1),
    ]  # fmt: skip
    layout = build_layout(specs, config.network.shard_bytes, ranks_of(config))
    codec_states = ShardCodecStates(config)
    assert {layout.shards[index].group for index in codec_states.among(layout)} == expected
    for shard in layout.shards:
        if shard.group not in expected:
            with pytest.raises(ProtocolError, match="has none in this job"):
                codec_states.of(shard)


# ---- Which codec each of a job's shards is written with, both ways ----


RAW = 0
INT8 = 3
TOP_K = 5
SIGN = 7
POWERSGD = 8


def code(settings: dict[str, Any], shard: Shard) -> int:
    codec = ShardCodecs(resolve(settings)).of(shard)
    return RAW if codec is None else codec.code


def shard(group: int, words: int, columns: int = 0) -> Shard:
    return Shard(0, group, 100, 100 + words, columns)


def test_a_group_has_the_jobs_codec_unless_it_has_one_of_its_own() -> None:
    groups = (rp.Group(match=("head.*",), codec=Sign()), rp.Group(match=("body.*",)))
    settings = {"codec": Int8(), "groups": groups}
    assert [code(settings, shard(group, 4096)) for group in (-1, 0, 1, 2, 3)] == [RAW, INT8, INT8, SIGN, INT8]
    assert codec_of(resolve(settings), -1) == Raw()


LARGEST = 1 << 26  # bytes of a shard


def dgc(ratio: float, shard_bytes: int = LARGEST) -> dict[str, Any]:
    return {"codec": DGC(ratio=ratio), "optimizer": rp.SGD(lr=0.1), "network.shard_bytes": shard_bytes}


@pytest.mark.parametrize("settings", [dgc(0.01), dgc(0.66), dgc(1.0, LARGEST // 2)])
def test_what_a_codec_makes_of_the_largest_shard_fits_into_a_frame(settings: dict[str, Any]) -> None:
    words = settings["network.shard_bytes"] // 4
    codec = ShardCodecs(resolve(settings)).of(shard(0, words))
    unpack(pack(Header(Kind.PUSH, length=codec.bytes_for(words))))


@pytest.mark.parametrize("ratio", [0.67, 0.9, 1.0])
def test_settings_whose_contributions_no_frame_carries_are_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="more than the 64 MiB that go in one piece"):
        resolve(dgc(ratio))


def test_a_shard_that_would_not_become_smaller_goes_raw() -> None:
    assert code({"codec": Int8()}, shard(0, 10)) == RAW  # a whole block and its scale are 260 bytes
    assert code({"codec": Int8()}, shard(0, 100)) == INT8
    assert code({"codec": TopK(ratio=0.9)}, shard(0, 4096)) == RAW
    assert down_codec(resolve({"down": Int8()}), shard(0, 10), Scratch()) is None


def test_all_of_a_dgc_group_goes_through_it_for_there_is_its_momentum() -> None:
    assert code({"codec": DGC(), "optimizer": rp.SGD(lr=0.1)}, shard(0, 1)) == TOP_K


def test_powersgd_factors_matrices_and_sends_vectors_raw() -> None:
    assert code({"codec": PowerSGD(rank=4)}, shard(0, 4096, columns=64)) == POWERSGD
    assert code({"codec": PowerSGD(rank=4)}, shard(0, 4096)) == RAW
    codecs = ShardCodecs(resolve({"codec": PowerSGD(rank=4)}))
    for rows, columns in ((64, 64), (32, 128), (64, 64)):
        codec = codecs.of(shard(0, rows * columns, columns))
        assert codec.bytes_for(rows * columns) == 4 * 4 * (rows + columns)


def test_the_layout_is_cut_by_rows_where_powersgd_is_used() -> None:
    groups = (rp.Group(match=("a",), codec=PowerSGD(rank=2)), rp.Group(match=("b",), codec=Fp16()))
    assert ranks_of(resolve({"codec": PowerSGD(rank=8), "groups": groups})) == {0: 8, 1: 8, 2: 2}
    assert ranks_of(resolve({"codec": Int8()})) == {}


def test_versions_go_down_in_the_jobs_own_codec_and_buffers_raw() -> None:
    for spec, number in ((Raw(), RAW), (Fp16(), 1), (Bf16(), 2), (Int8(), INT8)):
        codec = down_codec(resolve({"down": spec}), shard(2, 4096), Scratch())
        assert (RAW if codec is None else codec.code) == number
        assert down_codec(resolve({"down": spec}), shard(-1, 4096), Scratch()) is None


def test_codecs_are_settings_of_the_command_line() -> None:
    sets = [
        "codec.type=powersgd", "codec.rank=4", "down.type=int8", "down.block=64",
        "groups=[{match=['head.*'], codec={type='topk', ratio=0.02}}, {match=['x'], lr_scale=0.5}]",
    ]  # fmt: skip
    config = resolve({"codec": TopK(ratio=0.5)}, overrides_from(None, sets))
    assert config.codec == PowerSGD(rank=4)
    assert config.down == Int8(block=64)
    assert [group.codec for group in config.groups] == [TopK(ratio=0.02), None]


@pytest.mark.parametrize("spec", [PowerSGD(rank=0), Int8(block=100), TopK(ratio=0.0)])
def test_an_impossible_codec_is_refused_before_anything_is_sent(spec: Any) -> None:
    with pytest.raises(ConfigError):
        ShardCodecs(resolve({"codec": spec})).of(shard(0, 4096, columns=64))
