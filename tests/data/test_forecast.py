"""The forecast of what a worker loads next."""

from __future__ import annotations

from itertools import islice

from rallypoint.config import JobConfig
from rallypoint.core.policy import LocalSteps
from rallypoint.data.order import Forecast, Place, places_after, places_from

SYNC = JobConfig(replicas=4, batch=4, steps=9)


def test_replicas_take_turns_within_a_step() -> None:
    assert list(islice(places_after((7, 2, 0), (2, 3), SYNC), 3)) == [(7, 3, 0), (8, 2, 0), (8, 3, 0)]
    assert list(places_after((8, 2, 0), (2, 3), SYNC)) == [(8, 3, 0)], "the job has nine steps"


def test_micro_batches_of_a_replica_come_before_the_next_replica() -> None:
    config = JobConfig(replicas=2, batch=4, accumulate=2, steps=9)
    assert list(islice(places_after((0, 0, 0), (0, 1), config), 4)) == [(0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)]


def test_a_replica_makes_all_steps_of_a_round_before_the_next() -> None:
    config = JobConfig(replicas=2, batch=4, steps=5, sync=LocalSteps(steps=3))
    expected = [(step, replica, 0) for steps in (range(3), range(3, 5)) for replica in (0, 1) for step in steps]
    for index, place in enumerate(expected):
        assert list(places_after(place, (0, 1), config)) == expected[index + 1 :]
    assert list(places_from(1, 0, (0, 1), config)) == expected[6:]


def test_a_replica_that_is_somebody_elses_now_is_followed_by_the_workers_own() -> None:
    assert list(islice(places_after((4, 1, 0), (0, 3), SYNC), 3)) == [(4, 3, 0), (5, 0, 0), (5, 3, 0)]
    assert list(places_after((4, 1, 0), (), SYNC)) == []


def test_a_forecast_gives_back_what_is_put_in_front() -> None:
    places: list[Place] = [(0, 0, 0), (1, 0, 0)]
    forecast = Forecast(places)
    assert not forecast.ended
    assert forecast.pop() == places[0]
    assert not forecast.ended
    forecast.again(places[:1])
    assert [forecast.pop(), forecast.pop(), forecast.pop()] == [*places, None]
    assert forecast.ended
