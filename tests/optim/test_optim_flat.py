"""Optimizers on shards: the bytes of torch's own on whole parameters, however the vector is cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rallypoint as rp
from rallypoint.config import JobConfig, resolve
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import Optimizer
from rallypoint.core.schedule import rate_at
from rallypoint.optim import ShardOptimizer, state_names
from rallypoint.store.export import model_state
from rallypoint.store.manifest import Manifest, snapshot_id
from rallypoint.store.record import ShardRecord, decode_record, encode_record
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.testing.reference import plain_optimizer
from support.training import optimizer_state

STEPS = 10
OPTIMIZERS = (
    rp.AdamW(lr=rp.cosine(0.1, warmup=2), weight_decay=0.1), rp.Adam(lr=0.1, weight_decay=0.1),
    rp.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), rp.Adagrad(lr=rp.cosine(0.1, warmup=2)),
    rp.Adagrad(lr=0.1, lr_decay=0.3, weight_decay=0.1, initial_accumulator_value=0.2, eps=1e-6),
    rp.NAdam(lr=0.1, weight_decay=0.1),
    rp.NAdam(lr=rp.cosine(0.1, warmup=2), weight_decay=0.1, decoupled_weight_decay=True),
    rp.RAdam(lr=0.1, weight_decay=0.1), rp.Adamax(lr=0.1, weight_decay=0.1), rp.Adadelta(lr=0.5, weight_decay=0.1),
    rp.RMSprop(lr=0.1), rp.RMSprop(lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    rp.ASGD(lr=rp.linear(0.1), t0=3, weight_decay=0.1),
)
PURE = settings(max_examples=12)


def _config(spec: Optimizer) -> JobConfig:
    return resolve({"optimizer": spec, "steps": STEPS})


def _gradient(words: int, step: int) -> torch.Tensor:
    """Some elements are huge, some tiny, some 0."""
    generator = torch.Generator().manual_seed(100 + step)
    size = torch.randint(-6, 4, (words,), generator=generator)
    return torch.randn(words, generator=generator) * 10.0**size * (size != 0)


def _plain(spec: Optimizer, start: torch.Tensor) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """torch's own, over the whole vector as one parameter."""
    config, parameter = _config(spec), torch.nn.Parameter(start.clone())
    optimizer = plain_optimizer(spec, [{"params": [parameter], "weight_decay": spec.weight_decay}])
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate_at(config.schedule, step, STEPS)
        parameter.grad = _gradient(len(start), step)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.some("AdamW*", "Adagrad(lr=Cosine*", "RAdam*", "SGD(lr=0.1, momentum*")
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=repr)
@given(st.integers(1, 400), st.sets(st.integers(1, 399), max_size=5), st.integers(0, STEPS - 1))
@PURE
def test_shards_hold_the_bytes_of_plain_torch_whatever_the_cut_and_after_their_state_has_moved(
    spec: Optimizer, words: int, cuts: set[int], moves_at: int
) -> None:
    start, config = torch.linspace(-1, 1, words), _config(spec)
    edges = [0, *sorted(cut for cut in cuts if cut < words), words]
    ranges = list(pairwise(edges))
    shards = []
    for first, stop in ranges:
        shards.append(ShardOptimizer(config, 0, stop - first))
        shards[-1].master.copy_(start[first:stop])
    for step in range(STEPS):
        if step == moves_at:
            shards = [_moved(config, shard) for shard in shards]
        for shard, (first, stop) in zip(shards, ranges, strict=True):
            shard.apply(_gradient(words, step)[first:stop].clone(), step)
    assert torch.equal(torch.cat([shard.master for shard in shards]), _plain(spec, start)[0].detach())


def _moved(config: JobConfig, shard: ShardOptimizer) -> ShardOptimizer:
    """The same on another server: all that it is told is the state."""
    arrays, scalars = shard.state()
    assert (arrays.keys(), scalars.keys()) in state_names(config.applied)
    other = ShardOptimizer(config, 0, len(shard.master))
    other.master.copy_(shard.master)
    other.load(arrays, scalars)
    return other


def test_an_export_has_adagrad_s_state_by_parameter_name(tmp_path: Path) -> None:
    spec = OPTIMIZERS[4]
    config = _config(spec)
    layout = build_layout([TensorSpec("body", (20, 9), "float32", 0), TensorSpec("head", (7,), "float32", 0)], 64 * 4)
    start = torch.linspace(-1, 1, layout.words)
    records = []
    for shard in layout.shards:
        optimizer = ShardOptimizer(config, 0, shard.words)
        optimizer.master.copy_(start[shard.start : shard.stop])
        for step in range(STEPS):
            optimizer.apply(_gradient(layout.words, step)[shard.start : shard.stop].clone(), step)
        arrays, scalars = optimizer.state()
        plain = {name: values.numpy() for name, values in {"master": optimizer.master, **arrays}.items()}
        stored = encode_record(ShardRecord(shard.index, STEPS, plain, scalars), "zstd-planes")
        records.append(decode_record(stored))
    assert len(records) > 2, "or no parameter would be cut"
    store, name = SnapshotStore(str(tmp_path)), snapshot_id(STEPS, 1)
    part = store.write_part(name, "a", records, "none")
    job = msgspec.to_builtins(JobRecord({}, layout, STEPS))
    manifest = Manifest(name, STEPS, job, 0.0, {}, "none", part.shards, part.files)

    parameter, torchs = _plain(spec, start)
    model, state = model_state(store, manifest), optimizer_state(store, manifest)
    for entry in layout.entries:
        kept = state[entry.spec.name]
        assert kept.keys() == {"step", "sum"}
        assert kept["step"] == STEPS
        squares = torchs.state[parameter]["sum"][entry.start : entry.stop].view(entry.spec.shape)
        assert torch.equal(torch.as_tensor(kept["sum"]), squares)
        values = parameter.detach()[entry.start : entry.stop].view(entry.spec.shape)
        assert torch.equal(model[entry.spec.name], values)
