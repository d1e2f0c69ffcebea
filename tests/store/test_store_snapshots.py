"""Snapshots on a disk and in memory: whole or not there, and never trusted unchecked."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from samples import LAYOUT, records, same, take

from rallypoint.errors import ConfigError, DamagedSnapshot, SnapshotError, SnapshotFailed, UsageError
from rallypoint.store import files, snapshots, writer
from rallypoint.store.files import StoreSilent
from rallypoint.store.manifest import Compression, checksum_of, encode_manifest, snapshot_id
from rallypoint.store.record import ShardRecord, encode_record
from rallypoint.store.snapshots import FILE_S, Retention, SnapshotStore, WritePace
from rallypoint.store.writer import StagedCopies
from rallypoint.testing.processes import fork_server

SHARDS = [shard.index for shard in LAYOUT.shards]


def silent(sentence: str) -> None:
    pytest.fail(f"there was nothing to say, but: {sentence}")


@pytest.fixture(params=["disk", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place for a store that does not exist yet."""
    if request.param == "disk":
        yield str(tmp_path / "runs" / "one" / "snapshots")
        return
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}/snapshots"
    memory = MemoryFileSystem()
    if memory.exists(root):
        memory.rm(root, recursive=True)


@pytest.fixture
def store(url: str) -> SnapshotStore:
    return SnapshotStore(url)


# Round trips


@pytest.mark.parametrize("compression", get_args(Compression))
def test_what_was_written_is_read_by_another_process(store: SnapshotStore, compression: Compression) -> None:
    written = take(store, 42, compression=compression)
    other = SnapshotStore(store.url)
    found = other.latest_usable(silent)
    assert found is not None
    assert msgspec.json.encode(found) == msgspec.json.encode(written)
    assert same(list(other.read(found, SHARDS)), list(records(42)))


def test_any_shards_can_be_read_in_any_order(store: SnapshotStore) -> None:
    manifest = take(store, 1)
    expected = list(records(1))
    assert same(list(store.read(manifest, [2, 0])), [expected[2], expected[0]])
    with pytest.raises(SnapshotError, match="snapshot step-00000001-1 has no shard 99"):
        list(store.read(manifest, [99]))


def test_an_empty_store_has_no_snapshot(store: SnapshotStore) -> None:
    assert store.latest_usable(silent) is None
    assert store.manifests() == []
    store.retain(Retention())


def test_a_file_is_closed_once_it_is_full(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_BYTES", len(encode_record(next(records(1)), "none")) + 1)  # with the second
    manifest = take(store, 1, writers=1, compression="none")
    assert sorted(manifest.files) == ["server0-0.shards", "server0-1.shards"]
    assert {entry.file for entry in manifest.shards.values()} == manifest.files.keys()
    assert same(list(store.read(manifest, SHARDS)), list(records(1)))


class _SlowFiles:
    """Takes bytes at once, like a cache; a file is durable only after a time that its size and the `rate` give."""

    def __init__(self, store: SnapshotStore, rate: float, latency: float = 0.0) -> None:
        self.now = 0.0
        self._writing, self._rate, self._latency = store._files.writing, rate, latency
        store._pace = WritePace(lambda: self.now)
        store._files.writing = self.writing  # type: ignore[method-assign]

    @contextmanager
    def writing(self, path: str) -> Iterator[Any]:
        sizes = [0]
        with self._writing(path) as write:
            yield lambda chunk: sizes.append(len(chunk)) or write(chunk)
        self.now += self._latency + sum(sizes) / self._rate


def _large(count: int, words: int) -> Iterator[ShardRecord]:
    return (ShardRecord(shard, 1, {"master": np.zeros(words, np.float32)}, {}) for shard in range(count))


def _ages(store: SnapshotStore, slow: _SlowFiles, count: int) -> list[tuple[float, int]]:
    """Write a part of `count` shards of 1 MB. Returns after how many seconds each file came, with how many shards."""
    told: list[tuple[float, int]] = []
    last = slow.now

    def written(part: snapshots.SnapshotPart) -> None:
        nonlocal last
        told.append((slow.now - last, len(part.shards)))
        last = slow.now

    store.write_part(snapshot_id(1, 1), "a", _large(count, 250_000), "none", written)
    return told


@pytest.mark.parametrize("rate", [300e3, 1e6, 5e6])
def test_a_slow_store_gets_files_that_it_stores_in_seconds(tmp_path: Path, rate: float) -> None:
    """Or the snapshot would be given up: a file of 64 MB takes longer than that is waited for."""
    store = SnapshotStore(str(tmp_path))
    slow = _SlowFiles(store, rate)
    told = _ages(store, slow, 40)
    assert sum(shards for _, shards in told) == 40
    assert told[0][0] <= 9.1e6 / rate <= 31
    assert max(seconds for seconds, _ in told[1:]) <= 2 * FILE_S


def test_a_fast_store_gets_large_files_and_a_small_one_does_not_make_them_small(tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path))
    slow = _SlowFiles(store, 100e6, latency=0.2)
    assert [shards for _, shards in _ages(store, slow, 80)] == [9, 68, 3]
    assert [shards for _, shards in _ages(store, slow, 80)] == [68, 12]


