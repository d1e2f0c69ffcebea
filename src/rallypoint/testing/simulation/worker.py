"""A simulated worker: the real shell and machine, and a main thread that takes its time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from rallypoint.core.view import View, ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.inner import InnerStates
from rallypoint.testing.simulation.exchange import SimulatedExchange
from rallypoint.testing.simulation.job import GARBAGE, Content, SimulatedJob, combine
from rallypoint.testing.simulation.member import Membership
from rallypoint.testing.simulation.network import Node, World
from rallypoint.testing.simulation.store import SimulatedStore


@dataclass(slots=True)
class Inner:
    """The state of a replica's own optimizer: a name, and the one that the round was begun with. 0: a new one."""

    round: int
    whole: bool = False
    name: int = 0
    before: int = 0

    def begin(self, round: int) -> None:
        """It goes on to the next round."""
        assert round == self.round + 1, f"round {round} is begun with the inner state of round {self.round}"
        self.round, self.whole, self.before = round, False, self.name

    def go_back(self) -> None:
        """The round is begun once more."""
        self.whole, self.name = False, self.before


class InnerOptimizers:
    """The replicas' own optimizers on one worker, which the real `InnerStates` picks from round to round."""

    def __init__(self, name: str, job: SimulatedJob) -> None:
        self._name, self._job = name, job
        self._states = InnerStates(job.keeps_inner, Inner)
        self._state = Inner(-1)  # of the replica in progress
        self._generation = ViewNumber()
        self._begun: dict[tuple[ViewNumber, int, int], int] = {}  # generation, round, replica -> state
        self._made: dict[tuple[int, int], tuple[int, ViewNumber]] = {}  # replica, state -> round, generation

    @property
    def began_with(self) -> int:
        """The state that the replica in progress has begun its round with."""
        return self._state.before

    def begin(self, round: int, replica: int, generation: ViewNumber) -> None:
        """Make the first step: until the round is over the state is that of half a round."""
        self._generation = generation
        self._state = state = self._states.begin(round, replica, generation)
        what = f"{self._name}: round {round} of replica {replica}"
        same = self._begun.setdefault((generation, round, replica), state.name)
        assert state.name == same, f"{what} is begun with two inner states"
        made = self._made.get((replica, state.name))
        fits = state.name == 0 or made == (round - 1, generation)
        assert fits, f"{what} is begun with the inner state of (round, generation) {made}, in {generation}"
        state.name = combine(state.name, round, 23)

    def made(self, round: int, replica: int, model: list[Content]) -> None:
        """The last step of the round is made."""
        self._state.name = self._job.inner_after(self.began_with, round, replica, model)
        self._made[replica, self._state.name] = (round, self._generation)
        self._states.made(replica)


