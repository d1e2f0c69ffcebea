"""A simulated coordinator: the product's service, journal and keeper of snapshots, on a played disk and clock."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from rallypoint.codec.base import digest_of
from rallypoint.coordinator import acts, inbox
from rallypoint.coordinator.connections import Checks
from rallypoint.coordinator.events import EventLog
from rallypoint.coordinator.fingerprints import FingerprintLog, KeptFingerprints
from rallypoint.coordinator.journal import JOURNAL, Journal, kept_state
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.coordinator.snapshots import SnapshotKeeper
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Resumed
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing.links import LinkSpeeds, MeasuredLinks
from rallypoint.core.protocol import Aborted, Finished, Hello, Message, Metrics, Report, Say, decode, encode
from rallypoint.core.view import ViewNumber
from rallypoint.errors import ProtocolError
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR
from rallypoint.testing.simulation.network import Node, PlayedCondition, PlayedThread, Wire, World, watch
from rallypoint.testing.simulation.operating.copies import CopiesWatch
from rallypoint.testing.simulation.store import SimulatedStore

_MEMORY = Path("/dev/shm")  # no disk is waited for
_LOG = f"{JOURNAL}-wal"
_KILL = acts.Over("it is killed")  # what it has written down is all that the next one knows


class Disk:
    """Where coordinators keep their journal: each finds the files as a kill has left them, with a part of a write that
    nobody has heard of.

    While it is `full`, nothing can be written but what is needed. `started`: how many coordinators began.
    """

    def __init__(self, seed: int = 0) -> None:
        self.full, self.started = False, 0
        self._random, self.root, self._journals = random.Random(f"the disk of {seed}"), "", list[Journal]()

    @property
    def state(self) -> ClusterState | None:
        """What the next coordinator finds."""
        return kept_state(Path(self._journals[-1].path).parent) if self._journals else None

    def open(self) -> Journal:
        """The journal of the next coordinator."""
        self.root = self.root or tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else None)
        (folder := Path(self.root, str(len(self._journals)))).mkdir()
        if self._journals:
            _copy(Path(self._journals[-1].path).parent, folder)
            self._tear(folder, folder.with_suffix(".torn"))
        self._journals.append(journal := Journal(str(folder)))
        journal._db.execute("pragma synchronous=off")  # what a kill leaves is played
        return journal

    def close(self) -> None:
        """Nobody needs it any more."""
        for journal in self._journals:
            journal.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def _tear(self, folder: Path, aside: Path) -> None:
        """Write what nobody may ever find, up to a byte before its end at most."""
        _copy(folder, aside)
        journal = Journal(str(aside))
        if (state := journal.load()) is not None:
            journal.save(msgspec.structs.replace(state, record=None, view=None, begun=False))
            before, after = ((place / _LOG).read_bytes() for place in (folder, aside))
            if after.startswith(before):  # else SQLite has begun the log anew
                (folder / _LOG).write_bytes(after[: self._cut(len(before), len(after))])
        journal.close()

    def _cut(self, before: int, after: int) -> int:
        return self._random.randrange(before, after)


def _copy(before: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in (JOURNAL, _LOG):  # what else there is SQLite makes anew
        shutil.copy(before / file, folder)


class _Owner:
    """What `Owner` is to real coordinators: it takes events as they come."""

    def __init__(self, node: Node, handle: Callable[[inbox.Event], None], tick_s: float) -> None:
        self._node, self._handle, self._tick_s = node, handle, tick_s
        self._inbox, self._busy = deque[inbox.Event](), False

    def start(self) -> None:
        self.put(inbox.Ticked())
        self._node.later(self._tick_s, self.start)

    def put(self, event: inbox.Event) -> None:
        self._inbox.append(event)
        while self._inbox and not self._busy and self._node.alive:
            self._busy = True
            self._handle(self._inbox.popleft())
            self._busy = False


class _Tasks:
    """The queue of a keeper of snapshots that is played: one task after the other, some of which take a while."""

    def __init__(self, node: Node, keeper: SnapshotKeeper) -> None:
        self._node, self._free, self._do, self._trips = node, 0.0, keeper.do, 0
        keeper.do = self.do  # type: ignore[method-assign]

    def do(self, act: acts.Act) -> None:
        self._trips = 2 * isinstance(act, acts.CommitSnapshot) + isinstance(act, FindSnapshot)  # to the store
        self._do(act)  # it puts its tasks here

    def put(self, task: tuple[str, Callable[[], None]]) -> None:
        world = self._node.world
        self._free = max(self._free, world.now + self._trips * (world.latency() if self._trips else 0.0))
        self._node.later(self._free - world.now, task[1])


@dataclass(frozen=True)
class _Channel:
    """What a channel is to real coordinators: the accepting end of a wire."""

    wire: Wire

    @property
    def connection(self) -> Any:
        return SimpleNamespace(close=lambda: self.wire.close(1))

    def send_message(self, message: Message) -> None:
        self.wire.send(1, message)

    def refuse(self, reason: str, *, final: bool = False) -> None:
        self.wire.cut()


@dataclass
class Outcome:
    """How the job ended. `paused`: before which step, in which generation. `copies`: of each shard, on servers."""

    finished: bool = False
    aborted: str = ""
    said: list[str] = field(default_factory=list)
    computed: list[tuple[str, int, int]] = field(default_factory=list)
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    paused: set[tuple[ViewNumber, int]] = field(default_factory=set)
    copies: CopiesWatch = field(default_factory=CopiesWatch)


def _at_once(log: Any, put: Callable[..., None], waiting: Queue[Any], *what: Any) -> None:
    """Let a log write this without its thread, and end."""
    log._thread = SimpleNamespace(ident=0)
    put(*what)
    waiting.put(None)
    log._run()


def check_recorded(job: SimulatedJob, folder: str, outcome: Outcome, *, whole: bool) -> None:
    """AssertionError unless the digests and events that are kept are the undisturbed job's. `whole`: all must be."""
    dense = [shard for shard in range(job.shards) if shard not in job.buffer_shards]
    digest: Any = lambda *names: b"".join(digest_of(job.floats.of(name)) for name in names)  # noqa: E731
    with KeptFingerprints(Path(folder)) as kept:
        for step in range(0, job.steps, job.recorded):
            model, versions, made = job.trajectory[step], kept.version(step), kept.contributions(step)
            gradients = [[job.gradient(shard, step, r, (*model, 0)) for shard in dense] for r in range(job.replicas)]
            wrong = [shard for shard, known in versions.items() if known != digest(model[shard])]
            wrong += [replica for replica, known in made.items() if known.digests != digest(*gradients[replica])]
            assert not wrong, f"other digests of step {step}: of shards {[*versions]} and replicas {[*made]} {wrong}"
            all_here = (len(made), len(versions)) == (job.replicas, job.shards * (step > 0))
            assert all_here or not whole, f"of step {step} digests of {[*versions]} and {[*made]} are kept"
    differ = [said for said in outcome.said if "see `rallypoint replay`" in said]
    assert not differ, f"digests differ: {differ}"
    events = [msgspec.json.decode(line) for line in (Path(folder) / "events.jsonl").read_bytes().splitlines()]
    done, skipped = ({one["step"] for one in events if one["type"] == kind} for kind in ("StepDone", "Skipped"))
    steps = zip(job.trajectory, job.trajectory[1:], strict=False)
    right = {step for step, (old, new) in enumerate(steps) if all(old[shard] == new[shard] for shard in dense)}
    logged = skipped <= right and (not whole or (done, skipped) == ({*range(job.steps)}, right))
    assert logged, f"steps {done} and {skipped} are logged as done and skipped: {right} are skipped"


