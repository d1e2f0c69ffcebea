"""An operator pauses a job: how far it goes, what outlives what, and what may be ordered."""

from __future__ import annotations

import msgspec
import pytest
from test_core_cluster import STEPS, _of
from test_core_stop import _begun, _reported

from rallypoint.coordinator.operator import Orders
from rallypoint.core.cluster.effects import PublishView
from rallypoint.core.cluster.events import Captured, From, Heard, Left, Tick
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin
from rallypoint.core.protocol import (
    AnyOrder,
    Capture,
    Drain,
    Ordered,
    Pause,
    Snapshotted,
    SnapshotWanted,
    Stop,
    StopWanted,
)
from rallypoint.core.view import StandingOrders, View, ViewNumber
from rallypoint.core.worker.ending import LeasedVersion
from rallypoint.core.worker.slots import Compute


def test_a_paused_job_computes_the_step_in_progress_and_no_further_one() -> None:
    job = _begun()
    _reported(job, 4)
    (publish,) = _of(PublishView, job.play(Pause(True)))
    assert publish.view.orders.paused == 5
    assert job.machine.waiting_for() == "the operator, who has paused the job before step 5"
    assert _of(PublishView, job.play(Pause(True))) == []
    (publish,) = _of(PublishView, job.play(Pause(False)))
    assert publish.view.orders.paused is None
    assert job.machine.waiting_for() is None


def test_a_worker_holds_back_what_comes_after_the_pause_and_says_for_whom_it_waits() -> None:
    view = View(ViewNumber(1, 1), ViewNumber(), (), (), (), {}, orders=StandingOrders(paused=5))
    leased = LeasedVersion(None)  # type: ignore[arg-type]
    assert not leased.holds_back(view, Compute(4, 0))
    assert leased.holds_back(view, Compute(5, 0))
    assert "operator" in leased.awaited(view)


def test_a_pause_outlives_the_coordinator_a_worker_and_a_roll_back() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Pause(True))
    job.play(Left("w0", "killed"))
    assert job.view.orders.paused == 5
    again = ClusterMachine(job.machine.terms, job.machine.state())
    assert again.course.views.orders.paused == 5
    generation = job.view.generation
    job.play(Left("s0", "killed"), Left("s1", "killed"))
    job.come("s2", "s3")
    (publish,) = _of(PublishView, job.play(Origin("step-00000003-1", 3)))
    assert publish.view.generation > generation
    assert publish.view.orders.paused == 3
    assert "operator, who has paused the job before step 3" in str(job.machine.waiting_for())
    (publish,) = _of(PublishView, job.play(Pause(False)))
    assert publish.view.orders.paused is None


def test_an_order_to_go_on_outlives_the_coordinator_though_no_view_says_it_yet() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Pause(True))
    job.play(Left("s0", "killed"), Left("s1", "killed"))
    revision = job.machine.revision
    assert _of(PublishView, job.play(Pause(False))) == []
    assert job.machine.revision > revision
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState)
    again = ClusterMachine(job.machine.terms, state)
    assert again.course.views.orders.paused is None
    assert again.state().goes_on


def test_a_snapshot_that_is_wanted_in_a_pause_is_of_the_version_that_there_is() -> None:
    job = _begun(snapshots=True)
    _reported(job, 4)
    job.play(Pause(True))
    (capture,) = _of(Capture, job.play(SnapshotWanted()))
    assert capture.version == 5


def test_while_the_job_is_paused_no_version_is_stored_twice() -> None:
    job = _begun(snapshots=True, snapshot_seconds=10.0)
    _reported(job, 4)
    job.play(Pause(True))
    versions = []
    for now in range(10):
        alive = [Heard(name) for name in ("s0", "s1", "w0", "w1")]
        for capture in _of(Capture, job.play(*alive, Tick(20.0 * now))):
            versions.append(capture.version)
            job.play(*(Captured(server, capture.snapshot, tuple(range(99))) for server in capture.writers))
            job.play(Snapshotted(capture.snapshot, 0, 0, 0.0))
    assert versions == [5]


def test_a_job_that_has_not_begun_or_is_at_its_end_is_not_paused() -> None:
    job = _begun()
    assert not _of(PublishView, _begun(workers=1).play(Pause(False)))
    _reported(job, STEPS - 1)
    assert not _of(PublishView, job.play(Pause(True)))


@pytest.mark.parametrize(("order", "said"), [
    (Pause(), "pauses the job before step 5"), (StopWanted("enough"), "stops the job after the step"),
    (Drain("w1"), "sends w1 away"), (Drain("s0"), "sends s0 away"),
])  # fmt: skip
def test_an_order_is_followed_and_told(order: AnyOrder, said: str) -> None:
    job = _begun()
    _reported(job, 4)
    answer = Orders(0.0).answer(order, job.machine.course, 1.0)
    told = _told(answer.news)
    assert said in told.text
    assert not told.refused
    assert list(answer.workers) == (["w0", "w1"] if isinstance(order, StopWanted) else [])
    assert (order in answer.news) == isinstance(order, Drain)


def test_a_stop_in_a_pause_lets_the_job_go_on_to_its_end() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Pause(True))
    assert Orders(0.0).answer(StopWanted(), job.machine.course, 1.0).events == [Pause(False)]


@pytest.mark.parametrize(("order", "why"), [
    (Pause(False), "not paused"), (Drain("w7"), "no worker or server w7"), (Drain(""), "without a name"),
])  # fmt: skip
def test_an_order_that_makes_no_sense_is_refused_with_a_sentence(order: AnyOrder, why: str) -> None:
    job = _begun()
    _reported(job, 4)
    told = _told(Orders(0.0).answer(order, job.machine.course, 1.0).news)
    assert told.refused
    assert why in told.text


def test_the_last_of_its_kind_is_not_sent_away_and_a_stopped_job_not_stopped_again() -> None:
    job = _begun(workers=1)
    assert _told(Orders(0.0).answer(Drain("w0"), job.machine.course, 1.0).news).refused
    _reported(job, 4)
    job.play(From("w0", Stop(6, "enough", -1, job.view.generation)))
    assert "ends with step 6 already" in _told(Orders(0.0).answer(StopWanted(), job.machine.course, 1.0).news).text


def test_too_many_orders_are_refused() -> None:
    job, orders = _begun(), Orders(0.0)
    told = [_told(orders.answer(Drain("w0"), job.machine.course, 1.0).news) for _ in range(100)]
    assert sum(not one.refused for one in told) < 20


def _told(news: object) -> Ordered:
    (told,) = [one for one in news if isinstance(one, Ordered)]  # type: ignore[attr-defined]
    return told
