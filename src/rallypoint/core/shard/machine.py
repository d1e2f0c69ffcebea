"""The state machine of one shard on a server. Events go in, effects come out.

The machine only decides; `server/reducer.py` runs the effects. It has no lock: one thread calls it, its owner.

A shard has one primary, which sums contributions and publishes versions. It may have one backup, which applies the same
updates and acknowledges them. `core/shard/replication.py` shows a backup's states and what is published when.

The path of a contribution through a primary:

```
   Contribute --policy.admit--> Hold --> Take / Add --> Finish --+--> Apply --> Publish (aligned) or Reply (streaming)
                      |                                          |     ^
                      +--> Drop                      decides: awaiting +-- Decide
```

With `chooses`, the sum depends on which contributions came first, and servers decide by its norm. If there is a backup,
it has to know the choice before the sum is finished and anybody hears the norm: Choose, then Finish when it has
acknowledged. If it is promoted in the middle of the round, it takes the same contributions in the same order, so its
sum has the same norm.

Under a streaming policy each replica has a clock: the step of its next contribution. Versions count updates. A follower
asks for the parameters for one replica's next step (`core/shard/pulls.py`). The primary answers when three things are
true: the parameters contain that replica's last contribution, they are durable, and the policy lets the replica go on.

A `Ticket` names a payload here: a number that the shell maps to a buffer. Every ticket that comes in with an event goes
out exactly once in Take, Add, Drop or Install, so no buffer leaks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core.policy import Policy, Verdict
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import (
    Abandon,
    Acknowledge,
    Apply,
    BackupCaughtUp,
    CaptureShard,
    Choose,
    Drop,
    Effect,
    Fill,
    Finish,
    Gather,
    Hold,
    InstallFirst,
    Prove,
    Publish,
    Take,
)
from rallypoint.core.shard.invariants import check_shard
from rallypoint.core.shard.pulls import Wants
from rallypoint.core.shard.replication import ShardCopies
from rallypoint.core.shard.summing import Chain, Choice, SumInProgress, TreeSum
from rallypoint.core.shard.tally import Clocks, Tally

# Chooses the version at which a shard's state is kept for a snapshot.


@dataclass(slots=True)
class CapturePoint:
    """The version that a snapshot waits for; -1 if there is none. `any_version`: the first one that is here will do."""

    at: int = -1
    any_version: bool = False

    def ask(self, at: int, now: int, *, primary: bool, any_version: bool) -> list[CaptureShard]:
        """A snapshot wants version `at`; the shard is at version `now`.

        With `any_version` (streaming policies, where no version is common to all shards) the current version is
        captured; if the shard is still being restored, the version that it is restored to.
        """
        if primary and any_version:
            self.any_version = True
            return self.reached(now)
        if not primary or now > at:
            return [CaptureShard(max(now, at + 1), missed=True)]
        self.at = at
        return self.reached(now)

    def reached(self, version: int) -> list[CaptureShard]:
        """The shard is now at `version`. Returns a Capture if the snapshot waits for it."""
        if version < 0 or not (self.any_version or version == self.at):
            return []
        self.at, self.any_version = -1, False
        return [CaptureShard(version)]


VERSIONS_KEPT = 2  # I5: a worker can fetch the version of the step in progress


@dataclass(slots=True)
class ShardMachine:
    """The state of one shard.

    `expected` replicas contribute to it, from `lowest` on: R for parameters, 1 for buffers (only replica 0's are kept)
    and for what a replica carries. With `decides`, the finished sum waits for a decision: global-norm clipping, or what
    to do with a step that is not finite. `rounds` is how many contributions each replica makes to it in the whole job.
    """

    policy: Policy
    expected: int
    decides: bool = False
    primary: bool = True
    rounds: int = 0
    chooses: bool = False  # the decision depends on which contributions this shard takes
    skips: bool = False  # under a streaming policy: a contribution that is not finite gets an update of its own
    compensates: bool = False
    lowest: int = 0
    version: int = -1  # updates applied here; -1: no state yet
    published: int = -1  # the newest version that followers may see (<= `version`)
    pinned: int = -1  # the version whose evaluation is leased: it is kept, whatever its age
    first: int = 0  # the version that was loaded here: none before it may be kept
    awaiting: bool = False  # the sum is finished and waits for the decision
    chosen: tuple[int, ...] = ()  # the round in progress takes these, as an earlier primary had chosen; empty: any
    clocks: Clocks = field(default_factory=Clocks)  # none under an aligned policy
    clocked: bool = field(init=False)  # there are some
    tally: Tally = field(default_factory=Tally)
    copies: ShardCopies = field(default_factory=ShardCopies)
    differs: bool = False  # this backup holds other bytes than its primary, and waits to be filled
    unasked: bool = False  # it was the primary, kept its state, and acknowledges nothing before it has proved that
    wants: Wants = field(default_factory=Wants)
    _capture: CapturePoint = field(default_factory=CapturePoint)
    _fill_next: set[bool] = field(default_factory=set)  # whom to fill after the sum in progress: see `Fill.incoming`
    _choice: Choice = field(default_factory=Choice)
    _decision: events.Decide | None = None  # arrived before the sum was finished (possible for buffers)
    _sum: SumInProgress = field(init=False)
    _held: dict[int, events.Contribute] = field(default_factory=dict)  # not for a tree

    def __post_init__(self) -> None:
        self.clocks = Clocks.at((), self.policy.clocks(self.expected), self.version)
        self.clocked = bool(self.clocks)
        self._sum = TreeSum(self.expected, self.lowest) if self.policy.tree else Chain(self.expected)

    # ---- what a policy reads (`core.policy.Ledger`) ----

    @property
    def added(self) -> int:
        return self._sum.added

    @property
    def slowest(self) -> int:
        return self.clocks.slowest() if self.clocked else self.version

    @property
    def visible(self) -> int:
        return self.clocks.visible(self.published) if self.clocked else self.published

    def knows(self, replica: int) -> bool:
        return replica in self._held or self._sum.knows(replica)

    def clock(self, replica: int) -> int:
        return self.clocks[replica] if self.clocked else self.version

    def handle(self, event: events.Event) -> list[Effect]:
        """Handle one event. Returns the effects, which the caller runs in order."""
        match event:
            case events.Contribute():
                return self._contribute(event)
            case events.Want():
                # A backup drops it: the worker sent it under an older view and will ask the new primary.
                return self.wants.add(event, self) if self.primary else []
            case events.Replicated():
                return self._replicated(event)
            case events.Chosen(step=step):
                self._choice.learn(event)  # (it may overtake the question what is here)
                silent = self.primary or self.unasked or step != self.version
                return [] if silent else [self._choice.acknowledge(self.version)]
            case events.Acked():
                return self._acknowledged(event)
            case events.Initialise(ticket=ticket, version=version):
                return self._initialise(ticket, version)
            case events.Decide():
                return self._decide(event)
            case events.Fold():
                return self._finish() if self._sum.added and not self.awaiting else []
            case events.Unfollowed(follower=follower):
                self.wants.forget(follower)
                return []
            case events.Loaded():
                return self._loaded(event)
            case events.Assigned():
                return self._assigned(event)
            case events.FillBackup(incoming=incoming):
                return self._fill(incoming=incoming)
            case events.Compared(version=version, same=same) if not self.primary:
                # If it differs, it keeps what it holds until it is filled: that may have been published
                self.differs, self.unasked = not same, False
                return [self._choice.acknowledge(version) if same else Acknowledge(version, differs=True)]
            case events.Compared():
                return []
            case events.CaptureAt(version=at):
                free = event.any_version or self.clocked
                return [*self._capture.ask(at, self.version, primary=self.primary, any_version=free)]

    # ---- the primary: contributions ----

    def _initialise(self, ticket: events.Ticket, version: int) -> list[Effect]:
        if self.version >= 0 or not self.primary:
            return [Drop(ticket)]
        self.version = version
        self.tally.restart(version)
        return [InstallFirst(ticket, version), *self._capture.reached(version), *self._publish()]

    def _contribute(self, event: events.Contribute) -> list[Effect]:
        if not self.primary or self.version < 0:
            return [Drop(event.ticket)]  # sent under an older view: the worker will send it again
        if fault := self._sum.fault(event):
            return [Drop(event.ticket, fault)]
        verdict = self.policy.admit(self, event.step, event.replica - self.lowest)
        alone = self.clocked and self.skips and not event.finite  # drop it, and no other in its sum
        waits = self.awaiting or (alone and self._sum.added and self.decides)  # for the decision on the sum before it
        match verdict:
            case Verdict.REJECT:
                # For a step that has not begun here: the worker has a version from a newer primary than this server.
                return [Drop(event.ticket)]
            case _ if verdict is Verdict.DROP or self._sum.covers(event):
                self.tally.refused(event.replica, event.step, may_be_late=not self.clocked)
                return [Drop(event.ticket)]
            case Verdict.HOLD | Verdict.ADD if verdict is Verdict.HOLD or waits:
                self._held[event.replica] = event
                self.tally.arrived(event.replica, event.step)
                finished = self._finish() if verdict is Verdict.ADD and not self.awaiting else []
                # What was chosen first may come last, from the same worker: nobody may wait to be allowed to send it.
                return [Hold(event.ticket, credit=bool(self.chosen)), *finished]
            case _:
                before = self._finish() if alone and self._sum.added else []
                added = self._add(event)
                held = self._take_held() if self._held else []
                return [*before, *added, *held, *self._finish_when_complete()]

    def _add(self, event: events.Contribute) -> list[Effect]:
        for replica in range(event.replica, event.replica + event.count):
            self.tally.arrived(replica, event.step)
        base = event.base if self.compensates and event.base < self.version else None
        return self._sum.add(event, base)

    def _take_held(self) -> list[Effect]:
        """Add the held contributions that the policy admits now, in the order chosen, or of replicas."""
        effects: list[Effect] = []
        for replica in [r for r in self.chosen or sorted(self._held) if r in self._held]:
            held = self._held.pop(replica)
            if self.policy.admit(self, held.step, replica) is not Verdict.ADD:
                self._held[replica] = held
                continue
            effects += self._add(held)
            if self.clocked:
                break  # each held contribution becomes an update of its own
        return effects

    def _finish_when_complete(self) -> list[Effect]:
        if not self._sum.added or self.awaiting or self._choice.pending:
            return []
        alone = self.clocked and (self.copies.replicating or (self.skips and (self._sum.losses or self._sum.gradients)))
        if alone or self.policy.complete(self):
            if not (self.chooses and self.copies.limits):
                return self._finish()
            self._choice.pending = True  # without a link it is told with the state, once the link is up again
            return [self._choice.tell(self.version, self._sum.contributions)] if self.copies.replicating else []
        return [Gather()] if self.clocked else []

    def _finish(self) -> list[Effect]:
        self._choice.pending = False
        losses, gradients = self._sum.losses, self._sum.gradients
        finish = Finish(self.version, self._sum.weight, self.decides, losses, self._sum.added, gradients)
        if not self.decides:
            return [finish, *self._advance(None if self.skips and (losses or gradients) else 1.0)]
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
        rate, copies = self._count(skipped=scale is None), self.copies.replicating
        applied = Apply(
            self.version + 1, self.clocks.mean if self.clocked else self.version, scale, self._oldest, rate=rate,
            replica=self._sum.first, replicate=bool(copies), copies=copies, pinned=self.pinned,
        )  # fmt: skip
        done = self._sum.contributions
        self._sum.clear()
        self.awaiting = False
        self.version += 1
        self.chosen = ()
        for contribution in done if self.clocked else ():
            self.clocks.tick(contribution.replica, self.version)
        effects: list[Effect] = [applied, *self._capture.reached(self.version), *self._publish()]
        for incoming in sorted(self._fill_next):
            effects += self._fill(incoming=incoming)
        self._fill_next.clear()
        if self.clocked:
            effects += [*self._take_held(), *self._finish_when_complete()]
        return effects

    def _count(self, *, skipped: bool) -> float:
        """Count the finished sum in the tally. Returns its factor on the learning rate."""
        if not self.clocked:
            self.tally.round(self._sum.added, self.expected, skipped=skipped)
            return 1.0
        self.tally.update([max(0, self.version - c.base) for c in self._sum.contributions], skipped=skipped)
        return sum(self.policy.rate(self, self.version - contribution.base) for contribution in self._sum.contributions)

    @property
    def _oldest(self) -> int:
        """The oldest version whose wire copy is still needed after the next update."""
        kept = VERSIONS_KEPT + (2 * self.expected if self.compensates else 0)
        oldest = max(0, self.version + 2 - kept)
        return min(oldest, max(self.published, 0)) if self.primary else oldest

    # ---- the primary: versions ----

    def _publish(self) -> list[Effect]:
        """Publish the newest durable version, unless it is published already."""
        if (durable := self.copies.durable(self.version)) <= self.published:
            return []
        self.published = durable
        return self.wants.serve(self) if self.clocked else [Publish(durable)]

    def _fill(self, *, incoming: bool) -> list[Effect]:
        copy = self.copies.of(incoming)
        if not (self.primary and copy.needs_sync and self.version >= 0):
            return []
        if self.clocked and self._sum.added and self.decides:
            self._fill_next.add(incoming)  # once the sum in progress is decided
            return [] if self.awaiting else self._finish()
        effects: list[Effect] = []
        while self.clocked and self._sum.added:
            # The backup hears of one contribution per update, so finish the sum in progress before sending the state.
            effects += self._finish()
        copy.filled()
        if self.chooses and (self._choice.pending or self.awaiting):
            effects.append(self._choice.tell(self.version, self._sum.contributions))
        elif self.chosen:
            effects.append(Choose(self.version, self.chosen))  # an earlier primary has told its norm perhaps
        state = Prove(self.version) if copy.asks else Fill(self.version, incoming)
        return [*effects, state]  # after the choice: with the state the backup may be promoted

    def _acknowledged(self, event: events.Acked) -> list[Effect]:
        copy = self.copies.of(event.incoming)
        if not (self.primary and copy.replicating) or event.version > self.version:
            return []
        if event.differs:
            copy.refuted()
            return []
        copy.acknowledged(event.version, chosen=event.chosen)
        effects = self._publish()
        if copy.catches_up(self.published):
            effects.append(BackupCaughtUp(event.incoming))
        if self._choice.pending and self.copies.chose(self.version):
            effects += self._finish()
        return effects

    # ---- the backup ----

    def _replicated(self, event: events.Replicated) -> list[Effect]:
        if self.primary or self.differs or self.version < event.step:
            return [Drop(event.ticket)]  # from a replaced primary, or sent before this backup had the state
        if self.version > event.step:
            return [Drop(event.ticket), self._choice.acknowledge(self.version)]
        place = self.clocks.mean if self.clocked else self.version
        scale = None if event.skip else 1.0
        applied = Apply(self.version + 1, place, scale, self._oldest, rate=event.rate, pinned=self.pinned)
        self.version += 1
        if event.replica < len(self.clocks):
            self.clocks.tick(event.replica, self.version)
        return [Take(event.ticket, 1.0), applied, self._choice.acknowledge(self.version)]

    # ---- either ----

    def _loaded(self, event: events.Loaded) -> list[Effect]:
        self.version = self.first = event.version
        self.differs = self.unasked = False
        if self.clocked:
            self.clocks = Clocks.at(event.clocks, self.expected, event.version)
        if not self.primary:
            return [self._choice.acknowledge(self.version)]
        self.published = -1
        self.tally.restart(event.version)
        self.wants.restarted(self)
        effects = [*self._capture.reached(self.version), *self._publish()]
        return effects + [effect for follower in self.wants for effect in self.wants.told_to_wait(follower, self)]

    def _assigned(self, event: events.Assigned) -> list[Effect]:
        promoted, demoted = event.primary and not self.primary, self.primary and not event.primary
        self.primary = event.primary
        effects: list[Effect] = self._forget_step() if promoted or demoted else []
        if demoted:
            self.published, self.unasked = -1, event.proven
        if demoted and not event.proven:  # else the new primary asks what is here; now it sends its state
            self.version, self.clocks = -1, Clocks.at((), self.expected, -1) if self.clocked else self.clocks
        self.copies.assigned(event, promoted=promoted)
        if promoted:
            self.differs = self.unasked = False
            self.chosen = self._choice.known(self.version)
            self.published = -1
            self.tally.restart(self.version)
        if event.primary and self.version >= 0:
            effects += self._publish()
        if self._choice.pending and self.copies.chose(self.version):
            effects += self._finish()  # the backup that was to know the choice is gone
        return effects

    def _forget_step(self) -> list[Effect]:
        effects: list[Effect] = [Drop(held.ticket) for _, held in sorted(self._held.items())]
        self._held.clear()
        self.wants.clear()
        self._sum.clear()
        self.awaiting, self._decision = False, None
        self._fill_next.clear()
        self._choice.pending, self.chosen = False, ()
        self._capture = CapturePoint()
        return [*effects, Abandon()]

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the machine is in a state that it can never reach."""
        check_shard(self)


def summed(machine: ShardMachine) -> list[tuple[int, int]]:
    """The contributions in the sum in progress, as (step, replica)."""
    return machine._sum.named(machine.version)
