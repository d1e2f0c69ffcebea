"""What arrives at a worker: versions, states, rows, words, codec states, lost links."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from rallypoint.config import JobConfig
from rallypoint.core.cadence import TOGETHER
from rallypoint.core.layout import Entry, Layout, Shard
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Arriving, Evaluate, SlotMachine, ToWait, UploadFirst
from rallypoint.errors import NO_SNAPSHOT, JobAborted, ProtocolError, RallypointError
from rallypoint.net.frames import LATEST, NEWEST, SKIP, Header, Kind
from rallypoint.net.pool import bytes_of
from rallypoint.store.record import ShardRecord, read_state
from rallypoint.worker.exchange.links import Links, Receiver
from rallypoint.worker.exchange.locked import LockedShell, NarrowVector, Rewound, SlotMemory, memory_of
from rallypoint.worker.exchange.pushes import CodecStates, Encoder

# ---- What a version contains: parameters, or (AllReduce) the update for this worker's own optimizer ----

States = dict[int, ShardRecord]


class ServerState:
    """The servers hold the optimizer's state: a version is the parameters and nothing else."""

    records = False  # does `lands` do anything?

    def starts(self, shard: Shard) -> bool:
        """True if a worker can start from this shard's versions."""
        return True

    def skips(self, header: Header) -> bool:
        """True if this version only says that its step is skipped. Then it has no bytes."""
        return False

    def read(self, header: Header, data: bytearray, shard: Shard) -> ShardRecord:
        """Read a shard's whole state. Raises ProtocolError if it cannot be read."""
        raise ProtocolError(f"a state of shard {header.shard}, though this job's workers have none")

    def lands(self, shard: int, *, skips: bool = False, record: ShardRecord | None = None) -> None:
        """Record that a version of the shard, or its whole state, may land. Needs the exchange's lock."""

    def begin_install(self) -> None:
        """Begin to install what has landed. Needs the exchange's lock."""

    def take(self) -> tuple[States, bool]:
        """Return what is being installed: the shards' states, if all start from them; is the step skipped?"""
        return {}, False

    def rolled_back(self) -> None:
        """A new generation has begun: drop what has landed. Needs the exchange's lock."""

    def where_missing(self, view: View, step: int) -> str:
        """What a worker without a model waits for, as a phrase; "" for nothing special."""
        return ""


class ReplicatedState(ServerState):
    """Every worker holds the model and the optimizer's state: a version is the mean gradient, or a whole state."""

    records = True

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._states: States = {}  # of the version that all start from, filled as they land
        self._skipped: set[int] = set()  # shards whose landed version says that its step is skipped
        self._taken: tuple[States, bool] = ({}, False)

    def starts(self, shard: Shard) -> bool:
        return shard.role == "buffers"

    def skips(self, header: Header) -> bool:
        return bool(header.flags & SKIP)

    def read(self, header: Header, data: bytearray, shard: Shard) -> ShardRecord:
        return read_state(data, shard, header.step, self._config)

    def lands(self, shard: int, *, skips: bool = False, record: ShardRecord | None = None) -> None:
        (self._skipped.add if skips else self._skipped.discard)(shard)
        if record is not None:
            self._states[shard] = record

    def begin_install(self) -> None:
        self._taken, self._states = (self._states, bool(self._skipped)), {}

    def take(self) -> tuple[States, bool]:
        taken, self._taken = self._taken, ({}, False)
        return taken

    def rolled_back(self) -> None:
        self._states.clear()

    def where_missing(self, view: View, step: int) -> str:
        if step >= 0 or not view.uploader:
            return ""
        return "the model's state" + ("" if view.origin else f", which {view.uploader} uploads")


# ---- Pulls of rows of tables: the main thread waits for those of its batch; and pulls of whole versions ----

Asked = tuple[ViewNumber, str, int]  # the view, the primary asked, and the number of our connection to it


