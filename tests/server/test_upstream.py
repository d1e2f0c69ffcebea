"""An aggregator's links to the servers of its view."""

from __future__ import annotations

import threading

import msgspec
from one_server import CONFIG, LAYOUT

from rallypoint.aggregator import Event, ServerUp, Upstream
from rallypoint.config import record_of
from rallypoint.core.protocol import Hello, Welcome
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import Credentials, Identity, ticket_for
from rallypoint.net.transport import InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Views
from support.beside import until

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
        adopts = threading.Thread(target=upstream.adopt, args=(without,), daemon=True)
        adopts.start()
        adopts.join(PATIENCE_S)
        assert not adopts.is_alive(), "the thread that brings the views waits for one that waits for a view"
        assert came == [ServerUp(server)]
    finally:
        views.end(None)
        upstream.close()
        gate.close()
