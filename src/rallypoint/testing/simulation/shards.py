"""A simulated server's shards: the product's own, with a few floats, beside the names that say what these must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from rallypoint.config import of_group
from rallypoint.core.layout import Shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.optim import InPlace
from rallypoint.server.held import ShardFactory
from rallypoint.server.shard import AveragedShard, GradientSum, OwnedShard, norms_of
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.names import NBYTES, NamedBuffer, NamedShard
from rallypoint.testing.simulation.replicas.contents import Content, Mean, State
from rallypoint.testing.simulation.replicas.floats import WORDS

if TYPE_CHECKING:
    from rallypoint.testing.simulation.server import SimulatedServer


class NamedShards(ShardFactory):
    """Allocates shards of names, and where names are of bytes the product's own beside them.

    Attributes:
        pool: of the buffers with floats.
    """

    def __init__(self, server: SimulatedServer) -> None:
        job, self.pool = server.job, BufferPool(WORDS)
        super().__init__(job.config, job.layout, self.pool, BufferPools(), InPlace())
        self._server = server

    def allocate(self, index: int) -> Any:
        """A shard. Tables, loss scales and sets of contributions have names only."""
        server, job = self._server, self._server.job
        if not job.same_bytes or index in job.table_shards or index == job.scale_shard:
            return NamedShard(server, job.layout.shards[index])
        return RealShard(server, job.layout.shards[index], cast(Any, super().allocate(index)), self.pool)


class RealShard(NamedShard):
    """Does with the floats what it does with the names, and compares them whenever they leave."""

    def __init__(
        self, server: SimulatedServer, shard: Shard, real: OwnedShard | AveragedShard, pool: BufferPool
    ) -> None:
        super().__init__(server, shard)
        self.real, self._pool, self._floats = real, pool, server.job.floats

    @property
    def buffers(self) -> int:
        """How many of the pool's buffers it holds for a use."""
        sums = self.real._sum
        assert isinstance(sums, GradientSum)
        return sum(kept._pool is self._pool for kept in (*sums._parts.values(), *self.real._wire._raw.values()))

    def _filled(self, content: Content) -> Buffer:
        buffer = self._pool.take()
        if content is not None:  # None: what a backup gets of a step that is skipped
            buffer.tensor.copy_(self._floats.of(content.content if isinstance(content, State) else content))
        return buffer

    def install(self, payload: NamedBuffer, version: int = 0, nbytes: int = 0) -> None:
        super().install(payload, version, nbytes)
        self.real.install(self._filled(self.master), version, NBYTES)

    def take(self, payload: NamedBuffer, weight: float, base: int | None = None, at: int = 0) -> None:
        super().take(payload, weight, base, at)
        self.real.take(self._filled(self.parts[at].content), weight, base, at)

    def merge(self, left: int, right: int) -> None:
        self.real.merge(left, right)  # that drops the right one
        part = self.parts[left]
        part.content = self.server.job.add(part.content, self.parts[right].content)
        super().discard(right)

    def discard(self, at: int) -> None:
        super().discard(at)
        self.real.discard(at)

    def mean(self, total_weight: float) -> None:
        super().mean(total_weight)
        self.real.mean(total_weight)

    def norms(self) -> tuple[float, ...]:
        assert self.real.norms() == norms_of(self._floats.of(self.parts[0].content)), "the sum has other floats"
        return super().norms()

    def first_not_finite(self) -> int:
        assert self.real.first_not_finite() < 0
        return super().first_not_finite()

    def apply(self, update: Apply) -> tuple[Any, int] | None:
        part, before = self.parts[0], self.master
        finished = part.content
        left, given = self.real.apply(update), super().apply(update)
        self._name(update, before, finished, part.content)
        if left is not None:
            part.real = left[0], self._floats.of(part.content)
        assert self.wire.keys() == set(self.real._wire), f"shard {self.shard.index} keeps other versions"
        return given

    def _name(self, update: Apply, before: Content, finished: Content, scaled: Content) -> None:
        if scaled != finished:
            assert update.scale is not None
            self._floats.scaled(scaled, finished, update.scale if self.real.measured else 1.0)  # buffers are copied
        if update.scale is None or isinstance(self.master, Mean):
            return
        if self.real.measured:
            config = of_group(self.server.job.config, self.shard.group)
            self._floats.updated(self.master, before, scaled, update, config, self.shard.group)
        else:
            self._floats.scaled(self.master, scaled, 1.0)

    def release(self) -> None:
        self.abandon()
        self.real.release()

    def raw(self, version: int) -> tuple[int, Any, int]:
        code, named, nbytes = super().raw(version)
        content = self.wire[version].content if isinstance(self.wire[version], Mean) else self.wire[version]
        if content is not None and not isinstance(content, State):
            named.real = self.real.encoded(version)[1], self._floats.of(content)
            assert named.content is not None
        return code, named, nbytes

    encoded = raw

    def digest(self, before: bytes) -> bytes:
        return super().digest(before) + self.real.digest(before)

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        record = self.real.state(version, clocks, wires=wires)
        master = self.master if wires or self.real.measured else self.wire[version]
        right = self._record(master, self.wire if wires else {}, version, clocks)
        assert (record.arrays.keys(), record.scalars) == (right.arrays.keys(), right.scalars), "another state"
        assert all((record.arrays[name] == array).all() for name, array in right.arrays.items()), "another state"
        return super().state(version, clocks, wires=wires)

    def load(self, record: ShardRecord) -> None:
        _, wires = self.server.world.tokens.of(record.arrays["master"])
        super().load(record)
        self.real.load(self._record(self.master, wires or {}, record.version, record.clocks))

    def _record(self, master: Content, wires: dict[int, Content], version: int, clocks: Sequence[int]) -> ShardRecord:
        """What these names stand for."""
        master = master.content if isinstance(master, State) else master
        moments, numbers = self._floats.moments(master)
        arrays = {"master": self._floats.of(master), **moments}
        arrays |= {f"wire-{kept}": self._floats.of(content) for kept, content in wires.items()}
        plain = {name: array.clone().numpy() for name, array in arrays.items()}
        return ShardRecord(self.shard.index, version, plain, dict(numbers), tuple(clocks))