@dataclass(slots=True)
class RowPull:
    """Rows of some parts of tables: shard -> the payload that names the rows, and the size of the answer in bytes.

    With `newest` any version is accepted. Otherwise it must be `version`; `outdated` is set when a server does not keep
    that version any more. `own` has the shards whose own number of that version is another one.
    """

    number: int
    version: int
    newest: bool
    wanted: Mapping[int, tuple[memoryview, int]]
    got: dict[int, bytearray] = field(default_factory=dict)
    outdated: bool = False
    own: Mapping[int, int] = field(default_factory=dict)
    _asked: dict[int, Asked] = field(default_factory=dict)

    @classmethod
    def of(
        cls, number: int, machine: SlotMachine, wanted: Mapping[int, tuple[memoryview, int]], *, newest: bool
    ) -> RowPull:
        """A pull of rows as they are at the step in progress.

        With `newest` a newer version is accepted; a streaming job gets the newest.
        """
        version = machine.row_version
        return cls(number, LATEST if version is None else version, version is None or newest, wanted)

    @property
    def missing(self) -> list[int]:
        return [shard for shard in self.wanted if shard not in self.got]

    @property
    def over(self) -> bool:
        """True when there is nothing left to wait for."""
        return self.outdated or len(self.got) == len(self.wanted)

    def unasked(self, view: ViewNumber, homes: Mapping[int, str], connections: Mapping[str, int]) -> Iterator[int]:
        """The shards whose primary is connected and was not asked under this view and over this connection."""
        for shard in self.missing:
            home = homes[shard]
            if home in connections and self._asked.get(shard) != (view, home, connections[home]):
                yield shard

    def ask(self, shard: int, view: ViewNumber, home: str, connection: int) -> None:
        self._asked[shard] = (view, home, connection)

    def answered(self, shard: int, number: int, data: bytearray, *, outdated: bool) -> bool:
        """Record an answer. Returns False when it does not belong to this pull or has the wrong length."""
        if number != self.number or shard not in self.wanted or shard in self.got:
            return False
        if outdated:
            self.outdated = True
        elif len(data) == self.wanted[shard][1]:
            self.got[shard] = data
        else:
            return False
        return True

    def vector(self, layout: Layout) -> torch.Tensor:
        """The flat fp32 vector of a whole version that has come."""
        vector = torch.empty(layout.words, dtype=torch.float32, device="cpu")
        for place in map(layout.shards.__getitem__, self.wanted):
            vector[place.start : place.stop] = torch.frombuffer(self.got.pop(place.index), dtype=torch.float32)
        return vector


_NOTHING = memoryview(b"")


def unanswered(locked: LockedShell) -> str:
    """Why no server will answer what the main thread asks for; "": they will. Needs the lock."""
    if locked.shell.finished:
        return "the job is over: no server answers any more"
    # They wait for first weights of the thread that waits here
    return NO_SNAPSHOT if isinstance(locked.machine.next_action(), UploadFirst) else ""