class SimulatedWorker:
    """One worker process."""

    install_s = 0.01  # at most, to copy a version into the model
    evaluate_s = 0.5  # at most, to evaluate the last version

    def __init__(
        self, world: World, name: str, job: SimulatedJob, store: SimulatedStore, speed: float = 1.0,
        hesitate_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.node, self.job, self.store, self.speed = Node(world, name), job, store, speed
        self._hesitate_s = hesitate_s
        self._exchange = SimulatedExchange(self.node, job, self._poke)
        self.shell, self.machine, self.slots = self._exchange.shell, self._exchange.machine, self._exchange.slots
        self.model: list[Content] = []
        self._claim: ViewNumber | None = None  # the generation of which it says that it is done
        self._todo: deque[int] = deque()
        self._captured = ""  # the last snapshot that was asked for
        self._replica = -1
        self._began = 0.0
        self._generation = ViewNumber()  # that the replica in progress belongs to
        self._inner = InnerOptimizers(name, job)
        self._blocked = self._acting = self._busy = False
        self.membership = Membership(self.node, "worker", self._on_message, self._on_admitted)

    @property
    def done(self) -> bool:
        """Has it said that it is done, and is that still so?"""
        return self._claim is not None and self._claim == self.shell.done_in

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
        if self.done:
            self.membership.send(("done", self._claim))
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
            case ("assist", step, replica):
                self._exchange.apply(self.machine.handle(machine.Assisted(step, replica)))
            case ("capture", id, version, writers):
                self._capture(id, version, writers)
            case ("finish",):
                self.shell.finished = True

    def _capture(self, id: str, version: int, writers: tuple[str, ...]) -> None:
        """A snapshot is to be taken. (It is said again with each view.)"""
        if id == self._captured:
            return
        self._captured = id
        if (passed := self.shell.snapshots.wanted(machine.Store(id, version, writers))) >= 0:
            self.membership.send(("snapshot lost", id, "the step was over before the request came", passed))
        self._poke()

    def _go(self) -> None:
        self.membership.close()
        self.node.kill()

    # ---- the main thread ----

    def _poke(self) -> None:
        """Something has changed: whatever the main thread waits for may be there."""
        if self._blocked:
            self._blocked = False
            self._fill_next()
        elif not self._acting:
            self._acting = True
            self.node.later(0.0, self._act)

    def _act(self) -> None:
        self._acting = False
        if self._replica >= 0 or self._blocked or self._busy:
            return
        if self.shell.gone:
            self._go()
            return
        self._exchange.prepare()
        action = self.shell.choose()
        if action is None or not self._hesitate_s:
            self._begin(action)
        else:
            self._acting = True
            self.node.later(self._hesitate_s * self.node.world.random.random(), lambda: self._begin(action))

    def _begin(self, action: machine.Action | machine.Store | None) -> None:
        self._acting = False
        if isinstance(action, machine.Store):
            self._store_share(action)
            self._poke()
        elif self._takes(action):
            match action:
                case machine.Initialise():
                    self._initialise()
                case machine.Install(version=version):
                    self._install(version)
                case machine.Compute(replica=replica):
                    self._compute(replica)
        elif action is not None:
            self._poke()  # it was too late for that

    def _takes(self, action: machine.Action | None) -> bool:
        match action:
            case machine.Initialise():
                return self.shell.begin_upload() is not None
            case machine.Compute(step=step, replica=replica):
                return self.shell.begin_replica(step, replica) is not None
            case _:
                return self.machine.take(action)

    def _initialise(self) -> None:
        version, contents = 0, [self.job.first(shard) for shard in range(self.job.shards)]
        if self.shell.holds >= 0:
            version, contents = self.shell.holds, self.model
        elif self.job.stateful_workers:
            self.shell.holds, self.model = version, contents
        for shard, content in enumerate(contents):
            link = self._exchange.links[self.shell.view.primary[shard]]
            link.send(("initial", self.shell.number, shard, content, version))
        if self.node.world.spring("drop first"):
            wires = [link.wire for link in self._exchange.links.values() if link.wire is not None]
            self.node.world.random.choice(wires).cut()
        self._poke()

    def _install(self, version: int) -> None:
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
        self._busy = False
        self.model = self.model or [GARBAGE] * self.job.shards
        for shard in new:
            self.model[shard] = self.job.after(self.model[shard], begun.get(shard, self.slots[shard]), version)
        if self.job.stateful_workers:
            self.shell.holds = version
            for shard, content in enumerate(self.model):  # also after a roll-back: it may have to upload it
                self.job.check_version(shard, version, content)
        self._exchange.apply(self.shell.installed())
        for shard, content in enumerate(self.model) if self.machine.step >= 0 else ():
            own = self.job.cadence.updates_before(shard, self.machine.step)
            self.job.check_version(shard, own, content)
        if self.shell.done_in is not None:
            self._evaluate(self.shell.done_in)

    def _evaluate(self, generation: ViewNumber) -> None:
        """The last version of this generation is here. It says so after an evaluation, which may take a while."""
        self._busy = True
        seconds = self.evaluate_s * self.node.world.random.random()
        self.node.later(seconds, lambda: self._say_done(generation))

    def _say_done(self, generation: ViewNumber) -> None:
        self._busy, self._claim = False, generation
        self.membership.send(("done", generation))
        self._poke()

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
        self._inner.begin(self.machine.step, replica, self._generation)
        self._todo = deque(s for s in range(self.job.shards) if self.machine.contributes(s, replica))
        self._fill_next()

    def _fill_next(self) -> None:
        if self.machine.rewound:
            self._end_replica(whole=False)
        elif not self._todo:
            self._end_replica(whole=True)
        elif (may := self.machine.may_fill(self._todo[0])) is False:
            self._blocked = True
        else:
            self._fill(self._todo.popleft(), fills=bool(may))

    def _fill(self, shard: int, *, fills: bool) -> None:
        if fills:
            self.machine.fill(shard)
            self.slots[shard] = GARBAGE
        seconds = self.job.compute_s / self.job.shards / self.speed * self.node.world.random.uniform(0.5, 1.5)
        step, replica = self.machine.step, self._replica
        self.node.later(seconds, lambda: self._filled(shard, fills, step, replica))

    def _filled(self, shard: int, fills: bool, step: int, replica: int) -> None:
        if fills and not self.machine.rewound:
            model = (*self.model, self._inner.began_with) if self.job.same_bytes else self.model
            self.slots[shard] = self.job.gradient(shard, step, replica, model)
            self._exchange.run(self.machine.handle(machine.Filled(shard)))
        self._fill_next()

    def _end_replica(self, *, whole: bool) -> None:
        replica, self._replica = self._replica, -1
        self._todo.clear()
        step = self.machine.step
        if whole and self.job.inner:
            self._inner.made(step, replica, self.model)
        self._exchange.run(self.shell.end_replica(whole=whole))
        if whole:
            self.membership.send(("progress", step, replica, self.node.world.now - self._began, self._generation))
        self._poke()
