"""Tars of samples: by position, indexed once, from a store that fails too."""

from __future__ import annotations

import io
import pickle
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rallypoint as rp
from rallypoint.config import JobConfig
from rallypoint.data.dataset import fetch
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
from rallypoint.data.sources import tars
from rallypoint.errors import DataError

from failing_store import FailingStore, failing_store  # isort: skip


def tar_of(members: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        tar.add(Path(__file__).parent, "folder", recursive=False)
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def samples(begin: int, end: int) -> dict[str, bytes]:
    return {
        f"train/{i:06d}.{extension}": data
        for i in range(begin, end) for extension, data in (("cls", b"%d" % i), ("seg.bin", bytes([i % 256]) * i))
    }  # fmt: skip


@pytest.fixture
def store(monkeypatch: Any) -> Iterator[type[FailingStore]]:
    """Three tars of samples 0..199, in pieces of 16 KB: of 8 samples, or of what a tar has left."""
    monkeypatch.setattr(tars, "PIECE_BYTES", 16384)
    monkeypatch.setattr(tars, "HEADERS_BYTES", 2048)
    with failing_store(monkeypatch) as made:
        for number, (begin, end) in enumerate([(0, 20), (20, 150), (150, 200)]):
            FailingStore().pipe_file(f"/web/{number}.tar", tar_of(samples(begin, end)))
        yield made


def test_a_sample_is_the_members_of_one_key(tmp_path: Path) -> None:
    other = {"README": b"no sample", "b/.hidden": b"no key", "b/2.png": b"p", "b/2.cam.json": b"{}", "c/2.png": b"q"}
    (tmp_path / "0.tar").write_bytes(tar_of({**samples(3, 5), **other}))
    data = rp.WebDataset(tmp_path)
    assert fetch(data, range(len(data))) == [
        {"__key__": "train/000003", "cls": b"3", "seg.bin": b"\3\3\3"},
        {"__key__": "train/000004", "cls": b"4", "seg.bin": b"\4\4\4\4"},
        {"__key__": "b/2", "png": b"p", "cam.json": b"{}"},
        {"__key__": "c/2", "png": b"q"},
    ]


def test_a_pass_in_windows_reads_a_store_that_fails_about_once(store: type[FailingStore]) -> None:
    store.every = 10
    data = rp.WebDataset("failing://web", lambda sample: int(sample["cls"]), threads=3)
    assert store.failed > 5
    assert data.shard_lengths() == [8, 8, 4, *[8] * 16, 2, *[8] * 6, 2]
    store.sent = 0
    config = JobConfig(replicas=2, batch=5, steps=20, order="windowed", mixed_shards=4)
    batches = MicroBatches(data, config, torch.device("cpu"))
    read = [int(i) for step in range(20) for replica in range(2) for i in batches.load(step, replica, 0)]
    assert sorted(read) == list(range(200))
    whole = sum(len(FailingStore().cat_file(f"/web/{number}.tar")) for number in range(3))
    assert store.sent <= 2 * whole, "what was counted, and the tars themselves"


def test_tars_are_indexed_once(store: type[FailingStore], tmp_path: Path) -> None:
    index = tmp_path / "new" / "index"
    first = fetch(rp.WebDataset("failing://web/*.tar", index=index), range(200))
    store.requests = 0
    again = rp.WebDataset("failing://web/*.tar", index=index)
    assert store.requests == 0
    assert fetch(pickle.loads(pickle.dumps(again)), range(200)) == first
    FailingStore().pipe_file("/web/2.tar", tar_of(samples(150, 260)))
    assert len(rp.WebDataset("failing://web/*.tar", index=index)) == 260, "one has another size: all are read again"
    index.write_bytes(b"cut off")
    assert len(rp.WebDataset("failing://web/*.tar", index=index)) == 260
    assert [path.name for path in index.parent.iterdir()] == ["index"]


def test_what_is_no_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match=r"0\.tar cannot be read as a tar: .*unpacked"):
        rp.WebDataset(tmp_path)
    (tmp_path / "0.tar").write_bytes(tar_of({"README": b""}))
    with pytest.raises(DataError, match="there are no samples in"):
        rp.WebDataset(tmp_path)
    whole = tar_of(samples(0, 200))
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        second = tar.getmembers()[2].offset
    for damaged in (whole[:9000], whole[:second], whole[: second + 100], whole[:second] + b"?" + whole[second + 1 :]):
        (tmp_path / "0.tar").write_bytes(damaged)
        with pytest.raises(DataError, match=r"0\.tar"):
            rp.WebDataset(tmp_path)


def test_what_a_stores_client_draws_at_random_changes_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As botocore does when it waits before it asks again."""
    (tmp_path / "0.tar").write_bytes(tar_of(samples(0, 8)))
    found = rp.WebDataset(tmp_path, transform=lambda row: (row["cls"], random.random()))
    read = type(found)._read
    monkeypatch.setattr(type(found), "_read", lambda self, shard: (random.random(), read(self, shard))[1])
    seed_everything(3)
    fetched = fetch(found, [1, 5])
    seed_everything(3)
    assert fetch(found, [1, 5]) == fetched, "from memory"
