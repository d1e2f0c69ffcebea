"""Coordinators of resumed jobs are killed, on real processes: the job goes on, and never begins anew.

While members gather (they wait before they join), after that with the same command, and of a job that begins with
another one's snapshot, which is only read.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.beside import until
from support.members import PATIENCE_S as LONG_S
from support.members import Members, members_in
from test_survival import AT, SCRIPT, STEPS, Cluster, cluster_of, undisturbed_run

pytestmark = [pytest.mark.programs, pytest.mark.slow]

# A member's script waits before it joins, as long as there is such a file
WAITING = """
import pathlib, sys, time
while pathlib.Path(sys.argv[1]).with_name("wait").exists():
    time.sleep(0.01)
"""
# Else a job that begins anew would end with the same bytes
OTHER_WEIGHTS = """
if gate.with_name("other").exists():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
"""
ENV = {**os.environ, "RALLYPOINT_TOKEN": "a token for this test", "COLUMNS": "200"}


class _Waiting(Cluster):
    def __init__(self, home: Path) -> None:
        super().__init__(home, WAITING + SCRIPT.replace("\ndata =", f"{OTHER_WEIGHTS}\ndata =", 1))

    @property
    def coordinator(self) -> int:
        """Its pid; 0 while there is none."""
        found = self.processes().get("coordinator")
        return 0 if found is None else found.pid

    @property
    def steps(self) -> list[int]:
        """The steps that were done, in order."""
        return [event["step"] for event in self.events("StepDone")]


cluster = cluster_of(_Waiting)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The weights of a run that nothing happened to."""
    with undisturbed_run(_Waiting(tmp_path_factory.mktemp("undisturbed"))) as made:
        yield made.hash


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_resumed_run_whose_coordinator_dies_while_members_gather_goes_on_from_its_snapshot(
    cluster: _Waiting, wanted: str, deaths: int
) -> None:
    cluster.run("--workers", "2", "--servers", "2")
    taken = cluster.snapshot_from(AT)
    cluster.kill_everything()
    done = len(cluster.steps)

    for name in ("wait", "other"):
        (cluster.home / name).touch()
    cluster.open(STEPS)
    cluster.resume()
    cluster.until(lambda: "worker1" in cluster.processes())  # started when the coordinator listens
    dead: set[int] = set()
    for _ in range(deaths):
        cluster.until(lambda: cluster.coordinator not in (0, *dead))
        dead.add(cluster.coordinator)
        os.kill(cluster.coordinator, signal.SIGKILL)
    (cluster.home / "wait").unlink()
    assert cluster.ended() == 0, cluster.output
    assert cluster.output.count("coordinator was killed (SIGKILL): starting another") == deaths
    assert cluster.steps[done:] == list(range(taken["version"], STEPS)), "it went back behind the snapshot"
    assert cluster.hash == wanted


# ---- a coordinator that the same command starts ----


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    (tmp_path / "train.py").write_text(SCRIPT)
    with members_in(tmp_path, ENV) as made:
        yield made


def steps(members: Members, run: str) -> list[int]:
    """The steps that a job by hand has done, in order."""
    import json

    log = members.folder / run / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["step"] for event in events if event["type"] == "StepDone"]


def until_step(members: Members, run: str, step: int) -> None:
    until(lambda: max(steps(members, run), default=-1) >= step, lambda: str(steps(members, run)))


def open_to(members: Members, step: int) -> None:
    """Let workers come as far as this step."""
    (members.folder / "partial").write_text(str(step))
    (members.folder / "partial").replace(members.folder / "gate")


def begin(members: Members, run: str, *options: str) -> str:
    """Start a coordinator, a server and a worker. Returns the coordinator's address."""
    members.start(f"{run}-coordinator", "coordinator", "--folder", run, "--snapshot-steps", "2", *options)
    address = members.until(f"{run}-coordinator", r"the coordinator listens at (\S+)\n")
    members.start(f"{run}-server", "server", "--coordinator", address)
    members.start(f"{run}-worker", "worker", "--coordinator", address, "train.py", str(members.folder / "gate"))
    return address


def kill(members: Members, *names: str) -> None:
    for name in names:
        members.started[name].kill()
        members.started[name].wait(LONG_S)


