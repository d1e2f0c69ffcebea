"""Views and the deal: who computes which replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core import view as views
from rallypoint.core.view import Assignment, Entries, Member, Reassigned, View, ViewNumber, assign_replicas, canonical


def _workers(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


_SPEEDS = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=8)


@given(st.integers(0, 40), _SPEEDS)
def test_every_replica_is_assigned_to_exactly_one_worker_in_ascending_order(replicas: int, speeds: list[float]) -> None:
    workers = _workers(len(speeds))
    assignment = assign_replicas(replicas, workers, dict(zip(workers, speeds, strict=True)))
    assert list(assignment) == workers
    assert sorted(replica for own in assignment.values() for replica in own) == list(range(replicas))
    assert all(list(own) == sorted(own) for own in assignment.values())


@given(st.integers(0, 40), st.integers(1, 8), st.floats(0.01, 1000.0))
def test_equal_speeds_get_equal_runs_of_neighbours(replicas: int, count: int, speed: float) -> None:
    workers = _workers(count)
    assigned = assign_replicas(replicas, workers)
    lengths = sorted(len(own) for own in assigned.values())
    assert sorted(replica for own in assigned.values() for replica in own) == list(range(replicas))
    assert all(own == tuple(range(own[0], own[-1] + 1)) for own in assigned.values() if own)
    assert lengths[-1] - lengths[0] <= 1
    assert assign_replicas(replicas, workers, dict.fromkeys(workers, speed)) == assigned


def test_a_worker_of_unknown_speed_counts_as_one() -> None:
    assert assign_replicas(4, ["a", "b"], {"a": 1.0}) == {"a": (0, 1), "b": (2, 3)}


def test_the_larger_runs_are_where_fewer_blocks_are_sent() -> None:
    assert assign_replicas(5, ["a", "b"]) == {"a": (2, 3, 4), "b": (0, 1)}  # [2,4) and [4,5), [0,2)
    assert assign_replicas(8, ["a", "b", "c"]) == {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}


def test_without_a_worker_there_is_no_assignment() -> None:
    with pytest.raises(ValueError, match="no worker"):
        assign_replicas(2, [])


# ---- hands that change ----


_HANDS = st.integers(1, 5).flatmap(
    lambda count: st.lists(st.integers(0, count - 1), min_size=0, max_size=12).map(
        lambda owners: {f"w{i}": tuple(r for r, owner in enumerate(owners) if owner == i) for i in range(count)}
    )
)


@given(_HANDS, st.sets(st.integers(0, 7), min_size=1), st.data())
def test_patched_hands_hold_every_replica_once_and_survivors_keep_theirs(
    assigned: dict[str, tuple[int, ...]], here: set[int], data: st.DataObject
) -> None:
    workers = data.draw(st.permutations([f"w{i}" for i in sorted(here)]))
    patched = views.reassign_orphans(assigned, workers)
    assert list(patched) == workers
    assert sorted(r for own in patched.values() for r in own) == sorted(r for own in assigned.values() for r in own)
    assert all(list(own) == sorted(own) for own in patched.values())
    for worker in workers:
        assert set(assigned.get(worker, ())) <= set(patched[worker])


@given(_HANDS, st.data())
def test_when_nobody_is_gone_patching_changes_nothing(assigned: dict[str, tuple[int, ...]],
    data: st.DataObject) -> None:
    workers = data.draw(st.permutations([*assigned, "newcomer"]))
    assert views.reassign_orphans(assigned, workers) == {worker: assigned.get(worker, ()) for worker in workers}


def test_an_idle_worker_takes_all_replicas_of_one_that_is_gone() -> None:
    assigned = {"a": (0, 3), "b": (1, 4), "c": (2, 5), "idle": ()}
    assert views.reassign_orphans(assigned, ["a", "c", "idle"]) == {"a": (0, 3), "c": (2, 5), "idle": (1, 4)}


def test_without_an_idle_worker_each_orphan_goes_to_who_would_finish_it_first() -> None:
    assigned = {"a": (0, 3), "b": (1, 4), "c": (2,)}
    assert views.reassign_orphans(assigned, ["a", "c"]) == {"a": (0, 1, 3), "c": (2, 4)}
    assert views.reassign_orphans(assigned, ["a", "c"], {"a": 9.0, "c": 1.0}) == {"a": (0, 1, 3, 4), "c": (2,)}


def test_hands_cannot_be_patched_without_a_worker() -> None:
    with pytest.raises(ValueError, match="no worker"):
        views.reassign_orphans({"a": (0,)}, [])


# ---- views ----


@pytest.mark.parametrize(
    ("workers", "servers", "by_port"),
    [(1, 1, (False, False)), (1, 2, (True, False)), (2, 2, (True, True)), (4, 4, (True, True)), (2, 4, (True, False)),
     (4, 2, (False, False)), (0, 2, (True, False))],
)
def test_who_paces_by_its_port(workers: int, servers: int, by_port: tuple[bool, bool]) -> None:
    """Workers where theirs are full, servers where theirs are full too; one that stands by computes nothing."""
    members = tuple(Member(f"s{number}", "h", f"h:{number}") for number in range(servers))
    computing: dict[str, tuple[int, ...]] = {f"w{number}": (number,) for number in range(workers)}
    primary = {shard: f"s{shard % servers}" for shard in range(4 * servers)}
    view = _view(
        servers=members, assignments=(Assignment(0, {}), Assignment(3, {**computing, "w9": ()})), primary=primary,
        backup={},
    )  # fmt: skip
    assert (view.workers_by_port(), view.servers_by_port()) == by_port
    few = msgspec.structs.replace(view, primary={0: "s0"})
    assert not few.workers_by_port()
    replicated = msgspec.structs.replace(view, backup={0: "s1"})
    assert (replicated.workers_by_port(), replicated.servers_by_port()) == (by_port[0], False)
    near = msgspec.structs.replace(view, aggregators=(Member("a0", "h", "h:99"),))
    assert not near.workers_by_port()
    assert not near.servers_by_port()


def _view(**changes: object) -> View:
    view = View(
        number=ViewNumber(1, 2),
        generation=ViewNumber(1, 1),
        workers=(Member("w0", "h", incarnation=3), Member("w1", "h", incarnation=4)),
        servers=(Member("s0", "h", "h:1", 1), Member("s1", "h", "h:2", 2)),
        assignments=(Assignment(0, {"w1": (1,), "w0": (0, 2)}),),
        primary={3: "s0", 0: "s1", 1: "s0"},
        backup={3: "s1"},
    )
    return msgspec.structs.replace(view, **changes)


def test_a_view_answers_who_leads_and_who_holds_what() -> None:
    view = _view()
    assert view.lead(0) == "w0"
    assert (view.shards_of("s0"), view.shards_of("s1"), view.shards_of("s2")) == ([1, 3], [0], [])
    assert view.server("s1").address == "h:2"
    with pytest.raises(KeyError):
        view.server("w0")
    assert str(view.number) == "1.2"


def test_the_last_assignment_whose_start_is_not_above_a_step_counts_for_it() -> None:
    view = _view(assignments=(Assignment(0, {"w0": (0, 1)}), Assignment(5, {"w0": (0,), "w1": (1,)}), Assignment(7,
        {"w1": (0, 1), "w0": ()})))
    assert [view.replicas_of("w0", step) for step in (-1, 0, 4, 5, 6, 7, 99)] == [(0, 1)] * 3 + [(0,)] * 2 + [()] * 2
    assert [view.replicas_of("w1", step) for step in (-1, 4, 5, 7)] == [(), (), (1,), (0, 1)]
    assert [view.lead(step) for step in (4, 5, 7)] == ["w0", "w0", "w1"]
    assert view.replicas_of("nobody", 5) == ()


def test_a_worker_takes_part_if_it_computes_at_this_step_or_later() -> None:
    view = _view(assignments=(Assignment(0, {"w0": (0,), "w1": ()}), Assignment(5, {"w0": (), "w1": (0,)}),
        Assignment(8, {"w2": (0,)})))
    assert [view.takes_part("w0", step) for step in (-1, 4, 5, 9)] == [True, True, False, False]
    assert [view.takes_part("w1", step) for step in (-1, 4, 5, 8)] == [True, True, True, False]
    assert [view.takes_part("w2", step) for step in (-1, 8)] == [True, True]
    assert not view.takes_part("w3", 0)


def test_while_the_job_waits_for_workers_nobody_computes_or_leads() -> None:
    for view in (_view(assignments=()), _view(assignments=(Assignment(4, {"w0": (0,)}),))):
        assert (dict(view.assigned(3)), view.replicas_of("w0", 3), view.lead(3)) == ({}, (), "")


# ---- A view as the difference to an earlier one leads to that view or to an error, never to another view ----


_NAMES = st.sampled_from([f"m{number}" for number in range(6)])
_NUMBERS = st.builds(ViewNumber, st.integers(0, 2), st.integers(0, 9))
_MEMBERS = st.lists(
    st.builds(Member, _NAMES, st.just("host"), incarnation=st.integers(1, 3)), max_size=6, unique_by=lambda one: one.id
).map(tuple)
_REPLICAS = st.dictionaries(_NAMES, st.lists(st.integers(0, 9), max_size=3).map(tuple))
_SHARDS = st.integers(0, 9)
VIEWS = st.builds(
    View, _NUMBERS, _NUMBERS, _MEMBERS, _MEMBERS,
    st.lists(st.builds(Assignment, st.integers(0, 20), _REPLICAS), max_size=3).map(tuple),
    st.dictionaries(_SHARDS, _NAMES), st.dictionaries(_SHARDS, _NAMES), st.dictionaries(_SHARDS, _NUMBERS),
    st.dictionaries(_SHARDS, _NUMBERS), contributors=_REPLICAS, aggregators=_MEMBERS,
    aggregator_of=st.dictionaries(_NAMES, _NAMES), speeds=st.dictionaries(_NAMES, st.floats(0.1, 9)),
    orders=st.builds(
        views.StandingOrders, lease=st.none() | st.builds(views.Lease, st.integers(0, 9), _NAMES, st.integers(0, 9)),
        paused=st.none() | st.integers(0, 9),
    ),
)  # fmt: skip


def large(workers: int = 2000, servers: int = 200, **changed: Any) -> View:
    """A view in which worker w computes replica w."""
    names = [f"worker-{number:05}" for number in range(workers)]
    homes = [f"server-{number:05}" for number in range(servers)]
    primary = {shard: homes[shard % servers] for shard in range(8 * servers)}
    number = ViewNumber(1, 1)
    replicas = {name: (index,) for index, name in enumerate(names)}
    view = View(
        number, number, tuple(Member(name, f"host-{name}", "", i) for i, name in enumerate(names, 1)),
        tuple(Member(name, f"host-{name}", "10.0.0.1:40001", i) for i, name in enumerate(homes, workers + 1)),
        (Assignment(0, replicas),), primary, homed=dict.fromkeys(primary, number), contributors=replicas,
    )  # fmt: skip
    return msgspec.structs.replace(view, **changed)


def over_the_wire(change: views.ViewDifference) -> views.ViewDifference:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=views.ViewDifference)


@given(VIEWS, VIEWS)
def test_a_difference_leads_from_any_view_to_any_other(base: View, view: View) -> None:
    reached = views.apply(over_the_wire(views.difference(base, canonical(view))), base)
    assert reached == view
    assert msgspec.msgpack.encode(reached) == msgspec.msgpack.encode(canonical(view)), "byte for byte: its proof holds"


@pytest.mark.slow
@given(VIEWS, VIEWS, VIEWS)
def test_a_wrong_base_is_found_also_under_the_right_number(base: View, view: View, other: View) -> None:
    change = views.difference(base, canonical(view))
    other = msgspec.structs.replace(other, number=base.number)
    try:
        assert views.apply(change, other) == view
    except views.WrongBase:
        assert other != base


@pytest.mark.slow
@given(VIEWS, VIEWS, st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_changed_byte_is_found_or_changes_nothing(base: View, view: View, place: int, bits: int) -> None:
    data = bytearray(msgspec.msgpack.encode(views.difference(base, canonical(view))))
    data[place % len(data)] ^= bits
    try:
        change = msgspec.msgpack.decode(data, type=views.ViewDifference)
        reached = views.apply(change, base)
    except (msgspec.DecodeError, UnicodeDecodeError, views.WrongBase):
        return
    assert reached == view


@pytest.mark.parametrize("changed", [
    {"assignments": (Reassigned(0, 7, Entries()),)}, {"assignments": (Reassigned(0, -2, Entries()),)},
    {"workers": views.Moved((), ((5, Member("w9", "host")),))}, {"servers": views.Moved((0,))}, {"digest": bytes(16)},
    {"base": ViewNumber(1, 2)},
], ids=["assignment", "negative", "position", "gone", "digest", "base"])  # fmt: skip
def test_what_does_not_fit_is_an_error_of_its_own(changed: Mapping[str, Any]) -> None:
    base = large(3, 2)
    view = canonical(msgspec.structs.replace(base, number=ViewNumber(1, 2), workers=base.workers[:2]))
    change = views.difference(base, view)
    assert views.apply(change, base) == view
    with pytest.raises(views.WrongBase):
        views.apply(msgspec.structs.replace(change, **changed), base)


def test_the_order_of_a_table_does_not_change_the_digest() -> None:
    one = large(3, 2)
    other = msgspec.structs.replace(one, primary=dict(reversed(one.primary.items())))
    assert list(one.primary) != list(other.primary)
    assert views.digest_of(canonical(one)) == views.digest_of(canonical(other))


def test_a_death_among_thousands_is_some_hundred_bytes() -> None:
    base = large()
    assigned = dict(base.assignments[0].replicas)
    (orphan,) = assigned.pop("worker-00700")
    assigned["worker-00701"] = (*assigned["worker-00701"], orphan)
    view = canonical(msgspec.structs.replace(
        base, number=ViewNumber(1, 2), workers=base.workers[:700] + base.workers[701:],
        assignments=(Assignment(0, assigned),), contributors={**base.contributors, "worker-00701": (701, 700)},
    ))  # fmt: skip
    change = msgspec.msgpack.encode(views.difference(base, view))
    assert len(change) < 1000
    assert len(msgspec.msgpack.encode(view)) > 200_000
