"""The whole cluster on its real machines, in one process, under seeded faults: the same bytes, or a line that replays.

RALLYPOINT_SIMULATION_SEEDS sets how many fresh seeds are played; `python -m rallypoint.testing.simulation` plays more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.coordinator import shell
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing import assigner as trial
from rallypoint.core.policy import AllReduce, Async, BoundedStaleness, LocalSteps, Sync
from rallypoint.core.shard.clip import StepVerdict as ClipVerdict
from rallypoint.core.shard.events import Decide
from rallypoint.core.shard.server import Effect as ServerEffect
from rallypoint.core.shard.server import ServerMachine
from rallypoint.core.view import ViewNumber
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.plan import Plan, make_plan
from rallypoint.testing.simulation.policies import Play, Played, replay_line, word_for
from rallypoint.testing.simulation.run import Result, Simulation, SimulationFailed, play, simulate
from rallypoint.testing.simulation.server import SimulatedServer
from rallypoint.testing.simulation.worker import SimulatedWorker
from rallypoint.worker.exchange.links import ServerLink

pytestmark = pytest.mark.timeout(600)  # plays take a minute of a core, which a busy machine may not have

FIXED = range(60)
FEW, MORE = range(10), range(10, 30)  # of each policy that is not plain Sync
HESITANT = range(103, 203, 4)  # in which workers are slow to begin
ENOUGH = range(300)  # seeds within which a planted bug has to be found
TURNS = (LocalSteps(2, fragments=2), LocalSteps(3, fragments=3))
OTHERS = (BoundedStaleness(1), BoundedStaleness(3), Async(), Async(fold=3), Sync(quorum=2), AllReduce(), *TURNS)


def _failures(seeds: Iterable[int], policy: Played) -> list[str]:
    failures = []
    for seed in seeds:
        try:
            simulate(seed, policy)
        except SimulationFailed as failed:
            failures.append(str(failed))
    return failures


def _play_seeds(seeds: Sequence[int], policy: Played) -> None:
    failures = _failures(seeds, policy)
    if failures:
        pytest.fail("\n\n".join([f"{len(failures)} of {len(seeds)} seeds failed", *failures[:3]]), pytrace=False)


def _fresh(share: int = 1) -> range:
    count = int(os.environ.get("RALLYPOINT_SIMULATION_SEEDS", "100")) // share
    first = int(time.time()) % 1_000_000 * 1000
    return range(first, first + count)


@pytest.mark.parametrize("seeds", [FIXED[:20], FIXED[20:], _fresh()], ids=["fixed", "more", "fresh"])
@pytest.mark.some("fixed")
def test_whatever_fails_the_run_ends_with_the_bytes_of_an_undisturbed_one(seeds: range) -> None:
    _play_seeds(seeds, Sync())


@pytest.mark.some("few-fragments:3")
@pytest.mark.parametrize("policy", OTHERS, ids=word_for)
@pytest.mark.parametrize("seeds", [FEW, MORE, _fresh(len(OTHERS))], ids=["few", "more", "fresh"])
def test_whatever_fails_every_contribution_counts_once_nobody_is_stuck_and_the_bound_is_kept(
    seeds: range, policy: Played
) -> None:
    _play_seeds(seeds, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Sync(), *OTHERS], ids=word_for)
def test_what_a_worker_hears_that_it_is_to_do_may_be_out_of_date_when_it_begins(policy: Played) -> None:
    _play_seeds(HESITANT, policy)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(30), _fresh(len(OTHERS))], ids=["fixed", "fresh"])
@pytest.mark.parametrize("periods", [((1, 0), (2, 1)), ((2, 0), (2, 1), (6, 4))], ids=str)
def test_layers_at_their_own_frequency_count_every_contribution_once_whatever_fails(
    periods: tuple[tuple[int, int], ...], seeds: range
) -> None:
    """Whatever else there is takes turns of three, or is due every third tick."""
    for seed in seeds:
        plan = make_plan(seed, LocalSteps(3, fragments=3 if seed % 2 else 1))
        job = plan.job
        job = replace(job, periods=periods, shards=max(job.shards, 3 * (1 + len(periods)) + job.buffers))
        play(replace(plan, job=job))


@pytest.mark.some("fragments:2")
@pytest.mark.parametrize("policy", OTHERS, ids=word_for)
def test_a_seed_replays_exactly_under_every_policy(policy: Played) -> None:
    first, again = simulate(17, policy), simulate(17, policy)
    assert again == first
    assert simulate(18, policy).outcome.computed != first.outcome.computed


@pytest.mark.some("17")
@pytest.mark.parametrize("seed", [3, 17, 40])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, again = simulate(seed), simulate(seed)
    assert again == first
    assert first.seconds > 0
    assert simulate(seed + 1).outcome.computed != first.outcome.computed


def test_the_fixed_seeds_play_every_kind_of_fault() -> None:
    played = {fault.kind for seed in FIXED for fault in make_plan(seed).faults}
    assert played >= {
        "crash", "pause", "long pause", "drop", "partition", "join", "leave", "disk full", "torn write", "everything",
        "half said",
    }  # fmt: skip
    plans = [make_plan(seed) for seed in FIXED]
    assert all(make_plan(seed).hesitate_s > 0 for seed in HESITANT)
    assert {plan.job.buffers for plan in plans} == {0, 1}
    assert {plan.job.skip for plan in plans} == {True, False}
    assert {plan.terms.replication for plan in plans} == {1, 2}
    assert {plan.terms.workers_min for plan in plans} == {1, 2}


JOURNAL_BEHIND = [
    seed for seed in range(1000, 1200) if any(fault.kind == "journal full" for fault in make_plan(seed).faults)
]


@pytest.mark.slow
def test_a_coordinator_whose_journal_is_behind_goes_on_from_what_its_members_know() -> None:
    _play_seeds(JOURNAL_BEHIND[::3], Sync())


@pytest.mark.slow
def test_a_coordinator_that_believes_a_journal_that_is_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "needed", lambda recovered: False)
    _play_seeds(JOURNAL_BEHIND[::9], Sync())  # members' newer views send it back to a snapshot, at least
    monkeypatch.setattr(shell.CoordinatorShell, "_knows", lambda self, hello, view: [])
    assert _failures([1044, 1053, 1070], Sync())


def test_a_failed_run_says_how_to_replay_it_and_what_had_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedJob, "undisturbed", lambda self: [0] * self.shards)
    seed = next(seed for seed in FIXED if make_plan(seed).faults)
    with pytest.raises(SimulationFailed, match=f"python -m rallypoint.testing.simulation --seed {seed}\nother bytes"):
        simulate(seed)


@pytest.mark.parametrize("policy", OTHERS, ids=word_for)
def test_the_line_that_replays_a_failed_run_names_its_policy(policy: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedJob, "check_end", _nothing_is_right)
    line = f"python -m rallypoint.testing.simulation --policy {word_for(policy)} --seed 3\n"
    with pytest.raises(SimulationFailed, match=f"^{line}"):
        simulate(3, policy)


def _nothing_is_right(self: SimulatedJob, shard: int, content: Any) -> None:
    raise AssertionError(f"{content} in shard {shard}")


def test_a_policy_without_a_word_is_replayed_by_a_call() -> None:
    policy = Async(scale_by_staleness=True)
    assert word_for(policy) is None
    assert replay_line(7, policy) == f"rallypoint.testing.simulation.run.simulate(7, {policy})"


def _a_verdict_of_any_generation(self: ServerMachine, verdict: ClipVerdict) -> list[ServerEffect]:
    """What was decided before a roll-back decides the same step of the generation after it."""
    decide = Decide(verdict.step, verdict.scale)
    return [e for i in self.held if i in self.plan.decides for e in self.handle(i, decide)]


def _roll_backs_in_the_middle_of_decisions() -> list[Plan]:
    """The only copy of some shards is lost, and the job goes back to a step that was just being decided."""
    job = SimulatedJob(shards=4, replicas=3, steps=12, clip=1.0, sync=Sync(quorum=2), compute_s=0.05)
    crashes = [
        (Fault(at, "crash", "server", 0.3), Fault(at + 2.0, "crash", "server", 0.3))
        for at in (1.12, 1.38, 1.64, 3.35, 3.4, 3.65)
    ]
    return [_plan(1, job, 3, 2, *two, snapshot_steps=1) for two in crashes]


@pytest.mark.slow
def test_a_stale_verdict_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inboxes are so full that a view overtakes a verdict now and then."""
    monkeypatch.setattr(SimulatedServer, "decision_s", 0.4)
    plans = _roll_backs_in_the_middle_of_decisions()
    _play_all(plans)
    monkeypatch.setattr(ServerMachine, "decided", _a_verdict_of_any_generation)
    # It decides a sum that waits, or is kept for one that is not finished: then that shard's scale is another.
    assert any(re.search("is taken in generation|is scaled by", failure) for failure in map(_failure, plans))


