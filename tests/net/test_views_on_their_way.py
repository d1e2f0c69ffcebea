"""Whatever is lost with a connection, all members end with one view and the right tickets."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.coordinator.joining import Tickets
from rallypoint.core.protocol import NewView, OfViews, ViewChange, decode, encode
from rallypoint.core.view import Assignment, Member, View, ViewNumber, WrongBase, apply, canonical, difference
from rallypoint.errors import CorruptFrame
from rallypoint.net.handshake import ticket_for
from rallypoint.net.member import ViewReceiver

SECRET = b"s" * 32
ALL = ("s0", "s1", "s2", "g0", "w0", "w1", "w2")
# One thing that happens: to whom, and what.
EVENTS = st.lists(st.tuples(st.sampled_from(ALL), st.sampled_from((
    "dies or joins", "comes back as somebody new", "hears", "hears", "loses its connection", "changes aggregator",
    "the coordinator restarts", "is left out",
))), min_size=5, max_size=60)  # fmt: skip


class Cluster:
    """A coordinator's views, and members each with a connection that keeps the order or breaks."""

    def __init__(self) -> None:
        self.tickets, self.epoch, self.count = Tickets(SECRET), 1, 0
        self.here = {"s0": 1, "w0": 2, "g0": 3}  # who is here: its incarnation
        self.used, self.incarnations = dict[str, str](), 3
        self.receivers = {id: ViewReceiver() for id in ALL}
        self.wires = {id: deque[OfViews]() for id in ALL}
        self.has: dict[str, NewView] = {}
        self.lacks = set(ALL)  # whose connection has brought no view: it is sent one when it stands again
        self.view = self.make()

    def make(self) -> View:
        def of(first: str) -> tuple[Member, ...]:
            return tuple(Member(id, "host", "", number) for id, number in self.here.items() if id[0] == first)

        self.count += 1
        servers, workers = of("s"), of("w")
        number = ViewNumber(self.epoch, self.count)
        replicas = {one.id: (index,) for index, one in enumerate(workers)}
        homes = {shard: servers[shard % len(servers)].id for shard in range(6)} if servers else {}
        through = {id: g for id, g in self.used.items() if g in self.here and id in self.here}
        return View(number, ViewNumber(), workers, servers, (Assignment(0, replicas),), homes, aggregators=of("g"),
            aggregator_of=through)  # fmt: skip

    def publish(self, *without: str) -> None:
        self.view = self.make()
        self.send(*(id for id in self.here if id not in without))

    def send(self, *members: str) -> None:
        for id, message in self.tickets.news(self.view, members):
            came = decode(encode(message))
            assert isinstance(came, NewView | ViewChange)
            self.wires[id].append(came)

    def reconnect(self, id: str) -> None:
        self.wires[id].clear()
        self.receivers[id] = ViewReceiver()
        self.tickets.connected_anew(id)
        if id in self.here:
            self.send(id)

    def hear(self, id: str) -> None:
        while self.wires[id]:
            self.has[id] = self.receivers[id].take(self.wires[id].popleft())

    def happens(self, id: str, what: str) -> None:
        match what:
            case "dies or joins":
                if self.here.pop(id, None) is None:
                    self.join(id)
                self.publish()
            case "comes back as somebody new":
                self.join(id)
                self.publish()
            case "hears":
                self.hear(id)
            case "loses its connection":
                self.reconnect(id)
            case "changes aggregator":
                self.used = {"w0": "g0"} if not self.used else {}
                self.publish()
            case "the coordinator restarts":
                self.tickets, self.epoch, self.count = Tickets(SECRET), self.epoch + 1, 0
                self.view = self.make()
                for member in ALL:
                    self.reconnect(member)
            case "is left out":
                self.publish(id)

    def join(self, id: str) -> None:
        self.incarnations += 1
        self.here[id] = self.incarnations
        self.wires[id].clear()
        self.receivers[id] = ViewReceiver()
        self.tickets.connected_anew(id)


def role(id: str) -> str:
    return {"s": "server", "g": "aggregator", "w": "worker"}[id[0]]


@given(EVENTS)
def test_in_the_end_all_have_the_same_view_and_the_tickets_of_who_got_it_whole(events: list[tuple[str, str]]) -> None:
    cluster = Cluster()
    cluster.send(*cluster.here)
    for id, what in events:
        cluster.happens(id, what)
    cluster.publish()
    for id, incarnation in cluster.here.items():
        cluster.hear(id)
        has, view = cluster.has[id], cluster.view
        assert has.view == view
        assert has.proof == cluster.tickets.proof(view)
        (whole,) = [one for name, one in Tickets(SECRET).views(canonical(view), [id]) if name == id]
        assert isinstance(whole, NewView)
        assert whole.tickets.items() <= has.tickets.items(), "every ticket that it would have got with the whole view"
        for other, secret in has.tickets.items():
            of_other = ticket_for(SECRET, role(other), other, cluster.here[other])
            assert secret == ticket_for(of_other, role(id), id, incarnation), "and none that its listener would refuse"


def test_a_difference_without_its_base_ends_the_connection_and_nothing_else() -> None:
    cluster = Cluster()
    first = cluster.view
    second = canonical(cluster.make())
    change = ViewChange(difference(first, second))
    with pytest.raises(CorruptFrame, match="no view before it"):
        ViewReceiver().take(change)
    receiver = ViewReceiver()
    receiver.take(NewView(second))
    with pytest.raises(CorruptFrame, match=r"a difference to view 1\.1, and view 1\.2 is here"):
        receiver.take(change)
    wrong = msgspec.structs.replace(first, servers=())
    with pytest.raises(WrongBase, match=r"does not lead from view 1\.1 to view 1\.2"):
        apply(change.change, wrong)


def test_a_death_costs_each_member_no_ticket() -> None:
    cluster = Cluster()
    for id in ("s1", "w1"):
        cluster.join(id)
    cluster.publish()
    for id in cluster.here:
        cluster.hear(id)
    del cluster.here["w1"]
    cluster.publish()
    assert [wire[0].tickets for id, wire in cluster.wires.items() if id in cluster.here] == [{}] * 4
