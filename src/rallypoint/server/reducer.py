"""The one thread that owns a server's shards: takes events from its inbox, runs the machines' effects on tensors.

Single owner, so no tensor has a lock. Everything that arrives from the network comes through `Reducer.inbox` as a call.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from rallypoint.codec.memory import ShardMemories
from rallypoint.codec.scratch import Scratch
from rallypoint.codec.spec import remembers
from rallypoint.config import JobConfig, cadence_of
from rallypoint.core import clip, server, shard_effects, shard_events
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Shard
from rallypoint.core.policy import Async, Sync
from rallypoint.core.server import Plan, ServerMachine
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import COPY, NEWEST, NOT_FINITE, SKIP, Header, Kind, wants
from rallypoint.net.messages import Accounted, Applied, InStep, Message, NotStored
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.observe.trace import Tracer
from rallypoint.server.averaged import AveragedShard
from rallypoint.server.memories import Memories
from rallypoint.server.owned import OwnedShard
from rallypoint.server.rows import Ids, OwnedRows
from rallypoint.store.record import ShardRecord, encode_record
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.writer import SnapshotWriter, own_copy

_LEDGER = 64  # entries that are said again to a coordinator that took over
_ACCOUNT_EVERY = 32  # updates
_measures = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class _Arrived:
    """A payload between its arrival and its place in the sum."""

    shard: int
    channel: Channel
    buffer: Buffer
    nbytes: int
    credited: bool = False


@dataclass(slots=True)
class _Pull:
    """Rows that somebody wants, perhaps of a version that is still to come."""

    channel: Channel
    header: Header
    ids: Ids


class Surroundings(Protocol):
    """Whom the reducer talks to beside followers and peers: the service."""

    def say(self, message: Message) -> None:
        """Tell the coordinator."""

    def not_finite(self, verdict: clip.Verdict) -> None:
        """A step was skipped, or must stop the job."""

    def failed(self, error: BaseException) -> None:
        """The shards can no longer be trusted: the job must end."""


class Reducer:
    """Owns the shards of one server in one job."""

    def __init__(self, *, me: str, tracer: Tracer, surroundings: Surroundings) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._me, self._tracer, self._around = me, tracer, surroundings
        self._followers: list[Channel] = []
        self._askers: dict[str, Channel] = {}
        self._gathering: dict[int, None] = {}  # shards whose sum may take more of what is in the inbox
        self._peers: dict[str, Channel] = {}
        self._owned: dict[int, OwnedShard | OwnedRows] = {}
        self._pulls: dict[int, list[_Pull]] = {}  # those that wait, by shard
        self._tickets: dict[int, _Arrived] = {}
        self._next_ticket = 0
        self._held_bytes = 0
        self._hold_limit = 0
        self._number = ViewNumber()
        self._machine: ServerMachine | None = None
        self._answer_to: Channel | None = None
        self._writer: SnapshotWriter | None = None
        self._snapshot = ""
        self._to_copy: dict[int, int] = {}
        self._arrivals: dict[str, float] = {}
        self._added: dict[int, int] = {}  # contributions in a shard's sum
        self._told_added: dict[int, int] = {}  # of a shard that we are the backup of: the same at its primary
        self._filled_under: dict[int, ViewNumber] = {}
        self._scratch = Scratch()  # of this thread, which encodes versions
        self._ledger: deque[Applied] = deque(maxlen=_LEDGER)
        self._snapshots_url = ""
        self._memories: Memories | None = None  # in a job whose workers remember something of their replicas
        self._thread = threading.Thread(target=self._run, name="reduce", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what is in the inbox."""
        self.inbox.put(None)
        self._thread.join()
        if self._writer is not None:
            self._writer.close()

    def _run(self) -> None:
        while True:
            call = self._next()
            if call is None:
                return
            try:
                call()
                for index in list(self._pulls):  # only now: in the midst of effects a machine is ahead of its tensors
                    self._answer_pulls(index)
            except Exception as error:  # whatever it was, the shards can no longer be trusted: the job must end
                self._around.failed(error)
                return

    def _next(self) -> Callable[[], None] | None:
        if not self._to_copy and not self._gathering:
            return self.inbox.get()
        try:
            return self.inbox.get_nowait()
        except queue.Empty:
            return self._fold_one if self._gathering else self._copy_one

    # ---- what the inbox's calls do: only ever on the owner's thread ----

    def prepare(
        self, record: JobRecord, config: JobConfig, pool: BufferPool, pools: BufferPools,
        writer: SnapshotWriter | None, url: str,
    ) -> None:  # fmt: skip
        """The job is known: views can come."""
        shards = record.layout.shards
        self._shards, self._tables, self._config = shards, record.layout.tables, config
        self._pool, self._pools = pool, pools
        self._hold_limit = config.hold_bytes
        self._writer, self._snapshots_url = writer, url
        self._machine = ServerMachine(self._me, plan_of(config, shards))
        self._cadence = self._machine.plan.cadence
        if any(map(remembers, config.codecs)):
            self._memories = Memories(self._me, ShardMemories(config), config.replicas, self._send_to_worker)

    @property
    def machine(self) -> ServerMachine:
        """The machine, once the job is known."""
        assert self._machine is not None
        return self._machine

    def adopt(self, view: View) -> None:
        """A new view."""
        before = self.machine.view
        if before is not None and (before.primary != view.primary or before.since != view.since):
            self._abandon_snapshot()
        self._number = view.number
        stayed = {member.id for member in view.servers if before is not None and member in before.servers}
        self._peers = {id: channel for id, channel in self._peers.items() if id in stayed}
        if self._memories is not None:
            self._memories.adopt(view)
        self._run_all(self.machine.adopt(view))

    def admitted(self, new: bool) -> None:
        """The coordinator has taken us (back): what it may have forgotten is said again."""
        if new or self._machine is None:
            return
        if self._machine.in_step:
            self._around.say(InStep(self._machine.in_step))
        for entry in self._ledger:
            self._around.say(entry)

    def peer_linked(self, peer: str, channel: Channel) -> None:
        """The link to another server stands."""
        self._peers[peer] = channel
        self._run_all(self.machine.peer_linked(peer))

    def peer_lost(self, peer: str, channel: Channel) -> None:
        """The link to another server is gone."""
        if self._peers.get(peer) is channel:
            del self._peers[peer]
            self.machine.peer_lost(peer)

    def follow(self, channel: Channel) -> None:
        """Send the newest version of every shard, and every one from now on."""
        if channel not in self._followers:
            self._followers.append(channel)
        for index in self.machine.held:
            machine = self.machine.machine(index)
            if machine is not None and machine.primary and machine.published >= 0:
                self._send_version(channel, index, machine.published)

    def unfollow(self, channel: Channel) -> None:
        """The channel is gone, or wants no more."""
        if channel in self._followers:
            self._followers.remove(channel)

    def linked(self, channel: Channel, worker: str) -> None:
        """A worker has connected (again): what its channel before this one still brings of wants does not count.

        Both may have waited for the same view, and be told of it in any order.
        """
        if (other := self._askers.get(worker)) is None or other.number < channel.number:
            self._askers[worker] = channel

    def gone(self, channel: Channel, worker: str) -> None:
        """The channel is closed."""
        self.unfollow(channel)
        for index, pulls in self._pulls.items():
            self._pulls[index] = [pull for pull in pulls if pull.channel is not channel]
        if self._askers.get(worker) is channel:
            del self._askers[worker]
            if self._machine is not None:
                self._run_all(self._machine.unfollowed(worker))

    def want(self, channel: Channel, worker: str, index: int, replica: int) -> None:
        """A worker wants the parameters for a replica's next step."""
        if self._askers.get(worker) is channel and self.machine.is_primary(index):
            self._handle(index, shard_events.Want(worker, replica))

    def fetch(self, channel: Channel, index: int, version: int) -> None:
        """Send one version again, if it is still kept; otherwise a newer one has been sent anyway."""
        machine = self.machine.machine(index)
        if machine is not None and self._owned[index].keeps(version) and version <= machine.published:
            self._send_version(channel, index, version)

    def pull(self, channel: Channel, header: Header, ids: Ids) -> None:
        """A worker wants rows of a table's part, at a version that may be still to come."""
        self._pulls.setdefault(header.shard, []).append(_Pull(channel, header, ids))

    def initialise(self, channel: Channel, header: Header, buffer: Buffer) -> None:
        """The version of a shard that all begin with: 0, or what the worker that brings it has come to."""
        if self._wanted(channel, header, buffer):
            ticket = self._ticket(channel, header, buffer)
            version = header.step if self._config.stateful_workers else 0
            self._handle(header.shard, shard_events.Initialise(ticket, version))

    def contribute(self, channel: Channel, worker: str, header: Header, buffer: Buffer) -> None:
        """A contribution to a shard's step, and what its worker wants next."""
        if not self._wanted(channel, header, buffer):
            return
        if self._in_ledger(header.shard, header.step):
            self._arrivals[channel.name] = time.monotonic()
        if self._memories is not None and header.replica < self._config.replicas:
            self._memories.contributed(header, worker, self._upcoming(header))
        event = shard_events.Contribute(
            step=header.step, replica=header.replica, weight=header.weight,
            ticket=self._ticket(channel, header, buffer), finite=not header.flags & NOT_FINITE, base=header.base,
        )  # fmt: skip
        self._handle(header.shard, event)
        if header.wanted is not None:
            self.want(channel, worker, header.shard, header.wanted)

    def memory_given(self, header: Header, data: memoryview, worker: str) -> None:
        """What a worker's codec remembers of a replica that it computes no longer."""
        if self._memories is None or not self.machine.is_primary(header.shard):
            return
        if header.base == COPY:
            self._memories.copied(header, data)
            self._put_complete(header.shard, at_last=False)
        else:
            self._memories.given(header, data, worker, self._upcoming(header))

    def memory_recalled(self, channel: Channel, header: Header, worker: str) -> None:
        """A worker that is to compute a replica wants what the one before remembered of it."""
        current = self._askers.get(worker) is channel and self.machine.is_primary(header.shard)
        if self._memories is not None and current:
            self._memories.recalled(header, worker, self._upcoming(header))

    def _upcoming(self, header: Header) -> int:
        """The next step of which the shard takes that replica's contribution."""
        machine = self.machine.machine(header.shard)
        assert machine is not None
        if header.replica >= machine.expected:
            return machine.version
        return machine.clock(header.replica) + machine.knows(header.replica)

    def _send_to_worker(self, worker: str, header: Header, payload: memoryview | None) -> None:
        if (channel := self._askers.get(worker)) is not None:
            channel.send(header._replace(view=self._number), payload)

    def replicated(self, channel: Channel, sender: str, header: Header, buffer: Buffer) -> None:
        """A primary's update of a shard that we are the backup of."""
        if not self.machine.takes_from(header.shard, sender):
            buffer.release()
            return
        ticket = self._ticket(channel, header, buffer)
        self._tickets[ticket].credited = True  # servers give each other no credit
        self._held_bytes += header.length
        self._answer_to = channel
        self._told_added[header.shard] = header.base
        update = shard_events.Replicated(header.step, bool(header.flags & SKIP), ticket, header.replica, header.weight)
        self._handle(header.shard, update)
        self._answer_to = None

    def filled(self, channel: Channel, sender: str, record: ShardRecord) -> None:
        """A primary's whole state of a shard that we are the backup of."""
        if self.machine.takes_from(record.shard, sender):
            self._owned[record.shard].load(record)
            self._answer_to = channel
            self._handle(record.shard, shard_events.Loaded(record.version, record.clocks))
            self._answer_to = None

    def acked(self, peer: str, channel: Channel, index: int, version: int, number: ViewNumber) -> None:
        """A backup holds a version (an older view's word may be of a state that it has let go of since)."""
        view = self.machine.view
        current = self._peers.get(peer) is channel and view is not None and view.backup.get(index) == peer
        if current and self.machine.is_primary(index) and number >= self._filled_under.get(index, self._number):
            self._handle(index, shard_events.Acked(version))

    def told(self, step: int, measures: Iterable[clip.Measure]) -> None:
        """Another server's measures."""
        self._run_all(self.machine.told(step, measures))

    def capture(self, snapshot: str, version: int) -> None:
        """A snapshot is wanted of all shards that are primary here."""
        if self._writer is None or self._machine is None:
            return
        self._abandon_snapshot()
        own = [index for index in self.machine.held if self.machine.is_primary(index)]
        if not own:
            return
        self._snapshot = snapshot
        self._writer.begin(snapshot, len(own))
        self._run_all(self.machine.capture(version))

    # ---- effects ----

    def _handle(self, index: int, event: shard_events.Event) -> None:
        self._run_all(self.machine.handle(index, event))

    def _run_all(self, effects: Sequence[server.Effect]) -> None:
        for effect in effects:
            match effect:
                case server.On(shard=index, effect=on):
                    self._run_on(index, self._owned[index], on)
                case server.Own(shard=index):
                    self._owned[index] = self._own(self._shards[index])
                case server.Disown(shard=index):
                    self._disown(index)
                case server.Restore(shards=indices, origin=origin):
                    self._restore(indices, origin)
                case clip.Tell():
                    self._tell(effect)
                case clip.Verdict():
                    if effect.scale is None or not math.isfinite(effect.norm):
                        self._around.not_finite(effect)
                        if effect.scale is not None and self._config.nonfinite == "stop":
                            continue  # the job ends here, and a snapshot shall not catch what comes of this step
                    # On the inbox, not here: the shard whose Finish brought the verdict is still running its effects.
                    self.inbox.put(lambda verdict=effect: self._run_all(self.machine.decided(verdict)))  # type: ignore[misc]

    def _own(self, place: Shard) -> OwnedShard | OwnedRows:
        if self._config.stateful_workers and place.role == "parameters":
            return AveragedShard(place, self._config, self._pool, self._scratch)
        if place.part is None:
            return OwnedShard(place, self._config, self._pool, self._scratch)
        return OwnedRows(place, self._tables[place.part.table].name, self._config, self._pools)

    def _run_on(self, index: int, owned: OwnedShard | OwnedRows, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Take(ticket=ticket, weight=weight, base=base):
                owned.take(self._settle(ticket), weight, base)
                self._count(index, first=True)
            case shard_effects.Add(ticket=ticket, weight=weight, base=base):
                with self._tracer.span("reduce", shard=index):
                    owned.add(self._settle(ticket), weight, base)
                self._count(index, first=False)
            case shard_effects.Hold(ticket=ticket):
                self._hold(ticket)
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._drop(ticket, fault)
            case shard_effects.Finish():
                self._finish(owned, effect)
            case shard_effects.Apply():
                self._apply(index, owned, effect)
            case shard_effects.Publish(version=version):
                self._publish(index, version)
            case shard_effects.Reply():
                self._reply(index, effect)
            case shard_effects.Gather():
                self._gathering[index] = None
            case shard_effects.Install(ticket=ticket, version=version):
                nbytes = self._tickets[ticket].nbytes
                owned.install(self._settle(ticket), version, nbytes)
            case shard_effects.Abandon():
                owned.abandon()
            case _:
                self._run_rare(index, owned, effect)

    def _run_rare(self, index: int, owned: OwnedShard | OwnedRows, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Fill(version=version):
                data = encode_record(owned.state(version, self._clocks(index), wires=True), "none")
                self._filled_under[index] = self._number
                header = Header(Kind.STATE, self._number, shard=index, step=version, length=len(data))
                self._backup_of(index).send(header, memoryview(data))
            case shard_effects.Wait(follower=follower, replica=replica, clock=clock):
                header = Header(Kind.WAIT, self._number, shard=index, base=clock, wants=wants(replica))
                self._askers[follower].send(header, urgent=True)
            case shard_effects.Acknowledge(version=version):
                if self._answer_to is not None:
                    self._answer_to.send(Header(Kind.ACK, self._number, shard=index, step=version), urgent=True)
            case shard_effects.InStep():
                self._around.say(InStep({index: self.machine.in_step[index]}))
            case shard_effects.Capture(version=version, missed=True):
                self._around.say(NotStored(self._snapshot, "a step was quicker than the word", version))
            case shard_effects.Capture(version=version):
                self._to_copy[index] = version
            case _:
                raise AssertionError(f"an effect that nobody runs: {effect}")

    def _finish(self, owned: OwnedShard | OwnedRows, effect: shard_effects.Finish) -> None:
        owned.mean(effect.total_weight)
        if effect.measure and owned.measured:
            measure = clip.Measure(owned.shard.index, owned.norm(), effect.not_finite)
            self._run_all(self.machine.measured(effect.step, measure))

    def _apply(self, index: int, owned: OwnedShard | OwnedRows, effect: shard_effects.Apply) -> None:
        if index in self._to_copy:
            self._copy(index)
        self._put_complete(index, at_last=True)
        self._gathering.pop(index, None)
        with self._tracer.span("apply", shard=index, step=effect.step):
            finished = owned.apply(self._timed(index, effect))
        if self._in_ledger(index, effect.version - 1):
            self._enter(index, self._cadence.tick_of(index, effect.version - 1))
        if finished is None:
            return
        buffer, nbytes = finished
        skip = effect.scale is None
        header = Header(
            Kind.REPLICATE, self._number, shard=index, step=effect.version - 1, flags=SKIP if skip else 0,
            length=0 if skip else nbytes, replica=effect.replica, weight=effect.rate,
            base=self._added.get(index, 0),
        )  # fmt: skip
        self._backup_of(index).send(header, None if skip else buffer.bytes[:nbytes], sent=buffer.release)

    def _timed(self, index: int, effect: shard_effects.Apply) -> shard_effects.Apply:
        """With its place in the schedule as the job counts rounds."""
        if self._cadence.together:
            return effect
        return replace(effect, step=self._cadence.tick_of(index, effect.step))

    def _in_ledger(self, index: int, version: int) -> bool:
        """Is it this shard's next update, at that version, that stands for its round?"""
        return self._cadence.witness(self._cadence.tick_of(index, version)) == index

    def _backup_of(self, index: int) -> Channel:
        assert self.machine.view is not None
        return self._peers[self.machine.view.backup[index]]

    def _tell(self, tell: clip.Tell) -> None:
        data = memoryview(_measures.encode(tell.measures))
        for peer in self._peers.values():
            peer.send(Header(Kind.MEASURES, self._number, step=tell.step, length=len(data)), data, urgent=True)

    def _publish(self, index: int, version: int) -> None:
        for channel in self._followers:
            self._send_version(channel, index, version)

    def _reply(self, index: int, reply: shard_effects.Reply) -> None:
        if (channel := self._askers.get(reply.follower)) is None:
            return
        owned = self._owned[index]
        code, buffer, nbytes = owned.raw(reply.version) if reply.last else owned.encoded(reply.version)
        header = Header(
            Kind.VERSION, self._number, shard=index, step=reply.version, length=nbytes, codec=code, base=reply.clock,
            wants=wants(reply.replica),
        )  # fmt: skip
        channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release)

    def _answer_pulls(self, index: int) -> None:
        """Rows for whoever can have them now; those who ask a server that is not the primary will ask another."""
        pulls, self._pulls[index] = self._pulls.pop(index), []
        if self.machine.is_primary(index):
            self._pulls[index] = [pull for pull in pulls if not self._send_rows(index, pull)]
        if not self._pulls[index]:
            del self._pulls[index]

    def _send_rows(self, index: int, pull: _Pull) -> bool:
        """False: there is no such version yet."""
        machine, owned, asked = self.machine.machine(index), self._owned[index], pull.header
        assert machine is not None
        assert isinstance(owned, OwnedRows)
        kept = owned.keeps(asked.step) and asked.step <= machine.published
        newest_will_do = bool(asked.flags & NEWEST)
        if not kept and (machine.published < 0 or (asked.step > machine.published and not newest_will_do)):
            return False
        answer = Header(Kind.ROWS, self._number, shard=index, step=asked.step, base=asked.base)
        if not kept and not newest_will_do:
            pull.channel.send(answer._replace(flags=SKIP))
            return True
        version = asked.step if kept else machine.published
        with self._tracer.span("rows", shard=index, version=version):
            buffer, nbytes = owned.rows(version, pull.ids)
        answer = answer._replace(step=version, length=nbytes)
        pull.channel.send(answer, buffer.bytes[:nbytes], sent=buffer.release)
        return True

    def _fold_one(self) -> None:
        index = next(iter(self._gathering))
        del self._gathering[index]
        self._handle(index, shard_events.Fold())

    def _clocks(self, index: int) -> Sequence[int]:
        machine = self.machine.machine(index)
        return machine.clocks if machine is not None else ()

    def _count(self, index: int, *, first: bool) -> None:
        self._added[index] = 1 if first else self._added[index] + 1

    def _enter(self, index: int, step: int) -> None:
        """The ledger of the first shard that is due, which primary and backup both keep: one of them may die."""
        first = min(self._arrivals.values(), default=0.0)
        late = {worker: round(when - first, 4) for worker, when in self._arrivals.items()}
        self._arrivals.clear()
        added = (self._added if self.machine.is_primary(index) else self._told_added).get(index, 0)
        entry = Applied(step, added, time.time(), late)
        self._ledger.append(entry)
        self._around.say(entry)
        self._account(step)

    def _account(self, step: int) -> None:
        """Now and then, and at the end, what has become of the contributions: where not every one is applied alike."""
        machine = self.machine.machine(0)
        if machine is None or not machine.primary or self._config.policy == Sync():
            return
        ended = (machine.slowest if machine.policy.streaming else machine.version) >= self._config.rounds
        if ended or step % _ACCOUNT_EVERY == 0:
            tally = machine.tally
            self._around.say(
                Accounted(tally.applied, tally.folded, tally.dropped, tally.repeats, dict(tally.staleness))
            )

    def _send_version(self, channel: Channel, index: int, version: int) -> None:
        owned = self._owned[index]
        # The last version goes as it is: it is what the job was for.
        last = version >= self.machine.plan.rounds_of(index)
        code, buffer, nbytes = owned.raw(version) if last else owned.encoded(version)
        header = Header(Kind.VERSION, self._number, shard=index, step=version, length=nbytes, codec=code)
        if isinstance(owned, AveragedShard):
            header = owned.named(header)
        channel.send(header, buffer.retain().bytes[:nbytes], sent=buffer.release)

    def _disown(self, index: int) -> None:
        for ticket in [t for t, arrived in self._tickets.items() if arrived.shard == index]:
            self._settle(ticket).release()
        self._to_copy.pop(index, None)
        self._gathering.pop(index, None)
        self._owned.pop(index).release()

    def _restore(self, indices: Sequence[int], origin: str) -> None:
        store = SnapshotStore(self._snapshots_url)
        for record in store.read(store.load(origin), indices):
            self._owned[record.shard].load(record)
            if self._memories is not None:
                self._memories.restored(record, self._shards[record.shard])
            self._handle(record.shard, shard_events.Loaded(record.version, record.clocks))

    # ---- snapshots ----

    def _copy_one(self) -> None:
        self._copy(next(iter(self._to_copy)))

    def _copy(self, index: int) -> None:
        version = self._to_copy.pop(index)
        if self._writer is None:
            return
        with self._tracer.span("capture", shard=index, version=version):
            record = own_copy(self._owned[index].state(version, self._clocks(index), wires=False))
        goes_on = not self._config.streaming and 0 < version < self.machine.plan.rounds_of(index)
        if self._memories is None or not goes_on or not self._memories.awaited(record, self._shards[index]):
            self._writer.put(record)

    def _put_complete(self, index: int, *, at_last: bool) -> None:
        """Copies of memories may have come after the state was copied; with the next update all are here."""
        if self._memories is not None and (record := self._memories.complete(index, at_last=at_last)) is not None:
            assert self._writer is not None
            self._writer.put(record)

    def _abandon_snapshot(self) -> None:
        self._to_copy.clear()
        if self._memories is not None:
            self._memories.abandon()
        if self._writer is not None:
            self._writer.abandon()

    # ---- tickets and credits ----

    def _wanted(self, channel: Channel, header: Header, buffer: Buffer) -> bool:
        """Are we the shard's primary? If not, its sender has an older view, and will send it where it belongs."""
        if self.machine.is_primary(header.shard):
            return True
        buffer.release()
        channel.send(Header(Kind.CREDIT, self._number, replica=1), urgent=True)
        return False

    def _ticket(self, channel: Channel, header: Header, buffer: Buffer) -> int:
        self._next_ticket += 1
        self._tickets[self._next_ticket] = _Arrived(header.shard, channel, buffer, header.length)
        return self._next_ticket

    def _settle(self, ticket: int) -> Buffer:
        arrived = self._tickets.pop(ticket)
        if arrived.credited:
            self._held_bytes -= arrived.nbytes
        else:
            self._credit(arrived)
        return arrived.buffer

    def _hold(self, ticket: int) -> None:
        arrived = self._tickets[ticket]
        if self._held_bytes + arrived.nbytes <= self._hold_limit:
            arrived.credited = True
            self._held_bytes += arrived.nbytes
            self._credit(arrived)

    def _drop(self, ticket: int, fault: str) -> None:
        channel = self._tickets[ticket].channel
        self._settle(ticket).release()
        if fault:
            channel.refuse(fault)

    def _credit(self, arrived: _Arrived) -> None:
        arrived.channel.send(Header(Kind.CREDIT, self._number, replica=1), urgent=True)


def plan_of(config: JobConfig, shards: Sequence[Shard]) -> Plan:
    """What the machine needs to know of a job."""
    parameters = frozenset(s.index for s in shards if s.role != "buffers")
    waiting = frozenset(s.index for s in shards) if config.nonfinite == "skip" else parameters
    policy = config.policy
    return Plan(
        policy=policy, expected=[config.contributors(s.role) for s in shards], measured=parameters,
        decides=waiting if config.decides else frozenset(), clip=config.clip if config.clips_on_servers else None,
        skip_not_finite=config.nonfinite == "skip", rounds=config.rounds,
        buffer_policy=Sync(quorum=1) if config.contributors("buffers") > 1 else None,
        compensates=isinstance(policy, Async) and policy.delay_compensation > 0, cadence=cadence_of(config, shards),
    )  # fmt: skip
