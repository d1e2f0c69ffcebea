"""Parquet by row groups: what rows are, what is read how often, and a store that fails."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_store import FailingStore, failing_store

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.data.dataset import fetch
from rallypoint.data.loader import MicroBatches
from rallypoint.data.processes import LoaderProcesses
from rallypoint.data.sources import shards
from rallypoint.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
CPU = torch.device("cpu")


def table(begin: int, end: int, width: int = 1) -> Any:
    ids = np.arange(begin, end)
    return pa.table({"id": ids, "x": pa.array([np.full(width, i, "f4") for i in ids]), "name": [f"n{i}" for i in ids]})


def file_of(rows: Any, group: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(rows, sink, row_group_size=group, compression="none")
    return sink.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with row groups of 10, 40 and 7 rows: 120 rows."""
    for name, begin, end, group in (("a", 0, 25, 10), ("b", 25, 105, 40), ("c", 105, 120, 7)):
        (tmp_path / f"{name}.parquet").write_bytes(file_of(table(begin, end), group))
    (tmp_path / "notes.txt").write_text("no data")
    return tmp_path


@pytest.fixture
def store(monkeypatch: Any) -> Iterator[type[FailingStore]]:
    with failing_store(monkeypatch) as made:
        yield made


def put(name: str, data: bytes) -> None:
    FailingStore().pipe_file(name, data)


def test_a_folder_a_pattern_and_a_list_are_the_same_rows(folder: Path) -> None:
    listed = [folder / "a.parquet", str(folder / "b.parquet"), folder / "c.parquet"]
    for urls in (folder, str(folder / "*.parquet"), listed, f"file://{folder}"):
        data = rp.Parquet(urls)
        assert [int(row["id"]) for row in fetch(data, range(120))] == list(range(120))
        assert data.shard_lengths() == [10, 10, 5, 40, 40, 7, 7, 1]
    with pytest.raises(IndexError):
        data[120]


def test_rows_keep_their_types_and_make_a_batch(folder: Path) -> None:
    rows = rp.Parquet(folder, columns=["x", "id"])
    batch = MicroBatches(rows, JobConfig(batch=3, steps=1, order="sequential"), CPU).load(0, 0, 0)
    assert sorted(batch) == ["id", "x"]
    assert torch.equal(batch["x"], torch.tensor([[0.0], [1.0], [2.0]]))
    assert batch["id"].dtype == torch.int64


def test_values_that_are_no_numbers_or_are_missing_are_what_pyarrow_makes_of_them(tmp_path: Path) -> None:
    rows = [
        {"n": 1, "list": [1, 2], "text": "a", "bytes": b"x", "yes": True, "nested": [[1]], "struct": {"a": 1}},
        {"n": None, "list": [], "text": None, "bytes": b"", "yes": False, "nested": [], "struct": {"a": None}},
        {"n": 3, "list": [4], "text": "c", "bytes": b"yz", "yes": True, "nested": [[], [2]], "struct": None},
    ]
    (tmp_path / "d.parquet").write_bytes(file_of(pa.Table.from_pylist(rows), 2))
    found = fetch(rp.Parquet(tmp_path / "d.parquet"), [2, 0, 1])
    for row, expected in zip(found, [rows[2], rows[0], rows[1]], strict=True):
        assert isinstance(row["list"], np.ndarray)
        assert {**row, "list": row["list"].tolist()} == expected


def test_slices_of_lists_are_rows_of_their_own(tmp_path: Path) -> None:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(12)), 2)
    (tmp_path / "d.parquet").write_bytes(file_of(pa.table({"pair": fixed, "list": [[i] * i for i in range(6)]}), 4))
    data = rp.Parquet(tmp_path / "d.parquet")
    data[1]["list"][0] = 9
    assert [(row["pair"].tolist(), row["list"].tolist()) for row in fetch(data, [1, 5])] == [
        ([2, 3], [1]), ([10, 11], [5] * 5),
    ]  # fmt: skip


