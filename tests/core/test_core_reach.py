"""Who cannot reach whom, and whose thread hangs: the smallest set of members that lets the job go on is set apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from test_core_cluster import _begun, _Job, _of, _terms, beat

from rallypoint.core.cluster.effects import Effect, FindSnapshot, Refuse
from rallypoint.core.cluster.events import From, Tick
from rallypoint.core.cluster.reach import FIRST, SOUND
from rallypoint.core.protocol import Done, Finished, Say
from rallypoint.core.view import Member

HB = 2.0
TICK_S = 0.25
Missed = Mapping[str, Sequence[str]]


def _job(*members: str, **terms: Any) -> _Job:
    job = _begun(_terms(**{"heartbeat": HB, "replication": 2, **terms}), members or ("s0", "s1", "w0", "w1"))
    job.tick(0.1)
    return job


class _Beats:
    """The beats of a job's members while nothing gets on, or only `busy` workers' threads do."""

    def __init__(self, job: _Job) -> None:
        self.job, self.activity, self.stalled = job, 0, 0.0

    def play(
        self, seconds: float, missed: Missed, *, waiting: bool = True, busy: Sequence[str] = (),
        hung: Sequence[str] = ()
    ) -> list[Effect]:  # fmt: skip
        effects = []
        for _ in range(round(seconds / TICK_S)):
            self.job.now += TICK_S
            self.stalled = self.stalled + TICK_S if waiting else 0.0
            self.activity += 1
            for name in (*self.job.machine.course.members.workers, *self.job.machine.course.members.servers):
                late = dict.fromkeys(missed.get(name, ()), self.stalled)
                works = name.startswith("s") or name in busy or name in hung
                activity = 7 if name in hung else self.activity
                effects += self.job.play(beat(name, late, 0.0 if works else self.stalled, activity))
            effects += self.job.play(Tick(self.job.now))
        return effects


def _apart(job: _Job) -> set[str]:
    return job.machine.course.members.apart


@pytest.mark.parametrize(
    ("missed", "apart"),
    [
        ({"w0": ["s1"]}, {"w0"}), ({"w1": ["s0"]}, {"w1"}), ({"w0": ["s0", "s1"]}, {"w0"}),
        ({"w0": ["s1"], "w1": ["s1"]}, {"s1"}), ({"s0": ["s1"], "s1": ["s0"]}, {"s1"}), ({"s0": ["s1"]}, {"s1"}),
        ({"w0": ["s1"], "w1": ["s1"], "s0": ["s1"], "s1": ["s0"]}, {"s1"}),
    ],
)
def test_the_smallest_set_is_set_apart_within_three_heartbeats_and_not_before(missed: Missed, apart: set[str]) -> None:
    job = _job()
    beats = _Beats(job)
    assert beats.play(3 * HB - TICK_S, missed) == []
    effects = beats.play(2 * TICK_S, missed)
    assert _apart(job) == apart
    assert _of(FindSnapshot, effects) == []
    computing = {worker for worker, own in job.view.assigned(1).items() if own}
    assert computing == {"w0", "w1"} - apart
    assert set(job.view.primary.values()) <= {"s0", "s1"} - apart


def test_a_worker_that_began_to_wait_a_little_later_is_heard_first() -> None:
    """Both miss s1. Judged by the first one alone, w0 would be set apart in vain, and s1 a while later."""
    job = _job()
    missed = {"w0": ["s1"], "w1": ["s1"]}
    beats = _Beats(job)
    beats.play(TICK_S, missed, busy=["w1"])
    late = TICK_S  # by which w1's wait is shorter
    for _ in range(round(3.5 * HB / TICK_S)):
        job.now += TICK_S
        beats.stalled += TICK_S
        for worker, waited in (("w0", beats.stalled), ("w1", beats.stalled - late)):
            job.play(beat(worker, dict.fromkeys(missed[worker], beats.stalled), waited, 1))
        job.play(beat("s0", {}, 0.0, 1), beat("s1", {}, 0.0, 1), Tick(job.now))
    assert _apart(job) == {"s1"}


def _play_beats(job: _Job, seconds: float, beats: Callable[[float], Sequence[From]]) -> None:
    """`beats` gets the seconds since the first beat."""
    for count in range(1, round(seconds / TICK_S) + 1):
        job.now += TICK_S
        job.play(*beats(count * TICK_S), Tick(job.now))


def _sawtooth(now: float) -> float:
    """Waits of less than three heartbeats, one after the other."""
    return TICK_S + now % (2 * HB)


def test_short_waits_of_a_worker_that_misses_nobody_put_no_other_pair_off() -> None:
    job = _job()
    _play_beats(job, 4 * HB, lambda now: [
        beat("w0", {"s1": now}, now), beat("w1", {}, _sawtooth(now), round(now)), beat("s0"), beat("s1"),
    ])  # fmt: skip
    assert _apart(job) == {"w0"}


@pytest.mark.parametrize("witness", ["w1", "s0"])
def test_a_pair_is_put_off_while_who_may_miss_the_same_peer_has_not_waited_long_enough(witness: str) -> None:
    """Judged by w0 alone, w0 would be set apart in vain; s1 is the one that all miss."""
    job = _job()
    missed = {name: {"s1": 4 * HB} if name in ("w0", witness) else {} for name in ("w0", "w1", "s0")}
    waits = {"w0": 4 * HB, "w1": 2 * HB}

    def beats(_: float) -> Sequence[From]:
        return [beat("s1"), *(beat(name, peers, waits.get(name, 0.0)) for name, peers in missed.items())]

    _play_beats(job, 4 * TICK_S, beats)
    assert _apart(job) == set()
    waits["w1"] = 3 * HB
    _play_beats(job, TICK_S, beats)
    assert _apart(job) == {"s1"}


def test_it_says_in_one_sentence_whom_and_why() -> None:
    effects = _Beats(_job()).play(3.5 * HB, {"w0": ["s1"]})
    why = "w0 has not reached s1 for 6.0 s, and the job has made no progress for 3 heartbeats"
    assert Refuse("w0", f"given up: {why}") in effects
    assert Say(f"w0 is gone: {why}") in effects


def test_a_worker_that_nobody_can_replace_is_kept_and_the_server_hands_its_shards_over() -> None:
    job = _job("s0", "s1", "w0", workers_start=1)
    effects = _Beats(job).play(3.5 * HB, {"w0": ["s1"]})
    why = "w0 has not reached s1 for 6.0 s, and the job has made no progress for 3 heartbeats"
    assert _of(Say, effects) == [Say(f"s1 is to hold no shards for now: {why}")]
    assert set(job.view.primary.values()) == {"s0"}
    assert {member.id for member in job.view.servers} == {"s0", "s1"}


def test_a_single_pair_with_nobody_to_spare_is_waited_for() -> None:
    job = _begun(_terms(1, 1, heartbeat=HB), ("s0", "w0"))
    job.tick(0.1)
    assert _Beats(job).play(10 * HB, {"w0": ["s0"]}) == []


def test_a_standby_worker_takes_over() -> None:
    job = _job("s0", "s1", "w0", "w1", "w2")
    _Beats(job).play(3.5 * HB, {"w0": ["s1"]})
    assert {worker for worker, own in job.view.assigned(1).items() if own} == {"w1", "w2"}


def test_without_replication_a_server_is_emptied_and_nothing_is_lost() -> None:
    job = _job("s0", "s1", "w0", workers_start=1, replication=1)
    beats = _Beats(job)
    effects = beats.play(3.5 * HB, {"w0": ["s1"]})
    assert _of(FindSnapshot, effects) == []
    job.all_caught_up()
    assert set(job.view.primary.values()) == {"s0"}


def test_who_was_set_apart_stands_by_when_it_comes_back_and_computes_when_nobody_has_missed_anybody_for_long() -> None:
    job = _job()
    beats = _Beats(job)
    beats.play(3.5 * HB, {"w0": ["s1"]})
    job.come("w0")
    assert not job.view.takes_part("w0", 1)
    beats.play(5 * HB, {"w0": ["s1"]}, waiting=False)
    assert not job.view.takes_part("w0", 1)
    effects = beats.play(SOUND * HB + 0.5, {}, waiting=False)
    assert Say("w0 takes part again") in effects
    job.reached("w0")  # it has fetched a version
    assert job.view.takes_part("w0", 3)


def test_a_worker_that_cannot_fetch_the_last_version_does_not_hold_up_the_end() -> None:
    job = _job(snapshots=False)
    assert _of(Finished, job.play(From("w1", Done(job.view.generation)))) == []
    assert _of(Finished, _Beats(job).play(3.5 * HB, {"w0": ["s1"]})) == [Finished("w1")]


def test_who_was_set_apart_does_not_put_off_the_end() -> None:
    job = _job(snapshots=False)
    _Beats(job).play(3.5 * HB, {"w0": ["s1"]})
    job.come("w0")
    assert _of(Finished, job.play(From("w1", Done(job.view.generation)))) == [Finished("w1")]


@pytest.mark.parametrize("snapshots", [False, True])
def test_a_server_that_cannot_hand_its_shards_over_is_given_up_only_if_there_are_snapshots(snapshots: bool) -> None:
    job = _job("s0", "s1", "w0", workers_start=1, replication=1, snapshots=snapshots)
    beats = _Beats(job)
    cut: Missed = {"s0": ["s1"], "s1": ["s0"]}  # with a limit on the norm, servers need each other
    beats.play(3.5 * HB, cut)
    assert _apart(job) == {"s1"}
    effects = beats.play(4 * HB, cut)
    assert [refuse.member for refuse in _of(Refuse, effects)] == (["s1"] if snapshots else [])
    assert (FindSnapshot() in effects) == snapshots


def test_a_server_whose_shards_still_move_is_waited_for_and_given_up_when_they_no_longer_do() -> None:
    job = _job("s0", "s1", "w0", workers_start=1, replication=1, snapshots=True)
    beats, missed = _Beats(job), {"w0": ["s1"]}
    beats.play(3.5 * HB, missed)
    own = job.view.shards_of("s1")
    assert len(own) > 1
    for shard in own[:-1]:
        job.caught_up(shard)
        assert _of(Refuse, beats.play(3 * HB, missed)) == []
    assert [refuse.member for refuse in _of(Refuse, beats.play(3 * HB, missed))] == ["s1"]


@pytest.mark.parametrize(("seconds", "missed", "busy"), [
    (10 * HB, {"w0": ["s1"]}, ["w0"]), (10 * HB, {"s0": ["s1"], "s1": ["s0"]}, ["w1"]), (20 * HB, {}, []),
    (300.0, {}, ["w0"]),
], ids=["a link that breaks while its worker computes", "servers that cannot reach each other while a worker computes",
        "a long wait with all links sound", "a slow worker that gets on"])  # fmt: skip
def test_this_is_no_reason_to_set_anybody_apart(seconds: float, missed: Missed, busy: list[str]) -> None:
    assert _Beats(_job()).play(seconds, missed, busy=busy) == []


def test_a_member_that_is_silent_is_left_to_the_heartbeat() -> None:
    job = _job()
    for _ in range(round(3.5 * HB / TICK_S)):
        job.now += TICK_S
        late = job.now - 1.0
        job.play(beat("w0", {"s1": late}, late), beat("w1", {"s1": late}, late), beat("s0"), Tick(job.now))
    assert _apart(job) == set()
    assert "s1" not in {member.id for member in job.view.servers}


# ---- threads that hang ----


def test_a_worker_whose_thread_hangs_while_all_others_wait_is_given_up_after_a_minute() -> None:
    job = _job()
    beats = _Beats(job)
    beats.play(1.0, {}, waiting=False)
    assert beats.play(59.0, {}, hung=["w0"]) == []
    effects = beats.play(2.0, {}, hung=["w0"])
    assert [refuse.member for refuse in _of(Refuse, effects)] == ["w0"]
    assert "its main thread hangs: nothing for 60 s while all wait" in _of(Say, effects)[0].text
    job.come("w0")
    beats.play(SOUND * HB + 1.0, {}, waiting=False, hung=["w0"])
    assert not job.view.takes_part("w0", 3), "it hangs still"
    beats.play(SOUND * HB + 1.0, {}, waiting=False)
    job.reached("w0")
    assert job.view.takes_part("w0", 3)


def test_workers_that_are_busy_at_the_same_time_do_not_hang() -> None:
    assert _Beats(_job("s0", "s1", "w0", "w1", "w2")).play(1000.0, {}, hung=["w0", "w1"]) == []


def test_where_steps_take_minutes_a_thread_may_take_ten_times_as_long() -> None:
    job = _job()
    beats = _Beats(job)
    for step in range(1, 5):
        beats.play(50.0, {}, waiting=False, busy=["w0", "w1"])
        job.step(step)
    assert beats.play(490.0, {}, hung=["w0"]) == []
    assert _of(Refuse, beats.play(20.0, {}, hung=["w0"])) != []


def test_a_worker_that_may_compile_its_model_has_ten_times_as_long() -> None:
    job = _job("s0", "s1", "w0", workers_start=1)
    job.come("w1")
    for step in (1, 2):
        job.step(step, only="w0")
    assert job.view.takes_part("w1", 3)
    beats = _Beats(job)
    assert beats.play(60.0 * FIRST - 5.0, {}, hung=["w1"]) == []
    assert [refuse.member for refuse in _of(Refuse, beats.play(10.0, {}, hung=["w1"]))] == ["w1"]


@pytest.mark.parametrize("terms", [{"hang_after": 0.0}, {"workers_min": 2}])
def test_a_hanging_worker_is_waited_for_if_told_so_or_if_too_few_would_be_left(terms: dict[str, Any]) -> None:
    assert _Beats(_job(**terms)).play(200.0, {}, hung=["w0"]) == []


def test_an_unknown_member_s_beat_says_nothing() -> None:
    job = _job()
    assert job.play(beat("w9", {"s0": 100.0}, 100.0), beat("w0", {"s9": 100.0}, 100.0), Tick(job.now + 0.1)) == []
    assert Member("w9", "x") not in job.view.workers
