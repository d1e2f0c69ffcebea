"""Audits, purely: what is audited, by whom, and what a shard does with the opinions."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from test_core_cluster import RECORD, _begun, _Job, _of, _terms

from rallypoint.config import JobConfig, audits_of, record_of, resolve
from rallypoint.core.audits import Audits, alike, computing
from rallypoint.core.cluster.auditing import unlike
from rallypoint.core.cluster.effects import PublishView
from rallypoint.core.cluster.events import From, Joined
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.policy import Sync
from rallypoint.core.protocol import Aborted, AuditFound, Propose, Say
from rallypoint.core.shard.audited import AuditedShard
from rallypoint.core.shard.effects import Accepted, Apply, Disputed, Drop, Take
from rallypoint.core.shard.events import Assigned, Contribute, Initialise
from rallypoint.core.sums import DIGEST_BYTES, Part, Presum, leaf, leaf_digest
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


# ---- What the coordinator makes of servers' findings about contributions (`audit=`) ----


AUDITED = msgspec.structs.replace(RECORD, config={**RECORD.config, "audit": {"share": 1.0}})


def begun(workers: int = 4, **terms: Any) -> _Job:
    return _begun(_terms(workers=workers, **terms), ["s0", "s1", *(f"w{i}" for i in range(workers))], AUDITED)


def found(job: _Job, step: int, *others: str, server: str = "s0", shard: int = -1, agreed: tuple[str, ...] = ()) -> Any:
    shard = shard if shard >= 0 else job.view.shards_of(server)[0]
    return job.play(From(server, AuditFound(step, 0, shard, agreed, others, job.view.generation)))


def test_a_server_tells_a_dispute_by_a_shard_that_has_moved_meanwhile() -> None:
    job = begun()
    job.step(0)
    found(job, 1, "w0", "w1", server="s0", shard=job.view.shards_of("s1")[0])
    (dispute,) = job.view.orders.disputes
    assert dispute.third in ("w2", "w3"), "it has other shards that wait, of which it says nothing"
    job = begun()
    assert found(job, 1, "w0", "w1", server="s9", shard=0) == [], "a server without any shard"


def test_no_view_says_that_nobody_decides_while_somebody_can() -> None:
    job = begun()
    told = AuditFound(1, 0, job.view.shards_of("s0")[0], (), ("w0", "w1"), job.view.generation)
    views = [p.view for p in _of(PublishView, job.machine._auditing.handle("s0", told, lambda *_: []))]
    assert [[d.third != "" for d in view.orders.disputes] for view in views] == [[True]]


def test_a_server_that_lies_about_far_steps_fills_no_view() -> None:
    job = begun()
    for step in range(19, 0, -1):
        found(job, step, "w0", "w1")
    assert {d.step for d in job.view.orders.disputes} == {1, 2, 3, 4}
    assert found(job, 20, "w0", "w1") == found(job, 1 << 40, "w0", "w1") == [], "the job has 20 steps"
    for n in range(99):
        found(job, 1, f"x{n}", f"y{n}")
    assert max(len(d.heard) for d in job.view.orders.disputes) <= 8


def test_a_verdict_needs_two_who_agree() -> None:
    job = begun()
    for agreed in (("w0",), ("w0", "w0"), ("w0", "w1")):
        found(job, 0, "w1", agreed=agreed)
        assert "w1" in job.machine.course.members.workers
    effects = found(job, 0, "w1", agreed=("w0", "w2"))
    assert "w0 on host-of-w0 and w2 on host-of-w2 agree" in " ".join(say.text for say in _of(Say, effects))
    assert "w1" not in job.machine.course.members.workers


def test_of_three_workers_each_server_may_hear_two_others_before_the_third() -> None:
    job = begun(3)
    job.step(0)
    effects = [*found(job, 1, "w0", "w1", server="s0"), *found(job, 1, "w1", "w2", server="s1")]
    assert _of(Aborted, effects) == [], "both will hear the third one too"
    effects = [*found(job, 1, "w1", server="s0", agreed=("w0", "w2"))]
    assert "w1" not in job.machine.course.members.workers
    assert _of(Aborted, effects) == []


# ---- Which workers can audit each other: those whose probes gave the same bytes ----


ONE, OTHER = b"1" * 16, b"2" * 16
NUMBER = ViewNumber(1, 1)


def worker(id: str, kernels: bytes) -> Member:
    return Member(id, f"host-of-{id}", kernels=kernels)


def test_workers_audit_each_other_if_their_probes_gave_the_same_bytes() -> None:
    workers = (worker("w0", ONE), worker("w1", ONE), worker("w2", OTHER), worker("w3", b""), worker("w4", b""))
    view = View(NUMBER, NUMBER, workers, (), (), {})
    assert alike(view, "w0") == alike(view, "w1") == {"w0", "w1"}
    assert alike(view, "w2") == {"w2"}
    assert alike(view, "w3") == {"w3", "w4"}, "where nobody has a probe, all count as alike"


def test_the_first_worker_of_a_kind_is_named_and_no_other() -> None:
    like, others = worker("w1", ONE), [worker("w0", ONE)]
    assert unlike(like, others) == ""
    assert unlike(worker("w0", ONE), []) == ""
    assert unlike(worker("w1", b""), others) == ""
    sentence = unlike(worker("w2", OTHER), [*others, like])
    assert "w2 on host-of-w2 computes other bytes than w0 on host-of-w0, w1 on host-of-w1" in sentence
    assert unlike(worker("w3", OTHER), [*others, like, worker("w2", OTHER)]) == "", "it is known already"
    many = [worker(f"w{n}", ONE) for n in range(1000)]
    assert "and 996 more" in unlike(worker("x", OTHER), many)


def test_the_coordinator_puts_probes_into_the_view_and_says_who_is_unlike() -> None:
    config = JobConfig(replicas=3)
    record = record_of(config, build_layout([TensorSpec("w", (8, 8), "float32", 0)], 64), {})
    machine = ClusterMachine(Terms(workers_start=3, workers_max=3, servers=1, replication=1))
    machine.handle(Joined(Member("s0", "here", "h:1"), "server"))
    effects = []
    for id, kernels in (("w0", ONE), ("w1", OTHER), ("w2", OTHER)):
        machine.handle(Joined(Member(id, "here"), "worker"))
        effects += machine.handle(From(id, Propose(record, kernels)))
        effects += machine.handle(From(id, Propose(record, kernels)))  # again, after a lost connection
    said = [effect.text for effect in effects if isinstance(effect, Say)]
    assert [text for text in said if "other bytes" in text] == [text for text in said if text.startswith("w1 on here")]
    assert len([text for text in said if "other bytes" in text]) == 1
    view = next(effect.view for effect in effects if isinstance(effect, PublishView))
    assert alike(view, "w1") == {"w1", "w2"}
    assert alike(view, "w0") == {"w0"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=View) == view


# ---- Digests of contributions are the same everywhere, and notice a single bit ----


LEAF = struct.pack("<5f", 0.0, 1.0, -2.5, 1e-30, float("inf"))


def test_a_digest_has_known_bytes() -> None:
    """They are compared between machines and kept with runs: another digest would be another format."""
    assert leaf_digest(LEAF).hex() == "a6a5f33c8d93ca17271bade19cd67351"
    assert len(leaf_digest(LEAF)) == DIGEST_BYTES


def test_the_digest_is_that_of_the_bytes_however_they_come() -> None:
    words = memoryview(LEAF).cast("f")
    assert leaf_digest(words) == leaf_digest(memoryview(LEAF)) == leaf_digest(bytearray(LEAF)) == leaf_digest(LEAF)


@pytest.mark.parametrize("bit", [0, 31, 77, 8 * len(LEAF) - 1])
def test_one_flipped_bit_is_another_digest(bit: int) -> None:
    flipped = bytearray(LEAF)
    flipped[bit // 8] ^= 1 << bit % 8
    assert leaf_digest(flipped) != leaf_digest(LEAF)


def test_zero_and_minus_zero_are_other_bytes() -> None:
    assert leaf_digest(struct.pack("<f", 0.0)) != leaf_digest(struct.pack("<f", -0.0))


def test_half_a_word_is_no_leaf() -> None:
    with pytest.raises(ValueError, match="21 bytes"):
        leaf_digest(LEAF + b"x")
