"""Steps of a large job, with failures: the real coordinator's machine decides, `core.plan` says how long a step takes.

Things happen one after the other: a machine fails, another comes in its place, a step ends. A loss is answered as in a
real job: its machine is silent for a heartbeat, the coordinator's machine makes a view, the view goes out to everybody
over the coordinator's link, and somebody computes the lost replica of the same step (I2). So the step in progress ends
no sooner than that. Views queue up at the coordinator, which has one core and one link for them.

Every worker has a link and a core of its own. Not in it: disks, routers, losses of packets, the filling of backups.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.cluster import events
from rallypoint.core.cluster.effects import Effect, FindSnapshot, Publish
from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.pipeline import step_cost
from rallypoint.core.plan.site import ONE_SITE, Servers, Site, Sites, Workers, sites_seconds
from rallypoint.core.plan.workload import Workload
from rallypoint.core.sums import blocks_of
from rallypoint.core.view import View
from rallypoint.testing.scale.cluster import BigCluster, Messages, Size, change_bytes, messages_of, named, named_role

_TICKET_S, _ENCODE_S = 3e-6, 2e-9  # a ticket for a server; a byte of a message: timed once, 1,000 + 1,000
_SEND_S = 180e-6  # a difference that is queued, sealed and sent: 0.45 s for 5 x 498 in benchmarks/members.py
_BEATS = 4  # of a heartbeat
_STATE = 12  # bytes of a parameter in a snapshot
Group = tuple[int, bool, bool]  # a worker's replicas; is it slow; is its link


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is played.

    Attributes:
        size, workload: the cluster and one replica's step.
        sites: where members are in several data centres; by default in one.
        rate, server_rate, aggregator_rate: bytes a second and direction of the links; the coordinator's is a server's.
        uplink: that of a rack; 0: no limit.
        mtbf: mean seconds between two failures of one machine, worker or server.
        away: seconds until another machine comes in place of one that failed.
        spot, taken, notice: so many workers of all (a share) are spot machines. Each is taken away after `taken`
            seconds in the mean, and told so `notice` seconds before.
        stragglers, slowness: so many workers of all (a share) compute so many times slower.
        slow_links, slow_link: so many have links of this part of the rate.
        snapshot_steps: without replication, a lost server takes the job back to a multiple of this.
    """

    size: Size
    workload: Workload
    rate: float
    server_rate: float
    aggregator_rate: float = 0.0
    uplink: float = 0.0
    steps: int = 100
    mtbf: float = NEVER
    away: float = 600.0
    spot: float = 0.0
    taken: float = NEVER
    notice: float = 0.0
    stragglers: float = 0.0
    slowness: float = 1.5
    slow_links: float = 0.0
    slow_link: float = 0.5
    snapshot_steps: int = 20
    sites: Sites = ONE_SITE
    seed: int = 0


