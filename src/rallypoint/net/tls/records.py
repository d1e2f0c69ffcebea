"""Records: what a connection with TLS carries after TLS's handshake. Each is encrypted and authenticated.

     0  length   4 bytes, little-endian: of the data, 1 byte to 256 KiB
     4  data     encrypted with AES-256-GCM (NIST SP 800-38D)
        tag      16 bytes, of the length and the data

TLS's own records have at most 16 KiB, so a payload of 1 MiB is 64 calls of OpenSSL: that took five times as long
(docs/security.md). The keys are TLS's work all the same: inside TLS both sides have sent each other a secret
(`connection.py`), and nobody else has it.

Each direction has a key of its own, and a record's nonce is its number, so no nonce is used twice with one key, and a
record that was changed, repeated, left out, moved or put in has a wrong tag. After `KEY_LASTS` records the next key
follows from the last one, which is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rallypoint.net.keys import expand, extract

LENGTH_BYTES = 4
TAG_BYTES = 16
LONGEST = 256 << 10  # bytes of data; longer ones leave the processor's caches
SECRET_BYTES = 32  # what each side adds to the keys
KEY_LASTS = 1 << 20  # records: at most 2^38 bytes, with which GCM's margin is still below 2^-57 (RFC 8446, section 5.5)
_NONCE_BYTES = 12


def keys(binding: bytes, dialers: bytes, listeners: bytes) -> tuple[bytes, bytes]:
    """Return the keys for what the dialer sends, and for what the listener sends.

    They follow from both sides' secrets and from what is this connection's alone (`Secured.binding`).
    """
    root = extract(binding, dialers + listeners)
    return expand(root, b"rallypoint/tls from the dialer"), expand(root, b"rallypoint/tls from the listener")


class RecordError(Exception):
    """These bytes are not the next record."""


class _Direction:
    """The cipher and the count of one direction's records."""

    def __init__(self, key: bytes) -> None:
        self._begin(key)

    def _begin(self, key: bytes) -> None:
        self._next_key, self._count = expand(key, b"next key"), 0
        self._cipher = AESGCM(expand(key, b"records"))

    def next(self) -> tuple[AESGCM, bytes]:
        """The cipher and the nonce of the next record."""
        if self._count == KEY_LASTS:
            self._begin(self._next_key)
        self._count += 1
        return self._cipher, (self._count - 1).to_bytes(_NONCE_BYTES, "little")


class Writer:
    """Makes the records of one direction. Only one thread may use it."""

    def __init__(self, key: bytes) -> None:
        self._direction = _Direction(key)
        self._room = memoryview(bytearray(4 << 10))

    def seal(self, pieces: Sequence[bytes | memoryview]) -> memoryview:
        """Return a record for each piece, one behind the other. They are there until the next call."""
        total = sum(LENGTH_BYTES + len(piece) + TAG_BYTES for piece in pieces)
        if total > len(self._room):
            self._room = memoryview(bytearray(total))
        at = 0
        for piece in pieces:
            data = at + LENGTH_BYTES
            end = data + len(piece) + TAG_BYTES
            self._room[at:data] = len(piece).to_bytes(LENGTH_BYTES, "little")
            cipher, nonce = self._direction.next()
            cipher.encrypt_into(nonce, piece, self._room[at:data], self._room[data:end])
            at = end
        return self._room[:total]


class Reader:
    """Opens the records of one direction. Only one thread may use it."""

    def __init__(self, key: bytes) -> None:
        self._direction = _Direction(key)

    def length_of(self, head: bytes | memoryview) -> int:
        """Return how many bytes of data the record has that begins like this. RecordError if none can be so long.

        It is not proved yet, and good only to know how much to receive.
        """
        count = int.from_bytes(head, "little")
        if not 1 <= count <= LONGEST:
            raise RecordError(f"a record of {count} bytes")
        return count

    def open(self, head: bytes | memoryview, sealed: memoryview, into: memoryview) -> None:
        """Decrypt the rest of a record `into` as many bytes as it has data. RecordError if anybody changed it: then
        nothing may read `into`."""
        cipher, nonce = self._direction.next()
        try:
            cipher.decrypt_into(nonce, sealed, head, into)
        except InvalidTag:
            raise RecordError("a wrong tag") from None
