"""A frame that changes on its way, in any bit, is never taken for one that was sent."""

from __future__ import annotations

import hashlib
import hmac
import threading

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.view import ViewNumber
from rallypoint.errors import CorruptFrame, LinkError
from rallypoint.net import seal
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack
from rallypoint.net.keys import LinkKeys
from rallypoint.net.seal import SEALED_BYTES, Opener, Sealer, SharedCheck
from rallypoint.testing.contracts.transports import Beside

KEYS = LinkKeys(bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96)), False)
TRUSTED = LinkKeys(KEYS.sending, KEYS.receiving, KEYS.payload, True)
LINKS = pytest.mark.parametrize("keys", [KEYS, TRUSTED], ids=["any network", "a trusted network"])
WITH_PAYLOAD = sorted(set(Kind) - {
    Kind.CREDIT, Kind.FOLLOW, Kind.FETCH, Kind.UNFOLLOW, Kind.ACK, Kind.WANT, Kind.WAIT, Kind.RECALL, Kind.TAKEN,
})  # fmt: skip


def framed(keys: LinkKeys, header: Header, payload: bytes, sealer: Sealer | None = None) -> bytes:
    return (sealer or Sealer(keys)).seal(header, memoryview(payload)) + payload


def opened(opener: Opener, data: bytes) -> tuple[Header, bytes]:
    """What a receiver takes of these bytes: it reads as many bytes of payload as the header says."""
    header = opener.open(memoryview(data)[:SEALED_BYTES])
    payload = memoryview(data)[SEALED_BYTES : SEALED_BYTES + header.length]
    if len(payload):
        opener.verify(payload)
    return header, bytes(payload)


def receiver(keys: LinkKeys) -> Opener:
    return Opener(keys.other_side(), "server0")


@LINKS
@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_frame_survives_the_wire(keys: LinkKeys, kind: Kind) -> None:
    payload = b"payload" * 20 if kind in WITH_PAYLOAD else b""
    header = Header(kind, ViewNumber(1, 2), 3, 4, 5, 0.5, len(payload))
    assert opened(receiver(keys), framed(keys, header, payload)) == (header, payload)


@LINKS
@pytest.mark.parametrize("kind", Kind)
def test_a_flipped_bit_anywhere_in_a_frame_of_any_kind_is_seen(keys: LinkKeys, kind: Kind) -> None:
    """Each bit of header, check, tag and payload."""
    payload = bytes(range(40)) if kind in WITH_PAYLOAD else b""
    data = framed(keys, Header(kind, ViewNumber(1, 2), 3, 4, 5, 0.5, len(payload)), payload)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame, match=rf"^(the payload of a {kind.name} frame|a frame) from server0 "):
            opened(receiver(keys), bytes(changed))


@LINKS
@given(payload=st.binary(min_size=1, max_size=2000), data=st.data())
def test_no_change_of_any_bytes_is_taken_for_what_was_sent(
    keys: LinkKeys, payload: bytes, data: st.DataObject
) -> None:
    sent = framed(keys, Header(Kind.PUSH, shard=7, weight=1.0, length=len(payload)), payload)
    at = data.draw(st.integers(0, len(sent) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=min(64, len(sent) - at)))
    changed = sent[:at] + noise + sent[at + len(noise) :]
    if changed == sent:
        assert opened(receiver(keys), changed)[1] == payload
    else:
        with pytest.raises(CorruptFrame):
            opened(receiver(keys), changed)


@LINKS
@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0], [0, 2], [0, 1, 1], [0, 1, 0]])
def test_a_frame_that_is_repeated_left_out_or_moved_is_seen(keys: LinkKeys, order: list[int]) -> None:
    sealer, opener = Sealer(keys), receiver(keys)
    frames = [framed(keys, Header(Kind.CREDIT, replica=1), b"", sealer) for _ in range(3)]
    assert len(set(frames)) == 3, "the same frame has another tag each time"
    for expected, number in enumerate(order):
        if number == expected:
            opened(opener, frames[number])
        else:
            with pytest.raises(CorruptFrame, match="a frame from server0 has a wrong tag"):
                opened(opener, frames[number])


@LINKS
def test_reflection_a_side_s_own_frames_are_not_the_other_side_s(keys: LinkKeys) -> None:
    with pytest.raises(CorruptFrame):
        opened(Opener(keys, "server0"), framed(keys, Header(Kind.FOLLOW), b""))


