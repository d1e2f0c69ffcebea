"""A key-value store as a script sees it: keys that are pushed and pulled, each by itself."""

from __future__ import annotations

import glob
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from rallypoint.codec.base import encode_gradient, encode_ids
from rallypoint.config import Group, JobConfig, Network, group_of, of_group, resolve
from rallypoint.core.keys import LAST, NEWEST, Effect
from rallypoint.core.layout import Entry, Layout, TensorSpec, build_layout
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.policy import Async, BoundedStaleness, Sync
from rallypoint.core.typed import MOST_PUSHES
from rallypoint.core.view import ViewNumber
from rallypoint.errors import ConfigError, StoreRolledBack, UsageError
from rallypoint.net.frames import LATEST
from rallypoint.net.pool import bytes_of
from rallypoint.optim import refusal
from rallypoint.worker.keys_exchange import KeyExchange, KeyRequest
from rallypoint.worker.sources.hooks import parts_of, split_rows

# ---- What a store is made of: the names, shapes and optimizers of its keys, as a configuration and a layout ----

NOT_OF_RANKS = "job.store is for workers of one process: leave --ranks out"

KeyShape = torch.Tensor | Sequence[int]


class KeySettings(TypedDict, total=False):
    """The settings of `job.store`.

    `contributors` (R) push to each key; a round of ``rp.Sync()`` has one push of each. `optimizer` steps each key with
    what is pushed: one for all keys, or a dict by the part of a key's name before its first dot. `steps`: a contributor
    pushes to a key at most so often; schedules of rates reach over so many. `network.shard_bytes`: a key of at most so
    many bytes is one piece, so a push to it counts wholly or not at all. `table_std`: servers make the first rows of
    tables, normal(0, table_std).
    """

    contributors: int
    sync: Sync | BoundedStaleness | Async
    optimizer: Optimizer | Mapping[str, Optimizer]
    steps: int
    seed: int
    network: Network
    table_std: float


def declared(
    keys: Mapping[str, KeyShape], settings: KeySettings, overrides: Mapping[str, Any]
) -> tuple[JobConfig, Layout]:
    """Return the configuration and the layout of a store with these keys. Raises ConfigError or ModelError.

    Each key is an optimizer group of its own, so that no shard has two keys: keys go on independently.
    """
    given: dict[str, Any] = {key: value for key, value in settings.items() if key != "contributors"}
    if unknown := sorted(given.keys() - KeySettings.__annotations__.keys()):
        raise ConfigError(f"job.store has no setting {unknown[0]!r}: it has {', '.join(KeySettings.__annotations__)}")
    if not keys:
        raise ConfigError("a store without keys: give job.store a dict of names and shapes")
    names = sorted(keys)
    optimizers = _optimizers(given, names, overrides)
    groups = tuple(Group(match=(glob.escape(name),), optimizer=optimizers.get(name)) for name in names)
    ours = {"replicas": settings.get("contributors", 1), "groups": groups, "keyed": True}
    config = resolve({"steps": MOST_PUSHES, "batch": 1, **given, **ours}, overrides)
    specs = {name: TensorSpec(name, _shape(name, keys[name]), "float32", group_of(config, name, 2)) for name in names}
    tables = [specs.pop(name) for name in names if is_table(keys[name])]
    for table in tables:
        if len(table.shape) != 2:
            raise ConfigError(
                f"key {table.name} is declared on the meta device, as a table: that has rows and columns, not "
                f"{table.shape}"
            )
        if why := refusal(of_group(config, table.group).optimizer):
            raise ConfigError(f"key {table.name} cannot be a table: {why}")
    return config, build_layout(list(specs.values()), config.network.shard_bytes, tables=tables)


def _optimizers(given: dict[str, Any], names: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, Optimizer]:
    """Take an `optimizer` that is a dict out of what is `given`; return that of each key."""
    if not isinstance(by_part := given.get("optimizer"), Mapping):
        return {}
    del given["optimizer"]
    if "optimizer" in overrides:
        raise ConfigError(
            "optimizer is set, and the script gives each key an optimizer of its own: change it in the script"
        )
    parts = {name: name.partition(".")[0] for name in names}
    if others := sorted(set(parts.values()) ^ by_part.keys()):
        what = "is the first part of no key's name" if others[0] in by_part else "has no optimizer"
        raise ConfigError(f"{others[0]!r} {what}: give each key one, by the part of its name before its first dot")
    return {name: by_part[part] for name, part in parts.items()}


def first_values(keys: Mapping[str, KeyShape]) -> dict[str, torch.Tensor]:
    """The first values that `job.store` was given with the keys' names."""
    return {name: value for name, value in keys.items() if isinstance(value, torch.Tensor) and not is_table(value)}


