"""Which workers can audit each other: those whose probes gave the same bytes."""

from __future__ import annotations

import msgspec

from rallypoint.config import JobConfig, record_of
from rallypoint.core.audits import alike
from rallypoint.core.cluster.auditing import unlike
from rallypoint.core.cluster.effects import PublishView
from rallypoint.core.cluster.events import From, Joined
from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Propose, Say
from rallypoint.core.view import Member, View, ViewNumber

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
