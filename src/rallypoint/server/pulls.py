"""Requests of workers for rows of tables, words of shards or whole shards, at a version that may not exist yet."""

from __future__ import annotations

from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.pulls import Request, Requests
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.observe.trace import Tracer
from rallypoint.server.shards.held import HeldShard
from rallypoint.server.shards.owned import StreamedShard
from rallypoint.server.shards.rows import Ids, OwnedRows

_ANSWER = {Kind.PULL_ROWS: Kind.ROWS, Kind.PULL_WORDS: Kind.WORDS}


class Pulls:
    """Runs `Requests` on frames. Not thread-safe: only the owner thread calls it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._requests: Requests[Channel, tuple[Header, Ids | None]] = Requests()

    @property
    def shards(self) -> list[int]:
        """The shards for which a request waits."""
        return self._requests.shards

    def add(self, channel: Channel, header: Header, ids: Ids | None) -> None:
        """A worker asks for the rows `ids` of a table's part, or for all of another shard; None: for the words that the
        header names."""
        newest = bool(header.flags & NEWEST)
        place = (0, 0) if ids is not None else (header.replica, header.wants)
        self._requests.add(header.shard, Request(channel, header.step, newest, (header, ids), place))

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
            answer = Header(_ANSWER[asked.kind], number, shard=asked.shard, step=asked.step, base=asked.base)
            if version is None:
                request.link.send(answer._replace(flags=SKIP))
                continue
            with self._tracer.span("rows" if ids is not None else "words", shard=asked.shard, version=version):
                buffer, payload = _payload(owned, version, asked, ids)
            answer = answer._replace(step=version, length=len(payload))
            request.link.send(answer, payload, sent=buffer.release)


def _payload(owned: HeldShard, version: int, asked: Header, ids: Ids | None) -> tuple[Buffer, memoryview]:
    """What was asked for, and the buffer to release when it is sent. The intake has looked at what may be asked."""
    if ids is None:
        assert isinstance(owned, StreamedShard), "only streamed parameters are pulled by words"
        return owned.words(version, asked.replica, asked.wants)
    if not isinstance(owned, OwnedRows):
        _, kept, nbytes = owned.raw(version)
        return kept.retain(), kept.bytes[:nbytes]
    buffer, nbytes = owned.rows(version, ids)
    return buffer, buffer.bytes[:nbytes]
