"""A script ends its job before the last round: with which version, whoever says it and whatever is lost."""

from __future__ import annotations

import msgspec
from test_core_cluster import RECORD, SHARDS, _Job, _of, _record, _terms, applied

from rallypoint.config import Reading
from rallypoint.core import protocol
from rallypoint.core.cluster.effects import Commit, PublishView
from rallypoint.core.cluster.events import Captured, Computed, From, Left
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin, Phase, Resumed
from rallypoint.core.modes import Feature, ModeTraits
from rallypoint.core.order import stream_unread
from rallypoint.core.policy import Async, Sync
from rallypoint.core.protocol import Aborted, Capture, Finished, NotStored, Say, Snapshotted, SnapshotWanted
from rallypoint.core.shard.server import ServerMachine, ServerPlan
from rallypoint.core.shard.shell import ServerShell
from rallypoint.core.view import EarlyEnd, StandingOrders, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.shell import WorkerPlan, shell_for


def _begun(workers: int = 2, **terms: object) -> _Job:
    job = _Job(_terms(workers, 2, **terms))
    effects = job.come("s0", "s1", *(f"w{i}" for i in range(workers)))
    for capture in _of(Capture, effects):  # version 0 is stored
        job.play(*(Captured(server, capture.snapshot, tuple(SHARDS)) for server in capture.writers))
        job.play(Snapshotted(capture.snapshot, 0, 0, 0.0))
    return job


def _reported(job: _Job, step: int, worker: str = "w0") -> None:
    for reached in range(step + 1):
        job.play(Computed(worker, reached, 0, 0.1, job.view.generation))


def _stop(job: _Job, version: int, worker: str = "w0", left: int = -1) -> From:
    return From(worker, protocol.Stop(version, "enough", left, job.view.generation))


def _done(job: _Job, worker: str, version: int) -> From:
    return From(worker, protocol.Done(job.view.generation, version))


def test_the_next_view_says_with_which_version_the_job_ends() -> None:
    job = _begun()
    _reported(job, 4)
    effects = job.play(_stop(job, 6))
    (publish,) = _of(PublishView, effects)
    assert [said.text for said in _of(Say, effects)] == ["the job ends with step 6: enough (w0)"]
    assert publish.view.orders.stop == EarlyEnd(6, "enough", "w0")
    assert set(publish.members) == {"s0", "s1", "w0", "w1"}
    _reported(job, 5)
    assert job.play(_done(job, "w0", 6), _done(job, "w1", 6))[-1] == Finished("w0", 6, "enough")


def test_a_job_resumed_from_a_snapshot_that_knows_the_stop_ends_with_the_same_version() -> None:
    job = _Job(_terms(1, 2), resume=Resumed(RECORD, "step-00000005-1", 5, EarlyEnd(6, "enough", "w0")))
    job.come("s0", "s1", "w0")
    assert job.view.orders.stop == EarlyEnd(6, "enough", "w0")
    _reported(job, 5)
    assert job.play(_done(job, "w0", 6))[-1] == Finished("w0", 6, "enough")


def test_a_snapshot_says_what_the_journal_had_no_room_for() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Left("s0", "x"), Left("s1", "x"))
    job.come("s2", "s3")
    job.play(Origin("step-00000005-1", 5, EarlyEnd(6, "enough", "w0")))
    assert job.view.orders.stop == EarlyEnd(6, "enough", "w0")


def test_of_two_workers_who_stop_it_the_lower_version_counts_whoever_is_heard_first() -> None:
    ends = []
    for order in (("w0", 6), ("w1", 5)), (("w1", 5), ("w0", 6)):
        job = _begun()
        _reported(job, 4)
        for worker, version in order:
            job.play(_stop(job, version, worker))
        ends.append(job.view.orders.stop.version)
    assert ends == [5, 5]


def test_a_version_that_exists_is_not_taken_back() -> None:
    """The claim came too late: others have a later version, as servers say, before or after."""
    for early in (True, False):
        job = _begun()
        _reported(job, 4)
        seven = applied("s0", 7, job.view.generation)
        job.play(*((seven, _stop(job, 6)) if early else (_stop(job, 6), seven)))
        assert job.view.orders.stop.version == 8


def test_who_says_that_it_is_done_with_another_version_is_not_believed() -> None:
    job = _begun()
    _reported(job, 5)
    job.play(_done(job, "w1", 7), _stop(job, 6))
    assert not _of(Finished, job.play(_done(job, "w0", 6)))
    assert _of(Finished, job.play(_done(job, "w1", 6)))


def test_the_replicas_of_a_worker_that_has_left_its_loop_go_to_others() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(_stop(job, 6, left=5))
    assert job.view.assigned(5) == {"w1": (0, 1, 2, 3)}
    assert job.view.orders.stop == EarlyEnd(6, "enough", "w0")


def test_a_worker_that_left_its_loop_after_its_part_keeps_its_replicas() -> None:
    job = _begun()
    _reported(job, 5)
    before = job.view.assigned(5)
    job.play(_stop(job, 6, left=6))
    assert job.view.assigned(5) == before


def test_if_all_have_left_before_a_step_the_job_ends_with_the_version_that_all_hold() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(_stop(job, 6, "w0", left=5), _stop(job, 6, "w1", left=5))
    assert job.view.orders.stop.version == 5
    (finish,) = _of(Finished, job.play(_done(job, "w0", 5), _done(job, "w1", 5)))
    assert (finish.stopped_at, finish.why) == (5, "enough")


