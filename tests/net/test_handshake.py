"""Both sides prove that they know the token, over every byte of the greeting; the token itself never travels."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from rallypoint.core.protocol import Challenge, Hello, Welcome, encode
from rallypoint.core.view import ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError, UnprovenPeer, UsageError
from rallypoint.net import handshake
from rallypoint.net.channel import Channel
from rallypoint.net.frames import _LIMITS, HEADER_BYTES, PROTOCOL, Header, Kind, pack
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import COORDINATOR, NONCE_BYTES, PROOF_BYTES, Identity, greet, role_token, ticket_for
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, InprocTransport, Transport
from support.transports import Beside, receive

TOKEN = "correct horse battery staple"
SECRET = bytes(range(100, 132))
ME = Identity("coordinator", "", TOKEN, secret=SECRET)
SERVER = Identity("server", "server1", TOKEN, incarnation=2, secret=SECRET)
HELLO = Hello("worker", "w0", "here", "127.0.0.1:7", to=COORDINATOR)
WELCOME = Welcome({"steps": 3}, "runs/1", (5, 7))


@dataclass
class Tapped:
    """A connection that keeps what passes through it, and may change a byte of what is received."""

    inner: Connection
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    flips: int = -1  # the number of the received byte that is changed; -1: none

    def __post_init__(self) -> None:
        self.peer, self.secured, self.lender, self.offers = self.inner.peer, self.inner.secured, None, ""
        self.set_timeout, self.set_deadline = self.inner.set_timeout, self.inner.set_deadline
        self.limit_in_flight, self.close = self.inner.limit_in_flight, self.inner.close
        self.pace = self.inner.pace

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self.sent += head + bytes(payload or b"")
        self.inner.send(head, payload)

    def recv_into(self, view: memoryview) -> None:
        self.inner.recv_into(view)
        if len(self.received) <= self.flips < len(self.received) + len(view):
            view[self.flips - len(self.received)] ^= 0x10
        self.received += view


Connect = Callable[[], tuple[Tapped, Tapped]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes both ends of a new connection to one listener: the dialer's and the listener's."""
    transport = InprocTransport()
    listener = transport.listen("gate")
    opened: list[Any] = [listener]

    def both() -> tuple[Tapped, Tapped]:
        opened.extend((near := Tapped(transport.connect("gate", 1.0)), far := Tapped(listener.accept())))
        return near, far

    yield both
    for thing in opened:
        thing.close()


@pytest.fixture
def ends(connect: Connect) -> tuple[Tapped, Tapped]:
    return connect()


@dataclass
class Listener:
    """Greets whoever comes at `end`, as `me`, and then welcomes or refuses."""

    end: Connection
    me: Identity = ME
    refuses: str = ""
    hello: Hello | None = None
    keys: handshake.LinkKeys | None = None

    def __call__(self) -> None:
        try:
            greeting: handshake.Greeting = greet(self.end, self.me)
            self.hello = greeting.hello
            if self.refuses:
                greeting.refuse(self.refuses)
            else:
                self.keys = greeting.welcome(WELCOME)
        except RallypointError:
            self.end.close()  # as a gate does
            raise


def join(
    connection: Connection, token: str = TOKEN, hello: Hello = HELLO, ticket: bytes = b""
) -> tuple[Welcome, handshake.LinkKeys]:
    return handshake.introduce(connection, hello, token, ticket)


def frame(kind: Kind, data: bytes) -> bytes:
    return pack(Header(kind, length=len(data))) + data


def read(connection: Connection) -> tuple[bytes, bytes]:
    """The next frame of a greeting: its header, and its bytes."""
    head = receive(connection, HEADER_BYTES)
    return head, receive(connection, int.from_bytes(head[40:44], "little"))


