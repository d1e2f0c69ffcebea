"""What the coordinator gives to members that join, and asks of those that come back.

First: their secrets and tickets, and its proofs of the views that it writes. `net.handshake` says what they are.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rallypoint.coordinator import inbox
from rallypoint.core import protocol
from rallypoint.core.cluster.course import Course
from rallypoint.core.cluster.events import Outrun
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.placing.view_change import still_caught_up
from rallypoint.core.protocol import Knows, Say
from rallypoint.core.view import Member, View, ViewDifference, ViewNumber, canonical, difference
from rallypoint.net.handshake import proof_of_view, ticket_for
from rallypoint.observe.lines import Allowance


class Tickets:
    """Computes them from the coordinator's secret, so a restarted coordinator gives the same ones again."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._sent: dict[str, View] = {}  # the last view that went over each member's connection

    def admitted(self, id: str, incarnation: int, role: str) -> protocol.Admitted:
        return protocol.Admitted(incarnation, ticket_for(self._secret, role, id, incarnation))

    def news(self, view: View, members: Sequence[str]) -> Iterator[tuple[str, protocol.OfViews]]:
        """`views`, for members that are connected, with what their connections have brought them until now."""
        view = canonical(view)
        yield from self.views(view, members, self._sent)
        here = {one.id for one in (*view.workers, *view.servers, *view.aggregators)}
        self._sent = {id: last for id, last in self._sent.items() if id in here} | dict.fromkeys(members, view)

    def connected_anew(self, id: str) -> None:
        """This member has another connection than before: what was sent over the former may be lost."""
        self._sent.pop(id, None)

    def views(
        self, view: View, members: Iterable[str], sent: Mapping[str, View] | None = None
    ) -> Iterator[tuple[str, protocol.OfViews]]:
        """The view for each of these members, with the member's tickets for the view's servers.

        `sent`: the last view that went to a member over the connection that it has now. It gets the difference to that,
        and tickets only for servers that are new. Both views must be `canonical`. A worker gets a ticket for its
        aggregator too. Who is not in the view has none: no server would listen to it.
        """
        proof, earlier = self.proof(view), {} if sent is None else sent
        secrets = {one.id: ticket_for(self._secret, role, one.id, one.incarnation) for role, one in _listening(view)}
        now, known = _Given(view), dict[ViewNumber, tuple[ViewDifference, _Given]]()
        for id in members:
            if (base := earlier.get(id)) is None:
                yield id, protocol.NewView(view, self._tickets_for(id, now, secrets), proof)
                continue
            if base.number not in known:
                known[base.number] = difference(base, view), _Given(base)
            change, before = known[base.number]
            yield id, protocol.ViewChange(change, self._tickets_for(id, now, secrets, before), proof)

    def _tickets_for(
        self, id: str, now: _Given, secrets: Mapping[str, bytes], before: _Given | None = None
    ) -> dict[str, bytes]:
        """The tickets of this member, without those that it had `before`."""
        if (who := now.here.get(id)) is None:
            return {}
        had = before if before is not None and before.here.get(id) == who else None
        listeners = now.listeners(id) if had is None else now.new_listeners(id, had)
        return {one: ticket_for(secrets[one], who[0], id, who[1]) for one in listeners}

    def proof(self, view: View) -> bytes:
        """The proof that a coordinator of this job has written `view`."""
        return proof_of_view(self._secret, msgspec.msgpack.encode(canonical(view)))

    def proven(self, knows: Knows) -> Knows:
        """What counts of it: nothing, if no coordinator of this job has written that view."""
        written = knows.view is not None and hmac.compare_digest(self.proof(knows.view), knows.proof)
        return knows if written else Knows()


class _Given:
    """For whom members have tickets in one view.

    Attributes:
        here: member -> its role and incarnation.
        servers: those among them, with their incarnation.
    """

    def __init__(self, view: View) -> None:
        workers = {one.id: ("worker", one.incarnation) for one in view.workers}
        self.here = {**workers, **{one.id: (role, one.incarnation) for role, one in _listening(view)}}
        self.servers = {(one.id, one.incarnation) for one in view.servers}
        self._through = view.aggregator_of
        self._new: tuple[_Given, set[tuple[str, int]]] | None = None  # servers that are new after an earlier view

    def listeners(self, id: str) -> Iterator[str]:
        """For whom this member has a ticket."""
        yield from (server for server, _ in self.servers if server != id)
        if (through := self._through.get(id, id)) != id and through in self.here:
            yield through

    def new_listeners(self, id: str, before: _Given) -> Iterator[str]:
        """Those for whom it had none `before`, or whose place another process has taken."""
        if self._new is None or self._new[0] is not before:
            self._new = before, self.servers - before.servers
        yield from (server for server, _ in self._new[1] if server != id)
        through = self._through.get(id, id)
        had = before.here.get(through) if before._through.get(id) == through else None
        if through != id and through in self.here and self.here[through] != had:
            yield through


