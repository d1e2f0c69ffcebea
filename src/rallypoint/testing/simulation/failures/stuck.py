"""What everybody waits for, where a run is stuck."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.testing.simulation.coordinator import Outcome, SimulatedCoordinator
from rallypoint.testing.simulation.keys.worker import KeyedWorker
from rallypoint.testing.simulation.server import SimulatedServer
from rallypoint.testing.simulation.worker import SimulatedWorker


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
    return f"{name}: replica {worker._replica}, next {machine.next_action()}, missing {machine.missing}, {machine}"
