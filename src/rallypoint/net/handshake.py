"""The greeting: both sides prove that they know the same token or ticket, which itself is never sent (I9)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec

from rallypoint.core.protocol import Challenge, Hello, Message, Refused, Welcome, encode, expect
from rallypoint.core.typed import printable
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, UnprovenPeer, UsageError
from rallypoint.net.frames import GREETING_LIMIT, HEADER_BYTES, PROTOCOL, Header, Kind, pack, unpack
from rallypoint.net.transport import Connection, Secured, Transport, receive_bytes

# ---- Keys from the job's token and from tickets: HKDF-SHA256 (RFC 5869), one for each purpose and direction ----
#
# From the job's token follows a token for each role of a member. Who has a role's token can be a newcomer of that role,
# and of no other; who has the job's token can be any, and the coordinator:
#
#     the job's token  --  "worker"    -->  worker:2f41...     for workers that join
#                      --  "server"    -->  server:a70c...     for servers that join
#                      --  "observer"  -->  observer:91be...   for consoles, `resize` and `snapshot`
#
# A *ticket* is what a member proves itself with to one listener. The listener computes it from its own secret and from
# who the member says it is, so it keeps no list:
#
#     the coordinator's secret   from the job's token and 32 random bytes, which are in its journal
#     a member's secret          its ticket for the coordinator
#     a ticket for a server      from that server's secret and the dialer's role, id and incarnation
#
# No key is used for two purposes, so nothing that one side has proved can be sent back to it as a proof of the other.

ROLES = ("worker", "server", "aggregator", "observer")  # of those who connect to a coordinator
KEY_BYTES = 32
_NAME = f"rallypoint/{PROTOCOL}".encode()
_TOKENS = b"rallypoint's tokens"  # without the protocol's number: files with tokens outlive a version
_ROLES_TOKEN = re.compile(rf"({'|'.join(ROLES)}):[0-9a-f]{{{2 * KEY_BYTES}}}")


def extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract (RFC 5869, section 2.2): a key of 32 bytes from a secret of any length."""
    return hmac.digest(salt or bytes(KEY_BYTES), secret, "sha256")


def expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand (RFC 5869, section 2.3): the first block of 32 bytes for the purpose `info`."""
    return hmac.digest(key, info + b"\x01", "sha256")


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


def ticket_for(secret: bytes, role: str, id: str, incarnation: int) -> bytes:
    """The ticket of this member for the listener that has this secret."""
    return expand(secret, b"ticket" + msgspec.msgpack.encode((role, id, incarnation)))


def proof_of_view(secret: bytes, view: bytes) -> bytes:
    """The proof that the coordinator that has this secret wrote this view."""
    return hmac.digest(expand(secret, b"views"), view, "sha256")


def dialers_keys(keys: TokenKeys, transcript: bytes) -> LinkKeys:
    """The dialer's keys of the connection whose greeting has this digest."""
    root = extract(transcript, keys.session)
    return LinkKeys(expand(root, b"from the dialer"), expand(root, b"from the listener"))


# ---- The greeting: both sides prove that they know the same token or ticket, which itself is never sent (I9) ----
#
#     listener                                               dialer
#       Challenge: nonce, who listens                 ->
#                                                     <-       Hello: who connects, whom it means, nonce; proof
#       Welcome: settings, or Refused: reason; proof  ->
#
# A proof is an HMAC-SHA256 over every byte of the greeting before it, in both directions, frame headers included. The
# two sides prove with different keys. So a proof is good for one connection, one direction, these two
# members and these settings. Whoever stands between two members can only pass a greeting on unchanged. The frames that
# follow carry tags under keys derived from this greeting and the proofs' keys. `docs/protocol.md` has the state
# diagram.
#
# The proofs' keys depend on who connects, and to whom:
#
#     somebody new, an observer  ->  the coordinator   the token of its role
#     an admitted member         ->  the coordinator   the token of its role, and its ticket for the coordinator
#     an admitted member         ->  a member          its ticket for that member; no token, because their roles differ
#
# With a ticket each side proves that it is the one that the coordinator admitted. Without one, one can only join the
# coordinator, in the role whose token one has.

GREETING_TIMEOUT_S = 10.0  # for the whole handshake: a peer that sends slowly cannot hold a connection
NONCE_BYTES = 32
PROOF_BYTES = 32
_MIN_TOKEN = 16
_TLS = b"\x16\x03"  # how TLS's handshake begins


@dataclass(frozen=True, slots=True)
class Identity:
    """Who connects or listens: the role, the member's name, a token; `near`, `link_mbit`: see `core.view.Member`.

    The token is the role's own, or the job's, from which it follows; the coordinator's is the job's. Workers, servers,
    aggregators and observers connect. Servers, aggregators and the coordinator (its name is "") listen. `incarnation`
    and `secret` come from the coordinator when it admits a member; the coordinator's own secret follows from its
    journal and the job's token.
    """

    role: str
    id: str
    token: str = field(default="", repr=False)
    incarnation: int = 0
    secret: bytes = field(default=b"", repr=False)
    near: str = ""
    link_mbit: float = 0.0

    def __str__(self) -> str:
        return _named(self.role, self.id)


