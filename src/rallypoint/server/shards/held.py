"""What a server holds of a shard, whatever kind of shard it is; and which kind that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rallypoint.codec.base.scratch import Scratch
from rallypoint.config import JobConfig
from rallypoint.core.layout import Layout, Shard
from rallypoint.core.modes import Holder
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.server.shards.averaged import AveragedShard
from rallypoint.server.shards.owned import OwnedShard
from rallypoint.server.shards.rows import OwnedRows
from rallypoint.store.record import ShardRecord


class HeldShard(Protocol):
    """One shard's tensors, as primary or backup. Only the owner's thread calls it; what happens is decided elsewhere.

    A step on a primary: `take` the first contribution, `add` the others, `mean`, then `norm` if a decision is awaited,
    and `apply`, which makes the next version. A buffer that is passed in belongs to the shard from then on.
    """

    @property
    def shard(self) -> Shard:
        """Which one."""

    @property
    def measured(self) -> bool:
        """Does its gradient count in the global norm?"""

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """The version that all begin with has come, in so many bytes."""

    def take(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """The first contribution (a backup's: the finished gradient). With `base`, see `OwnedShard.compensate`."""

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """One more contribution."""

    def mean(self, total_weight: float) -> None:
        """Turn the sum into the weighted mean."""

    def norm(self) -> float:
        """The 2-norm of the finished gradient."""

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Make the next version. With `replicate`: the scaled gradient for the backup, and its bytes."""

    def abandon(self) -> None:
        """Forget the sum in progress."""

    def release(self) -> None:
        """Let go of every buffer."""

    def keeps(self, version: int) -> bool:
        """Can that version still be sent?"""

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as it is: codec number, buffer (not retained), bytes."""

    def encoded(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as followers get it: see `raw`."""

    def named(self, header: Header) -> Header:
        """The header of a version's frame, as what the version is."""

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """Everything there is at `version`; with `wires` the last versions too. Views, not copies."""

    def load(self, record: ShardRecord) -> None:
        """Become what `record` says."""


_PARAMETERS: dict[Holder, type[OwnedShard] | type[AveragedShard]] = {
    Holder.SERVERS: OwnedShard, Holder.WORKERS: AveragedShard,
}  # fmt: skip


class Shelf:
    """Makes room for shards: the one place that knows which kind a shard is."""

    def __init__(self, config: JobConfig, layout: Layout, pool: BufferPool, pools: BufferPools) -> None:
        self._config, self._layout, self._pool, self._pools = config, layout, pool, pools
        self._parameters = _PARAMETERS[config.mode.holder]
        self._scratch = Scratch()  # of the owner's thread, which encodes versions

    def hold(self, index: int) -> HeldShard:
        """Room for a shard."""
        place = self._layout.shards[index]
        if place.part is not None:
            return OwnedRows(place, self._layout.tables[place.part.table].name, self._config, self._pools)
        kind = self._parameters if place.role == "parameters" else OwnedShard
        return kind(place, self._config, self._pool, self._scratch)