def is_table(given: KeyShape) -> bool:
    """Is this key declared as a table? A tensor on the meta device has a shape and no values."""
    return isinstance(given, torch.Tensor) and given.is_meta


def _shape(name: str, given: KeyShape) -> tuple[int, ...]:
    shape = tuple(given.shape if isinstance(given, torch.Tensor) else (int(size) for size in given))
    if not all(size > 0 for size in shape):
        raise ConfigError(f"key {name} of shape {list(shape)} has no values: leave it out")
    return shape


# ---- A dense key: a tensor, cut into shards ----

Rows = torch.Tensor | Sequence[int] | None
Wanted = Mapping[int, tuple[memoryview, int]]  # by shard: the payload of a pull, and the bytes of its answer
_NO_ROWS = memoryview(b"")


class DenseKey:
    """A key whose value is one fp32 tensor."""

    def __init__(self, entry: Entry, layout: Layout) -> None:
        self.name, self.shape = entry.spec.name, entry.spec.shape
        touched = layout.shards_touching(entry.start, entry.stop)
        self._ranges = {
            index: slice(layout.shards[index].start - entry.start, layout.shards[index].stop - entry.start)
            for index in touched
        }

    @property
    def shards(self) -> list[int]:
        """The shards that it is made of."""
        return list(self._ranges)

    def first(self, values: torch.Tensor) -> dict[int, memoryview]:
        """By shard, the bytes of a first value. UsageError for a tensor of another shape."""
        return self.pushed(values, None)

    def pushed(self, values: torch.Tensor, rows: Rows) -> dict[int, memoryview]:
        """By shard, the bytes of a push: a copy. UsageError for a tensor of another shape."""
        self._no_rows(rows)
        if tuple(values.shape) != self.shape:
            shapes = f"a tensor of shape {list(values.shape)} for key {self.name}, which has {list(self.shape)}"
            raise UsageError(shapes)
        vector = in_fp32(values, self.name).reshape(-1)
        return {shard: bytes_of(vector[place].clone()) for shard, place in self._ranges.items()}

    def reading(self, rows: Rows) -> KeyReading:
        """What a pull asks for."""
        self._no_rows(rows)
        return KeyReading(self.name, self.shape, self._ranges)

    def _no_rows(self, rows: Rows) -> None:
        if rows is not None:
            raise UsageError(
                f"rows of key {self.name}, which is dense: declare it as torch.empty(rows, columns, device='meta')"
            )