def test_each_row_group_leaves_the_store_once_in_a_pass(store: type[FailingStore]) -> None:
    """Two workers of two replicas each, row groups of very different sizes."""
    total = 0
    for number, (rows, group) in enumerate([(400, 100), (3000, 500), (600, 60)]):
        noise = pa.array(np.random.default_rng(number).bytes(1024) for _ in range(rows))
        data = file_of(table(5000 * number, 5000 * number + rows).append_column("noise", noise), group)
        put(f"/clicks/{number}.parquet", data)
        total += len(data)
    config = JobConfig(replicas=4, batch=25, steps=40, order="windowed", mixed_shards=8)
    read = []
    for replicas in ((0, 1), (2, 3)):
        batches = MicroBatches(rp.Parquet("failing://clicks", cache_bytes=3 << 20), config, CPU, collate=list)
        read += [int(row["id"]) for t in range(40) for r in replicas for row in batches.load(t, r, 0)]
    assert sorted(read) == [*range(400), *range(5000, 8000), *range(10_000, 10_600)]
    read_twice, footers = 3 * 500 * 1024, 2 * 3 * 65536
    assert store.sent <= total + read_twice + footers, "three row groups in which a replica's range ends"
    assert store.requests == pytest.approx(2 * 3 + 4 + 6 + 10, abs=3)


def test_a_store_that_fails_one_request_in_ten_costs_no_sample(store: type[FailingStore]) -> None:
    for number in range(3):
        put(f"/clicks/{number}.parquet", file_of(table(100 * number, 100 * number + 100), 10))
    store.every = 10
    data = rp.Parquet("failing://clicks/*.parquet", cache_bytes=1)
    assert [int(row["id"]) for row in fetch(data, range(300))] == list(range(300))
    assert store.failed >= 3
    store.every = 1
    with pytest.raises(DataError, match=r"failing://clicks/0\.parquet cannot be read: OSError: .* \(5 tries\)"):
        data[0]


def test_loader_processes_read_what_the_loop_reads(store: type[FailingStore]) -> None:
    put("/clicks/0.parquet", file_of(table(0, 300, 8), 20))
    store.every = 10
    config = JobConfig(replicas=2, batch=5, steps=6, order="windowed", mixed_shards=4, seed=3)

    def batches(workers: int) -> MicroBatches:
        rows = rp.Parquet("failing://clicks/0.parquet", transform=lambda row: (row["id"], row["x"], np.random.rand()))
        rows[0]  # connections and row groups that forked processes inherit
        return MicroBatches(rows, config, CPU, loader=rp.Loader(workers=workers))

    inline, loading = batches(0), LoaderProcesses(batches(2), print)
    try:
        loading.expect(0, 0, (0, 1))
        for place in [(step, replica, 0) for step in range(6) for replica in range(2)]:
            for ours, theirs in zip(loading.take(place), inline.loaded(*place)[0], strict=True):
                assert torch.equal(ours, theirs)
    finally:
        loading.close()


def test_it_pickles_without_what_it_has_read(folder: Path) -> None:
    data = rp.Parquet(folder, cache_bytes=1 << 20)
    before = len(pickle.dumps(data))
    rows = [row["id"] for row in fetch(data, range(120))]
    packed = pickle.dumps(data)
    assert len(packed) == before
    assert [row["id"] for row in fetch(pickle.loads(packed), range(120))] == rows


def test_a_cache_that_is_too_small_is_told_once(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(shards, "TOO_OFTEN", 4)
    data = rp.Parquet(folder, cache_bytes=1, threads=1)
    fetch(data, range(120))
    assert not caplog.messages
    for index in (0, 119) * 6:
        data[index]
    assert len([line for line in caplog.messages if "cache_bytes=1" in line]) == 1


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "d.parquet").write_bytes(b"PAR1 and then nothing")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (folder, {}, r"d\.parquet cannot be read as a Parquet file"),
        (folder / "none.parquet", {}, r"none\.parquet cannot be read"),
        (folder / "*.pq", {}, r"there are no files \.parquet in .*\*\.pq"),
        ("nowhere://x.parquet", {}, r"nowhere://x\.parquet cannot be read: Protocol not known"),
        (folder / "a.parquet", {"columns": ["idd"]}, r"a\.parquet has no column idd: it has id, x, name"),
    ]
    for urls, settings, sentence in cases:
        with pytest.raises(DataError, match=sentence):
            rp.Parquet(urls, **settings)
    (folder / "d.parquet").write_bytes(file_of(pa.table({"id": [1], "x": [[1.0]], "name": ["a"], "more": [1]}), 1))
    with pytest.raises(DataError, match=r"d\.parquet has columns that .*a\.parquet has not \(more\)"):
        rp.Parquet(folder)
