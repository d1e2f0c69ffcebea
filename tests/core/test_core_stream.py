"""A streaming job's worker, event by event; `test_simulation.py` plays it against the servers and the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_bench import V1, SlotBench, view_of

from rallypoint.core.shard.events import EVERYTHING
from rallypoint.core.view import Assignment, View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.slots import Compute, DropArriving, Effect, Install, Land, LinkUp, ReplicaComputed, Viewed
from rallypoint.core.worker.streaming import StreamMachine


def _view(shards: int, assigned: Sequence[int] = (0,), **others: Any) -> View:
    """`assigned` are ours."""
    return view_of(shards, {"me": assigned, "other": (9,)}, **others)


class _Bench(SlotBench):
    def __init__(
        self, shards: int = 2, assigned: Sequence[int] = (0,), buffers: Sequence[int] = (), steps: int = 10,
        view: View | None = None,
    ) -> None:  # fmt: skip
        super().__init__(StreamMachine("me", shards, frozenset(buffers), steps), view or _view(shards, assigned))

    def arrive(self, shard: int, replica: int, clock: int, version: int = 0) -> list[Effect]:
        return self.handle(slots.Arriving(shard, version, self.machine.view.number, replica, clock))

    def land(self, replica: int, clock: int, shards: Sequence[int] | None = None, version: int = 0) -> list[Effect]:
        """These shards' answers for a replica come; what the last one brings about."""
        effects: list[Effect] = []
        for shard in range(self.shards) if shards is None else shards:
            assert self.arrive(shard, replica, clock, version)[0] == Land(shard)
            effects = self.handle(slots.Landed(shard))
        return effects

    def answer(self, replica: int, clock: int, version: int = 0) -> None:
        """All shards answer, and that is installed."""
        self.land(replica, clock, version=version)
        assert self.machine.next_action() == Install(clock)
        self.installed()

    def compute(self, *, sent: bool = True) -> list[slots.Send]:
        """The turn's replica; what was sent."""
        sends = self.fill_all(self.begin())
        for send in sends if sent else ():
            self.handle(slots.SlotSent(send.shard, send.serial))
        self.after = self.handle(ReplicaComputed())
        return sends


def test_a_worker_keeps_what_is_assigned_to_it_and_the_step_in_progress() -> None:
    bench = _Bench(assigned=(1,))
    assert bench.machine.keeps == {1}
    bench.land(1, 3)
    assert bench.machine.take(bench.machine.next_action())
    bench.handle(Viewed(_view(2, (0,), count=2)))
    assert bench.machine.keeps == {0, 1}  # it is being installed, and will be computed
    bench.handle(slots.Installed())
    assert bench.machine.keeps == {0, 1}
    bench.compute()
    assert bench.machine.keeps == {0}


def _wants(replica: int, *shards: int) -> list[Effect]:
    return [slots.AskNext(shard, replica, f"s{shard % 2}") for shard in shards]


def _in_turn(shards: int = 2, assigned: Sequence[int] = (0,), buffers: Sequence[int] = (), steps: int = 10) -> _Bench:
    """The first replica's parameters are installed: its turn begins at step 0."""
    bench = _Bench(shards, assigned, buffers, steps)
    bench.answer(assigned[0], 0)
    assert bench.machine.next_action() == Compute(0, assigned[0])
    return bench


# ---- turns ----


def test_at_first_the_lowest_replica_s_parameters_are_wanted_of_every_server_that_is_linked() -> None:
    bench = _Bench(3, [2, 1])
    assert bench.first == [*_wants(1, 0, 2), *_wants(1, 1)]
    assert bench.machine.next_action() is None
    assert bench.machine.missing == [0, 1, 2]
    assert bench.machine.target == 0
    assert bench.machine.upcoming is None  # its clock is not known yet


