"""The client's machine of a store: links break, servers go back to a snapshot, each push counts once."""

from __future__ import annotations

import msgspec

from rallypoint.core.keys import NEWEST, OWN, KeyMachine, SendInitial, SendPull, SendPush, SendWant
from rallypoint.core.view import Assignment, Member, View, ViewNumber


def view(
    count: int, home: str, assigned: dict[str, tuple[int, ...]], *, generation: int = 1, moved: int = 1,
    origin: str = "",
) -> View:  # fmt: skip
    number = ViewNumber(1, count)
    return View(
        number=number, generation=ViewNumber(1, generation), workers=tuple(Member(w, "", "", 1) for w in assigned),
        servers=(Member(home, "", "", 1),), assignments=(Assignment(0, assigned),), primary={0: home},
        homed={0: ViewNumber(1, moved)}, contributors=assigned, origin=origin,
    )  # fmt: skip


def linked(*, by_clocks: bool = False, tables: frozenset[int] = frozenset()) -> KeyMachine:
    """The machine of worker "w" with one key, whose server it has a link to."""
    machine = KeyMachine("w", 1, by_clocks=by_clocks, tables=tables)
    machine.adopt(view(1, "s", {"w": (0, 1)}))
    machine.link_up("s")
    return machine


def test_a_first_value_is_sent_again_until_a_version_is_there() -> None:
    machine = linked()
    assert machine.begin(0) == [SendInitial(0, "s"), SendPull(0, OWN, NEWEST, "s")]
    machine.link_lost("s")
    assert machine.link_up("s") == [SendInitial(0, "s"), SendPull(0, OWN, NEWEST, "s")]
    machine.answered(0, OWN, 0)
    machine.link_lost("s")
    assert machine.link_up("s") == []


def test_a_push_waits_for_a_first_value_and_counts_when_its_round_is_published() -> None:
    machine = linked()
    assert machine.push(0, 1, 0) == [SendPull(0, OWN, NEWEST, "s")]
    _, effects = machine.answered(0, OWN, 0)
    assert effects == [SendPush(0, 1, 0, "s"), SendPull(0, OWN, 1, "s")]
    assert machine.lines[0].pushes
    machine.answered(0, OWN, 1)
    assert not machine.lines[0].pushes
    assert machine.push(0, 1, 0) == [], "it counts already"


def test_a_streaming_push_whose_contribution_was_lost_is_sent_again() -> None:
    machine = linked(by_clocks=True)
    machine.replied(0, 0, 0, 0)
    assert machine.push(0, 0, 0) == [SendPush(0, 0, 0, "s")], "a push asks by itself"
    assert machine.replied(0, 0, 0, 0) == [SendPush(0, 0, 0, "s")]
    assert machine.replied(0, 0, 1, 1) == []
    assert not machine.lines[0].pushes


def test_a_contributor_that_has_to_wait_does_not_keep_others_from_being_heard_of() -> None:
    machine = linked(by_clocks=True)
    machine.replied(0, 0, 0, 0)
    machine.push(0, 0, 0)
    machine.push(0, 1, 1)  # the server keeps this question only, and makes contributor 1 wait
    assert machine.to_wait(1) == [SendWant(0, 0, "s")]
    assert machine.replied(0, 0, 1, 1) == [SendWant(0, 1, "s")]
    assert machine.to_wait(1) == [], "nobody else to ask for: no ping-pong"


def test_a_newest_value_is_never_older_than_the_question() -> None:
    machine = linked()
    machine.need(0, 7, NEWEST)
    assert machine.answered(0, 6, 3) == ([], [])
    assert machine.answered(0, 7, 3)[0] == [7]


def test_a_version_that_is_not_kept_any_more_is_replaced_by_the_newest() -> None:
    machine = linked()
    machine.need(0, 7, 2)
    done, effects = machine.answered(0, 7, 2, kept=False)
    assert (done, effects) == ([], [SendPull(0, 7, NEWEST, "s")])


def test_under_rounds_a_pull_of_a_version_gets_that_version_as_long_as_it_is_kept() -> None:
    """Else who makes a dead worker's push again would read what comes after it, and push something else."""
    machine = linked()
    machine.need(0, 1, NEWEST)
    machine.answered(0, 1, 5)
    machine.push(0, 1, 5)  # asks for version 6
    assert machine.need(0, 2, 5) == [SendPull(0, 2, 5, "s")]
    assert machine.answered(0, OWN, 6)[0] == []
    assert machine.answered(0, 2, 5)[0] == [2]
    streaming = linked(by_clocks=True)
    streaming.need(0, 1, 5)
    streaming.need(0, 2, 6)
    assert streaming.answered(0, 2, 6)[0] == [1, 2]


