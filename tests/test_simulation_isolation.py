"""Cut off, and come: in the simulation what costs nothing, or a few heartbeats only, does so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.reach import Finding, Reach, Silence
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing.handover import Handover
from rallypoint.core.policy import AllReduce, Async, Sync
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan, make_plan, supported
from rallypoint.testing.simulation.policies import Played, word_for
from rallypoint.testing.simulation.run import Result, Simulation, SimulationFailed, play

SEEDS = [seed for seed in range(60) if not make_plan(seed).terms.backup_tasks][:12]
_SYNC = Sync()


def _isolated(seed: int, seconds: float, policy: Played = _SYNC) -> Simulation:
    """The seed's job, long enough to be still under way afterwards, with nothing but the isolation; without snapshots
    the loss of a server would end it."""
    plan = make_plan(seed, policy)
    job = replace(plan.job, steps=40, skip=False)
    terms = msgspec.structs.replace(
        plan.terms, snapshots=False, snapshot_steps=0, snapshot_seconds=0.0, workers_min=1, workers_max=plan.workers,
    )  # fmt: skip
    faults = (Fault(1.5, "isolation", "coordinator", seconds),)
    return Simulation(Plan(seed, job, terms, plan.workers, plan.servers, faults))


@pytest.mark.some("1.6-sync")
@pytest.mark.parametrize("policy", [Sync(), Async()], ids=word_for)
@pytest.mark.parametrize("seconds", [1.6, 4.0, 10.0])
def test_an_isolated_coordinator_costs_no_step_and_no_member(seconds: float, policy: Played) -> None:
    for seed in SEEDS[:4]:
        simulation = _isolated(seed, seconds, policy)
        result = simulation.run()
        assert not [said for said in result.outcome.said if "gone" in said or "going back" in said], result.outcome.said
        assert result.recomputed == 0 or policy != Sync()  # a stream's replicas may move for speed's sake
        assert simulation.coordinator is not None
        members = simulation.coordinator.machine.course.members
        assert members.incarnations == len(members.workers) + len(members.servers), "somebody joined anew"


def test_a_coordinator_that_gives_up_whoever_is_silent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: Silence, members: Membership, now: float, replaced: frozenset[str]) -> Finding:
        return Finding(tuple((id, f"silent for {s:.1f} s") for id, s in members.silent(now, self.heartbeat)))

    monkeypatch.setattr(Silence, "look", look)
    with pytest.raises(SimulationFailed, match="set replication to 2"):
        _isolated(SEEDS[0], 10.0).run()


# ---- two members that cannot reach each other for good ----


FOR_GOOD_S = 1e6


def _cut(seed: int, pair: tuple[str, str], policy: Played) -> Simulation:
    """The seed's job on two workers and two servers; the pair is cut after a second. Without snapshots nothing may be
    lost."""
    plan = make_plan(seed, policy)
    job = replace(plan.job, steps=12, skip=False)
    terms = msgspec.structs.replace(
        plan.terms, snapshots=False, snapshot_steps=0, snapshot_seconds=0.0, workers_start=2, workers_min=1,
        workers_max=2, servers=2, backup_tasks=False, replication=2,
    )  # fmt: skip
    simulation = Simulation(Plan(seed, job, supported(terms, job), 2, 2, (Fault(0.0, "drop", "nobody"),)))
    simulation.world.at(1.0, lambda: simulation.world.partition(*pair, FOR_GOOD_S))
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Sync(), Async(), AllReduce()], ids=word_for)
@pytest.mark.parametrize("pair", [("worker1", "server2"), ("server1", "server2")], ids="-".join)
def test_a_pair_that_is_cut_for_good_ends_the_stall_within_four_heartbeats(
    pair: tuple[str, str], policy: Played
) -> None:
    for seed in range(6):
        simulation = _cut(seed, pair, policy)
        undisturbed = _cut(seed, ("nobody", "nobody else"), policy).run()
        result = simulation.run()
        assert result.seconds < undisturbed.seconds * 2 + 4 * simulation.plan.terms.heartbeat, result.outcome.said
        assert not [said for said in result.outcome.said if "going back" in said], result.outcome.said


def test_seeds_play_both_among_other_faults() -> None:
    faults = [(seed, fault.kind, fault.role) for seed in range(18) for fault in make_plan(seed).faults]
    assert sum(seed < 14 and (kind, role) == ("isolation", "coordinator") for seed, kind, role in faults) == 2
    assert sum(kind == "cut" and role != "aggregator" for _, kind, role in faults) == 2


@pytest.mark.slow
def test_a_coordinator_that_does_not_look_who_cannot_reach_whom_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reach, "look", lambda self: [])
    with pytest.raises(SimulationFailed, match="stuck"):
        _cut(0, ("worker1", "server2"), Sync()).run()


# ---- members that come while all is well ----


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
    assert [joined(seed, job, "server", replication=replication).recomputed for seed in range(8)] == [0] * 8


@pytest.mark.slow
def test_without_a_step_between_them_some_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: Any = lambda self, *about: None  # noqa: E731
    monkeypatch.setattr(Handover, "before", at_once)
    assert sum(joined(seed, JOBS[0], "server", replication=2).recomputed for seed in range(8)) > 0


@pytest.mark.slow
def test_a_worker_that_joins_makes_no_replica_be_computed_again() -> None:
    job = SimulatedJob(shards=12, replicas=6, steps=40, clip=None, compute_s=0.2)
    results = [joined(seed, job, "worker", replication=2) for seed in range(8)]
    assert [result.recomputed for result in results] == [0] * 8
    assert all(any(worker == "worker3" for worker, _, _ in result.outcome.computed) for result in results)
