"""With what a coordinator begins that is told to --resume: which snapshot of which store, or its journal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from samples import JOB, take

from rallypoint.config import JobConfig, record_of
from rallypoint.coordinator.journal import Journal
from rallypoint.coordinator.service import JoinInfo
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, begun_by
from rallypoint.core.cluster.storing.snapshot_duty import ATTEMPTS
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.decisions import Decided, StopWhen, Trend
from rallypoint.core.protocol import Aborted, Finished
from rallypoint.core.view import EarlyEnd
from rallypoint.errors import DamagedSnapshot, UsageError
from rallypoint.launch.commands.resume import command_of, start_of
from rallypoint.store.snapshots import SnapshotStore


@pytest.fixture
def about(tmp_path: Path) -> JoinInfo:
    """A job's places, with snapshots of steps 20 and 40, which two coordinators have asked for."""
    record = record_of(JobConfig(replicas=2, steps=100), JOB.layout)
    store = SnapshotStore(str(tmp_path / "snapshots"))
    for version, attempt in ((20, ATTEMPTS + 2), (40, 2 * ATTEMPTS + 1)):
        manifest = take(store, version, attempt)
        store.commit(msgspec.structs.replace(manifest, record=msgspec.to_builtins(record)))
    (tmp_path / "run").mkdir()
    return JoinInfo(folder=str(tmp_path / "run"), snapshots=str(tmp_path / "snapshots"))


def journal(about: JoinInfo, **changed: object) -> None:
    """The journal of a job that was begun by `--resume step-00000020-10002`, and has gone on since."""
    command = command_of("step-00000020-10002", about)
    start, _ = start_of("step-00000020-10002", about, command)
    state = ClusterMachine(Terms(begun_by=command), None, start).state()
    kept = Journal(about.folder)
    kept.save(msgspec.structs.replace(state, **changed))
    kept.close()


def names(about: JoinInfo) -> list[str]:
    return [manifest.id for manifest in SnapshotStore(about.snapshots).manifests()]


def test_latest_is_the_newest_and_a_name_is_that_one(about: JoinInfo) -> None:
    newest, _ = start_of("latest", about, "")
    named, _ = start_of("step-00000020-10002", about, "")
    assert newest is not None
    assert named is not None
    assert (newest.snapshot, newest.version) == ("step-00000040-20001", 40)
    assert (named.snapshot, named.version) == ("step-00000020-10002", 20)
    assert named.epoch == 2, "a coordinator with a new journal takes no name that is taken"


def test_after_an_older_one_was_named_it_is_the_newest_until_there_is_another(about: JoinInfo) -> None:
    """Else the job would go back to a version of the course that was given up."""
    start_of("step-00000020-10002", about, "")
    found = SnapshotStore(about.snapshots).latest_usable(lambda text: None)
    assert found.id == "step-00000020-10002"
    assert names(about) == ["step-00000020-10002", "step-00000040-20001"], "nothing is deleted"


def test_a_damaged_one_that_was_named_does_not_become_the_newest(about: JoinInfo) -> None:
    file = Path(about.snapshots) / "step-00000020-10002" / "server0-0.shards"
    damaged = bytearray(file.read_bytes())
    damaged[5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DamagedSnapshot, match="is not what was written"):
        start_of("step-00000020-10002", about, "")
    newest, _ = start_of("latest", about, "")
    assert newest.version == 40


