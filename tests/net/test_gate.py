"""Strangers cost little: a bounded number of connections, threads, descriptors and log lines, whatever they do."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from rallypoint.core.protocol import Hello, Welcome, encode
from rallypoint.errors import AccessDenied, LinkError
from rallypoint.net.channel import SEALED_BYTES, Channel, Opener, Sealer
from rallypoint.net.frames import Header, Kind, pack
from rallypoint.net.gate import Gate, Unproven
from rallypoint.net.handshake import COORDINATOR, PROOF_BYTES, Identity, LinkKeys, introduce
from rallypoint.net.tcp import TcpConnection, TcpListener, TcpTransport, split_address
from rallypoint.net.transport import PLAIN, Connection, Listener, Transport
from support.beside import raising, until
from support.transports import receive

TOKEN = "correct horse battery staple"
PATIENCE_S = 60.0


class Door(Gate):
    """A coordinator's gate, which answers each frame by a credit."""

    def __init__(self, transport: Transport | None = None, *, most: int = 8, from_one: int = 4) -> None:
        super().__init__(
            transport or TcpTransport(), "127.0.0.1:0", Identity("coordinator", "", TOKEN), lambda hello: Welcome(),
            self._answer, unproven=Unproven(most, from_one),
        )  # fmt: skip

    def _answer(self, channel: Channel, hello: Hello) -> None:
        while True:
            channel.receive_header()
            channel.send(Header(Kind.CREDIT))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom the gate lets go in a test, it does not let go by the handshake's deadline."""
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 5 * PATIENCE_S)


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def knock(door: Gate, opened: contextlib.ExitStack, source: str = "127.0.0.1") -> TcpConnection:
    """A connection from `source`, which says nothing."""
    sock = socket.create_connection(split_address(door.address), PATIENCE_S, (source, 0))
    connection = TcpConnection(sock, door.address)
    connection.set_timeout(PATIENCE_S)
    opened.callback(connection.close)
    return connection


def joins(connection: Connection) -> tuple[Sealer, Opener]:
    """It proves itself, and is served."""
    _, keys = introduce(connection, Hello("worker", "w0", "here", to=COORDINATOR), TOKEN)
    connection.set_timeout(PATIENCE_S)
    member = Sealer(keys), Opener(keys, "the gate")
    is_served(connection, *member)
    return member


def is_served(connection: Connection, sealer: Sealer, opener: Opener) -> None:
    connection.send(sealer.seal(Header(Kind.CREDIT), None))
    assert opener.open(memoryview(receive(connection, SEALED_BYTES))) == Header(Kind.CREDIT)


def is_let_go(connection: Connection) -> bool:
    """Read until the other side closes. Fails by its time-out if that does not come."""
    try:
        while True:
            receive(connection, 1)
    except LinkError as error:
        return "timed out" not in str(error)


def test_of_those_who_say_nothing_only_so_many_are_held(door: Door, opened: contextlib.ExitStack) -> None:
    before = threading.active_count()
    knocking = [knock(door, opened) for _ in range(40)]
    assert all(is_let_go(connection) for connection in knocking[:36]), "the oldest go first"
    # The last thread that was told to go may still be on its way out.
    until(lambda: threading.active_count() - before <= 4)
    for connection in knocking[36:]:
        joins(connection)  # the newest are still welcome: each of them has its whole time


def test_who_comes_from_elsewhere_does_not_pay_for_the_many(opened: contextlib.ExitStack) -> None:
    door = opened.enter_context(contextlib.closing(Door(most=6, from_one=6)))
    first = knock(door, opened, "127.0.0.2")
    crowd = [knock(door, opened) for _ in range(30)]
    assert all(is_let_go(connection) for connection in crowd[:25])
    joins(first)


def test_proven_connections_are_not_counted(door: Door, opened: contextlib.ExitStack) -> None:
    members = [knock(door, opened) for _ in range(3)]
    served = [joins(member) for member in members]
    for _ in range(20):
        assert knock(door, opened)
    members.append(knock(door, opened))
    served.append(joins(members[-1]))
    for member, ends in zip(members, served, strict=True):
        is_served(member, *ends)


