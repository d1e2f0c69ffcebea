"""An operator changes how often snapshots are taken: when the next one is due, and what the change outlives."""

from __future__ import annotations

import msgspec
import pytest
from test_core_cluster import _Job, _of
from test_core_stop import _begun, _reported

from rallypoint.coordinator.ordering.orders import Orders
from rallypoint.core.cluster.effects import Capture
from rallypoint.core.cluster.events import (
    Captured,
    Committed,
    Event,
    Failed,
    Heard,
    Paused,
    Progress,
    SnapshotsEvery,
    SnapshotWanted,
    Tick,
)
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import Resumed
from rallypoint.core.cluster.terms import SnapshotPeriod
from rallypoint.net.ordering.messages import Ordered, SnapshotEvery


def test_the_next_snapshot_is_due_by_the_new_period_of_steps() -> None:
    job = _begun(snapshots=True, snapshot_steps=100)
    _reported(job, 4)
    (capture,) = _of(Capture, job.play(SnapshotsEvery(SnapshotPeriod(steps=5))))
    assert capture.version > 4


def test_the_next_snapshot_is_due_by_the_new_period_of_seconds() -> None:
    job = _begun(snapshots=True)
    _reported(job, 4)
    assert _of(Capture, job.play(Tick(1.0), *_alive(job, 50.0))) == []
    assert _of(Capture, job.play(SnapshotsEvery(SnapshotPeriod(seconds=30.0)))) != []


def test_with_a_period_of_nothing_snapshots_are_taken_on_demand_only() -> None:
    job = _begun(snapshots=True, snapshot_seconds=10.0, snapshot_steps=2)
    job.play(SnapshotsEvery(SnapshotPeriod()))
    _reported(job, 9)
    assert _of(Capture, job.play(Tick(1.0), *_alive(job, 50.0))) == []


def test_the_period_outlives_the_coordinator_and_its_journal_is_written_once() -> None:
    job = _begun(snapshots=True, snapshot_steps=100)
    before = job.machine.revision
    job.play(SnapshotsEvery(SnapshotPeriod(7, 3.0)))
    revision = job.machine.revision
    assert revision > before
    job.play(SnapshotsEvery(SnapshotPeriod(7, 3.0)))
    assert job.machine.revision == revision
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=type(job.machine.state()))
    assert ClusterMachine(job.machine.terms, state).course.snapshot_period == SnapshotPeriod(7, 3.0)


def test_a_resumed_run_has_the_period_that_it_is_started_with() -> None:
    job = _begun(snapshots=True, snapshot_steps=100)
    job.play(SnapshotsEvery(SnapshotPeriod(7)))
    assert job.machine.record is not None
    resumed = Resumed(job.machine.record, "step-00000003-1", 3)
    again = ClusterMachine(job.machine.terms, job.machine.state(), resumed)
    assert again.course.snapshot_period == SnapshotPeriod(100, 0.0)


def test_a_snapshot_in_progress_is_ended_before_the_next_one() -> None:
    job = _begun(snapshots=True, snapshot_steps=2)
    (capture,) = [one for step in range(4) for one in _of(Capture, job.play(*_step(job, step)))]
    assert _of(Capture, job.play(SnapshotsEvery(SnapshotPeriod(1)))) == []
    job.play(*(Captured(server, capture.snapshot, tuple(range(99))) for server in capture.writers))
    job.play(Committed(capture.snapshot))
    assert _of(Capture, job.play(*_step(job, capture.version + 1))) != []


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_while_the_job_is_paused_no_version_is_stored_twice(steps: int) -> None:
    job = _begun(snapshots=True, snapshot_steps=100)
    _reported(job, 4)
    captures = _of(Capture, [*job.play(Paused(True)), *job.play(SnapshotsEvery(SnapshotPeriod(steps)))])
    versions = []
    while captures and len(versions) < 4:
        (capture,) = captures
        versions.append(capture.version)
        job.play(*(Captured(server, capture.snapshot, tuple(range(99))) for server in capture.writers))
        captures = _of(Capture, [*job.play(Committed(capture.snapshot)), *job.play(Tick(1.0))])
    assert len(versions) <= 1
    assert _of(Capture, job.play(SnapshotWanted())) != [], "a user gets one all the same"


@pytest.mark.parametrize(("steps", "seconds", "said"), [
    (0, 0.0, "only at the end and when somebody asks"), (1, 0.0, "every step"), (250, 0.0, "every 250 steps"),
    (0, 1.0, "every second"), (0, 1.5, "every 1.5 s"), (250, 60.0, "every 250 steps and every 60 s"),
])  # fmt: skip
def test_the_order_is_followed_and_told_to_all_observers(steps: int, seconds: float, said: str) -> None:
    job, order = _begun(snapshots=True), SnapshotEvery(steps, seconds)
    answer = Orders(0.0).answer(order, job.machine.course, 1.0)
    assert answer.events == [SnapshotsEvery(SnapshotPeriod(steps, seconds))]
    told = [one for one in answer.news if isinstance(one, Ordered)]
    assert order in answer.news
    assert [said in one.text and not one.refused for one in told] == [True]


def test_it_is_refused_where_no_snapshots_are_kept_and_where_the_job_ends() -> None:
    without, ends = _begun(), _begun(snapshots=True)
    _reported(ends, 4)
    ends.play(Failed("s0", "its disk is gone", 5, ends.view.generation))
    for job, why in ((without, "keeps no snapshots"), (ends, "the job ends")):
        (told,) = Orders(0.0).answer(SnapshotEvery(5), job.machine.course, 1.0).news
        assert isinstance(told, Ordered)
        assert told.refused
        assert why in told.text


def _step(job: _Job, step: int) -> list[Event]:
    return [Progress("w0", step, 0, 0.1, job.view.generation)]


def _alive(job: _Job, now: float) -> list[Event]:
    """Time goes by, and everybody gives a sign of life."""
    return [*(Heard(name) for name in ("s0", "s1", "w0", "w1")), Tick(now)]
