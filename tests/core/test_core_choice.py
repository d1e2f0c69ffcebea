"""A quorum's choice is on the backup before anybody hears the norm: all servers take the same decision for a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_core_shard import Pair, caught_up

from rallypoint.core.policy import Async, ServerPolicy, Sync
from rallypoint.core.shard import effects as fx
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import Acknowledge, Add, Apply, Drop, Effect, Fill, Finish, Hold, Publish
from rallypoint.core.shard.events import Acked, Assigned, Chosen, Contribute, Decide, FillBackup, Initialise
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.server import ServerPlan

OF = 4  # replicas
PROMOTED = Assigned(primary=True, backup=False, fresh=False)


def _kept(effects: Sequence[Effect], *kinds: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


def _caught_up(quorum: int = 2) -> Pair:
    return caught_up(OF, True, quorum)


def _push(pair: Pair, step: int, *replicas: int) -> list[Effect]:
    """These replicas' contributions come to the primary; what the last one brings about."""
    return [pair.run(Contribute(step, replica, 1.0, pair.ticket())) for replica in replicas][-1]


def _sum_of(machine: ShardMachine, step: int, arriving: Sequence[int]) -> tuple[int, ...]:
    """The sum that a primary finishes when all these contributions come."""
    for ticket, replica in enumerate(arriving, 1000):
        if _kept(machine.handle(Contribute(step, replica, 1.0, ticket)), Finish):
            return tuple(c.replica for c in machine._sum.contributions)
        machine.validate()
    raise AssertionError("it waits for more")


def test_a_primary_finishes_the_sum_when_its_backup_knows_whose_contributions_are_in_it() -> None:
    pair = _caught_up()
    effects = _push(pair, 0, 2, 0)
    assert effects == [Add(effects[0].ticket, 1.0), Chosen(0, (2, 0))]  # type: ignore[union-attr]
    assert _kept(_push(pair, 0, 1), Add, Chosen, Finish) == [], "it has all that it takes"
    assert pair.deliver_down() == [Acknowledge(0, chosen=True)]
    assert pair.run(pair.up.pop()) == [Finish(0, 2.0, True, (), 2)]
    assert _kept(pair.run(Decide(0, 0.5)), Apply, Publish) == [
        Apply(1, 0, 0.5, 0, replica=2, replicate=True, copies=(False,))
    ]
    pair.deliver()
    assert _kept(pair.effects, Publish)[-1] == Publish(1)


def test_a_promoted_backup_takes_what_was_chosen_in_that_order_and_nothing_else() -> None:
    pair = _caught_up(3)
    _push(pair, 0, 3, 2, 0)
    pair.deliver()
    new = pair.backup
    new.handle(PROMOTED)
    held = [new.handle(Contribute(0, replica, 1.0, 100 + replica)) for replica in (0, 1, 2)]
    assert held == [[Hold(100, credit=True)], [Drop(101)], [Hold(102, credit=True)]]
    assert new.handle(Contribute(0, 3, 1.0, 103)) == [
        fx.Take(103, 1.0), Add(102, 1.0), Add(100, 1.0), Finish(0, 3.0, True, (), 3)
    ]  # fmt: skip
    new.validate()
    new.handle(Decide(0, 1.0))
    assert _sum_of(new, 1, [1, 0, 2, 3]) == (1, 0, 2), "a choice is for one round"


def test_a_backup_that_was_told_no_choice_makes_its_own() -> None:
    pair = _caught_up()
    _push(pair, 0, 2, 0)  # it dies before the choice has left, and has told nobody a norm
    assert pair.measured == []
    pair.backup.handle(PROMOTED)
    assert _sum_of(pair.backup, 0, [1, 3, 0, 2]) == (1, 3)


def test_a_backup_that_is_filled_in_the_middle_of_a_decision_gets_the_choice_with_the_state() -> None:
    pair = Pair(OF, True, 2)
    pair.run(Initialise(pair.ticket()))
    assert _push(pair, 0, 3, 1)[-1] == Finish(0, 2.0, True, (), 2), "there is nobody who could replace it"
    assert pair.run(FillBackup()) == [Chosen(0, (3, 1)), Fill(0)], "who has the state may be promoted: choice first"
    assert pair.deliver_down() == []
    assert pair.deliver_down() == [Acknowledge(0, chosen=True)]
    assert pair.run(pair.up.pop()) == [fx.BackupCaughtUp()]
    pair.backup.handle(PROMOTED)
    assert _sum_of(pair.backup, 0, [0, 1, 2, 3]) == (3, 1)


