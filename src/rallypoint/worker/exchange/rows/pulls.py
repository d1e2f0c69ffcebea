"""Pulls of rows of tables: the main thread asks for the rows of its batch and waits for them."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.errors import JobAborted
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell, Rewound
from rallypoint.worker.exchange.rows.pull import Pull


class RowPulls:
    """One pull at a time. `_pull` is the pull in progress; the shell's lock guards it."""

    def __init__(self, locked: LockedShell, links: Links) -> None:
        self._locked, self._links = locked, links
        self._pull: Pull | None = None
        self._pulls = 0

    def pull(self, wanted: Mapping[int, tuple[memoryview, int]]) -> dict[int, bytearray]:
        """Return rows of tables as they are at the step in progress. Main thread only.

        `wanted` maps each shard to the payload of row numbers and the size of the answer in bytes. The answers are
        returned by shard. During an evaluation a newer version is accepted; a streaming job gets the newest. Raises
        Rewound when what is being computed is stale, or when the servers no longer keep that step;
        JobAborted when the job is over.
        """
        locked, shell, machine = self._locked, self._locked.shell, self._locked.machine
        self._pulls += 1
        pull = Pull.of(self._pulls, machine, wanted)
        with locked.changed:
            self._pull = pull
            try:
                while not pull.over:
                    locked.check()
                    if shell.finished:
                        raise JobAborted("the job is over: no server answers any more")
                    for shard in self._unasked(pull):
                        self._ask(pull, shard)
                    locked.wait(
                        lambda: pull.over or machine.rewound or shell.finished or bool(self._unasked(pull)),
                        lambda: self._where_missing(pull),
                    )
            finally:
                self._pull = None
        if pull.outdated:
            raise Rewound
        if not machine.computing:  # an evaluation, which does nothing twice
            locked.progress.got_on()
        return pull.got

    def arrived(self, header: Header, data: bytearray) -> None:
        """Take rows that have arrived, or the answer that the version is not kept any more. Takes the lock."""
        with self._locked.changed:
            outdated = bool(header.flags & SKIP)
            if self._pull is not None and self._pull.answered(header.shard, header.base, data, outdated=outdated):
                self._locked.changed.notify_all()

    def _where_missing(self, pull: Pull) -> str:
        home = self._locked.shell.view.primary
        return f"rows of tables, step {self._locked.machine.step}: {self._links.describe(pull.missing, home)}"

    def _unasked(self, pull: Pull) -> list[int]:
        shell = self._locked.shell
        return list(pull.unasked(shell.number, shell.view.primary, shell.links.connections))

    def _ask(self, pull: Pull, shard: int) -> None:
        shell = self._locked.shell
        home = shell.view.primary[shard]
        pull.ask(shard, shell.number, home, shell.links.connections[home])
        payload = pull.wanted[shard][0]
        header = Header(
            Kind.PULL_ROWS, shell.number, shard=shard, step=pull.version, base=pull.number, length=len(payload),
            flags=NEWEST if pull.newest else 0,
        )  # fmt: skip
        if (link := self._links.get(home)) is not None:
            link.pull(header, payload)
