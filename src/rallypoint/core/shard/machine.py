"""The server's machine, one per shard: events in, effects out. It decides; `server/reducer.py` does.

A shard has one primary, which sums and publishes, and perhaps one backup, which applies the same updates and
acknowledges them. The backup first gets the whole state (Fill), then every update (Apply with `replicate`). From its
first acknowledgement on, the primary publishes nothing that the backup does not hold (I4); once that is so for all that
has been published, the backup is in step, and may be promoted.

Under a streaming policy each replica has a clock, the step of its next contribution, and versions count updates. What
goes back then is an answer: a follower wants the parameters for one replica's next step, and gets them (Reply) once
that replica's contribution before is in them, durable, and the policy lets it go on.

A payload is named here by a `Ticket`, an opaque number that the shell maps to a buffer. Every ticket that comes in goes
out again in exactly one of Take, Add or Drop, so no buffer can be forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.policy import Policy, Verdict
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import (
    Abandon,
    Acknowledge,
    Add,
    Apply,
    Capture,
    CaughtUp,
    Drop,
    Effect,
    Fill,
    Finish,
    Gather,
    Hold,
    Install,
    Publish,
    Reply,
    Take,
    Wait,
)

VERSIONS_KEPT = 2  # I5: a worker can fetch the version of the step in progress


@dataclass(slots=True)
class Tally:
    """What has become of contributions: each is counted once, as applied, folded (into another's update) or dropped.

    `repeats` are none of these: the same contribution once more (I2). `staleness` counts contributions by the updates
    that their shard had had since the version they were computed from.
    """

    applied: int = 0
    folded: int = 0
    dropped: int = 0
    repeats: int = 0
    staleness: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Wanted:
    replica: int
    clock: int  # served once the replica's clock shows so much


@dataclass(slots=True)
class ShardMachine:
    """One shard's ledger. `expected` replicas contribute: R to parameters, 1 to buffers (replica 0's are kept).

    With `decides` the shard waits, once its sum is finished, for the decision that all servers take together
    (global-norm clipping, or skipping a step that is not finite). `rounds` is how often each replica contributes.
    """

    policy: Policy
    expected: int
    decides: bool = False
    primary: bool = True
    rounds: int = 0
    skips: bool = False  # under a streaming policy: a contribution that is not finite changes nothing
    compensates: bool = False
    version: int = -1  # updates applied here
    published: int = -1  # what followers may see; behind `version` while the backup has not acknowledged
    awaiting: bool = False
    needs_sync: bool = False  # there is a backup that has not been sent the state
    caught_up: bool = False
    clocks: list[int] = field(default_factory=list)  # of each replica, under a streaming policy
    tally: Tally = field(default_factory=Tally)
    _replicating: bool = False  # the backup gets every update
    _needs_ack: bool = False  # nothing is published that the backup does not hold
    _acked: int = -1
    _capture_at: int = -1
    _decision: events.Decide | None = None  # one that came before the sum was finished (buffers are not measured)
    _sum: list[events.Contribute] = field(default_factory=list)  # what is in the sum in progress, in its order
    _held: dict[int, events.Contribute] = field(default_factory=dict)
    _wants: dict[str, _Wanted] = field(default_factory=dict)
    _since: list[int] = field(default_factory=list)  # the version that each replica's last contribution is in

    def __post_init__(self) -> None:
        self._restart_clocks(())

    # ---- what the policy may know ----

    @property
    def added(self) -> int:
        return len(self._sum)

    @property
    def slowest(self) -> int:
        return min(self.clocks, default=self.version)

    @property
    def visible(self) -> int:
        # No replica has more than one contribution that is not published: it gets nothing more to compute from.
        published = (clock - (since > self.published) for clock, since in zip(self.clocks, self._since, strict=True))
        return min(published, default=self.published)

    def knows(self, replica: int) -> bool:
        return replica in self._held or any(contribution.replica == replica for contribution in self._sum)

    def clock(self, replica: int) -> int:
        return self.clocks[replica] if self.clocks else self.version

    @property
    def missing(self) -> list[int]:
        """The replicas whose next contribution has not arrived."""
        return [replica for replica in range(self.expected) if not self.knows(replica)]

    def handle(self, event: events.Event) -> list[Effect]:
        """Take one event; the effects are to be run in order."""
        match event:
            case events.Contribute():
                return self._contribute(event)
            case events.Want():
                return self._want(event)
            case events.Replicated():
                return self._replicated(event)
            case events.Acked(version=version):
                return self._acknowledged(version)
            case events.Initialise(ticket=ticket, version=version):
                return self._initialise(ticket, version)
            case events.Decide():
                return self._decide(event)
            case events.Fold():
                return self._finish() if self._sum else []
            case events.Unfollowed(follower=follower):
                self._wants.pop(follower, None)
                return []
            case events.Loaded():
                return self._loaded(event)
            case events.Assigned():
                return self._assigned(event)
            case events.FillBackup():
                return self._fill()
            case events.CaptureAt(version=version):
                return self._capture(version)

    # ---- the primary: contributions ----

    def _initialise(self, ticket: events.Ticket, version: int) -> list[Effect]:
        if self.version >= 0 or not self.primary:
            return [Drop(ticket)]
        self.version = version
        return [Install(ticket, version), *self._captured(), *self._publish()]

    def _contribute(self, event: events.Contribute) -> list[Effect]:
        if not self.primary or self.version < 0:
            return [Drop(event.ticket)]  # it was sent under an older view; its worker will send it again
        match self.policy.admit(self, event.step, event.replica):
            case Verdict.REJECT if event.replica < self.expected:
                # Of a step that has not begun here: its worker has seen the version of a newer primary than us.
                return [Drop(event.ticket)]
            case Verdict.REJECT:
                fault = f"replica {event.replica} does not contribute to this shard (it has {self.expected})"
                return [Drop(event.ticket, fault)]
            case Verdict.DROP:
                self.tally.repeats += 1
                return [Drop(event.ticket)]
            case Verdict.HOLD:
                self._held[event.replica] = event
                return [Hold(event.ticket)]
            case Verdict.ADD:
                alone = self.skips and not event.finite  # what is skipped must not take others with it
                before = self._finish() if alone and self._sum else []
                return [*before, self._add(event), *self._take_held(), *self._finish_when_complete()]

    def _add(self, event: events.Contribute) -> Effect:
        self._sum.append(event)
        base = event.base if self.compensates and event.base < self.version else None
        return (Take if self.added == 1 else Add)(event.ticket, event.weight, base)

    def _take_held(self) -> list[Effect]:
        """Those of the held whose turn has come, in replica order."""
        effects: list[Effect] = []
        for replica in sorted(self._held):
            held = self._held.pop(replica)
            if self.policy.admit(self, held.step, replica) is not Verdict.ADD:
                self._held[replica] = held
                continue
            effects.append(self._add(held))
            if self.policy.streaming:
                break  # an update of its own
        return effects

    def _finish_when_complete(self) -> list[Effect]:
        if not self._sum or self.awaiting:
            return []
        alone = self.policy.streaming and (self._replicating or (self.skips and not self._sum[0].finite))
        if alone or self.policy.complete(self):
            return self._finish()
        return [Gather()] if self.policy.streaming else []

    def _finish(self) -> list[Effect]:
        not_finite = tuple(sorted(c.replica for c in self._sum if not c.finite))
        total = sum(contribution.weight for contribution in self._sum)
        finish = Finish(self.version, total, self.decides, not_finite)
        if not self.decides:
            return [finish, *self._advance(None if self.skips and not_finite else 1.0)]
        if self._decision is not None and self._decision.step == self.version:
            return [finish, *self._advance(self._decision.scale)]
        self.awaiting = True
        return [finish]

    def _decide(self, event: events.Decide) -> list[Effect]:
        if event.step != self.version or not self.primary:
            return []
        if self.awaiting:
            return self._advance(event.scale)
        self._decision = event
        return []

    def _advance(self, scale: float | None) -> list[Effect]:
        rate = self._count(skipped=scale is None)
        replica = self._sum[0].replica
        applied = Apply(
            self.version + 1, self._place, scale, self._oldest, rate=rate, replica=replica, replicate=self._replicating
        )
        done, self._sum, self.awaiting = self._sum, [], False
        self.version += 1
        for contribution in done if self.clocks else ():
            self._tick(contribution.replica)
        effects: list[Effect] = [applied, *self._captured(), *self._publish()]
        if self.policy.streaming:
            effects += [*self._take_held(), *self._finish_when_complete()]
        return effects

    def _count(self, *, skipped: bool) -> float:
        """The sum in the tally; how many times the learning rate it is worth."""
        if not self.policy.streaming:
            self.tally.applied += 0 if skipped else self.added
            self.tally.dropped += self.expected if skipped else self.expected - self.added
            return 1.0
        for contribution in self._sum:
            late = max(0, self.version - contribution.base)
            self.tally.staleness[late] = self.tally.staleness.get(late, 0) + 1
        if skipped:
            self.tally.dropped += self.added
        else:
            self.tally.applied += 1
            self.tally.folded += self.added - 1
        return sum(self.policy.rate(self, self.version - contribution.base) for contribution in self._sum)

    @property
    def _place(self) -> int:
        """Where in the schedule the job is, as this shard sees it."""
        return self.version if not self.clocks else sum(self.clocks) // len(self.clocks)

    @property
    def _oldest(self) -> int:
        """The oldest version of which, after the next update, the wire copy is needed."""
        kept = VERSIONS_KEPT + (2 * self.expected if self.compensates else 0)
        oldest = max(0, self.version + 2 - kept)
        return min(oldest, max(self.published, 0)) if self.primary else oldest

    def _tick(self, replica: int) -> None:
        self.clocks[replica] += 1
        self._since[replica] = self.version

    # ---- the primary: versions ----

    def _publish(self) -> list[Effect]:
        """Publish what may be, if there is anything new."""
        visible = min(self.version, self._acked) if self._needs_ack else self.version
        if visible <= self.published:
            return []
        self.published = visible
        return self._serve() if self.policy.streaming else [Publish(visible)]

    def _want(self, event: events.Want) -> list[Effect]:
        if not self.primary:
            return []  # it was sent under an older view; its worker will ask again
        self._wants[event.follower] = _Wanted(event.replica, self._next_clock(event.replica))
        return [*self._serve(), *self._told_to_wait(event.follower)]

    def _told_to_wait(self, follower: str) -> list[Effect]:
        """What keeps it may be a replica of its own: it has to hear that others come first."""
        wanted = self._wants.get(follower)
        if wanted is None or wanted.replica == events.EVERYTHING or self.published < 0:
            return []
        may = self.policy.serve(self, wanted.clock)
        return [] if may else [Wait(follower, wanted.replica, wanted.clock)]

    def _next_clock(self, replica: int) -> int:
        """What the replica's clock will show once all that has arrived of it is applied."""
        if replica == events.EVERYTHING:
            return self.rounds
        return self.clocks[replica] + self.knows(replica) if replica < self.expected else 0

    def _serve(self) -> list[Effect]:
        if self.published < 0:
            return []
        effects: list[Effect] = []
        for follower in [f for f, wanted in self._wants.items() if self._may_have(wanted)]:
            replica = self._wants.pop(follower).replica
            clock = self.clocks[replica] if 0 <= replica < self.expected else self.rounds
            effects.append(Reply(follower, replica, clock, self.published, last=replica == events.EVERYTHING))
        return effects

    def _may_have(self, wanted: _Wanted) -> bool:
        replica = wanted.replica
        if replica == events.EVERYTHING:
            return self.slowest >= self.rounds and self.published == self.version
        if replica >= self.expected:
            return True  # it contributes nothing here: any version will do
        here = self.clocks[replica] >= wanted.clock and self.published >= self._since[replica]
        return here and self.policy.serve(self, self.clocks[replica])

    def _fill(self) -> list[Effect]:
        if not (self.primary and self.needs_sync and self.version >= 0):
            return []
        effects: list[Effect] = []
        while self.policy.streaming and self._sum:
            # The backup is told of one contribution with each update: what is being folded belongs to the state.
            effects += self._finish()
        self.needs_sync, self._replicating = False, True
        return [*effects, Fill(self.version)]

    def _acknowledged(self, version: int) -> list[Effect]:
        if not (self.primary and self._replicating):
            return []
        self._acked = max(self._acked, version)
        self._needs_ack = True
        effects = self._publish()
        if not self.caught_up and self._acked >= self.published:
            self.caught_up = True
            effects.append(CaughtUp())
        return effects

    # ---- the backup ----

    def _replicated(self, event: events.Replicated) -> list[Effect]:
        if self.primary or self.version < event.step:
            return [Drop(event.ticket)]  # from a primary that has been replaced, or from before our state came
        if self.version > event.step:
            return [Drop(event.ticket), Acknowledge(self.version)]
        scale = None if event.skip else 1.0
        applied = Apply(self.version + 1, self._place, scale, self._oldest, rate=event.rate)
        self.version += 1
        if event.replica < len(self.clocks):
            self._tick(event.replica)
        return [Take(event.ticket, 1.0), applied, Acknowledge(self.version)]

    # ---- either ----

    def _loaded(self, event: events.Loaded) -> list[Effect]:
        self.version = event.version
        self._restart_clocks(event.clocks)
        if not self.primary:
            return [Acknowledge(event.version)]
        self.published = -1
        for wanted in self._wants.values():  # some came before the clocks were known
            wanted.clock = self._next_clock(wanted.replica)
        effects = [*self._captured(), *self._publish()]
        return effects + [effect for follower in self._wants for effect in self._told_to_wait(follower)]

    def _restart_clocks(self, clocks: tuple[int, ...]) -> None:
        if self.policy.streaming:
            self.clocks = list(clocks) or [0] * self.expected
            self._since = [max(0, self.version)] * self.expected

    def _assigned(self, event: events.Assigned) -> list[Effect]:
        promoted, demoted = event.primary and not self.primary, self.primary and not event.primary
        self.primary = event.primary
        effects: list[Effect] = self._forget_step() if promoted or demoted else []
        if demoted:
            self.version = self.published = -1  # whoever is primary now will send its state
        if event.fresh or not event.backup or promoted:
            self.needs_sync = event.primary and event.backup
            self._replicating = self.caught_up = False
            # A backup that lost its link still counts as one that may be promoted: nothing passes it by.
            self._needs_ack = self._needs_ack and event.backup and not promoted and not event.fresh
            self._acked = -1
        if promoted:
            self.published = -1
        if event.primary and self.version >= 0:
            effects += self._publish()
        return effects

    def relinked(self) -> None:
        """The link to the backup was lost, with what was under way: it must be sent the whole state again."""
        if self._replicating:
            self.needs_sync, self._replicating = True, False
            self._acked = -1

    def _forget_step(self) -> list[Effect]:
        effects: list[Effect] = [Drop(held.ticket) for _, held in sorted(self._held.items())]
        self._held.clear()
        self._wants.clear()
        self._sum, self.awaiting, self._decision = [], False, None
        self._capture_at = -1
        return [*effects, Abandon()]

    def _capture(self, version: int) -> list[Effect]:
        if self.primary and self.policy.streaming and self.version >= 0:
            return [Capture(self.version)]  # no version is common to all shards
        if not self.primary or self.version > version:
            return [Capture(max(self.version, version + 1), missed=True)]
        self._capture_at = version
        return self._captured()

    def _captured(self) -> list[Effect]:
        if self._capture_at < 0 or self.version != self._capture_at:
            return []
        self._capture_at = -1
        return [Capture(self.version)]
