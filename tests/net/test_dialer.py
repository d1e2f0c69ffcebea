"""A dialer keeps one connection alive: it comes back whenever it is lost, and ends when it is told to."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from rallypoint.core.protocol import Hello, Welcome
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError
from rallypoint.net import dialer
from rallypoint.net.channel import Channel
from rallypoint.net.dialer import Calls, Dialer
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Credentials, Identity, ticket_for
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, InprocTransport, Listener, Transport
from rallypoint.observe.trace import Tracer
from support.beside import raising, until

PATIENCE_S = 60.0
TOKEN = "a token that nobody guesses"
SECRET = b"the secret of server0 alone"


@dataclass
class Host:
    """The other side: a gate whose connections the test holds in its hands."""

    transport: Transport
    address: str
    secret: bytes = SECRET
    came: queue.SimpleQueue[tuple[Channel, Hello]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        me = Identity("server", "server0", TOKEN, secret=self.secret)
        self.gate = Gate(self.transport, self.address, me, lambda hello: Welcome(), self._serve)
        self.address = self.gate.address

    def next(self) -> tuple[Channel, Hello]:
        return self.came.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.gate.close()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        self.came.put((channel, hello))
        while True:
            channel.receive_header()


def credentials(server: Member) -> Credentials:
    """Those of worker0, with a ticket for this server."""
    known = Credentials(Identity("worker", "worker0", TOKEN))
    known.admitted(5, b"")
    view = View(ViewNumber(), ViewNumber(), (), (server,), (), {})
    known.given(view, {server.id: ticket_for(SECRET, "worker", "worker0", 5)})
    return known


class Caller:
    """This side: what the dialer has called, in order, and from which thread."""

    def __init__(self, transport: Transport, address: str, view: Callable[[], ViewNumber] = ViewNumber) -> None:
        self.calls: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self.threads: set[str] = set()
        self.serving = threading.Semaphore(0)
        self.fault: RallypointError | None = None
        self.fault_when_down: Exception | None = None
        peer = Member("server0", "there", address)
        self.dialer = Dialer(
            transport=transport, peer=peer, credentials=credentials(peer),
            tracer=Tracer("worker0"),
            calls=Calls(
                view, up=lambda channel: self._called("up", channel), serve=self._serve,
                down=self._down, failed=lambda fault: self._called("failed", fault),
            ),
        )  # fmt: skip

    def expect(self, name: str) -> object:
        called, what = self.calls.get(timeout=PATIENCE_S)
        assert called == name
        return what

    def _serve(self, channel: Channel) -> None:
        self._called("serve", channel)
        channel.receive_header()
        if self.fault is not None:
            raise self.fault
        while True:
            channel.receive_header()

    def _down(self, error: RallypointError) -> None:
        self._called("down", error)
        if self.fault_when_down is not None:
            raise self.fault_when_down

    def _called(self, name: str, what: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.put((name, what))


@pytest.fixture(params=["tcp", "inproc"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return TcpTransport() if request.param == "tcp" else InprocTransport()


@pytest.fixture
def host(transport: Transport) -> Iterator[Host]:
    host = Host(transport, "127.0.0.1:0")
    yield host
    host.close()


@pytest.fixture
def caller(transport: Transport, host: Host) -> Iterator[Caller]:
    caller = Caller(transport, host.address)
    yield caller
    caller.dialer.close()


def test_it_introduces_itself_and_tells_the_newest_view(transport: Transport, host: Host) -> None:
    number = ViewNumber(2, 1)
    caller = Caller(transport, host.address, view=lambda: number)
    caller.dialer.start()
    there, hello = host.next()
    assert (hello.role, hello.id, hello.view) == ("worker", "worker0", ViewNumber(2, 1))
    number = ViewNumber(2, 2)
    there.connection.close()
    assert host.next()[1].view == ViewNumber(2, 2)
    caller.dialer.close()


def test_it_comes_back_whenever_it_is_lost(host: Host, caller: Caller) -> None:
    caller.dialer.start()
    for _ in range(4):
        there, _ = host.next()
        channel = caller.expect("up")
        assert caller.expect("serve") is channel
        assert caller.dialer.trouble == ""
        there.connection.close()
        assert isinstance(caller.expect("down"), LinkError)
    assert caller.threads == {"link to server0"}


def test_connections_that_break_at_once_are_not_made_again_without_a_pause(host: Host, caller: Caller) -> None:
    began = time.monotonic()
    caller.dialer.start()
    for _ in range(5):
        host.next()[0].connection.close()
    host.next()
    assert time.monotonic() - began > 0.8  # at least its first five pauses


def test_when_it_is_down_nothing_of_the_channel_runs_any_more(host: Host, caller: Caller) -> None:
    caller.dialer.start()
    there, _ = host.next()
    channel = caller.expect("up")
    assert isinstance(channel, Channel)
    sent = threading.Event()
    bulk = memoryview(bytes(32 << 20))  # more than any buffer on the way holds
    channel.send(Header(Kind.PUSH, length=len(bulk)), bulk, sent.set)
    caller.expect("serve")
    assert not sent.is_set()
    there.connection.close()
    caller.expect("down")
    assert sent.is_set()
    assert not channel._thread.is_alive()


@pytest.mark.parametrize("fault", [ProtocolError("a frame that has no business here"), AccessDenied("shown out")])
def test_a_fault_in_what_came_is_told_and_it_dials_again(host: Host, caller: Caller, fault: RallypointError) -> None:
    caller.fault = fault
    caller.dialer.start()
    for _ in range(2):
        there, _ = host.next()
        caller.expect("up")
        caller.expect("serve")
        there.send(Header(Kind.CREDIT))
        assert caller.expect("down") is fault


def test_nobody_there_is_no_reason_to_give_up(transport: Transport, host: Host) -> None:
    host.close()
    caller = Caller(transport, host.address)
    caller.dialer.start()
    until_trouble(caller, host.address)
    assert caller.calls.empty(), "a connection that never stood cannot be lost"
    again = Host(transport, host.address)
    again.next()
    caller.expect("up")
    caller.dialer.close()
    again.close()


def test_a_host_that_restarts_is_found_again(transport: Transport, host: Host, caller: Caller) -> None:
    caller.dialer.start()
    caller.expect("up")
    caller.expect("serve")
    host.close()
    caller.expect("down")
    until_trouble(caller, host.address)
    again = Host(transport, host.address)
    again.next()
    caller.expect("up")
    caller.expect("serve")
    caller.dialer.close()
    again.close()


def test_a_refusal_is_why_there_is_no_connection(transport: Transport) -> None:
    host = Host(transport, "127.0.0.1:0", secret=b"of a server with the same name")
    caller = Caller(transport, host.address)
    caller.dialer.start()
    until_trouble(caller, "refuses worker worker0 without proving that it knows the ticket of worker worker0")
    caller.dialer.close()
    assert caller.calls.empty()
    host.close()


@pytest.mark.parametrize("state", ["not started", "dialling", "up"])
def test_closing_ends_the_thread_and_calls_nothing_any_more(transport: Transport, state: str) -> None:
    host = Host(transport, "127.0.0.1:0")
    if state == "dialling":
        host.close()
    caller = Caller(transport, host.address)
    if state != "not started":
        caller.dialer.start()
    if state == "dialling":
        until_trouble(caller, host.address)
    if state == "up":
        caller.expect("up")
        caller.expect("serve")
    caller.dialer.close()
    caller.dialer.close()
    assert has_ended(caller)
    assert caller.calls.empty(), "its owner has closed it: that is no news"
    host.close()


def test_closing_again_and_again_in_the_middle_of_dialling_hangs_never(transport: Transport) -> None:
    host = Host(transport, "127.0.0.1:0")
    for _ in range(50):
        caller = Caller(transport, host.address)
        caller.dialer.start()
        caller.dialer.close()
        assert has_ended(caller)
    host.close()


def has_ended(caller: Caller) -> bool:
    thread = caller.dialer._thread
    if thread.ident is not None:
        thread.join(PATIENCE_S)
    return not thread.is_alive()


class Slow:
    """A transport whose `connect` takes as long as the test wants, as to a host that has died."""

    secure = False

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.connecting, self.goes_on = threading.Semaphore(0), threading.Event()

    def connect(self, address: str, timeout: float) -> Connection:
        self.connecting.release()
        assert self.goes_on.wait(PATIENCE_S)
        return self.transport.connect(address, timeout)

    def listen(self, address: str) -> Listener:
        return self.transport.listen(address)

    def private(self, address: str) -> bool:
        return self.transport.private(address)


def test_closing_does_not_wait_for_an_attempt_to_connect(transport: Transport, host: Host) -> None:
    slow = Slow(transport)
    caller = Caller(slow, host.address)
    caller.dialer.start()
    assert slow.connecting.acquire(timeout=PATIENCE_S)
    (closes := threading.Thread(target=caller.dialer.close)).start()
    closes.join(PATIENCE_S / 2)
    closed = not closes.is_alive()
    slow.goes_on.set()
    closes.join(PATIENCE_S)
    assert closed
    assert has_ended(caller)
    assert caller.calls.empty(), "a connection that comes after that is nobody's"


def test_closing_waits_until_nothing_of_the_connection_is_used_any_more(
    transport: Transport, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(transport, host.address)
    serves, goes_on, order = threading.Event(), threading.Event(), []

    def serve(channel: Channel) -> None:
        serves.set()
        assert goes_on.wait(PATIENCE_S)
        order.append("the last byte has landed")

    def close() -> None:
        caller.dialer.close()
        order.append("closed")

    calls = dataclasses.replace(caller.dialer._calls, serve=serve)
    monkeypatch.setattr(caller.dialer, "_calls", calls)
    caller.dialer.start()
    assert serves.wait(PATIENCE_S)
    (closes := threading.Thread(target=close)).start()
    assert caller.dialer._closed.wait(PATIENCE_S)
    goes_on.set()
    closes.join(PATIENCE_S)
    assert order == ["the last byte has landed", "closed"]
    assert has_ended(caller)


def until_trouble(caller: Caller, words: str) -> None:
    """Until the dialer says why it has no connection."""
    until(lambda: words in caller.dialer.trouble, lambda: f"no such trouble: {caller.dialer.trouble}")


def test_a_fault_in_what_is_received_is_told_and_the_link_is_made_again(
    host: Host, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that ends unseen would leave everybody waiting for what it should have received."""
    caller.fault = RuntimeError("a bug in a codec")  # type: ignore[assignment]
    caller.dialer.start()
    for _ in range(2):
        there, _ = host.next()
        caller.expect("up")
        caller.expect("serve")
        there.send(Header(Kind.CREDIT))
        error = caller.expect("down")
        assert isinstance(error, ProtocolError)
        assert str(error) == "what server0 sent could not be taken: RuntimeError('a bug in a codec')"
    caller.dialer.close()
    assert {entry.message for entry in caplog.records} == {"the link to server0 has failed"}


