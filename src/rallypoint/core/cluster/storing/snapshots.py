"""Asks members for a snapshot when one is due, and commits it when all of its parts are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.core import protocol
from rallypoint.core.cluster import events
from rallypoint.core.cluster.course import Course, tunes_period
from rallypoint.core.cluster.effects import Commit, Effect
from rallypoint.core.cluster.evaluations import awaits_decision, known_version, version_to_capture
from rallypoint.core.cluster.state import Origin, Phase
from rallypoint.core.cluster.storing.snapshot_duty import CAPTURE_AHEAD, SnapshotDuty, SnapshotInProgress
from rallypoint.core.protocol import Aborted, Capture, Held, NotStored, Say, SnapshotEvery

_NO_FIRST = (
    "version 0 is not stored, so the job computes without a snapshot to go back to: until one is stored, a loss of "
    "parameters ends it; make room, or write snapshots elsewhere"
)


@dataclass(slots=True)
class Snapshots:
    """Handles the events of snapshots: updates `duty`, returns effects.

    It also sets `course.begun` when version 0 is stored, or cannot be. Under AllReduce the workers of
    `course.evaluating` store their shares after their evaluation.
    """

    course: Course
    duty: SnapshotDuty

    @property
    def taking(self) -> SnapshotInProgress | None:
        return self.duty.taking

    @property
    def final(self) -> bool:
        """True if no snapshot of the job's last version is needed any more."""
        return self.duty.final or not self.course.terms.snapshots

    def handle(self, event: events.Event) -> list[Effect]:
        """Take one event; return the effects. Events that are not about snapshots do nothing."""
        match event:
            case protocol.SnapshotWanted():
                self.duty.ask()
                return self.take_if_due()
            case events.Captured():
                return self.stored(event)
            case NotStored(snapshot=snapshot) if self.duty.under_way(snapshot):
                return self._lost(event)
            case protocol.Release():
                self.duty.final = True
                return []
            case protocol.Snapshotted(snapshot=snapshot) if self.duty.under_way(snapshot):
                return self._committed(self.duty.complete(self.course.now))
            case _:
                return []

    def stored(self, event: events.Captured) -> list[Effect]:
        """A writer has stored shards. Others than its own do not count: it cannot know of them."""
        taking = self.duty.under_way(event.snapshot)
        own = self.shards_to_store(event.server, event.snapshot).intersection(event.shards)
        if taking is None or not own or not self.duty.stored(own, self.course.now):
            return []
        return self.commit()

    def commit(self) -> list[Effect]:
        """Commit the snapshot in progress if it is whole, and everything before its version is decided.

        A job that goes on from it cannot evaluate earlier versions any more. One that fails may not wait for that.
        """
        taking, course = self.duty.taking, self.course
        if taking is None or taking.missing or taking.committing:
            return []
        if course.phase is not Phase.FAILING and awaits_decision(course, taking.version):
            return []
        taking.committing = True
        return [Commit(taking.id, taking.version)]

    def shards_to_store(self, member: str, snapshot: str) -> set[int]:
        """The shards of the snapshot in progress that this member has to store, and has not stored yet."""
        taking, view = self.duty.under_way(snapshot), self.course.view
        if taking is None or view is None or member not in taking.writers:
            return set()
        writer_of = self.course.recovery.writer_of
        return {shard for shard in taking.missing if writer_of(shard, taking.writers, view) == member}

    def tick(self) -> list[Effect]:
        """Give up the snapshot in progress if nothing of it was stored for too long; take one if it is due."""
        taking, now = self.duty.taking, self.course.now
        missed = [] if taking is None else self._unfinished(taking)
        waits = taking is not None and not taking.missing and not taking.committing  # for an evaluation
        if taking is not None and (waits or not self._may_be_stored(taking.version, missed)):
            taking.news = now  # not yet: three steps, or an evaluation, may take longer than the patience
        lost = self.duty.given_up(now, missed)
        return [*([] if lost is None else self._lost(lost)), *self.take_if_due()]

    def take_if_due(self) -> list[Effect]:
        course = self.course
        if not course.begun or course.phase is not Phase.RUNNING or not course.terms.snapshots:
            return []
        said = ""
        if tunes_period(course):
            said = course.tuned_period.look(course.furthest, course.now, taking=self.duty.taking is not None)
        chosen: list[Effect] = [Say(said), SnapshotEvery(course.tuned_period.seconds)] if said else []
        ending = self._ending
        due = self.duty.is_due(
            course.job, course.furthest, course.now, period=course.snapshot_period, ending=ending, lead=self._lead
        )
        soon = self.duty.taking is None and self._evaluated_soon()
        if due and not (self.duty.wanted or self.duty.held or ending):  # only the period asks for it
            due = self._next_version() > self.duty.last[0]  # while the job is paused, there is none
        return [*chosen, *(self.take() if due or soon else [])]

    def _evaluated_soon(self) -> bool:
        """True if it is time to ask for a snapshot of the next version that is evaluated, because the best is kept."""
        version = version_to_capture(self.course)
        return version is not None and version <= known_version(self.course) + self._lead

    def take(self) -> list[Effect]:
        """Begin a snapshot now; if one of its writers is not connected yet, as soon as it is."""
        course = self.course
        if course.record is None or course.view is None or self.final:
            return []
        servers = [member.id for member in course.view.servers]
        writers = course.recovery.writers(servers, course.computing())
        # Members of an earlier coordinator that have not connected again would miss the request.
        self.duty.wanted = not writers or not course.members.awaited.isdisjoint(writers)
        if self.duty.wanted:
            return []
        return self.capture(self._next_version(), writers)

    def _next_version(self) -> int:
        """The version of a snapshot that is asked for now."""
        course = self.course
        assert course.view is not None
        in_rounds, ending = course.strategies.in_rounds, course.view.orders.ending
        version = self.duty.next_version(course.job, course.furthest, in_rounds=in_rounds, ending=ending)
        version, evaluated = min(version, course.last), version_to_capture(course)
        if course.views.orders.paused is not None:
            version = min(version, max(course.views.orders.paused, course.known))  # no later one is made for now
        if evaluated is not None and (version > evaluated or self._evaluated_soon()):
            version = evaluated  # nobody is past it: see `Lease.until`
        return version

    def capture(self, version: int, writers: Sequence[str]) -> list[Effect]:
        """Begin a snapshot of `version`, which replaces the one in progress, and ask `writers` for their parts."""
        self.course.evaluations.asked = max(self.course.evaluations.asked, version)
        shards = (shard.index for shard in self.course.job.layout.shards)
        return [Capture(self.duty.begin(version, shards, self.course.now, writers), version, tuple(writers))]

    def _may_be_stored(self, version: int, missed: Sequence[str]) -> bool:
        has_come = self._ending or version <= max(self.course.furthest, self.course.applied + 1)  # members have it
        return has_come and self.course.evaluating.isdisjoint(missed)

    def _unfinished(self, taking: SnapshotInProgress) -> list[str]:
        """The writers that have not stored all of their shards."""
        view = self.course.view
        assert view is not None
        return sorted({self.course.recovery.writer_of(shard, taking.writers, view) for shard in taking.missing})

    def _committed(self, version: int) -> list[Effect]:
        self.course.evaluations.is_stored(version)
        if self.course.rules.best is not None:
            self.course.changed()
        if not self.course.begun:
            self._begin()
            return []
        if self._at_the_end(version):
            self.duty.final = True
            return []
        return self.take() if self.course.view is not None and self.course.view.orders.ending else []

    def _lost(self, event: NotStored) -> list[Effect]:
        version = self.duty.lost(event.passed, self.course.now)
        if event.passed > self.course.last and self._ending and self.course.views.orders.stop is not None:
            return self.course.end(Aborted(
                f"all workers have left their loops in the middle of a step, and a part of version {event.passed} "
                "exists already: call run.stop() instead, and let the loop end by itself"
            ))  # fmt: skip
        if event.passed >= 0:
            # One server's word: like a report, it proves at most one step after what is known. If it has passed more,
            # the next request fails too, and this goes on until the servers' other words are here.
            passed = min(event.passed, self.course.job.rounds)
            self.course.furthest = max(self.course.furthest, self.course.reached_by(passed))
            return []
        if self._at_the_end(version) and self._ending:
            return self._hold(event.reason)
        said: list[Effect] = [Say(f"snapshot {event.snapshot} could not be taken: {event.reason}")]
        if not self.course.begun:
            said.append(Say(_NO_FIRST))
            self.duty.wanted = True
            self._begin()
        return said

    def _hold(self, reason: str) -> list[Effect]:
        """The last version could not be stored: keep it in memory until it is, or until the user lets the job end."""
        if not self.duty.hold():
            return []
        return [Held(
            f"version {self.course.last}, the last, is not stored ({reason}). {self.holders} hold it in memory and "
            "wait: make room, it is tried again. Ctrl-C ends the job without it; scripts then go on, and may save the "
            "model"
        )]  # fmt: skip

    @property
    def not_stored(self) -> str:
        """What of the snapshot in progress is missing, as ``3 of 8 shards (server0, server1) are``."""
        taking, record = self.duty.taking, self.course.record
        if taking is None or record is None or not taking.missing:
            return "its manifest is"
        writers, shards = ", ".join(self._unfinished(taking)), len(record.layout.shards)
        return f"{len(taking.missing)} of {shards} shards ({writers}) are"

    @property
    def awaited_at_the_end(self) -> str:
        """A phrase for what the job's end waits for, when all workers have the last version and it is not stored."""
        if self.duty.held:
            return f"room for the last version, which {self.holders} hold (Ctrl-C ends the job without it)"
        return f"a snapshot of the last version, which {self.holders} hold"

    @property
    def holders(self) -> str:
        """The members that hold the last version, as ``server0, server1``."""
        assert self.course.view is not None
        servers = [member.id for member in self.course.view.servers]
        return ", ".join(sorted(self.course.recovery.writers(servers, self.course.computing()))) or "workers"

    @property
    def _ending(self) -> bool:
        return self.course.view is not None and self.course.view.orders.ending

    @property
    def _lead(self) -> int:
        """So many steps before its version a snapshot is asked for."""
        return CAPTURE_AHEAD if self.course.strategies.in_rounds else 0

    def _begin(self) -> None:
        """Let the workers compute: the first weights are stored, or cannot be."""
        course = self.course
        course.begun = True
        course.changed()
        if course.view is not None and course.view.uploader in course.members.workers:
            course.recovery.uploaded(course.view.uploader)

    def _at_the_end(self, version: int) -> bool:
        return self.course.record is not None and version >= self.course.last


def begin_from(origin: Origin, snapshots: Snapshots) -> None:
    """The first view of the job will be of this snapshot, and the next snapshot of a later version."""
    course = snapshots.course
    course.origin, course.begun, course.furthest = origin, True, origin.version - 1
    course.views.order(stop=origin.stop)
    course.evaluations.decided = origin.decided
    snapshots.duty.last = (origin.version, 0.0)
