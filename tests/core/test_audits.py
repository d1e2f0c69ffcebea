"""Audits, purely: what is audited, by whom, and what a shard does with the opinions."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rallypoint.config import audits_of, resolve
from rallypoint.core.audits import Audits, computing
from rallypoint.core.policy import Sync
from rallypoint.core.shard.audited import AuditedShard
from rallypoint.core.shard.effects import Accepted, Apply, Disputed, Drop, Take
from rallypoint.core.shard.events import Assigned, Contribute, Initialise
from rallypoint.core.sums import Part, Presum, leaf
from rallypoint.core.view import Assignment, Dispute, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.aligned import WorkerMachine
from rallypoint.errors import ConfigError

FOUR = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "d": ()}


def view_of(
    assigned: dict[str, tuple[int, ...]], *disputes: Dispute, count: int = 1, same: str = "", unlike: str = ""
) -> View:
    """A view of workers on hosts of their own; those in `same` share one, those in `unlike` have other kernels."""
    workers = tuple(
        Member(w, "shared" if w in same else f"host-{w}", kernels=b"other" if w in unlike else b"") for w in assigned
    )
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, 1), workers=workers, servers=(), primary={0: "s"},
        assignments=(Assignment(0, assigned),), contributors={w: own for w, own in assigned.items() if own},
        orders=StandingOrders(disputes=disputes),
    )  # fmt: skip


# ---- the choice ----


def test_the_share_that_is_audited_is_the_one_that_was_asked_for() -> None:
    def steps_of(seed: int, share: float) -> list[int]:
        return [step for step in range(40_000) if Audits(seed, share, 8).audited(step)]

    assert 320 <= len(steps_of(3, 0.01)) <= 480, "one in a hundred of 40,000"
    assert steps_of(3, 0.01) != steps_of(4, 0.01)
    assert len(steps_of(3, 1.0)) == 40_000


@pytest.mark.parametrize("assigned", [
    FOUR, {"a": (0, 1, 2), "b": (3,), "c": (4,), "d": (5,)}, {"a": (0,), "b": (1, 2), "c": (3, 4, 5)},
    {"a": (0, 1, 2, 3), "b": (4, 5)},
])  # fmt: skip
def test_every_replica_has_one_auditor_which_is_not_its_owner(assigned: dict[str, tuple[int, ...]]) -> None:
    audits, view = Audits(1, 1.0, 6), view_of(assigned)
    for step in range(30):
        duties = {worker: audits.duties(view, worker, step) for worker in assigned}
        assert sorted(r for own in duties.values() for r in own) == [0, 1, 2, 3, 4, 5]
        assert not any(set(own) & set(assigned[worker]) for worker, own in duties.items())
        if max(map(len, assigned.values())) <= 3:
            assert {w: len(own) for w, own in duties.items()} == {w: len(own) for w, own in assigned.items()}, "even"


def test_who_audits_whom_changes_from_step_to_step_and_prefers_other_hosts() -> None:
    audits, view = Audits(1, 1.0, 6), view_of(FOUR)
    assert {audits.auditor(view, step, 0) for step in range(60)} == {"b", "c"}
    even = {"a": (0,), "b": (1,), "c": (2,), "d": (3,)}
    found = {audits.auditor(view_of(even, same="ab"), step, 0) for step in range(60)}
    assert found <= {"c", "d"}, "b is on the owner's host"
    assert audits.auditor(view_of({"a": (0, 1, 2, 3, 4, 5)}), 7, 0) == "", "nobody is there who could"


def test_only_workers_on_like_machines_audit_each_other() -> None:
    audits, view = Audits(1, 1.0, 4), view_of({"a": (0,), "b": (1,), "c": (2,), "d": (3,)}, unlike="cd")
    assert {audits.auditor(view, step, 0) for step in range(30)} == {"b"}
    assert audits.another(view, 3, 0, ("a", "b")) == "", "nobody of a's kind is left to decide"
    assert audits.auditor(view_of(THREE, unlike="c"), 3, 2) == "", "nobody is like c"


def test_the_third_of_a_dispute_has_that_replica_among_its_duties() -> None:
    audits = Audits(1, 0.0, 6)
    view = view_of(FOUR, Dispute(7, 0, ("a", "b"), "c"))
    assert audits.duties(view, "c", 7) == (0,)
    assert audits.duties(view, "c", 8) == audits.duties(view, "b", 7) == ()
    assert audits.another(view, 7, 0, ("a", "b")) == "c"


# ---- the worker ----


def worker_at(step: int, view: View, audits: Audits) -> WorkerMachine:
    """Worker a, which has installed that version. One shard."""
    machine = WorkerMachine("a", 1, frozenset(), 100, audits=audits, presum=Presum(frozenset({0}), 6, 8))
    machine.step, machine.view = step, view
    machine._duties.plan(view, step, machine.presum)
    return machine


def test_a_worker_computes_its_own_replicas_first_and_adds_nothing_up_in_a_step_that_is_audited() -> None:
    audits, view = Audits(1, 0.4, 6), view_of(FOUR)
    audited = next(step for step in range(99) if audits.audited(step))
    other = next(step for step in range(99) if not audits.audited(step))
    machine = worker_at(audited, view, audits)
    assert list(machine.assigned) == [0, 1, *audits.duties(view, "a", audited)]
    assert len(machine.assigned) == 4
    assert machine.presum.part(0, 0) is None, "it is sent as a leaf"
    machine = worker_at(other, view, audits)
    assert list(machine.assigned) == [0, 1]
    assert machine.presum.part(0, 0) is not None


def test_a_worker_sends_again_when_its_own_opinion_is_to_be_enough() -> None:
    audits = Audits(1, 1.0, 6)
    for view, again in (
        (view_of({"a": (0, 1, 2, 3, 4, 5), "b": (), "c": ()}, count=2), (0, 1)),
        (view_of(FOUR, Dispute(7, 1, ("a", "b")), count=2), (1,)),
        (view_of(FOUR, Dispute(7, 1, ("a", "b"), "c"), count=2), ()),
        (view_of(FOUR, count=2), ()),
    ):
        machine = worker_at(7, view_of(FOUR), audits)
        for replica in (0, 1):
            machine.presum.filled(0, Part((), leaf(replica), keep=False), use=True, send=True)
        machine._duties.plan(view, 7, machine.presum)
        assert [replica for replica in (0, 1) if not machine.presum.has(0, replica)] == list(again)


def test_a_worker_that_has_missed_a_view_sends_again_what_may_not_have_been_enough_in_it() -> None:
    alone = {"a": (0, 1, 2, 3, 4, 5), "b": (), "c": ()}
    nobody = Dispute(7, 1, ("a", "b"))
    for before, after, again in (
        (view_of(alone), view_of(alone, count=2), ()),
        (view_of(alone), view_of(alone, count=3), (0, 1)),
        (view_of(FOUR, nobody), view_of(FOUR, nobody, count=2), ()),
        (view_of(FOUR, nobody), view_of(FOUR, nobody, count=3), (1,)),
    ):
        machine = worker_at(7, before, Audits(1, 1.0, 6))
        for replica in (0, 1):
            machine.presum.filled(0, Part((), leaf(replica), keep=False), use=True, send=True)
        machine._duties.plan(after, 7, machine.presum)
        assert [replica for replica in (0, 1) if not machine.presum.has(0, replica)] == list(again)


# ---- the shard ----


def shard_of(view: View, replicas: int = 2) -> AuditedShard:
    """At version 0, primary, in this view."""
    machine = AuditedShard(Sync(), replicas, rounds=9)
    machine.handle(Initialise(0))
    machine.handle(Assigned(primary=True, backup=False, fresh=False))
    machine.opinions.view = view
    return machine


def sent(sender: str, ticket: int, value: bytes = b"x", replica: int = 0) -> Contribute:
    return Contribute(0, replica, 1.0, ticket, sender=sender, digest=value)


TWO = {"a": (0,), "b": (1,), "c": ()}
THREE = {"a": (0,), "b": (1,), "c": (2,)}


def test_a_contribution_is_added_when_another_worker_has_sent_the_same_bytes() -> None:
    machine = shard_of(view_of(TWO))
    assert machine.handle(sent("a", 1)) == [Drop(1)], "only its digest is kept"
    assert machine.handle(sent("a", 2)) == [Drop(2)], "its own repeat is no second opinion"
    machine.validate()
    effects = machine.handle(sent("b", 3))
    assert effects[0] == Accepted(0, 0, ("a", "b"))
    assert [effect.ticket for effect in effects if isinstance(effect, Take)] == [3]
    assert machine.handle(sent("c", 4)) == [Drop(4)], "a repeat (I2)"
    assert (machine.opinions.accepted, machine.opinions.lost) == (1, 0)
    machine.validate()


def test_what_has_lost_is_never_added() -> None:
    machine = shard_of(view_of(THREE), replicas=3)
    machine.handle(sent("a", 1, b"wrong"))
    assert machine.handle(sent("b", 2)) == [Drop(2), Disputed(0, 0, ("a", "b"))]
    assert machine.handle(sent("a", 3, b"wrong")) == [Drop(3), Disputed(0, 0, ("a", "b"))], "it is said again"
    effects = machine.handle(sent("c", 4))
    assert effects[0] == Accepted(0, 0, ("b", "c"), ("a",))
    assert [effect.ticket for effect in effects if isinstance(effect, Take)] == [4]


def test_three_opinions_that_differ_wait_and_say_so() -> None:
    machine = shard_of(view_of(THREE), replicas=3)
    machine.handle(sent("a", 1, b"x"))
    machine.handle(sent("b", 2, b"y"))
    assert machine.handle(sent("c", 3, b"z")) == [Drop(3), Disputed(0, 0, ("a", "b", "c"))]


def test_a_weight_that_differs_is_another_contribution() -> None:
    machine = shard_of(view_of(TWO))
    machine.handle(sent("a", 1))
    assert Disputed(0, 0, ("a", "b")) in machine.handle(replace(sent("b", 2), weight=2.0))


def test_a_lone_worker_waits_for_nobody() -> None:
    machine = shard_of(view_of({"a": (0,)}), replicas=1)
    assert any(isinstance(effect, Apply) for effect in machine.handle(sent("a", 1)))
    machine = shard_of(view_of(TWO))
    machine.handle(sent("a", 1))
    machine.opinions.view = view_of({"a": (0, 1)}, count=2)
    assert any(isinstance(effect, Take) for effect in machine.handle(sent("a", 2))), "b is gone, and a sends again"


def test_a_worker_on_an_unlike_machine_is_not_waited_for_and_blames_nobody() -> None:
    machine = shard_of(view_of(THREE, unlike="c"), replicas=3)
    assert any(isinstance(effect, Take) for effect in machine.handle(sent("c", 1, b"z", replica=2)))
    machine.handle(sent("c", 2, b"z"))
    assert machine.handle(sent("a", 3)) == [Drop(3)], "c, which had the replica before, has other kernels"
    assert machine.handle(sent("b", 4))[0] == Accepted(0, 0, ("a", "b"))


def test_without_a_third_worker_the_owners_is_taken_only_when_the_view_says_so() -> None:
    machine = shard_of(view_of(TWO))
    machine.handle(sent("b", 1, b"y"))
    machine.handle(sent("a", 2, b"x"))
    machine.opinions.view = view_of({"a": (0, 1)}, count=2)
    assert not any(isinstance(effect, Take) for effect in machine.handle(sent("a", 3, b"x"))), "b is gone, and differed"
    machine.opinions.view = view_of(TWO, Dispute(0, 0, ("a", "b")), count=3)
    assert not any(isinstance(effect, Take) for effect in machine.handle(sent("b", 4, b"y")))
    assert any(isinstance(effect, Take) for effect in machine.handle(sent("a", 5, b"x")))


def test_a_primary_that_is_replaced_forgets_the_opinions() -> None:
    machine = shard_of(view_of(TWO))
    machine.handle(sent("a", 1))
    machine.handle(Assigned(primary=False, backup=False, fresh=False))
    machine.validate()
    assert machine.opinions.replicas == []


# ---- settings ----


def test_what_audits_do_not_support_is_refused_with_a_sentence() -> None:
    for settings in ({"sync": {"type": "async"}}, {"codec": {"type": "int8"}}, {"memory.parameters": "streamed"}):
        with pytest.raises(ConfigError, match="audit"):
            resolve({"audit.share": 0.1, **settings})
    with pytest.raises(ConfigError, match=r"audit.share is 1\.5"):
        resolve({"audit.share": 1.5})
    assert audits_of(resolve({})) is None
    assert audits_of(resolve({"audit.share": 0.5, "replicas": 4, "seed": 2})) == Audits(2, 0.5, 4)


def test_a_dispute_travels_in_the_view() -> None:
    view = view_of(FOUR, Dispute(7, 0, ("a", "b"), "c"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=View) == view
    assert computing(view, 3) == ["a", "b", "c"]
