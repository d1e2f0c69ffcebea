"""A simulated server's shards: the product's own, with a few floats, beside the names that say what these must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rallypoint.codec.base import encode_gradient
from rallypoint.config import of_group
from rallypoint.core.layout import Shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import Header, Kind
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.optim import InPlace
from rallypoint.server.held import ShardFactory
from rallypoint.server.rows import OwnedRows, first_rows, fits_rows
from rallypoint.server.shard import StreamedShard, fits, norms_of
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.names import NBYTES, NamedBuffer
from rallypoint.testing.simulation.operating import server_checks
from rallypoint.testing.simulation.replicas import contents
from rallypoint.testing.simulation.replicas.contents import Content, Mean, NamedSet, State, name_of
from rallypoint.testing.simulation.replicas.floats import COLUMNS, ROWS, WORDS

if TYPE_CHECKING:
    from rallypoint.testing.simulation.server import SimulatedServer


class NamedShards(ShardFactory):
    """Allocates shards of names, with the product's own.

    Attributes:
        pool: of the buffers with floats; `pools`: of those with rows.
    """

    def __init__(self, server: SimulatedServer) -> None:
        job, self.pool, self.pools = server.job, BufferPool(WORDS), BufferPools()
        super().__init__(job.config, job.layout, self.pool, self.pools, InPlace())
        self._server = server

    @property
    def held(self) -> int:
        """How many buffers somebody holds, beside the empty one here."""
        return sum(pool.made - len(pool.free) for pool in (self.pool, *self.pools._pools.values())) - 1

    def allocate(self, index: int) -> Any:
        """The only place that knows which of them a shard is."""
        server, job, real = self._server, self._server.job, cast(Any, super().allocate(index))
        kind = NamedShard if index not in job.absent else NamedWords if job.streamed else NamedRows
        return kind(server, job.layout.shards[index], real, self)


class NamedShard:
    """A `HeldShard`: names, and the product's own shard, which does with floats what is done with the names here. They
    are compared whenever they leave."""

    _fits = staticmethod(fits)  # would a backup take such a state?

    def __init__(self, server: SimulatedServer, shard: Shard, real: Any, factory: NamedShards) -> None:
        self.server, self.shard, self.real, self.measured = server, shard, real, real.measured
        self._factory, self._floats = factory, server.job.floats
        self._config = of_group(server.job.config, shard.group)
        self.master: Content = 0
        self.parts: dict[int, NamedBuffer] = {}  # of the sum in progress, by the first replica
        self.wire: dict[int, Content] = {}
        self.step = -1  # of the sum that is measured
        self.late = -1  # how many updates there were since what the last contribution was computed from; -1: unknown
        self.encoded, self.keeps, self.digest = self.raw, real.keeps, real.digest

    @property
    def buffers(self) -> int:
        """How many of the pool's buffers it holds for a use."""
        kept = (*self.real._sum._parts.values(), *self.real._wire._raw.values())
        return sum(buffer._pool is self._factory.pool for buffer in kept)

    @property
    def loss_scale(self) -> float:
        named = contents.scale_of(self.master) if self.shard.index == self.server.job.scale_shard else 0.0
        assert self.real.loss_scale == named, "another loss scale"
        return named

    def _of(self, content: Content) -> torch.Tensor:
        return self._floats.of(name_of(content))

    _gradient = _of

    def _filled(self, content: Content) -> Buffer:
        buffer = self._factory.pool.take()
        buffer.tensor.copy_(self._of(content.content if isinstance(content, State) else content))
        return buffer

    def _payload(self, content: Content, update: Apply) -> torch.Tensor:
        """What a backup is sent of this finished gradient."""
        return self._of(content)

    # ---- a step ----

    def install(self, payload: NamedBuffer, version: int = 0, nbytes: int = 0) -> None:
        job, index = self.server.job, self.shard.index
        right = nbytes == (0 if index in job.table_shards else NBYTES) or job.averages(index)
        assert right, f"a first version of {nbytes} bytes"
        content = job.first(index) if index in job.table_shards else payload.content
        payload.release()
        self.master = State(content) if job.averages(index) else content
        self.real.install(self._filled(self.master), version, NBYTES)
        self._keep(version, version)

    def _keep(self, version: int, oldest: int, pinned: int = -1) -> None:
        """The master is this version now."""
        self.wire[version] = self.master
        self.wire = {v: content for v, content in self.wire.items() if v >= oldest or v == pinned}
        server_checks.note_held(self.server, self.shard.index, version)

    def take(self, payload: NamedBuffer, weight: float, base: int | None = None, at: int = 0) -> None:
        assert at not in self.parts, f"{self.server.node.name}: shard {self.shard.index}: part {at} is there"
        self.parts[at] = payload
        self.real.take(_came(self, payload, base), weight, base, at)

    def add(self, payload: NamedBuffer, weight: float, base: int | None = None) -> None:
        came = _came(self, payload, base)
        self.parts[0].add_(payload)
        payload.release()
        self.real.add(came, weight, base)

    def merge(self, left: int, right: int) -> None:
        self.real.merge(left, right)
        other = self.parts.pop(right)
        self.parts[left].add_(other)
        other.release()

    def discard(self, at: int) -> None:
        self.parts.pop(at).release()
        self.real.discard(at)

    def mean(self, total_weight: float) -> None:
        self.parts[0].content = self.server.job.mean(self.parts[0].content, total_weight)
        self.real.mean(total_weight)

    def norms(self) -> tuple[float, ...]:
        assert self.real.norms() == norms_of(self._gradient(self.parts[0].content)), "the sum has other floats"
        norm, at = self.server.job.look(self.shard.index, self.step, self.parts[0].content)
        return (norm if at < 0 else math.inf,)

    def first_not_finite(self) -> int:
        assert self.real.first_not_finite() < 0
        return self.server.job.look(self.shard.index, self.step, self.parts[0].content)[1]

    def apply(self, update: Apply) -> tuple[Any, int] | None:
        server_checks.check_applied(self.server, self.shard.index, update)
        rated = self.late >= 0 and getattr(self.server.job.sync, "scale_by_staleness", False)
        assert not rated or update.rate == 1.0 / max(1, self.late), f"rate {update.rate} after {self.late} updates"
        part, left = self.parts.pop(0), self.real.apply(update)
        self.master = self._next(part, update)
        self._keep(update.version, update.oldest, update.pinned)
        kept = {version for version in range(max(0, update.oldest - 1), update.version + 2) if self.real.keeps(version)}
        assert kept | {update.pinned} == {*self.wire, update.pinned}, f"shard {self.shard.index} keeps other versions"
        if left is None:
            part.release()
            return None
        part.real = left[0], self._payload(part.content, update)
        return part, NBYTES

    def _next(self, part: NamedBuffer, update: Apply) -> Content:
        job, floats, before, finished = self.server.job, self._floats, self.master, part.content
        if self.shard.index == job.scale_shard:
            after = contents.scale_after(before, skipped=update.scale is None)
            floats.begins(after, contents.scale_words(after))
            return after
        if update.scale is None:
            return Mean(None) if job.averages(self.shard.index) else before
        part.content = scaled = job.scaled(finished, update.scale)
        gradient = name_of(scaled)
        floats.scaled(gradient, name_of(finished), update.scale if self.measured else 1.0)  # buffers are copied
        if job.averages(self.shard.index):
            return Mean(scaled)
        new = job.update(before, scaled, update.version - 1, update.reductions, update.rate)
        if self.measured:
            floats.updated(name_of(new), name_of(before), gradient, update, self._config, self.shard.group)
        else:
            floats.scaled(name_of(new), gradient, 1.0)
        return new

    def abandon(self) -> None:
        for at in list(self.parts):
            self.discard(at)

    def release(self) -> None:
        self.abandon()
        self.real.release()

    # ---- versions, and the whole state ----

    def raw(self, version: int) -> tuple[int, Any, int]:
        content, named = self.wire[version], NamedBuffer(self.wire[version])
        content = content.content if isinstance(content, Mean) else content
        if content is not None and not isinstance(content, State):
            named.real = self.real.raw(version)[1], self._of(content)
            assert named.content is not None
        return 0, named, NBYTES

    def named(self, header: Header) -> Header:
        """As it is, or as a whole state: else a content says itself what it is."""
        return header._replace(kind=Kind.STATE) if isinstance(self.wire.get(header.step), State) else header

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        record = self.real.state(version, clocks, wires=wires)
        master = self.master if wires or self.measured else self.wire[version]
        right = self._record(master, self.wire if wires else {}, version, clocks)
        assert (record.arrays.keys(), record.scalars) == (right.arrays.keys(), right.scalars), "another state"
        assert all(np.array_equal(record.arrays[name], array) for name, array in right.arrays.items()), "another state"
        assert not wires or self._fits(record, self.shard, self._config), "a state that nobody takes"
        name = self.server.world.tokens.bytes_of((master, dict(self.wire) if wires else None))
        return ShardRecord(self.shard.index, version, {"master": np.frombuffer(name, np.uint8)}, {}, tuple(clocks))

    def load(self, record: ShardRecord) -> None:
        self.master, wires = self.server.world.tokens.of(record.arrays["master"])
        self.real.load(self._record(self.master, wires or {}, record.version, record.clocks))
        self.wire = dict(wires or ())
        if wires is not None:
            server_checks.note_taken(self.server, "copy", self.shard.index, record.version)
            for version in sorted(wires):
                server_checks.note_held(self.server, self.shard.index, version)
        else:
            self.master = State(self.master) if self.server.job.averages(self.shard.index) else self.master
            self._keep(record.version, record.version)

    def _record(self, master: Content, wires: dict[int, Content], version: int, clocks: Sequence[int]) -> ShardRecord:
        """What these names stand for."""
        averaged = self.measured and self.server.job.average is not None
        moments, numbers = self._floats.moments(name_of(master), averaged=averaged)
        arrays = {"master": self._of(master), **moments, **self._earlier(wires)}
        plain = {name: array.clone().numpy() for name, array in arrays.items()}
        return ShardRecord(self.shard.index, version, plain, dict(numbers), tuple(clocks))

    def _earlier(self, wires: dict[int, Content]) -> dict[str, torch.Tensor]:
        return {f"wire-{kept}": self._of(content) for kept, content in wires.items()}