def _listening(view: View) -> Iterator[tuple[str, Member]]:
    """Servers and aggregators, each with its role."""
    yield from (("server", one) for one in view.servers)
    yield from (("aggregator", one) for one in view.aggregators)


# ---- Processes that come under the name of a member that is expected to come back ----
#
# After a coordinator's restart, or a broken link, a member is away for a moment. Whoever knows the token could be
# faster than it and take its name; its shards would be lost with it. So a newcomer waits until the member is back
# (then it is refused) or has been given up.
#
# Each process that joins under a new name costs a view, a write to the journal and some lines. Who knows the token
# can be ever new ones: beyond a number that no honest cluster comes to, they are let in one after another.

_JOINS, _JOINS_EACH, _JOIN_S = 1024, 4, 0.25  # so many may join, and more for each member wanted; then one each 0.25 s


@dataclass(slots=True)
class Newcomers:
    """Keeps at most one newcomer for each name, and lets no more than `joins` allows join."""

    joins: Allowance
    _waiting: dict[str, inbox.Opened] = field(default_factory=dict)
    _crowd: dict[str, inbox.Opened] = field(default_factory=dict)
    _told: bool = False

    @classmethod
    def of(cls, terms: Terms, now: float) -> Newcomers:
        """Those of a job with these terms."""
        wanted = terms.workers_max + terms.servers + terms.aggregators
        return cls(Allowance(_JOINS + _JOINS_EACH * wanted, _JOIN_S, now))

    def keeps(self, opened: inbox.Opened, members: Membership, now: float) -> str | None:
        """What to tell, if this process has to wait; None if it need not.

        It has to if its name is that of a member that is expected back, and it is not that one; or if too many join.
        """
        hello = opened.hello
        if _must_wait(hello, members):
            self._waiting[hello.id] = opened
            return f"another process has come as {hello.id}: it waits until {hello.id} is back, or is given up"
        if members.same(hello.id, hello.role, hello.incarnation, hello.process) is not None or self.joins.take(now):
            return None
        self._crowd[hello.id] = opened
        first, self._told = not self._told, True
        return "more processes join than a job needs: they are let in one after another" if first else ""

    @property
    def names(self) -> frozenset[str]:
        """The names of members that are expected back, under which other processes wait."""
        return frozenset(self._waiting)

    def waits_for(self, id: str) -> bool:
        """True if a process waits for this name, or under it."""
        return id in self._waiting or id in self._crowd

    def allowed(self, now: float) -> list[inbox.Opened]:
        """Take out those of a crowd that may join now."""
        return [self._crowd.pop(id) for id in list(self._crowd)[: self.joins.left(now)]]

    def due(self, members: Membership) -> list[inbox.Opened]:
        """Take out those that have to wait no longer."""
        ids = [id for id, opened in self._waiting.items() if not _must_wait(opened.hello, members)]
        return [self._waiting.pop(id) for id in ids]

    def take_all(self) -> list[inbox.Opened]:
        """Take out all: the job has ended."""
        waiting = [*self._waiting.values(), *self._crowd.values()]
        self._waiting, self._crowd = {}, {}
        return waiting

    def closed(self, closed: inbox.Closed) -> None:
        """A connection ended: if it was one that waited, forget it."""
        for waiting in (self._waiting, self._crowd):
            opened = waiting.get(closed.hello.id)
            if opened is not None and opened.connection == closed.connection:
                del waiting[closed.hello.id]


def _must_wait(hello: protocol.Hello, members: Membership) -> bool:
    is_it = members.same(hello.id, hello.role, hello.incarnation, hello.process) is not None
    return hello.id in members.awaited and not is_it


def taken(id: str) -> str:
    """The sentence with which a second process of this id is refused."""
    return f"the id {id} is taken: give every member one of its own"


# ---- What the members of an earlier coordinator know, collected before the next one decides anything (I7, I10) ----
#
# The journal may be behind: its disk was full, and views were published all the same. Every member knows the newest
# view that it was sent, and says so first of all when it comes back. The newest of all counts: no member has acted on
# a newer one. Until it is found, the events of members wait here.


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

    def _hear(self, hello: protocol.Hello, view: View | None) -> None:
        self._came.add((hello.id, hello.incarnation))
        if view is not None and knows_truly(hello, view) and view.number > self._newest.number:
            self._newest = view


def knows_truly(hello: protocol.Hello, view: View) -> bool:
    """True if the member has a place in the view that it says it knows: a view is sent to its members only."""
    return (hello.id, hello.incarnation) in {_key(member) for member in _members(view)}


def late_view(hello: protocol.Hello, view: View | None, course: Course) -> Outrun | Say | None:
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
