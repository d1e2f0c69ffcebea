"""One seed: a job, a cluster, a plan of faults; afterwards every byte and every sample is accounted for."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec

from rallypoint.coordinator.inbox import End
from rallypoint.core.policy import Sync
from rallypoint.core.protocol import Resize
from rallypoint.core.view import View
from rallypoint.server.job import ServerJob
from rallypoint.testing.simulation.coordinator import Disk, Outcome, SimulatedCoordinator, check_recorded
from rallypoint.testing.simulation.keys import LEFT, KeyedWorker
from rallypoint.testing.simulation.member import COORDINATOR, MALFORMED, SimulatedOrders, send_malformed
from rallypoint.testing.simulation.network import Fault, Node, Noted, World
from rallypoint.testing.simulation.operating import history, server_checks
from rallypoint.testing.simulation.operating.pauses import PAUSE, Operators
from rallypoint.testing.simulation.operating.resuming import KEEP, RESUME, Resuming
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Played, replay_line
from rallypoint.testing.simulation.replicas.evaluations import check_evaluations
from rallypoint.testing.simulation.replicas.script import ScriptStops
from rallypoint.testing.simulation.server import SimulatedAggregator, SimulatedServer
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.testing.simulation.worker import SimulatedWorker

LIMIT_S = 600.0  # of simulated time: a run takes about five
_SYNC = Sync()


class SimulationFailed(AssertionError):
    """A seed whose run went wrong; the message begins with the line that replays it. `entry`: where it was seen."""

    entry: Noted | None = None


@dataclass
class Result:
    """What a run came to: `recomputed` replicas were computed again or twice."""

    plan: Plan
    outcome: Outcome
    seconds: float
    recomputed: int
    events: list[str] = field(default_factory=list)


class Simulation:
    """The cluster of one plan, with a launcher that replaces what crashes."""

    def __init__(self, plan: Plan, *, checked: bool = True) -> None:
        """`checked`: what is published, held and seen is logged, and looked at after the run (`history`)."""
        self.plan, self.disk, self.outcome = plan, Disk(plan.seed), Outcome()
        self.store, self._resuming = SimulatedStore(KEEP if plan.resumes else 3), Resuming()
        self.world = World(plan.seed, uneven=plan.terms.measure_links)
        self.world.history = [] if checked else None
        plan.job.lost.clear()
        self.workers: dict[str, SimulatedWorker | KeyedWorker] = {}
        self.servers: dict[str, SimulatedServer] = {}
        self.aggregators: dict[str, SimulatedAggregator] = {}
        self.coordinator: SimulatedCoordinator | None = None
        self.events: list[str] = []
        self._named = Counter[str]()
        self._told_to_leave: set[str] = set()
        self._orders = SimulatedOrders(lambda: Node(self.world, self._name("launcher")), self._resized)
        forgets = any(fault.kind == "journal full" for fault in plan.faults)
        self._operators = Operators(lambda: Node(self.world, self._name("operator")), self.events, forgets=forgets)
        self.computing_at_most = self.plan.terms.workers_max  # by the last order that the coordinator has announced

    def run(self) -> Result:
        """Play the plan to its end; SimulationFailed when something is wrong."""
        self.start_coordinator()
        for _ in range(self.plan.servers):
            self.start_server()
        for _ in range(self.plan.aggregators):
            self.start_aggregator()
        for _ in range(self.plan.workers):
            self.start_worker()
        for fault in self.plan.faults:
            self.world.at(fault.at, lambda fault=fault: self.strike(fault))  # type: ignore[misc]
        try:
            self.world.run(LIMIT_S, lambda: self.outcome.finished or bool(self.outcome.aborted))
            self._check()
            history.check(self.world.history or (), self.plan.job)
        except Exception as error:  # a defect of any kind is a failed seed
            raise failure(self, error) from error
        finally:
            self.world.close()
            self.disk.close()
            for store in (self.store, *self._resuming.read):
                store.forget()
        steps = {(step, replica) for _, step, replica in self.outcome.computed}
        recomputed = len(self.outcome.computed) - len(steps)
        return Result(self.plan, self.outcome, self.world.now, recomputed, self.events)

    # ---- the launcher ----

    def start_coordinator(self) -> None:
        """A coordinator, with whatever its predecessor wrote down."""
        if self.coordinator is None or not self.coordinator.node.alive:
            of, began, journal = self.plan, self._resuming, self.disk.state
            terms = msgspec.structs.replace(of.terms, workers_max=self.computing_at_most, begun_by=began.command)
            self.coordinator = SimulatedCoordinator(
                self.world, of.job, terms, self.store, self.disk, self.outcome,
                began.next(journal, self.store),
            )  # fmt: skip
            began.check(journal, self.coordinator.machine)

    def start_server(self) -> None:
        name = self._name("server")
        self.servers[name] = SimulatedServer(self.world, name, self.plan.job, self.store)
        if self.plan.terms.measure_links:
            self.servers[name].update_beside()

    def start_aggregator(self) -> None:
        name = self._name("aggregator")
        self.aggregators[name] = SimulatedAggregator(self.world, name, self.plan.job)

    def start_worker(self) -> None:
        name = self._name("worker")
        speed, job = self.world.random.choice([1.0, 1.0, 0.4]), self.plan.job
        if job.keys:
            self.workers[name] = KeyedWorker(self.world, name, job, speed)
            return
        self.workers[name] = worker = SimulatedWorker(self.world, name, job, self.store, speed, self.plan.hesitate_s)
        history.note_accepted(self.world, worker.shell)

    def _name(self, role: str) -> str:
        self._named[role] += 1
        return f"{role}{self._named[role]}"

    # ---- faults ----

    def strike(self, fault: Fault) -> None:
        match fault.kind:
            case "disk full" | "journal full":
                which = "disk" if fault.kind == "journal full" else "store"
                if which == "disk" or self.store.newest()[0]:  # without room for the first nothing can go back
                    getattr(self, which).full = True
                    self.world.at(fault.seconds, lambda: setattr(getattr(self, which), "full", False))
            case "torn write":
                self.store.tear()
            case "half said" | "drop first":
                self.world.trap(fault.kind)
                self._watch_coordinator()
            case "resize":
                self._resize()
            case kind if kind == RESUME:
                self._resuming.strike(self, fault)
            case kind if kind == PAUSE:
                self._operators.pause(fault.seconds)
            case "join":
                self._again("worker" if fault.role == "coordinator" else fault.role)
            case "everything":
                for role in ("coordinator", "server", "aggregator", "worker"):
                    for name in self._alive(role):
                        self._crash(role, name, fault.seconds / 5)
            case _:
                alive = self._alive(fault.role)
                if alive:
                    self._strike_one(fault, self.world.random.choice(alive))
                    return
        self._tell(f"{fault.kind} {fault.seconds:.2f}")

    def _strike_one(self, fault: Fault, name: str) -> None:
        self._tell(f"{fault.kind} {name} {fault.seconds:.2f}")
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
                        wire.cut(End.RESET if wire.number % 2 else End.LOST)
            case "cut":
                if others := [server for server in self._alive("server") if server != name]:
                    self.world.partition(name, self.world.random.choice(others), fault.seconds)
            case "isolation":
                self.world.partition(name, "", fault.seconds)
            case kind if kind == MALFORMED:
                self._tell(send_malformed(node, self.plan.job))
            case "partition":
                other = self.world.random.choice(sorted(self.world.nodes))
                if other != name:
                    self.world.partition(name, other, fault.seconds)
            case "leave" if len(self._staying(fault.role)) > self.plan.least(fault.role):
                self._tell_to_leave(fault.role, name)

    def _tell(self, what: str) -> None:
        self.events.append(f"{self.world.now:.3f} {what}")
        self.world.tell(f"fault: {what}")

    def _watch_coordinator(self) -> None:
        self.start_coordinator()
        self.world.at(0.5, self._watch_coordinator)

    def _crash(self, role: str, name: str, back_after: float) -> None:
        if role == "server":
            self.servers[name].crashes()
        self.world.nodes[name].kill()
        self.world.at(back_after, lambda: self._again(role))

    def _again(self, role: str) -> None:
        if self.outcome.finished:
            return
        start = {"server": self.start_server, "aggregator": self.start_aggregator, "worker": self.start_worker}
        start.get(role, self.start_coordinator)()
        self.world.tell(f"the launcher starts {next(reversed(self.world.nodes))}")

    def _resize(self) -> None:
        """The launcher acts on it when the coordinator has announced it, as the real one does."""
        choose, least = self.world.random.randint, self.plan.terms.workers_min
        order = Resize(choose(least, least + 3), choose(1, 4))
        self._tell(str(order))
        self._orders.give(order)

    def _resized(self, order: Resize) -> None:
        """So many are to be here: start some, or tell the newest to go."""
        self.computing_at_most = order.workers
        for role, wanted in (("worker", order.workers), ("server", order.servers)):
            staying = self._staying(role)
            for name in staying[wanted:]:
                self._tell_to_leave(role, name)
            for _ in range(wanted - len(staying)):
                self._again(role)

    def _staying(self, role: str) -> list[str]:
        return [name for name in self._alive(role) if name not in self._told_to_leave]

    def _tell_to_leave(self, role: str, name: str) -> None:
        """A process that sleeps hears it when it wakes."""
        self._told_to_leave.add(name)
        member = self.workers[name] if role == "worker" else self.servers[name]
        member.node.run(member.leave)

    def _alive(self, role: str) -> list[str]:
        return [name for name in self.world.nodes if name.startswith(role)]

    # ---- afterwards ----

    def _check(self) -> None:
        if self.plan.job.poison is not None and self._stopped_for(self.plan.job.poison):
            return
        if (audits := self.plan.job.audits) is not None and audits.check(self.outcome.said, self.outcome.aborted):
            return
        if self.plan.job.stop is not None and self.plan.job.stop.leaves:
            if "call run.stop() instead" in self.outcome.aborted:
                return
            view = self.coordinator.machine.view if self.coordinator is not None else None
            self.plan = _ended_earlier(self.plan, self.plan.job.stop, view)
        if self.plan.job.keys and LEFT in self.outcome.aborted:
            return  # nobody can make its pushes again
        assert not self.outcome.aborted, f"aborted: {self.outcome.aborted}"
        assert self.outcome.finished, stuck(self)
        self._check_size()
        check_evaluations(self.plan.job, self.outcome, self.coordinator, self.events)
        job = self.plan.job
        if job.recorded:
            check_recorded(job, self.disk.root, self.outcome, whole=not self.plan.faults)
        assert not any(store.trespassed for store in self._resuming.read), "a job writes into another's store"
        for shard in range(job.shards):
            contents = self._final_contents(shard)
            if shard in job.absent and not contents and self._primary_gone(shard):
                continue  # no worker has it
            assert contents, f"nobody holds the last version of shard {shard}"
            for content in contents:
                job.check_end(shard, content)
        for server in self.servers.values():
            server.check_tickets()
            server_checks.check_staleness(server)
        for aggregator in self.aggregators.values():
            aggregator.check_memory()
        if not job.same_bytes:
            self._check_accounts()
            self._check_wants()
        for worker in self.workers.values():
            if worker.node.alive and worker.done:
                for shard, content in job.dense(worker.model):
                    job.check_end(shard, content)

    def _stopped_for(self, poison: tuple[int, int]) -> bool:
        """Has the job ended at the step whose gradient is not finite? With a quorum it may do without it."""
        if not self.outcome.aborted:
            assert self.outcome.finished, stuck(self)
            sync = self.plan.job.sync
            quorum = sync.quorum if isinstance(sync, Sync) else None
            assert quorum is not None, f"it went on after (step, replica) {poison}"
            return False
        at = ServerJob(self.plan.job.record, self.plan.job.config).round_named(poison[0])
        found = re.search(f"{at}: the gradient.* is not finite", self.outcome.aborted)
        assert found, f"aborted: {self.outcome.aborted}"
        return True

    def _check_size(self) -> None:
        """No more workers compute than were ordered, whoever is coordinator by now."""
        view = self.coordinator.machine.view if self.coordinator is not None else None
        newest = view.assignments[-1].replicas if view is not None and view.assignments else {}
        computing = [worker for worker, own in newest.items() if own]
        assert len(computing) <= self.computing_at_most, f"{computing} compute: {self.computing_at_most} are to"

    def _check_accounts(self) -> None:
        """Each contribution is counted once; a tally lives with its primary, so only where nothing was lost."""
        if self.plan.faults or self.world.uneven or any("going back" in said for said in self.outcome.said):
            return
        for server in self.servers.values():
            for shard in server.machine.held:
                if server.machine.is_primary(shard):
                    server_checks.check_tally(server, shard)

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
        id, version, *_ = self.store.newest()
        if version == job.end and not job.config.keyed:
            record = next(self.store.read(self.store.load(id), (shard,)))
            contents.append(self.world.tokens.of(record.arrays["master"])[0])
        if self._primary_gone(shard) and shard not in job.absent:  # as soon as the workers had it
            contents += [worker.model[shard] for worker in self.workers.values() if worker.node.alive and worker.done]
        return contents

    def _primary_gone(self, shard: int) -> bool:
        view = self.coordinator.machine.view if self.coordinator is not None else None
        primary = self.servers.get(view.primary[shard]) if view is not None else None
        return primary is None or not primary.node.alive or shard not in primary.machine.held


def failure(played: Simulation, error: Exception) -> SimulationFailed:
    """What has gone wrong, and what was wrong in the log before that."""
    said, entry = [str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"], None
    try:
        history.check(played.world.history or (), played.plan.job)
    except history.Broken as broken:
        said, entry = list(dict.fromkeys([*said, str(broken)])), broken.entry
    failed = SimulationFailed("\n".join([replay_line(played.plan.seed, played.plan.played), *said, *played.events]))
    failed.entry = entry
    return failed


def stuck(played: Simulation) -> str:
    """What each member that lives waits for, and what the coordinator has said."""
    lines = [f"stuck after {played.world.now:.1f} s"]
    lines += [worker.story() for worker in played.workers.values() if worker.node.alive]
    lines += [f"{name}: {server.machine}" for name, server in played.servers.items() if server.node.alive]
    if played.coordinator is not None:
        machine = played.coordinator.machine
        lines.append(f"coordinator: {machine.phase}, {machine.view}, taking {machine._snapshots.taking}, "
                     f"done {machine.course.members.done}, waits for {machine.waiting_for()}")  # fmt: skip
    return "\n".join([*lines, *played.outcome.said])


def _ended_earlier(plan: Plan, planned: ScriptStops, view: View | None) -> Plan:
    """Who has left the loop computes nothing again that is lost with a server: the job may end a version earlier."""
    version = planned.version if view is None or view.orders.stop is None else view.orders.stop.version
    assert version <= planned.version, f"the job ends with version {version}: {planned}"
    return replace(plan, job=replace(plan.job, stop=replace(planned, step=version)))


def play(plan: Plan) -> Result:
    return Simulation(plan).run()


def simulate(seed: int, played: Played = _SYNC) -> Result:
    return play(make_plan(seed, played))
