"""Audits, purely: what is audited, by whom, and what a shard does with the opinions."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rallypoint.config import audits_of, resolve
from rallypoint.core.audits.choice import Audits, computing
from rallypoint.core.audits.shard import AuditedShard
from rallypoint.core.policy import Sync
from rallypoint.core.shard.effects import Accepted, Apply, Disputed, Drop, Hold, Take
from rallypoint.core.shard.events import Assigned, Contribute, Initialise
from rallypoint.core.view import Assignment, Dispute, Member, View, ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.errors import ConfigError

FOUR = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "d": ()}


def view_of(assigned: dict[str, tuple[int, ...]], *disputes: Dispute, count: int = 1, same: str = "") -> View:
    """A view of workers on hosts of their own; those named in `same` share one."""
    workers = tuple(Member(w, "shared" if w in same else f"host-{w}") for w in assigned)
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, 1), workers=workers, servers=(), primary={0: "s"},
        assignments=(Assignment(0, assigned),), contributors={w: own for w, own in assigned.items() if own},
        disputes=disputes,
    )  # fmt: skip


# ---- the choice ----


def test_the_share_that_is_audited_is_the_one_that_was_asked_for() -> None:
    audits = Audits(seed=3, share=0.01, replicas=8)
    chosen = sum(len(audits.chosen(step)) for step in range(5000))
    assert 320 <= chosen <= 480, "one in a hundred of 40,000"
    assert [Audits(4, 0.01, 8).chosen(step) for step in range(500)] != [audits.chosen(step) for step in range(500)]
    assert all(Audits(0, 1.0, 3).chosen(step) == (0, 1, 2) for step in range(50))


def test_another_worker_audits_and_one_of_another_host_if_there_is_one() -> None:
    audits, view = Audits(1, 1.0, 6), view_of(FOUR)
    found = {audits.auditor(view, step, 0) for step in range(60)}
    assert found == {"b", "c"}, "neither the owner nor who has nothing to compute at this step"
    assert {audits.auditor(view_of(FOUR, same="ab"), step, 0) for step in range(60)} == {"c"}
    assert audits.auditor(view_of({"a": (0, 1, 2, 3, 4, 5)}), 7, 0) == "", "nobody is there who could"


def test_each_audited_replica_has_exactly_one_auditor_among_the_duties_of_all() -> None:
    audits, view = Audits(1, 0.5, 6), view_of(FOUR)
    for step in range(40):
        duties = [replica for worker in FOUR for replica in audits.duties(view, worker, step)]
        assert sorted(duties) == list(audits.chosen(step))


def test_the_third_of_a_dispute_has_that_replica_among_its_duties() -> None:
    audits = Audits(1, 0.0, 6)
    view = view_of(FOUR, Dispute(7, 0, ("a", "b"), "c"))
    assert audits.duties(view, "c", 7) == (0,)
    assert audits.duties(view, "c", 8) == audits.duties(view, "b", 7) == ()
    assert audits.another(view, 7, 0, ("a", "b")) == "c"


# ---- the worker ----


def test_a_worker_computes_its_own_replicas_first_and_adds_up_none_that_is_audited() -> None:
    audits = Audits(1, 0.4, 6)
    view = view_of(FOUR)
    step = next(s for s in range(99) if 0 in audits.chosen(s) and audits.duties(view, "a", s))
    machine = WorkerMachine("a", 1, frozenset(), 100, audits=audits)
    machine.presum.shards, machine.presum.replicas, machine.presum.largest = frozenset({0}), 6, 8
    machine.step, machine.view = step, view
    machine._duties.plan(view, step, machine.presum)
    assert list(machine.assigned) == [0, 1, *audits.duties(view, "a", step)]
    assert machine.presum.part(0, 0) is None, "it is sent as a leaf"


# ---- the shard ----


def shard_of(view: View, replicas: int = 2) -> AuditedShard:
    """At version 0, primary, in this view."""
    machine = AuditedShard(Sync(), replicas, rounds=9)
    machine.handle(Initialise(0))
    machine.handle(Assigned(primary=True, backup=False, fresh=False))
    machine.viewed(view)
    return machine


def sent(sender: str, ticket: int, value: bytes = b"x", replica: int = 0) -> Contribute:
    return Contribute(0, replica, 1.0, ticket, sender=sender, digest=value)


THREE = {"a": (0,), "b": (1,), "c": ()}


def test_a_contribution_waits_until_another_worker_has_sent_the_same_bytes() -> None:
    machine = shard_of(view_of(THREE))
    assert machine.handle(sent("a", 1)) == [Hold(1, credit=True)]
    assert machine.handle(sent("a", 2)) == [Drop(1), Hold(2, credit=True)], "its own repeat is no second opinion"
    effects = machine.handle(sent("b", 3))
    assert effects[:3] == [Hold(3, credit=True), Drop(3), Accepted(0, 0, ("a", "b"))]
    assert isinstance(effects[3], Take)
    assert machine.handle(sent("c", 4)) == [Drop(4)], "a repeat (I2)"
    machine.validate()


def test_what_has_lost_is_never_added() -> None:
    machine = shard_of(view_of({"a": (0,), "b": (1,), "c": (2,)}), replicas=3)
    machine.handle(sent("a", 1, b"wrong"))
    assert machine.handle(sent("b", 2))[-1] == Disputed(0, 0, ("a", "b"))
    effects = machine.handle(sent("c", 3))
    assert Accepted(0, 0, ("b", "c"), ("a",)) in effects
    assert [e.ticket for e in effects if isinstance(e, Take)] == [2]
    assert {e.ticket for e in effects if isinstance(e, Drop)} == {1, 3}


def test_three_opinions_that_differ_wait_and_say_so() -> None:
    machine = shard_of(view_of({"a": (0,), "b": (1,), "c": (2,)}), replicas=3)
    machine.handle(sent("a", 1, b"x"))
    machine.handle(sent("b", 2, b"y"))
    assert machine.handle(sent("c", 3, b"z")) == [Hold(3, credit=True), Disputed(0, 0, ("a", "b", "c"))]


def test_a_weight_that_differs_is_another_contribution() -> None:
    machine = shard_of(view_of(THREE))
    machine.handle(sent("a", 1))
    assert machine.handle(replace(sent("b", 2), weight=2.0))[-1] == Disputed(0, 0, ("a", "b"))


def test_a_lone_worker_waits_for_nobody() -> None:
    machine = shard_of(view_of({"a": (0,)}), replicas=1)
    assert any(isinstance(effect, Apply) for effect in machine.handle(sent("a", 1)))


def test_a_worker_that_is_left_alone_waits_no_longer() -> None:
    machine = shard_of(view_of(THREE))
    machine.handle(sent("a", 1))
    effects = machine.viewed(view_of({"a": (0, 1)}, count=2))
    assert Accepted(0, 0, ("a",)) in effects
    assert any(isinstance(effect, Take) for effect in effects)


def test_without_a_third_worker_the_owners_is_taken_only_when_the_view_says_so() -> None:
    machine = shard_of(view_of(THREE))
    machine.handle(sent("b", 1, b"y"))
    machine.handle(sent("a", 2, b"x"))
    assert not any(isinstance(e, Take) for e in machine.viewed(view_of({"b": (0, 1)}, count=2))), "nor if one dies"
    effects = machine.viewed(view_of(THREE, Dispute(0, 0, ("a", "b")), count=3))
    assert [effect.ticket for effect in effects if isinstance(effect, Take)] == [2]


def test_a_primary_that_is_replaced_forgets_the_opinions() -> None:
    machine = shard_of(view_of(THREE))
    machine.handle(sent("a", 1))
    assert Drop(1) in machine.handle(Assigned(primary=False, backup=False, fresh=False))
    machine.validate()


# ---- settings ----


def test_what_audits_do_not_support_is_refused_with_a_sentence() -> None:
    for settings in ({"sync": {"type": "async"}}, {"codec": {"type": "int8"}}, {"parameters": "streamed"}):
        with pytest.raises(ConfigError, match="audit"):
            resolve({"audit": 0.1, **settings})
    with pytest.raises(ConfigError, match=r"audit is 1\.5"):
        resolve({"audit": 1.5})
    assert audits_of(resolve({})) is None
    assert audits_of(resolve({"audit": 0.5, "replicas": 4, "seed": 2})) == Audits(2, 0.5, 4)


def test_a_dispute_travels_in_the_view() -> None:
    view = view_of(FOUR, Dispute(7, 0, ("a", "b"), "c"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=View) == view
    assert computing(view, 3) == ["a", "b", "c"]
