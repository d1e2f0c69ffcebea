"""Pulls of rows of tables: the main thread asks for the rows of its batch and waits for them. And of whole versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rallypoint.core.cadence import TOGETHER
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.machine import SlotMachine
from rallypoint.core.worker.slots import Evaluate, Initialise
from rallypoint.errors import NO_SNAPSHOT, JobAborted
from rallypoint.net.frames import LATEST, NEWEST, SKIP, Header, Kind
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell, Rewound

# One pull of rows: which server was asked for what, and what has arrived. A lost request is sent again (I2).


Asked = tuple[ViewNumber, str, int]  # the view, the primary asked, and the number of our connection to it


@dataclass(slots=True)
class Pull:
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
    ) -> Pull:
        """A pull of rows as they are at the step in progress.

        With `newest` a newer version is accepted; a streaming job gets the newest.
        """
        version = machine.row_version
        return cls(number, LATEST if version is None else version, version is None or newest, wanted)

    @property
    def missing(self) -> list[int]:
        """The shards that have not answered yet."""
        return [shard for shard in self.wanted if shard not in self.got]

    @property
    def over(self) -> bool:
        """True when there is nothing left to wait for."""
        return self.outdated or len(self.got) == len(self.wanted)

    def version_of(self, shard: int) -> int:
        """The shard's own version that is wanted."""
        return self.own.get(shard, self.version)

    def unasked(self, view: ViewNumber, homes: Mapping[int, str], connections: Mapping[str, int]) -> Iterator[int]:
        """The shards whose primary is connected and was not asked under this view and over this connection."""
        for shard in self.missing:
            home = homes[shard]
            if home in connections and self._asked.get(shard) != (view, home, connections[home]):
                yield shard

    def ask(self, shard: int, view: ViewNumber, home: str, connection: int) -> None:
        """Record that the shard's primary is asked."""
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


_NOTHING = memoryview(b"")


class RowPulls:
    """One pull at a time. `_pull` is the pull in progress; the shell's lock guards it.

    Attributes:
        in_micro: the script is inside of ``with micro:``, which swallows Rewound. Main thread only.
    """

    def __init__(self, locked: LockedShell, links: Links) -> None:
        self.in_micro = False
        self._locked, self._links = locked, links
        self._pull: Pull | None = None
        self._pulls = 0

    def pull(self, wanted: Mapping[int, tuple[memoryview, int]]) -> dict[int, bytearray]:
        """Return rows of tables as they are at the step in progress. Main thread only.

        `wanted` maps each shard to the payload of row numbers and the size of the answer in bytes. The answers are
        returned by shard. In an evaluation, and wherever else the script uses the model outside of ``with micro:``, a
        newer version is accepted; a streaming job gets the newest. Raises Rewound, inside of ``with micro:`` only, when
        what is being computed is stale, or when the servers no longer keep that step; JobAborted when the job is over.
        """
        locked, shell, machine = self._locked, self._locked.shell, self._locked.machine
        unwinds = self.in_micro and machine.computing
        self._pulls += 1
        pull = Pull.of(self._pulls, machine, wanted, newest=not unwinds)
        with locked.changed:
            self._pull = pull
            try:
                while not pull.over:
                    locked.check(stale=unwinds)
                    if shell.finished:
                        raise JobAborted("the job is over: no server answers any more")
                    if isinstance(machine.next_action(), Initialise):
                        raise JobAborted(NO_SNAPSHOT)  # servers wait for first weights of the thread that waits here
                    for shard in self._unasked(pull):
                        self._ask(pull, shard)
                    locked.wait(
                        lambda: self._goes_on(pull, unwinds),
                        lambda: self._where_missing(pull),
                    )
            finally:
                self._pull = None
        if pull.outdated:
            raise Rewound
        if not machine.computing:  # an evaluation, which does nothing twice
            locked.progress.got_on()
        return pull.got

    def whole(self, version: int, shards: Iterable[Shard], goes_on: Callable[[], bool]) -> Pull | None:
        """Pull all of these shards at a version that may not exist yet. Main thread only.

        `goes_on` is asked under the lock. Returns None once it says no, else the pull: with every shard's bytes, or
        `outdated` if no server keeps that version any more.
        """
        locked, machine = self._locked, self._locked.machine
        self._pulls += 1
        wanted = {shard.index: (_NOTHING, shard.nbytes) for shard in shards}
        cadence = machine.cadence if isinstance(machine, WorkerMachine) else TOGETHER
        own = {shard: cadence.updates_before(shard, version) for shard in wanted}
        pull = Pull(self._pulls, version, False, wanted, own=own)
        with locked.changed:
            self._pull = pull
            try:
                while not pull.over:
                    locked.check(stale=False)
                    if not goes_on():
                        return None
                    for shard in self._unasked(pull):
                        self._ask(pull, shard)
                    locked.wait(
                        lambda: pull.over or not goes_on() or bool(self._unasked(pull)),
                        lambda: self._where_whole_misses(pull),
                    )
            finally:
                self._pull = None
        return pull

    def arrived(self, header: Header, data: bytearray) -> None:
        """Take rows that have arrived, or the answer that the version is not kept any more. Takes the lock."""
        with self._locked.changed:
            outdated = bool(header.flags & SKIP)
            if self._pull is not None and self._pull.answered(header.shard, header.base, data, outdated=outdated):
                self._locked.changed.notify_all()

    def _goes_on(self, pull: Pull, unwinds: bool) -> bool:
        shell = self._locked.shell
        if pull.over or (unwinds and shell.machine.rewound) or shell.finished or self._unasked(pull):
            return True
        return isinstance(shell.machine.next_action(), Initialise)

    def _where_missing(self, pull: Pull) -> str:
        home = self._locked.shell.view.primary
        return f"rows of tables, step {self._locked.machine.step}: {self._links.describe(pull.missing, home)}"

    def _where_whole_misses(self, pull: Pull) -> str:
        machine = self._locked.machine
        if not machine.takes_part:
            return ""  # the version may not exist yet
        home = self._locked.shell.view.primary
        return f"version {pull.version}, to be evaluated: {self._links.describe(pull.missing, home)}"

    def _unasked(self, pull: Pull) -> list[int]:
        shell = self._locked.shell
        return list(pull.unasked(shell.number, shell.view.primary, shell.links.connections))

    def _ask(self, pull: Pull, shard: int) -> None:
        shell = self._locked.shell
        home = shell.view.primary[shard]
        pull.ask(shard, shell.number, home, shell.links.connections[home])
        payload = pull.wanted[shard][0]
        header = Header(
            Kind.PULL_ROWS, shell.number, shard=shard, step=pull.version_of(shard), base=pull.number,
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
        vector = torch.empty(self._layout.words, dtype=torch.float32, device="cpu")
        for shard in self._layout.shards:
            vector[shard.start : shard.stop] = torch.frombuffer(pull.got.pop(shard.index), dtype=torch.float32)
        return generation, vector

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
