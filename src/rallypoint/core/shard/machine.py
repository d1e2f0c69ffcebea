"""The state machine of one shard on a server. Events go in, effects come out.

The machine only decides; `server/reducer.py` runs the effects. It has no lock: one thread calls it, its owner.

A shard has one primary, which sums contributions and publishes versions. It may have one backup, which applies the same
updates and acknowledges them. `core/shard/machine.py` shows a backup's states and what is published when.

The path of a contribution through a primary:

```
   Contribute --policy.admit--> Hold --> Take / Add --> Finish --+--> Apply --> Publish (aligned) or Reply (streaming)
                      |                                          |     ^
                      +--> Drop                      decides: awaiting +-- Decide
```

With `chooses`, the sum depends on which contributions came first, and servers decide by its norm. If there is a backup,
it has to know the choice before the sum is finished and anybody hears the norm: Chosen, then Finish when it has
acknowledged. If it is promoted in the middle of the round, it takes the same contributions in the same order, so its
sum has the same norm.

Under a streaming policy each replica has a clock: the step of its next contribution. Versions count updates. A follower
asks for the parameters for one replica's next step (`core/shard/pulls.py`). The primary answers when three things are
true: the parameters contain that replica's last contribution, they are durable, and the policy lets the replica go on.

A `Ticket` names a payload here: a number that the shell maps to a buffer. Every ticket that comes in with an event goes
out exactly once in Take, Add, Drop or Install, so no buffer leaks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from rallypoint.core.policy import Policy, Verdict
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import (
    Abandon,
    Acknowledge,
    Apply,
    BackupCaughtUp,
    CaptureShard,
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
from rallypoint.core.shard.events import Assigned
from rallypoint.core.shard.pulls import Clocks, Wants
from rallypoint.core.shard.summing import Chain, Choice, TreeSum


@dataclass(slots=True)
class Tally:
    """Counts each contribution once: as applied, folded (into another's update) or dropped.

    `repeats` counts contributions that arrived a second time (I2). `staleness` is a histogram: how many updates the
    shard had between the version that a contribution was computed from and the update that it became part of.

    Example, a quorum of 2 of 3: replicas 0 and 1 make step 0's update, so `applied` is 2 and `dropped` is 1. When
    replica 2's contribution arrives afterwards, it is the dropped one and is not counted again; sent again, it is a
    repeat.
    """

    applied: int = 0
    folded: int = 0
    dropped: int = 0
    repeats: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)  # replica -> the newest step that it was counted for
    _first: int = 0  # contributions to steps before this one were counted elsewhere

    def restart(self, version: int) -> None:
        """This server is the shard's primary from `version` on. Contributions before that were counted elsewhere."""
        self._newest.clear()
        self._first = max(0, version)

    def arrived(self, replica: int, step: int) -> None:
        """A contribution was added or held."""
        self._newest[replica] = max(step, self._newest.get(replica, -1))

    def refused(self, replica: int, step: int, *, may_be_late: bool) -> None:
        """A contribution was dropped on arrival.

        It is a repeat, or (with `may_be_late`) the first copy of one that the update did not wait for.
        """
        if not may_be_late or step <= self._newest.get(replica, self._first - 1):
            self.repeats += 1
        else:
            self._newest[replica] = step

    def round(self, added: int, expected: int, *, skipped: bool) -> None:
        """An aligned update took `added` of `expected` contributions. `skipped`: it changed nothing."""
        self.applied += 0 if skipped else added
        self.dropped += expected if skipped else expected - added

    def update(self, staleness: Iterable[int], *, skipped: bool) -> None:
        """A streaming update took contributions with these staleness values, in updates."""
        added = 0
        for late in staleness:
            added += 1
            self.staleness[late] = self.staleness.get(late, 0) + 1
        if skipped:
            self.dropped += added
        else:
            self.applied += 1
            self.folded += added - 1

    def validate(self) -> None:
        """Raise AssertionError unless the counts are possible."""
        counts = (self.applied, self.folded, self.dropped, self.repeats)
        assert all(count >= 0 for count in (*counts, *self.staleness.values())), f"{self} counts below zero"
        assert all(late >= 0 for late in self.staleness), f"{self} has a contribution from a later version"


@dataclass(slots=True)
class CopyState:
    """The backup of one shard, or the third server, as the primary sees it.

    ```
              a view names          the state            an acknowledgement covers
              a new backup           is sent             all that was published
       none ---------------> needs sync -----> replicating ---------------> caught up
        ^                      ^   ^                |                          |
        |                      |   +-- link lost ---+                          |
        |                      +------ link lost (stays caught up) ------------+
        +-- a view takes the backup away, or this server is no longer primary (from every state)
    ```

    From the first acknowledgement on (`needs_ack`), the primary publishes only versions that the backup has (I4). While
    the link is broken it publishes nothing new. So a backup that was caught up stays caught up and may be promoted;
    `needs_sync` then says that the whole state must be sent first on the new link.

    A backup that held all that was published when this server became the primary is caught up from the beginning. It
    may be at the same version: so it is asked first (`asks`), and filled only if it is not.
    """

    needs_sync: bool = False  # there is a backup, and the state has not been sent over its current link
    replicating: bool = False  # the primary sends every update to the backup
    caught_up: bool = False  # the backup may be promoted
    needs_ack: bool = False  # publish only versions that the backup has
    asks: bool = False  # it may hold the state already
    acked: int = -1  # the newest version acknowledged over the current link
    chose: int = -1  # the step of the newest choice of contributions acknowledged over the current link

    def assigned(self, *, backup: bool, proven: bool = False) -> None:
        """A view pairs the shard with a new backup, or (False) with none. `proven`: it holds all that was published."""
        self.needs_sync = backup
        self.replicating = False
        self.caught_up = self.needs_ack = self.asks = backup and proven
        self.acked = self.chose = -1

    def filled(self) -> None:
        """The caller sends the whole state now, and every update from now on."""
        self.needs_sync, self.replicating = False, True

    def link_lost(self) -> None:
        """The link broke, and everything in transit is lost: the whole state must be sent again."""
        if self.replicating:
            self.needs_sync, self.replicating = True, False
            self.acked = self.chose = -1

    def refuted(self) -> None:
        """The backup does not hold the same state: it is to be filled."""
        self.asks = False
        self.link_lost()

    def acknowledged(self, version: int, *, chosen: bool = False) -> None:
        """The backup acknowledged `version`, and perhaps a choice for the next one."""
        self.acked = max(self.acked, version)
        self.chose = version if chosen else self.chose
        self.needs_ack, self.asks = True, False

    @property
    def limits(self) -> bool:
        """True if the backup may be promoted, or will be as soon as the state that is on its way has come."""
        return self.replicating or self.needs_ack

    def catches_up(self, published: int) -> bool:
        """Returns True once: when the backup has all published versions for the first time."""
        if self.caught_up or self.acked < published:
            return False
        self.caught_up = True
        return True

    def validate(self, version: int, published: int, *, primary: bool) -> None:
        """Raise AssertionError unless this is one of the states above."""
        assert primary or self == CopyState(), f"a shard that is not primary here has a backup: {self}"
        assert not (self.needs_sync and self.replicating), f"{self}: a backup that is replicating needs no sync"
        assert self.needs_ack or not self.caught_up, f"{self}: caught up without an acknowledgement"
        assert self.replicating or self.acked < 0, f"{self}: an acknowledgement counts beyond its link"
        assert self.acked <= version, f"{self}: the backup acknowledged more than version {version}"
        lost = self.caught_up and self.acked >= 0 and published > self.acked
        assert not lost, f"publishes version {published} while its backup, caught up, is at version {self.acked}"


@dataclass(slots=True)
class ShardCopies:
    """The backup of one shard, and the third server (`incoming`) that is filled beside it: see `View.incoming`."""

    backup: CopyState = field(default_factory=CopyState)
    incoming: CopyState = field(default_factory=CopyState)

    def of(self, incoming: bool) -> CopyState:
        """The third server, or the backup."""
        return self.incoming if incoming else self.backup

    def assigned(self, event: Assigned, *, promoted: bool) -> None:
        """A view names the backup and the third server; `promoted`: this server is the primary from now on."""
        if event.arrived:
            self.backup, self.incoming = self.incoming, CopyState()
        elif event.fresh or not event.backup or promoted:
            self.backup.assigned(backup=event.primary and event.backup, proven=event.proven)
        if event.incoming_fresh or not event.incoming:
            self.incoming.assigned(backup=event.incoming)

    @property
    def replicating(self) -> tuple[bool, ...]:
        """To whom updates are sent: the backup (False), the third server (True)."""
        if not self.incoming.replicating:
            return (False,) if self.backup.replicating else ()
        return (False, True) if self.backup.replicating else (True,)

    @property
    def limits(self) -> bool:
        """True if somebody may be promoted, or soon."""
        return self.backup.limits or self.incoming.limits

    def durable(self, version: int) -> int:
        """The newest version that may be published while the primary is at `version`."""
        for one in (self.backup, self.incoming):
            if one.needs_ack and one.acked < version:
                version = one.acked
        return version

    def chose(self, step: int) -> bool:
        """True if all who may be promoted know the contributions that were chosen for `step`."""
        return all(one.chose == step or not one.limits for one in (self.backup, self.incoming))

    def validate(self, version: int, published: int, *, primary: bool) -> None:
        """Raise AssertionError unless both are in one of their states."""
        assert self.backup.needs_sync or self.backup.limits or not self.incoming.limits, f"{self}: no backup, a third"
        for one in (self.backup, self.incoming):
            one.validate(version, published, primary=primary)


# How the servers that have a copy of a shard prove what they acknowledge.


Digest = Hashable  # of what a shard holds at a version: bytes; in the simulation the content itself


@dataclass(slots=True)
class Proofs:
    """The digests that acknowledgements must carry: of the state that was sent, and of each version after it.

    Only who has loaded the state and applied the updates knows the digest of the version that they make. So a server
    that acknowledges everything and holds nothing is found out by its first acknowledgement.
    """

    _expected: dict[tuple[int, str], dict[int, Digest]] = field(default_factory=dict)  # shard, server -> by version

    def filled(self, shard: int, server: str, version: int, digest: Digest) -> None:
        """The whole state is sent to that server, or it is asked whether it holds it."""
        self._expected[shard, server] = {version: digest}

    def sent(self, shard: int, server: str, version: int, digest: Digest) -> None:
        """The update that makes `version` is sent."""
        self._expected.setdefault((shard, server), {})[version] = digest

    def keep(self, servers: Collection[str]) -> None:
        """Forget all others."""
        self._expected = {copy: known for copy, known in self._expected.items() if copy[1] in servers}

    def check(self, shard: int, server: str, version: int, digest: Digest) -> bool | None:
        """Is the digest right? None if this version is not awaited: an earlier one, or one that was never sent."""
        expected = self._expected.get((shard, server), {})
        if version not in expected:
            return None
        self._expected[shard, server] = {later: known for later, known in expected.items() if later >= version}
        return expected[version] == digest


# Chooses the version at which a shard's state is kept for a snapshot.


@dataclass(slots=True)
class CapturePoint:
    """The version that a snapshot waits for; -1 if there is none. `any_version`: the first one that is here will do."""

    at: int = -1
    any_version: bool = False

    def ask(self, at: int, now: int, clocks: Clocks, *, primary: bool, any_version: bool) -> list[CaptureShard]:
        """A snapshot wants version `at`; the shard is at version `now`.

        With `any_version` (streaming policies, where no version is common to all shards) the current version is
        captured; if the shard is still being restored, the version that it is restored to.
        """
        if primary and any_version:
            self.any_version = True
            return self.reached(now, clocks)
        if not primary or now > at:
            return [CaptureShard(max(now, at + 1), missed=True)]
        self.at = at
        return self.reached(now, clocks)

    def reached(self, version: int, clocks: Clocks) -> list[CaptureShard]:
        """The shard is now at `version`. Returns a Capture if the snapshot waits for it."""
        if version < 0 or not (self.any_version or version == self.at):
            return []
        self.at, self.any_version = -1, False
        return [CaptureShard(version, clocks=tuple(clocks))]


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
    _sum: Chain | TreeSum = field(init=False)
    _held: dict[int, events.Contribute] = field(default_factory=dict)  # not for a tree

    def __post_init__(self) -> None:
        self.clocks = Clocks.at((), self.policy.clocks(self.expected), self.version)
        self.clocked = bool(self.clocks)
        self._sum = TreeSum(self.expected, self.lowest) if self.policy.tree else Chain(self.expected)

    # ---- what a policy reads ----

    @property
    def added(self) -> int:
        """The number of contributions in the sum in progress."""
        return self._sum.added

    @property
    def slowest(self) -> int:
        """The lowest clock: the number of steps of which every replica's contribution has been applied."""
        return self.clocks.slowest() if self.clocked else self.version

    @property
    def visible(self) -> int:
        """The lowest clock in the published version; lower than `slowest` until the backup has acknowledged."""
        return self.clocks.visible(self.published) if self.clocked else self.published

    def knows(self, replica: int) -> bool:
        """True if this replica's next contribution is here already, in the sum or held."""
        return replica in self._held or self._sum.knows(replica)

    def clock(self, replica: int) -> int:
        """The step of this replica's next contribution; under an aligned policy the round in progress."""
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
                return [*self._capture.ask(at, self.version, self.clocks, primary=self.primary, any_version=free)]

    # ---- the primary: contributions ----

    def _initialise(self, ticket: events.Ticket, version: int) -> list[Effect]:
        if self.version >= 0 or not self.primary:
            return [Drop(ticket)]
        self.version = version
        self.tally.restart(version)
        return [InstallFirst(ticket, version), *self._capture.reached(version, self.clocks), *self._publish()]

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
        effects: list[Effect] = [applied, *self._capture.reached(self.version, self.clocks), *self._publish()]
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
            effects.append(events.Chosen(self.version, self.chosen))  # an earlier primary has told its norm perhaps
        state = Prove(self.version) if copy.asks else Fill(self.version, incoming, tuple(self.clocks))
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
        effects = [*self._capture.reached(self.version, self.clocks), *self._publish()]
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
        assert self.published <= self.version, f"publishes version {self.published} at version {self.version}"
        summing = self.added > 0
        assert not self.awaiting or (self.decides and summing), "a decision is awaited for a sum that there is not"
        assert self.primary or not (summing or self._held or self.wants), "a backup sums, holds or answers"
        assert not self._choice.pending or (summing and not self.awaiting), "a choice is told for a finished sum"
        assert self.primary or not self.chosen, "a backup takes contributions"
        assert not (self.primary and self.differs), "a primary waits for another one's state"
        assert self.version >= 0 or not (summing or self._held), "there are contributions before any version"
        self._sum.validate()
        assert not any(map(self._sum.knows, self._held)), f"replicas {sorted(self._held)} are held, and in the sum"
        assert all(0 <= replica < self.expected for replica in self._held), f"{self._held}: of {self.expected}"
        if self.clocks:
            self.clocks.validate(self.expected, self.version)
        else:
            steps = {contribution.step for contribution in self._sum.contributions}
            assert steps <= {self.version}, f"contributions to steps {sorted(steps)} at version {self.version}"
            assert not (self._held and self.policy.tree), "a tree holds nothing back"
            counted = self.tally.applied + self.tally.dropped
            assert counted % self.expected == 0, f"{self.tally}: {self.expected} are counted with each update"
        self.copies.validate(self.version, self.published, primary=self.primary)
        self.tally.validate()


def summed(machine: ShardMachine) -> list[tuple[int, int]]:
    """The contributions in the sum in progress, as (step, replica)."""
    return machine._sum.named(machine.version)