def _came(self: NamedShard, payload: NamedBuffer, base: int | None) -> Buffer:
    """The floats of a contribution; its payload has the name that is to be added. `base`: see `compensate`."""
    payload.content = content = server_checks.decoded(self.server, self.shard.index, payload.content)
    came, seen, newest = self._filled(content), getattr(content, "seen", None), max(self.wire, default=-1)
    self.late = -1 if seen is None or not self.measured else 0 if base is None else newest - base
    if self.late >= 0 and (then := self.wire.get(newest - self.late)) is not None:
        assert (then, name_of(then)) == (seen, name_of(seen)), f"it was not computed from {newest - self.late}"
        if base is not None:
            names = name_of(content), name_of(self.master), name_of(then)
            payload.content = NamedSet(content, contents.combine(*names, 83))
            self._floats.compensated(payload.content.name, *names, self._config.compensation)
    return came


def _nothing(self: NamedShard, version: int) -> tuple[int, Any, int]:
    """Nothing but that it exists."""
    return 0, NamedBuffer(self.wire[version]), int(self.real.raw(version)[2])


class NamedWords(NamedShard, StreamedShard):  # type: ignore[misc]  # (who asks for words looks whether it is one)
    """The same for streamed parameters."""

    raw = _nothing

    def words(self, version: int, first: int, count: int) -> tuple[Any, Any]:
        """These words of a kept version; of none its name alone."""
        (buffer, words), floats = self.real.words(version, first, count), self._of(self.wire[version])
        same = torch.equal(torch.frombuffer(words, dtype=torch.float32), floats[first : first + count])
        assert same, f"words of shard {self.shard.index} at version {version} have other floats"
        named = NamedBuffer(self.wire[version]).retain()
        named.real, named.nbytes = (buffer, floats[:0]), 4 * count
        return named, named


