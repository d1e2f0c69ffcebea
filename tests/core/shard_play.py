"""One shard under a policy, simulated with a worker for each replica and optionally a backup. Every effect is checked.

The policies' contract suite (`policy_contract.py`) runs it. For the whole cluster see `rallypoint.testing.simulation`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rallypoint.core.policy import Policy
from rallypoint.core.shard import effects as shard_effects
from rallypoint.core.shard import events as shard_events
from rallypoint.core.shard.events import EVERYTHING
from rallypoint.core.shard.machine import ShardMachine

ACTIONS = ("push", "push", "push", "push again", "push late", "push early", "ask", "go", "ack", "ack", "fold")
_END = "end"  # a follower that does not contribute and waits for the end of the job
Name = tuple[int, int]  # (step, replica): a contribution


def missing(machine: ShardMachine) -> list[int]:
    """Return the replicas whose next contribution has not arrived."""
    return [replica for replica in range(machine.expected) if not machine.knows(replica)]


class PolicyBroken(AssertionError):
    """The policy made a shard do something forbidden."""


@dataclass(frozen=True)
class Cast:
    """The participants: `replicas` contribute `rounds` times each.

    With `backup`, a version is visible only after its ack.

    With `skips` (under a streaming policy) some contributions are not finite, and must change nothing.
    """

    replicas: int
    rounds: int
    backup: bool = False
    skips: bool = False


@dataclass(frozen=True, slots=True)
class _HeldShard:
    """The parameters that a replica's worker computes from."""

    clock: int
    version: int


