"""The links from an aggregator to the servers of its view."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.core.shard.links import Key, PeerLinks
from rallypoint.core.view import Member, View
from rallypoint.errors import ProtocolError, RallypointError
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import Credentials
from rallypoint.net.pool import Buffer
from rallypoint.net.transport import Transport
from rallypoint.observe.trace import Tracer
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Views
from rallypoint.server.reducer import inbox as of_servers
from rallypoint.worker.exchange.links import ServerLink

# The events that other threads put into the relay's inbox: those of a server's workers, and what servers send.


@dataclass(frozen=True, slots=True)
class ServerUp:
    """The link to a server is up."""

    server: Member


@dataclass(frozen=True, slots=True)
class ServerLost:
    """The link to a server is lost."""

    server: Member


@dataclass(frozen=True, slots=True)
class Arrived:
    """A server sent a version; the payload is as the header says, encoded perhaps."""

    header: Header
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Ticked:
    """The time is `now`, in seconds."""

    now: float


Event = ServerUp | ServerLost | Arrived | Ticked | of_servers.Event


_CODEC_HEAD = 4096  # bytes beside the values that a codec may need for a small shard


class Upstream:
    """The links, by server. The coordinator's link calls `adopt`; the owner's thread looks links up.

    `failed` is called with a fault of our own that has ended a link.
    """

    def __init__(
        self, credentials: Credentials, job: ServerJob, views: Views, put: Callable[[Event | None], None],
        *, transport: Transport, tracer: Tracer, failed: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._credentials, self._job, self._views, self._put, self._failed = credentials, job, views, put, failed
        self._transport, self._tracer = transport, tracer
        self._wanted = PeerLinks(credentials.me.id, decides=True)  # every server of the view
        self._links: dict[Key, ServerLink] = {}
        self._receivers: dict[Key, _FromServer] = {}
        self._by_id: dict[str, ServerLink] = {}

    def adopt(self, view: View) -> None:
        """Close the links that the view no longer needs, and open the new ones."""
        gone, new = self._wanted.adopt(view)
        for key in gone:
            link = self._links.pop(key)
            if self._by_id.get(key[0]) is link:
                del self._by_id[key[0]]
            self._receivers.pop(key).let_go()
            link.close()
        for member in new:
            key = (member.id, member.incarnation)
            receiver = self._receivers[key] = _FromServer(member, self._job, self._views, self._put, self._failed)
            link = ServerLink(
                transport=self._transport, server=member, credentials=self._credentials, window=self._job.config.window,
                receiver=receiver, view=lambda: self._views.number, tracer=self._tracer,
            )  # fmt: skip
            # Which blocks are early may change with each view: the server keeps no credit back for long (see
            # `ServerLink.overdraw`), and what is under way is bounded: one block for each part of a sum.
            link.overdraw(True)
            self._links[key] = self._by_id[member.id] = link
            link.start()

    def get(self, server: str) -> ServerLink | None:
        """The link to that server; None if there is none any more."""
        return self._by_id.get(server)

    def unreachable(self) -> dict[str, float]:
        """The servers that cannot be reached -> seconds. Any thread may call it."""
        missed = {key[0]: link.unreachable() for key, link in list(self._links.items())}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()


class _FromServer:
    """The `Receiver` of one link: puts whole versions into the inbox. Every method runs on that link's thread."""

    def __init__(
        self, server: Member, job: ServerJob, views: Views, put: Callable[[Event | None], None],
        failed: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._server, self._job, self._views, self._put, self._failed = server, job, views, put, failed
        self._header: Header | None = None
        self._buffer: Buffer | None = None
        self._let_go = threading.Event()

    def let_go(self) -> None:
        """The link is about to be closed: wait for no view any more. Any thread may call it, also the one that brings
        the views: `ServerLink.close` waits for this link's thread."""
        self._views.end_wait(self._let_go)

    def arriving(self, header: Header, server: str) -> memoryview | None:
        if header.shard >= len(self._job.shards):
            raise ProtocolError(f"a version of shard {header.shard}: this job has {len(self._job.shards)}")
        place = self._job.shards[header.shard]
        if header.length > 2 * place.slot_bytes + _CODEC_HEAD or (not header.codec and header.length > place.nbytes):
            raise ProtocolError(f"a version of {header.length} bytes for shard {header.shard}")
        self._release()  # of a connection that broke halfway
        fits = header.length <= 4 * self._job.record.layout.largest_shard
        self._buffer = self._job.pool.take() if fits else self._job.pools.take(header.length)
        self._header = header
        return self._buffer.bytes[: header.length]

    def decode(self, shard: int, payload: memoryview) -> None:
        """An encoded version goes to the workers as it is."""
        assert self._buffer is not None
        self._buffer.bytes[: len(payload)] = payload

    def landed(self, shard: int) -> None:
        assert self._header is not None
        assert self._buffer is not None
        self._views.wait_for(self._header.view, self._let_go)
        if self._let_go.is_set():
            self._release()
            return
        self._put(Arrived(self._header, self._buffer))
        self._header = self._buffer = None

    def link_up(self, server: Member) -> None:
        self._put(ServerUp(server))

    def link_lost(self, server: Member, error: RallypointError) -> None:
        self._release()
        self._put(ServerLost(server))

    def link_failed(self, server: Member, fault: Exception) -> None:
        self._failed(fault)

    def state(self, header: Header, data: bytearray, server: str) -> None:
        """The state with which a generation begins: workers that need it ask the servers themselves."""

    def _release(self) -> None:
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None

    # ---- what no server sends to who has no replica of its own ----

    def rows(self, header: Header, data: bytearray) -> None:
        raise ProtocolError(_strange(header.kind))

    def words_arriving(self, header: Header) -> memoryview | None:
        raise ProtocolError(_strange(header.kind))

    def words_arrived(self, header: Header) -> None:
        raise ProtocolError(_strange(header.kind))

    def to_wait(self, replica: int, clock: int) -> None:
        raise ProtocolError(_strange(Kind.WAIT))

    def check_codec_state(self, header: Header) -> None:
        raise ProtocolError(_strange(header.kind))

    def codec_state(self, header: Header, data: bytearray) -> None:
        raise ProtocolError(_strange(header.kind))

    def codec_state_taken(self, header: Header) -> None:
        raise ProtocolError(_strange(header.kind))


def _strange(kind: Kind) -> str:
    return f"a {kind.name} frame for an aggregator"
