"""One seed: a job, a cluster, a plan of faults; afterwards every byte and every sample is accounted for."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from rallypoint.codec.spec import TopK, has_state
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.modes import Feature
from rallypoint.core.policy import LocalSteps, Sync
from rallypoint.testing.simulation.coordinator import Disk, Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR
from rallypoint.testing.simulation.network import World
from rallypoint.testing.simulation.policies import CodecState, Mode, Played, replay_line
from rallypoint.testing.simulation.server import SimulatedServer
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.testing.simulation.worker import SimulatedWorker

LIMIT_S = 600.0  # of simulated time: a run takes about five
HESITATION_S = 0.6  # at most, where workers hesitate: about as long as a step takes
_SYNC = Sync()


class SimulationFailed(AssertionError):
    """A seed whose run went wrong; the message begins with the line that replays it."""


@dataclass(frozen=True)
class Fault:
    """Something that happens at `at` seconds to a member of `role`."""

    at: float
    kind: str
    role: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What one seed plays. `hesitate_s`: at most so long after a worker hears what it is to do it begins with it."""

    seed: int
    job: SimulatedJob
    terms: Terms
    workers: int
    servers: int
    faults: tuple[Fault, ...]
    hesitate_s: float = 0.0


_KINDS = (
    "crash", "crash", "crash", "pause", "pause", "long pause", "drop", "drop", "partition", "join", "leave",
    "disk full", "torn write", "everything", "half said", "drop first",
)  # fmt: skip


# Codec states are lost with the member that holds them. Where nobody dies who may hold one, nobody is given up either.
# (A member whose connection to the coordinator breaks counts as dead.)
_LEAVING = ("pause", "drop data", "partition", "join", "join", "leave", "leave", "leave", "half said", "disk full")
_LOSING_SERVERS = ("pause", "drop data", "partition", "crash", "crash", "join", "half said", "torn write", "disk full")
_PATIENT_S = 30.0


def make_plan(seed: int, played: Played = _SYNC) -> Plan:
    """The plan of a seed: everything in it follows from the number (and from the policy)."""
    if not isinstance(played, CodecState):
        return _plan_of(seed, played)
    plan = _plan_of(seed, played.sync)
    job = replace(plan.job, codec=TopK())
    plan = replace(plan, job=job, terms=supported(plan.terms, job))
    if seed % 3 == 0 or not job.same_bytes or job.policy.streaming:
        return replace(plan, job=replace(job, loses_states=True))
    kinds, role = (_LEAVING, "worker") if seed % 3 == 1 else (_LOSING_SERVERS, "server")
    rng = random.Random(seed * 7919 + 2)
    faults = []
    for fault in plan.faults:
        kind = rng.choice(kinds)
        coordinator = kind == "crash" and rng.random() < 0.2
        seconds = min(fault.seconds, 1.0) if kind in ("pause", "partition") else fault.seconds
        faults.append(Fault(fault.at, kind, "coordinator" if coordinator else role, seconds))
    terms = msgspec.structs.replace(plan.terms, heartbeat=_PATIENT_S)
    return replace(plan, terms=terms, faults=tuple(faults))


def _plan_of(seed: int, sync: Mode) -> Plan:
    rng = random.Random(seed * 7919 + 1)
    job = SimulatedJob(
        shards=rng.randint(1, 8), buffers=0, replicas=rng.randint(1, 6), steps=rng.randint(4, 14),
        clip=rng.choice([None, 1.0]),
    )  # fmt: skip
    buffers = int(job.shards > 2 and rng.random() < 0.5)
    job = SimulatedJob(job.shards, buffers, job.replicas, job.steps, job.clip, skip=rng.random() < 0.25)
    quorum = sync.quorum if isinstance(sync, Sync) and sync.quorum is not None else 1
    job = replace(job, sync=sync, replicas=max(job.replicas, quorum))
    if isinstance(sync, LocalSteps):  # a shard or more for each fragment, and no decisions
        job = replace(job, shards=max(job.shards, sync.fragments + buffers), clip=None, skip=False)
    workers, servers = rng.randint(1, 4), rng.randint(1, 4)
    workers_max = rng.choice([workers, workers + 2, max(1, workers - 1)])
    terms = Terms(
        workers_start=workers, workers_min=rng.choice([1, 1, min(2, workers, workers_max)]), workers_max=workers_max,
        servers=servers, replication=rng.choice([1, 2, 2]), heartbeat=2.0, backup_tasks=rng.random() < 0.3,
        snapshot_seconds=rng.choice([0.5, 1.0, 3.0]), snapshot_steps=rng.choice([0, 0, 2]), snapshots=True,
    )  # fmt: skip
    terms = supported(terms, job)
    faults = []
    at = 0.0
    for _ in range(rng.randint(0, 10)):
        at += rng.expovariate(1.2)
        kind = rng.choice(_KINDS)
        role = rng.choice(["worker", "worker", "server", "server", "coordinator"])
        seconds = {"pause": rng.uniform(0.1, 1.5), "long pause": rng.uniform(2.0, 6.0)}.get(kind, rng.uniform(0.1, 5.0))
        faults.append(Fault(0.0 if kind == "drop first" else at, kind, role, seconds))
    return Plan(seed, job, terms, workers, servers, tuple(faults), HESITATION_S if hesitates(seed) else 0.0)


