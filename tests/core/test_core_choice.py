"""A quorum's choice is on the backup before anybody hears the norm: all servers take the same decision for a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rallypoint.core.policy import Async, ServerPolicy, Sync
from rallypoint.core.shard import effects as fx
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import Acknowledge, Add, Apply, Drop, Effect, Fill, Finish, Hold, Publish
from rallypoint.core.shard.events import Acked, Assigned, Chosen, Contribute, Decide, Event, FillBackup, Initialise
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.shard.server import ServerPlan

OF = 4  # replicas
PROMOTED = Assigned(primary=True, backup=False, fresh=False)


def _machine(quorum: int = 2, *, primary: bool = True) -> ShardMachine:
    return ShardMachine(Sync(quorum=quorum), OF, decides=True, primary=primary, chooses=True, rounds=9)


def _kept(effects: Sequence[Effect], *kinds: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


class _Pair:
    """A primary and its backup. What one tells the other is under way until a test delivers it."""

    def __init__(self, quorum: int = 2) -> None:
        self.primary, self.backup = _machine(quorum), _machine(quorum, primary=False)
        self.down: list[Event] = []
        self.up: list[Event] = []
        self.effects: list[Effect] = []
        self.measured: list[tuple[int, ...]] = []  # whose contributions are in the sums that were finished
        self._tickets = 0
        self.at(Assigned(primary=True, backup=True, fresh=True))
        self.at(Initialise(self.ticket()))

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def at(self, event: Event) -> list[Effect]:
        """Something happens at the primary."""
        effects = self.primary.handle(event)
        for effect in effects:
            match effect:
                case Fill(version=version):
                    self.down.append(events.Loaded(version))
                case Chosen():
                    self.down.append(effect)
                case Apply(step=step, scale=scale, replicate=True):
                    self.down.append(events.Replicated(step, scale is None, self.ticket()))
                case Finish():
                    self.measured.append(tuple(c.replica for c in self.primary._sum.contributions))
        self.effects += effects
        self.primary.validate()
        return effects

    def push(self, step: int, *replicas: int) -> list[Effect]:
        """These replicas' contributions come to the primary; what the last one brings about."""
        effects: list[Effect] = []
        for replica in replicas:
            effects = self.at(Contribute(step, replica, 1.0, self.ticket()))
        return effects

    def deliver_down(self) -> list[Effect]:
        """The first that is under way to the backup comes."""
        effects = self.backup.handle(self.down.pop(0))
        self.up += [Acked(e.version, e.chosen) for e in effects if isinstance(e, Acknowledge)]
        self.backup.validate()
        return effects

    def deliver(self) -> None:
        while self.down or self.up:
            if self.down:
                self.deliver_down()
            if self.up:
                self.at(self.up.pop(0))

    def lose_link(self) -> None:
        self.primary.copies.backup.link_lost()
        self.down.clear()
        self.up.clear()


def _caught_up(quorum: int = 2) -> _Pair:
    pair = _Pair(quorum)
    pair.at(FillBackup())
    pair.deliver()
    assert pair.primary.copies.backup.caught_up
    return pair


def _sum_of(machine: ShardMachine, step: int, arriving: Sequence[int]) -> tuple[int, ...]:
    """The sum that a primary finishes when all these contributions come."""
    for ticket, replica in enumerate(arriving, 1000):
        if _kept(machine.handle(Contribute(step, replica, 1.0, ticket)), Finish):
            return tuple(c.replica for c in machine._sum.contributions)
        machine.validate()
    raise AssertionError("it waits for more")


def test_a_primary_finishes_the_sum_when_its_backup_knows_whose_contributions_are_in_it() -> None:
    pair = _caught_up()
    effects = pair.push(0, 2, 0)
    assert effects == [Add(effects[0].ticket, 1.0), Chosen(0, (2, 0))]  # type: ignore[union-attr]
    assert _kept(pair.push(0, 1), Add, Chosen, Finish) == [], "it has all that it takes"
    assert pair.deliver_down() == [Acknowledge(0, chosen=True)]
    assert pair.at(pair.up.pop()) == [Finish(0, 2.0, True, (), 2)]
    assert _kept(pair.at(Decide(0, 0.5)), Apply, Publish) == [
        Apply(1, 0, 0.5, 0, replica=2, replicate=True, copies=(False,))
    ]
    pair.deliver()
    assert _kept(pair.effects, Publish)[-1] == Publish(1)


