"""Keys from the job's token and from tickets: HKDF-SHA256 (RFC 5869), one key for each purpose and direction.

A *ticket* is what a member proves itself with to one listener. The listener computes it from its own secret and from
who the member says it is, so it keeps no list:

    the coordinator's secret   random, one for each job; in its journal
    a member's secret          its ticket for the coordinator
    a ticket for a server      from that server's secret and the dialer's role, id and incarnation

No key is used for two purposes, so nothing that one side has proved can be sent back to it as a proof of the other.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from rallypoint.net.frames import PROTOCOL

KEY_BYTES = 32
_NAME = f"rallypoint/{PROTOCOL}".encode()


def extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract (RFC 5869, section 2.2): a key of 32 bytes from a secret of any length."""
    return hmac.digest(salt or bytes(KEY_BYTES), secret, "sha256")


def expand(key: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF-Expand (RFC 5869, section 2.3): `length` bytes for the purpose `info`. At most 255 * 32 bytes."""
    done, block = b"", b""
    for number in range(1, -(-length // KEY_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        done += block
    return done[:length]


@dataclass(frozen=True, slots=True, repr=False)
class TokenKeys:
    """The keys of all who know one token, or of the two who also know one ticket.

    Attributes:
        dialer: for the proof of the side that connects.
        listener: for the proof of the side that listens.
        session: the secret part of every connection's own keys.
    """

    dialer: bytes
    listener: bytes
    session: bytes


@dataclass(frozen=True, slots=True, repr=False)
class LinkKeys:
    """One side's keys of one connection.

    Attributes:
        sending: for the frames that this side sends.
        receiving: for the frames that the other side sends.
    """

    sending: bytes
    receiving: bytes

    def other_side(self) -> LinkKeys:
        """The keys of the other side of the same connection."""
        return LinkKeys(self.receiving, self.sending)


@lru_cache(maxsize=1024)
def token_keys(token: str, ticket: bytes = b"") -> TokenKeys:
    """The keys that belong to a token; with a ticket, to both."""
    root = extract(_NAME, token.encode())
    root = extract(root, ticket) if ticket else root
    return TokenKeys(*(expand(root, label) for label in (b"dialer", b"listener", b"session")))


def ticket(secret: bytes, role: str, id: str, incarnation: int) -> bytes:
    """The ticket of this member for the listener that has this secret."""
    return expand(secret, b"ticket" + msgspec.msgpack.encode((role, id, incarnation)))


def proof_of_view(secret: bytes, view: bytes) -> bytes:
    """The proof that the coordinator that has this secret wrote this view."""
    return hmac.digest(expand(secret, b"views"), view, "sha256")


def dialers_keys(keys: TokenKeys, transcript: bytes) -> LinkKeys:
    """The dialer's keys of the connection whose greeting has this digest."""
    root = extract(transcript, keys.session)
    return LinkKeys(expand(root, b"from the dialer"), expand(root, b"from the listener"))
