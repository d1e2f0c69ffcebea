"""Sends versions: to workers that follow every one of them, and to those that ask for one at a time."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.core.shard.effects import Reply
from rallypoint.core.shard.shell import ServerShell
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.transport import share_of
from rallypoint.server.shards.held import HeldShard


class Followers:
    """The owner's thread owns it. `owned` is the reducer's own, by shard; the shell knows who follows."""

    def __init__(self, shell: ServerShell[Channel], owned: Mapping[int, HeldShard]) -> None:
        self._shell, self._owned = shell, owned
        self._in_flight = 0  # bytes, on each worker's link; 0: no limit of ours

    def linked(self, channel: Channel, worker: str) -> None:
        """A worker has connected (again)."""
        if self._shell.linked(channel, worker):
            self._limit(channel)

    def share(self, nbytes: int, workers: int) -> None:
        """So many bytes may be on their way here at once from these many workers together (0: no limit of ours)."""
        self._in_flight = share_of(nbytes, workers)
        for channel in self._shell.workers.values():
            self._limit(channel)

    def _limit(self, channel: Channel) -> None:
        if self._in_flight:
            channel.connection.limit_in_flight(self._in_flight)

    def publish(self, shard: int, version: int) -> None:
        """A version for all that follow."""
        for channel in self._shell.followers:
            self.send(channel, shard, version)

    def send(self, channel: Channel, shard: int, version: int) -> None:
        """A version for one of them; the last one goes raw: it is what the job was for."""
        self._send(channel, shard, Header(Kind.VERSION, step=version), raw=self._shell.is_last(shard, version))

    def reply(self, shard: int, reply: Reply) -> None:
        """The version that a worker has asked for, if the worker is still there."""
        if (channel := self._shell.workers.get(reply.follower)) is not None:
            header = Header(Kind.VERSION, step=reply.version, base=reply.clock, wants=wants(reply.replica))
            self._send(channel, shard, header, raw=reply.last)

    def tell(self, worker: str, header: Header, payload: memoryview | None = None, *, urgent: bool = False) -> None:
        """Any other frame for a worker, if it is still there."""
        if (channel := self._shell.workers.get(worker)) is not None:
            channel.send(header._replace(view=self._shell.fence.number), payload, urgent=urgent)

    def _send(self, channel: Channel, shard: int, header: Header, *, raw: bool) -> None:
        owned = self._owned[shard]
        code, buffer, nbytes = owned.raw(header.step) if raw else owned.encoded(header.step)
        header = owned.named(header._replace(view=self._shell.fence.number, shard=shard, length=nbytes, codec=code))
        channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release)
