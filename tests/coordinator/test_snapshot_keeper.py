"""The coordinator's share of snapshots: every question is answered, whatever the store does."""

from __future__ import annotations

import queue
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rallypoint.coordinator import inbox, snapshots
from rallypoint.coordinator.acts import AddFigures, AddPart, CommitSnapshot
from rallypoint.coordinator.snapshots import SnapshotKeeper
from rallypoint.core.cluster.effects import FindSnapshot
from rallypoint.core.cluster.state import Origin
from rallypoint.core.cluster.storing.snapshot_duty import ATTEMPTS
from rallypoint.core.protocol import Aborted, Capture, NotStored, Say, Snapshotted, Stored
from rallypoint.errors import DamagedSnapshot, SnapshotError
from rallypoint.store import files
from rallypoint.store.files import StoreSilent, end_threads
from rallypoint.store.manifest import snapshot_id
from rallypoint.store.snapshots import Retention, SnapshotStore
from support.beside import Hanging, raising

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from samples import JOB, records, take

PATIENCE_S = 60.0


class Keeper:
    """A keeper, and what it has answered."""

    def __init__(self, folder: Path, retention: Retention | None = None, attempt: int = 1) -> None:
        self.url, self.attempt = str(folder), attempt
        self.answers: queue.SimpleQueue[inbox.Event] = queue.SimpleQueue()
        self.said: list[str] = []
        self.keeper = SnapshotKeeper(self.url, "zstd", retention or Retention(), self.put)

    def put(self, event: inbox.Event) -> None:
        if isinstance(event, Say):
            self.said.append(event.text)
        else:
            self.answers.put(event)

    def store(self, version: int, second: Path | None = None) -> str:
        """As servers do: begin, write the parts, tell. The second one may see another folder."""
        name = snapshot_id(version, self.attempt)
        self.keeper.do(Capture(name, 0))
        everything = list(records(version))
        for index, url in enumerate((self.url, str(second or self.url))):
            part = SnapshotStore(url).write_part(name, f"server{index}", everything[index::2], "zstd")
            entries = {shard: (e.file, e.offset, e.length, e.checksum) for shard, e in part.shards.items()}
            self.keeper.do(AddPart(Stored(name, part.files, entries), f"server{index} on node{index}"))
        return name

    def commit(self, name: str, version: int, origin: str = "", metrics: dict[str, float] | None = None) -> inbox.Event:
        loss = {"loss": 1.0} if metrics is None else metrics
        self.keeper.do(CommitSnapshot(name, version, version, JOB, loss, origin))
        return self.answers.get(timeout=PATIENCE_S)

    def find(self) -> inbox.Event:
        self.keeper.do(FindSnapshot())
        return self.answers.get(timeout=PATIENCE_S)

    def on_disk(self) -> list[int]:
        return [manifest.version for manifest in SnapshotStore(self.url).manifests()]


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path, Retention(keep_last=2))
    yield keeper
    end_threads(keeper.keeper.stop())


def test_what_all_servers_have_stored_is_committed_and_found_again(keeper: Keeper) -> None:
    assert keeper.find() == Origin(""), "there is none"
    name = keeper.store(3)
    done = keeper.commit(name, 3)
    assert isinstance(done, Snapshotted)
    assert done.nbytes == sum(SnapshotStore(keeper.url).load(name).files.values())
    assert done.seconds >= 0
    assert keeper.find() == Origin(name, 3)


def test_old_ones_are_deleted_and_the_one_that_a_server_may_still_need_is_not(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, Retention(keep_last=1))
    for version in (1, 2, 3):
        assert isinstance(keeper.commit(keeper.store(version), version, snapshot_id(1, 1)), Snapshotted)
    end_threads(keeper.keeper.stop())
    assert keeper.on_disk() == [1, 3]


LATER = ATTEMPTS + 1
REPLACED = "another coordinator, in place of this one, has stored {}: end this one"


def test_a_coordinator_that_was_paused_and_replaced_makes_no_given_up_course_the_newest(tmp_path: Path) -> None:
    """Its successor has gone back to an earlier version: it does not delete what was stored of later ones."""
    paused = Keeper(tmp_path)
    paused.commit(paused.store(1), 1)
    name = paused.store(5)
    later = Keeper(tmp_path, attempt=LATER)
    assert isinstance(later.commit(newest := later.store(2), 2), Snapshotted)
    assert paused.commit(name, 5) == NotStored(name, REPLACED.format(newest))
    assert later.find() == Origin(newest, 2)
    for keeper in (paused, later):
        end_threads(keeper.keeper.stop())


