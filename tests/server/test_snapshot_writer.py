"""A server's part of snapshots: stored, given up or failed, each is answered and the next one is written."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.core.protocol import NotStored, Stored
from rallypoint.observe.trace import Tracer
from rallypoint.server.snapshots import SnapshotCapture
from rallypoint.store import files
from rallypoint.store.files import DirectFile
from rallypoint.store.manifest import snapshot_id
from rallypoint.store.record import ShardRecord
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.writer import SnapshotWriter
from support.beside import Hanging, raising

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from samples import records

PATIENCE_S = 60.0


class Writer:
    """A writer, and what it has told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: queue.SimpleQueue[Stored | NotStored] = queue.SimpleQueue()
        self.writer = SnapshotWriter(str(folder), "none", "server0", self.told.put)

    def take(self, version: int, shards: int | None = None) -> str:
        name, everything = snapshot_id(version, 1), list(records(version))
        self.writer.begin(name, len(everything))
        for record in everything[:shards]:
            self.writer.put(record)
        return name

    def next(self) -> Stored | NotStored:
        return self.told.get(timeout=PATIENCE_S)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path)
    yield writer
    writer.writer.close()
    assert not writer.writer._thread.is_alive()


def test_a_part_is_told_with_where_every_shard_lies(writer: Writer) -> None:
    name = writer.take(3)
    told = writer.next()
    assert isinstance(told, Stored)
    assert (told.snapshot, sorted(told.shards)) == (name, [record.shard for record in records(3)])
    assert {file: (writer.folder / name / file).stat().st_size for file in told.files} == told.files


