"""Small snapshots for the tests: a layout of a few shards, records with arrays that a version and a shard decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from rallypoint.core.job import JobRecord
from rallypoint.core.layout import Layout, TensorSpec, build_layout
from rallypoint.store.manifest import Compression, Manifest, snapshot_id
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore

LAYOUT = build_layout([TensorSpec("weight", (40,), "float32", 0), TensorSpec("bias", (8,), "float32", 1)], 64)
JOB = JobRecord({"steps": 100, "optimizer": {"lr": 3e-4}}, LAYOUT, 100)


def records(version: int, layout: Layout = LAYOUT) -> Iterator[ShardRecord]:
    for shard in layout.shards:
        noise = np.random.default_rng([version, shard.index])
        arrays = {name: noise.standard_normal(shard.words, np.float32) for name in ("master", "exp_avg")}
        yield ShardRecord(shard.index, version, arrays, {"step": float(version)})


def take(
    store: SnapshotStore, version: int, attempt: int = 1, *, compression: Compression = "zstd-planes",
    metrics: dict[str, float] | None = None, writers: int = 2,
) -> Manifest:
    """Write and commit a whole snapshot, in as many parts as there are `writers`."""
    name = snapshot_id(version, attempt)
    everything = list(records(version))
    parts = [store.write_part(name, f"server{i}", everything[i::writers], compression) for i in range(writers)]
    manifest = Manifest(
        id=name, version=version, record=msgspec.to_builtins(JOB), created=1e9 + version, metrics=metrics or {},
        compression=compression, shards={shard: entry for part in parts for shard, entry in part.shards.items()},
        files={file: size for part in parts for file, size in part.files.items()},
    )
    store.commit(manifest)
    return manifest


def same(found: Sequence[ShardRecord], expected: Sequence[ShardRecord]) -> bool:
    return [_plain(record) for record in found] == [_plain(record) for record in expected]


def _plain(record: ShardRecord) -> tuple[object, ...]:
    arrays = {name: (array.dtype.name, array.tobytes()) for name, array in record.arrays.items()}
    codec_states = {replica: (array.dtype.name, array.tobytes()) for replica, array in record.codec_states.items()}
    return record.shard, record.version, arrays, record.scalars, record.clocks, codec_states
