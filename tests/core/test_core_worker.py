"""The worker's machine, event by event; `test_core_step_simulation.py` plays it against the servers' machines."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.worker import (
    Arriving,
    Discard,
    Fetch,
    Filled,
    Install,
    Installed,
    Land,
    Landed,
    ReplicaComputed,
    Send,
    Sent,
    WorkerMachine,
)

PURE = settings(derandomize=True, deadline=None, max_examples=50)


def _at_step_0(shards: int, replicas: Sequence[int], buffers: Sequence[int] = ()) -> WorkerMachine:
    machine = WorkerMachine(shards, frozenset(buffers), replicas, steps=10)
    for shard in range(shards):
        machine.handle(Arriving(shard, 0))
        machine.handle(Landed(shard))
    machine.handle(Installed())
    return machine


def _compute(machine: WorkerMachine, shards: int) -> None:
    for shard in range(shards):
        machine.handle(Filled(shard))
        machine.handle(Sent(shard, machine.step))
    machine.handle(ReplicaComputed())


@PURE
@given(st.permutations(list(range(5))))
def test_version_0_is_installed_once_all_shards_have_landed_in_any_order(order: list[int]) -> None:
    machine = WorkerMachine(5, frozenset(), [0], steps=10)
    assert machine.next_replica is None
    for count, shard in enumerate(order):
        assert sorted(machine.missing) == sorted(order[count:])
        assert machine.handle(Arriving(shard, 0)) == [Land(shard)]
        assert machine.handle(Landed(shard)) == ([Install(0)] if count == 4 else [])
    assert machine.step == -1
    machine.handle(Installed())
    assert (machine.step, machine.next_replica) == (0, 0)


def test_replicas_are_computed_one_after_the_other_and_sent_under_their_own_name() -> None:
    machine = _at_step_0(1, [1, 4])
    assert machine.handle(Filled(0)) == [Send(0, 0, 1)]
    machine.handle(Sent(0, machine.step))
    machine.handle(ReplicaComputed())
    assert machine.next_replica == 4
    assert machine.handle(Filled(0)) == [Send(0, 0, 4)]
    machine.handle(ReplicaComputed())
    assert machine.next_replica is None


def test_a_slot_may_not_be_filled_again_before_its_gradient_has_left() -> None:
    machine = _at_step_0(2, [0, 1])
    machine.handle(Filled(0))
    machine.handle(ReplicaComputed())
    assert (machine.may_fill(0), machine.may_fill(1)) == (False, True)
    assert machine.unsent == [0]
    machine.handle(Sent(0, machine.step))
    assert machine.may_fill(0)
    assert machine.unsent == []


def test_a_buffer_shard_gets_replica_0_alone() -> None:
    lead, other = _at_step_0(2, [0, 2], buffers=[1]), _at_step_0(2, [1], buffers=[1])
    assert lead.handle(Filled(1)) == [Send(1, 0, 0)]
    lead.handle(Sent(1, lead.step))
    lead.handle(ReplicaComputed())
    assert lead.handle(Filled(1)) == []
    assert lead.may_fill(1)
    assert other.handle(Filled(1)) == []
    assert (lead.contributes(1, 0), lead.contributes(1, 2), lead.contributes(0, 2)) == (True, False, True)


def test_a_version_lands_although_its_slot_is_still_queued_and_late_news_of_sending_changes_nothing() -> None:
    machine = _at_step_0(2, [0])
    machine.handle(Filled(0))
    assert machine.handle(Arriving(0, 1)) == [Land(0)]
    assert not machine.may_fill(0)
    machine.handle(Sent(0, machine.step))
    assert not machine.may_fill(0)
    machine.handle(Landed(0))
    machine.handle(Sent(0, machine.step))
    assert machine.missing == [1]


def test_a_version_that_comes_before_this_worker_s_own_contributions_is_let_go_and_fetched_once_they_are_made() -> None:
    machine = _at_step_0(2, [0, 3])
    machine.handle(Filled(1))  # replica 0's, still queued: somebody else's copy of replica 3 has ended the step
    assert machine.handle(Arriving(1, 1)) == [Discard(1)]
    assert machine.handle(Arriving(0, 1)) == [Discard(0)]
    machine.handle(Sent(1, machine.step))
    machine.handle(Filled(0))
    machine.handle(Sent(0, machine.step))
    assert machine.handle(ReplicaComputed()) == []
    for shard in (0, 1):
        machine.handle(Filled(shard))
    assert machine.handle(ReplicaComputed()) == [Fetch(0, 1), Fetch(1, 1)]
    assert machine.handle(Arriving(0, 1)) == [Land(0)]
    assert machine.handle(Arriving(1, 1)) == [Land(1)]
    machine.handle(Landed(0))
    assert machine.handle(Landed(1)) == [Install(1)]


def test_a_version_that_was_missed_but_came_again_by_itself_is_not_fetched() -> None:
    machine = _at_step_0(1, [0])
    assert machine.handle(Arriving(0, 1)) == [Discard(0)]
    machine.handle(Filled(0))
    assert machine.handle(Arriving(0, 1)) == [Land(0)]
    assert machine.handle(ReplicaComputed()) == []


def test_old_and_repeated_versions_are_read_and_forgotten() -> None:
    machine = _at_step_0(2, [0])
    _compute(machine, 2)
    assert machine.handle(Arriving(0, 0)) == [Discard(0)]
    assert machine.handle(Arriving(0, 1)) == [Land(0)]
    assert machine.handle(Arriving(0, 1)) == [Discard(0)]
    machine.handle(Landed(0))
    assert machine.handle(Arriving(0, 1)) == [Discard(0)]
    assert machine.missing == [1]


def test_a_buffer_shard_that_runs_a_version_ahead_is_fetched_as_soon_as_this_worker_gets_there() -> None:
    machine = _at_step_0(2, [1], buffers=[1])
    assert machine.handle(Arriving(1, 1)) == [Land(1)]  # replica 0 alone makes it: it may come at any time
    machine.handle(Landed(1))
    machine.handle(Filled(0))
    machine.handle(Sent(0, machine.step))
    machine.handle(ReplicaComputed())
    machine.handle(Arriving(0, 1))
    assert machine.handle(Landed(0)) == [Install(1)]
    assert machine.handle(Arriving(1, 2)) == [Discard(1)]  # the model still holds version 0
    assert machine.handle(Installed()) == [Fetch(1, 2)]
    assert machine.handle(Arriving(1, 2)) == [Land(1)]
    machine.handle(Landed(1))
    _compute(machine, 1)
    machine.handle(Arriving(0, 2))
    machine.handle(Landed(0))
    assert machine.handle(Installed()) == []


def test_a_worker_without_replicas_waits_for_the_last_version_only() -> None:
    machine = WorkerMachine(2, frozenset(), (), steps=3)
    assert machine.wanted == 3
    for version in range(3):
        assert [machine.handle(Arriving(shard, version)) for shard in (0, 1)] == [[Discard(0)], [Discard(1)]]
        assert machine.next_replica is None
    for shard in (0, 1):
        assert machine.handle(Arriving(shard, 3)) == [Land(shard)]
    machine.handle(Landed(0))
    assert machine.handle(Landed(1)) == [Install(3)]
    assert machine.handle(Installed()) == []
    assert (machine.step, machine.next_replica) == (3, None)


def test_nothing_is_carried_from_one_step_into_the_next() -> None:
    machine = _at_step_0(2, [0, 1])
    for step in range(3):
        assert machine.step == step
        assert machine.next_replica == 0
        _compute(machine, 2)
        _compute(machine, 2)
        assert machine.handle(Filled(0)) == []  # there is nothing left to compute
        for shard in (1, 0):
            assert machine.handle(Arriving(shard, step + 1)) == [Land(shard)]
            machine.handle(Landed(shard))
        machine.handle(Installed())
