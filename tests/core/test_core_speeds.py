"""How fast workers are, and who is late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core.placing.speeds import Speeds
from rallypoint.core.view import assign_replicas


def _speeds(**seconds: float) -> Speeds:
    """Every worker has computed four replicas in so many seconds each."""
    speeds = Speeds()
    for worker, each in seconds.items():
        for step in range(4):
            speeds.computed(worker, step, 0, each, now=float(step))
    return speeds


def test_a_rate_is_replicas_per_second_by_the_median_of_the_last_ones() -> None:
    speeds = _speeds(a=0.5)
    speeds.computed("a", 9, 0, 1000.0, now=9.0)  # one hiccup is no speed
    assert speeds.rates(["a"]) == {"a": 2.0}
    for step in range(40):
        speeds.computed("a", step, 0, 0.25, now=9.0)
    assert speeds.rates(["a"]) == {"a": 4.0}


def test_who_is_not_known_well_counts_as_the_median_of_the_others() -> None:
    speeds = _speeds(a=1.0, b=0.5, c=0.25)
    speeds.computed("d", 0, 0, 9.0, now=0.0)
    assert speeds.rates(["a", "b", "c", "d", "e"]) == {"a": 1.0, "b": 2.0, "c": 4.0, "d": 2.0, "e": 2.0}
    assert Speeds().rates(["a", "b"]) == {"a": 1.0, "b": 1.0}


def test_a_replica_that_took_no_time_is_no_division_by_zero() -> None:
    assert _speeds(a=0.0).rates(["a"])["a"] > 0


def test_whoever_is_gone_is_forgotten() -> None:
    speeds = _speeds(a=1.0, b=0.5)
    speeds.forget("a")
    speeds.forget("never seen")
    assert speeds.rates(["a", "b"]) == {"a": 2.0, "b": 2.0}
    assert not speeds.known({"a": (0,)})
    assert speeds.known({"b": (1,)})


@given(st.integers(1, 30), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6))
def test_the_makespan_is_when_the_last_worker_is_through(replicas: int, rates: list[float]) -> None:
    known = {f"w{i}": rate for i, rate in enumerate(rates)}
    assigned = assign_replicas(replicas, list(known), known)
    makespan = Speeds().makespan(assigned, known)
    assert makespan == pytest.approx(max(len(assigned[w]) / rate for w, rate in known.items()))
    one_more = {w: (*own, replicas) for w, own in assigned.items()}
    assert Speeds().makespan(one_more, known) > makespan
    assert Speeds().makespan({}, known) == 0.0


def test_enough_is_known_when_it_is_of_everybody_who_computes() -> None:
    speeds = _speeds(a=1.0, b=1.0)
    assert speeds.known({"a": (0,), "b": (1,), "idle": ()})
    assert not speeds.known({"a": (0,), "b": (1,), "c": (2,)})


def test_what_is_known_of_a_worker_that_computes_nothing_is_known_no_longer_after_a_while() -> None:
    speeds = _speeds(a=1.0, b=0.5)
    assigned = {"a": (), "b": (0, 1)}
    speeds.fade(assigned, now=60.0)
    assert speeds.rates(["a", "b"]) == {"a": 1.0, "b": 2.0}
    speeds.fade(assigned, now=70.0)
    assert speeds.rates(["a", "b"]) == {"a": 2.0, "b": 2.0}


_HANDS = {"fast": (0,), "slow": (1,)}


def test_a_straggler_is_late_when_it_has_said_nothing_for_twice_the_usual_time_of_a_replica() -> None:
    speeds = _speeds(fast=1.0, slow=1.0)  # both last reported at 3.0
    speeds.computed("fast", 4, 0, 1.0, now=4.0)
    assert speeds.straggler(_HANDS, 4, ["fast", "slow"], now=5.0) is None
    assert speeds.straggler(_HANDS, 4, ["fast", "slow"], now=5.1) == ("fast", 4, 1)
    assert speeds.straggler(_HANDS, 4, ["fast", "slow"], now=5.2) is None  # it has been asked for


def test_after_a_roll_back_replicas_may_be_asked_for_again() -> None:
    speeds = _speeds(fast=1.0, slow=1.0)
    speeds.computed("fast", 4, 0, 1.0, now=4.0)
    assert speeds.straggler(_HANDS, 4, ["fast", "slow"], now=9.0) == ("fast", 4, 1)
    speeds.restart()
    speeds.computed("fast", 4, 0, 1.0, now=9.0)
    assert speeds.straggler(_HANDS, 4, ["fast", "slow"], now=9.0) == ("fast", 4, 1)


def test_what_a_straggler_has_computed_it_may_keep_unsent_so_an_idle_worker_computes_it_too() -> None:
    speeds = _speeds(fast=1.0, slow=1.0)
    hands = {"fast": (2, 3), "slow": (0, 1)}
    for worker, replica in (("fast", 2), ("fast", 3), ("slow", 0)):
        speeds.computed(worker, 4, replica, 1.0, now=5.0)
    asked = [speeds.straggler(hands, 4, ["fast", "slow"], now=60.0) for _ in range(3)]
    assert asked == [("fast", 4, 1), ("fast", 4, 0), None]
