"""The data plane of a store: runs `core.keys.machine` on links, and keeps what has to be sent again."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.config import JobConfig
from rallypoint.core import keys as machine
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.protocol import Beat, Message, Report
from rallypoint.core.view import Member, View
from rallypoint.core.worker.shell import LinkTable
from rallypoint.core.worker.slots import Store
from rallypoint.errors import JobAborted, ProtocolError, RallypointError, StoreRolledBack
from rallypoint.net.frames import LATEST, NEWEST, SKIP, Header, Kind, wants
from rallypoint.observe.waits import wait_until
from rallypoint.worker.exchange.links import ExchangeContext, Links, Receiver, ServerLink, nothing

# ---- What a store's worker has asked for, and what has come ----

Value = tuple[int, bytearray]  # a version of a shard, and its bytes
_NO_ROWS = memoryview(b"")


@dataclass(slots=True, weakref_slot=True, eq=False)
class KeyRequest:
    """A request for one shard. Who wants the answer keeps it: a request that nobody keeps needs no memory."""

    number: int  # its name on the wire
    rows: memoryview  # of a part of a table, the payload that names the rows
    nbytes: int  # the length of the answer
    value: Value | None = None  # the answer; None until it is here


@dataclass(slots=True)
class Answers:
    """Values that have come. The exchange's lock guards it."""

    # By number, the requests that somebody keeps
    asked: weakref.WeakValueDictionary[int, KeyRequest] = field(default_factory=weakref.WeakValueDictionary)
    # By shard, the value that came with the last acknowledgement of a push
    with_push: dict[int, Value] = field(default_factory=dict)

    def came(self, numbers: Iterable[int], version: int, data: bytearray) -> None:
        """A value answers these requests. (An answer of another length is of a generation before.)"""
        for number in numbers:
            if (asked := self.asked.get(number)) is not None and asked.nbytes == len(data):
                asked.value = version, data

    def rows_of(self, number: int) -> memoryview:
        """The payload of a pull with that number."""
        asked = self.asked.get(number)
        return _NO_ROWS if asked is None else asked.rows


# ---- What arrives on a store's links, checked. Called on the links' threads ----


