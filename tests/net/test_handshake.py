"""Only who knows the token comes in, and the token itself never travels."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import threading
from collections.abc import Iterator

import pytest

from rallypoint.errors import AccessDenied, LinkError, ProtocolError, UsageError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import check_exposure, greet, introduce, new_token, refuse, welcome
from rallypoint.net.inproc import InprocTransport
from rallypoint.net.messages import Challenge, Hello, Welcome, encode, expect
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, Transport
from rallypoint.testing.contracts.transports import Beside, receive

TOKEN = "correct horse battery staple"


class Recording:
    """A connection that keeps what passes through it."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self.peer = inner.peer
        self.set_timeout, self.set_deadline, self.close = inner.set_timeout, inner.set_deadline, inner.close
        self.bytes = bytearray()

    def send(self, head: bytes, payload: memoryview | None = None) -> None:
        self.bytes += head + bytes(payload or b"")
        self._inner.send(head, payload)

    def recv_into(self, view: memoryview) -> None:
        self._inner.recv_into(view)
        self.bytes += view


@pytest.fixture
def ends() -> Iterator[tuple[Recording, Connection]]:
    transport = InprocTransport()
    listener = transport.listen("gate")
    near, far = transport.connect("gate", 1.0), listener.accept()
    yield Recording(near), far
    for thing in (near, far, listener):
        thing.close()


def join(connection: Connection, token: str) -> Welcome:
    return introduce(connection, token, role="worker", id="w0", host="here", address="127.0.0.1:7")


def test_the_right_token_comes_in(ends: tuple[Recording, Connection]) -> None:
    near, far = ends
    greeted: list[Hello] = []

    def listen() -> None:
        greeted.append(greet(far, TOKEN))
        welcome(far, Welcome({"steps": 3}, "runs/1", (5, 7)))

    with Beside(listen) as listening:
        assert join(near, TOKEN) == Welcome({"steps": 3}, "runs/1", (5, 7))
        listening.raise_if_failed()
    (hello,) = greeted
    assert (hello.role, hello.id, hello.host, hello.address) == ("worker", "w0", "here", "127.0.0.1:7")
    assert TOKEN.encode() not in near.bytes


@pytest.mark.parametrize("wrong", ["", "correct horse battery stapl", TOKEN + " ", "x" * 1000])
def test_a_wrong_token_is_denied_on_both_sides(ends: tuple[Recording, Connection], wrong: str) -> None:
    near, far = ends
    with Beside(lambda: greet(far, TOKEN)) as listening:
        with pytest.raises(AccessDenied, match=r"^gate refused worker w0: the job token is wrong: start every member"):
            join(near, wrong)
        denied = listening.outcome()
    assert isinstance(denied, AccessDenied)
    assert str(denied) == "a thread, for gate (worker w0) came with a wrong token"
    assert TOKEN.encode() not in near.bytes
    assert not wrong or wrong.encode() not in near.bytes


def test_an_answer_is_good_for_one_challenge_only() -> None:
    transport = InprocTransport()
    listener = transport.listen("gate")
    answers: list[bytes] = []
    for attempt in range(2):
        near, far = transport.connect("gate", 1.0), listener.accept()
        with Beside(lambda far=far: greet(far, TOKEN)) as listening:  # type: ignore[misc]
            if attempt == 0:
                recording = Recording(near)
                with Beside(lambda recording=recording: join(recording, TOKEN)):  # type: ignore[misc]
                    listening.raise_if_failed()
                    refuse(far, "enough")
                answers.append(bytes(recording.bytes))
            else:
                hello_at = answers[0].index(b"RLPT", 4)
                near.send(answers[0][hello_at : answers[0].index(b"RLPT", hello_at + 4)])
                assert isinstance(listening.outcome(), AccessDenied)
        near.close()
        far.close()
    listener.close()


def test_a_proof_is_bound_to_the_role_and_the_id(ends: tuple[Recording, Connection]) -> None:
    near, far = ends
    with Beside(lambda: greet(far, TOKEN)) as listening:
        head = receive(near, 48)
        nonce = expect(receive(near, int.from_bytes(head[40:44], "little")), Challenge).nonce
        proof = hmac.new(TOKEN.encode(), nonce + b"observer/w0", hashlib.sha256).digest()
        data = encode(Hello("server", "w0", "here", proof))
        near.send(pack(Header(Kind.HELLO, length=len(data))), memoryview(data))
        assert isinstance(listening.outcome(), AccessDenied)


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.HELLO}))
def test_a_frame_before_the_greeting_is_refused(ends: tuple[Recording, Connection], kind: Kind) -> None:
    near, far = ends
    near.send(pack(Header(kind)))
    with pytest.raises(ProtocolError, match=rf"sent a {kind.name} frame before its HELLO"):
        greet(far, TOKEN)


