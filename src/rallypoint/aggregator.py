"""The aggregator: merges the contributions of workers near it, sends fewer upstream, hands versions down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rallypoint.core import aggregator as machine
from rallypoint.core.aggregator import AggregatorMachine, AggregatorShell
from rallypoint.core.protocol import Hello, Say
from rallypoint.core.sums import Block
from rallypoint.core.view import Member
from rallypoint.errors import ProtocolError, RallypointError
from rallypoint.net.channel import Channel
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.observe.observed import observed
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox as of_servers
from rallypoint.server.held import newest_is_enough
from rallypoint.server.intake import Intake
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Handler, Key, ListeningMember, Receive, ServerLinks, Views
from rallypoint.server.reducer import bad_replicas
from rallypoint.worker.exchange.links import Receiver, ServerLink

# ---- The links from an aggregator to the servers of its view ----


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
class AggregatorTick:
    """The time is `now`, in seconds."""

    now: float


Event = ServerUp | ServerLost | Arrived | AggregatorTick | of_servers.Event


_CODEC_HEAD = 4096  # bytes beside the values that a codec may need for a small shard


class Upstream(ServerLinks):
    """The links to all servers. The owner's thread looks them up by the server."""

    def __init__(self, job: ServerJob, *about: Any, **settings: Any) -> None:
        super().__init__(*about, **settings)
        self._job = job
        self._receivers: dict[Key, _FromServer] = {}
        self._by_id: dict[str, ServerLink] = {}

    def _end(self, key: Key) -> None:
        if self._by_id.get(key[0]) is self._links[key]:
            del self._by_id[key[0]]
        self._receivers.pop(key).let_go()
        super()._end(key)

    def _opened(self, server: Member) -> ServerLink:
        receiver = _FromServer(server, self._job, self._views, self._put, self._failed)
        self._receivers[server.id, server.incarnation] = receiver
        self._by_id[server.id] = link = ServerLink(
            transport=self._transport, server=server, credentials=self._credentials,
            window=self._job.config.network.window,
            receiver=receiver, view=lambda: self._views.number, tracer=self._tracer,
        )  # fmt: skip
        # Which blocks are early may change with each view: the server keeps no credit back for long (see
        # `ServerLink.overdraw`), and what is under way is bounded: one block for each part of a sum.
        link.overdraw(True)
        return link

    def get(self, server: str) -> ServerLink | None:
        """The link to that server; None if there is none any more."""
        return self._by_id.get(server)


