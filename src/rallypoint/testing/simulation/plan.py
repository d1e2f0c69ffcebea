"""What one seed plays: a job, a cluster, a plan of faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from rallypoint.codec.spec import TopK, has_state
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.decisions import KeepBest, ReduceOnPlateau, Rules, StopWhen
from rallypoint.core.modes import Feature
from rallypoint.core.optimizer import EMA, SWA
from rallypoint.core.policy import LocalSteps, Sync
from rallypoint.testing.simulation.job import SimulatedJob
from rallypoint.testing.simulation.member import MALFORMED
from rallypoint.testing.simulation.network import Fault
from rallypoint.testing.simulation.operating.pauses import PAUSE, pauses
from rallypoint.testing.simulation.operating.resuming import RESUME, resumed
from rallypoint.testing.simulation.policies import Mode, Play, Played
from rallypoint.testing.simulation.replicas.contents import AuditedJob
from rallypoint.testing.simulation.replicas.script import ScriptStops

HESITATION_S = 0.6  # at most, where workers hesitate: about as long as a step takes
CUT_S = 60.0  # longer than any job takes; but where there is only one worker and one server, only its end helps
_SYNC = Sync()


@dataclass(frozen=True)
class Plan:
    """What one seed plays. `hesitate_s`: at most so long after a worker hears what it is to do it begins with it.

    `aggregators`: so many are started; workers use them where the job's mode supports it. `played`: what the plan was
    made for.
    """

    seed: int
    job: SimulatedJob
    terms: Terms
    workers: int
    servers: int
    faults: tuple[Fault, ...]
    hesitate_s: float = 0.0
    aggregators: int = 0
    played: Played = _SYNC

    @property
    def resumes(self) -> bool:
        return any(fault.kind == RESUME for fault in self.faults)

    @property
    def kills(self) -> bool:
        """May members be killed besides? Where no state may be lost with them, only coordinators are."""
        return any(fault.kind not in (RESUME, PAUSE, MALFORMED) for fault in self.faults) and not (
            self.job.inner or has_state(self.job.codec)
        )

    def least(self, role: str) -> int:
        return self.terms.workers_min if role == "worker" else 1


_KINDS = (
    "crash", "crash", "crash", "pause", "pause", "long pause", "drop", "drop", "partition", "join", "leave",
    "disk full", "torn write", "everything", "half said", "drop first",
)  # fmt: skip

# Codec states are lost with the member that holds them. Where nobody dies who may hold one, nobody is given up either.
# (A member whose connection to the coordinator breaks counts as dead.)
_LEAVING = ("pause", "drop data", "partition", "join", "join", "leave", "leave", "leave", "half said", "disk full")
_LOSING_SERVERS = ("pause", "drop data", "partition", "crash", "crash", "join", "half said", "torn write", "disk full")
_PATIENT_S = 30.0


def make_plan(seed: int, played: Played = _SYNC) -> Plan:
    """The plan of a seed: everything in it follows from the number (and from the policy)."""
    if not isinstance(played, Play):
        return _plan_of(seed, played)
    return replace(_SPECIAL[played.word](make_plan(seed, played.of)), played=played)


def _with_codec_states(plan: Plan) -> Plan:
    job = replace(plan.job, codec=TopK())
    plan, seed = replace(plan, job=job, terms=supported(plan.terms, job)), plan.seed
    if seed % 3 == 0 or not job.same_bytes or job.policy.streaming:
        return replace(plan, job=replace(job, loses_states=True))
    kinds, role = (_LEAVING, "worker") if seed % 3 == 1 else (_LOSING_SERVERS, "server")
    rng = random.Random(seed * 7919 + 2)
    faults = []
    for fault in plan.faults:
        kind = rng.choice(kinds)
        coordinator = kind == "crash" and rng.random() < 0.2
        seconds = min(fault.seconds, 1.0) if kind in ("pause", "partition") else fault.seconds
        faults.append(Fault(fault.at, kind, "coordinator" if coordinator else role, seconds))
    return replace(plan, terms=msgspec.structs.replace(plan.terms, heartbeat=_PATIENT_S), faults=tuple(faults))


_HARMLESS = ("drop data", "drop data", "pause", "partition")  # nobody dies of these, and no replica moves


def _with_inner(plan: Plan) -> Plan:
    """Where inner states are kept, two of three plans lose some, and one has no faults: its bytes are promised.

    With a delay that one has faults that make replicas compute a round once more.
    """
    sync = cast(LocalSteps, plan.job.sync)
    if sync.delay and plan.seed % 3 == 0:
        rng = random.Random(plan.seed * 7919 + 4)
        roles = ("worker", "server")
        faults = tuple(
            Fault(1.0 + rng.uniform(0.0, 6.0), rng.choice(_HARMLESS), rng.choice(roles), rng.uniform(0.1, 1.0))
            for _ in range(rng.randint(0, 10))
        )
        terms = msgspec.structs.replace(plan.terms, heartbeat=_PATIENT_S)
        return replace(plan, terms=terms, faults=faults, job=replace(plan.job, inner=True))
    faults = plan.faults if plan.seed % 3 or not sync.keep_inner else ()
    job = replace(plan.job, inner=True, loses_states=sync.keep_inner and faults != ())
    return replace(plan, faults=faults, job=job)


def _poisoned(plan: Plan) -> Plan:
    rng = random.Random(plan.seed * 7919 + 3)
    poison = (rng.randrange(plan.job.steps), rng.randrange(plan.job.replicas))
    return replace(plan, job=replace(plan.job, skip=False, poison=poison))


def _stopped(plan: Plan) -> Plan:
    """The script stops the job at a random step, on the worker that computes a random replica of it."""
    rng = random.Random(plan.seed * 7919 + 9)
    step, replica = rng.randrange(plan.job.steps - 1), rng.randrange(plan.job.replicas)
    terms = msgspec.structs.replace(plan.terms, backup_tasks=False)  # they may overtake who says so
    return replace(plan, terms=terms, job=replace(plan.job, stop=ScriptStops(step, replica, rng.random() < 0.4)))


def _malformed(plan: Plan) -> Plan:
    """Members send what nobody may send, some of it before the job has begun."""
    rng, roles = random.Random(plan.seed * 7919 + 20), ("worker", "worker", "worker", "server", "server", "aggregator")
    added = (Fault(rng.uniform(0.1, 6.0), MALFORMED, rng.choice(roles)) for _ in range(rng.randint(4, 16)))
    return replace(plan, faults=(*plan.faults, *added))


def _as_store(plan: Plan) -> Plan:
    """The plan for a store of one key or several; some of the shards may be parts of a table."""
    rng = random.Random(plan.seed * 7919 + 17)
    tables = rng.choice([0, 0, rng.randint(1, plan.job.shards)])
    job = replace(plan.job, buffers=0, clip=None, skip=False, tables=tables)
    keyed, terms = replace(job, keys=rng.randint(1, job.shards)), plan.terms
    return replace(plan, job=keyed, terms=msgspec.structs.replace(terms, backup_tasks=False))


def _evaluating(plan: Plan) -> Plan:
    """Two workers more stand by; in every fourth plan there are backup tasks, and no aggregators."""
    rng = random.Random(plan.seed * 7919 + 11)
    plan = replace(_with_backup_tasks(plan), workers=plan.workers + 2)
    return replace(plan, job=replace(plan.job, every=rng.choice([1, 2, 3, 5])))


def _with_backup_tasks(plan: Plan) -> Plan:
    tasks = plan.seed % 4 == 0
    plan = replace(plan, terms=msgspec.structs.replace(plan.terms, backup_tasks=tasks))
    return _without_aggregators(plan) if tasks else plan


def _without_aggregators(plan: Plan) -> Plan:
    """The plan without aggregators, and without their faults."""
    faults = tuple(fault for fault in plan.faults if fault.role != "aggregator")
    terms = msgspec.structs.replace(plan.terms, aggregators=0)
    return replace(plan, terms=terms, faults=faults, aggregators=0)


def _deciding(plan: Plan) -> Plan:
    """Rules of all kinds; up to two workers more stand by.

    The journal has room: what nobody has written down and whose evaluator is dead too cannot be decided again.
    """
    rng = random.Random(plan.seed * 7919 + 12)
    plan = _with_backup_tasks(plan)
    rules = Rules(
        stops=(StopWhen(metric="figure", patience=rng.randint(2, 4)),) if rng.random() < 0.6 else (),
        plateau=ReduceOnPlateau("figure", patience=rng.randint(0, 1), cooldown=rng.randint(0, 1)),
        best=KeepBest("figure") if rng.random() < 0.6 else None,
    )
    job = replace(plan.job, every=rng.choice([1, 2, 3, 5]), rules=rules)
    faults = tuple(fault for fault in plan.faults if fault.kind != "journal full")
    return replace(plan, job=job, faults=faults, workers=plan.workers + rng.randint(0, 2))


def _audited(plan: Plan, *, wrong: bool = False) -> Plan:
    """No aggregators. Where a worker computes wrong, everything is audited and the job waits for three workers."""
    rng = random.Random(plan.seed * 7919 + 13)
    plan = _without_aggregators(plan)
    if not wrong:
        return replace(plan, job=replace(plan.job, audits=AuditedJob(rng.choice([0.2, 0.7, 1.0]))))
    workers, most = rng.randint(3, 5), rng.randint(5, 7)
    terms = msgspec.structs.replace(plan.terms, workers_start=workers, workers_min=3, workers_max=most)
    audits = AuditedJob(1.0, f"worker{rng.randint(1, workers)}", rng.randrange(plan.job.steps))
    job = replace(plan.job, audits=audits, replicas=rng.randint(3, 6))
    return replace(plan, workers=workers, terms=terms, job=job)


def _scaled(plan: Plan) -> Plan:
    """There is a shard of buffers more, which has the loss scale."""
    job = plan.job
    return replace(plan, job=replace(job, shards=job.shards + 1, buffers=job.buffers + 1, skip=True, fp16=True))


def _carrying(plan: Plan) -> Plan:
    """Each replica carries a state: a shard more for each of them."""
    job, more = plan.job, plan.job.replicas
    return replace(plan, job=replace(job, carries=True, shards=job.shards + more, buffers=job.buffers + more))


def _with_tables(plan: Plan) -> Plan:
    """One shard or more of the parameters are parts of a table. (In a streaming mode its gradient is not clipped.)"""
    job, rng = plan.job, random.Random(plan.seed * 7919 + 5)
    tables = rng.randint(1, job.shards - job.buffers)
    return replace(plan, job=replace(job, tables=tables, clip=None if job.policy.streaming else job.clip))


def _plan_of(seed: int, sync: Mode) -> Plan:
    rng = random.Random(seed * 7919 + 1)
    job = SimulatedJob(
        shards=rng.randint(1, 8), buffers=0, replicas=rng.randint(1, 6), steps=rng.randint(4, 14),
        clip=rng.choice([None, 1.0]),
    )  # fmt: skip
    buffers = int(job.shards > 2 and rng.random() < 0.5 and not (isinstance(sync, LocalSteps) and sync.delay))
    job = SimulatedJob(job.shards, buffers, job.replicas, job.steps, job.clip, skip=rng.random() < 0.25)
    quorum = sync.quorum if isinstance(sync, Sync) and sync.quorum is not None else 1
    job = replace(job, sync=sync, replicas=max(job.replicas, quorum))
    if isinstance(sync, LocalSteps):  # a shard or more for each fragment, and no decisions
        job = replace(job, shards=max(job.shards, sync.fragments + buffers), clip=None, skip=False)
    workers, servers = rng.randint(1, 4), rng.randint(1, 4)
    workers_max = rng.choice([workers, workers + 2, max(1, workers - 1)])
    terms = Terms(
        workers_start=workers, workers_min=rng.choice([1, 1, min(2, workers, workers_max)]), workers_max=workers_max,
        servers=servers, replication=rng.choice([1, 2, 2]), heartbeat=2.0, backup_tasks=rng.random() < 0.3,
        snapshot_seconds=rng.choice([0.5, 1.0, 3.0]), snapshot_steps=rng.choice([0, 0, 2]), snapshots=True,
    )  # fmt: skip
    terms = supported(terms, job)
    faults = []
    at = 0.0
    for _ in range(rng.randint(0, 10)):
        at += rng.expovariate(1.2)
        kind = rng.choice(_KINDS)
        role = rng.choice(["worker", "worker", "server", "server", "coordinator"])
        seconds = {"pause": rng.uniform(0.1, 1.5), "long pause": rng.uniform(2.0, 6.0)}.get(kind, rng.uniform(0.1, 5.0))
        faults.append(Fault(0.0 if kind == "drop first" else at, kind, role, seconds))
    if seed % 5 == 1:
        more = random.Random(seed * 7919 + 3)
        faults += [Fault(more.uniform(0.3, 6.0), "resize", "launcher") for _ in range(2)]
    if seed % 11 in (3, 8, 10):
        faults += _behind_the_journal(random.Random(seed * 7919 + 4))
    if seed % 7 == 4:
        more = random.Random(seed * 7919 + 4)
        faults.append(Fault(more.uniform(0.3, 5.0), "isolation", "coordinator", more.uniform(0.5, 10.0)))
    if seed % 9 == 5:
        more = random.Random(seed * 7919 + 5)
        faults.append(Fault(more.uniform(0.3, 3.0), "cut", more.choice(["worker", "server"]), CUT_S))
    aggregators = 0
    if seed % 3 == 2:
        more = random.Random(seed * 7919 + 6)
        aggregators = more.randint(1, 2)
        faults += _on_aggregators(more)
    return Plan(seed, job, terms, workers, servers, tuple(faults), HESITATION_S * (seed % 4 == 3), aggregators, sync)


def _on_aggregators(rng: random.Random) -> list[Fault]:
    kinds = ("crash", "crash", "pause", "long pause", "drop", "partition", "cut", "isolation", "join")
    return [
        Fault(rng.uniform(0.2, 5.0), rng.choice(kinds), "aggregator", rng.uniform(0.1, 5.0))
        for _ in range(rng.randint(0, 4))
    ]


def supported(terms: Terms, job: SimulatedJob) -> Terms:
    """These terms without what the job's mode does not support: see `core.modes`."""
    without: dict[Feature, dict[str, Any]] = {
        Feature.REPLICATION: {"replication": 1}, Feature.BACKUP_TASKS: {"backup_tasks": False},
    }  # fmt: skip
    record = job.record
    for feature, changes in without.items():
        if feature in terms.features and record.refusal_of(frozenset({feature})):
            terms = msgspec.structs.replace(terms, **changes)
    return terms


