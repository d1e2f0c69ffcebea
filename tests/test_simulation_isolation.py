"""In the simulation a coordinator that is cut off from everybody for a while costs nothing."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.reach import Finding, Silence
from rallypoint.core.policy import Async, Sync
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Played, word_for
from rallypoint.testing.simulation.run import Simulation, SimulationFailed

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


def test_seeds_play_it_among_other_faults() -> None:
    faults = [(fault.kind, fault.role) for seed in range(14) for fault in make_plan(seed).faults]
    assert faults.count(("isolation", "coordinator")) == 2


def test_a_coordinator_that_gives_up_whoever_is_silent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: Silence, members: Membership, now: float, replaced: frozenset[str]) -> Finding:
        return Finding(tuple((id, f"silent for {s:.1f} s") for id, s in members.silent(now, self.heartbeat)))

    monkeypatch.setattr(Silence, "look", look)
    with pytest.raises(SimulationFailed, match="set replication to 2"):
        _isolated(SEEDS[0], 10.0).run()
