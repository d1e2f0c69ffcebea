"""One shard's tensors as a server holds them, as primary or backup; what happens to them is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rallypoint.codec.protocol import NonFinitePayload
from rallypoint.codec.scratch import Scratch
from rallypoint.codec.shards import down_codec
from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.core.optimizer import SGD
from rallypoint.core.order import derive_seed
from rallypoint.core.policy import Async
from rallypoint.core.shard.effects import Apply
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.optim.flat import ShardOptimizer, state_names
from rallypoint.store.record import ShardRecord

_WIRE = "wire-"


class OwnedShard:
    """Master weights, optimizer state, the sum in progress, and the wire copies of the last two versions."""

    def __init__(self, shard: Shard, config: JobConfig, pool: BufferPool, scratch: Scratch) -> None:
        self.shard, self._seed = shard, config.seed
        self._pool = pool
        none_here = shard.role == "buffers" or config.stateful_workers
        self._optimizer = None if none_here else ShardOptimizer(config, shard.group, shard.words)
        self.master = torch.zeros(shard.words) if self._optimizer is None else self._optimizer.master
        self.wire: dict[int, Buffer] = {}
        self._codec = down_codec(config, shard, scratch)
        self._encoded: dict[int, tuple[int, Buffer, int]] = {}
        self._sum: Buffer | None = None
        # torch's foreach kernel adds Nesterov's momentum to the gradient itself; the backup is to get it without.
        self._spends_gradient = isinstance(config.applied, SGD) and config.applied.nesterov
        self._compensation = config.policy.delay_compensation if isinstance(config.policy, Async) else 0.0

    @property
    def measured(self) -> bool:
        """Does this shard's gradient count in the global norm?"""
        return self._optimizer is not None

    @property
    def gradient(self) -> torch.Tensor:
        """The sum in progress, a view of its buffer."""
        assert self._sum is not None
        return self._sum.tensor[: self.shard.words]

    def install(self, payload: Buffer, version: int = 0, nbytes: int = 0) -> None:
        """The version that all begin with has come: its buffer becomes the wire copy."""
        self.master.copy_(payload.tensor[: self.shard.words])
        self._keep(version, payload, version)

    def take(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """The first contribution's buffer becomes the sum; `base`: see `compensate`."""
        if base is not None:
            self.compensate(payload, base)
        self._sum = payload
        if weight != 1.0:
            self.gradient.mul_(weight)

    def add(self, payload: Buffer, weight: float, base: int | None = None) -> None:
        """Add a contribution. Times the weight first: each rounding is then the same however shards are cut."""
        if base is not None:
            self.compensate(payload, base)
        values = payload.tensor[: self.shard.words]
        if weight != 1.0:
            values.mul_(weight)
        self.gradient.add_(values)
        payload.release()

    def compensate(self, payload: Buffer, base: int) -> None:
        """Add lambda * g * g * (now - then) to a gradient g that was computed from version `base`.

        Zheng et al., 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation", equation 10. Nothing is
        added when `base` is not kept any more.
        """
        if (then := self.wire.get(base)) is None or self._compensation == 0.0:
            return
        gradient = payload.tensor[: self.shard.words]
        moved = self.master - then.tensor[: self.shard.words]
        gradient.addcmul_(moved.mul_(gradient), gradient, value=self._compensation)

    def mean(self, total_weight: float) -> None:
        """Turn the sum into the weighted mean."""
        if total_weight != 1.0:
            self.gradient.mul_(1.0 / total_weight)

    def norm(self) -> float:
        """The 2-norm of the finished gradient."""
        return float(torch.linalg.vector_norm(self.gradient))

    def apply(self, update: Apply) -> tuple[Buffer, int] | None:
        """Update the master with the finished gradient, whose buffer becomes the new version's wire copy.

        With `replicate` the wire copy gets a buffer of its own, and the scaled gradient's is returned with its bytes,
        for the backup.
        """
        scale = update.scale
        assert self._sum is not None
        wire = self._pool.take() if update.replicate else self._sum
        if scale is not None and self._optimizer is None:
            self.master.copy_(self.gradient)
        elif scale is not None and self._optimizer is not None:
            if scale != 1.0:
                self.gradient.mul_(scale)
            gradient = self.gradient
            if update.replicate and self._spends_gradient:
                gradient = wire.tensor[: self.shard.words].copy_(gradient)
            self._optimizer.apply(gradient, update.step, update.rate)
        finished, self._sum = self._sum, None
        wire.tensor[: self.shard.words].copy_(self.master)
        self._keep(update.version, wire, update.oldest)
        return (finished, self.shard.nbytes) if update.replicate else None

    def abandon(self) -> None:
        """Forget the sum in progress."""
        if self._sum is not None:
            self._sum.release()
            self._sum = None

    def release(self) -> None:
        """Let go of every buffer."""
        self.abandon()
        for buffer in (*self.wire.values(), *(encoded for _, encoded, _ in self._encoded.values())):
            buffer.release()
        self.wire.clear()
        self._encoded.clear()

    def keeps(self, version: int) -> bool:
        """Is there a wire copy of `version`?"""
        return version in self.wire

    def raw(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as it is: codec number, buffer (not retained), bytes."""
        return 0, self.wire[version], self.shard.nbytes

    def encoded(self, version: int) -> tuple[int, Buffer, int]:
        """A kept version as followers get it, encoded once for all of them; raw where the codec refuses a NaN."""
        if self._codec is None:
            return self.raw(version)
        if version not in self._encoded:
            buffer = self._pool.take()
            values = self.wire[version].tensor[: self.shard.words]
            try:  # the backup would write the same bytes
                seed = derive_seed(self._seed, "down", version, self.shard.index)
                used = self._codec.encode(values, buffer.bytes, seed=seed)
            except NonFinitePayload:
                buffer.release()
                return self.raw(version)
            self._encoded[version] = (self._codec.code, buffer, used)
        return self._encoded[version]

    # ---- the whole state, for a backup or a snapshot ----

    def state(self, version: int, clocks: Sequence[int], *, wires: bool) -> ShardRecord:
        """Everything there is at `version`; with `wires` the copies of the last versions too. Views, not copies."""
        arrays = {"master": self.master}
        scalars: dict[str, float] = {}
        if self._optimizer is not None:
            moments, scalars = self._optimizer.state()
            arrays |= moments
        if wires:
            arrays |= {f"{_WIRE}{v}": buffer.tensor[: self.shard.words] for v, buffer in self.wire.items()}
        plain = {name: array.numpy() for name, array in arrays.items()}
        return ShardRecord(self.shard.index, version, plain, scalars, tuple(clocks))

    def load(self, record: ShardRecord) -> None:
        """Become what `record` says (from a snapshot: without wire copies, so the master is the only one)."""
        self.release()
        arrays = {name: torch.from_numpy(array) for name, array in record.arrays.items()}
        self.master.copy_(arrays.pop("master"))
        wires = {name: arrays.pop(name) for name in list(arrays) if name.startswith(_WIRE)}
        if self._optimizer is not None:
            self._optimizer.load(arrays, record.scalars)
        for name, values in (wires or {f"{_WIRE}{record.version}": self.master}).items():
            buffer = self._pool.take()
            buffer.tensor[: self.shard.words].copy_(values)
            self.wire[int(name.removeprefix(_WIRE))] = buffer

    def _keep(self, version: int, buffer: Buffer, oldest: int) -> None:
        self.wire[version] = buffer
        for old in [v for v in self.wire if v < oldest]:
            self.wire.pop(old).release()
            if old in self._encoded:
                self._encoded.pop(old)[1].release()


def fits(record: ShardRecord, shard: Shard, config: JobConfig) -> bool:
    """Is `record` a whole state of this shard, as `OwnedShard.load` needs it?"""
    clocks = 0 if not config.streaming else 1 if shard.role == "buffers" else config.replicas
    wires = {name for name in record.arrays if name.startswith(_WIRE) and name.removeprefix(_WIRE).isdecimal()}
    moments = record.arrays.keys() - wires - {"master"}
    nothing: tuple[set[str], set[str]] = (set(), set())
    known = [nothing] if shard.role == "buffers" else state_names(config.applied)
    right = (moments, set(record.scalars)) in known and len(record.clocks) == clocks
    same = all(len(array) == shard.words and array.dtype == np.float32 for array in record.arrays.values())
    return "master" in record.arrays and f"{_WIRE}{record.version}" in wires and right and same