def says(connection: Connection, token: str, hello: Hello) -> handshake._Transcript:
    """A dialer reads the challenge, and says this with the proof that it has the token."""
    transcript = handshake._Transcript(connection, handshake.token_keys(token))
    transcript.receive(transcript.receive_header(), proof=False)
    transcript.send(Kind.HELLO, msgspec.structs.replace(hello, nonce=bytes(NONCE_BYTES)), transcript.keys.dialer)
    return transcript


@contextlib.contextmanager
def allocates_at_most(count: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()


# ---- the right token -------------------------------------------------------------------------------------------------


def test_the_right_token_comes_in_and_both_sides_have_the_same_keys(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    with Beside(listener := Listener(far)) as listening:
        welcome, keys = join(near)
        listening.raise_if_failed()
    assert (welcome.overrides, welcome.folder, welcome.trace) == ({"steps": 3}, "runs/1", (5, 7))
    assert (listener.hello.role, listener.hello.id, listener.hello.address) == ("worker", "w0", "127.0.0.1:7")
    assert listener.keys == keys.other_side()
    assert keys.sending != keys.receiving
    assert TOKEN.encode() not in near.sent + near.received


def test_the_keys_of_two_connections_differ(connect: Connect) -> None:
    found = []
    for _ in range(2):
        near, far = connect()
        with Beside(Listener(far)):
            found.append(join(near)[1])
    assert len({keys.sending for keys in found} | {keys.receiving for keys in found}) == 4


@pytest.mark.parametrize(("incarnation", "known"), [
    (0, "61ccd952bd00a571cb6c47c989629947f8c71bbaf05d2edb43bf9fe81bb47ad6"),
    (7, "83c1ca3b2a41afb62f139c7b62d1a600d0e8a467fc5ba7d4c302710165c068c9"),
], ids=["somebody new", "with a ticket"])  # fmt: skip
def test_the_greeting_is_byte_for_byte_what_the_documents_say(
    ends: tuple[Tapped, Tapped], monkeypatch: pytest.MonkeyPatch, incarnation: int, known: str
) -> None:
    """Known answers: the proofs, keys and tickets, computed here from RFC 2104 and RFC 5869 and from nothing of ours.
    """
    nonces = iter([bytes(range(32)), bytes(range(32, 64))])
    monkeypatch.setattr("rallypoint.net.handshake.secrets.token_bytes", lambda count: next(nonces))
    near, far = ends

    def mac(key: bytes, data: bytes) -> bytes:
        return hmac.new(key, data, hashlib.sha256).digest()

    def expand(key: bytes, info: bytes) -> bytes:  # one block of HKDF-Expand
        return mac(key, info + b"\x01")

    of_workers = "worker:" + expand(mac(b"rallypoint's tokens", TOKEN.encode()), b"worker").hex()
    root = mac(b"rallypoint/22", of_workers.encode())
    known_ticket = b""
    if incarnation:
        known_ticket = expand(SECRET, b"ticket" + bytes([0x93, 0xA6]) + b"worker" + bytes([0xA2]) + b"w0" + bytes([7]))
        root = mac(root, known_ticket)
    with Beside(listener := Listener(far)):
        _, keys = join(near, hello=msgspec.structs.replace(HELLO, incarnation=incarnation), ticket=known_ticket)
    challenge = frame(Kind.CHALLENGE, encode(Challenge(bytes(range(32)), "coordinator", "", 0)))
    nonce = bytes(range(32, 64))
    hello_data = encode(Hello("worker", "w0", "here", "127.0.0.1:7", incarnation, to=COORDINATOR, nonce=nonce))
    hello = pack(Header(Kind.HELLO, length=len(hello_data) + 32)) + hello_data
    hello += mac(expand(root, b"dialer"), hashlib.sha256(challenge + hello).digest())
    welcome_data = encode(Welcome({"steps": 3}, "runs/1", (5, 7)))
    welcome = pack(Header(Kind.WELCOME, length=len(welcome_data) + 32)) + welcome_data
    welcome += mac(expand(root, b"listener"), hashlib.sha256(challenge + hello + welcome).digest())
    assert near.received == challenge + welcome
    assert near.sent == hello
    session = mac(hashlib.sha256(challenge + hello + welcome).digest(), expand(root, b"session"))
    assert keys == handshake.LinkKeys(expand(session, b"from the dialer"), expand(session, b"from the listener"))
    assert listener.keys == keys.other_side()
    assert keys.sending.hex() == known


# ---- the wrong token -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["correct horse battery stapl", TOKEN + " ", "x" * 1000, ""])
def test_a_wrong_or_missing_token_is_denied_and_told_on_both_sides(ends: tuple[Tapped, Tapped], wrong: str) -> None:
    near, far = ends
    here = r"^gate refuses worker w0 without proving .* wrong \(--token-file"
    there = r"either there is none here \(give --token-file or RALLYPOINT_TOKEN\)"
    with Beside(Listener(far)) as listening:
        with pytest.raises(UnprovenPeer, match=here if wrong else there):
            join(near, wrong)
        denied = listening.outcome()
    assert isinstance(denied, AccessDenied)
    assert str(denied) == f"a thread, for gate came {'with a wrong' if wrong else 'without a'} token"
    assert TOKEN.encode() not in near.sent + near.received
    assert not wrong or wrong.encode() not in near.sent + near.received


def test_a_refusal_that_is_proved_is_believed(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    with Beside(Listener(far, refuses="it is taken")), pytest.raises(AccessDenied, match=r"refused worker w0: it is"):
        join(near)


@pytest.mark.parametrize("reflects", [False, True], ids=["squatter", "reflection"])
def test_a_listener_without_the_token_is_not_believed(ends: tuple[Tapped, Tapped], reflects: bool) -> None:
    """He takes any proof for right, and welcomes with settings of his own. His proof is nothing, or the dialer's own of
    its Hello: the two sides prove with different keys."""
    near, far = ends

    def welcome() -> None:
        far.send(frame(Kind.CHALLENGE, encode(Challenge(bytes(32), "coordinator", ""))))
        proof = read(far)[1][-PROOF_BYTES:] if reflects else bytes(PROOF_BYTES)
        far.send(frame(Kind.WELCOME, encode(Welcome(folder="/home/victim")) + proof))

    with Beside(welcome), pytest.raises(UnprovenPeer, match=r"^gate welcomes worker w0 without proving"):
        join(near)


@pytest.mark.parametrize("kind", [Kind.CHALLENGE, Kind.WELCOME, Kind.REFUSE, Kind.CONTROL])
def test_a_stranger_s_answer_is_a_failed_attempt_and_nothing_more(ends: tuple[Tapped, Tapped], kind: Kind) -> None:
    """Whatever comes before the proof, nothing of it may end a member: it says so with a LinkError."""
    near, far = ends
    far.send(pack(Header(kind)))
    far.send(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
    with pytest.raises(UnprovenPeer):
        join(near)


def test_a_listener_that_is_not_meant_is_left_before_anything_is_proved(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    with Beside(Listener(far, SERVER)) as listening:
        with pytest.raises(UnprovenPeer, match=r"^gate is server server1, not server server0$"):
            join(near, hello=Hello("worker", "w0", "here", to=("server", "server0", 1)), ticket=b"for server0")
        near.close()
        assert isinstance(listening.outcome(), LinkError)
    assert near.sent == b""


# ---- tickets ---------------------------------------------------------------------------------------------------------

W0 = Hello("worker", "w0", "here", incarnation=7, to=("server", "server1", 2))


@pytest.mark.parametrize(("listens", "hello"), [(SERVER, W0), (ME, msgspec.structs.replace(HELLO, incarnation=7))])
def test_who_has_the_ticket_comes_in(ends: tuple[Tapped, Tapped], listens: Identity, hello: Hello) -> None:
    near, far = ends
    known = ticket_for(SECRET, "worker", "w0", 7)
    with Beside(listener := Listener(far, listens)) as listening:
        _, keys = join(near, hello=hello, ticket=known)
        listening.raise_if_failed()
    assert (listener.hello.id, listener.hello.incarnation) == ("w0", 7)
    assert listener.keys == keys.other_side()
    assert known not in near.sent + near.received


@pytest.mark.parametrize("listens", [SERVER, ME], ids=["a server", "the coordinator"])
@pytest.mark.parametrize(
    "known",
    [
        bytes(32), ticket_for(SECRET, "worker", "w1", 7), ticket_for(SECRET, "worker", "w0", 6),
        ticket_for(SECRET, "server", "w0", 7), ticket_for(b"another server's", "worker", "w0", 7),
    ],
    ids=["zeros", "another worker's", "an earlier incarnation's", "another role's", "for another server"],
)  # fmt: skip
def test_the_token_alone_is_not_enough_to_be_a_member(
    ends: tuple[Tapped, Tapped], listens: Identity, known: bytes
) -> None:
    near, far = ends
    hello = msgspec.structs.replace(W0, to=(listens.role, listens.id, listens.incarnation))
    with Beside(Listener(far, listens)) as listening:
        with pytest.raises(UnprovenPeer, match=r"refuses worker w0 without proving that it knows the"):
            join(near, hello=hello, ticket=known)
        denied = listening.outcome()
    assert isinstance(denied, AccessDenied)
    assert str(denied).endswith("came with a wrong " + ("ticket" if listens is SERVER else "token or ticket"))


@pytest.mark.parametrize("incarnation", [0, 7])
@pytest.mark.parametrize("token", ["", role_token(TOKEN, "worker"), TOKEN], ids=["nothing", "the role's", "the job's"])
def test_who_has_no_ticket_is_nobody_to_a_server(ends: tuple[Tapped, Tapped], token: str, incarnation: int) -> None:
    """Between members no token counts: its holders are of different roles. That of nobody least of all."""
    near, far = ends
    hello = msgspec.structs.replace(W0, incarnation=incarnation)
    with pytest.raises(LinkError, match=r"^no ticket for server1"):
        join(near, hello=hello)
    with Beside(Listener(far, SERVER)) as listening:
        says(near, token, hello)
        denied = listening.outcome()
    assert isinstance(denied, AccessDenied)
    assert str(denied).endswith("came with a wrong ticket")


# ---- a token for each role -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", handshake.ROLES)
def test_a_role_s_token_is_enough_for_that_role(ends: tuple[Tapped, Tapped], role: str) -> None:
    near, far = ends
    with Beside(listener := Listener(far)) as listening:
        _, keys = join(near, role_token(TOKEN, role), msgspec.structs.replace(HELLO, role=role))
        listening.raise_if_failed()
    assert listener.hello.role == role
    assert listener.keys == keys.other_side()


@pytest.mark.parametrize(("role", "other"), [(r, o) for r in handshake.ROLES for o in handshake.ROLES if r != o])
def test_a_role_s_token_is_for_no_other_role(ends: tuple[Tapped, Tapped], role: str, other: str) -> None:
    near, far = ends
    hello = msgspec.structs.replace(HELLO, role=other)
    with pytest.raises(UsageError, match=f"^this token is for the role {role}, and a token for the role {other} is"):
        join(near, role_token(TOKEN, role), hello)
    with Beside(Listener(far)) as listening:  # who does not care about that
        transcript = says(near, role_token(TOKEN, role), hello)
        refused = transcript.receive(transcript.receive_header())
        denied = listening.outcome()
    assert b"the token is wrong" in bytes(refused)
    assert not transcript.proved(transcript.keys.listener)
    assert isinstance(denied, AccessDenied)
    assert str(denied).endswith(f"came as {other} w0 with the token of the role {role}")


def test_a_listener_with_a_role_s_token_takes_that_role_alone(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    with Beside(Listener(far, Identity("coordinator", "", role_token(TOKEN, "observer")))) as listening:
        with pytest.raises(LinkError):
            join(near)
        assert "came in another role than this token is for" in str(listening.outcome())


def test_a_wrong_token_is_denied_by_a_listener_with_a_role_s_token_too(ends: tuple[Tapped, Tapped]) -> None:
    """A doctor's probe: it knows no other role's token that it could compare with."""
    near, far = ends
    with Beside(Listener(far, Identity("coordinator", "", role_token(TOKEN, "observer")))) as listening:
        with pytest.raises(UnprovenPeer):
            join(near, role_token("another token", "observer"), msgspec.structs.replace(HELLO, role="observer"))
        denied = listening.outcome()
    assert isinstance(denied, AccessDenied)
    assert str(denied).endswith("came with a wrong token")


def test_a_role_s_token_does_not_make_a_coordinator_of_other_roles(ends: tuple[Tapped, Tapped]) -> None:
    """A worker's machine that takes the coordinator's port is not believed by a server that joins."""
    near, far = ends
    hello = msgspec.structs.replace(HELLO, role="server")

    def squat() -> None:
        transcript = handshake._Transcript(far, handshake.token_keys(role_token(TOKEN, "worker")))
        transcript.send(Kind.CHALLENGE, Challenge(bytes(32), "coordinator", ""))
        transcript.receive(transcript.receive_header())
        transcript.send(Kind.WELCOME, WELCOME, transcript.keys.listener)

    with Beside(squat), pytest.raises(UnprovenPeer, match=r"^gate welcomes server w0 without proving"):
        join(near, role_token(TOKEN, "server"), hello)


def test_a_token_holder_cannot_listen_as_a_server_or_as_the_coordinator_of_members(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    fake = Identity("server", "server1", TOKEN, incarnation=2, secret=b"made up")
    with Beside(Listener(far, fake)), pytest.raises(UnprovenPeer, match="that it knows the ticket of worker w0"):
        join(near, hello=W0, ticket=ticket_for(SECRET, "worker", "w0", 7))


def test_a_server_takes_nobody_before_it_is_admitted_itself(ends: tuple[Tapped, Tapped]) -> None:
    """Else the tickets of an empty secret would do, and everybody can compute those."""
    near, far = ends
    hello = msgspec.structs.replace(W0, to=("server", "server1", 0))
    with Beside(Listener(far, Identity("server", "server1", TOKEN))) as listening:
        with pytest.raises(LinkError):
            join(near, hello=hello, ticket=ticket_for(b"", "worker", "w0", 7))
        assert "server server1 is not admitted to the job yet" in str(listening.outcome())


def test_another_incarnation_of_a_server_is_not_the_one_that_is_meant(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    with Beside(Listener(far, SERVER)):
        with pytest.raises(UnprovenPeer, match=r"^gate is server server1, not its incarnation 1$"):
            join(near, hello=msgspec.structs.replace(W0, to=("server", "server1", 1)), ticket=b"old")
        near.close()


# ---- bytes that change, repeat or come back --------------------------------------------------------------------------


def test_relay_a_greeting_cannot_be_led_to_another_listener(connect: Connect) -> None:
    """A relay answers for server0, and passes everything on to server1, who it calls server0."""
    (near, relay_near), (relay_far, far) = connect(), connect()

    def relay() -> None:
        read(relay_far)
        relay_near.send(frame(Kind.CHALLENGE, encode(Challenge(bytes(NONCE_BYTES), "server", "server0", 1))))
        for source, sink in ((relay_near, relay_far), (relay_far, relay_near)):
            sink.send(b"".join(read(source)))

    with Beside(Listener(far, SERVER)) as listening, Beside(relay):
        with pytest.raises(UnprovenPeer):
            join(near, hello=msgspec.structs.replace(W0, to=("server", "server0", 1)), ticket=b"for server0")
        assert isinstance(listening.outcome(), AccessDenied)


def greeted(connect: Connect) -> Tapped:
    """The dialer's end of a connection, after a greeting."""
    near, far = connect()
    with Beside(Listener(far)):
        join(near)
    return near


@pytest.mark.parametrize("direction", ["to the dialer", "to the listener"])
def test_forged_welcome_a_changed_byte_anywhere_in_the_greeting_is_seen(
    connect: Connect, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Challenge, Hello, Welcome; headers, messages and proofs: no byte may change, and nothing of it is believed."""
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.2)  # a length that has grown is waited for
    of = greeted(connect)
    welcome_at = of.received.index(b"RLPT", 4)
    for position in range(len(of.received if direction == "to the dialer" else of.sent)):
        near, far = connect()
        (near if direction == "to the dialer" else far).flips = position
        listener = Listener(far)
        with Beside(listener) as listening:
            try:
                with pytest.raises(LinkError):
                    join(near)
            finally:
                near.close()
            heard = listening.outcome()
        if direction == "to the listener" or position < welcome_at:
            assert isinstance(heard, RallypointError), position
            assert listener.hello is None
        far.close()


def test_replayed_handshake_a_hello_is_good_for_one_challenge_only(connect: Connect) -> None:
    of = greeted(connect)
    again, far = connect()
    with Beside(Listener(far)) as listening:
        again.send(bytes(of.sent))
        assert isinstance(listening.outcome(), AccessDenied)
    replayed, squatter = connect()
    squatter.send(bytes(of.received))  # the same listener's challenge and welcome, for another dialer
    with pytest.raises(UnprovenPeer):
        join(replayed)


def test_reflection_a_listener_does_not_greet_itself(ends: tuple[Tapped, Tapped]) -> None:
    """A relay connects a listener's two connections with each other: nobody proves anything."""
    near, far = ends
    with Beside(Listener(far)) as one:
        near.send(b"".join(read(near)))
        assert isinstance(one.outcome(), ProtocolError)


@pytest.mark.parametrize("version", [0, 1, PROTOCOL - 1, PROTOCOL + 1])
def test_downgrade_an_older_protocol_is_refused_by_both_sides(connect: Connect, version: int) -> None:
    near, far = connect()
    with Beside(Listener(far)) as listening:
        old = bytearray(frame(Kind.HELLO, encode(HELLO) + bytes(PROOF_BYTES)))
        old[4] = version
        near.send(bytes(old))
        assert f"protocol {version} instead of {PROTOCOL}" in str(listening.outcome())
    mine, theirs = connect()
    challenge = bytearray(frame(Kind.CHALLENGE, encode(Challenge(bytes(32), "coordinator", ""))))
    challenge[4] = version
    theirs.send(bytes(challenge))
    with pytest.raises(UnprovenPeer, match=f"protocol {version} instead of {PROTOCOL}: run the same version"):
        join(mine)


@pytest.mark.parametrize("changed", [
    Hello("server", "w0", "here", "127.0.0.1:7", to=COORDINATOR),
    Hello("worker", "w1", "here", "127.0.0.1:7", to=COORDINATOR),
    Hello("worker", "w0", "here", "127.0.0.1:8", to=COORDINATOR),
    Hello("worker", "w0", "here", "127.0.0.1:7", incarnation=3, to=COORDINATOR),
    Hello("worker", "w0", "here", "127.0.0.1:7", view=ViewNumber(1, 1), to=COORDINATOR),
])  # fmt: skip
def test_a_proof_is_bound_to_all_that_the_hello_says(connect: Connect, changed: Hello) -> None:
    """The proof of HELLO under another Hello."""
    (near, far), (mine, theirs) = connect(), connect()
    with Beside(Listener(far)) as listening:
        theirs.send(b"".join(read(near)))
        with Beside(lambda: join(mine)):
            proof = read(theirs)[1][-PROOF_BYTES:]
            near.send(frame(Kind.HELLO, encode(changed) + proof))
            assert isinstance(listening.outcome(), AccessDenied)
            theirs.close()


def test_a_hello_without_a_nonce_is_refused(ends: tuple[Tapped, Tapped], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends
    with Beside(Listener(far)) as listening:
        monkeypatch.setattr("rallypoint.net.handshake.secrets.token_bytes", lambda count: b"")
        with pytest.raises(LinkError):
            join(near)
        assert isinstance(listening.outcome(), ProtocolError)


# ---- who says something else, or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "why"), [
    *((pack(Header(kind)), rf"sent a {kind.name} frame before its HELLO") for kind in sorted(set(Kind) - {Kind.HELLO})),
    *((frame(Kind.HELLO, bytes(length)), f"a HELLO frame of {length} bytes: it has no proof")
      for length in (0, 1, PROOF_BYTES - 1)),
    (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", "is this another program's connection"),
])  # fmt: skip
def test_what_is_no_greeting_is_refused(ends: tuple[Tapped, Tapped], said: bytes, why: str) -> None:
    near, far = ends
    near.send(said)
    with pytest.raises(ProtocolError, match=why):
        greet(far, ME)


def test_who_says_nothing_is_let_go(ends: tuple[Tapped, Tapped], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.05)
    near, far = ends
    with pytest.raises(LinkError, match="no greeting from a thread, for gate"):
        greet(far, ME)
    read(near)  # the challenge, which we did not answer
    with pytest.raises(LinkError, match="no greeting from gate"):
        join(near)


@pytest.mark.parametrize("transport", [InprocTransport(), TcpTransport()], ids=["inproc", "tcp"])
def test_who_trickles_is_let_go_when_the_whole_greeting_takes_too_long(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte comes whenever one is waited for, so no single receive takes long."""
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.2)
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, 5.0), listener.accept()
    near.set_timeout(5.0)
    slow = frame(Kind.HELLO, encode(HELLO) + bytes(PROOF_BYTES))
    let_go = threading.Event()

    def trickle() -> None:
        for byte in itertools.cycle(slow):
            if let_go.wait(0.05):
                return
            with contextlib.suppress(LinkError):
                near.send(bytes([byte]))

    with Beside(trickle) as trickling:
        try:
            with pytest.raises(LinkError):
                greet(far, ME)
        finally:
            let_go.set()
            trickling.raise_if_failed()
    for thing in (near, far, listener):
        thing.close()


def test_the_deadline_of_a_greeting_is_for_the_welcome_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer has the token, and reads nothing of a long answer."""
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.3)
    listener = TcpTransport().listen("127.0.0.1:0")
    near, far = TcpTransport().connect(listener.address, 5.0), listener.accept()
    near.limit_in_flight(4096)

    def listen() -> None:
        greeting = greet(far, ME)
        while True:
            greeting.welcome(Welcome({"steps": "x" * 1_000_000}))
            far.set_deadline(0.3)  # `welcome` takes it away, when it has come to its end

    with Beside(listen) as listening:
        says(near, role_token(TOKEN, "worker"), HELLO)
        assert isinstance(listening.outcome(), LinkError)
    for thing in (near, far, listener):
        thing.close()


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.WELCOME, Kind.REFUSE}))
def test_a_length_alone_costs_a_member_nothing(ends: tuple[Tapped, Tapped], kind: Kind) -> None:
    """48 bytes of somebody who listens at the coordinator's address must not make a member allocate 456 MiB."""
    near, far = ends
    data = encode(Challenge(bytes(32), "coordinator"))
    far.send(pack(Header(Kind.CHALLENGE, length=len(data))), memoryview(data))
    far.send(pack(Header(kind, length=_LIMITS[kind])))
    with allocates_at_most(1 << 20), pytest.raises(UnprovenPeer, match=rf"the greeting with a {kind.name} frame"):
        join(near)


def test_of_a_welcome_a_member_believes_what_has_come(ends: tuple[Tapped, Tapped]) -> None:
    near, far = ends
    data = encode(Challenge(bytes(32), "coordinator"))
    far.send(pack(Header(Kind.CHALLENGE, length=len(data))), memoryview(data))
    far.send(pack(Header(Kind.WELCOME, length=1 << 20)))
    with allocates_at_most(512 << 10), Beside(lambda: join(near)) as joining:
        receive(far, 48)
        far.close()
        assert isinstance(joining.outcome(), LinkError)


def test_tokens_are_fresh_and_long_enough() -> None:
    assert handshake.new_token() != handshake.new_token()
    handshake.check_exposure(TcpTransport(), "0.0.0.0:0", handshake.new_token())


@pytest.mark.parametrize("token", ["", "short", "fifteen letters"])
@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:4700", "node7:4700", "[::]:0"])
def test_nothing_is_served_to_others_without_a_token(address: str, token: str) -> None:
    me = Identity("coordinator", "", token)
    with pytest.raises(UsageError, match=r"of at least 16 characters \(RALLYPOINT_TOKEN, or --token-file\)"):
        Gate(TcpTransport(), address, me, admit=lambda hello: Welcome(), serve=lambda channel, hello: None)


def test_loopback_needs_no_token() -> None:
    handshake.check_exposure(TcpTransport(), "127.0.0.1:0", "")
    handshake.check_exposure(InprocTransport(), "name", "")


# ---- the gate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def transport() -> TcpTransport:
    return TcpTransport()


def test_a_refusal_reaches_who_was_refused(transport: TcpTransport) -> None:
    def admit(hello: Hello) -> Welcome:
        raise AccessDenied("the id w0 is taken: give every member one of its own")

    gate = Gate(transport, "127.0.0.1:0", ME, admit, serve=lambda channel, hello: None)
    connection = transport.connect(gate.address, 5.0)
    with pytest.raises(AccessDenied, match="refused worker w0: the id w0 is taken"):
        join(connection)
    connection.close()
    gate.close()


def test_a_protocol_error_ends_one_connection_with_a_sentence(transport: TcpTransport) -> None:
    def serve(channel: Channel, hello: Hello) -> None:
        while True:
            header = channel.receive_header()
            if header.kind is not Kind.CREDIT:
                raise ProtocolError(f"no {header.kind.name} here")
            channel.send(Header(Kind.CREDIT))

    gate = Gate(transport, "127.0.0.1:0", ME, admit=lambda hello: Welcome(), serve=serve)
    good, bad = transport.connect(gate.address, 5.0), transport.connect(gate.address, 5.0)
    channels = []
    for connection in (good, bad):
        channels.append(Channel(connection, "gate", join(connection)[1]))
        connection.set_timeout(5.0)
    channels[1].send(Header(Kind.FETCH))
    refusal = channels[1].receive_header()
    assert (refusal.kind, b"no FETCH here" in channels[1].receive_bytes(refusal)) == (Kind.REFUSE, True)
    with pytest.raises(LinkError):
        channels[1].receive_header()
    channels[0].send(Header(Kind.CREDIT))
    assert channels[0].receive_header() == Header(Kind.CREDIT)
    for thing in (*channels, gate):
        thing.close()


def test_a_gate_closes_with_connections_in_every_state(transport: TcpTransport) -> None:
    def serve(channel: Channel, hello: Hello) -> None:
        channel.receive_header()

    gate = Gate(transport, "127.0.0.1:0", ME, admit=lambda hello: Welcome(), serve=serve)
    connections = [transport.connect(gate.address, 5.0) for _ in range(6)]
    for connection in connections[:3]:
        join(connection)
    gate.close()
    for connection in connections:
        connection.close()