LAUNCHER = "launcher"  # the name of the observer that shows a run to a person
COORDINATOR = ("coordinator", "", 0)  # whom a member of the job means to reach when it joins


class Credentials:
    """One member's credentials. The link to the coordinator keeps them up to date; any thread may read them.

    Attributes:
        me: who this member is; its incarnation is 0, and its secret empty, before the coordinator has admitted it.
    """

    def __init__(self, me: Identity) -> None:
        self.me = me
        self._tickets: tuple[ViewNumber, dict[Member, tuple[str, bytes]]] = (ViewNumber(), {})  # role and ticket

    def admitted(self, incarnation: int, secret: bytes) -> None:
        """The coordinator has admitted this member. Tickets of another incarnation are dropped."""
        if incarnation != self.me.incarnation:
            self._tickets = (ViewNumber(), {})
        self.me = replace(self.me, incarnation=incarnation, secret=secret)

    def given(self, view: View, tickets: Mapping[str, bytes]) -> None:
        """The coordinator has sent a view, with this member's tickets for servers and aggregators of it.

        An older view is ignored.
        """
        if view.number >= self._tickets[0]:
            roles = dict.fromkeys(view.servers, "server") | dict.fromkeys(view.aggregators, "aggregator")
            known = {one: (role, tickets[one.id]) for one, role in roles.items() if one.id in tickets}
            self._tickets = (view.number, known)

    def hello(self, listener: Member, host: str, view: ViewNumber) -> tuple[Hello, bytes]:
        """How this member introduces itself to a server or an aggregator, and its ticket for that listener.

        LinkError if it has none (yet): views and links change at different moments.
        """
        me, (role, ticket) = self.me, self._tickets[1].get(listener, ("", b""))
        if not ticket:
            raise LinkError(f"no ticket for {listener.id} has come yet")
        to = (role, listener.id, listener.incarnation)
        return Hello(me.role, me.id, host, incarnation=me.incarnation, view=view, to=to), ticket


def new_token() -> str:
    return secrets.token_hex(16)


def check_exposure(transport: Transport, address: str, token: str) -> None:
    """UsageError if other machines can reach `address`, there is no TLS, and the token has fewer than 16 characters."""
    if not (transport.private(address) or transport.secure) and len(token) < _MIN_TOKEN:
        raise UsageError(
            f"{address} can be reached from other machines: set a job token of at least {_MIN_TOKEN} characters "
            "(RALLYPOINT_TOKEN, or --token-file), the same for every member, or give each TLS (--tls; `rallypoint "
            "token --tls FOLDER` makes certificates)"
        )


def check_role(secured: Secured, role: str, who: str) -> None:
    """AccessDenied if there is TLS, and the other side's certificate is not for this role. `who` names it.

    The coordinator may also observe: its own console does.
    """
    if secured.role not in ("", role) and (secured.role, role) != ("coordinator", "observer"):
        raise AccessDenied(f"{who} shows the certificate of a {secured.role}, which cannot be a {role}")


class Greeting:
    """The listener's side of a greeting: `hello` is proved. End it with `welcome` or `refuse`, which are proved too."""

    def __init__(self, transcript: _Transcript, hello: Hello) -> None:
        self.hello = hello
        self._transcript = transcript

    def welcome(self, message: Welcome) -> LinkKeys:
        """Accept the dialer. Returns the keys for the frames that follow."""
        connection, keys = self._transcript.connection, self._transcript.keys
        agreed = self.hello.payloads if self.hello.payloads == connection.offers else ""
        self._transcript.send(Kind.WELCOME, msgspec.structs.replace(message, payloads=agreed), keys.listener)
        links = dialers_keys(keys, self._transcript.digest).other_side()
        if agreed:
            connection.upgrade(links.sending, links.receiving)
        connection.set_deadline(None)
        return links

    def refuse(self, reason: str) -> None:
        self._transcript.send(Kind.REFUSE, Refused(reason), self._transcript.keys.listener)


