"""Headers survive the wire; whatever is not a header is refused with a sentence."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.shard.events import EVERYTHING
from rallypoint.core.view import ViewNumber
from rallypoint.errors import ProtocolError
from rallypoint.net.frames import HEADER_BYTES, PROTOCOL, Header, Kind, pack, unpack, wants

U32 = st.integers(0, 2**32 - 1)
EMPTY = {
    Kind.CREDIT, Kind.FOLLOW, Kind.FETCH, Kind.UNFOLLOW, Kind.WANT, Kind.WAIT, Kind.RECALL, Kind.TAKEN,
    Kind.PULL_WORDS,
}  # fmt: skip
HEADERS = st.builds(
    Header, kind=st.sampled_from(Kind), view=st.builds(ViewNumber, U32, U32), shard=U32, replica=U32, step=U32,
    weight=st.floats(allow_nan=False, allow_infinity=False), flags=st.integers(0, 15),
    length=st.just(0), codec=st.just(0), base=U32, wants=U32,
)  # fmt: skip
LAYOUT = struct.Struct("<4sBBBBIIIIIIdII")
GOOD = {
    "magic": b"RLPT", "protocol": PROTOCOL, "kind": Kind.PUSH, "flags": 0, "codec": 0, "epoch": 1, "count": 2,
    "shard": 3, "replica": 4, "step": 5, "base": 6, "weight": 1.0, "length": 64, "wants": 9,
}  # fmt: skip


def raw(**changed: object) -> bytes:
    return LAYOUT.pack(*{**GOOD, **changed}.values())


@given(HEADERS)
def test_a_header_survives_the_wire(header: Header) -> None:
    data = pack(header)
    assert len(data) == HEADER_BYTES
    assert unpack(data) == header
    assert type(unpack(memoryview(bytearray(data))).kind) is Kind


@given(st.sampled_from(sorted(set(Kind) - EMPTY - {Kind.ACK, Kind.PROVE})), st.integers(0, 4 << 10))
def test_a_short_payload_is_within_every_limit(kind: Kind, length: int) -> None:
    assert unpack(pack(Header(kind, length=length))).length == length


def test_the_header_is_what_the_docstring_says() -> None:
    assert unpack(raw()) == Header(
        Kind.PUSH, ViewNumber(1, 2), shard=3, replica=4, step=5, weight=1.0, length=64, base=6, wants=9
    )


@pytest.mark.parametrize(("replica", "field"), [(None, 0), (EVERYTHING, 1), (0, 2), (7, 9), (2**32 - 3, 2**32 - 1)])
def test_a_wish_is_for_nobody_s_parameters_for_the_end_s_or_for_a_replica_s(replica: int | None, field: int) -> None:
    assert wants(replica) == field
    assert unpack(raw(wants=field)).wanted == replica


@pytest.mark.parametrize("kind", [Kind.WANT, Kind.WAIT])
def test_a_wish_and_the_word_that_it_has_to_wait_say_which_replica_and_which_clock(kind: Kind) -> None:
    header = unpack(pack(Header(kind, ViewNumber(1, 2), shard=3, base=11, wants=wants(4))))
    assert (header.kind, header.shard, header.wanted, header.base) == (kind, 3, 4, 11)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"magic": b"GET "}, "do not begin a frame: is this another program's connection"),
        ({"magic": b"RLPU"}, "do not begin a frame"),
        ({"protocol": PROTOCOL + 1}, "run the same version of rallypoint everywhere"),
        ({"protocol": 0}, "protocol 0 instead of"), ({"kind": 0}, "a frame of unknown kind 0"),
        ({"kind": 255}, "a frame of unknown kind 255"),
        ({"kind": Kind.INITIAL, "codec": 1}, "a INITIAL frame .*codec 1.* impossible"),
        ({"kind": Kind.REPLICATE, "codec": 1}, "a REPLICATE frame .*codec 1.* impossible"),
        ({"kind": Kind.STATE, "codec": 255}, "a STATE frame .*codec 255.* impossible"),
        ({"flags": 32}, "flags 32.* impossible"), ({"flags": 255}, "impossible"),
        ({"weight": math.nan}, "weight nan.* impossible"), ({"weight": math.inf}, "weight inf.* impossible"),
        ({"weight": -math.inf}, "impossible"),
        ({"length": 2**32 - 1}, "a PUSH frame of 4294967295 bytes: at most 67108864 are allowed"),
    ],
)
def test_an_impossible_header_is_refused_and_says_why(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        unpack(raw(**changed))


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.VERSION, Kind.CODEC_STATE])
def test_only_contributions_versions_and_memories_are_written_by_a_codec(kind: Kind) -> None:
    assert unpack(raw(kind=kind, codec=1)).codec == 1
    for other in set(Kind) - {Kind.PUSH, Kind.VERSION, Kind.CODEC_STATE}:
        with pytest.raises(ProtocolError, match=f"a {other.name} frame .*codec 1"):
            unpack(raw(kind=other, codec=1, length=0))


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_a_limit(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=rf"a {kind.name} frame of \d+ bytes: at most \d+ are allowed"):
        unpack(raw(kind=kind, length=(456 << 20) + 1))


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.STATE, Kind.CODEC_STATE}))
def test_only_a_whole_state_or_a_memory_may_be_longer_than_a_shard(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=rf"a {kind.name} frame of \d+ bytes: at most \d+ are allowed"):
        unpack(raw(kind=kind, length=(64 << 20) + 1))
    for longer in (Kind.STATE, Kind.CODEC_STATE):
        assert unpack(raw(kind=longer, length=(64 << 20) + 1)).kind is longer


@pytest.mark.parametrize("kind", sorted(EMPTY))
def test_a_frame_that_carries_nothing_carries_nothing(kind: Kind) -> None:
    assert unpack(raw(kind=kind, length=0)).length == 0
    with pytest.raises(ProtocolError, match="at most 0 are allowed"):
        unpack(raw(kind=kind, length=1))


def test_before_the_handshake_nobody_can_make_us_allocate() -> None:
    for kind in (Kind.HELLO, Kind.CHALLENGE):
        with pytest.raises(ProtocolError, match="at most 4096 are allowed"):
            unpack(raw(kind=kind, length=4097))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


@given(st.binary(min_size=HEADER_BYTES - 5, max_size=HEADER_BYTES - 5))
def test_random_fields_give_a_header_or_a_protocol_error(rest: bytes) -> None:
    data = b"RLPT" + bytes([PROTOCOL]) + rest
    try:
        header = unpack(data)
    except ProtocolError:
        return
    assert pack(header) == data