def round_seconds(scenario: Scenario, groups: Mapping[Group, int], servers: int, blocks: float = 1.0) -> float:
    """Seconds of a step (of a round of local steps) that nothing disturbs: `core.plan` alone, without a coordinator.

    `groups`: how many workers are alike; `blocks`: how many blocks of replicas a sender pushes of each shard.
    """
    workload, size = scenario.workload, scenario.size
    workers = tuple(
        Workers(count, scenario.rate * (scenario.slow_link if thin else 1.0), 1, scenario.slowness if slow else 1.0,
                replicas)
        for (replicas, slow, thin), count in sorted(groups.items())
    )  # fmt: skip
    site = Site(
        workers=workers, servers=(Servers(servers, scenario.server_rate),), replication=size.replication,
        aggregators=size.racks > 0, rack=-(-size.workers // size.racks) if size.racks else 0,
        aggregator_rate=scenario.aggregator_rate or scenario.server_rate, uplink=scenario.uplink, blocks=blocks,
    )  # fmt: skip
    return workload.steps * sites_seconds(workload, scenario.sites, step_cost(workload, site).seconds)


class Step(msgspec.Struct, frozen=True):
    """One step: its number, seconds with what failures added, and without; the failures and machines that were taken
    away; blocks that a sender pushes."""

    number: int
    seconds: float
    undisturbed: float
    failures: int
    blocks: float
    taken: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        steps: in the order in which they were computed; a number comes twice after a roll-back.
        ideal: seconds of a step when nothing has failed.
        goodput: the ideal seconds of all steps, divided by what they took.
        failures, views, rollbacks: how many; `taken`: the spot machines that were taken away.
        view: what one whole view takes, as at the beginning: bytes, seconds.
        view_seconds: seconds from a whole view's making to its being everywhere.
        coordinator: the share of the time in which the coordinator sent views.
        machine: real seconds that the machine took by kind of event, and how many there were.
        largest_change, mean_change: bytes of the message to one member, of the views after the first: differences.
        sending: seconds in which the coordinator sent these.
        connections: of one server.
    """

    steps: tuple[Step, ...]
    ideal: float
    goodput: float
    failures: int
    views: int
    rollbacks: int
    view: Messages
    view_seconds: float
    coordinator: float
    machine: dict[str, tuple[float, int]]
    largest_change: int
    mean_change: float
    sending: float
    connections: int
    taken: int = 0


@dataclass(slots=True)
class Play:
    """Plays a scenario once. `clock` only measures the machine: it changes nothing that happens."""

    scenario: Scenario
    clock: Callable[[], float] = time.perf_counter
    cluster: BigCluster = field(init=False)
    _now: float = 1.0
    _due: list[tuple[float, int, str, str]] = field(default_factory=list)  # when, number of the event, what, to whom
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 62)))
    _free: float = 0.0  # when the coordinator has sent all that it has to send
    _sending: float = 0.0  # seconds that it sent
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)
    _blocks: tuple[object, float] = (None, 1.0)
    _fresh: int = 0
    _failures: int = 0
    _taken: int = 0
    _rollbacks: int = 0
    _slow: set[str] = field(default_factory=set)
    _thin: set[str] = field(default_factory=set)
    _compute: float = field(init=False)  # seconds of a replica
    _dice: random.Random = field(init=False)
    _view: Messages = field(init=False)
    _last: View = field(init=False)  # the last view that went out
    _changes: list[int] = field(default_factory=list)  # bytes of one member's message, of each difference

    def __post_init__(self) -> None:
        self._dice, self._compute = random.Random(self.scenario.seed), self.scenario.workload.compute
        self.cluster = BigCluster(self.scenario.size, self.clock)

    def run(self, told: Callable[[Step], None] = lambda step: None) -> Outcome:
        """Play all steps; `told` hears of each."""
        scenario, cluster = self.scenario, self.cluster
        self._begin()
        self._view, self._last = messages_of(cluster.view, self.clock), cluster.view
        before, steps, number, began = cluster.views, [], 0, self._now
        ideal, _ = self._undisturbed(0)
        while number < scenario.steps:
            step, number = self._step(number)
            steps.append(step)
            told(step)
        seconds = self._now - began
        return Outcome(
            tuple(steps), ideal, scenario.steps * ideal / seconds, self._failures, cluster.views - before,
            self._rollbacks, self._view, self.view_seconds, min(1.0, self._sending / seconds), dict(cluster.spent),
            max(self._changes, default=0), sum(self._changes) / max(1, len(self._changes)), self._sending,
            scenario.size.racks or scenario.size.workers + scenario.size.standby, self._taken,
        )  # fmt: skip

    @property
    def view_seconds(self) -> float:
        """What sending one view to everybody takes: the coordinator's core, or its link."""
        one = self._view
        tickets = self.scenario.size.servers * _TICKET_S
        return max(one.members * (tickets + one.message * _ENCODE_S), one.total / self.scenario.server_rate)

    def _change_seconds(self, view: View) -> float:
        """What sending the difference to the view before to everybody takes."""
        before, self._last = self._last, view
        nbytes = change_bytes(before, view)
        self._changes.append(nbytes)
        members = len(view.workers) + len(view.servers) + len(view.aggregators)
        new = len({*view.servers} - {*before.servers}) * _TICKET_S
        return members * max(_SEND_S + new + nbytes * _ENCODE_S, nbytes / self.scenario.server_rate)

    # ---- the beginning ----

    def _begin(self) -> None:
        scenario = self.scenario
        for name, role in self.cluster.members():
            if role == "worker":
                self._mark(name)
            if role != "aggregator":
                self._fails(name)
        self.cluster.gather()
        self._fresh = max(scenario.size.workers + scenario.size.standby, scenario.size.servers)

    def _mark(self, worker: str) -> None:
        if self._dice.random() < self.scenario.stragglers:
            self._slow.add(worker)
        if self._dice.random() < self.scenario.slow_links:
            self._thin.add(worker)

    def _fails(self, member: str) -> None:
        scenario, dice = self.scenario, self._dice
        if scenario.mtbf < NEVER:
            self._at(self._now + dice.expovariate(1 / scenario.mtbf), "fails", member)
        if scenario.spot and named_role(member) == "worker" and dice.random() < scenario.spot:
            self._at(self._now + dice.expovariate(1 / scenario.taken), "is taken", member)

    def _at(self, when: float, what: str, member: str) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), what, member))

    # ---- a step ----

    def _step(self, number: int) -> tuple[Step, int]:
        """Compute step `number`; returns it, and the step that follows."""
        undisturbed, blocks = self._undisturbed(number)
        began, ends, after = self._now, self._now + undisturbed, number + 1
        failures, taken = self._failures, self._taken
        while self._due and self._due[0][0] < ends:
            when, _, what, member = heapq.heappop(self._due)
            ready, back = self._happens(when, what, member, number)
            ends = max(ends, ready)
            after = min(after, back)
        self._let_pass(ends)
        if after > number:
            self.cluster.step(number, self._seconds_of, self._now)
            self.cluster.catch_up()
        return Step(number, ends - began, undisturbed, self._failures - failures, blocks, self._taken - taken), after

    def _seconds_of(self, worker: str) -> float:
        return self._compute * (self.scenario.slowness if worker in self._slow else 1.0)

    def _let_pass(self, ends: float) -> None:
        """Beats and the coordinator's clock, until then."""
        heartbeat = self.cluster.size.heartbeat
        rounds = max(1, math.ceil((ends - self._now) / (heartbeat / _BEATS)))
        for number in range(rounds):
            self.cluster.beat(ends - (rounds - 1 - number) * (ends - self._now) / rounds)
        self._now = ends

    def _undisturbed(self, number: int) -> tuple[float, float]:
        """The seconds of a step with the workers and servers that are here, and the blocks that a sender pushes."""
        scenario, view = self.scenario, self.cluster.view
        assigned = view.assigned(number)
        groups = Counter(self._key(worker, len(own)) for worker, own in assigned.items() if own)
        if self._blocks[0] is not assigned:
            self._blocks = assigned, self._most_blocks(assigned)
        blocks = self._blocks[1]
        key = (*sorted(groups.items()), len(view.servers), blocks)
        if key not in self._known:
            self._known[key] = round_seconds(scenario, groups, len(view.servers), blocks)
        return self._known[key], blocks

    def _key(self, worker: str, replicas: int) -> Group:
        return replicas, worker in self._slow, worker in self._thin

    def _most_blocks(self, assigned: Mapping[str, tuple[int, ...]]) -> float:
        """The blocks that a worker, or an aggregator, pushes on average: its replicas, cut into nodes of the tree."""
        used = self.cluster.view.aggregator_of
        senders: dict[str, list[int]] = {}
        for worker, own in assigned.items():
            if own:
                senders.setdefault(used.get(worker, worker), []).extend(own)
        return sum(len(blocks_of(own, self.scenario.size.workers)) for own in senders.values()) / len(senders)

    # ---- what happens to members ----

    def _happens(self, when: float, what: str, member: str, number: int) -> tuple[float, int]:
        """A member fails or is taken, or one of a role comes. Returns when the step in progress can end, and the step
        after it."""
        if what == "comes":
            return self._comes(when, member), number + 1
        if member not in self.cluster.machine.course.members:
            return when, number + 1
        role, had = named_role(member), bool(self.cluster.view.replicas_of(member, number))
        self._at(when + self.scenario.away, "comes", role)
        if what == "is taken":
            self._taken += 1
            return self._leaves(when, member, had), number + 1
        self._failures += 1
        seen = when + self.cluster.size.heartbeat
        effects = self.cluster.die(member)
        if any(isinstance(effect, FindSnapshot) for effect in effects):
            return self._back(seen, number)
        ready = self._send(effects, seen)
        return (ready + self._again if had or role == "server" else when), number + 1

    @property
    def _again(self) -> float:
        """Seconds in which somebody else fetches the parameters and computes a replica that was lost."""
        workload = self.scenario.workload
        return workload.compute * workload.steps + workload.nbytes / self.scenario.rate

    def _leaves(self, when: float, worker: str, had: bool) -> float:
        """A spot worker is told to go: if it has the time, it finishes what it computes. Returns as `_happens` does."""
        scenario, computes = self.scenario, self._seconds_of(worker) * self.scenario.workload.steps
        effects = self.cluster.leave(worker) if scenario.notice else self.cluster.die(worker)
        told = when if scenario.notice else when + self.cluster.size.heartbeat
        ready = self._send(effects, told)
        return ready + self._again if had and scenario.notice < computes else when

    def _comes(self, when: float, role: str) -> float:
        number, self._fresh = self._fresh, self._fresh + 1
        member = named(role, number)
        effects = self.cluster.join(number) if role == "worker" else self.cluster.serve(number)
        if role == "worker":
            self._mark(member)
        self._now, before = when, self._now
        self._fails(member)
        self._now = before
        self._send(effects, when)
        return when  # nobody waits for it

    def _back(self, seen: float, number: int) -> tuple[float, int]:
        """Shards are lost: the job goes on from its last snapshot."""
        scenario = self.scenario
        version = number - number % scenario.snapshot_steps
        self._rollbacks += 1
        ready = self._send(self.cluster.handle(events.Found(f"v{version}", version), "a snapshot is found"), seen)
        restored = _STATE * scenario.workload.words / len(self.cluster.view.servers) / scenario.server_rate
        return ready + restored + scenario.workload.nbytes / scenario.rate, version

    def _send(self, effects: list[Effect], when: float) -> float:
        """The coordinator sends the views among these effects. Returns when the last member has the last one."""
        for view in (effect.view for effect in effects if isinstance(effect, Publish)):
            seconds = self._change_seconds(view)
            self._free = max(self._free, when) + seconds
            self._sending += seconds
        return max(self._free, when)