def _behind_the_journal(rng: random.Random) -> list[Fault]:
    """The journal's disk is full for a time, while members and coordinators die."""
    begins, lasts = rng.uniform(0.2, 3.0), rng.uniform(1.0, 12.0)
    role = rng.choice(["worker", "server", "server"])
    changes = [Fault(begins + rng.random() * 2, rng.choice(["crash", "join", "drop"]), role, 0.5) for _ in range(2)]
    deaths = [
        Fault(begins + rng.uniform(0.0, min(4.0, lasts)), "crash", "coordinator", 0.3)
        for _ in range(rng.randint(1, 3))
    ]
    return [Fault(begins, "journal full", "coordinator", lasts), *changes, *deaths]


# What is special about a play, by the words of `policies`.
_SPECIAL: dict[str, Callable[[Plan], Plan]] = {
    "inner": _with_inner, "codec-state": _with_codec_states, "poisoned": _poisoned, "tables": _with_tables,
    "stopped": _stopped, "carrying": _carrying, "scaled": _scaled, "evaluating": _evaluating, "decided": _deciding,
    "audited": _audited, "audited:wrong": partial(_audited, wrong=True),
    "store": lambda plan: _as_store(_without_aggregators(plan)),
    "averaged": lambda plan: replace(plan, job=replace(
        plan.job, average=EMA(0.75) if plan.seed % 2 else SWA(start=plan.seed % 3, every=1 + plan.seed % 4))),
    "recorded": lambda plan: replace(plan, job=replace(plan.job, recorded=1 + plan.seed % 3)),
    "streamed": lambda plan: replace(_without_aggregators(plan), job=replace(plan.job, streamed=True)),
    "paused": lambda plan: replace(plan, faults=plan.faults + pauses(plan.seed, kills=plan.kills)),
    "malformed": _malformed, "resumed": resumed,
    "uneven": lambda plan: replace(plan, terms=msgspec.structs.replace(plan.terms, measure_links=True)),
}  # fmt: skip
