"""Publishes the next view: after a join or a loss, for a better assignment, for a new generation."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.cluster import events
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, FindSnapshot, Note, PublishView, SendTo
from rallypoint.core.cluster.evaluations import lease_noted, rolled_back, wanted_lease
from rallypoint.core.cluster.recovery import FromSnapshot, FromWorker
from rallypoint.core.cluster.state import NO_SERVER, Origin, Phase
from rallypoint.core.cluster.storing.snapshots import Snapshots
from rallypoint.core.placing.assigner import Assigner
from rallypoint.core.placing.links import said_of
from rallypoint.core.placing.pinned import pinned_assignments, pins_after
from rallypoint.core.placing.view_change import says_nothing_new
from rallypoint.core.protocol import Aborted, Assist, CaughtUp, Finished, Reached, Say, Unrestored
from rallypoint.core.view import Assignment, View, holds

# What follows for the next view from what workers say of the versions that they hold: see `placing.handover`.


def ready(course: Course) -> tuple[list[str], list[str]]:
    """The active workers that compute, and those that fetch a version first."""
    view, active = course.view, course.active()
    if view is None or course.phase is not Phase.RUNNING or not course.strategies.warms:
        return active, []
    if course.storing_first_weights:
        return active, []
    cold = course.handover.cold(active, view.assigned(course.furthest + 1), course.known)
    left = set(cold)
    return [worker for worker in active if worker not in left] if cold else active, cold


def moves_before(course: Course) -> int | None:
    """The step before which shards that have caught up change their primaries; None: they do now."""
    view = course.view
    if view is None or course.record is None or not course.strategies.hands_over or not course.begun:
        return None
    stuck = not course.members.apart.isdisjoint(view.primary.values())  # no step ends before these shards move
    computing = _computing(course, view)
    if view.orders.ending or stuck or not computing:
        return None
    if course.handover.hurries(view, course.members.leaving, course.now):
        return None
    return course.handover.before(view, course.known, computing, _ends(course), course.now)


def nothing_on_its_way(course: Course) -> bool:
    """True if no update can be on its way: the primary and the backup of each shard are at the same version, or will
    be when the backup has got what was sent to it."""
    view = course.view
    if view is None or course.record is None or not course.strategies.hands_over or not course.begun:
        return False
    computing = _computing(course, view)
    return view.orders.ending or not computing or course.handover.all_there(view, computing, _ends(course))


def _computing(course: Course, view: View) -> list[str]:
    """The workers that compute the next step."""
    here = course.members.workers
    return [worker for worker, own in view.assigned(course.known + 1).items() if own and worker in here]


def _ends(course: Course) -> tuple[int | None, int | None]:
    """Steps that will not be computed for now: a pause, the job's end."""
    return course.views.orders.paused, course.last


_UNDAMAGED = ("", -1, "")


