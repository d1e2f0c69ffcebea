"""Frames that cannot change unseen: each has a MAC of its payload, and a tag of its header and place in the stream.

After the greeting (`handshake.py`) each frame begins with 80 bytes:

     0  header   48 bytes (`frames.py`)
    48  mac      16 bytes, of the payload: AES-256-GMAC (NIST SP 800-38D). Its nonce is the frame's number (12 bytes).
                 Zeros if there is no payload, and with TLS
    64  tag      16 bytes: keyed BLAKE2b of the frame's number (8 bytes, from 0), header and MAC

All numbers are little-endian. The keys belong to this connection and direction, so no nonce is used twice, and a frame
that was changed, repeated, left out, put in, moved or taken from another connection has a wrong tag. The tag is checked
before the header is read, the MAC before anything reads the payload.

Frames are not encrypted, but the secrets in control messages are (`Secrets`): who reads the network gets no tickets.

With TLS the connection authenticates every byte itself, and the greeting is bound to that connection. So there a
payload needs no MAC: `macs` is False on both sides. The tags stay.

GMAC takes about as long as reading the payload from memory (`benchmarks/seals.py`), so there is no cheaper checksum for
networks that somebody trusts.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rallypoint.errors import CorruptFrame, ProtocolError
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack, unpack
from rallypoint.net.keys import LinkKeys, expand

MAC_BYTES = 16
TAG_BYTES = 16
SEALED_BYTES = HEADER_BYTES + MAC_BYTES + TAG_BYTES
_EMPTY = bytes(MAC_BYTES)
_NONCE_BYTES = 12
_PERSON = b"rallypoint/frame"  # BLAKE2b's personalisation: 16 bytes


class Sealer:
    """Makes the first 80 bytes of each frame that one side sends. Only one thread may use it."""

    def __init__(self, keys: LinkKeys, *, macs: bool = True) -> None:
        self._seals, self._macs, self._count = _Seals(keys.sending), macs, 0

    def seal(self, header: Header, payload: memoryview | None) -> bytes:
        """The header, MAC and tag of the next frame. The payload must not change before it is sent."""
        number, self._count = self._count, self._count + 1
        head = pack(header)
        head += self._seals.mac(number, payload) if self._macs and payload is not None and len(payload) else _EMPTY
        return head + self._seals.tag(number, head)


class Opener:
    """Checks each frame that one side receives: `open`, then `verify` if it has a payload. Only one thread may use it.

    `peer` names the sender in errors. A CorruptFrame is final: the connection must be closed.
    """

    def __init__(self, keys: LinkKeys, peer: str, *, macs: bool = True) -> None:
        self._seals, self._macs = _Seals(keys.receiving), macs
        self._peer = peer
        self._number, self._kind, self._mac = -1, Kind.CONTROL, _EMPTY  # of the frame that was opened last

    def open(self, sealed: memoryview) -> Header:
        """Return the header of the next frame. CorruptFrame if the tag is wrong, ProtocolError if it is no header."""
        self._number += 1
        tag = self._seals.tag(self._number, sealed[:-TAG_BYTES])
        if not hmac.compare_digest(tag, sealed[-TAG_BYTES:]):
            raise CorruptFrame(f"a frame from {self._peer} has a wrong tag: something changed it on the way")
        header = unpack(sealed[:HEADER_BYTES])
        self._kind, self._mac = header.kind, bytes(sealed[HEADER_BYTES:-TAG_BYTES])
        return header

    def verify(self, payload: memoryview) -> None:
        """CorruptFrame unless this is the payload of the frame that was opened last. Without MACs it is believed."""
        if self._macs and not hmac.compare_digest(self._seals.mac(self._number, payload), self._mac):
            raise CorruptFrame(f"the payload of a {self._kind.name} frame from {self._peer} was changed on the way")


class Secrets:
    """Encrypts the secrets that one side sends in control messages, and decrypts those that it gets: AES-256-GCM.

    The keys are those of this connection; each secret has a random nonce of 12 bytes before it. Any thread may use it.
    """

    def __init__(self, keys: LinkKeys) -> None:
        self._sending, self._receiving = (AESGCM(expand(key, b"secrets")) for key in (keys.sending, keys.receiving))

    def hide(self, secret: bytes) -> bytes:
        """Encrypt a secret. It is 28 bytes longer then; b"", which is none, stays so."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._sending.encrypt(nonce, secret, None) if secret else b""

    def reveal(self, hidden: bytes) -> bytes:
        """Decrypt a secret. ProtocolError if it was not encrypted for this connection and direction."""
        if not hidden:
            return b""
        try:
            return self._receiving.decrypt(hidden[:_NONCE_BYTES], hidden[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            raise ProtocolError("a secret that was not encrypted for this connection") from None


class _Seals:
    """The MACs and tags of one direction's frames."""

    def __init__(self, secret: bytes) -> None:
        self._tags = hashlib.blake2b(digest_size=TAG_BYTES, key=expand(secret, b"tags"), person=_PERSON)
        self._macs = AESGCM(expand(secret, b"payloads"))

    def tag(self, number: int, data: bytes | memoryview) -> bytes:
        """The tag of this frame's header and MAC."""
        state = self._tags.copy()
        state.update(number.to_bytes(8, "little"))
        state.update(data)
        return state.digest()

    def mac(self, number: int, payload: memoryview) -> bytes:
        """The MAC of this frame's payload: it is authenticated, and not encrypted. Python's lock is let go."""
        return self._macs.encrypt(number.to_bytes(_NONCE_BYTES, "little"), b"", payload)
