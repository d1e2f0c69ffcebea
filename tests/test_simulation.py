"""The whole cluster on its real machines, in one process, under seeded faults: the same bytes, or a line that replays.

RALLYPOINT_SIMULATION_SEEDS sets how many fresh seeds are played; `python -m rallypoint.testing.simulation` plays more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rallypoint.core import cluster
from rallypoint.core.cluster import Terms
from rallypoint.core.policy import Ledger, Sync, Verdict
from rallypoint.core.shard import Effect, Publish, ShardMachine
from rallypoint.core.view import deal_replicas
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.run import Fault, Plan, Result, SimulationFailed, make_plan, play, simulate
from rallypoint.testing.simulation.worker import SimulatedWorker

FIXED = range(60)
ENOUGH = range(300)  # seeds within which a planted bug has to be found


def _failures(seeds: Iterable[int]) -> list[str]:
    failures = []
    for seed in seeds:
        try:
            simulate(seed)
        except SimulationFailed as failed:
            failures.append(str(failed))
    return failures


def _fresh() -> range:
    count = int(os.environ.get("RALLYPOINT_SIMULATION_SEEDS", "200"))
    first = int(time.time()) % 1_000_000 * 1000
    return range(first, first + count)


@pytest.mark.parametrize("seeds", [FIXED, _fresh()], ids=["fixed", "fresh"])
def test_whatever_fails_the_run_ends_with_the_bytes_of_an_undisturbed_one(seeds: range) -> None:
    failures = _failures(seeds)
    if failures:
        pytest.fail("\n\n".join([f"{len(failures)} of {len(seeds)} seeds failed", *failures[:3]]), pytrace=False)


@pytest.mark.parametrize("seed", [3, 17, 40])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, again = simulate(seed), simulate(seed)
    assert again == first
    assert first.seconds > 0
    assert simulate(seed + 1).outcome.computed != first.outcome.computed


def test_the_fixed_seeds_play_every_kind_of_fault() -> None:
    played = {fault.kind for seed in FIXED for fault in make_plan(seed).faults}
    assert played >= {
        "crash", "pause", "long pause", "drop", "partition", "join", "leave", "disk full", "torn write", "everything",
        "half said",
    }  # fmt: skip
    plans = [make_plan(seed) for seed in FIXED]
    assert {plan.job.buffers for plan in plans} == {0, 1}
    assert {plan.job.skip for plan in plans} == {True, False}
    assert {plan.terms.replication for plan in plans} == {1, 2}
    assert {plan.terms.workers_min for plan in plans} == {1, 2}


def test_a_failed_run_says_how_to_replay_it_and_what_had_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedJob, "undisturbed", lambda self: [0] * self.shards)
    seed = next(seed for seed in FIXED if make_plan(seed).faults)
    with pytest.raises(SimulationFailed, match=f"python -m rallypoint.testing.simulation --seed {seed}\nother bytes"):
        simulate(seed)


# ---- the simulation finds what it is made to find ----


def _a_repeat_is_added(self: Sync, ledger: Ledger, step: int, replica: int) -> Verdict:
    """I2 broken: whether a contribution has come already is not asked."""
    if replica >= ledger.expected or step > ledger.version:
        return Verdict.REJECT
    if step < ledger.version:
        return Verdict.DROP
    return Verdict.ADD if replica <= ledger.added else Verdict.HOLD


def _whatever_comes_is_added(self: Sync, ledger: Ledger, step: int, replica: int) -> Verdict:
    """I3 broken: the sum is in the order of arrival."""
    if replica >= ledger.expected or step > ledger.version:
        return Verdict.REJECT
    return Verdict.DROP if step < ledger.version else Verdict.ADD


def _published_at_once(self: ShardMachine) -> list[Effect]:
    """I4 broken: the backup is not waited for."""
    if self.version == self.published:
        return []
    self.published = self.version
    return [Publish(self.version)]


def _one_replica_too_few(replicas: int, *args: Any) -> dict[str, tuple[int, ...]]:
    """I1 broken."""
    return deal_replicas(replicas - 1, *args)


def _one_replica_too_many(replicas: int, *args: Any) -> dict[str, tuple[int, ...]]:
    """I1 broken."""
    return deal_replicas(replicas + 1, *args)


@pytest.mark.parametrize(("owner", "name", "bug"), [
    (Sync, "admit", _a_repeat_is_added),
    (Sync, "admit", _whatever_comes_is_added),
    (ShardMachine, "_publish", _published_at_once),
    (cluster, "deal_replicas", _one_replica_too_few),
    (cluster, "deal_replicas", _one_replica_too_many),
])  # fmt: skip
def test_a_bug_planted_on_purpose_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, bug)
    found = None
    for seed in ENOUGH:
        try:
            simulate(seed)
        except SimulationFailed as failed:
            found = seed
            assert str(failed).startswith(f"python -m rallypoint.testing.simulation --seed {seed}\n")  # noqa: PT017
            break
    assert found is not None


# ---- plans for one thing each ----


def _plan(seed: int, job: SimulatedJob, workers: int, servers: int, *faults: Fault, **terms: Any) -> Plan:
    usual = {"workers_start": workers, "workers_max": workers, "servers": servers, "snapshots": True}
    return Plan(seed, job, Terms(**{**usual, **terms}), workers, servers, faults)


def _play_all(plans: Iterable[Plan]) -> list[Result]:
    return [play(plan) for plan in plans]


def _computed(result: Result) -> list[tuple[int, int]]:
    return sorted((step, replica) for _, step, replica in result.outcome.computed)


_DECISIONS = [SimulatedJob(clip=None), SimulatedJob(clip=0.7), SimulatedJob(clip=0.7, skip=True)]


@pytest.mark.parametrize("job", _DECISIONS, ids=["plain", "clip", "skip"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (4, 2)])
def test_when_nothing_fails_every_replica_of_every_step_is_computed_once(
    job: SimulatedJob, workers: int, servers: int
) -> None:
    for replication in (1, 2):
        for result in _play_all(_plan(s, job, workers, servers, replication=replication) for s in range(3)):
            assert _computed(result) == [(step, r) for step in range(job.steps) for r in range(job.replicas)]
            assert result.recomputed == 0


def test_a_job_without_snapshots_ends_too() -> None:
    results = _play_all(_plan(seed, SimulatedJob(), 2, 2, snapshots=False, replication=2) for seed in range(5))
    assert [result.recomputed for result in results] == [0] * 5


@pytest.mark.parametrize("buffers", [0, 1])
def test_workers_without_replicas_end_with_the_last_version(buffers: int) -> None:
    job = SimulatedJob(replicas=2, buffers=buffers, steps=6)
    for result in _play_all(_plan(seed, job, 5, 2) for seed in range(8)):
        assert len({worker for worker, _, _ in result.outcome.computed}) <= 2
        assert result.recomputed == 0


def test_more_workers_than_replicas_take_over_from_those_that_die() -> None:
    job = SimulatedJob(replicas=2, steps=10)
    crashes = tuple(Fault(0.5 * at, "crash", "worker", 0.5) for at in range(1, 8))
    results = _play_all(_plan(seed, job, 5, 2, *crashes, heartbeat=2.0) for seed in range(8))
    assert any(len({worker for worker, _, _ in result.outcome.computed}) > 2 for result in results)


def test_a_replica_computed_by_two_workers_counts_once() -> None:
    job = SimulatedJob(replicas=4, steps=8)
    pauses = tuple(Fault(1.0 + at, "pause", "worker", 1.5) for at in range(6))
    results = _play_all(_plan(seed, job, 4, 2, *pauses, backup_tasks=True, heartbeat=20.0) for seed in range(12))
    assert sum(result.recomputed for result in results) > 0  # else this has proven nothing


@pytest.mark.parametrize(("job", "ahead"), [
    (SimulatedJob(shards=5, buffers=2, replicas=2, clip=0.7, compute_s=0.005), True),
    # None can run ahead of a decision.
    (SimulatedJob(shards=5, buffers=2, replicas=2, clip=0.7, skip=True, compute_s=0.005), False),
], ids=["clip", "skip"])  # fmt: skip
def test_buffers_that_run_a_version_ahead_of_a_slow_worker_are_not_lost(job: SimulatedJob, ahead: bool) -> None:
    results = _play_all(_plan(seed, job, 2, 2) for seed in range(25))
    assert (sum(result.fetched for result in results) > 0) == ahead  # else this has proven nothing


def test_losing_one_server_at_a_time_rolls_nothing_back() -> None:
    job = SimulatedJob(shards=8, replicas=3, steps=14)
    crashes = tuple(Fault(2.0 * at, "crash", "server", 0.5) for at in range(1, 5))
    for result in _play_all(_plan(seed, job, 3, 3, *crashes, replication=2) for seed in range(8)):
        assert not any("going back" in said for said in result.outcome.said)


def test_the_coordinator_may_die_as_often_as_it_likes() -> None:
    job = SimulatedJob(replicas=3, steps=14)
    crashes = tuple(Fault(0.4 * at, "crash", "coordinator", 1.0) for at in range(1, 12))
    for result in _play_all(_plan(seed, job, 3, 2, *crashes) for seed in range(8)):
        assert result.recomputed == 0  # it is not on the path of a step (I7)


def test_everything_may_die_at_once_and_again() -> None:
    job = SimulatedJob(replicas=3, steps=8)
    ends = tuple(Fault(2.0 * at, "everything", "worker", 2.0) for at in range(1, 4))
    results = _play_all(_plan(seed, job, 3, 2, *ends, snapshot_steps=2) for seed in range(8))
    assert any(result.recomputed > 0 for result in results)


# ---- defects that were found and must not come back ----


def test_first_weights_survive_a_broken_link() -> None:
    _play_all(_plan(seed, SimulatedJob(), 2, 2, Fault(0.0, "drop first", "worker")) for seed in range(8))


def test_versions_that_come_while_one_is_copied_into_the_model_do_not_spoil_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedWorker, "install_s", 0.2)
    job = SimulatedJob(replicas=2, steps=14, compute_s=0.02)  # those who take over come late, and others go on
    crashes = tuple(Fault(0.2 + 0.15 * at, "crash", "worker", 0.5) for at in range(10))
    _play_all(_plan(seed, job, 5, 2, *crashes, heartbeat=2.0) for seed in range(8))
