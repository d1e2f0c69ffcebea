"""What the coordinator knows of the job: its members, the view in force, the furthest step."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rallypoint.core.cluster.effects import Effect, Refuse
from rallypoint.core.cluster.evaluations import EvaluationLedger
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.recovery import ServersHoldState, WorkersHoldState
from rallypoint.core.cluster.state import ClusterState, Failing, Origin, Phase
from rallypoint.core.cluster.terms import SnapshotPeriod, Terms, copies_of
from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.decisions import Rules
from rallypoint.core.job import JobRecord
from rallypoint.core.modes import Feature, Pace, StateHolder
from rallypoint.core.placing.handover import Handover
from rallypoint.core.placing.links import MeasuredLinks
from rallypoint.core.placing.pinned import Lately, pins_after
from rallypoint.core.plan.failures import TunedPeriod
from rallypoint.core.plan.tuning import Tuning
from rallypoint.core.protocol import Aborted, Finished
from rallypoint.core.view import View, ViewNumber, holds

# ---- Chooses the strategies of a job from its mode. No other file of `core/cluster` reads the mode's description ----



@dataclass(slots=True)
class Strategies:
    """What depends on a job's record. The defaults are for a job whose record is not known yet.

    Attributes:
        recovery: who holds the model's state, and how the job goes on when some of it is lost.
        by_speed: replicas may move to a faster worker. False where a replica leaves state on its worker.
        backup_tasks: an idle worker is asked for a straggler's replica.
        aggregates: workers may use aggregators.
        hands_over: shards move between two steps. Else each of them at once, and steps may be computed again.
        warms: a worker that joins fetches a version before it gets replicas.
        pinned: each replica stays with its worker, also while that is away: see `core.placing.pinned`.
        workers_have_codec_states: a snapshot needs the workers' codec states.
        in_rounds: servers report each round, once.
        anybody_begins: any worker may upload first values, so nothing is half done if one of them dies.
        rules: by which evaluations decide, as the record has them.
    """

    recovery: ServersHoldState = field(default_factory=ServersHoldState)
    by_speed: bool = True
    backup_tasks: bool = False
    aggregates: bool = True
    hands_over: bool = False
    warms: bool = False
    pinned: bool = False
    workers_have_codec_states: bool = False
    in_rounds: bool = True
    anybody_begins: bool = False
    rules: Rules = field(default_factory=Rules)


def strategies_for(record: JobRecord, terms: Terms) -> Strategies:
    """The strategies of a job with this record."""
    pinned, in_rounds = Feature.OWN_LOOP in record.features, record.mode.pace is Pace.ROUNDS
    steps = in_rounds and not {Feature.SUMS, Feature.KEYED} & set(record.features)
    stay = {Feature.OWN_LOOP, Feature.KEYED, Feature.AUDIT} & set(record.features)  # one worker alone cannot be audited
    return Strategies(
        recovery=WorkersHoldState() if record.mode.holder is StateHolder.WORKERS else ServersHoldState(),
        by_speed=not stay and not record.mode.leaves_state,
        backup_tasks=terms.backup_tasks and record.supports(Feature.BACKUP_TASKS),
        hands_over=steps and not pinned,
        warms=steps and not pinned and record.mode.holder is StateHolder.SERVERS,
        pinned=pinned,
        aggregates=not terms.backup_tasks and record.supports(Feature.AGGREGATORS),
        workers_have_codec_states=Feature.CODEC_STATE in record.features and record.mode.holder is StateHolder.SERVERS,
        in_rounds=in_rounds,
        anybody_begins=Feature.KEYED in record.features,
        rules=record.rules,
    )


@dataclass(slots=True)
class Course:
    """What the coordinator knows of the job now.

    Attributes:
        terms: how the cluster is to behave.
        views: the view in force, and how the next one is made.
        phase: the phase of the job.
        begun: the first weights are stored, or a step has been computed, or the job begins with a snapshot. From then
            on first weights cannot be uploaded (again).
        origin: the snapshot with which the job begins; None: with first weights.
        begun_by: see `Terms`.
        furthest: the highest step that reports of this generation prove (`reached_by`); -1 before the first.
        applied: the highest step that a server has applied in this generation; -1 if none has said so.
        witnesses: the servers that have said in this generation what they have applied.
        workers_max: the most workers that compute; more stand by.
        revision: rises whenever `state()` has changed in something that the next coordinator needs.
        last_word: how the job ended; None while it goes on.
        failing: why the job is about to end, also after a restart of the coordinator; None if it is not.
        now: the time of the last Tick, in seconds.
        members: the workers and servers that are here.
        evaluating: the workers that evaluate now, after their beats.
        evaluations: the script's evaluations, and their results.
        links: what members say of the links of servers.
        handover: what workers say of the versions that they hold, while shards move or workers warm up.
        tuning: how long steps take, and what is tried to make them shorter.
        tuned_period: how often snapshots are taken where nobody has said it.
        lately: until when workers may contribute what they were assigned earlier.
        pins: where replicas stay with their workers: who has each, or had it last.
        copies: on how many servers each shard should be. Where the terms do not say it, that is decided once, when the
            job begins: the number of servers may be another one later.
        record: the job's record; None before a worker has proposed one.
        strategies: what depends on the record: see `strategies_for`.
    """

    terms: Terms
    views: ViewSequence
    phase: Phase = Phase.GATHERING
    begun: bool = False
    origin: Origin | None = None
    begun_by: str = ""
    furthest: int = -1
    applied: int = -1
    witnesses: set[str] = field(default_factory=set)
    workers_max: int = 1
    revision: int = 0
    last_word: Finished | Aborted | None = None
    failing: Failing | None = None
    now: float = 0.0
    members: Membership = field(default_factory=Membership)
    evaluating: set[str] = field(default_factory=set)
    evaluations: EvaluationLedger = field(default_factory=EvaluationLedger)
    tuned_period: TunedPeriod = field(default_factory=TunedPeriod)
    links: MeasuredLinks = field(default_factory=MeasuredLinks)
    handover: Handover = field(default_factory=Handover)
    tuning: Tuning = field(default_factory=Tuning)
    lately: Lately = field(default_factory=Lately)
    pins: dict[int, str] = field(default_factory=dict)
    copies: int = 0
    record: JobRecord | None = None
    strategies: Strategies = field(default_factory=Strategies)

    def describe(self, record: JobRecord | None) -> None:
        """Set (or with None drop) the job's record, and choose the strategies that depend on it.

        A job of sums takes no snapshots: its script saves what it holds.
        """
        if record is not None and Feature.SUMS in record.features:
            self.terms = msgspec.structs.replace(self.terms, snapshots=False)
        self.record, self.strategies = record, Strategies() if record is None else strategies_for(record, self.terms)
        supported = record is not None and record.supports(Feature.REPLICATION)
        said = self.terms.replication or (self.copies if record is not None else 0)
        self.copies = copies_of(said, self.terms.servers, supported=supported)
        self.views.replication = self.recovery.replication(self.copies)
        self.views.aggregates, self.views.uplinks.told = self.strategies.aggregates, self.terms.topology.uplinks
        if self.view is not None:  # of an earlier coordinator
            self.pins = pins_after(self.pins, self.view)

    def changed(self) -> None:
        """Raise `revision`: something has changed that the next coordinator needs."""
        self.revision += 1

    def end(self, word: Finished | Aborted) -> list[Effect]:
        """End the job with this last word. Returns the effects to run."""
        self.phase, self.last_word = Phase.OVER, word
        self.changed()
        return [word]

    def has_state(self, worker: str, version: int) -> None:
        """A worker reports that it has reached `version`."""
        if worker in self.members.workers:
            self.revision += self.recovery.has(worker, version)

    def has_applied(self, server: str, step: int) -> None:
        """A server of the view in force reports that it has applied `step`."""
        view = self.view
        if view is not None and self.record is not None and holds(view, server):
            self.applied = max(self.applied, min(step, self.record.rounds - 1))
            self.witnesses.add(server)

    @property
    def last(self) -> int:
        """The job's last version: its last round, or an earlier one if it is stopped. Call it only with a record."""
        assert self.record is not None
        return self.views.orders.last(self.record.rounds)

    def reached_by(self, step: int) -> int:
        """The step that a report of `step` proves: at most one after what servers have applied.

        Reports and servers' words come over different connections, so a report that seems too high may be true; it
        counts as less until the servers' words are here. Without them it counts as one step more than was known.
        """
        return min(step, max(self.furthest, self.applied + 1) if self.applied >= 0 else self.furthest + 1)

    @property
    def snapshot_period(self) -> SnapshotPeriod:
        told = SnapshotPeriod(self.terms.snapshot_steps, self.terms.snapshot_seconds)
        chosen = SnapshotPeriod(seconds=self.tuned_period.seconds)
        return chosen if tunes_period(self) and chosen.seconds else told

    @property
    def known(self) -> int:
        """The highest step that is known to be reached, by reports or by what servers have applied."""
        return max(self.furthest, self.applied + 1)

    def may_report(self, worker: str, step: int) -> bool:
        """True if a report of `step` from `worker` can be true: it has proposed the record, and the job has that step.
        """
        here = worker in self.members.proposed and worker in self.members.workers  # not `present`: it is built anew
        return here and self.record is not None and 0 <= step < self.record.rounds

    def has_a_part(self, member: str) -> bool:
        """True if the member can know that the job cannot go on: it was assigned replicas in this generation, uploads
        its state or is the primary of shards. Before the job begins, everybody can."""
        view = self.view
        if view is None or self.phase is Phase.GATHERING:
            return True
        evaluates = view.orders.lease is not None and view.orders.lease.holder == member
        return evaluates or bool(view.contributors.get(member)) or member in {view.uploader, *view.primary.values()}

    def state(self) -> ClusterState:
        """What the next coordinator needs to go on."""
        evaluations = self.evaluations
        return ClusterState(
            record=self.record,
            view=self.view,
            caught_up=tuple(sorted(self.views.caught_up)),
            incarnations=self.members.incarnations,
            epoch=self.views.epoch,
            begun=self.begun,
            furthest=self.furthest,
            workers_max=self.workers_max,
            last_word=self.last_word,
            state_holders=dict(self.recovery.reached),
            failing=self.failing,
            results=dict(evaluations.results),
            decided=evaluations.decided,
            stored=tuple(evaluations.stored),
            periods=evaluations.periods,
            stops=evaluations.stops,
            goes_on=self.view is not None and self.view.orders.paused is not None and self.views.orders.paused is None,
            origin=self.origin,
            begun_by=self.begun_by,
            copies=self.copies if self.record is not None else 0,
        )

    def dismiss_aggregators(self) -> list[Effect]:
        """Remove and refuse all aggregators if the job's mode has no use for them. Returns the effects to run."""
        why = "" if self.record is None else self.record.refusal_of(self.terms.features | {Feature.AGGREGATORS})
        idle = list(self.members.aggregators) if why else []
        for aggregator in idle:
            self.members.remove(aggregator)
        return [Refuse(aggregator, why, final=True) for aggregator in idle]

    @property
    def rules(self) -> Rules:
        """The rules by which evaluations decide. None where they cannot."""
        if self.record is None or not self.record.leases:
            return Rules()
        return msgspec.structs.replace(self.strategies.rules, stops=self.evaluations.stops)

    @property
    def kept(self) -> tuple[int, int] | None:
        """Where the best is kept: the best version (-1: none yet), and the last one that is decided.

        Snapshots of the best one, and of all after the last one, must not be deleted. None: any may be.
        """
        decided = self.evaluations.decided
        best = -1 if decided.best is None else decided.best.version
        return None if self.rules.best is None else (best, decided.version)

    @property
    def recovery(self) -> ServersHoldState:
        """The strategy of this job for lost state."""
        return self.strategies.recovery

    @property
    def view(self) -> View | None:
        """The view in force; None before the first."""
        return self.views.view

    @property
    def job(self) -> JobRecord:
        """The record. Call it, and `replicas`, only when it is known."""
        assert self.record is not None
        return self.record

    @property
    def replicas(self) -> int:
        """R, the number of replicas."""
        return int(self.job.config["replicas"])

    @property
    def storing_first_weights(self) -> bool:
        """True while the job waits until version 0 is in a snapshot: those weights cannot be uploaded a second time."""
        return self.terms.snapshots and not self.begun

    @property
    def workers_to_begin(self) -> int:
        """The workers to wait for before computing: `workers_start`; `workers_min` once there has been a view."""
        wanted = self.terms.workers_min if self.views.begun else self.terms.workers_start
        return max(wanted, self.replicas) if self.strategies.pinned else wanted

    @property
    def servers_to_begin(self) -> int:
        """The servers to wait for before computing: `servers`; one, once there has been a view. Others may have left
        since as they were told, and nobody starts others in their place; who comes later becomes a backup."""
        return 1 if self.views.begun else self.terms.servers

    def active(self) -> list[str]:
        """The workers that compute, those that are ready longest first; the others stand by."""
        last = None if self.record is None else self.last
        if self.strategies.pinned:  # a replica that has no worker waits, and nobody computes meanwhile
            return self.members.active(self.replicas, self.replicas, last)
        return self.members.active(self.terms.workers_min, self.workers_max, last)

    def computing(self) -> list[str]:
        """The active workers that have replicas at the next step or later."""
        view = self.view
        return [worker for worker in self.active() if view is not None and view.takes_part(worker, self.furthest + 1)]

    def is_current(self, generation: ViewNumber) -> bool:
        """True if a claim made in `generation` counts; one of an older generation is stale (I10)."""
        return self.view is not None and self.view.generation == generation


