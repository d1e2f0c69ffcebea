"""Parquet by row groups: what rows are, what is read how often, and a store that fails."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_store import FailingStore, failing_store
from torch.utils.data import Subset

import rallypoint as rp
from rallypoint.config import JobConfig, Reading
from rallypoint.config.resolve import record_of, resolve
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.data import parquet, shards
from rallypoint.data.dataset import fetch
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import MicroBatches
from rallypoint.data.parquet import TableRows
from rallypoint.data.processes import LoaderProcesses
from rallypoint.errors import ConfigError, DataError

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


def test_a_file_that_is_written_again_while_a_job_reads_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(file_of(table(10, 30), 10))
    data = rp.Parquet(path)
    assert data[0]["id"] == 10
    os.utime(path, (1e9, 1e9))
    assert data[10]["id"] == 20, "the same bytes, whatever its time"
    path.write_bytes(file_of(table(30, 50), 10))
    assert path.stat().st_size == data._files[0].size
    data = pickle.loads(pickle.dumps(data))  # as a loader process gets it
    with pytest.raises(DataError, match="was written again after the job had begun"):
        data[10]


def test_rows_keep_their_types_and_make_a_batch(folder: Path) -> None:
    rows = rp.Parquet(folder, columns=["x", "id"])
    batch = MicroBatches(rows, JobConfig(batch=3, steps=1, reading=rp.Reading(order="sequential")), CPU).load(0, 0, 0)
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


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.int64(), [1, None, 3], np.int64), (pa.uint8(), [1, None, 3], np.uint8),
        (pa.float32(), [1, None, 3], np.float32), (pa.list_(pa.int32()), [[1], None, [2, 3]], np.ndarray),
        (pa.large_list(pa.int32()), [[1], None, []], np.ndarray),
        (pa.list_(pa.float32(), 2), [[1, 2], None, [3, 4]], np.ndarray),
        (pa.string(), ["a", None, "b"], str), (pa.bool_(), [True, None, False], bool),
    ],
    ids=str,
)  # fmt: skip
def test_a_missing_value_changes_no_row_but_its_own(kind: Any, values: Any, expected: type, tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(file_of(pa.table({"x": pa.array([*values, values[0]], kind)}), 3))
    rows = [row["x"] for row in fetch(rp.Parquet(tmp_path / "d.parquet"), range(4))]
    assert rows[1] is None
    assert [type(row) for row in rows[::2]] == [expected] * 2
    assert type(rows[3]) is expected, "of a row group without a missing value"
    assert [np.asarray(row).tolist() for row in rows] == [*values, values[0]]
    assert {np.asarray(row).dtype for row in rows[::2]} == {np.asarray(rows[3]).dtype}


def test_a_missing_element_changes_no_list_but_its_own() -> None:
    values = pa.array([[9], [1, 2], [3, None], None, [4]], pa.list_(pa.int32()))
    for chunks in ([values], [values[:2], values[2:4], values[4:]], [values[:0], values[:4], values[4:]]):
        rows = TableRows(pa.table({"x": pa.chunked_array(chunks).slice(1)}))
        found = [rows.row(number)["x"] for number in range(4)]
        assert [type(row) for row in found] == [np.ndarray, list, type(None), np.ndarray]
        assert [found[0].tolist(), found[1], found[2], found[3].tolist()] == [[1, 2], [3, None], None, [4]]


def test_columns_with_a_dot_and_parts_of_nested_ones(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([{"user.id": 7, "user": {"id": 1, "age": 2}, "user.name": "n"}])
    (tmp_path / "d.parquet").write_bytes(file_of(rows, 1))
    for columns, expected in (
        (["user.id"], {"user.id": 7}), (["user.age"], {"user": {"age": 2}}), (["user"], {"user": {"id": 1, "age": 2}}),
        (["user.name", "user.id"], {"user.id": 7, "user.name": "n"}), (None, rows.to_pylist()[0]),
    ):  # fmt: skip
        assert rp.Parquet(tmp_path, columns=columns)[0] == expected
    with pytest.raises(DataError, match=r"has no column user\.sex"):
        rp.Parquet(tmp_path, columns=["user.sex"])


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
    config = JobConfig(replicas=4, batch=25, steps=40, reading=rp.Reading(order="windowed", mixed_shards=8))
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
    config = JobConfig(replicas=2, batch=5, steps=6, reading=rp.Reading(order="windowed", mixed_shards=4), seed=3)

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


def test_workers_compare_data_sets_without_reading_row_groups(store: type[FailingStore]) -> None:
    for name, end in (("first", 300), ("other", 301)):
        put(f"/{name}/0.parquet", file_of(table(0, end), 1000))
    first, again, other = (rp.Parquet(f"failing://{name}") for name in ("first", "first", "other"))
    store.requests = 0
    assert identity_of(first) == identity_of(again) != identity_of(other)
    assert store.requests == 0


def test_files_of_equal_sizes_and_other_columns_are_told_apart(tmp_path: Path) -> None:
    def identity(folder: str, begin: int, columns: Any = None, name: str = "0.parquet") -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        for old in (tmp_path / folder).iterdir():
            old.unlink()
        plain = table(begin, begin + 20).drop_columns(["name"]).append_column("y", pa.array(range(20)))
        (tmp_path / folder / name).write_bytes(file_of(plain, 10))
        return identity_of(rp.Parquet(tmp_path / folder, columns=columns)), (tmp_path / folder / name).stat().st_size

    first, size = identity("first", 100)
    assert identity("copy", 100) == (first, size), "files may lie elsewhere"
    assert identity("first", 100, ["y", "id", "x"])[0] == first, "all columns, one by one"
    other, of_other = identity("other", 200)
    assert of_other == size
    for found in (
        other, identity("names", 100, name="1.parquet")[0], identity("columns", 100, ["id", "x"])[0],
        identity("columns", 100, ["y", "x"])[0],
    ):  # fmt: skip
        assert found != first
    assert identity("columns", 100, ["y", "x"])[0] == identity("columns", 100, ["x", "y"])[0]


def test_a_footer_longer_than_what_is_read_of_a_file_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.parquet").write_bytes(file_of(table(0, 60), 2))
    whole = rp.Parquet(tmp_path)
    monkeypatch.setattr(parquet, "END_BYTES", 100)
    again = rp.Parquet(tmp_path)
    assert identity_of(again) == identity_of(whole)
    assert [int(row["id"]) for row in fetch(again, range(60))] == list(range(60))


def test_it_pickles_without_what_it_has_read(folder: Path) -> None:
    data = rp.Parquet(folder, cache_bytes=1 << 20)
    before = len(pickle.dumps(data))
    rows = [row["id"] for row in fetch(data, range(120))]
    packed = pickle.dumps(data)
    assert len(packed) == before
    assert [row["id"] for row in fetch(pickle.loads(packed), range(120))] == rows


def test_a_cache_that_is_too_small_is_told_once(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(shards, "TOO_OFTEN", 4)
    fetch(rp.Parquet(folder, cache_bytes=1, threads=1), range(120))
    data = rp.Parquet(folder, cache_bytes=1, threads=1)
    for index in (0, 119, 0, 119, 0):
        data[index]
    assert not caplog.messages
    for index in (119, 60, 11, 21, 105, *(0, 119) * 3):  # some for the first time
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


# ---- order="windowed": what a data set must tell for it, and what workers compare ----


CPU = torch.device("cpu")


class Cut(list[int]):
    """A list that tells shards."""

    def __init__(self, values: Any, lengths: list[int]) -> None:
        super().__init__(values)
        self.lengths = lengths

    def shard_lengths(self) -> list[int]:
        return self.lengths


def test_an_attribute_of_that_name_is_no_shards() -> None:
    class Other(list[int]):
        shard_lengths = (1, 2)

    assert identity_of(Other(range(3))).shards == ""
    with pytest.raises(DataError, match="Other does not tell them"):
        batches(Other(range(3)))


def batches(dataset: Any, **settings: Any) -> MicroBatches:
    return MicroBatches(dataset, JobConfig(batch=4, steps=5, reading=Reading(order="windowed", **settings)), CPU)


def test_one_shard_after_the_other_is_read_where_one_is_mixed() -> None:
    cut = batches(Cut(range(20), [4, 0, 12, 4]), mixed_shards=1)
    read = [set(cut.load(step, 0, 0).tolist()) for step in range(5)]
    assert {0, 1, 2, 3} in read
    assert {16, 17, 18, 19} in read
    assert set().union(*read) == set(range(20))


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([1, 2, 3], "shuffles the shards of a data set, and a list does not tell them: give rp.Parquet"),
        (Subset(Cut([1, 2], [2]), [0, 1]), "a Subset does not tell them"),
        (Cut([1, 2, 3], [1, 1]), "the sum is 2, the length 3"),
        (Cut([1, 2, 3], [4, -1]), "must be numbers of samples"),
    ],
)
def test_a_data_set_that_does_not_tell_its_shards_is_refused(dataset: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        batches(dataset)


def test_no_shards_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="mixed_shards"):
        resolve({"reading.mixed_shards": 0})


def test_workers_whose_shards_differ_are_told_so() -> None:
    layout = build_layout([TensorSpec("weight", (4,), "float32", 0)])

    def record(dataset: Any) -> JobRecord:
        return record_of(resolve({}), layout, data=identity_of(dataset))

    first, other = record(Cut([1, 2, 3], [1, 2])), record(Cut([1, 2, 3], [2, 1]))
    assert disagreement(first, first) is None
    assert "its shards (files, row groups) have other lengths or sizes" in str(disagreement(first, other))
    assert disagreement(first, record([1, 2, 3])) is None
