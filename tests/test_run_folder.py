"""What a run's folder holds already: nobody overwrites a run, and no two launchers share a folder."""

from __future__ import annotations

import contextlib
import errno
import grp
import io
import multiprocessing
import os
import pwd
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rallypoint import cli
from rallypoint.config import JobConfig, record_of
from rallypoint.coordinator.events import EventLog
from rallypoint.coordinator.journal import Journal
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Aborted, Finished, Say
from rallypoint.core.typed import MOST_PUSHES
from rallypoint.errors import ConfigError, DataError, UsageError
from rallypoint.launch import folder as folders
from rallypoint.launch import run
from rallypoint.launch.commands.resume import going_on_or_anew
from rallypoint.launch.console import RunConsole
from rallypoint.launch.folder import clear, coordinated, locked, read_where, refuse_a_finished_run, refuse_an_old_run
from rallypoint.launch.kept_code import keep, refuse_others_script, refuse_others_words
from rallypoint.launch.observing.replay import replay
from rallypoint.launch.options import RunOptions
from rallypoint.launch.plan import Launch, program_of, read_plan, write_plan
from rallypoint.own_files import OpenFolder, is_alone_in_group
from rallypoint.store.files import Files, end_threads
from rallypoint.store.snapshots import SnapshotStore
from support.beside import Beside, raising

sys.path.insert(0, str(Path(__file__).parent / "store"))

from samples import take as snapshot

RECORD = record_of(JobConfig(steps=800), build_layout([TensorSpec("w", (4,), "float32", 0)], 64))


def test_a_run_that_only_its_owner_may_write_is_resumed(tmp_path: Path) -> None:
    old_run(tmp_path, None)
    (tmp_path / "code").mkdir()
    refuse_others_words(tmp_path)
    refuse_others_words(tmp_path / "none")  # who reads the plan says that there is none


