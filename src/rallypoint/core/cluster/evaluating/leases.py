"""Evaluation leases: who evaluates a version that is due, in place of the lead in its training loop.

The lease is in the view, so it is journalled, it comes back with a coordinator, and it reaches the servers before any
contribution of a worker that relies on it: they keep the version from then on, until a later view says another.

    no lease: the lead evaluates each version that is due, before it computes replica 0 of that step
    a standby is there: it gets the next version that is due. The lead leaves out what the view in force leases
    the lead is lost while it evaluates: the view that replaces it leases that version
    the holder is lost: another standby, or a worker once the version exists
    the version has its result: the lease is over, the next one begins

If the lead gets the lease too late, both evaluate. They get the same figures, and the first counts (I2).
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, Note, Say
from rallypoint.core.cluster.events import Evaluated, NotKept
from rallypoint.core.view import Lease, View

AHEAD = 2  # the lead may be so many steps ahead of what is known: a lease of an earlier version would come too late


def wanted_lease(course: Course) -> Lease | None:
    """The lease that the next view is to have, with the members that are here."""
    view, record, ledger = course.view, course.record, course.evaluations
    if view is None or record is None or not course.strategies.leases:
        return None
    lease = view.lease
    if lease is not None and (ledger.is_over(lease.version) or lease.version > course.last):
        lease = None
    if lease is None and ledger.periods:
        version = _first_undecided(course) if course.decides else _version_to_lease(course, view)
        lease = None if version is None else Lease(version)
    return None if lease is None else Lease(lease.version, _holder(course, view, lease))


def wanted_limit(course: Course, lease: Lease | None) -> int | None:
    """The limit that the next view is to have with this lease: see `View.limit`.

    Where evaluations decide, no version that is due is passed before it is leased, and not the one after it before it
    has its result. Where the best is kept, none is passed before servers are asked for its snapshot.
    """
    ledger, record = course.evaluations, course.record
    if record is None:
        return None
    if not course.strategies.leases:  # workers do not know how the cluster was started
        return record.rounds if record.leases and record.rules.steers else None
    if not ledger.registered:
        return course.views.limit
    if not course.rules.steers:
        return None
    gates, first = [record.rounds], _first_undecided(course)
    if first is not None and lease is not None and lease.version == first:
        first = ledger.due_after(first, course.last)
    if (captured := version_to_capture(course)) is not None:
        gates.append(captured)
    return min(gates if first is None else [*gates, first])


def version_to_capture(course: Course) -> int | None:
    """The next version that is evaluated and of which a snapshot is to be asked for; None if there is none."""
    ledger = course.evaluations
    if course.rules.best is None or not course.terms.snapshots:
        return None
    version = ledger.due_after(max(ledger.asked, known_version(course) - 1), course.last)
    return None if version == course.last else version


def awaits_decision(course: Course, version: int) -> bool:
    """True if evaluations of versions before this one are still to be decided from."""
    if not course.evaluations.registered and course.views.limit is not None:
        return True  # a coordinator that was restarted, whom nobody has told yet what the script evaluates
    if not course.rules.steers:
        return False
    first = _first_undecided(course)
    return first is not None and first < version


def holds_back(course: Course) -> str:
    """A phrase for what training waits for at the limit; "" if it is not there."""
    view, record = course.view, course.record
    if view is None or record is None or view.limit is None or not view.limit <= course.known < record.rounds:
        return ""
    if view.lease is None or view.limit <= view.lease.version:  # what is decided counts from a later one on
        return f"a snapshot of step {record.steps_at(view.limit)} to begin, because it is evaluated"
    at = record.steps_at(view.lease.version)
    return f"the evaluation of step {at} by {view.lease.holder or 'a worker that can run it'}: the job decides from it"


def version_is_settled(course: Course, version: int) -> bool:
    """True if the version has its result, or never will: it is lost, or is from before this generation."""
    return course.evaluations.is_over(version) or version < course.evaluations.first


def known_version(course: Course) -> int:
    """The highest version that is known to exist. Reports may be lost with a connection; what is evaluated exists."""
    return max(course.known, course.evaluations.decided.version)


def _first_undecided(course: Course) -> int | None:
    return course.evaluations.due_after(course.evaluations.decided.version, course.last)


def heard(event: Evaluated | NotKept, course: Course) -> None:
    """Take what a worker says of an evaluation: a result, or a version that no server keeps."""
    ledger, view = course.evaluations, course.view
    if event.worker not in course.members.present or course.record is None:
        return
    if view is None or not course.is_current(event.generation) or not 0 < event.version <= course.last:
        return
    if isinstance(event, Evaluated):
        if not ledger.is_due(course.record, event.version, course.last):
            return
        new = ledger.add(event.version, event.figures, known_version(course))
        if new and (view.leases(event.version) or course.decides):
            course.changed()  # it must not be given again, or shown again, by the next coordinator
    elif view.leases(event.version) and not ledger.is_over(event.version):
        ledger.lost.add(event.version)


def rolled_back(course: Course) -> None:
    """A new generation begins from version `course.furthest` + 1: later versions are made, and evaluated, again."""
    ledger, lease, version = course.evaluations, course.views.lease, course.furthest + 1
    ledger.rewind(version)
    if lease is not None and lease.version < version and not ledger.is_over(lease.version):
        ledger.lost.add(lease.version)
    course.views.lease = course.views.limit = None
    course.views.reductions = ledger.decided.reductions
    if course.views.paused is not None:
        course.views.paused = version  # it stays where it is


def lease_noted(course: Course, before: View) -> list[Effect]:
    """Note for the event log who evaluates which step, if the next view says something new about it."""
    lease = course.views.lease
    if lease is None or not lease.holder or lease == before.lease or course.record is None:
        return []
    return [Note(f"step {course.record.steps_at(lease.version)} is evaluated by {lease.holder}")]


def lost_evaluations(course: Course) -> list[Effect]:
    """Say which evaluations have no result, at the job's end."""
    assert course.record is not None
    steps = sorted(course.record.steps_at(version) for version in course.evaluations.lost)
    said = f"without an evaluation: step {', '.join(map(str, steps))}; whoever had that version was lost"
    return [Say(said)] if steps else []


