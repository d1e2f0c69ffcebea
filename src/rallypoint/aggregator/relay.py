"""Takes the events of an aggregator's inbox, asks the shell, and runs its effects on tensors and channels.

All of this runs on the owner's thread, as in a server (`server/reducer/reducer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.aggregator.upstream import Arrived, Event, ServerLost, ServerUp, Ticked, Upstream
from rallypoint.core.aggregator import effects as machine
from rallypoint.core.aggregator.shell import AggregatorShell
from rallypoint.core.sums import Block
from rallypoint.net.channel import Channel
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.observe.trace import Tracer
from rallypoint.server.job import ServerJob
from rallypoint.server.reducer import inbox as of_servers
from rallypoint.server.reducer.reducer import bad_replicas
from rallypoint.server.shards.held import newest_is_enough

_NAMED = 32  # a frame can name so many replicas of a block


class Relay:
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
            of_servers.Unfollowed: lambda e: shell.unfollowed(e.channel, e.worker),
            of_servers.Fetched: lambda e: shell.fetched(e.channel, e.worker, e.shard, e.version),
            of_servers.Viewed: lambda e: shell.adopt(e.view),
            ServerUp: lambda e: shell.server_up(e.server),
            ServerLost: lambda e: shell.server_lost(e.server),
            Arrived: self._arrived,
            Ticked: self._ticked,
        }

    def handle(self, event: Event) -> None:
        """Handle one event."""
        handler = self._handlers.get(type(event))
        if handler is None:  # first weights, states and rows go to the servers
            _refuse(event)
            return
        for effect in handler(event):
            self._run(effect)

    def idle_work(self) -> Callable[[], None] | None:
        """There is none."""
        return None

    def close(self) -> None:
        """The job is over."""

    # ---- events ----

    def _pushed(self, event: of_servers.Pushed) -> Iterable[machine.Effect]:
        header = event.header
        replicas = bad_replicas(header) or tuple(range(header.replica, header.replica + header.base + 1))
        flags = header.flags & (NOT_FINITE | BAD_GRADIENT)
        self.taken += 1
        new = machine.Contribution(
            header.shard, header.step, Block(header.replica, header.replica + header.base + 1), header.weight,
            self._ticket(header, event.buffer, event.channel), replicas if flags & NOT_FINITE else (),
            replicas if flags == BAD_GRADIENT else (),
        )  # fmt: skip
        return self._shell.contributed(event.worker, new, header.view)

    def _ticked(self, event: Ticked) -> Iterable[machine.Effect]:
        """Give every worker a sign of life of this thread, too."""
        for channel in self._shell.workers.values():
            self._credit(channel, 0)
        return self._shell.machine.tick(event.now)

    def _arrived(self, event: Arrived) -> Iterable[machine.Effect]:
        header = event.header
        return self._shell.arrived(
            header.shard, header.step, self._ticket(header, event.buffer, None), header.view
        )

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
            case machine.Drop(ticket=ticket, fault=fault):
                _, buffer, sender = self._tickets.pop(ticket)
                buffer.release()
                self._credit(sender)
                if fault and sender is not None:
                    sender.refuse(fault)
            case machine.Merge():
                self._merge(effect)
            case machine.Forget(shard=shard, step=step, at=at):
                self._parts.pop((shard, step, at)).release()
            case machine.Push():
                self._push(effect)
            case machine.Store(shard=shard, version=version, ticket=ticket):
                header, buffer, _ = self._tickets.pop(ticket)
                self._versions[shard, version] = header, buffer
            case machine.Give():
                self._give(effect)
            case machine.Release(shard=shard, version=version):
                self._versions.pop((shard, version))[1].release()
            case machine.Follow(server=server):
                if (link := self._upstream.get(server)) is not None:
                    link.follow(self._shell.fence.number, on=True)
            case machine.Fetch(shard=shard, version=version, server=server):
                if (link := self._upstream.get(server)) is not None:
                    link.fetch(shard, version, self._shell.fence.number)
            case machine.Dismiss(why=why):
                for channel in self._shell.dismissed(effect):
                    channel.refuse(why)

    def _credit(self, sender: Channel | None, count: int = 1) -> None:
        if sender is not None:
            sender.send(Header(Kind.CREDIT, self._shell.fence.number, replica=count), urgent=True)

    def _merge(self, merge: machine.Merge) -> None:
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

    def _push(self, push: machine.Push) -> None:
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

    def _give(self, give: machine.Give) -> None:
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
