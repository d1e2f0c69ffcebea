"""Tars of samples: by position, indexed once, from a store that fails too."""

from __future__ import annotations

import io
import os
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
from rallypoint.data import tars
from rallypoint.data.dataset import fetch
from rallypoint.data.identity import identity_of
from rallypoint.data.loader import MicroBatches
from rallypoint.data.randomness import seed_everything
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
    config = JobConfig(replicas=2, batch=5, steps=20, reading=rp.Reading(order="windowed", mixed_shards=4))
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


def test_a_tar_that_was_written_again_with_its_size_is_indexed_again(tmp_path: Path) -> None:
    tar, index = tmp_path / "0.tar", tmp_path / "index"
    tar.write_bytes(tar_of({"a.txt": b"first", "b.txt": b"other"}))
    assert fetch(rp.WebDataset(tar, index=index), [0])[0] == {"__key__": "a", "txt": b"first"}
    before = tar.stat()
    tar.write_bytes(tar_of({"c.txt": b"third", "a.txt": b"first"}))
    assert tar.stat().st_size == before.st_size
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    assert fetch(rp.WebDataset(tar, index=index), [0])[0] == {"__key__": "c", "txt": b"third"}


def test_a_tar_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    """Or while a store tells no time of its files: the header before a member is looked at."""
    tar, index = tmp_path / "0.tar", tmp_path / "index"
    tar.write_bytes(tar_of({"a.txt": b"first", "b.txt": b"other"}))
    before = tar.stat()
    found = rp.WebDataset(tar, index=index)
    tar.write_bytes(tar_of({"c.txt": b"third", "b.txt": b"other"}))
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    for data in (found, rp.WebDataset(tar, index=index)):
        assert data[1] == {"__key__": "b", "txt": b"other"}, "this one is where it was"
        with pytest.raises(DataError, match=r"0\.tar is another tar than .* a\.txt is no longer at byte 2048"):
            data[0]


def test_tars_of_equal_sizes_are_told_apart(tmp_path: Path) -> None:
    def identity(name: str, members: dict[str, bytes]) -> Any:
        (tmp_path / "0.tar").write_bytes(tar_of(members))
        (tmp_path / "0.tar").rename(tmp_path / name)
        found = identity_of(rp.WebDataset(tmp_path / name))
        (tmp_path / name).unlink()
        return found

    first = identity("a.tar", {"a.txt": b"1", "b.txt": b"22"})
    assert identity("a.tar", {"a.txt": b"1", "b.txt": b"22"}) == first
    for name, members in (
        ("a.tar", {"b.txt": b"1", "a.txt": b"22"}), ("a.tar", {"a.txt": b"11", "b.txt": b"2"}),
        ("a.tar", {"a.png": b"1", "b.txt": b"22"}), ("b.tar", {"a.txt": b"1", "b.txt": b"22"}),
    ):  # fmt: skip
        assert identity(name, members) != first


@pytest.mark.parametrize("long", [90, 300])
@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_those_of_other_languages_are_read(kind: int, long: int, tmp_path: Path) -> None:
    name = f"folder/{'ü' * long}"
    with tarfile.open(tmp_path / "0.tar", "w", format=kind) as tar:
        for number in range(3):
            info = tarfile.TarInfo(f"{name}{number}.txt")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"%d" % number))
    data = rp.WebDataset(tmp_path)
    assert [data[n] for n in range(3)] == [{"__key__": f"{name}{n}", "txt": b"%d" % n} for n in range(3)]


def test_what_would_be_left_out_of_a_sample_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for _ in range(3):
            tar.addfile(tarfile.TarInfo("image.jpg"))
    with pytest.raises(DataError, match=r"0\.tar has two members image\.jpg in one sample"):
        rp.WebDataset(tmp_path)
    linked = tarfile.TarInfo("b.jpg")
    linked.type, linked.linkname = tarfile.LNKTYPE, "a.jpg"
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
        tar.addfile(linked)
    with pytest.raises(DataError, match=r"0\.tar has b\.jpg as a hard link.*--hard-dereference"):
        rp.WebDataset(tmp_path)


def test_names_that_are_not_utf_8_and_sparse_files_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo("über.txt"))
    with pytest.raises(DataError, match=r"0\.tar has a member whose name is not UTF-8 \(b'\\xfcber\.txt'\)"):
        rp.WebDataset(tmp_path)
    (tmp_path / "0.tar").write_bytes(sparse())
    with pytest.raises(DataError, match=r"0\.tar has a\.bin as a sparse file"):
        rp.WebDataset(tmp_path)


def sparse() -> bytes:
    """A tar with 4 bytes at 1000 of a file of 2000, as `tar --sparse --format=gnu` writes it."""
    info = tarfile.TarInfo("a.bin")
    info.size, info.type = 4, tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (1000, 4)
    header[483:495] = b"%011o\0" % 2000
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"data".ljust(512, b"\0") + bytes(10240 - 1024)


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
