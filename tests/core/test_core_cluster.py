"""The coordinator's machine: who is here, which view follows, what survives it, when snapshots are due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.config import JobConfig, record_of
from rallypoint.core import protocol
from rallypoint.core.cluster import effects as fx
from rallypoint.core.cluster import events as ev
from rallypoint.core.cluster.effects import Effect, FindSnapshot, PublishView
from rallypoint.core.cluster.events import Captured, From, Left, Tick
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.state import ClusterState, Origin, Phase, Resumed
from rallypoint.core.cluster.storing.snapshot_duty import CAPTURE_AHEAD, SNAPSHOT_PATIENCE
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import AdamW
from rallypoint.core.placing.assigner import PAUSE_S, ROUNDS
from rallypoint.core.placing.pinned import LATE
from rallypoint.core.placing.view_change import AHEAD
from rallypoint.core.policy import LocalSteps
from rallypoint.core.protocol import (
    Aborted,
    Capture,
    CaughtUp,
    Disproved,
    Done,
    Finished,
    GiveUp,
    Held,
    Leaving,
    NotStored,
    Propose,
    Release,
    Resize,
    Say,
    Snapshotted,
    SnapshotWanted,
    Unrestored,
)
from rallypoint.core.view import Member, View, ViewNumber

STEPS = 20


def _record(
    width: int = 4, frozen: dict[str, str] | None = None, replicas: int = 4, steps: int = STEPS, **config: Any
) -> JobRecord:
    specs = [TensorSpec("body.weight", (8, 8), "float32", 0), TensorSpec("head.weight", (width,), "float32", 0)]
    record = record_of(JobConfig(replicas=replicas, steps=steps, **config), build_layout(specs, 64), frozen)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=JobRecord)  # as it comes from the wire


RECORD = _record()
SHARDS = [shard.index for shard in RECORD.layout.shards]


def _terms(workers: int = 2, servers: int = 2, **others: Any) -> Terms:
    return Terms(**{"workers_start": workers, "workers_max": workers, "servers": servers, **others})


def _of(kind: type, effects: Sequence[Effect]) -> list[Any]:
    """The effects of this kind, or that send a message of it."""
    said = [(effect.message if isinstance(effect, fx.SendTo) else effect, effect) for effect in effects]
    return [effect for what, effect in said if isinstance(what, kind)]


def beat(member: str, *said: Any, **more: Any) -> From:
    """The member's heartbeat."""
    return From(member, protocol.Beat(*said, **more))


def applied(server: str, step: int, generation: ViewNumber) -> From:
    """The server says that it has applied this step."""
    return From(server, protocol.Applied(step, 1, 0.0, generation=generation))


class _Job:
    """A machine, its members' birth numbers, and the answers that a shell would give."""

    def __init__(
        self, terms: Terms, recovered: ClusterState | None = None,
        resume: Resumed | None = None, record: JobRecord = RECORD,
    ) -> None:  # fmt: skip
        self.machine = ClusterMachine(terms, recovered, resume)
        self.record = record
        self.incarnations: dict[str, int] = {}
        self.now = 1.0

    def play(self, *events: ev.Event) -> list[Effect]:
        effects = []
        for event in events:
            effects += self.machine.handle(event)
            self.machine.validate()
        for admitted in _of(fx.Admit, effects):
            self.incarnations[admitted.member] = admitted.incarnation
        return effects

    def join(self, *names: str, incarnation: int = 0, host: str = "") -> list[Effect]:
        effects = []
        for name in names:
            role = "server" if name.startswith("s") else "worker"
            address = f"{name}:1" if role == "server" else ""
            effects += self.play(ev.Joined(Member(name, host or f"host-of-{name}", address, incarnation), role))
        return effects

    def come(self, *names: str) -> list[Effect]:
        """They join, and workers propose."""
        effects = []
        for name in names:
            effects += self.join(name)
            if name.startswith("w"):
                effects += self.play(From(name, Propose(self.record))) + self.reached(name)
        return effects

    def reached(self, worker: str) -> list[Effect]:
        """If the view asks the worker for the version that it holds, it says that as soon as it can be."""
        view = self.machine.view
        if view is None or (view.orders.handover is None and worker not in view.orders.warming):
            return []
        version = self.machine.course.known if view.orders.handover is None else view.orders.handover
        return self.play(From(worker, protocol.Reached(version, view.generation)))

    def all_caught_up(self) -> list[Effect]:
        """Every backup has been filled, and every third server."""
        effects, thirds = [], self.view.incoming
        for shard in sorted(self.view.backup):
            effects += self.caught_up(shard)
        for shard in sorted(thirds):
            effects += self.caught_up(shard, thirds[shard].paired)
        return effects

    def caught_up(self, shard: int, paired: ViewNumber | None = None, by: str = "") -> list[Effect]:
        """The shard's primary (or somebody else) says so of the backup that it met in that view (the right one)."""
        effects = self.play(From(by or self.view.primary[shard], CaughtUp({shard: paired or self.view.paired[shard]})))
        for worker in self.view.assigned(0) if self.view.orders.handover is not None else ():
            effects += self.reached(worker)
        return effects

    def tick(self, seconds: float, *, alive: Sequence[str] | None = None, replaced: Sequence[str] = ()) -> list[Effect]:
        """Time goes by; those who are alive (all by default) give a sign of life."""
        self.now += seconds
        heard = [ev.Heard(member) for member in (self.incarnations if alive is None else alive)]
        return self.play(Tick(self.now, frozenset(replaced)), *heard)

    def done(self, *workers: str) -> list[Effect]:
        """The servers have applied the last round, and these workers hold its version."""
        last, server = self.record.rounds - 1, min(self.view.primary.values())
        self.play(applied(server, last, self.view.generation))
        return self.play(*(From(worker, Done(self.view.generation)) for worker in workers))

    def step(self, step: int, seconds: float = 0.1, only: str = "") -> list[Effect]:
        """Every worker reports its replicas of a step."""
        effects = []
        for worker, own in self.view.assigned(step).items():
            for replica in own if only in ("", worker) else ():
                effects += self.play(ev.Computed(worker, step, replica, seconds, self.view.generation))
        return effects

    def rounds(self, first: int, count: int, seconds: float, slow: float = 1.0) -> list[Effect]:
        """Steps of so many seconds, of which w0 is busy with each of its replicas for `slow` times as long as w1."""
        effects = []
        for step in range(first, first + count):
            self.step(step, 0.1 * slow, only="w0")
            self.step(step, 0.1, only="w1")
            effects += self.tick(seconds)
        return effects

    def store(self, taken: Capture) -> list[Effect]:
        """Every server stores its part, and the manifest is written."""
        effects = []
        for server in taken.writers:
            parts = tuple(self.machine.shards_to_store(server, taken.snapshot))
            effects += self.play(Captured(server, taken.snapshot, parts))
        assert _of(fx.Commit, effects) == [fx.Commit(taken.snapshot, taken.version)]
        return effects + self.play(Snapshotted(taken.snapshot, 0, 0, 0.0))

    @property
    def view(self) -> View:
        assert self.machine.view is not None
        return self.machine.view


def _running(
    terms: Terms | None = None, members: Sequence[str] = ("s0", "s1", "w0", "w1"), record: JobRecord = RECORD
) -> _Job:
    job = _Job(terms or _terms(), record=record)
    job.come(*members)
    assert job.machine.phase is Phase.RUNNING
    job.play(Tick(job.now))
    return job


def _begun(
    terms: Terms | None = None, members: Sequence[str] = ("s0", "s1", "w0", "w1"), record: JobRecord = RECORD
) -> _Job:
    """Steps are being computed, and every backup is in step."""
    job = _running(terms, members, record)
    job.all_caught_up()
    if job.machine.terms.snapshots:
        job.store(Capture(job.machine._snapshots.taking.id, 0, job.machine._snapshots.taking.writers))  # type: ignore[union-attr]
    job.step(0)
    return job


# ---- gathering ----


@given(st.permutations(["s0", "s1", "w0", "w1", "w2"]), st.data())
def test_whatever_order_members_come_in_the_job_begins_once_and_ends_once(
    order: list[str], data: st.DataObject
) -> None:
    job = _Job(_terms(3, 2))
    effects: list[Effect] = []
    to_propose: list[str] = []
    while order or to_propose:
        assert job.machine.phase is Phase.GATHERING
        if to_propose and (not order or data.draw(st.booleans())):
            effects += job.play(From(to_propose.pop(), Propose(RECORD)))
        else:
            name = order.pop()
            effects += job.join(name)
            to_propose += [name] if name.startswith("w") else []
    assert job.machine.phase is Phase.RUNNING
    assert sorted(admitted.incarnation for admitted in _of(fx.Admit, effects)) == [1, 2, 3, 4, 5]
    assert {prepare.member for prepare in _of(protocol.Prepare, effects)} == {"s0", "s1"}
    ((publish,)) = _of(PublishView, effects)
    view = publish.view
    assert sorted(publish.members) == ["s0", "s1", "w0", "w1", "w2"]
    assert view.assigned(0) == {"w0": (0, 1), "w1": (2,), "w2": (3,)}  # sorted: not by who came first
    assert (view.uploader, view.lead(0), view.origin, view.orders.ending) == ("w0", "w0", "", False)
    assert view.number == view.generation == ViewNumber(1, 1)
    assert {member.incarnation for member in (*view.workers, *view.servers)} == {1, 2, 3, 4, 5}
    assert sorted(view.primary) == SHARDS
    assert view.backup == {}
    a, b, c = data.draw(st.permutations(["w0", "w1", "w2"]))
    assert _of(Finished, job.done(a, b, a)) == []
    assert job.view.orders.ending
    assert job.done(c) == [Finished("w0")]
    assert job.machine.phase is Phase.OVER