def test_a_step_is_want_install_compute_and_want_again() -> None:
    bench = _Bench(2)
    bench.land(0, 0, version=4)
    assert bench.machine.next_action() == Install(0)
    assert bench.installed() == []
    assert (bench.machine.step, bench.machine.next_action()) == (0, Compute(0, 0))
    assert bench.compute() == [
        slots.Send(0, 0, 0, "s0", 1, V1, base=4, wants=0), slots.Send(1, 0, 0, "s1", 2, V1, base=4, wants=0)
    ]  # fmt: skip
    assert bench.after == []  # the contributions have asked
    assert bench.machine.next_action() is None
    assert bench.machine.upcoming == (1, 0)
    bench.answer(0, 1, version=7)
    assert bench.machine.step == 1
    assert [send.base for send in bench.compute()] == [7, 7]


@given(st.permutations(list(range(4))))
def test_answers_are_installed_once_all_have_landed_in_any_order(order: list[int]) -> None:
    bench = _Bench(4)
    for count, shard in enumerate(order):
        assert sorted(bench.machine.missing) == sorted(order[count:])
        assert bench.machine.next_action() is None
        bench.land(0, 0, [shard])
    assert bench.machine.next_action() == Install(0)


def test_what_a_contribution_was_computed_from_is_each_shard_s_own_version() -> None:
    bench = _Bench(2)
    bench.land(0, 3, [0], version=11)
    bench.land(0, 3, [1], version=12)
    bench.installed()
    assert [(send.shard, send.step, send.base) for send in bench.compute()] == [(0, 3, 11), (1, 3, 12)]


def test_of_several_replicas_the_one_that_is_furthest_behind_comes_next() -> None:
    bench = _in_turn(1, [1, 4, 6])
    turns = []
    for _ in range(7):
        (send,) = bench.compute()
        turns.append((send.step, send.replica))
        assert send.wants is not None
        bench.answer(send.wants, turns.count((send.step, send.replica)) and _next_step(turns, send.wants))
    assert turns == [(0, 1), (0, 4), (0, 6), (1, 1), (1, 4), (1, 6), (2, 1)]


def _next_step(turns: Sequence[tuple[int, int]], replica: int) -> int:
    return sum(1 for _, r in turns if r == replica)


def test_which_replica_is_next_is_decided_once_for_all_shards_of_a_step() -> None:
    bench = _in_turn(2, [0, 1])
    bench.begin()
    (first,) = bench.fill(0)
    bench.handle(Viewed(_view(2, [0], count=2)))  # replica 1 goes to somebody else meanwhile
    (second,) = bench.fill(1)
    assert isinstance(first, slots.Send)
    assert isinstance(second, slots.Send)
    assert (first.wants, second.wants) == (1, 1)
    bench.handle(slots.SlotSent(0, first.serial))
    bench.handle(slots.SlotSent(1, second.serial))
    assert bench.handle(ReplicaComputed()) == _wants(0, 0, 1)  # and once it is over, what is wanted now


def test_a_buffer_shard_gets_replica_0_alone_and_is_asked_for_the_others_too() -> None:
    bench = _in_turn(2, [0, 2], buffers=[1])
    assert [(send.shard, send.replica, send.wants) for send in bench.compute()] == [(0, 0, 2), (1, 0, 2)]
    bench.land(2, 0, [0])
    bench.land(2, 10, [1])  # its clock there says nothing
    assert bench.machine.next_action() == Install(0)
    bench.installed()
    bench.begin()
    assert bench.machine.may_fill(1) is None
    bench.send(0)
    assert bench.handle(ReplicaComputed()) == _wants(0, 1)


def test_a_straggler_s_replica_is_nobody_s_business_here() -> None:
    bench = _in_turn(1)
    assert bench.handle(slots.Assisted(0, 3)) == []
    assert bench.machine.assigned == [0]


# ---- slots ----


def test_a_slot_may_not_be_filled_again_before_its_gradient_has_left() -> None:
    bench = _in_turn(2, [0, 1])
    (first, _) = bench.compute(sent=False)
    assert bench.machine.slots.unsent == [0, 1]
    bench.handle(slots.SlotSent(0, first.serial))
    assert bench.machine.slots.unsent == [1]
    assert bench.arrive(0, 1, 0) == [Land(0)]
    # An answer that overtakes the news that the gradient has left finds no room, and is asked for again.
    assert bench.arrive(1, 1, 0) == [DropArriving(1), *_wants(1, 1)]


