"""What the coordinator does not compute anew in a large job: its answers are those that it would compute."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_core_cluster import _begun, _terms, beat

from rallypoint.core.cluster import view_sequence
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.view_sequence import Remembered, ViewSequence
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.placing import view_change
from rallypoint.core.placing.assigner import Assigner
from rallypoint.core.placing.pinned import nearest_aggregators
from rallypoint.core.placing.speeds import Speeds
from rallypoint.core.placing.view_change import AHEAD, Placing, contributing, following_assignments, homings, pairings
from rallypoint.core.view import Assignment, Member, View, ViewNumber, assign_replicas, reassign_orphans

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its modules import one another by name

from scale_cluster import BigCluster, Size

SHARDS = build_layout([TensorSpec("weight", (256,), "float32", 0)], 64).shards


def _counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return counted


# ---- the last answer ----


def test_a_remembered_function_is_called_again_only_when_an_argument_is_another() -> None:
    calls: Counter[str] = Counter()
    last = Remembered(_counted(sorted, calls))
    assert [last([2, 1]), last([2, 1]), last([3, 1]), last([2, 1])] == [[1, 2], [1, 2], [1, 3], [1, 2]]
    assert last([2, 1], reverse=True) == [2, 1]
    assert calls["sorted"] == 4


# ---- views ----


def _come_and_go(members: Membership, event: tuple[str, int]) -> None:
    what, number = event
    if what in ("server", "worker", "aggregator"):
        name = f"{what}-{number}"
        if name not in members:
            members.join(Member(name, f"host-{number % 3}", near=f"rack{number % 2}"), what)
        if what == "worker":
            members.propose(name)
    elif what == "gone" and len(members.servers) + len(members.workers) > 4:
        for name in (f"server-{number}", f"worker-{number}"):
            if len(members.servers) > 2 or not name.startswith("server"):
                members.remove(name)
    elif what == "leaving":
        members.leaving ^= {f"server-{number}"} & members.servers.keys()
    elif what == "awaited":
        members.awaited ^= {f"server-{number}"} & members.servers.keys()


EVENTS = st.tuples(
    st.sampled_from(["server", "worker", "aggregator", "gone", "leaving", "awaited", "caught up", "as before"]),
    st.integers(0, 7),
)


@given(st.lists(EVENTS, max_size=25))
def test_a_view_is_the_one_that_a_coordinator_without_memory_makes(happens: list[tuple[str, int]]) -> None:
    members, views = Membership(), ViewSequence(1, replication=2)
    for number in range(3):
        _come_and_go(members, ("server", number))
        _come_and_go(members, ("worker", number))
    deal = (Assignment(0, assign_replicas(6, sorted(members.present))),)
    views.adopt(views.first(SHARDS, members, deal, uploader="worker-0", origin=""))
    for event in happens:
        _come_and_go(members, event)
        before = views.view
        assert before is not None
        if event[0] == "caught up":
            views.caught_up |= set(list(before.backup)[event[1] :: 2])
        if members.present:
            deal = (Assignment(0, reassign_orphans(before.assigned(0), sorted(members.present))),)
        anew = dataclasses.replace(
            views, _placing=Placing(), _nearest=nearest_aggregators, _contributing=contributing
        ).following(SHARDS, members, deal, ending=False)
        view = views.following(SHARDS, members, deal, ending=False)
        assert view == anew
        if view is not None:
            views.adopt(view)


@given(st.lists(st.sampled_from("abc"), min_size=8, max_size=8), st.sampled_from(["", "home", "backup", "process"]))
def test_pairs_and_homes_are_compared_shard_by_shard_where_anything_has_changed(names: list[str], other: str) -> None:
    servers = tuple(Member(name, "here", incarnation=1) for name in "abc")
    homes, backups = dict(enumerate(names)), {s: "abc"[("abc".index(n) + 1) % 3] for s, n in enumerate(names)}
    first = View(ViewNumber(1, 1), ViewNumber(1, 1), (), servers, (), homes, backups)
    first = msgspec.structs.replace(first, paired=pairings(first, None), homed=homings(first, None))
    changed: dict[str, Any] = {
        "": {}, "home": {"primary": {**homes, 0: backups[0]}, "backup": {**backups, 0: homes[0]}},
        "backup": {"backup": {s: b for s, b in backups.items() if s}},
        "process": {"servers": (Member("a", "here", incarnation=2), *servers[1:])},
    }[other]  # fmt: skip
    view = msgspec.structs.replace(first, number=ViewNumber(1, 2), **changed)

    def since(shard: int, *roles: dict[int, str]) -> ViewNumber:
        now = [role.get(shard) for role in roles]
        then = [{id(view.primary): homes, id(view.backup): backups}[id(role)].get(shard) for role in roles]
        return first.number if now == then and not (other == "process" and "a" in now) else view.number

    assert pairings(view, first) == {s: since(s, view.primary, view.backup) for s in view.backup}
    assert homings(view, first) == {s: since(s, view.primary) for s in view.primary}


def test_backups_that_catch_up_place_no_shard_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("place", "place_backups", "contributing", "nearest_aggregators"):
        monkeypatch.setattr(view_sequence, name, _counted(getattr(view_sequence, name), calls))
    cluster = BigCluster(Size(workers=16, servers=12, racks=4, replication=2), clock=lambda: 0.0)
    cluster.gather()
    assert cluster.spent["CaughtUp"][1] == 12
    assert not cluster.view.backup.keys() - cluster.machine.course.views.caught_up
    assert max(calls.values()) <= 2  # of the first view and of the one after it, which is not published


# ---- assignments ----


REPORTS = st.tuples(st.integers(0, 3), st.sampled_from([0.5, 1.0, 1.05, 3.0]))


@given(st.lists(REPORTS | st.just("look") | st.just("gone"), max_size=120))
def test_an_assignment_by_speed_is_the_one_that_is_computed_anew(happens: list[Any]) -> None:
    workers, kept, anew = [f"w{i}" for i in range(4)], Assigner(), Assigner()
    assigned, now, step = assign_replicas(8, workers), 0.0, 0
    for event in happens:
        now += 0.4
        if event == "gone":
            kept.forget("w3")
            anew.forget("w3")
        elif event == "look":
            anew._even = ()
            found = kept.better(assigned, workers, 8, step, now)
            assert found == anew.better(assigned, workers, 8, step, now)
            assigned = dict(found[1][-1].replicas) if found else assigned
        else:
            worker, seconds = event
            for replica in assigned[f"w{worker}"]:
                for assigner in (kept, anew):
                    assigner.computed(f"w{worker}", step, replica, seconds, 8, now)
            step += worker == 3


def test_an_even_assignment_is_not_computed_again_before_a_worker_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    monkeypatch.setattr(
        "rallypoint.core.placing.assigner.following_assignments", _counted(following_assignments, calls)
    )
    assigner, workers = Assigner(), ["a", "b"]
    assigned = assign_replicas(2, workers)
    for step in range(12):
        for replica, worker in enumerate(workers):
            assigner.computed(worker, step, replica, 1.0, 2, float(step))
    for tick in range(20):
        assert assigner.better(assigned, workers, 2, 11, 12.0 + tick) is None
    assert calls["following_assignments"] == 1
    assigner.computed("a", 12, 0, 1.0, 2, 40.0)
    assigner.better(assigned, workers, 2, 12, 41.0)
    assert calls["following_assignments"] == 2


@given(
    st.integers(1, 24), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.integers(1, 6),
    st.sampled_from([0.0, 1.0, 30.0]),
)  # fmt: skip
def test_whether_replicas_move_is_decided_by_the_assignment_that_they_would_get(
    replicas: int, seconds: list[float], had: int, round: float
) -> None:
    workers, speeds = [f"w{i}" for i in range(len(seconds))], Speeds()
    for worker, each in zip(workers, seconds, strict=True):
        for step in range(4):
            speeds.computed(worker, step, 0, each, float(step))
    assigned = assign_replicas(replicas, workers[:had])
    rates = speeds.rates(workers)
    fair, now = assign_replicas(replicas, workers, rates), reassign_orphans(assigned, workers, rates)
    computing = speeds.makespan(now, rates)
    beside = max(0.0, round - computing)
    moves = computing + beside > (speeds.makespan(fair, rates) + beside) * view_change._WORTH_IT
    wanted = (Assignment(0, now), Assignment(5 + AHEAD, fair)) if moves else (Assignment(0, now),)
    assert following_assignments(assigned, workers, replicas, 5, speeds, round) == wanted


# ---- signs of life ----


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 9.0)), max_size=20), st.floats(0.0, 4.0))
def test_who_is_silent_is_found_among_all_members(heard: list[tuple[int, float]], patience: float) -> None:
    members, last = Membership(), {}
    for number in range(4):
        members.join(Member(f"w{number}", "here"), "worker")
    for number, when in heard:
        last[f"w{number}"] = when
        members.heard(f"w{number}", when)
    silences = [(name, 9.0 - last.get(name, 9.0)) for name in members.everybody]
    assert members.silent(9.0, patience) == [(name, seconds) for name, seconds in silences if seconds > patience]


def test_a_beat_counts_for_the_next_tick_and_has_no_effects() -> None:
    job = _begun(_terms(replication=2), ("s0", "s1", "w0", "w1"))
    assert job.machine.handle(beat("w1", evaluating=True)) == []
    assert job.machine.course.evaluating == {"w1"}
    assert job.machine.handle(beat("w1")) == []
    assert not job.machine.course.evaluating
