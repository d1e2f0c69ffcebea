"""Links of servers get faster and slower, and shards move because of it, whatever else happens: the same bytes."""

from __future__ import annotations

import pytest

from rallypoint.core.placing import view_change
from rallypoint.core.policy import AllReduce, Async, LocalSteps, Sync
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy  # fmt: skip
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure

KINDS = (
    Sync(), Sync(), Sync(), *map(Play, ("paused", "stopped", "decided", "audited", "codec-state", "tables")),
    AllReduce(), Async(), LocalSteps(2, fragments=2),
)  # fmt: skip


@pytest.mark.some("0", "1", "2", "8", "11")
@pytest.mark.parametrize("seed", range(28))
def test_a_job_whose_servers_links_change_ends_with_the_same_bytes(seed: int) -> None:
    simulate(seed, Play("uneven", KINDS[seed % len(KINDS)]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_many_jobs_whose_servers_links_change(seed: int) -> None:
    simulate(seed, Play("uneven", KINDS[seed % len(KINDS)]))


@pytest.mark.slow
def test_shards_do_move_in_the_middle_of_jobs() -> None:
    """Else the tests above would be as well if the coordinator believed nothing."""
    results = [simulate(seed, Play("uneven")) for seed in range(8)]
    moves = [sum("shards move" in said for said in result.outcome.said) for result in results]
    assert sum(moves) >= 8
    assert max(moves) >= 2


def test_plans_are_played_again_as_what_they_are() -> None:
    for word in ("uneven", "uneven:paused", "uneven:paused:decided"):
        played = parse_policy(word)
        assert make_plan(3, played).played == played


@pytest.mark.slow
def test_a_shard_that_moves_before_its_new_home_has_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_change, "all", lambda _: True, raising=False)
    first_failure(Play("uneven"), range(60))