def test_a_writer_without_shards_writes_nothing(store: SnapshotStore) -> None:
    part = store.write_part(snapshot_id(1, 1), "idle", [], "none")
    assert (part.files, part.shards) == ({}, {})


def test_a_part_travels_as_a_message(store: SnapshotStore) -> None:
    part = store.write_part(snapshot_id(1, 1), "a", records(1), "none")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=snapshots.SnapshotPart) == part


# What is not committed does not exist


def test_parts_without_a_manifest_are_no_snapshot(store: SnapshotStore) -> None:
    take(store, 1)
    store.write_part(snapshot_id(2, 1), "a", records(2), "none")
    found = store.latest_usable(silent)
    assert found.version == 1
    assert [manifest.version for manifest in store.manifests()] == [1]


def test_a_snapshot_that_lacks_a_shard_is_not_committed(store: SnapshotStore) -> None:
    whole = take(store, 1)
    part = store.write_part(snapshot_id(2, 1), "a", list(records(2))[1:], "none")
    lacking = msgspec.structs.replace(whole, id=snapshot_id(2, 1), version=2, shards=part.shards, files=part.files)
    with pytest.raises(SnapshotFailed, match=r"step-00000002-1 lacks 1 shards \(the first is 0\)"):
        store.commit(lacking)
    assert [manifest.version for manifest in store.manifests()] == [1]


def test_a_manifest_that_could_not_be_read_is_not_committed(store: SnapshotStore) -> None:
    whole = take(store, 1)
    with pytest.raises(SnapshotFailed, match="step-00000001-1 is not committed"):
        store.commit(msgspec.structs.replace(whole, files={}))


@pytest.mark.parametrize("snapshot", ["../x", "step-1"])
def test_names_that_lead_elsewhere_are_refused(store: SnapshotStore, snapshot: str) -> None:
    with pytest.raises(UsageError):
        store.write_part(snapshot, "a", [], "none")


def test_a_writer_may_have_any_name(store: SnapshotStore) -> None:
    """`rallypoint server --id rack1/server0`: no snapshot could be taken."""
    names = set[str]()
    writers = ("rack1/server0", "rack1 server0", "../server0", "-s", "Bücher:0", "s" * 200, "é" * 200)
    for version, name in enumerate(writers, 1):
        id, everything = snapshot_id(version, 1), list(records(version))
        part = store.write_part(id, name, everything, "none")
        manifest = msgspec.structs.replace(
            take(store, version, 2), id=id, compression="none", shards=part.shards, files=part.files
        )
        store.commit(manifest)
        store.verify(manifest)
        assert same(list(store.read(store.load(id), SHARDS)), everything)
        names |= part.files.keys()
    assert len(names) == len(writers), "each has files of its own"


