"""Views and the deal: who computes which replica."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.view import Member, View, ViewNumber, deal_replicas

PURE = settings(derandomize=True, deadline=None, max_examples=80)


def _workers(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


_SPEEDS = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=8)


@PURE
@given(st.integers(0, 40), _SPEEDS)
def test_every_replica_is_dealt_to_exactly_one_worker_in_ascending_order(replicas: int, speeds: list[float]) -> None:
    workers = _workers(len(speeds))
    deal = deal_replicas(replicas, workers, dict(zip(workers, speeds, strict=True)))
    assert list(deal) == workers
    assert sorted(replica for hand in deal.values() for replica in hand) == list(range(replicas))
    assert all(list(hand) == sorted(hand) for hand in deal.values())


@PURE
@given(st.integers(0, 40), st.integers(1, 8), st.floats(0.01, 1000.0))
def test_equal_speeds_are_dealt_round_robin(replicas: int, count: int, speed: float) -> None:
    workers = _workers(count)
    expected = {worker: tuple(range(i, replicas, count)) for i, worker in enumerate(workers)}
    assert deal_replicas(replicas, workers) == expected
    assert deal_replicas(replicas, workers, dict.fromkeys(workers, speed)) == expected


@PURE
@given(st.integers(1, 60), _SPEEDS)
def test_no_other_deal_would_end_the_step_sooner(replicas: int, speeds: list[float]) -> None:
    workers = _workers(len(speeds))
    deal = deal_replicas(replicas, workers, dict(zip(workers, speeds, strict=True)))
    counts = [len(deal[worker]) for worker in workers]
    end = max(n / speed for n, speed in zip(counts, speeds, strict=True))
    for n, speed in zip(counts, speeds, strict=True):  # one more anywhere would not be quicker than the last to end
        assert (n + 1) / speed >= end * (1 - 1e-9)


def test_a_worker_three_times_as_fast_gets_three_times_as_many() -> None:
    deal = deal_replicas(16, ["slow", "fast"], {"slow": 1.0, "fast": 3.0})
    assert {worker: len(hand) for worker, hand in deal.items()} == {"slow": 4, "fast": 12}


def test_a_worker_of_unknown_speed_counts_as_one() -> None:
    assert deal_replicas(4, ["a", "b"], {"a": 1.0}) == {"a": (0, 2), "b": (1, 3)}


def test_workers_beyond_the_replicas_get_none() -> None:
    assert deal_replicas(2, _workers(4)) == {"w0": (0,), "w1": (1,), "w2": (), "w3": ()}


def test_without_a_worker_there_is_no_deal() -> None:
    with pytest.raises(ValueError, match="no worker"):
        deal_replicas(2, [])


@PURE
@given(*[st.integers(0, 3)] * 4)
def test_the_higher_epoch_wins_then_the_higher_count(e1: int, c1: int, e2: int, c2: int) -> None:
    assert (ViewNumber(e1, c1) < ViewNumber(e2, c2)) == ((e1, c1) < (e2, c2))


def _view() -> View:
    return View(
        number=ViewNumber(1, 2),
        workers=(Member("w0", "h"), Member("w1", "h")),
        servers=(Member("s0", "h", "h:1"), Member("s1", "h", "h:2")),
        deal={"w1": (1,), "w0": (0, 2)},
        primary={3: "s0", 0: "s1", 1: "s0"},
    )


def test_a_view_answers_who_leads_and_who_holds_what() -> None:
    view = _view()
    assert view.lead == "w0"
    assert (view.shards_of("s0"), view.shards_of("s1"), view.shards_of("s2")) == ([1, 3], [0], [])
    assert view.server("s1").address == "h:2"
    with pytest.raises(KeyError):
        view.server("w0")
    assert str(view.number) == "1.2"


def test_a_view_survives_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(_view()), type=View) == _view()
