"""Every cell of FEATURE x MODE that is supported, as a small job with a kill in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.modes import Bytes, Feature, ModeName, StateHolder
from rallypoint.core.modes.table import TABLE, No
from rallypoint.core.protocol import SnapshotWanted
from rallypoint.store.export import export_snapshot
from rallypoint.store.snapshots import SnapshotStore
from rallypoint.testing.processes import ProcessCluster
from rallypoint.testing.reference import average_reference

sys.path.insert(0, str(Path(__file__).parent))  # the fork server's children import cell_jobs.py by name

from cell_jobs import ENDS_AT, HELD_AT, STOPS_AT, CellJob, Net, Play, dataset, job_of, loss_of, train_cell
from stage import Stage

QUICK = {
    Feature.CLIP: set(ModeName), Feature.REPLICATION: {ModeName.SYNC}, Play.SNAPSHOTS: {ModeName.SYNC},
    Feature.AGGREGATORS: {ModeName.SYNC},
}
PATIENT = 60.0  # heartbeat in seconds: nobody is given up because this machine is busy
SUPPORTED = [
    pytest.param(
        feature, mode, id=f"{feature.name.lower()}-{mode.name.lower()}",
        marks=() if mode in QUICK.get(feature, set()) else (pytest.mark.slow,),
    )
    for feature, mode in (
        *((feature, mode) for feature in Feature for mode in ModeName if not isinstance(TABLE[feature][mode], No)),
        *((play, mode) for play in Play for mode in ModeName if play.belongs_to(mode)),
    )
    # These are in tests/ranks, tests/bridges and test_survival_store.py
    if feature not in (Feature.RANKS, Feature.SUMS, Feature.KEYED)
]  # fmt: skip


class Walk:
    """One cell's job: who plays in it, who is killed, and what has to be true at the end."""

    def __init__(self, home: Path, job: CellJob) -> None:
        self.home, self.mode = home, job.config.mode
        (home / "gate").mkdir()
        self.job = job.held(home / "gate")
        self.stages: list[Stage] = []

    def begin(
        self, workers: int = 2, servers: int = 2, *, aggregators: int = 0, at_most: int = 2, resume: bool = False,
        **terms: object,
    ) -> Stage:  # fmt: skip
        """The job's processes, all started. `at_most`: so many workers compute."""
        wanted = Terms(
            aggregators=aggregators, workers_start=workers, workers_max=at_most, servers=servers, heartbeat=PATIENT,
            **terms,  # type: ignore[arg-type]
        )  # fmt: skip
        folder = self.home / "run"
        stage = Stage(folder, wanted, self.job, resume=f"{folder}/snapshots" if resume else "")
        self.stages.append(stage)
        stage.aggregators_come(*(f"aggregator{i}" for i in range(aggregators)))
        stage.servers_come(*(f"server{i}" for i in range(servers)))
        stage.workers_come(*(f"worker{i}" for i in range(workers)))
        return stage

    def ends(self, stage: Stage, *workers: str, went_on: bool = True) -> None:
        """Let everybody go on to the end, and check what the mode promises. `went_on`: no worker's state is lost."""
        stage.open()
        hashes = {stage.result(worker) for worker in workers}
        assert len(hashes) == 1, "workers end with different weights"
        promised = self.mode.bytes is Bytes.ALWAYS or (self.mode.bytes is Bytes.UNDISTURBED and not went_on)
        if promised:
            assert hashes == {undisturbed(self.job.mode, self.job.features)}

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


@cache
def undisturbed(mode: ModeName, features: tuple[Feature | Play, ...]) -> str:
    """The hash of the same job with one worker and one server, to which nothing happens."""
    with ProcessCluster(workers=1, servers=1) as cluster:
        (hash,) = cluster.run(train_cell, CellJob(mode, features))
    return hash


# ---- what happens in the jobs ----


def a_worker_is_killed(walk: Walk) -> None:
    stage = walk.begin().until_held("worker0", "worker1")
    stage.kill("worker1")
    walk.ends(stage, "worker0")
    _every_contribution_counts(walk, stage)


def _every_contribution_counts(walk: Walk, stage: Stage) -> None:
    """The servers' account at the end: each contribution once, and dropped only where that may be."""
    stage.until_over()
    accounts = stage.events("Accounted")
    assert bool(accounts) == walk.mode.accounts
    if not accounts:
        return  # every contribution is applied, or the step does not end: `undisturbed` has the same bytes
    account = accounts[-1]
    whole = account["applied"] + account["folded"] + account["dropped"]
    config = walk.job.config
    assert whole == config.replicas * config.rounds, account
    assert walk.mode.drops or walk.job.has(Feature.SKIP) or account["dropped"] == 0, account


def the_lead_is_killed_and_somebody_else_evaluates(walk: Walk) -> None:
    stage = walk.begin().until_held("worker0", "worker1")
    stage.kill("worker0")
    walk.ends(stage, "worker1")
    steps = {event["step"] for event in stage.events("Metrics")}
    assert len(steps) > 1
    assert max(steps) == walk.job.config.steps
    assert any(step <= HELD_AT for step in steps), "none before the kill"