POISONED = (Sync(), BoundedStaleness(1), Async(), Async(fold=3), Sync(quorum=2), AllReduce(), TURNS[0])


@pytest.mark.slow
@pytest.mark.parametrize("sync", POISONED, ids=word_for)
@pytest.mark.parametrize("seeds", [FEW, MORE, _fresh(len(POISONED))], ids=["few", "more", "fresh"])
def test_a_gradient_that_is_not_finite_ends_the_job_with_a_sentence_and_is_never_published(
    seeds: range, sync: Any
) -> None:
    _play_seeds(seeds, Play("poisoned", sync))


def _one_server_heard_of_the_norm(seed: int, at: float) -> Simulation:
    """A primary is cut off from its shard's backup and dies; the third server has its norms, and repeats them late."""
    job = SimulatedJob(shards=6, replicas=6, steps=8, clip=1.0, sync=Sync(quorum=2), compute_s=0.1)
    simulation = Simulation(_plan(seed, job, 3, 3, Fault(at + 2.0, "join", "server"), replication=2, heartbeat=2.0))
    world = simulation.world
    world.at(at, lambda: world.partition("server1", "server2", 0.5))
    world.at(at + 0.2, lambda: world.nodes["server1"].kill())
    world.at(at + 0.2, lambda: world.partition("server2", "server3", 0.4))
    return simulation


