"""A simulated server's shards: the product's own, with a few floats, beside the names that say what these must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rallypoint.codec.base import encode_gradient
from rallypoint.config import of_group
from rallypoint.core.layout import Shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.optim import InPlace
from rallypoint.server.held import ShardFactory
from rallypoint.server.rows import OwnedRows, first_rows, fits_rows
from rallypoint.server.shard import fits, norms_of
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.names import NBYTES, NamedBuffer, NamedShard
from rallypoint.testing.simulation.replicas.contents import Content, Mean, State, name_of, scale_words
from rallypoint.testing.simulation.replicas.floats import COLUMNS, ROWS, WORDS

if TYPE_CHECKING:
    from rallypoint.testing.simulation.server import SimulatedServer


class NamedShards(ShardFactory):
    """Allocates shards of names, and where names are of bytes the product's own beside them.

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
        """A shard."""
        server, job, real = self._server, self._server.job, cast(Any, super().allocate(index))
        return (RealRows if index in job.table_shards else RealShard)(server, job.layout.shards[index], real, self)


class RealShard(NamedShard):
    """Does with the floats what it does with the names, and compares them whenever they leave."""

    _fits = staticmethod(fits)  # would a backup take such a state?

    def __init__(self, server: SimulatedServer, shard: Shard, real: Any, factory: NamedShards) -> None:
        super().__init__(server, shard)
        self.real, self._factory, self._floats = real, factory, server.job.floats
        self._config = of_group(server.job.config, shard.group)

    @property
    def buffers(self) -> int:
        """How many of the pool's buffers it holds for a use."""
        kept = (*self.real._sum._parts.values(), *self.real._wire._raw.values())
        return sum(buffer._pool is self._factory.pool for buffer in kept)

    @property
    def _versions(self) -> set[int]:
        return set(self.real._wire)

    @property
    def loss_scale(self) -> float:
        named = super().loss_scale
        assert self.real.loss_scale == named, "another loss scale"
        return named

    def _of(self, content: Content) -> torch.Tensor:
        return self._floats.of(name_of(content))

    def _filled(self, content: Content) -> Buffer:
        buffer = self._factory.pool.take()
        buffer.tensor.copy_(self._of(content.content if isinstance(content, State) else content))
        return buffer

    def install(self, payload: NamedBuffer, version: int = 0, nbytes: int = 0) -> None:
        super().install(payload, version, nbytes)
        self.real.install(self._filled(self.master), version, NBYTES)

    def take(self, payload: NamedBuffer, weight: float, base: int | None = None, at: int = 0) -> None:
        super().take(payload, weight, base, at)
        self.real.take(self._filled(self.parts[at].content), weight, base, at)

    def add(self, payload: NamedBuffer, weight: float, base: int | None = None) -> None:
        super().add(payload, weight, base)
        self.real.add(self._filled(payload.content), weight, base)

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
        assert self.real.norms() == norms_of(self._gradient(self.parts[0].content)), "the sum has other floats"
        return super().norms()

    def _gradient(self, content: Content) -> torch.Tensor:
        return self._of(content)

    def first_not_finite(self) -> int:
        assert self.real.first_not_finite() < 0
        return super().first_not_finite()

    def apply(self, update: Apply) -> tuple[Any, int] | None:
        part, before = self.parts[0], self.master
        finished = part.content
        left, given = self.real.apply(update), super().apply(update)
        self._name(update, before, finished, part.content)
        if left is not None:
            part.real = left[0], self._payload(part.content, update)
        assert self.wire.keys() == self._versions, f"shard {self.shard.index} keeps other versions"
        return given

    def _payload(self, content: Content, update: Apply) -> torch.Tensor:
        """What a backup is sent of this finished gradient."""
        return self._of(content)

    def _name(self, update: Apply, before: Content, finished: Content, scaled: Content) -> None:
        gradient, master, made = name_of(scaled), name_of(before), name_of(self.master)
        if self.shard.index == self.server.job.scale_shard:
            self._floats.begins(made, scale_words(made))
            return
        if gradient != name_of(finished):
            assert update.scale is not None
            clipped = update.scale if self.real.measured else 1.0  # buffers are copied
            self._floats.scaled(gradient, name_of(finished), clipped)
        if update.scale is None or isinstance(self.master, Mean):
            return
        if self.real.measured:
            self._floats.updated(made, master, gradient, update, self._config, self.shard.group)
        else:
            self._floats.scaled(made, gradient, 1.0)

    def release(self) -> None:
        self.abandon()
        self.real.release()

    def raw(self, version: int) -> tuple[int, Any, int]:
        code, named, nbytes = super().raw(version)
        content = self.wire[version].content if isinstance(self.wire[version], Mean) else self.wire[version]
        if content is not None and not isinstance(content, State):
            named.real = self.real.encoded(version)[1], self._of(content)
            assert named.content is not None
        return code, named, nbytes

    encoded = raw

    def digest(self, before: bytes) -> bytes:
        return super().digest(before) + bytes(self.real.digest(before))

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        record = self.real.state(version, clocks, wires=wires)
        master = self.master if wires or self.real.measured else self.wire[version]
        right = self._record(master, self.wire if wires else {}, version, clocks)
        assert (record.arrays.keys(), record.scalars) == (right.arrays.keys(), right.scalars), "another state"
        assert all(np.array_equal(record.arrays[name], array) for name, array in right.arrays.items()), "another state"
        assert not wires or self._fits(record, self.shard, self._config), "a state that nobody takes"
        return super().state(version, clocks, wires=wires)

    def load(self, record: ShardRecord) -> None:
        _, wires = self.server.world.tokens.of(record.arrays["master"])
        super().load(record)
        self.real.load(self._record(self.master, wires or {}, record.version, record.clocks))

    def _record(self, master: Content, wires: dict[int, Content], version: int, clocks: Sequence[int]) -> ShardRecord:
        """What these names stand for."""
        master = master.content if isinstance(master, State) else master
        moments, numbers = self._floats.moments(name_of(master))
        arrays = {"master": self._of(master), **moments, **self._earlier(wires)}
        plain = {name: array.clone().numpy() for name, array in arrays.items()}
        return ShardRecord(self.shard.index, version, plain, dict(numbers), tuple(clocks))

    def _earlier(self, wires: dict[int, Content]) -> dict[str, torch.Tensor]:
        return {f"wire-{kept}": self._of(content) for kept, content in wires.items()}


class RealRows(RealShard, OwnedRows):  # type: ignore[misc, override]  # (who asks for rows looks whether it is one)
    """The same for a part of a table: sums of few rows, and the old rows of the versions before the newest."""

    _fits = staticmethod(fits_rows)
    buffers = 0  # what it takes is copied

    @property
    def _versions(self) -> set[int]:
        assert all(map(self.real.keeps, self.wire)), f"shard {self.shard.index} does not keep {list(self.wire)}"
        return {*self.real._before, self.real._version}

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

    def raw(self, version: int) -> tuple[int, Any, int]:
        assert self.real.raw(version)[2] == 0
        return NamedShard.raw(self, version)

    encoded = raw

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