def test_an_answer_that_comes_too_early_is_asked_for_again_once_the_step_is_over() -> None:
    bench = _in_turn(2)
    bench.begin()
    (first,) = bench.fill(0)
    assert bench.arrive(0, 0, 1) == [DropArriving(0)]
    assert isinstance(first, slots.Send)
    bench.handle(slots.SlotSent(0, first.serial))
    bench.send(1)
    assert bench.handle(ReplicaComputed()) == _wants(0, 0)


@pytest.mark.parametrize("replica", [3, EVERYTHING])
def test_a_late_answer_to_what_is_not_wanted_any_more_is_read_and_forgotten(replica: int) -> None:
    bench = _Bench(2)
    assert bench.arrive(0, replica, 4) == [DropArriving(0)]
    assert bench.arrive(0, 0, 4) == [Land(0)]
    assert bench.arrive(0, 0, 4) == [DropArriving(0)]
    bench.handle(slots.Landed(0))
    assert bench.arrive(0, 0, 4) == [DropArriving(0)]
    assert bench.machine.missing == [1]


def test_while_answers_are_copied_into_the_model_nothing_lands() -> None:
    bench = _Bench(2)
    bench.land(0, 0)
    assert bench.machine.take(bench.machine.next_action())
    assert bench.machine.next_action() is None
    assert bench.arrive(0, 0, 0) == [DropArriving(0)]
    bench.handle(slots.Installed())
    assert bench.machine.next_action() == Compute(0, 0)


# ---- takeover ----


def test_a_replica_that_comes_from_another_worker_begins_at_the_lowest_clock_that_any_shard_has_of_it() -> None:
    bench = _Bench(3)
    bench.land(0, 7, [0])
    bench.land(0, 5, [1])
    bench.land(0, 6, [2])
    assert bench.machine.upcoming == (5, 0)
    assert bench.machine.next_action() == Install(5)
    bench.installed()
    assert [(send.shard, send.step) for send in bench.compute()] == [(0, 5), (1, 5), (2, 5)]  # two drop the repeat


def test_a_replica_that_turns_out_to_be_finished_makes_room_for_the_next() -> None:
    bench = _Bench(2, [0, 1], steps=4)
    assert bench.land(0, 4) == _wants(1, 0, 1)
    assert bench.machine.missing == [0, 1]
    bench.answer(1, 2)
    assert bench.machine.next_action() == Compute(2, 1)


def test_a_replica_that_turns_out_to_be_finished_before_its_step_is_over_is_not_installed_once_more() -> None:
    bench = _Bench(2, [0], steps=4)
    bench.answer(0, 1)
    bench.begin()
    for shard in (0, 1):  # who had it before has computed it to the end: the servers drop this step as a repeat
        bench.send(shard)
        bench.land(0, 4, [shard])
    assert bench.handle(ReplicaComputed()) == _wants(EVERYTHING, 0, 1)
    assert bench.machine.next_action() is None
    bench.answer(EVERYTHING, 4)
    assert bench.machine.step == 4


def test_a_replica_that_was_finished_on_a_lost_primary_goes_on_where_the_new_one_is() -> None:
    bench = _Bench(2, [0], steps=4)
    bench.answer(0, 1)
    bench.begin()
    for shard in (0, 1):
        bench.send(shard)
        bench.land(0, 4, [shard])
    bench.handle(slots.LinkLost("s1"))
    assert bench.handle(ReplicaComputed()) == []
    bench.handle(LinkUp("s1"))
    assert [(send.shard, send.step, send.wants) for send in bench.compute()] == [(1, 1, 0)]
    bench.land(0, 3, [1])  # shard 0 has it all, this one has not
    assert bench.machine.next_action() == Install(3)


