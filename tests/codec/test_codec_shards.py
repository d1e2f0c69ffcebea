"""Which codec each of a job's shards is written with, both ways."""

from __future__ import annotations

from typing import Any

import pytest

import rallypoint as rp
from rallypoint.codec.base import Scratch
from rallypoint.codec.build import ShardCodecs, down_codec
from rallypoint.codec.spec import DGC, Bf16, Fp16, Int8, PowerSGD, Raw, Sign, TopK
from rallypoint.config import codec_of, overrides_from, ranks_of, resolve
from rallypoint.core.layout import Shard
from rallypoint.errors import ConfigError
from rallypoint.net.frames import Header, Kind, pack, unpack

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
    assert codec is not None
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
        assert codec is not None
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
