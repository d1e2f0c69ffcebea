"""A simulated worker: the real machine, links that come back, and a main thread that takes its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from rallypoint.core.view import Member, View
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.streaming import StreamMachine
from rallypoint.testing.simulation.job import GARBAGE, Content, Mean, SimulatedJob
from rallypoint.testing.simulation.member import Membership
from rallypoint.testing.simulation.network import Node, Wire, World
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.testing.simulation.watch import watch

RETRY_S = 0.1


def _machine_for(name: str, job: SimulatedJob) -> StreamMachine | WorkerMachine:
    if job.policy.streaming:
        return StreamMachine(name, job.shards, job.replica_0_shards, job.steps)
    return WorkerMachine(
        name, job.shards, job.replica_0_shards, job.steps, cadence=job.cadence, in_order=job.stateful_workers
    )


class SimulatedWorker:
    """One worker process."""

    install_s = 0.01  # at most, to copy a version into the model

    def __init__(
        self, world: World, name: str, job: SimulatedJob, store: SimulatedStore, speed: float = 1.0,
        hesitate_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.node, self.job, self.store, self.speed = Node(world, name), job, store, speed
        self._hesitate_s = hesitate_s
        self.holds = -1  # the version that the model is, where workers are stateful: also in a view in which it is void
        self._to_store: tuple[str, int, tuple[str, ...]] | None = None
        self.machine = watch(_machine_for(name, job), name)
        self.slots: list[Content] = [GARBAGE] * job.shards
        self.model: list[Content] = []
        self.done = self.finished = self.leaving = False
        self.fetched = 0
        self._links: dict[str, tuple[Member, Wire]] = {}
        self._trying: set[tuple[str, int]] = set()
        self._leaves: dict[Wire, float] = {}  # when the last contribution queued for it will
        self._landing: dict[Wire, deque[Any]] = {}  # what has come behind a version that is being received
        self._todo: deque[int] = deque()
        self._replica = -1
        self._began = 0.0
        self._blocked = self._acting = self._installing = False
        self.membership = Membership(self.node, "worker", self._on_message, self._on_admitted)

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        self.membership.send(("propose", self.job.record()))
        if self.done:
            self.membership.send(("done", self._generation))
        if self.leaving:
            self.membership.send(("leaving",))

    def leave(self) -> None:
        """SIGTERM: a spot machine's notice."""
        self.leaving = True
        self.membership.send(("leaving",))

    def _on_message(self, message: Any) -> None:
        match message:
            case ("view", View() as view):
                self._viewed(view)
            case ("assist", step, replica):
                self._handle(machine.Assisted(step, replica))
            case ("capture", id, version, writers):
                self._to_store = (id, version, writers)
                self._poke()
            case ("finish",):
                self.finished = True

    def _viewed(self, view: View) -> None:
        before = self.machine.view
        if before is not None and view.number <= before.number:
            return
        stale = before is not None and before.generation != view.generation
        incarnations = {member.id: member.incarnation for member in view.servers}
        homes = {} if before is None else before.primary
        losing = {home for shard, home in homes.items() if view.primary[shard] != home}
        ended = []
        for id, (member, wire) in list(self._links.items()):
            if incarnations.get(id) != member.incarnation or stale or id in losing:
                wire.close(0)
                del self._links[id]
                ended.append(id)
        effects = [effect for id in ended for effect in self.machine.handle(machine.LinkLost(id))]
        self._run([*effects, *self.machine.handle(machine.Viewed(view))])
        self._poke()
        self._connect_all()
        if self.leaving and not self.machine.takes_part:
            self.node.later(0.0, self._go)

    def _go(self) -> None:
        self.membership.close()
        self.node.kill()

    # ---- links ----

    def _connect_all(self) -> None:
        view = self.machine.view
        assert view is not None
        for member in view.servers:
            key = (member.id, member.incarnation)
            if member.id not in self._links and key not in self._trying:
                self._trying.add(key)
                self._connect(member)

    def _connect(self, member: Member) -> None:
        def up(wire: Wire) -> None:
            self._trying.discard((member.id, member.incarnation))
            if not self._in_view(member):
                wire.close(0)
                return
            self._links[member.id] = (member, wire)
            wire.on_message[0] = lambda message: self._receive(wire, message)
            wire.on_close[0] = lambda: self._lost(member, wire)
            self._handle(machine.LinkUp(member.id))

        def failed(_: str) -> None:
            self.node.later(RETRY_S, lambda: self._connect_again(member))

        hello = ("worker", self.machine.me, self._number)
        self.node.world.connect(self.node, member.address, hello, up, failed)

    def _connect_again(self, member: Member) -> None:
        if self._in_view(member):
            self._connect(member)
        else:
            self._trying.discard((member.id, member.incarnation))

    def _in_view(self, member: Member) -> bool:
        return self.machine.view is not None and member in self.machine.view.servers

    def _lost(self, member: Member, wire: Wire) -> None:
        if self._links.get(member.id, (None, None))[1] is wire:
            del self._links[member.id]
            self._handle(machine.LinkLost(member.id))
            if self._in_view(member):
                self._connect_all()

    @property
    def _number(self) -> Any:
        return self.machine.view.number if self.machine.view is not None else None

    @property
    def _generation(self) -> Any:
        return self.machine.view.generation if self.machine.view is not None else None

    def _receive(self, wire: Wire, message: Any) -> None:
        if wire in self._landing:
            self._landing[wire].append(message)  # one after the other
            return
        match message:
            case ("version", number, shard, version, content, replica, clock):
                whole = not isinstance(content, Mean)
                begins = whole and self.job.stateful_workers and shard not in self.job.buffer_shards
                effects = self.machine.handle(machine.Arriving(shard, version, number, replica, clock, whole, begins))
                self._run(effects)
                if machine.Land(shard) in effects:
                    self.slots[shard] = GARBAGE
                    self._landing[wire] = deque()
                    self.node.later(self.node.world.latency() / 4, lambda: self._land(wire, shard, content))
            case ("wait", _, replica, clock):
                self._handle(machine.ToWait(replica, clock))
        self._poke()

    def _land(self, wire: Wire, shard: int, content: Content) -> None:
        waiting = self._landing.pop(wire)
        if not wire.open or all(wire is not link for _, link in self._links.values()):
            return  # it broke halfway
        self.slots[shard] = content
        self._handle(machine.Landed(shard))
        for message in waiting:
            self._receive(wire, message)

    # ---- the main thread ----

    def _handle(self, event: machine.Event) -> None:
        self._run(self.machine.handle(event))
        self._poke()

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
        if self._replica >= 0 or self._blocked or self._installing:
            return
        self._store_share()
        if not self.done and self.machine.step == self.job.steps:
            self.done = True
            self.membership.send(("done", self._generation))
        self.done = self.done and self.machine.step == self.job.steps
        action = self.machine.next_action()
        if action is None or not self._hesitate_s:
            self._begin(action)
        else:
            self._acting = True
            self.node.later(self._hesitate_s * self.node.world.random.random(), lambda: self._begin(action))

    def _begin(self, action: machine.Action | None) -> None:
        self._acting = False
        if not self.machine.take(action):
            if action is not None:
                self._poke()  # it was too late for that
            return
        match action:
            case machine.Initialise():
                self._initialise()
            case machine.Install(version=version):
                self._install(version)
            case machine.Compute(replica=replica):
                self._compute(replica)

    def _initialise(self) -> None:
        assert self.machine.view is not None
        version, contents = 0, [self.job.first(shard) for shard in range(self.job.shards)]
        if self.holds >= 0:
            version, contents = self.holds, self.model
        elif self.job.stateful_workers:
            self.holds, self.model = version, contents
        for shard, content in enumerate(contents):
            _, wire = self._links[self.machine.view.primary[shard]]
            wire.send(0, ("initial", self._number, shard, content, version))
        if self.node.world.spring("drop first"):
            self.node.world.random.choice([wire for _, wire in self._links.values()]).cut()
        self._poke()

    def _install(self, version: int) -> None:
        new = self.machine.changed if isinstance(self.machine, WorkerMachine) else list(range(self.job.shards))
        begun = {shard: self.slots[shard] for shard in new[::2]}
        if self.install_s:
            self._installing = True
            seconds = self.install_s * self.node.world.random.random()
            self.node.later(seconds, lambda: self._installed(version, new, begun))
        else:
            self._installed(version, new, begun)

    def _installed(self, version: int, new: list[int], begun: dict[int, Content]) -> None:
        """Links have gone on meanwhile: half of the slots have been copied at the beginning, half at the end."""
        self._installing = False
        self.model = self.model or [GARBAGE] * self.job.shards
        for shard in new:
            self.model[shard] = self.job.after(self.model[shard], begun.get(shard, self.slots[shard]), version)
        if self.job.stateful_workers:
            self.holds = version
            for shard, content in enumerate(self.model):  # also if all begin again meanwhile: it may have to bring it
                self.job.check_version(shard, version, content)
        self._run(self.machine.handle(machine.Installed()))
        for shard, content in enumerate(self.model) if self.machine.step >= 0 else ():
            own = self.job.cadence.updates_before(shard, self.machine.step)
            self.job.check_version(shard, own, content)
        self._poke()

    def _store_share(self) -> None:
        """Of a snapshot of the version that the model holds, where workers are stateful."""
        if self._to_store is None or self.holds < self._to_store[1]:
            return
        (id, version, writers), self._to_store = self._to_store, None
        if self.holds > version:
            self.membership.send(("snapshot lost", id, "too late", self.holds))
            return
        share = range(self.job.shards)[writers.index(self.node.name) :: len(writers)]
        contents = {shard: self.model[shard] for shard in share}

        def write() -> None:
            if all(self.store.write(id, shard, version, (contents[shard], ())) for shard in share):
                self.membership.send(("captured", id, tuple(share)))
            else:
                self.membership.send(("snapshot lost", id, "no space left", -1))

        self.node.later(self.node.world.latency() * 2, write)

    def _compute(self, replica: int) -> None:
        self._replica, self._began = replica, self.node.world.now
        self._todo = deque(s for s in range(self.job.shards) if self.machine.contributes(s, replica))
        self._fill_next()

    def _fill_next(self) -> None:
        if self.machine.rewound:
            self._end_replica(machine.ReplicaAbandoned())
            return
        while self._todo:
            shard = self._todo[0]
            may = self.machine.may_fill(shard)
            if may is False:
                self._blocked = True
                return
            self._todo.popleft()
            self._fill(shard, fills=bool(may))
            return
        self._end_replica(machine.ReplicaComputed())

    def _fill(self, shard: int, *, fills: bool) -> None:
        if fills:
            self.machine.fill(shard)
            self.slots[shard] = GARBAGE
        seconds = self.job.compute_s / self.job.shards / self.speed * self.node.world.random.uniform(0.5, 1.5)
        step, replica = self.machine.step, self._replica
        self.node.later(seconds, lambda: self._filled(shard, fills, step, replica))

    def _filled(self, shard: int, fills: bool, step: int, replica: int) -> None:
        if fills and not self.machine.rewound:
            self.slots[shard] = self.job.gradient(shard, step, replica, self.model)
            self._run(self.machine.handle(machine.Filled(shard)))
        self._fill_next()

    def _end_replica(self, event: machine.ReplicaComputed | machine.ReplicaAbandoned) -> None:
        replica, self._replica = self._replica, -1
        self._todo.clear()
        step = self.machine.step
        self._run(self.machine.handle(event))
        if isinstance(event, machine.ReplicaComputed):
            self.membership.send(("progress", step, replica, self.node.world.now - self._began, self._generation))
        self._poke()

    # ---- effects ----

    def _run(self, effects: Sequence[machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case machine.Send():
                    self._send(effect)
                case machine.Fetch(shard=shard, version=version, server=server):
                    self.fetched += 1
                    self._links[server][1].send(0, ("fetch", self._number, shard, version))
                case machine.Want(shard=shard, replica=replica, server=server) if server in self._links:
                    self._want(self._links[server][1], ("want", self._number, shard, replica))
                case machine.Want():
                    pass  # its link has been ended with the view that is coming
                case machine.Follow(server=server, on=on):
                    self._links[server][1].send(0, ("follow", self._number, on))
                case _:
                    pass

    def _send(self, send: machine.Send) -> None:
        _, wire = self._links[send.server]
        leaves = max(self._leaves.get(wire, 0.0), self.node.world.now + self.node.world.latency() / 4)
        self._leaves[wire] = leaves
        self.node.later(leaves - self.node.world.now, lambda: self._transmit(wire, send))

    def _want(self, wire: Wire, want: Any) -> None:
        """Not before what has been queued: the last want counts."""
        self.node.later(max(0.0, self._leaves.get(wire, 0.0) - self.node.world.now), lambda: wire.send(0, want))

    def _transmit(self, wire: Wire, send: machine.Send) -> None:
        content = self.slots[send.shard]  # what is in the slot when the bytes leave
        push = ("push", send.view, send.shard, send.step, send.replica, content, send.base, send.wants)
        for _ in range(2 if self.node.world.random.random() < 0.02 else 1):
            wire.send(0, push)
        self.node.later(self.node.world.latency() / 4, lambda: self._handle(machine.Sent(send.shard, send.serial)))
