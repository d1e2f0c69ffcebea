"""Frames that cannot change unseen: a check of the payload, and a tag of the header and its place in the stream.

After the greeting (`handshake.py`) each frame begins with 80 bytes:

     0  header   48 bytes (`frames.py`)
    48  check    16 bytes, of the payload: XXH3-128 for tensors where both sides trust the network, else HMAC-SHA256,
                 cut to 16 bytes. Zeros if there is no payload
    64  tag      16 bytes: keyed BLAKE2b of the frame's number (u64, from 0), header and check

The tag's key belongs to this connection and direction. So a frame that was changed, repeated, left out, put in, moved
or taken from another connection has a wrong tag. The tag is checked before the header is read, the payload's check
before anything reads the payload.
"""

from __future__ import annotations

import hashlib
import hmac
import threading

import xxhash

from rallypoint.errors import CorruptFrame
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack, unpack
from rallypoint.net.keys import LinkKeys

CHECK_BYTES = 16
TAG_BYTES = 16
SEALED_BYTES = HEADER_BYTES + CHECK_BYTES + TAG_BYTES
_EMPTY = bytes(CHECK_BYTES)
_PERSON = b"rallypoint/frame"  # BLAKE2b's personalisation: 16 bytes
_FIRST_TENSOR = Kind.INITIAL  # kinds below it carry messages: they always have a MAC


class SharedCheck:
    """The check of one payload that goes to many peers: computed once for each key. Thread-safe.

    The payload must not change while this object is in use.
    """

    __slots__ = ("_found", "_lock")

    def __init__(self) -> None:
        self._found: dict[tuple[bytes, int], bytes] = {}
        self._lock = threading.Lock()  # other threads wait for the one that computes, instead of computing too

    def of(self, payload: memoryview, key: bytes) -> bytes:
        """Return the check of the payload under `key`; b"": the checksum, which has no key."""
        with self._lock:
            name = (key, len(payload))
            if name not in self._found:
                self._found[name] = _check(payload, key)
            return self._found[name]


class Sealer:
    """Makes the first 80 bytes of each frame that one side sends. Only one thread may use it."""

    def __init__(self, keys: LinkKeys) -> None:
        self._tags = _Tags(keys.sending)
        self._keys = keys

    def seal(self, header: Header, payload: memoryview | None, shared: SharedCheck | None = None) -> bytes:
        """The header, check and tag of the next frame. `shared` may know the payload's check."""
        head, check = pack(header), _EMPTY
        if payload is not None and len(payload):
            key = _key(self._keys, header.kind)
            check = _check(payload, key) if shared is None else shared.of(payload, key)
        return head + check + self._tags.next(head + check)


class Opener:
    """Checks each frame that one side receives: `open`, then `verify` if it has a payload. Only one thread may use it.

    `peer` names the sender in errors. A CorruptFrame is final: the connection must be closed.
    """

    def __init__(self, keys: LinkKeys, peer: str) -> None:
        self._tags = _Tags(keys.receiving)
        self._keys, self._peer = keys, peer
        self._kind, self._check = Kind.CONTROL, _EMPTY

    def open(self, sealed: memoryview) -> Header:
        """Return the header of the next frame. CorruptFrame if the tag is wrong, ProtocolError if it is no header."""
        tag = self._tags.next(sealed[:-TAG_BYTES])
        if not hmac.compare_digest(tag, sealed[-TAG_BYTES:]):
            raise CorruptFrame(f"a frame from {self._peer} has a wrong tag: something changed it on the way")
        header = unpack(sealed[:HEADER_BYTES])
        self._kind, self._check = header.kind, bytes(sealed[HEADER_BYTES:-TAG_BYTES])
        return header

    def verify(self, payload: memoryview) -> None:
        """CorruptFrame unless this is the payload of the frame that was opened last."""
        if not hmac.compare_digest(_check(payload, _key(self._keys, self._kind)), self._check):
            raise CorruptFrame(f"the payload of a {self._kind.name} frame from {self._peer} was changed on the way")


class _Tags:
    """The tags of one direction's frames, in order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=_PERSON)
        self._number = 0

    def next(self, data: bytes | memoryview) -> bytes:
        """The tag of the next frame's header and check."""
        state = self._keyed.copy()
        state.update(self._number.to_bytes(8, "little"))
        state.update(data)
        self._number += 1
        return state.digest()


def _key(keys: LinkKeys, kind: Kind) -> bytes:
    return b"" if keys.checksums and kind >= _FIRST_TENSOR else keys.payload


def _check(payload: memoryview, key: bytes) -> bytes:
    if not key:
        return xxhash.xxh3_128_digest(payload)
    return hmac.digest(key, payload, "sha256")[:CHECK_BYTES]
