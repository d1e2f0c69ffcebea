"""What a plan was made for, so that a failing seed's line says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rallypoint.codec.spec import has_state
from rallypoint.core.policy import AllReduce, LocalSteps
from rallypoint.testing.simulation.coordinator import Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.keys import KeyedJob, KeyedWorker
from rallypoint.testing.simulation.operating import links
from rallypoint.testing.simulation.operating.pauses import PAUSE
from rallypoint.testing.simulation.operating.resuming import RESUME
from rallypoint.testing.simulation.plan import Plan
from rallypoint.testing.simulation.policies import (
    Audited,
    AuditedWrong,
    Carrying,
    CodecStatePlay,
    Deciding,
    Evaluating,
    InnerStatePlay,
    Keyed,
    PausedPlay,
    Played,
    Poisoned,
    ResumedPlay,
    Scaled,
    Stopped,
    TablesPlay,
    Uneven,
)
from rallypoint.testing.simulation.server import SimulatedServer
from rallypoint.testing.simulation.worker import SimulatedWorker


def played_by(plan: Plan) -> Played:
    """What a plan was made for."""
    job, faults = plan.job, tuple(fault for fault in plan.faults if fault.kind != PAUSE)
    if plan.resumes:
        played = played_by(replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind != RESUME)))
        assert not isinstance(played, PausedPlay | Uneven | ResumedPlay)
        return ResumedPlay(played)
    if plan.terms.measure_links:
        return links.on_uneven(played_by(links.steady(plan)))
    if len(faults) < len(plan.faults):
        played = played_by(replace(plan, faults=faults))
        assert not isinstance(played, PausedPlay | Uneven | ResumedPlay)
        return PausedPlay(played)
    if isinstance(job, KeyedJob):
        assert not isinstance(job.sync, LocalSteps | AllReduce)
        return Keyed(job.sync)
    if job.audits is not None:
        return AuditedWrong() if job.audits.wrong else Audited()
    if job.carries:
        return Carrying(job.sync)
    if job.fp16:
        return Scaled()
    if job.every:
        return Deciding() if job.rules.steers else Evaluating()
    if job.tables:
        assert not isinstance(job.sync, LocalSteps | AllReduce)
        return TablesPlay(job.sync)
    if job.inner and isinstance(job.sync, LocalSteps):
        return InnerStatePlay(job.sync)
    if job.poison is not None:
        return Poisoned(job.sync)
    if job.stop is not None:
        return Stopped(job.sync)
    return CodecStatePlay(job.sync) if has_state(job.codec) else job.sync


# What everybody waits for, where a run is stuck.


def stuck(
    now: float, workers: Mapping[str, SimulatedWorker | KeyedWorker], servers: Mapping[str, SimulatedServer],
    coordinator: SimulatedCoordinator | None, outcome: Outcome,
) -> str:  # fmt: skip
    """What each member that lives waits for, at the time `now`, and what the coordinator has said."""
    lines = [f"stuck after {now:.1f} s"]
    lines += [_of_worker(name, worker) for name, worker in workers.items() if worker.node.alive]
    for name, server in servers.items():
        if server.node.alive:
            held = {i: server.machine.machine(i) for i in server.machine.held}
            lines.append(f"{name}: view {server.machine.view and server.machine.view.number} " + "; ".join(
                f"{i}: {'P' if m.primary else 'B'} v{m.version} pub{m.published} sum of {m.added} held {m._held} "
                f"{m.copies} awaiting {m.awaiting} clocks {m.clocks} wants {m.wants}"
                for i, m in held.items() if m is not None))  # fmt: skip
    if coordinator is not None:
        machine = coordinator.machine
        lines.append(f"coordinator: {machine.phase}, {machine.view}, taking {machine._snapshots.taking}, "
                     f"done {machine.course.members.done}, waits for {machine.waiting_for()}")  # fmt: skip
    return "\n".join([*lines, *outcome.said])


def _of_worker(name: str, worker: SimulatedWorker | KeyedWorker) -> str:
    if isinstance(worker, KeyedWorker):
        return worker.story()
    machine = worker.machine
    return f"{name}: replica {worker.replica}, next {machine.next_action()}, missing {machine.missing}, {machine}"
