"""Sends versions: every version to workers that follow, one version to a worker that asks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from rallypoint.core.shard.effects import Reply
from rallypoint.core.shard.server import Effect
from rallypoint.core.shard.shell import ServerShell
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.transport import Limits
from rallypoint.server.shards.held import HeldShard


class Followers:
    """Sends frames to workers. Not thread-safe: only the owner thread calls it.

    `owned` is the reducer's dict of shards. The shell knows which workers follow. With `newest_is_enough` a version
    replaces the shard's older one that still waits for a slow follower. With `ranks`, one for each shard, versions of a
    lower rank go out first.
    """

    def __init__(
        self, shell: ServerShell[Channel], owned: Mapping[int, HeldShard], *, newest_is_enough: bool,
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._shell, self._owned, self._newest_is_enough = shell, owned, newest_is_enough
        self._ranks = ranks
        self._limits = Limits()  # of each worker's link

    def linked(self, channel: Channel, worker: str) -> Sequence[Effect]:
        """A worker connected (again). Returns the effects to run.

        Closes the connection that this one replaces: if its worker is still there, it connects and follows again.
        """
        older = self._shell.workers.get(worker)
        effects = self._shell.linked(channel, worker)
        if effects is None:
            return []
        self._limits.set_on(channel.connection)
        if older is not None:
            older.connection.close()
        return effects

    def share(self, limits: Limits, workers: int) -> None:
        """Set what `workers` workers may have in flight to this server, and get from it, together."""
        before, self._limits = self._limits, limits.shared(workers)
        for channel in self._shell.workers.values():
            self._limits.set_on(channel.connection, before)

    def publish(self, shard: int, version: int) -> None:
        """Send a version to all followers."""
        for channel in self._shell.followers:
            self.send(channel, shard, version)

    def send(self, channel: Channel, shard: int, version: int, *, asked: bool = False) -> None:
        """Send a version to one follower. The job's last version is sent raw, because it is the result.

        `asked`: the follower needs this very version (I5), so it neither replaces a newer one nor is replaced.
        """
        place = ("version", shard) if self._newest_is_enough and not asked else None
        raw = self._shell.is_last(shard, version)
        self._send(channel, shard, Header(Kind.VERSION, step=version), raw=raw, place=place)

    def reply(self, shard: int, reply: Reply) -> None:
        """Send the version that a worker asked for, if the worker is still connected.

        It replaces the shard's answer that still waits: since then the worker has asked for another replica's.
        """
        if (channel := self._shell.workers.get(reply.follower)) is not None:
            header = Header(Kind.VERSION, step=reply.version, base=reply.clock, wants=wants(reply.replica))
            self._send(channel, shard, header, raw=reply.last, place=("reply", shard))

    def tell(self, worker: str, header: Header, payload: memoryview | None = None, *, urgent: bool = False) -> None:
        """Send any other frame to a worker, if it is still connected."""
        if (channel := self._shell.workers.get(worker)) is not None:
            channel.send(header._replace(view=self._shell.fence.number), payload, urgent=urgent)

    def _send(
        self, channel: Channel, shard: int, header: Header, *, raw: bool, place: Hashable = None
    ) -> None:
        owned = self._owned[shard]
        code, buffer, nbytes = owned.raw(header.step) if raw else owned.encoded(header.step)
        header = owned.named(header._replace(view=self._shell.fence.number, shard=shard, length=nbytes, codec=code))
        rank = (header.step, self._ranks[shard]) if self._ranks else ()
        channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release, place=place, rank=rank)