class RowPulls:
    """One pull at a time. `_pull` is the pull in progress; the shell's lock guards it."""

    def __init__(self, locked: LockedShell, links: Links) -> None:
        self.in_micro = False  # the script is inside of ``with micro:``, which swallows Rewound. Main thread only.
        self._locked, self._links = locked, links
        self._pull: RowPull | None = None
        self._pulls = 0

    def pull(self, wanted: Mapping[int, tuple[memoryview, int]]) -> dict[int, bytearray]:
        """Return rows of tables as they are at the step in progress. Main thread only.

        `wanted` maps each shard to the payload of row numbers and the size of the answer in bytes. The answers are
        returned by shard. In an evaluation, and wherever else the script uses the model outside of ``with micro:``, a
        newer version is accepted; a streaming job gets the newest. Raises Rewound, inside of ``with micro:`` only, when
        what is being computed is stale, or when the servers no longer keep that step; JobAborted when the job is over.
        """
        machine = self._locked.machine
        unwinds = self.in_micro and machine.computing
        self._pulls += 1
        pull = RowPull.of(self._pulls, machine, wanted, newest=not unwinds)

        def describe() -> str:
            home = self._locked.shell.view.primary
            return f"rows of tables, step {machine.step}: {self._links.describe(pull.missing, home)}"

        if why := self._asked(pull, lambda: unanswered(self._locked), describe, stale=unwinds):
            raise JobAborted(why)
        if pull.outdated:
            raise Rewound
        if not machine.computing:  # an evaluation, which does nothing twice
            self._locked.progress.got_on()
        return pull.got

    def whole(self, version: int, shards: Iterable[Shard], goes_on: Callable[[], bool]) -> RowPull | None:
        """Pull all of these shards at a version that may not exist yet. Main thread only.

        `goes_on` is asked under the lock. Returns None once it says no, else the pull: with every shard's bytes, or
        `outdated` if no server keeps that version any more.
        """
        machine = self._locked.machine
        self._pulls += 1
        wanted = {shard.index: (_NOTHING, shard.nbytes) for shard in shards}
        cadence = machine.cadence if isinstance(machine, WorkerMachine) else TOGETHER
        own = {shard: cadence.updates_before(shard, version) for shard in wanted}
        pull = RowPull(self._pulls, version, False, wanted, own=own)

        def describe() -> str:
            if not machine.takes_part:
                return ""  # the version may not exist yet
            home = self._locked.shell.view.primary
            return f"version {version}, as servers have it: {self._links.describe(pull.missing, home)}"

        return None if self._asked(pull, lambda: "" if goes_on() else "it is given up", describe) else pull

    def _asked(
        self, pull: RowPull, stops: Callable[[], str], describe: Callable[[], str], *, stale: bool = False
    ) -> str:
        """Ask for all of it, and wait. Returns why it `stops` before, or "". `stale`: see `LockedShell.check`."""
        locked = self._locked
        with locked.changed:
            self._pull = pull
            try:
                while not pull.over:
                    locked.check(stale=stale)
                    if why := stops():
                        return why
                    for shard in self._unasked(pull):
                        self._ask(pull, shard)
                    locked.wait(
                        lambda: pull.over or (stale and locked.machine.rewound) or bool(stops() or self._unasked(pull)),
                        describe,
                    )
            finally:
                self._pull = None
        return ""

    def arrived(self, header: Header, data: bytearray) -> None:
        """Take rows that have arrived, or the answer that the version is not kept any more. Takes the lock."""
        with self._locked.changed:
            outdated = bool(header.flags & SKIP)
            if self._pull is not None and self._pull.answered(header.shard, header.base, data, outdated=outdated):
                self._locked.changed.notify_all()

    def _unasked(self, pull: RowPull) -> list[int]:
        shell = self._locked.shell
        return list(pull.unasked(shell.number, shell.view.primary, shell.links.connections))

    def _ask(self, pull: RowPull, shard: int) -> None:
        shell = self._locked.shell
        home = shell.view.primary[shard]
        pull.ask(shard, shell.number, home, shell.links.connections[home])
        payload = pull.wanted[shard][0]
        header = Header(
            Kind.PULL_ROWS, shell.number, shard=shard, step=pull.own.get(shard, pull.version), base=pull.number,
            length=len(payload), flags=NEWEST if pull.newest else 0,
        )  # fmt: skip
        if (link := self._links.get(home)) is not None:
            link.pull(header, payload)


class LeasedPull:
    """The version whose evaluation is leased to this worker: as its model holds it, or as the servers keep it.

    It is pulled beside the exchange buffer, which goes on with training. Main thread only.
    """

    def __init__(self, layout: Layout, locked: LockedShell, rows: RowPulls) -> None:
        self._layout, self._locked, self._rows = layout, locked, rows
        self._begun: tuple[ViewNumber, int] | None = None  # what is being evaluated: the generation and the version

    def expect(self, periods: Sequence[int]) -> None:
        """The script has evaluations, so often: nothing is computed before a view says how far."""
        with self._locked.changed:
            self._locked.shell.leased.periods = tuple(periods)

    def is_due(self, version: int) -> bool:
        """True if this worker is to evaluate that version before it computes that step."""
        with self._locked.changed:
            return self._locked.shell.leased.evaluates(self._locked.shell.view, version)

    def held(self, version: int) -> ViewNumber | None:
        """The generation of the version, if the model holds it and it is still to be evaluated; else None."""
        shell, machine = self._locked.shell, self._locked.machine
        with self._locked.changed:
            if shell.next_action() != Evaluate(version) or not version == machine.step == machine.reads:
                return None
            self._begun = shell.view.generation, version
            return shell.view.generation

    def begin(self, version: int) -> tuple[ViewNumber, torch.Tensor | None] | None:
        """Wait for the version. Returns the generation, and the version's flat fp32 vector.

        None: it is not to be evaluated here any more, or there is something else to do first. None in place of the
        vector: no server keeps that version.
        """
        shell = self._locked.shell
        generation = shell.view.generation

        def goes_on() -> bool:
            same = shell.view.generation == generation
            return same and not shell.over and shell.next_action() == Evaluate(version)

        pull = self._rows.whole(version, self._layout.shards, goes_on)
        if pull is None:
            return None
        self._begun = generation, version
        if pull.outdated:
            self.end()
            return generation, None
        return generation, pull.vector(self._layout)

    def check(self) -> None:
        """Raise Rewound if another worker is to evaluate the version by now, or a roll-back has made it stale."""
        self._locked.check(stale=False)
        view, begun = self._locked.shell.view, self._begun
        if begun is None or view.generation != begun[0] or not view.evaluates(self._locked.machine.me, begun[1]):
            raise Rewound

    def end(self) -> None:
        """The evaluation is over: this worker is not asked for it again."""
        assert self._begun is not None
        with self._locked.changed:
            self._locked.shell.leased.over(*self._begun)