class NamedRows(NamedShard, OwnedRows):  # type: ignore[misc, override]  # (who asks for rows looks whether it is one)
    """The same for a part of a table: sums of few rows, and the old rows of the versions before the newest."""

    _fits = staticmethod(fits_rows)
    buffers = 0  # what it takes is copied

    def _filled(self, content: Content) -> Buffer:
        payload = self._encoded_rows(content)
        buffer = self._factory.pools.take(4 * len(payload))
        buffer.tensor[: len(payload)] = payload
        return buffer

    def _encoded_rows(self, content: Content) -> torch.Tensor:
        """The rows of a gradient as they travel."""
        ids = self._floats.rows(name_of(content))
        return torch.frombuffer(encode_gradient(ids, self._gradient(content)), dtype=torch.float32)

    def install(self, payload: Any, version: int = 0, nbytes: int = 0) -> None:
        job, part = self.server.job, self.shard.part
        assert part is not None
        whole = first_rows(job.config.seed, "table", np.arange(ROWS * part.parts), COLUMNS)
        first = whole[part.part :: part.parts].reshape(-1).tolist()
        self._floats.begins(name_of(job.first(self.shard.index)), first)
        super().install(payload, version, nbytes)

    def _gradient(self, content: Content) -> torch.Tensor:
        return self._of(content).view(ROWS, COLUMNS)[self._floats.rows(name_of(content))]

    def _payload(self, content: Content, update: Apply) -> torch.Tensor:
        return self._encoded_rows(None if update.scale is None else content)

    raw = _nothing

    def rows(self, version: int, ids: torch.Tensor) -> tuple[Any, int]:
        """These rows of a kept version; of none its name alone."""
        buffer, nbytes = self.real.rows(version, ids)
        named = NamedBuffer(self.wire[version]).retain()
        named.real = buffer, self._of(self.wire[version]).view(ROWS, COLUMNS)[ids].view(-1)
        assert nbytes == 4 * COLUMNS * len(ids)
        return named, nbytes

    def _earlier(self, wires: dict[int, Content]) -> dict[str, torch.Tensor]:
        found = dict[str, torch.Tensor]()
        for kept in wires.keys() - {max(wires, default=0)}:
            after, before = name_of(wires[kept + 1]), name_of(wires[kept])
            ids = self._floats.rows(after if after != before else 0)
            rows = self._floats.of(before).view(ROWS, COLUMNS)[ids]
            found |= {f"changed-{kept}": ids, f"before-{kept}": rows.view(-1)}
        return found
