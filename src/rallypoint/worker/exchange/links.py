"""One worker's links to all servers of a view."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rallypoint.config import JobConfig, audits_of, paces_by_port
from rallypoint.core.protocol import Refused, expect
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.errors import AccessDenied, ProtocolError, RallypointError
from rallypoint.net.channel import Channel, Rank
from rallypoint.net.dialer import Calls, dialer_over
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.handshake import Credentials
from rallypoint.net.transport import Limits, Transport
from rallypoint.observe.trace import Tracer
from rallypoint.observe.waits import SharedCores

# The link from a worker to one server: sends pushes under a credit window, receives versions into their slots.


AGGREGATOR_SILENT_S = 2.0  # an aggregator gives a sign of life far more often: one that does not, hangs
_NOTHING = memoryview(b"")


class Receiver:
    """Gets what arrives on a link, and changes of the link itself. All methods run on the link's receiving thread.

    A ProtocolError from any of them ends the link, and then the job with that message: so do frames for a method that a
    receiver leaves as it is here.
    """

    def arriving(self, header: Header, server: str) -> memoryview | None:
        """Return the bytes where this version, which `server` sends, belongs; None to read and drop it.

        ProtocolError for an impossible version.
        """
        raise NotImplementedError

    def landed(self, shard: int) -> None:
        """The version that `arriving` accepted is complete."""

    def link_up(self, server: Member) -> None:
        """The link is connected (again)."""

    def link_lost(self, server: Member, error: RallypointError) -> None:
        """The link has ended and touches no slot any more. It will reconnect."""

    def link_failed(self, server: Member, fault: Exception) -> None:
        """A fault of our own has ended the link for good."""

    def decode(self, shard: int, payload: memoryview) -> None:
        """Decode the payload of the version that `arriving` accepted. ProtocolError if it cannot be read."""
        raise ProtocolError(f"an encoded value of shard {shard}: here they are raw")

    def rows(self, header: Header, data: bytearray) -> None:
        """Take the rows that were pulled, or the answer that the server does not keep that version any more."""
        raise _strange(header.kind)

    def words_arriving(self, header: Header) -> memoryview | None:
        """Return the bytes where words that were pulled belong; None to read and drop them. ProtocolError if they
        cannot be what was asked for."""
        raise _strange(header.kind)

    def words_arrived(self, header: Header) -> None:
        """The words that were pulled are complete, or the answer is that the server does not keep that version."""

    def to_wait(self, replica: int, clock: int) -> None:
        """Report that a replica's next step must wait for replicas that are behind."""
        raise _strange(Kind.WAIT)

    def state(self, header: Header, data: bytearray, server: str) -> None:
        """Take a shard's whole state, where workers hold states. ProtocolError if it cannot be read."""
        raise _strange(header.kind)

    def check_codec_state(self, header: Header) -> None:
        """Raise ProtocolError unless this frame is a valid codec state of that shard, or says that there is none."""
        raise _strange(header.kind)

    def codec_state(self, header: Header, data: bytearray) -> None:
        """Take a replica's codec state that was asked for. ProtocolError if it cannot be read."""

    def codec_state_taken(self, header: Header) -> None:
        """The server has confirmed the codec state that was sent."""
        raise _strange(header.kind)


def _strange(kind: Kind) -> ProtocolError:
    return ProtocolError(f"a {kind.name} frame, and there is nothing here that it could be for")


class QueuedFrame(NamedTuple):
    """A contribution, or a request, that waits for its turn, or for credit. Compared by its first two fields: they
    differ."""

    rank: Rank
    number: int
    header: Header
    payload: memoryview
    sent: Callable[[], None]


