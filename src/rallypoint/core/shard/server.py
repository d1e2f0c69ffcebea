"""The state machine of a whole server: its shards under the current view, and decisions shared by all servers.

Events for one shard go to `handle`, measures to `told`, views to `adopt`. Each returns effects, which the caller runs
in order. `server/reducer.py` runs them; in the simulation on names instead of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.audits import Audits
from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.policy import Policy
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.audited import AuditedShard
from rallypoint.core.shard.clip import ClipMachine, Measure, Rule, StepVerdict, Tell
from rallypoint.core.shard.machine import ShardMachine, summed
from rallypoint.core.view import View, ViewNumber

# The servers that have copies of this server's shards, and which of them are being filled.


Copy = tuple[int, bool]  # a shard, and whether its backup is meant or its third server
Pair = tuple[str, ViewNumber, ViewNumber]  # the other server, and in which views we became a pair, and we the primary


@dataclass(slots=True)
class Pairs:
    """Of each shard that is primary here: its backup, and the third server (`View.incoming`).

    `filling`: to whom the whole state is on its way.
    """

    known: dict[Copy, Pair] = field(default_factory=dict)
    filling: set[Copy] = field(default_factory=set)

    def adopt(self, index: int, view: View, *, primary: bool) -> tuple[bool, bool, bool]:
        """Note the shard's pairs in `view`; none if it is not `primary` here.

        Returns whether the backup is new, whether it was the third server, and whether there is a new third server.
        """
        homed, third = view.homed.get(index, view.generation), view.incoming.get(index)
        backup = (view.backup[index], view.paired[index], homed) if primary and index in view.backup else None
        other = (third.server, third.paired, homed) if primary and third is not None else None
        if (backup, other) == (self.known.get((index, False)), self.known.get((index, True))):
            return False, False, False
        new: dict[Copy, Pair | None] = {(index, False): backup, (index, True): other}
        before = {copy: self.known.pop(copy, None) for copy in new}
        self.known |= {copy: pair for copy, pair in new.items() if pair is not None}
        arrived = backup is not None and before[index, True] == backup
        still = {copy for copy in self.filling & new.keys() if new[copy] == before[copy]}
        if arrived and (index, True) in self.filling:
            still = {(index, False)}
        self.filling = (self.filling - new.keys()) | still
        fresh, third_fresh = (new[copy] is not None and new[copy] != before[copy] for copy in new)
        return fresh and not arrived, arrived, third_fresh

    def forget(self, index: int) -> None:
        """The shard is not here any more."""
        for copy in ((index, False), (index, True)):
            self.known.pop(copy, None)
            self.filling.discard(copy)

    def server(self, index: int, *, incoming: bool) -> str:
        """The shard's backup, or its third server."""
        return self.known[index, incoming][0]

    def replicating(self, index: int, machine: ShardMachine) -> list[str]:
        """The servers to which each update of the shard is sent."""
        return [self.known[index, i][0] for i in (False, True) if machine.copies.of(i).replicating]

    def caught_up(self, machines: Mapping[int, ShardMachine], *, incoming: bool) -> dict[int, ViewNumber]:
        """The shards whose backup (or third server) may be promoted, and for each the view that paired the two."""
        of = sorted(machines.items())
        return {index: self.known[index, incoming][1] for index, one in of if one.copies.of(incoming).caught_up}


# What a server's machine needs to know of the job.


