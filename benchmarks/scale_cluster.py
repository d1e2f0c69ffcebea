"""The real coordinator's machine with as many members as one likes: none of them is there, what they say is made up.

`core.cluster.machine.ClusterMachine` handles each event as in a real coordinator, and the caller's clock times it; what
goes over the network is what `coordinator.joining` and `core.protocol` make of it.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.config import JobConfig, record_of
from rallypoint.coordinator.joining import Tickets
from rallypoint.core.cluster import events
from rallypoint.core.cluster.effects import Effect, FindSnapshot, PublishView
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import Origin, Phase
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import WORD_BYTES, TensorSpec, build_layout
from rallypoint.core.plan.failures import NEVER
from rallypoint.core.plan.pipeline import step_cost
from rallypoint.core.plan.site import ACKNOWLEDGED, PAYLOAD, Rates, Servers, Site, Workers
from rallypoint.core.plan.workload import Workload
from rallypoint.core.protocol import Applied, Beat, CaughtUp, Leaving, Propose, ViewChange, encode
from rallypoint.core.sums import blocks_of
from rallypoint.core.view import Member, View, ViewNumber, canonical, difference

# A step across data centres: what the links between sites carry, and how long that takes.
#
# Members are spread evenly over the sites. A site's link has one rate in each direction; no two sites share one.


EXCHANGES = 4  # waits of one delay in a step: a push, its backup's copy, the backup's word, the new version


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """The sites of a job.

    Attributes:
        count: how many.
        rate: bytes a second of one site's link to all others, each direction.
        delay: seconds from one site to another.
        senders: who sends at each site: its workers, or one aggregator.
        replication: with 2, servers send what they have added up, in fp32, to a backup at another site.
        fragments: a round of local steps exchanges the model in so many parts, one after the other (streaming).
    """

    count: int
    rate: float
    delay: float = 0.0
    senders: int = 1
    replication: int = 1
    fragments: int = 1


ONE_SITE = Sites(count=1, rate=math.inf)
SPEEDS = Rates(threads=4)  # a server has a machine with four cores or more


def uplink_bytes(workload: Workload, sites: Sites) -> float:
    """Bytes that one site sends to others in a round, and gets: of each sender all but its own site's part.

    Example: 3 sites with a worker and a server each, K of fp32, two copies: 2/3 K of contributions, 2/3 K of versions,
    1/3 K to a backup: 5/3 K. (docs/sites.md has the same for `Sync()`.)
    """
    away = (sites.count - 1) / sites.count
    words = workload.words
    copies = (sites.replication - 1) * WORD_BYTES * words / sites.count
    return sites.senders * away * words * (workload.up + workload.down) + copies


def sites_seconds(workload: Workload, sites: Sites, near: float) -> float:
    """Seconds of a step; `near` are those of a step inside a site, where no link between sites is used.

    Without local steps computing goes on while links carry something, and waits for the delays. A round of local steps
    ends before it is exchanged, and the next one waits for all of that; with fragments an exchange goes on while later
    steps are computed, and must end before the next one begins. The least it can be: TCP's slow start, losses and
    uneven connections come on top (docs/scale.md says how much).
    """
    if sites.count < 2:
        return near
    exchange = uplink_bytes(workload, sites) / sites.fragments / (sites.rate * PAYLOAD / ACKNOWLEDGED)
    between = workload.steps / sites.fragments  # steps from one exchange to the next
    delays = EXCHANGES * sites.delay
    if sites.fragments > 1:
        return max(near, (exchange + delays) / between)
    if workload.steps > 1:
        return near + (exchange + delays) / between
    return max(near, exchange) + delays


_STEPS = 1_000_000


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large a cluster is: R replicas and R workers that compute them, `standby` more workers, `servers`.

    `racks`: neighbouring workers are in one of so many racks, with an aggregator in each; 0: none.
    """

    workers: int
    servers: int
    racks: int = 0
    shards: int = 0
    standby: int = 0
    replication: int = 1
    heartbeat: float = 3.0

    @property
    def shard_count(self) -> int:
        """By default 8 for each server."""
        return self.shards or 8 * self.servers

    def rack_of(self, worker: int) -> int:
        """The rack in which worker number `worker` is, as its replacements are."""
        return worker % self.workers * max(1, self.racks) // self.workers


