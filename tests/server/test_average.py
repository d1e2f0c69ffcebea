"""An average of the parameters on servers: torch's own bytes, on the backup, in a snapshot and after a move too."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rallypoint as rp
from rallypoint.codec.base import Scratch
from rallypoint.config import JobConfig, resolve
from rallypoint.core.layout import Shard
from rallypoint.core.optimizer import Average
from rallypoint.core.shard.effects import Apply
from rallypoint.errors import ConfigError
from rallypoint.net.pool import BufferPool
from rallypoint.server.shard import OwnedShard, fits
from rallypoint.store.record import ShardRecord, decode_record, encode_record

STEPS, WORDS = 9, 301
CUTS = (0, 7, 120, 301)
AVERAGES: tuple[Average, ...] = (rp.EMA(0.9), rp.EMA(0.3), rp.SWA(), rp.SWA(start=4, every=2))


def _config(average: Average | None) -> JobConfig:
    return resolve({"steps": STEPS, "optimizer": rp.SGD(lr=0.1, momentum=0.9), "average": average})


def _gradient(step: int) -> torch.Tensor:
    return torch.randn(WORDS, generator=torch.Generator().manual_seed(step))


def _torchs(average: Average, steps: int = STEPS) -> torch.Tensor:
    """Plain torch over the whole vector as one parameter."""
    model = torch.nn.Linear(WORDS, 1, bias=False)
    model.weight.data.fill_(1.0)
    fn = get_ema_multi_avg_fn(average.decay) if isinstance(average, rp.EMA) else None  # type: ignore[no-untyped-call]
    averaged = AveragedModel(model, multi_avg_fn=fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        model.weight.grad = _gradient(step).view(1, -1)
        optimizer.step()
        if isinstance(average, rp.EMA) or step + 1 in range(max(1, average.start), steps + 1, average.every):
            averaged.update_parameters(model)
    return averaged.module.weight.detach().view(-1)


class Held:
    """A shard of the vector on a primary and its backup."""

    def __init__(self, config: JobConfig, start: int, stop: int) -> None:
        self.config, self.start, self.pool = config, start, BufferPool(stop - start)
        self.shard = Shard(index=0, start=start, stop=stop, group=0)
        self.primary, self.backup = self.made(), self.made()
        for owned in (self.primary, self.backup):
            first = self.pool.take()
            first.tensor.fill_(1.0)
            owned.install(first)

    def made(self) -> OwnedShard:
        return OwnedShard(self.shard, self.config, self.pool, Scratch())

    def step(self, step: int, *, skip: bool = False) -> None:
        buffer = self.pool.take()
        buffer.tensor.copy_(_gradient(step)[self.shard.start : self.shard.stop])
        self.primary.take(buffer, 1.0)
        scale = None if skip else 1.0
        sent = self.primary.apply(Apply(step + 1, step, scale, step, replicate=True))
        self.backup.take(sent[0], 1.0)
        self.backup.apply(Apply(step + 1, step, scale, step))

    def record(self, version: int, *, wires: bool = True) -> ShardRecord:
        return decode_record(encode_record(self.primary.state(version, (), wires=wires), "none"))

    def moves(self, record: ShardRecord) -> None:
        """Both are elsewhere from now on, and have only what is in the record."""
        self.primary, self.backup = self.made(), self.made()
        self.primary.load(record)
        self.backup.load(record)


def _average(record: ShardRecord) -> torch.Tensor:
    return torch.from_numpy(record.arrays["average"])


@pytest.mark.parametrize("average", AVERAGES, ids=repr)
@pytest.mark.parametrize("wires", [True, False], ids=["to a new backup", "to a snapshot"])
def test_the_average_has_torchs_bytes_whatever_the_cut_and_after_its_state_has_moved(
    average: Average, wires: bool
) -> None:
    held = [Held(_config(average), a, b) for a, b in pairwise(CUTS)]
    for step in range(STEPS):
        for part in held:
            if step in (0, 5):
                part.moves(part.record(step, wires=wires))
            part.step(step)
            assert part.primary.digest(b"") == part.backup.digest(b"")
    assert torch.equal(torch.cat([_average(part.record(STEPS)) for part in held]), _torchs(average))
    assert all(fits(part.record(STEPS), part.shard, part.config) for part in held)


def test_a_step_that_is_skipped_is_not_averaged() -> None:
    with_skip, without = Held(_config(rp.EMA(0.9)), 0, WORDS), Held(_config(rp.EMA(0.9)), 0, WORDS)
    for step in range(3):
        with_skip.step(step, skip=step == 2)
        if step < 2:
            without.step(step)
    assert torch.equal(_average(with_skip.record(3)), _average(without.record(2)))


def test_the_digest_proves_the_average() -> None:
    held = Held(_config(rp.EMA(0.9)), 0, WORDS)
    held.step(0)
    held.primary.state(1, (), wires=False).arrays["average"][3] += 1.0
    assert held.primary.digest(b"") != held.backup.digest(b"")


def test_an_average_begins_at_the_snapshot_of_a_job_that_had_none_and_may_be_left_out_again() -> None:
    held = Held(_config(None), 0, WORDS)
    held.step(0)
    record = held.record(1, wires=False)
    held.config = _config(rp.EMA(0.5))
    held.moves(record)
    held.step(1)
    assert torch.equal(_average(held.record(2)), held.primary.master)  # as torch's: the first one is a copy
    record = held.record(2, wires=False)
    held.config = _config(None)
    held.moves(record)
    held.step(2)
    assert "average" not in held.record(3).arrays
    assert set(held.record(3).scalars) == set()


@pytest.mark.parametrize("spoil", [
    "no average", "no number", "a number that is not whole", "too short", "of doubles", "a copy of no version",
])  # fmt: skip
def test_a_state_without_a_whole_average_does_not_fit(spoil: str) -> None:
    held = Held(_config(rp.EMA(0.5)), 0, WORDS)
    held.step(0)
    record = held.record(1)
    assert fits(record, held.shard, held.config)
    match spoil:
        case "no average":
            del record.arrays["average"]
        case "no number":
            del record.scalars["averaged"]
        case "a number that is not whole":
            record.scalars["averaged"] = 0.5
        case "a copy of no version":
            record.arrays["wire-" + "9" * 5000] = record.arrays["average"]
        case "too short":
            record.arrays["average"] = record.arrays["average"][1:]
        case _:
            record.arrays["average"] = record.arrays["average"].astype(np.float64)
    assert not fits(record, held.shard, held.config)
    assert not fits(held.record(1), held.shard, _config(None))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"average": rp.EMA(1.0)}, "average.decay is 1.0: it must be a number from 0 to below 1"),
        ({"average": rp.SWA(every=0)}, "average.every is 0: it must be a whole number of at least 1"),
        ({"average": "ema"}, r"average is 'ema': write rp.EMA\(\) \(--set average.type=ema\)"),
        ({"average": rp.EMA(), "sync": rp.AllReduce()}, r"average= is not supported under rp.AllReduce\(\): workers"),
    ],
)
def test_an_average_that_makes_no_sense_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(settings)