def supported(terms: Terms, job: SimulatedJob) -> Terms:
    """These terms without what the job's mode does not support: see `core.modes`."""
    without: dict[Feature, dict[str, Any]] = {
        Feature.REPLICATION: {"replication": 1}, Feature.BACKUP_TASKS: {"backup_tasks": False},
    }  # fmt: skip
    record = job.record
    for feature, changes in without.items():
        if feature in terms.features and record.refusal_of(frozenset({feature})):
            terms = msgspec.structs.replace(terms, **changes)
    return terms


def hesitates(seed: int) -> bool:
    """Are workers slow to begin with what they were told in this seed's plan?"""
    return seed % 4 == 3


@dataclass
class Result:
    """What a run came to: `recomputed` replicas were computed again or twice, `fetched` versions asked for."""

    plan: Plan
    outcome: Outcome
    seconds: float
    recomputed: int
    fetched: int
    events: list[str] = field(default_factory=list)


class Simulation:
    """The cluster of one plan, with a launcher that replaces what crashes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world, self.store, self.disk = plan, World(plan.seed), SimulatedStore(), Disk()
        self.outcome = Outcome()
        self.workers: dict[str, SimulatedWorker] = {}
        self.servers: dict[str, SimulatedServer] = {}
        self.coordinator: SimulatedCoordinator | None = None
        self.events: list[str] = []
        self._named = Counter[str]()

    def run(self) -> Result:
        """Play the plan to its end; SimulationFailed when something is wrong."""
        self.start_coordinator()
        for _ in range(self.plan.servers):
            self.start_server()
        for _ in range(self.plan.workers):
            self.start_worker()
        for fault in self.plan.faults:
            self.world.at(fault.at, lambda fault=fault: self.strike(fault))  # type: ignore[misc]
        try:
            self.world.run(LIMIT_S, lambda: self.outcome.finished or bool(self.outcome.aborted))
            self._check()
        except AssertionError as error:
            job = self.plan.job
            replay = replay_line(self.plan.seed, CodecState(job.sync) if has_state(job.codec) else job.sync)
            raise SimulationFailed("\n".join([replay, str(error), *self.events])) from error
        steps = {(step, replica) for _, step, replica in self.outcome.computed}
        return Result(
            self.plan, self.outcome, self.world.now, len(self.outcome.computed) - len(steps),
            sum(worker.fetched for worker in self.workers.values()), self.events,
        )  # fmt: skip

    # ---- the launcher ----

    def start_coordinator(self) -> None:
        """A coordinator, with whatever its predecessor wrote down."""
        if self.coordinator is None or not self.coordinator.node.alive:
            self.coordinator = SimulatedCoordinator(
                self.world, self.plan.job, self.plan.terms, self.store, self.disk, self.outcome
            )

    def start_server(self) -> None:
        """One more server."""
        name = self._name("server")
        self.servers[name] = SimulatedServer(self.world, name, self.plan.job, self.store)

    def start_worker(self) -> None:
        """One more worker."""
        name = self._name("worker")
        speed = self.world.random.choice([1.0, 1.0, 0.4])
        self.workers[name] = SimulatedWorker(
            self.world, name, self.plan.job, self.store, speed, self.plan.hesitate_s
        )  # fmt: skip

    def _name(self, role: str) -> str:
        self._named[role] += 1
        return f"{role}{self._named[role]}"

    # ---- faults ----

    def strike(self, fault: Fault) -> None:
        """Let a fault happen."""
        match fault.kind:
            case "disk full":
                if self.store.newest()[0]:  # without room for the first there is nothing to go back to
                    self.store.full = True
                    self.world.at(fault.seconds, lambda: setattr(self.store, "full", False))
            case "torn write":
                self.store.tear()
            case "half said" | "drop first":
                self.world.trap(fault.kind)
                self._watch_coordinator()
            case "join":
                self._again("worker" if fault.role == "coordinator" else fault.role)
            case "everything":
                for role in ("coordinator", "server", "worker"):
                    for name in self._alive(role):
                        self._crash(role, name, fault.seconds / 5)
            case _:
                alive = self._alive(fault.role)
                if alive:
                    self._strike_one(fault, self.world.random.choice(alive))
                    return
        self.events.append(f"{self.world.now:.3f} {fault.kind} {fault.seconds:.2f}")

    def _strike_one(self, fault: Fault, name: str) -> None:
        self.events.append(f"{self.world.now:.3f} {fault.kind} {name} {fault.seconds:.2f}")
        node = self.world.nodes[name]
        match fault.kind:
            case "crash":
                self._crash(fault.role, name, fault.seconds / 5)
            case "pause" | "long pause":
                node.pause()
                self.world.at(fault.seconds, node.resume)
            case "drop" | "drop data":
                for wire in list(node.wires):
                    spared = fault.kind == "drop data" and any(end.name == COORDINATOR for end in wire.ends)
                    if self.world.random.random() < 0.5 and not spared:
                        wire.cut()
            case "partition":
                other = self.world.random.choice(sorted(self.world.nodes))
                if other != name:
                    self.world.partition(name, other, fault.seconds)
            case "leave" if fault.role == "worker" and self._staying() > self.plan.terms.workers_min:
                self.workers[name].leave()

    def _watch_coordinator(self) -> None:
        self.start_coordinator()
        self.world.at(0.5, self._watch_coordinator)

    def _crash(self, role: str, name: str, back_after: float) -> None:
        self.world.nodes[name].kill()
        self.world.at(back_after, lambda: self._again(role))

    def _again(self, role: str) -> None:
        if self.outcome.finished:
            return
        {"worker": self.start_worker, "server": self.start_server, "coordinator": self.start_coordinator}[role]()

    def _staying(self) -> int:
        return sum(not self.workers[name].leaving for name in self._alive("worker"))

    def _alive(self, role: str) -> list[str]:
        return [name for name in self.world.nodes if name.startswith(role)]

    # ---- afterwards ----

    def _check(self) -> None:
        assert not self.outcome.aborted, f"aborted: {self.outcome.aborted}"
        assert self.outcome.finished, f"stuck after {self.world.now:.1f} s: {self._where()}"
        job = self.plan.job
        for shard in range(job.shards):
            contents = self._final_contents(shard)
            assert contents, f"nobody holds the last version of shard {shard}"
            for content in contents:
                job.check_end(shard, content)
        for server in self.servers.values():
            server.check_tickets()
            server.check_staleness()
        if not job.same_bytes:
            self._check_accounts()
            self._check_wants()
        for worker in self.workers.values():
            if worker.node.alive and worker.done:
                for shard, content in enumerate(worker.model):
                    job.check_end(shard, content)

    def _check_accounts(self) -> None:
        """Each contribution is counted once; a tally lives with its primary, so only where nothing was lost."""
        if self.plan.faults or any("going back" in said for said in self.outcome.said):
            return
        for server in self.servers.values():
            for shard in server.machine.held:
                if server.machine.is_primary(shard):
                    server.check_tally(shard)

    def _check_wants(self) -> None:
        """Nobody waits for what is there."""
        for server in self.servers.values():
            for shard in server.machine.held if server.node.alive else ():
                machine = server.machine.machine(shard)
                stuck = [] if machine is None else machine.wants.ready(machine) if machine.published >= 0 else []
                assert not stuck, f"{server.node.name} has forgotten what {stuck} want of shard {shard}"

    def _final_contents(self, shard: int) -> list[int]:
        """The last version wherever it is: on any server (the last view may not have come to all), in a snapshot."""
        job, contents = self.plan.job, []
        if job.stateful_workers:
            return [worker.model[shard] for worker in self.workers.values() if worker.node.alive and worker.done]
        for server in self.servers.values():
            machine = server.machine.machine(shard)
            at = -1 if machine is None else machine.slowest if machine.policy.streaming else machine.version
            if server.node.alive and at == job.last_version(shard):
                contents.append(server.held[shard].master)
        id, version = self.store.newest()
        if version == job.steps:
            contents.append(self.store.read(id, shard)[1][0])
        if self._primary_gone(shard):  # as soon as the workers had it
            contents += [worker.model[shard] for worker in self.workers.values() if worker.node.alive and worker.done]
        return contents

    def _primary_gone(self, shard: int) -> bool:
        view = self.coordinator.machine.view if self.coordinator is not None else None
        primary = self.servers.get(view.primary[shard]) if view is not None else None
        return primary is None or not primary.node.alive or shard not in primary.machine.held

    def _where(self) -> str:
        lines = []
        for name, worker in self.workers.items():
            if worker.node.alive:
                m = worker.machine
                lines.append(
                    f"{name}: replica {worker._replica}, next {m.next_action()}, missing {m.missing}, {m}"
                )
        for name, server in self.servers.items():
            if server.node.alive:
                held = {i: server.machine.machine(i) for i in server.machine.held}
                lines.append(f"{name}: view {server.machine.view and server.machine.view.number} " + "; ".join(
                    f"{i}: {'P' if m.primary else 'B'} v{m.version} pub{m.published} sum {m._sum} held {m._held} "
                    f"{m.replication} awaiting {m.awaiting} clocks {m.clocks} wants {m.wants}"
                    for i, m in held.items() if m is not None))  # fmt: skip
        if self.coordinator is not None:
            machine = self.coordinator.machine
            lines.append(f"coordinator: {machine.phase}, {machine.view}, taking {machine._snapshots.taking}, "
                         f"done {machine.course.members.done}, waits for {machine.waiting_for()}")  # fmt: skip
        return "\n".join([*lines, *self.outcome.said])


def play(plan: Plan) -> Result:
    """Play a plan; SimulationFailed when something is wrong."""
    return Simulation(plan).run()


def simulate(seed: int, played: Played = _SYNC) -> Result:
    """Play one seed under a policy."""
    return play(make_plan(seed, played))
