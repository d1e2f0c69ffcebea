"""The simulation plays models that are updated alternately: each shard counts its own model's updates."""

from __future__ import annotations

import pytest

from rallypoint.core.shard import events, server
from rallypoint.core.shard.clip import Verdict
from rallypoint.testing.simulation.failures.played import played_by
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Alternating, parse_policy, word_for
from rallypoint.testing.simulation.run import first_failure, simulate
from rallypoint.worker.exchange.rows.pull import Pull

FIXED = range(3, 10)
ENOUGH = range(40)  # seeds within which a planted bug has to be found


def test_whatever_fails_the_bytes_are_those_of_an_undisturbed_run() -> None:
    plans = [make_plan(seed, Alternating()) for seed in FIXED]
    assert any(plan.faults for plan in plans)
    assert {plan.job.skip for plan in plans} == {plan.job.clip is None for plan in plans} == {True, False}
    for seed in FIXED:
        simulate(seed, Alternating())


def test_every_model_is_updated_and_none_at_each_step() -> None:
    for seed in FIXED:
        job = make_plan(seed, Alternating()).job
        updates = {job.cadence.updates(s) for s in range(job.shards) if s not in job.buffer_shards}
        assert min(updates) >= 1
        assert min(updates) < job.steps


@pytest.mark.slow
def test_a_server_that_takes_a_step_of_the_job_for_a_shard_s_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a decision is told to a shard under the job's number."""

    def under_the_job_s(index: int, verdict: Verdict, plan: server.Plan) -> events.Decide:
        return events.Decide(verdict.step, verdict.scale)

    monkeypatch.setattr(server, "_for_shard", under_the_job_s)
    assert first_failure(Alternating(), ENOUGH)


@pytest.mark.slow
def test_an_evaluator_that_asks_a_shard_for_the_job_s_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the version whose evaluation is leased is pulled under the job's number: it may never come."""
    monkeypatch.setattr(Pull, "version_of", lambda pull, shard: pull.version)
    assert first_failure(Alternating(), ENOUGH)


def test_its_word_is_understood() -> None:
    assert parse_policy("alternating") == Alternating() == played_by(make_plan(3, Alternating()))
    assert word_for(Alternating()) == "alternating"
