"""What a simulated server's own reducer holds and sends: names in place of tensors, wires in place of channels.

`server/reducer.py` and its parts are the product's own; here is what they are given: shards (`NamedShards`), buffers,
channels, a writer of snapshots, and restores without threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rallypoint.core.layout import Shard
from rallypoint.core.protocol import NotStored, Stored
from rallypoint.core.shard.effects import Apply
from rallypoint.core.view import ViewNumber
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.server import inbox
from rallypoint.server.held import ShardFactory
from rallypoint.server.snapshots import Restores
from rallypoint.store.record import Array, ShardRecord
from rallypoint.testing.simulation import server_checks
from rallypoint.testing.simulation.network import Wire, World
from rallypoint.testing.simulation.replicas import scale as loss_scale
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content, Mean, State

if TYPE_CHECKING:
    from rallypoint.testing.simulation.server import SimulatedServer

NBYTES = 64  # of every payload


class NamedBuffer:
    """A payload with its holders, as `net.pool.Buffer` counts them. `freed` is called when nobody holds it."""

    def __init__(self, content: Content, holders: int = 1, freed: Callable[[], None] = lambda: None) -> None:
        self.content, self._holders, self._freed = content, holders, freed

    def __len__(self) -> int:
        return NBYTES

    @property
    def bytes(self) -> NamedBuffer:
        """Its bytes: itself."""
        return self

    def __getitem__(self, part: slice) -> NamedBuffer:
        return self

    def retain(self) -> NamedBuffer:
        """One more holder."""
        self._holders += 1
        return self

    def release(self) -> None:
        """One holder less."""
        self._holders -= 1
        assert self._holders >= 0, "a buffer was released more often than it was held"
        if not self._holders:
            self._freed()


@dataclass
class NamedShard:
    """One shard's names."""

    server: SimulatedServer
    shard: Shard
    master: Content = 0
    parts: dict[int, Any] = field(default_factory=dict)  # buffers of the sum in progress, by the first replica
    wire: dict[int, Content] = field(default_factory=dict)
    step: int = -1  # of the sum that is measured

    @property
    def measured(self) -> bool:
        """Does it count in the norm?"""
        return self.shard.index not in self.server.job.buffer_shards

    @property
    def loss_scale(self) -> float:
        """What the losses of the step are multiplied by."""
        return loss_scale.scale_of(self.master) if self.shard.index == self.server.job.scale_shard else 0.0

    def keep(self, version: int, oldest: int, pinned: int = -1) -> None:
        """The master is this version now."""
        self.wire[version] = self.master
        self.wire = {v: content for v, content in self.wire.items() if v >= oldest or v == pinned}

    def install(self, payload: NamedBuffer, version: int = 0, nbytes: int = 0) -> None:
        """The first version."""
        job, index = self.server.job, self.shard.index
        assert nbytes == NBYTES, f"a first version of {nbytes} bytes"
        content = job.first(index) if index in job.table_shards else payload.content
        payload.release()
        self.master = State(content) if job.averages(index) else content
        self.keep(version, version)

    def take(self, payload: NamedBuffer, weight: float, base: int | None = None, at: int = 0) -> None:
        """A contribution becomes a part of the sum."""
        assert at not in self.parts, f"{self.server.node.name}: shard {self.shard.index}: part {at} is there"
        payload.content = server_checks.decoded(self.server, self.shard.index, payload.content)
        self.parts[at] = payload

    def merge(self, left: int, right: int) -> None:
        """Two parts become one."""
        part = self.parts[left]
        part.content = self.server.job.add(part.content, self.parts[right].content)
        self.discard(right)

    def discard(self, at: int) -> None:
        """Drop a part."""
        self.parts.pop(at).release()

    def add(self, payload: NamedBuffer, weight: float, base: int | None = None) -> None:
        """A contribution joins the only part."""
        content = server_checks.decoded(self.server, self.shard.index, payload.content)
        self.parts[0].content = self.server.job.add(self.parts[0].content, content)
        payload.release()

    def mean(self, total_weight: float) -> None:
        """The sum, divided."""
        self.parts[0].content = self.server.job.mean(self.parts[0].content, total_weight)

    def norms(self) -> tuple[float, ...]:
        """The norm of the finished sum; not finite if a value is not."""
        norm, at = self._looked
        return (norm if at < 0 else math.inf,)

    def first_not_finite(self) -> int:
        """The first word that is not finite."""
        return self._looked[1]

    @property
    def _looked(self) -> tuple[float, int]:
        return self.server.job.look(self.shard.index, self.step, self.parts[0].content)

    def apply(self, update: Apply) -> tuple[Any, int] | None:
        """Make the next version."""
        job, index = self.server.job, self.shard.index
        server_checks.check_applied(self.server, index, update)
        part = self.parts.pop(0, None)
        if index == job.scale_shard:
            self.master = loss_scale.after(self.master, skipped=update.scale is None)
        elif update.scale is not None:
            part.content = job.scaled(part.content, update.scale)
            new = Mean(part.content) if job.averages(index) else None
            self.master = new or job.update(self.master, part.content, update.version - 1, update.reductions)
        elif job.averages(index):
            self.master = Mean(None)
        self.keep(update.version, update.oldest, update.pinned)
        if update.replicate:
            return part, NBYTES
        if part is not None:
            part.release()
        return None

    def abandon(self) -> None:
        """Discard the sum in progress."""
        for at in list(self.parts):
            self.discard(at)

    release = abandon

    def keeps(self, version: int) -> bool:
        """Can that version be sent?"""
        return version in self.wire

    def raw(self, version: int) -> tuple[int, Any, int]:
        """A kept version."""
        return 0, NamedBuffer(self.wire[version], 0), NBYTES

    encoded = raw

    def named(self, header: Header) -> Header:
        """As it is: a content says itself what it is."""
        return header

    def digest(self, before: bytes) -> bytes:
        """Of the parameters."""
        return hash(self.master).to_bytes(8, "little", signed=True)

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """The whole state; without `wires` for a snapshot."""
        stored = self.wire[version] if self.shard.index in self.server.job.buffer_shards and not wires else self.master
        array = _array(self.server.world, (stored, dict(self.wire) if wires else None))
        return ShardRecord(self.shard.index, version, {"master": array}, {}, tuple(clocks))

    def load(self, record: ShardRecord) -> None:
        """Replace the state."""
        content, wires = self.server.world.tokens.of(record.arrays["master"])
        self.master, self.wire = content, dict(wires or ())
        if wires is None:
            self.master = State(content) if self.server.job.averages(self.shard.index) else content
            self.keep(record.version, record.version)