# ---- Pulls of streamed parameters: words of shards at the step in progress, several at a time ----

_NUMBERS = 1 << 32  # of the header's field


@dataclass(frozen=True, slots=True)
class Range:
    """`count` words of a shard from its word `first` on; in the parameter they begin at word `at`."""

    shard: int
    first: int
    count: int
    at: int


def ranges_of(layout: Layout, entry: Entry) -> list[Range]:
    """The ranges of shards that a parameter is made of, in its order."""
    found = []
    for index in layout.shards_touching(entry.start, entry.stop):
        shard = layout.shards[index]
        first, last = max(entry.start, shard.start), min(entry.stop, shard.stop)
        found.append(Range(index, first - shard.start, last - first, first - entry.start))
    return found


@dataclass(eq=False, slots=True)
class PulledParameter:
    """One parameter that was asked for: 1-D fp32 `values`, complete when nothing is `missing`.

    With `newest` a newer version is accepted; else it must be `version`, in this generation.
    """

    version: int
    generation: ViewNumber
    newest: bool
    values: torch.Tensor
    missing: dict[int, Range]  # by number
    asked: dict[int, Asked] = field(default_factory=dict)
    outdated: bool = False

    @property
    def over(self) -> bool:
        """True when there is nothing left to wait for."""
        return self.outdated or not self.missing