@pytest.mark.parametrize("name", ["resnet::lr=0.1", "a::b", "x:y", "#1?%20", "[1]*"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """``--folder runs/resnet::lr=0.1``: its snapshots came into ``runs/resnet``, with those of other runs."""
    folder = tmp_path / name / "snapshots"
    store = SnapshotStore(str(folder))
    for version in (1, 2):
        take(store, version)
    store.retain(Retention(keep_last=1))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", snapshot_id(2, 1)]


def test_an_unknown_kind_of_place_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere://x is no place for snapshots"):
        SnapshotStore("nowhere://x")


# Damage


def damaged(data: bytes, seed: random.Random) -> Iterator[tuple[str, bytes]]:
    for _ in range(12):
        position, bit = seed.randrange(len(data)), 1 << seed.randrange(8)
        yield f"bit {bit} of byte {position}", data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
    for length in {0, 1, len(data) - 1, seed.randrange(len(data))}:
        yield f"cut to {length}", data[:length]
    yield "longer", data + b"\0"


@pytest.mark.parametrize("compression", get_args(Compression))
def test_any_changed_byte_in_any_file_is_detected_and_the_one_before_is_used(
    tmp_path: Path, compression: Compression
) -> None:
    store = SnapshotStore(str(tmp_path))
    take(store, 41, compression=compression)
    manifest = take(store, 42, compression=compression)
    seed = random.Random(42)
    for file in sorted((tmp_path / manifest.id).iterdir()):
        sound = file.read_bytes()
        for what, data in damaged(sound, seed):
            file.write_bytes(data)
            said: list[str] = []
            found = store.latest_usable(said.append)
            assert found is not None, f"{file.name}, {what}"
            assert found.version == 41, f"{file.name}, {what}"
            assert len(said) == 1
            assert said[0].startswith(f"snapshot step-00000042-1 is damaged: file {file.name}: "), said
            assert said[0].endswith("; using the one before it")
        file.write_bytes(sound)
    assert store.latest_usable(silent) is not None


def test_what_is_no_regular_file_is_damage_and_is_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe would wait for somebody who writes into it."""
    store = SnapshotStore(str(tmp_path))
    take(store, 41)
    manifest = take(store, 42)
    for file in (tmp_path / "latest", *(tmp_path / manifest.id).iterdir()):
        file.unlink()
        os.mkfifo(file)
    said: list[str] = []
    found = store.latest_usable(said.append)
    assert found.version == 41
    assert all(
        f"{name} is" in sentence for name, sentence in zip(("latest", "snapshot step-00000042-1"), said, strict=True)
    )


def test_a_changed_latest_is_detected_and_misleads_nobody(tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path))
    take(store, 41)
    take(store, 42)
    latest = tmp_path / "latest"
    sound = latest.read_bytes()
    for what, data in damaged(sound, random.Random(1)):
        latest.write_bytes(data)
        said: list[str] = []
        found = store.latest_usable(said.append)
        assert found is not None, what
        assert found.version == 42, what
        assert said == [f"{latest} is damaged; using the snapshot with the highest version"], what


def test_latest_decides_and_its_loss_is_no_loss(tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path))
    for version in (50, 100):
        take(store, version)
    take(store, 60, attempt=2)  # somebody went on from 50: version 100 was given up
    found = store.latest_usable(silent)
    assert found.id == "step-00000060-2"

    (tmp_path / "step-00000060-2" / "server0-0.shards").unlink()
    said: list[str] = []
    found = store.latest_usable(said.append)
    assert found.version == 50
    assert said == [
        "snapshot step-00000060-2 is damaged: file server0-0.shards: it is missing; using the one before it"
    ]

    store.discard("step-00000060-2")
    said.clear()
    found = store.latest_usable(said.append)
    assert found.version == 50
    assert said == [
        f"{tmp_path / 'latest'} names snapshot step-00000060-2, which is not there; using the one before it"
    ]

    (tmp_path / "latest").unlink()
    found = store.latest_usable(silent)
    assert found.version == 100


@pytest.mark.parametrize("name", ["manifest.json", "latest"])
def test_a_file_that_claims_to_be_huge_is_damage_and_fills_no_memory(tmp_path: Path, name: str) -> None:
    """It is sparse: it takes nothing on the disk, and whoever read all of it would run out of memory."""
    store = SnapshotStore(str(tmp_path))
    take(store, 1)
    newest = take(store, 2)
    path = tmp_path / name if name == "latest" else tmp_path / newest.id / name
    os.truncate(path, 1 << 40)
    said: list[str] = []
    found = store.latest_usable(said.append)
    assert found is not None
    assert found.version == (2 if name == "latest" else 1)
    assert any(sentence in said[0] for sentence in ("more than 268435456 bytes", "latest is damaged"))


def test_a_shard_that_claims_to_be_huge_is_damage_and_fills_no_memory(tmp_path: Path) -> None:
    """Its manifest says the same, with a right checksum of its own."""
    store = SnapshotStore(str(tmp_path))
    take(store, 1)
    newest = take(store, 2)
    shard, entry = max(newest.shards.items(), key=lambda item: item[1].offset)
    huge = msgspec.structs.replace(entry, length=1 << 40)
    shards, files = {**newest.shards, shard: huge}, {**newest.files, entry.file: entry.offset + (1 << 40)}
    os.truncate(tmp_path / newest.id / entry.file, files[entry.file])
    forged = msgspec.structs.replace(newest, shards=shards, files=files)
    (tmp_path / newest.id / "manifest.json").write_bytes(encode_manifest(forged))
    said: list[str] = []
    found = store.latest_usable(said.append)
    assert found.version == 1
    assert f"shard {shard} cannot have {1 << 40} bytes" in said[0]
    with pytest.raises(DamagedSnapshot, match="cannot have"):
        list(store.read(forged, [shard]))


def test_when_nothing_is_usable_every_snapshot_is_named(store: SnapshotStore) -> None:
    for version in (1, 2):
        manifest = take(store, version)
        put(store, f"{manifest.id}/manifest.json", b"?")
    said: list[str] = []
    assert store.latest_usable(said.append) is None
    assert [sentence.rpartition("; ")[2] for sentence in said] == ["using the one before it", "there is none before it"]
    assert store.manifests() == []


def test_a_newer_format_stops_rather_than_going_back(store: SnapshotStore) -> None:
    take(store, 1)
    manifest = take(store, 2)
    body = b'{"format": 7}'
    put(store, f"{manifest.id}/manifest.json", checksum_of(body).encode() + b"\n" + body)
    with pytest.raises(SnapshotError, match=r"snapshot step-00000002-1 cannot be used: .* format 7"):
        store.latest_usable(silent)
    assert [manifest.version for manifest in store.manifests()] == [1]
    take(store, 3)
    store.retain(Retention(keep_last=1))
    assert store._files.names() == ["latest", "step-00000002-1", "step-00000003-1"]  # not ours to judge


def test_reading_a_damaged_shard_names_it(store: SnapshotStore) -> None:
    manifest = take(store, 5, writers=1)
    entry = manifest.shards[1]
    path = f"{manifest.id}/{entry.file}"
    data = bytearray(store._files.get(path))
    data[entry.offset + entry.length // 2] ^= 1
    put(store, path, bytes(data))
    reading = store.read(manifest, SHARDS)
    assert same([next(reading)], [next(records(5))])  # what is sound can be had
    with pytest.raises(DamagedSnapshot, match=r"step-00000005-1 is damaged: file server0-0.shards: shard 1 is not"):
        next(reading)


def test_a_record_under_another_number_is_refused(store: SnapshotStore) -> None:
    manifest = take(store, 5)
    swapped = msgspec.structs.replace(manifest, shards={0: manifest.shards[1]})
    with pytest.raises(DamagedSnapshot, match="holds shard 1 at version 5 where shard 0 should be"):
        list(store.read(swapped, [0]))


def test_a_store_that_does_not_answer_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(str(tmp_path))
    take(store, 1)

    def refuse(self: Any, path: str, **_: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(LocalFileSystem, "cat_file", refuse)
    with pytest.raises(SnapshotError, match=f"{tmp_path}/latest cannot be read: Permission denied") as raised:
        store.latest_usable(silent)
    assert not isinstance(raised.value, DamagedSnapshot)


class BadDisk:
    """The first `errors` reads of a file whose name ends in `of` fail with EIO; `reads` counts all of them.

    `what` is how they are read: "cat_file" for the bytes, "info" for the size.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, errors: float, *, of: str = ".shards", what: str = "cat_file"
    ) -> None:
        self.reads = 0
        read = getattr(LocalFileSystem, what)

        def reads(fs: LocalFileSystem, path: str, **options: Any) -> Any:
            if path.endswith(of):
                self.reads += 1
                if self.reads <= errors:
                    raise OSError(errno.EIO, "Input/output error", path)
            return read(fs, path, **options)

        monkeypatch.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
        monkeypatch.setattr(LocalFileSystem, what, reads)


@pytest.mark.parametrize(
    ("of", "what"),
    [
        (".shards", "cat_file"), (".shards", "info"), ("manifest.json", "cat_file"), ("-00000002-1", "info"),
        ("latest", "cat_file"),
    ],
)
def test_a_read_error_that_goes_away_costs_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, what: str
) -> None:
    store = SnapshotStore(str(tmp_path))
    take(store, 1)
    newest = take(store, 2)
    disk = BadDisk(monkeypatch, errors=2, of=of, what=what)
    found = store.latest_usable(silent)
    assert disk.reads > 2
    assert found.id == newest.id