def awaits_evaluation(course: Course) -> str:
    """A phrase for the evaluation that the job's end waits for; "" if there is none."""
    if course.view is None or course.record is None or not course.strategies.leases:
        return ""
    if not course.evaluations.able & course.members.present:
        return ""  # nobody is here who could
    lease, ledger, last = course.view.lease, course.evaluations, course.last
    if lease is not None and not ledger.is_over(lease.version) and lease.version <= last:
        at = course.record.steps_at(lease.version)
        return f"the evaluation of step {at} by {lease.holder or 'a worker that can run it'}"
    if ledger.periods and last > 0 and not ledger.is_over(last):
        return f"the evaluation of the last step, {course.record.steps_at(last)}"
    return ""


def _version_to_lease(course: Course, view: View) -> int | None:
    assert course.record is not None
    ledger, known, last = course.evaluations, course.known, course.last
    if course.members.all_done:
        return None if ledger.is_over(last) or last <= 0 else last
    if known <= last and ledger.is_due(course.record, known, last) and not ledger.is_over(known):
        lead = view.lead(known)
        if lead not in course.members.present or lead in course.members.leaving:
            return known
    if not _standbys(course, view):
        return None
    return ledger.next_due(known + AHEAD, last)


def _holder(course: Course, view: View, lease: Lease) -> str:
    members, ledger, holder = course.members, course.evaluations, lease.holder
    able = [worker for worker in members.proposed if worker in members.present and worker in ledger.able]
    staying = [worker for worker in able if worker not in members.leaving | members.apart]
    idle = _standbys(course, view)
    if holder in staying and (holder in idle or not idle or ledger.high):
        return holder
    if idle:
        return idle[0]
    if holder in able:
        return holder  # it was told to go: it ends its evaluation first
    if lease.version > course.known and not members.all_done:
        return ""  # a worker that trains evaluates a version only once it has come to it
    if (lead := view.lead(course.known)) in able:
        return lead
    return next((worker for worker in staying if worker not in members.awaited), "")


def _standbys(course: Course, view: View) -> Sequence[str]:
    """The workers that can evaluate and have nothing else to do, the earliest first."""
    members, active = course.members, set(course.active())
    busy = active | members.leaving | members.apart | members.awaited
    idle = [worker for worker in members.proposed if worker in members.present and worker not in busy]
    return [w for w in idle if w in course.evaluations.able and not view.takes_part(w, course.furthest + 1)]
