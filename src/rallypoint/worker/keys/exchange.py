"""The data plane of a store: runs `core.keys.machine` on links, and keeps what has to be sent again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from rallypoint.config import JobConfig
from rallypoint.core.keys import machine
from rallypoint.core.layout import Layout
from rallypoint.core.view import View
from rallypoint.core.worker.links import LinkTable
from rallypoint.core.worker.slots import Store
from rallypoint.errors import JobAborted, StoreRolledBack
from rallypoint.net.frames import LATEST, NEWEST, Header, Kind, wants
from rallypoint.net.messages import Beat, Message, Report
from rallypoint.net.pool import bytes_of
from rallypoint.observe.waits import wait_until
from rallypoint.worker.exchange.links import Context, Links
from rallypoint.worker.keys.arrivals import KeyArrivals

Change = Callable[[], Sequence[machine.Effect]]


class KeyExchange:
    """One worker's data plane in one store.

    Locks: `_adopting`, one view after the other; below it `changed`, the machine and all fields. Nobody sends or
    receives under `changed`.

    Attributes:
        rolled_back: rises with each roll-back to a snapshot: whatever began before it is stale.
        finished: the coordinator has said that the job is over.
    """

    def __init__(self, layout: Layout, config: JobConfig, context: Context, send: Callable[[Message], None]) -> None:
        self.layout, self.config, self.me = layout, config, context.me
        self.changed = threading.Condition()
        self.machine = machine.KeyMachine(context.me, len(layout.shards), streaming=config.policy.streaming)
        self.rolled_back, self.finished = 0, False
        self._send_report, self._say = send, context.say
        self._adopting = threading.Lock()
        self._closed = self._leaving = False
        self._failure: BaseException | None = None
        self._activity, self._numbers = 0, machine.OWN
        self._table = LinkTable(context.me)
        self._links = Links(context, config, lambda: self.machine.number)
        self._arrivals = KeyArrivals(layout, config.replicas, self)
        self._initial: dict[int, torch.Tensor] = {}  # by shard
        self._pushes: dict[tuple[int, int], torch.Tensor] = {}  # by shard and contributor: to be sent again
        self._answers: dict[int, tuple[int, bytearray] | None] = {}  # by number: None until it is here
        self._values: dict[int, tuple[int, bytearray]] = {}  # by shard: what came with the last acknowledgement
        self._reported: dict[int, int] = {}  # by contributor: the last step of which the coordinator was told

    # ---- messages of the coordinator, on its link's thread: see `DataPlane` ----

    @property
    def view(self) -> View:
        """The view in force. Valid only after the first view has arrived."""
        assert self.machine.view is not None
        return self.machine.view

    @property
    def step(self) -> int:
        """The highest step that this worker has pushed; -1 before the first."""
        return max(self._reported.values(), default=-1)

    def adopt(self, view: View) -> None:
        """Install a new view. Returns after the links that the view ends have ended."""
        with self._adopting:
            before = self.machine.view
            if self._closed or (before is not None and view.number <= before.number):
                return
            ended = self._table.to_end(before, view)
            self._links.end(ended)
            with self.changed:
                effects: list[machine.Effect] = []
                for server in ended:
                    self._table.end(server)
                    effects += self.machine.link_lost(server)
                if before is not None and before.generation != view.generation:
                    self._roll_back()
                effects += self.machine.adopt(view)
                new = self._table.to_open(view)
                self.changed.notify_all()
            self._run(effects)
            self._links.open(new, self._arrivals, view)

    def _roll_back(self) -> None:
        self.rolled_back += 1
        for kept in (self._initial, self._pushes, self._answers, self._values, self._reported):
            kept.clear()

    def assist(self, step: int, replica: int) -> None:
        """There are no backup tasks in a store."""

    def capture(self, snapshot: Store) -> int:
        """Workers have no part in a store's snapshots."""
        return -1

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
        """End every link."""
        with self._adopting:
            self._closed = True
            self._links.close()

    def beat(self) -> Beat:
        """What the next heartbeat says. What a script does between two calls is its own affair: it counts as active."""
        self._activity += 1
        return Beat(self._links.unreachable(), 0.0, self._activity, True)

    # ---- the script's threads ----

    def begin(self, shard: int, values: torch.Tensor) -> None:
        """Give the shard its first value, unless it has one (1-D fp32; kept until one is there)."""

        def begins() -> list[machine.Effect]:
            self._initial[shard] = values
            return self.machine.begin(shard)

        self.apply(begins)

    def push(self, shard: int, contributor: int, step: int, values: torch.Tensor) -> None:
        """Push `values` (1-D fp32; not changed any more) as this contributor's `step`. Its last push counts already."""

        def pushes() -> list[machine.Effect]:
            self._pushes[shard, contributor] = values
            self._values.pop(shard, None)
            return self.machine.push(shard, contributor, step)

        self.apply(pushes)

    def need(self, shard: int, version: int) -> int:
        """Ask for the shard's value, at this version or a later one (`machine.NEWEST`: any). Returns the number."""
        with self.changed:
            self._numbers += 1
            number = self._numbers
            self._answers[number] = None
            effects = self.machine.need(shard, number, version)
        self._run(effects)
        return number

    def answer(self, number: int) -> tuple[int, bytearray] | None:
        """The version and bytes that answer a request; None while they are not here. Needs the lock."""
        return self._answers.get(number)

    def take(self, number: int) -> tuple[int, bytearray]:
        """Take the answer out. Needs the lock."""
        answer = self._answers.pop(number)
        assert answer is not None
        return answer

    def value_with_push(self, shard: int) -> tuple[int, bytearray] | None:
        """The value that came with the last acknowledgement of a push, once. Takes the lock."""
        with self.changed:
            return self._values.pop(shard, None)

    def watch(self, shards: Iterable[int], contributors: Iterable[int]) -> None:
        """Ask how far these contributors are (rounds: hear of the shards' next versions)."""
        self.apply(lambda: self.machine.watch(shards, contributors))

    def is_counted(self, shards: Iterable[int], contributor: int) -> bool:
        """True if no push of this contributor to the shards is on its way. Needs the lock."""
        return all(contributor not in self.machine.lines[shard].pushes for shard in shards)

    def next_step(self, shards: Iterable[int], contributor: int) -> int | None:
        """The step of the contributor's next push; None while it is not known. Needs the lock."""
        steps = [self.machine.next_step(shard, contributor) for shard in shards]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == len(steps) else None

    def wait(
        self, ready: Callable[[], bool], describe: Callable[[], str], generation: int | None = None, *,
        waited: float = 0.0,
    ) -> None:  # fmt: skip
        """Wait until `ready()`, which is asked under the lock; `waited` seconds were waited for it before.

        Raises the error of whatever has failed; StoreRolledBack if there was a roll-back after `generation`;
        SystemExit when this worker was told to leave and may.
        """

        def over() -> bool:
            rolled = generation is not None and generation != self.rolled_back
            return self._failure is not None or rolled or self.finished or self._gone or ready()

        with self.changed:
            wait_until(self.changed, over, describe, self._say, waited=waited)
            if self._failure is not None:
                raise self._failure
            if generation is not None and generation != self.rolled_back:
                raise StoreRolledBack(
                    "the servers lost values and went back to a snapshot: ask store.step(key) where each key is now, "
                    "and go on from there (a server's death alone costs nothing with --replication 2)"
                )
            if ready():
                return
            if self._gone:
                raise SystemExit(0)
            raise JobAborted("the job is over: no server answers any more")

    @property
    def _gone(self) -> bool:
        return self._leaving and not self.machine.contributors

    # ---- what has arrived, on the links' threads: see `Heard` ----

    def valued(self, shard: int, contributor: int, clock: int, version: int, data: bytearray) -> None:
        def replied() -> list[machine.Effect]:
            self._values[shard] = version, data
            return self.machine.replied(shard, contributor, clock, version)

        self.apply(replied)

    def answered(self, shard: int, number: int, version: int, data: bytearray | None) -> None:
        def answers() -> list[machine.Effect]:
            done, effects = self.machine.answered(shard, number, version, kept=data is not None)
            if data is not None:
                self._answers.update({one: (version, data) for one in done if one in self._answers})
                if number == machine.OWN:
                    self._values[shard] = version, data
            return effects

        self.apply(answers)

    def to_wait(self, contributor: int) -> None:
        self.apply(lambda: self.machine.to_wait(contributor))

    def link_up(self, server: str) -> None:
        self.apply(lambda: self.machine.link_up(server) if self._table.up(server) else [])

    def link_lost(self, server: str) -> None:
        def lost() -> list[machine.Effect]:
            self._table.lost(server)
            return self.machine.link_lost(server)

        self.apply(lost)

    # ---- inside ----

    def apply(self, change: Change) -> None:
        """Make a change under the lock, then run its effects without it."""
        with self.changed:
            effects = change()
            reports = self._counted()
            self.changed.notify_all()
        self._run(effects)
        for report in reports:
            self._send_report(report)

    def _counted(self) -> list[Report]:
        """Forget what need not be sent again; tell the coordinator of steps that count. Needs the lock."""
        lines, reports = self.machine.lines, []
        for shard in [s for s in self._initial if not lines[s].begins]:
            del self._initial[shard]
        for shard, contributor in [(s, c) for s, c in self._pushes if c not in lines[s].pushes]:
            del self._pushes[shard, contributor]
            step = (self.machine.next_step(shard, contributor) or 0) - 1
            if step > self._reported.get(contributor, -1):
                self._reported[contributor] = step
                reports.append(Report(step, contributor, 0.0, 1.0, 0, generation=self.view.generation))
        return reports

    def _run(self, effects: Sequence[machine.Effect]) -> None:
        for effect in effects:
            if (link := self._links.get(effect.server)) is None:
                continue  # it has ended: a new one sends this again
            header = Header(Kind.PUSH, self.machine.number, shard=effect.shard)
            match effect:
                case machine.SendInitial():
                    if (values := self._initial.get(effect.shard)) is not None:
                        data = bytes_of(values)
                        link.push(header._replace(kind=Kind.INITIAL, length=len(data)), data, sent=_nothing)
                case machine.SendPush(contributor=contributor, step=step):
                    if (values := self._pushes.get((effect.shard, contributor))) is not None:
                        data = bytes_of(values)
                        header = header._replace(replica=contributor, step=step, weight=1.0, length=len(data))
                        if self.machine.streaming:
                            known = self.machine.lines[effect.shard].version
                            header = header._replace(wants=wants(contributor), base=max(0, known))
                        link.push(header, data, sent=_nothing)
                case machine.SendWant(contributor=contributor):
                    link.want(effect.shard, contributor, self.machine.number)
                case machine.SendPull(number=number, version=version):
                    newest = version == machine.NEWEST
                    header = header._replace(kind=Kind.PULL_ROWS, base=number, flags=NEWEST if newest else 0)
                    link.pull(header._replace(step=LATEST if newest else version), memoryview(b""))


def _nothing() -> None:
    """Each push has memory of its own, which nobody writes to again."""