@pytest.mark.parametrize("name", [".", "run.json", "code"])
@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022])
def test_a_run_that_others_may_write_is_not_resumed(tmp_path: Path, name: str, mode: int) -> None:
    """It runs what run.json says: any user who may write that could have anything run."""
    old_run(tmp_path, None)
    (tmp_path / "code").mkdir()
    path = tmp_path / name
    others_may_write(path, mode)
    with pytest.raises(UsageError, match=rf"^other users may write {path}, .* chmod -R go-w {tmp_path}$"):
        refuse_others_words(tmp_path)
    with pytest.raises(UsageError, match="and replaying a run runs what it says"):
        replay(tmp_path, lambda text: None, step=3)
    result = CliRunner().invoke(cli.app, ["resume", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "other users may write" in str(result.exception)


def others_may_write(path: Path, mode: int) -> None:
    """`mode` of a group is of one that is not this user's alone."""
    if os.geteuid() == 0:
        os.chown(path, -1, 65534)
    elif not mode & 0o002 and is_alone_in_group(path.stat()):
        pytest.skip("this user's files are of a group of his own")
    path.chmod(path.stat().st_mode | mode)


def test_a_run_of_another_user_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(tmp_path, None)
    mine = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if mine:
        with pytest.raises(UsageError, match=rf"belongs to another user \(number {mine}\)"):
            refuse_others_words(tmp_path)
    else:
        refuse_others_words(tmp_path)  # root's is as good as one's own
        os.chown(tmp_path / "run.json", 12345, -1)
        with pytest.raises(UsageError, match=r"run.json belongs to another user \(number 12345\)"):
            refuse_others_words(tmp_path)


def test_a_new_run_s_folder_is_written_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with locked(tmp_path / "run"):
            write_plan(Launch(folder=str(tmp_path / "run"), worker=("python",)))
    finally:
        os.umask(before)
    refuse_others_words(tmp_path / "run")


def test_a_file_system_without_locks_keeps_no_launcher_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre mounted without flock, NFS without lockd: the launcher ended with a traceback."""
    monkeypatch.setattr("fcntl.flock", raising(OSError(errno.ENOSYS, "Function not implemented")))
    with locked(tmp_path / "run"), coordinated(tmp_path / "run"):
        write_plan(Launch(folder=str(tmp_path / "run"), worker=("python",)))


def test_a_script_whose_name_is_no_text_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    script = os.fsdecode(os.fsencode(tmp_path) + b"/tr\xe4in.py")
    Path(script).touch()
    plan = Launch(folder=str(tmp_path / "run"), worker=(sys.executable, script), script=script)
    with pytest.raises(UsageError, match=r"tr\\udce4in.py' is no UTF-8: rename it"):
        run.launch(plan, RunConsole(Console(file=io.StringIO())), made=True)
    assert [path.name for path in tmp_path.iterdir()] == [Path(script).name]


@pytest.mark.parametrize("name", ["code/train.py", "code/inner", "code/inner/model.py"])
def test_kept_code_that_others_may_write_is_not_run(tmp_path: Path, name: str) -> None:
    """Also a file in it: `code` itself may be copied, or open for a moment."""
    old_run(tmp_path, None)
    (tmp_path / "code" / "inner").mkdir(parents=True)
    for file in ("train.py", "inner/model.py"):
        (tmp_path / "code" / file).touch(0o600)
    refuse_others_words(tmp_path)
    path = tmp_path / name
    path.chmod(path.stat().st_mode | 0o022)
    with pytest.raises(UsageError, match=rf"^other users may write {path}, "):
        refuse_others_words(tmp_path)


def test_kept_code_that_is_a_link_is_not_run(tmp_path: Path) -> None:
    old_run(tmp_path, None)
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere.py").touch()
    (tmp_path / "code" / "train.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(UsageError, match=r"train\.py is a link, which no run makes there"):
        refuse_others_words(tmp_path)


def test_what_is_kept_where_groups_may_write_by_default_is_run_again(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        (tmp_path / "src" / "inner").mkdir(parents=True)
        for file in ("train.py", "inner/model.py"):
            (tmp_path / "src" / file).touch()
        with locked(tmp_path / "run"):
            write_plan(Launch(folder=str(tmp_path / "run"), worker=("python",)))
            keep(str(tmp_path / "src" / "train.py"), tmp_path / "run")
    finally:
        os.umask(before)
    refuse_others_words(tmp_path / "run")
    assert (tmp_path / "run" / "code" / "inner" / "model.py").exists()


def test_a_run_that_this_user_s_own_group_may_write_is_resumed(tmp_path: Path) -> None:
    """As everything of a run of an earlier version is, where groups may write by default."""
    needs_a_group_of_ones_own(tmp_path)
    old_run(tmp_path, None)
    (tmp_path / "code" / "inner").mkdir(parents=True)
    for name in ("code/inner/model.py", "run.json", "code/inner", "code", "."):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o775)
    refuse_others_words(tmp_path)


@pytest.mark.parametrize("private", ["code", "code/inner"])
def test_kept_code_in_a_folder_that_only_its_owner_can_enter_is_run(tmp_path: Path, private: str) -> None:
    old_run(tmp_path, None)
    file = tmp_path / "code" / "inner" / "more" / "model.py"
    file.parent.mkdir(parents=True)
    file.touch()
    others_may_write(file, 0o022)
    with pytest.raises(UsageError, match=rf"^other users may write {file}, "):
        refuse_others_words(tmp_path)
    (tmp_path / private).chmod(0o700)
    refuse_others_words(tmp_path)
    (tmp_path / private).chmod(0o710)  # who may enter it may write what he knows the name of
    with pytest.raises(UsageError, match=rf"^other users may write {file}, "):
        refuse_others_words(tmp_path)


def test_a_script_is_recorded_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume from another folder must not run what has that name there."""
    monkeypatch.chdir(tmp_path)
    options = RunOptions(snapshots="kept", trace="trace.json", folder=str(tmp_path / "run"), watch=False)
    plan = options.run([sys.executable, "train.py", "train.py"], script="train.py")
    script = str(tmp_path / "train.py")
    assert (plan.script, plan.worker) == (script, (sys.executable, script, "train.py"))
    assert (plan.snapshots, plan.trace) == (str(tmp_path / "kept"), str(tmp_path / "trace.json"))
    assert options.run([sys.executable, "-m", "recipe"]).worker == (sys.executable, "-m", "recipe")


def of_script(folder: Path, script: str) -> Launch:
    return Launch(worker=(sys.executable, script), script=script, folder=str(folder))


def test_a_script_without_its_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run.json of an earlier version may have it; a stranger's file of that name may stand in the current folder."""
    old_run(tmp_path, None)
    write_plan(of_script(tmp_path, "train.py"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").touch()
    monkeypatch.chdir(elsewhere)
    result = CliRunner().invoke(cli.app, ["resume", str(tmp_path)])
    assert isinstance(result.exception, UsageError)
    assert "names the script train.py without its folder" in str(result.exception)


@pytest.mark.parametrize("name", ["", "train.py"])
def test_a_script_that_others_may_write_is_not_run_again(tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").touch(0o600)
    plan = of_script(tmp_path, str(home / "train.py"))
    refuse_others_script(plan, "resuming", "give --original")
    refuse_others_script(of_script(tmp_path, str(home / "gone.py")), "resuming", "give --original")
    path = home / name
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(UsageError, match=rf"^{path} may be written by other users, and resuming .*: give --original;"):
        refuse_others_script(plan, "resuming", "give --original")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["", "train.py", "link.py"])
def test_a_script_of_another_user_is_not_run_again(tmp_path: Path, name: str) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (elsewhere / "link.py").touch()
    (home / "train.py").touch()
    (home / "link.py").symlink_to(elsewhere / "link.py")
    plan = of_script(tmp_path, str(home / (name or "train.py")))
    refuse_others_script(plan, "resuming", "give --original")
    os.chown(home / name, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to another user \(number 65534\)"):
        refuse_others_script(plan, "resuming", "give --original")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize(("mode", "group"), [(0o644, 1), (0o664, 54321)])
def test_root_runs_the_script_of_whose_folder_it_is_in_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, group: int
) -> None:
    """In a container, a user's sources are mounted; nobody there has his number. A stranger's elsewhere are refused."""
    for name in ("work", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").touch()
        (tmp_path / name / "train.py").chmod(mode)
        for path in (tmp_path / name, tmp_path / name / "train.py"):
            os.chown(path, 54321, group)
    script = str(tmp_path / "work" / "train.py")
    with pytest.raises(UsageError, match=r"belongs to another user \(number 54321\)"):
        refuse_others_script(of_script(tmp_path, script), "resuming", "give --original")
    monkeypatch.chdir(tmp_path / "work")
    said = refuse_others_script(of_script(tmp_path, script), "resuming", "give --original")
    assert said == f"{script} belongs to user number 54321, as the folder does where you are: it runs as root"
    os.chown(tmp_path / "elsewhere", 54322, -1)
    for owner, path in ((54322, tmp_path / "elsewhere" / "train.py"), (54321, tmp_path / "elsewhere" / "train.py")):
        os.chown(path, owner, -1)
        with pytest.raises(UsageError, match=r"belongs to another user \(number 54322\)"):
            refuse_others_script(of_script(tmp_path, str(path)), "resuming", "give --original")
    os.chmod(script, 0o666)
    with pytest.raises(UsageError, match=r"train\.py may be written by other users, and resuming"):
        refuse_others_script(of_script(tmp_path, script), "resuming", "give --original")


def needs_a_group_of_ones_own(folder: Path) -> None:
    """Skip the test where new files are of another group than this user's own."""
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(folder.stat().st_gid)
    if (user.pw_name, user.pw_gid) != (group.gr_name, group.gr_gid) or set(group.gr_mem) - {user.pw_name}:
        pytest.skip("this user has no group of his own")


def test_a_script_that_this_user_s_own_group_may_write_is_run_again(tmp_path: Path) -> None:
    """As it is by default where each user has a group of his own."""
    needs_a_group_of_ones_own(tmp_path)
    script = tmp_path / "train.py"
    script.touch()
    script.chmod(0o664)
    refuse_others_script(of_script(tmp_path, str(script)), "resuming", "give --original")


def test_what_runs_is_said_without_its_arguments() -> None:
    plan = Launch(worker=("/bin/python", "/home/me/train.py", "--key", "secret"), script="/home/me/train.py")
    assert program_of(plan) == "/home/me/train.py"
    assert program_of(Launch(worker=("/bin/python", "-m", "recipe", "--key", "secret"))) == "/bin/python -m recipe"
    assert program_of(Launch(worker=("true",))) == "true"


def old_run(
    folder: Path, last_word: Finished | Aborted | None, *, snapshots: str = "", record: JobRecord = RECORD
) -> None:
    folder.mkdir(exist_ok=True)
    write_plan(Launch(worker=("true",), folder=str(folder), snapshots=snapshots))
    journal = Journal(str(folder))
    journal.save(ClusterState(record, None, (), 3, 1, True, 799, 2, last_word, {}))
    journal.close()


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    """Whoever makes the folder has it: a sweep starts many at once."""
    together = threading.Barrier(16)

    def begin(number: int) -> Path:
        together.wait()
        return folders.new_folder(tmp_path / "runs")

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(begin, range(16)))
    assert len(set(made)) == 16
    assert all(folder.is_dir() for folder in made)
    for folder in made:
        with locked(folder):
            refuse_an_old_run(folder, str(folder / "snapshots"))


def test_where_no_folder_can_be_made_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UsageError, match="cannot be a run's folder: File exists; choose another --folder"):
        folders.new_folder(tmp_path / "runs")


def test_options_that_cannot_be_used_make_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no compression"):
        RunOptions(compression="lead").run(["true"])
    assert list(tmp_path.iterdir()) == []
    assert Path(RunOptions(watch=False).run(["true"]).folder).is_dir()


def test_a_new_folder_is_anybodys(tmp_path: Path) -> None:
    refuse_an_old_run(tmp_path, "")


@pytest.mark.parametrize("others", [(), ("mine.txt",)])
def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path, others: tuple[str, ...]) -> None:
    """Unless somebody else has put something into it meanwhile."""
    folder, script = tmp_path / "run", tmp_path / "train.py"
    script.touch()
    plan = Launch(worker=("python", str(script)), script=str(script), folder=str(folder), tls=str(tmp_path / "nosuch"))

    def look(text: str) -> None:
        for name in others:
            (folder / name).touch()

    console = RunConsole(Console(file=io.StringIO()))
    console.console.print = lambda text, **more: look(text)  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(UsageError, match="nosuch"):
        run.launch(plan, console)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt"] if others else not folder.exists()
    folder.mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="nosuch"):
        run.launch(plan, RunConsole(Console(file=io.StringIO())))
    assert (folder / "run.json").exists()  # it was the user's folder
    made = folders.new_folder(tmp_path / "runs")
    with pytest.raises(UsageError, match="nosuch"):
        run.launch(
            msgspec.structs.replace(plan, folder=str(made)), RunConsole(Console(file=io.StringIO())), made=True
        )
    assert not made.exists()


@pytest.mark.parametrize("given", [[], ["--folder", "run"]])
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["import", "none.pt", "train.py"], "there is no checkpoint none.pt"),
        (["import", "--snapshots", "none", "train.py", "train.py"], "it needs a place for one"),
        (["import", "train.py", "train.py"], "before it had a snapshot"),
        (["chaos", "--tls", "nosuch", "gpt"], "nosuch"),
    ],
)
def test_no_command_that_cannot_begin_leaves_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], sentence: str, given: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    result = CliRunner().invoke(cli.app, [command[0], *given, "--no-watch", *command[1:]])
    assert isinstance(result.exception, UsageError), result.output
    assert sentence in str(result.exception)
    left = [path for path in (*Path("runs").glob("*"), Path("run")) if path.exists()]
    assert left == []


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    old_run(tmp_path, Finished("worker0"))
    with pytest.raises(UsageError, match=r"holds a finished run of 800 steps: choose another --folder, or --overwrite"):
        refuse_an_old_run(tmp_path, "")


