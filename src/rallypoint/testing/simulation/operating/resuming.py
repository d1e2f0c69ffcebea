"""A simulated job that goes on from a snapshot: `rallypoint resume`, and a coordinator's own --resume.

Everybody is killed; then a coordinator begins with a snapshot, and others come while it, or the next one, gathers them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Resumed, begun_by
from rallypoint.core.cluster.storing.snapshot_duty import ATTEMPTS
from rallypoint.core.view import ViewNumber
from rallypoint.store.manifest import Manifest
from rallypoint.store.snapshots import order
from rallypoint.testing.simulation.coordinator import Disk
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.store import SimulatedStore

if TYPE_CHECKING:
    from rallypoint.testing.simulation.plan import Plan
    from rallypoint.testing.simulation.run import Simulation

RESUME = "everybody is killed, and the job resumed"  # a kind of fault

# Who resumes, as a fault's role. A launcher begins with --resume, and starts later coordinators without it. The others
# start each coordinator with the same command: on the job's journal, with a new one, and as another job, which has a
# store of its own and reads the first one's.
LAUNCHER, COMMAND, NEW_JOURNAL, FORK = "launcher", "command", "new journal", "fork"
WAYS = (LAUNCHER, LAUNCHER, COMMAND, COMMAND, NEW_JOURNAL, FORK)

_ROLES = ("coordinator", "server", "aggregator", "worker")

COME_S = 1.5  # members come within so many seconds
KEEP = 2  # so many snapshots are kept


def later(rng: random.Random, *, kills: bool) -> Iterator[Fault]:
    """What happens after the job is resumed: the coordinator dies while members gather, most of all."""
    for _ in range(rng.randint(1, 3)):
        yield Fault(rng.uniform(0.0, COME_S), "crash", "coordinator", rng.uniform(0.1, 1.5))
    for _ in range(rng.randint(0, 2)):
        yield Fault(rng.uniform(COME_S, 5.0), "crash", "coordinator", rng.uniform(0.1, 2.0))
    for role in ("server", "worker") if kills else ():
        if rng.random() < 0.3:
            yield Fault(rng.uniform(0.0, 4.0), "crash", role, rng.uniform(0.1, 5.0))


def resumed(plan: Plan) -> Plan:
    """The plan with snapshots early enough. A replica's own optimizer, and what it has gone ahead, are in none.

    The role of a fault is who resumes; its seconds are the least version of the snapshot, which is waited for.
    """
    job = replace(plan.job, loses_states=True) if plan.job.keeps_inner or plan.job.delayed else plan.job
    steps = random.Random(plan.seed * 7919 + 19).choice([1, 1, 2, plan.terms.snapshot_steps])
    terms = msgspec.structs.replace(plan.terms, snapshot_steps=steps)
    rng = random.Random(plan.seed * 7919 + 18)
    times = sorted(rng.uniform(0.7, 4.5) for _ in range(rng.choice([1, 1, 1, 2])))
    faults = (Fault(at, RESUME, rng.choice(WAYS), rng.choice([0, 1, 2, 3])) for at in times)
    return replace(plan, job=job, terms=terms, faults=(*plan.faults, *faults))


@dataclass
class Resuming:
    """With what the coordinators of a simulated job begin.

    Attributes:
        command: what is given each time; "": a launcher says --resume once.
        read: stores of other jobs.
    """

    command: str = ""
    read: list[SimulatedStore] = field(default_factory=list)
    _snapshot: Manifest | None = None
    _elsewhere: bool = False
    _again: bool = False

    def strike(self, played: Simulation, fault: Fault) -> None:
        """Kill everybody, as soon as there is such a snapshot, and resume the job from it."""
        world, plan = played.world, played.plan
        if played.store.newest()[1] < fault.seconds:
            world.at(0.1, lambda: played.strike(fault))
            return
        for name in [name for name in world.nodes if name.startswith(_ROLES)]:
            world.nodes[name].kill()
        world.note("resumed", fault.role, -1, -1, ViewNumber())
        if fault.role in (NEW_JOURNAL, FORK):
            played.disk.close()
            played.disk = Disk(plan.seed)
        self._begin(fault.role, played.store, f"resume {len(played.events)}")
        if self._elsewhere:
            played.store.closed = True
            self.read.append(played.store)
            played.store = SimulatedStore(KEEP)
        played.start_coordinator()
        started = ((played.start_server, plan.servers), (played.start_aggregator, plan.aggregators),
                   (played.start_worker, plan.workers))  # fmt: skip
        for start, count in started:
            for _ in range(count):
                world.at(world.random.uniform(0.0, COME_S), start)
        for event in later(world.random, kills=plan.kills):
            world.at(event.at, lambda event=event: played.strike(event))  # type: ignore[misc]

    def check(self, journal: ClusterState | None, machine: ClusterMachine) -> None:
        """AssertionError if a coordinator that the same command starts goes back behind the journal of its job."""
        if journal is None or journal.view is None or not self.command or journal.begun_by != self.command:
            return
        at, before = machine.course.furthest, journal.furthest
        went_on = journal.last_word is not None or (machine.view is not None and at >= before)
        assert went_on, f"the same command goes back to step {at + 1}: the job was at step {before + 1}"

    def _begin(self, way: str, store: SimulatedStore, command: str) -> None:
        self._snapshot, self._elsewhere, self._again = store.load(store.newest()[0]), way == FORK, True
        self._in, self.command = store, "" if way == LAUNCHER else command

    def next(self, journal: ClusterState | None, store: SimulatedStore) -> Resumed | None:
        """With what the next coordinator begins that has this journal; None: with that, or with first weights."""
        if self._snapshot is None or not self._again or begun_by(journal, self.command):
            return None
        self._again, of = self.command != "", self._snapshot
        assert self._in._is_committed(of.id), f"snapshot {of.id} is deleted, and a coordinator begins with it"
        epoch = max((order(known.id)[1] // ATTEMPTS for known in store.manifests()), default=0)
        name = f"{self._in.url}/{of.id}" if self._elsewhere else of.id
        return Resumed(of.job, name, of.version, of.stop, of.decided, epoch)
