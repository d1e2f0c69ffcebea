"""A frame that changes on its way, in any bit, is never taken for one that was sent."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.view import ViewNumber
from rallypoint.errors import CorruptFrame, LinkError, ProtocolError, UsageError
from rallypoint.net import handshake
from rallypoint.net.channel import SEALED_BYTES, Opener, Sealer, Secrets
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.handshake import ROLES, LinkKeys, job_secret, role_of, role_token, ticket_for, token_keys

KEYS = LinkKeys(bytes(range(32)), bytes(range(32, 64)))
WITH_PAYLOAD = sorted(set(Kind) - {
    Kind.CREDIT, Kind.FOLLOW, Kind.FETCH, Kind.UNFOLLOW, Kind.ACK, Kind.WANT, Kind.WAIT, Kind.RECALL, Kind.TAKEN,
    Kind.PULL_WORDS, Kind.PROVE,
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


def receiver() -> Opener:
    return Opener(KEYS.other_side(), "server0")


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_frame_survives_the_wire(kind: Kind) -> None:
    payload = b"payload" * 20 if kind in WITH_PAYLOAD else b""
    header = Header(kind, ViewNumber(1, 2), 3, 4, 5, 0.5, len(payload))
    assert opened(receiver(), framed(KEYS, header, payload)) == (header, payload)


@pytest.mark.parametrize("kind", Kind)
def test_a_flipped_bit_anywhere_in_a_frame_of_any_kind_is_seen(kind: Kind) -> None:
    """Each bit of header, MAC, tag and payload."""
    payload = bytes(range(40)) if kind in WITH_PAYLOAD else b""
    data = framed(KEYS, Header(kind, ViewNumber(1, 2), 3, 4, 5, 0.5, len(payload)), payload)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrame, match=rf"^(the payload of a {kind.name} frame|a frame) from server0 "):
            opened(receiver(), bytes(changed))


@given(payload=st.binary(min_size=1, max_size=2000), data=st.data())
def test_no_change_of_any_bytes_is_taken_for_what_was_sent(payload: bytes, data: st.DataObject) -> None:
    sent = framed(KEYS, Header(Kind.PUSH, shard=7, weight=1.0, length=len(payload)), payload)
    at = data.draw(st.integers(0, len(sent) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=min(64, len(sent) - at)))
    changed = sent[:at] + noise + sent[at + len(noise) :]
    if changed == sent:
        assert opened(receiver(), changed)[1] == payload
    else:
        with pytest.raises(CorruptFrame):
            opened(receiver(), changed)


@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0], [0, 2], [0, 1, 1], [0, 1, 0]])
def test_a_frame_that_is_repeated_left_out_or_moved_is_seen(order: list[int]) -> None:
    sealer, opener = Sealer(KEYS), receiver()
    frames = [framed(KEYS, Header(Kind.CREDIT, replica=1), b"", sealer) for _ in range(3)]
    assert len(set(frames)) == 3, "the same frame has another tag each time"
    for expected, number in enumerate(order):
        if number == expected:
            opened(opener, frames[number])
        else:
            with pytest.raises(CorruptFrame, match="a frame from server0 has a wrong tag"):
                opened(opener, frames[number])


def test_reflection_a_side_s_own_frames_are_not_the_other_side_s() -> None:
    with pytest.raises(CorruptFrame):
        opened(Opener(KEYS, "server0"), framed(KEYS, Header(Kind.FOLLOW), b""))


def test_a_frame_of_another_connection_is_seen() -> None:
    other = LinkKeys(bytes(32), bytes(32))
    with pytest.raises(CorruptFrame):
        opened(receiver(), framed(other, Header(Kind.FOLLOW), b""))


def test_payloads_of_two_frames_cannot_be_exchanged() -> None:
    sealer, opener = Sealer(KEYS), receiver()
    first = framed(KEYS, Header(Kind.PUSH, shard=0, length=4), b"left", sealer)
    second = framed(KEYS, Header(Kind.PUSH, shard=1, length=4), b"rite", sealer)
    with pytest.raises(CorruptFrame, match="the payload of a PUSH frame"):
        opened(opener, first[:-4] + second[-4:])


def test_a_length_is_not_believed_before_the_tag() -> None:
    """A changed length names bytes that never come: it is refused with the 80 bytes at hand."""
    data = bytearray(framed(KEYS, Header(Kind.STATE, length=4), b"four"))
    data[40:44] = (456 << 20).to_bytes(4, "little")
    with pytest.raises(CorruptFrame):
        receiver().open(memoryview(data)[:SEALED_BYTES])


def test_a_corrupt_frame_ends_the_link_as_any_loss_does() -> None:
    assert issubclass(CorruptFrame, LinkError), "both sides connect again and say it again (I2)"


# ---- known answers ---------------------------------------------------------------------------------------------------


def test_a_frame_is_byte_for_byte_what_the_docstring_says() -> None:
    """The keys computed here from RFC 5869, the MAC by encryption of nothing (NIST SP 800-38D, section 3)."""
    sealer, payload = Sealer(KEYS), b"payload"

    def expand(info: bytes) -> bytes:  # one block of HKDF-Expand
        return hmac.new(KEYS.sending, info + b"\x01", hashlib.sha256).digest()

    for number in range(3):
        header = Header(Kind.PUSH, shard=number, weight=1.0, length=len(payload))
        gmac = Cipher(algorithms.AES(expand(b"payloads")), modes.GCM(number.to_bytes(12, "little"))).encryptor()
        gmac.authenticate_additional_data(payload)
        gmac.finalize()
        begin = pack(header) + gmac.tag
        tag = hashlib.blake2b(
            number.to_bytes(8, "little") + begin, digest_size=16, key=expand(b"tags"), person=b"rallypoint/frame"
        ).digest()
        assert sealer.seal(header, memoryview(payload)) == begin + tag
    assert gmac.tag.hex() == "36f767972d70e409451fc25cc8c0e982"
    assert tag.hex() == "d71b5ad8233aeeedb1fb241fdd75d328"


def test_no_nonce_is_used_twice() -> None:
    """Also a frame without a payload has a number of its own."""
    sealer = Sealer(KEYS)
    nonces = []
    real = sealer._macs

    class Watched:
        def encrypt(self, nonce: bytes, data: bytes, also: memoryview) -> bytes:
            nonces.append(nonce)
            return real.encrypt(nonce, data, also)

    sealer._macs = Watched()
    for length in (4, 0, 4, 0, 0, 7):
        sealer.seal(Header(Kind.PUSH, length=length), memoryview(bytes(length)))
    assert [int.from_bytes(nonce, "little") for nonce in nonces] == [0, 2, 5]


# ---- secrets in messages ---------------------------------------------------------------------------------------------


def test_a_secret_is_read_by_the_other_side_of_its_connection_alone() -> None:
    mine, secret = Secrets(KEYS), bytes(range(32))
    hidden = mine.hide(secret)
    assert len(hidden) == 60
    assert secret[:4] not in hidden
    assert hidden != mine.hide(secret), "the same secret looks different each time"
    assert Secrets(KEYS.other_side()).reveal(hidden) == secret
    elsewhere = Secrets(LinkKeys(bytes(32), bytes(32)))
    for other in (mine, elsewhere):
        with pytest.raises(ProtocolError, match=r"^a secret that was not encrypted for this connection$"):
            other.reveal(hidden)


@pytest.mark.parametrize("hidden", [b"x", bytes(12), bytes(28), bytes(60)])
def test_what_is_no_hidden_secret_is_a_protocol_error(hidden: bytes) -> None:
    with pytest.raises(ProtocolError):
        Secrets(KEYS).reveal(hidden)


def test_no_secret_stays_none() -> None:
    assert Secrets(KEYS).hide(b"") == Secrets(KEYS).reveal(b"") == b""


# ---- HKDF gives the answers of RFC 5869; no two purposes share a key ----


@pytest.mark.parametrize(
    ("secret", "salt", "info", "key", "output"),
    [
        (  # A.1
            "0b" * 22, "000102030405060708090a0b0c", "f0f1f2f3f4f5f6f7f8f9",
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (  # A.2
            bytes(range(0x50)).hex(), bytes(range(0x60, 0xB0)).hex(), bytes(range(0xB0, 0x100)).hex(),
            "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (  # A.3
            "0b" * 22, "", "",
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.2", "A.3"],
)  # fmt: skip
def test_hkdf_gives_the_answers_of_rfc_5869(secret: str, salt: str, info: str, key: str, output: str) -> None:
    found = handshake.extract(bytes.fromhex(salt), bytes.fromhex(secret))
    assert found.hex() == key
    assert handshake.expand(found, bytes.fromhex(info)) == bytes.fromhex(output)[:32]


def test_every_purpose_direction_token_and_greeting_has_a_key_of_its_own() -> None:
    found = []
    for token, known in itertools.product(("", "a token", "another token"), (b"", b"a ticket", b"another")):
        keys = token_keys(token, known)
        found += [keys.dialer, keys.listener, keys.session]
        for transcript in (bytes(32), bytes(31) + b"\1"):
            link = handshake.dialers_keys(keys, transcript)
            found += [link.sending, link.receiving]
    assert len(set(found)) == len(found)
    assert {len(key) for key in found} == {32}


def test_every_member_has_a_ticket_of_its_own_for_each_listener() -> None:
    who = [("worker", "w1", 1), ("worker", "w11", 1), ("worker", "w1", 11), ("server", "w1", 1), ("worker", "w", 11)]
    found = [ticket_for(secret, *one) for secret in (b"a secret", b"another") for one in who]
    assert len(set(found)) == len(found)
    assert {len(one) for one in found} == {32}
    assert ticket_for(b"a secret", "worker", "w1", 1) == found[0]


def test_keys_are_not_shown() -> None:
    keys = token_keys("a token")
    link = handshake.dialers_keys(keys, bytes(32))
    for shown in (keys, link):
        for field in dataclasses.fields(shown):
            value = getattr(shown, field.name)
            assert not isinstance(value, bytes) or (repr(value) not in repr(shown) and value.hex() not in repr(shown))


# ---- a token for each role -------------------------------------------------------------------------------------------


def test_every_role_of_every_job_has_a_token_of_its_own() -> None:
    found = [role_token(job, role) for job in ("a job's token", "another's") for role in ROLES]
    assert len({token.partition(":")[2] for token in found}) == len(found)
    assert [role_of(token) for token in found] == [*ROLES, *ROLES]
    assert found[0] == role_token("a job's token", "worker"), "it does not change: it is in files"
    assert found[0] == "worker:892b47b2a25d6a69627a677334fe0e3e30a28fa5924a8fe76985885c75ac8771"


@pytest.mark.parametrize("token", ["", "a job's token", "worker:of a job", "worker:" + 63 * "0", "gambler:" + 64 * "0"])
def test_what_is_no_role_s_token_is_a_job_s(token: str) -> None:
    assert role_of(token) == ""
    assert role_token(token, "coordinator") == token


def test_a_role_s_token_gives_no_other_token() -> None:
    token = role_token("a job's token", "worker")
    assert role_token(token, "worker") == token
    for other in ("server", "aggregator", "observer", "coordinator"):
        with pytest.raises(UsageError, match=r"^this token is for the role worker"):
            role_token(token, other)


def test_a_job_without_a_token_has_none_for_a_role() -> None:
    assert {role_token("", role) for role in (*ROLES, "coordinator")} == {""}


def test_the_job_s_secret_needs_both_the_journal_and_the_token() -> None:
    found = {job_secret(kept, token) for kept in (bytes(32), b"1" * 32) for token in ("", "a token", "another")}
    assert len(found) == 6
    assert bytes(32) not in found