def test_a_peer_that_answers_can_be_reached_and_one_that_does_not_cannot(host: Host, caller: Caller) -> None:
    assert caller.dialer.unreachable() > 0.0
    caller.dialer.start()
    host.next()
    caller.expect("up")
    assert caller.dialer.unreachable() == 0.0
    host.close()
    caller.expect("serve")
    caller.expect("down")
    assert caller.dialer.unreachable() > 0.0


def test_a_peer_that_is_lost_was_there_until_then_at_every_moment_of_the_loss(
    host: Host, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats say for how long it could not be reached, from a thread of their own."""
    seen: list[float] = []

    def set_and_look(watched: Dialer, name: str, value: object) -> None:
        object.__setattr__(watched, name, value)
        if name == "_up_at" and value == 0.0:
            seen.append(watched.unreachable())

    caller.dialer.start()
    channel, _ = host.next()
    caller.expect("up")
    caller.dialer._lost_at -= 1000.0  # the connection has stood for so long
    monkeypatch.setattr(Dialer, "__setattr__", set_and_look)
    channel.connection.close()
    caller.expect("serve")
    caller.expect("down")
    assert seen[0] < 1000.0


def test_a_peer_whose_connections_do_not_hold_cannot_be_reached_although_it_answers(
    host: Host, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller.dialer.start()
    began = time.monotonic()
    for _ in range(2):
        host.next()[0].connection.close()
        for call in ("up", "serve", "down"):
            caller.expect(call)
    caller.expect("up")
    assert caller.dialer.unreachable() > 0.0
    assert caller.dialer.unreachable() <= time.monotonic() - began
    monkeypatch.setattr(dialer, "_HOLDS_S", 0.0)  # this one has held for long enough
    assert caller.dialer.unreachable() == 0.0


def test_a_fault_while_the_loss_is_told_is_told_in_its_turn(
    host: Host, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """The dialer ends: nobody knows what state its owner is in."""
    caller.fault_when_down = KeyError("a bug")
    caller.dialer.start()
    there, _ = host.next()
    caller.expect("up")
    caller.expect("serve")
    there.connection.close()
    caller.expect("down")
    assert caller.expect("failed") is caller.fault_when_down
    caller.dialer._thread.join(PATIENCE_S)
    assert not caller.dialer._thread.is_alive()
    assert [entry.message for entry in caplog.records] == ["the link to server0 has failed"]


def test_a_fault_while_it_dials_is_told(transport: Transport, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    fault = KeyError("a bug")
    caller = Caller(transport, host.address, raising(fault))
    caller.dialer.start()
    assert caller.expect("failed") is fault
    assert caller.dialer.trouble == "it has failed: KeyError('a bug')"
    caller.dialer.close()