class _FromServer(Receiver):
    """Puts the whole versions of one link into the inbox. Every method runs on that link's thread."""

    def __init__(
        self, server: Member, job: ServerJob, views: Views, put: Callable[[Event | None], None],
        failed: Callable[[Exception], None],
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


# ---- Takes the events of an aggregator's inbox, asks the shell, and runs its effects on tensors and channels ----
#
# All of this runs on the owner's thread, as in a server (`server/reducer.py`).

_NAMED = 32  # a frame can name so many replicas of a block


class AggregatorRelay(Handler):
    """One aggregator's tensors and channels. Not thread-safe: only the owner thread calls it.

    `taken` and `sent` count the contributions that came from workers, and those that went upstream.

    Memory: at most one payload for each block of its workers' replicas, in each of at most two steps, and two versions.
    """

    def __init__(self, job: ServerJob, shell: AggregatorShell[Channel], upstream: Upstream, tracer: Tracer) -> None:
        self._job, self._shell, self._upstream, self._tracer = job, shell, upstream, tracer
        self._tickets: dict[int, tuple[Header, Buffer, Channel | None]] = {}
        self._last_ticket = self.taken = self.sent = 0
        self._parts: dict[tuple[int, int, int], Buffer] = {}  # by shard, step, first replica
        self._versions: dict[tuple[int, int], tuple[Header, Buffer]] = {}  # by shard, version
        self._newest_is_enough = newest_is_enough(job.config)
        self._handlers: dict[type, Callable[[Any], Iterable[machine.Effect]]] = {
            of_servers.Pushed: self._pushed,
            of_servers.Linked: lambda e: shell.linked(e.channel, e.worker),
            of_servers.Gone: lambda e: shell.gone(e.channel, e.peer),
            of_servers.Followed: lambda e: shell.followed(e.channel, e.worker, e.header.step, e.header.view),
            of_servers.UnfollowCame: lambda e: shell.unfollowed(e.channel, e.worker),
            of_servers.Fetched: lambda e: shell.fetched(e.channel, e.worker, e.shard, e.version),
            of_servers.ViewCame: lambda e: shell.adopt(e.view),
            ServerUp: lambda e: shell.server_up(e.server),
            ServerLost: lambda e: shell.server_lost(e.server),
            Arrived: self._arrived,
            AggregatorTick: self._ticked,
        }

    def handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is None:  # first weights, states and rows go to the servers
            _refuse(event)
            return
        for effect in handler(event):
            self._run(effect)

    # ---- events ----

    def _pushed(self, event: of_servers.Pushed) -> Iterable[machine.Effect]:
        header = event.header
        replicas = bad_replicas(header) or tuple(range(header.replica, header.replica + header.base + 1))
        flags = header.flags & (NOT_FINITE | BAD_GRADIENT)
        self.taken += 1
        new = machine.BlockContribution(
            header.shard, header.step, Block(header.replica, header.replica + header.base + 1), header.weight,
            self._ticket(header, event.buffer, event.channel), replicas if flags & NOT_FINITE else (),
            replicas if flags == BAD_GRADIENT else (),
        )  # fmt: skip
        return self._shell.contributed(event.worker, new, header.view)

    def _ticked(self, event: AggregatorTick) -> Iterable[machine.Effect]:
        """Give every worker a sign of life of this thread, too."""
        for channel in self._shell.workers.values():
            self._credit(channel, 0)
        return self._shell.machine.tick(event.now)

    def _arrived(self, event: Arrived) -> Iterable[machine.Effect]:
        header = event.header
        return self._shell.arrived(header.shard, header.step, self._ticket(header, event.buffer, None), header.view)

    def _ticket(self, header: Header, buffer: Buffer, sender: Channel | None) -> int:
        self._last_ticket += 1
        self._tickets[self._last_ticket] = header, buffer, sender
        return self._last_ticket

    # ---- effects ----

    def _run(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Keep(ticket=ticket):
                _, buffer, sender = self._tickets.pop(ticket)
                self._parts[effect.shard, effect.step, effect.at] = buffer
                self._credit(sender)
            case machine.DropPayload(ticket=ticket, fault=fault):
                _, buffer, sender = self._tickets.pop(ticket)
                buffer.release()
                self._credit(sender)
                if fault and sender is not None:
                    sender.refuse(fault)
            case machine.MergeParts():
                self._merge(effect)
            case machine.Forget(shard=shard, step=step, at=at):
                self._parts.pop((shard, step, at)).release()
            case machine.PushPart():
                self._push(effect)
            case machine.KeepVersion(shard=shard, version=version, ticket=ticket):
                header, buffer, _ = self._tickets.pop(ticket)
                self._versions[shard, version] = header, buffer
            case machine.GiveVersion():
                self._give(effect)
            case machine.ReleaseVersion(shard=shard, version=version):
                self._versions.pop((shard, version))[1].release()
            case machine.FollowServer(server=server):
                if (link := self._upstream.get(server)) is not None:
                    link.follow(self._shell.fence.number, on=True)
            case machine.FetchVersion(shard=shard, version=version, server=server):
                if (link := self._upstream.get(server)) is not None:
                    link.fetch(shard, version, self._shell.fence.number)
            case machine.DismissWorkers(why=why):
                for channel in self._shell.dismissed(effect):
                    channel.refuse(why)

    def _credit(self, sender: Channel | None, count: int = 1) -> None:
        if sender is not None:
            sender.send(Header(Kind.CREDIT, self._shell.fence.number, replica=count), urgent=True)

    def _merge(self, merge: machine.MergeParts) -> None:
        words = self._job.shards[merge.shard].words
        with self._tracer.span("reduce", shard=merge.shard):
            left = self._parts[merge.shard, merge.step, merge.left].tensor[:words]
            other = self._parts.pop((merge.shard, merge.step, merge.right))
            right = other.tensor[:words]
            for values, factor in ((left, merge.left_factor), (right, merge.right_factor)):
                if factor != 1.0:
                    values.mul_(factor)
            left.add_(right)
            other.release()

    def _push(self, push: machine.PushPart) -> None:
        buffer = self._parts[push.shard, push.step, push.block.start]
        if (link := self._upstream.get(push.server)) is None:
            return  # it has just been closed: the next view names another
        nbytes, start = self._job.shards[push.shard].nbytes, push.block.start
        flags = (NOT_FINITE if push.losses else 0) | (BAD_GRADIENT if push.gradients else 0)
        named = {replica - start for replica in (*push.losses, *push.gradients) if replica - start < _NAMED}
        header = Header(
            Kind.PUSH, self._shell.fence.number, shard=push.shard, replica=start, step=push.step, weight=push.weight,
            length=nbytes, flags=flags, base=push.block.size - 1, wants=sum(1 << bit for bit in named),
        )  # fmt: skip
        self.sent += 1
        link.push(header, buffer.retain().bytes[:nbytes], sent=buffer.release)

    def _give(self, give: machine.GiveVersion) -> None:
        if (channel := self._shell.workers.get(give.worker)) is None:
            return
        header, buffer = self._versions[give.shard, give.version]
        place = ("version", give.shard) if self._newest_is_enough and not give.asked else None
        channel.send(
            header._replace(view=self._shell.fence.number), buffer.retain().bytes[: header.length],
            sent=buffer.release, place=place,
        )  # fmt: skip


def _refuse(event: Event) -> None:
    """End the connection of who sent it; its payload is dropped."""
    if isinstance(event, of_servers.Initial):
        event.buffer.release()
    if (channel := getattr(event, "channel", None)) is not None:
        channel.refuse(f"{type(event).__name__}: that is for a server, and this is an aggregator")


# ---- The life of an aggregator: it joins the coordinator, serves workers near it, and ends with the job ----

_TICK_S = 0.25


class AggregatorService(ListeningMember):
    """One aggregator of one job, from joining to the end.

    It holds nothing that could be lost: it may be closed, or killed, at any time. One more thread tells the owner the
    time.
    """

    role, waits_for = "aggregator", "workers near it"
    serves = ("worker",)
    _intake_of: type[Intake] = Intake

    _relay: AggregatorRelay | None = None  # the job's, once it is known

    def start(self) -> None:
        super().start()
        self._clock = threading.Thread(target=self._tell_time, name="time", daemon=True)
        self._clock.start()

    @property
    def counts(self) -> tuple[int, int]:
        """How many contributions came from workers, and how many went upstream."""
        return (0, 0) if self._relay is None else (self._relay.taken, self._relay.sent)

    def close(self) -> None:
        super().close()
        self._clock.join()

    def failed(self, error: BaseException) -> None:
        """It cannot go on. The job can, without it."""
        reason = f"aggregator {self.id} failed: {type(error).__name__}: {error}"
        self._link.send(Say(reason))
        self._views.end(reason)

    def _begin(self, job: ServerJob) -> Upstream:
        upstream = Upstream(
            job, self._views, self._owner.put, transport=self._transport, credentials=self._link.credentials,
            tracer=self._tracer, failed=self.failed,
        )  # fmt: skip
        machine = AggregatorMachine(self.id, job.plan.expected, job.plan.cadence, job.plan.carried)
        shell: AggregatorShell[Channel] = AggregatorShell(observed(machine, self.id))
        self._relay = self._owner.handler = AggregatorRelay(job, shell, upstream, self._tracer)
        self._intake = self._intake_of(job, self._views, self._owner.put, self._tracer, self._link.welcome.trace)
        return upstream

    def _tell_time(self) -> None:
        while not self._views.over.wait(_TICK_S):
            self._owner.put(AggregatorTick(time.monotonic()))

    def _receiver(self, hello: Hello) -> Receive:
        """See `ListeningMember`. The current view must give this worker to this aggregator."""
        view = self._views.view
        workers = {(member.id, member.incarnation) for member in view.workers} if view is not None else set()
        if view is None or (hello.id, hello.incarnation) not in workers or view.aggregator_of.get(hello.id) != self.id:
            raise ProtocolError(f"worker {hello.id} is not near aggregator {self.id} in this view")
        return self._intake.receive_from_worker
