"""The end of a job that goes well: with which version, which workers hold it, and when that ends the job.

A script may end its job before the last round. What it says becomes part of the next view (`orders.stop`), so it is in
the journal before anybody acts on it. The worker that says it holds a contribution back until it has that view, so in
an aligned job no server makes a later version, and none makes the last one, before it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rallypoint.core import protocol
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, Note
from rallypoint.core.cluster.evaluations import awaits_evaluation, lost_evaluations
from rallypoint.core.cluster.state import Phase
from rallypoint.core.cluster.storing.snapshots import Snapshots
from rallypoint.core.cluster.succession import Succession
from rallypoint.core.modes import Feature
from rallypoint.core.order import stream_unread
from rallypoint.core.protocol import Aborted, Finished, Say
from rallypoint.core.view import EarlyEnd, ViewNumber


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

    def handle(self, worker: str, said: protocol.Done | protocol.Stop) -> list[Effect]:
        """Take a worker's message; return the effects."""
        return self._stop(worker, said) if isinstance(said, protocol.Stop) else self._done(worker, said)

    def _stop(self, worker: str, said: protocol.Stop) -> list[Effect]:
        """The script on a worker stops the job.

        Of two versions the lower counts, unless a version after it is known to exist already. The worker says it again
        to the next coordinator and in each new generation, until a view says it.
        """
        course = self.course
        if course.phase is not Phase.RUNNING or course.record is None or worker not in course.members.present:
            return []
        if not course.is_current(said.generation) or not course.record.supports(Feature.STOP):
            return []
        if said.left >= 0:
            course.members.left[worker] = said.left
        version, before = max(said.version, course.known), course.views.orders.stop
        if not 0 <= version < course.last:
            return [*self.advance(), *self.succession.advance()]  # others compute what it does not
        who, why = (worker, said.reason) if before is None else (before.worker, before.reason)
        at = course.record.steps_at(version)
        # (Where scripts have sums, each says that it has ended, and there are no steps)
        shown = said.left < 0 and Feature.SUMS not in course.record.features
        news = [Say(f"the job ends with step {at}: {why} ({who})")] if shown else []
        return [*news, *self._ends_with(EarlyEnd(version, why, who))]

    def decided(self, stop: EarlyEnd) -> list[Effect]:
        """An evaluation has decided that the job ends early."""
        at = self.course.job.steps_at(stop.version)
        return [Say(f"the job ends with step {at}: {stop.reason}"), *self._ends_with(stop)]

    def _deserted(self) -> list[Effect]:
        """All workers have left their loops before the last version: end with the one that they have, if they can."""
        course, stop = self.course, self.course.views.orders.stop
        if stop is None:
            return []
        left = [course.members.left.get(worker, course.last) for worker in course.members.present]
        if not left or max(left) >= course.last:
            return []
        if (version := max(left)) >= course.known:
            return self._ends_with(msgspec.structs.replace(stop, version=version))
        return course.end(Aborted(
            f"{stop.reason} ({stop.worker}), and so have all other workers, in the middle of a step or before the job "
            "went back to a snapshot: call run.stop() instead, and let the loop end by itself"
        ))

    def _overtaken(self) -> list[Effect]:
        """End a stopped job with a later version if that exists: what stopped it came too late."""
        course, stop = self.course, self.course.views.orders.stop
        if stop is None or course.record is None or course.known <= stop.version:
            return []
        return self._ends_with(msgspec.structs.replace(stop, version=min(course.known, course.record.rounds)))

    def _ends_with(self, stop: EarlyEnd) -> list[Effect]:
        course = self.course
        before, taking = course.views.orders.stop, self.snapshots.taking
        course.views.order(stop=stop)
        course.members.done.clear()
        no_last = taking is not None and before is not None and taking.version == before.version  # has no codec states
        if taking is not None and (taking.version > stop.version or no_last):
            self.snapshots.duty.abandon()
        noted = Note(f"the job ends with version {stop.version}: {stop.reason} ({stop.worker})")
        return [noted, *self.succession.advance(), *self.advance()]

    def _done(self, worker: str, said: protocol.Done) -> list[Effect]:
        """A worker says that it holds the last version."""
        course = self.course
        if course.phase is Phase.RUNNING and worker in course.members.present:
            course.members.says_done[worker] = (said.generation, said.version)
        return self.advance()

    def advance(self) -> list[Effect]:
        """Believe the workers whose word can be true by now, and end the job if nothing is missing."""
        course, members = self.course, self.course.members
        if course.phase is not Phase.RUNNING or course.record is None or course.view is None:
            return []
        if course.failing is not None:
            return []
        if ends := self._overtaken() or self._deserted():
            return ends
        said = {worker for worker, done in members.says_done.items() if self._is_the_last(*done)}
        said = said and said & members.present  # asked at every report: `present` is as long as the job is large
        effects = self._believe(said) if not said <= members.done and self._can_be(said) else []
        if course.phase is not Phase.RUNNING or not members.is_complete(course.now) or not self.snapshots.final:
            return effects
        if awaits_evaluation(course):
            return effects
        effects += lost_evaluations(course)
        lead, able = course.view.lead(course.last), members.finishing
        able = able - members.awaited or able  # who is away hears of it later, or not at all
        stop, at = course.views.orders.stop, course.record.steps_at(course.last)
        lead = lead if lead in able else min(able)
        effects += [Say(text) for text in (course.tuning.unfinished(course.record), self._unread()) if text]
        return [*effects, *course.end(Finished(lead) if stop is None else Finished(lead, at, stop.reason))]

    def _unread(self) -> str:
        """A sentence, if the job's steps have ended it and not the stream that it was to read to its end."""
        record = self.course.record
        if record is None or self.course.views.orders.stop is not None:
            return ""
        return stream_unread(record.config.get("reading", {}).get("passes", 0), record.config.get("steps", 0))

    def _is_the_last(self, generation: ViewNumber, version: int) -> bool:
        course = self.course
        version = course.job.rounds if version < 0 else version
        return course.is_current(generation) and version == course.last

    def _can_be(self, said: set[str]) -> bool:
        course = self.course
        assert course.view is not None
        last, computing = course.last - 1, course.computing()
        if max(course.furthest, course.applied) >= last:
            return True
        witnesses = course.witnesses.intersection(server.id for server in course.view.servers)
        if witnesses and course.strategies.in_rounds:
            return False  # they say each round that they apply, and have not come to the last one
        return bool(computing) and said.issuperset(computing)

    def _believe(self, workers: set[str]) -> list[Effect]:
        course = self.course
        assert course.view is not None
        course.members.done |= workers
        for worker in sorted(workers):
            course.has_state(worker, course.last)
        course.furthest = max(course.furthest, course.last - 1)
        if course.view.orders.ending:
            return []
        effects = self.succession.advance(ending=True)
        return [*effects, *(self.snapshots.take() if self.snapshots.taking is None else [])]
