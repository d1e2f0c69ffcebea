"""A key-value store as a script sees it: keys that are pushed and pulled, each by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from rallypoint.core.keys.machine import NEWEST
from rallypoint.core.layout import Entry
from rallypoint.core.view import ViewNumber
from rallypoint.errors import UsageError
from rallypoint.worker.keys.exchange import KeyExchange

LOOK_AGAIN_S = 0.5  # how often a contributor that has done its part looks how far the others are (streaming)


class Due(NamedTuple):
    """A push that this worker owes: `step` of `contributor`."""

    step: int
    contributor: int


class Push:
    """A push on its way. Any thread may ask it."""

    def __init__(self, exchange: KeyExchange, name: str, shards: Sequence[int], due: Due, generation: int) -> None:
        self._exchange, self._name, self._shards, self._due = exchange, name, shards, due
        self._generation = generation

    def done(self) -> bool:
        """True if the push counts, durably (under ``rp.Sync()``: its round is complete)."""
        with self._exchange.changed:
            return self._counts()

    def result(self) -> None:
        """Wait until the push counts. Raises StoreRolledBack, or JobAborted when the job is over."""
        self._exchange.wait(self._counts, self._describe, self._generation)

    def _counts(self) -> bool:
        return self._exchange.machine.counts(self._shards, self._due.contributor)

    def _describe(self) -> str:
        return f"step {self._due.step} of key {self._name} to count (contributor {self._due.contributor})"


class Pull:
    """A pull on its way. Any thread may ask it; `result` once."""

    def __init__(
        self, exchange: KeyExchange, entry: Entry, numbers: Mapping[int, int], generation: int
    ) -> None:
        self._exchange, self._entry, self._numbers, self._generation = exchange, entry, numbers, generation

    def done(self) -> bool:
        """True if the value is here."""
        with self._exchange.changed:
            return self._here()

    def result(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the value, and copy it into `out` (the key's shape), or into a new fp32 tensor."""
        self._exchange.wait(self._here, lambda: f"a value of key {self._entry.spec.name}", self._generation)
        with self._exchange.changed:
            parts = {shard: self._exchange.answers.take(number) for shard, number in self._numbers.items()}
        return filled(self._exchange, self._entry, parts, out)

    def _here(self) -> bool:
        return self._exchange.answers.here(self._numbers.values())


