"""Decides from the results of evaluations, in the order of their versions.

    a worker says what its script evaluates (`Evaluates`)
    each version that is due gets a lease, before anybody passes it: servers keep it, and it can be evaluated again
    it has its result, in the journal: what is decided counts from the next version that is due
    the next view says it, leases that version, and lets training go on up to the one after it (`View.limit`)

Example: an evaluation every 100 steps. Nobody computes step 200 before version 100 is decided: so the job can end with
version 200, or go on from there with another rate, whatever is killed and however long an evaluation takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.core.cluster.completion import Completion
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Abort, Effect, Refuse, Say
from rallypoint.core.cluster.evaluating.leases import heard, version_is_settled
from rallypoint.core.cluster.events import Evaluated, Evaluates, NotKept
from rallypoint.core.cluster.state import Phase
from rallypoint.core.modes import Feature

_NO_EVALUATION = "run.stop_when and plateau= decide from evaluations, and the script has none: write @run.every(100)"

Left = Callable[[str, str], list[Effect]]


@dataclass(slots=True)
class Deciding:
    """Handles what workers say of evaluations."""

    course: Course
    completion: Completion
    _told: int = 0  # the best version that was shown last

    def handle(self, event: Evaluates | Evaluated | NotKept, left: Left) -> list[Effect]:
        """Take one event; return the effects. `left(member, why)` is what happens when a member is gone."""
        if isinstance(event, Evaluates):
            return self._evaluates(event, left)
        heard(event, self.course)
        return [*self.advance(), *self.completion.advance()]

    def _evaluates(self, event: Evaluates, left: Left) -> list[Effect]:
        course, ledger = self.course, self.course.evaluations
        if event.worker not in course.members.present or course.record is None:
            return []
        if wrong := next((rule.problem for rule in event.stops if rule.problem), ""):
            return self._refuse(event.worker, f"it brought a rule of run.stop_when that is none: {wrong}", left)
        if event.stops and (why := course.record.refusal_of({Feature.STOP_WHEN, *course.terms.features})):
            return self._cannot(event.worker, why, left)
        steers = course.rules.steers or bool(event.stops)
        same = ledger.agrees(event, fixed=course.begun and steers)
        if not same and steers:
            return self._refuse(event.worker, (
                "its script has other evaluations or other rules than the job (run.every, run.stop_when): all workers "
                "need the same ones, because what the job computes depends on them"
            ), left)  # fmt: skip
        if not event.periods and (event.stops or course.rules.plateau):
            return self._cannot(event.worker, _NO_EVALUATION, left)
        if ledger.register(event, same=same):
            course.changed()
        return self.completion.advance()

    def _cannot(self, worker: str, why: str, left: Left) -> list[Effect]:
        """The job cannot do what this worker's script asks for. Where it has no part, it ends alone."""
        course = self.course
        if course.phase is Phase.OVER:
            return []
        if not course.begun or course.has_a_part(worker):
            return course.end(Abort(why))
        return self._refuse(worker, why, left)

    def _refuse(self, worker: str, why: str, left: Left) -> list[Effect]:
        said = [Say(f"refused: {worker}: {why}")] if self.course.phase is Phase.GATHERING else []
        return [Refuse(worker, why, final=True), *said, *left(worker, f"refused: {why}")]

    def advance(self) -> list[Effect]:
        """Decide from all versions whose result is here, and from none before an earlier one is decided."""
        course, ledger = self.course, self.course.evaluations
        if course.phase is not Phase.RUNNING or course.record is None or not ledger.registered or not course.decides:
            return []
        effects: list[Effect] = []
        before = ledger.decided.version
        while (version := ledger.due_after(ledger.decided.version, course.last)) is not None:
            if not version_is_settled(course, version):
                break
            effects += self._decide(version)
        if ledger.decided.version != before:
            effects += self.completion.snapshots.commit()
        return [*effects, *self._best()]

    def _decide(self, version: int) -> list[Effect]:
        course, ledger = self.course, self.course.evaluations
        assert course.record is not None
        before = ledger.decided
        following = ledger.due_after(version, course.last)
        ledger.decide(course.rules, version, following)
        course.views.reductions = ledger.decided.reductions
        course.changed()
        effects: list[Effect] = []
        if len(ledger.decided.reductions) > len(before.reductions) and following is not None:
            effects.append(Say(f"the learning rate is reduced from step {course.record.steps_at(following)} on"))
        stop = ledger.decided.stop
        if stop is not None and stop.version < course.last:
            effects += self.completion.decided(stop)
        return effects

    def _best(self) -> list[Effect]:
        """Say that a new best version is kept, once its snapshot is complete."""
        course, rule = self.course, self.course.rules.best
        best = None if rule is None else course.evaluations.decided.best_by(rule)
        if best is None or rule is None or best.version == self._told or course.record is None:
            return []
        if best.version not in course.evaluations.stored:
            return []
        self._told = best.version
        step = course.record.steps_at(best.version)
        return [Say(f"step {step} is the best so far: {rule.metric} {best.value:.6g}; its snapshot is kept")]
