"""What is decided from evaluations on a simulated cluster, whatever happens: the same end, bytes and best version.

The undisturbed computation decides too, with the rates that follow from it: so every byte depends on every decision.
"""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.core.cluster import evaluations
from rallypoint.core.worker.ending import LeasedVersion
from rallypoint.server import reducer
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure


@pytest.mark.some("0", "3", "6", "9")
@pytest.mark.parametrize("seed", [*range(12), 165])
def test_whatever_is_killed_the_same_is_decided(seed: int) -> None:
    simulate(seed, Play("decided"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_many_jobs_that_decide(seed: int) -> None:
    simulate(seed, Play("decided"))


def test_plans_have_all_rules_and_a_word() -> None:
    jobs = [make_plan(seed, Play("decided")).job for seed in range(16)]
    assert {bool(job.rules.stops) for job in jobs} == {True, False}
    assert {job.rules.best is None for job in jobs} == {True, False}
    assert any(job.end < job.steps for job in jobs), "some jobs end early"
    assert any(job.trajectory and job.undisturbed_decisions.decided.reductions for job in jobs)
    assert word_for(parse_policy("decided")) == "decided"


@pytest.mark.slow
def test_a_worker_that_does_not_wait_for_a_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeasedVersion, "holds_back", lambda self, view, action: False)
    first_failure(Play("decided"), range(20))


def test_a_server_that_does_not_hear_of_a_reduction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "reductions_at", lambda reductions, step: 0)
    assert "other bytes" in first_failure(Play("decided"), range(10))


@pytest.mark.slow
def test_a_coordinator_that_forgets_at_a_roll_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: evaluations.EvaluationLedger, decided: Any) -> None:
        self.decided = evaluations.Decided(version=decided.version)

    monkeypatch.setattr(evaluations.EvaluationLedger, "go_back_to", forgets)
    first_failure(Play("decided"), range(60))
