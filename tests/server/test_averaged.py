"""A shard of which a server has no more than the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rallypoint as rp
from rallypoint.codec.base import Scratch
from rallypoint.codec.spec import Bf16
from rallypoint.config import resolve
from rallypoint.core.layout import Shard
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.server.shard import AveragedShard
from rallypoint.store.record import ShardRecord, decode_record, encode_record

WORDS = 1000
SHARD = Shard(index=0, start=0, stop=WORDS, group=0)


class _Bench:
    def __init__(self, version: int = 5, **settings: object) -> None:
        config = resolve({"replicas": 2, "steps": 20, "sync": rp.AllReduce(), **settings})
        self.pool = BufferPool(WORDS)
        self.owned = AveragedShard(SHARD, config, self.pool, Scratch())
        arrays = {name: np.arange(WORDS, dtype=np.float32) for name in ("master", "exp_avg", "exp_avg_sq")}
        self.record = ShardRecord(0, version, arrays, {"step": float(version)})
        self.data = encode_record(self.record, "none")
        self.once = BufferPool(-(-len(self.data) // 4), keeps=False)
        payload = self.once.take()
        payload.bytes[: len(self.data)] = self.data
        self.owned.install(payload, version, len(self.data))
        self.version = version

    def gradient(self, replica: int) -> Buffer:
        buffer = self.pool.take()
        generator = torch.Generator().manual_seed(100 * self.version + replica)
        buffer.tensor.copy_(torch.randn(WORDS, generator=generator))
        return buffer

    def step(self, scale: float | None = 1.0) -> torch.Tensor:
        """One more version; what its mean is, scaled."""
        gradients = [self.gradient(0), self.gradient(1)]
        expected = (gradients[0].tensor + gradients[1].tensor) * 0.5 * (1.0 if scale is None else scale)
        self.owned.take(gradients[0], 1.0)
        self.owned.add(gradients[1], 1.0)
        self.owned.mean(2.0)
        oldest = max(0, self.version)
        self.owned.apply(Apply(self.version + 1, self.version, scale, oldest))
        self.version += 1
        return expected

    def sent(self, version: int) -> tuple[Header, bytes]:
        code, buffer, nbytes = self.owned.encoded(version)
        header = self.owned.named(Header(Kind.VERSION, step=version, length=nbytes, codec=code))
        return header, bytes(buffer.bytes[:nbytes])


def test_what_a_worker_has_brought_goes_on_as_it_came() -> None:
    bench = _Bench(down=Bf16())
    header, data = bench.sent(5)
    assert (header.kind, header.step, header.codec, data) == (Kind.STATE, 5, 0, bench.data)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_version_is_the_scaled_mean_of_the_step_before(scale: float) -> None:
    bench = _Bench()
    expected = bench.step(scale)
    header, data = bench.sent(6)
    assert (header.kind, header.flags, header.length) == (Kind.VERSION, 0, 4 * WORDS)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), expected)


def test_of_a_step_that_is_skipped_only_the_word_goes_out() -> None:
    bench = _Bench(down=Bf16())
    bench.step(None)
    header, data = bench.sent(6)
    assert (header.kind, header.flags, header.length, header.codec, data) == (Kind.VERSION, SKIP, 0, 0, b"")
    bench.step()
    bench.step()
    assert bench.sent(8)[0].flags == 0


def test_two_versions_are_kept_and_all_buffers_come_back() -> None:
    bench = _Bench()
    for _ in range(6):
        bench.step()
    assert [version for version in range(20) if bench.owned.keeps(version)] == [10, 11]
    bench.owned.release()
    assert len(bench.pool.free) == bench.pool.made <= 4
    assert bench.once.free == []  # the state, three times as large, is not kept for another time


def test_a_snapshot_is_a_beginning_like_what_a_worker_brings() -> None:
    bench, again = _Bench(), _Bench(version=0)
    again.step()
    again.owned.load(bench.record)
    header, data = again.sent(5)
    assert header.kind is Kind.STATE
    read = decode_record(data)
    assert (read.version, read.scalars) == (5, {"step": 5.0})
    assert all(np.array_equal(read.arrays[name], array) for name, array in bench.record.arrays.items())
    assert not again.owned.keeps(1)


def test_it_has_no_master_copy_and_no_optimizer_state() -> None:
    bench = _Bench()
    assert not hasattr(bench.owned, "master")
    assert not hasattr(bench.owned, "_optimizer")
    assert bench.owned.measured
