"""A job that fails stores the newest version that its servers hold, in a bounded time, and then ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from test_core_cluster import _begun, _Job, _of, _record, _terms, applied

from rallypoint.codec.spec import TopK
from rallypoint.core.cluster.effects import Commit, Effect, PublishView
from rallypoint.core.cluster.events import Captured, From, Left, Unlinked
from rallypoint.core.cluster.state import ClusterState, Phase
from rallypoint.core.cluster.storing.last_snapshot import PATIENCE_S
from rallypoint.core.cluster.storing.snapshot_duty import SNAPSHOT_PATIENCE
from rallypoint.core.policy import AllReduce
from rallypoint.core.protocol import Aborted, Capture, Finished, GiveUp, Held, NotStored, Release, Say, Snapshotted
from rallypoint.core.view import ViewNumber

WHY = "the loss of replica 0 at step 5 is nan"
ENDED = [Aborted(f"w0: {WHY}")]


def at_step_5(*, heartbeat: float = 1.0, workers: Sequence[str] = ("w0", "w1"), **settings: Any) -> _Job:
    """Steps 0 to 4 are complete, and so is version 5."""
    terms = _terms(workers=len(workers), snapshots=True, heartbeat=heartbeat)
    job = _begun(terms, ("s0", "s1", *workers), _record(**settings))
    for step in range(5):
        job.step(step)
        job.play(*(applied(s, step, job.view.generation) for s in ("s0", "s1")))
    return job


def asked(effects: Sequence[Effect]) -> Capture:
    (capture,) = _of(Capture, effects)
    assert isinstance(capture, Capture)
    return capture


def test_the_version_that_the_servers_hold_is_stored_before_the_job_ends() -> None:
    job = at_step_5()
    effects = job.play(From("w0", GiveUp(WHY)))
    capture = asked(effects)
    assert (capture.version, capture.writers) == (5, ("s0", "s1"))
    assert [said.text for said in _of(Held, effects)] == [
        "w0 has failed; storing the newest version before the job ends (Ctrl-C ends it now)"
    ]
    assert _of(Aborted, effects) == []
    shards = len(job.view.primary)
    assert job.machine.waiting_for() == (
        f"the newest version to be stored before the job ends: {shards} of {shards} shards (s0, s1) are not stored yet"
    )
    assert _of(Aborted, job.store(capture)) == ENDED
    assert job.machine.phase is Phase.OVER


@pytest.mark.parametrize(("claimed", "version"), [(0, 5), (5, 5), (6, 6), (99, 6)])
def test_a_worker_that_fails_proves_at_most_one_version_more_than_is_known(claimed: int, version: int) -> None:
    job = at_step_5()
    assert asked(job.play(From("w0", GiveUp(WHY, claimed, job.view.generation)))).version == version


@pytest.mark.parametrize("stored", [0, 1])
def test_a_failure_that_overtakes_the_servers_word_of_the_version_that_the_worker_has_does_not_lose_it(
    stored: int,
) -> None:
    job = _begun(_terms(snapshots=True), record=_record())
    if stored:
        job.play(*(applied(s, 0, job.view.generation) for s in ("s0", "s1")))
        job.machine._snapshots.duty.last = (1, 1.0)
    capture = asked(job.play(From("w0", GiveUp(WHY, stored + 1, job.view.generation))))
    assert capture.version == stored + 1
    assert _of(Aborted, job.store(capture)) == ENDED


@pytest.mark.parametrize(
    ("version", "stale"), [(0, False), (1, True)], ids=["it has no newer one", "it had one before a roll-back"]
)
def test_a_failure_before_there_is_anything_new_ends_the_job_at_once(version: int, stale: bool) -> None:
    job = _begun(_terms(snapshots=True), record=_record())
    now = job.view.generation
    generation = ViewNumber(now.epoch, now.count - 1) if stale else now
    assert _of(Aborted, job.play(From("w0", GiveUp(WHY, version, generation)))) == ENDED


def test_while_it_is_stored_nobody_takes_the_failed_worker_s_replicas() -> None:
    job = at_step_5()
    capture = asked(job.play(From("w0", GiveUp(WHY))))
    assert (
        _of(PublishView, job.play(Left("w0", "it has ended")) + job.come("w9") + job.tick(100 * PATIENCE_S / 1000))
        == []
    )
    assert job.play(From("w1", GiveUp("the same"))) == []
    assert _of(Aborted, job.store(capture)) == ENDED


def test_a_shard_that_is_further_names_the_version_that_is_stored_instead() -> None:
    job = at_step_5()
    first = asked(job.play(From("w0", GiveUp(WHY))))
    second = asked(job.play(NotStored(first.snapshot, "s1: too late", 6)))
    assert second.version == 6
    assert job.play(Captured("s0", first.snapshot, (0,))) == [], "of the snapshot that was given up"
    assert _of(Aborted, job.store(second)) == ENDED


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (NotStored("", "no space left"), ["could not be taken: no space left"]),
        (Left("s1", "killed"), ["the newest version is not stored: s1, which held it, has ended too"]),
        (Unlinked("s1", "a broken wire"), ["the newest version is not stored: s1, which held it, has ended too"]),
        (Release(), []),
    ],
)
def test_what_cannot_be_stored_is_not_waited_for(event: Any, said: list[str]) -> None:
    job = at_step_5()
    capture = asked(job.play(From("w0", GiveUp(WHY))))
    if isinstance(event, NotStored):
        event = NotStored(capture.snapshot, event.reason)
    effects = job.play(event)
    assert _of(Aborted, effects) == ENDED
    assert [effect.text.removeprefix(f"snapshot {capture.snapshot} ") for effect in _of(Say, effects)] == said


def test_a_slow_store_is_waited_for_as_long_as_files_come() -> None:
    job = at_step_5(heartbeat=0.5)
    capture = asked(job.play(From("w0", GiveUp(WHY))))
    files = [(server, shard) for server in capture.writers for shard in job.view.shards_of(server)]
    assert len(files) > 2
    effects: list[Effect] = []
    for count, (server, shard) in enumerate(files):
        assert f": {len(files) - count} of {len(files)} shards (" in job.machine.waiting_for()
        assert _of(Aborted, job.tick(PATIENCE_S)) == []
        effects = job.play(Captured(server, capture.snapshot, (shard,)))
    assert _of(Commit, effects) == [Commit(capture.snapshot, 5)]
    assert job.machine.waiting_for().endswith(": its manifest is not stored yet")
    assert _of(Aborted, job.play(Snapshotted(capture.snapshot, 0, 0, 0.0))) == ENDED


@pytest.mark.parametrize(("heartbeat", "patience"), [(0.5, PATIENCE_S), (3.0, 3.0 * SNAPSHOT_PATIENCE)])
def test_parts_that_never_come_are_waited_for_so_long_only(heartbeat: float, patience: float) -> None:
    job = at_step_5(heartbeat=heartbeat)
    capture = asked(job.play(From("w0", GiveUp(WHY))))
    assert _of(Aborted, job.tick(1.0)) == []
    own = tuple(job.view.shards_of("s0"))
    assert _of(Aborted, job.play(Captured("s0", capture.snapshot, own))) == []
    assert job.play(Captured("s0", capture.snapshot, own), Captured("s9", capture.snapshot, (0,))) == []
    assert _of(Aborted, job.tick(patience - 0.5)) == []
    assert job.play(Captured("s0", capture.snapshot, own)) == [], "nothing new"
    assert _of(Aborted, job.tick(1.0)) == ENDED


def test_a_snapshot_that_is_committed_too_late_changes_nothing() -> None:
    job = at_step_5()
    capture = asked(job.play(From("w0", GiveUp(WHY))))
    parts = [Captured(s, capture.snapshot, tuple(job.view.shards_of(s))) for s in capture.writers]
    assert _of(Commit, job.play(*parts)) == [Commit(capture.snapshot, 5)]
    assert _of(Aborted, job.tick(PATIENCE_S + 1)) == ENDED
    assert job.play(Snapshotted(capture.snapshot, 0, 0, 0.0)) == []


@pytest.mark.parametrize(
    ("job", "member"),
    [
        (lambda: _begun(_terms()), "w0"),
        (lambda: _begun(_terms(snapshots=True)), "w0"),
        (at_step_5, "s0"),
        (lambda: at_step_5(codec=TopK()), "w0"),
    ],
    ids=["no snapshots", "no step since the last", "a server, and others may be further", "codec states"],
)
def test_where_there_is_nothing_to_store_the_job_ends_at_once(job: Any, member: str) -> None:
    made = job()
    if made.machine.terms.snapshots and made.machine.course.furthest < 1:
        made.machine._snapshots.duty.last = (made.machine.course.furthest + 1, 1.0)
    assert _of(Aborted, made.play(From(member, GiveUp(WHY)))) == [Aborted(f"{member}: {WHY}")]


def test_a_server_that_clips_with_the_others_stores_what_it_holds_too_when_a_step_fails() -> None:
    job = at_step_5(clip=1.0)
    capture = asked(job.play(From("s0", GiveUp(WHY, 5, job.view.generation))))
    assert (capture.version, capture.writers) == (5, ("s0", "s1"))
    assert _of(Aborted, job.store(capture)) == [Aborted(f"s0: {WHY}")]


def test_shards_that_a_server_cannot_vouch_for_are_not_waited_for() -> None:
    assert _of(Aborted, at_step_5(clip=1.0).play(From("s0", GiveUp(WHY)))) == [Aborted(f"s0: {WHY}")]


def followed(job: _Job) -> _Job:
    """The job's next coordinator, to which nobody has come back yet."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(job.machine.state()), type=ClusterState)
    follower = _Job(_terms(snapshots=True), state, record=job.record)
    follower.incarnations = dict(job.incarnations)
    return follower


