"""Audits of a server's own memory (`audit_servers=`): digests of whole states, at audited versions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import xxhash

from rallypoint.core.audits.rest import AtRest
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.view import ViewNumber
from rallypoint.net.auditing.messages import StateChanged
from rallypoint.net.messages import Message
from rallypoint.server.reducer.inbox import Admitted, Event, Viewed, Wake
from rallypoint.server.shards.held import HeldShard


class ChangedAtRest(Exception):
    """The state of a shard is not what it was right after the update that made its version."""

    def __init__(self, shard: int, version: int) -> None:
        super().__init__(f"shard {shard} at version {version} has changed in this server's memory")
        self.shard, self.version = shard, version


class ServerAudits:
    """Takes and compares digests of the shards in `owned`. Not thread-safe: only the owner thread calls it."""

    def __init__(self, every: int, owned: Mapping[int, HeldShard]) -> None:
        self.rest = AtRest(every)
        self._owned = owned

    def made(self, shard: int, version: int) -> None:
        """The shard is at this version now, by an update."""
        self.rest.moved(shard)
        if self.rest.audited(shard, version):
            self.rest.keep(shard, version, self._digest(shard, version))

    def loaded(self, shard: int, version: int) -> None:
        """The shard is at this version now: it was loaded or installed, or its whole state is sent to a backup."""
        self.rest.also(shard, version)
        self.made(shard, version)

    def awaits_use(self, shard: int, version: int) -> None:
        """The shard is at this version, and a snapshot is to have it: from now on it must not change."""
        if self.rest.every and self.rest.kept(shard) is None:
            self.rest.keep(shard, version, self._digest(shard, version))

    def check(self, shard: int) -> None:
        """The shard is about to be used. Raises ChangedAtRest if it has changed since its version was made."""
        kept = self.rest.kept(shard)
        if kept is not None and self._digest(shard, kept[0]) != kept[1]:
            raise ChangedAtRest(shard, kept[0])

    def proof(self, shard: int, version: int, digest: bytes) -> bytes:
        """What proves that this version is held: `digest`, of the parameters; of an audited version, of all state.

        16 bytes. Two servers with the same state have the same.
        """
        kept = self.rest.kept(shard)
        if kept is None or kept[0] != version or not self.rest.audited(shard, version):
            return digest
        assert isinstance(kept[1], bytes)
        return xxhash.xxh3_128_digest(digest + kept[1])

    def proven(self, machine: ShardMachine | None) -> bool:
        """Does nothing speak against storing this shard's state? With audits its backup has to hold the same first."""
        if not self.rest.every or machine is None or not machine.copies.replicating:
            return True
        return machine.published >= machine.version

    def _digest(self, shard: int, version: int) -> bytes:
        record = self._owned[shard].state(version, (), wires=False)
        found = xxhash.xxh3_128()
        for name in sorted(record.arrays):
            found.update(record.arrays[name].data)
        found.update(repr(sorted(record.scalars.items())).encode())
        return found.digest()


class SetAside:
    """Holds a server's events back from the moment when it knows that its own state is wrong.

    It tells the coordinator, which gives it up: then a view comes in which it is somebody new, or a new generation.
    That one releases everything, and the events that waited follow it. So not one update is made from a state that has
    changed: to all others the server looks as if it had hung since then.
    """

    def __init__(self, me: str, machine: ServerMachine, say: Callable[[Message], None]) -> None:
        self._me, self._machine, self._say = me, machine, say
        self._held: deque[Event] = deque()
        self._changed: StateChanged | None = None

    @property
    def active(self) -> bool:
        """Do events wait?"""
        return self._changed is not None

    def begin(self, changed: ChangedAtRest) -> None:
        """This server's state has changed."""
        view = self._machine.view
        generation = ViewNumber() if view is None else view.generation
        self._changed = StateChanged(changed.shard, changed.version, generation)
        self._say(self._changed)

    def admit(self, event: Event) -> Iterator[Event]:
        """The events to handle now: this one, unless it has to wait; and those that have waited for it."""
        if self._changed is None or isinstance(event, Wake):
            yield event
            return
        if not self._ends(event):
            self._held.append(event)
            if isinstance(event, Admitted) and not event.new:
                self._say(self._changed)  # a coordinator that was restarted may not know it
            return
        self._changed = None
        yield event
        while self._held and self._changed is None:
            yield self._held.popleft()

    def _ends(self, event: Event) -> bool:
        before = self._machine.view
        if not isinstance(event, Viewed) or before is None or event.view.number <= before.number:
            return False
        mine = {(server.id, server.incarnation) for server in event.view.servers}
        gone = (self._me, self._machine.incarnation) not in mine
        return gone or event.view.generation != before.generation
