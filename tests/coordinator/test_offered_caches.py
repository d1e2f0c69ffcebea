"""Workers that answer for a cache hear of each other, and have tickets for each other, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rallypoint.coordinator import joining as shared
from rallypoint.coordinator.joining import BURST, EVERY_S, MOST_OF_ONE_CACHE, Tickets
from rallypoint.core.protocol import Caches, Holder, NewView, Offers
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.handshake import ticket_for

SECRET = b"s" * 32


def view(**workers: int) -> View:
    members = tuple(Member(id, "h", "", incarnation) for id, incarnation in workers.items())
    return View(ViewNumber(1, 1), ViewNumber(1, 1), members, (), (), {})


def offers(cache: int, port: int = 1) -> Offers:
    return Offers(f"10.0.0.{cache}:{port}", f"{cache:016x}")


def told(tickets: Tickets, now: View) -> dict[str, Caches]:
    """What they are told who were told nothing before."""
    tickets._shared._told.clear()
    return dict(tickets._shared.caches(now))


def test_each_hears_of_all_and_can_prove_itself_to_each_other() -> None:
    tickets, now = Tickets(SECRET), view(w0=3, w1=4, w2=5)
    alone = dict(tickets.offered("w0", offers(0), now, 0.0))
    assert alone.keys() == {"w0"}  # it hears that it is alone
    found = dict(tickets.offered("w1", offers(1), now, 0.0))
    assert found.keys() == {"w0", "w1"}
    assert [one.id for one in found["w0"].holders] == ["w1"]  # what is new
    found["w0"] = found["w0"].after(alone["w0"])
    assert set(found["w0"].holders) == set(found["w1"].holders)
    assert [(one.id, one.incarnation, one.address) for one in found["w0"].holders] == [
        ("w0", 3, "10.0.0.0:1"), ("w1", 4, "10.0.0.1:1"),
    ]  # fmt: skip
    secret = ticket_for(SECRET, "worker", "w1", 4)  # what w1 was told when it was admitted
    assert found["w0"].tickets == {"w1": ticket_for(secret, "worker", "w0", 3)}


def test_who_leaves_or_comes_back_as_somebody_new_is_forgotten_until_he_says_it_again() -> None:
    tickets = Tickets(SECRET)
    for id, cache in (("w0", 0), ("w1", 1)):
        list(tickets.offered(id, offers(cache), view(w0=1, w1=2), 0.0))
    assert told(tickets, view(w0=1, w1=9)).keys() == {"w0"}
    assert [one.id for one in told(tickets, view(w0=1, w1=2))["w0"].holders] == ["w0"]
    assert list(tickets.offered("w7", offers(7), view(w0=1), 0.0)) == []  # not in the view
    assert list(tickets.offered("w0", offers(7), None, 0.0)) == []


def test_of_one_cache_a_few_workers_are_named_and_all_hear() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=1, w2=1, w3=1)
    for number in range(4):
        list(tickets.offered(f"w{number}", offers(5, port=number), now, 0.0))
    found = told(tickets, now)
    assert found.keys() == {"w0", "w1", "w2", "w3"}
    assert len(found["w3"].holders) == MOST_OF_ONE_CACHE


def test_each_view_is_followed_by_what_has_changed_of_the_caches() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=1)
    for number in (0, 1):
        list(tickets.offered(f"w{number}", offers(number), now, 0.0))
    news = [(id, type(message)) for id, message in tickets.views(now, ["w0", "w1"])]
    assert news == [("w0", NewView), ("w1", NewView)]
    later = list(tickets.views(view(w0=1), ["w0"]))
    assert [(id, type(message)) for id, message in later] == [("w0", NewView), ("w0", Caches)]
    assert later[1][1] == Caches((), {}, more=True, gone=("w1",))


def test_who_says_the_same_again_is_answered_and_nobody_else_is_told() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=2)
    for id, cache in (("w0", 0), ("w1", 1)):
        list(tickets.offered(id, offers(cache), now, 0.0))
    assert [id for id, _ in tickets.offered("w1", offers(1), now, 0.0)] == ["w1"]


def test_workers_that_join_at_once_are_told_of_each_other_once() -> None:
    count = 40
    tickets, now = Tickets(SECRET), view(**{f"w{number}": 1 for number in range(count)})
    known = {f"w{number}": Caches(()) for number in range(count)}
    sent = 0
    for number in range(count):
        for id, news in tickets.offered(f"w{number}", offers(number), now, 0.0):
            sent += len(news.tickets)
            known[id] = news.after(known[id])
    assert sent == count * (count - 1)  # a ticket for each other one, and none of them twice
    assert all(len(found.holders) == count and len(found.tickets) == count - 1 for found in known.values())
    assert list(tickets._shared.caches(now)) == []  # nothing has changed


def test_what_was_told_before_and_what_has_changed_is_what_is_so_now() -> None:
    tickets, known = Tickets(SECRET), {f"w{number}": Caches(()) for number in range(4)}
    before, after = view(w0=1, w1=1, w2=1), view(w0=1, w2=1, w3=7)

    def hear(news: Iterable[tuple[str, NewView | Caches]]) -> None:
        for id, one in news:
            if isinstance(one, Caches):
                known[id] = one.after(known[id])

    for number in (0, 1, 2):
        hear(tickets.offered(f"w{number}", offers(number), before, 0.0))
    hear(tickets.views(after, ["w0", "w2", "w3"]))
    hear(tickets.offered("w3", offers(3), after, 0.0))
    hear(tickets.offered("w2", offers(2, port=9), after, 0.0))  # it listens elsewhere now
    for id in ("w0", "w2", "w3"):
        whole = told(tickets, after)[id]
        assert not whole.more
        assert set(known[id].holders) == set(whole.holders)
        assert known[id].tickets == whole.tickets
    assert {one.id for one in known["w0"].holders} == {"w0", "w2", "w3"}


def test_an_offer_is_followed_so_often_and_later_the_newest_of_those_that_came_faster() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=1)
    list(tickets.offered("w0", offers(0), now, 0.0))
    for port in range(BURST):
        assert list(tickets.offered("w1", offers(1, port), now, 0.0))
    for port in range(100, 200):
        assert list(tickets.offered("w1", offers(1, port), now, 0.0)) == []
    assert list(tickets.offered("w0", offers(0), now, 0.0))  # one that says too much holds up nobody else
    assert list(tickets.late(now, EVERY_S / 2)) == []
    news = dict(tickets.late(now, EVERY_S))
    assert [one.address for one in news["w0"].holders] == ["10.0.0.1:199"]
    assert list(tickets.late(now, 2 * EVERY_S)) == []


def test_who_has_left_while_its_offer_waited_is_not_told_of() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=1)
    for _ in range(BURST + 1):
        list(tickets.offered("w1", offers(1), now, 0.0))
    list(tickets.views(view(w0=1), ["w0"]))
    assert list(tickets.late(view(w0=1), EVERY_S)) == []
    assert not tickets._shared._allowances


def test_an_offer_costs_a_look_at_each_other_one_and_not_at_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Counted(Holder, frozen=True, array_like=True):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return bool(super().__eq__(other))

        def __hash__(self) -> int:
            return hash(self.id)

    monkeypatch.setattr(shared, "Holder", Counted)
    count = 40
    tickets, now = Tickets(SECRET), view(**{f"w{number:02}": 1 for number in range(count)})
    for number in range(count):
        list(tickets.offered(f"w{number:02}", offers(number), now, 0.0))
    before = compared
    list(tickets.offered("w07", offers(7, port=9), now, 0.0))
    assert compared - before <= 4 * count
