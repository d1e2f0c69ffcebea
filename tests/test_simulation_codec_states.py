"""The simulation plays codec states: they follow their replicas, are in snapshots, and none is used twice or stale."""

from __future__ import annotations

import random

import pytest

from rallypoint.codec.spec import TopK
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.policy import Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.protocol import Hello, Pause, SnapshotWanted
from rallypoint.net.frames import Header
from rallypoint.server.snapshots import StateRelay
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR, Given
from rallypoint.testing.simulation.network import Fault, Node
from rallypoint.testing.simulation.operating.resuming import LAUNCHER, RESUME
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Play
from rallypoint.testing.simulation.run import Simulation, play
from rallypoint.testing.simulation.worker import SimulatedWorker

FIXED = range(18)
ENOUGH = range(150)  # seeds within which a planted bug has to be found
OTHERS = tuple(
    Play("codec-state", mode) for mode in (Sync(quorum=2), BoundedStaleness(1), Async(), LocalSteps(2, fragments=2))
)


def _often_told_to_go(seed: int) -> Plan:
    """Workers come and go, and snapshots are taken all the time."""
    rng, faults = random.Random(seed), list[Fault]()
    terms = Terms(workers_start=3, workers_max=3, servers=2, snapshots=True, snapshot_steps=2, heartbeat=30.0)
    for _ in range(4):
        at = rng.uniform(0.3, 4.0)
        faults += [Fault(at, "leave", "worker"), Fault(at + rng.uniform(0, 0.6), "join", "worker")]
        if rng.random() < 0.4:
            faults.append(Fault(rng.uniform(0.3, 4.0), "drop data", "worker", rng.uniform(0, 0.5)))
    job = SimulatedJob(replicas=3, steps=12, codec=TopK())
    return Plan(seed, job, terms, 3, 2, tuple(sorted(faults, key=lambda fault: fault.at)))


@pytest.mark.some("0", "3")
@pytest.mark.parametrize("seed", [0, 3, 4, 16])
def test_a_worker_that_is_told_to_go_hands_its_codec_states_over_in_the_middle_of_a_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed as soon as servers have them: what it encodes later, or copies for a snapshot, must not count."""
    leave, steps_cut = SimulatedWorker.leave, 0

    def leave_at_once(self: SimulatedWorker) -> None:
        def hand_over() -> None:
            nonlocal steps_cut
            steps_cut += self.machine.computing
            end()

        def end() -> None:
            states = self.exchange.codec_states
            if states is not None and states.hand_over():
                self.node.kill()
            else:
                self.node.later(0.05, end)

        leave(self)
        self.node.later(random.Random(self.node.name).uniform(0.0, 0.25), hand_over)

    monkeypatch.setattr(SimulatedWorker, "leave", leave_at_once)
    play(_often_told_to_go(seed))
    assert steps_cut > 0


@pytest.mark.some("0.1-2")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("after", [0.1, 0.3])
def test_a_codec_state_between_two_workers_is_not_lost_when_its_shard_moves(seed: int, after: float) -> None:
    """Restored from a snapshot, not asked for yet, and the shard is to move: it does so between two steps."""
    job = SimulatedJob(shards=8, replicas=6, steps=8, codec=TopK())
    terms = Terms(workers_start=2, workers_max=2, servers=2, snapshots=True, snapshot_seconds=0.5, heartbeat=30.0)
    faults = (Fault(4.0, "crash", "server", 200.0), Fault(4.0 + after, "join", "server"))
    play(Plan(seed, job, terms, 2, 2, faults))
    assert not job.lost


@pytest.mark.parametrize("late_s", [0.0, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_a_paused_job_is_stored_with_its_codec_states_and_goes_on_with_the_same_bytes(seed: int, late_s: float) -> None:
    """Also if a worker hears of the pause when it has contributed to the step before which the others stop."""
    job = SimulatedJob(replicas=5, codec=TopK(), compute_s=0.05)
    terms = Terms(workers_start=2, workers_max=2, servers=2, snapshots=True, heartbeat=30.0)
    simulation = Simulation(Plan(seed, job, terms, 2, 2, (Fault(1.0, RESUME, LAUNCHER, 1),)))
    world, ahead = simulation.world, list[tuple[int, ...]]()

    def pause() -> None:
        world.partition("worker1", COORDINATOR, late_s)
        Given(Node(world, "operator"), Pause(), lambda *_: ask_for_a_snapshot())

    def ask_for_a_snapshot() -> None:
        hello = Hello("observer", "operator", "host", "", 0)
        world.connect(Node(world, "another"), COORDINATOR, hello, lambda wire: wire.send(0, SnapshotWanted()), id)

    def stored(record: ShardRecord) -> None:
        ahead.append(record.ahead)
        SimulatedJob.check_stored(job, record)

    object.__setattr__(job, "check_stored", stored)
    world.at(0.8, pause)
    simulation.run()
    assert simulation._resuming._snapshot is not None, "there was none to go on from"
    assert any(ahead) == (late_s > 0)


def test_a_copy_that_was_sent_in_a_pause_is_not_sent_again_and_kept_with_the_next_contribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server kept all codec states of the job, for a snapshot that was complete. So it did those of the last version,
    which are not stored."""
    job = SimulatedJob(replicas=4, codec=TopK(), compute_s=0.05)
    came, relays = list[tuple[int, ...]](), set[StateRelay]()
    terms = Terms(workers_start=2, workers_max=2, servers=2, snapshots=True, heartbeat=30.0)
    simulation = Simulation(Plan(0, job, terms, 2, 2, ()))
    world, copied = simulation.world, StateRelay.copied

    def count(self: StateRelay, header: Header, data: memoryview) -> None:
        came.append((header.shard, header.replica, header.step + 1))
        relays.add(self)
        copied(self, header, data)

    def pause_and_store() -> None:
        hello = Hello("observer", "another", "host", "", 0)
        Given(Node(world, "operator"), Pause(), lambda *_: world.connect(
            Node(world, "another"), COORDINATOR, hello, lambda wire: wire.send(0, SnapshotWanted()), id
        ))  # fmt: skip

    monkeypatch.setattr(StateRelay, "copied", count)
    world.at(0.8, pause_and_store)
    world.at(3.0, lambda: Given(Node(world, "operator"), Pause(on=False), lambda *_: None))
    simulation.run()
    assert len(came) == len(set(came)) > 0
    assert len({version for *_, version in came}) == 1
    assert [len(relay._copies) for relay in relays] == [0, 0]


@pytest.mark.slow
def test_no_plan_that_promises_the_bytes_loses_a_codec_state() -> None:
    """Seed 14 did: a server crashes, the other restores all shards, a third joins and takes half of them."""
    plans = {seed: plan for seed in FIXED if not (plan := make_plan(seed, Play("codec-state"))).job.loses_states}
    for plan in plans.values():
        play(plan)
    assert 14 in plans
    assert [seed for seed, plan in plans.items() if plan.job.lost] == []