def test_a_coordinator_that_is_cut_off_while_it_writes_a_manifest_deletes_nothing_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine and the store come together again when another coordinator has stored newer ones."""
    hangs, later = Keeper(tmp_path, Retention(keep_last=2)), list[Keeper]()
    for version in (1, 2):
        hangs.commit(hangs.store(version), version)
    name, put = hangs.store(3), hangs.keeper._store._put

    def late(snapshot: str, path: str, data: bytes) -> None:
        if not later:
            later.append(Keeper(tmp_path, Retention(keep_last=3), LATER))
            assert isinstance(later[0].commit(later[0].store(4), 4), Snapshotted)
            end_threads(later[0].keeper.stop())  # it deletes old attempts, this one's folder too
        put(snapshot, path, data)

    monkeypatch.setattr(hangs.keeper._store, "_put", late)
    assert hangs.commit(name, 3) == NotStored(name, REPLACED.format(snapshot_id(4, LATER)))
    end_threads(hangs.keeper.stop())
    follows = Keeper(tmp_path, attempt=LATER + 1)
    assert follows.find() == Origin(snapshot_id(4, LATER), 4)
    end_threads(follows.keeper.stop())


def test_what_the_store_says_of_earlier_snapshots_holds_no_later_one_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file with the newest one's name is lost; a store has written it, and says that it has not."""
    keeper = Keeper(tmp_path)
    keeper.commit(keeper.store(1), 1)
    (tmp_path / "latest").unlink()
    assert isinstance(keeper.commit(keeper.store(2), 2), Snapshotted)
    keeper.attempt, put = 2, keeper.keeper._store._put

    def fails(snapshot: str, path: str, data: bytes) -> None:
        put(snapshot, path, data)
        if path == "latest":
            raise SnapshotError("it timed out")

    monkeypatch.setattr(keeper.keeper._store, "_put", fails)
    assert isinstance(keeper.commit(keeper.store(3), 3), NotStored)
    monkeypatch.undo()
    keeper.attempt = 3
    assert isinstance(keeper.commit(keeper.store(4), 4), Snapshotted)
    end_threads(keeper.keeper.stop())
    follows = Keeper(tmp_path, attempt=2)  # its coordinator has a lower number: the one before took very many
    assert isinstance(follows.commit(follows.store(5), 5), Snapshotted)
    end_threads(follows.keeper.stop())


def test_the_parts_of_a_snapshot_that_was_given_up_are_forgotten(keeper: Keeper) -> None:
    name = keeper.store(3)
    keeper.keeper.do(Capture(snapshot_id(4, 1), 0))
    assert keeper.commit(name, 3) == NotStored(name, "its parts have been forgotten")
    keeper.keeper.do(AddPart(Stored(name, {}, {}), "server0 on node0"))  # a straggler's word changes nothing
    assert keeper.find() == Origin("")


def test_what_attempts_have_stored_makes_room_for_the_next_one(keeper: Keeper) -> None:
    """On a full disk none would ever fit again."""
    keeper.commit(keeper.store(2), 2)
    keeper.store(3)  # and no word of the other parts: the disk of another server is full
    keeper.store(4)
    assert keeper.find() == Origin(snapshot_id(2, 1), 2)  # (what was asked for before is done)
    assert sorted(path.name for path in Path(keeper.url).glob("step*")) == [snapshot_id(2, 1), snapshot_id(4, 1)]


def test_late_metrics_belong_to_the_newest_attempt_at_their_version(tmp_path: Path) -> None:
    """The older one is of a course that was given up."""
    store = SnapshotStore(str(tmp_path))
    take(store, 20, 1)
    take(store, 20, 10001)
    keeper = Keeper(tmp_path)
    keeper.keeper.do(AddFigures(20, {"loss": 0.5}, 20))
    end_threads(keeper.keeper.stop())
    assert [manifest.metrics for manifest in store.manifests()] == [{}, {"loss": 0.5}]


