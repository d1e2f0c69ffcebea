"""A script that stops its job at some step, on a simulated cluster, whatever happens: the same bytes on all."""

from __future__ import annotations

import pytest

from rallypoint.core.policy import AllReduce, Sync
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate


@pytest.mark.some("1", "5", "8", "1?")
@pytest.mark.parametrize("seed", range(20))
def test_a_job_that_its_script_stops_ends_with_the_same_bytes(seed: int) -> None:
    simulate(seed, Play("stopped", AllReduce() if seed % 4 == 3 else Sync()))


def test_a_stop_that_the_journal_had_no_room_for_is_known_from_the_snapshot() -> None:
    simulate(3332, Play("stopped", AllReduce()))


def test_a_server_that_may_go_after_one_loss_stays_when_another_is_lost_at_the_same_moment() -> None:
    simulate(3255, Play("stopped"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_jobs_that_their_scripts_stop(seed: int) -> None:
    simulate(seed, Play("stopped", AllReduce() if seed % 4 == 3 else Sync()))


def test_plans_stop_in_both_ways_and_have_a_word() -> None:
    stops = [make_plan(seed, Play("stopped")).job.stop for seed in range(20)]
    assert {stop.leaves for stop in stops if stop is not None} == {True, False}
    assert all(parse_policy(word) == Play("stopped", sync) for word, sync in [
        ("stopped", Sync()), ("stopped:all-reduce", AllReduce()),
    ])  # fmt: skip
    assert word_for(Play("stopped")) == "stopped"
