"""An operator's orders: which the coordinator follows, how, and how many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.core.cluster import events
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.operator import may_pause
from rallypoint.core.modes import Feature
from rallypoint.core.protocol import AnyOrder, Drain, Message, Ordered, Pause, Resize, StopWanted
from rallypoint.observe.lines import Allowance

_BURST, _EVERY_S = 16, 2.0  # orders that are followed at once; then one in so many seconds


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """What is done about an order: events for the machine; the order itself to `workers`; then news for observers."""

    events: Sequence[events.Event] = ()
    workers: Sequence[str] = ()
    news: Sequence[Message] = ()


class Orders:
    """Decides about an operator's orders. Whoever may observe may give them, as often as he likes: too many are
    refused, because each may be written to the journal and the event log."""

    def __init__(self, now: float) -> None:
        self._allowance = Allowance(_BURST, _EVERY_S, now)

    def answer(self, order: AnyOrder, course: Course, now: float) -> OrderAnswer:
        """What to do about this order, at the time `now` (s)."""
        if not self._allowance.take(now):
            return _refused(order, "too many orders: try again in some seconds")
        match order:
            case Pause(on=on):
                return self._pause(order, course, on=on)
            case StopWanted(reason=reason):
                return self._stop(order, course, reason)
            case Drain(member=member):
                return self._drain(order, course, member)

    def _pause(self, order: Pause, course: Course, *, on: bool) -> OrderAnswer:
        if on and (why := may_pause(course)):
            return _refused(order, why)
        if not on and course.views.orders.paused is None:
            return _refused(order, "the job is not paused")
        assert course.record is not None
        before = course.record.steps_at(course.known + 1)
        said = f"the operator pauses the job before step {before}" if on else "the operator lets the job go on"
        return OrderAnswer([Pause(on)], news=[_ordered(order, said)])

    def _stop(self, order: StopWanted, course: Course, reason: str) -> OrderAnswer:
        record, workers = course.record, course.computing()
        if record is None or not course.begun or not workers:
            return _refused(order, "no worker computes: nothing can be stopped")
        if not record.supports(Feature.STOP):
            return _refused(order, "a job in this mode cannot be stopped early")
        if course.views.orders.stop is not None:
            return _refused(order, f"the job ends with step {record.steps_at(course.last)} already")
        goes_on = [Pause(False)] if course.views.orders.paused is not None else []
        said = f"the operator stops the job after the step that is computed now{f': {reason}' if reason else ''}"
        return OrderAnswer(goes_on, workers, [_ordered(order, said)])

    def _drain(self, order: Drain, course: Course, member: str) -> OrderAnswer:
        members = course.members
        if member not in members.workers and member not in members.servers:
            return _refused(order, f"there is no worker or server {member or 'without a name'}")
        peers = members.workers if member in members.workers else members.servers
        if not peers.keys() - members.leaving - {member}:
            return _refused(order, f"{member} is the last {'worker' if peers is members.workers else 'server'}")
        said = f"the operator sends {member} away"
        return OrderAnswer(news=[order, _ordered(order, said)])


class Sizes:
    """Lets through so many orders at once, then one every 2 seconds. Of those that come faster the newest counts.

    Each order that is followed is written to the journal and the event log, and starts or ends processes.
    """

    def __init__(self, now: float) -> None:
        self._allowance = Allowance(_BURST, _EVERY_S, now)
        self._waiting: Resize | None = None

    def take(self, order: Resize, now: float) -> Resize | None:
        """The order to follow now; None if this one has to wait."""
        before = self._waiting or Resize(0)
        self._waiting = Resize(order.workers or before.workers, order.servers or before.servers)
        return self.due(now)

    def due(self, now: float) -> Resize | None:
        """The order that has waited and is to be followed now; None if there is none."""
        if self._waiting is None or not self._allowance.take(now):
            return None
        order, self._waiting = self._waiting, None
        return order


def _ordered(order: AnyOrder, text: str) -> Ordered:
    return Ordered(type(order).__name__, text)


def _refused(order: AnyOrder, text: str) -> OrderAnswer:
    return OrderAnswer(news=[Ordered(type(order).__name__, text, refused=True)])