def a_server_with_a_backup_is_killed(walk: Walk) -> None:
    stage = walk.begin(replication=2).until_held("worker0", "worker1")
    stage.until(lambda: stage.events("Members")[-1]["exposed"] == 0, "every shard has a backup")
    stage.kill("server0")
    walk.ends(stage, "worker0", "worker1", went_on=False)
    assert not stage.said("going back")


def everybody_with_the_state_is_killed(walk: Walk) -> None:
    """Snapshots by steps; then nobody has the parameters any more."""
    stage = walk.begin(servers=1, snapshots=True, snapshot_steps=1).until_held("worker0", "worker1")
    stage.until(lambda: stage.events("Snapshotted") != [], "a snapshot is taken")
    if walk.mode.holder is StateHolder.WORKERS:
        stage.kill("worker0", "worker1")
        stage.workers_come("worker2", "worker3")
        survivors = ("worker2", "worker3")
    else:
        stage.kill("server0")
        stage.servers_come("server1")
        survivors = ("worker0", "worker1")
    stage.until(lambda: stage.said("going on from snapshot"), "the job goes back to the snapshot")
    walk.ends(stage, *survivors)


def a_snapshot_is_asked_for_and_a_worker_is_killed(walk: Walk) -> None:
    stage = walk.begin(snapshots=True).until_held("worker0", "worker1")
    stage.kill("worker1")
    stage.until(lambda: "worker1" not in stage.events("Members")[-1]["workers"], "worker1 is given up")
    stage.order(SnapshotWanted())
    stage.open()
    stage.until(lambda: any(taken["version"] > 0 for taken in stage.events("Snapshotted")), "a snapshot is taken")
    (walk.home / "gate" / "stored").touch()
    walk.ends(stage, "worker0")
    versions = {taken["version"] for taken in stage.events("Snapshotted")}
    assert any(0 < version < walk.job.config.rounds for version in versions), versions


def the_whole_job_is_killed_and_resumed(walk: Walk) -> None:
    stage = walk.begin(snapshots=True, snapshot_steps=1).until_held("worker0", "worker1")
    stage.until(lambda: stage.events("Snapshotted") != [], "a snapshot is taken")
    stage.close()
    again = walk.begin(workers=1, servers=1, snapshots=True, resume=True)
    walk.ends(again, "worker0")


def a_straggler_is_helped_and_killed(walk: Walk) -> None:
    stage = walk.begin(backup_tasks=True).until_held("worker1")
    stage.until(
        lambda: any((walk.home / "gate").glob(f"worker0 is at {step}") for step in range(HELD_AT + 1, 12)),
        "worker0 goes past the step in which worker1 stands still",
    )
    stage.kill("worker1")
    walk.ends(stage, "worker0")


def a_worker_that_stands_by_takes_over(walk: Walk) -> None:
    stage = walk.begin(workers=3, at_most=2)
    stage.until(lambda: stage.events("Members") != [], "the job begins")
    computing, standby = stage.events("Members")[-1]["workers"], stage.events("Members")[-1]["standby"]
    assert (len(computing), len(standby)) == (2, 1)
    stage.until_held(*computing)
    stage.kill(computing[0])
    stage.until(lambda: standby[0] in stage.events("Members")[-1]["workers"], "the one that stood by has replicas")
    walk.ends(stage, computing[1], *standby)


def a_worker_joins_and_another_is_killed(walk: Walk) -> None:
    stage = walk.begin(at_most=3).until_held("worker0", "worker1")
    stage.workers_come("worker2")
    stage.until(lambda: "worker2" in stage.events("Members")[-1]["workers"], "worker2 has replicas")
    stage.kill("worker0")
    walk.ends(stage, "worker1", "worker2")


def replicas_move_to_the_faster_worker_which_is_killed(walk: Walk) -> None:
    stage = walk.begin()
    stage.until(lambda: stage.said("not equally fast"), "replicas are assigned by speed")
    stage.kill("worker0")
    walk.ends(stage, "worker1")


def the_aggregator_is_killed_mid_step(walk: Walk) -> None:
    """Workers go to the servers at once; another aggregator joins; one worker dies too."""
    stage = walk.begin(aggregators=1).until_held("worker0", "worker1")
    assert stage.events("Members")[-1]["through"] == {"worker0": "aggregator0", "worker1": "aggregator0"}
    stage.kill("aggregator0")
    stage.until(lambda: not stage.events("Members")[-1]["through"], "the aggregator is given up")
    stage.aggregators_come("aggregator1")
    stage.until(lambda: bool(stage.events("Members")[-1]["through"]), "workers may use the other aggregator")
    stage.kill("worker1")
    walk.ends(stage, "worker0")


@pytest.mark.slow
def test_an_aggregator_that_hangs_is_left_long_before_it_is_given_up(tmp_path: Path) -> None:
    """With a heartbeat of 60 s, workers notice by themselves that it is silent."""
    walk = Walk(tmp_path, job_of(Feature.AGGREGATORS, ModeName.SYNC))
    try:
        stage = walk.begin(aggregators=1).until_held("worker0", "worker1")
        stage.stop("aggregator0")
        walk.ends(stage, "worker0", "worker1")
        assert not stage.said("aggregator0 is gone")
    finally:
        walk.close()


