"""The coordinator's share of snapshots: every question is answered, whatever the store does."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.coordinator.snapshots import SnapshotKeeper
from rallypoint.net.messages import Stored
from rallypoint.store.manifest import snapshot_id
from rallypoint.store.retention import Retention
from rallypoint.store.snapshots import SnapshotStore

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from samples import JOB, records, take

PATIENCE_S = 20.0
Answer = tuple[Any, ...]


class Keeper:
    """A keeper, and what it has answered."""

    def __init__(self, folder: Path, retention: Retention | None = None) -> None:
        self.url = str(folder)
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.said: list[str] = []
        self.keeper = SnapshotKeeper(self.url, "zstd", retention or Retention(), self.said.append)

    def store(self, version: int) -> str:
        """As servers do: begin, write the parts, tell."""
        name = snapshot_id(version, 1)
        self.keeper.begin(name)
        everything = list(records(version))
        for index in range(2):
            part = SnapshotStore(self.url).write_part(name, f"server{index}", everything[index::2], "zstd")
            entries = {shard: (e.file, e.offset, e.length, e.checksum) for shard, e in part.shards.items()}
            self.keeper.stored(Stored(name, part.files, entries))
        return name

    def commit(self, name: str, version: int) -> Answer:
        self.keeper.commit(
            name, version, JOB, {"loss": 1.0}, "", done=lambda *what: self.answers.put(("done", *what)),
            failed=lambda why: self.answers.put(("failed", why)),
        )  # fmt: skip
        return self.answers.get(timeout=PATIENCE_S)

    def find(self) -> Answer:
        self.keeper.find(
            found=lambda *what: self.answers.put(("found", *what)),
            failed=lambda why: self.answers.put(("failed", why)),
        )
        return self.answers.get(timeout=PATIENCE_S)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path, Retention(keep_last=2))
    yield keeper
    keeper.keeper.close()


def broken(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def test_what_all_servers_have_stored_is_committed_and_found_again(keeper: Keeper) -> None:
    assert keeper.find() == ("found", "", -1), "there is none"
    name = keeper.store(3)
    done, nbytes, seconds = keeper.commit(name, 3)
    assert (done, nbytes) == ("done", sum(SnapshotStore(keeper.url).load(name).files.values()))
    assert seconds >= 0
    assert keeper.find() == ("found", name, 3)


def test_old_ones_are_deleted_and_the_one_that_a_server_may_still_need_is_not(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, Retention(keep_last=1))
    for version in (1, 2, 3):
        keeper.keeper.commit(
            keeper.store(version), version, JOB, {}, snapshot_id(1, 1), done=lambda *what: keeper.answers.put(what),
            failed=pytest.fail,
        )  # fmt: skip
        keeper.answers.get(timeout=PATIENCE_S)
    keeper.keeper.close()
    assert [manifest.version for manifest in SnapshotStore(keeper.url).manifests()] == [1, 3]


def test_the_parts_of_a_snapshot_that_was_given_up_are_forgotten(keeper: Keeper) -> None:
    name = keeper.store(3)
    keeper.keeper.begin(snapshot_id(4, 1))
    assert keeper.commit(name, 3) == ("failed", "its parts have been forgotten")
    keeper.keeper.stored(Stored(name, {}, {}))  # a straggler's word changes nothing
    assert keeper.find() == ("found", "", -1)


def test_a_snapshot_that_lacks_a_part_is_not_committed(keeper: Keeper) -> None:
    name = snapshot_id(3, 1)
    keeper.keeper.begin(name)
    part = SnapshotStore(keeper.url).write_part(name, "server0", list(records(3))[1:], "zstd")
    entries = {shard: (e.file, e.offset, e.length, e.checksum) for shard, e in part.shards.items()}
    keeper.keeper.stored(Stored(name, part.files, entries))
    failed, why = keeper.commit(name, 3)
    assert (failed, "lacks 1 shards" in why) == ("failed", True)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (RuntimeError("the bucket's own exception"), "RuntimeError: the bucket's own exception"),
    ],
    ids=["the disk is full", "a remote filesystem's own"],
)
def test_a_store_that_fails_is_an_answer_and_never_silence(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    name = keeper.store(3)
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "commit", broken(error))
        assert keeper.commit(name, 3) == ("failed", sentence)
        patch.setattr(SnapshotStore, "latest_usable", broken(error))
        assert keeper.find() == ("failed", f"the snapshots cannot be read: {sentence}")
    name = keeper.store(4)
    assert keeper.commit(name, 4)[0] == "done", "the next one is none the worse for it"
    monkeypatch.setattr(SnapshotStore, "retain", broken(error))
    name = keeper.store(5)
    assert keeper.commit(name, 5)[0] == "done", "committed is committed"
    assert keeper.find() == ("found", name, 5)
    assert keeper.said == [f"old snapshots could not be deleted: {sentence}"]


def test_a_damaged_snapshot_is_passed_over_aloud(keeper: Keeper, tmp_path: Path) -> None:
    for version in (1, 2):
        take(SnapshotStore(keeper.url), version)
    file = next((tmp_path / snapshot_id(2, 1)).glob("*.shards"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert keeper.find() == ("found", snapshot_id(1, 1), 1)
    assert len(keeper.said) == 1
    assert keeper.said[0].startswith(f"snapshot {snapshot_id(2, 1)} is damaged: file {file.name}: ")
    assert keeper.said[0].endswith("; using the one before it")
