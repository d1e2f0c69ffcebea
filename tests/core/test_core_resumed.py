"""A job that begins with a snapshot never begins with first weights, whichever coordinator is killed, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_core_all_reduce import RECORD as ALL_REDUCE
from test_core_cluster import RECORD, _Job, _of, _terms

from rallypoint.core.cluster.effects import FindSnapshot, PublishView
from rallypoint.core.cluster.events import Left, Tick
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin, Phase, Resumed, begun_by
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.decisions import Decided
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import Aborted, Finished, Prepare
from rallypoint.core.view import EarlyEnd

MEMBERS = ("s0", "s1", "w0", "w1")
SNAPSHOT, ELSEWHERE = "step-00000010-10002", "s3://bucket/other/step-00000010-10002"


def _resumed(snapshot: str = SNAPSHOT, version: int = 10, record: JobRecord = RECORD, **known: Any) -> Resumed:
    return Resumed(record, snapshot, version, **known)


def _next(job: _Job, **terms: Any) -> _Job:
    """The next coordinator, which knows what the journal of this one has."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState)
    return _Job(_terms(**terms), recovered=state, record=job.record)


@pytest.mark.parametrize("record", [RECORD, ALL_REDUCE], ids=["servers-hold-the-state", "workers-hold-the-state"])
@pytest.mark.parametrize("came", [0, 1, 3])
@pytest.mark.parametrize("coordinators", [1, 2])
def test_a_coordinator_killed_while_members_gather_is_followed_by_one_that_begins_with_the_snapshot(
    record: JobRecord, came: int, coordinators: int
) -> None:
    job = _Job(_terms(), resume=_resumed(record=record), record=record)
    for _ in range(coordinators):
        job.come(*MEMBERS[:came])
        assert job.machine.view is None
        job = _next(job)
    assert job.machine.phase is Phase.GATHERING
    job.come(*MEMBERS)
    assert (job.view.origin, job.machine.course.furthest) == (SNAPSHOT, 9)


def test_it_has_what_the_snapshot_knows() -> None:
    known = {"stop": EarlyEnd(14, "enough", "w0"), "decided": Decided(version=8)}
    job = _next(_Job(_terms(), resume=_resumed(**known)))
    job.come(*MEMBERS)
    assert job.view.orders.stop == EarlyEnd(14, "enough", "w0")
    assert job.machine.course.evaluations.decided == Decided(version=8)


def test_workers_that_leave_while_members_gather_take_the_record_with_them_only_from_a_job_without_a_snapshot() -> None:
    """The record of a resumed job has the settings with which it goes on."""
    job = _next(_Job(_terms(), resume=_resumed()))
    job.come("w0")
    job.play(Left("w0", "x"))
    assert job.machine.record == RECORD


def test_the_journal_has_it_before_anybody_has_come() -> None:
    machine = ClusterMachine(_terms(), None, _resumed())
    assert machine.revision > 0
    assert machine.state().origin == _resumed().origin


def test_a_job_that_has_begun_and_whose_journal_does_not_know_with_what_looks_for_a_snapshot() -> None:
    """As a journal of an earlier version of Rallypoint has it."""
    state = msgspec.structs.replace(_Job(_terms(), resume=_resumed()).machine.state(), origin=None)
    job = _Job(_terms(), recovered=state)
    effects = job.come(*MEMBERS)
    assert _of(PublishView, effects) == []
    assert len(_of(FindSnapshot, effects)) == 1
    assert {prepare.member for prepare in _of(Prepare, effects)} == {"s0", "s1"}
    job.play(Origin("step-00000012-20001", 12))
    assert (job.view.origin, job.machine.course.furthest) == ("step-00000012-20001", 11)


def test_first_weights_in_a_job_that_has_begun_are_found_by_the_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Job(_terms(), resume=_resumed())
    monkeypatch.setattr(Succession, "begin", lambda succession: succession.new_generation(""))
    with pytest.raises(AssertionError, match=r"begins with first weights of w0, and the job has begun"):
        job.come(*MEMBERS)


@pytest.mark.parametrize(("snapshot", "version"), [(SNAPSHOT, 10), ("step-00000000-10001", 0)])
def test_without_its_snapshot_it_ends_and_never_begins_anew(snapshot: str, version: int) -> None:
    """Also at version 0: those may be the weights of a checkpoint."""
    job = _Job(_terms(), resume=_resumed(snapshot, version))
    job.come(*MEMBERS)
    job.play(Left("s0", "x"), Left("s1", "x"))
    job.come("s2")
    assert len(_of(Aborted, job.play(Origin("")))) == 1


def test_another_jobs_snapshot_is_gone_back_to_until_this_job_has_one_of_its_own() -> None:
    job = _Job(_terms(), resume=_resumed(ELSEWHERE))
    job.come(*MEMBERS)
    assert job.view.origin == ELSEWHERE
    job.step(10)
    job.play(Left("s0", "x"), Left("s1", "x"))
    job.come("s2")
    job.play(Origin(""))
    assert (job.view.origin, job.machine.course.furthest) == (ELSEWHERE, 9)
    job.play(Left("s2", "x"))
    job.come("s3")
    job.play(Origin("step-00000012-10001", 12))
    assert job.view.origin == "step-00000012-10001"


def test_a_coordinator_writes_no_snapshot_under_a_name_that_the_store_has() -> None:
    """The journal is a new one, and knows of no earlier coordinator."""
    job = _Job(_terms(snapshots=True, snapshot_steps=1), resume=_resumed(epoch=4))
    assert job.machine.state().epoch == 5


def test_a_command_given_again_goes_on_with_the_job_that_it_has_begun() -> None:
    job = _Job(_terms(begun_by="resume 10"), resume=_resumed())
    assert begun_by(job.machine.state(), "resume 10")
    job.come(*MEMBERS)
    state = job.machine.state()
    assert begun_by(state, "resume 10")
    assert not begun_by(state, "resume 12")
    assert not begun_by(state, "")
    assert not begun_by(None, "resume 10")
    again = _next(job)
    again.play(Tick(1.0))
    assert begun_by(again.machine.state(), "resume 10"), "also after a coordinator that was started without --resume"
    assert again.view.origin == SNAPSHOT
    assert begun_by(msgspec.structs.replace(state, last_word=Finished("w0")), "resume 10")
    assert not begun_by(msgspec.structs.replace(state, last_word=Aborted("a loss is not finite")), "resume 10")


def test_a_launchers_resume_counts_each_time() -> None:
    job = _Job(_terms(), resume=_resumed())
    assert not begun_by(job.machine.state(), "")
