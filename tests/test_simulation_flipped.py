"""Bits that flip in servers' memory on a simulated cluster, whatever else happens: the same bytes."""

from __future__ import annotations

import pytest

from rallypoint.core.audits.rest import AtRest
from rallypoint.core.cluster.auditing import servers
from rallypoint.testing.simulation.flips.job import FlippedJob
from rallypoint.testing.simulation.flips.server import AuditedServer
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.policies import Flipped, parse_policy, word_for
from rallypoint.testing.simulation.run import first_failure, simulate


@pytest.mark.parametrize("seed", range(8))
def test_whatever_flips_the_bytes_are_the_same(seed: int) -> None:
    simulate(seed, Flipped())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_many_jobs_in_whose_servers_bits_flip(seed: int) -> None:
    simulate(seed, Flipped())


def test_plans_audit_each_version_or_some_and_have_a_word() -> None:
    jobs = [make_plan(seed, Flipped()).job for seed in range(12)]
    every = {job.checks for job in jobs if isinstance(job, FlippedJob)}
    assert 1 in every
    assert max(every) > 1
    assert word_for(parse_policy("flipped")) == "flipped"


def test_a_server_that_does_not_look_at_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuditedServer, "_check", lambda self, index: None)
    first_failure(Flipped(), range(20))


@pytest.mark.slow
def test_a_server_that_keeps_no_digest_of_what_it_loads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtRest, "audited", lambda self, shard, version: False)
    first_failure(Flipped(), range(20))


def test_a_coordinator_that_believes_the_primary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did before there were audits: where only some versions are audited, the wrong one may stay."""
    monkeypatch.setattr(
        servers, "disputed", lambda event, course, left, recover: servers.disproved(event, course, left)
    )
    monkeypatch.setattr("rallypoint.core.cluster.auditing.verdicts.disputed", servers.disputed)
    first_failure(Flipped(), range(0, 60, 3))