def test_a_new_generation_forgets_what_was_wanted() -> None:
    machine = linked()
    machine.answered(0, OWN, 5)
    machine.push(0, 0, 5)
    machine.need(0, 7, NEWEST)
    machine.link_lost("s")
    machine.adopt(view(2, "s", {"w": (0, 1)}, generation=2))
    assert machine.link_up("s") == []
    assert machine.next_step(0, 0) is None


def test_a_worker_that_was_given_up_and_came_back_sends_its_push_again() -> None:
    """Servers dropped what came while the view did not have it."""
    machine = linked()
    machine.answered(0, OWN, 0)
    assert SendPush(0, 1, 0, "s") in machine.push(0, 1, 0)
    back = msgspec.structs.replace(view(3, "s", {"w": (0, 1)}), workers=(Member("w", "", "", 2),))
    assert machine.adopt(back) == [SendPush(0, 1, 0, "s")]


def test_a_push_of_another_workers_contributor_is_not_sent_again_and_again() -> None:
    machine = linked(by_clocks=True)
    machine.replied(0, 2, 0, 0)
    assert machine.push(0, 2, 0) == []
    assert machine.watch([0], [2]) == [SendWant(0, 2, "s")], "it asks how far that contributor is"
    assert machine.replied(0, 2, 0, 0) == [], "it does not ask again by itself"
    machine.replied(0, 2, 1, 1)
    assert machine.counts([0], 2)


def test_who_joins_while_servers_read_the_snapshot_says_no_first_value() -> None:
    machine = KeyMachine("w", 1)
    machine.adopt(view(1, "s", {"w": (0, 1)}, origin="snapshot"))
    machine.link_up("s")
    assert machine.begin(0) == [SendPull(0, OWN, NEWEST, "s")]


def test_an_older_push_counts_while_the_next_one_is_on_its_way() -> None:
    machine = linked()
    machine.answered(0, OWN, 1)
    machine.push(0, 0, 1)
    assert machine.counts([0], 0, step=0)
    assert not machine.counts([0], 0, step=1)


def test_rows_of_a_table_answer_no_other_pull() -> None:
    machine = linked(tables=frozenset({0}))
    machine.need(0, 7, 1)
    machine.need(0, 8, 1)
    done, effects = machine.answered(0, 7, 1)
    assert (done, effects) == ([7], [SendPull(0, 8, 1, "s")])


def test_how_far_a_contributor_is_is_asked_anew_when_it_becomes_this_workers() -> None:
    """Another worker has pushed for it since: `store.step` would name a push that counts already."""
    machine = linked(by_clocks=True)
    machine.watch([0], [2])
    machine.replied(0, 2, 3, 9)
    assert machine.adopt(view(2, "s", {"w": (0, 1, 2)})) == [SendWant(0, 2, "s")]
    assert machine.next_step(0, 2) is None
    machine.replied(0, 2, 7, 20)
    assert machine.next_step(0, 2) == 7


def test_a_first_value_that_is_given_twice_is_said_again_in_a_generation_that_begins_from_no_snapshot() -> None:
    machine = linked()
    machine.begin(0)
    machine.answered(0, OWN, 0)
    machine.begin(0)
    machine.link_lost("s")
    machine.adopt(view(2, "s", {"w": (0, 1)}, generation=2))
    assert machine.link_up("s") == [SendInitial(0, "s"), SendPull(0, OWN, NEWEST, "s")]


def test_threads_that_pull_the_newest_rows_again_and_again_keep_nobody_waiting_for_a_version_that_exists() -> None:
    machine = linked(tables=frozenset({0}))
    machine.answered(0, OWN, 5)
    machine.need(0, 1, NEWEST)
    machine.need(0, 2, 4)
    machine.need(0, 3, NEWEST)
    assert machine.answered(0, 1, 5) == ([1], [SendPull(0, 2, 4, "s")])


def test_only_pushes_that_servers_take_from_this_worker_are_waited_for_before_it_leaves() -> None:
    machine = linked()
    machine.answered(0, OWN, 0)
    machine.push(0, 1, 0)
    assert machine.unfinished() == [(0, 1, 0)]
    machine.push(0, 2, 0)  # another worker's
    machine.adopt(view(2, "s", {"w": (0,), "v": (1, 2)}))
    assert machine.unfinished() == []
