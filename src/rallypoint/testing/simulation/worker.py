"""A simulated worker: the product's own exchange, and a main thread that takes its time."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from rallypoint.codec.base import encode_gradient, encode_ids
from rallypoint.core import protocol
from rallypoint.core.protocol import NotStored
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.ending import End
from rallypoint.errors import SnapshotFailed
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotPart
from rallypoint.testing.simulation.exchange import SimulatedExchange, SimulatedForward, SimulatedWords
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import SimulatedMembership
from rallypoint.testing.simulation.names import NBYTES, TOKEN, payload_of
from rallypoint.testing.simulation.network import Node, PlayedThread, World
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Content, name_of
from rallypoint.testing.simulation.replicas.evaluations import SimulatedEvaluations
from rallypoint.testing.simulation.replicas.floats import ROWS
from rallypoint.testing.simulation.replicas.inner import DelayedReplicas, InnerOptimizers
from rallypoint.testing.simulation.replicas.script import Script
from rallypoint.testing.simulation.store import SimulatedStore
from rallypoint.worker.exchange.locked import Rewound


class _Asked(bytes):
    """The numbers of rows, and (`of`) the step and the replica that they are for."""

    of: tuple[int, int]


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
        self._hesitate_s, self._tokens = hesitate_s, world.tokens
        self._thread = PlayedThread(self.node, self._main)
        self.exchange = SimulatedExchange(self.node, job, self._thread)
        self.shell, self.machine = self.exchange.shell, self.exchange.shell.machine
        self.model: list[Content] = []
        self.replica = -1  # in progress
        self._claim: End | None = None  # what it says that it is done with
        self._captured = ""  # the last snapshot that was asked for
        self._replicas = (DelayedReplicas if job.delayed else InnerOptimizers)(name, job)
        self._forward = SimulatedForward(self.exchange, self._thread, self.install_s)
        self._streamed = SimulatedWords(self.exchange, self._thread, self.install_s)
        self.membership = SimulatedMembership(
            self.node, "worker", self._on_message, self._on_admitted, beat=self.exchange.beat
        )
        self._evaluations = SimulatedEvaluations(self.exchange, self._thread, self.evaluate_s, self.membership.send)
        view = lambda: self.shell.view if self.shell.number.count else None  # noqa: E731
        self._script = Script(job.stop, view, self.membership.send)
        self.exchange.reaching.to = lambda generation, at: self.membership.send(protocol.Reached(at, generation))
        self.node.later(0.0, self._thread.play)

    @property
    def done(self) -> bool:
        """Has it said that it is done, and is that still so?"""
        return self._claim is not None and self._claim == self.shell.ending.reached

    def story(self) -> str:
        """What it waits for, where the job is stuck."""
        machine, name = self.machine, self.node.name
        return f"{name}: replica {self.replica}, next {machine.next_action()}, missing {machine.missing}, {machine}"

    # ---- the coordinator's words ----

    def _on_admitted(self, new: bool) -> None:
        self.membership.send(protocol.Propose(self.job.record))
        self._evaluations.register(new=new)
        if self.done and self._claim is not None:
            self.membership.send(protocol.Done(*self._claim))
        self._script.say(again=True)
        self.exchange.reaching.say(again=True)
        if self.shell.leaving:
            self.membership.send(protocol.Leaving())

    def leave(self) -> None:
        """SIGTERM: a spot machine's notice."""
        self.exchange.leave()
        self.membership.send(protocol.Leaving())

    def _on_message(self, message: Any) -> None:
        match message:
            case protocol.NewView(view=view):
                self.exchange.adopt(view)
                self._script.say()
            case protocol.Assist(step=step, replica=replica):
                self.exchange.assist(step, replica)
            case protocol.Capture(snapshot=id, version=version, writers=writers) if id != self._captured:
                self._captured = id  # (it is said again with each view)
                self.exchange.capture(machine.Store(id, version, writers))

    # ---- the main thread ----

    def _main(self) -> None:
        while True:
            self._forward.allow(not self._evaluations.evaluates(self.machine.step + 1))
            self._go_ahead()
            if (action := self.exchange.next_action()) is None:
                break
            if self._hesitate_s:
                self._thread.sleep(self._hesitate_s * self.node.world.random.random())
            self._do(action)
            if (end := self.exchange.end.take()) is not None:
                self._end(end)
        if self.exchange.gone:
            self.membership.close()
            self.node.kill()

    def _do(self, action: machine.Next) -> None:
        match action:
            case machine.Store():
                self._store_share(action)
            case machine.Evaluate(version=version):
                self._evaluations.evaluate(version, self.model)
            case machine.Compute(step=step) if self._script.leaves(step):
                self._script.leave(step)
                self.exchange.end.wait_for_others()
            case machine.UploadFirst():
                self._initialise()
            case machine.Install(version=version):
                self._install(version)
            case machine.Compute(step=step, replica=replica):
                self._compute(step, replica)

    def _go_ahead(self) -> None:
        """With a delay: begin the next round while its version is on its way. That takes as long as its steps."""
        if not self.job.delayed or (upcoming := self.exchange.upcoming) is None or not self.exchange.idle:
            return
        if self._replicas.goes_ahead(*upcoming, self.shell.view.generation):
            self._work(self.job.compute_s * self.job.rounds.ahead / self.job.rounds.steps)
            self._replicas.gone_ahead()

    def _work(self, seconds: float) -> None:
        """Take as long as work takes here that takes so many seconds on a worker of speed 1, more or less."""
        self._thread.sleep(seconds / self.speed * self.node.world.random.uniform(0.5, 1.5))

    def _initialise(self) -> None:
        contents = [self.job.first(shard) for shard in range(self.job.shards)]
        if self.shell.holds >= 0:
            contents = self.model
        elif self.job.stateful_workers:
            self.exchange.holds, self.model = 0, contents
        state = None if not self.job.stateful_workers else (
            lambda shard: self._record(shard.index, self.shell.holds, contents[shard.index])
        )
        self.exchange.initialise(lambda start, stop: self._words(start, stop, contents), state)
        to_servers = [wire for wire in self.node.wires if wire.ends[1].name.startswith("server")]
        if self.node.world.spring("drop first") and to_servers:
            self.node.world.random.choice(to_servers).cut()

    def _words(self, start: int, stop: int, contents: list[Content]) -> torch.Tensor:
        """A shard's first values; servers compute the first rows of tables."""
        if start == stop:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return torch.frombuffer(payload_of(self._tokens, contents[start // (NBYTES // 4)]), dtype=torch.float32)

    def _record(self, shard: int, version: int, content: Any) -> ShardRecord:
        return ShardRecord(shard, version, {"master": np.frombuffer(self._tokens.bytes_of(content), np.uint8)}, {})

    def _install(self, version: int) -> None:
        """Links go on meanwhile: half of the slots are copied at the beginning, half at the end."""
        if self.exchange.begin_install(version) is None:
            return
        self._replicas.install()
        records, _ = self.exchange.take_states()
        brought = {shard: self._tokens.of(record.arrays["master"]) for shard, record in records.items()}
        new = self.machine.changed
        begun = {shard: self.exchange.read(shard) for shard in new[::2]} | brought
        if self.install_s:
            self._thread.sleep(self.install_s * self.node.world.random.random())
        self.model = self.model or [GARBAGE] * self.job.shards
        for shard in new:
            came = begun[shard] if shard in begun else self.exchange.read(shard)
            self.model[shard] = self.job.after(self.model[shard], came, version)
        if self.job.stateful_workers:
            self.exchange.holds = version
            for shard, content in enumerate(self.model):  # also after a roll-back: it may have to upload it
                self.job.check_version(shard, version, content)
        self.exchange.installed(version)
        for shard, content in self.job.dense(self.model) if self.machine.step >= 0 else ():
            own = self.job.cadence.updates_before(shard, self.machine.step)
            self.job.check_version(shard, own, content)
        self._replicas.installed(self.model)

    def _end(self, end: End) -> None:
        """It holds the last version, and says so after an evaluation, which may take a while."""
        self._thread.sleep(self.evaluate_s * self.node.world.random.random())
        self._claim = end if self.honest else (self.shell.view.generation, end[1])
        self.membership.send(protocol.Done(*self._claim))

    def _store_share(self, wanted: machine.Store) -> None:
        """Of a snapshot of the version that the model holds, where workers are stateful."""
        id, version, writers = wanted.snapshot, wanted.version, wanted.writers
        if self.shell.holds > version:
            self.membership.send(NotStored(id, "too late", self.shell.holds))
            return
        share = range(self.job.shards)[writers.index(self.node.name) :: len(writers)]
        records = [self._record(shard, version, (self.model[shard], None)) for shard in share]

        def stored(file: SnapshotPart) -> None:
            entries = {shard: msgspec.structs.astuple(entry) for shard, entry in file.shards.items()}
            self.membership.send(protocol.Stored(id, file.files, entries))

        def write() -> None:
            try:
                self.store.write_part(id, self.node.name, records, "none", stored)
            except SnapshotFailed:
                self.membership.send(NotStored(id, "no space left"))

        self.node.later(self.node.world.latency() * 2, write)

    # ---- one replica ----

    def _compute(self, step: int, replica: int) -> None:
        began = self.node.world.now
        if (generation := self.exchange.replica.begin(step, replica)) is None:
            return
        self.replica, self.exchange.rows.in_micro = replica, True
        try:
            self._passes(step, replica, generation)
        except Rewound:
            self._forward.undo(self.model)
            self._replicas.abandoned()
            self.exchange.replica.abandoned()
            return
        finally:
            self.replica, self.exchange.rows.in_micro = -1, False
        self.membership.send(protocol.Report(step, replica, 0.0, 1.0, 1, self.node.world.now - began, generation))
        if digests := self.exchange.replica.contributions.take():
            self.membership.send(protocol.Contributed(step, replica, 0.0, digests, generation))

    def _passes(self, step: int, replica: int, generation: ViewNumber) -> None:
        early = self.exchange.forward.begin(step, replica)
        ahead = self._replicas.begin(step, replica, generation)
        wanted = {shard: self._asked(ids, replica) for shard, ids in self.job.looked_up(step, replica).items()}
        rows = self.exchange.rows.pull(wanted) if wanted else {}
        read = {shard: self._tokens.of(data[:TOKEN]) for shard, data in rows.items()} | self._streamed.pull()
        if early:
            self._forward.run(self.model)
        if ahead:
            self._work(self.job.compute_s * ahead)
        self.exchange.replica.weigh(1.0, finite=self.job.defect(step, replica) != "loss")
        own = [shard for shard in range(self.job.shards) if replica in self.job.contributing(shard)]
        due = [shard for shard in own if self.job.cadence.due(shard, step)]
        for shard in due:
            if shard == due[-1] and self._script.stops(step, replica):
                self.exchange.end.wait_until_known()  # it holds the last shard back until all know
            self._fill(shard, step, replica, read)
        self.exchange.check()
        self._replicas.made(step, replica, self.model)
        self.exchange.replica.computed()

    def _asked(self, ids: list[int], replica: int) -> Any:
        asked = _Asked(encode_ids(torch.tensor(ids, dtype=torch.int64, device="cpu")))
        asked.of = self.machine.step, replica
        return asked, NBYTES

    def _fill(self, shard: int, step: int, replica: int, read: dict[int, Content]) -> None:
        claimed = self.exchange.replica.claim(shard)
        if claimed:
            self.exchange.memory.words(shard).zero_()  # of a streamed shard: there is memory from now on
            self.exchange.spoil(shard)
        self._work(self.job.compute_s / self.job.shards)
        if not claimed and not self.exchange.replica.contributions.active:
            return
        seen = [
            content if of not in self.job.absent else read.get(of, self.job.nothing)
            for of, content in enumerate(self.model)
        ]
        content = self._replicas.contribution(shard, step, replica, seen)
        self.exchange.contributed = name_of(content)
        if not claimed:
            self.exchange.replica.not_needed(shard, torch.empty(0, dtype=torch.float32, device="cpu"))
            return
        _, whole = self.job.flags(shard, self.job.cadence.updates_before(shard, step), replica)
        if shard in self.job.table_shards:
            values = torch.frombuffer(payload_of(self._tokens, content), dtype=torch.float32).view(ROWS, -1)
            values[-1, -1] = 0.0 if whole else torch.nan
            place = torch.arange(ROWS, dtype=torch.int64, device="cpu")
            self.exchange.replica.filled_rows(shard, encode_gradient(place, values))
        else:
            self.exchange.write(shard, content, whole=whole)
            self.exchange.replica.filled(shard)