@pytest.mark.parametrize("trouble", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_thread_that_cannot_be_started_does_not_end_the_gate(
    door: Door, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, trouble: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name.startswith("from "):
            raise trouble
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert all(is_let_go(knock(door, opened)) for _ in range(3))
    monkeypatch.setattr(threading.Thread, "start", start)
    joins(knock(door, opened))
    assert "cannot take a connection now" in caplog.text


def test_without_a_thread_to_send_from_there_is_no_channel(
    opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LinkError: who dials tries again, who listens goes on."""
    here, there = socket.socketpair()
    opened.callback(here.close)
    opened.callback(there.close)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        with pytest.raises(LinkError, match="no thread"):
            Channel(Silent(), "x", LinkKeys(bytes(32), bytes(32)))


class Silent:
    """A connection of which nothing is asked."""

    peer, secured, lender = "silent", PLAIN, None

    def close(self) -> None:
        pass


def test_without_descriptors_strangers_are_turned_away_and_the_gate_goes_on(
    door: Door, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = [socket.socket() for _ in range(4)]
    for sock in late:
        opened.callback(sock.close)
        sock.settimeout(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    full: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                full.append(os.dup(late[0].fileno()))
        late[0].connect(split_address(door.address))  # an `accept` that waits has its descriptor already
        for sock in late[1:]:
            sock.connect(split_address(door.address))
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b"", "accepted and closed: it does not wait in vain"
    finally:
        for fd in full:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    joins(knock(door, opened))
    assert "file descriptors" in caplog.text


def test_whoever_comes_after_a_shortage_of_descriptors_is_let_in(
    door: Door, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says EMFILE while nobody waits: that is no reason to turn the next one away."""
    short, refuse = threading.Event(), TcpListener._refuse_one

    def noticed(self: TcpListener) -> None:
        refuse(self)  # first: whoever comes meanwhile is somebody who waits
        short.set()

    monkeypatch.setattr(TcpListener, "_refuse_one", noticed)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = opened.enter_context(socket.socket())
    first.settimeout(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    full: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                full.append(os.dup(first.fileno()))
        first.connect(split_address(door.address))  # takes the descriptor of the `accept` that waits
        assert short.wait(PATIENCE_S)
    finally:
        for fd in full:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    joins(knock(door, opened))


def test_an_error_of_a_listener_that_is_not_closed_does_not_end_the_gate(
    door: Door, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example EPERM of a firewall, or an error of the network that Linux passes on from the new connection."""
    listener: Listener = door._listener
    accept, failed = listener.accept, threading.Event()

    def fails() -> Connection:
        connection = accept()
        if failed.is_set():
            return connection
        failed.set()
        connection.close()
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listener, "accept", fails)
    for _ in range(2):  # the one that already waits in the real `accept`, and the one that fails
        assert knock(door, opened)
    assert failed.wait(PATIENCE_S)
    joins(knock(door, opened))


# ---- words ----


def greet_wrongly(door: Gate, opened: contextlib.ExitStack, hello: Hello) -> None:
    connection = knock(door, opened)
    data = encode(hello) + bytes(PROOF_BYTES)
    connection.send(pack(Header(Kind.HELLO, length=len(data))), memoryview(data))
    assert is_let_go(connection)
    connection.close()


def test_many_greetings_write_few_lines(
    door: Door, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="rallypoint")
    for _ in range(200):
        greet_wrongly(door, opened, Hello("worker", "w0", "here", to=COORDINATOR))
    assert 1 <= len(caplog.records) <= 12
    door.close()
    assert "more such lines" in caplog.text, "and how many were left out"


@pytest.mark.parametrize("field", ["role", "id", "host", "address"])
def test_no_control_character_of_a_stranger_reaches_the_console(
    door: Door, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    caplog.set_level(logging.DEBUG, logger="rallypoint")
    hello = {"role": "worker", "id": "w0", "host": "here", "address": ""}
    evil = "\x1b]0;owned\x07\r\n\u202efailed\x9b31m"
    greet_wrongly(door, opened, Hello(**{**hello, field: evil}, to=COORDINATOR))  # type: ignore[arg-type]
    assert caplog.records
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_long_name_is_no_long_line(
    door: Door, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    greet_wrongly(door, opened, Hello("worker", "w" * 3000, "here", to=COORDINATOR))
    assert caplog.records
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


@pytest.mark.parametrize("id", ["\x1b]0;owned\x07", "w" * 3000])
def test_a_member_whose_name_cannot_be_shown_is_refused(door: Door, opened: contextlib.ExitStack, id: str) -> None:
    """It has the token: its name would be in everybody's sentences."""
    with pytest.raises(AccessDenied, match="control characters, or more than 200") as refused:
        introduce(knock(door, opened), Hello("worker", id, "here", to=COORDINATOR), TOKEN)
    assert refused
