"""A codec state goes through bytes unharmed, and bytes that the codec cannot have written are refused."""

from __future__ import annotations

import math
import struct

import pytest
from codec_cases import SPECS, STATEFUL, encoded, encoder_of, gradient, shape_for

import rallypoint as rp
from rallypoint.codec.base import Codec, Stateful
from rallypoint.codec.build import ShardCodecStates, build, dump, limits_of, load, state_bytes
from rallypoint.codec.spec import DGC, CodecSpec, Int8, PowerSGD, Raw, TopK, has_state
from rallypoint.config import ranks_of, resolve
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.errors import ProtocolError

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
