"""The handshake: a challenge and an HMAC of it. The job token itself is never sent (I9)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from rallypoint.core.view import ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, UsageError
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack, unpack
from rallypoint.net.messages import Challenge, Hello, Message, Refused, Welcome, encode, expect
from rallypoint.net.transport import Connection, Transport

GREETING_TIMEOUT_S = 10.0  # for the whole handshake: a peer that sends slowly cannot hold a connection
FIRST_VIEW = ViewNumber()
_MIN_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects: the role (worker, server or observer), the member's name, and the job's token."""

    role: str
    id: str
    token: str = field(default="", repr=False)


def new_token() -> str:
    """Make a new random job token."""
    return secrets.token_hex(16)


def check_exposure(transport: Transport, address: str, token: str) -> None:
    """UsageError if other machines can reach `address` and the token has fewer than 16 characters."""
    if not transport.private(address) and len(token) < _MIN_TOKEN:
        raise UsageError(
            f"{address} can be reached from other machines: set a job token of at least {_MIN_TOKEN} characters "
            "(RALLYPOINT_TOKEN), the same for every member"
        )


def greet(connection: Connection, token: str) -> Hello:
    """The listener's side of the handshake, until `welcome` or `refuse`. One deadline covers both.

    AccessDenied if the token is wrong; ProtocolError for anything that is not a Hello.
    """
    connection.set_deadline(GREETING_TIMEOUT_S)
    nonce = secrets.token_bytes(32)
    _send(connection, Kind.CHALLENGE, Challenge(nonce))
    hello = expect(_receive(connection, Kind.HELLO), Hello)
    if not hmac.compare_digest(hello.proof, _proof(token, nonce, hello.role, hello.id)):
        refuse(connection, "the job token is wrong: start every member with the job's own token (RALLYPOINT_TOKEN)")
        raise AccessDenied(f"{connection.peer} ({hello.role} {hello.id}) came with a wrong token")
    return hello


def welcome(connection: Connection, message: Welcome) -> None:
    """The listener's last step: accept the peer."""
    _send(connection, Kind.WELCOME, message)
    connection.set_deadline(None)


def refuse(connection: Connection, reason: str) -> None:
    """The listener's last step: refuse the peer."""
    _send(connection, Kind.REFUSE, Refused(reason))


def introduce(
    connection: Connection, token: str, *, role: str, id: str, host: str, address: str = "", incarnation: int = 0,
    view: ViewNumber = FIRST_VIEW,
) -> Welcome:  # fmt: skip
    """The connecting side of the handshake. Returns the listener's Welcome.

    AccessDenied, with the listener's reason, if it refuses; ProtocolError for any other answer; LinkError if the
    connection breaks.
    """
    connection.set_deadline(GREETING_TIMEOUT_S)
    nonce = expect(_receive(connection, Kind.CHALLENGE), Challenge).nonce
    _send(connection, Kind.HELLO, Hello(role, id, host, _proof(token, nonce, role, id), address, incarnation, view))
    header = _receive_header(connection)
    data = _receive_payload(connection, header)
    if header.kind is Kind.REFUSE:
        raise AccessDenied(f"{connection.peer} refused {role} {id}: {expect(data, Refused).reason}")
    if header.kind is not Kind.WELCOME:
        raise ProtocolError(f"{connection.peer} answered the greeting with a {header.kind.name} frame")
    connection.set_deadline(None)
    return expect(data, Welcome)


def _proof(token: str, nonce: bytes, role: str, id: str) -> bytes:
    return hmac.new(token.encode(), nonce + f"{role}/{id}".encode(), hashlib.sha256).digest()


def _send(connection: Connection, kind: Kind, message: Message) -> None:
    data = encode(message)
    connection.send(pack(Header(kind, length=len(data))), memoryview(data))


def _receive(connection: Connection, kind: Kind) -> bytearray:
    header = _receive_header(connection)
    if header.kind is not kind:
        raise ProtocolError(f"{connection.peer} sent a {header.kind.name} frame before its {kind.name}")
    return _receive_payload(connection, header)


def _receive_header(connection: Connection) -> Header:
    head = bytearray(HEADER_BYTES)
    try:
        connection.recv_into(memoryview(head))
    except LinkError as error:
        raise LinkError(f"no greeting from {connection.peer}: {error}") from None
    return unpack(head)


def _receive_payload(connection: Connection, header: Header) -> bytearray:
    data = bytearray(header.length)
    if header.length:
        connection.recv_into(memoryview(data))
    return data
