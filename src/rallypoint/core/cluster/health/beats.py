"""Takes the members' beats: most of what a coordinator gets."""

from __future__ import annotations

from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.effects import Effect
from rallypoint.core.cluster.events import Beat
from rallypoint.core.cluster.health.reach import Reach


def take_beat(beat: Beat, course: Course, reach: Reach) -> list[Effect]:
    """Note what a member's beat says. Nothing is done about it before the next tick: it has no effects."""
    member = beat.member
    course.members.spoke(member, course.now)
    if member in course.members:
        reach.beat(beat)
        course.links.speeds.heard(member, beat.paced)
    if beat.evaluating:
        course.evaluating.add(member)
    else:
        course.evaluating.discard(member)
    return []
