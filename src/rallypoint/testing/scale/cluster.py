"""The real coordinator's machine with as many members as one likes: none of them is there, what they say is made up.

`core.cluster.machine.ClusterMachine` handles each event as in a real coordinator, and the caller's clock times it; what
goes over the network is what `coordinator.joining.tickets` and `core.protocol` make of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.config import JobConfig, record_of
from rallypoint.coordinator.joining.tickets import Tickets
from rallypoint.core.cluster import events
from rallypoint.core.cluster.effects import Effect, Publish
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import Phase
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import CaughtUp, Leaving, Propose, ViewChange, encode
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.core.view_difference import canonical, difference

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
    _beats: dict[str, events.Beat] = field(default_factory=dict)
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
        self.views += sum(isinstance(effect, Publish) for effect in effects)
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
        self._beats |= {name: events.Beat(name) for name in here if name not in self._beats}
        self._handle([self._beats[name] for name in here], "Beat")
        self.handle(events.Tick(now))

    def step(self, number: int, seconds: Callable[[str], float], now: float) -> None:
        """Each worker reports its replicas of this step, `seconds(worker)` for each; each server has applied it."""
        generation = self.view.generation
        reports = [
            events.Progress(worker, number, replica, seconds(worker), generation, now)
            for worker, replicas in self.view.assigned(number).items()
            for replica in replicas
        ]
        self._handle(reports, "Progress")
        self._handle([events.Applied(server.id, number, generation) for server in self.view.servers], "Applied")

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