def test_a_choice_survives_a_second_promotion_before_its_contributions_have_come_again() -> None:
    first = _caught_up(3)
    _push(first, 0, 3, 2, 0)
    first.deliver()  # some servers have its norm; now it dies
    second = Pair(OF, True, 3)
    second.primary = first.backup
    second.run(Assigned(primary=True, backup=True, fresh=True))
    _push(second, 0, 0)  # one has come again
    assert second.run(FillBackup()) == [Chosen(0, (3, 2, 0)), Fill(0)]
    second.deliver()
    second.backup.handle(PROMOTED)
    assert _sum_of(second.backup, 0, [0, 1, 2, 3]) == (3, 2, 0)


def test_without_a_link_the_choice_waits_for_it() -> None:
    pair = _caught_up()
    pair.lose_link()
    assert _kept(_push(pair, 0, 2, 0), Chosen, Finish) == []
    assert pair.run(FillBackup()) == [Chosen(0, (2, 0)), Fill(0)]
    pair.deliver()
    assert pair.measured == [(2, 0)]


@pytest.mark.parametrize(
    "view", [Assigned(True, False, False), Assigned(True, True, True)], ids=["no backup", "another backup"]
)
def test_the_sum_is_finished_when_the_backup_that_was_to_know_the_choice_is_gone(view: Assigned) -> None:
    pair = _caught_up()
    _push(pair, 0, 2, 0)
    pair.lose_link()
    assert _kept(pair.run(view), Finish) == [Finish(0, 2.0, True, (), 2)]


def test_an_old_acknowledgement_finishes_nothing() -> None:
    pair = _caught_up()
    _push(pair, 0, 2, 0)
    assert pair.run(Acked(0)) == [], "it is of the state, and the choice may be lost"
    assert pair.measured == []


def test_a_choice_may_overtake_the_update_before_it() -> None:
    """Frames of a few bytes are urgent, and updates are not."""
    pair = _caught_up()
    _push(pair, 0, 2, 0)
    pair.deliver()
    pair.run(Decide(0, 1.0))
    _push(pair, 1, 3, 1)
    assert [type(event) for event in pair.down] == [events.Replicated, Chosen]
    pair.down.reverse()
    assert pair.deliver_down() == [], "it has not the version that the choice is for"
    assert _kept(pair.deliver_down(), Acknowledge) == [Acknowledge(1, chosen=True)]
    pair.run(pair.up.pop())
    assert pair.measured == [(2, 0), (3, 1)]


def test_a_demoted_primary_forgets_the_sum_that_waited() -> None:
    pair = _caught_up()
    _push(pair, 0, 2, 0)
    pair.run(Assigned(primary=False, backup=False, fresh=False))
    pair.run(events.Loaded(0))
    pair.run(PROMOTED)
    assert _sum_of(pair.primary, 0, [1, 0, 2]) == (1, 0)


@pytest.mark.parametrize(
    ("policy", "index", "decides", "chooses"),
    [
        (Sync(quorum=2), 0, {0, 1}, True),
        (Sync(quorum=2), 1, {0, 1}, True),  # a buffer: whether it is finite depends on whose it is
        (Sync(quorum=2), 0, set(), False),  # nothing is decided
        (Sync(), 0, {0, 1}, False),  # all contribute
        (Async(), 0, set(), False),
    ],
)
def test_a_choice_is_told_where_the_decision_depends_on_it(
    policy: ServerPolicy, index: int, decides: set[int], chooses: bool
) -> None:
    plan = ServerPlan(policy, [OF, OF], frozenset({0}), frozenset(decides), rounds=9)
    assert plan.machine(index, primary=True).chooses is chooses


def test_a_demoted_primary_acknowledges_no_choice_before_it_has_proved_what_it_holds() -> None:
    """The choice is urgent on a link, and overtakes the question."""
    old = ShardMachine(Sync(quorum=2), 3, True, rounds=20, chooses=True)
    old.handle(Assigned(True, True, True))
    old.handle(Initialise(0, 0))
    old.handle(Assigned(False, False, False, proven=True))
    assert old.handle(Chosen(0, (2, 0))) == []
    assert old.handle(events.Compared(0, same=True)) == [Acknowledge(0, chosen=True)]
    assert old.handle(Chosen(0, (2, 0))) == [Acknowledge(0, chosen=True)]