def uploads(course: Course, worker: str) -> bool:
    """True if the first weights are lost, or half there, when this worker dies now."""
    alone = not (course.begun or course.strategies.anybody_begins)
    return alone and course.view is not None and course.view.uploader == worker


def tunes_period(course: Course) -> bool:
    """True if the job may choose how often snapshots are taken: the user has not said it."""
    tuned = course.record is not None and course.record.config.get("tune") == "auto"
    return tuned and course.terms.snapshot_tuned and course.terms.snapshots


# What must be true of the coordinator's machine after every event.


def check_course(course: Course, before: View | None) -> None:
    """Raise AssertionError with a sentence if an invariant does not hold; `before`: the view at the last check."""
    _check_members(course)
    assert (course.phase is Phase.OVER) == (course.last_word is not None), f"{course.phase}, {course.last_word}"
    if course.view is None:
        assert course.phase is not Phase.RUNNING, "the job runs without a view"
        return
    _check_beginning(course, course.view, before)
    if course.record is not None:
        _check_view(course.view, course.replicas, {shard.index for shard in course.record.layout.shards})
    _check_order(course.view, before)
    strange = course.views.caught_up - course.view.backup.keys()
    assert not strange, f"shards {sorted(strange)} have caught up, and no backup"
    strange = course.views.arrived - course.view.incoming.keys()
    assert not strange, f"shards {sorted(strange)} have caught up on a third server, and have none"
    if course.phase is Phase.RUNNING:
        _check_presence(course, course.view)