class ShardPlay:
    """One simulated job: call `act` with actions, then `finish`.

    `bound`: how many steps a replica may be ahead of the slowest replica that it sees; None: any number. `needed`: how
    many contributions of a round make an update, under an aligned policy; None under a streaming one, where each
    counts.
    """

    def __init__(self, policy: Policy, cast: Cast, *, bound: int | None, needed: int | None) -> None:
        self.policy, self.cast, self.bound, self.needed = policy, cast, bound, needed
        self.machine = ShardMachine(policy, cast.replicas, rounds=cast.rounds, skips=cast.skips and policy.streaming)
        # Version -> the contributions in it, skipped ones included
        self.contents: dict[int, frozenset[Name]] = {0: frozenset()}
        self.skipped: set[Name] = set()
        self.steps: list[int] = []  # for each update its place in the schedule
        self._tickets: dict[int, Name] = {}
        self._out: Counter[int] = Counter()
        self._parts: dict[int, list[Name]] = {}  # of the sum in progress, by the first replica
        self._clocks = list(self.machine.clocks)
        self._held: dict[int, _HeldShard] = {}
        self._sent: list[shard_events.Contribute] = []
        self._waits: set[int] = set()  # replicas whose worker waits for an answer
        self._under_way: list[int] = []  # versions that the backup has not acknowledged
        self._acked = -1
        self._ended = False
        self._gathering = False
        self._begin()

    def _begin(self) -> None:
        self._handle(shard_events.Assigned(primary=True, backup=self.cast.backup, fresh=self.cast.backup))
        self._handle(shard_events.Initialise(0))
        if self.cast.backup:
            self._handle(shard_events.FillBackup())
            self._ack()
        if self.policy.streaming:
            for replica in range(self.cast.replicas):
                self._ask(replica)
            self._handle(shard_events.Want(_END, EVERYTHING))

    # ---- what may happen ----

    def act(self, action: str, which: int) -> None:
        """Make one action happen to a replica, or to something that was sent."""
        replica = which % self.cast.replicas
        match action:
            case "push":
                self._push(replica)
            case "push again" if self._sent:
                self._contribute(self._sent[which % len(self._sent)])
            case "push late" if replica in self._held and self._held[replica].clock > 0:
                self._contribute(shard_events.Contribute(self._held[replica].clock - 1, replica, 1.0, 0))
            case "push early":
                clock = self.machine.clock(replica) + 1 + self.machine.knows(replica)
                self._contribute(shard_events.Contribute(clock, replica, 1.0, 0))
            case "ask" if replica in self._waits:
                self._ask(replica)
            case "go" if replica in self._waits:
                self._handle(shard_events.Unfollowed(_name(replica)))
                self._ask(replica)
            case "ack":
                self._ack()
            case "fold":
                self._fold()

    def finish(self) -> None:
        """Deliver everything. Raises PolicyBroken unless the job ends and every contribution is accounted for."""
        for _ in range(2 * self.cast.replicas * (self.cast.rounds + 1)):
            for replica in range(self.cast.replicas):
                self._push(replica)
            self._fold()
            while self._under_way:
                self._ack()
        self._check(not self._waits, f"{sorted(self._waits)} wait for ever, clocks {self.machine.clocks}")
        self._check(not self._held, f"{self._held} are not finished")
        self._check(self._ended or not self.policy.streaming, "the end of the job is published to nobody")
        self._check_accounts()

    def _push(self, replica: int) -> None:
        """The replica's worker, if it has parameters, contributes its next step and asks for the next parameters."""
        if (held := self._held.pop(replica, None)) is None:
            return
        finite = not self.cast.skips or (held.clock * 5 + replica) % 7 != 3
        event = shard_events.Contribute(held.clock, replica, 1.0 + replica, 0, finite, held.version)
        self._sent.append(event)
        if self.policy.streaming:
            self._waits.add(replica)
        self._contribute(event)
        if self.policy.streaming:
            self._ask(replica)

    def _ask(self, replica: int) -> None:
        self._waits.add(replica)
        self._handle(shard_events.Want(_name(replica), replica))

    def _contribute(self, event: shard_events.Contribute) -> None:
        ticket = len(self._tickets) + 1
        self._tickets[ticket] = (event.step, event.replica)
        self._handle(shard_events.Contribute(event.step, event.replica, event.weight, ticket, event.finite, event.base))

    def _ack(self) -> None:
        if self._under_way:
            self._acked = self._under_way.pop(0)
            self._handle(shard_events.Acked(self._acked))

    def _fold(self) -> None:
        if self._gathering:
            self._gathering = False
            self._handle(shard_events.Fold())

    # ---- the effects ----

    def _handle(self, event: shard_events.Event) -> None:
        for effect in self.machine.handle(event):
            self._run(effect)
        clocks = list(self.machine.clocks)
        self._check(all(b <= a for b, a in zip(self._clocks, clocks, strict=True)), f"{self._clocks} became {clocks}")
        self._clocks = clocks

    def _run(self, effect: shard_effects.Effect) -> None:
        match effect:
            case shard_effects.InstallFirst():
                pass
            case shard_effects.Take(ticket=ticket, at=at):
                self._check(at not in self._parts, f"{effect} into {self._parts}")
                self._leave(ticket)
                self._parts[at] = [self._tickets[ticket]]
            case shard_effects.Add(ticket=ticket):
                self._leave(ticket)
                self._parts[0].append(self._tickets[ticket])
            case shard_effects.Merge(left=left, right=right):
                self._parts[left] += self._parts.pop(right)
            case shard_effects.Discard(at=at):
                del self._parts[at]
            case shard_effects.Drop(ticket=ticket, fault=fault):
                self._leave(ticket)
                self._check(not fault, fault)
            case shard_effects.Apply():
                self._apply(effect)
            case shard_effects.Fill(version=version):
                self._under_way.append(version)
            case shard_effects.Publish(version=version):
                self._published(version)
            case shard_effects.Reply():
                self._reply(effect)
            case shard_effects.TellWait(clock=clock):
                self._check(self.bound is not None, f"{effect}, and there is no bound")
                seen = min(self._clock_in(self.machine.published, other) for other in range(self.cast.replicas))
                self._check(clock > seen + (self.bound or 0), f"{effect}, and it need not: {self.machine.clocks}")
            case shard_effects.Gather():
                self._gathering = True

    def _leave(self, ticket: int) -> None:
        self._out[ticket] += 1
        self._check(self._out[ticket] == 1, f"the payload of {self._tickets.get(ticket)} has left twice")

    def _apply(self, apply: shard_effects.Apply) -> None:
        before, done = self.contents[max(self.contents)], self._parts.get(0, [])
        self._check(len(self._parts) == 1, f"{apply} of {self._parts}")
        self._check(apply.version == max(self.contents) + 1, f"{apply} after version {max(self.contents)}")
        self._check(not before & set(done), f"{sorted(before & set(done))} are applied twice")
        self._check(len(set(done)) == len(done), f"{done} in one sum")
        self._check(math.isfinite(apply.rate) and apply.rate > 0, f"{apply} has no sensible rate")
        if self.needed is not None:
            steps = {step for step, _ in done}
            self._check(steps == {apply.version - 1}, f"{done} in round {apply.version - 1}")
            self._check(len(done) == self.needed, f"{len(done)} instead of {self.needed} in a round")
        self._check(not self.steps or self.steps[-1] <= apply.step, f"{apply} after step {self.steps}")
        self.steps.append(apply.step)
        self.contents[apply.version] = before | set(done)
        self.skipped.update(done if apply.scale is None else ())
        self._parts = {}
        if apply.replicate:
            self._under_way.append(apply.version)

    def _published(self, version: int) -> None:
        """Under an aligned policy all replicas continue from this version, also those that were too slow for it."""
        self._check_visible(version)
        self._held = {r: _HeldShard(version, version) for r in range(self.cast.replicas) if version < self.cast.rounds}

    def _reply(self, reply: shard_effects.Reply) -> None:
        self._check_visible(reply.version)
        if reply.follower == _END:
            everything = all(clock == self.cast.rounds for clock in self.machine.clocks)
            self._check(reply.last and everything, f"{reply} at {self.machine.clocks}")
            self._ended = True
            return
        self._check(reply.follower == _name(reply.replica) and not reply.last, f"{reply} to somebody else")
        own = self._clock_in(reply.version, reply.replica)
        self._check(own >= reply.clock, f"{reply} lacks what its replica has contributed: it is at {own}")
        for other in range(self.cast.replicas) if self.bound is not None else ():
            seen = self._clock_in(reply.version, other)
            self._check(reply.clock <= seen + (self.bound or 0), f"{reply} is ahead of replica {other} at {seen}")
        if reply.replica in self._waits:
            self._waits.discard(reply.replica)
            if reply.clock < self.cast.rounds:
                self._held[reply.replica] = _HeldShard(reply.clock, reply.version)

    def _clock_in(self, version: int, replica: int) -> int:
        """Return the first step of the replica whose contribution is not in this version."""
        return next(step for step in itertools.count() if (step, replica) not in self.contents[version])

    def _check_visible(self, version: int) -> None:
        known = version in self.contents and version <= self.machine.published
        self._check(known, f"version {version} of {self.machine.published} published")
        self._check(not self.cast.backup or self._acked < 0 or version <= self._acked, f"{version} is not durable")

    def _check_accounts(self) -> None:
        tally, total = self.machine.tally, self.cast.replicas * self.cast.rounds
        self._check(tally.applied + tally.folded + tally.dropped == total, f"{tally} of {total} contributions")
        content = self.contents[max(self.contents)]
        changing = content - self.skipped
        self._check(tally.applied + tally.folded == len(changing), f"{tally}, and {len(changing)} are applied")
        if self.policy.streaming:
            self._check(sum(tally.staleness.values()) == total, f"{tally} of {total} contributions")
            due = {(step, r) for step in range(self.cast.rounds) for r in range(self.cast.replicas)}
            self._check(content == due, f"{sorted(content ^ due)} are missing or too many")
            not_finite = {(c.step, c.replica) for c in self._sent if not c.finite}
            self._check(self.skipped == not_finite, f"{self.skipped} are skipped, {not_finite} are not finite")
        self._check(set(self._out) - {0} == set(self._tickets), "a payload has been forgotten")

    def _check(self, holds: bool, sentence: str) -> None:
        if not holds:
            raise PolicyBroken(sentence)


def play(
    policy: Policy, cast: Cast, actions: Iterable[tuple[str, int]], *, bound: int | None, needed: int | None
) -> ShardPlay:
    """Run these actions to the end of the job. Raises PolicyBroken when the policy breaks a promise of all policies."""
    shard_play = ShardPlay(policy, cast, bound=bound, needed=needed)
    for action, which in actions:
        shard_play.act(action, which)
    shard_play.finish()
    return shard_play


def in_order(cast: Cast) -> Sequence[tuple[str, int]]:
    """Return a schedule in which nothing is late."""
    return [("push", replica) for _ in range(cast.rounds) for replica in range(cast.replicas)]


def _name(replica: int) -> str:
    return f"worker {replica}"