def test_a_new_assignment_counts_at_once_and_the_step_in_progress_is_ended_first() -> None:
    bench = _in_turn(2, [0])
    bench.begin()
    assert bench.handle(Viewed(_view(2, [5], count=2))) == []
    assert not bench.machine.rewound
    assert [send.wants for send in (*bench.fill(0), *bench.fill(1)) if isinstance(send, slots.Send)] == [5, 5]
    bench.handle(ReplicaComputed())
    assert bench.machine.target == 1


def test_a_new_assignment_while_answers_are_awaited_asks_for_what_is_wanted_now() -> None:
    bench = _Bench(2, [0])
    bench.land(0, 3, [1])
    assert bench.arrive(0, 0, 3) == [Land(0)]
    assert bench.handle(Viewed(_view(2, [5], count=2))) == _wants(5, 0, 1)
    bench.handle(slots.Landed(0))  # what was on its way into the slot belongs to nobody
    assert bench.machine.missing == [0, 1]
    bench.answer(5, 1)
    assert bench.machine.next_action() == Compute(1, 5)


def test_the_newest_assignment_counts_whatever_step_it_is_for() -> None:
    bench = _Bench(1, view=_view(1, [0], later=[Assignment(40, {"me": (2, 5)})]))
    assert bench.machine.assigned == [2, 5]
    assert bench.first == _wants(2, 0)


def test_a_worker_to_whom_nothing_is_assigned_wants_nothing() -> None:
    bench = _Bench(2, [])
    assert bench.first == []
    assert not bench.machine.takes_part
    assert bench.machine.target == -1
    assert bench.machine.next_action() is None
    assert bench.handle(Viewed(_view(2, [3], count=2))) == _wants(3, 0, 1)


def test_a_worker_from_whom_everything_is_taken_ends_its_step_and_wants_nothing() -> None:
    bench = _in_turn(2, [0])
    bench.handle(Viewed(_view(2, [], count=2)))
    assert [send.wants for send in bench.compute()] == [None, None]
    assert bench.after == []
    assert bench.machine.next_action() is None


# ---- waiting for those that are behind ----


def test_the_one_that_is_furthest_behind_waits() -> None:
    bench = _Bench(2, [0, 1])
    assert bench.handle(slots.ToWait(0, 6)) == _wants(1, 0, 1)
    assert bench.handle(slots.ToWait(1, 8)) == _wants(0, 0, 1)
    assert bench.handle(slots.ToWait(0, 6)) == []
    bench.answer(0, 6)
    assert bench.machine.next_action() == Compute(6, 0)


def test_that_a_replica_has_to_wait_changes_nothing_in_the_step_in_progress() -> None:
    bench = _in_turn(2, [0, 1])
    bench.begin()
    (send,) = bench.fill(0)
    assert isinstance(send, slots.Send)
    assert send.wants == 1
    assert bench.handle(slots.ToWait(1, 7)) == []
    bench.handle(slots.SlotSent(0, send.serial))
    bench.fill(1)
    assert bench.handle(ReplicaComputed()) == _wants(0, 0, 1)  # only now: another is further behind
    assert bench.machine.upcoming == (1, 0)


def test_a_replica_that_is_told_to_wait_at_the_end_is_not_taken_for_finished() -> None:
    bench = _Bench(2, [0], steps=4)
    assert bench.handle(slots.ToWait(0, 4)) == []  # that it is, only the answers of all shards can tell
    bench.land(0, 3, [0])
    bench.land(0, 4, [1])
    assert bench.machine.next_action() == Install(3)


# ---- links that are lost ----


def test_what_may_not_have_arrived_is_computed_again_and_nothing_else() -> None:
    bench = _in_turn(4)
    bench.begin()
    for shard in (0, 1, 2):
        bench.send(shard)
    assert bench.arrive(0, 0, 1) == [Land(0)]
    bench.handle(slots.Landed(0))
    bench.handle(slots.LinkLost("s0"))  # shards 0 and 2: an answer says nothing of what was sent with the question
    bench.fill(3)
    assert bench.handle(ReplicaComputed()) == []
    assert bench.machine.next_action() is None
    assert bench.handle(LinkUp("s0")) == []
    assert bench.machine.next_action() == Compute(0, 0)
    assert [(send.shard, send.step, send.wants) for send in bench.compute()] == [(0, 0, 0), (2, 0, 0)]
    assert bench.after == []
    assert bench.machine.upcoming == (1, 0)