def _check_members(course: Course) -> None:
    members = course.members
    twice = [id for id in set(members.everybody) if members.everybody.count(id) > 1]
    assert not twice, f"{sorted(twice)} have two roles"
    gone = members.leaving - members.workers.keys() - members.servers.keys()
    assert not gone, f"{sorted(gone)} are leaving, and no members"
    for name, ids in (("proposed", members.proposed.keys()), ("done", members.done)):
        gone = set(ids) - members.workers.keys()
        assert not gone, f"{sorted(gone)} are {name}, and no workers"
    missing = members.awaited - set(members.everybody)
    assert not missing, f"{sorted(missing)} are awaited, and no members"


def _check_beginning(course: Course, view: View, before: View | None) -> None:
    """First weights are uploaded only while the job has not begun: else what was computed is lost without a word."""
    known = before is not None and before.generation == view.generation
    if known or view.generation.epoch < course.views.epoch or course.recovery.workers_store or view.origin:
        return
    what = f"view {view.number} begins with first weights of {view.uploader}"
    assert not course.begun, f"{what}, and the job has begun"


def _check_order(view: View, before: View | None) -> None:
    assert view.generation <= view.number, f"view {view.number} is older than its generation {view.generation}"
    if before is None or before is view:
        return
    assert view.number > before.number, f"view {view.number} follows {before.number}"
    assert view.generation >= before.generation, f"generation {view.generation} follows {before.generation}"


