"""The aggregator's machine: the reference's sum bit for bit, whoever comes when, and nobody waits for what never comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rallypoint.core import aggregator as machine
from rallypoint.core.aggregator import AggregatorMachine, BlockContribution, DropPayload, GiveVersion, PushPart
from rallypoint.core.sums import Block, blocks_of, leaf
from rallypoint.core.view import Assignment, Member, View, ViewNumber

SHARD, STEP = 0, 5


def view_of(
    workers: dict[str, Sequence[int]], near: Iterable[str], count: int = 1, home: str = "s0", generation: int = 1,
    incarnation: int = 0,
) -> View:
    """Workers with these replicas; those `near` may use aggregator a0; two servers, the shard on `home`."""
    return View(
        number=ViewNumber(1, count), generation=ViewNumber(1, generation),
        workers=tuple(Member(worker, "h") for worker in workers), servers=(Member("s0", "h"), Member("s1", "h")),
        assignments=(Assignment(0, {worker: tuple(own) for worker, own in workers.items()}),),
        primary={SHARD: home}, homed={SHARD: ViewNumber(1, 1)},
        aggregators=(Member("a0", "h", incarnation=incarnation),),
        aggregator_of=dict.fromkeys(near, "a0"), contributors={worker: tuple(own) for worker, own in workers.items()},
    )  # fmt: skip


def aggregator(
    workers: dict[str, Sequence[int]], *, follow: Iterable[str] | None = None, replicas: int = 0
) -> AggregatorMachine:
    """One that is linked to all servers; the workers in `follow` (by default all) contribute through it."""
    made = AggregatorMachine("a0", [replicas or sum(map(len, workers.values()))])
    made.viewed(view_of(workers, workers))
    made.server_up("s0")
    made.server_up("s1")
    for worker in workers if follow is None else follow:
        assert not any(isinstance(effect, machine.DismissWorkers) for effect in made.followed(worker, 0))
    return made


def push(made: AggregatorMachine, block: tuple[int, int], ticket: int = 1, step: int = STEP) -> list[machine.Effect]:
    effects = made.contributed(BlockContribution(SHARD, step, Block(*block), float(block[1] - block[0]), ticket))
    made.validate()
    return effects


def pushed(effects: Iterable[machine.Effect]) -> list[tuple[int, int]]:
    return [tuple(effect.block) for effect in effects if isinstance(effect, PushPart)]


# ---- what is merged, and when it leaves ----


def test_siblings_of_two_workers_leave_as_one_block() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2, 3)})
    assert pushed(push(made, (0, 2))) == []
    effects = push(made, (2, 4))
    assert machine.MergeParts(SHARD, STEP, 0, 2, 1.0, 1.0) in effects
    assert pushed(effects) == [(0, 4)]


def test_a_leaf_that_is_merged_is_weighted_first_and_one_that_leaves_alone_is_not() -> None:
    made = aggregator({"w0": (0,), "w1": (1, 2)}, replicas=4)
    made.contributed(BlockContribution(SHARD, STEP, leaf(0), 0.5, 1))
    effects = made.contributed(BlockContribution(SHARD, STEP, leaf(1), 3.0, 2))
    assert machine.MergeParts(SHARD, STEP, 0, 1, 0.5, 3.0) in effects
    (alone,) = [
        e for e in made.contributed(BlockContribution(SHARD, STEP, leaf(2), 0.25, 3)) if isinstance(e, PushPart)
    ]
    assert (alone.block, alone.weight) == ((2, 3), 0.25)


def test_only_the_highest_nodes_leave() -> None:
    """Replicas 1 to 6 of 8: [1,2), [2,4), [4,6) and [6,7); [2,4) and [4,6) have siblings that go other ways."""
    made = aggregator({"w0": (1, 2, 3), "w1": (4, 5, 6)}, replicas=8)
    sent = [block for r in (3, 4, 6, 1, 5, 2) for block in pushed(push(made, (r, r + 1), r))]
    assert sorted(sent) == [tuple(block) for block in blocks_of(range(1, 7), 8)]


def test_a_repeat_is_dropped_and_a_larger_block_replaces_what_it_covers() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2, 3)})
    push(made, (0, 1), 1)
    assert push(made, (0, 1), 2) == [DropPayload(2)]
    assert machine.Forget(SHARD, STEP, 0) in push(made, (0, 2), 3)
    assert push(made, (1, 2), 4) == [DropPayload(4)]


def test_nobody_waits_for_a_worker_that_goes_another_way() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2, 3)})
    assert pushed(push(made, (0, 2))) == []
    assert pushed(made.gone("w1")) == [(0, 2)]
    made = aggregator({"w0": (0, 1), "w1": (2, 3)}, follow=["w0"])
    assert pushed(push(made, (0, 2))) == [(0, 2)]


def test_a_worker_counts_from_the_round_it_names() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2, 3)}, follow=["w0"])
    made.followed("w1", STEP + 1)
    assert pushed(push(made, (0, 2))) == [(0, 2)]
    assert pushed(push(made, (0, 2), step=STEP + 1)) == []


def test_what_was_sent_is_not_merged_any_more() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2, 3)}, follow=["w0"])
    push(made, (0, 2), 1)
    made.followed("w1", 0)
    effects = push(made, (2, 4), 2)
    assert pushed(effects) == [(2, 4)]
    assert not any(isinstance(effect, machine.MergeParts) for effect in effects)


# ---- servers come and go ----


def test_what_was_under_way_to_a_server_is_sent_again() -> None:
    made = aggregator({"w0": (0, 1)})
    assert pushed(push(made, (0, 2))) == [(0, 2)]
    made.server_lost("s0")
    assert made.server_up("s0") == [machine.FollowServer("s0"), PushPart(SHARD, STEP, Block(0, 2), 2.0, "s0")]


def test_a_shard_that_moves_gets_all_of_its_parts_again() -> None:
    made = aggregator({"w0": (0, 1)})
    push(made, (0, 2))
    effects = made.viewed(view_of({"w0": (0, 1)}, ["w0"], count=2, home="s1"))
    assert [effect.server for effect in effects if isinstance(effect, PushPart)] == ["s1"]
    made.validate()


def test_who_was_given_up_and_joined_again_forgets_what_servers_may_have_refused() -> None:
    """While it was given up, servers took nothing from it, and it may hold parts that it may not push any more."""
    made = aggregator({"w0": (0, 1), "w1": (2, 3)}, follow=["w0"])
    push(made, (0, 2), 1)
    assert machine.Forget(SHARD, STEP, 0) in made.viewed(view_of({"w2": (0, 1, 2, 3)}, ["w2"], 3, incarnation=1))
    made.followed("w2", STEP)
    assert pushed(push(made, (0, 4), 2)) == [(0, 4)]


def test_who_is_given_up_forgets_its_parts_and_what_comes_before_it_joins_again() -> None:
    made = aggregator({"w0": (0, 1)})
    push(made, (0, 2), 1)
    given_up = msgspec.structs.replace(view_of({"w0": (0, 1)}, [], 2), aggregators=())
    assert machine.Forget(SHARD, STEP, 0) in made.viewed(given_up)
    push(made, (0, 2), 2)  # it was on its way; servers refuse it
    assert machine.Forget(SHARD, STEP, 0) in made.viewed(view_of({"w0": (0, 1)}, ["w0"], 3))
    assert pushed(push(made, (0, 2), 3)) == [(0, 2)]


def test_the_next_version_ends_the_step() -> None:
    made = aggregator({"w0": (0, 1)})
    push(made, (0, 2))
    effects = made.arrived(SHARD, STEP + 1, 9)
    assert effects[:2] == [machine.KeepVersion(SHARD, STEP + 1, 9), machine.Forget(SHARD, STEP, 0)]
    assert GiveVersion("w0", SHARD, STEP + 1) in effects
    assert push(made, (0, 2), 3) == [DropPayload(3)]  # it is over
    made.server_lost("s0")
    assert pushed(made.server_up("s0")) == []


def test_a_server_that_cannot_be_reached_for_long_sends_the_workers_away() -> None:
    made = aggregator({"w0": (0, 1)})
    made.tick(10.0)
    made.server_lost("s1")
    assert made.tick(10.0 + machine.CUT_OFF_S) == []
    (dismissed,) = made.tick(10.1 + machine.CUT_OFF_S)
    assert isinstance(dismissed, machine.DismissWorkers)
    assert dismissed.workers == ("w0",)
    assert isinstance(made.followed("w0", STEP)[0], machine.DismissWorkers)
    made.server_up("s1")
    assert made.followed("w0", STEP) == []


# ---- versions ----


def test_what_workers_ask_for_is_bounded_and_what_no_server_keeps_any_more_is_forgotten() -> None:
    made = aggregator({"w0": (0,), "w1": (1,)})
    made.arrived(SHARD, 6, 1)
    asked = {version for version in range(7, 1000) if made.fetched("w0", SHARD, version)}
    made.validate()
    assert asked == {7, 8, 9, 10}
    made.arrived(SHARD, 10, 2)  # 7 and 8 never came
    again = made.server_up("s0")
    assert [effect.version for effect in again if isinstance(effect, machine.FetchVersion)] == [9]


def test_two_versions_are_kept_and_each_is_fetched_once() -> None:
    made = aggregator({"w0": (0,), "w1": (1,)})
    assert made.fetched("w0", SHARD, 7) == [machine.FetchVersion(SHARD, 7, "s0")]
    assert made.fetched("w1", SHARD, 7) == []  # asked for already
    effects = made.arrived(SHARD, 7, 1)
    assert {effect.worker for effect in effects if isinstance(effect, GiveVersion) and effect.asked} == {"w0", "w1"}
    assert made.arrived(SHARD, 7, 2) == [DropPayload(2)]
    made.arrived(SHARD, 8, 3)
    assert machine.ReleaseVersion(SHARD, 7) in made.arrived(SHARD, 9, 4)
    assert made.fetched("w0", SHARD, 8) == [GiveVersion("w0", SHARD, 8, asked=True)]
    assert made.fetched("w0", SHARD, 7) == []  # too old: newer ones have been sent


def test_who_begins_to_follow_gets_the_newest_version() -> None:
    made = aggregator({"w0": (0,)}, follow=[])
    made.arrived(SHARD, 4, 1)
    assert made.followed("w0", 4) == [GiveVersion("w0", SHARD, 4)]


def test_a_new_generation_forgets_everything_and_follows_again() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2,)})
    push(made, (0, 2))
    made.arrived(SHARD, STEP, 2)
    effects = made.viewed(view_of({"w0": (0, 1), "w1": (2,)}, ["w0", "w1"], count=2, generation=2))
    assert machine.Forget(SHARD, STEP, 0) in effects
    assert machine.ReleaseVersion(SHARD, STEP) in effects
    assert effects[-2:] == [machine.FollowServer("s0"), machine.FollowServer("s1")]
    assert pushed(push(made, (0, 2), step=0)) == [(0, 2)]  # nobody follows in it yet


def test_a_worker_that_the_view_takes_away_is_sent_away() -> None:
    made = aggregator({"w0": (0, 1), "w1": (2, 3)})
    push(made, (0, 2))
    effects = made.viewed(view_of({"w0": (0, 1), "w1": (2, 3)}, ["w0"], count=2))
    assert [effect.workers for effect in effects if isinstance(effect, machine.DismissWorkers)] == [("w1",)]
    assert pushed(effects) == [(0, 2)]


def test_impossible_contributions_end_their_connection() -> None:
    made = aggregator({"w0": (0, 1, 2)}, replicas=3)
    (dropped,) = push(made, (1, 3), 1)
    assert isinstance(dropped, DropPayload)
    assert "no block" in dropped.fault
    made.arrived(SHARD, STEP, 2)
    (far,) = push(made, (0, 1), 3, step=STEP + 2)
    assert isinstance(far, DropPayload)
    assert far.fault


# ---- stale frames and older links ----


class Link:
    def __init__(self, number: int) -> None:
        self.number = number


def test_frames_of_an_older_generation_and_of_older_links_do_not_count() -> None:
    shell: machine.AggregatorShell[Link] = machine.AggregatorShell(AggregatorMachine("a0", [2]))
    shell.adopt(view_of({"w0": (0, 1)}, ["w0"], count=3, generation=3))
    for server in ("s0", "s1"):
        shell.server_up(Member(server, "h"))
    assert shell.server_up(Member("s0", "h", incarnation=7)) == []  # not in the view
    older, newer = Link(1), Link(2)
    shell.linked(newer, "w0")
    shell.linked(older, "w0")
    assert shell.followed(older, "w0", 0, ViewNumber(1, 3)) == []
    assert shell.followed(newer, "w0", 0, ViewNumber(1, 2)) == []  # stale
    new = BlockContribution(SHARD, 0, Block(0, 2), 2.0, 1)
    assert shell.contributed("w0", new, ViewNumber(1, 2)) == [DropPayload(1)]
    assert shell.arrived(SHARD, 0, 2, ViewNumber(1, 2)) == [DropPayload(2)]
    assert pushed(shell.contributed("w0", new, ViewNumber(1, 3))) == [(0, 2)]
    assert shell.contributed("w1", new, ViewNumber(1, 3)) == [DropPayload(1)]  # another worker's replicas
    assert shell.gone(older, "w0") == []
    assert shell.workers == {"w0": newer}


def test_views_and_links_that_are_old_news_change_nothing() -> None:
    made = aggregator({"w0": (0, 1)})
    assert made.viewed(view_of({"w0": ()}, [])) == []  # not newer
    reborn = msgspec.structs.replace(
        view_of({"w0": (0, 1)}, ["w0"], count=2),
        servers=(replace_member(Member("s0", "h")), Member("s1", "h")),
    )
    push(made, (0, 2))
    assert pushed(made.viewed(reborn)) == []  # the new s0 is not linked yet
    assert pushed(made.server_up("s0")) == [(0, 2)]


def replace_member(member: Member) -> Member:
    return msgspec.structs.replace(member, incarnation=member.incarnation + 1)
