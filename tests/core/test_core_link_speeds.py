"""What members say of the links of servers becomes speeds; a few who lie change nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.placing.links import LinkSpeeds, settled
from rallypoint.core.plan.topology import LEAST, MOST, gain, weights_of
from rallypoint.core.view import Member

SERVERS = ("s0", "s1", "s2", "s3")
WORKERS = ("w0", "w1", "w2")
Said = dict[str, tuple[float, float]]


def said(speeds: dict[str, float], busy: float = 0.5) -> Said:
    """What a worker says that sent for that part of the time on each link."""
    return {server: (speed * busy * 1e6, busy) for server, speed in speeds.items()}


def after(beats: int, by: dict[str, Said]) -> LinkSpeeds:
    links = LinkSpeeds()
    for _ in range(beats):
        for member, paced in by.items():
            links.heard(member, paced)
    return links


UNEVEN = dict.fromkeys(SERVERS, 1.0) | {"s3": 0.5}


def test_a_server_that_takes_half_has_half_the_speed_however_busy_its_link_is() -> None:
    mixed = said(UNEVEN) | {"s3": said({"s3": 0.5}, busy=1.0)["s3"]}
    links = after(5, dict.fromkeys(WORKERS, mixed))
    assert links.speeds(SERVERS) == pytest.approx(UNEVEN)
    assert links.busiest(SERVERS) == pytest.approx(1.0)


def test_a_worker_whose_own_link_is_slow_says_nothing_of_servers() -> None:
    slow = {server: (rate / 10, busy) for server, (rate, busy) in said(UNEVEN).items()}
    assert after(5, {"w0": said(UNEVEN), "w1": slow}).speeds(SERVERS) == pytest.approx(UNEVEN)


def test_nothing_is_known_after_a_few_beats_or_of_links_that_carry_nothing() -> None:
    assert after(3, dict.fromkeys(WORKERS, said(UNEVEN))).speeds(SERVERS) == {}
    assert after(9, dict.fromkeys(WORKERS, said(UNEVEN, busy=0.005))).speeds(SERVERS) == {}
    assert after(9, dict.fromkeys(WORKERS, said({"s0": 1.0}))).speeds(SERVERS) == {}  # nothing to compare it with
    assert after(9, {}).busiest(SERVERS) == 0.0


def test_what_was_said_before_a_move_is_forgotten() -> None:
    links = after(9, dict.fromkeys(WORKERS, said(UNEVEN)))
    links.clear()
    assert links.speeds(SERVERS) == {}


def test_a_link_that_changes_is_seen_within_some_beats() -> None:
    links = after(20, dict.fromkeys(WORKERS, said(dict.fromkeys(SERVERS, 1.0))))
    for _ in range(8):
        for worker in WORKERS:
            links.heard(worker, said(UNEVEN))
    assert links.speeds(SERVERS)["s3"] == pytest.approx(0.5, rel=0.2)


def test_beats_without_traffic_between_two_steps_change_no_speed() -> None:
    links = LinkSpeeds()
    for beat in range(20):
        for worker in WORKERS:
            links.heard(worker, said(UNEVEN) if beat % 4 == 0 else {})
    assert links.speeds(SERVERS) == pytest.approx(UNEVEN)
    assert links.busiest(SERVERS) < 0.2


def test_one_worker_of_three_cannot_make_a_server_look_slow_or_fast() -> None:
    for lie in ({"s0": 1e-9, "s3": 1e9}, {"s0": 1e9, "s1": 1e-9}):
        honest = dict.fromkeys(("w0", "w1"), said(UNEVEN))
        assert after(5, {**honest, "w2": said({**UNEVEN, **lie})}).speeds(SERVERS) == pytest.approx(UNEVEN)


def test_a_server_can_make_only_itself_slower() -> None:
    honest = dict.fromkeys(WORKERS, said(UNEVEN))
    own = {server: said({server: UNEVEN[server]}) for server in SERVERS}
    assert after(5, {**honest, **own}).speeds(SERVERS) == pytest.approx(UNEVEN)
    boasts = own | {"s3": said({"s3": 1e9})}
    assert after(5, {**honest, **boasts}).speeds(SERVERS)["s3"] == pytest.approx(0.5)
    of_others = own | {"s0": said({"s0": 1.0, "s1": 1e-9, "s2": 1e-9})}
    assert after(5, {**honest, **of_others}).speeds(SERVERS) == pytest.approx(UNEVEN)
    modest = own | {"s1": said({"s1": 0.25})}
    assert after(5, {**honest, **modest}).speeds(SERVERS)["s1"] == pytest.approx(0.25)


NONSENSE = st.tuples(st.floats(), st.floats())


@given(st.lists(st.dictionaries(st.sampled_from(SERVERS), NONSENSE), max_size=8), st.integers(1, 3))
def test_whatever_is_said_speeds_are_finite_and_within_their_limits(beats: list[Said], workers: int) -> None:
    links = LinkSpeeds()
    for paced in beats * 3:
        for worker in WORKERS[:workers]:
            links.heard(worker, paced)
    assert all(LEAST <= speed <= MOST for speed in links.speeds(SERVERS).values())
    assert 0.0 <= links.busiest(SERVERS) <= 1.0


def test_who_is_gone_is_forgotten() -> None:
    links = after(5, {"w0": said(UNEVEN), "w1": said(dict.fromkeys(SERVERS, 1.0))})
    links.forget("w1")
    assert links.speeds(SERVERS) == pytest.approx(UNEVEN)
    links.forget("s3")
    assert set(links.speeds(SERVERS)) == {"s0", "s1", "s2"}


def test_speeds_near_the_median_one_are_like_it() -> None:
    assert settled({"a": 0.95, "b": 1.08, "c": 0.5043, "d": 1.0}) == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 1.0}


# ---- weights ----


def servers(**mbit: float) -> dict[str, Member]:
    return {id: Member(id, f"host of {id}", f"{id}:1", link_mbit=rate) for id, rate in mbit.items()}


def test_servers_of_which_nothing_is_known_are_alike() -> None:
    assert weights_of(servers(a=0, b=0), {}) == {}
    assert weights_of(servers(a=100, b=100), {}) == {}


def test_weights_are_what_was_told_and_what_was_measured_counts_before_it() -> None:
    told = servers(a=100, b=50, c=100, d=0)
    assert weights_of(told, {}) == {"a": 1.0, "b": 0.5, "c": 1.0, "d": 1.0}
    assert weights_of(told, {"c": 0.25}) == {"a": 1.0, "b": 0.5, "c": 0.25, "d": 1.0}


def test_servers_of_one_machine_share_its_link() -> None:
    both = {id: Member(id, "one", "10.0.0.1:1", link_mbit=100) for id in "ab"}
    assert weights_of({**both, "c": Member("c", "two", "10.0.0.2:1", link_mbit=100)}, {}) == {
        "a": 1.0, "b": 1.0, "c": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("lie", [1e9, math.inf, math.nan, -1.0])
def test_no_server_starves_the_others_by_what_it_says(lie: float) -> None:
    weights = weights_of(servers(a=100, b=100, c=100, liar=lie), {})
    assert all(math.isfinite(weight) and LEAST <= weight <= MOST for weight in weights.values())
    assert weights_of(servers(a=100, b=100, liar=1e9), {})["liar"] == MOST


def test_the_gain_is_what_the_fullest_link_takes_too_long() -> None:
    assert gain(dict.fromkeys("abcd", 25), {"a": 1, "b": 1, "c": 1, "d": 0.5}) == pytest.approx(1.75)
    assert gain({"a": 20, "b": 10}, {"a": 1, "b": 0.5}) == pytest.approx(1.0)
    assert gain({"a": 0, "b": 0}, {"a": 1, "b": 0.5}) == 1.0


def test_figures_that_all_but_vanish_and_names_without_end_cost_the_coordinator_nothing() -> None:
    least, most = (5e-324, 1.0), (1e15, 1.0)
    links = after(5, {"w0": {"s0": least, "s1": most}, "w1": {"s2": least, "s1": most}})
    assert links.speeds(SERVERS) == {}
    for beat in range(5):
        links.heard("w0", {f"{beat} {number}": most for number in range(1000)})
    assert sum(map(len, links._said.values())) <= 1002
    tiny = {id: Member(id, "h", "10.0.0.1:1", 1, link_mbit=5e-324) for id in SERVERS}
    assert weights_of(tiny, {}) == {}
