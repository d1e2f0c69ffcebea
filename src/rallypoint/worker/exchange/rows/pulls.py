"""Pulls of rows of tables: the main thread asks for the rows of its batch and waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rallypoint.core.cadence import TOGETHER
from rallypoint.core.layout import Shard
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Initialise
from rallypoint.errors import NO_SNAPSHOT, JobAborted
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell, Rewound
from rallypoint.worker.exchange.rows.pull import Pull

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

    @property
    def me(self) -> str:
        """This worker's name."""
        return self._locked.machine.me

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
