"""Keeps backups: sends states and updates as a primary, applies and acknowledges them as a backup."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rallypoint.core.shard import events
from rallypoint.core.shard.effects import Apply, Choose
from rallypoint.core.shard.server import Effect
from rallypoint.core.shard.shell import Answer, ServerShell, applied_in
from rallypoint.net.channel import Channel
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.pool import Buffer
from rallypoint.server.reducer.inbox import Asked, Chosen, Filled, Replicated
from rallypoint.server.reducer.ledger import Ledger
from rallypoint.server.reducer.tickets import Tickets
from rallypoint.server.shards.held import HeldShard
from rallypoint.store.record import ShardRecord, encode_record


class Replication:
    """Not thread-safe: only the owner thread calls it."""

    def __init__(
        self, shell: ServerShell[Channel], tickets: Tickets, ledger: Ledger, owned: Mapping[int, HeldShard]
    ) -> None:
        self._shell, self._tickets, self._ledger, self._owned = shell, tickets, ledger, owned
        self._choices = msgspec.msgpack.Encoder()
        # Shard and server ("": this one, as a backup) -> version, and the digest of what is held at it. A part of a
        # table is digested from the state on that was sent to that server.
        self._digests: dict[tuple[int, str], tuple[int, bytes]] = {}

    # ---- the primary's side ----

    def send_state(self, record: ShardRecord, *, incoming: bool) -> None:
        """Send a shard's whole state to its backup, or to the third server."""
        server = self._shell.machine.pairs.server(record.shard, incoming=incoming)
        data = encode_record(record, "none")
        header = Header(
            Kind.STATE, self._shell.fence.number, shard=record.shard, step=record.version, length=len(data)
        )
        digest = self._digest_of_state(record.shard, server, record.version)
        self._shell.fill(record.shard, server, record.version, digest).send(header, memoryview(data))

    def ask(self, shard: int, version: int) -> None:
        """Ask the shard's backup whether it holds this version. It is sent no digest that it could repeat."""
        server = self._shell.machine.pairs.server(shard, incoming=False)
        digest = self._digest_of_state(shard, server, version)
        data = memoryview(sealed(digest))
        header = Header(Kind.PROVE, self._shell.fence.number, shard=shard, step=version, length=len(data))
        self._shell.fill(shard, server, version, digest).send(header, data)

    def send_update(self, shard: int, update: Apply, gradient: tuple[Buffer, int]) -> None:
        """Send who has a copy the finished gradient of an update that was just applied here, or that it changed
        nothing."""
        buffer, nbytes = gradient
        skip = update.scale is None
        header = Header(
            Kind.REPLICATE, self._shell.fence.number, shard=shard, step=update.version - 1,
            flags=SKIP * skip, length=0 if skip else nbytes, replica=update.replica, weight=update.rate,
            base=self._ledger.added(shard),
        )  # fmt: skip
        payload = None if skip else buffer.bytes[:nbytes]
        servers = [self._shell.machine.pairs.server(shard, incoming=incoming) for incoming in update.copies]
        done = buffer.release if len(servers) == 1 else after(len(servers), buffer.release)
        for server in servers:
            digest = self._digest_of_update(shard, server, update.version)
            self._shell.replicate(shard, server, update.version, digest).send(header, payload, sent=done)

    def send_choice(self, shard: int, choice: Choose) -> None:
        """Tell who has a copy which contributions make an update. Nobody hears its norm before they know them."""
        data = memoryview(self._choices.encode(choice.replicas))
        header = Header(Kind.CHOICE, self._shell.fence.number, shard=shard, step=choice.step, length=len(data))
        for server in self._copies(shard):
            self._shell.peers[server].send(header, data, urgent=True)

    # ---- the backup's side ----

    def updated(self, event: Replicated) -> Sequence[Effect | Answer[Channel]]:
        """An update from the primary arrived."""
        header = event.header
        if not self._shell.takes_from(header.shard, event.sender, header.view):
            event.buffer.release()
            return []
        ticket = self._tickets.issue(event.channel, header, event.buffer, credited=True)
        self._ledger.told(header.shard, header.base)
        skip = bool(header.flags & SKIP)
        update = events.Replicated(header.step, skip, ticket, header.replica, header.weight)
        return self._shell.replicated(event.channel, header.shard, update)

    def filled(self, event: Filled) -> Sequence[Effect | Answer[Channel]]:
        """A whole state from the primary arrived."""
        record = event.record
        if not self._shell.takes_from(record.shard, event.sender, event.number):
            return []
        self._owned[record.shard].load(record)
        self._digest_of_state(record.shard, "", record.version)
        loaded = events.Loaded(record.version, record.clocks)
        answers = self._shell.replicated(event.channel, record.shard, loaded)
        self._ledger.proves(applied_in(self._shell.machine, [record.shard]))
        return answers

    def chosen(self, event: Chosen) -> Sequence[Effect | Answer[Channel]]:
        """The primary told which contributions make an update."""
        header = event.header
        if not self._shell.takes_from(header.shard, event.sender, header.view):
            return []
        return self._shell.replicated(event.channel, header.shard, events.Chosen(header.step, event.replicas))

    def asked(self, event: Asked) -> Sequence[Effect | Answer[Channel]]:
        """The primary asks whether this backup holds a version."""
        header = event.header
        if not self._shell.takes_from(header.shard, event.sender, header.view):
            return []
        if same := self._shell.holds(header.shard, header.step):
            same = sealed(self._digest_of_state(header.shard, "", header.step)) == event.sealed
        return self._shell.replicated(event.channel, header.shard, events.Compared(header.step, same))

    def acknowledge(self, answer: Answer[Channel]) -> None:
        """Tell the primary that this backup has a version, and prove it; or that it does not have it."""
        digest = b"" if answer.differs else self._digest_of_update(answer.shard, "", answer.version)
        header = Header(
            Kind.ACK, self._shell.fence.number, shard=answer.shard, step=answer.version, base=int(answer.chosen),
            length=len(digest),
        )  # fmt: skip
        answer.link.send(header, memoryview(digest), urgent=True)

    # ---- either ----

    def _copies(self, shard: int) -> list[str]:
        """The servers to which each update of the shard is sent."""
        machine = self._shell.machine.machine(shard)
        return [] if machine is None else self._shell.machine.pairs.replicating(shard, machine)

    def _digest_of_state(self, shard: int, server: str, version: int) -> bytes:
        peers = ("", *self._shell.peers)
        self._digests = {copy: known for copy, known in self._digests.items() if copy[1] in peers}
        digest = self._owned[shard].digest(b"")
        self._digests[shard, server] = (version, digest)
        return digest

    def _digest_of_update(self, shard: int, server: str, version: int) -> bytes:
        """The digest after the update that made `version`, computed once."""
        known, digest = self._digests[shard, server]
        if known != version:
            digest = self._owned[shard].digest(digest)
            self._digests[shard, server] = (version, digest)
        return digest


def sealed(digest: bytes) -> bytes:
    """16 bytes that say whether another digest is the same, and from which it cannot be had."""
    return hashlib.blake2b(digest, digest_size=16).digest()


def after(times: int, call: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `call` when it is called for the last of so many times. Threads may call it at once."""
    left = iter(range(times - 1, -1, -1))
    return lambda: None if next(left) else call()