def test_late_metrics_that_cannot_be_stored_do_not_end_the_job(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the coordinator it looks in the store for the snapshot of that version."""
    monkeypatch.setattr(SnapshotStore, "manifests", raising(StoreSilent("it does not answer")))
    keeper.keeper.do(AddFigures(20, {"loss": 0.5}, 10))
    assert keeper.find() == Origin("")
    assert keeper.said == ["the figures of step 20 could not be stored: it does not answer"]


def test_a_snapshot_that_lacks_a_part_is_not_committed(keeper: Keeper) -> None:
    name = snapshot_id(3, 1)
    keeper.keeper.do(Capture(name, 0))
    part = SnapshotStore(keeper.url).write_part(name, "server0", list(records(3))[1:], "zstd")
    entries = {shard: (e.file, e.offset, e.length, e.checksum) for shard, e in part.shards.items()}
    keeper.keeper.do(AddPart(Stored(name, part.files, entries), "server0 on node0"))
    failed = keeper.commit(name, 3)
    assert isinstance(failed, NotStored)
    assert "lacks 1 shards" in failed.reason


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
        patch.setattr(SnapshotStore, "commit", raising(error))
        assert keeper.commit(name, 3) == NotStored(name, sentence)
    name = keeper.store(4)
    assert isinstance(keeper.commit(name, 4), Snapshotted), "the next one is none the worse for it"
    monkeypatch.setattr(SnapshotStore, "retain", raising(error))
    name = keeper.store(5)
    assert isinstance(keeper.commit(name, 5), Snapshotted), "committed is committed"
    assert keeper.find() == Origin(name, 5)
    assert keeper.said == [f"old snapshots could not be deleted: {sentence}"]


# ---- a folder that is not shared ---------------------------------------------------------------------------------


def unshared(folder: Path, file: str) -> str:
    return (
        f"the coordinator on {socket.gethostname()} does not see in {folder} what members have stored there: server1 "
        f"on node1 ({file}). Let --snapshots (or --folder) be a folder that all hosts share, or a URL such as "
        "s3://bucket/run; --snapshots none trains without snapshots"
    )


def test_a_snapshot_with_a_file_that_the_coordinator_does_not_see_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest would name a file on another host's disk: nothing could be loaded from it."""
    monkeypatch.setattr(snapshots, "_LOOK_AGAIN_S", (0.0, 0.0))
    shared, other = tmp_path / "shared", tmp_path / "other"
    keeper = Keeper(shared)
    name = keeper.store(3, other)
    assert keeper.commit(name, 3) == NotStored(name, unshared(shared, "server1-0.shards"))
    assert isinstance(keeper.commit(keeper.store(4), 4), Snapshotted), "the next one is seen"
    end_threads(keeper.keeper.stop())
    assert keeper.on_disk() == [4]


def test_if_it_is_the_first_snapshot_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_LOOK_AGAIN_S", ())
    keeper = Keeper(tmp_path / "shared")
    name = keeper.store(0, tmp_path / "other")
    assert keeper.commit(name, 0) == Aborted(unshared(tmp_path / "shared", "server1-0.shards"))
    end_threads(keeper.keeper.stop())


def test_a_file_of_another_size_is_not_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_LOOK_AGAIN_S", ())
    keeper = Keeper(tmp_path)
    name = keeper.store(3)
    file = tmp_path / name / "server1-0.shards"
    file.write_bytes(file.read_bytes()[:-1])
    assert keeper.commit(name, 3) == NotStored(name, unshared(tmp_path, file.name))
    end_threads(keeper.keeper.stop())


def test_a_file_that_a_network_file_system_shows_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    keeper = Keeper(shared)
    name, looks = keeper.store(3, other), list[float]()

    def comes(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            (other / name / "server1-0.shards").rename(shared / name / "server1-0.shards")

    monkeypatch.setattr(snapshots.time, "sleep", comes)
    assert isinstance(keeper.commit(name, 3), Snapshotted)
    assert len(looks) == 2
    assert 3.0 < sum(snapshots._LOOK_AGAIN_S) < files.END_PATIENCE_S
    end_threads(keeper.keeper.stop())


# ---- a store that does not answer ------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DELAYS_S", (0.0, 0.0, 0.0))


def _fails_at_first(times: int, error: Exception, call: Callable[..., Any]) -> Callable[..., Any]:
    left = [times]

    def fails(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return call(*args, **kwargs)

    return fails


@pytest.mark.parametrize(
    "error", [files.StoreSilent("the bucket cannot be read: timed out"), RuntimeError("500 Internal Error")]
)
def test_a_store_that_does_not_answer_for_a_moment_is_asked_again(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, hasty: None, error: Exception
) -> None:
    name = keeper.store(3)
    keeper.commit(name, 3)
    monkeypatch.setattr(SnapshotStore, "latest_usable", _fails_at_first(2, error, SnapshotStore.latest_usable))
    assert keeper.find() == Origin(name, 3)
    assert len(keeper.said) == 2
    assert all("looking for the newest snapshot: " in said and "trying again in 0 s" in said for said in keeper.said)


def test_a_store_that_stays_silent_ends_the_job_with_what_to_do(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, hasty: None
) -> None:
    monkeypatch.setattr(SnapshotStore, "latest_usable", raising(RuntimeError("the bucket's own exception")))
    assert keeper.find() == Aborted(
        "the snapshots cannot be read: RuntimeError: the bucket's own exception (4 tries, looking for the newest "
        "snapshot): when it answers again, go on with `rallypoint resume`"
    )


@pytest.mark.parametrize("error", [DamagedSnapshot("file 3 is damaged"), SnapshotError("it is of format 9")])
def test_what_no_patience_mends_is_not_tried_again(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, hasty: None, error: Exception
) -> None:
    monkeypatch.setattr(SnapshotStore, "latest_usable", raising(error))
    assert keeper.find() == Aborted(f"the snapshots cannot be read: {error}")
    assert keeper.said == []


# ---- the best one ----------------------------------------------------------------------------------------------


def test_the_figures_of_an_evaluation_that_ends_after_its_snapshot_are_added_to_it(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, Retention(keep_last=1, keep_best="loss"))
    for version, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, 4.0)):
        assert isinstance(keeper.commit(keeper.store(version), version, metrics={}), Snapshotted)
        keeper.keeper.do(AddFigures(version, {"loss": loss}))
    keeper.keeper.do(AddFigures(9, {"loss": 0.0}))  # of a version of which there is no snapshot
    assert keeper.find() == Origin(snapshot_id(4, 1), 4)
    end_threads(keeper.keeper.stop())
    assert keeper.on_disk() == [2, 4], "the best and the newest"
    assert SnapshotStore(keeper.url).load(snapshot_id(2, 1)).metrics == {"loss": 1.0}


def test_the_best_one_stays_if_only_the_script_asks_for_it(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, Retention(keep_last=1))
    job = msgspec.structs.replace(JOB, config=JOB.config | {"evaluation": {"keep_best": "accuracy", "best_is": "max"}})
    for version, accuracy in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4)):
        keeper.keeper.do(CommitSnapshot(keeper.store(version), version, version, job, {"accuracy": accuracy}, ""))
        assert isinstance(keeper.answers.get(timeout=PATIENCE_S), Snapshotted)
    end_threads(keeper.keeper.stop())
    assert keeper.on_disk() == [2, 4], "the best and the newest"