class ServerPlan(msgspec.Struct, frozen=True):
    """What the machine needs to know of the job.

    `expected[i]` replicas contribute to shard i, `rounds` times each; staggered, as often as `cadence` says. To the
    `carried` (shards of carried state) only the named one does. `measured` shards count in the global norm
    (parameters), `decides` wait for a decision that all servers take together. Where the `rule` examines, every other
    shard is decided by its own server.
    """

    policy: Policy
    expected: Sequence[int]
    measured: frozenset[int]
    decides: frozenset[int]
    rule: Rule = msgspec.field(default_factory=Rule)
    rounds: int = 0
    buffer_policy: Policy | None = None  # None: the same as for the parameters
    compensates: bool = False
    cadence: Cadence = TOGETHER
    audits: Audits | None = None
    carried: Mapping[int, int] = {}
    keyed: bool = False  # each shard counts its own updates, and any worker may begin it

    def rounds_of(self, index: int) -> int:
        """The shard's own version at the end of the job."""
        return self.rounds if self.cadence.together else self.cadence.updates(index)

    def clip(self, generation: ViewNumber) -> ClipMachine | None:
        """A new machine for what all servers decide together in this generation; None if they decide nothing."""
        decided = sorted(self.decides)
        return ClipMachine(decided, frozenset(), self.rule, generation) if decided else None

    def machine(self, index: int, *, primary: bool) -> ShardMachine:
        policy = self.policy if self.buffer_policy is None or index in self.measured else self.buffer_policy
        kind = ShardMachine if self.audits is None else AuditedShard
        return kind(
            policy, self.expected[index], index in self.decides or self.rule.examines, primary=primary,
            rounds=self.rounds_of(index), chooses=policy.chooses and index in self.decides, skips=self.rule.examines,
            compensates=self.compensates and index in self.measured, lowest=self.carried.get(index, 0),
        )  # fmt: skip


FILLS_AT_ONCE = 2  # whole states in transit to backups at a time: limits their share of bandwidth and memory


# ---- effects beside those of a shard ---------------------------------------------------------------------------


class Own(msgspec.Struct, frozen=True):
    """Allocate room for a shard."""

    shard: int


class Disown(msgspec.Struct, frozen=True):
    """Release a shard and everything that is held for it."""

    shard: int


class Restore(msgspec.Struct, frozen=True):
    """Read these shards from the snapshot `origin`, then send each a Loaded event."""

    shards: tuple[int, ...]
    origin: str


class TellNotFinite(msgspec.Struct, frozen=True):
    """Tell the coordinator that a sum of this server was not finite: it was dropped, or the job must stop."""

    verdict: StepVerdict


class TellDisproved(msgspec.Struct, frozen=True):
    """Tell the coordinator that the backup of this shard does not hold `version`, which it has acknowledged, as the two
    were in the view `paired`."""

    shard: int
    version: int
    paired: ViewNumber


class On(msgspec.Struct, frozen=True):
    """An effect on one shard."""

    shard: int
    effect: shard_effects.Effect


Effect = Own | Disown | Restore | TellNotFinite | TellDisproved | On | Tell | StepVerdict