@dataclass(slots=True)
class Succession:
    """Decides which view follows the one in force, and publishes it.

    When the model's state is lost, it begins a new generation; if that needs a snapshot, it looks for one first.
    """

    course: Course
    snapshots: Snapshots
    assigner: Assigner
    _damaged: tuple[str, int, str] = _UNDAMAGED  # the snapshot that a server has just not loaded: its version, why

    # ---- the view that follows ----

    def advance(self, *, assignments: tuple[Assignment, ...] | None = None, ending: bool = False) -> list[Effect]:
        """Publish the view that follows from the members that are here, if it differs from the one in force.

        `assignments` replace those that the assigner would choose. `ending`: a worker holds the last version.
        """
        course = self.course
        if course.phase is Phase.RECOVERING and course.recovery.workers_end_it:
            return self.recover()
        if course.phase is not Phase.RUNNING or course.view is None or course.record is None:
            return []
        before, ending = course.view, course.view.orders.ending or ending
        assignments = self._assignments(before) if assignments is None else assignments
        if course.recovery.needs_new_generation(before, assignments, course.members, ending=ending):
            return self.recover(ending=ending)
        course.views.order(lease=wanted_lease(course))
        view = course.views.following(
            course.record.layout.shards, course.members, assignments, ending=ending, moves_before=moves_before(course),
            warming=ready(course)[1], settled=nothing_on_its_way(course),
        )
        if view is None:  # shards are lost
            return self.recover()
        if says_nothing_new(view, before, course.furthest):
            return []
        if course.storing_first_weights and view.primary != before.primary:
            return self.new_generation("")
        if view.assigned(course.furthest + 1).keys() != before.assigned(course.furthest + 1).keys():
            self.assigner.others_compute()
        if course.strategies.in_rounds and not course.strategies.pinned and course.lately.over(course.applied):
            view = course.views.forgetting(view)
        noted = lease_noted(course, before)
        return [*noted, *self._publish(view, abandon=view.primary != before.primary)]

    def ends_before(self, step: int) -> list[Effect]:
        """Of a job that fails: publish a view in which the workers that stay compute all replicas of the step in
        progress, and none of `step` or a later one. Nothing if there are none, or if theirs cannot be computed by
        others."""
        course = self.course
        if course.view is None or course.record is None or course.strategies.pinned:
            return []
        assignments = self._assignments(course.view)
        ending = course.view.orders.ending
        if not assignments or course.recovery.needs_new_generation(
            course.view, assignments, course.members, ending=ending
        ):
            return []
        course.views.order(paused=step)
        view = course.views.following(
            course.record.layout.shards, course.members, assignments, ending=ending, moves_before=step
        )
        return [] if view is None else self._publish(view, abandon=False)

    def lease(self) -> list[Effect]:
        """Publish a view with another evaluation lease, or another decision, if there is to be one."""
        course, view = self.course, self.course.view
        if view is None or course.phase is not Phase.RUNNING or not course.evaluations.periods:
            return []
        wanted = (wanted_lease(course), course.views.orders.reductions)
        return self.advance() if wanted != (view.orders.lease, view.orders.reductions) else []

    def noted(self, member: str, said: CaughtUp | Reached) -> list[Effect]:
        """A primary says that the backups of some shards have caught up (see `ViewSequence.backups_caught_up`), or a
        worker that it holds a version."""
        course = self.course
        if course.view is None or course.phase is not Phase.RUNNING:
            return []
        if isinstance(said, CaughtUp):
            if not course.views.backups_caught_up(member, said.backups):
                return []
            course.changed()
        elif member in course.members.present and course.is_current(said.generation):
            course.handover.says(member, said.version, course.view)
        return self.advance()

    # ---- assignments ----

    def improve(self) -> list[Effect]:
        """Assign replicas by the workers' speeds, or as before if that made steps no shorter; help stragglers; place
        shards by the speeds of servers' links; tune what changes no bytes."""
        return [
            *self._reassign_if_uneven(), *self._assist_straggler(), *self._place_if_uneven(), *self._place_by_uplinks(),
            *self._tune(), *self._hand_over(),
        ]  # fmt: skip

    def _assignments(self, before: View | None) -> tuple[Assignment, ...]:
        course = self.course
        active = course.active() if before is None else ready(course)[0]
        if not active or course.record is None or course.storing_first_weights:
            return ()
        if course.strategies.pinned:
            return pinned_assignments(course.pins, active, course.replicas)
        assigned = before.assigned(course.furthest + 1) if before is not None else {}
        if before is not None and assigned.keys() == set(active):
            return before.assignments_from(course.furthest + 1)  # no worker has come or gone
        by_speed = course.strategies.by_speed
        return self.assigner.assignments(assigned, active, course.replicas, course.furthest, by_speed=by_speed)

    def _reassign_if_uneven(self) -> list[Effect]:
        course = self.course
        if course.view is None or course.record is None or not course.strategies.by_speed:
            return []
        if len(course.view.assignments) > 1 and course.view.assignments[-1].start > course.furthest:
            return []  # the last new assignment has not started yet
        assigned = course.view.assigned(course.furthest + 1)
        better = self.assigner.better(
            assigned, ready(course)[0], course.replicas, course.furthest, course.now, adds_up=course.record.adds_up
        )
        if better is None:
            return []
        why, assignments = better
        return [Note(why), *self.advance(assignments=assignments)]

    def _assist_straggler(self) -> list[Effect]:
        course = self.course
        if not course.strategies.backup_tasks or course.view is None:
            return []
        assigned = course.view.assigned(course.furthest)
        found = self.assigner.straggler(assigned, course.furthest, ready(course)[0], course.now)
        if found is None:
            return []
        worker, *at = found
        view = course.views.with_backup_task(worker, at[1])  # servers have to know of it before it contributes
        published = [] if view is None else self._publish(view, abandon=False)
        return [*published, SendTo(worker, Assist(*at))]

    def _place_if_uneven(self) -> list[Effect]:
        course, members = self.course, self.course.members
        if not course.terms.measure_links or course.view is None or course.record is None:
            return []
        if not course.views.replication:  # no shard could move
            return []
        if course.storing_first_weights or course.view.orders.ending or not members.awaited.isdisjoint(members.servers):
            return []
        shards = course.record.layout.shards
        factors = course.views.uplinks.factors(course.views.situation(members, course.view.assignments))
        speeds = course.links.look(course.view, course.views.caught_up, shards, members.staying, course.now, factors)
        if speeds is None:
            return []
        course.views.speeds = speeds
        return [Say(said_of(speeds)), *self.advance()]

    def _place_by_uplinks(self) -> list[Effect]:
        course, members, views = self.course, self.course.members, self.course.views
        if not views.uplinks.told or course.view is None or not members.awaited.isdisjoint(members.servers):
            return []
        if not views.replication:  # no shard could move
            return []
        if course.storing_first_weights or course.view.orders.ending or course.view.backup.keys() - views.caught_up:
            return []
        if course.view.incoming:
            return []
        why = views.uplinks.look(views.situation(members, course.view.assignments), course.now)
        return [Say(why), *self.advance()] if why else []

    def _hand_over(self) -> list[Effect]:
        waits = self.course.view is not None and self.course.view.orders.handover is not None
        return self.advance() if waits and moves_before(self.course) is None else []

    def _tune(self) -> list[Effect]:
        course = self.course
        if course.view is None or course.record is None or course.storing_first_weights:
            return []
        decided = course.tuning.look(course.view, course.record)
        if decided is None:
            return []
        course.views.order(tuned=dict(decided.values))
        return [*([Say(decided.said)] if decided.said else []), *self.advance()]

    # ---- new generations ----

    def recover(self, *, ending: bool = False, why: str = "") -> list[Effect]:
        """Begin a new generation from what is left: the state is lost, or a worker without it is to take part.

        `why` is said in place of the loss.
        """
        course = self.course
        before, computing = course.phase, course.computing()
        course.members.done.clear()
        if not course.begun:
            return self.new_generation("")
        self.snapshots.duty.abandon()
        course.phase = Phase.RECOVERING
        alone = course.terms.by_hand and before is Phase.RUNNING and not course.members.servers
        more = [Say(f"waiting for {NO_SERVER}")] if alone else []
        match course.recovery.plan(course.members, course.active(), computing):
            case None:
                return [*more]
            case FromSnapshot(lost=lost):
                if before is Phase.RUNNING:
                    course.tuned_period.went_back()
                return [*([Say(why or lost)] if before is Phase.RUNNING else []), *more, FindSnapshot()]
            case FromWorker(uploader=uploader, version=version):
                course.phase, course.furthest = Phase.RUNNING, version - 1
                return self.new_generation("", uploader=uploader, ending=ending)

    def outrun(self, event: events.Outrun) -> list[Effect]:
        """A member acted on a view that nobody knew when this coordinator took over: begin a new generation."""
        if self.course.phase is not Phase.RUNNING:
            return []
        said = Say(
            f"{event.member} comes back with view {event.number}, which the journal had no room for and no other "
            "member knew: what the servers hold is not certain"
        )
        return [said, *self.recover()]

    def unrestored(self, server: str, said: Unrestored) -> list[Effect]:
        """The server cannot load the snapshot with which the generation begins: that was damaged after it was verified.
        Search again, which verifies all anew."""
        view = self.course.view
        if view is None or self.course.phase is not Phase.RUNNING or view.generation != said.generation:
            return []
        if not view.origin or not holds(view, server):
            return []  # another server has said so before, or it does not load any
        self._damaged = (view.origin, self.course.furthest + 1, f"{server} cannot go on: {said.reason}")
        return self.recover(why=f"{server} cannot go on from snapshot {view.origin}: {said.reason}")

    def found(self, event: Origin) -> list[Effect]:
        """Begin a new generation from the snapshot that was found; end the job if there is none."""
        course = self.course
        if course.phase is not Phase.RECOVERING or not course.members.servers:
            return []
        origin = course.origin
        if origin is not None and event.snapshot == ("" if origin.is_elsewhere else origin.snapshot):  # no other is yet
            event = origin
        if event.snapshot == "":
            if course.furthest >= 0 or course.applied >= 0 or origin is not None:
                return course.end(Aborted(course.recovery.no_snapshot))
            course.phase, course.begun = Phase.RUNNING, False  # nothing is computed: the first weights come once more
            return self.new_generation("")
        snapshot, version, why = self._damaged
        if event.snapshot == snapshot or event.version > version >= 0:
            # Only that server sees the damage; or there are later ones, of another course than the one resumed
            return course.end(Aborted(why))
        course.phase, self._damaged = Phase.RUNNING, _UNDAMAGED
        said = Say(f"going on from snapshot {event.snapshot}: version {event.version}{_lost(course, event.version)}")
        course.furthest = event.version - 1
        course.views.order(stop=course.views.orders.stop or event.stop)  # the journal may have had no room for it
        course.evaluations.go_back_to(event.decided)
        self.snapshots.duty.last = (event.version, course.now)
        return [said, *self.new_generation(event.snapshot)]

    def begin(self) -> list[Effect]:
        """All who are waited for are here: begin with the job's origin, or with first weights.

        A job that has begun never gets first weights: without an origin it goes on from the newest snapshot.
        """
        course = self.course
        if course.begun and (course.origin is None or course.views.begun):
            return self.recover()
        course.phase = Phase.RUNNING
        return self.new_generation(course.origin.snapshot if course.begun and course.origin is not None else "")

    def new_generation(self, origin: str, *, uploader: str = "", ending: bool = False) -> list[Effect]:
        """Begin a new generation: publish a view that makes everything before it stale.

        All members start from snapshot `origin`; if that is "", from what the worker `uploader` uploads (by default the
        active worker with the lowest id).
        """
        course = self.course
        course.applied, course.witnesses = -1, set()
        course.handover.restart()
        rolled_back(course)
        course.members.left = dict.fromkeys(course.members.left, -1)
        course.recovery.begins(stored=origin != "")
        self.assigner.restart()
        self.snapshots.duty.restart()
        if not course.members.servers or (origin == "" and not course.active()):
            course.phase = Phase.GATHERING  # wait for members
            return []
        first = uploader or min(course.active(), default="")
        writers = course.recovery.first_writers(first, list(course.members.servers))
        fresh = origin == "" and uploader == "" and course.terms.snapshots
        capture = self.snapshots.capture(0, writers) if fresh else []
        # Do not start from the old assignment: all replicas are computed again in any case.
        shards = course.job.layout.shards
        view = course.views.first(
            shards, course.members, self._assignments(None), uploader=first, origin=origin, ending=ending
        )
        return [*self._publish(view, abandon=False), *capture]

    def _publish(self, view: View, *, abandon: bool) -> list[Effect]:
        course = self.course
        course.lately.published(view, course.view, course.known, course.now)
        course.views.adopt(view)
        course.recovery.published(view)
        course.pins = pins_after(course.pins, view)
        course.changed()
        if abandon:
            self.snapshots.duty.abandon()
        told = tuple(member.id for member in (*view.servers, *view.aggregators, *view.workers))
        return [PublishView(view, told), *self.dismiss()]

    def dismiss(self) -> list[Effect]:
        """Let servers that were told to leave go: those without a shard; under AllReduce all of them."""
        members, needed = self.course.members, self._needed()
        if self.course.view is None:
            return []
        return [SendTo(server, Finished()) for server in members.servers if server in members.leaving - needed]

    def after_losses(self, effects: list[Effect]) -> list[Effect]:
        """Return the effects of several losses at once, without those that only the last one makes wrong."""
        phase, spared = self.course.phase, [SendTo(server, Finished()) for server in self._needed()]
        # A server that could go after one loss may be needed after the next
        kept = [effect for effect in effects if effect not in spared]
        # When all have gone, a view of those who were given up is for nobody
        return [effect for effect in kept if phase is not Phase.GATHERING or not isinstance(effect, PublishView)]

    def _needed(self) -> set[str]:
        """The servers that hold shards in the view in force; none under AllReduce."""
        view = self.course.view
        if view is None or self.course.recovery.workers_store:
            return set()
        return view.holders


def _lost(course: Course, version: int) -> str:
    """What it costs to go back to `version`, and which option would spare it."""
    steps = course.job.steps_at(course.furthest + 1) - course.job.steps_at(version)
    if steps <= 0:
        return ""
    again = f"; {steps} step{'s are' if steps > 1 else ' is'} computed again"
    spared = course.views.replication < 2 and not course.recovery.workers_store
    return f"{again}. With two servers and --replication 2 a server's death costs none" if spared else again
