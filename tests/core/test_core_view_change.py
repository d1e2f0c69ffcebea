"""How one view follows another: surviving primaries, moves of shards, deals, and whether there is any news."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rallypoint.config import resolve
from rallypoint.core.cluster.membership import Membership
from rallypoint.core.cluster.view_sequence import ViewSequence
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.placing import view_change
from rallypoint.core.placing.speeds import Speeds
from rallypoint.core.placing.view_change import contributors, first_homes, following_assignments, says_nothing_new
from rallypoint.core.view import Assignment, Member, StandingOrders, View, ViewNumber
from rallypoint.core.worker.shell import LinkTable, shell_for
from rallypoint.worker.exchange.exchange import worker_plan

LAYOUT = build_layout([TensorSpec("weight", (64,), "float32", 0)], 64)
SHARDS = [shard.index for shard in LAYOUT.shards]


def _servers(*names: str, incarnation: int = 1) -> dict[str, Member]:
    return {name: Member(name, f"host-of-{name}", incarnation=incarnation) for name in names}


def _members(servers: Sequence[str], workers: Sequence[str]) -> Membership:
    members = Membership()
    for name in servers:
        members.join(Member(name, f"host-of-{name}"), "server")
    for name in workers:
        members.join(Member(name, "here"), "worker")
        members.propose(name)
    return members


def _view(servers: dict[str, Member], replication: int = 2, count: int = 1, assignments: tuple[Assignment,
    ...] = ()) -> View:
    primary, backup = first_homes(LAYOUT.shards, servers, replication)
    number = ViewNumber(1, count)
    view = View(number, ViewNumber(1, 1), (), tuple(servers.values()), assignments, primary, backup)
    return msgspec.structs.replace(view, paired=view_change.pairings(view, None))


# ---- shards ----


def test_first_homes_do_not_depend_on_the_order_in_which_servers_came() -> None:
    assert first_homes(LAYOUT.shards, _servers("a", "b", "c"), 1) == first_homes(
        LAYOUT.shards, _servers("c", "a", "b"), 1
    )


def test_a_backup_is_promoted_only_if_it_has_caught_up_and_is_the_same_process() -> None:
    view = _view(_servers("a", "b"))
    (first_of_a, *_), alone = view.shards_of("a"), _servers("b")
    assert view_change.surviving_primaries(view, _servers("a", "b"), frozenset()) == view.primary
    assert view_change.surviving_primaries(view, alone, frozenset(SHARDS)) == dict.fromkeys(SHARDS, "b")
    assert view_change.surviving_primaries(view, alone, frozenset(SHARDS) - {first_of_a}) is None
    assert view_change.surviving_primaries(view, _servers("b", incarnation=2), frozenset(SHARDS)) is None


def test_a_meeting_lasts_while_primary_and_backup_are_the_same_processes() -> None:
    before = _view(_servers("a", "b", "c"))
    servers = {**_servers("a", "b"), **_servers("c", incarnation=2)}
    view = msgspec.structs.replace(before, number=ViewNumber(1, 2), servers=tuple(servers.values()))
    reborn = {s for s in SHARDS if "c" in (before.primary[s], before.backup[s])}
    assert 0 < len(reborn) < len(SHARDS)
    view = msgspec.structs.replace(view, paired=view_change.pairings(view, before))
    assert view.paired == {s: ViewNumber(1, 2 if s in reborn else 1) for s in SHARDS}
    assert view_change.still_caught_up(view, before, frozenset(SHARDS)) == set(SHARDS) - reborn


def test_a_worker_that_missed_views_sees_that_a_shard_was_elsewhere_meanwhile() -> None:
    """Shard 0 went from a to b and back: a has dropped what it was sent before."""
    first = _view(_servers("a", "b"))
    first = msgspec.structs.replace(first, homed=view_change.homings(first, None))
    away, back = dict(first.primary), first.primary
    away[0] = "b" if first.primary[0] == "a" else "a"
    views = [first]
    for count, primary in enumerate((away, back), start=2):
        view = msgspec.structs.replace(views[-1], number=ViewNumber(1, count), primary=primary)
        views.append(msgspec.structs.replace(view, homed=view_change.homings(view, views[-1])))
    assert views[2].primary == first.primary
    assert views[2].moved(first) == views[1].moved(first) == [0]
    assert first.moved(first) == []
    links = LinkTable("w0")
    links.to_open(first)
    assert links.to_end(first, views[2]) == [first.primary[0]]
    assert links.to_end(views[2], views[2]) == []


# ---- replicas ----


def _speeds(**seconds: float) -> Speeds:
    speeds = Speeds()
    for worker, each in seconds.items():
        for step in range(8):
            speeds.computed(worker, step, 0, each, float(step))
    return speeds


def test_survivors_keep_their_replicas_and_a_fair_assignment_follows_a_little_ahead() -> None:
    (first,) = following_assignments({}, ["w1", "w0"], 4, -1, Speeds())
    assert first == Assignment(0, {"w0": (0, 1), "w1": (2, 3)})
    (alone,) = following_assignments(first.replicas, ["w0"], 4, 5, Speeds())
    assert alone == Assignment(0, {"w0": (0, 1, 2, 3)})
    now, later = following_assignments(alone.replicas, ["w0", "w1"], 4, 5, Speeds())
    assert now == Assignment(0, {"w0": (0, 1, 2, 3), "w1": ()})
    assert later == Assignment(5 + view_change.AHEAD, {"w0": (0, 1), "w1": (2, 3)})


def test_an_assignment_that_is_nearly_fair_stays() -> None:
    assigned = {"w0": (0, 1), "w1": (2, 3)}
    assert len(following_assignments(assigned, ["w0", "w1"], 4, 5, _speeds(w0=1.0, w1=1.05))) == 1
    assert len(following_assignments(assigned, ["w0", "w1"], 4, 5, _speeds(w0=1.0, w1=3.0))) == 2


def test_what_a_round_takes_beside_computing_no_assignment_makes_shorter() -> None:
    assigned, speeds = {"w0": (0, 1), "w1": (2, 3)}, _speeds(w0=1.0,
        w1=3.0)  # six seconds of computing would become three
    for seconds, assignments in ((0.0, 2), (6.0, 2), (32.9, 2), (33.1, 1), (60.0, 1)):
        assert len(following_assignments(assigned, ["w0", "w1"], 4, 5, speeds, seconds)) == assignments


def test_a_cut_of_more_blocks_has_to_pay_for_what_it_pushes() -> None:
    """Of 8 replicas 4 + 4 are two blocks, and 5 + 3 are four: a worker that is a little faster gets no fifth one."""
    assigned = {"w0": (0, 1, 2, 3), "w1": (4, 5, 6, 7)}
    speeds, workers = _speeds(w0=1.0, w1=1.4), ["w0", "w1"]  # 5.6 seconds of computing would become 5
    for beside, moves in ((0.0, True), (0.04, True), (0.1, False), (0.5, False)):
        found = following_assignments(assigned, workers, 8, 5, speeds, 5.6 + beside, adds_up=True)
        assert (len(found) == 2) == moves, beside
        assert len(following_assignments(assigned, workers, 8, 5, speeds, 5.6 + beside)) == 2  # each is pushed alone
    slow = _speeds(w0=1.0, w1=4.0)  # 16 seconds would become 7: that pays for much
    assert len(following_assignments(assigned, workers, 8, 5, slow, 16.0 + 2.0, adds_up=True)) == 2


# ---- news ----


def test_a_view_that_differs_in_its_number_and_in_assignments_that_no_longer_count_says_nothing_new() -> None:
    then, now = Assignment(0, {"w0": (0, 1)}), Assignment(4, {"w0": (0,), "w1": (1,)})
    before = _view(_servers("a", "b"), assignments=(then, now))
    view = msgspec.structs.replace(before, number=ViewNumber(1, 2), assignments=(Assignment(0, now.replicas),))
    assert says_nothing_new(view, before, furthest=3)
    assert not says_nothing_new(view, before, furthest=2)  # the second deal is still to come
    assert not says_nothing_new(msgspec.structs.replace(view, orders=StandingOrders(ending=True)), before, furthest=3)


# ---- the sequence of views ----


def test_numbers_rise_and_nothing_counts_before_it_is_adopted() -> None:
    views = ViewSequence(epoch=3, replication=2)
    members = _members(("a", "b"), ("w0",))
    first = views.first(LAYOUT.shards, members, (), uploader="w0", origin="")
    assert first.number == first.generation == ViewNumber(3, 1)
    assert (views.view, views.begun, views.exposed) == (None, False, 0)
    views.adopt(first)
    assert (views.begun, views.exposed) == (True, len(SHARDS))
    second = views.following(LAYOUT.shards, members, (), ending=True)
    assert (second.number, second.generation) == (ViewNumber(3, 2), first.generation)
    assert (second.uploader, second.orders.ending) == ("w0", True)
    assert views.view is first


def test_backups_have_caught_up_by_their_primary_s_word_until_the_two_part_or_the_generation_is_stale() -> None:
    views, members = ViewSequence(1, 2), _members(("a", "b"), ("w0",))
    views.adopt(view := views.first(LAYOUT.shards, members, (), uploader="w0", origin=""))
    of_a = {shard: view.paired[shard] for shard in view.shards_of("a")}
    assert not views.backups_caught_up("b", of_a)
    assert not views.backups_caught_up("a", dict.fromkeys(of_a, ViewNumber(1, 9)))
    assert views.backups_caught_up("a", of_a)
    assert not views.backups_caught_up("a", of_a)  # known
    assert views.caught_up == set(of_a)
    same = views.following(LAYOUT.shards, members, (), ending=False)
    assert same is not None
    views.adopt(same)
    assert views.caught_up == set(of_a)
    views.adopt(views.first(LAYOUT.shards, members, (), uploader="w0", origin="step-1"))
    assert views.caught_up == set()


def test_contributors_are_all_that_were_assigned_in_the_generation_and_are_here() -> None:
    def made(assigned: dict[str, tuple[int, ...]], *workers: str) -> View:
        here, number = tuple(Member(id, "here") for id in workers), ViewNumber(1, 1)
        return View(number, number, here, (), (Assignment(0, assigned),), {})

    first = made({"w0": (0, 1), "w1": (2,), "w2": ()}, "w0", "w1", "w2")
    first = msgspec.structs.replace(first, contributors=contributors(first, None))
    assert first.contributors == {"w0": (0, 1), "w1": (2,)}
    then = made({"w0": (), "w2": (0, 2)}, "w0", "w2")
    assert contributors(then, first) == {"w0": (0, 1), "w2": (0, 2)}, "what w0 has sent may be on its way; w1 is gone"
    assert contributors(then, None) == {"w2": (0, 2)}, "a new generation"
    assignments = (Assignment(0, {}), Assignment(7, {"w0": (5,)}))
    later = msgspec.structs.replace(made({}, "w0"), assignments=assignments)
    assert contributors(later, None) == {"w0": (5,)}, "an assignment that is still to come"


def test_an_aggregator_contributes_what_its_workers_may_also_if_one_is_gone() -> None:
    """[0,2) of w0 and w1 may be on its way, or be sent again to a new primary, when w1 is gone: w0 counts on it."""
    workers, relay, number = (Member("w0", "h"), Member("w1", "h")), Member("a0", "h"), ViewNumber(1, 1)
    first = View(
        number, number, workers, (), (Assignment(0, {"w0": (0,), "w1": (1,)}),), {}, aggregators=(relay,),
        aggregator_of={"w0": "a0", "w1": "a0"},
    )  # fmt: skip
    first = msgspec.structs.replace(first, contributors=contributors(first, None))
    assert first.contributors == {"a0": (0, 1), "w0": (0,), "w1": (1,)}
    then = msgspec.structs.replace(
        first, workers=workers[:1], assignments=(Assignment(0, {"w0": (0, 1)}),), aggregator_of={}
    )
    assert contributors(then, first) == {"a0": (0, 1), "w0": (0, 1)}
    assert contributors(msgspec.structs.replace(then, aggregators=()), first) == {"w0": (0, 1)}


def test_a_backup_task_may_come_through_the_worker_s_aggregator() -> None:
    """Else servers refuse it, and what the aggregator has merged with it."""
    views, members = ViewSequence(1, 1), _members(("a",), ("w0", "w1"))
    for name in ("r0", "r1"):
        members.join(Member(name, "here"), "aggregator")
    assigned = (Assignment(0, {"w0": (0,), "w1": (1,)}),)
    views.adopt(views.first(LAYOUT.shards, members, assigned, uploader="w0", origin=""))
    view = views.with_backup_task("w0", 1)
    assert view.aggregator_of == {"w0": "r0", "w1": "r1"}
    assert view.contributors == {"r0": (0, 1), "r1": (1,), "w0": (0, 1), "w1": (1,)}


def test_a_worker_that_was_given_up_and_came_back_begins_all_its_links_anew() -> None:
    """What it sent before may have been dropped: it must not count it as delivered."""
    server = Member("s0", "here", "s0:1", 1)
    shell = shell_for("w0", worker_plan(resolve({"replicas": 2, "batch": 1, "steps": 9}), LAYOUT, frozenset()))

    def seen(count: int, incarnation: int) -> list[str] | None:
        number = ViewNumber(1, count)
        worker = Member("w0", "here", incarnation=incarnation)
        assigned = (Assignment(0, {"w0": (0, 1)}),)
        view = View(number, ViewNumber(1, 1), (worker,), (server,), assigned, dict.fromkeys(SHARDS, "s0"))
        ended = shell.links_to_end(view)
        if ended is not None:
            shell.adopt(view, ended)
            shell.links.to_open(view)
        return ended

    assert seen(1, incarnation=2) == []
    assert seen(2, incarnation=2) == []
    assert seen(4, incarnation=3) == ["s0"], "view 3, without it, it has never seen"
    assert seen(5, incarnation=3) == []