def test_the_best_version_is_kept_and_those_that_are_not_decided_yet(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, Retention(keep_last=1))
    for version in range(1, 7):
        name, decided = keeper.store(version), (1, min(version, 4))
        keeper.keeper.do(CommitSnapshot(name, version, version, JOB, {}, "", kept=decided))
        assert isinstance(keeper.answers.get(timeout=PATIENCE_S), Snapshotted)
    end_threads(keeper.keeper.stop())
    assert keeper.on_disk() == [1, 5, 6], "the best so far; 5 or 6 may be better"


def test_a_new_coordinator_adds_the_figures_of_the_best_version_once_more(keeper: Keeper) -> None:
    take(SnapshotStore(keeper.url), 7)
    keeper.keeper.do(AddFigures(7, {"loss": 0.5}, version=7))
    assert keeper.find() == Origin(snapshot_id(7, 1), 7)
    assert SnapshotStore(keeper.url).load(snapshot_id(7, 1)).metrics == {"loss": 0.5}


def test_a_damaged_snapshot_is_passed_over_aloud(keeper: Keeper, tmp_path: Path) -> None:
    for version in (1, 2):
        take(SnapshotStore(keeper.url), version)
    file = next((tmp_path / snapshot_id(2, 1)).glob("*.shards"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert keeper.find() == Origin(snapshot_id(1, 1), 1)
    assert len(keeper.said) == 1
    assert keeper.said[0].startswith(f"snapshot {snapshot_id(2, 1)} is damaged: file {file.name}: ")
    assert keeper.said[0].endswith("; using the one before it")


# ---- the end ----------------------------------------------------------------------------------------------------


def test_a_store_that_hangs_does_not_keep_the_job_from_ending(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "END_PATIENCE_S", 0.05)
    name, hangs = keeper.store(3), Hanging()
    monkeypatch.setattr(SnapshotStore, "commit", hangs)
    keeper.keeper.do(CommitSnapshot(name, 3, 3, JOB, {}, ""))
    hangs.keeps_nobody(lambda: end_threads(keeper.keeper.stop()))
    assert [said.getMessage() for said in caplog.records] == [
        f"given up: the manifest of snapshot {name}. The job is over, and the store has not answered for 0.05 s"
    ]


def test_what_was_asked_for_before_the_end_is_still_done(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    name = keeper.store(3)
    keeper.keeper.do(CommitSnapshot(name, 3, 3, JOB, {}, ""))
    end_threads(keeper.keeper.stop())
    assert keeper.on_disk() == [3]
    assert caplog.records == []


def test_a_fault_on_the_keeper_s_thread_ends_the_job_with_a_sentence(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the coordinator would wait for ever for an answer."""
    monkeypatch.setattr(SnapshotKeeper, "_commit", raising(KeyError("a bug")))
    assert keeper.commit(keeper.store(3), 3) == Aborted("the thread for snapshots failed: KeyError: 'a bug'")