def test_the_next_coordinator_goes_on_with_the_end_and_says_the_same_reason() -> None:
    job = at_step_5()
    job.play(From("w0", GiveUp(WHY)))
    follower = followed(job)
    assert _of(Capture, follower.tick(1.0, alive=())) == [], "it waits for the servers to come back"
    for member in ("s0", "s1", "w1"):
        follower.join(member, incarnation=job.incarnations[member])
    capture = asked(follower.tick(0.1, alive=()))
    assert (capture.version, capture.writers) == (5, ("s0", "s1"))
    assert _of(Aborted, follower.store(capture)) == ENDED


@pytest.mark.parametrize("came", [("w1", "s0"), ("s0", "w0", "w1")], ids=["another failure", "they are done"])
def test_the_next_coordinator_of_a_failing_job_waits_for_the_servers_whatever_workers_say(came: Sequence[str]) -> None:
    job = at_step_5()
    job.play(From("w0", GiveUp(WHY)))
    follower = followed(job)
    follower.tick(1.0, alive=())
    for member in came:
        follower.join(member, incarnation=job.incarnations[member])
    if "w0" in came:
        assert _of(Finished, follower.done("w0", "w1")) == []
    else:
        follower.play(From("w1", GiveUp("the same")), Left("w1", "it has ended"))
        assert follower.machine.last_word is None
    follower.join("s1", incarnation=job.incarnations["s1"])
    capture = asked(follower.tick(0.1, alive=()))
    assert _of(Aborted, follower.store(capture)) == ENDED