def test_an_interrupted_run_is_not_resumed_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(tmp_path, None)
    monkeypatch.setattr(folders, "has_snapshot", lambda snapshots: True)
    resume = f"holds an interrupted run: go on with `rallypoint resume {tmp_path}`, or --overwrite"
    with pytest.raises(UsageError, match=resume):
        refuse_an_old_run(tmp_path, "somewhere")


def test_a_run_whose_snapshots_cannot_be_used_now_does_not_begin_anew(tmp_path: Path) -> None:
    """Clearing its folder deletes them: a disk that fails for a moment would cost the run."""
    place = tmp_path / "snapshots"
    old_run(tmp_path, None, snapshots=str(place))
    snapshot(SnapshotStore(str(place)), 20)
    for file in place.glob("*/*.shards"):
        file.write_bytes(b"")
    plan = msgspec.structs.replace(read_plan(tmp_path), folder=str(tmp_path))
    said: list[str] = []
    with pytest.raises(UsageError, match="has no usable snapshot"):
        going_on_or_anew(plan, said.append)
    assert "step-00000020-1 is damaged" in said[0]


def test_a_run_that_goes_on_by_another_command_line_says_which_counts(tmp_path: Path) -> None:
    place = tmp_path / "snapshots"
    old_run(tmp_path, None, snapshots=str(place))
    snapshot(SnapshotStore(str(place)), 20)
    plan = msgspec.structs.replace(read_plan(tmp_path), folder=str(tmp_path), servers=9)
    said: list[str] = []
    going_on, _ = going_on_or_anew(plan, said.append)
    assert going_on.servers != 9
    assert said[0].endswith("these count; `rallypoint resume` changes the numbers")


