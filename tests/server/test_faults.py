"""A fault of a server's own threads ends the job with a sentence: nobody else would know why frames do not come. And
its owner's thread computes as the job says.
"""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from one_server import CONFIG, FIRST, LAYOUT, OneServer

from rallypoint.aggregator import AggregatorService, Event, ServerUp, Upstream
from rallypoint.config import record_of
from rallypoint.core.protocol import GiveUp, Hello, Leaving, Message, Welcome
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.data.loader import one_thread
from rallypoint.errors import LinkError, ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Credentials, Identity, ticket_for
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox, member
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Views
from rallypoint.server.service import Peers, ServerService
from support.beside import until

FAULT = KeyError("a bug")
BROKEN: Any = SimpleNamespace(fault=FAULT, name="w")


def test_what_could_not_be_sent_to_a_worker_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(channel: Any, worker: str) -> None:
        raise ProtocolError("what was queued for w could not be sent")

    said: list[Message] = []
    server: Any = ServerService(id="s", coordinator="nobody:1", transport=InprocTransport())
    monkeypatch.setattr(server, "_intake", SimpleNamespace(receive_from_worker=receive), raising=False)
    monkeypatch.setattr(server, "_links", SimpleNamespace())
    monkeypatch.setattr(server._views, "wait_for", lambda number: None)
    server._link = SimpleNamespace(send=said.append)
    with pytest.raises(ProtocolError):
        server._serve(BROKEN, Hello("worker", "w", "here", b""))
    server._owner.stop()
    assert said == [GiveUp("server s failed: KeyError: 'a bug'")]
    assert server.wait() == "server s failed: KeyError: 'a bug'"


@pytest.mark.parametrize("role", [ServerService, AggregatorService])
def test_one_that_cannot_listen_leaves_no_thread(role: Any) -> None:
    transport = InprocTransport()
    taken, before = transport.listen("s:1"), set(threading.enumerate())
    with pytest.raises(RallypointError):
        role(id="s", coordinator="nobody:1", bind=taken.address, transport=transport).start()
    assert set(threading.enumerate()) == before
    taken.close()


def test_what_could_not_be_sent_to_another_server_ends_the_job() -> None:
    put: list[inbox.Event | None] = []
    failed: list[Exception] = []
    peers = Peers(
        Views(), put.append, transport=InprocTransport(), tracer=Tracer("s"),
        credentials=Credentials(Identity("server", "s")), failed=failed.append, always=False,
    )  # fmt: skip
    other = Member("s1", "there", "s1:1", 2)
    calls = peers._opened(other)._calls
    calls.up(BROKEN)
    calls.down(LinkError("cut"))
    assert put == [inbox.PeerLinked(other, BROKEN), inbox.PeerLost("s1", BROKEN)]
    assert failed == [FAULT]


def test_a_connection_that_another_one_of_its_worker_replaces_is_closed() -> None:
    """It may be the real worker's: closed, it comes again, follows again and asks again. Left open, it would wait."""
    closed: list[int] = []

    def channel(number: int) -> Any:
        close = lambda: closed.append(number)  # noqa: E731
        return SimpleNamespace(number=number, name="w", connection=SimpleNamespace(close=close))

    server = OneServer()
    server.adopt(FIRST)
    for number in (1, 3, 2):  # 2 is late: what waited for the view is told in either order
        server.reducer.handle(inbox.Linked(channel(number), "w"))
    assert closed == [1]


def test_an_owner_that_begins_while_samples_are_loaded_computes_with_the_job_s_threads() -> None:
    """A thread's first computation in torch takes the number of threads that the process has then, for ever; sums
    depend on it. Embedded, the loop's main thread loads samples with one thread, beside it.
    """
    server, began, loaded, threads, before = (
        OneServer(), threading.Event(), threading.Event(), list[int](), torch.get_num_threads()
    )  # fmt: skip
    server.job.record = msgspec.structs.replace(server.job.record, threads=2)

    def own() -> None:
        server.adopt(FIRST)
        torch.zeros(1 << 17).sum()
        began.set()
        assert loaded.wait(30.0)
        threads.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        owner = threading.Thread(target=own)
        with one_thread():
            owner.start()
            assert began.wait(30.0)
        loaded.set()
        owner.join(30.0)
        assert (threads, torch.get_num_threads()) == ([2], 2)
    finally:
        torch.set_num_threads(before)


# ---- An aggregator's links to the servers of its view ----


PATIENCE_S = 60.0
SECRET = b"the server's secret"


def test_a_server_that_is_ahead_by_a_view_does_not_keep_the_aggregator_from_the_view_without_it() -> None:
    """What the server has sent waits for a view that comes after the one that ends its link."""
    transport, views = InprocTransport(), Views()
    nbytes = LAYOUT.shards[0].nbytes

    def serve(channel: Channel, hello: Hello) -> None:
        header = Header(Kind.VERSION, ViewNumber(1, 3), step=1, length=nbytes)
        channel.send(header, memoryview(bytes(nbytes)))
        channel.receive_header()

    me = Identity("server", "s", incarnation=1, secret=SECRET)
    gate = Gate(transport, "s:1", me, lambda hello: Welcome(), serve)
    server = Member("s", "here", gate.address, 1)
    first = View(ViewNumber(1, 1), ViewNumber(1, 1), (), (server,), (), {0: "s"}, {})
    credentials = Credentials(Identity("aggregator", "a"))
    credentials.admitted(2, b"")
    credentials.given(first, {"s": ticket_for(SECRET, "aggregator", "a", 2)})
    came: list[Event | None] = []
    upstream = Upstream(
        ServerJob(record_of(CONFIG, LAYOUT), CONFIG), views, came.append, transport=transport, credentials=credentials,
        tracer=Tracer("a"), failed=lambda error: None,
    )  # fmt: skip
    views.adopt(first)
    upstream.adopt(first)
    try:
        until(lambda: bool(views._changed._waiters))  # type: ignore[attr-defined]
        without = msgspec.structs.replace(first, number=ViewNumber(1, 2), servers=())
        (adopts := threading.Thread(target=upstream.adopt, args=(without,), daemon=True)).start()
        adopts.join(PATIENCE_S)
        assert not adopts.is_alive(), "the thread that brings the views waits for one that waits for a view"
        assert came == [ServerUp(server)]
    finally:
        views.end(None)
        upstream.close()
        gate.close()


# ---- A server that is told to go says so to its coordinator until it may ----


PATIENCE_S = 60.0


def test_a_notice_that_comes_before_the_server_has_joined_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()

    class _Link:
        """A link to a coordinator that hears what is said."""

        welcome = Welcome()

        def __init__(self, **_: Any) -> None:
            self.send = said.put

        def start(self) -> None:
            """Nothing comes."""

        def close(self) -> None:
            """There is nothing to close."""

    monkeypatch.setattr(member, "CoordinatorLink", _Link)
    server = ServerService(id="s", coordinator="127.0.0.1:1")
    server.leave()  # SIGTERM, while it looks for its coordinator
    server.start()
    try:
        assert said.get(timeout=PATIENCE_S) == Leaving()
    finally:
        server.close()