def test_the_next_coordinator_ends_a_failing_job_without_servers_that_do_not_come_back() -> None:
    job = at_step_5()
    job.play(From("w0", GiveUp(WHY)))
    follower = followed(job)
    follower.join("s0", incarnation=job.incarnations["s0"])
    ended: list[Effect] = []
    for _ in range(20):
        ended += follower.tick(1.0, alive=("s0",))
    assert _of(Aborted, ended) == ENDED


def test_workers_that_hold_the_state_store_it_without_the_one_that_failed() -> None:
    job = at_step_5(sync=AllReduce())
    assert asked(job.play(From("w0", GiveUp(WHY)))).writers == ("w1",)


# ---- a worker that has failed in the middle of a step ----------------------------------------------------------


def torn(job: _Job, member: str = "w0", version: int = 5) -> list[Effect]:
    return job.play(From(member, GiveUp(WHY, version, job.view.generation, sent="some")))


def test_others_compute_what_a_worker_owes_that_failed_in_a_backward_pass_and_no_later_step() -> None:
    job = at_step_5()
    capture = asked(torn(job))
    assert capture.version == 5, "no shard is known to have the update of step 5"
    effects = job.play(NotStored(capture.snapshot, "s1: too late", 6))
    capture = asked(effects)
    (published,) = _of(PublishView, effects)
    assert (capture.version, published.view.orders.paused) == (6, 6)
    assert published.view.assigned(5) == {"w1": (0, 1, 2, 3)}
    assert published.view.primary == {shard: job.view.primary[shard] for shard in published.view.primary}
    assert _of(Aborted, job.store(capture)) == ENDED