def test_a_gradient_that_is_whole_while_its_server_is_away_is_computed_again() -> None:
    bench = _in_turn(2)
    bench.begin()
    bench.machine.fill(0)
    bench.handle(slots.LinkLost("s0"))
    assert bench.handle(slots.Filled(0)) == []
    assert bench.slot(0) is slots.Slot.FREE
    bench.fill(1)
    bench.handle(ReplicaComputed())
    bench.handle(LinkUp("s0"))
    assert [send.shard for send in bench.compute()] == [0]


def test_what_was_wanted_of_a_server_that_was_away_is_wanted_again() -> None:
    bench = _Bench(3)
    bench.land(0, 0, [0])
    assert bench.arrive(2, 0, 0) == [Land(2)]
    bench.handle(slots.LinkLost("s0"))
    bench.handle(slots.Landed(2))  # it broke halfway
    assert bench.handle(LinkUp("s0")) == _wants(0, 2)
    bench.land(0, 0, [1])
    assert bench.machine.missing == [2]
    bench.land(0, 0, [2])
    assert bench.machine.next_action() == Install(0)


def test_who_was_done_asks_again_when_its_last_contribution_may_be_lost() -> None:
    bench = _in_turn(2, [0], steps=1)
    assert [send.wants for send in bench.compute()] == [EVERYTHING, EVERYTHING]
    assert bench.handle(slots.LinkLost("s1")) == _wants(0, 0)
    assert bench.handle(LinkUp("s1")) == _wants(0, 1)
    bench.land(0, 1, [0])
    bench.land(0, 0, [1])
    assert bench.machine.next_action() == Install(0)


def test_what_another_replica_contributed_may_be_lost_with_a_primary_in_the_middle_of_a_step() -> None:
    bench = _in_turn(2, [0, 1], steps=1)
    bench.compute()
    bench.answer(1, 0)
    bench.begin()
    assert [send.wants for send in bench.fill(0) if isinstance(send, slots.Send)] == [EVERYTHING]
    bench.handle(Viewed(_view(2, [0, 1], count=2, homes=["s0", "s0"])))  # server 1 had not replicated all of it
    bench.fill(1)
    assert bench.handle(ReplicaComputed()) == [slots.AskNext(0, 0, "s0"), slots.AskNext(1, 0, "s0")]
    bench.handle(slots.SlotSent(0, 3))
    bench.handle(slots.SlotSent(1, 4))
    bench.land(0, 1, [0])
    bench.land(0, 0, [1])
    assert bench.machine.next_action() == Install(0)


def test_what_was_sent_to_a_shard_s_old_home_is_computed_for_the_new_one() -> None:
    bench = _in_turn(2)
    bench.begin()
    bench.fill(0)
    bench.fill(1)
    bench.handle(Viewed(_view(2, count=2, homes=["s0", "s0"])))
    bench.handle(ReplicaComputed())
    sends = bench.compute()
    assert [(send.shard, send.server, send.step, send.view) for send in sends] == [(1, "s0", 0, ViewNumber(1, 2))]


# ---- the end ----


def test_whose_replicas_are_finished_wants_everything_and_computes_nothing_any_more() -> None:
    bench = _in_turn(2, [0], steps=1)
    assert [send.wants for send in bench.compute()] == [EVERYTHING, EVERYTHING]
    assert bench.machine.target == 1
    assert bench.arrive(0, 0, 1) == [DropArriving(0)]
    bench.answer(EVERYTHING, 1)
    assert bench.machine.step == 1
    assert bench.machine.next_action() is None
    assert bench.machine.target == -1
    assert bench.handle(Viewed(_view(2, [0], count=2, ending=True))) == []