@dataclass(slots=True)
class ServerMachine:
    """All shards that server `me` holds, as primary or backup. Not thread-safe: only the owner thread calls it."""

    me: str
    plan: ServerPlan
    view: View | None = None
    incarnation: int = -1
    _machines: dict[int, ShardMachine] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=Pairs)
    _clip: ClipMachine | None = None
    _linked: set[str] = field(default_factory=set)
    _refused: StepVerdict | None = None  # the verdict that stops the job

    def machine(self, index: int) -> ShardMachine | None:
        """The shard's machine; None if this server does not hold the shard."""
        return self._machines.get(index)

    @property
    def held(self) -> list[int]:
        """The shards held here, in ascending order."""
        return sorted(self._machines)

    @property
    def caught_up(self) -> dict[int, ViewNumber]:
        """The shards whose backup may be promoted, and for each the view that paired it with this server."""
        return self.pairs.caught_up(self._machines, incoming=False)

    @property
    def arrived(self) -> dict[int, ViewNumber]:
        """The shards whose third server may be promoted, and for each the view in which it came beside the backup."""
        return self.pairs.caught_up(self._machines, incoming=True)

    def is_primary(self, index: int) -> bool:
        return (machine := self._machines.get(index)) is not None and machine.primary

    def takes_from(self, index: int, sender: str) -> bool:
        """Is `sender` the shard's primary, and has this server a copy, in the current view? (I10)"""
        return (
            self.view is not None and self.view.primary.get(index) == sender
            and self.me in self.view.holders_of(index)[1:] and index in self._machines
        )  # fmt: skip

    # ---- events ----

    def handle(self, index: int, event: shard_events.Event) -> list[Effect]:
        """Handle an event for one shard. KeyError if this server does not hold the shard."""
        machine = self._machines[index]
        effects: list[Effect] = [On(index, effect) for effect in machine.handle(event)]
        if isinstance(event, (shard_events.Initialise, shard_events.Loaded)):
            effects += self._fill_some([index])  # only now there is a state to send
        elif isinstance(event, shard_events.Acked):
            if (index, event.incoming) not in self.pairs.filling and not event.differs:
                return effects
            self.pairs.filling.discard((index, event.incoming))  # the first one after a fill
            effects += self._fill_some(self.held, asks=False)
        else:  # its sum in progress had to be decided first
            for one in effects:
                if isinstance(one, On) and isinstance(one.effect, shard_effects.Fill):
                    self.pairs.filling.add((index, one.effect.incoming))
        return effects

    def capture(self, version: int) -> list[Effect]:
        """A snapshot needs the state at the job's version `version`, of each shard that is primary here.

        In a Capture effect with `missed` the version is the job's; in the others it is the shard's.
        """
        effects: list[Effect] = []
        for index in (i for i in self.held if self.is_primary(i)):
            at = shard_events.CaptureAt(self.plan.cadence.updates_before(index, version), self.plan.keyed)
            for effect in self.handle(index, at):
                match effect:
                    case On(effect=shard_effects.CaptureShard(missed=True)) if self._may_be_the_one_before(
                        index, version
                    ):
                        effects.append(On(index, shard_effects.CaptureShard(self._machines[index].version - 1)))
                    case On(effect=shard_effects.CaptureShard(missed=True)):
                        passed = self.plan.cadence.begun(index, self._machines[index].version)
                        effects.append(On(index, shard_effects.CaptureShard(max(passed, version + 1), missed=True)))
                    case _:
                        effects.append(effect)
        return effects

    def _may_be_the_one_before(self, index: int, version: int) -> bool:
        """True for buffers one ahead of the job's version: they have one contributor, and their last versions are kept.
        """
        machine, before = self._machines[index], self.plan.cadence.updates_before(index, version)
        return index not in self.plan.measured and machine.version == before + 1 and before >= machine.first

    def unfollowed(self, follower: str) -> list[Effect]:
        gone, own = shard_events.Unfollowed(follower), [index for index in self.held if self.is_primary(index)]
        return [effect for index in own for effect in self.handle(index, gone)]

    def measured(self, step: int, measure: Measure) -> list[Effect]:
        """One of this server's shards has finished its sum, and this is what was found in it; `step`: its own version.

        A shard that does not wait for a decision of all servers is decided here and now.
        """
        machine, rule = self._machines.get(measure.shard), self.plan.rule
        alone, good = measure.shard not in self.plan.decides, measure.at < 0 and not measure.not_finite
        if alone and good and not measure.gradients and not rule.scaled and rule.clip is None:
            waits = machine is not None and machine.awaiting and self.view is not None
            return self.handle(measure.shard, shard_events.Decide(step, 1.0)) if waits else []
        contributions = [] if machine is None else summed(machine)
        if measure.at >= 0 and not measure.gradients and len(contributions) == 1:
            measure = msgspec.structs.replace(measure, gradients=(contributions[0][1],))
        if not alone:
            return [] if self._clip is None else self._remember(self._clip.measured(step, measure))
        if machine is None or not machine.awaiting or self.view is None:
            return []
        begun = contributions[0][0] if contributions else machine.version
        round = self.plan.cadence.round_of(measure.shard, begun)
        verdict = rule.verdict(round, [measure], self.view.generation)
        report: list[Effect] = [] if verdict.whole else [TellNotFinite(verdict)]
        if verdict.stops:
            self._refused = verdict
            return report  # it waits for ever: nothing that is not finite is applied
        return [*report, *self.handle(measure.shard, shard_events.Decide(step, verdict.scale))]

    def told(self, step: int, measures: Iterable[Measure]) -> list[Effect]:
        """Another server sent its measures."""
        return [] if self._clip is None else self._remember(self._clip.told(step, measures))

    def _remember(self, effects: Sequence[Tell | StepVerdict]) -> list[Effect]:
        self._refused = next((e for e in effects if isinstance(e, StepVerdict) and e.stops), self._refused)
        return [*effects]

    def report_again(self) -> list[Effect]:
        """What a coordinator that was restarted may not know: the verdict that stops the job."""
        return [] if self._refused is None else [TellNotFinite(self._refused)]

    def decided(self, verdict: StepVerdict) -> list[Effect]:
        """Apply a verdict to every shard that waits for it.

        Call it when the effects that came with the verdict are done. A new view may have come in between: a verdict of
        an older generation is stale and is ignored (I10). One that stops the job is applied nowhere.
        """
        if self.view is None or verdict.generation != self.view.generation or verdict.stops:
            return []
        event = shard_events.Decide(verdict.step, verdict.scale)
        return [effect for index in self.held if index in self.plan.decides for effect in self.handle(index, event)]

    def peer_linked(self, server: str) -> list[Effect]:
        """The link to another server is up (again): send it all measures, because it may have missed some."""
        self._linked.add(server)
        known = [] if self._clip is None else list(self._clip.retell())
        return [*known, *self._fill_some(self.held)]

    def peer_lost(self, server: str) -> list[Effect]:
        """The link to another server broke. Everything in transit on it is lost."""
        self._linked.discard(server)
        for (index, incoming), (other, *_) in self.pairs.known.items():
            if other == server:
                self._machines[index].copies.of(incoming).link_lost()
                self.pairs.filling.discard((index, incoming))
        return self._fill_some(self.held)  # its fills have ended, so others may begin

    def adopt(self, view: View) -> list[Effect]:
        """Adopt a view, if it is newer than the current one."""
        if self.view is not None and view.number <= self.view.number:
            return []
        before, self.view = self.view, view
        stayed = {(member.id, member.incarnation) for member in before.servers} if before is not None else set()
        self._linked &= {member.id for member in view.servers if (member.id, member.incarnation) in stayed}
        incarnation = next((member.incarnation for member in view.servers if member.id == self.me), -1)
        reborn, self.incarnation = incarnation != self.incarnation, incarnation
        rolled_back = before is None or before.generation != view.generation
        if reborn or rolled_back:
            return self._new_generation(view, restore=rolled_back)
        held = {s for s in view.primary if self.me in view.holders_of(s)}
        effects: list[Effect] = [self._disown(index) for index in sorted(self._machines.keys() - held)]
        for index in sorted(held):
            effects += self._assign(index, view)
        return [*effects, *self._share(view), *self._fill_some(self.held)]

    def _new_generation(self, view: View, *, restore: bool) -> list[Effect]:
        """Release everything: after a roll-back, or because the coordinator had given this server up."""
        effects: list[Effect] = [self._disown(index) for index in sorted(self._machines)]
        self.pairs.filling.clear()
        self._refused = None
        self._clip = self.plan.clip(view.generation)
        for index in sorted(s for s in view.primary if self.me in view.holders_of(s)):
            effects += self._assign(index, view)
        effects += self._share(view)
        own = tuple(view.shards_of(self.me))
        if restore and view.origin and own:  # a server that joins later has no shards, and the snapshot may be deleted
            effects.append(Restore(own, view.origin))
        return effects

    def _assign(self, index: int, view: View) -> list[Effect]:
        primary = view.primary[index] == self.me
        effects: list[Effect] = []
        if index not in self._machines:
            self._machines[index] = self.plan.machine(index, primary=primary)
            effects.append(Own(index))
        fresh, arrived, third_fresh = self.pairs.adopt(index, view, primary=primary)
        machine = self._machines[index]
        if isinstance(machine, AuditedShard):
            machine.opinions.view = view
        lease = view.orders.lease
        machine.pinned = -1 if lease is None else self.plan.cadence.updates_before(index, lease.version)
        backup, third = (index, False) in self.pairs.known, (index, True) in self.pairs.known
        done = machine.handle(
            shard_events.Assigned(primary, backup, fresh, view.proven(index), arrived, third, third_fresh)
        )
        verdict = self._clip.verdict(machine.version) if self._clip is not None else None
        if verdict is not None and index in self.plan.decides and not verdict.stops:
            done += machine.handle(shard_events.Decide(verdict.step, verdict.scale))  # decided before we held the shard
        return effects + [On(index, effect) for effect in done]

    def _disown(self, index: int) -> Disown:
        del self._machines[index]
        self.pairs.forget(index)
        return Disown(index)

    def _share(self, view: View) -> list[Effect]:
        """Update which norms this server measures, and send all known measures again."""
        if self._clip is None:
            return []
        self._clip.own = frozenset(view.shards_of(self.me)) & self.plan.decides
        return list(self._clip.retell())

    def _fill_some(self, indices: Iterable[int], *, asks: bool = True) -> list[Effect]:
        """Begin to send the whole state to some more of these shards' backups, at most FILLS_AT_ONCE at a time. `asks`:
        some may have to be asked what they hold, which is short."""
        effects: list[Effect] = []
        begun = len(self.pairs.filling)
        for index, incoming in ((index, third) for index in indices for third in (False, True)):
            if begun >= FILLS_AT_ONCE and not asks:
                break
            copy = self._machines[index].copies.of(incoming)
            if not copy.needs_sync or self.pairs.server(index, incoming=incoming) not in self._linked:
                continue
            if begun >= FILLS_AT_ONCE and not copy.asks:
                continue
            asked = copy.asks
            if filled := self._machines[index].handle(shard_events.FillBackup(incoming)):
                begun += not asked
                if copy.replicating and not asked:
                    self.pairs.filling.add((index, incoming))
                effects += [On(index, effect) for effect in filled]
        return effects

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the server or a shard is in a state that it can never reach."""
        view, me = self.view, self.me
        if view is None:
            assert not self._machines, f"{me} holds shards {self.held} before any view"
            return
        named = {shard for shard in view.primary if me in view.holders_of(shard)}
        assert self._machines.keys() == named, f"{me} holds shards {self.held}, and view {view.number} says {named}"
        for index, machine in self._machines.items():
            assert machine.primary == (view.primary[index] == me), f"{me}, shard {index}: primary in no view"
            for incoming, server_id in enumerate(view.holders_of(index)[1:]):
                known = self.pairs.known.get((index, bool(incoming)), ("",))[0]
                assert not machine.primary or known == server_id, f"{me}, shard {index}: not the view's backup"
            try:
                machine.validate()
            except AssertionError as error:
                raise AssertionError(f"{me}, shard {index}: {error}") from None
        filling = self.pairs.filling
        assert len(filling) <= FILLS_AT_ONCE, f"{me} fills {sorted(filling)} at once"
        for index, incoming in filling:
            copy = self._machines[index].copies.of(incoming)
            assert copy.replicating, f"{me} fills shard {index}, which does not replicate"
        if self._clip is not None:
            own = frozenset(view.shards_of(me)) & self.plan.decides
            assert self._clip.own == own, f"{me} measures shards {sorted(self._clip.own)} instead of {sorted(own)}"
            assert self._clip.generation == view.generation, f"{me} decides for a generation that is over"
            self._clip.validate()