class KeyReading:
    """A pull of one key: what is asked of each shard, and where its answer belongs in a tensor of `shape`.

    `places`: by shard, the positions of its values among all that is asked for, seen as a matrix whose rows have
    `columns` elements. Of rows, each is asked for once, and given wherever it is named: `inverse` has its place for
    each name.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], places: Mapping[int, slice | torch.Tensor], columns: int = 1,
        payloads: Mapping[int, memoryview] | None = None, inverse: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.name, self._shape, self._places, self._columns = name, shape, places, columns
        self._payloads, self._inverse = payloads or {}, inverse

    @property
    def wanted(self) -> Wanted:
        """What is asked for."""
        return {
            shard: (self._payloads.get(shard, _NO_ROWS), 4 * self._columns * _count(place))
            for shard, place in self._places.items()
        }

    def check(self, out: torch.Tensor | None) -> None:
        """Raise UsageError if the answer does not fit into `out`."""
        if out is not None and tuple(out.shape) != self._shape:
            raise UsageError(f"out has shape {list(out.shape)}, and what is pulled of {self.name} {list(self._shape)}")

    def filled(self, parts: Mapping[int, bytearray], out: torch.Tensor | None) -> torch.Tensor:
        """What was asked for, from the bytes of each shard, in `out` if it is given."""
        count = sum(map(_count, self._places.values()))
        values = torch.empty(count, self._columns, dtype=torch.float32, device="cpu")  # whatever the script's defaults
        for shard, data in parts.items():
            values[self._places[shard]] = torch.frombuffer(data, dtype=torch.float32).view(-1, self._columns)
        value = (values if self._inverse is None else values[self._inverse]).view(self._shape)
        if out is None:
            return value
        with torch.no_grad():
            return out.copy_(value)


def _count(place: slice | torch.Tensor) -> int:
    return int(place.stop - place.start) if isinstance(place, slice) else len(place)


def in_fp32(values: torch.Tensor, name: str) -> torch.Tensor:
    """The values on the CPU, in fp32. UsageError for what has no fp32 form."""
    if values.layout is not torch.strided:
        raise UsageError(
            f"a sparse tensor for key {name}: push a table's rows with rows= and values=, or gradient.to_dense()"
        )
    if values.is_meta:
        raise UsageError(f"a tensor without values (on the meta device) for key {name}")
    if values.is_complex():
        raise UsageError(f"a complex tensor for key {name}: servers keep fp32; use torch.view_as_real")
    return values.detach().to("cpu", torch.float32)


# ---- What a push and a pull return, and how a script's threads hear of a roll-back ----

LOOK_AGAIN_S = 0.5  # how often it asks how far others are, where no answer comes by itself (streaming)
NEVER, NEVER_YET = float("inf"), float("-inf")


class StoreWaits:
    """Waits for a store, on the script's threads.

    A step that a thread knows is of some generation. After a roll-back its next call raises StoreRolledBack, once:
    else it would wait for a version that can only come when the thread itself goes back.
    """

    def __init__(self, exchange: KeyExchange) -> None:
        self._exchange, self._known = exchange, threading.local()

    @property
    def generation(self) -> int:
        """The generation of what the calling thread knows."""
        if not hasattr(self._known, "generation"):
            self._known.generation = self._exchange.rolled_back
        found: int = self._known.generation
        return found

    def knows(self, generation: int) -> None:
        """The calling thread has been told where keys are in this generation."""
        self._known.generation = generation

    def ask(self, ready: Callable[[], bool], generation: int) -> bool:
        """Is it ready? Raises what `until` would raise."""
        try:
            return self._exchange.ask(ready, generation)
        except StoreRolledBack:
            self.knows(self._exchange.rolled_back)
            raise

    def until(
        self, ready: Callable[[], bool], describe: Callable[[], str], generation: int | None = None, *,
        of: tuple[Sequence[int], Iterable[int]] = ((), ()), then: Callable[[], Sequence[Effect] | None] | None = None,
    ) -> None:  # fmt: skip
        """Wait until it is ready, then do something (`then`), under one lock. `generation`: by default the thread's.

        `of` says which shards and contributors it depends on: under a streaming policy nobody tells how far a
        contributor is that is another worker's.
        """
        exchange, began, done = self._exchange, time.monotonic(), list[bool]()
        generation = self.generation if generation is None else generation
        streaming, (shards, contributors) = exchange.machine.by_clocks, of

        def then_or_again() -> Sequence[Effect]:
            if not ready():
                return exchange.machine.watch(shards, contributors)
            done.append(True)
            return then() or () if then is not None else ()

        try:
            while not done:
                again = time.monotonic() + LOOK_AGAIN_S if streaming else NEVER
                exchange.wait(
                    lambda again=again: ready() or time.monotonic() > again, describe, generation,  # type: ignore[misc]
                    waited=time.monotonic() - began, then=then_or_again,
                )  # fmt: skip
        except StoreRolledBack:
            self.knows(exchange.rolled_back)
            raise


class Push:
    """A push on its way. Any thread may ask it."""

    def __init__(
        self, exchange: KeyExchange, waiting: StoreWaits, name: str, shards: Sequence[int], step: int, contributor: int
    ) -> None:
        self._exchange, self._waiting, self._name, self._shards = exchange, waiting, name, shards
        self._step, self._contributor = step, contributor
        self._generation, self._looked = waiting.generation, NEVER_YET

    def done(self) -> bool:
        """True if the push counts, durably (under ``rp.Sync()``: its round is complete). Raises what `result` raises
        when that can never be."""
        counts = self._waiting.ask(self._counts, self._generation)
        if not counts and self._exchange.machine.by_clocks and time.monotonic() > self._looked + LOOK_AGAIN_S:
            self._looked = time.monotonic()  # nobody tells how far a contributor is that is another worker's by now
            self._exchange.watch(self._shards, [self._contributor])
        return counts

    def result(self) -> None:
        """Wait until the push counts. Raises StoreRolledBack, or JobAborted when the job is over."""
        self._waiting.until(
            self._counts, lambda: f"step {self._step} of key {self._name} to count (contributor {self._contributor})",
            self._generation, of=(self._shards, [self._contributor]),
        )  # fmt: skip

    def _counts(self) -> bool:
        return self._exchange.machine.counts(self._shards, self._contributor, self._step)


class Pull:
    """A pull on its way. Any thread may ask it."""

    def __init__(
        self, waiting: StoreWaits, reading: KeyReading, requests: Mapping[int, KeyRequest], generation: int
    ) -> None:
        self._waiting, self._reading, self._requests, self._generation = waiting, reading, dict(requests), generation

    def done(self) -> bool:
        """True if the value is here. Raises what `result` raises when it cannot come any more."""
        return self._waiting.ask(self._here, self._generation)

    def result(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the value, and copy it into `out` (the shape of what was asked for), or into a new fp32 tensor.

        Each call copies the same value. Raises StoreRolledBack, or JobAborted when the job is over.
        """
        self._reading.check(out)
        parts: dict[int, bytearray] = {}
        self._waiting.until(
            self._here, lambda: f"a value of key {self._reading.name}", self._generation,
            then=lambda: parts.update({s: one.value[1] for s, one in self._requests.items() if one.value is not None}),
        )  # fmt: skip
        return self._reading.filled(parts, out)

    def _here(self) -> bool:
        return all(asked.value is not None for asked in self._requests.values())


