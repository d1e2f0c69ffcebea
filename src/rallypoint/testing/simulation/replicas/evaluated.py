"""What must be true of a simulated job's evaluations at its end."""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.testing.simulation.coordinator import Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.replicas.decided import figure_of
from rallypoint.testing.simulation.replicas.evaluations import due


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
    if job.rules.steers and coordinator is not None:
        decided, wanted = coordinator.machine.course.evaluations.decided, job.undisturbed_decisions.decided
        view = coordinator.machine.view
        assert decided == wanted, f"{decided} is decided, and not {wanted}"
        assert (view is None or view.stop is None) == (job.end == job.steps), f"the job ends with {job.end}: {view}"
    missing = right.keys() - {step for step, _ in outcome.evaluated}
    if any("snapshot" in said for said in outcome.said) and coordinator is not None:
        missing -= coordinator.machine.course.evaluations.lost
    if any("coordinator" in event or "drop" in event or "partition" in event for event in events):
        missing &= outcome.leased
    assert not missing, f"versions {sorted(missing)} have no result"
