"""The simulation plays servers that are told to go, and orders of another size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing import view_change
from rallypoint.core.placing.view_change import Copies
from rallypoint.core.policy import AllReduce, BoundedStaleness, LocalSteps, Sync
from rallypoint.testing.simulation import run
from rallypoint.testing.simulation.coordinator import Disk, SimulatedCoordinator
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.operating.copies import LOSS, WINDOWS
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Mode, word_for
from rallypoint.testing.simulation.run import Simulation, SimulationFailed, play, simulate

ENOUGH = [  # within which a planted bug has to be found
    seed for seed in range(300) if any(fault.kind == "resize" for fault in make_plan(seed).faults)
]
RESIZED = [seed for seed in ENOUGH if seed < 60]
POLICIES = (Sync(), Sync(quorum=2), BoundedStaleness(1), LocalSteps(2, fragments=2), AllReduce())


@pytest.mark.some("quorum:2")
@pytest.mark.parametrize("policy", POLICIES, ids=word_for)
def test_servers_that_are_told_to_go_hand_their_shards_over_and_end(policy: Mode) -> None:
    """Two of three go, also where no shard has a backup."""
    job = SimulatedJob(replicas=3, steps=14, sync=policy)
    leaves = tuple(Fault(at, "leave", "server") for at in (0.7, 3.4))  # (the first one goes between two steps)
    for seed in range(4):
        terms = Terms(workers_start=2, workers_max=2, servers=3, replication=1, snapshots=False)
        simulation = Simulation(Plan(seed, job, terms, 2, 3, leaves))
        result = simulation.run()
        gone = [name for name, server in simulation.servers.items() if server.leaving and not server.node.alive]
        assert len(gone) == 2, f"seed {seed}: only {gone} are gone; {result.outcome.said}"
        assert not any("going back" in said for said in result.outcome.said), f"seed {seed}: {result.outcome.said}"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=word_for)
def test_workers_and_servers_come_and_go_by_order_whatever_fails(policy: Mode) -> None:
    sizes = {line.split(" ", 1)[1] for seed in RESIZED for line in simulate(seed, policy).events if "Resize(" in line}
    assert len(sizes) > 5


_state = Course.state


def _the_order_is_not_written_down(self: Course) -> Any:
    """The next coordinator goes by the size that the job began with."""
    return msgspec.structs.replace(_state(self), workers_max=self.terms.workers_max)


def _started_by_hand(
    world: Any, job: Any, terms: Terms, store: Any, disk: Disk, outcome: Any, resume: Any = None
) -> SimulatedCoordinator:
    """Whoever starts it knows neither of earlier coordinators nor of the order: only the journal does."""
    disk.started = 0
    return _started_with_the_first_size(world, job, terms, store, disk, outcome, resume)


def _started_with_the_first_size(
    world: Any, job: Any, terms: Terms, store: Any, disk: Disk, outcome: Any, resume: Any = None
) -> SimulatedCoordinator:
    """The launcher has announced another size since."""
    return SimulatedCoordinator(world, job, msgspec.structs.replace(terms, workers_max=6), store, disk, outcome, resume)


def _with_an_order() -> list[Plan]:
    """Six workers compute at most, then fewer by order; the coordinator dies, and more workers come."""
    job = SimulatedJob(replicas=6, steps=14)
    terms = Terms(workers_start=4, workers_max=6, servers=2, snapshots=True)
    joins = tuple(Fault(at, "join", "worker") for at in (2.0, 2.1, 2.2))
    faults = (Fault(0.6, "resize", "launcher"), Fault(1.5, "crash", "coordinator", 0.5), *joins)
    return [Plan(seed, job, terms, 4, 2, faults) for seed in range(6)]


@pytest.mark.slow
def test_an_order_that_dies_with_the_coordinator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that started the earlier coordinators knows the order; the journal is for any other."""
    monkeypatch.setattr(run, "SimulatedCoordinator", _started_by_hand)
    _play_all(_with_an_order())
    monkeypatch.setattr(Course, "state", _the_order_is_not_written_down)
    with pytest.raises(SimulationFailed, match=r"compute: \d are to"):
        _play_all(_with_an_order())


@pytest.mark.slow
def test_a_launcher_that_forgets_its_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _play_all(_with_an_order())
    monkeypatch.setattr(run, "SimulatedCoordinator", _started_with_the_first_size)
    with pytest.raises(SimulationFailed, match=r"compute: \d are to"):
        _play_all(_with_an_order())


def _play_all(plans: list[Plan]) -> None:
    for plan in plans:
        play(plan)


def test_shards_that_stay_on_a_server_that_was_told_to_go_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "staying", property(lambda self: self.servers))
    with pytest.raises(AssertionError, match=r"only .* are gone"):
        test_servers_that_are_told_to_go_hand_their_shards_over_and_end(Sync())


def _always_in_place(self: Copies, server: str, *, moves: bool) -> None:
    """The new server takes the backup's place at once."""
    self.backup, self.incoming = server, ""


def _never_carried(*about: Any) -> set[int]:
    """A primary that is demoted holds nothing any more."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "bug"), [
    (Copies, "fill", _always_in_place),
    (view_change, "carried", _never_carried),
], ids=["fill", "carried"])  # fmt: skip
def test_a_shard_that_is_left_with_one_copy_while_it_moves_is_found(
    owner: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, terms = SimulatedJob(replicas=3, steps=14), Terms(workers_start=2, workers_max=2, servers=3, replication=2)
    plans = [Plan(seed, job, terms, 2, 3, (Fault(1.5, "leave", "server"),)) for seed in range(4)]
    _play_all(plans)
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(SimulationFailed, match=r"has one copy in view .* although both servers are here"):
        _play_all(plans)


def test_shards_have_one_copy_only_after_a_loss_or_in_a_declared_window() -> None:
    windows = sum((simulate(seed).outcome.copies.windows for seed in range(6)), Counter[str]())
    assert windows.keys() <= {LOSS, *WINDOWS}
    assert windows[LOSS] > 0
