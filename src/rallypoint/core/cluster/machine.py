"""The coordinator's machine: members join, report and leave; it publishes views, takes snapshots and ends the job.

Pure: events go in (`core.cluster.events`), effects come out (`core.cluster.effects`), time comes with `Tick`. Parts:

    course      what the coordinator knows of the job
    membership  the workers and servers that are here
    succession  which view follows the one in force
    snapshots   when to take a snapshot
    operator    what an operator orders
    evaluations which versions are evaluated by whom, and what is decided from that
    completion  the end of a job that goes well; ending: the last snapshot of one that fails
    assigner    which worker computes which replicas

The shell writes `state()` to the journal whenever `revision` has risen, before it runs any effect (I7).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.core import protocol
from rallypoint.core.cluster import events
from rallypoint.core.cluster.auditing import Auditing, probed
from rallypoint.core.cluster.completion import Completion
from rallypoint.core.cluster.course import Course, check_course, uploads
from rallypoint.core.cluster.effects import Admit, Effect, PublishView, Refuse, SendTo
from rallypoint.core.cluster.evaluations import Decisions
from rallypoint.core.cluster.operator import follow, waiting_for
from rallypoint.core.cluster.reach import Reach, Silence, disagrees, disproved, set_apart, take_beat
from rallypoint.core.cluster.state import ClusterState, Origin, Phase, Resumed
from rallypoint.core.cluster.storing.last_snapshot import LastSnapshot
from rallypoint.core.cluster.storing.snapshot_duty import SnapshotDuty
from rallypoint.core.cluster.storing.snapshots import Snapshots, begin_from
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.placing.assigner import Assigner
from rallypoint.core.protocol import Aborted, Applied, Beat, Finished, GiveUp, Message, Propose, Say
from rallypoint.core.view import Member, View


@dataclass(slots=True)
class ClusterMachine:
    """The coordinator's decisions in one job. The caller makes one call at a time.

    Attributes:
        terms: how the cluster is to behave.
        recovered: the state that an earlier coordinator left in the journal; None if there was none.
        resume: (record, snapshot, version) of the snapshot to go on from; None to start with first weights.
        course: what the coordinator knows of the job.
    """

    terms: Terms
    recovered: ClusterState | None = None
    resume: Resumed | None = None
    course: Course = field(init=False)
    _assigner: Assigner = field(default_factory=Assigner)
    _snapshots: Snapshots = field(init=False)
    _ending: LastSnapshot = field(init=False)
    _succession: Succession = field(init=False)
    _completion: Completion = field(init=False)
    _decisions: Decisions = field(init=False)
    _auditing: Auditing = field(init=False)
    _silence: Silence = field(init=False)
    _reach: Reach = field(init=False)
    _checked: View | None = None  # the view in force when `validate` was called last

    def __post_init__(self) -> None:
        before = (self.terms.earlier, *(known.epoch for known in (self.recovered, self.resume) if known is not None))
        epoch = 1 + max(before)
        self.course = course = Course(self.terms, ViewSequence(epoch, 1))
        course.workers_max, course.begun_by = self.terms.workers_max, self.terms.begun_by
        self._snapshots = Snapshots(self.course, SnapshotDuty(self.terms, epoch))
        self._succession = Succession(self.course, self._snapshots, self._assigner)
        self._ending = LastSnapshot(self.course, self._snapshots, self._succession)
        self._completion = Completion(self.course, self._snapshots, self._succession)
        self._decisions = Decisions(self.course, self._completion)
        self._auditing = Auditing(course, self._succession)
        self._silence, self._reach = Silence(self.terms.heartbeat, self.terms.living), Reach(self.course)
        if self.resume is not None:
            course.describe(self.resume.record)
            begin_from(self.resume.origin, self._snapshots)
            course.changed()  # the next coordinator must know with what the job begins
        if self.recovered is not None:
            self._recover(self.recovered)

    def _recover(self, state: ClusterState) -> None:
        course = self.course
        course.members.incarnations = state.incarnations
        course.changed()
        if self.resume is not None:  # a resumed job has new members; the incarnations count on
            return
        # Without a record, all members had left before anything was computed: do not use their view.
        view = state.view if state.record is not None else None
        course.views.go_on_from(view, state.caught_up, goes_on=state.goes_on)
        course.copies = state.copies
        course.describe(state.record)
        course.begun, course.furthest = state.begun, state.furthest
        course.origin, course.begun_by = state.origin, state.begun_by
        course.last_word, course.failing = state.last_word, state.failing
        course.evaluations.recovered(state)
        if view is None and state.origin is not None:  # members still gathered
            begin_from(state.origin, self._snapshots)
        if not self.terms.earlier:  # else the launcher knows the last size that was announced; the journal may not
            course.workers_max = state.workers_max
        if course.view is None or state.last_word is not None:
            course.phase = Phase.GATHERING if state.last_word is None else Phase.OVER
            return
        course.phase = Phase.RUNNING
        course.members.expect(course.view)
        course.recovery.recovered(state.state_holders, moved=bool(course.view.assignments) or state.begun)

    # ---- questions the shell asks ----

    def state(self) -> ClusterState:
        """What the next coordinator needs. Write it to the journal when `revision` has risen."""
        return self.course.state()

    @property
    def revision(self) -> int:
        """Rises whenever `state()` has changed in something that the next coordinator needs."""
        return self.course.revision

    @property
    def phase(self) -> Phase:
        return self.course.phase

    @property
    def record(self) -> JobRecord | None:
        return self.course.record

    @property
    def view(self) -> View | None:
        return self.course.view

    @property
    def last_word(self) -> Finished | Aborted | None:
        return self.course.last_word

    @property
    def exposed(self) -> int:
        """The number of shards that would be lost with the loss of one server."""
        return self.course.recovery.exposed(self.course.views.exposed)

    @property
    def handed_over(self) -> bool:
        """True if this generation goes on from a version that workers had: reports of steps before it count."""
        return self.course.begun and self.view is not None and self.course.recovery.hands_over(self.view)

    def shards_to_store(self, member: str, snapshot: str) -> set[int]:
        """The shards of the snapshot in progress that this member has to store, and has not stored yet."""
        return self._snapshots.shards_to_store(member, snapshot)

    def waiting_for(self) -> str | None:
        """A phrase for what the whole job waits for (I8); None when it only waits for the step in progress."""
        if self.course.phase is Phase.FAILING:
            return self._ending.awaited
        return waiting_for(self.course, self._snapshots, cut_off=self._silence.cut_off)

    def validate(self) -> None:
        """Raise AssertionError with a sentence if an invariant does not hold. Call it between any two events."""
        check_course(self.course, self._checked)
        self._checked = self.course.view

    # ---- events ----

    def handle(self, event: events.Event) -> list[Effect]:
        """Take one event; return the effects, to be run in order."""
        often = isinstance(event, events.OFTEN)
        if isinstance(event, events.From):
            if isinstance(message := event.message, Beat) and self.course.phase not in (Phase.FAILING, Phase.OVER):
                return take_beat(event.member, message, self.course, self._reach)  # the short way: the most frequent
            often = isinstance(message, Beat | Applied)
        known, effects = self.course.known, self._handle(event)
        same = often and self.course.known == known
        after = () if same else (*self._decisions.advance(), *self._succession.lease(), *self._auditing.advance())
        return [*effects, *after]

    def _handle(self, event: events.Event) -> list[Effect]:
        course = self.course
        if course.phase is Phase.OVER:
            return [Refuse(event.member.id, "the job is over")] if isinstance(event, events.Joined) else []
        if course.phase is Phase.FAILING:
            return self._ending.handle(event)
        match event:
            case events.Heard(member=member):
                course.members.spoke(member, course.now)
            case events.Computed():
                return self._progress(event)
            case events.Tick(now=now, replaced=replaced):
                return self._tick(now, replaced)
            case events.Joined():
                return self._joined(event)
            case events.From(member=member, message=message):
                return self._told(member, message)
            case protocol.Resize() | protocol.Pause():
                return self._succession.advance() if follow(course, event) else []
            case events.Left(member=member, reason=reason):
                return self._left(member, reason)
            case events.Unlinked(member=member, reason=reason, reset=reset):
                if member in course.members:
                    course.members.unlinked(member, reason if reset else "")
            case Origin():
                return self._succession.found(event)
            case events.TookOver(state=state, complete=complete):
                course.views.complete = complete
                if state is not None:
                    course.views.epoch = self._snapshots.duty.epoch = max(course.views.epoch, state.epoch + 1)
                    self._recover(state)
                return []
            case events.Outrun():
                return self._succession.outrun(event)
            case _:
                return self._snapshot_event(event)
        return []

    def _told(self, member: str, message: Message) -> list[Effect]:
        course = self.course
        match message:
            case Applied(step=step, generation=generation):
                if course.is_current(generation):
                    course.has_applied(member, step)
                return self._completion.advance()
            case Propose():
                return self._proposal(member, message)
            case protocol.Disproved():
                return disproved(member, message, course, self._left)
            case protocol.AuditFound():
                return self._auditing.handle(member, message, self._left)
            case protocol.CaughtUp() | protocol.Reached():
                return self._succession.noted(member, message)
            case protocol.Leaving():
                course.members.leaving |= {member} & (course.members.workers.keys() | course.members.servers.keys())
                return [*self._succession.advance(), *self._succession.dismiss()]
            case protocol.Done() | protocol.Stop():
                return self._completion.handle(member, message)
            case protocol.Evaluates() | protocol.Evaluated():
                return self._decisions.handle(member, message, self._left)
            case GiveUp():
                return self._failed(member, message)
            case protocol.Unrestored():
                return self._succession.unrestored(member, message)
            case _:
                raise AssertionError(f"a message that nobody takes: {message}")

    # ---- members ----

    def _joined(self, event: events.Joined) -> list[Effect]:
        course, members = self.course, self.course.members
        member, role = self.terms.topology.told(event.member), event.role
        members.heard(member.id, course.now)
        if (known := members.same(member.id, role, member.incarnation, event.process)) is not None:
            return self._returned(known)
        effects: list[Effect] = []
        if members.is_taken(member.id, role):  # the old process is gone, even if its connection still looks open
            effects += self._left(member.id, "another process came under its name")
        course.recovery.gone(member.id)  # the state that a process of this id had is gone with that process
        effects.append(Admit(member.id, members.join(member, role, event.process)))
        if role != "worker" and course.record is not None and course.phase is not Phase.GATHERING:
            effects.append(SendTo(member.id, protocol.Prepare(course.record)))
        effects += course.dismiss_aggregators()
        if course.phase is Phase.GATHERING:
            return [*effects, *self._begin_when_gathered()]
        if role == "worker":
            return effects
        recovering = course.phase is Phase.RECOVERING and role == "server"
        return [*effects, *(self._succession.recover() if recovering else self._succession.advance())]

    def _returned(self, member: Member) -> list[Effect]:
        """The same process has connected again: after the coordinator's restart, or because its connection broke.

        What was sent to it may be lost: send it again.
        """
        course = self.course
        course.members.returned(member.id)
        self._snapshots.duty.abandon()  # it may have missed the request
        effects: list[Effect] = [Admit(member.id, member.incarnation)]
        proposes = course.phase is Phase.GATHERING or member.id in course.members.workers
        if course.record is not None and not proposes:
            effects.append(SendTo(member.id, protocol.Prepare(course.record)))
        if self.view is not None and course.phase is not Phase.GATHERING:  # else the next view begins the job anew
            effects.append(PublishView(self.view, (member.id,)))
            effects += self._succession.advance()  # while it was away, nothing moved
        return effects

    def _proposal(self, worker: str, said: Propose) -> list[Effect]:
        course, members, record = self.course, self.course.members, said.record
        if worker not in members.workers:
            return []
        if course.record is None:
            course.describe(record)
            course.changed()
        elif (why := disagreement(course.record, record)) is not None:
            return disagrees(worker, why, course, self._left)
        if course.phase is Phase.GATHERING and (refused := record.refusal_of(self.terms.features)):
            return course.end(Aborted(refused))
        if worker in members.proposed:
            return []
        news = probed(worker, said.kernels, course)
        members.propose(worker)
        gathering = course.phase is Phase.GATHERING
        return [*news, *(self._begin_when_gathered() if gathering else self._succession.advance())]

    def _begin_when_gathered(self) -> list[Effect]:
        course, members = self.course, self.course.members
        if len(members.servers) < course.servers_to_begin or len(members.proposed) < course.workers_to_begin:
            return []
        refused, begins = course.dismiss_aggregators(), self._succession.begin()
        if course.phase is Phase.GATHERING:
            return [*refused, *begins]  # all who could begin are leaving: nobody is sent the record, it may be dropped
        prepare = [SendTo(member, protocol.Prepare(course.job)) for member in (*members.servers, *members.aggregators)]
        return [*refused, *prepare, *begins]

    def _left(self, member: str, reason: str) -> list[Effect]:
        course, members = self.course, self.course.members
        if member not in members:
            return []
        was_worker, polite = member in members.workers, member in members.leaving
        members.remove(member)
        for known in (self._assigner, self._reach, course.links.speeds, course.handover):
            known.forget(member)
        course.evaluations.able.discard(member)
        course.evaluating.discard(member)
        had_state = course.recovery.gone(member)
        if course.phase is Phase.GATHERING:
            if not members.proposed and course.origin is None and not course.views.begun:
                course.describe(None)  # nobody was sent it; servers keep a record that they have
            return []
        said = Say(f"{member} {'has left' if polite else 'is gone'}: {reason}")
        if course.phase is Phase.RECOVERING:
            return [said]
        if was_worker and uploads(course, member):
            return [said, *self._succession.new_generation("")]  # it may have uploaded half of the first weights
        if was_worker and course.recovery.workers_store and course.view is not None:
            course.revision += had_state
            self._snapshots.duty.abandon()  # it may have had a share in one
            if course.recovery.ends_with(member, course.view):
                return [said, *self._succession.recover(ending=course.view.orders.ending)]
        return [said, *self._succession.advance(), *self._completion.advance()]

    def _failed(self, member: str, said: GiveUp) -> list[Effect]:
        """A member says that it cannot go on. If the job can go on without it, it fails alone."""
        if member not in self.course.members:
            return []
        if self.course.has_a_part(member):
            return self._ending.begin(member, said)
        why = f"it has failed: {said.reason}"
        return [Refuse(member, why, final=True), *self._left(member, why)]

    # ---- progress and time ----

    def _progress(self, event: events.Computed) -> list[Effect]:
        """A report counts if it is of this generation, from a worker of the job, and of a step that the job has."""
        course = self.course
        course.members.heard(event.worker, course.now)
        if not course.is_current(event.generation) or not course.may_report(event.worker, event.step):
            return []
        if not course.begun:
            course.begun = True
            course.changed()
        course.has_state(event.worker, event.step)
        reached = course.reached_by(event.step)
        now = max(course.now, event.now)
        self._assigner.computed(event.worker, event.step, event.replica, event.seconds, course.replicas, now)
        course.furthest = max(course.furthest, reached)
        course.tuning.reached(course.furthest, max(course.now, event.now))
        self._reach.computed(event.worker, event.step)
        self._snapshots.duty.computed(event.step, event.replica)
        return [*self._snapshots.take_if_due(), *self._completion.advance()]

    def _tick(self, now: float, replaced: frozenset[str]) -> list[Effect]:
        course = self.course
        first, course.now = course.now == 0.0, now
        if first:
            course.members.all_heard(now)
            course.lately.begins(now, 0.0 if self.recovered is None else self.terms.heartbeat)
            self._snapshots.duty.last = (self._snapshots.duty.last[0], now)
        if ends := self._ending.again():
            return ends
        found = self._silence.look(course.members, now, replaced)
        effects: list[Effect] = [Say(found.said)] if found.said else []
        for member, why in found.given_up:
            if course.phase is Phase.OVER:
                break  # the job ended with the loss of the member before
            effects.append(Refuse(member, f"given up: {why}"))
            if member not in found.dead:
                course.members.give_up(member, now + self.terms.heartbeat)
            effects += self._left(member, why)
        effects = self._succession.after_losses(effects)
        if course.phase is Phase.RUNNING and not self._silence.cut_off:
            apart = set_apart(self._reach, course, self._left)
            effects += [*apart, *self._succession.advance()] if apart else []
        if course.phase is Phase.RUNNING:
            if course.storing_first_weights and self._snapshots.taking is None and not course.members.awaited:
                effects += self._succession.new_generation("")  # an earlier coordinator was lost at the start
            effects += self._succession.improve()
            effects += self._snapshot_event(events.Tick(now))
        return effects

    def _snapshot_event(self, event: events.Event) -> list[Effect]:
        begun = self.course.begun
        effects = self._snapshots.tick() if isinstance(event, events.Tick) else self._snapshots.handle(event)
        effects += self._succession.advance() if self.course.begun and not begun else []
        return [*effects, *self._completion.advance()]
