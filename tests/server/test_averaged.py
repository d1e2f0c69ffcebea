"""A shard of which a server has no more than the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rallypoint as rp
from rallypoint.codec.base import Scratch
from rallypoint.codec.spec import Bf16
from rallypoint.config import JobConfig, resolve
from rallypoint.core.layout import Shard
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.shard.effects import Apply
from rallypoint.net.frames import SKIP, Header, Kind
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.server.shard import AveragedShard, OwnedShard, StreamedShard
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


# ---- a shard's tensors on its primary and its backup ----


WORDS = 1000
IN_ROWS = Shard(index=0, start=0, stop=WORDS, group=0, columns=20)
OPTIMIZERS = (
    rp.SGD(lr=0.1), rp.SGD(lr=0.1, momentum=0.9), rp.SGD(lr=0.1, momentum=0.9, nesterov=True),
    rp.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), rp.Adam(lr=0.1, weight_decay=0.1),
    rp.AdamW(lr=0.1, weight_decay=0.1), rp.Adagrad(lr=0.1), rp.Adagrad(lr=0.1, weight_decay=0.1),
    rp.NAdam(lr=0.1, weight_decay=0.1),
    rp.NAdam(lr=rp.cosine(0.1, warmup=2), weight_decay=0.1, decoupled_weight_decay=True),
    rp.RAdam(lr=0.1, weight_decay=0.1), rp.Adamax(lr=0.1, weight_decay=0.1), rp.Adadelta(lr=0.5, weight_decay=0.1),
    rp.RMSprop(lr=0.1), rp.RMSprop(lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    rp.ASGD(lr=rp.linear(0.1), t0=3, weight_decay=0.1), rp.Muon(lr=rp.linear(0.1)),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_backup_that_applies_what_it_is_sent_holds_the_primarys_bytes(optimizer: Optimizer) -> None:
    config = resolve({"replicas": 1, "batch": 1, "steps": 3, "optimizer": optimizer})
    pool = BufferPool(WORDS)
    primary, backup = _owned(config, pool), _owned(config, pool)
    for step in range(3):
        primary.take(_gradient(pool, step), 1.0)
        sent = primary.apply(_apply(step, 0.5, replicate=True))
        backup.take(sent[0], 1.0)
        backup.apply(_apply(step, 1.0, replicate=False))
        assert torch.equal(backup.master, primary.master)
        assert torch.equal(backup.raw(step + 1)[1].tensor, primary.raw(step + 1)[1].tensor)


def test_buffers_can_be_stored_at_the_version_before() -> None:
    config, pool = resolve({"replicas": 1, "batch": 1, "steps": 3}), BufferPool(WORDS)
    buffers = OwnedShard(Shard(index=0, start=0, stop=WORDS, group=-1), config, pool, Scratch())
    first = pool.take()
    first.tensor.fill_(1.0)
    buffers.install(first)
    buffers.take(_gradient(pool, 0), 1.0)
    buffers.apply(Apply(1, 0, 1.0, 0))
    assert (buffers.state(0, (), wires=False).arrays["master"] == 1.0).all()
    assert torch.equal(torch.from_numpy(buffers.state(1, (), wires=False).arrays["master"]), _gradient(pool, 0).tensor)


def test_few_words_that_a_slow_worker_waits_for_keep_no_version() -> None:
    """The backlog counts the words alone."""
    config, pool = resolve({"memory.parameters": "streamed"}), BufferPool(WORDS)
    streamed = StreamedShard(IN_ROWS, config, pool, Scratch(), pool.take())
    first = pool.take()
    first.tensor.copy_(torch.arange(WORDS))
    streamed.install(first)
    buffer, few = streamed.words(0, 7, 2)
    assert buffer is not first
    assert buffer.bytes.nbytes == len(few) == 8
    first.tensor.zero_()
    assert torch.frombuffer(few, dtype=torch.float32).tolist() == [7.0, 8.0]
    buffer.release()
    whole, most = streamed.words(0, 0, WORDS - 1)
    assert whole is first
    assert len(most) == 4 * (WORDS - 1)
    whole.release()


def _owned(config: JobConfig, pool: BufferPool) -> OwnedShard:
    owned = OwnedShard(IN_ROWS, config, pool, Scratch())
    first = pool.take()
    first.tensor.fill_(1.0)
    owned.install(first)
    return owned


def _gradient(pool: BufferPool, step: int) -> Buffer:
    buffer = pool.take()
    buffer.tensor.copy_(torch.randn(WORDS, generator=torch.Generator().manual_seed(step)))
    return buffer


def _apply(step: int, scale: float, *, replicate: bool) -> Apply:
    return Apply(step + 1, step, scale, max(0, step), replicate=replicate)
