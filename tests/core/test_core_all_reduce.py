"""Where workers have the state: who brings it to whom, and what a worker may begin with and go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from slot_bench import AlignedBench, view_of
from test_core_cluster import SHARDS, STEPS, _Job, _of, _record, _running, _terms, beat

from rallypoint.config import group_of, resolve, with_own_optimizer
from rallypoint.core.cluster.effects import Effect, FindSnapshot
from rallypoint.core.cluster.events import Captured, From, Left, Tick
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.recovery import WorkersHoldState
from rallypoint.core.cluster.state import Origin, Phase
from rallypoint.core.cluster.storing.snapshot_duty import SNAPSHOT_PATIENCE
from rallypoint.core.modes import StateHolder
from rallypoint.core.optimizer import SGD
from rallypoint.core.policy import AllReduce, LocalSteps, Sync
from rallypoint.core.protocol import Aborted, Capture, Held, Leaving, Say, Snapshotted, SnapshotWanted
from rallypoint.core.shard.effects import Apply, Drop, InstallFirst
from rallypoint.core.shard.effects import Publish as Published
from rallypoint.core.shard.events import Contribute, Initialise
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.core.worker.slots import Arriving, Compute, DropArriving, Fetch, Installed, Land, Landed, LinkUp, Viewed
from rallypoint.core.worker.slots import Install as InstallAction
from rallypoint.errors import ConfigError

RECORD = _record(sync=AllReduce(), replicas=6)
EVERYBODY = ("s0", "s1", "w0", "w1")


def _begun(members: Sequence[str] = EVERYBODY, steps: int = 1, **terms: Any) -> _Job:
    """Steps have been computed."""
    job = _running(_terms(**terms), members, RECORD)
    for step in range(steps):
        job.step(step)
    return job


def _gone(job: _Job, *members: str) -> list[Effect]:
    return job.play(*(Left(member, "test") for member in members))


# ---- who brings the state ----


def test_the_furthest_of_those_who_go_on_uploads_the_state_or_else_of_all() -> None:
    state_holders = WorkersHoldState({"a": 3, "b": 7, "c": 9})
    assert state_holders.uploader(["a", "b", "new"], {"a", "b", "c"}) == "b"
    assert state_holders.uploader(["new"], {"a", "new", "c"}) == "c"
    assert state_holders.uploader(["new"], {"new"}) == ""


def test_a_worker_that_joins_makes_all_go_on_from_what_the_furthest_uploads() -> None:
    job = _begun(steps=5, workers=2)
    job.step(5, only="w1")
    before = job.view
    job.machine.course.workers_max = 3
    job.come("w2")
    assert job.view.generation == job.view.number > before.number
    assert (job.view.uploader, job.view.origin) == ("w1", "")
    assert [assignment.start for assignment in job.view.assignments] == [0]  # whoever is dealt anything begins at once
    assert sorted(job.view.assigned(0)) == ["w0", "w1", "w2"]
    assert job.machine.course.furthest == 4  # it is at version 5, or 6


def test_before_anybody_has_reported_it_is_whoever_uploaded_the_first_weights_that_has_the_state() -> None:
    job = _Job(_terms(1, 1, workers_max=2, snapshots=True), record=RECORD)
    capture = _of(Capture, job.come("s0", "w0"))[0]
    job.play(Captured("w0", capture.snapshot, tuple(SHARDS)), Snapshotted(capture.snapshot, 0, 0, 0.0))
    before = job.view
    effects = job.come("w1")
    assert _of(FindSnapshot, effects) == []
    assert job.view.generation > before.generation
    assert (job.view.uploader, job.view.origin, sorted(job.view.assigned(0))) == ("w0", "", ["w0", "w1"])


def test_who_dies_right_after_bringing_the_first_weights_may_have_left_them_in_part_on_the_servers() -> None:
    job = _Job(_terms(2, 1, snapshots=True), record=RECORD)
    capture = _of(Capture, job.come("s0", "w0", "w1"))[0]
    job.play(Captured("w0", capture.snapshot, tuple(SHARDS)), Snapshotted(capture.snapshot, 0, 0, 0.0))
    assert (job.view.uploader, job.machine.course.recovery.reached) == ("w0", {"w0": 0})
    effects = _gone(job, "w0")
    assert _of(FindSnapshot, effects) == [FindSnapshot()]  # w1 would wait for shards that nobody brings


def test_a_worker_that_dies_makes_nobody_begin_again() -> None:
    job = _begun()
    before = job.view
    _gone(job, "w1")
    assert job.view.generation == before.generation
    assert job.view.assigned(1) == {"w0": (0, 1, 2, 3, 4, 5)}


def test_a_worker_that_stands_by_gets_the_state_once_it_is_to_compute() -> None:
    job = _begun((*EVERYBODY, "w2"))
    before = job.view
    assert "w2" not in before.assigned(1)
    _gone(job, "w0")
    assert job.view.generation > before.generation
    assert (job.view.uploader, sorted(job.view.assigned(1))) == ("w1", ["w1", "w2"])


def test_one_that_was_without_replicas_for_a_while_has_to_be_given_the_state_again() -> None:
    job = _begun(steps=3)
    job.play(From("w1", Leaving()))
    view = job.view
    job.machine.course.members.leaving.clear()
    job.come("w2")
    assert job.view.generation > view.generation
    assert job.view.uploader == "w0"


def test_a_lost_server_costs_the_step_in_progress_and_no_more_and_so_does_one_that_joins() -> None:
    job = _begun(steps=4)
    assert job.view.backup == {}
    assert job.machine.exposed == 0
    before = job.view
    said = _gone(job, "s0")
    assert job.view.generation > before.generation
    assert (job.view.uploader, job.view.origin, set(job.view.primary.values())) == ("w1", "", {"s1"})
    assert not [effect for effect in _of(Say, said) if "snapshot" in effect.text]
    again = job.view
    job.come("s2")
    assert job.view.generation > again.generation
    assert set(job.view.primary.values()) == {"s1", "s2"}


def test_without_any_server_the_job_waits_for_one_and_goes_on_from_a_worker_s_state() -> None:
    job = _begun(steps=4)
    _gone(job, "s0", "s1")
    assert job.machine.phase is Phase.RECOVERING
    assert job.machine.waiting_for() == "1 more server"
    effects = job.come("s2")
    assert job.machine.phase is Phase.RUNNING
    assert _of(FindSnapshot, effects) == []
    assert (job.view.uploader, job.view.origin) == ("w1", "")


def test_with_too_few_workers_the_job_waits_for_more_and_the_one_that_is_left_uploads_the_state() -> None:
    job = _begun(steps=4, workers_min=2)
    _gone(job, "s0", "s1")
    _gone(job, "w1")
    job.come("s2")
    assert job.machine.waiting_for() == "workers to go on with the state that is here (at least 2 are wanted)"
    job.come("w2")
    assert (job.view.uploader, job.view.origin) == ("w0", "")
    assert job.machine.waiting_for() is None


def test_a_bringer_that_dies_before_its_state_is_known_to_be_whole_is_followed_by_another() -> None:
    job = _begun(steps=4)
    _gone(job, "s0")
    before = job.view
    _gone(job, before.uploader)
    assert job.view.generation > before.generation
    assert job.view.uploader == "w0"


def test_a_bringer_that_dies_after_somebody_has_gone_on_is_not_missed() -> None:
    job = _begun(steps=4)
    _gone(job, "s0")
    job.step(4, only="w0")
    before = job.view
    _gone(job, before.uploader)
    assert job.view.generation == before.generation


def test_when_nobody_has_the_state_the_last_snapshot_has_it() -> None:
    job = _begun(steps=4)
    _gone(job, "w0", "w1")
    said = job.come("w2")
    assert _of(FindSnapshot, said) == [FindSnapshot()]
    assert "the model's state is lost with the workers" in _of(Say, said)[0].text
    job.play(Origin("step-00000002-1", 2))
    assert (job.view.origin, sorted(job.view.assigned(2))) == ("step-00000002-1", ["w2"])
    assert job.machine.course.furthest == 1


def test_when_nobody_has_the_state_and_there_is_no_snapshot_the_job_ends_with_a_sentence() -> None:
    job = _begun(steps=4)
    _gone(job, "w0", "w1")
    job.come("w2")
    (abort,) = _of(Aborted, job.play(Origin("")))
    assert "no worker is left that has the model's state" in abort.reason


def test_before_a_step_is_known_to_be_computed_anybody_s_first_weights_will_do() -> None:
    job = _running(_terms(), EVERYBODY, RECORD)
    _gone(job, "s0")
    assert (job.view.origin, job.view.uploader) == ("", "w0")
    assert job.machine.phase is Phase.RUNNING


def test_a_name_that_comes_again_has_not_the_state_of_the_one_before() -> None:
    job = _begun(steps=4)
    _gone(job, "w1")
    job.step(4)
    job.come("w1")
    assert job.view.uploader == "w0"
    _gone(job, "w0")  # before w1 has reported anything
    assert job.machine.phase is Phase.RECOVERING


def test_at_the_end_those_who_stood_by_are_given_the_last_state() -> None:
    job = _begun((*EVERYBODY, "w2"), steps=STEPS)
    before = job.view
    job.done("w0")
    assert job.view.orders.ending
    assert job.view.generation > before.generation
    assert job.view.uploader == "w0"
    after = job.view
    assert job.tick(1.0) == []  # that is all
    job.done("w0", "w1", "w2")
    assert job.view == after
    assert job.machine.phase is Phase.OVER


def test_the_next_coordinator_knows_who_has_the_state() -> None:
    job = _begun(steps=4)
    again = _Job(_terms(), job.machine.state(), record=RECORD)
    assert isinstance(again.machine, ClusterMachine)
    again.incarnations = job.incarnations
    for member in ("s0", "s1", "w0", "w1"):
        again.join(member, incarnation=job.incarnations[member])
    again.play(Tick(1.0), Left("s0", "test"))
    assert again.machine.phase is Phase.RUNNING
    assert again.view.uploader in ("w0", "w1")
    assert again.view.origin == ""


@pytest.mark.parametrize(("terms", "sentence"), [
    ({"backup_tasks": True}, "--backup-tasks is not supported under rp.AllReduce"),
    ({"replication": 2}, "--replication 2 is not supported under rp.AllReduce"),
])  # fmt: skip
def test_terms_that_the_mode_does_not_support_end_the_job_at_once(terms: dict[str, Any], sentence: str) -> None:
    job = _Job(_terms(**terms), record=RECORD)
    effects = job.come(*EVERYBODY)
    (aborted,) = _of(Aborted, effects)
    assert aborted.reason.startswith(sentence)


# ---- snapshots ----


def test_stateful_workers_store_a_share_each() -> None:
    job = _running(_terms(snapshots=True), EVERYBODY, RECORD)
    taken = job.machine._snapshots.taking
    job.play(Captured("w0", taken.id, tuple(SHARDS)))  # the first weights are the bringer's
    generation = job.view.generation
    job.play(Snapshotted(taken.id, 0, 0, 0.0))
    assert job.view.generation == generation  # it has only to begin
    job.step(0)
    (capture,) = _of(Capture, job.play(SnapshotWanted()))
    assert capture.writers == ("w0", "w1")
    _gone(job, "w1")
    assert job.machine._snapshots.duty.under_way(capture.snapshot) is None  # its share will not come


# ---- the shard's machine ----


@pytest.mark.parametrize("ending", [False, True])
def test_a_worker_that_evaluates_for_long_stores_its_share_afterwards(ending: bool) -> None:
    """Its main thread does both. At the end nobody is told to make room, and to press Ctrl-C."""
    job = _running(_terms(snapshots=True, heartbeat=2.0), EVERYBODY, RECORD)
    (first,) = [job.machine._snapshots.taking]
    job.play(Captured("w0", first.id, tuple(SHARDS)), Snapshotted(first.id, 0, 0, 0.0))
    for step in range(STEPS if ending else 1):
        job.step(step)
    (capture,) = _of(Capture, job.done("w1") if ending else job.play(SnapshotWanted()))
    for step in range(1, 0 if ending else capture.version + 1):
        job.step(step)
    job.play(Captured("w1", capture.snapshot, tuple(SHARDS[list(capture.writers).index("w1") :: 2])))
    for _ in range(3 * SNAPSHOT_PATIENCE):
        job.play(beat("w0", evaluating=True))
        assert _of(Held, effects := job.tick(1.0)) == []
        assert _of(Say, effects) == []
    job.play(beat("w0"))
    for _ in range(2 * SNAPSHOT_PATIENCE - 1):
        assert job.tick(1.0) == []
    (said,) = _of(Held if ending else Say, job.tick(2.0))
    assert "of its shards (w0) are not stored, and none was for 20 s" in said.text


def test_a_shard_begins_at_the_version_that_is_uploaded() -> None:
    machine = ShardMachine(Sync(), 2, rounds=9)
    assert machine.handle(Initialise(1, 5)) == [InstallFirst(1, 5), Published(5)]
    assert machine.handle(Initialise(2, 6)) == [Drop(2)]
    assert machine.handle(Contribute(4, 0, 1.0, 3)) == [Drop(3)]  # of a past that is void
    machine.handle(Contribute(5, 0, 1.0, 4))
    effects = machine.handle(Contribute(5, 1, 1.0, 5))
    assert [(effect.version, effect.step, effect.oldest) for effect in effects if isinstance(effect, Apply)] == [
        (6, 5, 5)
    ]


# ---- the worker's machine ----


class _Bench(AlignedBench):
    """A machine of two shards that may leave no version out."""

    whole = False

    def __init__(self) -> None:
        super().__init__(WorkerMachine("me", 2, frozenset(), 10, in_order=True), view_of(2))

    def begin_again(self) -> None:
        """In another generation, in which it is linked to all servers."""
        self.handle(Viewed(view_of(2, count=2, generation=2)))
        for server in ("s0", "s1"):
            self.handle(LinkUp(server))


def test_a_worker_begins_with_a_whole_version_and_with_no_other() -> None:
    bench = _Bench()
    for shard in range(2):
        assert bench.arrive(shard, 7) == [DropArriving(shard)]
    assert bench.machine.next_action() is None
    assert bench.machine.target == -1
    bench.install(6, whole=True)
    assert bench.machine.step == 6


def test_what_others_begin_again_with_is_not_taken_before_the_view_says_so() -> None:
    bench = _Bench()
    bench.install(6, whole=True)
    assert Land(0) in bench.arrive(0, 7)
    bench.handle(Landed(0))  # a mean; with a state for the other shard the two would not fit together
    early = Arriving(1, 7, ViewNumber(1, 2), begins=True)
    assert bench.handle(early) == [DropArriving(1)]
    assert not isinstance(bench.machine.next_action(), InstallAction)
    bench.begin_again()
    bench.install(7, whole=True)
    assert bench.machine.step == 7


def test_no_version_is_left_out_however_many_there_are() -> None:
    bench = _Bench()
    bench.install(6, whole=True)
    assert bench.machine.next_action() == Compute(6, 0)
    for shard in range(2):
        assert bench.arrive(shard, 8)[0] == DropArriving(shard)
    assert bench.machine.target == 7
    assert bench.machine.next_action() is None  # nobody needs its contribution any more
    bench.install(7)
    assert bench.machine.step == 7


def test_nothing_lands_while_a_version_that_has_become_stale_is_still_being_copied() -> None:
    """The model is to be whole: its worker may be the one that brings it."""
    bench = _Bench()
    bench.install(6, whole=True)
    bench.land(7)
    assert bench.machine.take(bench.machine.next_action())
    bench.begin_again()
    assert [bench.arrive(shard, 6, whole=True) for shard in range(2)] == [[DropArriving(0)], [DropArriving(1)]]
    assert bench.handle(Installed()) == [Fetch(0, 6, "s0"), Fetch(1, 6, "s1")]
    assert bench.machine.step == -1
    bench.install(6, whole=True)


# ---- the configuration ----


def test_all_reduce_is_set_from_the_command_line_like_any_mode() -> None:
    config = resolve({"sync": LocalSteps(4)}, {"sync": {"type": "all-reduce"}})
    assert (config.sync, config.policy, config.mode.holder) == (AllReduce(), Sync(), StateHolder.WORKERS)
    assert config.clips_on_servers is False
    assert resolve({"sync": AllReduce(), "clip": 1.0}).clips_on_servers
    assert group_of(config, "any", 2) == 0


def test_an_own_optimizer_is_part_of_the_job_s_record_and_needs_all_reduce() -> None:
    config = resolve({"sync": AllReduce()})
    assert with_own_optimizer(config, "").own_optimizer == ""
    assert with_own_optimizer(config, "torch.optim.Muon").sync == AllReduce(own="torch.optim.Muon")
    with pytest.raises(ConfigError, match=r"own_optimizer= is not supported under .*needs sync=rp\.AllReduce"):
        with_own_optimizer(resolve({"optimizer": SGD()}), "torch.optim.Muon")
    with pytest.raises(ConfigError, match=r"leave it to job\.train"):
        with_own_optimizer(resolve({"sync": AllReduce(own="another")}), "")
    with pytest.raises(ConfigError, match="its own param_groups"):
        with_own_optimizer(resolve({"sync": AllReduce(), "groups": [{"match": ["*"], "lr_scale": 2.0}]}), "mine")