def record_for(size: Size) -> JobRecord:
    """The record of a job with so many equal shards (of 16 words: nothing here has their content) and replicas."""
    layout = build_layout([TensorSpec("weight", (16 * size.shard_count,), "float32", 0)], 64)
    return record_of(JobConfig(replicas=size.workers, steps=_STEPS), layout)


@dataclass(slots=True)
class BigCluster:
    """A coordinator's machine and the names of its members.

    Attributes:
        size: how many members there are at the start.
        clock: what measures the machine's time, in seconds.
        spent: seconds that the machine took for each kind of event, and how many it had: kind -> (seconds, events).
        views: the views published until now.
    """

    size: Size
    clock: Callable[[], float] = time.perf_counter
    spent: dict[str, tuple[float, int]] = field(default_factory=dict)
    views: int = 0
    _beats: dict[str, events.From] = field(default_factory=dict)
    machine: ClusterMachine = field(init=False)
    record: JobRecord = field(init=False)

    def __post_init__(self) -> None:
        size = self.size
        terms = Terms(
            workers_start=size.workers, workers_max=size.workers, servers=size.servers, replication=size.replication,
            aggregators=size.racks, heartbeat=size.heartbeat,
        )  # fmt: skip
        self.machine, self.record = ClusterMachine(terms), record_for(size)

    # ---- what happens ----

    def handle(self, event: events.Event, kind: str = "") -> list[Effect]:
        """Let the machine handle an event; its time counts for `kind`, by default the name of the event or message."""
        told = event.message if isinstance(event, events.From) else event
        return self._handle((event,), kind or type(told).__name__)

    def _handle(self, several: Iterable[events.Event], kind: str) -> list[Effect]:
        """Let the machine handle these events, which are made before its time counts."""
        several, handle = tuple(several), self.machine.handle
        began = self.clock()
        effects = [effect for event in several for effect in handle(event)]
        seconds, count = self.spent.get(kind, (0.0, 0))
        self.spent[kind] = seconds + self.clock() - began, count + len(several)
        self.views += sum(isinstance(effect, PublishView) for effect in effects)
        return effects

    def gather(self) -> View:
        """All members join and propose the job; the last proposal begins it. Returns the first view."""
        size = self.size
        self.handle(events.Tick(1.0))
        for name, role in self.members():
            self.handle(events.Joined(self._member(name, role), role), f"{role} joins")
        workers = [name for name, role in self.members() if role == "worker"]
        for name in workers[:-1]:
            self.handle(events.From(name, Propose(self.record)))
        self.handle(events.From(workers[-1], Propose(self.record)), "the job begins")
        if size.replication > 1:
            self.catch_up()
        return self.view

    def join(self, number: int) -> list[Effect]:
        """Worker `number` joins and proposes the job."""
        name = named("worker", number)
        joined = self.handle(events.Joined(self._member(name, "worker"), "worker"), "a worker joins late")
        return [*joined, *self.handle(events.From(name, Propose(self.record)), "a worker joins late")]

    def die(self, name: str) -> list[Effect]:
        """The member's process ends."""
        return self.handle(events.Left(name, "it closed its connection"), f"a {named_role(name)} dies")

    def leave(self, name: str) -> list[Effect]:
        """The member is told to leave, and its process ends when it has handed over what it had."""
        told = self.handle(events.From(name, Leaving()), "a worker is told to leave")
        return [*told, *self.handle(events.Left(name, "it has left"), "a worker leaves")]

    def serve(self, number: int) -> list[Effect]:
        """Server `number` joins."""
        return self.handle(events.Joined(self._member(named("server", number), "server"), "server"), "a server joins")

    def beat(self, now: float) -> None:
        """Each member beats once, then time is `now`."""
        here = self.machine.course.members.everybody
        self._beats |= {name: events.From(name, Beat()) for name in here if name not in self._beats}
        self._handle([self._beats[name] for name in here], "Beat")
        self.handle(events.Tick(now))

    def step(self, number: int, seconds: Callable[[str], float], now: float) -> None:
        """Each worker reports its replicas of this step, `seconds(worker)` for each; each server has applied it."""
        generation = self.view.generation
        reports = [
            events.Computed(worker, number, replica, seconds(worker), generation, now)
            for worker, replicas in self.view.assigned(number).items()
            for replica in replicas
        ]
        self._handle(reports, "Progress")
        applied = Applied(number, 0, 0.0, generation=generation)
        self._handle([events.From(server.id, applied) for server in self.view.servers], "Applied")

    def catch_up(self) -> None:
        """All backups, and all third servers, that have not caught up by now have."""
        view, views = self.view, self.machine.course.views
        lacking = {shard: view.paired[shard] for shard in sorted(view.backup.keys() - views.caught_up)}
        thirds = {shard: view.incoming[shard].paired for shard in sorted(view.incoming.keys() - views.arrived)}
        for among in (lacking, thirds):
            said: dict[str, dict[int, ViewNumber]] = {}
            for shard, paired in among.items():
                said.setdefault(view.primary[shard], {})[shard] = paired
            for server, backups in said.items():
                self.handle(events.From(server, CaughtUp(backups)))

    # ---- what there is ----

    @property
    def view(self) -> View:
        """The view in force. RuntimeError before the first, and when the job is over."""
        if self.machine.view is None or self.machine.phase is not Phase.RUNNING:
            raise RuntimeError(f"the job does not run: {self.machine.phase.value}")
        return self.machine.view

    def members(self) -> Iterable[tuple[str, str]]:
        """The members at the start: (name, role)."""
        size = self.size
        counts = (("server", size.servers), ("aggregator", size.racks), ("worker", size.workers + size.standby))
        return ((named(role, number), role) for role, count in counts for number in range(count))

    def _member(self, name: str, role: str) -> Member:
        """A member on a host of its own, with an address as long as real ones are."""
        number = int(name.partition("-")[2])
        rack = number if role == "aggregator" else self.size.rack_of(number)
        near = f"rack{rack}" if self.size.racks and role != "server" else ""
        address = "" if role == "worker" else f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:40001"
        return Member(name, f"host-{role}-{number}", address, near=near)