def test_others_compute_it_at_once_if_a_server_has_applied_the_step_already() -> None:
    job = at_step_5()
    job.play(applied("s0", 5, job.view.generation))
    effects = torn(job)
    assert asked(effects).version == 6
    (published,) = _of(PublishView, effects)
    assert published.view.orders.paused == 6
    assert published.view.assigned(5) == {"w1": (0, 1, 2, 3)}


def test_what_nobody_can_compute_any_more_is_not_waited_for() -> None:
    job = at_step_5()
    capture = asked(torn(job))
    job.play(NotStored(capture.snapshot, "s1: too late", 6))
    effects = job.play(From("w1", GiveUp("the same", 5, job.view.generation, sent="some")))
    assert _of(Aborted, effects) == ENDED
    (said,) = _of(Say, effects)
    assert said.text.startswith("the newest version is not stored: w0 has failed in the middle of a backward pass")


@pytest.mark.parametrize("first", ["it is gone", "a shard is further"])
def test_others_compute_what_a_failed_worker_owes_that_is_gone_before_the_shards_are_at_one_version(first: str) -> None:
    job = at_step_5()
    capture = asked(job.play(From("w0", GiveUp(WHY, 5, job.view.generation))))
    gone, further = Left("w0", "killed"), NotStored(capture.snapshot, "s1: too late", 6)
    before, after = (gone, further) if first == "it is gone" else (further, gone)
    assert _of(PublishView, job.play(before)) == []
    (published,) = _of(PublishView, job.play(after))
    assert (published.view.orders.paused, published.view.assigned(5)) == (6, {"w1": (0, 1, 2, 3)})


def sent_all(job: _Job, member: str = "w0") -> list[Effect]:
    return job.play(From(member, GiveUp(WHY, 5, job.view.generation, sent="all")))


def test_the_version_that_a_failed_worker_has_sent_all_for_is_stored_though_no_shard_has_it_yet() -> None:
    job = at_step_5()
    capture = asked(sent_all(job))
    assert capture.version == 6
    assert sent_all(job, "w1") == [], "it has sent all too: the version comes"
    assert _of(Capture, job.play(Left("w0", "it has ended"), Left("w1", "it has ended"))) == [], "they have it"
    assert _of(Aborted, job.store(capture)) == ENDED


def test_where_that_version_cannot_be_made_the_one_before_is_stored() -> None:
    """All workers run the same script, so the others fail soon too."""
    job = at_step_5()
    sent_all(job)
    capture = asked(job.play(From("w1", GiveUp("the same", 5, job.view.generation))))
    assert capture.version == 5
    assert _of(Aborted, job.store(capture)) == ENDED


