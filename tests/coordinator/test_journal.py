"""What a coordinator has written down, the next one knows: however the first one ended."""

from __future__ import annotations

import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.coordinator import journal as journal_module
from rallypoint.coordinator.journal import JOURNAL, Journal, Persistence, kept_state
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Aborted, Finished
from rallypoint.core.view import Assignment, EarlyEnd, Member, StandingOrders, View, ViewNumber
from rallypoint.errors import DataError
from rallypoint.store import files
from rallypoint.store.files import ROLLBACK, WAL, end_threads

WAIT_S = 20.0
LAYOUT = build_layout([TensorSpec("w", (30, 3), "float32", 0), TensorSpec("b", (3,), "float32", 1)], shard_bytes=128)
RECORD = msgspec.json.decode(  # lists, as from the wire
    msgspec.json.encode(record_of(resolve({"replicas": 2}), LAYOUT, {"frozen": "00ff"})), type=JobRecord
)
# Saves states for ever, and says after each that it is written; the test kills it in the middle of one.
WRITER = """
import sys
import msgspec
from rallypoint.coordinator import journal as module
module.journal_mode = lambda path: sys.argv[2]
journal = module.Journal(sys.argv[1])
state = journal.load()
while True:
    state = msgspec.structs.replace(state, incarnations=state.incarnations + 1, furthest=state.incarnations + 1)
    journal.save(state)
    print(state.incarnations, flush=True)
"""


def view(count: int) -> View:
    return View(
        ViewNumber(2, count), ViewNumber(1, 1), (Member("w0", "here", incarnation=3),),
        (Member("s0", "there", "127.0.0.1:1", 1), Member("s1", "there", "127.0.0.1:2", 2)),
        (Assignment(0, {"w0": (0, 1)}), Assignment(9, {"w0": (1,)})), {0: "s0", 1: "s1"}, {0: "s1"}, uploader="w0",
    )  # fmt: skip


def state(count: int = 1, *, last_word: Finished | Aborted | None = None) -> ClusterState:
    return ClusterState(
        RECORD, view(count), (0, 1), incarnations=3, epoch=2, begun=True, furthest=count, workers_max=2,
        last_word=last_word,
    )


MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /mnt/data rw - nfs4 store:/data rw,vers=4.2
31 30 0:41 / /mnt/data/fast rw - xfs /dev/sdb rw
32 22 0:42 / /mnt/of\040us rw - fuse.sshfs me@there: rw
33 22 0:43 / /mnt/data/twice rw - tmpfs tmpfs rw
34 22 0:44 / /mnt/data/twice rw - lustre lustre rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "mode"),
    [
        ("/home/me/run", "ext4", WAL), ("/mnt/data/run", "nfs4", ROLLBACK), ("/mnt/data/fast/run", "xfs", WAL),
        ("/mnt/of us/run", "fuse.sshfs", ROLLBACK), ("/mnt/data/twice/run", "lustre", ROLLBACK),
        ("/mnt/database", "ext4", WAL),
    ],
)  # fmt: skip
def test_on_a_file_system_of_a_network_no_memory_is_shared(
    path: str, kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder on a volume that hosts share: the next coordinator may be on another one."""
    assert files.kind_of(Path(path), MOUNTS) == kind
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text(MOUNTS)
    assert files.journal_mode(Path(path)) == mode


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "journal_mode", lambda path: ROLLBACK)


@pytest.mark.usefixtures("shared")
def test_a_journal_on_such_a_file_system_is_read_while_it_is_written(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    for count in (1, 2):
        journal.save(state(count))
        assert kept_state(tmp_path) == state(count)
    assert not {f"{JOURNAL}-wal", f"{JOURNAL}-shm"} & {path.name for path in tmp_path.iterdir()}
    journal.close()
    assert kept_state(tmp_path) == state(2)


def test_a_journal_from_before_views_had_orders_keeps_them(tmp_path: Path) -> None:
    orders = StandingOrders(EarlyEnd(7, "enough", "w0"), paused=5)
    kept = msgspec.structs.replace(state(), view=msgspec.structs.replace(view(1), orders=orders))
    journal = Journal(str(tmp_path))
    journal.save(kept)
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(kept, record=None)))
    data["view"] |= data["view"].pop("orders")
    with sqlite3.connect(journal.path) as older:
        older.execute("update state set body = ?", (msgspec.msgpack.encode(data),))
    assert journal.load() == kept
    journal.close()


def test_a_journal_goes_on_that_was_on_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was copied, or an earlier version wrote it there."""
    for count, mode in enumerate((WAL, ROLLBACK, WAL), 1):
        monkeypatch.setattr(journal_module, "journal_mode", lambda path, mode=mode: mode)
        journal = Journal(str(tmp_path))
        assert journal.load() == (state(count - 1) if count > 1 else None)
        journal.save(state(count))
        journal.close()
    assert kept_state(tmp_path) == state(3)


@pytest.mark.parametrize(
    ("word", "earlier"), [(Finished("w0", 7, "enough"), "FinishJob"), (Aborted("w0 gave up"), "Abort")]
)
def test_the_last_word_is_read_as_earlier_versions_wrote_it(
    tmp_path: Path, word: Finished | Aborted, earlier: str
) -> None:
    journal = Journal(str(tmp_path))
    journal.save(state(last_word=word))
    (body,) = journal._db.execute("select body from state").fetchone()
    written = msgspec.msgpack.decode(body)
    written["last_word"]["type"] = earlier
    journal._db.execute("update state set body = ?", (msgspec.msgpack.encode(written),))
    assert journal.load() == state(last_word=word)
    journal.close()
    assert kept_state(tmp_path) == state(last_word=word)


@pytest.mark.parametrize(
    "written",
    [
        ClusterState(None, None, (), incarnations=0, epoch=1, begun=False, furthest=-1, workers_max=1),
        ClusterState(RECORD, None, (), incarnations=2, epoch=1, begun=False, furthest=-1, workers_max=1),
        state(),
        state(last_word=Finished("w0")),
        state(last_word=Aborted("w0 gave up")),
    ],
    ids=["empty", "gathering", "running", "finished", "aborted"],
)
def test_what_was_saved_is_loaded_by_the_next(tmp_path: Path, written: ClusterState) -> None:
    first = Journal(str(tmp_path))
    first.save(written)
    first.close()
    second = Journal(str(tmp_path))
    assert second.load() == written
    second.close()


def test_the_last_state_counts_and_none_before_it_is_kept(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    for count in range(1, 6):
        journal.save(state(count))
    assert journal.load() == state(5)
    journal.close()
    with sqlite3.connect(tmp_path / JOURNAL) as db:
        tables = {name: db.execute(f"select count(*) from {name}").fetchone()[0] for (name,) in db.execute(
            "select name from sqlite_master where type = 'table'").fetchall()}  # fmt: skip
    db.close()
    assert tables == {"record": 1, "state": 1, "secret": 1}, "a long job's journal does not grow"


def test_a_record_may_be_replaced_until_the_job_has_begun(tmp_path: Path) -> None:
    """All workers left while the cluster gathered; the next ones bring another model."""
    journal = Journal(str(tmp_path))
    gathering = ClusterState(RECORD, None, (), incarnations=1, epoch=1, begun=False, furthest=-1, workers_max=1)
    other = msgspec.structs.replace(gathering, record=msgspec.structs.replace(RECORD, frozen={"frozen": "ff00"}))
    for written in (gathering, msgspec.structs.replace(gathering, record=None), other):
        journal.save(written)
        assert journal.load() == written
    journal.close()


def test_without_a_folder_nothing_is_kept() -> None:
    journal = Journal("")
    journal.save(state())
    assert journal.load() == state()
    journal.close()
    journal.close()
    forgetful = Journal("")
    assert forgetful.load() is None
    forgetful.close()


@pytest.mark.parametrize("mode", [WAL, ROLLBACK])
def test_a_writer_that_is_killed_loses_nothing_that_it_had_saved(tmp_path: Path, mode: str) -> None:
    journal = Journal(str(tmp_path))
    journal.save(state())
    journal.close()
    saved = state().incarnations
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), mode], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        lines = [writer.stdout.readline() for _ in range(25)]
        writer.send_signal(signal.SIGKILL)
        lines += [line for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        writer.stdout.close()
        assert writer.wait(20) == -signal.SIGKILL
        assert int(lines[0]) == saved + 1, "it went on where the one before ended"
        journal = Journal(str(tmp_path))
        after = journal.load()
        journal.close()
        saved = after.incarnations
        assert saved in (int(lines[-1]), int(lines[-1]) + 1), "what was said to be saved is there, at most one more"
        assert after == msgspec.structs.replace(state(), incarnations=saved, furthest=saved)


# ---- a disk that is full ---------------------------------------------------------------------------------------

# A process whose files may not grow: the kernel refuses the writes, as a full disk or a quota does.
FULL = """
import resource, sys
import msgspec
from rallypoint.coordinator.journal import Journal, Persistence
journal = Journal(sys.argv[1])
state = journal.load()
said = []
persistence = Persistence(journal, said.append)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
state = msgspec.structs.replace(state, furthest=7)
persistence.save(state, 0.0, needed=False)
persistence.tick(0.5)
persistence.save(msgspec.structs.replace(state, furthest=8), 0.6, needed=False)
persistence.tick(1.5)
assert len(said) == 1, said
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
persistence.tick(2.0)  # not yet its time: it waits longer from try to try
assert len(said) == 1, said
persistence.tick(10.0)
print(*said, sep="\\n")
"""


def test_a_process_whose_journal_may_not_grow_says_so_goes_on_and_writes_it_when_it_may(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.save(state())
    journal.close()
    full = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert full.returncode == 0, full.stderr
    began, ended = full.stdout.splitlines()
    assert began.startswith(f"the journal {tmp_path / JOURNAL} cannot be written (")
    assert "the job goes on, and its members keep what the next coordinator must know; make room" in began
    assert ended == "the journal is written again"
    again = Journal(str(tmp_path))
    assert again.load() == msgspec.structs.replace(state(), furthest=8), "the newest of what was not written"
    again.close()


@pytest.mark.parametrize("error", ["database or disk is full", "disk I/O error", "it is read-only"])
def test_every_error_of_the_disk_is_tried_again_ever_more_rarely(error: str) -> None:
    tries: list[float] = []
    clock = 0.0

    class Broken(Journal):
        def save(self, state: ClusterState) -> None:
            tries.append(clock)
            raise DataError(f"the journal cannot be written ({error})")

    said: list[str] = []
    persistence = Persistence(Broken(""), said.append)
    persistence.save(state(), clock, needed=False)
    while clock < 400.0:
        clock += 0.5
        persistence.tick(clock)
    assert len(said) == 1
    assert tries[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert tries[-1] - tries[-2] == 60.0
    with pytest.raises(DataError, match=error):
        persistence.save(state(), clock, needed=True)
    end_threads(persistence.stop())


# ---- a disk that hangs -----------------------------------------------------------------------------------------


class Hanging(Journal):
    """Each `save` waits for the test's leave."""

    def __init__(self, folder: str = "") -> None:
        super().__init__(folder)
        self.asked: queue.SimpleQueue[ClusterState] = queue.SimpleQueue()
        self.leave = threading.Semaphore(0)

    def save(self, state: ClusterState) -> None:
        self.asked.put(state)
        assert self.leave.acquire(timeout=WAIT_S)
        super().save(state)


def test_a_journal_that_hangs_is_waited_for_once_and_written_with_the_newest_state_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "PATIENCE_S", 0.01)
    said: list[str] = []
    journal = Hanging()
    persistence = Persistence(journal, said.append)
    persistence.save(state(1), 0.0, needed=False)
    assert journal.asked.get(timeout=WAIT_S) == state(1)
    assert said == [
        "the journal :memory: cannot be written (its disk has not answered for 0.01 s): the job goes on, and its "
        "members keep what the next coordinator must know; make room. It is tried again until it succeeds"
    ]
    monkeypatch.setattr(journal_module, "PATIENCE_S", WAIT_S)  # whoever waits for it once more fails
    for count in (2, 3):
        persistence.save(state(count), 0.1, needed=False)
        persistence.tick(1000.0)
    assert journal.asked.empty()
    journal.leave.release(2)
    now = 1000.0
    while len(said) < 2:
        persistence.tick(now)
    assert said[1] == "the journal is written again"
    assert journal.asked.get(timeout=WAIT_S) == state(3), "the newest, and none between"
    assert journal.load() == state(3)
    end_threads(persistence.stop())


def test_a_disk_that_is_slower_than_that_is_waited_for_once_for_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written by the next look is written: it is not asked for the same once more, and again too late."""
    monkeypatch.setattr(journal_module, "PATIENCE_S", 0.01)
    said: list[str] = []
    journal = Hanging()
    persistence = Persistence(journal, said.append)
    for count in (1, 2):
        persistence.save(state(count), 0.0, needed=False)
        assert journal.asked.get(timeout=WAIT_S) == state(count)
        journal.leave.release()  # too late
        while persistence._writer.is_busy:
            pass
        persistence.tick(0.5)
        assert journal.asked.empty()
        assert len(said) == 2 * count
        assert said[-1] == "the journal is written again"
    end_threads(persistence.stop())


def test_a_state_that_is_needed_is_waited_for_so_long_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "NEEDED_PATIENCE_S", 0.01)
    journal = Hanging()
    persistence = Persistence(journal, print)
    for _ in range(2):  # the second time it has to wait for the first
        with pytest.raises(DataError, match=r"^the journal :memory: cannot be written \(its disk has not answered"):
            persistence.save(state(), 0.0, needed=True)
    journal.leave.release(2)
    end_threads(persistence.stop())


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_tries_once_more_and_waits_for_a_disk_that_hangs_so_long_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, answers: bool
) -> None:
    monkeypatch.setattr(journal_module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(files, "END_PATIENCE_S", WAIT_S if answers else 0.01)
    journal = Hanging(str(tmp_path))
    persistence = Persistence(journal, lambda text: None)
    persistence.save(state(1), 0.0, needed=False)
    persistence.save(state(2), 0.0, needed=False)
    if answers:
        journal.leave.release(2)
    ending = persistence.stop()
    end_threads(ending)
    assert [entry.message for entry in caplog.records] == [] if answers else [
        f"given up: the journal {tmp_path / JOURNAL}. The job is over, and the store has not answered for 0.01 s"
    ]
    journal.leave.release(2)
    ending[0].join(WAIT_S)
    again = Journal(str(tmp_path))
    assert again.load() == state(2)
    again.close()


def test_the_job_s_secret_is_made_once_and_kept(tmp_path: Path) -> None:
    secrets = set()
    for _ in range(2):
        journal = Journal(str(tmp_path))
        secrets.add(journal.secret)
        journal.close()
    assert len(secrets) == 1
    assert len(secrets.pop()) == 32
    assert Journal("").secret != Journal("").secret


# ---- a journal that cannot be read -----------------------------------------------------------------------------


def spoil_the_file(path: Path) -> None:
    path.write_bytes(b"this is no database, but it is long enough to be taken for one" * 100)


def spoil_the_state(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("update state set body = x'c1'")
    db.close()


def spoil_the_record(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("update record set body = x'93'")
    db.close()


@pytest.mark.parametrize("spoil", [spoil_the_file, spoil_the_state, spoil_the_record])
def test_a_journal_that_cannot_be_read_is_one_sentence(tmp_path: Path, spoil: object) -> None:
    journal = Journal(str(tmp_path))
    journal.save(state())
    journal.close()
    for beside in tmp_path.glob(f"{JOURNAL}-*"):
        beside.unlink()
    assert callable(spoil)
    spoil(tmp_path / JOURNAL)
    service = CoordinatorService(terms=Terms(), join_info=JoinInfo(folder=str(tmp_path)))
    with pytest.raises(DataError, match=r"^the journal .*journal\.sqlite cannot be read \(.*\): move it away to start"):
        service.start()