def test_one_that_is_not_wanted_any_more_leaves_no_file_and_no_word(writer: Writer) -> None:
    given_up = writer.take(3, shards=1)
    name = writer.take(4)  # begins, and with that gives up the one before
    told = writer.next()
    assert isinstance(told, Stored)
    assert told.snapshot == name
    assert writer.told.empty()
    assert not list(writer.folder.glob(f"{given_up}/*"))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("the bucket's own exception"), "RuntimeError: the bucket's own exception"),
    ],
    ids=["the disk is full", "a remote filesystem's own"],
)
def test_a_store_that_fails_is_told_and_the_next_snapshot_is_written(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rallypoint.store.files.Files.writing", raising(error))
        name = writer.take(3)
        told = writer.next()
    assert isinstance(told, NotStored)
    assert told.snapshot == name
    assert sentence in told.reason
    writer.take(4)
    assert isinstance(writer.next(), Stored)


def test_closing_gives_up_what_is_under_way(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.take(3, shards=1)
    writer.writer.close()
    assert not writer.writer._thread.is_alive()
    assert writer.told.empty()
    writer.writer.put(next(records(3)))  # a late shard is nobody's


def test_copies_are_stored_as_they_were_and_their_memory_is_used_again(writer: Writer) -> None:
    staging = writer.writer._staging
    addresses = []
    for version in (3, 4):
        name, everything = snapshot_id(version, 1), list(records(version))
        writer.writer.begin(name, len(everything))
        copies = [writer.writer.copy(record) for record in everything]
        addresses.append({array.ctypes.data for copy in copies for array in copy.arrays.values()})
        for copy, record in zip(copies, everything, strict=True):
            for array in record.arrays.values():
                array[:] = 77  # its owner goes on
            writer.writer.put(copy)
        del copies, copy
        told = writer.next()
        assert isinstance(told, Stored)
        expected = SnapshotStore(str(writer.folder / "expected")).write_part(name, "server0", records(version), "none")
        assert {shard: place[3] for shard, place in told.shards.items()} == {
            shard: entry.checksum for shard, entry in expected.shards.items()
        }
    assert addresses[0] == addresses[1]
    assert not staging._lent


def test_a_store_that_hangs_does_not_keep_the_job_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "END_PATIENCE_S", 0.05)
    monkeypatch.setattr("rallypoint.store.files.Files.writing", hangs := Hanging())
    writer = Writer(tmp_path)
    name = writer.take(3)
    hangs.keeps_nobody(writer.writer.close)
    (said,) = caplog.records
    assert (said.levelno, said.getMessage()) == (
        logging.WARNING,
        f"given up: server0's part of snapshot {name}. The job is over, and the store has not answered for 0.05 s",
    )
    writer.writer._thread.join(PATIENCE_S)


class HungStore:
    """A filesystem whose writes hang from now on, until `answers` is set. `entered`: one of them hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.answers = threading.Event(), threading.Event()
        real = DirectFile.write

        def write(file: DirectFile, chunk: Any) -> None:
            self.entered.set()
            assert self.answers.wait(PATIENCE_S)
            real(file, chunk)

        monkeypatch.setattr(DirectFile, "write", write)


def test_a_part_given_up_while_the_store_hangs_is_not_written_to_its_end_before_the_next(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HungStore(monkeypatch)
    given_up = [writer.take(version) for version in (3, 4, 5)]
    assert store.entered.wait(PATIENCE_S)
    name = writer.take(6)
    store.answers.set()
    told = writer.next()
    assert isinstance(told, Stored)
    assert (told.snapshot, len(told.shards)) == (name, len(list(records(6))))
    assert writer.told.empty()
    for other in given_up:
        assert not list(writer.folder.glob(f"{other}/*"))


def test_while_the_store_hangs_only_the_newest_part_and_the_record_being_written_are_in_memory(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HungStore(monkeypatch)
    shards = len(list(records(0)))
    for version in range(3, 13):
        writer.writer.begin(snapshot_id(version, 1), shards)
        for record in records(version):
            writer.writer.put(writer.writer.copy(record))
        assert store.entered.wait(PATIENCE_S)
    lent = len(writer.writer._staging._lent)
    store.answers.set()
    assert isinstance(writer.next(), Stored)
    assert lent <= (shards + 1) * len(next(records(3)).arrays)


def test_each_file_is_told_as_soon_as_it_is_written(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of an hour is no silence of an hour."""
    monkeypatch.setattr("rallypoint.store.snapshots.FILE_BYTES", 1)  # one shard a file
    everything = list(records(3))
    name = snapshot_id(3, 1)
    writer.writer.begin(name, len(everything))
    for count, record in enumerate(everything):
        writer.writer.put(record)
        told = writer.next()
        assert isinstance(told, Stored)
        assert (told.snapshot, list(told.shards)) == (name, [record.shard])
        assert list(told.files) == [f"server0-{count}.shards"]


def test_a_part_that_has_failed_takes_no_more_records(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.store.files.Files.writing", raising(OSError(28, "No space left on device")))
    everything = list(records(3))
    writer.writer.begin(snapshot_id(3, 1), len(everything))
    assert writer.writer.takes_records
    writer.writer.put(everything[0])
    assert isinstance(writer.next(), NotStored)
    assert not writer.writer.takes_records
    assert not writer.writer.wants_more
    for record in everything[1:]:
        writer.writer.put(writer.writer.copy(record))
    assert not writer.writer._staging._lent


def test_after_a_failure_the_owner_copies_no_more_shards(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.store.files.Files.writing", raising(OSError(28, "No space left on device")))
    everything, copied = list(records(0)), []

    def state(shard: int, version: int, clocks: tuple[int, ...]) -> ShardRecord:
        copied.append(shard)
        return everything[shard]

    job: Any = None  # not asked at version 0
    capture = SnapshotCapture(writer.writer, job, None, state, Tracer("server0"), lambda: None, lambda *_: False)
    capture.begin(snapshot_id(0, 1), len(everything))
    for record in everything:
        capture.wanted(record.shard, 0)
    capture.before_update(0)
    assert isinstance(writer.next(), NotStored)
    for record in everything[1:]:
        capture.before_update(record.shard)
    assert copied == [0]
    assert not capture.due