class KeyArrivals(Receiver):
    """What arrives on all links of one store, whose values are raw. It goes to the machine, and to who has asked."""

    def __init__(self, exchange: KeyExchange) -> None:
        self._exchange, self._keys, self._answers = exchange, exchange.machine, exchange.answers
        self._layout, config = exchange.layout, exchange.config
        self._contributors, self._steps = config.replicas, config.rounds
        self._most = config.rounds * (config.replicas if config.clocks("parameters") else 1)  # versions of a shard
        self._landing = threading.local()  # each link has a thread, and receives one value at a time

    def arriving(self, header: Header, server: str) -> memoryview | None:
        shard = self._shard(header)
        nbytes = shard.nbytes if shard.part is None else 0
        if header.codec or header.length != nbytes:
            raise ProtocolError(f"{header.length} bytes for shard {shard.index}, which has {nbytes}")
        if header.wanted is None or not 0 <= header.wanted < self._contributors:
            raise ProtocolError(f"the parameters of contributor {header.wanted}: there are {self._contributors}")
        if header.base > self._steps:
            raise ProtocolError(f"contributor {header.wanted} is said to be at step {header.base} of {self._steps}")
        self._landing.now = header, bytearray(header.length)
        return memoryview(self._landing.now[1])

    def landed(self, shard: int) -> None:
        header, data = self._landing.now
        self.valued(shard, header.wants - 2, header.base, header.step, data)

    def valued(self, shard: int, contributor: int, clock: int, version: int, data: bytearray) -> None:
        """The answer to a want, with the shard's value (of a part of a table: without any)."""

        def replied() -> list[machine.Effect]:
            counts = clock > self._keys.lines[shard].pushes.get(contributor, clock)
            if counts and shard not in self._keys.tables:
                self._answers.with_push[shard] = version, data
            return self._keys.replied(shard, contributor, clock, version)

        self._exchange.apply(replied)

    def rows(self, header: Header, data: bytearray) -> None:
        shard = self._shard(header)
        if header.flags & SKIP:
            self.answered(shard.index, header.base, header.step, None)
        elif len(data) != shard.nbytes if shard.part is None else not self._fits(header.base, len(data)):
            raise ProtocolError(f"{len(data)} bytes of shard {shard.index}, for another number of rows")
        else:
            self.answered(shard.index, header.base, header.step, data)

    def answered(self, shard: int, number: int, version: int, data: bytearray | None) -> None:
        """The answer to a pull; None: the version is not kept any more."""

        def answers() -> list[machine.Effect]:
            pushed = bool(self._keys.lines[shard].pushes)
            done, effects = self._keys.answered(shard, number, version, kept=data is not None)
            if data is not None:
                self._answers.came(done, version, data)
                if number == machine.OWN and pushed and shard not in self._keys.tables:
                    self._answers.with_push[shard] = version, data
            return effects

        self._exchange.apply(answers)

    def to_wait(self, replica: int, clock: int) -> None:
        if not 0 <= replica < self._contributors:
            raise ProtocolError(f"contributor {replica} is to wait: there are {self._contributors}")
        self._exchange.apply(lambda: self._keys.to_wait(replica))

    def link_up(self, server: Member) -> None:
        self._exchange.apply(lambda: self._keys.link_up(server.id) if self._exchange.table.up(server.id) else [])

    def link_lost(self, server: Member, error: RallypointError) -> None:
        def lost() -> list[machine.Effect]:
            self._exchange.table.lost(server.id)
            return self._keys.link_lost(server.id)

        if isinstance(error, ProtocolError):
            self._exchange.fail(JobAborted(f"the link to server {server.id} is gone: {error}"))
        self._exchange.apply(lost)

    def link_failed(self, server: Member, fault: Exception) -> None:
        self._exchange.fail(JobAborted(f"the link to server {server.id} has failed: {fault!r}"))

    def _shard(self, header: Header) -> Shard:
        if not 0 <= header.shard < len(self._layout.shards):
            raise ProtocolError(f"a {header.kind.name} frame for shard {header.shard}: not in this store's layout")
        if header.step > self._most:
            raise ProtocolError(f"version {header.step} of shard {header.shard}, which has {self._most} at most")
        return self._layout.shards[header.shard]

    def _fits(self, number: int, nbytes: int) -> bool:
        """Can so many bytes of rows answer the pull with that number, if anybody still wants it?"""
        if number == machine.OWN:
            return not nbytes
        with self._exchange.changed:
            asked = self._answers.asked.get(number)
            return asked is None or asked.nbytes == nbytes


# ---- What leaves a store's worker, and the values that may have to be sent again ----


@dataclass(slots=True)
class Sends:
    """Runs effects on links. The exchange's lock, `changed`, guards the fields; `run_all` is called without it.

    Each value is memory of its own, which nobody writes to again: so it may be sent twice, and by two threads.
    """

    keys: machine.KeyMachine
    links: Links
    answers: Answers
    changed: threading.Condition
    initial: dict[int, memoryview] = field(default_factory=dict)  # by shard, a first value that may be needed (again)
    # By shard and contributor, the step and bytes of a push that is not known to count
    pushes: dict[tuple[int, int], tuple[int, memoryview]] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)  # by contributor, the last step that counts in some key
    # Effects that nobody has run yet, in the order of the machine
    outgoing: deque[machine.Effect] = field(default_factory=deque)
    # Held by the thread that runs effects. Above the exchange's lock.
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
        if (link := self.links.get(effect.server)) is not None:  # else it has ended: a new one sends this again
            self._send(link, effect, Header(Kind.PUSH, self.keys.number, shard=effect.shard))

    def _send(self, link: ServerLink, effect: machine.Effect, header: Header) -> None:
        match effect:
            case machine.SendInitial(shard=shard):
                if (data := self.initial.get(shard)) is not None:
                    link.push(header._replace(kind=Kind.INITIAL, length=len(data)), data, sent=nothing)
            case machine.SendPush(shard=shard, contributor=contributor, step=step):
                at, data = self.pushes.get((shard, contributor), (-1, None))
                if data is not None and at == step:  # else it counts by now, or is of an older generation
                    header = header._replace(replica=contributor, step=step, weight=1.0, length=len(data))
                    if self.keys.by_clocks:
                        known = max(0, self.keys.lines[shard].version)
                        header = header._replace(wants=wants(contributor), base=known)
                    link.push(header, data, sent=nothing)
            case machine.SendWant(shard=shard, contributor=contributor):
                link.want(shard, contributor, self.keys.number)
            case machine.SendPull(number=number, version=version):
                newest = version == machine.NEWEST
                rows = self.answers.rows_of(number)
                header = header._replace(kind=Kind.PULL_ROWS, base=number, flags=NEWEST if newest else 0)
                link.pull(header._replace(step=LATEST if newest else version, length=len(rows)), rows)