def checked_step(step: int | None, most: int, name: str) -> None:
    """Raise UsageError for a step that a key never gets to."""
    if step is not None and not 0 <= step <= most:
        raise UsageError(f"step {step} of key {name}: this store has steps={most}, from 0")


# ---- A key that is a table: its rows are on the servers only, and are pushed and pulled by their numbers ----

_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class TableKey:
    """A key of `rows` by `columns`, which nobody holds as a whole."""

    def __init__(self, index: int, layout: Layout) -> None:
        spec = layout.tables[index]
        self.name, self.shape = spec.name, spec.shape
        self._parts = parts_of(layout, index)

    @property
    def shards(self) -> list[int]:
        """The shards that are its parts. A push goes to all of them: to most of them, few bytes."""
        return list(self._parts)

    def first(self, values: torch.Tensor) -> dict[int, memoryview]:
        """UsageError: servers make a table's first rows."""
        raise UsageError(f"a first value for key {self.name}, which is a table: servers make its rows (table_std=)")

    def begun(self) -> dict[int, memoryview]:
        """By shard, what is sent so that servers make the first rows."""
        return dict.fromkeys(self._parts, memoryview(b""))

    def pushed(self, values: torch.Tensor, rows: Rows) -> dict[int, memoryview]:
        """By shard, the bytes of a push. A row that is named twice gets the sum of its values."""
        ids = self._numbers(rows)
        if tuple(values.shape) != (*ids.shape, self.shape[1]):
            raise UsageError(
                f"values of shape {list(values.shape)} for rows {list(ids.shape)} of key {self.name}: "
                f"{[*ids.shape, self.shape[1]]} are wanted"
            )
        unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        sums = torch.zeros(len(unique), self.shape[1], dtype=torch.float32, device="cpu")
        sums.index_add_(0, inverse, in_fp32(values, self.name).reshape(-1, self.shape[1]))
        split = split_rows(unique, self._parts)
        return {
            shard: encode_gradient(unique[place] // len(self._parts), sums[place]) for shard, place in split.items()
        }

    def reading(self, rows: Rows) -> KeyReading:
        """What a pull of these rows asks for."""
        ids = self._numbers(rows)
        unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        places = {shard: place for shard, place in split_rows(unique, self._parts).items() if len(place)}
        payloads = {shard: encode_ids(unique[place] // len(self._parts)) for shard, place in places.items()}
        return KeyReading(self.name, (*ids.shape, self.shape[1]), places, self.shape[1], payloads, inverse)

    def _numbers(self, rows: Rows) -> torch.Tensor:
        if rows is None:
            raise UsageError(f"key {self.name} is a table, of which nobody holds all: say which rows with rows=")
        try:
            ids = torch.as_tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:  # ragged, not numbers, beyond 64 bits
            raise UsageError(f"rows of key {self.name} are whole numbers, in a tensor or a list: {error}") from None
        if not ids.numel():
            ids = ids.to(torch.int64)  # an empty list has no dtype of its own
        if ids.dtype not in _WHOLE:
            raise UsageError(f"rows of key {self.name} are whole numbers, not {str(ids.dtype).removeprefix('torch.')}")
        ids = ids.to(torch.int64)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            wrong, most = int(ids.min()) if int(ids.min()) < 0 else int(ids.max()), self.shape[0]
            raise UsageError(f"there is no row {wrong} of key {self.name}, which has {most}: they count from 0")
        return ids


# ---- The store ----

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
        self._exchange, self._done, self._waiting = exchange, done, StoreWaits(exchange)
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
        self._until_known(name, shards, one)
        self._waiting.until(
            lambda: self._known(shards, one), lambda: f"the first value of key {name}",
            then=lambda: found.append(self._next(shards, one)),
        )  # fmt: skip
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
            self._waiting.until(
                lambda: all(self._exchange.machine.counts(shards, one) for one in mine),
                lambda: f"this worker's pushes to key {name} to count", of=(shards, mine),
                then=lambda: parts.update(self._exchange.with_pushes(shards)),
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
        self._waiting.until(
            lambda: not exchange.machine.unfinished(), self._last,
            then=lambda: told.append((exchange.rolled_back, exchange.view.generation)),
        )  # fmt: skip
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
        worker = self._exchange.view.owner(LAST, contributor)
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
