"""Who gets versions: workers that follow every one of them, and those that ask for one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rallypoint.core.shard.effects import Reply
from rallypoint.core.view import ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind, wants
from rallypoint.net.transport import share_of
from rallypoint.server.averaged import AveragedShard
from rallypoint.server.owned import OwnedShard
from rallypoint.server.rows import OwnedRows


class Followers:
    """Workers' channels; the reducer's thread owns them. `owned` is the reducer's own, by shard; `view` tells the
    number of the view in force."""

    def __init__(self, owned: Mapping[int, OwnedShard | OwnedRows], view: Callable[[], ViewNumber]) -> None:
        self._owned, self._view = owned, view
        self._following: list[Channel] = []
        self._workers: dict[str, Channel] = {}
        self._in_flight = 0  # bytes, on each of these; 0: no limit of ours

    def __len__(self) -> int:
        """How many follow every version."""
        return len(self._following)

    def linked(self, channel: Channel, worker: str) -> None:
        """A worker has connected (again): what its channel before this one still brings of wants does not count.

        Both may have waited for the same view, and be told of it in any order.
        """
        if (other := self._workers.get(worker)) is None or other.number < channel.number:
            self._workers[worker] = channel
            self._limit(channel)

    def share(self, nbytes: int, workers: int) -> None:
        """So many bytes may be on their way here at once from these many workers together (0: no limit of ours)."""
        self._in_flight = share_of(nbytes, workers)
        for channel in self._workers.values():
            self._limit(channel)

    def _limit(self, channel: Channel) -> None:
        if self._in_flight:
            channel.connection.limit_in_flight(self._in_flight)

    def gone(self, channel: Channel, worker: str) -> bool:
        """The channel is closed; was it the one that its worker has now?"""
        self.unfollow(channel)
        if not self.current(channel, worker):
            return False
        del self._workers[worker]
        return True

    def channel(self, worker: str) -> Channel | None:
        """The one that this worker has now."""
        return self._workers.get(worker)

    def current(self, channel: Channel, worker: str) -> bool:
        """Is it the one that its worker has now?"""
        return self.channel(worker) is channel

    def follow(self, channel: Channel) -> None:
        """Every version from now on goes there."""
        if channel not in self._following:
            self._following.append(channel)

    def unfollow(self, channel: Channel) -> None:
        """The channel is gone, or wants no more."""
        if channel in self._following:
            self._following.remove(channel)

    def publish(self, shard: int, version: int, *, last: bool) -> None:
        """A version for all that follow."""
        for channel in self._following:
            self.send(channel, shard, version, last=last)

    def send(self, channel: Channel, shard: int, version: int, *, last: bool) -> None:
        """A version for one of them; the `last` goes as it is: it is what the job was for."""
        owned = self._owned[shard]
        code, buffer, nbytes = owned.raw(version) if last else owned.encoded(version)
        header = Header(Kind.VERSION, self._view(), shard=shard, step=version, length=nbytes, codec=code)
        if isinstance(owned, AveragedShard):
            header = owned.named(header)
        channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release)

    def reply(self, shard: int, reply: Reply) -> None:
        """The version that a worker has asked for, if it is still there."""
        if (channel := self._workers.get(reply.follower)) is None:
            return
        owned = self._owned[shard]
        code, buffer, nbytes = owned.raw(reply.version) if reply.last else owned.encoded(reply.version)
        header = Header(
            Kind.VERSION, self._view(), shard=shard, step=reply.version, length=nbytes, codec=code, base=reply.clock,
            wants=wants(reply.replica),
        )  # fmt: skip
        channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release)

    def tell(self, worker: str, header: Header, payload: memoryview | None = None, *, urgent: bool = False) -> None:
        """Any other frame for a worker, if it is still there."""
        if (channel := self._workers.get(worker)) is not None:
            channel.send(header._replace(view=self._view()), payload, urgent=urgent)
