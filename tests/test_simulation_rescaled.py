"""An operator changes a simulated job's learning rate, whatever happens: the bytes of an undisturbed job whose rate
changes at the same versions."""

from __future__ import annotations

import pytest

from rallypoint.core.policy import Sync
from rallypoint.core.shard.ordering.hold import RateHold
from rallypoint.testing.simulation import server
from rallypoint.testing.simulation.failures.played import played_by
from rallypoint.testing.simulation.operating.plans import RESCALE
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Audited, Deciding, Paused, Rescaled, Scaled, Stopped, parse_policy
from rallypoint.testing.simulation.run import first_failure, simulate

KINDS = (Sync(), Sync(), Sync(), Paused(), Stopped(), Scaled(), Deciding(), Audited())


@pytest.mark.some("0", "3", "6", "9")
@pytest.mark.parametrize("seed", range(16))
def test_a_job_whose_rate_changes_ends_with_the_same_bytes(seed: int) -> None:
    simulate(seed, Rescaled(KINDS[seed % len(KINDS)]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1080))
def test_many_jobs_whose_rate_changes(seed: int) -> None:
    simulate(seed, Rescaled(KINDS[seed % len(KINDS)]))


def test_orders_count_in_the_middle_of_jobs_and_some_of_these_jobs_go_back() -> None:
    """Else the tests above would be as well if the coordinator refused each order."""
    results = [simulate(seed, Rescaled()) for seed in range(8)]
    scales = [scale for result in results for scale in result.plan.job.scales or ()]
    assert len(scales) >= 8
    assert {scale.version for scale in scales} - {0, 1}
    assert any("going on from snapshot" in said for result in results for said in result.outcome.said)


def test_plans_are_played_again_as_what_they_are() -> None:
    for word in ("rescaled", "rescaled:decided", "rescaled:paused"):
        played = parse_policy(word)
        plan = make_plan(3, played)
        assert played_by(plan) == played
        assert any(fault.kind == RESCALE for fault in plan.faults)


@pytest.mark.slow
def test_a_server_that_does_not_hear_of_the_rate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "rate_in", lambda view, step: 0)
    assert "other bytes" in first_failure(Rescaled(), range(10))


@pytest.mark.slow
def test_a_server_that_holds_nothing_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RateHold, "_at", lambda self, machine: 1 << 62)
    assert "other bytes" in first_failure(Rescaled(), range(20, 40))


@pytest.mark.slow
def test_a_server_that_says_a_version_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from rallypoint.core.shard.ordering import hold

    monkeypatch.setattr(hold, "_begun", lambda machine: max(0, machine.version - 1))
    first_failure(Rescaled(), range(40))