@pytest.mark.slow
def test_servers_that_decide_a_step_differently_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word to its backup a primary tells the norm of the contributions that came first."""
    moments = [(seed, 0.6 + 0.1 * at) for seed in range(2) for at in range(6)]
    for seed, at in moments:
        _one_server_heard_of_the_norm(seed, at).run()
    monkeypatch.setattr(Sync, "chooses", property(lambda self: False))
    failures = []
    for seed, at in moments:
        try:
            _one_server_heard_of_the_norm(seed, at).run()
        except SimulationFailed as failed:
            failures.append(str(failed))
    assert failures
    for failure in failures:
        assert re.search(r"step \d is scaled by [\d.]+ in shard \d on server\d, and by [\d.]+ in shard \d on", failure)


# ---- plans for one thing each ----


def _plan(seed: int, job: SimulatedJob, workers: int, servers: int, *faults: Fault, **terms: Any) -> Plan:
    usual = {"workers_start": workers, "workers_max": workers, "servers": servers, "snapshots": True}
    return Plan(seed, job, Terms(**{**usual, **terms}), workers, servers, faults)


def _play_all(plans: Iterable[Plan]) -> list[Result]:
    return [play(plan) for plan in plans]


def _computed(result: Result) -> list[tuple[int, int]]:
    return sorted((step, replica) for _, step, replica in result.outcome.computed)


_DECISIONS = [SimulatedJob(clip=None), SimulatedJob(clip=0.7), SimulatedJob(clip=0.7, skip=True)]


@pytest.mark.some("1-1-clip")
@pytest.mark.parametrize("job", _DECISIONS, ids=["plain", "clip", "skip"])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (4, 2)])
def test_when_nothing_fails_every_replica_of_every_step_is_computed_once(
    job: SimulatedJob, workers: int, servers: int
) -> None:
    for replication in (1, 2):
        for result in _play_all(_plan(s, job, workers, servers, replication=replication) for s in range(3)):
            assert _computed(result) == [(step, r) for step in range(job.steps) for r in range(job.replicas)]
            assert result.recomputed == 0


@pytest.mark.slow
def test_a_job_without_snapshots_ends_too() -> None:
    results = _play_all(_plan(seed, SimulatedJob(), 2, 2, snapshots=False, replication=2) for seed in range(5))
    assert [result.recomputed for result in results] == [0] * 5


@pytest.mark.parametrize("buffers", [0, 1])
def test_workers_without_replicas_end_with_the_last_version(buffers: int) -> None:
    job = SimulatedJob(replicas=2, buffers=buffers, steps=6)
    for result in _play_all(_plan(seed, job, 5, 2) for seed in range(8)):
        assert len({worker for worker, _, _ in result.outcome.computed}) <= 2
        assert result.recomputed == 0


@pytest.mark.slow
def test_more_workers_than_replicas_take_over_from_those_that_die() -> None:
    job = SimulatedJob(replicas=2, steps=10)
    crashes = tuple(Fault(0.5 * at, "crash", "worker", 0.5) for at in range(1, 8))
    results = _play_all(_plan(seed, job, 5, 2, *crashes, heartbeat=2.0) for seed in range(8))
    assert any(len({worker for worker, _, _ in result.outcome.computed}) > 2 for result in results)


@pytest.mark.slow
def test_a_replica_computed_by_two_workers_counts_once() -> None:
    job = SimulatedJob(replicas=4, steps=8)
    pauses = tuple(Fault(1.0 + at, "pause", "worker", 1.5) for at in range(6))
    results = _play_all(_plan(seed, job, 4, 2, *pauses, backup_tasks=True, heartbeat=20.0) for seed in range(12))
    assert sum(result.recomputed for result in results) > 0  # else this has proven nothing


@pytest.mark.slow
@pytest.mark.parametrize(("job", "ahead"), [
    (SimulatedJob(shards=5, buffers=2, replicas=2, clip=0.7, compute_s=0.005), True),
    # None can run ahead of a decision.
    (SimulatedJob(shards=5, buffers=2, replicas=2, clip=0.7, skip=True, compute_s=0.005), False),
], ids=["clip", "skip"])  # fmt: skip
def test_buffers_that_run_a_version_ahead_of_a_slow_worker_are_not_lost(
    job: SimulatedJob, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, fetch = list[int](), ServerLink.fetch

    def counted(self: ServerLink, shard: int, version: int, number: ViewNumber) -> None:
        fetched.append(version)
        fetch(self, shard, version, number)

    monkeypatch.setattr(ServerLink, "fetch", counted)
    _play_all(_plan(seed, job, 2, 2) for seed in range(25))
    # Versions that come before a gradient has left are fetched too, so only the first case says that it was played.
    assert fetched or not ahead


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Sync(), AllReduce(), BoundedStaleness(1)], ids=word_for)
@pytest.mark.some("sync")
def test_replicas_that_move_for_the_speeds_sake_and_back_again_are_counted_once(
    policy: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every deal by speed is taken back, and tried again at once: many more moves than any real job sees."""
    for name, value in (("ROUNDS", 1), ("SECONDS", 0.1), ("PAUSE_S", 0.3), ("_PAID", 0.0)):
        monkeypatch.setattr(trial, name, value)
    verdicts: list[trial.Assigned | None] = []
    verdict = trial.Trial.verdict
    monkeypatch.setattr(trial.Trial, "verdict", lambda *of: verdicts.append(verdict(*of)) or verdicts[-1])
    _play_seeds(FIXED, policy)
    assert any(verdicts)