class SimulatedCoordinator(CoordinatorService):
    """One coordinator process."""

    def __init__(
        self, world: World, job: SimulatedJob, terms: Terms, store: SimulatedStore, disk: Disk, outcome: Outcome,
        resume: Resumed | None = None,
    ) -> None:  # fmt: skip
        self.node, self.job, self.outcome = Node(world, COORDINATOR), job, outcome
        self._disk, self._checks = disk, Checks()
        terms = msgspec.structs.replace(terms, earlier=disk.started)
        disk.started += 1
        about = JoinInfo(snapshots=store.url, retention=store.retention)
        super().__init__(terms=terms, join_info=about, resume=resume, announced=self._tell)
        self._clock = lambda: world.now + 1.0  # 0 is no time to the machine
        self._journal_of = cast(Any, lambda folder: disk.open())
        self._owner_of = cast(Any, lambda *about: _Owner(self.node, *about))
        world.acceptors[COORDINATOR] = self
        self.start()

    @property
    def machine(self) -> ClusterMachine:
        return self._shell.machine

    def _open_keeper(self) -> SnapshotKeeper | None:
        thread = PlayedThread(self.node, (writer := self._persistence._writer)._run)
        writer._thread = cast(Any, SimpleNamespace(ident=0))
        writer._changed = cast(Any, PlayedCondition(thread))
        if self._terms.measure_links:  # a simulated job takes a few seconds: shards move soon, and often
            links = MeasuredLinks(LinkSpeeds(least=1.0), settle_s=0.0, rest_s=0.3)
            self.machine.course.links = links
        watch(self.machine, COORDINATOR)
        if self.job.recorded:
            root, put, played = self._disk.root, _at_once, cast(Any, self)
            played._fingerprints = SimpleNamespace(
                add=lambda *of: put(log := FingerprintLog(root, self.say), log.add, log._claims, *of)
            )
            played._log = SimpleNamespace(write=lambda it: put(log := EventLog(root), log.write, log._lines, it))
        decide = self._shell.handle
        self._shell.handle = lambda event, now: self._decided(decide(event, now))  # type: ignore[method-assign]
        if (keeper := super()._open_keeper()) is not None:
            keeper.stop()[0].join()
            keeper._tasks = cast(Any, _Tasks(self.node, keeper))
        return keeper

    def _listen(self, me: Any) -> Any:
        return SimpleNamespace(address="127.0.0.1:1")

    def accept(self, wire: Wire, hello: Hello) -> str:
        channel, put = _Channel(wire), self._owner.put
        wire.on_message[1] = lambda message: self._receive(channel, hello, message)
        wire.on_close[1] = lambda: put(inbox.Closed(channel, hello, "its connection ended", wire.ended))
        put(inbox.Opened(channel, hello))
        return ""

    def _receive(self, channel: _Channel, hello: Hello, message: Message) -> None:
        try:
            arrived = self._checks.checked(decode(encode(message)), hello)
        except ProtocolError as error:
            channel.wire.refuse(1, str(error))
            return
        assert message is not channel.wire.malformed, f"{hello.id} may say {message}"
        if isinstance(message, Report) and self._shell.members.get(hello.id) is channel:
            done = (hello.id, message.step, message.replica)
            if not (message.repeated and done in self.outcome.computed):
                self.outcome.computed.append(done)
        self._owner.put(inbox.Received(channel, hello, arrived))

    # ---- acts ----

    def _decided(self, todo: list[acts.Act]) -> list[acts.Act]:
        needed = any(isinstance(act, acts.Save) and act.needed for act in todo)
        self._journal._db.execute(f"pragma query_only={self._disk.full and not needed:d}")
        self.outcome.copies.look(self.machine)
        if (view := self.machine.view) is not None and view.orders.paused is not None:
            self.outcome.paused.add((view.generation, view.orders.paused))
        first = next((i for i, act in enumerate(todo) if isinstance(act, acts.Save)), -1)
        if first >= 0 and self._shell.last_word is None and self.node.world.spring("half said"):
            todo = todo[: self.node.world.random.randint(first + 1, len(todo))]
            todo.append(_KILL)
        return todo

    def _do(self, act: acts.Act) -> None:
        match act:
            case acts.Over() if act is _KILL:
                self.node.kill()
            case acts.SendMessage(connection=_Channel() as channel, message=Finished()):
                if self._shell.last_word is None:
                    self._check_dismissed(channel)
        if self.node.alive:
            super()._do(act)

    def _check_dismissed(self, channel: _Channel) -> None:
        """A server that may go was told to go, and the view has no shard on it."""
        server = next(name for name, of in self._shell.members.items() if of is channel)
        view, members = self.machine.view, self.machine.course.members
        assert view is not None
        assert server in members.leaving, f"{server} is dismissed, and was not told to go"
        held = server in view.holders and not self.job.stateful_workers
        assert not held, f"{server} is dismissed, and has shards in view {view.number}"

    def _tell(self, message: object) -> None:
        match message:
            case Say(text=text):
                text = text.replace(self._disk.root, "disk")  # a seed says the same each time
                self.outcome.said.append(f"{self.node.world.now:.2f} {text}")
                self.node.world.tell(f"coordinator: {text}")
            case Metrics(step=step, values=values):
                self.outcome.evaluated.append((step, values["figure"]))
            case Finished():
                self.outcome.finished = True
            case Aborted(reason=reason):
                self.outcome.aborted = reason
