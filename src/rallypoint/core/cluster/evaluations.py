"""The job's evaluations: whose turn each version that is due is, what came of it, and what is decided from that.

    a worker says what its script evaluates (`Evaluates`)
    the view leases the first version that is due to a worker: servers keep that version. If something is decided from
    evaluations, nobody passes the next one that is due (`orders.lease`); else the lead evaluates those that it passes
    it has its result, in the journal: what is decided counts from the next version that is due
    the next view says what is decided, and leases that version

Example: an evaluation every 100 steps. Version 100 is leased to a standby, which evaluates it while others train, up to
version 200; without a standby to the lead, which does it before it computes step 100. Whoever evaluates may die, with
its result: the next view leases version 100 to another worker, which gets it from the servers. If the job decides from
evaluations, nobody computes step 200 before version 100 has its result: so the job can end with version 200, or go on
from there with another rate. If it does not, and the standby is slow or the coordinator away, the lead evaluates
version 200 before it computes step 200.

The lease is in the view, so it is journalled, and it reaches each server before a contribution of a worker that relies
on it. If two workers evaluate a version they get the same figures, and the first ones count (I2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from rallypoint.core.cluster.effects import Effect, Note, Refuse
from rallypoint.core.cluster.state import ClusterState, Phase
from rallypoint.core.decisions import Decided, Rules, StopWhen, is_due
from rallypoint.core.modes import Feature
from rallypoint.core.protocol import Aborted, Evaluated, Evaluates, Say
from rallypoint.core.view import Lease, View

if TYPE_CHECKING:
    from rallypoint.core.cluster.completion import Completion
    from rallypoint.core.cluster.course import Course
    from rallypoint.core.job import JobRecord

KEPT = 64  # versions
_NO_EVALUATION = (
    "run.stop_when and evaluation.plateau decide from evaluations, and the script has none: write @run.every(100)"
)


@dataclass(slots=True)
class EvaluationLedger:
    """What is known of a job's evaluations.

    Attributes:
        periods: how often each evaluation of the script is due, in steps; empty while no worker has said so.
        able: the workers whose script has these evaluations.
        results: version -> its figures by name, of the newest 64 versions that were evaluated. None in their place: it
            has no result, and never will have one: nobody has that version any more.
        registered: it is known which evaluations the script has: a worker has said it, or the journal.
        stops: the script's rules for an early end.
        decided: what is decided from the results.
        asked: the newest version of which a snapshot was asked for.
        stored: the newest 64 versions of which there is a snapshot.
        first: the version with which this generation began.
    """

    periods: tuple[int, ...] = ()
    able: set[str] = field(default_factory=set)
    results: dict[int, dict[str, float] | None] = field(default_factory=dict)
    registered: bool = False
    stops: tuple[StopWhen, ...] = ()
    decided: Decided = field(default_factory=Decided)
    asked: int = 0
    stored: list[int] = field(default_factory=list)
    first: int = 0
    _earlier: list[Decided] = field(default_factory=list)  # ascending; the newest 64, and the one that `asked` needs

    # ---- what the script evaluates ----

    def agrees(self, worker: str, said: Evaluates, *, fixed: bool) -> bool:
        """True if this worker's script has the evaluations and rules of the job, or may say which those are.

        The first one may, and who is alone. `fixed`: no more, for what the job has computed depends on them.
        """
        none = not self.periods and not self.stops
        if not self.registered or (none and not (fixed and said.stops)) or (self.able <= {worker} and not fixed):
            return True
        return said.periods == self.periods and said.stops == self.stops

    def register(self, worker: str, said: Evaluates, *, same: bool) -> bool:
        """A worker says which evaluations its script has. Who has others than the job (`same`) is not able.

        Returns True if those of the job are others now.
        """
        before = (self.periods, self.stops)
        if same and ((said.periods, said.stops) != before or self.able <= {worker}):
            self.periods, self.stops = said.periods, said.stops
        self.registered = True
        (self.able.add if same and said.periods else self.able.discard)(worker)
        return (self.periods, self.stops) != before

    def recovered(self, state: ClusterState) -> None:
        """Go on from what an earlier coordinator has left: the holder of its lease need not say that it is able."""
        self.decided, self.stored, self.asked = state.decided, list(state.stored), max(state.stored, default=0)
        self.results = dict(state.results)
        self.periods, self.stops = state.periods, state.stops
        self.registered = bool(self.periods or self.stops)
        if state.view is not None and (lease := state.view.orders.lease) is not None and lease.holder:
            self.able.add(lease.holder)

    # ---- which versions are due ----

    def due_after(self, version: int, last: int) -> int | None:
        """The first version after this one that is due; None if there is none up to `last`.

        Only where a version is one step, as wherever evaluations are leased.
        """
        if not self.periods or version >= last:
            return None
        return min(last, *((max(0, version) // every + 1) * every for every in self.periods))

    def is_due(self, record: JobRecord, version: int, last: int) -> bool:
        """True if an evaluation is due with that version of a job that ends with `last`."""
        if version <= 0:
            return False
        step, before = record.steps_at(version), record.steps_at(version - 1)
        return any(is_due(every, step, before, ends=version == last) for every in self.periods)

    # ---- results, and what is decided from them ----

    def add(self, version: int, figures: Mapping[str, float] | None, known: int) -> bool:
        """Add the result of a version. Returns False if that is known already.

        `known` is the highest version that is known to exist. Of too many results, one of a version after it goes
        first: those of honest workers are not far ahead.
        """
        if self.results.get(version) is not None or (figures is None and version in self.results):
            return False
        while len(self.results) >= KEPT:
            furthest = max(self.results)
            del self.results[furthest if furthest > known else min(self.results)]
        self.results[version] = None if figures is None else dict(figures)
        return True

    def rewind(self, version: int) -> None:
        """Drop what is known of versions after `version`: the job goes back to it."""
        self.results = {known: figures for known, figures in self.results.items() if known <= version}
        self.decided = self.decided_at(version)
        self.first = self.asked = version
        self.stored = [*(known for known in self.stored if known < version), version]

    def go_back_to(self, decided: Decided) -> None:
        """The job goes back to a snapshot, which says that this was decided."""
        self.decided = decided
        self._earlier.clear()

    def is_stored(self, version: int) -> None:
        """There is a snapshot of this version."""
        self.stored = [*self.stored, version][-KEPT:]

    def decided_at(self, version: int) -> Decided:
        """What was decided from evaluations of versions up to this one, as far as it is known."""
        known: Sequence[Decided] = [Decided(), *self._earlier, self.decided]
        return [one for one in known if one.version <= version][-1]

    def told_by(self, version: int) -> Decided:
        """What a snapshot of this version says. A run that goes on from the last one, with more steps, decides from it
        itself, if it is due there."""
        if (decided := self.decided_at(version)).before is None:
            return decided
        return msgspec.structs.replace(decided, version=decided.before, before=None)

    def decide(self, rules: Rules, version: int, following: int | None) -> None:
        """Decide from the result of `version`, which has one or never will. `following`: see `Decided.after`."""
        earlier = [*self._earlier, self.decided]
        needed = [one for one in earlier if one.version <= self.asked][-1:]  # by the snapshot in progress
        newest = earlier[-KEPT:]
        self._earlier = [*(one for one in needed if one.version < newest[0].version), *newest]
        self.decided = self.decided.after(rules, version, self.results.get(version) or {}, following)


# ---- the lease -----------------------------------------------------------------------------------------------------


def wanted_lease(course: Course) -> Lease | None:
    """The lease that the next view is to have, with the members that are here."""
    view, record, ledger = course.view, course.record, course.evaluations
    if view is None or record is None or not record.leases or not ledger.registered:
        return course.views.orders.lease  # a coordinator that was restarted may not know yet what is evaluated
    if not ledger.periods:
        return None
    version = ledger.due_after(ledger.decided.version, course.last)
    if version is None:
        return course.views.orders.lease  # all is evaluated
    gates = [record.rounds]  # where nothing depends on it, no step waits for it (I7)
    if course.rules.steers:
        gates.append(ledger.due_after(version, course.last) or record.rounds)
    if (captured := version_to_capture(course)) is not None:
        gates.append(captured)
    return Lease(version, _holder(course, view, version), min(gates))


def _holder(course: Course, view: View, version: int) -> str:
    members, ledger = course.members, course.evaluations
    able = [worker for worker in members.proposed if worker in members.present and worker in ledger.able]
    staying = [worker for worker in able if worker not in members.leaving | members.apart]
    busy = {*course.active(), *members.awaited}
    idle = [w for w in staying if w not in busy and not view.takes_part(w, course.furthest + 1)]
    before = next((worker for worker in able if view.evaluates(worker, version)), "")
    if before in staying and (before in idle or not idle or before in course.evaluating):
        return before
    if idle:
        return idle[0]
    if before:
        return before  # it was told to go: it ends its evaluation first
    if (lead := view.lead(version)) in staying:
        return lead
    return next((worker for worker in staying if worker not in members.awaited), "")


def version_to_capture(course: Course) -> int | None:
    """The next version that is evaluated and of which a snapshot is to be asked for; None if there is none."""
    ledger = course.evaluations
    if course.rules.best is None or not course.terms.snapshots:
        return None
    version = ledger.due_after(max(ledger.asked, known_version(course) - 1), course.last)
    return None if version == course.last else version


def awaits_decision(course: Course, version: int) -> bool:
    """True if evaluations of versions before this one are still to be decided from."""
    ledger = course.evaluations
    if not ledger.registered and course.views.orders.lease is not None:
        return True  # a coordinator that was restarted, whom nobody has told yet what the script evaluates
    first = ledger.due_after(ledger.decided.version, course.last) if course.rules.steers else None
    return first is not None and first < version


def known_version(course: Course) -> int:
    """The highest version that is known to exist. Reports may be lost with a connection; what is evaluated exists."""
    return max(course.known, course.evaluations.decided.version)


def rolled_back(course: Course) -> None:
    """A new generation begins from version `course.furthest` + 1: later versions are made, and evaluated, again."""
    ledger, lease, version = course.evaluations, course.views.orders.lease, course.furthest + 1
    ledger.rewind(version)
    if lease is not None and lease.version < version:
        ledger.results.setdefault(lease.version, None)
    course.views.order(lease=None, disputes=(), reductions=ledger.decided.reductions)
    if course.views.orders.paused is not None:
        course.views.order(paused=version)  # it stays where it is


def lease_noted(course: Course, before: View) -> list[Effect]:
    """Note for the event log who evaluates which step, if the next view says something new about it."""
    lease = course.views.orders.lease
    if lease is None or not lease.holder or before.evaluates(lease.holder, lease.version) or course.record is None:
        return []
    return [Note(f"step {course.record.steps_at(lease.version)} is evaluated by {lease.holder}")]


# ---- waits ---------------------------------------------------------------------------------------------------------


def holds_back(course: Course) -> str:
    """A phrase for what training waits for at the end of the lease; "" if it is not there."""
    record, lease = course.record, None if course.view is None else course.view.orders.lease
    if lease is None or record is None or not lease.until <= course.known < record.rounds:
        return ""
    if lease.until <= lease.version:  # what is decided counts from a later one on
        return f"a snapshot of step {record.steps_at(lease.until)} to begin, because it is evaluated"
    return _evaluation_of(record, lease)


def awaits_evaluation(course: Course) -> str:
    """A phrase for the evaluation that the job's end waits for; "" if there is none, or nobody is here who could."""
    ledger, record, lease = course.evaluations, course.record, None if course.view is None else course.view.orders.lease
    version = ledger.due_after(ledger.decided.version, course.last) if ledger.able & course.members.present else None
    if version is None or lease is None or record is None:
        return ""
    return _evaluation_of(record, lease if lease.version == version else Lease(version, "", 0))