def test_where_others_are_too_slow_for_that_version_the_one_before_is_stored() -> None:
    job = at_step_5()
    sent_all(job)
    effects: list[Effect] = []
    while not _of(Capture, effects):
        assert _of(Aborted, effects) == []
        effects = job.tick(1.0)
    assert asked(effects).version == 5
    late = job.play(NotStored(asked(effects).snapshot, "s1: too late", 6))
    assert _of(Aborted, late) == ENDED
    assert [said.text for said in _of(Say, late)][-1].startswith("the newest version is not stored: others cannot")


def test_what_a_lost_worker_owes_of_that_version_is_computed_by_one_that_has_not_failed() -> None:
    job = at_step_5(workers=("w0", "w1", "w2"))
    sent_all(job)
    (published,) = _of(PublishView, job.play(Left("w1", "killed")))
    assert (published.view.orders.paused, published.view.assigned(5)) == (6, {"w2": (0, 1, 2, 3)})


def test_the_next_coordinator_lets_others_compute_it_too() -> None:
    job = at_step_5()
    job.play(applied("s0", 5, job.view.generation))
    torn(job)
    follower = followed(job)
    follower.tick(1.0, alive=())
    for member in ("s0", "s1", "w1"):
        follower.join(member, incarnation=job.incarnations[member])
    effects = follower.tick(0.1, alive=())
    assert asked(effects).version == 6
    assert job.view.assigned(5) == {"w1": (0, 1, 2, 3)}
    assert _of(Aborted, follower.store(asked(effects))) == ENDED


def test_who_has_sent_all_and_failed_computes_nothing_more_either() -> None:
    job = at_step_5(workers=("w0", "w1", "w2"))
    capture = asked(torn(job))
    sent_all(job, "w1")
    (published,) = _of(PublishView, job.play(NotStored(capture.snapshot, "s1: too late", 6)))
    assert (published.view.orders.paused, published.view.assigned(5)) == (6, {"w2": (0, 1, 2, 3)})


@pytest.mark.parametrize("reset", [True, False])
def test_who_is_silent_while_others_are_to_compute_what_a_failed_worker_owes_is_not_waited_for(reset: bool) -> None:
    """A process whose system resets its connection is dead; another link may come back."""
    job = at_step_5(workers=("w0", "w1", "w2"))
    capture = asked(torn(job))
    job.play(NotStored(capture.snapshot, "s1: too late", 6))
    effects = job.play(Unlinked("w1", "it is gone", reset))
    seconds = 0
    while not _of(PublishView, effects) and seconds < 60:
        assert _of(Aborted, effects) == []
        effects, seconds = job.tick(1.0), seconds + 1
    (published,) = _of(PublishView, effects)
    assert (published.view.assigned(5), seconds > 0) == ({"w2": (0, 1, 2, 3)}, not reset)


@pytest.mark.parametrize("back", [True, False])
def test_a_server_whose_link_broke_just_before_a_worker_failed_is_waited_for(back: bool) -> None:
    job = at_step_5()
    job.play(Unlinked("s1", "its link broke"))
    effects = job.play(From("w0", GiveUp(WHY)))
    assert effects == []
    if back:
        job.join("s1", incarnation=job.incarnations["s1"])
        assert _of(Aborted, job.store(asked(job.tick(0.1)))) == ENDED
        return
    for _ in range(60):
        if job.machine.phase is not Phase.OVER:
            effects = job.tick(1.0, alive=("s0", "w0", "w1"))
    assert _of(Aborted, effects) == ENDED
    assert any(said.text.startswith("the newest version is not stored: ") for said in _of(Say, effects))


def test_where_nothing_can_be_stored_the_job_ends_at_once_although_a_server_s_link_has_broken() -> None:
    job = _begun(_terms(snapshots=False), record=_record())
    job.play(Unlinked("s1", "its link broke"))
    assert _of(Aborted, job.play(From("w0", GiveUp(WHY)))) == ENDED
