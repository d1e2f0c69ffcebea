"""The client's machine of a key-value store: what to send to which server, and again after a death.

A key is one or more shards. Each shard goes on by itself, so the machine keeps a `Line` for each, and names nothing
else. The caller makes one call at a time (one lock), and runs the effects that each call returns, in order.

Everything that is said may be said again (I2): a push is named by (shard, step, contributor), a request by its number.
So recovery is one rule: when a link ends, or a shard moves, what was sent there counts as not sent. A worker that was
given up and came back sends its pushes again, too: servers have dropped what came in between.

How a push is known to count, durably (I4):

    rounds (rp.Sync)     version `step` + 1 of the shard is published: ask for that version (PULL_ROWS), which waits
    streaming            the contributor's clock is above `step`: ask for its parameters (WANT), with the push itself

Of either request a server keeps only the newest of one worker for a shard, so a line has one of each on its way.

A part of a table is a shard like another. A pull asks for some of its rows, so its answer is nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rallypoint.core.view import View, ViewNumber

NEWEST = -1  # in place of a version: whatever is published
LAST = 1 << 60  # a step of which the newest assignment counts
OWN = 0  # the number of the machine's own requests; those of the caller have higher ones


class SendInitial(msgspec.Struct, frozen=True):
    """Send the first value of the shard."""

    shard: int
    server: str


class SendPush(msgspec.Struct, frozen=True):
    """Send the contributor's push of `step`."""

    shard: int
    contributor: int
    step: int
    server: str


class SendWant(msgspec.Struct, frozen=True):
    """Ask how far this contributor's pushes have got (streaming)."""

    shard: int
    contributor: int
    server: str


class SendPull(msgspec.Struct, frozen=True):
    """Ask for the shard's value at `version` (NEWEST: at any), under this number."""

    shard: int
    number: int
    version: int
    server: str


Effect = SendInitial | SendPush | SendWant | SendPull


@dataclass(slots=True)
class Line:
    """What this process knows of one shard, and what it waits for there.

    Attributes:
        version: the newest version that is known to be published; -1: none.
        clocks: contributor -> its next step, as far as known here (streaming).
        first: this process keeps a first value, in case it is needed (again).
        pushes: contributor -> the step that it has pushed, and of which it is not known whether it counts.
        needs: the number of each request of the caller -> the version that it waits for.
        watched: contributors whose clocks the caller wants to know (streaming).
        followed: the caller wants to hear of the next version (rounds).
    """

    version: int = -1
    clocks: dict[int, int] = field(default_factory=dict)
    first: bool = False
    pushes: dict[int, int] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)
    watched: set[int] = field(default_factory=set)
    followed: bool = False
    begun: bool = False  # the first value is sent
    sent: set[int] = field(default_factory=set)  # contributors whose push is sent
    asked: tuple[int, int] | None = None  # the number and version of the pull on its way
    wanted: int | None = None  # the contributor of the want on its way
    blocked: set[int] = field(default_factory=set)  # contributors that the policy makes wait

    def forget(self) -> None:
        """Nothing of what was sent can be counted on."""
        self.begun, self.asked, self.wanted = False, None, None
        self.sent.clear()
        self.blocked.clear()

    def ask_again(self, contributors: set[int]) -> None:
        """These are this worker's from now on: what is known of their clocks is from before others pushed for them."""
        for contributor in contributors & self.clocks.keys():
            del self.clocks[contributor]
            if contributor not in self.pushes:  # (else the push asks)
                self.watched.add(contributor)

    def order(self, contributor: int) -> tuple[int, int]:
        """Whose clock to ask for first: under bounded staleness the one that is furthest behind waits for nobody."""
        return self.pushes.get(contributor, self.clocks.get(contributor, 0)), contributor


