"""A shard's tensors on its primary and its backup."""

from __future__ import annotations

import pytest
import torch

import rallypoint as rp
from rallypoint.codec.base import Scratch
from rallypoint.config import JobConfig, resolve
from rallypoint.core.layout import Shard
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.shard.effects import Apply
from rallypoint.net.pool import Buffer, BufferPool
from rallypoint.server.shard import OwnedShard, StreamedShard

WORDS = 1000
SHARD = Shard(index=0, start=0, stop=WORDS, group=0, columns=20)
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
        assert sent is not None
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
    streamed = StreamedShard(SHARD, config, pool, Scratch(), pool.take())
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
    owned = OwnedShard(SHARD, config, pool, Scratch())
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