class KeyStore:
    """Keys on this job's servers; made by `job.store`. One thread at a time may use it.

    A push is named by (key, step, contributor) and counts once, whoever says it and how often. Each contributor of a
    key counts its own steps there, from 0. Gradients and values are fp32; a gradient is copied when it is pushed.

    Every call that waits raises JobAborted when the job is over, and StoreRolledBack when servers lost values that no
    other had, so that keys went back to a snapshot.
    """

    def __init__(
        self, exchange: KeyExchange, done: Callable[[ViewNumber], None], first: Mapping[str, torch.Tensor]
    ) -> None:
        self._exchange, self._done = exchange, done
        layout = exchange.layout
        self._entries = {entry.spec.name: entry for entry in layout.entries}
        self._shards = {n: layout.shards_touching(e.start, e.stop) for n, e in self._entries.items()}
        for name, values in first.items():
            self.init(name, values)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all keys."""
        return tuple(sorted(self._entries))

    @property
    def contributors(self) -> tuple[int, ...]:
        """The contributors that are assigned to this worker now. They change when workers die, come and go."""
        with self._exchange.changed:
            return self._exchange.machine.contributors

    def init(self, name: str, values: torch.Tensor) -> None:
        """Give a key its first value (any dtype, the key's shape). The first one wins; a later one changes nothing."""
        entry, vector = self._entry(name), self._vector(name, values)
        for shard in self._shards[name]:
            place = self._exchange.layout.shards[shard]
            self._exchange.begin(shard, vector[place.start - entry.start : place.stop - entry.start].clone())

    def step(self, name: str, contributor: int | None = None) -> int:
        """The step of this contributor's next push to the key: waits for the servers' answer, and for a first value."""
        contributor, shards = self._contributor(contributor), self._shards_of(name)
        exchange, generation = self._exchange, self._exchange.rolled_back

        def known() -> bool:
            return exchange.machine.next_of(shards, contributor) is not None

        with exchange.changed:
            ask = not known()
        if ask:
            exchange.watch(shards, [contributor])
            exchange.wait(known, lambda: f"the first value of key {name}", generation)
        with exchange.changed:
            step = exchange.machine.next_of(shards, contributor)
        assert step is not None
        return step

    def push(
        self, name: str, gradient: torch.Tensor, *, step: int | None = None, contributor: int | None = None
    ) -> Push:
        """Push a gradient (the key's shape). Returns at once, unless this contributor's last push is on its way still.

        `contributor`: by default the one that is assigned to this worker. `step`: by default its next one; a lower one
        is a push that counts already, and changes nothing. Raises UsageError for a later one.
        """
        entry, vector = self._entry(name), self._vector(name, gradient)
        contributor, shards = self._contributor(contributor), self._shards[name]
        exchange, generation = self._exchange, self._exchange.rolled_back
        exchange.wait(
            lambda: exchange.machine.counts(shards, contributor),
            lambda: f"the push before this one to key {name} (contributor {contributor})", generation,
        )  # fmt: skip
        at = self.step(name, contributor)
        if step is not None and step > at:
            raise UsageError(f"step {step} of key {name}: contributor {contributor} has pushed only {at} of them")
        step = at if step is None else step
        for shard in shards:
            place = exchange.layout.shards[shard]
            part = vector[place.start - entry.start : place.stop - entry.start].clone()
            exchange.push(shard, contributor, step, part)
        return Push(exchange, name, shards, Due(step, contributor), generation)

    def pull(self, name: str, out: torch.Tensor | None = None, *, step: int | None = None) -> torch.Tensor:
        """The key's value, in `out` or a new fp32 tensor. By default it has all that this worker has pushed there.

        With `step`, this worker's pushes are not waited for: under ``rp.Sync()`` it is the value after so many rounds,
        or a later one, and waits for that; else the newest one (`step` counts updates).
        """
        exchange, shards, generation = self._exchange, self._shards_of(name), self._exchange.rolled_back
        if step is None:
            mine = range(exchange.config.replicas)
            exchange.wait(
                lambda: all(exchange.machine.counts(shards, one) for one in mine),
                lambda: f"this worker's pushes to key {name} to count", generation,
            )  # fmt: skip
            with exchange.changed:
                came = {shard: exchange.answers.with_push.pop(shard, None) for shard in shards}
            parts = {shard: value[1] for shard, value in came.items() if value is not None}
            if len(parts) == len(shards):
                return filled(exchange, self._entries[name], parts, out)
        return self.pull_later(name, step=step).result(out)

    def pull_later(self, name: str, *, step: int | None = None) -> Pull:
        """Ask for the key's value, and return at once. `step`: see `pull`; None: the newest one that is published."""
        exchange, generation = self._exchange, self._exchange.rolled_back
        version = NEWEST if step is None or step == 0 else step
        numbers = {shard: exchange.need(shard, version) for shard in self._shards_of(name)}
        return Pull(exchange, self._entries[name], numbers, generation)

    def due(self, name: str, steps: int) -> Iterator[Due]:
        """Iterate over the pushes to this key that this worker owes, until the key has `steps` of every contributor.

        Yields a push when it can be computed: its contributor is assigned to this worker, its last push counts, and
        (``rp.Sync()``) the round before it is complete. So a dead worker's pushes come here when the servers give its
        contributors to this worker. Push each before you ask for the next.
        """
        exchange, shards = self._exchange, self._shards_of(name)
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
                due = self._next_due(shards, steps)
                over = due is None and not self._unfinished(shards, steps)
            if over:
                return
            if due is not None:
                yield due
                idle = time.monotonic()

    def finish(self) -> None:
        """Say that this worker has no more to push, and wait until all workers have said so."""
        exchange = self._exchange
        self._done(exchange.view.generation)
        exchange.wait(lambda: exchange.finished, lambda: "the other workers to finish")

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

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise UsageError(f"this store has no key {name!r}: it has {', '.join(self.keys[:8])}")
        return self._entries[name]

    def _shards_of(self, name: str) -> Sequence[int]:
        self._entry(name)
        return self._shards[name]

    def _vector(self, name: str, values: torch.Tensor) -> torch.Tensor:
        shape = self._entry(name).spec.shape
        if tuple(values.shape) != shape:
            raise UsageError(f"a tensor of shape {list(values.shape)} for key {name}, which has {list(shape)}")
        return values.detach().to("cpu", torch.float32).reshape(-1)

    def _contributor(self, contributor: int | None) -> int:
        if contributor is not None:
            if not 0 <= contributor < self._exchange.config.replicas:
                raise UsageError(f"contributor {contributor}: this store has {self._exchange.config.replicas}")
            return contributor
        assigned = self.contributors
        if len(assigned) != 1:
            raise UsageError(f"this worker has {len(assigned)} contributors, {list(assigned)}: say contributor=")
        return assigned[0]


def filled(
    exchange: KeyExchange, entry: Entry, parts: Mapping[int, bytearray], out: torch.Tensor | None
) -> torch.Tensor:
    """Return a key's value from the bytes of its shards, in `out` if it is given."""
    if out is not None and tuple(out.shape) != entry.spec.shape:
        raise UsageError(f"out has shape {list(out.shape)}, and key {entry.spec.name} has {list(entry.spec.shape)}")
    vector = torch.empty(entry.stop - entry.start)
    for shard, data in parts.items():
        place = exchange.layout.shards[shard]
        vector[place.start - entry.start : place.stop - entry.start] = torch.frombuffer(data, dtype=torch.float32)
    value = vector.view(entry.spec.shape)
    if out is None:
        return value
    with torch.no_grad():
        return out.copy_(value)