def test_it_says_what_it_waits_for_all_the_way() -> None:
    job = _Job(_terms(3, 2, workers_min=2))
    assert job.machine.waiting_for() == "2 more servers and 3 more workers"
    job.join("s0", "w0", "w1")
    assert job.machine.waiting_for() == "1 more server and 1 more worker"
    job.join("s1")
    assert job.machine.waiting_for() == "1 more worker"
    job.join("w2")
    job.play(From("w1", Propose(RECORD)))
    assert job.machine.waiting_for() == "the model of w0, w2"
    job.play(From("w0", Propose(RECORD)), From("w2", Propose(RECORD)))
    assert job.machine.waiting_for() is None
    job.step(0)
    job.play(Left("w0", "x"), Left("w1", "x"))
    assert job.machine.waiting_for() == "1 more worker (at least 2 are wanted)"
    job.play(Left("s0", "x"), Left("s1", "x"))
    assert job.machine.waiting_for() == "1 more server"
    job.join("s2")
    assert job.machine.waiting_for() == "a snapshot to go back to"
    job.play(Origin("step-1", 1), From("w2", Propose(RECORD)))
    job.come("w3")
    job.done("w2", "w3")
    assert job.machine.phase is Phase.OVER
    assert job.machine.waiting_for() is None


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_run_by_hand_without_a_server_says_that_its_user_has_to_start_one(by_hand: bool) -> None:
    job = _begun(_terms(servers=1, by_hand=by_hand), ("s0", "w0", "w1"))
    job.step(1)
    said = [announced.text for announced in _of(Say, job.play(Left("s0", "x")))]
    assert said[:2] == ["s0 is gone: x", "parameters are lost with their servers: going back to the last snapshot"]
    if by_hand:
        phrase = "a server: none is left; start one (rallypoint server --coordinator HOST:PORT), unless something "
        assert said[2:] == [f"waiting for {phrase}restarts it"]
        assert job.machine.waiting_for() == f"{phrase}restarts it"
    else:
        assert said[2:] == []
        assert job.machine.waiting_for() == "1 more server"


def test_with_replication_every_shard_has_a_backup_on_another_host() -> None:
    job = _Job(_terms(1, 3, replication=2))
    job.join("s0", host="a")
    job.join("s1", host="a")
    job.join("s2", host="b")
    job.come("w0")
    hosts = {member.id: member.host for member in job.view.servers}
    for shard in SHARDS:
        assert hosts[job.view.backup[shard]] != hosts[job.view.primary[shard]]


@pytest.mark.parametrize(
    ("there", "here", "differs"),
    [
        ({}, {"width": 5}, "a different model: parameter head.weight [5] float32 (group 0) here, parameter head.weight "
         "[4] float32 (group 0) there (w1 is here, w0 is there)"),
        ({"optimizer": AdamW(lr=0.1)}, {"optimizer": AdamW(lr=0.2)},
         "different settings: optimizer.lr is 0.2 here, 0.1 there"),
        ({"frozen": {"a": "1", "b": "2", "c": "3"}}, {"frozen": {"a": "1", "b": "9"}},
         "other values in the frozen parameter b:"),
    ],
    ids=["model", "settings", "frozen"],
)  # fmt: skip
def test_another_job_aborts_one_that_gathers_naming_worker_host_and_what_differs(
    there: dict[str, Any], here: dict[str, Any], differs: str
) -> None:
    job = _Job(_terms())
    job.join("s0", "s1", "w0", "w1")
    (abort,) = job.play(From("w0", Propose(_record(**there))), From("w1", Propose(_record(**here))))
    assert isinstance(abort, Aborted)
    assert abort.reason.startswith("w1 on host-of-w1 ")
    assert differs in abort.reason
    assert job.machine.phase is Phase.OVER


def test_a_worker_that_takes_part_and_proposes_another_job_is_given_up_and_others_compute_for_it() -> None:
    job = _begun(_terms(2, 2), ("s0", "s1", "w0", "w1"))
    effects = job.play(From("w1", Propose(_record(width=5))))
    assert [refused.member for refused in _of(fx.Refuse, effects)] == ["w1"]
    assert job.view.assigned(1) == {"w0": (0, 1, 2, 3)}


def test_a_late_worker_with_a_different_model_is_refused_and_the_job_goes_on() -> None:
    job = _begun()
    job.join("w2")
    refuse, say = job.play(From("w2", Propose(_record(width=5))))
    assert isinstance(refuse, fx.Refuse)
    assert refuse.member == "w2"
    assert refuse.final
    assert "head.weight [5]" in refuse.reason
    assert say == Say(f"refused: {refuse.reason}")
    assert job.machine.phase is Phase.RUNNING
    assert job.play(Left("w2", "it was refused")) == []


@given(st.sampled_from(["s0", "s1", "w0"]), st.booleans())
def test_a_member_that_leaves_while_the_job_gathers_may_be_replaced(name: str, proposed: bool) -> None:
    job = _Job(_terms())
    job.join("s0", "s1", "w0")
    if proposed:
        job.play(From("w0", Propose(RECORD)))
    assert job.play(Left(name, "it closed its connection")) == []
    assert job.machine.phase is Phase.GATHERING
    newcomer = f"{name}-again"
    job.come(newcomer, *(["w0"] if name != "w0" and not proposed else []), "w1")
    assert job.machine.phase is Phase.RUNNING
    assert newcomer in {member.id for member in (*job.view.workers, *job.view.servers)}


def test_when_the_only_one_that_proposed_has_left_another_record_may_be_proposed() -> None:
    job = _Job(_terms())
    job.join("s0", "s1", "w0", "w1")
    job.play(From("w0", Propose(_record(width=9))), Left("w0", "it closed its connection"))
    job.come("w2")
    job.play(From("w1", Propose(RECORD)))
    assert job.machine.phase is Phase.RUNNING


def test_a_record_that_servers_were_sent_stays_when_everybody_leaves_before_the_first_weights() -> None:
    job = _running()
    job.play(Left("w0", "x"), Left("w1", "x"))
    assert job.machine.phase is Phase.GATHERING
    job.join("w2")
    assert job.play(Left("w2", "x")) == []
    job.join("w3")
    (abort,) = job.play(From("w3", Propose(_record(width=9))))
    assert isinstance(abort, Aborted)
    assert "head.weight [9] float32 (group 0) here" in abort.reason
    assert "the job is there" in abort.reason


def test_a_record_of_workers_that_leave_before_the_first_view_is_sent_to_nobody_and_another_may_be_proposed() -> None:
    job = _Job(_terms(1, 1))
    job.join("w0")
    job.play(From("w0", Propose(_record(width=9))), From("w0", Leaving()))
    assert _of(protocol.Prepare, job.join("s0")) == []
    job.play(Left("w0", "it has left"))
    job.join("w1")
    assert _of(protocol.Prepare, job.play(From("w1", Propose(RECORD)))) == [fx.SendTo("s0", protocol.Prepare(RECORD))]


def test_a_worker_that_returns_while_the_job_gathers_again_is_not_sent_the_view_of_those_who_left() -> None:
    job = _running()
    job.play(Left("w0", "x"), Left("w1", "x"))
    job.join("w2")
    assert job.join("w2", incarnation=job.incarnations["w2"]) == [fx.Admit("w2", job.incarnations["w2"])]


def test_a_proposal_of_somebody_unknown_and_one_made_twice_change_nothing() -> None:
    job = _begun()
    assert job.play(From("w7", Propose(_record(width=9))), From("w0", Propose(RECORD))) == []


@given(st.permutations(["replicas", "seed", "clip"]), st.integers(1, 3))
def test_the_disagreement_names_the_first_setting_in_alphabetical_order(keys: list[str], count: int) -> None:
    changed = dict.fromkeys(keys[:count], 77)
    found = disagreement(RECORD, msgspec.structs.replace(RECORD, config={**RECORD.config, **changed}))
    assert found.startswith(f"different settings: {min(changed)} is 77 here, ")


def test_equal_records_agree_before_and_after_the_wire() -> None:
    record = _record(optimizer=AdamW(betas=(0.8, 0.9)))
    assert disagreement(record, _record(optimizer=AdamW(betas=(0.8, 0.9)))) is None
    sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=JobRecord) for _ in range(2)]
    assert disagreement(*sent) is None


# ---- workers that come and go ----


def test_a_dead_worker_s_replicas_go_to_the_others_at_once_and_survivors_keep_theirs() -> None:
    job = _begun(_terms(3), ("s0", "s1", "w0", "w1", "w2"))
    before = job.view.assigned(0)
    said, published = job.play(Left("w1", "its connection ended"))
    assert said == Say("w1 is gone: its connection ended")
    assert isinstance(published, PublishView)
    assigned = published.view.assigned(0)
    assert sorted(replica for own in assigned.values() for replica in own) == [0, 1, 2, 3]
    assert set(before["w0"]) <= set(assigned["w0"])
    assert set(before["w2"]) <= set(assigned["w2"])
    assert "w1" not in {member.id for member in published.view.workers}
    assert published.view.generation == ViewNumber(1, 1)
    assert published.view.number > published.view.generation


