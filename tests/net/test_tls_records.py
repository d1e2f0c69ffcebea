"""The records that follow TLS's handshake: whatever is done to them on the way is seen."""

from __future__ import annotations

import os
import random

import pytest

from rallypoint.net import tls
from rallypoint.net.tls import LENGTH_BYTES, LONGEST, TAG_BYTES, Reader, RecordError, Writer, keys

KEY = bytes(range(32))


def made(*pieces: bytes, key: bytes = KEY) -> list[bytes]:
    """A record for each piece."""
    writer = Writer(key)
    return [bytes(writer.seal([piece])) for piece in pieces]


def opened(reader: Reader, record: bytes) -> bytes:
    head, sealed = record[:LENGTH_BYTES], memoryview(record)[LENGTH_BYTES:]
    data = bytearray(reader.length_of(head))
    if len(sealed) != len(data) + TAG_BYTES:
        raise RecordError("another length")  # on a connection the receiver waits, or takes the next record's bytes
    reader.open(head, sealed, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("size", [1, 48, 16384, LONGEST])
def test_what_was_sealed_is_read(size: int) -> None:
    data = os.urandom(size)
    (record,) = made(data)
    assert len(record) == LENGTH_BYTES + size + TAG_BYTES
    assert opened(Reader(KEY), record) == data


def test_pieces_that_are_sealed_together_are_records_of_their_own() -> None:
    writer, reader = Writer(KEY), Reader(KEY)
    both = bytes(writer.seal([b"head", memoryview(b"payload")]))
    cut = LENGTH_BYTES + 4 + TAG_BYTES
    assert [opened(reader, both[:cut]), opened(reader, both[cut:])] == [b"head", b"payload"]


def test_one_text_twice_is_not_seen_to_be_the_same() -> None:
    first, second = made(b"secret" * 10, b"secret" * 10)
    assert b"secret" not in first
    assert first[LENGTH_BYTES:] != second[LENGTH_BYTES:]


@pytest.mark.parametrize("seed", range(5))
def test_a_bit_that_flips_anywhere_is_seen(seed: int) -> None:
    rng = random.Random(seed)
    (record,) = made(rng.randbytes(200))
    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(RecordError):
            opened(Reader(KEY), bytes(changed))


@pytest.mark.parametrize(
    ("read", "then"), [([], 1), ([0], 0), ([0], 2)], ids=["the first is left out", "one comes twice", "one is left out"]
)
def test_records_count_in_their_order_alone(read: list[int], then: int) -> None:
    three, reader = made(b"one", b"two", b"six"), Reader(KEY)
    for number in read:
        opened(reader, three[number])
    with pytest.raises(RecordError, match="a wrong tag"):
        opened(reader, three[then])


def test_each_direction_and_each_connection_has_keys_of_its_own() -> None:
    own = keys(b"binding", b"d" * 32, b"l" * 32)
    others = [
        keys(b"another", b"d" * 32, b"l" * 32),
        keys(b"binding", b"D" * 32, b"l" * 32),
        keys(b"binding", b"d" * 32, b"L" * 32),
        keys(b"binding", b"l" * 32, b"d" * 32),
    ]
    every = [key for pair in (own, *others) for key in pair]
    assert len(set(every)) == len(every)
    with pytest.raises(RecordError, match="a wrong tag"):  # sent back to who has made it
        opened(Reader(own[1]), made(b"data", key=own[0])[0])


def test_the_key_changes_on_both_sides_after_so_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "KEY_LASTS", 3)
    pieces = [bytes([number]) * 10 for number in range(10)]
    all_records, reader = made(*pieces), Reader(KEY)
    assert [opened(reader, record) for record in all_records] == pieces
    late = Reader(KEY)
    for record in all_records[:3]:
        opened(late, record)
    monkeypatch.setattr(tls, "KEY_LASTS", 4)
    with pytest.raises(RecordError, match="a wrong tag"):  # the old key does not open what follows
        opened(late, all_records[3])


@pytest.mark.parametrize("length", [0, LONGEST + 1, 2**32 - 1])
def test_a_length_that_no_record_has_costs_nothing(length: int) -> None:
    with pytest.raises(RecordError, match="a record of"):
        Reader(KEY).length_of(length.to_bytes(LENGTH_BYTES, "little"))


def test_a_record_is_byte_for_byte_what_the_documents_say() -> None:
    """AES-256-GCM with the record's number as nonce, under a key that follows from the direction's by HKDF."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    cipher = AESGCM(HKDFExpand(SHA256(), 32, b"records").derive(KEY))
    for number, record in enumerate(made(b"one", b"three")):
        data = (b"one", b"three")[number]
        head = len(data).to_bytes(4, "little")
        assert record == head + cipher.encrypt(number.to_bytes(12, "little"), data, head)
