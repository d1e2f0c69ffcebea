"""A part of a table on a server: sparse sums, lazy updates, and the old rows of the last versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from rallypoint.codec.base import RowSum, decode_gradient, encode_gradient, gradient_bytes
from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.order import derive_seed
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import Header
from rallypoint.net.pool import Buffer, BufferPools
from rallypoint.optim import RowsOptimizer, row_state_names
from rallypoint.server.shard import first_not_finite, is_version, norm_of
from rallypoint.store.record import ShardRecord

_CHANGED, _BEFORE = "changed-", "before-"  # the rows that the update after a version changed, and their old values
_VALUES_AT_ONCE = 1 << 16  # so that they and their 64-bit intermediates fit into the cache

Ids = torch.Tensor
Undo = tuple[Ids, torch.Tensor]


class OwnedRows:
    """Master rows, their optimizer state, and the sum in progress, of a shard that is a part of a table.

    There are no wire copies. For each kept version before the newest, it keeps the rows that the next update changed,
    with their old values (I5).
    """

    loss_scale = 0.0
    measured = True  # these gradients count in the global norm, like all others

    def __init__(self, shard: Shard, table: str, config: JobConfig, pools: BufferPools, nothing: Buffer) -> None:
        assert shard.part is not None
        self.shard, self._part, self._nothing = shard, shard.part, nothing
        self._table, self._config, self._pools = table, config, pools
        self._optimizer = RowsOptimizer(config, shard.group, shard.part.rows, shard.columns)
        self.master = self._optimizer.master
        self._version = -1
        self._before: dict[int, Undo] = {}
        self._parts: dict[int, RowSum] = {}  # of the sum in progress, by the first replica

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """Begin version 0: compute the initial rows here."""
        payload.release()
        step = max(1, _VALUES_AT_ONCE // self.shard.columns)
        for start in range(0, self._part.rows, step):
            local = np.arange(start, min(start + step, self._part.rows), dtype=np.int64)
            ids = local * self._part.parts + self._part.part
            values = first_rows(self._config.seed, self._table, ids, self.shard.columns, self._config.table_std)
            self.master[start : start + len(ids)] = torch.from_numpy(values)
        self._version = 0

    def take(self, payload: Buffer, weight: float, base: int | None = None, at: int = 0) -> None:
        self._parts[at] = RowSum(self.shard.columns)
        self._add(payload, weight, at)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """Add a contribution. It is multiplied by its weight first, as in a dense sum."""
        self._add(payload, weight, 0)

    def merge(self, left: int, right: int) -> None:
        other = self._parts.pop(right)
        self._parts[left].add(other.ids, other.values)

    def discard(self, at: int) -> None:
        del self._parts[at]

    def _add(self, payload: Buffer, weight: float, at: int) -> None:
        ids, values = decode_gradient(payload.bytes[: _used(payload, self.shard.columns)], self.shard.columns)
        self._parts[at].add(ids, values.mul(weight))  # a copy: the payload's buffer is released
        payload.release()

    def mean(self, total_weight: float) -> None:
        if total_weight != 1.0:
            self._parts[0].values.mul_(1.0 / total_weight)

    def norms(self) -> tuple[float, ...]:
        return (norm_of(self._parts[0].values),)

    def first_not_finite(self) -> int:
        at = first_not_finite(self._parts[0].values.view(-1))
        return at if at < 0 else int(self._parts[0].ids[at // self.shard.columns]) * self.shard.columns

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        done = self._parts.pop(0, RowSum(self.shard.columns))
        if update.scale is None:
            done = RowSum(self.shard.columns)
        elif update.scale != 1.0:
            done.values.mul_(update.scale)
        self._before[update.version - 1] = (done.ids, self.master.index_select(0, done.ids))
        if update.scale is not None:
            self._optimizer.apply(done.ids, done.values, update.step, update.rate)
        self._version = update.version
        for old in [version for version in self._before if version < update.oldest]:
            del self._before[old]
        return self._encoded(done) if update.replicate else None

    def abandon(self) -> None:
        self._parts.clear()

    def release(self) -> None:
        self.abandon()
        self._before.clear()

    # ---- versions ----

    def keeps(self, version: int) -> bool:
        """Can the rows be computed as they were at `version`?"""
        return all(v in self._before for v in range(version, self._version)) and 0 <= version <= self._version

    def rows(self, version: int, ids: Ids) -> tuple[Buffer, int]:
        """The rows `ids` (int64, ascending) at a kept version.

        Returns a buffer with the rows one after the other (fp32), and its number of bytes. The caller must release the
        buffer.
        """
        nbytes = len(ids) * self.shard.columns * 4
        buffer = self._pools.take(nbytes)
        values = buffer.tensor[: nbytes // 4].view(len(ids), self.shard.columns)
        torch.index_select(self.master, 0, ids, out=values)
        for later in range(self._version - 1, version - 1, -1):
            changed, before = self._before[later]
            if len(changed) and len(ids):
                at = torch.searchsorted(changed, ids).clamp_(max=len(changed) - 1)
                hit = changed[at] == ids
                values[hit] = before[at[hit]]
        return buffer, nbytes

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """An empty payload: followers only hear that the version exists, and pull the rows that they need."""
        return 0, self._nothing, 0

    encoded = raw

    def named(self, header: Header) -> Header:
        return header

    def _encoded(self, gradient: RowSum) -> tuple[Buffer, int]:
        nbytes = gradient_bytes(len(gradient.ids), self.shard.columns)
        buffer = self._pools.take(nbytes)
        encode_gradient(gradient.ids, gradient.values, buffer.bytes[:nbytes])
        return buffer, nbytes

    # ---- the whole state, for a backup or a snapshot ----

    def digest(self, before: bytes) -> bytes:
        """XXH3-128 of the digest of the version before and the rows that the last update changed; of all rows first."""
        if not before:
            return xxhash.xxh3_128_digest(self.master.numpy().data)
        ids = self._before[self._version - 1][0]
        changed = xxhash.xxh3_128(before)
        changed.update(ids.numpy().data)
        changed.update(self.master.index_select(0, ids).numpy().data)
        return changed.digest()

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        moments, scalars = self._optimizer.state()
        arrays = {name: tensor.view(-1) for name, tensor in {"master": self.master, **moments}.items()}
        if wires:
            for kept, (ids, before) in self._before.items():
                arrays |= {f"{_CHANGED}{kept}": ids, f"{_BEFORE}{kept}": before.view(-1)}
        plain = {name: array.numpy() for name, array in arrays.items()}
        return ShardRecord(self.shard.index, version, plain, scalars, tuple(clocks))

    def load(self, record: ShardRecord) -> None:
        """Replace the whole state by `record`. One from a snapshot has no earlier versions."""
        self.release()
        arrays = {name: torch.from_numpy(array) for name, array in record.arrays.items()}
        self.master.view(-1).copy_(arrays.pop("master"))
        for name in [name for name in arrays if name.startswith(_CHANGED)]:
            version = int(name.removeprefix(_CHANGED))
            before = arrays.pop(f"{_BEFORE}{version}").view(-1, self.shard.columns)
            self._before[version] = (arrays.pop(name), before)
        self._optimizer.load(arrays, record.scalars)
        self._version = record.version


def first_rows(
    seed: int, table: str, ids: np.ndarray[Any, np.dtype[np.int64]], columns: int, std: float = 1.0
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rows `ids` of a table at version 0, fp32, shape (len(ids), columns): normal(0, std).

    Each value depends only on the seed, the table, and its row and column. A counter is mixed by SplitMix64's finalizer
    (Steele, Lea and Flood, 2014), then transformed as by Box and Muller (1958).
    """
    key = np.uint64(derive_seed(seed, "rows", table))
    within = np.arange(1, columns + 1, dtype=np.uint64)
    place: np.ndarray[Any, np.dtype[np.uint64]] = ids.astype(np.uint64)[:, None] * np.uint64(columns) + within
    mixed = place * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    radius = ((mixed >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle = (mixed & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0**-32 * 2 * np.pi)
    normal: np.ndarray[Any, np.dtype[np.float64]] = np.sqrt(-2.0 * np.log(radius)) * np.cos(angle)
    return (normal * std).astype(np.float32)


def fits_rows(record: ShardRecord, shard: Shard, config: JobConfig) -> bool:
    """Is `record` a whole state of this part, as `OwnedRows.load` needs it?"""
    assert shard.part is not None
    arrays = dict(record.arrays)
    kept = [name.removeprefix(_CHANGED) for name in arrays if name.startswith(_CHANGED)]
    for version in kept:
        changed, before = arrays.pop(f"{_CHANGED}{version}"), arrays.pop(f"{_BEFORE}{version}", None)
        if not is_version(version, record.version - 1) or before is None:
            return False
        if changed.dtype != np.int64 or before.dtype != np.float32:
            return False
        if len(before) != len(changed) * shard.columns or np.any(np.diff(changed) <= 0):
            return False
        if len(changed) and not 0 <= changed[0] <= changed[-1] < shard.part.rows:
            return False
    known = (arrays.keys() - {"master"}, set(record.scalars)) in row_state_names(config.applied)
    whole = all(len(array) == shard.words and array.dtype == np.float32 for array in arrays.values())
    return "master" in arrays and known and whole and len(record.clocks) == config.clocks(shard.role)


def _used(payload: Buffer, columns: int) -> int:
    return gradient_bytes(int(np.frombuffer(payload.bytes[:4], np.uint32)[0]), columns)
