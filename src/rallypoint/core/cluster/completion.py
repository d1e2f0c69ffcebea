"""The end of a job that goes well: which workers hold the last version, and when that ends the job."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, Finish
from rallypoint.core.cluster.state import Phase
from rallypoint.core.cluster.storing.snapshots import Snapshots
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.view import ViewNumber


@dataclass(slots=True)
class Completion:
    """Counts the workers that hold the last version, and ends the job when all do and that version is stored.

    A worker that says so is believed when the last round is known to be reached, or when all workers that compute say
    so: then nobody is left to reach it. The latter not while a server of the view has said which rounds it has applied,
    and the last one is not among them: then all who compute lie. Until it is believed its word is kept: it comes over
    another connection than the servers' words, so an honest one may be early. Workers that stand by hold the last
    version too, in the end.
    """

    course: Course
    snapshots: Snapshots
    succession: Succession

    def said(self, worker: str, generation: ViewNumber) -> list[Effect]:
        """A worker says that it holds the last version; it installed it in `generation`."""
        course = self.course
        if worker in course.members.present and course.phase is Phase.RUNNING and course.is_current(generation):
            course.members.says_done[worker] = generation
        return self.advance()

    def advance(self) -> list[Effect]:
        """Believe the workers whose word can be true by now, and end the job if nothing is missing."""
        course, members = self.course, self.course.members
        if course.phase is not Phase.RUNNING or course.record is None or course.view is None:
            return []
        if course.failing is not None:
            return []
        said = {w for w, g in members.says_done.items() if course.is_current(g)} & members.present
        effects = self._believe(said) if not said <= members.done and self._can_be(said) else []
        if course.phase is not Phase.RUNNING or not members.is_complete(course.now) or not self.snapshots.final:
            return effects
        lead, able = course.view.lead(course.record.rounds), members.finishing
        able = able - members.awaited or able  # who is away hears of it later, or not at all
        return [*effects, *course.end(Finish(lead if lead in able else min(able)))]

    def _can_be(self, said: set[str]) -> bool:
        course = self.course
        assert course.record is not None
        assert course.view is not None
        last, computing = course.record.rounds - 1, course.computing()
        if max(course.furthest, course.applied) >= last:
            return True
        witnesses = course.witnesses.intersection(server.id for server in course.view.servers)
        if witnesses and course.strategies.in_rounds:
            return False  # they say each round that they apply, and have not come to the last one
        return bool(computing) and said.issuperset(computing)

    def _believe(self, workers: set[str]) -> list[Effect]:
        course = self.course
        assert course.record is not None
        assert course.view is not None
        course.members.done |= workers
        for worker in sorted(workers):
            course.has_state(worker, course.record.rounds)
        course.furthest = max(course.furthest, course.record.rounds - 1)
        if course.view.ending:
            return []
        effects = self.succession.advance(ending=True)
        return [*effects, *(self.snapshots.take() if self.snapshots.taking is None else [])]
