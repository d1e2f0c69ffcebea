"""A change of the learning rate that an operator orders: from which version on it counts, for everybody.

    Rescaled      the next view says the factor (`View.rescale`): servers hold updates back, and say from which one on
    RateAwaited   every server that is a primary in the view in force has said it: the highest version counts. The next
                  view says it (`View.scales`), and servers go on

Both views are in the journal before anybody acts on them. A view that comes in between (a death, a join, a new
coordinator) says the factor again, and servers answer it anew: `core.shard.ordering.hold` says why that is sound. A new
generation begins with a state that nobody has updated: there the factor counts from its first version on. What is
settled stays: a job that goes back computes the same versions with the same rates.
"""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect, RateScaled
from rallypoint.core.cluster.events import RateAwaited
from rallypoint.core.cluster.state import Phase
from rallypoint.core.deciding.scales import refused, scale_at, with_scale
from rallypoint.core.modes import Feature


def answered(course: Course, event: RateAwaited) -> list[Effect]:
    """A server says which updates it holds back. Returns what is said once all have: then the next view says it too."""
    view = course.view
    if view is None or course.record is None or view.rescale is None or event.number != view.number:
        return []
    if course.phase not in (Phase.RUNNING, Phase.FAILING):
        return []  # shards are lost: a new generation begins
    course.awaiting_rate[event.server] = event
    if _missing(course):
        return []
    version = max(course.awaiting_rate[server].at for server in view.primary.values())
    if course.applied < 0:  # servers may still restore what this generation begins with
        version = max(version, course.furthest + 1)
    return settled(course, min(version, course.record.rounds))


def settled(course: Course, version: int) -> list[Effect]:
    """The factor that was ordered counts from `version` on: the next view says it. Nothing, if none was ordered."""
    views, record = course.views, course.record
    if views.rescale is None or record is None:
        return []
    factor, views.rescale = views.rescale, None
    views.scales = with_scale(views.scales, version, factor)
    course.awaiting_rate.clear()
    step, scale = record.steps_at(version), scale_at(views.scales, version)
    whole = "" if scale == factor else f": with earlier orders by {scale:g}"
    said = f"the learning rate is multiplied by {factor:g} from step {step} on{whole}"
    return [RateScaled(said, step, factor, scale)]


def may_rescale(course: Course, factor: float) -> str:
    """Why the learning rate cannot be multiplied by this factor now, as a sentence; "" if it can."""
    record, views = course.record, course.views
    if course.phase is not Phase.RUNNING or course.view is None or record is None or not course.begun:
        return "the job does not compute yet, or no more"
    if why := record.refusal_of({Feature.RESCALE, *course.terms.features}):
        return why
    if views.rescale is not None:
        return f"an order to multiply it by {views.rescale:g} is not in force yet: try again in a moment"
    if course.known + 1 >= course.last:
        return "the job is at its last step"
    return refused(views.scales, factor, course.known + 1)


def awaits_rate(course: Course) -> str:
    """A phrase for what training waits for while the learning rate changes; "" if it does not."""
    missing = _missing(course)
    if course.view is None or course.view.rescale is None or not missing:
        return ""
    return f"{', '.join(missing)} to say from which step on the learning rate may change"


def _missing(course: Course) -> list[str]:
    """The servers with primaries that have not answered the view in force."""
    view, answers = course.view, course.awaiting_rate
    primaries = () if view is None else sorted(set(view.primary.values()))
    return [one for one in primaries if view is None or one not in answers or answers[one].number != view.number]