def test_a_run_that_failed_is_named_so(tmp_path: Path) -> None:
    old_run(tmp_path, Aborted("worker0: ValueError: boom"))
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


def test_a_new_run_is_not_started_over_the_snapshots_of_another_one(tmp_path: Path) -> None:
    """Its retention would take them for those of an abandoned course, and delete one after the other."""
    snapshot(SnapshotStore(str(tmp_path / "shared")), 7)
    shared = str(tmp_path / "shared")
    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            old_run(folder, Finished("worker0"))
            clear(folder)
        with pytest.raises(UsageError, match=f"{shared} holds snapshots of another run: choose another --snapshots"):
            refuse_an_old_run(folder, shared)
    refuse_an_old_run(tmp_path / "new", str(tmp_path / "elsewhere"))


def test_overwriting_says_which_snapshots_stay_because_they_are_elsewhere(tmp_path: Path) -> None:
    shared, folder = str(tmp_path / "shared"), tmp_path / "run"
    old_run(folder, None, snapshots=shared)
    assert clear(folder) == ""  # there are none
    old_run(folder, None, snapshots=shared)
    snapshot(SnapshotStore(shared), 7)
    assert clear(folder) == f"the snapshots of the run that was overwritten stay in {shared}: delete them by hand"
    old_run(folder, None, snapshots=str(folder / "snapshots"))
    snapshot(SnapshotStore(str(folder / "snapshots")), 7)
    assert clear(folder) == ""  # they were deleted


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


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ((), ((2, 5), 3, 4, 2)),
        (("--workers", "1"), ((1, 1), 1, 4, 2)),
        (("--workers", "2:8"), ((2, 8), 2, 4, 2)),
        (("--servers", "1"), ((2, 5), 3, 1, 1)),
    ],
    ids=["as before", "one worker", "a range", "one server"],
)
def test_a_run_is_resumed_in_its_size_unless_another_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], sizes: tuple[Any, ...]
) -> None:
    old_run(tmp_path, None)
    snapshot(SnapshotStore(str(tmp_path / "snapshots")), 7)
    write_plan(Launch(
        worker=("true",), folder=str(tmp_path), snapshots=str(tmp_path / "snapshots"), workers=(2, 5), workers_start=3,
        servers=4, replication=2,
    ))  # fmt: skip
    launched: list[Launch] = []
    monkeypatch.setattr(run, "launch", lambda plan, console, **how: launched.append(plan) or 0)
    result = CliRunner().invoke(cli.app, ["resume", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    (plan,) = launched
    assert (plan.workers, plan.workers_start, plan.servers, plan.replication) == sizes
    assert plan.resume.startswith("step-00000007")


def test_a_plan_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Launch(worker=("true",), folder=str(tmp_path))
    write_plan(before)

    def full(folder: OpenFolder, name: str, mode: int) -> None:
        with make(folder, name, mode):
            raise OSError(errno.ENOSPC, "No space left on device")

    make = OpenFolder.make
    monkeypatch.setattr(OpenFolder, "make", full)
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
    folders.write_where(tmp_path, folders.Where("127.0.0.1:1", "secret"))
    assert (tmp_path / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert read_where(tmp_path) == folders.Where("127.0.0.1:1", "secret")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode({"coordinator": 1}))
    with pytest.raises(DataError, match="no run is under way in"):
        read_where(tmp_path)


def test_a_coordinator_by_hand_takes_no_orders_also_where_nobody_can_tell_whether_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinated(tmp_path):
        pass
    with pytest.raises(DataError, match="no run is under way in"):
        read_where(tmp_path)
    monkeypatch.setattr("fcntl.flock", raising(OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(UsageError, match=r"the coordinator in .* was started by hand"):
        read_where(tmp_path)
    write_plan(Launch(worker=("train",), folder=str(tmp_path)))  # a launcher has started it
    with pytest.raises(DataError, match="no run is under way in"):
        read_where(tmp_path)


def test_a_finished_run_is_not_resumed_and_an_interrupted_one_is(tmp_path: Path) -> None:
    old_run(tmp_path, None)
    refuse_a_finished_run(tmp_path)
    old_run(tmp_path, Finished("worker0"))
    with pytest.raises(UsageError, match="holds a finished run of 800 steps: nothing is left to do") as refused:
        refuse_a_finished_run(tmp_path)
    assert f"`rallypoint resume {tmp_path} --set steps=N` makes more than 800 steps" in str(refused.value)
    refuse_a_finished_run(tmp_path / "elsewhere")
    endless = msgspec.structs.replace(RECORD, config=RECORD.config | {"steps": MOST_PUSHES})  # a store without steps=
    old_run(tmp_path, Finished("worker0"), record=endless)
    with pytest.raises(UsageError, match="holds a finished run: nothing is left to do"):
        refuse_a_finished_run(tmp_path)


def test_what_a_run_writes_is_for_its_owner_only(tmp_path: Path) -> None:
    """Whatever the umask: settings, addresses and weights are nobody else's."""
    before = os.umask(0)
    try:
        old_run(tmp_path / "run", None)
        log = EventLog(str(tmp_path / "run"))
        log.write(Say("words"))
        end_threads(log.stop())
        with Files(str(tmp_path / "run" / "snapshots")).writing("step-00000001-1/server0-0.shards") as write:
            write(b"weights")
    finally:
        os.umask(before)
    for name in ("run.json", "journal.sqlite", "events.jsonl"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o777 == 0o600, name
    for name in ("snapshots", "snapshots/step-00000001-1"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o777 == 0o700, name


def test_files_of_an_earlier_version_that_others_could_read_are_closed_to_them(tmp_path: Path) -> None:
    old_run(tmp_path, None)
    for name in ("journal.sqlite", "events.jsonl"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    old_run(tmp_path, None)
    end_threads(EventLog(str(tmp_path)).stop())
    for name in ("journal.sqlite", "events.jsonl"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, name


def test_a_folder_has_one_coordinator_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would write one journal, and both could prove that they are the job's."""
    monkeypatch.setattr("rallypoint.launch.folder.PREDECESSOR_S", 0.0)
    folder = tmp_path / "run"
    with coordinated(folder):
        who = f"process {os.getpid()} on "
        with pytest.raises(UsageError, match=rf"^{folder} has a coordinator already \({who}"), coordinated(folder):
            raise AssertionError("a second one")
    with coordinated(folder):
        pass  # the first one has ended


def test_a_coordinator_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    def come_after() -> None:
        with coordinated(tmp_path):
            pass

    with contextlib.ExitStack() as first:
        first.enter_context(coordinated(tmp_path))
        with Beside(come_after) as second:
            first.close()
            second.raise_if_failed()


def test_a_token_file_that_a_killed_process_of_the_same_number_left_is_replaced(tmp_path: Path) -> None:
    """In a container every coordinator has the same process id."""
    left = tmp_path / folders.TOKEN_FILE.format(os.getpid())
    left.write_text("the token from before")
    with folders.token_file(tmp_path, "a new token"):
        assert left.read_text() == "a new token"
        assert left.stat().st_mode & 0o777 == 0o600
    assert not left.exists()


def test_a_token_is_in_no_representation() -> None:
    assert repr(folders.Where("127.0.0.1:4700", "the token")) == "Where('127.0.0.1:4700')"
