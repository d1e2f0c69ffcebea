"""Keys from the job's token and from tickets: HKDF-SHA256 (RFC 5869), one key for each purpose and direction.

From the job's token follows a token for each role of a member. Who has a role's token can be a newcomer of that role,
and of no other; who has the job's token can be any, and the coordinator:

    the job's token  --  "worker"    -->  worker:2f41...     for workers that join
                     --  "server"    -->  server:a70c...     for servers that join
                     --  "observer"  -->  observer:91be...   for consoles, `resize` and `snapshot`

A *ticket* is what a member proves itself with to one listener. The listener computes it from its own secret and from
who the member says it is, so it keeps no list:

    the coordinator's secret   from the job's token and 32 random bytes, which are in its journal
    a member's secret          its ticket for the coordinator
    a ticket for a server      from that server's secret and the dialer's role, id and incarnation

No key is used for two purposes, so nothing that one side has proved can be sent back to it as a proof of the other.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from rallypoint.errors import UsageError
from rallypoint.net.frames import PROTOCOL

ROLES = ("worker", "server", "aggregator", "observer")  # of those who connect to a coordinator
KEY_BYTES = 32
_NAME = f"rallypoint/{PROTOCOL}".encode()
_TOKENS = b"rallypoint's tokens"  # without the protocol's number: files with tokens outlive a version
_ROLES_TOKEN = re.compile(rf"({'|'.join(ROLES)}):[0-9a-f]{{{2 * KEY_BYTES}}}")


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


def role_of(token: str) -> str:
    """The role that a token is for; "" if it is a job's own token, or none."""
    found = _ROLES_TOKEN.fullmatch(token)
    return found.group(1) if found else ""


def role_token(token: str, role: str) -> str:
    """The token of this role, written as ``worker:2f41...``, from the job's token; "" if there is none.

    A token that is of this role already is returned as it is. The coordinator's is the job's own. UsageError if
    `token` is of another role.
    """
    if own := role_of(token):
        if own == role:
            return token
        asked, made = f"a token for the role {role}", f"`rallypoint token --role {role} --token-file FILE` prints it"
        if role not in ROLES:
            asked, made = "the job's own token", "give --token-file the file in which `rallypoint token` wrote it"
        raise UsageError(f"this token is for the role {own}, and {asked} is needed: {made}")
    if not token or role == "coordinator":
        return token
    return f"{role}:{expand(extract(_TOKENS, token.encode()), role.encode()).hex()}"


@dataclass(frozen=True, slots=True, repr=False)
class TokenKeys:
    """The keys of all who know one role's token, or of the two who know one ticket.

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
    """The keys that belong to a role's token, or to a ticket ("": no token), or to both."""
    root = extract(_NAME, token.encode())
    root = extract(root, ticket) if ticket else root
    return TokenKeys(*(expand(root, label) for label in (b"dialer", b"listener", b"session")))


def job_secret(kept: bytes, token: str) -> bytes:
    """The coordinator's secret, from what its journal keeps and the job's token: neither is enough alone."""
    return expand(extract(token.encode(), kept), b"the job's secret")


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
