"""The interface of a shard on a server, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rallypoint.codec.base import Scratch
from rallypoint.config import JobConfig, of_group
from rallypoint.core.layout import SHARD_BYTES, Layout, Shard
from rallypoint.core.modes import StateHolder
from rallypoint.core.optimizer import of_shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer, BufferPool, BufferPools
from rallypoint.optim import InPlace, state_names
from rallypoint.server.job import ServerJob
from rallypoint.server.rows import OwnedRows
from rallypoint.server.shard import AveragedShard, InPlaceMean, InPlaceShard, OwnedShard, StreamedShard
from rallypoint.store.record import ShardRecord


class HeldShard(Protocol):
    """One shard's tensors, on its primary or backup. Only the owner's thread calls it. It makes no decisions.

    A step on a primary: `take` the first contribution, `add` the others, `mean`, then `norms` if a decision is awaited,
    then `apply`, which makes the next version. A buffer that is passed in belongs to the shard from then on.
    """

    @property
    def shard(self) -> Shard:
        """The shard's place in the layout."""

    @property
    def measured(self) -> bool:
        """Does its gradient count in the global norm?"""

    @property
    def loss_scale(self) -> float:
        """What the losses of the step in progress are multiplied by, if this shard has it; else 0."""

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Set the first version, of `nbytes` bytes."""

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        """Make a contribution (on a backup: the finished gradient) the part of the sum that begins at replica `at`.

        With `base`, apply delay compensation first: see `OwnedShard.compensate`.
        """

    def merge(self, left: int, right: int) -> None:
        """Add the part that begins at replica `right` to the one that begins at `left`."""

    def discard(self, at: int) -> None:
        """Drop the part that begins at replica `at`."""

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """Add one more contribution to the part that begins at replica 0 (where there is no tree)."""

    def mean(self, total_weight: float) -> None:
        """Multiply the sum by 1 / `total_weight`."""

    def norms(self) -> tuple[float, ...]:
        """The 2-norms of the finished gradient's pieces: see `Measure`."""

    def first_not_finite(self) -> int:
        """The first word of the shard that is not finite in the finished gradient; -1 if all are."""

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Make the next version. With `replicate`, returns the scaled gradient for the backup, and its bytes."""

    def abandon(self) -> None:
        """Discard the sum in progress."""

    def release(self) -> None:
        """Release every buffer."""

    def keeps(self, version: int) -> bool:
        """Can that version still be sent?"""

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version, raw (but for a mean: see `AveragedShard`): codec number, buffer (not retained), bytes."""

    def encoded(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as it is sent to followers: see `raw`."""

    def named(self, header: Header) -> Header:
        """The header of a version's frame, with the kind and flags that the version needs."""

    def digest(self, before: bytes) -> bytes:
        """16 bytes that prove that the newest version is held: XXH3-128 of the parameters.

        `before` is the digest of the version before; b"" if the shard was loaded. A part of a table adds the rows that
        the last update has changed to it.
        """

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """The whole state at `version`; with `wires` also the last versions. The arrays are views, not copies."""

    def load(self, record: ShardRecord) -> None:
        """Replace the whole state by `record`."""


_PARAMETERS: dict[StateHolder, type[OwnedShard] | type[AveragedShard]] = {
    StateHolder.SERVERS: OwnedShard, StateHolder.WORKERS: AveragedShard,
}  # fmt: skip


def newest_is_enough(config: JobConfig) -> bool:
    """May a follower miss a version if it gets a newer one? Not where its workers step the optimizer: they need each.
    """
    return config.mode.holder is StateHolder.SERVERS


LEAST_BESIDE = 3 << 20  # bytes that a thread is worth; handing work over takes 40 us, as AdamW for 0.1 MiB


def worked_beside(job: ServerJob) -> dict[int, int]:
    """The shards that threads may work on -> bytes of which an update computes: parameters and optimizer state."""
    places = [s for s in job.shards if s.role == "parameters" and s.part is None and s.nbytes >= SHARD_BYTES // 2]
    if not newest_is_enough(job.config):
        return {s.index: 0 for s in places}  # workers step
    return {s.index: s.nbytes * (1 + len(state_names(of_shard(job.config.applied, s.columns))[-1][0])) for s in places}


class ShardFactory:
    """Allocates shards. The only place that chooses a shard's implementation."""

    def __init__(
        self, config: JobConfig, layout: Layout, pool: BufferPool, pools: BufferPools, in_place: InPlace
    ) -> None:
        self._config, self._layout, self._pool, self._pools, self._in_place = config, layout, pool, pools, in_place
        self._parameters = _PARAMETERS[config.mode.holder]
        self._of_groups: dict[int, JobConfig] = {}
        self._nothing = pools.take(0)
        self._scratch = Scratch()  # for encoding versions, on the owner's thread

    def allocate(self, index: int) -> HeldShard:
        place = self._layout.shards[index]
        config = self._of_groups.setdefault(place.group, of_group(self._config, place.group))
        if index in self._in_place.parameters:
            if config.mode.holder is StateHolder.SERVERS:
                return InPlaceShard(place, config, self._in_place, self._nothing)
            return InPlaceMean(place, config, self._pool, self._scratch, self._in_place, self._nothing)
        if place.part is not None:
            table = self._layout.tables[place.part.table].name
            return OwnedRows(place, table, config, self._pools, self._nothing)
        if place.role == "parameters" and config.streamed:
            return StreamedShard(place, config, self._pool, self._scratch, self._nothing)
        if place.role == "parameters":
            return self._parameters(place, config, self._pool, self._scratch)
        return OwnedShard(place, config, self._pool, self._scratch, self._layout.entries)