@LINKS
def test_a_frame_of_another_connection_is_seen(keys: LinkKeys) -> None:
    other = LinkKeys(bytes(32), bytes(32), keys.payload, keys.checksums)
    with pytest.raises(CorruptFrame):
        opened(receiver(keys), framed(other, Header(Kind.FOLLOW), b""))


@LINKS
def test_payloads_of_two_frames_cannot_be_exchanged(keys: LinkKeys) -> None:
    sealer, opener = Sealer(keys), receiver(keys)
    first = framed(keys, Header(Kind.PUSH, shard=0, length=4), b"left", sealer)
    second = framed(keys, Header(Kind.PUSH, shard=1, length=4), b"rite", sealer)
    with pytest.raises(CorruptFrame, match="the payload of a PUSH frame"):
        opened(opener, first[:-4] + second[-4:])


def test_a_length_is_not_believed_before_the_tag() -> None:
    """A changed length names bytes that never come: it is refused with the 80 bytes at hand."""
    data = bytearray(framed(KEYS, Header(Kind.STATE, length=4), b"four"))
    data[40:44] = (384 << 20).to_bytes(4, "little")
    with pytest.raises(CorruptFrame):
        receiver(KEYS).open(memoryview(data)[:SEALED_BYTES])


def test_a_corrupt_frame_ends_the_link_as_any_loss_does() -> None:
    assert issubclass(CorruptFrame, LinkError), "both sides connect again and say it again (I2)"


# ---- known answers ---------------------------------------------------------------------------------------------------


def test_a_frame_is_byte_for_byte_what_the_docstring_says() -> None:
    sealer, payload = Sealer(KEYS), b"payload"
    for number in range(3):
        header = Header(Kind.PUSH, shard=number, weight=1.0, length=len(payload))
        check = hmac.new(KEYS.payload, payload, hashlib.sha256).digest()[:16]
        begin = pack(header) + check
        tag = hashlib.blake2b(
            number.to_bytes(8, "little") + begin, digest_size=16, key=KEYS.sending, person=b"rallypoint/frame"
        ).digest()
        assert sealer.seal(header, memoryview(payload)) == begin + tag
    assert check.hex() == "3b3c7b981861fbc052465e80a9a4a994"
    assert tag.hex() == "2881a3555ea3045a20b03ec2fb0c8509"


def test_tensors_have_a_checksum_on_a_trusted_network_and_messages_a_mac_everywhere() -> None:
    payload = b"payload"
    mac = hmac.new(KEYS.payload, payload, hashlib.sha256).digest()[:16]
    for kind in WITH_PAYLOAD:
        for keys in (KEYS, TRUSTED):
            check = framed(keys, Header(kind, length=len(payload)), payload)[HEADER_BYTES : HEADER_BYTES + 16]
            plain = keys.checksums and kind >= Kind.INITIAL
            assert check == (xxhash.xxh3_128_digest(payload) if plain else mac)


# ---- one payload for many --------------------------------------------------------------------------------------------


@LINKS
def test_a_version_for_many_followers_is_checked_once(keys: LinkKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    real = seal._check

    def counted(payload: memoryview, key: bytes) -> bytes:
        computed.append(threading.get_ident())
        return real(payload, key)

    monkeypatch.setattr(seal, "_check", counted)
    shared, payload = SharedCheck(), memoryview(b"a version" * 1000)
    header = Header(Kind.VERSION, length=len(payload))
    links = [LinkKeys(bytes([n]) * 32, bytes(32), keys.payload, keys.checksums) for n in range(5)]
    found: list[bytes] = []
    with Beside(lambda: found.extend(Sealer(link).seal(header, payload, shared) for link in links[:3])):
        found += [Sealer(link).seal(header, payload, shared) for link in links[3:]]
    assert len(computed) == 1
    assert len({data[HEADER_BYTES:-16] for data in found}) == 1
    assert len({data[-16:] for data in found}) == 5, "the tag is each connection's own"


def test_followers_of_both_kinds_share_and_a_shorter_payload_has_its_own() -> None:
    shared, payload = SharedCheck(), memoryview(b"a version")
    for keys in (KEYS, TRUSTED, KEYS):
        for part in (payload, payload[:4]):
            header = Header(Kind.VERSION, length=len(part))
            assert opened(receiver(keys), Sealer(keys).seal(header, part, shared) + bytes(part))[1] == part