class ServerLink:
    """Keeps a connection of `me` to one server, from threads of its own, from `start` until `close`.

    A worker's link to its aggregator is one too (`role`): to a worker an aggregator looks like a server. The link ends
    when nothing comes from it for AGGREGATOR_SILENT_S, or it reads nothing for so long: the worker can do without it.

    At most `window` contributions are on their way without the server's credit. That bounds the server's memory, and
    keeps many workers from flooding one server's switch port at once (incast).
    """

    def __init__(
        self, *, transport: Transport, server: Member, credentials: Credentials, window: int, receiver: Receiver,
        view: Callable[[], ViewNumber], tracer: Tracer, role: str = "server",
    ) -> None:  # fmt: skip
        self.server, self.role = server, role
        self._window = window
        self._receiver, self._tracer = receiver, tracer
        self._channel: Channel | None = None
        self._credits, self._limits = 0, Limits()
        self._overdraws = False
        self._busy = False  # the channel has a contribution that it has not sent
        self._feeding = False  # a thread gives the channel what may leave
        self._waiting: list[QueuedFrame] = []  # a heap
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._scratch = memoryview(b"")
        self._dialer = dialer_over(
            transport, peer=server, credentials=credentials, tracer=tracer,
            calls=Calls(view, self._up, self._receive_all, self._down, self._failed),
        )  # fmt: skip

    def start(self) -> None:
        self._dialer.start()

    @property
    def trouble(self) -> str:
        """Why there is no connection now; "" while there is one."""
        return self._dialer.trouble

    def unreachable(self) -> float:
        """Seconds for which the server could not be reached; 0.0 while it can."""
        return self._dialer.unreachable()

    def push(self, header: Header, payload: memoryview, sent: Callable[[], None], rank: Rank = ()) -> None:
        """Queue a contribution; those of a lower rank overtake it until it is being sent. `sent` is called when its
        bytes may be reused.

        It is also called when the link is lost.
        """
        with self._lock:
            lost = self._channel is None
            if not lost:
                heapq.heappush(self._waiting, QueuedFrame(rank, next(self._numbers), header, payload, sent))
        if lost:
            sent()  # `link_lost` makes the machine send it again
        else:
            self._feed()

    def reorder(self, ranks: Sequence[int]) -> None:
        """Send what waits by these ranks, by shard."""
        with self._lock:
            self._waiting = [
                one._replace(rank=(*one.rank[:2], ranks[one.header.shard])) if one.rank else one
                for one in self._waiting
            ]
            heapq.heapify(self._waiting)

    def overdraw(self, on: bool) -> None:
        """Send without credits (`on`), also what waits for some; or keep to the window again.

        A server keeps the credit of an early block back while lower replicas are missing. When this worker is to
        compute them, mid-step, it must not wait for that credit.
        """
        with self._lock:
            self._overdraws = on
        self._feed()

    def fetch(self, shard: int, version: int, number: ViewNumber) -> None:
        """Ask for one version of a shard again."""
        self.pull(Header(Kind.FETCH, number, shard=shard, step=version))

    def pull(self, header: Header, payload: memoryview | None = None) -> None:
        """Ask for something, as rows of one part of a table. The request is lost with the link."""
        if (channel := self._channel) is not None:
            channel.send(header, payload, urgent=True)

    def want(self, shard: int, replica: int, number: ViewNumber) -> None:
        """Ask for the parameters of a replica's next step, after all contributions that are queued (they ask too)."""
        with self._lock:
            if self._channel is None:
                return
            header = Header(Kind.WANT, number, shard=shard, wants=wants(replica))
            heapq.heappush(self._waiting, QueuedFrame((), next(self._numbers), header, _NOTHING, nothing))
        self._feed()

    def send_codec_state(self, header: Header, payload: memoryview | None = None) -> None:
        """Send a codec state or a request for one, in the order of the calls. It is lost with the link."""
        if (channel := self._channel) is not None:
            channel.send(header, payload)

    def follow(self, number: ViewNumber, *, on: bool, step: int = 0) -> None:
        """Ask for every shard's newest version and each one that follows; with ``on=False`` stop that.

        `step` is for an aggregator: see `core.worker.slots.Follow`.
        """
        self.pull(Header(Kind.FOLLOW if on else Kind.UNFOLLOW, number, step=step))

    def limit(self, limits: Limits) -> None:
        """Limit, approximately, the bytes of versions that are on their way to this worker at once, and the rate at
        which it sends."""
        with self._lock:
            before, self._limits = self._limits, limits
            if self._channel is not None:
                limits.set_on(self._channel.connection, before)

    def close(self) -> None:
        """End the link and its threads, and drop what waits for credit.

        Do not call it under a lock that `sent` takes.
        """
        self._dialer.close()
        self._let_go()

    # ---- the dialer's thread ----

    def _up(self, channel: Channel) -> None:
        with self._lock:
            self._channel, self._credits, self._busy = channel, self._window, False
            self._limits.set_on(channel.connection)
        if self.role == "aggregator":
            channel.connection.set_timeout(AGGREGATOR_SILENT_S)
        self._receiver.link_up(self.server)

    def _down(self, error: RallypointError) -> None:
        self._let_go()
        self._receiver.link_lost(self.server, error)

    def _failed(self, fault: Exception) -> None:
        self._receiver.link_failed(self.server, fault)

    def _let_go(self) -> None:
        """Drop everything that waits for credit: there is no connection."""
        with self._lock:
            self._channel = None
            waiting, self._waiting = self._waiting, []
        for one in sorted(waiting):
            one.sent()

    def _receive_all(self, channel: Channel) -> None:
        while True:
            header = channel.receive_header()
            match header.kind:
                case Kind.VERSION:
                    self._receive_version(channel, header)
                case Kind.STATE:
                    self._receiver.state(header, channel.receive_bytes(header), self.server.id)
                case Kind.ROWS:
                    self._receiver.rows(header, channel.receive_bytes(header))
                case Kind.WORDS:
                    self._receive_words(channel, header)
                case Kind.CREDIT:
                    self._credit(channel, header.replica)
                case Kind.CODEC_STATE:
                    self._receiver.check_codec_state(header)
                    self._receiver.codec_state(header, channel.receive_bytes(header))
                case Kind.TAKEN:
                    self._receiver.codec_state_taken(header)
                case Kind.WAIT if header.wanted is not None:
                    self._receiver.to_wait(header.wanted, header.base)
                case Kind.REFUSE:
                    reason = expect(channel.receive_bytes(header), Refused).reason
                    raise AccessDenied(f"{self.role} {self.server.id} ({self.server.address}) ended the link: {reason}")
                case _:
                    raise ProtocolError(f"a {header.kind.name} frame from server {self.server.id}")

    def _receive_words(self, channel: Channel, header: Header) -> None:
        if (place := self._receiver.words_arriving(header)) is None:
            channel.receive_bytes(header)
            return
        channel.receive_into(place)
        self._receiver.words_arrived(header)

    def _receive_version(self, channel: Channel, header: Header) -> None:
        place = self._receiver.arriving(header, self.server.id)
        if place is None or header.codec:
            if len(self._scratch) < header.length:
                self._scratch = memoryview(bytearray(header.length))
            payload = self._scratch[: header.length]
            channel.receive_into(payload)
            if place is None:
                return
            self._receiver.decode(header.shard, payload)
        elif self._tracer.on:
            with self._tracer.span("pull", shard=header.shard, version=header.step):
                channel.receive_into(place)
        else:
            channel.receive_into(place)
        self._receiver.landed(header.shard)

    def _credit(self, channel: Channel, count: int) -> None:
        with self._lock:
            if count > self._window - self._credits:
                out = self._window - self._credits
                raise ProtocolError(f"server {self.server.id} gives {count} credits for {out} contributions")
            self._credits += count
            more = bool(self._waiting)
        if more:
            self._feed()

    def _feed(self) -> None:
        """Give the channel what may leave now: at most one contribution, so that others can still overtake the rest.
        Requests need no credit, but keep their place among the contributions (none has a rank where there are any)."""
        while True:
            ready = []
            with self._lock:
                channel = self._channel
                if self._feeding or channel is None:
                    return  # whoever feeds looks again
                while self._waiting:
                    if self._waiting[0].header.kind is not Kind.WANT:
                        if self._busy or not (self._overdraws or self._credits > 0):
                            break
                        self._credits -= 1
                        self._busy = True
                    ready.append(heapq.heappop(self._waiting))
                if not ready:
                    return
                self._feeding = True
            try:
                for one in ready:
                    left = partial(self._left, channel, one.header.kind)
                    channel.send(one.header, one.payload, one.sent, rank=one.rank, left=left)
            finally:
                with self._lock:
                    self._feeding = False

    def _left(self, channel: Channel, kind: Kind) -> None:
        """The channel has sent one, or never will. Called on its sending thread, which sends the next one at once."""
        with self._lock:
            if self._channel is channel and kind is not Kind.WANT:
                self._busy = False
            more = bool(self._waiting)
        if more:
            self._feed()