def test_a_new_worker_is_assigned_replicas_from_a_step_ahead_of_the_furthest_one_seen() -> None:
    job = _begun(_terms(2, workers_max=4))
    job.step(1)
    job.step(2)
    job.come("w2")
    assert len(job.view.assignments) == 1  # four replicas are done no sooner by three workers than by two
    assert dict(job.view.assigned(9)) == {"w0": (0, 1), "w1": (2, 3), "w2": ()}
    job.come("w3")
    now, later = job.view.assignments
    assert (now.start, later.start) == (0, 2 + AHEAD)
    assert dict(job.view.assigned(3)) == {"w0": (0, 1), "w1": (2, 3), "w2": (), "w3": ()}
    assert dict(job.view.assigned(4)) == {"w0": (0,), "w1": (1,), "w2": (2,), "w3": (3,)}


def test_who_computes_makes_no_room_for_one_that_came_first_and_was_ready_last() -> None:
    job = _Job(_terms(1, 1, workers_max=2))
    job.join("w1")
    job.come("s0", "w0", "w2")
    assigned = job.view.assigned(0)
    assert sorted(assigned) == ["w0", "w2"]
    job.play(From("w1", Propose(RECORD)))
    assert job.view.assigned(0) == assigned
    assert _again(job).machine.course.active() == ["w0", "w2"]


def test_a_job_may_be_resized_and_the_next_coordinator_keeps_to_it() -> None:
    job = _begun(_terms(2), ("s0", "s1", "w0", "w1", "w2"))
    revision = job.machine.revision
    job.play(Resize(3))
    assert job.machine.revision > revision
    assert job.machine.course.active() == ["w0", "w1", "w2"]
    job.play(Resize(1))
    assert dict(job.view.assigned(0)) == {"w0": (0, 1, 2, 3)}
    assert _again(job).machine.course.active() == ["w0"]
    job.play(Resize(0))
    assert job.machine.course.active() == ["w0"]


def test_below_the_minimum_of_workers_nobody_computes_and_the_job_goes_on_when_one_comes() -> None:
    job = _begun(_terms(2, workers_min=2))
    job.step(3)
    job.play(Left("w0", "x"))
    assert job.view.assignments == ()
    job.come("w2")
    assert sorted(r for own in job.view.assigned(4).values() for r in own) == [0, 1, 2, 3]


def test_a_worker_told_to_go_hands_its_replicas_back_and_its_leaving_is_no_fault() -> None:
    job = _begun()
    assert [type(effect) for effect in job.play(From("w0", Leaving()))] == [PublishView]
    assert not job.view.takes_part("w0", 0)
    assert dict(job.view.assigned(1)) == {"w1": (0, 1, 2, 3)}
    assert job.play(Left("w0", "it closed its connection"))[0] == Say("w0 has left: it closed its connection")
    assert job.play(From("w7", Leaving())) == []


def test_a_process_that_comes_under_the_name_of_another_replaces_it_under_a_new_incarnation() -> None:
    job = _begun()
    old = job.incarnations["w0"]
    effects = job.come("w0")
    assert Say("w0 is gone: another process came under its name") in effects
    assert job.incarnations["w0"] > old
    assert [member.incarnation for member in job.view.workers if member.id == "w0"] == [job.incarnations["w0"]]


def test_a_server_that_was_told_to_go_is_let_go_once_all_of_its_shards_are_elsewhere() -> None:
    job = _begun()
    job.step(0)
    held = job.view.shards_of("s1")
    assert held
    effects = job.play(From("s1", Leaving()))
    assert _of(protocol.Finished, effects) == []
    assert {job.view.backup[shard] for shard in held} == {"s0"}  # being filled
    assert job.view.shards_of("s1") == held
    effects = job.all_caught_up()
    assert _of(protocol.Finished, effects) == [fx.SendTo("s1", protocol.Finished())]
    assert set(job.view.primary.values()) == {"s0"}
    generation = job.view.generation
    effects = job.play(Left("s1", "it closed its connection"))
    assert Say("s1 has left: it closed its connection") in effects
    assert job.view.generation == generation  # nothing was rolled back


