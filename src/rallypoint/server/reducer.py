"""The thread that owns a server's shards: it takes events, asks the shell and the machine, and runs their effects."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from rallypoint.config import paces_by_port
from rallypoint.core.decisions import reductions_at
from rallypoint.core.layout import forward_ranks
from rallypoint.core.protocol import Capture, CaughtUp, Disproved, NotStored, Say, Unrestored
from rallypoint.core.shard import clip, server
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.shard.shell import Answer, ServerShell, applied_in
from rallypoint.errors import DamagedSnapshot
from rallypoint.net.channel import Channel
from rallypoint.net.frames import BAD_GRADIENT, NOT_FINITE, Header, Kind, wants
from rallypoint.net.pool import Buffer
from rallypoint.net.transport import Limits
from rallypoint.observe.observed import observed
from rallypoint.observe.trace import Tracer
from rallypoint.server import inbox
from rallypoint.server.held import LEAST_BESIDE, HeldShard, ShardFactory, newest_is_enough, worked_beside
from rallypoint.server.job import ServerJob
from rallypoint.server.member import Handler
from rallypoint.server.parts import (
    AuditReports,
    Fingerprints,
    Followers,
    LedgerEntries,
    PayloadTickets,
    Pulls,
    ReducerContext,
    Replication,
    StepVerdicts,
)
from rallypoint.server.snapshots import Restores, SnapshotCapture, StateRelay
from rallypoint.store.record import ShardRecord
from rallypoint.store.writer import SnapshotWriter

# ---- Runs the machine's effects, in order, on tensors, channels and the coordinator's link ----

AnyEffect = server.Effect | Answer[Channel]


@dataclass
class ReducerParts:
    """The objects that a reducer's effects are run on, in one job. Not thread-safe: only the owner thread uses it."""

    job: ServerJob
    shell: ServerShell[Channel]
    owned: dict[int, HeldShard]
    factory: ShardFactory
    tickets: PayloadTickets
    ledger: LedgerEntries
    fingerprints: Fingerprints | None  # None: the job has none
    audits: AuditReports
    followers: Followers
    replication: Replication
    decisions: StepVerdicts
    context: ReducerContext
    tracer: Tracer
    restores: Restores
    codec_states: StateRelay | None
    capture: SnapshotCapture | None
    gathering: dict[int, None] = field(default_factory=dict)  # shards whose sum may take more from the inbox


_MOST_WORK = 16  # shards whose additions wait, and shards that wait for threads: then the owner works, too
ForBackup = tuple[Buffer, int] | None  # what an update leaves: see `HeldShard.apply`


@dataclass
class _Update:
    """Work that another thread does. Its shard is that thread's until then: later effects on it wait."""

    made: Future[ForBackup]
    then: Callable[[ForBackup], None]
    waiting: deque[Callable[[], None]]


