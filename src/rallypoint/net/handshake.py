"""The greeting: both sides prove that they know the job's token, which itself is never sent (I9).

    listener                                               dialer
      Challenge: nonce, who listens                 ->
                                                    <-       Hello: who connects, whom it means, nonce; proof
      Welcome: settings, or Refused: reason; proof  ->

A proof is an HMAC-SHA256 over every byte of the greeting before it, in both directions, frame headers included. The two
sides prove with different keys (`keys.py`). So a proof is good for one connection, one direction, these two members and
these settings. Whoever stands between two members can only pass a greeting on unchanged. The frames that follow carry
tags under keys derived from this greeting and the token. `docs/security.md` has the state diagram.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, UnprovenPeer, UsageError
from rallypoint.net.frames import GREETING_LIMIT, HEADER_BYTES, Header, Kind, pack, unpack
from rallypoint.net.keys import LinkKeys, dialers_keys, token_keys
from rallypoint.net.messages import Challenge, Hello, Message, Refused, Welcome, encode, expect
from rallypoint.net.transport import Connection, Transport, receive_bytes
from rallypoint.observe.lines import printable

GREETING_TIMEOUT_S = 10.0  # for the whole handshake: a peer that sends slowly cannot hold a connection
FIRST_VIEW = ViewNumber()
NONCE_BYTES = 32
PROOF_BYTES = 32
_MIN_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects or listens: the role, the member's name, and the job's token; `near`: see `core.view.Member`.

    Workers, servers, aggregators and observers connect. Servers, aggregators and the coordinator (its name is "")
    listen.
    """

    role: str
    id: str
    token: str = field(default="", repr=False)
    near: str = ""

    def __str__(self) -> str:
        return _named(self.role, self.id)


COORDINATOR = ("coordinator", "")  # whom a member of the job means to reach when it joins


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


class Greeting:
    """The listener's side of a greeting: `hello` is proved. End it with `welcome` or `refuse`, which are proved too."""

    def __init__(self, transcript: _Transcript, hello: Hello) -> None:
        self.hello = hello
        self._transcript = transcript

    def welcome(self, message: Welcome) -> LinkKeys:
        """Accept the dialer. Returns the keys for the frames that follow."""
        connection, keys = self._transcript.connection, self._transcript.keys
        self._transcript.send(Kind.WELCOME, message, keys.listener)
        connection.set_deadline(None)
        return dialers_keys(keys, self._transcript.digest).other_side()

    def refuse(self, reason: str) -> None:
        """Refuse the dialer."""
        self._transcript.send(Kind.REFUSE, Refused(reason), self._transcript.keys.listener)


def greet(connection: Connection, me: Identity) -> Greeting:
    """The listener's side of the handshake, until `welcome` or `refuse`. One deadline covers both.

    AccessDenied if the token is wrong; ProtocolError for anything that is not a Hello to this listener.
    """
    connection.set_deadline(GREETING_TIMEOUT_S)
    transcript = _Transcript(connection, me.token)
    transcript.send(Kind.CHALLENGE, Challenge(secrets.token_bytes(NONCE_BYTES), me.role, me.id))
    header = transcript.receive_header()
    if header.kind is not Kind.HELLO:
        raise ProtocolError(f"{connection.peer} sent a {header.kind.name} frame before its HELLO")
    data, proof = transcript.receive(header, transcript.keys.dialer, token_keys("").dialer)
    if proof != 0:
        # No proof goes with this refusal: nobody gets a proof for a greeting that is not his.
        transcript.send(Kind.REFUSE, Refused("the job token is wrong"))
        raise AccessDenied(f"{connection.peer} came {'with a wrong token' if proof < 0 else 'without a token'}")
    hello = expect(data, Hello)
    if hello.to != (me.role, me.id) or len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError(f"{_named(hello.role, hello.id)} means {_named(*hello.to)}, and this is {me}")
    return Greeting(transcript, hello)