class WordPulls:
    """Asks for parameters and receives them. The shell's lock guards `_open`, and each one's `missing` and `asked`."""

    def __init__(self, locked: LockedShell, links: Links, *, pinned: bool = False) -> None:
        self.nbytes = 0  # of parameters that have come
        self._locked, self._links, self._pinned = locked, links, pinned
        self._open: dict[int, PulledParameter] = {}  # by the number of each missing range
        self._numbers = itertools.count()
        self._awaited: PulledParameter | None = None

    def ask(self, ranges: Sequence[Range], *, newest: bool) -> PulledParameter:
        """Ask for a parameter as it is at the step in progress; with `newest`, or later. Does not wait."""
        values = memory_of(sum(part.count for part in ranges), pinned=self._pinned)
        with self._locked.changed:
            shell = self._locked.shell
            pulled = PulledParameter(max(0, shell.machine.step), shell.view.generation, newest, values, {})
            self._misses(pulled, ranges)
            self._ask_all(pulled)
        return pulled

    def _misses(self, pulled: PulledParameter, ranges: Iterable[Range]) -> None:
        for part in ranges:
            number = next(self._numbers) % _NUMBERS
            pulled.missing[number] = part
            self._open[number] = pulled

    def drop(self, pulled: PulledParameter) -> None:
        """Forget a parameter: what still comes of it is ignored."""
        with self._locked.changed:
            for number in pulled.missing:
                self._open.pop(number, None)
            pulled.missing.clear()

    def wait(self, pulled: PulledParameter, *, unwinds: bool) -> bool:
        """Wait until the parameter is here. Returns False if no server keeps that version any more, or has it yet.

        With `unwinds`, raises Rewound when what is being computed is stale. Raises JobAborted when the job is over, and
        the error of whatever has failed.
        """
        locked = self._locked
        with locked.changed:
            self._awaited = pulled
            try:
                while not pulled.over:
                    locked.check(stale=unwinds)
                    if self._is_stale(pulled):
                        return False
                    if why := unanswered(locked):
                        raise JobAborted(why)
                    self._ask_all(pulled)
                    locked.wait(lambda: self._goes_on(pulled, unwinds), lambda: self._where_missing(pulled))
            finally:
                self._awaited = None
        if unwinds and locked.machine.rewound:
            raise Rewound
        if not locked.machine.computing:  # an evaluation, which does nothing twice
            locked.progress.got_on()
        return not pulled.outdated

    def arriving(self, header: Header) -> memoryview | None:
        """Return where the words that a frame brings belong; None if nobody waits for them. Takes the lock.

        Raises ProtocolError for a frame that cannot be the answer.
        """
        with self._locked.changed:
            pulled = self._open.get(header.base)
            part = None if pulled is None else pulled.missing[header.base]
        if pulled is None or part is None:
            return None
        length = 0 if header.flags & SKIP else 4 * part.count
        if header.shard != part.shard or header.length != length:
            raise ProtocolError(f"{header.length} bytes of shard {header.shard}, and {length} were asked for")
        return bytes_of(pulled.values[part.at : part.at + part.count])[:length]

    def arrived(self, header: Header) -> None:
        """The words that `arriving` has given a place are here. Takes the lock."""
        with self._locked.changed:
            if (pulled := self._open.pop(header.base, None)) is None:
                return
            del pulled.missing[header.base]
            pulled.outdated = pulled.outdated or bool(header.flags & SKIP)
            self.nbytes += header.length
            if pulled is self._awaited and pulled.over:
                self._locked.changed.notify_all()

    def _goes_on(self, pulled: PulledParameter, unwinds: bool) -> bool:
        if pulled.over or (unwinds and self._locked.machine.rewound) or self._is_stale(pulled):
            return True
        return any(self._unasked(pulled)) or bool(unanswered(self._locked))

    def _is_stale(self, pulled: PulledParameter) -> bool:
        return not pulled.newest and pulled.generation != self._locked.shell.view.generation

    def _where_missing(self, pulled: PulledParameter) -> str:
        shards = {part.shard for part in pulled.missing.values()}
        home = self._locked.shell.view.primary
        return f"parameters of step {pulled.version}: {self._links.describe(shards, home)}"

    def _ask_all(self, pulled: PulledParameter) -> None:
        """Ask for what was not asked for under this view and over this connection. A lost request is repeated (I2): if
        any version is right, with new numbers and memory, as an answer of another version may be arriving."""
        shell = self._locked.shell
        if pulled.newest and any(number in pulled.asked for number, _, _ in self._unasked(pulled)):
            pulled.values = memory_of(len(pulled.values), pinned=self._pinned).copy_(pulled.values)
            lost = [(self._open.pop(number), pulled.missing.pop(number))[1] for number in list(pulled.missing)]
            self._misses(pulled, lost)
        for number, part, asked in list(self._unasked(pulled)):
            pulled.asked[number] = asked
            if (link := self._links.get(asked[1])) is not None:
                link.pull(Header(
                    Kind.PULL_WORDS, shell.number, shard=part.shard, replica=part.first, step=pulled.version,
                    base=number, wants=part.count, flags=NEWEST if pulled.newest else 0,
                ))  # fmt: skip

    def _unasked(self, pulled: PulledParameter) -> Iterator[tuple[int, Range, Asked]]:
        shell = self._locked.shell
        view, homes, connections = shell.number, shell.view.primary, shell.links.connections
        for number, part in pulled.missing.items():
            home = homes[part.shard]
            if home in connections:
                asked = view, home, connections[home]
                if pulled.asked.get(number) != asked:
                    yield number, part, asked


# ---- Handles what arrives. Called on the links' receiving threads ----

_CODEC_HEAD = 4096  # bytes beside the values that a codec may need for a small shard