def nothing() -> None:
    """For requests and rows: their bytes are not reused."""


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """What an exchange needs from its process."""

    credentials: Credentials
    transport: Transport
    tracer: Tracer
    say: Callable[[str], None]
    cores: SharedCores | None = None
    changed: Callable[[], threading.Condition] = threading.Condition  # makes what its threads wait on
    clock: Callable[[], float] = time.monotonic

    @property
    def me(self) -> str:
        return self.credentials.me.id


class Links:
    """The connections that the shell asks for. `view` returns the number of the view in force.

    Links are opened and ended under the exchange's lock for views, one view at a time. Any thread may look one up.
    """

    def __init__(self, context: ExchangeContext, config: JobConfig, view: Callable[[], ViewNumber]) -> None:
        self._context, self._config, self._view = context, config, view
        self._links: dict[str, ServerLink] = {}
        self.get = self._links.get  # the link to that server; None if no view here has named it
        self._lock = threading.Lock()  # of what follows: the coordinator's thread and the main thread change it
        self._overdraws = False
        self._overdrawn_step = -1
        self._audits = audits_of(config)

    def open(self, servers: Iterable[Member], receiver: Receiver, view: View) -> None:
        """Start to connect to these servers and aggregators of `view`. `receiver` gets what arrives."""
        config = self._config
        measured = paces_by_port(config) and view.workers_by_port()
        limits = Limits.of(
            view.in_flight(config.network.in_flight_bytes), view.paced(config.network.pace_mbit), measured=measured
        )
        equal = limits.shared(len(view.servers))
        shares = {server: limits.shared(len(view.servers), part) for server, part in view.port_parts().items()}
        for name, link in self._links.items():
            link.limit(shares.get(name, equal))
        for server in servers:
            link = self._links[server.id] = ServerLink(
                transport=self._context.transport, server=server, credentials=self._context.credentials,
                window=self._config.network.window, receiver=receiver, view=self._view, tracer=self._context.tracer,
                role="aggregator" if server in view.aggregators else "server",
            )  # fmt: skip
            link.limit(shares.get(server.id, equal))
            with self._lock:
                link.overdraw(self._overdraws)
            link.start()  # last: what arrives at once looks up its link here

    def overdraw(self, step: int, *, rolled_back: bool = False) -> None:
        """Send without credits on every link, present or to come, until a version after `step` is installed."""
        with self._lock:
            self._overdrawn_step = step if rolled_back else max(step, self._overdrawn_step)
            self._switch(True)

    def installed(self, version: int) -> None:
        """The worker has installed `version`. Keep to the window again, unless links overdraw for that step too: they
        do if it is audited."""
        with self._lock:
            if self._audits is not None and self._audits.audited(version):
                # It sends lower replicas after its own: while they are missing, servers keep credit of higher ones back
                self._overdrawn_step = max(version, self._overdrawn_step)
                self._switch(True)
            elif version > self._overdrawn_step:
                self._switch(False)

    def _switch(self, on: bool) -> None:
        if on != self._overdraws:
            self._overdraws = on
            for link in list(self._links.values()):
                link.overdraw(on)

    def reorder(self, ranks: Sequence[int]) -> None:
        """Send what waits on every link by these ranks, by shard."""
        for link in list(self._links.values()):
            link.reorder(ranks)

    def end(self, servers: Iterable[str]) -> None:
        """End these links and their threads. After that they touch no slot."""
        for server in servers:
            self._links.pop(server).close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def unreachable(self) -> dict[str, float]:
        """The servers that cannot be reached -> seconds."""
        missed = {link.server.id: link.unreachable() for link in list(self._links.values())}
        return {server: seconds for server, seconds in missed.items() if seconds > 0}

    def describe(self, shards: Iterable[int], homes: Mapping[int, str]) -> str:
        """Name the servers that these shards come from, as a phrase."""
        counts: dict[str, int] = {}
        for shard in shards:
            counts[homes[shard]] = counts.get(homes[shard], 0) + 1
        return "; ".join(f"{n} shard{'s' * (n != 1)} from {self._name(home)}" for home, n in counts.items())

    def _name(self, server: str) -> str:
        link = self._links.get(server)
        if link is None:
            return f"server {server}"
        member = link.server
        return f"{link.role} {server} on {member.host} ({member.address}{', ' + link.trouble if link.trouble else ''})"
