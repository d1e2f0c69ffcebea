"""The simulation plays codec states: they follow their replicas, are in snapshots, and none is used twice or stale."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.codec.spec import TopK
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.layout import Shard
from rallypoint.core.policy import Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.protocol import Hello, Pause, SnapshotWanted
from rallypoint.core.worker.handover import CodecStateCustody, Paths
from rallypoint.net.frames import Header
from rallypoint.server.snapshots import StateRelay
from rallypoint.store.record import ShardRecord
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import COORDINATOR, Given
from rallypoint.testing.simulation.network import Fault, Node
from rallypoint.testing.simulation.operating.resuming import LAUNCHER, RESUME
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Play, parse_policy, word_for
from rallypoint.testing.simulation.run import Simulation, play, simulate
from rallypoint.testing.simulation.worker import SimulatedWorker
from support.failing import first_failure

FIXED = range(18)
ENOUGH = range(150)  # seeds within which a planted bug has to be found
OTHERS = tuple(
    Play("codec-state", mode) for mode in (Sync(quorum=2), BoundedStaleness(1), Async(), LocalSteps(2, fragments=2))
)


@pytest.mark.slow
def test_codec_states_follow_replicas_and_are_restored_so_that_the_bytes_are_those_of_an_undisturbed_job() -> None:
    """Two of three plans promise the bytes: workers leave as told and join, or servers die and the job rolls back."""
    assert {make_plan(seed, Play("codec-state")).job.loses_states for seed in FIXED} == {True, False}
    for seed in FIXED:
        simulate(seed, Play("codec-state"))


@pytest.mark.some("codec-state:quorum:2")
@pytest.mark.parametrize("policy", OTHERS, ids=word_for)
def test_where_codec_states_are_lost_none_is_used_twice_and_none_is_stale(policy: Play) -> None:
    for seed in FIXED[:6]:
        simulate(seed, policy)


def test_a_worker_that_computes_a_replica_just_reassigned_does_not_keep_its_codec_states() -> None:
    """It had not recalled them, so it never gave them back, and the replica's next worker waited for it for ever."""
    simulate(137, Play("codec-state", BoundedStaleness(1)))


@pytest.mark.parametrize("seed", [334281247, 334281655, 334281979])
def test_a_worker_that_leaves_gives_the_codec_states_of_the_replica_that_it_was_about_to_compute(seed: int) -> None:
    """The view that took the replica from it came between its choice and its first step: it went, and gave nothing."""
    simulate(seed, Play("codec-state"))


def test_a_worker_that_was_given_up_uses_no_codec_state_that_lacks_what_others_have_contributed_since() -> None:
    """It was paused after step 2, another worker made step 3, and it went on with step 4 before it heard of that."""
    simulate(334281942, Play("codec-state"))


@pytest.mark.parametrize(("word", "seed"), [("resumed:codec-state", 1469), ("codec-state", 121)])
def test_a_snapshot_for_which_a_worker_has_no_copy_of_a_codec_state_any_more_is_given_up(word: str, seed: int) -> None:
    """A coordinator had died, and the next one asked for the same version again: servers were still at it, workers had
    begun its step. It was stored without codec states, and whoever went on from it ended with other bytes."""
    simulate(seed, parse_policy(word))


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


def _nothing_is_given(self: CodecStateCustody, replicas: frozenset[int], paths: Paths) -> list[Any]:
    """The worker lets go of replicas, and says nothing to the primaries."""
    self._here &= replicas
    return []


def _a_roll_back_changes_nothing(self: CodecStateCustody) -> None:
    """The encoder goes on with codec states of a stale generation."""


def _nobody_waits(self: CodecStateCustody, replica: int) -> bool:
    """A replica is computed before its codec states have come."""
    return True


def _no_copies(self: StateRelay, record: ShardRecord, place: Shard) -> bool:
    """Snapshots contain no codec states."""
    return False


@pytest.mark.parametrize(("owner", "name", "bug", "sentence", "first"), [
    (CodecStateCustody, "keep_only", _nothing_is_given, "stuck after|made from", 0),
    (CodecStateCustody, "ready", _nobody_waits, "made from", 0),
    (CodecStateCustody, "rolled_back", _a_roll_back_changes_nothing, "codec state of generation|state is ahead", 0),
    (StateRelay, "awaited", _no_copies, "is stored with codec states", 0),
], ids=["nothing is given", "nobody waits", "not rolled back", "not in snapshots"])  # fmt: skip
@pytest.mark.some("[!n]*")
def test_a_bug_in_codec_states_planted_on_purpose_is_found(
    owner: Any, name: str, bug: Callable[..., Any], sentence: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    assert re.search(sentence, first_failure(Play("codec-state"), ENOUGH[first:]))