def greet(connection: Connection, me: Identity) -> Greeting:
    """The listener's side of the handshake, until `welcome` or `refuse`. One deadline covers both.

    AccessDenied if the token or the ticket is wrong; ProtocolError for anything that is not a Hello to this listener.
    LinkError if this is a server that the coordinator has not admitted yet.
    """
    connection.set_deadline(GREETING_TIMEOUT_S)
    transcript = _Transcript(connection)
    transcript.send(Kind.CHALLENGE, Challenge(secrets.token_bytes(NONCE_BYTES), me.role, me.id, me.incarnation))
    header = transcript.receive_header()
    if header.kind is not Kind.HELLO:
        raise ProtocolError(f"{connection.peer} sent a {header.kind.name} frame before its HELLO")
    hello = expect(transcript.receive(header), Hello)  # nothing of it is believed before it is proved
    ticket = _ticket_of(hello, me)
    try:
        transcript.keys = _keys(hello, me.token, ticket)
    except UsageError:  # this listener has a role's token (a doctor's probe), and not the job's
        raise AccessDenied(f"{connection.peer} came in another role than this token is for") from None
    if not transcript.proved(transcript.keys.dialer):
        # No proof goes with this refusal: nobody gets a proof for a greeting that is not his.
        transcript.send(Kind.REFUSE, Refused("the token is wrong" + (", or the ticket" if ticket else "")))
        raise AccessDenied(f"{connection.peer} came {_how_wrong(transcript, hello, me, ticket)}")
    if hello.to != (me.role, me.id, me.incarnation) or len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError(f"{_named(hello.role, hello.id)} means {_named(*hello.to[:2])}, and this is {me}")
    greeting = Greeting(transcript, hello)
    try:
        check_role(connection.secured, hello.role, _named(hello.role, hello.id))
    except AccessDenied as error:
        greeting.refuse(str(error))
        raise AccessDenied(f"{connection.peer}: {error}") from None
    return greeting


def _keys(hello: Hello, token: str, ticket: bytes) -> TokenKeys:
    """The keys of this dialer's greeting with the listener that it means."""
    to_coordinator = hello.to[0] == COORDINATOR[0]
    return token_keys(role_token(token, hello.role) if to_coordinator else "", ticket)


def _how_wrong(transcript: _Transcript, hello: Hello, me: Identity, ticket: bytes) -> str:
    """With what a dialer came whose proof is not right."""
    if me.role == COORDINATOR[0]:
        if transcript.proved(token_keys("", ticket).dialer):
            return "without a token"
        known = () if role_of(me.token) else ROLES  # from a role's token (a doctor's probe) follows no other
        for role in known:  # the wrong file was given
            if transcript.proved(token_keys(role_token(me.token, role), ticket).dialer):
                return f"as {_named(hello.role, hello.id)} with the token of the role {role}"
        return "with a wrong token or ticket" if ticket else "with a wrong token"
    return "with a wrong ticket"


def _ticket_of(hello: Hello, me: Identity) -> bytes:
    """The ticket that the dialer must have; b"": none, because it joins the coordinator as somebody new."""
    if me.role == COORDINATOR[0] and not hello.incarnation:
        return b""
    if not me.secret:
        raise LinkError(f"{me} is not admitted to the job yet")
    return ticket_for(me.secret, hello.role, hello.id, hello.incarnation)


def introduce(
    connection: Connection, hello: Hello, token: str = "", ticket: bytes = b"", *, certificate: str = ""
) -> tuple[Welcome, LinkKeys]:
    """The connecting side of the handshake. Returns the listener's Welcome, and the keys for the frames that follow.

    `token` is the job's or the role's, for a greeting with the coordinator; other listeners know the dialer by its
    ticket alone. `ticket` is the dialer's for this listener; b"" to join the coordinator for the first time. With TLS
    the listener's certificate must be of the role `certificate`, by default the role that the Hello means. This
    function fills in the Hello's `nonce` and `payloads`. Raises UnprovenPeer if whoever listens there has not proved
    that it knows the same token and ticket, whatever it says; AccessDenied, with the reason, if it has and refuses;
    LinkError if the connection breaks, or there is no ticket for a member; UsageError if the token is of another role.
    """
    if not ticket and hello.to[0] != COORDINATOR[0]:
        raise LinkError(f"no ticket for {hello.to[1]}: everybody could prove that he has none")
    connection.set_deadline(GREETING_TIMEOUT_S)
    transcript, me = _Transcript(connection, _keys(hello, token, ticket)), _named(hello.role, hello.id)
    try:
        check_role(connection.secured, certificate or hello.to[0], connection.peer)
        _find(transcript, hello)
        nonce = secrets.token_bytes(NONCE_BYTES)
        hello = msgspec.structs.replace(hello, nonce=nonce, payloads=connection.offers)
        transcript.send(Kind.HELLO, hello, transcript.keys.dialer)
        header = transcript.receive_header()
        if header.kind not in (Kind.WELCOME, Kind.REFUSE):
            raise ProtocolError(f"{connection.peer} answered the greeting with a {header.kind.name} frame")
        data = transcript.receive(header)
    except (ProtocolError, AccessDenied) as error:
        raise UnprovenPeer(str(error)) from None
    if not transcript.proved(transcript.keys.listener):
        refuses = header.kind is Kind.REFUSE
        says = f"{connection.peer} {'refuses' if refuses else 'welcomes'} {me}"
        raise UnprovenPeer(f"{says} without proving {_unproved(hello, token, ticket)}", refuses=refuses)
    if header.kind is Kind.REFUSE:
        raise AccessDenied(f"{connection.peer} refused {me}: {expect(data, Refused).reason}")
    welcome = expect(data, Welcome)
    if welcome.payloads not in ("", hello.payloads):
        raise ProtocolError(f"{connection.peer} sends payloads by {printable(welcome.payloads, 40)}, which is unknown")
    keys = dialers_keys(transcript.keys, transcript.digest)
    if welcome.payloads:
        connection.upgrade(keys.sending, keys.receiving)
    connection.set_deadline(None)
    return welcome, keys


