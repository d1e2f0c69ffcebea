"""A key-value store as a script sees it: keys that are pushed and pulled, each by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from rallypoint.core.keys import NEWEST, Effect, holder
from rallypoint.core.view import ViewNumber
from rallypoint.errors import StoreRolledBack, UsageError
from rallypoint.net.frames import LATEST
from rallypoint.worker.keys.dense import DenseKey, Rows
from rallypoint.worker.keys.exchange import KeyExchange
from rallypoint.worker.keys.futures import LOOK_AGAIN_S, Pull, Push, Waiting, checked_step
from rallypoint.worker.keys.table import TableKey

_LEFT = (
    "the servers lost values and went back to a snapshot after this worker's script had ended: resume the job "
    "(with --replication 2 a server's death alone costs nothing)"
)


class Due(NamedTuple):
    """A push that this worker owes: `step` of `contributor`."""

    step: int
    contributor: int


class KeyStore:
    """Keys on this job's servers; made by `job.store`. Any thread may use it.

    A push is named by (key, step, contributor) and counts once, whoever says it and how often. Each contributor of a
    key counts its own steps there, from 0. Values are fp32; what is pushed is copied.

    Every call that waits raises JobAborted when the job is over. When servers lost values that no other had, so that
    keys went back to a snapshot, the next call of each thread raises StoreRolledBack, once; `due` never does.
    """

    def __init__(
        self, exchange: KeyExchange, done: Callable[[ViewNumber], None], first: Mapping[str, torch.Tensor]
    ) -> None:
        self._exchange, self._done, self._waiting = exchange, done, Waiting(exchange)
        layout = exchange.layout
        tables = [TableKey(index, layout) for index in range(len(layout.tables))]
        keys: list[DenseKey | TableKey] = [*(DenseKey(entry, layout) for entry in layout.entries), *tables]
        self._keys = {key.name: key for key in keys}
        for shard, data in (one for table in tables for one in table.begun().items()):
            exchange.begin(shard, data)
        for name, values in first.items():
            self.init(name, values)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all keys."""
        return tuple(sorted(self._keys))

    @property
    def contributors(self) -> tuple[int, ...]:
        """The contributors that are assigned to this worker now. They change when workers die, come and go."""
        with self._exchange.changed:
            return self._exchange.machine.contributors

    def init(self, name: str, values: torch.Tensor) -> None:
        """Give a dense key its first value (the key's shape). The first one wins; a later one changes nothing.

        A key of several pieces may get some of each, if workers give different ones.
        """
        for shard, data in self._key(name).first(values).items():
            self._exchange.begin(shard, data)

    def step(self, name: str, contributor: int | None = None) -> int:
        """The step of this contributor's next push to the key: waits for the servers' answer, and for a first value.

        One that is on its way may count as made or not.
        """
        shards, one = self._key(name).shards, self._contributor(contributor)
        found: list[int] = []

        def take() -> Sequence[Effect]:
            found.append(self._next(shards, one))
            return ()

        self._until_known(name, shards, one)
        self._waiting.until(lambda: self._known(shards, one), lambda: f"the first value of key {name}", then=take)
        return found[0]

    def push(
        self, name: str, values: torch.Tensor, *, rows: Rows = None, step: int | None = None,
        contributor: int | None = None,
    ) -> Push:  # fmt: skip
        """Push a gradient: of a dense key (its shape), or of some `rows` of a table (a row of values for each). A row
        that is named twice gets the sum.

        Returns at once, unless this contributor's last push to the key is on its way still. `contributor`: by default
        the one that is assigned to this worker. `step`: by default its next one; a lower one is a push that counts
        already, and changes nothing. Raises UsageError for a later one, and for one beyond the store's `steps`.
        """
        key, one = self._key(name), self._contributor(contributor)
        most = self._exchange.config.rounds
        checked_step(step, most - 1, name)
        data, shards = key.pushed(values, rows), key.shards
        pushed: list[int] = []

        def pushes() -> Sequence[Effect]:
            at = self._next(shards, one)
            if step is not None and step > at:
                raise UsageError(f"step {step} of key {name}: contributor {one} has pushed only {at} of them")
            if step is None and at >= most:
                raise UsageError(f"contributor {one} has made all of its {most} pushes to key {name}: see steps=")
            pushed.append(at if step is None else step)
            return self._exchange.push(data, one, pushed[0])

        def free() -> bool:
            return self._exchange.machine.counts(shards, one) and self._known(shards, one)

        self._until_known(name, shards, one)
        self._waiting.until(free, lambda: self._before(name, one), of=(shards, [one]), then=pushes)
        return Push(self._exchange, self._waiting, name, shards, pushed[0], one)

    def pull(
        self, name: str, out: torch.Tensor | None = None, *, rows: Rows = None, step: int | None = None
    ) -> torch.Tensor:
        """The key's value, or some `rows` of a table (int, any shape -> one dimension more), in `out` or a new fp32
        tensor. By default it has all that this worker has pushed there.

        With `step`, this worker's pushes are not waited for: under ``rp.Sync()`` it is the value after so many rounds,
        and waits for that; servers keep a key's last two values, and for an older one the newest is given. Else it is
        the newest one (`step` counts updates).
        """
        key = self._key(name)
        reading, shards = key.reading(rows), key.shards
        reading.check(out)
        if step is None:
            mine = range(self._exchange.config.replicas)
            parts: dict[int, bytearray] = {}

            def take() -> Sequence[Effect]:
                parts.update(self._exchange.with_pushes(shards))
                return ()

            self._waiting.until(
                lambda: all(self._exchange.machine.counts(shards, one) for one in mine),
                lambda: f"this worker's pushes to key {name} to count", of=(shards, mine), then=take,
            )  # fmt: skip
            if parts:
                return reading.filled(parts, out)
        return self.pull_later(name, rows=rows, step=step).result(out)

    def pull_later(self, name: str, *, rows: Rows = None, step: int | None = None) -> Pull:
        """Ask for the key's value (or these `rows` of a table), and return at once. `step`: see `pull`; None: the
        newest one that is published."""
        exchange, reading = self._exchange, self._key(name).reading(rows)
        streaming = exchange.machine.by_clocks
        most = exchange.config.rounds * (exchange.config.replicas if streaming else 1)
        checked_step(step, min(most, LATEST - 1), name)
        self._waiting.ask(lambda: True, self._waiting.generation)
        version = NEWEST if step is None or (streaming and step == 0) else step
        requests, generation = exchange.need(reading.wanted, version)
        if generation != self._waiting.generation:
            self._waiting.ask(lambda: True, self._waiting.generation)  # raises StoreRolledBack
        return Pull(self._waiting, reading, requests, generation)

    def due(self, names: str | Sequence[str], steps: int) -> Iterator[Due]:
        """Iterate over the pushes to this key that this worker owes, until the key has `steps` of every contributor.

        Of several keys: the pushes that some of them lacks. Push to each of them at the step that is yielded: where it
        counts already, because a worker died between two of its pushes, pushing again changes nothing.

        Yields a push when it can be computed: its contributor is assigned to this worker, its last push counts, and
        (``rp.Sync()``) the round before it is complete. So a dead worker's pushes come here when the servers give its
        contributors to this worker. Push each before you ask for the next. After a roll-back it goes on where the key
        is that is furthest behind. Raises UsageError for more than the store's `steps`, and without a name.
        """
        several = [names] if isinstance(names, str) else list(dict.fromkeys(names))
        name, exchange = " and ".join(several), self._exchange
        shards = [shard for one in several for shard in self._key(one).shards]
        if not shards:
            raise UsageError("store.due of no key: name one, or several")
        checked_step(steps, exchange.config.rounds, name)
        idle = time.monotonic()
        while True:
            exchange.watch(shards, self._unfinished(shards, steps))
            look_again = time.monotonic() + LOOK_AGAIN_S  # (`wait` looks at the clock a few times a second)

            def ready(look_again: float = look_again) -> bool:
                if time.monotonic() > look_again or self._next_due(shards, steps) is not None:
                    return True
                return not self._unfinished(shards, steps)

            exchange.wait(
                ready, lambda: f"round {self._round(shards)} of key {name}, or its first value",
                waited=time.monotonic() - idle,
            )
            with exchange.changed:
                self._waiting.knows(exchange.rolled_back)
                due = self._next_due(shards, steps)
                over = due is None and not self._unfinished(shards, steps)
            if over:
                return
            if due is not None:
                yield due
                idle = time.monotonic()

    def finish(self) -> None:
        """Wait until what this worker has pushed counts, say that it has no more, and wait until all have said so.

        Raises StoreRolledBack when keys went back to a snapshot: what this worker has pushed since is lost.
        """
        exchange, told = self._exchange, list[tuple[int, ViewNumber]]()
        unfinished = exchange.machine.unfinished

        def tell() -> Sequence[Effect]:
            told.append((exchange.rolled_back, exchange.view.generation))
            return ()

        self._waiting.until(lambda: not unfinished(), self._last, then=tell)
        self._done(told[0][1])
        try:
            exchange.wait(lambda: exchange.finished, lambda: "the other workers to finish", told[0][0])
        except StoreRolledBack:
            raise StoreRolledBack(_LEFT) from None

    # ---- inside ----

    def _next_due(self, shards: Sequence[int], steps: int) -> Due | None:
        exchange = self._exchange
        found = [
            Due(step, one) for one in exchange.machine.contributors
            if exchange.machine.counts(shards, one)
            and (step := exchange.machine.next_of(shards, one)) is not None and step < steps
        ]  # fmt: skip
        return min(found, default=None)

    def _unfinished(self, shards: Sequence[int], steps: int) -> list[int]:
        """The contributors that are not known to have pushed so many steps."""
        everybody = range(self._exchange.config.replicas)
        nexts = {one: self._exchange.machine.next_of(shards, one) for one in everybody}
        return [one for one, step in nexts.items() if step is None or step < steps]

    def _round(self, shards: Sequence[int]) -> int:
        return min(self._exchange.machine.lines[shard].version for shard in shards)

    def _known(self, shards: Sequence[int], contributor: int) -> bool:
        return self._exchange.machine.next_of(shards, contributor) is not None

    def _next(self, shards: Sequence[int], contributor: int) -> int:
        step = self._exchange.machine.next_of(shards, contributor)
        assert step is not None
        return step

    def _until_known(self, name: str, shards: Sequence[int], contributor: int) -> None:
        """Ask how far this contributor is, if that is not known."""
        with self._exchange.changed:
            ask = not self._known(shards, contributor)
        if ask:
            self._exchange.watch(shards, [contributor])
            self._waiting.until(
                lambda: self._known(shards, contributor), lambda: f"the first value of key {name}",
                of=(shards, [contributor]),
            )  # fmt: skip

    def _before(self, name: str, contributor: int) -> str:
        worker = holder(self._exchange.view, contributor)
        whose = "" if worker in ("", self._exchange.me) else f", which is {worker}'s"
        return f"the push before this one to key {name} (contributor {contributor}{whose})"

    def _last(self) -> str:
        shard, contributor, step = self._exchange.machine.unfinished()[0]
        name = next(name for name, key in self._keys.items() if shard in key.shards)
        return f"step {step} of key {name} to count (contributor {contributor}), before this worker leaves"

    def _key(self, name: str) -> DenseKey | TableKey:
        if name not in self._keys:
            raise UsageError(f"this store has no key {name!r}: it has {', '.join(self.keys[:8])}")
        return self._keys[name]

    def _contributor(self, contributor: int | None) -> int:
        if contributor is not None:
            if not 0 <= contributor < self._exchange.config.replicas:
                raise UsageError(f"contributor {contributor}: this store has {self._exchange.config.replicas}")
            return contributor
        assigned = self.contributors
        if len(assigned) != 1:
            raise UsageError(f"this worker has {len(assigned)} contributors, {list(assigned)}: say contributor=")
        return assigned[0]