def named(role: str, number: int) -> str:
    """A member's name. In the order of names, workers of one rack are neighbours, and get neighbouring replicas."""
    return f"{role}-{number:05}"


def named_role(name: str) -> str:
    """The role of the member of that name."""
    return name.partition("-")[0]


class Messages(msgspec.Struct, frozen=True):
    """What sending one view takes.

    Attributes:
        members: to how many it goes.
        view: bytes of the view alone, encoded.
        message: bytes of one worker's message, with its tickets.
        total: bytes of all messages.
        seconds: of the coordinator's processor, to make the tickets of all and to encode each message.
    """

    members: int
    view: int
    message: int
    total: int
    seconds: float


def messages_of(view: View, clock: Callable[[], float] = time.perf_counter, sample: int = 200) -> Messages:
    """What sending this view to all of its members takes: the real messages of `sample` members, for all of them."""
    told = [member.id for member in (*view.servers, *view.aggregators, *view.workers)]
    chosen: Sequence[str] = told if len(told) <= sample else [*told[:: max(1, len(told) // sample)], told[-1]]
    began = clock()
    sizes = [len(encode(news)) for _, news in Tickets(b"a secret of the coordinator's").views(view, chosen)]
    seconds = (clock() - began) * len(told) / len(chosen)
    return Messages(
        len(told), len(msgspec.msgpack.encode(view)), sizes[-1], round(sum(sizes) / len(sizes) * len(told)), seconds
    )


def change_bytes(base: View, view: View) -> int:
    """Bytes of the message that brings `view` to who has `base`, without tickets: only new servers make some."""
    return len(encode(ViewChange(difference(base, canonical(view)), {}, bytes(32))))


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
        speeds=SPEEDS,
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


class PlayOutcome(msgspec.Struct, frozen=True):
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

    def run(self, told: Callable[[Step], None] = lambda step: None) -> PlayOutcome:
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
        return PlayOutcome(
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
        ready = self._send(
            self.cluster.handle(Origin(f"v{version}", version), "a snapshot is found"), seen
        )
        restored = _STATE * scenario.workload.words / len(self.cluster.view.servers) / scenario.server_rate
        return ready + restored + scenario.workload.nbytes / scenario.rate, version

    def _send(self, effects: list[Effect], when: float) -> float:
        """The coordinator sends the views among these effects. Returns when the last member has the last one."""
        for view in (effect.view for effect in effects if isinstance(effect, PublishView)):
            seconds = self._change_seconds(view)
            self._free = max(self._free, when) + seconds
            self._sending += seconds
        return max(self._free, when)
