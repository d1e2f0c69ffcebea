"""What the coordinator makes of servers' findings about contributions (`audit=`)."""

from __future__ import annotations

from typing import Any

import msgspec
from test_core_cluster import RECORD, _begun, _Job, _of, _terms

from rallypoint.core.cluster.effects import Abort, PublishView
from rallypoint.core.cluster.events import From
from rallypoint.core.protocol import AuditFound, Say

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
    assert _of(Abort, effects) == [], "both will hear the third one too"
    effects = [*found(job, 1, "w1", server="s0", agreed=("w0", "w2"))]
    assert "w1" not in job.machine.course.members.workers
    assert _of(Abort, effects) == []