@dataclass(slots=True)
class KeyMachine:
    """The machine of one worker `me`. `by_clocks`: each contributor has a clock (streaming). `tables`: the shards that
    are parts of tables.

    Attributes:
        view: the view in force; None before the first.
        links: the servers to which a link is up.
    """

    me: str
    shards: int
    by_clocks: bool = False
    tables: frozenset[int] = frozenset()
    view: View | None = None
    links: set[str] = field(default_factory=set)
    lines: list[Line] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = [Line() for _ in range(self.shards)]

    @property
    def number(self) -> ViewNumber:
        """The number of the view in force; 0.0 before the first."""
        return ViewNumber() if self.view is None else self.view.number

    @property
    def contributors(self) -> tuple[int, ...]:
        """The contributors that the view gives this worker, ascending."""
        return () if self.view is None else tuple(sorted(self.view.replicas_of(self.me, LAST)))

    def next_step(self, shard: int, contributor: int) -> int | None:
        """The step of this contributor's next push to the shard; None while it is not known."""
        line = self.lines[shard]
        if self.by_clocks:
            return line.clocks.get(contributor)
        return line.version if line.version >= 0 else None

    def next_of(self, shards: Iterable[int], contributor: int) -> int | None:
        """The step of this contributor's next push to a key of these shards; None while it is not known."""
        steps = [self.next_step(shard, contributor) for shard in shards]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == len(steps) else None

    def counts(self, shards: Iterable[int], contributor: int, step: int | None = None) -> bool:
        """True if no push of this contributor to the shards is on its way; with `step`, none up to that one."""
        on_way = [self.lines[shard].pushes.get(contributor) for shard in shards]
        return all(at is None or (step is not None and at > step) for at in on_way)

    def unfinished(self) -> list[tuple[int, int, int]]:
        """The pushes that servers take from this worker and that are not known to count: (shard, contributor, step)."""
        return [
            (shard, one, step) for shard, line in enumerate(self.lines) for one, step in line.pushes.items()
            if self._takes(one)
        ]  # fmt: skip

    # ---- what the caller wants ----

    def begin(self, shard: int) -> list[Effect]:
        """The caller has a first value for the shard."""
        self.lines[shard].first = self.lines[shard].version <= 0  # at 0 it may be lost yet: see `adopt`
        return self._advance([shard])

    def push(self, shard: int, contributor: int, step: int) -> list[Effect]:
        """The caller pushes. The push before it, of the same contributor, must count already."""
        line = self.lines[shard]
        assert contributor not in line.pushes, f"two pushes of contributor {contributor} to shard {shard} at once"
        at = self.next_step(shard, contributor)
        if at is not None and step < at:
            return []  # it counts already
        line.pushes[contributor] = step
        line.blocked.clear()
        return self._advance([shard])

    def need(self, shard: int, number: int, version: int) -> list[Effect]:
        """The caller wants the shard's value, at this `version` or a later one, under a number that is new."""
        self.lines[shard].needs[number] = version
        return self._advance([shard])

    def watch(self, shards: Iterable[int], contributors: Iterable[int]) -> list[Effect]:
        """The caller wants to know how far these contributors are, or (rounds) when the shards go on."""
        shards = list(shards)
        for shard in shards:
            line = self.lines[shard]
            line.followed = True
            if self.by_clocks:
                line.watched |= {one for one in contributors if one not in line.pushes or not self._takes(one)}
        return self._advance(shards)

    # ---- what happens ----

    def adopt(self, view: View) -> list[Effect]:
        """A newer view is in force. In a new generation all that was wanted is forgotten: the caller says it again.

        Only first values are kept, if there is no snapshot from which the generation begins.
        """
        before, self.view = self.view, view
        if before is not None and before.generation != view.generation:
            self.lines = [Line(first=line.first and not view.origin) for line in self.lines]
        elif before is not None:
            for shard in view.moved(before):
                self.lines[shard].forget()
            if _standing(before, self.me) != _standing(view, self.me):
                taken = _standing(view, self.me)[1]
                for line in self.lines:
                    line.sent.clear()
                    line.ask_again(set(taken) - set(_standing(before, self.me)[1]))
        return self._advance(range(self.shards))

    def link_up(self, server: str) -> list[Effect]:
        self.links.add(server)
        return self._advance(self._at(server))

    def link_lost(self, server: str) -> list[Effect]:
        self.links.discard(server)
        for shard in self._at(server):
            self.lines[shard].forget()
        return []

    def replied(self, shard: int, contributor: int, clock: int, version: int) -> list[Effect]:
        """A server answers a want: the contributor's next step is `clock`, in what is published (streaming)."""
        line = self.lines[shard]
        self._published(line, version)
        line.clocks[contributor] = max(clock, line.clocks.get(contributor, 0))
        line.watched.discard(contributor)
        line.blocked.clear()
        if contributor in line.pushes:
            line.sent.discard(contributor)  # if it does not count: it was lost with a primary, or crossed this answer
            if line.pushes[contributor] < clock:
                del line.pushes[contributor]
        if line.wanted == contributor:
            line.wanted = None
        return self._advance([shard])

    def to_wait(self, contributor: int) -> list[Effect]:
        """A server says that the policy makes this contributor wait."""
        shards = [index for index, line in enumerate(self.lines) if line.wanted == contributor]
        for shard in shards:
            self.lines[shard].blocked.add(contributor)
        return self._advance(shards)

    def answered(self, shard: int, number: int, version: int, *, kept: bool = True) -> tuple[list[int], list[Effect]]:
        """A server answers a pull with the value at `version`; `kept` is False if it does not keep that any more.

        Returns the numbers of the caller's requests that this answers, and the effects.
        """
        line = self.lines[shard]
        self._published(line, version if kept else version + 1)
        if line.asked is not None and line.asked[0] == number:
            line.asked = None
        done: list[int] = []
        if kept:
            # A request for the newest value is answered by its own answer only; under rounds one for a version by that
            # version: who computes a dead worker's push again reads what the dead worker has read
            least = 0 if self.by_clocks else version
            done = [
                n for n, at in line.needs.items()
                if at <= version and (n == number or (shard not in self.tables and at >= least))
            ]  # fmt: skip
        elif number in line.needs:
            line.needs[number] = NEWEST
        for one in done:
            del line.needs[one]
        return done, self._advance([shard])

    # ---- inside ----

    def _at(self, server: str) -> list[int]:
        home: Mapping[int, str] = {} if self.view is None else self.view.primary
        return [shard for shard in range(self.shards) if home.get(shard) == server]

    def _published(self, line: Line, version: int) -> None:
        """The shard has this version."""
        if version > line.version:
            line.version, line.followed = version, False
        if line.version > 0:
            line.first = False
        if not self.by_clocks:
            for contributor in [c for c, step in line.pushes.items() if step < line.version]:
                del line.pushes[contributor]
                line.sent.discard(contributor)

    def _advance(self, shards: Iterable[int]) -> list[Effect]:
        """Send what these shards' lines wait for, as far as it is not on its way."""
        effects: list[Effect] = []
        for shard in shards:
            home = "" if self.view is None else self.view.primary.get(shard, "")
            if home in self.links:
                effects += self._send(shard, self.lines[shard], home)
        return effects

    def _send(self, shard: int, line: Line, home: str) -> list[Effect]:
        effects: list[Effect] = []
        if line.first and line.version < 0 and not line.begun and not (self.view and self.view.origin):
            line.begun = True
            effects.append(SendInitial(shard, home))
        for contributor in sorted(line.pushes.keys() - line.sent if line.version >= 0 else ()):
            if not self._takes(contributor):
                continue  # servers would drop it; who has the contributor pushes
            line.sent.add(contributor)
            effects.append(SendPush(shard, contributor, line.pushes[contributor], home))
            if self.by_clocks:
                line.wanted = contributor  # the push asks, in place of what asked before it
        if self.by_clocks and (asked := self._next_want(line)) is not None:
            line.wanted = asked
            effects.append(SendWant(shard, asked, home))
        if (need := self._next_need(line)) is not None and need != line.asked:
            line.asked = need
            effects.append(SendPull(shard, *need, home))
        return effects

    def _next_want(self, line: Line) -> int | None:
        """The contributor to ask for; None if the want on its way is right."""
        pushed = {contributor for contributor in line.pushes if self._takes(contributor)}
        open_ = sorted(pushed | line.watched, key=line.order)
        if not open_ or (line.wanted is not None and line.wanted not in line.blocked):
            return None
        pick = next((contributor for contributor in open_ if contributor not in line.blocked), open_[0])
        return pick if pick != line.wanted else None

    def _next_need(self, line: Line) -> tuple[int, int] | None:
        """The number and version to ask for: first what is there already, the oldest question first."""
        needs = [(version, number) for number, version in line.needs.items()]
        if line.version < 0 and (line.first or line.pushes):
            needs.append((NEWEST, OWN))
        elif not self.by_clocks and line.pushes:
            needs.append((min(line.pushes.values()) + 1, OWN))
        elif not self.by_clocks and line.followed:
            needs.append((line.version + 1 if line.version >= 0 else NEWEST, OWN))
        if not needs:
            return None
        # A thread that pulls the newest value again and again is not to keep others waiting for a version that exists
        version, number = min(needs, key=lambda need: (max(need[0], line.version), need[1], need[0]))
        return number, version

    def _takes(self, contributor: int) -> bool:
        """True if servers take this contributor's pushes from this worker."""
        return self.view is not None and self.view.takes(self.me, [contributor])

    def validate(self) -> None:
        """Raise AssertionError, with a sentence, if the machine is in a state that it can never reach."""
        for shard, line in enumerate(self.lines):
            linked = self.view is not None and self.view.primary.get(shard) in self.links
            assert line.sent <= line.pushes.keys(), f"shard {shard}: sent {line.sent}, which nobody pushes"
            assert not (line.first and line.version > 0), f"shard {shard} may begin, at version {line.version}"
            assert line.asked is None or linked, f"shard {shard}: a pull without a link"
            assert line.wanted is None or linked, f"shard {shard}: a want without a link"


def _standing(view: View, worker: str) -> tuple[int, tuple[int, ...]]:
    """The worker's incarnation (-1: the view does not have it), and whose pushes servers take from it."""
    incarnation = next((member.incarnation for member in view.workers if member.id == worker), -1)
    return incarnation, view.contributors.get(worker, ())
