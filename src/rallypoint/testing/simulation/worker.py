"""A simulated worker: the real shell and machine, and a main thread that takes its time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from rallypoint.core.protocol import Beat, Reached
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.ending import End
from rallypoint.net.frames import Header, Kind
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.names import NBYTES, NamedBuffer
from rallypoint.testing.simulation.network import Node, World
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content
from rallypoint.testing.simulation.replicas.delayed import DelayedReplicas
from rallypoint.testing.simulation.replicas.evaluations import SimulatedEvaluations
from rallypoint.testing.simulation.replicas.forward import SimulatedForward
from rallypoint.testing.simulation.replicas.inner import InnerOptimizers
from rallypoint.testing.simulation.replicas.script import Script
from rallypoint.testing.simulation.store import SimulatedStore


@dataclass(slots=True)
class MainThread:
    """When it last got on, and how often it has."""

    worked_at: float
    activity: int = 0

    def works(self, now: float) -> None:
        """It gets on."""
        self.worked_at, self.activity = now, self.activity + 1


class SimulatedWorker:
    """One worker process."""

    install_s = 0.01  # at most, to copy a version into the model
    evaluate_s = 0.5  # at most, to evaluate the last version
    honest = True  # False breaks I10: what was true before a roll-back is claimed for the generation after it

    def __init__(
        self, world: World, name: str, job: SimulatedJob, store: SimulatedStore, speed: float = 1.0,
        hesitate_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.node, self.job, self.store, self.speed = Node(world, name), job, store, speed
        self._hesitate_s = hesitate_s
        self._exchange = SimulatedExchange(self.node, job, self._poke)
        self.shell, self.machine, self.slots = self._exchange.shell, self._exchange.machine, self._exchange.slots
        self.model: list[Content] = []
        self._claim: End | None = None  # what it says that it is done with
        self._todo: deque[int] = deque()
        self._captured = ""  # the last snapshot that was asked for
        self._replica = self._step = -1
        self._began = 0.0
        self._generation = ViewNumber()  # that the replica in progress belongs to
        self._replicas = (DelayedReplicas if job.delayed else InnerOptimizers)(name, job)
        self._blocked = self._acting = self._busy = False
        self._thread = MainThread(self.node.world.now)
        self._forward = SimulatedForward(self._exchange, self.install_s, self._goes_on)
        self.membership = SimulatedMembership(
            self.node, "worker", self._on_message, self._on_admitted, beat=lambda: _beat_of(self)
        )
        self._evaluations = SimulatedEvaluations(self._exchange, self.evaluate_s, self.membership.send, self._poke)
        self._script = Script(job.stop, lambda: self.shell.view if self.shell.number.count else None,
            self.membership.send)

    @property
    def done(self) -> bool:
        """Has it said that it is done, and is that still so?"""
        return self._claim is not None and self._claim == self.shell.ending.reached

    @property
    def fetched(self) -> int:
        """Versions that it has asked for."""
        return self._exchange.fetched

    @property
    def leaving(self) -> bool:
        """Was it told to go?"""
        return self.shell.leaving

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        self.membership.send(("propose", self.job.record))
        self._evaluations.register(new=new)
        if self.done and self._claim is not None:
            self.membership.send(("done", *self._claim))
        self._script.say(again=True)
        _say_reached(self, again=True)
        if self.leaving:
            self.membership.send(("leaving",))

    def leave(self) -> None:
        """SIGTERM: a spot machine's notice."""
        self.shell.leaving = True
        self.membership.send(("leaving",))

    def _on_message(self, message: Any) -> None:
        match message:
            case ("view", View() as view):
                self._exchange.adopt(view)
                _say_reached(self)
                self._script.say()
                if self.shell.ending.due or self._script.said:
                    self._poke()
            case ("assist", step, replica):
                self._exchange.assist(step, replica)
            case ("capture", id, version, writers):
                self._capture(id, version, writers)
            case ("finish",):
                self.shell.finish()

    def _capture(self, id: str, version: int, writers: tuple[str, ...]) -> None:
        """A snapshot is to be taken. (It is said again with each view.)"""
        if id == self._captured:
            return
        self._captured = id
        if (passed := self.shell.snapshots.wanted(machine.Store(id, version, writers))) >= 0:
            self.membership.send(("snapshot lost", id, "the step was over before the request came", passed))
        self._poke()

    # ---- the main thread ----

    def _poke(self) -> None:
        """Something has changed: whatever the main thread waits for may be there."""
        if self._evaluations.runs:
            self._evaluations.go_on()
        elif self._blocked:
            self._blocked = False
            self._fill_next()
        elif not self._acting:
            self._acting = True
            self.node.later(0.0, self._act)

    def _act(self) -> None:
        self._acting = False
        if self._replica >= 0 or self._blocked or self._busy or self._evaluations.runs:
            return
        self._forward.allow(not self._evaluations.evaluates(self.machine.step + 1))
        if self._goes_ahead():
            return
        if self.shell.gone:
            self.membership.close()
            self.node.kill()
            return
        self._exchange.prepare()
        action = self.shell.choose()
        if action is None or not self._hesitate_s:
            self._begin(action)
        else:
            self._acting = True
            self.node.later(self._hesitate_s * self.node.world.random.random(), lambda: self._begin(action))

    def _goes_ahead(self) -> bool:
        """With a delay: begin the next round while its version is on its way. That takes as long as its steps."""
        if (upcoming := self.machine.upcoming) is None or self.machine.next_action() is not None:
            return False
        if not self._replicas.goes_ahead(*upcoming, self.shell.view.generation):
            return False

        def gone() -> None:
            self._busy = False
            self._replicas.gone_ahead()
            self._poke()

        self._busy = True
        self.node.later(self._seconds(self.job.compute_s * self.job.rounds.ahead / self.job.rounds.steps), gone)
        return True

    def _seconds(self, work: float) -> float:
        """How long work takes here that takes so many seconds on a worker of speed 1, more or less."""
        return work / self.speed * self.node.world.random.uniform(0.5, 1.5)

    def _begin(self, action: machine.Action | machine.Store | machine.Ended | machine.Evaluate | None) -> None:
        self._acting = False
        if action is not None:
            self._thread.works(self.node.world.now)
        if isinstance(action, machine.Store):
            self._store_share(action)
            self._poke()
        elif isinstance(action, machine.Ended):
            self._end()
        elif isinstance(action, machine.Evaluate):
            self._evaluations.begin(action.version, self.model)
        elif isinstance(action, machine.Compute) and self._script.leaves(action.step):
            if self.shell.next_action() == action:
                self._script.leave(action.step)
            else:
                self._poke()
        elif self._takes(action):
            match action:
                case machine.UploadFirst():
                    self._initialise()
                case machine.Install(version=version):
                    self._install(version)
                case machine.Compute(replica=replica):
                    self._compute(replica)
        elif action is not None:
            self._poke()  # it was too late for that

    def _takes(self, action: machine.Action | None) -> bool:
        match action:
            case machine.UploadFirst():
                return self.shell.begin_upload() is not None
            case machine.Compute(step=step, replica=replica):
                return self.shell.begin_replica(step, replica) is not None
            case _:
                return self.machine.take(action)

    def _initialise(self) -> None:
        version, tables = 0, self.job.table_shards  # servers compute the first rows of tables
        contents = [self.job.nothing if s in tables else self.job.first(s) for s in range(self.job.shards)]
        if self.shell.holds >= 0:
            version, contents = self.shell.holds, self.model
        elif self.job.stateful_workers:
            self.shell.holds, self.model = version, contents
        for shard, content in enumerate(contents):
            link = self._exchange.links.get(self.shell.view.primary[shard])
            assert link is not None
            kind = Kind.STATE if self.job.averages(shard) else Kind.INITIAL
            nbytes = 0 if shard in tables else NBYTES
            header = Header(kind, self.shell.number, shard=shard, step=version, length=nbytes)
            link.push(header, cast(Any, NamedBuffer(content)), sent=lambda: None)
        if self.node.world.spring("drop first"):
            to_servers = [wire for wire in self.node.wires if wire.ends[1].name.startswith("server")]
            self.node.world.random.choice(to_servers).cut()
        self._poke()

    def _install(self, version: int) -> None:
        self._replicas.install()
        new = self.machine.changed
        begun = {shard: self.slots[shard] for shard in new[::2]}
        if self.install_s:
            self._busy = True
            seconds = self.install_s * self.node.world.random.random()
            self.node.later(seconds, lambda: self._installed(version, new, begun))
        else:
            self._installed(version, new, begun)

    def _installed(self, version: int, new: list[int], begun: dict[int, Content]) -> None:
        """Links have gone on meanwhile: half of the slots have been copied at the beginning, half at the end."""
        self._thread.works(self.node.world.now)
        self._busy = False
        self.model = self.model or [GARBAGE] * self.job.shards
        for shard in new:
            self.model[shard] = self.job.after(self.model[shard], begun.get(shard, self.slots[shard]), version)
        if self.job.stateful_workers:
            self.shell.holds = version
            for shard, content in enumerate(self.model):  # also after a roll-back: it may have to upload it
                self.job.check_version(shard, version, content)
        self._exchange.installed()
        _say_reached(self)
        for shard, content in self.job.dense(self.model) if self.machine.step >= 0 else ():
            own = self.job.cadence.updates_before(shard, self.machine.step)
            self.job.check_version(shard, own, content)
        self._replicas.installed(self.model)
        self._end()

    def _end(self) -> None:
        """If it holds the last version, it says so after an evaluation, which may take a while."""
        if (end := self.shell.ending.take()) is None:
            return

        def evaluated() -> None:
            self._busy, self._claim = False, end if self.honest else (self.shell.view.generation, end[1])
            self.membership.send(("done", *self._claim))
            self._poke()

        self._busy = True
        seconds = 2 * self.evaluate_s if self._evaluations.runs else self.evaluate_s * self.node.world.random.random()
        self.node.later(seconds, evaluated)

    def _store_share(self, wanted: machine.Store) -> None:
        """Of a snapshot of the version that the model holds, where workers are stateful."""
        id, version, writers = wanted.snapshot, wanted.version, wanted.writers
        if self.shell.holds > version:
            self.membership.send(("snapshot lost", id, "too late", self.shell.holds))
            return
        share = range(self.job.shards)[writers.index(self.node.name) :: len(writers)]
        contents = {shard: self.model[shard] for shard in share}

        def write() -> None:
            if all(self.store.write(id, shard, version, (contents[shard], (), {})) for shard in share):
                self.membership.send(("captured", id, tuple(share)))
            else:
                self.membership.send(("snapshot lost", id, "no space left", -1))

        self.node.later(self.node.world.latency() * 2, write)

    def _compute(self, replica: int) -> None:
        self._replica, self._began, self._generation = replica, self.node.world.now, self.shell.view.generation
        self._step = step = self.machine.reads
        own = [s for s in range(self.job.shards) if replica in self.job.contributing(s)]
        self._todo = deque(shard for shard in own if self.job.cadence.due(shard, step))
        paused = self.shell.view.orders.paused
        assert paused is None or self.machine.step < paused, f"it begins step {self.machine.step} of a paused job"
        moves = self.shell.view.orders.handover
        assert moves is None or self.machine.step < moves, f"it begins step {self.machine.step} before shards move"
        if looked_up := self.job.looked_up(step, replica):
            self._exchange.pulls.begin(replica, looked_up)
        self._forward.begin(self.model)
        if part := self._replicas.begin(step, replica, self._generation):
            self.node.later(self._seconds(self.job.compute_s * part), self._fill_next)
        else:
            self._fill_next()

    def _fill_next(self) -> None:
        if self.machine.rewound or self._exchange.pulls.outdated:
            self._end_replica(whole=False)
        elif self._forward.runs:
            if not self._forward.go_on():
                self._blocked = True
        elif not self._exchange.pulls.ready():
            self._blocked = True
        elif not self._todo:
            self._end_replica(whole=True)
        elif len(self._todo) == 1 and self._script.stops(self._step, self._replica):
            self._blocked = True  # it holds the last shard back until all know
        elif (may := self.machine.may_fill(self._todo[0])) is False:
            self._blocked = True
        else:
            self._fill(self._todo.popleft(), fills=bool(may))

    def _fill(self, shard: int, *, fills: bool) -> None:
        if fills:
            self.machine.fill(shard)
            self.slots[shard] = GARBAGE
        step, replica = self.machine.step, self._replica
        seconds = self._seconds(self.job.compute_s / self.job.shards)
        self.node.later(seconds, lambda: self._filled(shard, fills, step, replica))

    def _filled(self, shard: int, fills: bool, step: int, replica: int) -> None:
        if fills and not self.machine.rewound:
            self.slots[shard] = self._replicas.contribution(shard, step, replica, self._exchange.pulls.seen(self.model))
            self._exchange.filled(shard, replica)
        self._goes_on()

    def _goes_on(self) -> None:
        """The main thread has done a part of a replica's work."""
        self._thread.works(self.node.world.now)
        self._fill_next()

    def _end_replica(self, *, whole: bool) -> None:
        replica, self._replica = self._replica, -1
        self._todo.clear()
        self._forward.give_up()
        self._exchange.pulls.end()
        step = self.machine.step
        if whole:
            self._replicas.made(step, replica, self.model)
        else:
            self._replicas.abandoned()
        self._exchange.run(self.shell.end_replica(whole=whole))
        if whole:
            self.membership.send(("progress", step, replica, self.node.world.now - self._began, self._generation))
        self._poke()


def _beat_of(worker: SimulatedWorker) -> Beat:
    missed = worker._exchange.links.unreachable()
    acts = worker._replica >= 0 or worker._busy or worker._acting or worker.shell.next_action() is not None
    waited = 0.0 if acts and not worker._blocked else worker.node.world.now - worker._thread.worked_at
    return Beat(missed, waited, worker._thread.activity)


def _say_reached(worker: SimulatedWorker, *, again: bool = False) -> None:
    if again:
        worker.shell.reaching.again()
    if (said := worker.shell.reaching.take()) is not None:
        worker.membership.send(Reached(said[1], said[0]))
