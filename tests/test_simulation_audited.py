"""Audits on a simulated cluster, whatever happens: the same bytes, nobody blamed who is right, who is wrong found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.shard.audited import Opinions
from rallypoint.core.shard.events import Contribute
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.aligned import AuditDuties
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import simulate
from support.failing import first_failure


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_killed_the_bytes_are_the_same_and_nobody_is_blamed(seed: int) -> None:
    simulate(seed, Play("audited"))


@pytest.mark.some("0", "1134", "3")
@pytest.mark.parametrize("seed", [*range(5), 1108, 1134, 2099])
def test_a_worker_that_computes_wrong_changes_no_byte(seed: int) -> None:
    simulate(seed, Play("audited:wrong"))


@pytest.mark.slow
@pytest.mark.parametrize("played", [Play("audited"), Play("audited:wrong")])
def test_many_jobs_with_audits(played: Play) -> None:
    for seed in range(3000, 3010):
        simulate(seed, played)


def test_they_have_words() -> None:
    assert word_for(parse_policy("audited")) == "audited"
    assert word_for(parse_policy("audited:wrong")) == "audited:wrong"


def test_a_server_that_waits_for_no_second_opinion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def believes(self: Opinions, event: Contribute) -> tuple[bool, list[Any]]:
        return True, []

    monkeypatch.setattr(Opinions, "hear", believes)
    assert "other bytes" in first_failure(Play("audited:wrong"), range(10))


@pytest.mark.slow
def test_a_worker_that_is_left_alone_and_sends_nothing_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AuditDuties.plan

    def forgets_nothing(self: AuditDuties, view: Any, step: int, presum: Any) -> None:
        self._planned = (-1, ViewNumber(), False, frozenset())  # of no step
        plan(self, view, step, presum)

    monkeypatch.setattr(AuditDuties, "plan", forgets_nothing)
    first_failure(Play("audited"), range(60))


@pytest.mark.slow
def test_a_coordinator_whose_view_names_no_third_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    following = ViewSequence.following

    def names_nobody(self: ViewSequence, *args: Any, **named: Any) -> Any:
        orders, self.orders = self.orders, msgspec.structs.replace(self.orders, disputes=())
        view = following(self, *args, **named)
        self.orders = orders
        return view

    monkeypatch.setattr(ViewSequence, "following", names_nobody)
    first_failure(Play("audited:wrong"), range(10))
