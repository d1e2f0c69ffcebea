"""An operator changes the learning rate: from which version on, for everybody, and what the change outlives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_core_cluster import STEPS, _Job, _of, _record, _terms
from test_core_stop import _begun, _reported

from rallypoint.coordinator.ordering.orders import Orders
from rallypoint.core.cluster.effects import Abort, Publish, RateScaled
from rallypoint.core.cluster.events import Failed, Found, Left, RateAwaited, Rescaled
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Resumed
from rallypoint.core.deciding.scales import MOST_SCALES, merged, refused, scale_at, with_scale
from rallypoint.core.modes import ModeName
from rallypoint.core.policy import AllReduce, Async, Sync
from rallypoint.core.shard.clip import Rule, Verdict
from rallypoint.core.shard.effects import Apply, Finish
from rallypoint.core.shard.events import Contribute, Initialise, Loaded, Replicated
from rallypoint.core.shard.ordering.hold import RateAwaited as Awaited
from rallypoint.core.shard.plan import Plan
from rallypoint.core.shard.server import Effect, On, ServerMachine
from rallypoint.core.view import Member, Scale, View, ViewNumber
from rallypoint.net.messages import decode, encode
from rallypoint.net.ordering.messages import LearningRate, Ordered
from rallypoint.net.ordering.messages import RateScaled as Told

# ---- the list of factors ----


def test_the_factors_of_a_version_are_multiplied_in_the_order_of_their_versions() -> None:
    scales = with_scale(with_scale(with_scale((), 9, 0.5), 4, 0.1), 9, 3.0)
    assert scales == (Scale(4, 0.1, 2), Scale(9, 0.5, 1), Scale(9, 3.0, 3))
    assert [scale_at(scales, version) for version in (0, 3, 4, 8, 9, 20)] == [
        1.0, 1.0, 0.1, 0.1, 1.0 * 0.1 * 0.5 * 3.0, 1.0 * 0.1 * 0.5 * 3.0,
    ]  # fmt: skip


def test_two_lists_are_one_and_that_of_the_snapshot_counts_where_they_differ() -> None:
    journaled, stored = (Scale(4, 0.5, 1), Scale(9, 2.0, 2)), (Scale(4, 0.5, 1), Scale(7, 3.0, 2))
    assert merged(journaled, stored) == stored
    assert merged(journaled, ()) == merged((), journaled) == journaled
    assert merged(journaled[:1], (Scale(2, 0.1, 2),)) == (Scale(2, 0.1, 2), Scale(4, 0.5, 1))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -1.0, 1e10])
def test_a_factor_that_would_spoil_the_weights_is_refused(factor: float) -> None:
    assert refused((), factor, 0)
    assert not refused((), 0.5, 0)
    assert refused((Scale(1, 1e-8, 1),), 1e-2, 3)
    assert not refused((Scale(1, 1e-8, 1),), 1e2, 3)
    assert "times already" in refused([Scale(1, 1.0, n) for n in range(MOST_SCALES)], 0.5, 3)


def test_after_a_roll_back_the_rate_stays_in_its_bounds_at_each_version() -> None:
    """A factor of version 100 counts again when the job gets there: until then 1e9 twice would be 1e18."""
    later = with_scale((), 100, 1e-9)
    assert not refused(later, 1e9, 60)
    both = with_scale(later, 60, 1e9)
    assert refused(both, 1e9, 70)
    assert not refused(both, 1e-9, 70)
    assert refused(with_scale(later, 60, 1e-3), 1.0, 70), "from version 100 on it would be 1e-12"


def test_what_observers_are_told_is_never_out_of_its_range() -> None:
    """1e-9 and 1e9, 0.1 ten times and so on: products round."""
    for scale in (1e9 * (1 + 2**-52), 1e-9 * (1 - 2**-52), 1.0):
        said = Told("from step 3 on", 3, 1e9, scale)
        assert decode(encode(said)) == said


# ---- the coordinator ----


def _answer(job: _Job, *at: int) -> list[Any]:
    """The servers of the view in force say which updates they hold back."""
    effects = []
    for server, version in zip(sorted(set(job.view.primary.values())), at, strict=True):
        effects += job.play(RateAwaited(server, job.view.number, version))
    return effects


def test_the_next_view_says_the_factor_and_the_one_after_the_servers_answers_the_version() -> None:
    job = _begun()
    _reported(job, 4)
    (asked,) = _of(Publish, job.play(Rescaled(0.5)))
    assert (asked.view.rescale, asked.view.scales) == (0.5, ())
    assert asked.view.primary == job.view.primary
    assert job.machine.waiting_for() == "s0, s1 to say from which step on the learning rate may change"
    assert job.play(RateAwaited("s0", job.view.number, 6)) == []
    assert job.machine.waiting_for() == "s1 to say from which step on the learning rate may change"
    publish, said = job.play(RateAwaited("s1", job.view.number, 5))
    assert (publish.view.rescale, publish.view.scales) == (None, (Scale(6, 0.5, 1),))
    assert said == RateScaled("the learning rate is multiplied by 0.5 from step 6 on", 6, 0.5, 0.5)
    assert job.machine.waiting_for() is None


def test_a_second_order_multiplies_and_says_what_it_comes_to() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Rescaled(0.5))
    _answer(job, 5, 5)
    job.play(Rescaled(0.5))
    *_, said = _answer(job, 5, 5)
    assert said.scale == 0.25
    assert said.text.endswith("from step 5 on: with earlier orders by 0.25")
    assert job.view.scales == (Scale(5, 0.5, 1), Scale(5, 0.5, 2))


def test_an_answer_to_another_view_does_not_count_and_everybody_is_asked_again() -> None:
    job = _begun(replication=2)
    _reported(job, 4)
    job.all_caught_up()
    job.play(Rescaled(0.5))
    old = job.view.number
    job.play(RateAwaited("s0", old, 5))
    (publish,) = _of(Publish, job.play(Left("s1", "killed")))
    assert publish.view.rescale == 0.5
    assert job.play(RateAwaited("s0", old, 5)) == []
    assert job.play(RateAwaited("s7", job.view.number, 5)) == []
    publish, _ = job.play(RateAwaited("s0", job.view.number, 7))
    assert publish.view.scales == (Scale(7, 0.5, 1),)


def test_servers_that_still_restore_a_snapshot_do_not_put_the_change_before_it() -> None:
    job = _begun()
    _reported(job, 8)
    job.play(Left("s0", "killed"), Left("s1", "killed"))
    job.come("s2", "s3")
    job.play(Found("step-00000003-1", 3), Rescaled(0.5))
    _answer(job, 0, 0)
    assert job.view.scales == (Scale(3, 0.5, 1),)


def test_no_server_s_word_puts_the_change_past_the_job_s_end() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Rescaled(0.5))
    _answer(job, 1 << 31, 5)
    assert job.view.scales == (Scale(STEPS, 0.5, 1),)


def test_the_order_outlives_the_coordinator_before_and_after_the_servers_have_answered() -> None:
    job = _begun()
    _reported(job, 4)
    revision = job.machine.revision
    job.play(Rescaled(0.5))
    assert job.machine.revision > revision
    assert _again(job).course.views.rescale == 0.5
    revision = job.machine.revision
    _answer(job, 5, 5)
    assert job.machine.revision > revision
    views = _again(job).course.views
    assert (views.rescale, views.scales) == (None, (Scale(5, 0.5, 1),))


def test_a_new_coordinator_takes_the_answers_of_those_who_come_back() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Rescaled(0.5))
    again = _Job(job.machine.terms, recovered=_state(job))
    for server, at in (("s0", 5), ("s1", 6)):
        again.join(server, incarnation=job.incarnations[server])
        effects = again.play(RateAwaited(server, again.view.number, at))
    assert _of(Publish, effects)[-1].view.scales == (Scale(6, 0.5, 1),)


def test_a_roll_back_keeps_what_is_settled_and_begins_with_what_is_not() -> None:
    job = _begun()
    _reported(job, 8)
    job.play(Rescaled(0.5))
    _answer(job, 9, 9)
    job.play(Rescaled(0.1))
    job.play(Left("s0", "killed"), Left("s1", "killed"))
    job.come("s2", "s3")
    effects = job.play(Found("step-00000003-1", 3))
    (publish,) = _of(Publish, effects)
    assert (publish.view.rescale, publish.view.scales) == (None, (Scale(3, 0.1, 2), Scale(9, 0.5, 1)))
    assert _of(RateScaled, effects)[0].step == 3


def test_a_snapshot_says_what_the_journal_had_no_room_for() -> None:
    job = _begun()
    _reported(job, 4)
    job.play(Left("s0", "x"), Left("s1", "x"))
    job.come("s2", "s3")
    job.play(Found("step-00000005-1", 5, scales=(Scale(3, 0.5, 1),)))
    assert job.view.scales == (Scale(3, 0.5, 1),)


def test_a_resumed_run_has_what_its_snapshot_and_its_journal_say() -> None:
    job = _begun()
    for at in (2, 9):
        _reported(job, at - 1)
        job.play(Rescaled(0.5))
        _answer(job, at, at)
    job.play(Rescaled(3.0))
    resume = Resumed(job.record, "step-00000004-1", 4, scales=(Scale(2, 0.5, 1),))
    again = _Job(_terms(), recovered=_state(job), resume=resume)
    assert again.machine.state().scales == job.view.scales, "also before its first view"
    again.come("s0", "s1", "w0", "w1")
    assert again.view.scales == (Scale(2, 0.5, 1), Scale(4, 3.0, 3), Scale(9, 0.5, 2))
    elsewhere = _Job(_terms(), resume=resume)
    elsewhere.come("s0", "s1", "w0", "w1")
    assert elsewhere.view.scales == (Scale(2, 0.5, 1),)


def test_a_job_that_fails_settles_it_so_that_its_last_version_can_be_stored() -> None:
    job = _begun(snapshots=True)
    _reported(job, 4)
    job.play(Rescaled(0.5))
    job.play(Failed("w0", "its disk is gone", 5, job.view.generation))
    assert not _of(Abort, job.play())
    effects = _answer(job, 5, 5)
    assert _of(Publish, effects)[-1].view.scales == (Scale(5, 0.5, 1),)


@pytest.mark.parametrize(("sync", "why"), [(Async(), "under rp.Async"), (AllReduce(), "workers step")], ids=str)
def test_a_mode_that_cannot_do_it_refuses_with_a_sentence(sync: Any, why: str) -> None:
    job = _Job(_terms(1, 1), record=_record(sync=sync))
    job.come("s0", "w0")
    _reported(job, 4)
    told = _told(job, LearningRate(0.5))
    assert told.refused
    assert why in told.text
    assert _of(Publish, job.play(Rescaled(0.5))) == []


def test_it_is_refused_before_the_job_computes_at_its_end_and_while_another_is_pending() -> None:
    assert "does not compute yet" in _told(_Job(_terms()), LearningRate(0.5)).text
    job = _begun()
    _reported(job, 4)
    assert not _told(job, LearningRate(0.5)).refused
    job.play(Rescaled(0.5))
    assert "multiply it by 0.5 is not in force yet" in _told(job, LearningRate(0.5)).text
    _answer(job, 5, 5)
    assert "in all" in _told(job, LearningRate(1e-9)).text
    _reported(job, STEPS - 1)
    assert "at its last step" in _told(job, LearningRate(0.5)).text


def _told(job: _Job, order: LearningRate) -> Ordered:
    answer = Orders(0.0).answer(order, job.machine.course, 1.0)
    (told,) = [one for one in answer.news if isinstance(one, Ordered)]
    assert told.refused == (not answer.events)
    return told


def _state(job: _Job) -> ClusterState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState)


def _again(job: _Job) -> ClusterMachine:
    return ClusterMachine(job.machine.terms, _state(job))


# ---- a server ----


def _view(count: int, primary: dict[int, str], backup: dict[int, str] | None = None, **news: Any) -> View:
    members = tuple(Member(id, "h", f"{id}:1", number) for number, id in enumerate(("s0", "s1")))
    return View(
        ViewNumber(1, count), ViewNumber(1, 1), (), members, (), dict(primary), dict(backup or {}),
        dict.fromkeys(backup or {}, ViewNumber(1, 1)), **news,
    )  # fmt: skip


HERE = {0: "s0", 1: "s0", 2: "s1"}


def _server(*, decides: bool = False, backup: dict[int, str] | None = None) -> ServerMachine:
    shards = frozenset(range(3))
    plan = Plan(Sync(), [1] * 3, shards, shards if decides else frozenset(), Rule(1.0 if decides else None))
    server = ServerMachine("s0", plan)
    server.adopt(_view(1, HERE, backup))
    for index in (0, 1):
        server.handle(index, Initialise(1000 + index))
    return server


def _push(server: ServerMachine, index: int, step: int) -> list[Effect]:
    effects = server.handle(index, Contribute(step, 0, 1.0, 100 * index + step))
    server.validate()
    return effects


def _applied(effects: list[Effect]) -> list[tuple[int, int]]:
    return [(one.shard, one.effect.version - 1) for one in effects if isinstance(one, On)
            and isinstance(one.effect, Apply)]  # fmt: skip


def test_a_server_holds_back_what_none_of_its_shards_has_begun_and_makes_it_with_the_view_that_says_the_rate() -> None:
    server = _server()
    for step in range(3):
        _push(server, 0, step)
    *_, said = server.adopt(_view(2, HERE, rescale=0.5))
    assert said == Awaited(ViewNumber(1, 2), 3)
    assert _applied(_push(server, 0, 3)) == [], "it waits for its rate"
    assert [_applied(_push(server, 1, step)) for step in range(4)] == [[(1, 0)], [(1, 1)], [(1, 2)], []]
    effects = server.adopt(_view(3, HERE, scales=(Scale(3, 0.5, 1),)))
    assert _applied(effects) == [(0, 3), (1, 3)]
    assert not [one for one in effects if isinstance(one, Awaited)]
    assert _applied(_push(server, 0, 4)) == [(0, 4)]


def test_a_sum_that_is_finished_and_waits_for_the_norm_is_begun() -> None:
    server = _server(decides=True)
    assert any(isinstance(one, On) and isinstance(one.effect, Finish) for one in _push(server, 0, 0))
    *_, said = server.adopt(_view(2, HERE, rescale=0.5))
    assert said == Awaited(ViewNumber(1, 2), 1)
    _push(server, 1, 0)
    assert _applied(server.decided(Verdict(0, 0.5, 1.0, generation=ViewNumber(1, 1)))) == [(0, 0), (1, 0)]
    assert _push(server, 0, 1)[-1:] != [], "it is added"
    assert _applied(server.decided(Verdict(1, 0.5, 1.0, generation=ViewNumber(1, 1)))) == []


def test_each_view_is_answered_with_the_versions_of_then_and_a_new_coordinator_hears_it_again() -> None:
    server = _server()
    server.adopt(_view(2, HERE, rescale=0.5))
    assert server.report_again() == [Awaited(ViewNumber(1, 2), 0)]
    *_, said = server.adopt(_view(3, HERE, rescale=0.5))
    assert said == Awaited(ViewNumber(1, 3), 0)
    server.adopt(_view(4, HERE, scales=(Scale(0, 0.5, 1),)))
    assert server.report_again() == []


def test_a_backup_makes_what_its_primary_sends_and_answers_when_it_is_promoted() -> None:
    server = _server(backup={2: "s0"})
    server.handle(2, Loaded(5))
    *_, said = server.adopt(_view(2, HERE, {2: "s0"}, rescale=0.5))
    assert said == Awaited(ViewNumber(1, 2), 0), "of shards that are primary here"
    assert _applied(server.handle(2, Replicated(5, False, 7))) == [(2, 5)]
    server.validate()
    *_, said = server.adopt(_view(3, dict.fromkeys(HERE, "s0"), rescale=0.5))
    assert said == Awaited(ViewNumber(1, 3), 6)
    assert _applied(_push(server, 2, 6)) == []


def test_a_server_without_a_primary_has_nothing_to_say() -> None:
    server = ServerMachine("s0", Plan(Sync(), [1] * 3, frozenset(range(3)), frozenset()))
    effects = server.adopt(_view(1, dict.fromkeys(HERE, "s1"), dict.fromkeys(HERE, "s0"), rescale=0.5))
    assert not [one for one in effects if isinstance(one, Awaited)]


def test_the_table_says_where_it_works() -> None:
    from rallypoint.core.modes import TABLE, Feature, No

    assert [mode for mode, cell in TABLE[Feature.RESCALE].items() if not isinstance(cell, No)] == [ModeName.SYNC]
