"""When snapshots are due, what is missing of the one being taken, and when it is given up."""

from __future__ import annotations

import pytest

from rallypoint.config import JobConfig, record_of
from rallypoint.core.cluster.storing.snapshot_duty import SNAPSHOT_PATIENCE, SnapshotDuty
from rallypoint.core.cluster.terms import SnapshotPeriod, Terms
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import Async, LocalSteps, Sync
from rallypoint.core.protocol import NotStored

STEPS = 20
SHARDS = (0, 1, 2)


def _record(sync: Sync | LocalSteps | Async | None = None) -> JobRecord:
    layout = build_layout([TensorSpec("weight", (8, 8), "float32", 0)], 64)
    return record_of(JobConfig(replicas=2, steps=STEPS, sync=sync or Sync()), layout)


def _duty(*, steps: int = 0, seconds: float = 0.0, epoch: int = 1) -> SnapshotDuty:
    return SnapshotDuty(Terms(snapshots=True, snapshot_steps=steps, snapshot_seconds=seconds, heartbeat=2.0), epoch)


def _is_due(duty: SnapshotDuty, record: JobRecord, furthest: int, now: float, *, ending: bool) -> bool:
    period = SnapshotPeriod(duty.terms.snapshot_steps, duty.terms.snapshot_seconds)
    return duty.is_due(record, furthest, now, period=period, ending=ending)


def test_where_snapshots_are_not_kept_none_is_due_and_the_last_version_need_not_be_stored() -> None:
    duty = SnapshotDuty(Terms(snapshot_steps=1))
    duty.wanted = True
    assert not _is_due(duty, _record(), furthest=9, now=100.0, ending=True)
    assert duty.final
    assert not _duty().final


@pytest.mark.parametrize(("sync", "furthest"), [(Sync(), 7), (LocalSteps(steps=4), 1)])
def test_one_is_due_after_so_many_steps_of_training_however_many_make_a_version(
    sync: Sync | LocalSteps, furthest: int
) -> None:
    duty = _duty(steps=8)
    assert not _is_due(duty, _record(sync), furthest - 1, now=1.0, ending=False)
    assert _is_due(duty, _record(sync), furthest, now=1.0, ending=False)


def test_one_is_due_after_so_many_seconds_if_a_step_was_made() -> None:
    duty = _duty(seconds=5.0)
    duty.last = (3, 10.0)
    assert not _is_due(duty, _record(), 3, now=14.9, ending=False)
    assert _is_due(duty, _record(), 3, now=15.0, ending=False)
    assert not _is_due(duty, _record(), 2, now=15.0, ending=False)


def test_one_is_due_when_wanted_or_at_the_end_but_never_two_at_a_time() -> None:
    duty = _duty()
    assert _is_due(duty, _record(), STEPS - 1, now=1.0, ending=True)
    duty.final = True
    assert not _is_due(duty, _record(), STEPS - 1, now=1.0, ending=True)
    duty.wanted = True
    assert _is_due(duty, _record(), 4, now=1.0, ending=False)
    duty.begin(7, SHARDS, now=1.0)
    assert not _is_due(duty, _record(), 4, now=1.0, ending=False)


def test_in_a_streaming_job_it_is_called_by_the_slowest_clock_never_lower_than_the_last_one() -> None:
    duty, record = _duty(), _record(Async())
    duty.computed(7, replica=0)
    assert duty.next_version(record, 7, in_rounds=False, ending=False) == 0
    duty.computed(4, replica=1)
    duty.computed(3, replica=1)  # a backup task came late
    assert duty.next_version(record, 7, in_rounds=False, ending=False) == 5
    duty.last = (6, 1.0)
    assert duty.next_version(record, 7, in_rounds=False, ending=False) == 6
    assert duty.next_version(record, STEPS - 1, in_rounds=False, ending=True) == STEPS
    duty.computed(STEPS - 1, replica=0)
    duty.computed(STEPS - 1, replica=1)
    assert duty.next_version(record, STEPS - 1, in_rounds=False, ending=False) == STEPS - 1


def test_no_two_have_one_id_not_even_of_two_coordinators() -> None:
    first, second = _duty(), _duty(epoch=2)
    ids = [duty.begin(7, SHARDS, now=1.0) for duty in (first, first, second)]
    assert len(set(ids)) == 3
    assert ids == sorted(ids)  # the later of one version is the newer


def test_one_without_news_is_given_up_after_some_heartbeats_and_wanted_again_after_a_pause() -> None:
    duty = _duty()
    id = duty.begin(7, SHARDS, now=1.0)
    duty.stored((1,), now=2.0)
    patience = SNAPSHOT_PATIENCE * duty.terms.heartbeat
    assert duty.given_up(now=2.0 + patience - 0.1) is None
    assert not duty.wanted
    now = 2.0 + patience
    lost = duty.given_up(now, ["server1"])
    assert lost == NotStored(id, "2 of its shards (server1) are not stored, and none was for 20 s")
    duty.lost(passed=-1, now=now)
    assert not _is_due(duty, _record(), 7, now + duty.terms.heartbeat - 0.1, ending=False), "its store may still hang"
    assert _is_due(duty, _record(), 7, now + duty.terms.heartbeat, ending=False)


def test_one_that_fails_is_tried_again_more_and_more_seldom() -> None:
    """A process without file descriptors, or a full disk: 289 tries in a minute do not help it."""
    duty, now, pauses = _duty(steps=1), 0.0, []
    for _ in range(8):
        began = now
        while not _is_due(duty, _record(), 9, now, ending=False):
            now += 1.0
        pauses.append(now - began)
        duty.begin(7, SHARDS, now)
        duty.lost(passed=-1, now=now)
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    duty.ask()
    assert _is_due(duty, _record(), 9, now, ending=False), "a user who asks is not made to wait"
    duty.begin(7, SHARDS, now)
    duty.complete(now)
    duty.wanted = False
    assert _is_due(duty, _record(), 9, now, ending=False), "the next one is due as always"


def test_after_a_roll_back_the_last_version_is_to_be_stored_again() -> None:
    duty = _duty()
    duty.begin(STEPS, SHARDS, now=1.0)
    duty.final = True
    duty.restart()
    assert (duty.taking, duty.final) == (None, False)
