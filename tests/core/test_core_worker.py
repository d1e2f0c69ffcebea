"""The worker's machine, event by event; `test_simulation.py` plays it against the servers' and the coordinator's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_bench import V1, AlignedBench, view_of

from rallypoint.core.cadence import TOGETHER, Cadence, Period
from rallypoint.core.view import Assignment, View, ViewNumber
from rallypoint.core.worker import slots
from rallypoint.core.worker.aligned import WorkerMachine, sent_of, unapplied
from rallypoint.core.worker.slots import Compute, DropArriving, Fetch, Follow, Install, Land, Landed, LinkUp, Viewed


class _Bench(AlignedBench):
    def __init__(
        self, shards: int, view: View | None = None, buffers: Sequence[int] = (), steps: int = 10,
        cadence: Cadence = TOGETHER,
    ) -> None:  # fmt: skip
        super().__init__(WorkerMachine("me", shards, frozenset(buffers), steps, cadence=cadence), view)


def _at_step_0(shards: int = 2, assigned: Sequence[int] = (0,), buffers: Sequence[int] = (), steps: int = 10) -> _Bench:
    bench = _Bench(shards, view_of(shards, {"me": assigned}), buffers, steps)
    bench.install(0)
    return bench


def _computed(*of: Any, **more: Any) -> _Bench:
    """It has computed the first replica of step 0."""
    bench = _at_step_0(*of, **more)
    bench.compute()
    return bench


# ---- the first version ----


@given(st.permutations(list(range(5))))
def test_version_0_is_installed_once_all_shards_have_landed_in_any_order(order: list[int]) -> None:
    bench = _Bench(5, view_of(5))
    assert bench.machine.next_action() is None
    for count, shard in enumerate(order):
        if count:
            assert sorted(bench.machine.missing) == sorted(range(5))  # no target is known yet
        assert bench.arrive(shard, 0)[0] == Land(shard)
        assert bench.machine.next_action() is None
        bench.handle(Landed(shard))
    assert bench.machine.missing == []
    assert bench.machine.next_action() == Install(0)
    assert bench.machine.step == -1
    bench.installed()
    assert (bench.machine.step, bench.machine.next_action()) == (0, Compute(0, 0))


def test_the_first_weights_are_uploaded_by_whom_the_view_names_and_only_when_every_server_is_linked() -> None:
    mine = _Bench(2)
    mine.handle(Viewed(view_of(2, uploader="me")))
    mine.handle(LinkUp("s0"))
    assert mine.machine.next_action() is None
    mine.handle(LinkUp("s1"))
    assert mine.machine.next_action() == slots.UploadFirst()
    assert mine.machine.take(slots.UploadFirst())
    assert mine.machine.next_action() is None
    assert _Bench(2, view_of(2, uploader="somebody")).machine.next_action() is None
    assert _Bench(2, view_of(2, uploader="me", origin="step-7")).machine.next_action() is None  # the servers have them


def test_the_first_weights_are_uploaded_again_after_a_new_generation_and_not_after_any_otherview_of() -> None:
    bench = _Bench(2, view_of(2, uploader="me"))
    assert bench.machine.take(slots.UploadFirst())
    bench.handle(Viewed(view_of(2, uploader="me", count=2)))
    assert bench.machine.next_action() is None
    bench.handle(Viewed(view_of(2, uploader="me", count=3, generation=3)))
    assert bench.machine.next_action() is None  # all links are made anew
    assert [bench.handle(LinkUp(server)) for server in ("s0", "s1")] == [[Follow("s0")], [Follow("s1")]]
    assert bench.machine.next_action() == slots.UploadFirst()


def test_first_weights_that_were_lost_with_a_link_are_uploaded_again() -> None:
    bench = _Bench(2, view_of(2, uploader="me"))
    assert bench.machine.take(slots.UploadFirst())
    bench.handle(slots.LinkLost("s1"))
    assert bench.machine.next_action() is None
    bench.handle(LinkUp("s1"))
    assert bench.machine.next_action() == slots.UploadFirst()


def test_first_weights_that_are_known_to_have_come_are_not_uploaded_again() -> None:
    bench = _Bench(2, view_of(2, uploader="me"))
    assert bench.machine.take(slots.UploadFirst())
    bench.arrive(1, 0)
    bench.handle(slots.LinkLost("s1"))
    bench.handle(LinkUp("s1"))
    assert bench.machine.next_action() is None
    bench.install(0)
    bench.handle(slots.LinkLost("s0"))
    bench.handle(LinkUp("s0"))
    assert bench.machine.next_action() == Compute(0, 0)


@pytest.mark.parametrize("view", [view_of(2, uploader="other"), view_of(2, uploader="me", origin="step-7")])
def test_a_lost_link_takes_no_first_weights_of_one_who_uploaded_none(view: View) -> None:
    bench = _Bench(2, view)
    bench.handle(slots.LinkLost("s1"))
    bench.handle(LinkUp("s1"))
    assert bench.machine.next_action() is None


# ---- computing ----


def test_replicas_are_computed_one_after_the_other_and_sent_under_their_own_name() -> None:
    bench = _at_step_0(1, [1, 4])
    assert bench.machine.next_action() == Compute(0, 1)
    assert bench.compute() == [slots.Send(0, 0, 1, "s0", 1, V1)]
    assert bench.machine.next_action() == Compute(0, 4)
    assert bench.compute() == [slots.Send(0, 0, 4, "s0", 2, V1)]
    assert bench.machine.next_action() is None


def test_a_slot_may_not_be_filled_again_before_its_gradient_has_left() -> None:
    bench = _at_step_0(2, [0, 1])
    first, second = bench.compute(sent=False)
    bench.handle(slots.SlotSent(1, second.serial))
    assert bench.begin() == 1
    assert (bench.machine.may_fill(0), bench.machine.may_fill(1)) == (False, True)
    assert bench.machine.slots.unsent == [0]
    bench.handle(slots.SlotSent(0, first.serial))
    assert bench.machine.may_fill(0)
    assert bench.machine.slots.unsent == []


def test_a_worker_knows_whether_some_or_all_shards_have_what_it_owes_them() -> None:
    bench = _at_step_0(2, [0, 1])
    assert (sent_of(bench.machine), unapplied(bench.machine)) == ("none", [])
    bench.compute()
    assert (sent_of(bench.machine), unapplied(bench.machine)) == ("none", [0, 1]), "no shard has all replicas"
    bench.begin()
    bench.fill(0)
    assert sent_of(bench.machine) == "some"
    bench.handle(slots.LinkLost("s0"))
    assert (sent_of(bench.machine), unapplied(bench.machine)) == ("none", [1]), "what s0 was sent may be lost"
    bench.handle(LinkUp("s0"))
    bench.handle(slots.ReplicaAbandoned())
    bench.compute()
    bench.compute()
    assert (sent_of(bench.machine), unapplied(bench.machine)) == ("all", [0, 1])
    bench.arrive(0, 1)
    assert unapplied(bench.machine) == [1]
    bench.arrive(1, 1)
    assert unapplied(bench.machine) == []


def test_a_buffer_shard_gets_replica_0_alone() -> None:
    lead, other = _at_step_0(2, [0, 2], buffers=[1]), _at_step_0(2, [1], buffers=[1])
    assert [(send.shard, send.replica) for send in lead.compute()] == [(0, 0), (1, 0)]
    lead.begin()
    assert lead.machine.may_fill(1) is None
    assert [(send.shard, send.replica) for send in other.compute()] == [(0, 1)]
    assert (lead.machine.contributes(1, 0), lead.machine.contributes(1, 2)) == (True, False)


def test_late_news_of_sending_does_not_free_a_slot_that_is_queued_again() -> None:
    bench = _at_step_0(1, [0, 1])
    (first,) = bench.compute(sent=False)
    bench.handle(slots.LinkLost("s0"))
    bench.handle(LinkUp("s0"))
    (second,) = bench.compute(sent=False)  # replica 0 again: nobody knows whether it has come through
    assert (first.replica, second.replica) == (0, 0)
    bench.handle(slots.SlotSent(0, first.serial))
    assert bench.machine.slots.unsent == [0]
    bench.handle(slots.SlotSent(0, second.serial))
    assert bench.machine.slots.unsent == []


def test_a_version_does_not_land_over_a_gradient_that_is_being_sent_and_is_fetched_when_it_has_left() -> None:
    """Others were quicker. The frame under way has a checksum: its bytes must not change."""
    bench = _at_step_0(2)
    sends = bench.compute(sent=False)
    assert bench.arrive(0, 1) == [DropArriving(0)]
    assert bench.slot(0) is slots.Slot.QUEUED
    assert bench.handle(slots.SlotSent(0, sends[0].serial)) == [Fetch(0, 1, sends[0].server)]
    assert bench.arrive(0, 1) == [Land(0)]
    bench.handle(Landed(0))
    assert bench.handle(slots.SlotSent(0, sends[0].serial)) == []
    assert bench.machine.missing == [1]


def test_a_straggler_s_replica_is_computed_for_the_step_that_was_asked_for_and_for_no_other() -> None:
    bench = _at_step_0(1, [0])
    bench.handle(slots.Assisted(1, 3))
    assert list(bench.machine.assigned) == [0]
    bench.handle(slots.Assisted(0, 3))
    bench.handle(slots.Assisted(0, 0))
    assert list(bench.machine.assigned) == [0, 3]
    assert [send.replica for _ in range(2) for send in bench.compute()] == [0, 3]
    bench.install(1)
    assert list(bench.machine.assigned) == [0]


def test_after_the_last_version_nothing_is_computed() -> None:
    bench = _computed(1, steps=1)
    bench.install(1)
    assert bench.machine.next_action() is None


# ---- versions that come while a slot is in use (I5) ----


def test_a_version_never_lands_in_a_slot_that_is_being_filled_and_is_fetched_when_it_is_free() -> None:
    bench = _at_step_0(2)
    bench.begin()
    bench.machine.fill(0)
    assert bench.arrive(0, 1) == [DropArriving(0)]
    assert bench.arrive(1, 1) == [Land(1)]  # and now all shards are known at version 1
    assert bench.machine.may_fill(0)  # what was begun may be ended
    assert bench.handle(slots.Filled(0)) == [Fetch(0, 1, "s0")]  # but nobody needs it
    assert bench.handle(slots.ReplicaComputed()) == []
    assert bench.arrive(0, 1) == [Land(0)]
    bench.handle(Landed(0))
    bench.handle(Landed(1))
    assert bench.machine.next_action() == Install(1)


def test_a_shard_that_is_already_newer_gets_no_gradient() -> None:
    bench = _at_step_0(2, [0, 3])
    bench.begin()
    bench.arrive(1, 1)  # somebody else's copy of our replicas has ended its step
    assert (bench.machine.may_fill(0), bench.machine.may_fill(1)) == (True, None)
    bench.fill(0)
    bench.handle(slots.ReplicaComputed())
    replica = bench.begin()
    assert (replica, bench.machine.may_fill(1)) == (3, None)


def test_a_version_that_was_let_go_is_fetched_once_when_the_replica_is_given_up() -> None:
    bench = _at_step_0(1)
    bench.begin()
    bench.machine.fill(0)
    assert bench.arrive(0, 1) == [DropArriving(0)]
    assert bench.handle(slots.ReplicaAbandoned()) == [Fetch(0, 1, "s0")]
    assert bench.handle(LinkUp("s1")) == [Follow("s1")]
    assert bench.arrive(0, 1) == [Land(0)]


def test_old_and_repeated_versions_are_read_and_forgotten() -> None:
    bench = _computed(2)
    assert bench.arrive(0, 0) == [DropArriving(0)]
    assert bench.arrive(0, 1) == [Land(0)]
    assert bench.arrive(0, 1) == [DropArriving(0)]
    bench.handle(Landed(0))
    assert bench.arrive(0, 1) == [DropArriving(0)]
    assert bench.machine.missing == [1]


def test_a_buffer_shard_that_runs_a_version_ahead_is_fetched_as_soon_as_this_worker_gets_there() -> None:
    bench = _computed(2, [1], buffers=[1])
    assert bench.arrive(1, 1) == [Land(1)]
    bench.handle(Landed(1))
    assert bench.arrive(1, 2) == [DropArriving(1)]
    assert bench.arrive(0, 1) == [Land(0)]
    bench.handle(Landed(0))
    assert bench.machine.next_action() == Install(1)
    assert bench.installed() == [Fetch(1, 2, "s1")]
    assert bench.arrive(1, 2) == [Land(1)]


def test_the_target_jumps_when_every_shard_is_known_to_have_moved_on() -> None:
    bench = _at_step_0(2)
    assert bench.machine.target == 1
    assert bench.arrive(0, 2) == [DropArriving(0), Fetch(0, 1, "s0")]  # the server keeps two versions (I5)
    assert bench.machine.target == 1  # the other may still need our part of step 0
    assert bench.arrive(1, 2) == [Land(1), Fetch(0, 2, "s0")]
    assert bench.machine.target == 2
    assert bench.machine.next_action() is None  # step 0 needs nothing from us any more
    bench.handle(Landed(1))
    bench.land(2, [0])
    assert bench.machine.next_action() == Install(2)
    assert bench.installed() == []


def test_what_has_landed_of_a_target_that_was_left_behind_gives_way() -> None:
    bench = _at_step_0(2)
    bench.land(1, [0])
    assert bench.arrive(0, 2) == [DropArriving(0)]
    assert bench.arrive(1, 2) == [Land(1), Fetch(0, 2, "s0")]
    assert bench.arrive(0, 2) == [Land(0)]
    bench.handle(Landed(0))
    bench.handle(Landed(1))
    assert bench.machine.next_action() == Install(2)


def test_a_version_that_is_old_by_the_time_it_has_landed_is_fetched_anew() -> None:
    bench = _at_step_0(2)
    assert bench.arrive(0, 1) == [Land(0)]
    bench.handle(slots.Arriving(0, 2, V1))
    bench.handle(slots.Arriving(1, 2, V1))
    assert bench.machine.target == 2
    assert bench.handle(Landed(0)) == [Fetch(0, 2, "s0")]


def test_a_version_that_all_others_have_gone_on_from_before_it_is_taken_up_is_not_installed() -> None:
    bench = _computed(2)
    bench.land(1)
    action = bench.machine.next_action()
    assert action == Install(1)
    assert bench.arrive(0, 2) == [DropArriving(0)]
    assert bench.arrive(1, 2)[0] == Land(1)  # now all are known to be at version 2: what is here is of two versions
    assert not bench.machine.take(action)
    assert bench.machine.next_action() is None
    bench.handle(Landed(1))
    bench.land(2, [0])
    assert bench.machine.take(Install(2))
    bench.handle(slots.Installed())
    assert bench.machine.step == 2


def test_a_replica_of_a_generation_that_has_become_stale_before_it_is_taken_up_is_not_begun() -> None:
    bench = _at_step_0(2)
    action = bench.machine.next_action()
    assert isinstance(action, Compute)
    bench.handle(Viewed(view_of(2, count=5, generation=5, origin="step-0")))
    assert not bench.machine.take(action)
    assert not bench.machine.take(None)


def test_what_is_installed_is_what_had_landed_even_if_a_newer_version_is_heard_of_meanwhile() -> None:
    bench = _computed(2)
    bench.land(1)
    assert bench.machine.next_action() == Install(1)
    assert bench.machine.take(bench.machine.next_action())
    effects = [*bench.arrive(0, 2), *bench.arrive(1, 2)]
    assert not any(isinstance(effect, Land) for effect in effects)
    assert bench.handle(slots.Installed()) == [Fetch(0, 2, "s0"), Fetch(1, 2, "s1")]
    assert bench.machine.step == 1


# ---- links ----


def test_what_a_lost_link_may_have_swallowed_is_computed_and_sent_again() -> None:
    bench = _computed(4)
    bench.handle(slots.LinkLost("s1"))
    assert bench.machine.next_action() is None  # there is nobody to send it to
    assert bench.handle(LinkUp("s1")) == [Follow("s1")]
    assert bench.machine.next_action() == Compute(0, 0)
    bench.begin()
    assert [bench.machine.may_fill(shard) for shard in range(4)] == [None, True, None, True]
    assert [send.shard for shard in (1, 3) for send in bench.fill(shard) if isinstance(send, slots.Send)] == [1, 3]
    bench.handle(slots.ReplicaComputed())
    assert bench.machine.next_action() is None


def test_a_gradient_is_not_queued_for_a_link_that_is_gone() -> None:
    bench = _at_step_0(2)
    bench.begin()
    bench.machine.fill(1)
    bench.handle(slots.LinkLost("s1"))
    assert bench.slot(1) is slots.Slot.FILLING
    assert bench.handle(slots.Filled(1)) == []
    assert bench.slot(1) is slots.Slot.FREE


def test_a_version_that_broke_off_halfway_is_received_again() -> None:
    bench = _computed(2)
    assert bench.arrive(0, 1) == [Land(0)]
    bench.handle(slots.LinkLost("s0"))
    assert bench.machine.missing == [0, 1]
    assert bench.handle(LinkUp("s0")) == [Follow("s0")]
    assert bench.arrive(0, 1) == [Land(0)]


# ---- views ----


def test_an_older_view_is_ignored() -> None:
    bench = _at_step_0()
    assert bench.handle(Viewed(view_of(2, {"me": [7]}, count=1))) == []
    assert list(bench.machine.assigned) == [0]


def test_what_was_sent_to_a_shard_s_old_home_is_computed_for_the_new_one() -> None:
    bench = _computed(2)
    assert bench.handle(Viewed(view_of(2, count=2, homes=["s0", "s0"]))) == []
    assert bench.machine.next_action() == Compute(0, 0)
    assert [(send.shard, send.server, send.view) for send in bench.compute()] == [(1, "s0", ViewNumber(1, 2))]


def test_a_server_that_was_restarted_has_to_be_linked_again() -> None:
    bench = _computed(2)
    bench.handle(Viewed(view_of(2, count=2, incarnations={"s1": 5})))
    assert bench.machine.next_action() is None
    bench.handle(LinkUp("s1"))
    assert [send.shard for send in bench.compute()] == [1]


def test_a_replica_that_changed_hands_is_computed_here_for_the_same_step() -> None:
    bench = _computed(2, [0])
    bench.handle(Viewed(view_of(2, {"me": [0, 3]}, count=2)))
    assert bench.machine.next_action() == Compute(0, 3)


@pytest.mark.parametrize("back", [False, True], ids=["given up", "joined again"])
def test_a_replica_that_servers_would_refuse_is_not_sent_and_is_computed_again_when_it_is_assigned_again(
    back: bool,
) -> None:
    """The worker was given up while it computed replica 3: servers take it from another worker now."""
    bench = _at_step_0(2, [3])
    bench.begin()
    bench.machine.fill(0)
    given_up = view_of(2, {"other": [3]}, count=2, mine=())
    bench.handle(Viewed(given_up if back else msgspec.structs.replace(given_up, workers=())))
    assert bench.handle(slots.Filled(0)) == []
    bench.handle(Viewed(view_of(2, {"me": [3]}, count=3)))
    for shard in range(2):
        assert bench.arrive(shard, 0) == [DropArriving(shard)]  # it follows again, and hears that the step is not over
    assert [send.shard for send in bench.fill(1) if isinstance(send, slots.Send)] == [1]
    bench.handle(slots.ReplicaComputed())
    assert [send.shard for send in bench.compute()] == [0]


def test_a_worker_that_takes_no_part_follows_nobody_and_is_not_sent_what_it_does_not_need() -> None:
    bench = _Bench(2)
    assert bench.handle(Viewed(view_of(2, {"other": [0]}))) == []
    assert [bench.handle(LinkUp(s)) for s in ("s0", "s1")] == [[], []]
    assert not bench.machine.following
    assert bench.handle(Viewed(view_of(2, {"me": [0]}, count=2))) == [Follow("s0"), Follow("s1")]
    bench.install(5)  # the job had gone on without it
    assert bench.handle(Viewed(view_of(2, {"other": [0]}, count=3))) == [Follow("s0", False), Follow("s1", False)]
    assert bench.machine.next_action() is None


def test_a_worker_that_will_take_part_later_follows_from_now_on() -> None:
    bench = _Bench(1)
    bench.handle(LinkUp("s0"))
    bench.handle(Viewed(view_of(1, {"other": [0]}, later=[Assignment(4, {"me": (0,)})])))
    assert bench.handle(LinkUp("s0")) == [Follow("s0")]


def test_when_it_follows_again_nothing_is_computed_before_it_has_heard_where_the_others_are() -> None:
    bench = _at_step_0(2)
    bench.handle(Viewed(view_of(2, {"other": [0]}, count=2)))
    bench.handle(Viewed(view_of(2, {"me": [0]}, count=3)))
    assert bench.machine.next_action() is None
    assert bench.arrive(0, 4) == [Land(0)]
    assert bench.machine.next_action() is None
    assert bench.arrive(1, 4) == [Land(1)]
    bench.handle(Landed(0))
    bench.handle(Landed(1))
    assert bench.machine.next_action() == Install(4)


def test_a_standby_worker_gets_the_last_version_when_the_job_is_ending() -> None:
    bench = _Bench(2, view_of(2, {"other": [0]}), steps=3)
    assert bench.handle(Viewed(view_of(2, {"other": [0]}, count=2, ending=True))) == [Follow("s0"), Follow("s1")]
    bench.install(3)
    assert bench.machine.next_action() is None


# ---- rewinds (I10) ----


def test_after_a_roll_back_everything_is_fetched_anew_and_the_old_replica_is_stale() -> None:
    bench = _computed(2)
    bench.install(1)
    bench.begin()
    bench.machine.fill(0)
    view = view_of(2, count=5, generation=5, origin="step-0")
    assert bench.handle(Viewed(view)) == []  # the links have ended: what is under way on them is void
    assert [bench.handle(LinkUp(server)) for server in ("s0", "s1")] == [[Follow("s0")], [Follow("s1")]]
    assert bench.machine.rewound
    assert bench.machine.step == -1
    assert bench.machine.may_fill(1) is None
    assert bench.arrive(0, 0) == [DropArriving(0)]  # the main thread has not let go of the slot
    assert bench.arrive(1, 0)[0] == Land(1)
    assert bench.handle(slots.Filled(0)) == [Fetch(0, 0, "s0")]  # not sent: it belongs to a void past
    bench.handle(Landed(1))
    assert bench.arrive(0, 0) == [Land(0)]
    bench.handle(Landed(0))
    assert bench.machine.next_action() is None  # the main thread is still in the backward pass
    bench.handle(slots.ReplicaAbandoned())
    assert not bench.machine.rewound
    assert bench.machine.next_action() == Install(0)


def test_a_roll_back_while_a_version_is_copied_makes_it_stale_and_what_it_was_copied_from() -> None:
    bench = _computed(2)
    bench.land(1)
    assert bench.machine.take(bench.machine.next_action())
    bench.handle(Viewed(view_of(2, count=5, generation=5, origin="step-0")))
    for server in ("s0", "s1"):
        bench.handle(LinkUp(server))
    bench.land(0, [0])
    assert bench.handle(slots.Installed()) == []
    assert bench.machine.step == -1
    assert bench.machine.missing == [0, 1]  # no target is known yet
    bench.land(0, [1])
    assert bench.machine.next_action() == Install(0)
    bench.installed()
    assert (bench.machine.step, bench.machine.next_action()) == (0, Compute(0, 0))


def test_a_roll_back_while_nothing_is_computed_leaves_nothing_to_abandon() -> None:
    bench = _at_step_0(2)
    bench.handle(Viewed(view_of(2, count=5, generation=5, origin="step-0")))
    assert not bench.machine.rewound
    assert bench.machine.next_action() is None


def test_a_version_from_before_the_roll_back_is_read_and_forgotten() -> None:
    bench = _at_step_0(2)
    bench.handle(Viewed(view_of(2, count=5, generation=5, origin="step-0")))
    assert bench.handle(slots.Arriving(0, 7, ViewNumber(1, 4))) == [DropArriving(0)]
    assert bench.machine.target == -1
    assert bench.handle(slots.Arriving(0, 0, ViewNumber(1, 5))) == [Land(0)]


def test_before_any_view_nothing_is_taken() -> None:
    bench = _Bench(2)
    assert bench.handle(slots.Arriving(0, 0, V1)) == [DropArriving(0)]
    assert bench.machine.next_action() is None
    assert list(bench.machine.assigned) == []


# ---- shards that take turns ----


def _staggered(assigned: Sequence[int] = (0,)) -> _Bench:
    """Shards 0 and 1 take turns over 5 ticks, shard 2 is due at every one: own versions 3, 3 and 5 at the end."""
    bench = _Bench(3, view_of(3, {"me": assigned}), [2], 5, Cadence((Period(2, 0), Period(2, 1)), 5, (0, 1, -1)))
    bench.land(0)
    assert bench.machine.next_action() == Install(0)
    assert bench.machine.take(bench.machine.next_action())
    assert bench.machine.changed == [0, 1, 2]
    bench.handle(slots.Installed())
    return bench


def test_only_shards_that_are_due_are_sent_and_under_their_own_version() -> None:
    bench = _staggered()
    sent = []
    for versions in ([1, 0, 1], [1, 1, 2], [2, 1, 3]):
        sent.append([(send.shard, send.step) for send in bench.compute()])
        for shard in [shard for shard, _ in sent[-1]]:
            assert bench.machine.next_action() is None
            assert bench.arrive(shard, versions[shard]) == [Land(shard)]
            bench.handle(Landed(shard))
        assert bench.machine.next_action() == Install(len(sent))
        bench.installed()
    assert sent == [[(0, 0), (2, 0)], [(1, 0), (2, 1)], [(0, 1), (2, 2)]]


def test_an_install_is_of_the_shards_that_were_due_and_of_no_other() -> None:
    bench = _staggered()
    bench.compute()
    for shard in (0, 2):
        bench.land(1, [shard])
    assert bench.machine.missing == []
    assert bench.machine.take(bench.machine.next_action())
    assert bench.machine.changed == [0, 2]


def test_at_the_last_round_everything_is_sent_and_after_it_nothing_is_waited_for() -> None:
    bench = _staggered()
    for own in ({0: 1, 2: 1}, {1: 1, 2: 2}, {0: 2, 2: 3}, {1: 2, 2: 4}, {0: 3, 1: 3, 2: 5}):
        assert {send.shard for send in bench.compute()} == own.keys()
        for shard, version in own.items():
            bench.land(version, [shard])
        bench.installed()
    assert bench.machine.step == 5
    assert bench.machine.next_action() is None
    assert bench.machine.missing == [0, 1, 2], "of a version that does not come"


def test_a_late_joiner_takes_each_shard_at_the_version_that_is_right_for_the_round() -> None:
    bench = _Bench(3, view_of(3), [2], 5, Cadence((Period(2, 0), Period(2, 1)), 5, (0, 1, -1)))
    bench.land(1, [0])  # tick 2 in progress: shard 0 has had one update, shard 1 one, shard 2 two
    bench.land(1, [1])
    bench.land(2, [2])
    assert bench.machine.next_action() == Install(2)
    bench.installed()
    assert [(send.shard, send.step) for send in bench.compute()] == [(0, 1), (2, 2)]


def test_what_the_model_holds_already_is_not_taken_again() -> None:
    """After a new link everything is said anew: it must not count as new, local steps would be lost with it."""
    bench = _staggered()
    bench.compute()
    for shard in (0, 2):
        bench.land(1, [shard])
    bench.installed()
    bench.handle(slots.LinkLost("s0"))
    bench.handle(LinkUp("s0"))
    assert [bench.arrive(shard, version) for shard, version in enumerate([1, 0, 1])] == [
        [DropArriving(0)], [DropArriving(1)], [DropArriving(2)],
    ]  # fmt: skip
    assert bench.machine.next_action() == Compute(1, 0)
