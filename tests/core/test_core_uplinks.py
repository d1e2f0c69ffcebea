"""Servers behind a rack's narrow uplink get as many bytes as it lets through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rallypoint.core.placing.uplinks import Rack, Situation, Uplinks, duration, factors, shares
from rallypoint.core.plan.topology import mbit_of, weights_of
from rallypoint.core.view import Assignment, Member

NARROW = {"a": Rack(4, 400.0), "b": Rack(1, 300.0, 100.0)}
RACKS = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(Rack, st.integers(0, 6), st.sampled_from([100.0, 300.0]), st.sampled_from([0.0, 50.0, 100.0, 400.0])),
    min_size=1,
)


def even(racks: dict[str, Rack]) -> dict[str, float]:
    everything = sum(rack.speed for rack in racks.values())
    return {name: rack.speed / everything for name, rack in racks.items()}


def test_a_rack_with_few_workers_gets_what_its_uplink_can_carry_beside_theirs() -> None:
    found = shares(NARROW)
    # 1 + (5 - 2) X through the uplink of 100 takes as long as 5 (1 - X) over the 400 of the servers outside
    assert found["b"] == pytest.approx(1 / 17)
    assert duration(NARROW, found) == pytest.approx((1 + 3 / 17) / 100)
    assert duration(NARROW, even(NARROW)) / duration(NARROW, found) == pytest.approx(1.943, abs=1e-3)


def test_a_rack_with_most_of_the_workers_gets_nearly_all_bytes() -> None:
    assert shares({"a": Rack(1, 400.0), "b": Rack(4, 400.0, 100.0)})["b"] == pytest.approx(16 / 17)


def test_where_no_share_helps_racks_get_bytes_as_their_links_are() -> None:
    half = {"a": Rack(4, 400.0), "b": Rack(4, 200.0, 100.0)}  # as many workers inside as outside: always 4 K
    assert shares(half) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert shares({"a": Rack(2, 100.0), "b": Rack(2, 300.0)}) == pytest.approx({"a": 0.25, "b": 0.75})


def test_a_placement_need_not_be_better_than_the_workers_own_links() -> None:
    slow = {"a": Rack(4, 400.0), "b": Rack(1, 400.0, 200.0)}
    assert shares(slow)["b"] < shares(slow, floor=1 / 50)["b"]
    assert shares(slow, floor=1 / 50) == pytest.approx(even(slow))


def test_copies_in_other_racks_count_as_one_more_worker_outside() -> None:
    twice = shares(NARROW, copies=2)
    assert twice["b"] < shares(NARROW)["b"]
    assert duration(NARROW, twice, 2) == pytest.approx(5 * twice["a"] / 400)


def test_nobody_there_is_no_reason_to_place_otherwise() -> None:
    assert shares({"a": Rack(0, 100.0, 1.0), "b": Rack(0, 300.0)}) == {"a": 0.25, "b": 0.75}


@given(RACKS, st.sampled_from([1, 2]))
def test_no_other_shares_take_less(racks: dict[str, Rack], copies: int) -> None:
    assume(any(rack.clients for rack in racks.values()))
    found = shares(racks, copies)
    assert sum(found.values()) == pytest.approx(1.0)
    best = duration(racks, found, copies)
    assert best <= duration(racks, even(racks), copies) * (1 + 1e-6)
    names = sorted(racks)
    for one, other in itertools.permutations(names, 2):  # it is a linear program: a local optimum is one
        step = min(0.01, found[one])
        moved = {**found, one: found[one] - step, other: found[other] + step}
        assert duration(racks, moved, copies) >= best * (1 - 1e-6)


@given(RACKS)
def test_factors_give_racks_their_shares(racks: dict[str, Rack]) -> None:
    wanted = shares(racks)
    by = factors(racks, wanted)
    assert max(by.values()) == 1.0
    links = {name: rack.speed * by[name] for name, rack in racks.items()}
    assert {name: link / sum(links.values()) for name, link in links.items()} == pytest.approx(wanted)


# ---- the coordinator's decision --------------------------------------------------------------------------------


def here(inside: int = 1, outside: int = 4, *, mbit: float = 100.0, incarnation: int = 1) -> Situation:
    """4 servers outside, 3 in rack b."""
    servers = {
        name: Member(name, name, f"{name}:1", incarnation, "b" if number > 3 else "a", link_mbit=mbit)
        for number, name in enumerate(f"s{number}" for number in range(7))
    }
    workers = [Member(f"w{number}", "", near="b" if number < inside else "a") for number in range(inside + outside)]
    return Situation(servers, {}, workers, [Assignment(0, {worker.id: (0,) for worker in workers})])


def test_weights_follow_from_the_uplink_and_nobody_is_starved() -> None:
    uplinks = Uplinks({"b": 100.0})
    by = uplinks.factors(here())
    assert by == pytest.approx({"a": 1.0, "b": (1 / 17 / 3) / (16 / 17 / 4)})
    weights = weights_of(here().servers, {}, by)
    assert weights["s0"] == 1.0
    assert weights["s6"] == pytest.approx(1 / 12)
    assert min(weights_of(here().servers, {}, {"b": 1e-9}).values()) == 1 / 16


def test_what_is_said_names_the_rack_and_what_it_gains() -> None:
    uplinks = Uplinks({"b": 100.0})
    uplinks.factors(here())
    assert uplinks.said(here(), aggregates=True) == [
        "rack b has an uplink of 100 Mbit/s: its servers get 6% of the bytes (by their own links it would be 43%); the "
        "fullest link takes 1.9 times less"
    ]


def test_an_aggregator_is_advised_where_workers_share_an_uplink() -> None:
    uplinks = Uplinks({"b": 100.0})
    uplinks.factors(here(inside=4))
    said = uplinks.said(here(inside=4), aggregates=True)
    assert said == [
        "rack b has an uplink of 100 Mbit/s for 4 workers: with an aggregator in it the fullest link takes 3.4 times "
        "less (--aggregators)"
    ]
    assert uplinks.said(here(inside=4), aggregates=False) == []


def test_without_uplinks_or_links_that_were_told_everything_is_as_ever() -> None:
    assert Uplinks().factors(here()) == {}
    assert Uplinks({"b": 100.0}).factors(here(mbit=0.0)) == {}
    assert mbit_of(here(mbit=0.0).servers, {}) == {}
    assert Uplinks({"b": 1e6}).factors(here()) == {}


def test_workers_who_come_move_shards_only_after_a_while_and_ever_more_rarely() -> None:
    uplinks = Uplinks({"b": 100.0}, settle_s=10.0, rest_s=30.0)
    few, many = here(1, 4), here(5, 1)
    before = dict(uplinks.factors(few))
    assert uplinks.look(few, 100.0) == ""
    assert uplinks.look(many, 101.0) == ""
    assert uplinks.look(many, 105.0) == ""
    assert uplinks.factors(many) == before
    assert uplinks.look(few, 106.0) == ""
    assert uplinks.look(many, 107.0) == ""  # it was not so all the time
    assert uplinks.look(many, 117.0).startswith("shards move: workers have come or gone")
    assert uplinks.factors(many) != before
    assert uplinks.look(few, 118.0) == ""
    assert uplinks.look(few, 146.0) == ""
    assert uplinks.look(few, 147.0) == ""
    assert uplinks.look(few, 157.0) != ""
    assert uplinks.rest_s == 120.0


def test_a_server_that_comes_is_decided_for_at_once() -> None:
    uplinks = Uplinks({"b": 100.0})
    before = dict(uplinks.factors(here(1, 4)))
    assert uplinks.factors(here(5, 1)) == before
    assert uplinks.factors(here(5, 1, incarnation=2)) != before
