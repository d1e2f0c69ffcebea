"""The machine's share of snapshots: asks for one when it is due, commits it when all parts are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.core.cluster import events
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Capture, Commit, Effect, Say
from rallypoint.core.cluster.snapshot_duty import SnapshotDuty, SnapshotInProgress
from rallypoint.core.cluster.state import Phase

_NO_FIRST = (
    "version 0 is not stored, so the job computes without a snapshot to go back to: until one is stored, a loss of "
    "parameters ends it; make room, or write snapshots elsewhere"
)


@dataclass(slots=True)
class Snapshots:
    """Turns events into the duty's steps and effects. It may set `course.begun`: version 0 is stored, or cannot be."""

    course: Course
    duty: SnapshotDuty

    @property
    def taking(self) -> SnapshotInProgress | None:
        """The snapshot under way."""
        return self.duty.taking

    @property
    def final(self) -> bool:
        """The last version has been stored, cannot be, or need not be."""
        return self.duty.final

    def handle(self, event: events.Event) -> list[Effect]:
        """Take a snapshot's event; any other is none of ours."""
        match event:
            case events.SnapshotWanted():
                self.duty.wanted = True
                return self.take_if_due()
            case events.Captured(snapshot=snapshot, shards=shards) if taking := self.duty.under_way(snapshot):
                return [Commit(snapshot, taking.version)] if self.duty.stored(shards, self.course.now) else []
            case events.SnapshotLost(snapshot=snapshot) if self.duty.under_way(snapshot):
                return self._lost(event)
            case events.Committed(snapshot=snapshot) if self.duty.under_way(snapshot):
                return self._committed(self.duty.complete(self.course.now))
            case _:
                return []

    def tick(self) -> list[Effect]:
        """Give up the snapshot under way if no part of it has come for long; take one if it is due."""
        lost = self.duty.given_up(self.course.now)
        return [*([] if lost is None else self._lost(lost)), *self.take_if_due()]

    def take_if_due(self) -> list[Effect]:
        """Begin one if it is time."""
        course = self.course
        if not course.begun or course.phase is not Phase.RUNNING:
            return []
        assert course.record is not None
        ending, lead = course.view is not None and course.view.ending, course.strategies.snapshot_lead
        due = self.duty.is_due(course.record, course.furthest, course.now, ending=ending, lead=lead)
        return self.take() if due else []

    def take(self) -> list[Effect]:
        """Begin one, if everybody who is to write it can hear of it."""
        course = self.course
        if course.record is None or course.view is None or self.duty.final:
            return []
        servers = [member.id for member in course.view.servers]
        writers = course.recovery.writers(servers, course.computing())
        # Those who are still to come back from an earlier coordinator could not hear of it.
        self.duty.wanted = not writers or not course.members.awaited.isdisjoint(writers)
        if self.duty.wanted:
            return []
        rule = course.strategies.snapshot_version
        version = self.duty.next_version(course.record, course.furthest, rule, ending=course.view.ending)
        return self.capture(version, writers)

    def capture(self, version: int, writers: Sequence[str]) -> list[Effect]:
        """Begin one of `version`, in place of any that is under way."""
        assert self.course.record is not None
        shards = (shard.index for shard in self.course.record.layout.shards)
        return [Capture(self.duty.begin(version, shards, self.course.now), version, tuple(writers))]

    def _committed(self, version: int) -> list[Effect]:
        if not self.course.begun:
            self._begin()
            return []
        if self._at_the_end(version):
            self.duty.final = True
            return []
        return self.take() if self.course.view is not None and self.course.view.ending else []

    def _lost(self, event: events.SnapshotLost) -> list[Effect]:
        version = self.duty.lost(event.passed)
        if event.passed >= 0:
            self.course.furthest = max(self.course.furthest, event.passed)
            return []
        if self._at_the_end(version):
            self.duty.final = True
        said: list[Effect] = [Say(f"snapshot {event.snapshot} could not be taken: {event.reason}")]
        if not self.course.begun:
            said.append(Say(_NO_FIRST))
            self.duty.wanted = True
            self._begin()
        return said

    def _begin(self) -> None:
        """The first weights are stored, or cannot be: let the workers compute."""
        course = self.course
        course.begun = True
        course.changed()
        if course.view is not None and course.view.uploader in course.members.workers:
            course.recovery.uploaded(course.view.uploader)

    def _at_the_end(self, version: int) -> bool:
        return self.course.record is not None and version >= self.course.record.rounds