def introduce(connection: Connection, hello: Hello, token: str) -> tuple[Welcome, LinkKeys]:
    """The connecting side of the handshake. Returns the listener's Welcome, and the keys for the frames that follow.

    This function fills in the Hello's `nonce`. Raises UnprovenPeer if whoever listens there has not proved
    that it knows the token, whatever it says; AccessDenied, with the reason, if it has and refuses; LinkError if the
    connection breaks.
    """
    connection.set_deadline(GREETING_TIMEOUT_S)
    transcript, me = _Transcript(connection, token), _named(hello.role, hello.id)
    try:
        _find(transcript, hello)
        hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))
        transcript.send(Kind.HELLO, hello, transcript.keys.dialer)
        header = transcript.receive_header()
        if header.kind not in (Kind.WELCOME, Kind.REFUSE):
            raise ProtocolError(f"{connection.peer} answered the greeting with a {header.kind.name} frame")
        data, proof = transcript.receive(header, transcript.keys.listener)
    except ProtocolError as error:
        raise UnprovenPeer(str(error)) from None
    if proof != 0:
        empty = "there is none here (RALLYPOINT_TOKEN is empty)"
        why = "the token here is wrong (RALLYPOINT_TOKEN)" if token else empty
        raise UnprovenPeer(
            f"{connection.peer} {'refuses' if header.kind is Kind.REFUSE else 'welcomes'} {me} without proving that it "
            f"knows the job token: either {why}, or somebody else listens there"
        )
    if header.kind is Kind.REFUSE:
        raise AccessDenied(f"{connection.peer} refused {me}: {expect(data, Refused).reason}")
    welcome = expect(data, Welcome)
    connection.set_deadline(None)
    return welcome, dialers_keys(transcript.keys, transcript.digest)


def _find(transcript: _Transcript, hello: Hello) -> None:
    """Receive the Challenge. ProtocolError if it says that somebody else listens there. It is proved later."""
    peer, header = transcript.connection.peer, transcript.receive_header()
    if header.kind is not Kind.CHALLENGE:
        raise ProtocolError(f"{peer} sent a {header.kind.name} frame before its CHALLENGE")
    challenge = expect(transcript.receive(header)[0], Challenge)
    if (challenge.role, challenge.id) != hello.to or len(challenge.nonce) != NONCE_BYTES:
        raise ProtocolError(f"{peer} is {printable(_named(challenge.role, challenge.id), 80)}, not {_named(*hello.to)}")


class _Transcript:
    """Sends and receives greeting frames, and digests all of their bytes. `digest` is the digest up to now."""

    def __init__(self, connection: Connection, token: str) -> None:
        self.connection, self.keys = connection, token_keys(token)
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def send(self, kind: Kind, message: Message, key: bytes | None = None) -> None:
        """Send a greeting frame. All but the Challenge end with a proof; without a `key`, with zeros."""
        data = encode(message)
        room = 0 if kind is Kind.CHALLENGE else PROOF_BYTES
        head = pack(Header(kind, length=len(data) + room))
        self._hash.update(head + data)
        if room:
            proof = bytes(PROOF_BYTES) if key is None else self._proof(key)
            self._hash.update(proof)
            data += proof
        self.connection.send(head, memoryview(data))

    def receive_header(self) -> Header:
        head = bytearray(HEADER_BYTES)
        try:
            self.connection.recv_into(memoryview(head))
        except LinkError as error:
            raise LinkError(f"no greeting from {self.connection.peer}: {error}") from None
        header = unpack(head)
        self._hash.update(head)
        return header

    def receive(self, header: Header, *keys: bytes) -> tuple[memoryview, int]:
        """Receive the rest of a greeting frame: the message, and by which of `keys` it is proved; -1: by none.

        Without `keys` no proof follows the message.
        """
        data = memoryview(receive_bytes(self.connection, header.length, GREETING_LIMIT))
        if not keys:
            self._hash.update(data)
            return data, -1
        if header.length < PROOF_BYTES:
            raise ProtocolError(f"a {header.kind.name} frame of {header.length} bytes: it has no proof")
        message, proof = data[:-PROOF_BYTES], data[-PROOF_BYTES:]
        self._hash.update(message)
        right = [hmac.compare_digest(self._proof(key), proof) for key in keys]
        self._hash.update(proof)
        return message, right.index(True) if True in right else -1

    def _proof(self, key: bytes) -> bytes:
        return hmac.digest(key, self.digest, "sha256")


def _named(role: str, id: str) -> str:
    """How a sentence names a member: "worker w0", "the coordinator"."""
    return f"{role} {id}" if id else f"the {role}"
