"""Data sets with a cache on disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import rallypoint as rp
from rallypoint.data.dataset import fetch

from failing_store import FailingStore, failing_store  # isort: skip


@pytest.fixture
def store(monkeypatch: Any) -> Iterator[Any]:
    with failing_store(monkeypatch) as made:
        for number in range(3):
            sink = pa.BufferOutputStream()
            table = pa.table({"user": range(100 * number, 100 * number + 100), "text": ["t" * 50] * 100})
            pyarrow.parquet.write_table(table, sink, row_group_size=20)
            FailingStore().pipe_file(f"/rows/{number}.parquet", sink.getvalue().to_pybytes())
        yield made


def test_a_data_set_is_fetched_once_for_all_processes_and_runs(store: Any, tmp_path: Path) -> None:
    store.every = 10
    plain = fetch(rp.Parquet("failing://rows"), range(300))
    store.sent = 0
    assert fetch(rp.Parquet("failing://rows", cache=tmp_path / "cache"), range(300)) == plain
    once = store.sent
    store.requests = 0
    again = rp.Parquet("failing://rows", cache=rp.Cache(tmp_path / "cache"))
    assert fetch(again, range(300)) == plain
    assert fetch(pickle.loads(pickle.dumps(again)), range(300)) == plain
    assert (store.sent, store.requests) == (once, 0)


def test_a_file_that_was_written_again_is_fetched_again(store: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert fetch(rp.Parquet("failing://rows", cache=cache), [0])[0]["user"] == 0
    sink = pa.BufferOutputStream()
    table = pa.table({"user": range(1000, 1100), "text": ["t" * 50] * 100})
    pyarrow.parquet.write_table(table, sink, row_group_size=20)
    store().pipe_file("/rows/0.parquet", sink.getvalue().to_pybytes())
    assert fetch(rp.Parquet("failing://rows", cache=cache), [0])[0]["user"] == 1000


def test_files_of_this_machine_are_not_kept_twice(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"user": range(10)}), tmp_path / "0.parquet")
    cache = rp.Cache(tmp_path / "cache")
    assert len(fetch(rp.Parquet(tmp_path, cache=cache), range(10))) == 10
    assert cache.total == 0