class Arrivals(Receiver):
    """What arrives on all links of one exchange. It has no mutable field of its own: its parts guard theirs."""

    def __init__(
        self, layout: Layout, config: JobConfig, locked: LockedShell, memory: SlotMemory, encoder: Encoder,
        codec_states: CodecStates | None, optimizer: ServerState, pulls: tuple[RowPulls, WordPulls],
    ) -> None:  # fmt: skip
        self._layout, self._replicas, self._rounds = layout, config.replicas, config.rounds
        self._most_updates = config.rounds * max(1, config.clocks("parameters"))  # of one shard
        self._locked, self._memory, self._encoder = locked, memory, encoder
        self._codec_states, self._optimizer = codec_states, optimizer
        self._landing = memory.landing
        if isinstance(memory, NarrowVector):
            self.decode = memory.take  # type: ignore[method-assign]
        self._begins = frozenset(shard.index for shard in layout.shards if optimizer.starts(shard))
        rows, self._words = pulls
        self.rows = rows.arrived  # type: ignore[method-assign]
        self.words_arrived = self._words.arrived  # type: ignore[method-assign]
        streamed = {s.index for s in layout.shards if config.streamed and s.role == "parameters"}
        self._empty = memory.in_place | streamed  # the shards whose versions have no bytes
        self.landed = locked.landed  # type: ignore[method-assign]

    # ---- versions ----

    def arriving(self, header: Header, server: str) -> memoryview | None:
        shard, nbytes = self._shard(header), header.length
        whole = shard.slot_bytes
        skips = bool(header.flags) and self._optimizer.skips(header)
        empty = skips or shard.index in self._empty
        if header.codec == 0 and nbytes != (0 if empty else whole):
            raise ProtocolError(f"a version of {nbytes} bytes for shard {shard.index}, which has {whole}")
        if nbytes > 2 * whole + _CODEC_HEAD:
            raise ProtocolError(f"an encoded version of {nbytes} bytes for shard {shard.index}: no codec needs so many")
        replica = self._check_version(header)
        event = Arriving(shard.index, header.step, header.view, replica, header.base, whole=shard.index in self._begins)
        lands = partial(self._optimizer.lands, shard.index, skips=skips) if self._optimizer.records else None
        if not self._locked.arriving(event, server, lands):
            return None
        return memoryview(bytearray(nbytes)) if empty else self._landing(shard.index)

    def decode(self, shard: int, payload: memoryview) -> None:
        self._encoder.decode(payload, self._memory.words(shard))

    def state(self, header: Header, data: bytearray, server: str) -> None:
        shard = self._shard(header)
        self._check_version(header)
        record = self._optimizer.read(header, data, shard)
        event = Arriving(shard.index, header.step, header.view, begins=True)
        if self._locked.arriving(event, server, lambda: self._optimizer.lands(shard.index, record=record)):
            self._locked.landed(shard.index)

    def to_wait(self, replica: int, clock: int) -> None:
        if replica >= self._replicas:
            raise ProtocolError(f"the word to wait for replica {replica}: this job has {self._replicas}")
        self._locked.handle(ToWait(replica, clock))

    def words_arriving(self, header: Header) -> memoryview | None:
        self._shard(header)
        return self._words.arriving(header)

    # ---- codec states ----

    def check_codec_state(self, header: Header) -> None:
        self._codec_states_of(header).check(self._shard(header), header)

    def codec_state(self, header: Header, data: bytearray) -> None:
        states = self._codec_states_of(header)
        self._locked.set(lambda: states.arrived(header, data))

    def codec_state_taken(self, header: Header) -> None:
        states = self._codec_states_of(header)
        self._locked.set(lambda: states.taken(header.shard, header.replica))

    def _codec_states_of(self, header: Header) -> CodecStates:
        if self._codec_states is None:
            raise ProtocolError(f"a {header.kind.name} frame, though this job's codecs have no state")
        return self._codec_states

    # ---- links ----

    def link_up(self, server: Member) -> None:
        self._locked.apply(lambda: self._locked.shell.link_up(server.id))

    def link_lost(self, server: Member, error: RallypointError) -> None:
        # The server may refuse us only for now: this worker may have been given up and be admitted again
        if isinstance(error, ProtocolError):
            self._locked.fail(JobAborted(f"the link to server {server.id} is gone: {error}"))
        self._locked.apply(lambda: self._locked.shell.link_lost(server.id))

    def link_failed(self, server: Member, fault: Exception) -> None:
        self._locked.fail(JobAborted(f"the link to server {server.id} has failed: {fault!r}"))

    def _check_version(self, header: Header) -> int:
        """The replica that the version is for; 0: for all. ProtocolError for a version that the job cannot have: the
        worker would wait for the other shards' for ever."""
        replica = header.wants - 2 if header.wants else 0
        if header.step > self._most_updates or header.base > self._rounds or replica >= self._replicas:
            raise ProtocolError(
                f"version {header.step} of shard {header.shard}, for replica {replica}'s step {header.base}: "
                f"this job has {self._replicas} replicas and {self._rounds} rounds"
            )
        return replica

    def _shard(self, header: Header) -> Shard:
        if not 0 <= header.shard < len(self._layout.shards):
            raise ProtocolError(f"a {header.kind.name} frame for shard {header.shard}: not in this job's layout")
        return self._layout.shards[header.shard]