def _array(world: World, thing: Any) -> Array:
    return np.frombuffer(world.tokens.bytes_of(thing), np.uint8)


class NamedShards(ShardFactory):
    """Allocates shards of names."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server

    def allocate(self, index: int) -> Any:
        return NamedShard(self._server, self._server.job.layout.shards[index])


class WireChannel:
    """One end of a wire. Counts the credits that the other end is owed for its payloads."""

    def __init__(self, server: SimulatedServer, wire: Wire, end: int, name: str) -> None:
        self.name, self.number = name, wire.number
        self.connection = SimpleNamespace(close=lambda: wire.close(end), limit_in_flight=id, share_port=id, pace=id)
        self.wire, self.owed = wire, 0
        self.asked: dict[tuple[int, int], tuple[int, int]] = {}  # shard and pull -> step and replica
        self._server, self._end = server, end

    def send(
        self, header: Header, payload: Any = None, sent: Callable[[], None] | None = None, *,
        place: Hashable = None, rank: object = (), urgent: bool = False,
    ) -> None:  # fmt: skip
        """Put a frame on the wire, in the words of whoever is at the other end."""
        if header.kind is Kind.CREDIT:
            self.owed -= header.replica
            assert self.owed >= 0, f"{self._server.node.name} gives {self.name} a credit too many"
        else:
            self.wire.send(self._end, self._said(header, payload), place=place)
        if sent is not None:
            sent()

    def refuse(self, reason: str) -> None:
        """Nobody here says what has to be refused."""
        raise AssertionError(f"{self._server.node.name} refuses {self.name}: {reason}")

    def _said(self, header: Header, payload: Any) -> tuple[Any, ...]:
        content = payload.content if isinstance(payload, NamedBuffer) else payload
        number, shard = header.view, header.shard
        match header.kind:
            case Kind.VERSION:
                sent = self._server.job.sent(shard, content)
                replica = 0 if header.wanted is None else header.wanted
                return ("version", number, shard, header.step, sent, replica, header.base)
            case Kind.WAIT:
                return ("wait", number, header.wanted, header.base)
            case Kind.TAKEN:
                return ("taken", shard, header.replica)
            case Kind.CODEC_STATE:
                state = None if payload is None else self._server.world.tokens.of(payload)
                return ("codec state", shard, header.replica, state)
            case Kind.ROWS | Kind.WORDS:
                outdated = bool(header.flags & SKIP)
                asked = self.asked.get((shard, header.base), (0, 0))
                if not outdated:
                    server_checks.check_rows(self._server, shard, header.step, content, *asked)
                return ("rows", shard, header.base, GARBAGE if outdated else content, outdated, header.step)
            case _:  # between servers
                return (header.kind.name.lower(), number, header, content)


class NamedWriter:
    """Writes records into the simulated store, each after a while."""

    wants_more = True

    def __init__(self, server: SimulatedServer) -> None:
        self.caught_up: Callable[[], None] = lambda: None
        self._server, self._snapshot = server, ""

    @property
    def takes_records(self) -> bool:
        """Is a snapshot in progress?"""
        return bool(self._snapshot)

    def begin(self, snapshot: str, shards: int) -> None:
        """A snapshot begins."""
        self._snapshot = snapshot

    def copy(self, record: ShardRecord) -> ShardRecord:
        """Names do not change."""
        return record

    def put(self, record: ShardRecord) -> None:
        """Store a record."""
        server, snapshot, index = self._server, self._snapshot, record.shard
        if not snapshot:
            return
        states = {replica: server.world.tokens.of(array) for replica, array in record.codec_states.items()}
        content = (server.world.tokens.of(record.arrays["master"])[0], record.clocks, states)

        def write() -> None:
            if server.store.write(snapshot, index, record.version, content):
                server.membership.send(Stored(snapshot, {}, {index: ("", 0, 0, "")}))
            else:
                server.membership.send(NotStored(snapshot, "no space left", -1))

        server.node.later(server.world.latency() * 2, write)

    def abandon(self) -> None:
        """It is not wanted any more."""
        self._snapshot = ""


class NamedRestores(Restores):
    """Reads from the simulated store, after a while."""

    def __init__(self, server: SimulatedServer) -> None:
        super().__init__(server.node.name, "", server.reducer_event, lambda text: None)
        self._server = server

    def begin(self, shards: Sequence[int], origin: str, generation: ViewNumber) -> None:
        self.cancel()
        self._missing = set(shards)

        def restored() -> None:
            for index in shards:
                if self._server.shell.wants_state(index, generation):
                    self._server.reducer_event(inbox.Restored(self._read_one(index, origin, generation), generation))

        self._server.node.later(self._server.world.latency() * 4, restored)

    def left_the_inbox(self) -> None:
        """There is always room."""

    def _read_one(self, index: int, origin: str, generation: ViewNumber) -> ShardRecord:
        world = self._server.world
        version, (content, clocks, states) = self._server.store.read(origin, index)
        kept = {r: _array(world, replace(state, generation=generation)) for r, state in states.items()}
        return ShardRecord(index, version, {"master": _array(world, (content, None))}, {}, clocks, kept)