def test_if_all_have_left_in_the_middle_of_a_step_the_job_ends_with_a_sentence() -> None:
    """Some shards are a version ahead already, and nobody is left who could bring the others there."""
    job = _begun()
    _reported(job, 4)
    job.play(applied("s0", 5, job.view.generation), _stop(job, 6, "w0", left=5))
    (abort,) = _of(Aborted, job.play(_stop(job, 6, "w1", left=5)))
    assert "call run.stop() instead" in abort.reason


def test_a_snapshot_of_a_version_that_is_not_made_any_more_is_dropped() -> None:
    job = _begun(snapshots=True, snapshot_steps=8)
    _reported(job, 5)
    taking = job.machine._snapshots.taking
    assert taking.version == 8
    job.play(_stop(job, 7))
    (capture,) = _of(Capture, job.play(Computed("w1", 5, 2, 0.1, job.view.generation)))
    assert capture.version == 7
    job.play(NotStored(capture.snapshot, "past it", 9), applied("s0", 8, job.view.generation))
    assert job.view.orders.stop.version == 9


def test_a_snapshot_of_the_last_version_is_dropped_when_a_later_one_is_the_last() -> None:
    """It may be stored without codec states: nobody was to contribute to what comes after it."""
    job = _begun(snapshots=True)
    _reported(job, 4)
    job.play(_stop(job, 6))
    (capture,) = _of(Capture, job.play(SnapshotWanted()))
    assert capture.version == 6
    effects = job.play(applied("s0", 7, job.view.generation))
    assert job.view.orders.stop.version == 8
    stored = [Captured(server, capture.snapshot, tuple(SHARDS)) for server in capture.writers]
    effects += job.play(*stored)
    assert not _of(Commit, effects)
    assert _of(Capture, [*effects, *job.tick(1.0)]), "it is due at once"


def test_the_next_coordinator_knows_it_and_a_roll_back_changes_nothing() -> None:
    job = _begun(snapshots=True)
    _reported(job, 4)
    job.play(_stop(job, 6))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState)
    later = ClusterMachine(job.machine.terms, state)
    assert later.course.last == 6
    effects = job.play(Left("s0", "killed"), Left("s1", "killed"))
    assert job.machine.phase is Phase.RECOVERING, effects
    assert job.machine.course.last == 6


def test_in_a_streaming_mode_nobody_can_stop_it() -> None:
    record = _record(sync=Async())
    job = _Job(_terms(1, 1), record=record)
    job.come("s0", "w0")
    job.play(_stop(job, 6))
    assert job.view.orders.stop is None
    assert record.rounds == RECORD.rounds


# ---- members ----


def test_a_worker_gives_up_a_step_that_is_not_made_any_more_and_says_that_it_has_the_last_version() -> None:
    job = _begun(1)
    shell = shell_for("w0", WorkerPlan(shards=2, rounds=20, mode=ModeTraits(), buffer_shards=frozenset()))
    shell.adopt(job.view, [])
    shell.machine.step, shell.machine._computing = 5, 0
    stopped = msgspec.structs.replace(job.view, number=ViewNumber(1, 9), orders=StandingOrders(EarlyEnd(5)))
    shell.adopt(stopped, [])
    assert shell.machine.rewound
    assert shell.ending.reached == (job.view.generation, 5)
    assert not shell.ending.due  # not before it has been unwound
    shell.end_replica(whole=False)
    assert shell.choose() == slots.Ended(5)
    assert shell.next_action() is None


def test_servers_send_the_last_version_as_it_is() -> None:
    job = _begun(1)
    plan = ServerPlan(Sync(), [4] * len(SHARDS), frozenset(SHARDS), frozenset(), rounds=20)
    shell: ServerShell = ServerShell(ServerMachine("s0", plan))  # type: ignore[type-arg]
    shell.adopt(job.view)
    assert (shell.is_last(0, 5), shell.is_last(0, 20)) == (False, True)
    shell.adopt(msgspec.structs.replace(job.view, number=ViewNumber(1, 9), orders=StandingOrders(EarlyEnd(5))))
    assert (shell.is_last(0, 4), shell.is_last(0, 5)) == (False, True)


def _ended(job: _Job, version: int, *before: From) -> list[str]:
    """What is said where both workers hold the last version."""
    effects = job.play(*before, applied("s0", version - 1, job.view.generation))
    effects += job.play(_done(job, "w0", version), _done(job, "w1", version))
    for capture in _of(Capture, effects):
        effects += job.play(*(Captured(server, capture.snapshot, tuple(SHARDS)) for server in capture.writers))
        effects += job.play(Snapshotted(capture.snapshot, 0, 0, 0.0))
    assert _of(Finished, effects)
    return [said.text for said in _of(Say, effects)]


def _job_of(**settings: object) -> _Job:
    job = _Job(_terms(2, 2), record=_record(**settings))  # type: ignore[arg-type]
    job.come("s0", "s1", "w0", "w1")
    return job


def test_where_scripts_make_sums_their_end_is_no_stop() -> None:
    record = msgspec.structs.replace(RECORD, features=(*RECORD.features, Feature.SUMS))
    job = _Job(_terms(2, 2), record=record)
    job.come("s0", "s1", "w0", "w1")
    assert not _of(Say, job.play(_stop(job, 1)))
    assert job.view.orders.stop is not None


def test_steps_that_may_be_over_before_the_stream_are_said_at_the_end() -> None:
    steps = RECORD.rounds
    assert stream_unread(3, steps) in _ended(_job_of(reading=Reading(passes=3), steps=steps), steps)
    assert _ended(_job_of(steps=steps), steps) == []


def test_tuning_that_is_not_over_says_so_at_the_end() -> None:
    steps = RECORD.rounds
    (said,) = _ended(_job_of(tune="auto", steps=steps), steps)
    assert said == "tuning has not begun: it looks at steps after 8 of them with the same members"
