"""The state machine of a whole server: its shards under the current view, and decisions shared by all servers.

Events for one shard go to `handle`, measures to `told`, views to `adopt`. Each returns effects, which the caller runs
in order. `server/reducer/` runs them on tensors, `testing/simulation/` on names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.audits.shard import AuditedShard
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.clip import ClipMachine, Measure, Tell, Verdict
from rallypoint.core.shard.copies.pairs import Pairs
from rallypoint.core.shard.invariants import check_server
from rallypoint.core.shard.machine import ShardMachine, summed
from rallypoint.core.shard.plan import Plan
from rallypoint.core.view import View, ViewNumber

FILLS_AT_ONCE = 2  # whole states in transit to backups at a time: limits their share of bandwidth and memory


# ---- effects beside those of a shard ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Own:
    """Allocate room for a shard."""

    shard: int


@dataclass(frozen=True, slots=True)
class Disown:
    """Release a shard and everything that is held for it."""

    shard: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Read these shards from the snapshot `origin`, then send each a Loaded event."""

    shards: tuple[int, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the coordinator that a sum of this server was not finite: it was dropped, or the job must stop."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Disproved:
    """Tell the coordinator that the backup of this shard does not hold `version`, which it has acknowledged, as the two
    were in the view `paired`."""

    shard: int
    version: int
    paired: ViewNumber


@dataclass(frozen=True, slots=True)
class On:
    """An effect on one shard."""

    shard: int
    effect: shard_effects.Effect


Effect = Own | Disown | Restore | Report | Disproved | On | Tell | Verdict


@dataclass(slots=True)
class ServerMachine:
    """All shards that server `me` holds, as primary or backup. Not thread-safe: only the owner thread calls it."""

    me: str
    plan: Plan
    view: View | None = None
    incarnation: int = -1
    _machines: dict[int, ShardMachine] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=Pairs)
    _clip: ClipMachine | None = None
    _linked: set[str] = field(default_factory=set)
    _refused: Verdict | None = None  # the verdict that stops the job

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
        """Is this server the shard's primary?"""
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
                    case On(effect=shard_effects.Capture(missed=True)) if self._may_be_the_one_before(index, version):
                        effects.append(On(index, shard_effects.Capture(self._machines[index].version - 1)))
                    case On(effect=shard_effects.Capture(missed=True)):
                        passed = self.plan.cadence.begun(index, self._machines[index].version)
                        effects.append(On(index, shard_effects.Capture(max(passed, version + 1), missed=True)))
                    case _:
                        effects.append(effect)
        return effects

    def _may_be_the_one_before(self, index: int, version: int) -> bool:
        """True for buffers one ahead of the job's version: they have one contributor, and their last versions are kept.
        """
        machine, before = self._machines[index], self.plan.cadence.updates_before(index, version)
        return index not in self.plan.measured and machine.version == before + 1 and before >= machine.first

    def unfollowed(self, follower: str) -> list[Effect]:
        """A follower disconnected."""
        gone, own = shard_events.Unfollowed(follower), [index for index in self.held if self.is_primary(index)]
        return [effect for index in own for effect in self.handle(index, gone)]

    def measured(self, step: int, measure: Measure) -> list[Effect]:
        """One of this server's shards has finished its sum, and this is what was found in it; `step`: its own version.

        A shard that does not wait for a decision of all servers is decided here and now.
        """
        machine = self._machines.get(measure.shard)
        contributions = [] if machine is None else summed(machine)
        if measure.at >= 0 and not measure.gradients and len(contributions) == 1:
            measure = msgspec.structs.replace(measure, gradients=(contributions[0][1],))
        if measure.shard in self.plan.decides:
            return [] if self._clip is None else self._remember(self._clip.measured(step, measure))
        if machine is None or not machine.awaiting or self.view is None:
            return []
        begun = contributions[0][0] if contributions else machine.version
        round = self.plan.cadence.round_of(measure.shard, begun)
        verdict = self.plan.rule.verdict(round, [measure], self.view.generation)
        report: list[Effect] = [] if verdict.whole else [Report(verdict)]
        if verdict.stops:
            self._refused = verdict
            return report  # it waits for ever: nothing that is not finite is applied
        return [*report, *self.handle(measure.shard, shard_events.Decide(step, verdict.scale))]

    def told(self, step: int, measures: Iterable[Measure]) -> list[Effect]:
        """Another server sent its measures."""
        return [] if self._clip is None else self._remember(self._clip.told(step, measures))

    def _remember(self, effects: Sequence[Tell | Verdict]) -> list[Effect]:
        self._refused = next((e for e in effects if isinstance(e, Verdict) and e.stops), self._refused)
        return [*effects]

    def report_again(self) -> list[Effect]:
        """What a coordinator that was restarted may not know: the verdict that stops the job."""
        return [] if self._refused is None else [Report(self._refused)]

    def decided(self, verdict: Verdict) -> list[Effect]:
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
        machine.pinned = -1 if view.lease is None else self.plan.cadence.updates_before(index, view.lease.version)
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
        check_server(self, FILLS_AT_ONCE)