def _unproved(hello: Hello, token: str, ticket: bytes) -> str:
    """What a listener has not proved, and why that may be."""
    if hello.to[0] != COORDINATOR[0]:
        return f"that it knows the ticket of {_named(hello.role, hello.id)}"
    admitted = f", and what it is to know of {_named(hello.role, hello.id)}" if ticket else ""
    empty = "there is none here (give --token-file or RALLYPOINT_TOKEN)"
    why = "the token here is wrong (--token-file or RALLYPOINT_TOKEN)" if token else empty
    return f"that it knows the job token{admitted}: either {why}, or somebody else listens there"


def _find(transcript: _Transcript, hello: Hello) -> None:
    """Receive the Challenge. ProtocolError if it says that somebody else listens there. It is proved later."""
    peer, header = transcript.connection.peer, transcript.receive_header()
    if header.kind is not Kind.CHALLENGE:
        if header.kind is Kind.REFUSE:  # a listener with TLS waits for the dialer's first word, and then says this
            raise ProtocolError(f"{peer} wants TLS, and this member comes without: give it --tls with its certificate")
        raise ProtocolError(f"{peer} sent a {header.kind.name} frame before its CHALLENGE")
    challenge = expect(transcript.receive(header, proof=False), Challenge)
    who = challenge.role, challenge.id, challenge.incarnation
    if who != hello.to or len(challenge.nonce) != NONCE_BYTES:
        names = [printable(_named(*name[:2]), 80) for name in (who, hello.to)]
        other = names[1] if names[0] != names[1] else f"its incarnation {hello.to[2]}"
        raise ProtocolError(f"{peer} is {names[0]}, not {other}")


class _Transcript:
    """Sends and receives greeting frames, and digests all of their bytes. `digest` is the digest up to now.

    With TLS it digests first what binds the greeting to the connection: a man in the middle has another one with each
    side. A listener sets `keys` when it knows who connects.
    """

    def __init__(self, connection: Connection, keys: TokenKeys | None = None) -> None:
        self.connection = connection
        if keys is not None:
            self.keys: TokenKeys = keys
        self._hash = hashlib.sha256(connection.secured.binding)
        self._claim = b"", b""  # the last proof that came, and the digest of what it is to prove

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
            proof = bytes(PROOF_BYTES) if key is None else _proof(key, self.digest)
            self._hash.update(proof)
            data += proof
        self.connection.send(head, memoryview(data))

    def receive_header(self) -> Header:
        head = bytearray(HEADER_BYTES)
        try:
            self.connection.recv_into(memoryview(head))
        except LinkError as error:
            if isinstance(error, UnprovenPeer):
                raise  # it says all
            raise LinkError(f"no greeting from {self.connection.peer}: {error}") from None
        if head.startswith(_TLS):
            raise ProtocolError(f"{self.connection.peer} speaks TLS, and this member without: give this one --tls")
        header = unpack(head)
        self._hash.update(head)
        return header

    def receive(self, header: Header, *, proof: bool = True) -> memoryview:
        """Receive the rest of a greeting frame: the message. Ask `proved` about the proof behind it, if it has one."""
        data = memoryview(receive_bytes(self.connection, header.length, GREETING_LIMIT))
        if not proof:
            self._hash.update(data)
            return data
        if header.length < PROOF_BYTES:
            raise ProtocolError(f"a {header.kind.name} frame of {header.length} bytes: it has no proof")
        message, came = data[:-PROOF_BYTES], data[-PROOF_BYTES:]
        self._hash.update(message)
        self._claim = bytes(came), self.digest
        self._hash.update(came)
        return message

    def proved(self, key: bytes) -> bool:
        """Was the last proof that came made with this key?"""
        came, digest = self._claim
        return hmac.compare_digest(_proof(key, digest), came)


def _proof(key: bytes, digest: bytes) -> bytes:
    return hmac.digest(key, digest, "sha256")


def _named(role: str, id: str) -> str:
    """How a sentence names a member: "worker w0", "the coordinator"."""
    return f"{role} {id}" if id else f"the {role}"
