"""Requests of workers for rows of tables, or for a whole shard, at a version that may not exist yet."""

from __future__ import annotations

from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.pulls import Request, Requests
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server.shards.held import HeldShard
from rallypoint.server.shards.rows import Ids, OwnedRows


class Pulls:
    """Runs `Requests` on frames. Not thread-safe: only the owner thread calls it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._requests: Requests[Channel, tuple[Header, Ids]] = Requests()

    @property
    def shards(self) -> list[int]:
        """The shards for which a request waits."""
        return self._requests.shards

    def add(self, channel: Channel, header: Header, ids: Ids) -> None:
        """A worker asks for the rows `ids` of a table's part; of another shard, for all of it."""
        newest = bool(header.flags & NEWEST)
        self._requests.add(header.shard, Request(channel, header.step, newest, (header, ids)))

    def gone(self, channel: Channel) -> None:
        """The channel is closed: drop its requests."""
        self._requests.gone(channel)

    def refuse(self, shard: int) -> None:
        """Drop the shard's requests: this server is not its primary, and the workers will ask another server."""
        self._requests.refuse(shard)

    def answer(self, shard: int, machine: ShardMachine, owned: HeldShard, number: ViewNumber) -> None:
        """Answer every request that can be answered now."""
        for request, version in self._requests.answered(shard, machine.published, owned.keeps):
            asked, ids = request.what
            answer = Header(Kind.ROWS, number, shard=asked.shard, step=asked.step, base=asked.base)
            if version is None:
                request.link.send(answer._replace(flags=SKIP))
                continue
            with self._tracer.span("rows", shard=asked.shard, version=version):
                if isinstance(owned, OwnedRows):
                    buffer, nbytes = owned.rows(version, ids)
                else:
                    _, kept, nbytes = owned.raw(version)
                    buffer = kept.retain()
            answer = answer._replace(step=version, length=nbytes)
            request.link.send(answer, buffer.bytes[:nbytes], sent=buffer.release)
