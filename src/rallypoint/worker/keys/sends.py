"""What leaves a store's worker: frames of the machine's effects, and the values that may have to be sent again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint.core import keys as machine
from rallypoint.core.protocol import Report
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.frames import LATEST, NEWEST, Header, Kind, wants
from rallypoint.worker.exchange.links import Receiver
from rallypoint.worker.keys.answers import Answers


class KeyLink(Protocol):
    """A link to one server: see `worker.exchange.link.ServerLink`."""

    def push(self, header: Header, payload: memoryview, sent: Callable[[], None]) -> None: ...

    def want(self, shard: int, replica: int, number: ViewNumber) -> None: ...

    def pull(self, header: Header, payload: memoryview | None = None) -> None: ...


class KeyLinks(Protocol):
    """The links to servers: see `worker.exchange.links.Links`."""

    def get(self, server: str) -> KeyLink | None: ...

    def open(self, servers: Iterable[Member], receiver: Receiver, view: View) -> None: ...

    def end(self, servers: Iterable[str]) -> None: ...

    def close(self) -> None: ...

    def unreachable(self) -> dict[str, float]: ...


@dataclass(slots=True)
class Sends:
    """Runs effects on links. The exchange's lock, `changed`, guards the fields; `run_all` is called without it.

    Each value is memory of its own, which nobody writes to again: so it may be sent twice, and by two threads.

    Attributes:
        initial: by shard, a first value that may be needed (again).
        pushes: by shard and contributor, the step and bytes of a push that is not known to count.
        counted: by contributor, the last step that counts in some key.
        outgoing: effects that nobody has run yet, in the order of the machine.
        sending: held by the thread that runs effects. Above the exchange's lock.
    """

    keys: machine.KeyMachine
    links: KeyLinks
    answers: Answers
    changed: threading.Condition
    initial: dict[int, memoryview] = field(default_factory=dict)
    pushes: dict[tuple[int, int], tuple[int, memoryview]] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    outgoing: deque[machine.Effect] = field(default_factory=deque)
    sending: threading.Lock = field(default_factory=threading.Lock)

    def clear(self, *, keep_first: bool) -> None:
        """A new generation: nothing of the one before is sent any more, except first values if they are needed."""
        self.outgoing.clear()
        if not keep_first:
            self.initial.clear()
        self.pushes.clear()
        self.counted.clear()

    def forget_counted(self) -> list[Report]:
        """Forget what need not be sent again. Returns reports of steps that count, for the coordinator."""
        lines, reports, view = self.keys.lines, list[Report](), self.keys.view
        for shard in [shard for shard in self.initial if not lines[shard].first]:
            del self.initial[shard]
        for shard, contributor in [(s, c) for s, c in self.pushes if c not in lines[s].pushes]:
            del self.pushes[shard, contributor]
            step = (self.keys.next_step(shard, contributor) or 0) - 1
            if view is not None and step > self.counted.get(contributor, -1):
                self.counted[contributor] = step
                reports.append(Report(step, contributor, 0.0, 1.0, 1, generation=view.generation))
        return reports

    def run_all(self) -> None:
        """Send what is to leave. If another thread does, it sends this too: of requests a server keeps the newest only,
        so they have to leave in the order in which the machine decided."""
        while self.outgoing and self.sending.acquire(blocking=False):
            try:
                while (effect := self._next()) is not None:
                    self.run(effect)
            finally:
                self.sending.release()

    def _next(self) -> machine.Effect | None:
        with self.changed:
            return self.outgoing.popleft() if self.outgoing else None

    def run(self, effect: machine.Effect) -> None:
        """Send what the machine says."""
        if (link := self.links.get(effect.server)) is not None:  # else it has ended: a new one sends this again
            self._send(link, effect, Header(Kind.PUSH, self.keys.number, shard=effect.shard))

    def _send(self, link: KeyLink, effect: machine.Effect, header: Header) -> None:
        match effect:
            case machine.SendInitial(shard=shard):
                if (data := self.initial.get(shard)) is not None:
                    link.push(header._replace(kind=Kind.INITIAL, length=len(data)), data, sent=_nothing)
            case machine.SendPush(shard=shard, contributor=contributor, step=step):
                at, data = self.pushes.get((shard, contributor), (-1, None))
                if data is not None and at == step:  # else it counts by now, or is of an older generation
                    header = header._replace(replica=contributor, step=step, weight=1.0, length=len(data))
                    if self.keys.by_clocks:
                        known = max(0, self.keys.lines[shard].version)
                        header = header._replace(wants=wants(contributor), base=known)
                    link.push(header, data, sent=_nothing)
            case machine.SendWant(shard=shard, contributor=contributor):
                link.want(shard, contributor, self.keys.number)
            case machine.SendPull(number=number, version=version):
                newest = version == machine.NEWEST
                rows = self.answers.rows_of(number)
                header = header._replace(kind=Kind.PULL_ROWS, base=number, flags=NEWEST if newest else 0)
                link.pull(header._replace(step=LATEST if newest else version, length=len(rows)), rows)


def _nothing() -> None:
    """A value's memory is not used again."""