def the_script_stops_the_job_after_a_kill(walk: Walk) -> None:
    assert STOPS_AT < _stopped_at(walk) < walk.job.config.steps


def the_stream_ends_after_a_kill(walk: Walk) -> None:
    assert _stopped_at(walk) == ENDS_AT


def _stopped_at(walk: Walk) -> int:
    """Kill a worker of a job that ends by itself before its last step. Returns the step."""
    stage = walk.begin().until_held("worker0", "worker1")
    stage.kill("worker1")
    walk.ends(stage, "worker0")
    stage.until_over()
    (finished,) = stage.events("Finished")
    return int(finished["stopped_at"])


def a_process_is_killed_and_another_takes_its_place(walk: Walk) -> None:
    """Nobody else can compute its replica: the loop's batches are its own."""
    stage = walk.begin().until_held("worker0", "worker1")
    stage.kill("worker1")
    stage.workers_come("worker2")
    stage.open()
    with ProcessCluster(workers=2, servers=1) as cluster:
        expected = cluster.run(train_cell, CellJob(walk.job.mode, walk.job.features))
    assert [stage.result("worker0"), stage.result("worker2")] == expected


PLAYS: dict[Feature | Play, Callable[[Walk], None]] = {
    Feature.OWN_LOOP: a_process_is_killed_and_another_takes_its_place, Feature.PASSES: the_stream_ends_after_a_kill,
    Feature.STOP: the_script_stops_the_job_after_a_kill,
    Play.EVALUATION: the_lead_is_killed_and_somebody_else_evaluates,
    Feature.REPLICATION: a_server_with_a_backup_is_killed, Play.SNAPSHOTS: everybody_with_the_state_is_killed,
    Play.ON_DEMAND: a_snapshot_is_asked_for_and_a_worker_is_killed, Play.RESUME: the_whole_job_is_killed_and_resumed,
    Feature.BACKUP_TASKS: a_straggler_is_helped_and_killed, Feature.AGGREGATORS: the_aggregator_is_killed_mid_step,
    Play.STANDBY: a_worker_that_stands_by_takes_over, Play.RESIZE: a_worker_joins_and_another_is_killed,
    Play.BY_SPEED: replicas_move_to_the_faster_worker_which_is_killed,
}


@pytest.mark.some("clip-ssp")
@pytest.mark.parametrize(("feature", "mode"), SUPPORTED)
def test_a_supported_feature_survives_a_kill(feature: Feature | Play, mode: ModeName, tmp_path: Path) -> None:
    walk = Walk(tmp_path, job_of(feature, mode))
    try:
        PLAYS.get(feature, a_worker_is_killed)(walk)
    finally:
        walk.close()


@pytest.mark.slow
@pytest.mark.parametrize("which", [Feature.AUDIT, Feature.STREAMED])
def test_with_audits_or_streamed_parameters_the_bytes_are_those_without(which: Feature) -> None:
    assert undisturbed(ModeName.SYNC, (which,)) == undisturbed(ModeName.SYNC, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [Feature.BUFFERS, Feature.REPLICATION, Play.SNAPSHOTS, Play.RESUME, Feature.BACKUP_TASKS]
)
@pytest.mark.parametrize("which", [Feature.AUDIT, Feature.STREAMED])
def test_with_audits_or_streamed_parameters_no_kill_changes_a_byte(
    which: Feature, other: Feature | Play, tmp_path: Path
) -> None:
    walk = Walk(tmp_path, CellJob(ModeName.SYNC, (which, other)))
    try:
        PLAYS.get(other, a_worker_is_killed)(walk)
    finally:
        walk.close()


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True], ids=["a server dies", "the job is resumed"])
def test_an_average_has_the_bytes_of_plain_pytorch_after_a_kill(resumed: bool, tmp_path: Path) -> None:
    job = job_of(Feature.AVERAGE, ModeName.SYNC)
    walk = Walk(tmp_path, job)
    try:
        stage = walk.begin(replication=2, snapshots=True, snapshot_steps=1).until_held("worker0", "worker1")
        stage.until(lambda: stage.events("Members")[-1]["exposed"] == 0, "every shard has a backup")
        stage.until(lambda: any(s["version"] > 0 for s in stage.events("Snapshotted")), "a snapshot is taken")
        stage.kill("server0")
        if resumed:
            stage.close()
            stage = walk.begin(workers=1, servers=2, replication=2, snapshots=True, resume=True)
        walk.ends(stage, "worker0", went_on=False)
        stage.until_over()
        store = SnapshotStore(str(stage.home / "snapshots"))
        manifest = store.latest_usable(lambda text: None)
        assert manifest.version == job.config.rounds
        export_snapshot(store.url, tmp_path / "average.pt", average=True)
    finally:
        walk.close()
    expected = average_reference(Net(job), dataset(), loss_of, job.config)
    found = torch.load(tmp_path / "average.pt", weights_only=True)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