@pytest.mark.slow
def test_losing_one_server_at_a_time_rolls_nothing_back() -> None:
    job = SimulatedJob(shards=8, replicas=3, steps=14)
    crashes = tuple(Fault(2.0 * at, "crash", "server", 0.5) for at in range(1, 5))
    for result in _play_all(_plan(seed, job, 3, 3, *crashes, replication=2) for seed in range(8)):
        assert not any("going back" in said for said in result.outcome.said)


@pytest.mark.slow
def test_the_coordinator_may_die_as_often_as_it_likes() -> None:
    job = SimulatedJob(replicas=3, steps=14)
    crashes = tuple(Fault(0.4 * at, "crash", "coordinator", 1.0) for at in range(1, 12))
    for result in _play_all(_plan(seed, job, 3, 2, *crashes) for seed in range(8)):
        assert result.recomputed == 0  # it is not on the path of a step (I7)


@pytest.mark.slow
def test_everything_may_die_at_once_and_again() -> None:
    job = SimulatedJob(replicas=3, steps=8)
    ends = tuple(Fault(2.0 * at, "everything", "worker", 2.0) for at in range(1, 4))
    results = _play_all(_plan(seed, job, 3, 2, *ends, snapshot_steps=2) for seed in range(8))
    assert any(result.recomputed > 0 for result in results)


# ---- defects that were found and must not come back ----


@pytest.mark.slow
def test_first_weights_survive_a_broken_link() -> None:
    _play_all(_plan(seed, SimulatedJob(), 2, 2, Fault(0.0, "drop first", "worker")) for seed in range(8))


@pytest.mark.slow
def test_versions_that_come_while_one_is_copied_into_the_model_do_not_spoil_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedWorker, "install_s", 0.2)
    job = SimulatedJob(replicas=2, steps=14, compute_s=0.02)  # those who take over come late, and others go on
    crashes = tuple(Fault(0.2 + 0.15 * at, "crash", "worker", 0.5) for at in range(10))
    _play_all(_plan(seed, job, 5, 2, *crashes, heartbeat=2.0) for seed in range(8))


# ---- a claim holds for the generation in which it became true ----


@pytest.mark.slow
def test_a_stale_claim_of_being_done_planted_on_purpose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is lost while the worker evaluates the last version."""
    monkeypatch.setattr(SimulatedWorker, "evaluate_s", 3.0)
    job = SimulatedJob(replicas=1, steps=14, compute_s=0.1, sync=Async())
    at = (1.4 + 0.1 * seed for seed in range(30))
    plans = [
        _plan(seed, job, 1, 1, Fault(when, "crash", "server", 0.1), snapshot_seconds=60.0)
        for seed, when in enumerate(at)
    ]
    results = _play_all(plans)
    assert any("going back" in said for result in results for said in result.outcome.said)
    monkeypatch.setattr(SimulatedWorker, "honest", False)
    assert any("shard 0: missing [(0, 0), (1, 0)" in failure for failure in map(_failure, plans))


def _failure(plan: Plan) -> str:
    try:
        play(plan)
    except SimulationFailed as failed:
        return str(failed)
    return ""
