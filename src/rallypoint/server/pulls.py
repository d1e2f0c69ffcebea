"""Requests of workers for rows of tables. They may ask for a version that does not exist yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind
from rallypoint.observe.trace import Tracer
from rallypoint.server.shards.rows import Ids, OwnedRows


@dataclass(slots=True)
class _Pull:
    channel: Channel
    header: Header
    ids: Ids


class Pulls:
    """The requests that wait, by shard. Not thread-safe: only the owner thread calls it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._waiting: dict[int, list[_Pull]] = {}

    @property
    def shards(self) -> list[int]:
        """The shards for which a request waits."""
        return list(self._waiting)

    def add(self, channel: Channel, header: Header, ids: Ids) -> None:
        """A worker asks for the rows `ids` of a table's part."""
        self._waiting.setdefault(header.shard, []).append(_Pull(channel, header, ids))

    def gone(self, channel: Channel) -> None:
        """The channel is closed: drop its requests."""
        for shard, pulls in list(self._waiting.items()):
            self._keep(shard, (pull for pull in pulls if pull.channel is not channel))

    def refuse(self, shard: int) -> None:
        """Drop the shard's requests: this server is not its primary, and the workers will ask another server."""
        del self._waiting[shard]

    def answer(self, shard: int, machine: ShardMachine, owned: OwnedRows, number: ViewNumber) -> None:
        """Answer every request that can be answered now."""
        self._keep(shard, [pull for pull in self._waiting[shard] if not self._send(pull, machine, owned, number)])

    def _keep(self, shard: int, pulls: Iterable[_Pull]) -> None:
        self._waiting[shard] = list(pulls)
        if not self._waiting[shard]:
            del self._waiting[shard]

    def _send(self, pull: _Pull, machine: ShardMachine, owned: OwnedRows, number: ViewNumber) -> bool:
        """Returns False if the version does not exist yet."""
        asked = pull.header
        kept = owned.keeps(asked.step) and asked.step <= machine.published
        newest_will_do = bool(asked.flags & NEWEST)
        if not kept and (machine.published < 0 or (asked.step > machine.published and not newest_will_do)):
            return False
        answer = Header(Kind.ROWS, number, shard=asked.shard, step=asked.step, base=asked.base)
        if not kept and not newest_will_do:
            pull.channel.send(answer._replace(flags=SKIP))
            return True
        version = asked.step if kept else machine.published
        with self._tracer.span("rows", shard=asked.shard, version=version):
            buffer, nbytes = owned.rows(version, pull.ids)
        answer = answer._replace(step=version, length=nbytes)
        pull.channel.send(answer, buffer.bytes[:nbytes], sent=buffer.release)
        return True