# ---- The data plane of a store: runs `core.keys.machine` on links, and keeps what has to be sent again ----

Change = Callable[[], Sequence[machine.Effect]]
_OVER = "the job is over: no server answers any more"


class KeyExchange:
    """One worker's data plane in one store.

    Locks: `_adopting`, one view after the other; below it that of the sends, one effect after the other; below it
    `changed`, the machine and all fields. Nobody sends or receives under `changed`.

    Attributes:
        arrivals: takes what arrives on links.
        table: the links and what is known of them. Guarded by `changed`.
        answers: what was asked for, and what came with acknowledgements of pushes. Guarded by `changed`.
        rolled_back: rises with each roll-back to a snapshot: whatever began before it is stale.
        finished: the coordinator has said that the job is over.
    """

    def __init__(
        self, layout: Layout, config: JobConfig, context: ExchangeContext, send: Callable[[Message], None]
    ) -> None:
        self.layout, self.config, self.me = layout, config, context.me
        self.changed = threading.Condition()
        self.machine = machine.KeyMachine(
            context.me, len(layout.shards), by_clocks=config.clocks("parameters") > 0,
            tables=frozenset(shard.index for shard in layout.shards if shard.part is not None),
        )  # fmt: skip
        self.rolled_back, self.finished = 0, False
        self._send_report, self._say = send, context.say
        self._adopting = threading.Lock()
        self._closed = self._leaving = False
        self._failure: BaseException | None = None
        self._activity, self._numbers = 0, machine.OWN
        self.table = LinkTable(context.me)
        self._links = Links(context, config, lambda: self.machine.number)
        self.answers = Answers()
        self.arrivals = KeyArrivals(self)
        self._sends = Sends(self.machine, self._links, self.answers, self.changed)

    # ---- messages of the coordinator, on its link's thread ----

    @property
    def view(self) -> View:
        """The view in force. Valid only after the first view has arrived."""
        assert self.machine.view is not None
        return self.machine.view

    @property
    def step(self) -> int:
        """The highest step that this worker has pushed; -1 before the first."""
        return max(self._sends.counted.values(), default=-1)

    def adopt(self, view: View) -> None:
        """Install a new view. Returns after the links that the view ends have ended."""
        with self._adopting:
            before = self.machine.view
            if self._closed or (before is not None and view.number <= before.number):
                return
            ended = self.table.to_end(before, view)
            self._links.end(ended)
            with self._sends.sending, self.changed:
                for server in ended:
                    self.table.end(server)
                    self.machine.link_lost(server)
                if before is not None and before.generation != view.generation:
                    self.rolled_back += 1
                    self.answers.asked.clear()  # it has no answer any more
                    self.answers.with_push.clear()
                    self._sends.clear(keep_first=not view.origin)
                self._sends.outgoing.extend(self.machine.adopt(view))
                new = self.table.to_open(view)
                self.changed.notify_all()
            self._sends.run_all()
            self._links.open(new, self.arrivals, view)

    def assist(self, step: int, replica: int) -> None:
        """There are no backup tasks in a store."""

    def capture(self, snapshot: Store) -> None:
        """Workers have no part in a store's snapshots."""

    def finish(self) -> None:
        """The job is over: end every wait."""
        with self.changed:
            self.finished = True
            self.changed.notify_all()

    def leave(self) -> None:
        """Ask this worker to leave: it does when it has no contributors any more."""
        with self.changed:
            self._leaving = True
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise this error in every thread that waits here, now or later."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def close(self) -> None:
        with self._adopting:
            self._closed = True
            self._links.close()

    def beat(self) -> Beat:
        """What the next heartbeat says. What a script does between two calls is its own affair: it counts as active."""
        self._activity += 1
        return Beat(self._links.unreachable(), 0.0, self._activity, True)

    # ---- the script's threads ----

    def begin(self, shard: int, data: memoryview) -> None:
        """Give the shard its first value, unless it has one (kept until that has changed). The first one wins."""

        def begins() -> list[machine.Effect]:
            self._sends.initial.setdefault(shard, data)
            return self.machine.begin(shard)

        self.apply(begins)

    def push(self, parts: Mapping[int, memoryview], contributor: int, step: int) -> list[machine.Effect]:
        """Push to these shards: by shard, the bytes, which do not change any more. Needs the lock (see `wait`); the
        contributor's last push there counts already."""
        effects: list[machine.Effect] = []
        for shard, data in parts.items():
            self._sends.pushes[shard, contributor] = step, data
            self.answers.with_push.pop(shard, None)
            effects += self.machine.push(shard, contributor, step)
        return effects

    def with_pushes(self, shards: Sequence[int]) -> dict[int, bytearray]:
        """Take the shards' values that came with the acknowledgements of pushes; {} unless all are here, and nothing
        newer is known. Needs the lock."""
        lines = self.machine.lines
        came = {shard: self.answers.with_push.pop(shard, (-1, bytearray())) for shard in shards}
        parts = {shard: data for shard, (version, data) in came.items() if version >= max(0, lines[shard].version)}
        return parts if len(parts) == len(shards) else {}

    def need(self, wanted: Mapping[int, tuple[memoryview, int]], version: int) -> tuple[dict[int, KeyRequest], int]:
        """Ask for shards' values, at this version or a later one (`machine.NEWEST`: any): of parts of tables for the
        rows in the payload, whose values have so many bytes. Returns the requests, and the generation."""
        requests: dict[int, KeyRequest] = {}
        with self.changed:
            for shard, (rows, nbytes) in wanted.items():
                self._numbers += 1
                requests[shard] = self.answers.asked[self._numbers] = KeyRequest(self._numbers, rows, nbytes)
                self._sends.outgoing.extend(self.machine.need(shard, self._numbers, version))
            generation = self.rolled_back
        self._sends.run_all()
        return requests, generation

    def watch(self, shards: Iterable[int], contributors: Iterable[int]) -> None:
        """Ask how far these contributors are (rounds: hear of the shards' next versions)."""
        self.apply(lambda: self.machine.watch(shards, contributors))

    def wait(
        self, ready: Callable[[], bool], describe: Callable[[], str], generation: int | None = None, *,
        waited: float = 0.0, then: Change | None = None,
    ) -> None:  # fmt: skip
        """Wait until `ready()`, then make a change `then`. Both are called under the lock, with nothing in between;
        `waited` seconds were waited for it before.

        Raises what `check` raises; SystemExit when this worker was told to leave and may.
        """

        def over() -> bool:
            rolled = generation is not None and generation != self.rolled_back
            return self._failure is not None or rolled or self.finished or self._gone or ready()

        with self.changed:
            wait_until(self.changed, over, describe, self._say, waited=waited)
            self.check(generation)
            if not ready():
                if self._gone:
                    raise SystemExit(0)
                raise JobAborted(_OVER)
            self._sends.outgoing.extend(then() if then is not None else ())
        self._sends.run_all()

    def check(self, generation: int | None) -> None:
        """Raise the error of whatever has failed; StoreRolledBack if there was a roll-back after `generation`. Needs
        the lock."""
        if self._failure is not None:
            raise self._failure
        if generation is not None and generation != self.rolled_back:
            raise StoreRolledBack(
                "the servers lost values and went back to a snapshot: ask store.step(key) where each key is now, "
                "and go on from there (a server's death alone costs nothing with --replication 2)"
            )

    def ask(self, ready: Callable[[], bool], generation: int) -> bool:
        """Is it ready? Raises what `wait` would raise, except that it does not wait."""
        with self.changed:
            self.check(generation)
            if not ready() and self.finished:
                raise JobAborted(_OVER)
            return ready()

    @property
    def _gone(self) -> bool:
        return self._leaving and not self.machine.contributors

    def apply(self, change: Change) -> None:
        """Make a change under the lock, then run its effects without it."""
        with self.changed:
            self._sends.outgoing.extend(change())
            reports = self._sends.forget_counted()
            self.changed.notify_all()
        self._sends.run_all()
        for report in reports:
            self._send_report(report)