def test_a_promoted_backup_takes_what_was_chosen_in_that_order_and_nothing_else() -> None:
    pair = _caught_up(3)
    pair.push(0, 3, 2, 0)
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
    pair.push(0, 2, 0)  # it dies before the choice has left, and has told nobody a norm
    assert pair.measured == []
    pair.backup.handle(PROMOTED)
    assert _sum_of(pair.backup, 0, [1, 3, 0, 2]) == (1, 3)


def test_a_backup_that_is_filled_in_the_middle_of_a_decision_gets_the_choice_with_the_state() -> None:
    pair = _Pair()
    assert pair.push(0, 3, 1)[-1] == Finish(0, 2.0, True, (), 2), "there is nobody who could replace it"
    assert pair.at(FillBackup()) == [Chosen(0, (3, 1)), Fill(0)], "who has the state may be promoted: choice first"
    assert pair.deliver_down() == []
    assert pair.deliver_down() == [Acknowledge(0, chosen=True)]
    assert pair.at(pair.up.pop()) == [fx.BackupCaughtUp()]
    pair.backup.handle(PROMOTED)
    assert _sum_of(pair.backup, 0, [0, 1, 2, 3]) == (3, 1)


def test_a_choice_survives_a_second_promotion_before_its_contributions_have_come_again() -> None:
    first = _caught_up(3)
    first.push(0, 3, 2, 0)
    first.deliver()  # some servers have its norm; now it dies
    second = _Pair(3)
    second.primary = first.backup
    second.at(Assigned(primary=True, backup=True, fresh=True))
    second.push(0, 0)  # one has come again
    assert second.at(FillBackup()) == [Chosen(0, (3, 2, 0)), Fill(0)]
    second.deliver()
    second.backup.handle(PROMOTED)
    assert _sum_of(second.backup, 0, [0, 1, 2, 3]) == (3, 2, 0)


def test_a_choice_that_was_lost_with_the_link_is_told_again_with_the_state() -> None:
    pair = _caught_up()
    pair.push(0, 2, 0)
    pair.lose_link()
    assert pair.at(FillBackup()) == [Chosen(0, (2, 0)), Fill(0)]
    pair.deliver()
    assert pair.measured == [(2, 0)]


def test_without_a_link_the_choice_waits_for_it() -> None:
    pair = _caught_up()
    pair.lose_link()
    assert _kept(pair.push(0, 2, 0), Chosen, Finish) == []
    assert pair.at(FillBackup()) == [Chosen(0, (2, 0)), Fill(0)]
    pair.deliver()
    assert pair.measured == [(2, 0)]


@pytest.mark.parametrize(
    "view", [Assigned(True, False, False), Assigned(True, True, True)], ids=["no backup", "another backup"]
)
def test_the_sum_is_finished_when_the_backup_that_was_to_know_the_choice_is_gone(view: Assigned) -> None:
    pair = _caught_up()
    pair.push(0, 2, 0)
    pair.lose_link()
    assert _kept(pair.at(view), Finish) == [Finish(0, 2.0, True, (), 2)]


def test_an_old_acknowledgement_finishes_nothing() -> None:
    pair = _caught_up()
    pair.push(0, 2, 0)
    assert pair.at(Acked(0)) == [], "it is of the state, and the choice may be lost"
    assert pair.measured == []


def test_a_choice_may_overtake_the_update_before_it() -> None:
    """Frames of a few bytes are urgent, and updates are not."""
    pair = _caught_up()
    pair.push(0, 2, 0)
    pair.deliver()
    pair.at(Decide(0, 1.0))
    pair.push(1, 3, 1)
    assert [type(event) for event in pair.down] == [events.Replicated, Chosen]
    pair.down.reverse()
    assert pair.deliver_down() == [], "it has not the version that the choice is for"
    assert _kept(pair.deliver_down(), Acknowledge) == [Acknowledge(1, chosen=True)]
    pair.at(pair.up.pop())
    assert pair.measured == [(2, 0), (3, 1)]


def test_a_demoted_primary_forgets_the_sum_that_waited() -> None:
    pair = _caught_up()
    pair.push(0, 2, 0)
    pair.at(Assigned(primary=False, backup=False, fresh=False))
    pair.at(events.Loaded(0))
    pair.at(PROMOTED)
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
