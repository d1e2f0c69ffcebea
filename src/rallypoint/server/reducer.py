"""The one thread that owns a server's shards: takes events from its inbox, runs the machines' effects on tensors.

Single owner, so no tensor has a lock. Everything that arrives from the network comes through `Reducer.inbox` as a call.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from rallypoint.codec.scratch import Scratch
from rallypoint.codec.spec import has_state
from rallypoint.codec.state import ShardCodecStates
from rallypoint.config import JobConfig, cadence_of
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Shard
from rallypoint.core.policy import Async, Sync
from rallypoint.core.shard import clip, server
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.server import Plan, ServerMachine
from rallypoint.core.view import View, ViewNumber
from rallypoint.net.channel import Channel
from rallypoint.net.frames import COPY, NOT_FINITE, SKIP, Header, Kind, wants
from rallypoint.net.messages import CaughtUp, Message, NotStored
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.observe.observed import observed
from rallypoint.observe.trace import Tracer
from rallypoint.server.averaged import AveragedShard
from rallypoint.server.capture import Capture
from rallypoint.server.codec_states import CodecStates
from rallypoint.server.followers import Followers
from rallypoint.server.ledger import Ledger
from rallypoint.server.owned import OwnedShard
from rallypoint.server.pulls import Pulls
from rallypoint.server.rows import Ids, OwnedRows
from rallypoint.server.tickets import Tickets
from rallypoint.store.record import ShardRecord, encode_record
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.writer import SnapshotWriter

_measures = msgspec.msgpack.Encoder()


class Context(Protocol):
    """Whom the reducer talks to beside followers and peers: the service."""

    def say(self, message: Message) -> None:
        """Tell the coordinator."""

    def not_finite(self, verdict: clip.Verdict) -> None:
        """A step was skipped, or must stop the job."""

    def failed(self, error: BaseException) -> None:
        """The shards can no longer be trusted: the job must end."""


class Reducer:
    """Owns the shards of one server in one job."""

    def __init__(self, *, me: str, tracer: Tracer, context: Context) -> None:
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._me, self._tracer, self._context = me, tracer, context
        self._gathering: dict[int, None] = {}  # shards whose sum may take more of what is in the inbox
        self._peers: dict[str, Channel] = {}
        self._owned: dict[int, OwnedShard | OwnedRows] = {}
        self._number = self._generation = ViewNumber()
        self._followers = Followers(self._owned, lambda: self._number)
        self._pulls = Pulls(tracer)
        self._tickets = Tickets(lambda: self._number)
        self._ledger = Ledger(context.say)
        self._machine: ServerMachine | None = None
        self._answer_to: Channel | None = None
        self._capture: Capture | None = None  # where snapshots are stored
        self._filled_under: dict[int, ViewNumber] = {}
        self._scratch = Scratch()  # of this thread, which encodes versions
        self._snapshots_url = ""
        self._codec_states: CodecStates | None = None  # in a job whose workers remember something of their replicas
        self._thread = threading.Thread(target=self._run, name="reduce", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what is in the inbox."""
        self.inbox.put(None)
        self._thread.join()
        if self._capture is not None:
            self._capture.close()

    def _run(self) -> None:
        while True:
            call = self._next()
            if call is None:
                return
            try:
                call()
                for index in self._pulls.shards:  # only now: in the midst of effects a machine is ahead of its tensors
                    self._answer_pulls(index)
            except Exception as error:  # whatever it was, the shards can no longer be trusted: the job must end
                self._context.failed(error)
                return

    def _next(self) -> Callable[[], None] | None:
        in_idle_time: Callable[[], None] | None = None
        if self._gathering:
            in_idle_time = self._fold_one
        elif self._capture is not None and self._capture.due:
            in_idle_time = self._capture.copy_one
        try:
            return self.inbox.get(block=in_idle_time is None)
        except queue.Empty:
            return in_idle_time

    # ---- what the inbox's calls do: only ever on the owner's thread ----

    def prepare(
        self, record: JobRecord, config: JobConfig, pool: BufferPool, pools: BufferPools,
        writer: SnapshotWriter | None, url: str,
    ) -> None:  # fmt: skip
        """The job is known: views can come."""
        shards = record.layout.shards
        self._shards, self._tables, self._config = shards, record.layout.tables, config
        self._pool, self._pools = pool, pools
        self._tickets.limit = config.hold_bytes
        self._snapshots_url = url
        self._machine = observed(ServerMachine(self._me, plan_of(config, shards)), self._me)
        self._cadence = self._machine.plan.cadence
        if any(map(has_state, config.codecs)):
            self._codec_states = CodecStates(self._me, ShardCodecStates(config), config.replicas, self._followers.tell)
        if writer is not None:
            self._capture = Capture(
                writer, config, self._machine.plan, shards, self._codec_states, self._stored_state, self._tracer,
                wake=lambda: self.inbox.put(_nothing),
            )  # fmt: skip

    @property
    def machine(self) -> ServerMachine:
        """The machine, once the job is known."""
        assert self._machine is not None
        return self._machine

    def adopt(self, view: View) -> None:
        """A new view."""
        before = self.machine.view
        moved = before is not None and (before.primary != view.primary or before.generation != view.generation)
        if moved and self._capture is not None:
            self._capture.abandon()
        self._number, self._generation = view.number, view.generation
        computing = view.assignments[-1].replicas if view.assignments else {}
        self._followers.share(self._config.in_flight_bytes, sum(map(bool, computing.values())))
        stayed = {member.id for member in view.servers if before is not None and member in before.servers}
        self._peers = {id: channel for id, channel in self._peers.items() if id in stayed}
        if self._codec_states is not None:
            self._codec_states.adopt(view)
        self._run_all(self.machine.adopt(view))

    def admitted(self, new: bool) -> None:
        """The coordinator has taken us (back): what it may have forgotten is said again."""
        if new or self._machine is None:
            return
        if self._machine.caught_up:
            self._context.say(CaughtUp(self._machine.caught_up))
        self._ledger.repeat()

    def peer_linked(self, peer: str, channel: Channel) -> None:
        """The link to another server stands."""
        self._peers[peer] = channel
        self._run_all(self.machine.peer_linked(peer))

    def peer_lost(self, peer: str, channel: Channel) -> None:
        """The link to another server is gone."""
        if self._peers.get(peer) is channel:
            del self._peers[peer]
            self._run_all(self.machine.peer_lost(peer))

    def follow(self, channel: Channel) -> None:
        """Send the newest version of every shard, and every one from now on."""
        self._followers.follow(channel)
        for index in self.machine.held:
            machine = self.machine.machine(index)
            if machine is not None and machine.primary and machine.published >= 0:
                self._followers.send(channel, index, machine.published, last=self._is_last(index, machine.published))

    def unfollow(self, channel: Channel) -> None:
        """The channel wants no more."""
        self._followers.unfollow(channel)

    def linked(self, channel: Channel, worker: str) -> None:
        """A worker has connected (again)."""
        self._followers.linked(channel, worker)

    def gone(self, channel: Channel, worker: str) -> None:
        """The channel is closed."""
        self._pulls.gone(channel)
        if self._followers.gone(channel, worker) and self._machine is not None:
            self._run_all(self._machine.unfollowed(worker))

    def want(self, channel: Channel, worker: str, index: int, replica: int) -> None:
        """A worker wants the parameters for a replica's next step."""
        if self._followers.current(channel, worker) and self.machine.is_primary(index):
            self._handle(index, shard_events.Want(worker, replica))

    def fetch(self, channel: Channel, index: int, version: int) -> None:
        """Send one version again, if it is still kept; otherwise a newer one has been sent anyway."""
        machine = self.machine.machine(index)
        if machine is not None and self._owned[index].keeps(version) and version <= machine.published:
            self._followers.send(channel, index, version, last=self._is_last(index, version))

    def pull(self, channel: Channel, header: Header, ids: Ids) -> None:
        """A worker wants rows of a table's part, at a version that may be still to come."""
        self._pulls.add(channel, header, ids)

    def initialise(self, channel: Channel, header: Header, buffer: Buffer) -> None:
        """The version of a shard that all begin with: 0, or what the worker that brings it has come to."""
        if self._wanted(channel, header, buffer):
            ticket = self._tickets.issue(channel, header, buffer)
            version = header.step if self._config.stateful_workers else 0
            self._handle(header.shard, shard_events.Initialise(ticket, version))

    def contribute(self, channel: Channel, worker: str, header: Header, buffer: Buffer) -> None:
        """A contribution to a shard's step, and what its worker wants next."""
        if not self._wanted(channel, header, buffer):
            return
        if self._in_ledger(header.shard, header.step):
            self._ledger.arrived(channel.name)
        if self._codec_states is not None and header.replica < self._config.replicas:
            self._codec_states.contributed(header, worker, self._upcoming(header))
        event = shard_events.Contribute(
            step=header.step, replica=header.replica, weight=header.weight,
            ticket=self._tickets.issue(channel, header, buffer), finite=not header.flags & NOT_FINITE, base=header.base,
        )  # fmt: skip
        self._handle(header.shard, event)
        if header.wanted is not None:
            self.want(channel, worker, header.shard, header.wanted)

    def codec_state_given(self, header: Header, data: memoryview, worker: str) -> None:
        """What a worker's codec remembers of a replica that it computes no longer."""
        if self._codec_states is None or self._is_stale(header.view) or not self.machine.is_primary(header.shard):
            return
        if header.base == COPY:
            self._codec_states.copied(header, data)
            if self._capture is not None:
                self._capture.codec_state_came(header.shard)
        else:
            self._codec_states.given(header, data, worker, self._upcoming(header))

    def codec_state_recalled(self, channel: Channel, header: Header, worker: str) -> None:
        """A worker that is to compute a replica wants what the one before remembered of it."""
        current = self._followers.current(channel, worker) and self.machine.is_primary(header.shard)
        if self._codec_states is not None and current:
            self._codec_states.recalled(header, worker, self._upcoming(header))

    def _upcoming(self, header: Header) -> int:
        """The next step of which the shard takes that replica's contribution."""
        machine = self.machine.machine(header.shard)
        assert machine is not None
        if header.replica >= machine.expected:
            return machine.version
        return machine.clock(header.replica) + machine.knows(header.replica)

    def replicated(self, channel: Channel, sender: str, header: Header, buffer: Buffer) -> None:
        """A primary's update of a shard that we are the backup of."""
        if self._is_stale(header.view) or not self.machine.takes_from(header.shard, sender):
            buffer.release()
            return
        ticket = self._tickets.issue(channel, header, buffer, credited=True)
        self._answer_to = channel
        self._ledger.told(header.shard, header.base)
        update = shard_events.Replicated(header.step, bool(header.flags & SKIP), ticket, header.replica, header.weight)
        self._handle(header.shard, update)
        self._answer_to = None

    def filled(self, channel: Channel, sender: str, record: ShardRecord, number: ViewNumber) -> None:
        """A primary's whole state of a shard that we are the backup of."""
        if not self._is_stale(number) and self.machine.takes_from(record.shard, sender):
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

    def told(self, step: int, measures: Iterable[clip.Measure], number: ViewNumber) -> None:
        """Another server's measures."""
        if not self._is_stale(number):
            self._run_all(self.machine.told(step, measures))

    def capture(self, snapshot: str, version: int) -> None:
        """A snapshot is wanted of all shards that are primary here."""
        if self._capture is None:
            return
        self._capture.abandon()
        own = [index for index in self.machine.held if self.machine.is_primary(index)]
        if not own:
            return
        self._capture.begin(snapshot, len(own))
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
                        self._context.not_finite(effect)
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
                owned.take(self._tickets.settle(ticket), weight, base)
                self._ledger.count(index, first=True)
            case shard_effects.Add(ticket=ticket, weight=weight, base=base):
                with self._tracer.span("reduce", shard=index):
                    owned.add(self._tickets.settle(ticket), weight, base)
                self._ledger.count(index, first=False)
            case shard_effects.Hold(ticket=ticket):
                self._tickets.hold(ticket)
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._tickets.drop(ticket, fault)
            case shard_effects.Finish():
                self._finish(owned, effect)
            case shard_effects.Apply():
                self._apply(index, owned, effect)
            case shard_effects.Publish(version=version):
                self._followers.publish(index, version, last=self._is_last(index, version))
            case shard_effects.Reply():
                self._followers.reply(index, effect)
            case shard_effects.Gather():
                self._gathering[index] = None
            case shard_effects.Install(ticket=ticket, version=version):
                nbytes = self._tickets.nbytes(ticket)
                owned.install(self._tickets.settle(ticket), version, nbytes)
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
                wait = Header(Kind.WAIT, shard=index, base=clock, wants=wants(replica))
                self._followers.tell(follower, wait, urgent=True)
            case shard_effects.Acknowledge(version=version):
                if self._answer_to is not None:
                    self._answer_to.send(Header(Kind.ACK, self._number, shard=index, step=version), urgent=True)
            case shard_effects.CaughtUp():
                self._context.say(CaughtUp({index: self.machine.caught_up[index]}))
            case shard_effects.Capture(version=version, missed=missed):
                assert self._capture is not None
                if missed:
                    self._context.say(NotStored(self._capture.snapshot, "a step was quicker than the word", version))
                else:
                    self._capture.wanted(index, version)
            case _:
                raise AssertionError(f"an effect that nobody runs: {effect}")

    def _finish(self, owned: OwnedShard | OwnedRows, effect: shard_effects.Finish) -> None:
        owned.mean(effect.total_weight)
        if effect.measure and owned.measured:
            measure = clip.Measure(owned.shard.index, owned.norm(), effect.not_finite)
            self._run_all(self.machine.measured(effect.step, measure))

    def _apply(self, index: int, owned: OwnedShard | OwnedRows, effect: shard_effects.Apply) -> None:
        if self._capture is not None:
            self._capture.before_update(index)
        self._gathering.pop(index, None)
        with self._tracer.span("apply", shard=index, step=effect.step):
            finished = owned.apply(self._timed(index, effect))
        if self._in_ledger(index, effect.version - 1):
            self._enter(index, self._cadence.round_of(index, effect.version - 1))
        if finished is None:
            return
        buffer, nbytes = finished
        skip = effect.scale is None
        header = Header(
            Kind.REPLICATE, self._number, shard=index, step=effect.version - 1, flags=SKIP if skip else 0,
            length=0 if skip else nbytes, replica=effect.replica, weight=effect.rate,
            base=self._ledger.added(index),
        )  # fmt: skip
        self._backup_of(index).send(header, None if skip else buffer.bytes[:nbytes], sent=buffer.release)

    def _timed(self, index: int, effect: shard_effects.Apply) -> shard_effects.Apply:
        """With its place in the schedule as the job counts rounds."""
        if self._cadence.together:
            return effect
        return replace(effect, step=self._cadence.round_of(index, effect.step))

    def _in_ledger(self, index: int, version: int) -> bool:
        """Is it this shard's next update, at that version, that stands for its round?"""
        return self._cadence.witness(self._cadence.round_of(index, version)) == index

    def _backup_of(self, index: int) -> Channel:
        assert self.machine.view is not None
        return self._peers[self.machine.view.backup[index]]

    def _tell(self, tell: clip.Tell) -> None:
        data = memoryview(_measures.encode(tell.measures))
        for peer in self._peers.values():
            peer.send(Header(Kind.MEASURES, self._number, step=tell.step, length=len(data)), data, urgent=True)

    def _is_last(self, index: int, version: int) -> bool:
        return version >= self.machine.plan.rounds_of(index)

    def _answer_pulls(self, index: int) -> None:
        machine, owned = self.machine.machine(index), self._owned.get(index)
        if machine is None or not machine.primary:
            self._pulls.refuse(index)
            return
        assert isinstance(owned, OwnedRows)
        self._pulls.answer(index, machine, owned, self._number)

    def _fold_one(self) -> None:
        index = next(iter(self._gathering))
        del self._gathering[index]
        self._handle(index, shard_events.Fold())

    def _clocks(self, index: int) -> Sequence[int]:
        machine = self.machine.machine(index)
        return machine.clocks if machine is not None else ()

    def _enter(self, index: int, step: int) -> None:
        """The ledger of the first shard that is due, which primary and backup both keep: one of them may die."""
        self._ledger.enter(index, step, primary=self.machine.is_primary(index))
        machine = self.machine.machine(0)
        if machine is not None and machine.primary and self._config.policy != Sync():
            self._ledger.account(machine, step, self._config.rounds)

    def _disown(self, index: int) -> None:
        self._tickets.drop_all(index)
        if self._capture is not None:
            self._capture.disowned(index)
        self._gathering.pop(index, None)
        self._owned.pop(index).release()

    def _restore(self, indices: Sequence[int], origin: str) -> None:
        store = SnapshotStore(self._snapshots_url)
        for record in store.read(store.load(origin), indices):
            self._owned[record.shard].load(record)
            if self._codec_states is not None:
                self._codec_states.restored(record, self._shards[record.shard])
            self._handle(record.shard, shard_events.Loaded(record.version, record.clocks))

    def _stored_state(self, index: int, version: int) -> ShardRecord:
        return self._owned[index].state(version, self._clocks(index), wires=False)

    def _is_stale(self, number: ViewNumber) -> bool:
        """Was it said in a past that is void (I10)? Whoever received it has looked; but a view may have come since."""
        return number < self._generation

    def _wanted(self, channel: Channel, header: Header, buffer: Buffer) -> bool:
        """Are we the shard's primary? If not, its sender has an older view, and will send it where it belongs."""
        if self.machine.is_primary(header.shard) and not self._is_stale(header.view):
            return True
        buffer.release()
        self._tickets.credit(channel)
        return False


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


def _nothing() -> None:
    """Wakes the owner's thread, so that it looks again what there is to do in idle time."""
