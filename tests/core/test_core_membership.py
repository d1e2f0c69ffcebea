"""Who takes part in a job, and what is known of each."""

from __future__ import annotations

from rallypoint.core.cluster.membership import Membership
from rallypoint.core.view import Member, View, ViewNumber


def _joined(*names: str) -> Membership:
    members = Membership()
    for name in names:
        members.join(Member(name, "here"), "server" if name.startswith("s") else "worker")
    return members


def test_a_process_that_joins_as_new_is_never_given_the_incarnation_that_it_has_already() -> None:
    members = _joined("s0", "w0")
    assert members.join(Member("w1", "here", incarnation=3), "worker") == 4
    assert members.join(Member("w2", "here", incarnation=3), "worker") == 5


def test_who_has_not_heard_of_its_admission_is_known_by_the_name_of_its_process() -> None:
    members = Membership()
    members.join(Member("w0", "here"), "worker", b"one")
    assert members.same("w0", "worker", 0, b"one") == members.workers["w0"]
    assert members.same("w0", "worker", 0, b"another") is None
    assert members.same("w0", "server", 0, b"one") is None
    members.join(Member("w0", "here"), "worker", b"two")
    assert members.same("w0", "worker", 0, b"one") is None
    members.spoke("w0", 1.0)
    assert members.same("w0", "worker", 0, b"two") is None, "it has heard of its admission"


def test_nothing_is_known_any_more_of_a_member_that_is_gone() -> None:
    members = _joined("s0", "w0")
    members.propose("w0")
    for known in (members.leaving, members.done, members.awaited):
        known.add("w0")
    members.heard("w0", 1.0)
    members.remove("w0")
    assert "w0" not in members
    assert "s0" in members
    assert members == Membership(incarnations=2, servers=members.servers)


def test_only_the_very_process_that_an_earlier_coordinator_knew_is_back() -> None:
    view = View(ViewNumber(1, 1), ViewNumber(1, 1), (Member("w0", "here", incarnation=4),), (Member("s0", "here",
        incarnation=2),),
                (), {0: "s0"})  # fmt: skip
    members = Membership()
    members.expect(view)
    assert members.awaited == {"w0", "s0"}
    assert list(members.proposed) == ["w0"]
    assert members.same("w0", "worker", 4) == view.workers[0]
    assert members.same("w0", "worker", 5) is None
    assert members.same("w0", "worker", 0) is None
    assert members.same("w0", "worker", 0, b"") is None
    assert members.same("w0", "server", 4) is None
    members.unlinked("w0", reset="x")
    members.returned("w0")
    assert members.awaited == {"s0"}
    assert members.resets == {}
