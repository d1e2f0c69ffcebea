"""In the simulation two members that cannot reach each other for good stall the job for a few heartbeats only."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rallypoint.core.cluster.reach import Reach
from rallypoint.core.policy import AllReduce, Async, Sync
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan, make_plan, supported
from rallypoint.testing.simulation.policies import Played, word_for
from rallypoint.testing.simulation.run import Simulation, SimulationFailed

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


def test_seeds_play_it_among_other_faults() -> None:
    roles = [fault.role for seed in range(18) for fault in make_plan(seed).faults if fault.kind == "cut"]
    assert len(roles) - roles.count("aggregator") == 2


@pytest.mark.slow
def test_a_coordinator_that_does_not_look_who_cannot_reach_whom_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reach, "look", lambda self: [])
    with pytest.raises(SimulationFailed, match="stuck"):
        _cut(0, ("worker1", "server2"), Sync()).run()