def test_what_cannot_be_looked_at_is_not_taken_for_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's folders: a job that finds no snapshot would begin with the first weights."""
    store = SnapshotStore(str(tmp_path))
    take(store, 1)
    info = LocalFileSystem.info

    def refuse(fs: LocalFileSystem, path: str, **options: Any) -> Any:
        if path.endswith("-00000001-1"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return info(fs, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", refuse)
    with pytest.raises(SnapshotError, match=r"manifest\.json cannot be read: Permission denied"):
        store.latest_usable(silent)


def test_a_snapshot_whose_manifest_cannot_be_read_now_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(str(tmp_path))
    for version in (10, 20, 30):
        take(store, version)
    with monkeypatch.context() as failing:
        BadDisk(failing, errors=float("inf"), of="-00000010-1/manifest.json")
        store.retain(Retention(keep_last=1))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-00000010-1", "step-00000030-1"]


def test_a_read_error_that_stays_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(str(tmp_path))
    manifest = take(store, 2)
    disk = BadDisk(monkeypatch, errors=float("inf"))
    with pytest.raises(DamagedSnapshot, match="Input/output error"):
        store.verify(manifest)
    assert disk.reads == 3


@pytest.mark.parametrize("of", ["latest", "manifest.json", ".shards"])
def test_a_read_error_of_a_store_is_no_damage(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """s3fs makes EIO of answers that it has no number for, as MinIO's SlowDownRead or a gateway's 502."""
    store, read = SnapshotStore(f"memory://busy{of}"), MemoryFileSystem.cat_file
    take(store, 1)
    newest = take(store, 2)
    with monkeypatch.context() as busy:

        def fails(fs: MemoryFileSystem, path: str, **options: Any) -> Any:
            if path.endswith(of):
                raise OSError(errno.EIO, "Resource requested is unreadable, please reduce your request rate")
            return read(fs, path, **options)

        busy.setattr(MemoryFileSystem, "cat_file", fails)
        busy.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
        with pytest.raises(StoreSilent, match="reduce your request rate"):
            store.latest_usable(pytest.fail)
    found = store.latest_usable(pytest.fail)
    assert found.id == newest.id


def test_the_url_of_a_store_is_no_pattern() -> None:
    store = SnapshotStore("memory://runs [1]/a*")
    gone, stays = take(store, 1), take(store, 2)
    store.discard(gone.id)
    assert MemoryFileSystem().ls("/runs [1]/a*", detail=False) == ["/runs [1]/a*/latest", f"/runs [1]/a*/{stays.id}"]


def test_bytes_with_a_wrong_checksum_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(str(tmp_path))
    manifest = take(store, 2)
    entry = msgspec.structs.replace(manifest.shards[0], checksum="0" * len(manifest.shards[0].checksum))
    disk = BadDisk(monkeypatch, errors=0)
    with pytest.raises(DamagedSnapshot, match="is not what was written"):
        list(store.read(msgspec.structs.replace(manifest, shards={0: entry}), [0]))
    assert disk.reads == 1


# A full disk


def put(store: SnapshotStore, path: str, data: bytes) -> None:
    with store._files.writing(path) as write:
        write(data)


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The disk takes so many bytes more."""

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os.write(descriptor, data[:room])
        room -= written
        return written

    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "write": write}))


@pytest.mark.parametrize("room", [0, 500, 900])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    store = SnapshotStore(str(tmp_path))
    take(store, 1)
    monkeypatch.setattr(snapshots, "FILE_BYTES", len(encode_record(next(records(1)), "none")) + 1)  # with the second
    with monkeypatch.context() as full:
        fill_disk(full, room)
        with pytest.raises(SnapshotFailed, match=r"step-00000002-1 failed: .*/a-\d.shards cannot .*: No space left"):
            store.write_part(snapshot_id(2, 1), "a", records(2), "none")
    assert list((tmp_path / "step-00000002-1").iterdir()) == []
    found = store.latest_usable(silent)
    assert found.version == 1


def test_a_disk_that_fills_up_at_the_manifest_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(str(tmp_path))
    parts = sum(take(store, 1, compression="none").files.values())
    with monkeypatch.context() as full:
        fill_disk(full, parts + 100)
        with pytest.raises(SnapshotFailed, match=r"manifest.json cannot be written"):
            take(store, 2, compression="none")
    assert sorted(path.name for path in (tmp_path / snapshot_id(2, 1)).iterdir()) == [
        "server0-0.shards",
        "server1-0.shards",
    ]
    assert [manifest.version for manifest in store.manifests()] == [1]


def test_a_writer_that_fails_half_way_takes_its_files_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_BYTES", 1)

    def failing() -> Iterator[Any]:
        yield next(records(1))
        raise RuntimeError("the server is going down")

    with pytest.raises(RuntimeError, match="going down"):
        SnapshotStore(str(tmp_path)).write_part(snapshot_id(1, 1), "a", failing(), "none")
    assert list((tmp_path / "step-00000001-1").iterdir()) == []


def test_importing_the_store_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, rallypoint.store.snapshots; print(*sorted({'torch', 'numpy'} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == ""


# ---- Copies on their way to the store: nobody else's memory, and given back, used again ----


def record(words: int = 4, value: float = 0.0) -> ShardRecord:
    arrays = {"master": np.full(words, value, np.float32), "ids": np.arange(words)}
    return ShardRecord(3, 1, arrays, {"step": 1.0}, (5,))


def address(record: ShardRecord) -> int:
    return int(record.arrays["master"].ctypes.data)


def test_a_copy_does_not_change_with_what_it_was_copied_from() -> None:
    original = record()
    copy = StagedCopies().copy(original)
    original.arrays["master"] += 1
    original.scalars["step"] = 2.0
    assert copy.arrays["master"].tolist() == [0.0] * 4
    assert copy.arrays["ids"].tolist() == [0, 1, 2, 3]
    assert (copy.shard, copy.version, copy.scalars, copy.clocks) == (3, 1, {"step": 1.0}, (5,))


def test_what_is_given_back_is_used_for_the_next_copy_of_that_size_and_only_then() -> None:
    lent = StagedCopies()
    first, second = lent.copy(record(value=1.0)), lent.copy(record(value=2.0))
    assert address(first) != address(second)
    at = address(first)
    lent.give_back(first)
    lent.give_back(first)  # twice: it is not lent to two
    other_size, third, fourth = lent.copy(record(5)), lent.copy(record(value=3.0)), lent.copy(record(value=4.0))
    assert at not in (address(other_size), address(fourth))
    assert address(third) == at
    assert [float(copy.arrays["master"][0]) for copy in (second, third, fourth)] == [2.0, 3.0, 4.0]


def test_a_record_that_is_no_copy_from_here_is_left_alone() -> None:
    lent, own = StagedCopies(), record()
    lent.give_back(own)
    assert address(lent.copy(record())) != address(own)


def test_more_than_a_certain_amount_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "KEPT_BYTES", 4 * 4 + 4 * 8 + 1)
    lent = StagedCopies()
    copies = [lent.copy(record()) for _ in range(3)]
    for copy in copies:
        lent.give_back(copy)
    assert {name for name, _ in lent._free} == {"float32", "int64"}
    assert sum(array.nbytes for free in lent._free.values() for array in free) == lent._kept <= writer.KEPT_BYTES


# ---- Kill the writer at any moment: what it said was committed is there, and everything that is there verifies ----


KILLS = 20


def write_until_killed(root: str, version: int, attempt: int, said: Connection) -> None:
    store = SnapshotStore(root)
    while True:
        version += 1
        take(store, version, attempt, compression="none")
        said.send(version)
        store.retain(Retention(keep_last=2))


@pytest.mark.slow
def test_killed_at_any_moment_the_last_committed_snapshot_is_whole(tmp_path: Path) -> None:
    context = fork_server()
    moments = random.Random(7)
    store = SnapshotStore(str(tmp_path))
    version = 0
    for attempt in range(KILLS):
        listening, said = context.Pipe(duplex=False)
        writer = context.Process(target=write_until_killed, args=(str(tmp_path), version, attempt, said))
        writer.start()
        said.close()
        committed = listening.recv()
        time.sleep(moments.uniform(0.0, 0.1))  # any moment will do: whatever it is, the promise holds
        writer.kill()
        writer.join()
        while True:
            try:
                committed = listening.recv()
            except (EOFError, OSError):
                break
        listening.close()
        writer.close()

        found = store.latest_usable(pytest.fail)
        assert found.version >= committed > version
        for manifest in store.manifests():
            store.verify(manifest)
        version = found.version
    take(store, version + 1, KILLS)
    store.retain(Retention(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step-{version + 1:08d}-{KILLS}"]