def test_a_replica_that_is_assigned_to_one_who_waits_for_the_end_comes_first() -> None:
    bench = _in_turn(2, [0], steps=2)
    bench.compute()
    bench.answer(0, 1)
    bench.compute()
    bench.land(EVERYTHING, 2, [0])
    assert bench.handle(Viewed(_view(2, [0, 4], count=2))) == _wants(4, 0, 1)
    bench.answer(4, 1)
    assert [send.wants for send in bench.compute()] == [EVERYTHING, EVERYTHING]


def test_a_standby_worker_wants_everything_when_the_job_is_ending() -> None:
    bench = _Bench(2, [])
    assert bench.handle(Viewed(_view(2, [], count=2, ending=True))) == _wants(EVERYTHING, 0, 1)
    bench.land(EVERYTHING, 10)
    assert bench.machine.next_action() == Install(10)
    bench.installed()
    assert (bench.machine.step, bench.machine.next_action()) == (10, None)


# ---- the first weights, and rewinds (I10) ----


def test_the_first_weights_are_uploaded_by_whom_the_view_names_and_again_if_they_may_be_lost() -> None:
    bench = _Bench(2, view=_view(2, uploader="me"))
    assert bench.machine.next_action() == slots.UploadFirst()
    assert bench.machine.take(slots.UploadFirst())
    assert bench.machine.next_action() is None
    bench.land(0, 0, [1])
    bench.handle(slots.LinkLost("s1"))
    bench.handle(LinkUp("s1"))
    assert bench.machine.next_action() is None  # there is an answer: they have come
    bench.handle(slots.LinkLost("s0"))
    assert bench.machine.next_action() is None
    bench.handle(LinkUp("s0"))
    assert bench.machine.next_action() == slots.UploadFirst()


def test_after_a_roll_back_everything_is_wanted_anew_and_the_step_in_progress_is_stale() -> None:
    bench = _in_turn(2)
    bench.compute()
    bench.answer(0, 1)
    bench.begin()
    bench.machine.fill(0)
    assert bench.handle(Viewed(_view(2, count=5, generation=5, origin="step-0"))) == []
    assert bench.machine.rewound
    assert bench.machine.step == -1
    assert bench.machine.may_fill(1) is None
    assert [bench.handle(LinkUp(server)) for server in ("s0", "s1")] == [_wants(0, 0), _wants(0, 1)]
    assert bench.arrive(0, 0, 0)[0] == DropArriving(0)  # the main thread has not let go of the slot
    assert bench.land(0, 0, [1]) == []
    assert bench.handle(slots.Filled(0)) == []  # not sent: it belongs to a void past
    assert bench.machine.next_action() is None
    bench.handle(slots.ReplicaAbandoned())
    assert not bench.machine.rewound
    bench.land(0, 0, [0])
    assert bench.machine.next_action() == Install(0)


def test_a_roll_back_while_answers_are_copied_makes_them_stale() -> None:
    bench = _Bench(2)
    bench.land(0, 6)
    assert bench.machine.take(bench.machine.next_action())
    bench.handle(Viewed(_view(2, count=5, generation=5, origin="step-0")))
    assert bench.handle(slots.Installed()) == []
    assert bench.machine.step == -1
    assert [bench.handle(LinkUp(server)) for server in ("s0", "s1")] == [_wants(0, 0), _wants(0, 1)]
    bench.answer(0, 2)
    assert bench.machine.next_action() == Compute(2, 0)


def test_an_answer_from_before_the_roll_back_is_read_and_forgotten() -> None:
    bench = _Bench(2)
    bench.handle(Viewed(_view(2, count=5, generation=5, origin="step-0")))
    for server in ("s0", "s1"):
        bench.handle(LinkUp(server))
    assert bench.handle(slots.Arriving(0, 7, ViewNumber(1, 4), 0, 3)) == [DropArriving(0)]
    assert bench.handle(slots.Arriving(0, 7, ViewNumber(1, 5), 0, 3)) == [Land(0)]


def test_before_any_view_nothing_is_taken() -> None:
    machine = StreamMachine("me", 2, frozenset(), 10)
    assert machine.handle(slots.Arriving(0, 0, V1)) == [DropArriving(0)]
    assert machine.assigned == []
    assert machine.next_action() is None
    assert machine.upcoming is None