def _evaluation_of(record: JobRecord, lease: Lease) -> str:
    return f"the evaluation of step {record.steps_at(lease.version)} by {lease.holder or 'a worker that can run it'}"


def lost_evaluations(course: Course) -> list[Effect]:
    """Say which evaluations have no result, at the job's end."""
    lost = sorted(version for version, figures in course.evaluations.results.items() if figures is None)
    steps = ", ".join(str(course.job.steps_at(version)) for version in lost)
    return [Say(f"without an evaluation: step {steps}; whoever had that version was lost")] if lost else []


# ---- what workers say ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Decisions:
    """Handles what workers say of evaluations; decides from the results, in the order of their versions."""

    course: Course
    completion: Completion
    _told: int = 0  # the best version that was shown last

    def handle(
        self, worker: str, said: Evaluates | Evaluated, left: Callable[[str, str], list[Effect]]
    ) -> list[Effect]:
        """Take a worker's message; return the effects. `left(member, why)` is what happens when a member is gone."""
        course, ledger, view = self.course, self.course.evaluations, self.course.view
        if worker not in course.members.present or course.record is None:
            return []
        if isinstance(said, Evaluates):
            return self._evaluates(worker, said, course.record, left)
        if view is None or not course.is_current(said.generation) or said.version > course.last:
            return []
        if said.values is None and (view.orders.lease is None or view.orders.lease.version != said.version):
            return []
        if not ledger.is_due(course.record, said.version, course.last):
            return []
        if ledger.add(said.version, said.values, known_version(course)):
            course.changed()  # it must not be leased again, or shown again, by the next coordinator
        return [*self.advance(), *self.completion.advance()]

    def _evaluates(
        self, worker: str, said: Evaluates, record: JobRecord, left: Callable[[str, str], list[Effect]]
    ) -> list[Effect]:
        course, ledger = self.course, self.course.evaluations
        if wrong := next((rule.problem for rule in said.stops if rule.problem), ""):
            return self._refuse(worker, f"it brought a rule of run.stop_when that is none: {wrong}", left)
        if said.stops and (why := record.refusal_of({Feature.DECIDES})):
            return self._cannot(worker, why, left)
        steers = course.rules.steers or bool(said.stops)
        same = ledger.agrees(worker, said, fixed=course.begun and steers)
        if not same and steers:
            return self._refuse(worker, (
                "its script has other evaluations or other rules than the job (run.every, run.stop_when): all workers "
                "need the same ones, because what the job computes depends on them"
            ), left)  # fmt: skip
        if not said.periods and (said.stops or course.rules.plateau):
            return self._cannot(worker, _NO_EVALUATION, left)
        if ledger.register(worker, said, same=same):
            if not steers:  # a script that says it late, in its loop, evaluates no earlier version
                passed = max(ledger.decided.version, course.known - 1)
                ledger.decided = msgspec.structs.replace(ledger.decided, version=passed)
            course.changed()
        return self.completion.advance()

    def _cannot(self, worker: str, why: str, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
        """The job cannot do what this worker's script asks for. Where it has no part, it ends alone."""
        course = self.course
        if course.phase is Phase.OVER:
            return []
        if not course.begun or course.has_a_part(worker):
            return course.end(Aborted(why))
        return self._refuse(worker, why, left)

    def _refuse(self, worker: str, why: str, left: Callable[[str, str], list[Effect]]) -> list[Effect]:
        said = [Say(f"refused: {worker}: {why}")] if self.course.phase is Phase.GATHERING else []
        return [Refuse(worker, why, final=True), *said, *left(worker, f"refused: {why}")]

    def advance(self) -> list[Effect]:
        """Decide from all versions whose result is here, and from none before an earlier one is decided."""
        course, ledger = self.course, self.course.evaluations
        if not ledger.periods or course.phase is not Phase.RUNNING or course.record is None:
            return []
        effects: list[Effect] = []
        before = ledger.decided.version
        while (version := ledger.due_after(ledger.decided.version, course.last)) is not None:
            settled = version in ledger.results or version < ledger.first  # or lost, or of an earlier generation
            if not course.record.leases or not settled:
                break
            effects += self._decide(version, course.record)
        if ledger.decided.version != before:
            effects += self.completion.snapshots.commit()
        return [*effects, *self._best(course.record)]

    def _decide(self, version: int, record: JobRecord) -> list[Effect]:
        course, ledger = self.course, self.course.evaluations
        before = ledger.decided
        following = ledger.due_after(version, version + max(ledger.periods)) if version < course.last else None
        ledger.decide(course.rules, version, following)
        course.views.order(reductions=ledger.decided.reductions)
        course.changed()
        effects: list[Effect] = []
        reduced = len(ledger.decided.reductions) > len(before.reductions)
        if reduced and following is not None and following <= course.last:
            effects.append(Say(f"the learning rate is reduced from step {record.steps_at(following)} on"))
        stop = ledger.decided.stop
        if stop is not None and stop.version < course.last:
            effects += self.completion.decided(stop)
        return effects

    def _best(self, record: JobRecord) -> list[Effect]:
        """Say that a new best version is kept, once its snapshot is complete."""
        ledger, rule = self.course.evaluations, self.course.rules.best
        best = None if rule is None else ledger.decided.best_by(rule)
        if best is None or rule is None or best.version == self._told or best.version not in ledger.stored:
            return []
        self._told = best.version
        step = record.steps_at(best.version)
        return [Say(f"step {step} has the {rule.word} {rule.metric} so far, {best.value:.6g}: its snapshot is kept")]