def test_a_server_that_was_told_to_go_keeps_its_copies_until_others_have_them_and_gets_no_more() -> None:
    job = _begun(_terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1"))
    job.step(0)
    job.all_caught_up()
    held = {shard for shard in SHARDS if "s1" in job.view.holders_of(shard)}
    effects, views = job.play(From("s1", Leaving())), [job.view]
    while not _of(protocol.Finished, effects):
        assert {shard for shard in SHARDS if "s1" in job.view.holders_of(shard)} <= held
        assert job.machine.exposed == 0
        effects = job.all_caught_up()
        views.append(job.view)
    assert "s1" not in job.view.holders
    promoted = {shard: views[0].backup[shard] for shard in views[0].shards_of("s1")}
    assert promoted.items() <= job.view.primary.items()  # who had a copy already
    assert job.machine.exposed == 0


@pytest.mark.parametrize("killed", ["s0", "s1", "s2"])
@pytest.mark.parametrize("happening", ["leaves", "joins"])
def test_with_a_backup_one_loss_rolls_nothing_back_whatever_moves(happening: str, killed: str) -> None:
    """Each server is killed at each moment while s1 hands its shards over, or while s3 gets some."""
    for moment in range(100):
        job = _begun(_terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1"), record=_record(width=200))
        job.step(0)
        job.all_caught_up()
        assert job.machine.exposed == 0
        generation = job.view.generation
        job.play(From("s1", Leaving())) if happening == "leaves" else job.come("s3")
        for _ in range(moment):
            if not _one_more(job):
                break
        else:
            assert job.machine.exposed == 0
            assert _of(FindSnapshot, job.play(Left(killed, "its connection ended"))) == []
            assert (job.machine.phase, job.view.generation) == (Phase.RUNNING, generation)
            continue
        return
    pytest.fail("they move for ever")


def _one_more(job: _Job) -> bool:
    """One more shard has caught up, or one more worker holds the version before which shards move. False if all is
    done."""
    view, views = job.view, job.machine.course.views
    behind = [(shard, view.paired[shard]) for shard in sorted(view.backup.keys() - views.caught_up)]
    behind += [(shard, view.incoming[shard].paired) for shard in sorted(view.incoming.keys() - views.arrived)]
    for shard, paired in behind[:1]:
        job.play(From(view.primary[shard], CaughtUp({shard: paired})))
    reached = job.machine.course.handover.reached
    late = [w for w in view.assigned(0) if reached.get(w, -1) < (view.orders.handover or -1)]
    for worker in late[:1] if not behind else ():
        job.reached(worker)
    return bool(behind or late)


def test_a_server_that_is_killed_while_its_shards_move_is_a_lost_server() -> None:
    job = _begun(_terms(snapshots=True))
    job.play(From("s1", Leaving()))
    moving = job.view.shards_of("s1")
    for shard in moving[1:]:
        assert _of(PublishView, job.caught_up(shard)) == []  # all of them move together
    effects = job.play(Left("s1", "its connection ended"))
    assert _of(FindSnapshot, effects) == [FindSnapshot()]
    assert job.machine.phase is Phase.RECOVERING


def test_a_coordinator_that_takes_over_goes_on_with_a_drain_when_the_server_says_so_again() -> None:
    before = _begun()
    before.play(From("s1", Leaving()))
    job = _Job(before.machine.terms, before.machine.state())
    for name in ("s0", "s1", "w0", "w1"):
        job.join(name, incarnation=before.incarnations[name])
    job.play(Tick(job.now))
    assert _of(protocol.Finished, job.play(From("s1", Leaving()))) == []  # s0 does not hold its shards yet
    assert {job.view.backup[shard] for shard in job.view.shards_of("s1")} == {"s0"}
    dismissed = [fx.SendTo("s1", protocol.Finished())]
    assert _of(protocol.Finished, job.all_caught_up()) == dismissed
    assert _of(protocol.Finished, job.play(From("s1", Leaving()))) == dismissed  # should the first one have been lost
    assert job.view.generation == before.view.generation


def test_two_of_three_servers_that_drain_at_once_hand_all_over_although_no_backup_is_left() -> None:
    job = _begun(_terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1"))
    job.all_caught_up()
    generation = job.view.generation
    effects = job.play(From("s1", Leaving()), From("s2", Leaving()))
    dismissed: set[str] = set()
    while dismissed != {"s1", "s2"}:
        dismissed |= {effect.member for effect in _of(protocol.Finished, effects)}
        assert not dismissed & {*job.view.primary.values(), *job.view.backup.values()}
        effects = job.all_caught_up()
    assert {*job.view.primary.values(), *job.view.backup.values()} == {"s0"}
    assert job.machine.exposed == len(SHARDS)
    job.play(Left("s1", "x"), Left("s2", "x"))
    job.come("s3")
    job.all_caught_up()  # the shards that move to s3 are promoted there
    job.all_caught_up()  # and get s0 as their backup
    assert (job.machine.exposed, job.view.generation) == (0, generation)


def test_the_last_server_is_not_let_go() -> None:
    job = _begun()
    job.step(0)
    job.play(From("s0", Leaving()), From("s1", Leaving()))
    assert _of(protocol.Finished, job.all_caught_up()) == []


def test_nothing_is_published_when_nothing_has_changed() -> None:
    job = _begun()
    revision = job.machine.revision
    caught_up = CaughtUp({0: ViewNumber(1, 99)})
    assert job.play(From("w9", Leaving()), Left("w9", "x"), From("w9", GiveUp("x")), From("s0", caught_up)) == []
    assert job.tick(0.5) == []
    assert job.machine.revision == revision


# ---- signs of life ----


def test_a_silent_member_is_given_up_after_a_heartbeat_and_told_so() -> None:
    job = _begun(_terms(heartbeat=2.0))
    assert job.tick(1.9, alive=["s0", "s1", "w1"]) == []
    effects = job.tick(0.2, alive=["s0", "s1", "w1"])
    assert effects[0] == fx.Refuse("w0", "given up: no sign of life for 2.1 s")
    assert effects[1] == Say("w0 is gone: no sign of life for 2.1 s")
    assert "w0" not in {member.id for member in job.view.workers}


def test_who_is_given_up_just_before_the_end_may_still_come_back_for_the_last_version() -> None:
    job = _begun(_terms(heartbeat=2.0, snapshots=False))
    job.tick(1.9, alive=["s0", "s1", "w1"])
    job.tick(0.2, alive=["s0", "s1", "w1"])
    assert _of(Finished, job.done("w1")) == []
    assert job.machine.waiting_for() == "w0 to come back, given up just before the end"
    job.join("w0")  # that is not enough: it has no model yet, and would go without the last version
    assert _of(Finished, job.tick(1.0)) == []
    effects = job.play(From("w0", Propose(RECORD)))
    assert any("w0" in publish.members for publish in _of(PublishView, effects))
    assert _of(Finished, job.tick(1.9)) == []
    assert _of(Finished, job.done("w0")) == [Finished("w1")]


def test_a_new_coordinator_gives_everybody_a_whole_heartbeat() -> None:
    old = _begun(_terms(heartbeat=2.0))
    job = _Job(_terms(heartbeat=2.0), recovered=old.machine.state())
    assert job.play(Tick(1000.0)) == []
    assert job.play(Tick(1001.9), ev.Heard("s0"), ev.Heard("w0")) == []
    assert [refuse.member for refuse in _of(fx.Refuse, job.play(Tick(1002.1)))] == ["w1", "s1"]


# ---- speeds ----


def test_a_worker_that_has_become_slow_is_assigned_less() -> None:
    job = _begun(_terms(2))
    job.rounds(1, ROUNDS, 0.8, slow=4.0)
    later = job.view.assignments[-1]
    assert later.start == job.machine.course.furthest + AHEAD
    assert _sizes(later.replicas) == {"w0": 1, "w1": 3}
    assert job.tick(2.5) == []  # the change has not come to count yet
    job.rounds(later.start - 1, ROUNDS + 2, 0.4, slow=4.0)
    assert _sizes(job.view.assigned(STEPS)) == {"w0": 1, "w1": 3}, "it has paid: it stays"


@pytest.mark.slow
def test_what_was_assigned_for_steps_that_are_over_is_forgotten() -> None:
    """A worker goes and another comes, again and again: servers take what was assigned lately, and no more."""
    names = [f"w{number}" for number in range(6)]
    job = _begun(_terms(6, workers_max=6), ("s0", "s1", *names), record=_record(replicas=48, steps=4000))
    for number in range(6, 36):
        for step in range(first := (number - 6) * (LATE + 6), first + LATE + 6):
            job.step(step)
            job.play(applied("s0", step, job.view.generation))
        leaver, before = sorted(job.view.assigned(step))[number % 6], job.view
        job.play(Left(leaver, "it died"))
        for worker, own in before.assigned(step).items():  # what is on its way now still counts
            assert worker == leaver or job.view.takes(worker, own)
        job.come(f"w{number}")
        may = sum(map(len, job.view.contributors.values()))
        assert may <= 3 * 48, f"{may} after {number - 5} losses"


def test_an_assignment_by_speed_that_does_not_make_steps_shorter_is_taken_back_and_tried_again_much_later() -> None:
    """Workers that share a machine's cores slow each other down: whoever happens to begin first looks fast."""
    job = _begun(_terms(2), record=_record(steps=1000))
    before = job.view.assigned(0)
    job.rounds(1, ROUNDS, 0.8, slow=4.0)
    start = job.view.assignments[-1].start
    job.rounds(start - 1, ROUNDS + 2, 0.8, slow=4.0)
    assert _sizes(job.view.assigned(start)) == {"w0": 1, "w1": 3}
    back = job.view.assignments[-1]
    assert (back.start, back.replicas) == (job.machine.course.furthest + AHEAD, before)
    quiet = int(PAUSE_S / 0.8) - 1
    assert _of(PublishView, job.rounds(job.machine.course.furthest + 1, quiet, 0.8, slow=4.0)) == []
    assert len(_of(PublishView, job.rounds(job.machine.course.furthest + 1, 3, 0.8, slow=4.0))) == 1
    assert _sizes(job.view.assignments[-1].replicas) == {"w0": 1, "w1": 3}


def test_a_worker_that_computed_nothing_because_it_was_slow_is_tried_again() -> None:
    job = _begun(_terms(2), record=_record(steps=1000))
    job.rounds(1, ROUNDS, 0.8, slow=40.0)
    assert _sizes(job.view.assigned(100)) == {"w0": 0, "w1": 4}
    job.rounds(job.machine.course.furthest + 1, 2 + ROUNDS + 1, 0.4, slow=40.0)
    assert _sizes(job.view.assigned(100)) == {"w0": 0, "w1": 4}
    began = job.now
    while _sizes(job.view.assignments[-1].replicas) == {"w0": 0, "w1": 4}:
        job.rounds(job.machine.course.furthest + 1, 1, 0.4)
    assert 50.0 < job.now - began < 70.0
    job.rounds(job.machine.course.furthest + 1, 2 + ROUNDS + 1, 0.2)
    assert _sizes(job.view.assigned(300)) == {"w0": 2, "w1": 2}


def _sizes(assigned: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {worker: len(own) for worker, own in assigned.items()}


def test_a_replica_that_leaves_something_on_its_worker_is_not_moved_for_speed_s_sake() -> None:
    job = _begun(_terms(2), record=_record(sync=LocalSteps(steps=2)))
    before = job.view
    assert job.rounds(1, 2 * ROUNDS, 0.8, slow=4.0) == []
    assert job.view == before


def test_nor_is_it_moved_because_a_server_has_gone_while_its_worker_was_slow() -> None:
    terms, names = _terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1")
    for record in (_record(sync=LocalSteps(steps=2)), _record()):
        job = _begun(terms, names, record=record)
        before = job.view.assigned(0)
        job.rounds(1, ROUNDS - 1, 0.8, slow=4.0)
        job.play(Left("s0", "its connection ended"))
        assert "s0" not in job.view.primary.values()
        assert job.view.assigned(100) == before


def test_an_assignment_that_is_still_to_come_stays_when_a_server_goes() -> None:
    job = _begun(_terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1"))
    job.rounds(1, ROUNDS, 0.8, slow=4.0)
    later = job.view.assignments[-1]
    assert later.start > job.machine.course.furthest
    job.play(Left("s0", "its connection ended"))
    assert "s0" not in job.view.primary.values()
    assert job.view.assignments[-1] == later


@pytest.mark.parametrize("wanted", [True, False])
def test_an_idle_worker_is_asked_for_a_straggler_s_replicas_once_and_only_where_wanted(wanted: bool) -> None:
    job = _begun(_terms(2, backup_tasks=wanted, heartbeat=60.0))
    for step in range(1, 4):
        job.step(step)
    job.step(4, only="w1")
    before = job.view
    done = [job.tick(0.3) for _ in range(3)]
    asked = [_of(protocol.Assist, effects) for effects in done]
    to_ask = [[fx.SendTo("w1", protocol.Assist(4, replica))] for replica in (1, 0)]
    assert asked == ([*to_ask, []] if wanted else [[], [], []])
    if not wanted:
        assert job.view == before
        return
    for effects in done[:2]:  # servers hear of it before the worker can contribute it
        kinds = [type(effect) for effect in effects]
        assert kinds.index(PublishView) < kinds.index(fx.SendTo)
    assert 1 in job.view.contributors["w1"]
    assert msgspec.structs.replace(job.view, number=before.number, contributors=before.contributors) == before


def test_a_backup_task_that_was_given_before_needs_no_other_view() -> None:
    job = _begun(_terms(2, backup_tasks=True, heartbeat=60.0))
    for step in range(1, 4):
        job.step(step)
    for step in (4, 5):
        job.step(step, only="w1")
        done = job.tick(0.3)
        assert _of(protocol.Assist, done)
        assert bool(_of(PublishView, done)) == (step == 4)
        job.step(step)


# ---- servers that come and go ----


def test_a_dead_server_s_backups_are_promoted_and_nothing_is_rolled_back() -> None:
    job = _begun(_terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1"))
    before = job.view
    effects = job.play(Left("s0", "its connection ended"))
    assert _of(FindSnapshot, effects) == []
    for shard, home in before.primary.items():
        kept = before.backup[shard] if home == "s0" else home
        assert job.view.primary[shard] == kept
        assert job.view.backup[shard] not in ("s0", kept)
    assert job.view.generation == before.generation
    assert "s0" not in {member.id for member in job.view.servers}


def test_a_backup_that_was_restarted_has_not_caught_up() -> None:
    job = _begun(_terms(replication=2))
    mine = [shard for shard, backup in job.view.backup.items() if backup == "s0"]
    paired = job.view.paired
    assert _of(FindSnapshot, job.join("s0")) == []
    again = [shard for shard in mine if job.view.backup.get(shard) == "s0"]
    assert again
    for shard in again:
        assert job.view.primary[shard] == "s1"  # as before
        assert job.caught_up(shard, paired[shard]) == []  # said of the process that is gone
    assert not set(again) & set(job.machine.state().caught_up)


def _rolled_back(snapshot: str, version: int) -> _Job:
    """A job of one copy that has lost s0, and begins again from that snapshot on s1."""
    job = _begun()
    for step in range(6):
        job.step(step)
    assert FindSnapshot() in job.play(Left("s0", "x"))
    job.play(Origin(snapshot, version))
    assert job.view.origin == snapshot
    return job


def test_of_a_snapshot_that_was_damaged_after_it_was_verified_the_one_before_is_used() -> None:
    job = _rolled_back("step-4", 4)
    first = job.view
    damaged = From("s1", Unrestored("its file 0 has other bytes", first.generation))
    effects = job.play(damaged)
    assert "s1 cannot go on from snapshot step-4: its file 0 has other bytes" in [
        say.text for say in _of(Say, effects)
    ]
    assert _of(FindSnapshot, effects) == [FindSnapshot()]
    assert job.play(damaged) == []  # said again: it is being answered
    job.play(Origin("step-2", 2))
    assert (job.view.origin, job.machine.course.furthest) == ("step-2", 1)
    assert job.view.generation > first.generation
    assert job.play(damaged) == []  # of the generation before
    job.play(Left("s1", "x"))
    job.come("s9")
    job.play(Origin("step-8", 8))  # taken long after: the damage is over
    assert job.view.origin == "step-8"


@pytest.mark.parametrize(("snapshot", "version"), [("step-4", 4), ("step-8", 8)])
def test_a_damage_that_the_search_does_not_see_or_goes_past_ends_the_job(snapshot: str, version: int) -> None:
    """The same one again: only that server cannot read it. A later one: of the course that the job was taken back from.
    """
    job = _rolled_back("step-4", 4)
    job.play(From("s1", Unrestored("its file 0 has other bytes", job.view.generation)))
    (abort,) = _of(Aborted, job.play(Origin(snapshot, version)))
    assert abort.reason == "s1 cannot go on: its file 0 has other bytes"


def test_only_who_loads_shards_can_say_that_a_snapshot_is_damaged() -> None:
    job = _rolled_back("step-4", 4)
    assert job.play(From("s0", Unrestored("no", job.view.generation))) == []


def _load(view: View) -> dict[str, int]:
    return {member.id: len(view.shards_of(member.id)) for member in view.servers}


@pytest.mark.parametrize("replication", [1, 2])
def test_a_new_server_is_filled_as_a_backup_before_shards_move_to_it(replication: int) -> None:
    job = _begun(_terms(2, 2, replication=replication), record=_record(width=200))
    job.come("s2")
    before = job.view
    assert _load(before)["s2"] == 0
    moving = [shard for shard in before.primary if "s2" in before.holders_of(shard)]
    assert moving
    effects = job.all_caught_up()
    assert _of(FindSnapshot, effects) == []
    assert _load(job.view)["s2"] > 0
    assert set(job.view.shards_of("s2")) <= set(moving)
    assert job.view.generation == before.generation
    if replication == 1:
        assert job.view.backup == {}
    else:
        assert all(job.view.backup[shard] != home for shard, home in job.view.primary.items())


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("width", [20, 80, 200])
def test_while_a_server_may_be_dead_the_copies_of_its_shards_do_not_move(width: int, reset: bool) -> None:
    job = _begun(_terms(2, 2, replication=2), record=_record(width=width))
    before = job.view
    job.play(ev.Unlinked("s0", "its connection broke", reset))
    job.come("s2")
    assert {s: b for s, b in job.view.backup.items() if b == "s1"} == {
        s: b for s, b in before.backup.items() if b == "s1"
    }
    effects = job.tick(0.1) + job.play(Left("s0", "it died"))
    assert not _of(FindSnapshot, effects)
    assert job.view.generation == before.generation
    assert set(job.view.primary.values()) == {"s1"}
    assert set(job.view.backup.values()) == {"s2"}


def test_shards_move_when_a_server_that_was_away_is_back() -> None:
    job = _begun(_terms(2, 2, replication=2), record=_record(width=200))
    (s0,) = (server for server in job.view.servers if server.id == "s0")
    job.play(ev.Unlinked("s0", "its connection broke"))
    job.come("s2")
    assert _load(job.view)["s2"] == 0
    assert "s2" not in job.view.holders
    job.play(ev.Joined(s0, "server"))
    assert "s2" in job.view.holders


def _there_and_back() -> tuple[_Job, list[int], list[View]]:
    """Shards that were to move to s2, then to s3, and then to s2 again: the same process, which has let go of them."""
    job = _begun(_terms(2, 2), record=_record(width=200))
    views = []
    for happening in (lambda: job.come("s2"), lambda: job.come("s3"), lambda: job.play(Left("s3", "x"))):
        happening()
        views.append(job.view)
    first, second, third = ({(s, view.primary[s], b) for s, b in view.backup.items()} for view in views)
    back = sorted(shard for shard, _, backup in (first & third) - second if backup == "s2")
    assert back
    assert all(views[1].backup.get(shard) != "s2" for shard in back)
    return job, back, views


def test_a_word_from_before_a_backup_was_let_go_and_taken_again_says_nothing() -> None:
    job, back, views = _there_and_back()
    revision = job.machine.revision
    for shard in back:
        assert views[0].paired[shard] == views[0].number
        assert job.view.paired[shard] == views[2].number
        for view in views[:2]:
            assert job.caught_up(shard, view.number) == []
    assert job.machine.state().caught_up == ()
    assert job.machine.revision == revision
    assert job.view == views[2]
    for count, shard in enumerate(back[:-1], 1):
        job.caught_up(shard, views[2].number)
        assert job.machine.state().caught_up == tuple(back[:count])


def test_a_word_of_an_older_view_counts_while_primary_and_backup_have_not_parted() -> None:
    job = _running(_terms(replication=2))
    paired = job.view
    job.come("w2")
    assert job.view.number > paired.number
    assert job.view.paired == paired.paired == dict.fromkeys(SHARDS, paired.number)
    shard = SHARDS[0]
    assert job.caught_up(shard, job.view.number) == []
    assert job.machine.state().caught_up == ()
    job.caught_up(shard, paired.number)
    assert job.machine.state().caught_up == (shard,)


def test_a_word_from_before_a_roll_back_says_nothing() -> None:
    job = _running(_terms(replication=2))
    before = job.view
    job.play(Left("w0", "x"))  # who was to bring the first weights
    assert job.view.generation > before.number
    kept = [shard for shard in SHARDS if (job.view.primary[shard], job.view.backup[shard])
            == (before.primary[shard], before.backup[shard])]  # fmt: skip
    assert kept
    assert job.view.paired == dict.fromkeys(SHARDS, job.view.number)
    assert job.caught_up(kept[0], before.paired[kept[0]]) == []
    assert job.machine.state().caught_up == ()
    job.caught_up(kept[0])
    assert job.machine.state().caught_up == (kept[0],)


def _swapped(*, in_time: bool) -> tuple[_Job, list[int], View]:
    """Shards that s0 and s1 have, and that have changed their primary from s0 to s1. `in_time`: before a step."""
    job = _begun(_terms(2, 1, replication=2), ("s0", "w0", "w1"))
    job.come("s1")
    before = job.view
    for shard in sorted(before.backup):
        job.play(From("s0", CaughtUp({shard: before.paired[shard]})))
    job.reached("w0")
    job.reached("w1") if in_time else job.tick(3.0)
    swapped = [s for s in SHARDS if job.view.primary[s] == before.backup[s] and job.view.backup[s] == before.primary[s]]
    assert swapped
    return job, swapped, before


def test_a_demoted_primary_is_a_backup_that_has_caught_up_where_no_update_can_be_on_its_way() -> None:
    job, swapped, before = _swapped(in_time=True)
    assert all(job.view.paired[shard] == before.paired[shard] for shard in swapped)
    assert all(job.view.proven(shard) for shard in swapped)
    assert job.machine.exposed == 0
    assert _of(FindSnapshot, job.play(Left("s1", "x"))) == []


def test_a_demoted_primary_that_may_be_at_another_version_has_not_caught_up_before_it_has_been_filled() -> None:
    job, swapped, before = _swapped(in_time=False)
    for shard in swapped:
        assert job.view.paired[shard] == job.view.number > before.paired[shard]
        assert not job.view.proven(shard)
        assert job.caught_up(shard, before.paired[shard]) == []
    assert not set(swapped) & set(job.machine.state().caught_up)
    assert FindSnapshot() in job.play(Left("s1", "x"))


# ---- roll back ----


def test_shards_that_are_lost_before_a_step_was_computed_are_uploaded_again() -> None:
    job = _running()
    before = job.view
    effects = job.play(Left("s0", "x"))
    assert _of(FindSnapshot, effects) == []
    assert job.view.generation == job.view.number > before.number
    assert (job.view.origin, job.view.uploader) == ("", "w0")
    assert set(job.view.primary.values()) == {"s1"}


def test_shards_that_are_lost_send_everybody_back_to_the_last_snapshot() -> None:
    job = _begun()
    for step in range(1, 9):
        job.step(step)
    effects = job.play(Left("s0", "its connection ended"))
    assert effects == [
        Say("s0 is gone: its connection ended"),
        Say("parameters are lost with their servers: going back to the last snapshot"),
        FindSnapshot(),
    ]
    said, published = job.play(Origin("step-00000005-1", 5))
    assert said == Say(
        "going on from snapshot step-00000005-1: version 5; 4 steps are computed again. With two servers and "
        "--replication 2 a server's death costs none"
    )
    assert published.view.generation == published.view.number
    assert published.view.origin == "step-00000005-1"
    assert set(published.view.primary.values()) == {"s1"}
    assert sorted(r for own in published.view.assigned(5).values() for r in own) == [0, 1, 2, 3]
    assert job.machine.course.furthest == 4
    assert job.play(Origin("step-00000005-1", 5)) == []


def test_without_a_snapshot_to_go_back_to_the_job_ends_and_says_what_to_set() -> None:
    job = _begun()
    job.play(Left("s0", "x"))
    (abort,) = job.play(Origin("", -1))
    assert isinstance(abort, Aborted)
    assert "set replication to 2, or snapshots" in abort.reason
    assert job.machine.phase is Phase.OVER


def test_while_it_recovers_members_come_and_go_and_no_view_is_published() -> None:
    job = _begun()
    job.play(Left("s0", "x"))
    assert job.play(Left("s1", "y")) == [Say("s1 is gone: y")]
    assert job.play(Origin("step-5", 5)) == []  # there is nobody to load it
    assert _of(PublishView, job.come("w2")) == []
    assert FindSnapshot() in job.join("s3")
    effects = job.play(Origin("step-5", 5))
    assert _of(PublishView, effects)[0].view.servers[0].id == "s3"
    assert job.view.workers[-1].id == "w2"


def test_who_comes_back_to_a_job_that_has_lost_all_workers_gets_no_view_of_it() -> None:
    """The workers that come may bring another record."""
    job = _running()
    job.play(Left("w0", "x"), Left("w1", "x"), Left("s0", "x"))
    assert job.machine.phase is Phase.GATHERING
    assert job.join("s1", incarnation=job.incarnations["s1"]) == [fx.Admit("s1", job.incarnations["s1"])]
    job.come("w5", "s5")
    assert [view.members for view in _of(PublishView, job.join("s1", incarnation=job.incarnations["s1"]))] == [("s1",)]


def test_when_everybody_who_could_begin_is_gone_the_job_gathers_again() -> None:
    job = _running()
    job.play(Left("w0", "x"), Left("w1", "x"), Left("s0", "x"), Left("s1", "x"))
    assert job.machine.phase is Phase.GATHERING
    job.come("s5", "s6")
    assert job.machine.phase is Phase.GATHERING
    job.come("w5")  # it needs no more of them to go on: some may have left for good
    assert job.machine.phase is Phase.RUNNING
    assert job.view.uploader == "w5"
    assert job.view.generation == job.view.number
    generation = job.view.generation
    job.come("w6")
    assert (job.view.uploader, job.view.generation) == ("w5", generation)
    assert job.view.number > generation


def test_when_the_uploader_of_the_first_weights_dies_another_uploads_them() -> None:
    job = _running()
    assert job.view.uploader == "w0"
    job.play(Left("w0", "x"))
    assert job.view.uploader == "w1"
    assert job.view.generation == job.view.number
    assert job.view.origin == ""
    job.step(0)
    generation = job.view.generation
    job.come("w2")
    job.play(Left("w1", "x"))
    assert job.view.generation == generation  # steps have been computed: what it brought is safe


def test_first_values_of_a_store_that_any_worker_may_give_go_back_for_no_dead_worker() -> None:
    """What it has given is whole: a new generation would drop what the other workers have pushed since."""
    layout = build_layout([TensorSpec("a", (8,), "float32", 0), TensorSpec("b", (8,), "float32", 0)], 64)
    job = _running(record=record_of(JobConfig(replicas=4, steps=STEPS, keyed=True), layout, None))
    generation, uploader = job.view.generation, job.view.uploader
    effects = job.play(Left(uploader, "x"))
    assert job.view.generation == generation
    assert not _of(FindSnapshot, effects)
    assert uploader not in job.view.assigned(0)


def test_whoever_was_done_before_a_roll_back_is_not_done_any_more() -> None:
    job = _begun(_terms(2, 2, workers_max=3))
    job.done("w0")
    job.play(Left("s0", "x"), Origin("step-5", 5))
    assert not job.view.orders.ending
    assert _of(Finished, job.done("w1")) == []
    assert _of(Finished, job.done("w0")) == [Finished("w0")]


def test_a_word_of_being_done_from_before_a_roll_back_does_not_count() -> None:
    job = _begun()
    stale = job.view
    job.play(Left("s0", "x"), Origin("step-5", 5))
    assert job.play(From("w0", Done(stale.generation)), From("w1", Done(stale.generation))) == []
    assert not job.view.orders.ending
    assert job.play(ev.Computed("w0", 17, 0, 0.1, stale.generation)) == []
    assert job.machine.course.furthest == 4


# ---- another coordinator (I7) ----


def _again(job: _Job, terms: Terms | None = None) -> _Job:
    """The coordinator is killed, and another started from what it had written down."""
    written = msgspec.msgpack.encode(job.machine.state())
    new = _Job(terms or job.machine.terms, recovered=msgspec.msgpack.decode(written, type=ClusterState))
    new.incarnations = dict(job.incarnations)
    new.play(Tick(1.0))
    return new


def test_members_that_outlived_the_coordinator_keep_their_incarnation_and_get_the_view() -> None:
    old = _begun(_terms(replication=2))
    job = _again(old)
    assert job.machine.phase is Phase.RUNNING
    assert job.view == old.view
    missed = [fx.SendTo("s1", protocol.Prepare(RECORD))]  # the server may have
    for name, prepare in (("w0", []), ("s1", missed)):
        assert job.join(name, incarnation=old.incarnations[name]) == [
            fx.Admit(name, old.incarnations[name]), *prepare, PublishView(old.view, (name,)),
        ]  # fmt: skip
    assert job.machine.state().caught_up == old.machine.state().caught_up


def test_a_word_that_died_with_the_coordinator_is_counted_when_it_is_said_again() -> None:
    old = _running(_terms(replication=2))
    old.step(0)
    paired = old.view.paired
    job = _again(old)  # which has not heard that any backup is in step
    assert job.machine.state().caught_up == ()
    for name in ("s0", "s1", "w1"):
        job.join(name, incarnation=old.incarnations[name])
    job.play(Left("w0", "x"))
    assert job.view.number == ViewNumber(2, 1)
    assert job.view.paired == paired  # who had met before goes on
    for server in ("s0", "s1"):
        job.play(From(server, CaughtUp({shard: paired[shard] for shard in old.view.shards_of(server)})))
    assert job.machine.state().caught_up == tuple(SHARDS)
    assert _of(FindSnapshot, job.play(Left("s0", "x"))) == []
    assert set(job.view.primary.values()) == {"s1"}


def test_a_server_that_died_with_the_coordinator_is_replaced_by_its_backups() -> None:
    old = _begun(_terms(2, 3, replication=2), ("s0", "s1", "s2", "w0", "w1"))
    job = _again(old)
    alive = ["s1", "s2", "w0", "w1"]
    for name in alive:
        job.join(name, incarnation=old.incarnations[name])
    effects = [effect for _ in range(5) for effect in job.tick(1.0, alive=alive)]
    assert _of(FindSnapshot, effects) == []
    assert "s0" not in {member.id for member in job.view.servers}
    assert set(job.view.primary.values()) <= {"s1", "s2"}


def test_a_job_that_was_over_stays_over() -> None:
    old = _begun()
    old.done("w0", "w1")
    job = _again(old)
    assert job.machine.phase is Phase.OVER
    assert job.machine.last_word == Finished("w0")
    assert job.join("w0", incarnation=old.incarnations["w0"]) == [fx.Refuse("w0", "the job is over")]
    assert job.play(Left("w0", "x"), From("w1", GiveUp("x")), Tick(9.0), Origin("x", 1)) == []


def test_a_coordinator_that_had_not_begun_gathers_again() -> None:
    old = _Job(_terms())
    old.come("s0", "w0")
    job = _again(old)
    assert job.machine.phase is Phase.GATHERING
    job.come("s0", "s1", "w0", "w1")
    assert job.view.number == ViewNumber(2, 1)
    assert min(job.incarnations.values()) > 2


def test_what_is_written_down_changes_with_every_view_incarnation_backup_and_ending() -> None:
    job = _begun(_terms(replication=2, workers_max=3))
    for happening in (lambda: job.come("w2"), lambda: job.play(Left("s1", "x")), lambda: job.done("w0", "w1", "w2")):
        revision, view = job.machine.revision, job.machine.view
        happening()
        assert job.machine.view is not view
        assert job.machine.revision > revision


# ---- resume ----


def test_a_resumed_job_starts_from_its_snapshot_and_never_from_first_weights() -> None:
    job = _Job(_terms(snapshots=True), resume=Resumed(RECORD, "step-00000007-1", 7))
    assert job.machine.waiting_for() == "2 more servers and 2 more workers"
    effects = job.come("s0", "s1", "w0", "w1")
    assert job.view.origin == "step-00000007-1"
    assert _of(Capture, effects) == []
    assert sorted(r for own in job.view.assigned(7).values() for r in own) == [0, 1, 2, 3]


def test_a_job_resumed_after_another_coordinator_has_higher_numbers_and_none_of_its_members() -> None:
    old = _begun()
    job = _Job(_terms(), recovered=old.machine.state(), resume=Resumed(RECORD, "step-7", 7))
    assert job.machine.phase is Phase.GATHERING
    job.come("s0", "s1", "w0", "w1")
    assert job.view.number == ViewNumber(2, 1)
    assert min(job.incarnations.values()) > max(old.incarnations.values())


# ---- snapshots ----


_SNAPSHOTS = _terms(snapshots=True, heartbeat=1000.0)


def test_nothing_is_computed_before_the_first_weights_are_stored() -> None:
    job = _Job(_SNAPSHOTS)
    effects = job.come("s0", "s1", "w0", "w1")
    publish, capture = effects[-2:]
    assert publish.view.assignments == ()
    assert publish.view.uploader == "w0"
    assert (capture.version, sorted(capture.writers)) == (0, ["s0", "s1"])
    stored = job.store(capture)
    assert len(_of(PublishView, stored)) == 1
    assert sorted(r for own in job.view.assigned(0).values() for r in own) == [0, 1, 2, 3]
    assert job.view.generation == publish.view.generation


def test_when_the_first_weights_cannot_be_stored_the_job_says_so_and_goes_on() -> None:
    job = _Job(_SNAPSHOTS)
    (capture,) = _of(Capture, job.come("s0", "s1", "w0", "w1"))
    effects = job.play(NotStored(capture.snapshot, "no space left"))
    assert effects[0] == Say(f"snapshot {capture.snapshot} could not be taken: no space left")
    assert job.view.assignments != ()


def test_a_coordinator_that_finds_first_weights_half_stored_begins_again() -> None:
    old = _Job(_SNAPSHOTS)
    old.come("s0", "s1", "w0", "w1")
    job = _again(old)
    for name in ("s0", "s1", "w0"):
        job.join(name, incarnation=old.incarnations[name])
    assert job.tick(0.25) == []  # not everybody is back
    job.join("w1", incarnation=old.incarnations["w1"])
    publish, capture = job.tick(0.25)
    assert publish.view.generation == publish.view.number == ViewNumber(2, 1)
    assert capture.version == 0
    assert capture.snapshot != old.machine._snapshots.taking.id  # type: ignore[union-attr]


def test_shards_that_change_hands_while_first_weights_are_stored_begin_anew() -> None:
    job = _Job(_terms(snapshots=True, replication=2))
    (first,) = _of(Capture, job.come("s0", "s1", "w0", "w1"))
    job.all_caught_up()
    effects = job.play(Left("s0", "x"))
    (second,) = _of(Capture, effects)
    assert job.view.generation == job.view.number
    assert second.snapshot != first.snapshot


@pytest.mark.parametrize(("every", "versions"), [(5, [5, 10, 15]), (4, [4, 8, 12, 16]), (0, [])])
def test_a_snapshot_is_taken_of_each_multiple_of_so_many_steps(every: int, versions: list[int]) -> None:
    job = _begun(_terms(snapshots=True, heartbeat=1000.0, snapshot_steps=every))
    taken = []
    for step in range(1, 15):
        for capture in _of(Capture, [*job.step(step), *job.tick(0.1)]):
            taken.append(capture.version)
            assert capture.version == step + CAPTURE_AHEAD, "no shard can have passed it"
            job.store(capture)
    assert taken == versions


def test_a_snapshot_that_takes_longer_than_the_time_between_two_is_followed_by_one_at_once() -> None:
    job = _begun(_terms(snapshots=True, heartbeat=1000.0, snapshot_steps=5))
    (first,) = [capture for step in range(1, 9) for capture in _of(Capture, job.step(step))]
    assert first.version == 5
    (second,) = _of(Capture, [*job.store(first), *job.step(9)])
    assert second.version == 9 + CAPTURE_AHEAD


def test_a_snapshot_is_committed_when_all_parts_are_there_and_strangers_parts_do_not_count() -> None:
    job = _begun(_SNAPSHOTS)
    (capture,) = job.play(SnapshotWanted())
    assert job.play(Captured("s0", "another", tuple(SHARDS)), Snapshotted("another", 0, 0, 0.0)) == []
    assert job.play(NotStored("another", "x")) == []
    assert job.play(Captured("s0", capture.snapshot, tuple(SHARDS))) == [], "one cannot know of the other's shards"
    assert job.play(Captured("w0", capture.snapshot, tuple(SHARDS))) == []
    *parts, last = job.view.shards_of("s1")
    for shard in parts:
        assert job.play(Captured("s1", capture.snapshot, (shard,))) == []
    assert job.play(Captured("s1", capture.snapshot, (last,))) == [fx.Commit(capture.snapshot, capture.version)]


def test_a_snapshot_that_comes_too_late_is_taken_again_further_ahead() -> None:
    job = _begun(_SNAPSHOTS)
    (capture,) = job.play(SnapshotWanted())
    job.play(applied("s0", 8, job.view.generation))
    assert job.play(NotStored(capture.snapshot, "too late", passed=9)) == []
    (again,) = _of(Capture, job.tick(0.1))
    assert again.version == 9 + CAPTURE_AHEAD
    assert again.snapshot != capture.snapshot


def test_one_server_s_word_that_it_has_passed_a_version_proves_one_step_more_than_is_known() -> None:
    job = _begun(_SNAPSHOTS)
    (capture,) = job.play(SnapshotWanted())
    job.play(NotStored(capture.snapshot, "too late", passed=STEPS))
    assert job.machine.course.furthest == 1
    (again,) = _of(Capture, job.tick(0.1))
    assert again.version == 1 + CAPTURE_AHEAD, "it is tried again, until the servers' other words are here"


# ---- who holds the last version ----


def test_a_worker_s_word_that_it_holds_the_last_version_waits_until_the_last_round_is_reached() -> None:
    job = _begun(_SNAPSHOTS, members=("s0", "s1", "w0", "w1", "w2"))
    for liar in ("w0", "w2"):  # one that computes, one that stands by
        assert job.play(From(liar, Done(job.view.generation))) == []
    job.step(1)
    assert (job.machine.course.furthest, job.view.orders.ending) == (1, False)
    job.play(applied("s0", STEPS - 2, job.view.generation))
    assert not job.view.orders.ending
    effects = job.play(applied("s0", STEPS - 1, job.view.generation))
    assert job.view.orders.ending, "its word was kept"
    assert [capture.version for capture in _of(Capture, effects)] == [STEPS]
    job.store(_of(Capture, effects)[0])
    assert job.play(From("w1", Done(job.view.generation))) == [Finished("w0")]


def test_a_word_of_the_last_version_that_was_kept_is_dropped_with_its_generation_and_its_worker() -> None:
    job = _begun(_terms())
    job.play(From("w0", Done(job.view.generation)))
    job.play(Left("w0", "it died"))
    job.come("w0")
    job.play(applied("s0", STEPS - 1, job.view.generation))
    assert not job.view.orders.ending


def test_a_worker_that_computes_alone_does_not_end_a_job_whose_servers_are_not_at_its_end() -> None:
    job = _begun(_terms(workers=1), ("s0", "s1", "w0"))
    generation = job.view.generation
    job.play(applied("s0", 0, generation))
    assert job.play(From("w0", Done(generation))) == []
    assert not job.view.orders.ending
    job.play(applied("s1", job.record.rounds - 2, generation))
    assert job.machine.phase is Phase.RUNNING
    assert job.play(applied("s0", job.record.rounds - 1, generation)) != []
    assert job.machine.phase is Phase.OVER


def test_a_server_that_is_gone_does_not_keep_a_job_from_its_end_with_words_that_were_lost() -> None:
    job = _begun(_terms(workers=1, replication=2), ("s0", "s1", "w0"))
    generation = job.view.generation
    job.play(applied("s0", job.record.rounds - 2, generation), Left("s0", "it has ended"))
    job.play(From("w0", Done(generation)))
    assert job.machine.phase is Phase.OVER


def test_a_worker_that_was_set_apart_and_computes_alone_now_ends_the_job() -> None:
    job = _begun()
    job.machine.course.members.apart.add("w0")
    job.play(Left("w1", "killed"))
    assert job.machine.course.computing() == ["w0"], "there is nobody else"
    job.done("w0")
    assert job.machine.last_word == Finished("w0")


def test_when_all_workers_that_compute_say_that_they_hold_the_last_version_nothing_more_is_waited_for() -> None:
    """The reports of the last steps went to a coordinator that died, and so may the servers' words have."""
    job = _begun(_terms(), members=("s0", "s1", "w0", "w1", "w2"))
    assert job.play(From("w0", Done(job.view.generation))) == []
    job.play(From("w1", Done(job.view.generation)))
    assert job.view.orders.ending, "so that the one that stands by gets the last version too"
    assert job.play(From("w2", Done(job.view.generation))) == [Finished("w0")]


def test_a_snapshot_of_a_version_that_takes_longer_than_the_patience_is_waited_for() -> None:
    """Three rounds of local steps, or three steps of a large model, may take minutes."""
    job = _begun(_terms(snapshots=True, heartbeat=2.0))
    (capture,) = job.play(SnapshotWanted())
    for step in range(1, capture.version):
        job.step(step)
        for _ in range(SNAPSHOT_PATIENCE):
            assert job.tick(1.0) == []
    assert job.machine._snapshots.taking.id == capture.snapshot  # type: ignore[union-attr]
    job.store(capture)


def test_a_snapshot_is_taken_again_when_shards_have_changed_hands_under_it() -> None:
    job = _begun(_terms(snapshots=True, replication=2, heartbeat=1000.0))
    (capture,) = job.play(SnapshotWanted())
    job.play(Left("s0", "x"))
    assert job.play(Captured("s1", capture.snapshot, tuple(SHARDS))) == []
    (again,) = _of(Capture, job.tick(0.1))
    assert again.writers == ("s1",)
    assert again.snapshot != capture.snapshot


def test_no_snapshot_is_begun_while_a_server_that_outlived_the_coordinator_is_not_back() -> None:
    old = _begun(_SNAPSHOTS)
    job = _again(old)
    job.join("s0", incarnation=old.incarnations["s0"])
    assert job.play(SnapshotWanted()) == []
    job.join("s1", incarnation=old.incarnations["s1"])
    assert len(_of(Capture, job.tick(0.1))) == 1


# ---- the end ----


def test_the_job_is_over_when_all_are_done_and_the_last_version_is_stored() -> None:
    job = _begun(_SNAPSHOTS)
    effects = job.done("w0")
    assert _of(PublishView, effects)[0].view.orders.ending
    (capture,) = _of(Capture, effects)
    assert capture.version == STEPS
    assert job.done("w1") == []
    assert job.machine.waiting_for() == "a snapshot of the last version, which s0, s1 hold"
    assert job.store(capture)[-1] == Finished("w0")


def test_a_last_version_that_is_stored_before_all_are_done_waits_for_them() -> None:
    job = _begun(_SNAPSHOTS)
    (capture,) = _of(Capture, job.done("w0"))
    assert _of(Finished, job.store(capture)) == []
    assert job.done("w1") == [Finished("w0")]


def test_when_the_last_version_cannot_be_stored_its_members_hold_it_until_there_is_room() -> None:
    job = _begun(msgspec.structs.replace(_SNAPSHOTS, heartbeat=2.0))
    (capture,) = _of(Capture, job.done("w0"))
    job.done("w1")
    (held,) = job.play(NotStored(capture.snapshot, "no space left"))
    assert isinstance(held, Held)
    assert held.text.startswith(f"version {STEPS}, the last, is not stored (no space left). s0, s1 hold it in memory")
    assert job.machine.waiting_for() == (
        "room for the last version, which s0, s1 hold (Ctrl-C ends the job without it)"
    )
    pauses, last = [], job.machine.course.now
    for _ in range(5):
        (again,) = _tries_again(job)
        pauses.append(job.machine.course.now - last)
        last = job.machine.course.now
        assert job.play(NotStored(again.snapshot, "no space left")) == [], "it is said once"
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    (again,) = _tries_again(job)
    assert job.store(again)[-1] == Finished("w0")


def _tries_again(job: Any) -> list[Capture]:
    while True:
        for member in ("s0", "s1", "w0", "w1"):
            job.play(ev.Heard(member))
        if captures := _of(Capture, job.play(Tick(job.machine.course.now + 1.0))):
            return captures


def test_a_user_may_let_the_job_end_without_its_last_version() -> None:
    job = _begun(_SNAPSHOTS)
    (capture,) = _of(Capture, job.done("w0"))
    job.done("w1")
    job.play(NotStored(capture.snapshot, "no space left"))
    assert job.play(Release()) == [Finished("w0")]


def test_a_snapshot_under_way_is_followed_by_that_of_the_last_version() -> None:
    job = _begun(_SNAPSHOTS)
    (early,) = job.play(SnapshotWanted())
    assert _of(Capture, job.done("w0")) == []
    (last,) = _of(Capture, job.store(early))
    assert last.version == STEPS
    job.done("w1")
    assert job.store(last)[-1] == Finished("w0")


def test_a_worker_that_leaves_at_the_end_is_not_waited_for() -> None:
    job = _begun()
    job.done("w0")
    assert job.play(Left("w1", "x"))[-1] == Finished("w0")


def test_a_worker_that_comes_at_the_end_is_waited_for() -> None:
    job = _begun(_terms(2, workers_max=3))
    job.done("w0")
    job.come("w2")
    assert _of(Finished, job.done("w1")) == []
    assert job.done("w2") == [Finished("w0")]


def test_a_done_from_somebody_who_is_no_worker_finishes_nothing() -> None:
    assert _begun().done("s0") == []


def test_a_worker_that_has_not_proposed_the_job_can_have_computed_nothing_of_it() -> None:
    job = _begun()
    job.join("w9")
    furthest = job.machine.course.furthest
    assert job.done("w9") == []
    assert job.play(ev.Computed("w9", furthest + 5, 0, 0.1, job.view.generation)) == []
    assert (job.machine.course.furthest, job.view.orders.ending) == (furthest, False)


@pytest.mark.parametrize("step", [-1, STEPS, 2**64 - 1])
def test_a_report_of_a_step_that_the_job_does_not_have_does_not_count(step: int) -> None:
    job = _begun()
    furthest = job.machine.course.furthest
    assert job.play(ev.Computed("w0", step, 0, 0.1, job.view.generation)) == []
    assert job.machine.course.furthest == furthest


def test_nothing_follows_the_last_word_although_more_members_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _begun()
    gone: list[str] = []

    def ends_the_job(machine: ClusterMachine, member: str, reason: str) -> list[Effect]:
        gone.append(member)
        return machine.course.end(Aborted(reason))

    monkeypatch.setattr(ClusterMachine, "_left", ends_the_job)
    effects = job.machine.handle(Tick(job.now + 1000.0))
    assert len(gone) == 1
    assert len(_of(Aborted, effects)) == 1


# ---- backups that do not hold what they acknowledge ----


def test_a_backup_that_was_disproved_is_given_up_and_holds_nothing_when_it_comes_back() -> None:
    job = _begun(_terms(2, replication=2), ("s0", "s1", "s2", "w0", "w1"))
    shard, backup = next(iter(job.view.backup.items()))
    primary, paired = job.view.primary[shard], job.view.paired[shard]
    assert job.play(From(backup, Disproved(shard, 4, paired))) == [], "it is not the primary"
    assert job.play(From(primary, Disproved(shard, 4, ViewNumber(9, 9)))) == [], "another pair's"
    effects = job.play(From(primary, Disproved(shard, 4, paired)))
    (refused,) = _of(fx.Refuse, effects)
    assert refused.member == backup
    assert refused.reason.startswith(
        f"given up: it acknowledged version 4 of shard {shard}, and does not hold what {primary} sent it"
    )
    assert backup not in {*job.view.primary.values(), *job.view.backup.values()}
    job.play(ev.Joined(Member(backup, "here", f"{backup}:2"), "server"))
    assert backup in {server.id for server in job.view.servers}
    assert backup not in {*job.view.primary.values(), *job.view.backup.values()}
    assert job.play(From(primary, Disproved(shard, 4, paired))) == [], "a word that comes twice gives nobody else up"


@pytest.mark.parametrize("failing", ["w2", "s2"])
def test_a_member_without_a_part_in_the_job_fails_alone(failing: str) -> None:
    """A worker that stands by, a server that has not caught up: whoever knows the token can be one."""
    job = _begun(_terms(servers=2, replication=2), ("s0", "s1", "w0", "w1", "w2"))
    job.join("s2")
    before = job.view
    effects = job.play(From(failing, GiveUp("for fun")))
    assert not _of(Aborted, effects)
    assert _of(fx.Refuse, effects) == [fx.Refuse(failing, "it has failed: for fun", final=True)]
    assert Say(f"{failing} is gone: it has failed: for fun") in effects
    assert job.machine.phase is Phase.RUNNING
    assert job.view.generation == before.generation
    assert failing not in job.machine.course.members


@pytest.mark.parametrize("failing", ["w0", "w1", "s0"])
def test_a_member_with_a_part_in_the_job_ends_it(failing: str) -> None:
    assert _of(Aborted, _begun().play(From(failing, GiveUp("no more")))) == [Aborted(f"{failing}: no more")]


def test_a_worker_that_was_assigned_replicas_in_this_generation_may_know_that_they_fail() -> None:
    job = _begun(_terms(workers=2, servers=2), ("s0", "s1", "w0", "w1", "w2"))
    job.play(Resize(1))
    for step in range(1, 6):
        job.step(step)
    assert set(job.view.assigned(5)) == {"w0"}
    assert _of(Aborted, job.play(From("w1", GiveUp("the loss is nan")))) == [Aborted("w1: the loss is nan")]
