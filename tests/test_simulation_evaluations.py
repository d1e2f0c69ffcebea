"""Evaluations on a simulated cluster, whatever happens to workers, servers and the coordinator: each has its result."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.view import View
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate
from rallypoint.testing.simulation.worker import SimulatedWorker
from support.failing import first_failure


@pytest.mark.some("0", "11", "14", "3", "6", "9")
@pytest.mark.parametrize("seed", range(16))
def test_each_version_that_is_due_has_its_result(seed: int) -> None:
    simulate(seed, Play("evaluating"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_many_jobs_that_evaluate(seed: int) -> None:
    simulate(seed, Play("evaluating"))


def test_plans_have_backup_tasks_and_aggregators_and_a_word() -> None:
    plans = [make_plan(seed, Play("evaluating")) for seed in range(8)]
    assert {plan.terms.backup_tasks for plan in plans} == {True, False}
    assert any(plan.aggregators for plan in plans)
    assert parse_policy("evaluating") == Play("evaluating")
    assert word_for(Play("evaluating")) == "evaluating"


@pytest.mark.slow
def test_a_server_that_does_not_keep_what_is_leased_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = ServerMachine.adopt

    def forgetful(self: ServerMachine, view: View) -> Any:
        effects = adopt(self, view)
        for index in self.held:
            self._machines[index].pinned = -1
        return effects

    monkeypatch.setattr(ServerMachine, "adopt", forgetful)
    monkeypatch.setattr(SimulatedWorker, "evaluate_s", 3.0)  # others train on meanwhile, and who evaluates is killed
    assert "have no result" in first_failure(Play("evaluating"), range(1139, 1169))
