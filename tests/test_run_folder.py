"""What a run's folder holds already: nobody overwrites a run, and no two launchers share a folder."""

from __future__ import annotations

import errno
import multiprocessing
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import msgspec
import pytest

from rallypoint.config import JobConfig, record_of
from rallypoint.coordinator.journal import Journal
from rallypoint.core.cluster.effects import Abort, Finish
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.errors import DataError, UsageError
from rallypoint.launch import folder as folders
from rallypoint.launch.folder import Where, clear, locked, read_where, refuse_an_old_run, write_where
from rallypoint.launch.plan import Launch, read_plan, write_plan

RECORD = record_of(JobConfig(steps=800), build_layout([TensorSpec("w", (4,), "float32", 0)], 64))


def old_run(folder: Path, last_word: Finish | Abort | None) -> None:
    folder.mkdir(exist_ok=True)
    write_plan(Launch(worker=("true",), folder=str(folder)))
    journal = Journal(str(folder))
    journal.save(ClusterState(RECORD, None, (), 3, 1, True, 799, 2, last_word, {}))
    journal.close()


def test_a_new_folder_is_anybodys(tmp_path: Path) -> None:
    refuse_an_old_run(tmp_path, "")


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    old_run(tmp_path, Finish("worker0"))
    with pytest.raises(UsageError, match=r"holds a finished run of 800 steps: choose another --folder, or --overwrite"):
        refuse_an_old_run(tmp_path, "")


def test_an_interrupted_run_is_not_resumed_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(tmp_path, None)
    monkeypatch.setattr(folders, "has_snapshot", lambda snapshots: True)
    resume = f"holds an interrupted run: go on with `rallypoint resume {tmp_path}`, or --overwrite"
    with pytest.raises(UsageError, match=resume):
        refuse_an_old_run(tmp_path, "somewhere")


def test_a_run_that_failed_is_named_so(tmp_path: Path) -> None:
    old_run(tmp_path, Abort("worker0: ValueError: boom"))
    failed = r"holds a run that failed \(worker0: ValueError: boom\), without a snapshot"
    with pytest.raises(UsageError, match=failed):
        refuse_an_old_run(tmp_path, "")


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    old_run(tmp_path, None)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "model.pt").write_text("mine")
    clear(tmp_path)
    refuse_an_old_run(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_users_own_folder_named_code_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("precious")
    with pytest.raises(UsageError, match="code is not of a run"):
        refuse_an_old_run(tmp_path, "")
    with pytest.raises(UsageError, match="code is not of a run"):
        clear(tmp_path)
    assert (tmp_path / "code" / "mine.py").read_text() == "precious"


def test_without_a_run_there_is_nothing_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "mine").write_text("precious")
    clear(tmp_path)
    assert (tmp_path / "snapshots" / "mine").read_text() == "precious"


def test_overwriting_takes_a_link_away_and_not_what_it_points_to(tmp_path: Path) -> None:
    old_run(tmp_path / "run", None)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "mine").write_text("precious")
    for name in ("snapshots", "code"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "disk")
    clear(tmp_path / "run")
    assert (tmp_path / "disk" / "mine").read_text() == "precious"
    assert not list((tmp_path / "run").iterdir())


def test_a_plan_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Launch(worker=("true",), folder=str(tmp_path))
    write_plan(before)

    def full(path: Path, data: bytes) -> int:
        with path.open("wb"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"run\.json cannot be written: No space left"):
        write_plan(msgspec.structs.replace(before, servers=9))
    assert read_plan(tmp_path) == before


HOLD = """
import sys
from pathlib import Path
from rallypoint.launch.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_launcher_is_refused_until_the_first_has_ended_however_it_ended(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="a run is under way in"), locked(tmp_path):
            pass
        first.kill()
    with locked(tmp_path):
        pass


def take(folder: Path, barrier: Barrier, results: multiprocessing.SimpleQueue[str]) -> None:
    barrier.wait()
    try:
        with locked(folder):
            results.put("runs")
            barrier.wait()  # nobody lets go before both have tried
    except UsageError:
        results.put("refused")
        barrier.wait()


def test_of_two_launchers_in_the_same_instant_one_runs(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    takers = [context.Process(target=take, args=(tmp_path, barrier, results)) for _ in range(2)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert sorted(results.get() for _ in takers) == ["refused", "runs"]


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be a run's folder"), locked(tmp_path / "file"):
        pass


def test_where_a_job_runs_is_for_its_user_only(tmp_path: Path) -> None:
    write_where(tmp_path, Where("127.0.0.1:1", "secret"))
    assert (tmp_path / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert read_where(tmp_path) == Where("127.0.0.1:1", "secret")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode({"coordinator": 1}))
    with pytest.raises(DataError, match="no run is under way in"):
        read_where(tmp_path)