def test_garbage_instead_of_a_greeting_is_refused(ends: tuple[Recording, Connection]) -> None:
    near, far = ends
    near.send(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
    with pytest.raises(ProtocolError, match="is this another program's connection"):
        greet(far, TOKEN)


def test_who_says_nothing_is_let_go(ends: tuple[Recording, Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.05)
    near, far = ends
    with pytest.raises(LinkError, match="no greeting from a thread, for gate"):
        greet(far, TOKEN)
    head = receive(near, 48)  # the challenge, which we did not answer
    receive(near, int.from_bytes(head[40:44], "little"))
    with pytest.raises(LinkError, match="no greeting from gate"):
        join(near, TOKEN)


@pytest.mark.parametrize("transport", [InprocTransport(), TcpTransport()], ids=["inproc", "tcp"])
def test_who_trickles_is_let_go_when_the_whole_greeting_takes_too_long(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte comes whenever one is waited for, so no single receive takes long."""
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.2)
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.connect(listener.address, 5.0), listener.accept()
    near.set_timeout(5.0)
    data = encode(Hello("worker", "w0", "here", bytes(32)))
    slow = pack(Header(Kind.HELLO, length=len(data))) + data
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
                greet(far, TOKEN)
        finally:
            let_go.set()
            trickling.raise_if_failed()
    for thing in (near, far, listener):
        thing.close()


def test_tokens_are_fresh_and_long_enough() -> None:
    assert new_token() != new_token()
    check_exposure(TcpTransport(), "0.0.0.0:0", new_token())


@pytest.mark.parametrize("token", ["", "short", "fifteen letters"])
@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:4700", "node7:4700", "[::]:0"])
def test_nothing_is_served_to_others_without_a_token(address: str, token: str) -> None:
    with pytest.raises(UsageError, match=r"set a job token of at least 16 characters \(RALLYPOINT_TOKEN\)"):
        Gate(TcpTransport(), address, token, admit=lambda hello: Welcome(), serve=lambda channel, hello: None)


def test_loopback_needs_no_token() -> None:
    check_exposure(TcpTransport(), "127.0.0.1:0", "")
    check_exposure(InprocTransport(), "name", "")


# ---- the gate --------------------------------------------------------------------------------------------------


@pytest.fixture
def transport() -> TcpTransport:
    return TcpTransport()


def test_a_refusal_reaches_who_was_refused(transport: TcpTransport) -> None:
    def admit(hello: Hello) -> Welcome:
        raise AccessDenied("the id w0 is taken: give every member one of its own")

    gate = Gate(transport, "127.0.0.1:0", TOKEN, admit, serve=lambda channel, hello: None)
    connection = transport.connect(gate.address, 5.0)
    with pytest.raises(AccessDenied, match="refused worker w0: the id w0 is taken"):
        join(connection, TOKEN)
    connection.close()
    gate.close()


def test_a_protocol_error_ends_one_connection_with_a_sentence(transport: TcpTransport) -> None:
    def serve(channel: Channel, hello: Hello) -> None:
        while True:
            header = channel.receive_header()
            if header.kind is not Kind.CREDIT:
                raise ProtocolError(f"no {header.kind.name} here")
            channel.send(Header(Kind.CREDIT))

    gate = Gate(transport, "127.0.0.1:0", TOKEN, admit=lambda hello: Welcome(), serve=serve)
    good, bad = transport.connect(gate.address, 5.0), transport.connect(gate.address, 5.0)
    for connection in (good, bad):
        join(connection, TOKEN)
        connection.set_timeout(5.0)
    bad.send(pack(Header(Kind.FETCH)))
    head = receive(bad, 48)
    assert b"no FETCH here" in receive(bad, int.from_bytes(head[40:44], "little"))
    with pytest.raises(LinkError):
        receive(bad, 1)
    good.send(pack(Header(Kind.CREDIT)))
    assert receive(good, 48) == pack(Header(Kind.CREDIT))
    for thing in (good, bad, gate):
        thing.close()


def test_a_gate_closes_with_connections_in_every_state(transport: TcpTransport) -> None:
    def serve(channel: Channel, hello: Hello) -> None:
        channel.receive_header()

    gate = Gate(transport, "127.0.0.1:0", TOKEN, admit=lambda hello: Welcome(), serve=serve)
    connections = [transport.connect(gate.address, 5.0) for _ in range(6)]
    for connection in connections[:3]:
        join(connection, TOKEN)
    gate.close()
    for connection in connections:
        connection.close()
