"""What must be true of a simulated job's evaluations at its end."""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.testing.simulation.coordinator import Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.evaluations import due, figure_of


def check_evaluations(
    job: SimulatedJob, outcome: Outcome, coordinator: SimulatedCoordinator | None, events: Iterable[str]
) -> None:
    """AssertionError unless each version that is due has its result, and no other.

    It may have none if the servers that kept the version are lost, and the job goes on from a later snapshot. And what
    the lead has evaluated is lost if it dies before the coordinator hears of it. A lease is not lost like that.
    """
    right = {v: figure_of(job.trajectory[v]) for v in range(1, job.end + 1) if due(job, v)}
    wrong = [(step, figure) for step, figure in outcome.evaluated if right.get(step) != figure]
    assert not wrong, f"evaluated to something else: {wrong}"
    missing = right.keys() - {step for step, _ in outcome.evaluated}
    if any("snapshot" in said for said in outcome.said) and coordinator is not None:
        missing -= coordinator.machine.course.evaluations.lost
    if any("coordinator" in event or "drop" in event or "partition" in event for event in events):
        missing &= outcome.leased
    assert not missing, f"versions {sorted(missing)} have no result"