def snapshots(folder: Path) -> dict[str, bytes]:
    """The files in a store, but for `latest`."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "latest")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def committed(members: Members) -> list[str]:
    """The names of the first job's snapshots, ascending."""
    return sorted(file.parent.name for file in members.folder.glob("snapshots/step-*/manifest.json"))


def a_job_with_snapshots(members: Members) -> str:
    """A job that was killed at step 8. Returns its last snapshot's name."""
    open_to(members, 8)
    begin(members, "first", "--snapshots", "snapshots")
    until_step(members, "first", 7)
    until(lambda: committed(members)[-1] >= "step-00000001", "there is no snapshot but of version 0")
    kill(members, "first-coordinator", "first-worker", "first-server")
    return committed(members)[-1]


def test_a_coordinator_started_again_with_resume_goes_on_where_it_was_also_when_the_snapshot_is_deleted(
    members: Members, wanted: str
) -> None:
    snapshot = a_job_with_snapshots(members)
    command = ("--snapshots", "snapshots", "--keep-last", "1", "--resume", snapshot)
    open_to(members, 14)
    address = begin(members, "then", *command)
    until_step(members, "then", 13)
    until(lambda: any(members.folder.glob("snapshots/step-*-2????/manifest.json")), "this job has stored nothing")
    kill(members, "then-server")  # the next generation begins with another snapshot, so this one may be deleted
    members.start("then-server-2", "server", "--coordinator", address)
    open_to(members, 18)
    until_step(members, "then", 17)
    until(lambda: not (members.folder / "snapshots" / snapshot).exists(), "it is still there")
    kill(members, "then-coordinator")
    before = steps(members, "then")
    again = ("coordinator", "--folder", "then", "--snapshot-steps", "2", *command, "--bind", address)
    members.start("then-coordinator-2", *again)
    open_to(members, STEPS)
    assert members.started["then-coordinator-2"].wait(LONG_S) == 0, members.said("then-coordinator-2")
    for name in ("then-worker", "then-server-2"):
        assert members.started[name].wait(LONG_S) == 0, members.said(name)
    assert "which this command has begun" in members.said("then-coordinator-2")
    after = steps(members, "then")[len(before):]  # what was reported of the step in progress died with the coordinator
    assert after == sorted(after)
    assert (after[0] > before[-1], after[-1]) == (True, STEPS - 1), "it went back"
    assert (members.folder / "then" / "hash").read_text() == wanted


def test_a_job_that_begins_with_another_ones_snapshot_only_reads_it(members: Members, wanted: str) -> None:
    snapshot = a_job_with_snapshots(members)
    theirs = snapshots(members.folder / "snapshots")
    open_to(members, 7)
    command = ("--snapshots", "mine", "--resume", f"snapshots/{snapshot}")
    address = begin(members, "fork", *command, "--snapshot-steps", "100", "--snapshot-seconds", "0")
    until_step(members, "fork", 6)
    kill(members, "fork-server")  # nothing of its own is stored: it goes back to theirs
    members.start("fork-server-2", "server", "--coordinator", address)
    members.until("fork-coordinator", r"(going on from snapshot \S+/snapshots/step-)")
    open_to(members, 16)
    until_step(members, "fork", 15)
    assert not snapshots(members.folder / "mine")
    assert snapshots(members.folder / "snapshots") == theirs
    kill(members, "fork-coordinator")
    again = ("coordinator", "--folder", "fork", "--snapshot-steps", "2", *command, "--bind", address)
    members.start("fork-coordinator-2", *again)
    for step in range(18, STEPS):  # a snapshot is asked for a few steps ahead
        open_to(members, step)
        until_step(members, "fork", step - 1)
    until(lambda: any(members.folder.glob("mine/step-*/manifest.json")), "this job has stored nothing")
    shutil.rmtree(members.folder / "snapshots" / snapshot)  # now it needs theirs no more
    theirs = {name: data for name, data in theirs.items() if not name.startswith(snapshot)}
    kill(members, "fork-server-2")
    members.start("fork-server-3", "server", "--coordinator", address)
    open_to(members, STEPS)
    assert members.started["fork-coordinator-2"].wait(LONG_S) == 0, members.said("fork-coordinator-2")
    assert (members.folder / "fork" / "hash").read_text() == wanted
    assert snapshots(members.folder / "snapshots") == theirs
    assert list(members.folder.glob(f"mine/step-{STEPS:08d}-*/manifest.json"))
