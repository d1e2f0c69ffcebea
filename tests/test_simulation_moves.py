"""Members that come while all is well cost no work: nothing is computed twice."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing.handover import Handover
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan
from rallypoint.testing.simulation.run import Result, play

SEEDS = range(8)
JOBS = [
    SimulatedJob(shards=12, replicas=4, steps=40, clip=None, compute_s=0.2),
    SimulatedJob(shards=12, replicas=4, steps=40, clip=1.0, compute_s=0.2),
]


def joined(seed: int, job: SimulatedJob, role: str, *, replication: int) -> Result:
    """A member of that role joins in the midst of the job; nothing else happens."""
    at = 1.5 + 0.13 * seed
    terms = Terms(workers_start=2, workers_max=3, servers=2, replication=replication, snapshots=True)
    return play(Plan(seed, job, terms, 2, 2, (Fault(at, "join", role),)))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=["plain", "clip"])
@pytest.mark.parametrize("replication", [1, 2])
def test_a_server_that_joins_makes_no_replica_be_computed_again(job: SimulatedJob, replication: int) -> None:
    assert [joined(seed, job, "server", replication=replication).recomputed for seed in SEEDS] == [0] * len(SEEDS)


@pytest.mark.slow
def test_without_a_step_between_them_some_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: Any = lambda self, *about: None  # noqa: E731
    monkeypatch.setattr(Handover, "before", at_once)
    assert sum(joined(seed, JOBS[0], "server", replication=2).recomputed for seed in SEEDS) > 0


@pytest.mark.slow
def test_a_worker_that_joins_makes_no_replica_be_computed_again() -> None:
    job = SimulatedJob(shards=12, replicas=6, steps=40, clip=None, compute_s=0.2)
    results = [joined(seed, job, "worker", replication=2) for seed in SEEDS]
    assert [result.recomputed for result in results] == [0] * len(SEEDS)
    assert all(any(worker == "worker3" for worker, _, _ in result.outcome.computed) for result in results)