def _check_view(view: View, replicas: int, shards: set[int]) -> None:
    for assignment in view.assignments:
        assigned = sorted(replica for own in assignment.replicas.values() for replica in own)
        assert assigned == list(range(replicas)), f"view {view.number} assigns {assigned} of {replicas} replicas"
    starts = [assignment.start for assignment in view.assignments]
    assert starts == sorted(starts), f"view {view.number} assigns from steps {starts}"
    used = set(view.aggregator_of.values()) - {member.id for member in view.aggregators}
    assert not used, f"view {view.number} gives workers to {sorted(used)}, who are not in it"
    servers = {member.id for member in view.servers}
    assert view.primary.keys() == shards, f"view {view.number} has primaries of {sorted(view.primary)}"
    assert view.paired.keys() == view.backup.keys(), f"view {view.number} pairs {sorted(view.paired)}"
    for shard, home in view.primary.items():
        backup = view.backup.get(shard)
        assert home in servers, f"the primary of shard {shard} is {home}, who is not in view {view.number}"
        assert backup is None or backup in servers, f"the backup of shard {shard} is {backup}, who is not in the view"
        assert backup != home, f"the primary and the backup of shard {shard} are both {home}"
    for shard, third in view.incoming.items():
        assert third.server in servers, f"shard {shard} goes to {third.server}, who is not in view {view.number}"
        assert view.backup.get(shard), f"shard {shard} goes to {third.server} beside no backup"
        twice = third.server in (view.primary[shard], view.backup[shard])
        assert not twice, f"shard {shard} goes to {third.server}, who has it"


def _check_presence(course: Course, view: View) -> None:
    here = course.members
    for member in view.servers:
        homes = [shard for shard, home in view.primary.items() if home == member.id]
        present = here.servers.get(member.id) == member
        assert present or not homes, f"{member.id} is gone, and the primary of shards {homes} in view {view.number}"
    for worker, own in view.assigned(course.furthest + 1).items():
        assert not own or worker in here.workers, f"{worker} is gone, and has replicas {own} in view {view.number}"