class ShardEffects:
    """Runs effects. Call `run`; the other methods each handle a group of effects.

    Much work on one shard is done by `threads`, if there are any, while the owner's thread goes on with other shards:
    updates, and additions to a sum that have come together while the owner had other events. It makes the rest when it
    is idle (`add_up`).

    Attributes:
        reductions: those of the view in force.
        adding: by shard, what is to be done to its sum.
        updating: by shard, the work that a thread does.
        began: by shard, when the thread began with it. Other threads may look.
    """

    def __init__(
        self, parts: ReducerParts, put: Callable[[inbox.Event], None], threads: Executor | None = None
    ) -> None:
        self._parts, self._put, self.threads = parts, put, threads
        self.adding: dict[int, list[Callable[[], None]]] = {}
        self.updating: dict[int, _Update] = {}
        self.began: dict[int, float] = {}
        self._beside, self.least = ({} if threads is None else worked_beside(parts.job)), LEAST_BESIDE
        self._cadence = parts.job.plan.cadence
        self._together = self._cadence.together
        self.reductions: tuple[int, ...] = ()
        # Looked up once, because every contribution uses them.
        self._owned, self._tickets, self._ledger, self._tracer = parts.owned, parts.tickets, parts.ledger, parts.tracer

    def run(self, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            match effect:
                case server.On(shard=index, effect=on):
                    if index in self.updating:
                        self.updating[index].waiting.append(partial(self._run_on, index, self._owned[index], on))
                    else:
                        self._run_on(index, self._owned[index], on)
                case Answer(shard=index) if index in self.updating:
                    self.updating[index].waiting.append(partial(self._parts.replication.acknowledge, effect))
                case Answer():
                    self._parts.replication.acknowledge(effect)
                case clip.Tell():
                    self._parts.decisions.tell(effect)
                case clip.StepVerdict():
                    self._parts.decisions.decide(effect)
                case server.TellNotFinite(verdict=verdict):
                    self._parts.context.not_finite(verdict, alone=True)
                case server.TellDisproved(shard=index, version=version, paired=paired):
                    self._parts.context.say(Disproved(index, version, paired))
                case server.Own(shard=index):
                    self._owned[index] = self._parts.factory.allocate(index)
                case server.Disown(shard=index):
                    self._disown(index)
                case server.Restore(shards=indices, origin=origin):
                    self._parts.restores.begin(indices, origin, self._parts.shell.fence.generation)

    def handle(self, index: int, event: shard_events.Event) -> None:
        """Handle an event for one shard, and run its effects."""
        self.run(self._parts.shell.machine.handle(index, event))

    def _run_on(self, index: int, owned: HeldShard, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.Take() | shard_effects.Add() if index in self.adding and self._is_much(index, owned):
                self._hand_over(index)
                self.updating[index].waiting.appendleft(partial(self._run_on, index, owned, effect))
            case shard_effects.Take():
                buffer = self._tickets.settle(effect.ticket, early=effect.at if effect.early else None)
                take = partial(owned.take, buffer, effect.weight if effect.count == 1 else 1.0, effect.base, effect.at)
                if index in self.adding:
                    self.adding[index].append(take)
                else:
                    take()
            case shard_effects.Merge(left=left, right=right):
                self._add(index, partial(owned.merge, left, right))
            case shard_effects.OnTime(at=at):
                self._tickets.on_time(index, at)
            case shard_effects.Add(ticket=ticket, weight=weight, base=base):
                self._add(index, partial(owned.add, self._tickets.settle(ticket), weight, base))
            case shard_effects.Hold(ticket=ticket, credit=credit):
                self._tickets.hold(ticket, always=credit)
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._tickets.drop(ticket, fault)
            case shard_effects.Finish():
                self._ledger.finished(index, effect.replicas)
                if index in self._beside:
                    self._finish_beside(index, owned, effect)
                else:
                    owned.mean(effect.total_weight)
                    self.run(self._parts.decisions.measured(owned, effect))
            case shard_effects.Apply():
                self._apply(index, owned, effect)
            case shard_effects.Publish(version=version):
                self._parts.followers.publish(index, version)
            case shard_effects.Reply():
                self._parts.followers.reply(index, effect)
            case shard_effects.Gather():
                self._parts.gathering[index] = None
            case _:
                self._run_rare(index, owned, effect)

    def _run_rare(self, index: int, owned: HeldShard, effect: shard_effects.Effect) -> None:
        parts = self._parts
        self.add_up(index)
        match effect:
            case shard_effects.InstallFirst(ticket=ticket, version=version):
                nbytes = self._tickets.nbytes(ticket)
                owned.install(self._tickets.settle(ticket), version, nbytes)
            case shard_effects.Discard(at=at):
                owned.discard(at)
            case shard_effects.Abandon():
                self._tickets.all_on_time(index)
                owned.abandon()
            case shard_events.Chosen():
                parts.replication.send_choice(index, effect)
            case shard_effects.Prove(version=version):
                parts.replication.ask(index, version)
            case shard_effects.Fill(version=version, incoming=incoming, clocks=clocks):
                state = owned.state(version, clocks, wires=True)
                parts.replication.send_state(state, incoming=incoming)
            case shard_effects.TellWait(follower=follower, replica=replica, clock=clock):
                wait = Header(Kind.WAIT, shard=index, base=clock, wants=wants(replica))
                parts.followers.tell(follower, wait, urgent=True)
            case shard_effects.Accepted() | shard_effects.Disputed():
                parts.audits.found(index, effect)
            case shard_effects.BackupCaughtUp(incoming=incoming):
                machines = parts.shell.machine
                parts.context.say(CaughtUp({index: (machines.arrived if incoming else machines.caught_up)[index]}))
            case shard_effects.CaptureShard(version=version, missed=missed, clocks=clocks):
                assert parts.capture is not None
                if missed:
                    too_late = "the step was over before the request came"
                    parts.context.say(NotStored(parts.capture.snapshot, too_late, version))
                else:
                    parts.capture.wanted(index, version, clocks)
            case _:
                raise AssertionError(f"an effect that nobody runs: {effect}")

    def _apply(self, index: int, owned: HeldShard, effect: shard_effects.Apply) -> None:
        parts = self._parts
        if parts.capture is not None and parts.capture.before_update(index):
            at = self._cadence.round_of(index, effect.version - 1)
            parts.context.say(NotStored(parts.capture.snapshot, "a codec state did not come", at))
        parts.gathering.pop(index, None)
        timed = effect if self._together and not self.reductions else self._timed(index, effect)
        if index in self._beside and self._is_much(index, owned, self._beside[index]):
            self._hand_over(
                index, partial(self._update, index, owned, timed), then=partial(self._updated, index, owned, effect)
            )
            return
        if index in self.adding:
            self.add_up(index)
        self._updated(index, owned, effect, self._update(index, owned, timed))

    def _finish_beside(self, index: int, owned: HeldShard, effect: shard_effects.Finish) -> None:
        self._add(index, partial(owned.mean, effect.total_weight))
        if effect.measure and self._is_much(index, owned):
            self._hand_over(index, then=lambda _: self.run(self._parts.decisions.measured(owned, effect)))
        elif effect.measure:
            self.add_up(index)
            self.run(self._parts.decisions.measured(owned, effect))

    # ---- work on one shard: on a thread, or here while the owner is idle ----

    def _add(self, index: int, do: Callable[[], None]) -> None:
        """Do this to the shard's sum: now, or later, if a thread may. What waits has no credits that bound it."""
        if index not in self._beside or len(self.updating) >= _MOST_WORK:
            self.add_up(index)
            self._add_up(index, (do,))
            return
        if len(self.adding) >= _MOST_WORK and index not in self.adding:
            self.add_up()
        self.adding.setdefault(index, []).append(do)

    def _is_much(self, index: int, owned: HeldShard, update: int = 0) -> bool:
        """Is what is to be done worth a thread, together with `update` bytes?"""
        todo = self.adding.get(index, ())
        return bool(todo or update) and len(todo) * owned.shard.nbytes + update >= self.least

    def _hand_over(
        self, index: int, update: Callable[[], ForBackup] = lambda: None,
        then: Callable[[ForBackup], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Let a thread add up a shard's sum and then `update` it. Afterwards the owner's thread calls `then`."""
        assert self.threads is not None
        made = self.threads.submit(self._work, index, self.adding.pop(index, ()), update)
        before = self.updating.get(index)
        self.updating[index] = _Update(made, then, deque() if before is None else before.waiting)
        made.add_done_callback(lambda made: self._put(inbox.UpdateMade(index, made)))

    def _work(self, index: int, todo: Sequence[Callable[[], None]], update: Callable[[], ForBackup]) -> ForBackup:
        self.began[index] = time.monotonic()
        self._add_up(index, todo)
        made = update()
        del self.began[index]
        return made

    def add_up(self, index: int | None = None) -> None:
        """Make what is to be added to a shard's sum, on this thread; None: of one of the shards that have any."""
        index = next(iter(self.adding), -1) if index is None else index
        self._add_up(index, self.adding.pop(index, ()))

    def _add_up(self, index: int, todo: Sequence[Callable[[], None]]) -> None:
        if todo:
            with self._tracer.span("reduce", shard=index):
                for do in todo:
                    do()

    def _update(self, index: int, owned: HeldShard, update: shard_effects.Apply) -> ForBackup:
        with self._tracer.span("apply", shard=index, step=update.step):
            return owned.apply(update)

    def updated(self, index: int, made: Future[ForBackup] | None = None) -> None:
        """Go on with a shard: wait for the work on it (`made`: only if it is this), and run what waits for it."""
        while (update := self.updating.get(index)) is not None and made in (None, update.made):
            update.then(update.made.result())
            while update.waiting and self.updating[index] is update:  # what comes of these stands behind the others
                update.waiting.popleft()()
            if self.updating[index] is update:
                del self.updating[index]

    def settle(self) -> None:
        """Do all work on shards: for events that may need the tensors of any."""
        while self.updating or self.adding:
            self.add_up()
            self.updated(next(iter(self.updating), -1))

    def _updated(self, index: int, owned: HeldShard, effect: shard_effects.Apply, finished: ForBackup) -> None:
        parts = self._parts
        if parts.fingerprints is not None:
            parts.fingerprints.applied(index, effect.version, owned)
        if self.in_ledger(index, effect.version - 1):
            self._enter(index, self._cadence.round_of(index, effect.version - 1))
        if finished is not None:
            parts.replication.send_update(index, effect, finished)

    def _timed(self, index: int, effect: shard_effects.Apply) -> shard_effects.Apply:
        """The update, with its step in the learning-rate schedule counted in the job's rounds, and the reductions that
        count for it: this server has the view that says them (see `orders.reductions`)."""
        if self.reductions:
            effect = replace(effect, reductions=reductions_at(self.reductions, effect.step))
        if self._together:
            return effect
        return replace(effect, step=self._cadence.round_of(index, effect.step))

    def in_ledger(self, index: int, version: int) -> bool:
        """Is this shard the one whose update from that version is reported for its round?"""
        return index == 0 if self._together else self._cadence.witness(self._cadence.round_of(index, version)) == index

    def _enter(self, index: int, step: int) -> None:
        """Report a round, for the first shard that is due in it. Primary and backup both do: one of them may die."""
        machines = self._parts.shell.machine
        self._ledger.enter(index, step, primary=machines.is_primary(index), norm=self._parts.decisions.norm(step))
        machine = machines.machine(0)
        if machine is not None and machine.primary and self._parts.job.accounts:
            self._ledger.account(machine, step, self._parts.job.config.rounds)

    def _disown(self, index: int) -> None:
        self.updated(index)
        self.add_up(index)
        self._tickets.drop_all(index)
        if self._parts.capture is not None:
            self._parts.capture.disowned(index)
        self._parts.gathering.pop(index, None)
        self._owned.pop(index).release()


# ---- Takes the events of a server's inbox, asks the shell and the machine, and runs their effects on tensors ----
#
# The path of one event: `OwnerThread` takes it from the inbox and calls `Reducer.handle`. The shell
# (`core/shard/shell.py`) decides whether it counts. The machine answers with effects. `ShardEffects` runs them. All of
# this runs on the owner's thread.

_WHILE_UPDATED = frozenset({  # events that touch no tensors but by effects on a shard
    inbox.Pushed, inbox.UpdateMade, inbox.UpdateCame, inbox.AckCame, clip.StepVerdict, inbox.Told, inbox.WantCame,
    inbox.PullCame, inbox.Wake,
})  # fmt: skip


class Reducer(Handler):
    """The shards of one server in one job. Not thread-safe: only the owner thread calls it.

    `put` appends an event to the inbox. `threads` is how many make updates beside the owner's; 0: none.
    """

    def __init__(
        self, me: str, job: ServerJob, context: ReducerContext, put: Callable[[inbox.Event], None], tracer: Tracer,
        writer: SnapshotWriter | None = None, snapshots_url: str = "", threads: int = 0,
    ) -> None:  # fmt: skip
        self.job = job
        self.shell: ServerShell[Channel] = ServerShell(observed(ServerMachine(me, job.plan), me))
        self._owned: dict[int, HeldShard] = {}
        self._pulls = Pulls(tracer)
        self._ledger = LedgerEntries(context.say, self.shell.fence)
        self._tickets = PayloadTickets(self.shell.fence, job.config.network.hold_bytes, self._ledger.arrived)
        self._followers = Followers(
            self.shell, self._owned, newest_is_enough=newest_is_enough(job.config),
            ranks=forward_ranks(job.record.layout) if job.config.overlaps else (),
        )  # fmt: skip
        self._replication = Replication(self.shell, self._tickets, self._ledger, self._owned)
        self._codec_states = None
        if job.codec_states is not None:
            self._codec_states = StateRelay(me, job.codec_states, job.config.replicas, self._followers.tell)
        self.capture = None
        if writer is not None:
            self.capture = SnapshotCapture(
                writer, job, self._codec_states, self._stored_state, tracer, wake=lambda: put(inbox.Wake()),
                is_last=self.shell.is_last,
            )  # fmt: skip
        self._context = context
        self._unrestored: Unrestored | None = None  # the last snapshot that could not be loaded
        self._restores = Restores(me, snapshots_url, put, lambda text: context.say(Say(text)))
        self._parts = ReducerParts(
            job=job, shell=self.shell, owned=self._owned, tickets=self._tickets, ledger=self._ledger,
            factory=ShardFactory(job.config, job.record.layout, job.pool, job.pools, job.in_place),
            followers=self._followers,
            replication=self._replication, context=context, tracer=tracer, restores=self._restores,
            decisions=StepVerdicts(self.shell, context, put),
            fingerprints=(
                Fingerprints(job.record.layout, every, context.say, self.shell.fence)
                if (every := job.config.audit.fingerprints) else None
            ),
            audits=AuditReports(context.say, self.shell.fence), codec_states=self._codec_states, capture=self.capture,
        )  # fmt: skip
        self._effects = ShardEffects(
            self._parts, put,
            ThreadPoolExecutor(threads, "update", own_threads, (intra_op(job),)) if threads else None,
        )
        self._handlers = self._table()
        self._tree = job.config.policy.tree

    @property
    def machine(self) -> ServerMachine:
        return self.shell.machine

    @property
    def updating_s(self) -> float:
        """For how many seconds a thread has made one update. Any thread may ask."""
        return max((time.monotonic() - began for began in list(self._effects.began.values())), default=0.0)

    def handle(self, event: inbox.Event) -> None:
        kind = type(event)
        if (self._effects.updating or self._effects.adding) and kind not in _WHILE_UPDATED:
            self._effects.settle()
        self._handlers[kind](event)
        if self._pulls.wait:
            self._answer_pulls()

    def idle_work(self) -> Callable[[], None] | None:
        if self._parts.gathering:
            return self._fold_one
        if self._effects.adding:
            return self._effects.add_up
        if self.capture is not None and self.capture.due:
            return self.capture.copy_one
        return None

    def close(self) -> None:
        """Stop storing and reading snapshots. Updates that are not made yet are given up."""
        if self._effects.threads is not None:
            self._effects.threads.shutdown(cancel_futures=True)
        self._restores.close()
        if self.capture is not None:
            self.capture.close()

    def _table(self) -> dict[type, Callable[[Any], None]]:
        shell, run = self.shell, self._effects.run

        def gone(event: inbox.Gone) -> None:
            self._pulls.requests.gone(event.channel)
            run(shell.gone(event.channel, event.peer))

        return {
            inbox.Pushed: self._pushed,
            inbox.Initial: self._initial,
            inbox.WantCame: lambda e: run(shell.want(e.channel, e.worker, e.shard, e.replica)),
            inbox.Fetched: self._fetched,
            inbox.PullCame: lambda e: self._pulls.add(e.channel, e.header, e.ids),
            inbox.Followed: self._followed,
            inbox.UnfollowCame: lambda e: shell.unfollow(e.channel),
            inbox.Linked: lambda e: run(self._followers.linked(e.channel, e.worker)),
            inbox.Gone: gone,
            inbox.StateGiven: self._state_given,
            inbox.StateRecalled: self._state_recalled,
            inbox.PeerLinked: lambda e: run(shell.peer_linked(e.peer, e.channel)),
            inbox.PeerLost: lambda e: run(shell.peer_lost(e.peer, e.channel)),
            inbox.UpdateMade: lambda e: self._effects.updated(e.shard, e.made),
            inbox.UpdateCame: self._update_came,
            inbox.StateCame: lambda e: run(self._replication.filled(e)),
            inbox.ChoiceCame: lambda e: run(self._replication.chosen(e)),
            inbox.QuestionCame: lambda e: run(self._replication.asked(e)),
            inbox.AckCame: lambda e: run(shell.acked(e.peer, e.channel, e.shard, e.acked, e.number, e.digest)),
            inbox.Told: lambda e: run(shell.told(e.step, e.measures, e.number)),
            clip.StepVerdict: lambda verdict: run(self.machine.decided(verdict)),
            inbox.ViewCame: self._viewed,
            inbox.AdmissionCame: self._admitted,
            Capture: self._capture_wanted,
            inbox.Restored: self._restored,
            inbox.RestoreFailed: self._restore_failed,
            inbox.Wake: lambda e: e.done and e.done.set(),
        }

    # ---- the coordinator ----

    def _viewed(self, event: inbox.ViewCame) -> None:
        view, before = event.view, self.machine.view
        if self.job.record.threads:
            own_threads(self.job.record.threads)
        rolled_back = before is not None and before.generation != view.generation
        if self.capture is not None and before is not None and (rolled_back or before.primary != view.primary):
            self.capture.abandon()
        if rolled_back:
            self._ledger.rolled_back()
            self._restores.cancel()
        config = self.job.config
        measured = paces_by_port(config) and view.servers_by_port()
        limits = Limits.of(
            view.in_flight(config.network.in_flight_bytes), view.paced(config.network.pace_mbit), measured=measured
        )
        self._followers.share(limits, view.computing())
        if self._codec_states is not None:
            self._codec_states.adopt(view)
        effects = self.shell.adopt(view)
        self._effects.reductions = () if self.machine.view is None else self.machine.view.orders.reductions
        self._effects.run(effects)
        self._effects.settle()  # the view may bring a verdict, and what follows is a claim
        self._ledger.proves(applied_in(self.machine))  # it may have become the primary
        if self.capture is not None:
            self.capture.viewed()

    def _admitted(self, event: inbox.AdmissionCame) -> None:
        for shards in self.shell.say_again(new=event.new):
            self._context.say(CaughtUp(dict(shards)))
        if not event.new:
            if self._unrestored is not None and self._unrestored.generation == self.shell.fence.generation:
                self._context.say(self._unrestored)
            self._ledger.proves(applied_in(self.machine))
            self._ledger.repeat()
            self._parts.audits.repeat()
            self._effects.run(self.machine.report_again())

    def _capture_wanted(self, event: Capture) -> None:
        if self.capture is None:
            return
        self.capture.abandon()
        own = [index for index in self.machine.held if self.machine.is_primary(index)]
        if own:
            self.capture.begin(event.snapshot, len(own))
            self._effects.run(self.machine.capture(event.version))

    # ---- restoring the snapshot that a generation begins with ----

    def _restored(self, event: inbox.Restored) -> None:
        if event.generation != self.shell.fence.generation:
            return  # its restore was cancelled by another roll-back
        self._restores.left_the_inbox()
        record = event.record
        if not self.shell.wants_state(record.shard, event.generation):
            self._restores.loaded(record.shard)
            return
        self._owned[record.shard].load(record)
        if self._codec_states is not None:
            self._codec_states.restored(record, self.job.shards[record.shard])
        loaded = shard_events.Loaded(record.version, record.clocks)
        self._effects.run(self.machine.handle(record.shard, loaded))
        for recall in self._restores.loaded(record.shard):
            self._state_recalled(recall)

    def _restore_failed(self, event: inbox.RestoreFailed) -> None:
        if event.generation != self.shell.fence.generation:
            return
        if not isinstance(event.error, DamagedSnapshot):
            raise event.error
        self._restores.cancel()
        view = self.machine.view
        assert view is not None
        self._unrestored = Unrestored(str(event.error), event.generation)
        self._context.say(self._unrestored)

    # ---- workers ----

    def _pushed(self, event: inbox.Pushed) -> None:
        header, tree = event.header, self._tree
        base, count = (0, header.base + 1) if tree else (header.base, 1)
        may = self.shell.may_contribute(event.worker, header.replica, count, header.step)
        if not (may and self.shell.takes(header.shard, header.view)):
            self._give_back(event.channel, event.buffer)
            self._asked_with(event)
            return
        came = time.monotonic() if self._effects.in_ledger(header.shard, header.step) else 0.0
        if self._codec_states is not None and header.replica < self.job.config.replicas:
            self._codec_states.contributed(header, event.worker, self._upcoming(header))
        contribution = shard_events.Contribute(
            step=header.step, replica=header.replica, weight=header.weight,
            ticket=self._tickets.issue(event.channel, header, event.buffer, came=came),
            finite=not header.flags & (NOT_FINITE | BAD_GRADIENT), base=base, count=count,
            bad=bad_replicas(header) if tree and header.wants else (),
            whole=header.flags & (NOT_FINITE | BAD_GRADIENT) != BAD_GRADIENT,  # a loss that is not finite says more
            sender=event.worker, digest=event.digest,
        )  # fmt: skip
        self._effects.run(self.shell.machine.handle(header.shard, contribution))
        if header.wants and not tree:
            self._asked_with(event)

    def _asked_with(self, event: inbox.Pushed) -> None:
        """Take the question that comes with a contribution, also with one that does not count: it is asked once."""
        header = event.header
        current = self.shell.takes(header.shard, header.view)
        if current and not self.job.config.policy.tree and header.wanted is not None:
            self._effects.run(self.shell.want(event.channel, event.worker, header.shard, header.wanted))

    def _initial(self, event: inbox.Initial) -> None:
        header = event.header
        if not (self.shell.may_begin(event.channel.name) and self.shell.takes(header.shard, header.view)):
            self._give_back(event.channel, event.buffer)
            return
        ticket, version = self._tickets.issue(event.channel, header, event.buffer), header.step * self.job.begins_whole
        self._effects.handle(header.shard, shard_events.Initialise(ticket, version))

    def _give_back(self, channel: Channel, buffer: Buffer) -> None:
        """A payload is not used: its buffer is free, and its sender may send another one."""
        buffer.release()
        self._tickets.credit(channel)

    def _followed(self, event: inbox.Followed) -> None:
        for index, version in self.shell.follow(event.channel):
            self._followers.send((event.channel,), index, version)

    def _fetched(self, event: inbox.Fetched) -> None:
        """Send one version again, if it is still kept. Otherwise a newer one has been sent already."""
        if self.shell.may_see(event.shard, event.version) and self._owned[event.shard].keeps(event.version):
            self._followers.send((event.channel,), event.shard, event.version, asked=True)

    def _update_came(self, event: inbox.UpdateCame) -> None:
        self._effects.updated(event.header.shard)  # its entry in the ledger is of the update before
        self._effects.run(self._replication.updated(event))

    # ---- codec states ----

    def _state_given(self, event: inbox.StateGiven) -> None:
        header = event.header
        if self._codec_states is None or not self.shell.takes(header.shard, header.view):
            return
        may = self.shell.may_contribute(event.worker, header.replica, 1)
        if not header.base:  # answered in any case: who was given up meanwhile says it until it is
            data = event.data if may else memoryview(b"")
            self._codec_states.given(header, data, event.worker, self._upcoming(header))
        elif may:
            self._codec_states.copied(header, event.data)
            if self.capture is not None:
                self.capture.codec_state_came(header.shard)

    def _state_recalled(self, event: inbox.StateRecalled) -> None:
        if self._restores.postpones(event):
            return
        header = event.header
        current = self.shell.is_current(event.channel, event.worker) and self.shell.takes(header.shard, header.view)
        may = current and self.shell.may_contribute(event.worker, header.replica, 1)
        if self._codec_states is not None and may:
            self._codec_states.recalled(header, event.worker, self._upcoming(header))

    def _upcoming(self, header: Header) -> int:
        """The next step of which the shard takes that replica's contribution."""
        machine = self.machine.machine(header.shard)
        assert machine is not None
        if header.replica >= machine.expected:
            return machine.version
        return machine.clock(header.replica) + machine.knows(header.replica)

    # ---- idle time, and what follows each event ----

    def _fold_one(self) -> None:
        index = next(iter(self._parts.gathering))
        del self._parts.gathering[index]
        self._effects.handle(index, shard_events.Fold())
        if self._pulls.wait:
            self._answer_pulls()

    def _answer_pulls(self) -> None:
        """Call it only after an event: while effects run or wait, a machine is ahead of its tensors."""
        for index in (shard for shard in self._pulls.requests.shards if shard not in self._effects.updating):
            machine, owned = self.machine.machine(index), self._owned.get(index)
            if machine is None or owned is None or not machine.primary:
                self._pulls.requests.refuse(index)
                continue
            self._pulls.answer(index, machine, owned, self.shell.fence.number)
        self._pulls.wait = bool(self._pulls.requests.shards)

    def _stored_state(self, index: int, version: int, clocks: tuple[int, ...]) -> ShardRecord:
        return self._owned[index].state(version, clocks, wires=False)


def own_threads(number: int) -> None:
    """Let torch compute with so many intra-op threads in this thread, whatever others set for now.

    Torch has a number for each thread. Its first computation there takes the one that the process has at that moment.
    """
    torch.set_num_threads(number)
    torch.get_num_threads()  # as a computation: from here on the thread has its own
    torch.set_num_threads(number)


def intra_op(job: ServerJob) -> int:
    """With how many intra-op threads an update's thread computes: more would only fight for the cores with the others,
    and with workers. Words are updated one by one; a matrix product (Muon) depends on their number."""
    return torch.get_num_threads() if any(shard.columns for shard in job.shards) else 1


def bad_replicas(header: Header) -> tuple[int, ...]:
    """The replicas of a pushed block whose loss or gradient is not finite, as far as the frame names them."""
    return tuple(header.replica + bit for bit in range(min(32, header.base + 1)) if header.wants >> bit & 1)
