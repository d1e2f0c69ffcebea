"""An operator pauses a simulated job and lets it go on, whatever happens: the same bytes, and it ends."""

from __future__ import annotations

import pytest

from rallypoint.core.policy import Async, Sync
from rallypoint.testing.simulation.operating.pauses import PAUSE
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate

KINDS = (Sync(), Sync(), Sync(), Async(), Play("stopped"), Play("decided"))


@pytest.mark.some("0", "3", "6", "9")
@pytest.mark.parametrize("seed", range(10))
def test_a_job_that_is_paused_ends_with_the_same_bytes(seed: int) -> None:
    simulate(seed, Play("paused", KINDS[seed % len(KINDS)]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_many_jobs_that_are_paused(seed: int) -> None:
    simulate(seed, Play("paused", KINDS[seed % len(KINDS)]))


@pytest.mark.slow
def test_some_of_these_plans_roll_back_in_a_pause_which_stays() -> None:
    """Else the tests above would be as well if the coordinator refused each pause, or forgot it."""
    results = [simulate(seed, Play("paused")) for seed in range(4)]
    assert sum(bool(result.outcome.paused) for result in results) >= 3
    generations = [len({generation for generation, _ in result.outcome.paused}) for result in results]
    assert max(generations) > 1


def test_plans_have_a_word_and_are_played_again_as_what_they_are() -> None:
    for word in ("paused", "paused:async", "paused:decided", "paused:stopped", "paused:fragments:2"):
        played = parse_policy(word)
        assert word_for(played) == word
        plan = make_plan(3, played)
        assert plan.played == played
        assert any(fault.kind == PAUSE for fault in plan.faults)
    with pytest.raises(ValueError, match="no policy"):
        parse_policy("paused:paused")
