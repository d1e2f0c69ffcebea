"""Takes the events of a server's inbox, asks the shell and the machine, and runs their effects on tensors.

The path of one event: `OwnerThread` takes it from the inbox and calls `Reducer.handle`. The shell
(`core/shard/shell.py`) decides whether it counts. The machine answers with effects. `effects.py` runs them. All of this
runs on the owner's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.config import paces_by_port
from rallypoint.core.layout import forward_ranks
from rallypoint.core.protocol import CaughtUp, Say, Unrestored
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.shard.shell import ServerShell, applied_in
from rallypoint.errors import DamagedSnapshot
from rallypoint.net.channel import Channel
from rallypoint.net.frames import BAD_GRADIENT, COPY, NOT_FINITE, Header
from rallypoint.net.pool import Buffer
from rallypoint.net.transport import Limits
from rallypoint.observe.observed import observed
from rallypoint.observe.trace import Tracer
from rallypoint.server.audits import AuditReports
from rallypoint.server.capture import Capture
from rallypoint.server.codec_states import CodecStates
from rallypoint.server.followers import Followers
from rallypoint.server.job import ServerJob
from rallypoint.server.pulls import Pulls
from rallypoint.server.reducer import inbox
from rallypoint.server.reducer.decisions import Context, Decisions
from rallypoint.server.reducer.effects import Effects, ReducerParts
from rallypoint.server.reducer.ledger import Fingerprints, Ledger
from rallypoint.server.reducer.replication import Replication
from rallypoint.server.reducer.tickets import Tickets
from rallypoint.server.restores import Restores
from rallypoint.server.shards.held import HeldShard, ShardFactory, newest_is_enough
from rallypoint.store.record import ShardRecord
from rallypoint.store.writer import SnapshotWriter


class Reducer:
    """The shards of one server in one job. Not thread-safe: only the owner thread calls it.

    `put` appends an event to the inbox.
    """

    def __init__(
        self, me: str, job: ServerJob, context: Context, put: Callable[[inbox.Event], None], tracer: Tracer,
        writer: SnapshotWriter | None = None, snapshots_url: str = "",
    ) -> None:  # fmt: skip
        self.job = job
        self.shell: ServerShell[Channel] = ServerShell(observed(ServerMachine(me, job.plan), me))
        self._owned: dict[int, HeldShard] = {}
        self._pulls = Pulls(tracer)
        self._ledger = Ledger(context.say, self.shell.fence)
        self._tickets = Tickets(self.shell.fence, job.config.hold_bytes)
        self._followers = Followers(
            self.shell, self._owned, newest_is_enough=newest_is_enough(job.config),
            ranks=forward_ranks(job.record.layout) if job.config.overlaps else (),
        )  # fmt: skip
        self._replication = Replication(self.shell, self._tickets, self._ledger, self._owned)
        self._codec_states = None
        if job.codec_states is not None:
            self._codec_states = CodecStates(me, job.codec_states, job.config.replicas, self._followers.tell)
        self.capture = None
        if writer is not None:
            self.capture = Capture(
                writer, job, self._codec_states, self._stored_state, tracer, wake=lambda: put(inbox.Wake()),
            )  # fmt: skip
        self._context = context
        self._unrestored: Unrestored | None = None  # the last snapshot that could not be loaded
        self._restores = Restores(me, snapshots_url, put, lambda text: context.say(Say(text)))
        self._parts = ReducerParts(
            job=job, shell=self.shell, owned=self._owned, tickets=self._tickets, ledger=self._ledger,
            factory=ShardFactory(job.config, job.record.layout, job.pool, job.pools), followers=self._followers,
            replication=self._replication, context=context, tracer=tracer, restores=self._restores,
            decisions=Decisions(self.shell, context, put),
            fingerprints=Fingerprints(job.record.layout, job.config.fingerprints, context.say, self.shell.fence),
            audits=AuditReports(context.say, self.shell.fence), codec_states=self._codec_states, capture=self.capture,
        )  # fmt: skip
        self._effects = Effects(self._parts)
        self._handlers = self._table()

    @property
    def machine(self) -> ServerMachine:
        """The machine of all shards held here."""
        return self.shell.machine

    def handle(self, event: inbox.Event) -> None:
        """Handle one event."""
        self._handlers[type(event)](event)
        self._answer_pulls()

    def idle_work(self) -> Callable[[], None] | None:
        """A function to call while the inbox is empty; None if there is nothing to do."""
        if self._parts.gathering:
            return self._fold_one
        if self.capture is not None and self.capture.due:
            return self.capture.copy_one
        return None

    def close(self) -> None:
        """Stop storing and reading snapshots."""
        self._restores.close()
        if self.capture is not None:
            self.capture.close()

    def _table(self) -> dict[type, Callable[[Any], None]]:
        shell, run = self.shell, self._effects.run
        return {
            inbox.Pushed: self._pushed,
            inbox.Initial: self._initial,
            inbox.Wanted: lambda e: run(shell.want(e.channel, e.worker, e.shard, e.replica)),
            inbox.Fetched: self._fetched,
            inbox.Pulled: lambda e: self._pulls.add(e.channel, e.header, e.ids),
            inbox.Followed: self._followed,
            inbox.Unfollowed: lambda e: shell.unfollow(e.channel),
            inbox.Linked: lambda e: run(self._followers.linked(e.channel, e.worker)),
            inbox.Gone: self._gone,
            inbox.StateGiven: self._state_given,
            inbox.StateRecalled: self._state_recalled,
            inbox.PeerLinked: lambda e: run(shell.peer_linked(e.peer, e.channel)),
            inbox.PeerLost: lambda e: run(shell.peer_lost(e.peer, e.channel)),
            inbox.Replicated: lambda e: run(self._replication.updated(e)),
            inbox.Filled: lambda e: run(self._replication.filled(e)),
            inbox.Chosen: lambda e: run(self._replication.chosen(e)),
            inbox.Asked: lambda e: run(self._replication.asked(e)),
            inbox.Acked: lambda e: run(shell.acked(e.peer, e.channel, e.shard, e.acked, e.number, e.digest)),
            inbox.Told: lambda e: run(shell.told(e.step, e.measures, e.number)),
            inbox.Decided: lambda e: run(shell.decided(e.verdict)),
            inbox.Viewed: self._viewed,
            inbox.Admitted: self._admitted,
            inbox.CaptureWanted: self._capture_wanted,
            inbox.Restored: self._restored,
            inbox.RestoreFailed: self._restore_failed,
            inbox.Wake: lambda e: e.done and e.done.set(),
        }

    # ---- the coordinator ----

    def _viewed(self, event: inbox.Viewed) -> None:
        view, before = event.view, self.machine.view
        rolled_back = before is not None and before.generation != view.generation
        if self.capture is not None and before is not None and (rolled_back or before.primary != view.primary):
            self.capture.abandon()
        if rolled_back:
            self._ledger.rolled_back()
            self._restores.cancel()
        config = self.job.config
        measured = paces_by_port(config) and view.servers_by_port()
        limits = Limits.of(view.in_flight(config.in_flight_bytes), view.paced(config.pace_mbit), measured=measured)
        self._followers.share(limits, view.computing())
        if self._codec_states is not None:
            self._codec_states.adopt(view)
        self._effects.run(self.shell.adopt(view))
        self._ledger.proves(applied_in(self.machine))  # it may have become the primary

    def _admitted(self, event: inbox.Admitted) -> None:
        for shards in self.shell.say_again(new=event.new):
            self._context.say(CaughtUp(dict(shards)))
        if not event.new:
            if self._unrestored is not None and self._unrestored.generation == self.shell.fence.generation:
                self._context.say(self._unrestored)
            self._ledger.proves(applied_in(self.machine))
            self._ledger.repeat()
            self._parts.audits.repeat()
            self._effects.run(self.machine.report_again())

    def _capture_wanted(self, event: inbox.CaptureWanted) -> None:
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
        self._effects.run(self.shell.restored(record.shard, event.generation, loaded))
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
        header = event.header
        tree = self.job.config.policy.tree
        base, count = (0, header.base + 1) if tree else (header.base, 1)
        if not self.shell.may_contribute(event.worker, header.replica, count, header.step):
            self._takes(event.channel, header, event.buffer, may=False)
            self._asked_with(event)
            return
        if not self._takes(event.channel, header, event.buffer, may=True):
            return
        if self._effects.in_ledger(header.shard, header.step):
            self._ledger.arrived(event.channel.name)
        if self._codec_states is not None and header.replica < self.job.config.replicas:
            self._codec_states.contributed(header, event.worker, self._upcoming(header))
        contribution = shard_events.Contribute(
            step=header.step, replica=header.replica, weight=header.weight,
            ticket=self._tickets.issue(event.channel, header, event.buffer),
            finite=not header.flags & (NOT_FINITE | BAD_GRADIENT), base=base, count=count,
            bad=bad_replicas(header) if tree else (),
            whole=header.flags & (NOT_FINITE | BAD_GRADIENT) != BAD_GRADIENT,  # a loss that is not finite says more
            sender=event.worker, digest=event.digest,
        )  # fmt: skip
        self._effects.handle(header.shard, contribution)
        self._asked_with(event)

    def _asked_with(self, event: inbox.Pushed) -> None:
        """Take the question that comes with a contribution, also with one that does not count: it is asked once."""
        header = event.header
        current = self.shell.takes(header.shard, header.view)
        if current and not self.job.config.policy.tree and header.wanted is not None:
            self._effects.run(self.shell.want(event.channel, event.worker, header.shard, header.wanted))

    def _initial(self, event: inbox.Initial) -> None:
        header = event.header
        if self._takes(event.channel, header, event.buffer, may=self.shell.may_begin(event.channel.name)):
            ticket = self._tickets.issue(event.channel, header, event.buffer)
            self._effects.handle(header.shard, shard_events.Initialise(ticket, self.job.beginning.version(header.step)))

    def _takes(self, channel: Channel, header: Header, buffer: Buffer, *, may: bool) -> bool:
        if may and self.shell.takes(header.shard, header.view):
            return True
        buffer.release()
        self._tickets.credit(channel)
        return False

    def _followed(self, event: inbox.Followed) -> None:
        for index, version in self.shell.follow(event.channel):
            self._followers.send(event.channel, index, version)

    def _fetched(self, event: inbox.Fetched) -> None:
        """Send one version again, if it is still kept. Otherwise a newer one has been sent already."""
        if self.shell.may_see(event.shard, event.version) and self._owned[event.shard].keeps(event.version):
            self._followers.send(event.channel, event.shard, event.version, asked=True)

    def _gone(self, event: inbox.Gone) -> None:
        self._pulls.gone(event.channel)
        self._effects.run(self.shell.gone(event.channel, event.peer))

    # ---- codec states ----

    def _state_given(self, event: inbox.StateGiven) -> None:
        header = event.header
        if self._codec_states is None or not self.shell.takes(header.shard, header.view):
            return
        may = self.shell.may_contribute(event.worker, header.replica, 1)
        if header.base != COPY:  # answered in any case: who was given up meanwhile says it until it is
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
        self._answer_pulls()

    def _answer_pulls(self) -> None:
        """Call it only after an event: while effects run, a machine is ahead of its tensors."""
        for index in self._pulls.shards:
            machine, owned = self.machine.machine(index), self._owned.get(index)
            if machine is None or owned is None or not machine.primary:
                self._pulls.refuse(index)
                continue
            self._pulls.answer(index, machine, owned, self.shell.fence.number)

    def _stored_state(self, index: int, version: int) -> ShardRecord:
        machine = self.machine.machine(index)
        assert machine is not None
        return self._owned[index].state(version, tuple(machine.clocks), wires=False)



def bad_replicas(header: Header) -> tuple[int, ...]:
    """The replicas of a pushed block whose loss or gradient is not finite, as far as the frame names them."""
    return tuple(header.replica + bit for bit in range(min(32, header.base + 1)) if header.wants >> bit & 1)
