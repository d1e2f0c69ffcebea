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

from rallypoint.net.messages import NotStored, Stored
from rallypoint.store import closing
from rallypoint.store.manifest import snapshot_id
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.store.writer import SnapshotWriter

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from samples import records

PATIENCE_S = 20.0


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
    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("rallypoint.store.files.Files.writing", fails)
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
    monkeypatch.setattr(closing, "PATIENCE_S", 0.05)
    entered, answers = threading.Event(), threading.Event()

    def hangs(*_: Any) -> None:
        entered.set()
        answers.wait()
        raise OSError("at last")

    monkeypatch.setattr("rallypoint.store.files.Files.writing", hangs)
    writer = Writer(tmp_path)
    name = writer.take(3)
    assert entered.wait(PATIENCE_S)
    closes = threading.Thread(target=writer.writer.close)
    closes.start()
    closes.join(PATIENCE_S)
    ended = not closes.is_alive()
    answers.set()
    closes.join(PATIENCE_S)
    assert ended, "the end of the job waits for the store"
    (said,) = caplog.records
    assert (said.levelno, said.getMessage()) == (
        logging.WARNING,
        f"given up: server0's part of snapshot {name}. The job is over, and the store has not answered for 0.05 s",
    )
    writer.writer._thread.join(PATIENCE_S)
