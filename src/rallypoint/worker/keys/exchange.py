"""The data plane of a store: runs `core.keys` on links, and keeps what has to be sent again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.config import JobConfig
from rallypoint.core import keys as machine
from rallypoint.core.layout import Layout
from rallypoint.core.protocol import Beat, Message
from rallypoint.core.view import View
from rallypoint.core.worker.links import LinkTable
from rallypoint.core.worker.slots import Store
from rallypoint.errors import JobAborted, StoreRolledBack
from rallypoint.observe.waits import wait_until
from rallypoint.worker.exchange.links import Context, Links
from rallypoint.worker.keys.answers import Answers, Asked
from rallypoint.worker.keys.arrivals import KeyArrivals, KeysHeard
from rallypoint.worker.keys.sends import KeyLinks, Sends

Change = Callable[[], Sequence[machine.Effect]]
_OVER = "the job is over: no server answers any more"


class KeyExchange:
    """One worker's data plane in one store.

    Locks: `_adopting`, one view after the other; below it that of the sends, one effect after the other; below it
    `changed`, the machine and all fields. Nobody sends or receives under `changed`.

    Attributes:
        heard: takes what arrives on links.
        answers: what was asked for, and what came with acknowledgements of pushes. Guarded by `changed`.
        rolled_back: rises with each roll-back to a snapshot: whatever began before it is stale.
        finished: the coordinator has said that the job is over.
    """

    def __init__(
        self, layout: Layout, config: JobConfig, context: Context, send: Callable[[Message], None],
        links: KeyLinks | None = None,
    ) -> None:  # fmt: skip
        """`links` are for simulated clusters; None: this process's own."""
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
        self._table = LinkTable(context.me)
        self._links: KeyLinks = Links(context, config, lambda: self.machine.number) if links is None else links
        self.answers = Answers()
        self.heard = KeysHeard(self.machine, self.answers, self._table, self.changed, self.apply, self.fail)
        self._arrivals = KeyArrivals(layout, config, self.heard)
        self._sends = Sends(self.machine, self._links, self.answers, self.changed)

    # ---- messages of the coordinator, on its link's thread: see `DataPlane` ----

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
            ended = self._table.to_end(before, view)
            self._links.end(ended)
            with self._sends.sending, self.changed:
                for server in ended:
                    self._table.end(server)
                    self.machine.link_lost(server)
                if before is not None and before.generation != view.generation:
                    self._roll_back(view)
                self._sends.outgoing.extend(self.machine.adopt(view))
                new = self._table.to_open(view)
                self.changed.notify_all()
            self._sends.run_all()
            self._links.open(new, self._arrivals, view)

    def _roll_back(self, view: View) -> None:
        """Nothing of the generation before leaves any more, but first values if there is no snapshot to go back to."""
        self.rolled_back += 1
        self.answers.clear()
        self._sends.clear(keep_first=not view.origin)

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
        came = {shard: self.answers.take_with_push(shard, lines[shard].version) for shard in shards}
        parts = {shard: data for shard, data in came.items() if data is not None}
        return parts if len(parts) == len(shards) else {}

    def need(self, wanted: Mapping[int, tuple[memoryview, int]], version: int) -> tuple[dict[int, Asked], int]:
        """Ask for shards' values, at this version or a later one (`machine.NEWEST`: any): of parts of tables for the
        rows in the payload, whose values have so many bytes. Returns the requests, and the generation."""
        requests: dict[int, Asked] = {}
        with self.changed:
            for shard, (rows, nbytes) in wanted.items():
                self._numbers += 1
                requests[shard] = self.answers.asked[self._numbers] = Asked(self._numbers, rows, nbytes)
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

    # ---- inside ----

    def apply(self, change: Change) -> None:
        """Make a change under the lock, then run its effects without it."""
        with self.changed:
            self._sends.outgoing.extend(change())
            reports = self._sends.forget_counted()
            self.changed.notify_all()
        self._sends.run_all()
        for report in reports:
            self._send_report(report)