def test_another_jobs_snapshot_is_read_where_it_is(
    about: JoinInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = msgspec.structs.replace(about, snapshots=str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    for place in ("snapshots", str(tmp_path / "snapshots")):
        for name in ("step-00000040-20001", "latest"):
            start, _ = start_of(f"{place}/{name}", own, "")
            assert (start.snapshot, start.epoch) == (f"{about.snapshots}/step-00000040-20001", 0)
            assert start.origin.is_elsewhere
    assert not (tmp_path / "mine").exists()
    itself, _ = start_of(f"{about.snapshots}/step-00000040-20001", about, "")
    assert itself.snapshot == "step-00000040-20001", "it is of the job's own store"


def test_another_jobs_snapshot_is_refused_where_there_is_a_course_already(about: JoinInfo, tmp_path: Path) -> None:
    own = msgspec.structs.replace(about, snapshots=str(tmp_path / "mine"))
    take(SnapshotStore(own.snapshots), 3)
    with pytest.raises(UsageError, match=r"mine has snapshots, and .*step-00000040-20001 is not one of them: give oth"):
        start_of(f"{about.snapshots}/step-00000040-20001", own, "")


def test_without_a_store_a_name_says_nothing(about: JoinInfo) -> None:
    with pytest.raises(UsageError, match=r"--resume step-00000040-20001: of which store\?"):
        start_of("step-00000040-20001", msgspec.structs.replace(about, snapshots=""), "")


@pytest.mark.parametrize("changed", [{}, {"last_word": Finished("w0")}], ids=["goes-on", "has-finished"])
def test_the_same_command_needs_no_snapshot_once_it_has_begun_a_job(
    about: JoinInfo, changed: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention may have deleted it."""
    journal(about, **changed)
    SnapshotStore(about.snapshots).discard("step-00000020-10002")
    assert start_of("step-00000020-10002", about, command_of("step-00000020-10002", about)) == (None, [])
    assert f"going on with the job of {about.folder}, which this command has begun" in capsys.readouterr().out


@pytest.mark.parametrize("other", ["step-00000040-20001", "latest"])
def test_another_command_begins_with_the_snapshot_that_it_names(about: JoinInfo, other: str) -> None:
    journal(about)
    start, _ = start_of(other, about, command_of(other, about))
    assert start is not None
    changed = msgspec.structs.replace(about, overrides={"steps": 200})
    again, changes = start_of("step-00000020-10002", changed, command_of("step-00000020-10002", changed))
    assert again is not None
    assert [change.key for change in changes] == ["steps"]
    launched, _ = start_of("step-00000020-10002", about, command="")
    assert launched is not None, "a launcher says it once"


@pytest.mark.parametrize(
    ("end", "counts"), [(None, True), (50, True), (40, False)], ids=["none", "not-there-yet", "with-this-version"]
)
def test_with_more_steps_a_rule_begins_anew_only_if_it_has_ended_the_job(
    about: JoinInfo, end: int | None, counts: bool
) -> None:
    store, name = SnapshotStore(about.snapshots), "step-00000040-20001"
    stop = None if end is None else EarlyEnd(end, "no better", "run.stop_when")
    decided = Decided(30, {repr(StopWhen(metric="loss", patience=3)): Trend(1.0, 2)}, stop=stop)
    store.commit(msgspec.structs.replace(store.load(name), stop=stop, decided=decided))
    start, _ = start_of(name, msgspec.structs.replace(about, overrides={"steps": 200}), "")
    assert start is not None
    assert (start.stop, start.decided) == ((stop, decided) if counts else (None, Decided(30)))


def test_after_a_failure_the_same_command_begins_with_the_snapshot(about: JoinInfo) -> None:
    journal(about, last_word=Aborted("w0: ZeroDivisionError"))
    command = command_of("step-00000020-10002", about)
    assert start_of("step-00000020-10002", about, command)[0] is not None
    SnapshotStore(about.snapshots).discard("step-00000020-10002")
    with pytest.raises(DamagedSnapshot, match="snapshot step-00000020-10002 is damaged"):
        start_of("step-00000020-10002", about, command)


def test_the_journal_keeps_all_of_it(about: JoinInfo) -> None:
    journal(about)
    kept = Journal(about.folder)
    state = kept.load()
    kept.close()
    assert isinstance(state, ClusterState)
    assert (state.origin.snapshot, state.origin.version) == ("step-00000020-10002", 20)
    assert begun_by(state, command_of("step-00000020-10002", about))
