"""Workers that answer for a cache hear of each other, and have tickets for each other, and for nobody else."""

from __future__ import annotations

from rallypoint.coordinator.joining.tickets import MOST_OF_ONE_CACHE, Tickets
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.net.keys import ticket
from rallypoint.net.messages import NewView
from rallypoint.net.sharing.messages import Caches, Offers

SECRET = b"s" * 32


def view(**workers: int) -> View:
    members = tuple(Member(id, "h", "", incarnation) for id, incarnation in workers.items())
    return View(ViewNumber(1, 1), ViewNumber(1, 1), members, (), (), {})


def offers(cache: int, port: int = 1) -> Offers:
    return Offers(f"10.0.0.{cache}:{port}", f"{cache:016x}")


def told(tickets: Tickets, now: View) -> dict[str, Caches]:
    return dict(tickets.caches(now))


def test_each_hears_of_all_and_can_prove_itself_to_each_other() -> None:
    tickets, now = Tickets(SECRET), view(w0=3, w1=4, w2=5)
    assert [id for id, _ in tickets.offered("w0", offers(0), now)] == ["w0"]  # it hears that it is alone
    found = dict(tickets.offered("w1", offers(1), now))
    assert found.keys() == {"w0", "w1"}
    assert [(one.id, one.incarnation, one.address) for one in found["w0"].holders] == [
        ("w0", 3, "10.0.0.0:1"), ("w1", 4, "10.0.0.1:1"),
    ]  # fmt: skip
    secret = ticket(SECRET, "worker", "w1", 4)  # what w1 was told when it was admitted
    assert found["w0"].tickets == {"w1": ticket(secret, "worker", "w0", 3)}


def test_who_leaves_or_comes_back_as_somebody_new_is_forgotten_until_he_says_it_again() -> None:
    tickets = Tickets(SECRET)
    for id, cache in (("w0", 0), ("w1", 1)):
        list(tickets.offered(id, offers(cache), view(w0=1, w1=2)))
    assert told(tickets, view(w0=1, w1=9)).keys() == {"w0"}
    assert [one.id for one in told(tickets, view(w0=1, w1=2))["w0"].holders] == ["w0"]
    assert list(tickets.offered("w7", offers(7), view(w0=1))) == []  # not in the view
    assert list(tickets.offered("w0", offers(7), None)) == []


def test_of_one_cache_a_few_workers_are_named_and_all_hear() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=1, w2=1, w3=1)
    for number in range(4):
        list(tickets.offered(f"w{number}", offers(5, port=number), now))
    found = told(tickets, now)
    assert found.keys() == {"w0", "w1", "w2", "w3"}
    assert len(found["w3"].holders) == MOST_OF_ONE_CACHE


def test_each_view_is_followed_by_the_caches() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=1)
    list(tickets.offered("w0", offers(0), now))
    news = [(id, type(message)) for id, message in tickets.views(now, ["w0", "w1"])]
    assert news == [("w0", NewView), ("w1", NewView), ("w0", Caches)]


def test_who_says_the_same_again_is_answered_and_nobody_else_is_told() -> None:
    tickets, now = Tickets(SECRET), view(w0=1, w1=2)
    for id, cache in (("w0", 0), ("w1", 1)):
        list(tickets.offered(id, offers(cache), now))
    assert [id for id, _ in tickets.offered("w1", offers(1), now)] == ["w1"]
