"""What the members of an earlier coordinator know, collected before the next one decides anything (I7, I10).

The journal may be behind: its disk was full, and views were published all the same. Every member knows the newest view
that it was sent, and says so first of all when it comes back. The newest of all counts: no member has acted on a newer
one. Until it is found, the events of members wait here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rallypoint.coordinator import inbox
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.events import Outrun
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.placing.view_change import still_caught_up
from rallypoint.core.protocol import Hello, Knows, Release, Resize, Say, SnapshotWanted
from rallypoint.core.view import Member, View


def needed(recovered: ClusterState | None) -> bool:
    """True if members of an earlier coordinator may come back and know more than its journal."""
    return recovered is not None and recovered.view is not None and recovered.begun and recovered.last_word is None


def has_begun(state: ClusterState) -> bool:
    """True if a coordinator that knows so much can go on with the job: its record, that it has begun, and a view."""
    return state.begun and state.record is not None and state.view is not None


@dataclass
class TakeOver:
    """Keeps members' events back until each member of the newest known view has said what it knows, or for `patience`.

    Attributes:
        journaled: the state that the journal has.
        patience: seconds, from the first event on, after which no more is waited for: who has not come back by then is
            probably dead. (Before the first event nobody could connect: the disk may be slow.)
        waiting: the events that were kept back, in order.
    """

    journaled: ClusterState
    patience: float
    waiting: list[inbox.Event] = field(default_factory=list)
    _until: float | None = None
    _newest: View = field(init=False)
    _incarnations: int = field(init=False)
    _came: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        assert self.journaled.view is not None
        self._newest, self._incarnations = self.journaled.view, self.journaled.incarnations

    def keeps(self, event: inbox.Event) -> bool:
        """True if the event was kept back."""
        match event:
            case inbox.Opened(hello=hello) | inbox.Closed(hello=hello) if hello.role == "observer":
                return False
            case inbox.Received(message=Resize() | SnapshotWanted() | Release()):
                pass
            case inbox.Opened(hello=hello):
                self._incarnations = max(self._incarnations, hello.incarnation)
            case inbox.Received(hello=hello, message=Knows(view=view)):
                self._hear(hello, view)
            case inbox.Received() | inbox.Closed():
                pass
            case _:
                return False
        self.waiting.append(event)
        return True

    def is_over(self, now: float) -> bool:
        """True if nothing more is waited for."""
        self._until = now + self.patience if self._until is None else self._until
        return now >= self._until or self.is_complete

    @property
    def is_complete(self) -> bool:
        """True if every member of the newest known view has come.

        A newer view, known to others only, had no effect: without its servers and workers nobody can have pushed or
        published anything in it.
        """
        return {_key(member) for member in _members(self._newest)} <= self._came

    @property
    def connected(self) -> list[inbox.Opened | inbox.Closed]:
        """Of the events that were kept back, those about connections."""
        return [event for event in self.waiting if isinstance(event, inbox.Opened | inbox.Closed)]

    def state(self) -> ClusterState | None:
        """What to go on from instead of the journal's state; None if members know neither a newer view nor a higher
        incarnation."""
        before, view = self.journaled, self._newest
        assert before.view is not None
        if view.number == before.view.number and self._incarnations <= before.incarnations:
            return None
        same = view.generation == before.view.generation
        return msgspec.structs.replace(
            before, view=view, epoch=max(before.epoch, view.number.epoch),
            incarnations=max(self._incarnations, *(member.incarnation for member in _members(view))),
            caught_up=tuple(sorted(still_caught_up(view, before.view, set(before.caught_up)))) if same else (),
            furthest=before.furthest if same else -1,  # reports soon say more
            state_holders=before.state_holders if same else {view.uploader: 0} if view.uploader else {},
            goes_on=before.goes_on and view.number == before.view.number,
        )  # fmt: skip

    def _hear(self, hello: Hello, view: View | None) -> None:
        self._came.add((hello.id, hello.incarnation))
        if view is not None and knows_truly(hello, view) and view.number > self._newest.number:
            self._newest = view


def knows_truly(hello: Hello, view: View) -> bool:
    """True if the member has a place in the view that it says it knows: a view is sent to its members only."""
    return (hello.id, hello.incarnation) in {_key(member) for member in _members(view)}


def late_view(hello: Hello, view: View | None, course: Course) -> Outrun | Say | None:
    """What follows when a member comes back and knows `view`.

    If it acted on a view that this coordinator, or one before it, went on without, the job begins anew. A view of this
    epoch or a higher one, and not ours, is another coordinator's: the member would take ours for older ones, so say
    what to do.
    """
    if view is None or not knows_truly(hello, view):
        return None
    epoch, own = course.views.epoch, course.view
    if view.number.epoch < epoch:
        return Outrun(hello.id, view.number) if course.views.is_outrun_by(view.number) else None
    if own is not None and view.number <= own.number:
        return None
    return Say(
        f"{hello.id} comes back with view {view.number}, which another coordinator has published, and takes no view of "
        f"this one (epoch {epoch}). If both run, end this one. If the other is gone, this one's journal is an old copy "
        "or missing: end the job, and go on from its last snapshot with `rallypoint resume`"
    )


def _members(view: View) -> tuple[Member, ...]:
    return (*view.workers, *view.servers, *view.aggregators)


def _key(member: Member) -> tuple[str, int]:
    return member.id, member.incarnation
