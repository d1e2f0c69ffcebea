"""Pulls of streamed parameters: words of shards at the step in progress, several at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rallypoint.core.layout import Entry, Layout
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.slots import Initialise
from rallypoint.errors import NO_SNAPSHOT, JobAborted, ProtocolError
from rallypoint.net.frames import NEWEST, SKIP, Header, Kind
from rallypoint.net.pool import bytes_of
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.locked import LockedShell, Rewound
from rallypoint.worker.streamed.memory import memory_of

_NUMBERS = 1 << 32  # of the header's field

Asked = tuple[ViewNumber, str, int]  # the view, the primary asked, and the number of our connection to it


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
class Pulled:
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
    """Asks for parameters and receives them. The shell's lock guards `_open`; of each `Pulled`, `missing` and `asked`.

    Attributes:
        nbytes: of parameters that have come.
    """

    def __init__(self, locked: LockedShell, links: Links, *, pinned: bool = False) -> None:
        self.nbytes = 0
        self._locked, self._links, self._pinned = locked, links, pinned
        self._open: dict[int, Pulled] = {}  # by the number of each missing range
        self._numbers = itertools.count()
        self._awaited: Pulled | None = None

    def ask(self, ranges: Sequence[Range], *, newest: bool) -> Pulled:
        """Ask for a parameter as it is at the step in progress; with `newest`, or later. Does not wait."""
        values = memory_of(sum(part.count for part in ranges), pinned=self._pinned)
        with self._locked.changed:
            shell = self._locked.shell
            pulled = Pulled(max(0, shell.machine.step), shell.view.generation, newest, values, {})
            for part in ranges:
                number = next(self._numbers) % _NUMBERS
                pulled.missing[number] = part
                self._open[number] = pulled
            self._ask_all(pulled)
        return pulled

    def drop(self, pulled: Pulled) -> None:
        """Forget a parameter: what still comes of it is ignored."""
        with self._locked.changed:
            for number in pulled.missing:
                self._open.pop(number, None)
            pulled.missing.clear()

    def wait(self, pulled: Pulled, *, unwinds: bool) -> bool:
        """Wait until the parameter is here. Returns False if no server keeps that version any more, or has it yet.

        With `unwinds`, raises Rewound when what is being computed is stale. Raises JobAborted when the job is over, and
        the error of whatever has failed.
        """
        locked, shell = self._locked, self._locked.shell
        with locked.changed:
            self._awaited = pulled
            try:
                while not pulled.over:
                    locked.check(stale=unwinds)
                    if self._is_stale(pulled):
                        return False
                    if shell.finished:
                        raise JobAborted("the job is over: no server answers any more")
                    if isinstance(locked.machine.next_action(), Initialise):
                        raise JobAborted(NO_SNAPSHOT)  # servers wait for first weights of the thread that waits here
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

    def _goes_on(self, pulled: Pulled, unwinds: bool) -> bool:
        shell = self._locked.shell
        if pulled.over or (unwinds and shell.machine.rewound) or shell.finished or self._is_stale(pulled):
            return True
        if any(self._unasked(pulled)):
            return True
        return isinstance(shell.machine.next_action(), Initialise)

    def _is_stale(self, pulled: Pulled) -> bool:
        return not pulled.newest and pulled.generation != self._locked.shell.view.generation

    def _where_missing(self, pulled: Pulled) -> str:
        shards = {part.shard for part in pulled.missing.values()}
        home = self._locked.shell.view.primary
        return f"parameters of step {pulled.version}: {self._links.describe(shards, home)}"

    def _ask_all(self, pulled: Pulled) -> None:
        """Ask for what was not asked for under this view and over this connection. A lost request is repeated (I2)."""
        shell = self._locked.shell
        for number, part, asked in list(self._unasked(pulled)):
            pulled.asked[number] = asked
            if (link := self._links.get(asked[1])) is not None:
                link.pull(Header(
                    Kind.PULL_WORDS, shell.number, shard=part.shard, replica=part.first, step=pulled.version,
                    base=number, wants=part.count, flags=NEWEST if pulled.newest else 0,
                ))  # fmt: skip

    def _unasked(self, pulled: Pulled) -> Iterator[tuple[int, Range, Asked]]:
        shell = self._locked.shell
        view, homes, connections = shell.number, shell.view.primary, shell.links.connections
        for number, part in pulled.missing.items():
            home = homes[part.shard]
            if home in connections:
                asked = view, home, connections[home]
                if pulled.asked.get(number) != asked:
                    yield number, part, asked
