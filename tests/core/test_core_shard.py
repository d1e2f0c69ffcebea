"""The shard's machine: first of its name, by the tree, exactly once, whatever the network does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_play import missing

from rallypoint.core.policy import Async, BoundedStaleness, Policy, Sync
from rallypoint.core.policy import Verdict as Admission
from rallypoint.core.shard import effects as fx
from rallypoint.core.shard import events
from rallypoint.core.shard.effects import Acknowledge, Apply, CaptureShard, Drop, Effect, Fill, Finish, Publish, Take
from rallypoint.core.shard.events import Acked, Assigned, Contribute, Decide, Event, FillBackup, Initialise, Loaded
from rallypoint.core.shard.machine import ShardMachine


def applied(
    step: int, scale: float | None, *, replicate: bool = False, replica: int = 0, oldest: int | None = None
) -> Apply:
    """The update of a round in an aligned job."""
    return Apply(
        step + 1, step, scale, step if oldest is None else oldest, replica=replica, replicate=replicate,
        copies=(False,) * replicate,
    )  # fmt: skip


@dataclass
class _Bench:
    """A machine, and everything that it ever answered."""

    machine: ShardMachine
    tickets: dict[int, Contribute] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def initialise(self) -> None:
        self.handle(Initialise(0))

    def push(self, step: int, replica: int, weight: float = 1.0, finite: bool = True) -> list[Effect]:
        ticket = len(self.tickets) + 1
        self.tickets[ticket] = Contribute(step, replica, weight, ticket, finite)
        return self.handle(self.tickets[ticket])

    def handle(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event)
        self.effects += effects
        return effects

    def of(self, *kinds: type) -> list[Effect]:
        return [effect for effect in self.effects if isinstance(effect, kinds)]

    def summed(self) -> list[object]:
        """Each finished sum as nested pairs (left, right) of leaves "step/replica"."""
        parts: dict[int, object] = {}
        sums: list[object] = []
        for effect in self.effects:
            match effect:
                case Take(ticket=ticket, at=at):
                    assert at not in parts
                    parts[at] = f"{self.tickets[ticket].step}/{self.tickets[ticket].replica}"
                case fx.Merge(left=left, right=right):
                    parts[left] = (parts[left], parts.pop(right))
                case Finish():
                    assert set(parts) == {0}
                    sums.append(parts.pop(0))
        return sums


def _ready(expected: int, decides: bool = False) -> _Bench:
    bench = _Bench(ShardMachine(Sync(), expected, decides))
    bench.initialise()
    return bench


@st.composite
def _storms(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """R, and for every step the arrivals: each replica, with repeats, old steps and future ones mixed in."""
    replicas = draw(st.integers(1, 6))
    steps = []
    for step in range(draw(st.integers(1, 4))):
        own = [(step, replica) for replica in range(replicas)]
        strays = st.tuples(st.integers(0, step), st.integers(0, replicas - 1))
        early = st.tuples(st.integers(step + 2, step + 5), st.integers(0, replicas - 1))
        others = draw(st.lists(st.one_of(strays, strays, early), max_size=8))
        steps.append(draw(st.permutations(own + others)))
    return replicas, steps


def _play(bench: _Bench, steps: list[list[tuple[int, int]]]) -> None:
    for step, arrivals in enumerate(steps):
        for place in arrivals:
            bench.push(*place, weight=1.0 + place[1])
        bench.handle(Decide(step, 0.5))


@given(_storms(), st.booleans())
def test_contributions_are_summed_by_the_tree_whatever_order_they_arrive_in(
    storm: tuple[int, list[list[tuple[int, int]]]], decides: bool
) -> None:
    replicas, steps = storm
    bench = _ready(replicas, decides)
    _play(bench, steps)
    trees: dict[int, Callable[[list[str]], object]] = {
        1: lambda r: r[0], 2: lambda r: (r[0], r[1]), 3: lambda r: ((r[0], r[1]), r[2]),
        4: lambda r: ((r[0], r[1]), (r[2], r[3])), 5: lambda r: (((r[0], r[1]), (r[2], r[3])), r[4]),
        6: lambda r: (((r[0], r[1]), (r[2], r[3])), (r[4], r[5])),
    }
    leaves = [[f"{step}/{replica}" for replica in range(replicas)] for step in range(len(steps))]
    assert bench.summed() == [trees[replicas](of_step) for of_step in leaves]
    assert not bench.of(fx.Add, fx.Hold)


@given(_storms(), st.booleans())
def test_every_ticket_goes_out_exactly_once(storm: tuple[int, list[list[tuple[int, int]]]], decides: bool) -> None:
    replicas, steps = storm
    bench = _ready(replicas, decides)
    _play(bench, steps)
    out = Counter(effect.ticket for effect in bench.of(Take, fx.Add, Drop))  # type: ignore[attr-defined]
    assert out == Counter(list(bench.tickets))
    held = [effect.ticket for effect in bench.of(fx.Hold)]  # type: ignore[attr-defined]
    assert len(held) == len(set(held))
    assert not {e.ticket for e in bench.of(Drop)} & set(held)  # type: ignore[attr-defined]


@given(_storms(), st.booleans())
def test_there_is_one_update_per_step_and_versions_rise_by_one(
    storm: tuple[int, list[list[tuple[int, int]]]], decides: bool
) -> None:
    replicas, steps = storm
    bench = _ready(replicas, decides)
    _play(bench, steps)
    total = sum(1.0 + replica for replica in range(replicas))
    outcome = [effect for effect in bench.effects if isinstance(effect, (Finish, Apply, Publish))]
    expected: list[Effect] = [Publish(0)]
    for step in range(len(steps)):
        finished = Finish(step, total, decides, (), replicas)
        expected += [finished, applied(step, 0.5 if decides else 1.0), Publish(step + 1)]
    assert outcome == expected
    assert bench.machine.version == len(steps)
    assert missing(bench.machine) == list(range(replicas))


@given(_storms())
def test_only_a_replica_that_does_not_contribute_is_a_fault(storm: tuple[int, list[list[tuple[int, int]]]]) -> None:
    replicas, steps = storm
    bench = _ready(replicas)
    for arrivals in steps:
        for step, replica in arrivals:
            before = (bench.machine.version, missing(bench.machine))
            (stranger,) = bench.push(step, replicas + replica)
            fault = f"replica {replicas + replica} does not contribute to this shard (it has {replicas})"
            assert stranger == Drop(len(bench.tickets), fault)
            assert (bench.machine.version, missing(bench.machine)) == before
            effects = bench.push(step, replica)
            if step > before[0]:  # its worker may have seen the version of a newer primary
                assert effects == [Drop(len(bench.tickets))]
                assert (bench.machine.version, missing(bench.machine)) == before
            else:
                assert all(effect.fault == "" for effect in effects if isinstance(effect, Drop))


@given(st.permutations(list(range(5))))
def test_missing_names_who_has_not_come_and_only_what_waits_for_a_lower_replica_is_early(arrivals: list[int]) -> None:
    bench = _ready(5)
    early: set[int] = set()
    for count, replica in enumerate(arrivals):
        come = set(arrivals[:count])
        assert missing(bench.machine) == [r for r in range(5) if r not in come]
        in_turn = set(range(replica)) <= come
        taken, *others = bench.push(0, replica)
        assert taken == Take(count + 1, 1.0, None, replica, 1, not in_turn)
        early |= set() if in_turn else {replica}
        on_time = [effect.at for effect in others if isinstance(effect, fx.OnTime)]
        assert len(on_time) == len(set(on_time))
        assert set(on_time) <= early
        early -= set(on_time)
        come.add(replica)
        assert not any(set(range(at)) <= come for at in early)  # nobody whose turn it is is slowed down
    assert not early


def test_a_larger_block_supersedes_what_it_covers_and_what_is_covered_is_a_repeat() -> None:
    bench = _ready(6)
    bench.push(0, 1)
    bench.push(0, 3)
    block = Contribute(0, 0, 4.5, 3, count=4)
    assert bench.handle(block) == [fx.Discard(1), fx.OnTime(1), fx.Discard(3), fx.OnTime(3), Take(3, 4.5, None, 0, 4)]
    for replica, count in ((0, 1), (2, 1), (2, 2), (0, 4)):
        assert bench.handle(Contribute(0, replica, 1.0, 9, count=count)) == [Drop(9)]
    assert bench.handle(Contribute(0, 4, 2.0, 4, count=2)) == [
        Take(4, 2.0, None, 4, 2), fx.Merge(0, 4), Finish(0, 6.5, False, (), 6), applied(0, 1.0), Publish(1),
    ]  # fmt: skip


@pytest.mark.parametrize(("replica", "count"), [(0, 3), (1, 2), (2, 4), (4, 4), (0, 8), (0, 0)])
def test_what_is_no_block_of_the_tree_is_the_senders_fault(replica: int, count: int) -> None:
    (dropped,) = _ready(6).handle(Contribute(0, replica, 1.0, 1, count=count))
    assert isinstance(dropped, Drop)
    assert "no block" in dropped.fault


def test_blocks_are_not_taken_where_contributions_are_counted_one_by_one() -> None:
    for policy in (Sync(quorum=2), Async(), BoundedStaleness(1)):
        machine = ShardMachine(policy, 4)
        machine.handle(Initialise(0))
        (dropped,) = machine.handle(Contribute(0, 0, 2.0, 1, count=2))
        assert isinstance(dropped, Drop)
        assert dropped.fault == "replicas 0 to 1: in this mode, one replica contributes at a time"


def test_a_block_that_is_not_finite_names_all_of_its_replicas() -> None:
    bench = _ready(4)
    bench.handle(Contribute(0, 2, 2.0, 1, finite=False, count=2))
    bench.handle(Contribute(0, 0, 2.0, 2, count=2))
    assert bench.of(Finish) == [Finish(0, 4.0, False, (2, 3), 4)]


@given(
    st.permutations(list(range(4))),
    st.lists(st.floats(0.001, 1e4), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_the_total_weight_is_added_by_the_tree_and_bad_replicas_are_named(
    arrivals: list[int], weights: list[float], finite: list[bool]
) -> None:
    bench = _ready(4, decides=True)
    for replica in arrivals:
        bench.push(0, replica, weights[replica], finite[replica])
        bench.push(0, replica, 99.0, not finite[replica])  # a repeat changes neither
    total = (weights[0] + weights[1]) + (weights[2] + weights[3])
    bad = tuple(replica for replica in range(4) if not finite[replica])
    assert bench.of(Finish) == [Finish(0, total, True, bad, 4)]
    assert {e.at: e.weight for e in bench.of(Take)} == dict(enumerate(weights))  # type: ignore[attr-defined]


def test_weights_and_flags_of_one_step_do_not_leak_into_the_next() -> None:
    bench = _ready(1)
    bench.push(0, 0, 3.0, finite=False)
    bench.push(1, 0, 5.0)
    assert bench.of(Finish) == [Finish(0, 3.0, False, (0,), 1), Finish(1, 5.0, False, (), 1)]


def test_with_decisions_the_update_waits_and_a_repeat_or_a_stale_decision_is_ignored() -> None:
    bench = _ready(2, decides=True)
    assert bench.handle(Decide(7, 0.1)) == []
    bench.push(0, 0)
    assert bench.push(0, 1)[-1] == Finish(0, 2.0, True, (), 2)
    assert bench.machine.awaiting
    assert bench.push(0, 1) == [Drop(3)]
    assert bench.handle(Decide(1, 0.1)) == []
    assert bench.handle(Decide(0, 0.25)) == [applied(0, 0.25), Publish(1)]
    assert bench.handle(Decide(0, 0.5)) == []
    assert bench.machine.version == 1
    bench.push(1, 0)
    bench.push(1, 1)
    assert bench.handle(Decide(0, 0.5)) == []
    assert bench.handle(Decide(1, None)) == [applied(1, None), Publish(2)]


def test_a_decision_that_comes_before_the_sum_is_finished_is_kept_for_that_step_only() -> None:
    bench = _ready(1, decides=True)
    assert bench.handle(Decide(0, None)) == []
    assert bench.push(0, 0)[1:] == [Finish(0, 1.0, True, (), 1), applied(0, None), Publish(1)]
    assert bench.push(1, 0)[1:] == [Finish(1, 1.0, True, (), 1)]  # the old decision decides nothing
    assert bench.machine.awaiting


def test_a_contribution_to_the_next_step_while_a_decision_is_awaited_is_dropped_without_fault() -> None:
    bench = _ready(1, decides=True)
    bench.push(0, 0)
    assert bench.push(1, 0) == [Drop(2)]
    assert bench.push(1, 1) == [Drop(3, "replica 1 does not contribute to this shard (it has 1)")]
    assert bench.machine.awaiting
    assert bench.handle(Decide(0, 0.5)) == [applied(0, 0.5), Publish(1)]
    assert bench.push(1, 0)[0] == Take(4, 1.0)  # sent again, it counts


def test_the_first_parameters_are_installed_and_later_ones_dropped_without_fault() -> None:
    bench = _Bench(ShardMachine(Sync(), 1))
    assert bench.machine.version == -1
    assert bench.handle(Initialise(10)) == [fx.InstallFirst(10), Publish(0)]
    assert bench.handle(Initialise(11)) == [Drop(11)]
    bench.push(0, 0)
    assert bench.handle(Initialise(12)) == [Drop(12)]
    assert bench.machine.version == 1


def test_nothing_is_taken_before_the_first_parameters_have_come_and_nobody_is_to_blame() -> None:
    bench = _Bench(ShardMachine(Sync(), 2))
    assert bench.push(0, 0) == [Drop(1)]  # sent under an older view: its worker will send it again


@pytest.mark.parametrize(
    ("step", "replica", "quorum", "expected"),
    [
        (3, 2, None, Admission.ADD),
        (3, 3, None, Admission.ADD),
        (3, 3, 4, Admission.ADD),
        (3, 1, 4, Admission.DROP),  # in the sum
        (3, 3, 3, Admission.DROP),  # three have come
        (2, 2, None, Admission.DROP),
        (4, 2, None, Admission.REJECT),
        (3, 6, None, Admission.REJECT),
        (2, 6, None, Admission.REJECT),
    ],
)
def test_sync_admits_by_step_and_replica(step: int, replica: int, quorum: int | None, expected: Admission) -> None:
    bench = _Bench(ShardMachine(Sync(quorum), 6, decides=True))  # a decision keeps finished sums waiting
    bench.initialise()
    for generation in range(3):
        for each in range(6):
            bench.push(generation, each)
        bench.handle(Decide(generation, 1.0))
    for each in (0, 1, 4):
        bench.push(3, each)
    assert Sync(quorum).admit(bench.machine, step, replica) is expected


# ---- primary and backup ----


class Pair:
    """A primary and its backup, and the link between them: what is under way arrives in order, when a test says so."""

    def __init__(self, expected: int = 1, decides: bool = False, quorum: int | None = None) -> None:
        self.primary, self.backup = (
            ShardMachine(Sync(quorum), expected, decides, primary=primary, chooses=quorum is not None, rounds=99)
            for primary in (True, False)
        )
        self.down: list[Event] = []  # to the backup
        self.up: list[Event] = []  # to the primary
        self.published: list[int] = []
        self.effects: list[Effect] = []
        self.measured: list[tuple[int, ...]] = []  # whose contributions are in the sums that were finished
        self.tickets = 0
        self.out: Counter[int] = Counter()
        self.run(Assigned(primary=True, backup=True, fresh=True))
        self.at_backup(Assigned(primary=False, backup=False, fresh=False))

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def run(self, event: Event) -> list[Effect]:
        effects = self.primary.handle(event)
        self.primary.validate()
        self._count(effects)
        for effect in effects:
            match effect:
                case events.Chosen():
                    self.down.append(effect)
                case Finish():
                    self.measured.append(tuple(c.replica for c in self.primary._sum.contributions))
                case Publish(version=version):
                    self.published.append(version)
                case Fill(version=version):
                    self.down.append(Loaded(version))
                case Apply(step=step, scale=scale, replicate=True):
                    self.down.append(events.Replicated(step, scale is None, self.ticket()))
        self.effects += effects
        return effects

    def at_backup(self, event: Event) -> list[Effect]:
        effects = self.backup.handle(event)
        self.backup.validate()
        self._count(effects)
        self.up += [Acked(e.version, e.chosen) for e in effects if isinstance(e, Acknowledge)]
        return effects

    def deliver_down(self) -> list[Effect]:
        """The first that is under way to the backup comes."""
        return self.at_backup(self.down.pop(0))

    def lose_link(self) -> None:
        self.down.clear()
        self.up.clear()
        self.primary.copies.backup.link_lost()

    def _count(self, effects: list[Effect]) -> None:
        self.out.update(e.ticket for e in effects if isinstance(e, (fx.InstallFirst, Take, fx.Add, Drop)))

    def step(self, step: int) -> list[Effect]:
        for replica in range(self.primary.expected - 1):
            self.run(Contribute(step, replica, 1.0, self.ticket()))
        return self.run(Contribute(step, self.primary.expected - 1, 1.0, self.ticket()))

    def deliver(self) -> None:
        while self.down or self.up:
            if self.down:
                self.deliver_down()
            if self.up:
                self.run(self.up.pop(0))


def caught_up(*of: Any, **more: Any) -> Pair:
    pair = Pair(*of, **more)
    pair.run(Initialise(pair.ticket()))
    pair.run(FillBackup())
    pair.deliver()
    assert pair.primary.copies.backup.caught_up
    return pair


def test_before_its_first_acknowledgement_a_backup_holds_nothing_up() -> None:
    pair = Pair()
    assert pair.run(FillBackup()) == []  # there is nothing to send yet
    assert pair.run(Initialise(pair.ticket())) == [fx.InstallFirst(1), Publish(0)]
    assert pair.primary.copies.backup.needs_sync
    assert pair.step(0)[1:] == [Finish(0, 1.0, False, (), 1), applied(0, 1.0), Publish(1)]
    assert pair.run(FillBackup()) == [Fill(1)]
    assert pair.run(FillBackup()) == []
    assert pair.step(1)[1:] == [Finish(1, 1.0, False, (), 1), applied(1, 1.0, replicate=True), Publish(2)]
    assert not pair.primary.copies.backup.caught_up


def test_a_backup_has_caught_up_once_it_holds_all_that_has_been_published() -> None:
    pair = Pair()
    pair.run(Initialise(pair.ticket()))
    pair.run(FillBackup())
    pair.step(0)
    assert pair.run(Acked(0)) == []  # version 1 has been published already
    assert not pair.primary.copies.backup.caught_up
    pair.step(1)
    assert pair.published == [0, 1]  # from the first acknowledgement on it is waited for
    assert pair.run(Acked(1)) == [fx.BackupCaughtUp()]
    assert pair.run(Acked(2)) == [Publish(2)]


@given(st.integers(1, 3), st.booleans(), st.lists(st.sampled_from(["step", "down", "up", "cut", "fill"]), max_size=60))
def test_whatever_happens_to_the_link_what_is_published_is_on_the_backup_that_may_be_promoted(
    expected: int, decides: bool, happenings: list[str]
) -> None:
    pair = Pair(expected, decides)
    pair.run(Initialise(pair.ticket()))
    for what in happenings:
        if what == "step" and pair.primary.version == pair.primary.published:
            pair.step(pair.primary.version)
            pair.run(Decide(pair.primary.version, None))
        elif what == "down" and pair.down:
            pair.deliver_down()
        elif what == "up" and pair.up:
            pair.run(pair.up.pop(0))
        elif what == "cut":
            for lost in pair.down:
                if isinstance(lost, events.Replicated):
                    pair.out[lost.ticket] += 1
            pair.lose_link()
        elif what == "fill":
            pair.run(FillBackup())
        if pair.primary.copies.backup.caught_up:
            assert pair.backup.version >= pair.primary.published
        assert pair.backup.version <= pair.primary.version
    assert pair.published == list(range(len(pair.published)))
    pair.run(FillBackup())
    pair.deliver()
    assert pair.primary.published == pair.primary.version == pair.backup.version
    assert pair.out == Counter(range(1, pair.tickets + 1))  # every payload has gone out once, on one side or the other


def test_after_a_lost_link_the_backup_gets_the_whole_state_again_and_nothing_passes_it_by() -> None:
    pair = caught_up()
    pair.step(0)
    pair.lose_link()
    assert pair.primary.copies.backup.needs_sync
    assert pair.primary.copies.backup.caught_up  # it may still be promoted: it holds all that has been published
    assert pair.run(Acked(1)) == []  # from the link that was lost
    assert pair.run(FillBackup()) == [Fill(1)]
    assert pair.published == [0]
    pair.deliver()
    assert pair.published == [0, 1]
    assert fx.BackupCaughtUp() not in pair.effects[-2:]  # that was said


def test_a_new_backup_starts_from_nothing_and_holds_nothing_up() -> None:
    pair = caught_up()
    pair.step(0)
    assert pair.published == [0]
    assert pair.run(Assigned(primary=True, backup=True, fresh=True)) == [Publish(1)]
    assert (pair.primary.copies.backup.caught_up, pair.primary.copies.backup.needs_sync) == (False, True)
    assert pair.run(Acked(1)) == []  # from the one before
    assert pair.step(1)[-1] == Publish(2)


def test_without_a_backup_what_waited_for_it_is_published() -> None:
    pair = caught_up()
    pair.step(0)
    assert pair.run(Assigned(primary=True, backup=False, fresh=False)) == [Publish(1)]
    assert (pair.primary.copies.backup.caught_up, pair.primary.copies.backup.needs_sync) == (False, False)
    assert pair.run(FillBackup()) == []


def test_a_view_that_changes_nothing_for_the_shard_changes_nothing() -> None:
    pair = caught_up(expected=2)
    pair.run(Contribute(0, 1, 1.0, pair.ticket()))
    assert pair.run(Assigned(primary=True, backup=True, fresh=False)) == []
    assert pair.at_backup(Assigned(primary=False, backup=False, fresh=False)) == []
    assert pair.primary.copies.backup.caught_up
    assert missing(pair.primary) == [0]


def test_a_backup_applies_the_same_update_and_acknowledges_it() -> None:
    backup = ShardMachine(Sync(), 3, decides=True, primary=False)
    assert backup.handle(Loaded(4)) == [Acknowledge(4)]
    assert backup.handle(events.Replicated(4, False, 1)) == [Take(1, 1.0), applied(4, 1.0), Acknowledge(5)]
    assert backup.handle(events.Replicated(5, True, 2)) == [Take(2, 1.0), applied(5, None), Acknowledge(6)]
    assert backup.version == 6


def test_a_backup_drops_what_it_has_and_what_comes_before_its_state() -> None:
    backup = ShardMachine(Sync(), 1, primary=False)
    assert backup.handle(events.Replicated(0, False, 1)) == [Drop(1)]
    backup.handle(Loaded(4))
    assert backup.handle(events.Replicated(3, False, 2)) == [Drop(2), Acknowledge(4)]
    assert backup.handle(events.Replicated(6, False, 3)) == [Drop(3)]
    assert backup.version == 4


def test_a_primary_takes_no_update_from_another_that_was_replaced() -> None:
    pair = caught_up()
    assert pair.run(events.Replicated(0, False, 9)) == [Drop(9)]


def test_a_backup_takes_no_contribution_no_first_weights_no_decision_and_no_snapshot() -> None:
    backup = ShardMachine(Sync(), 1, decides=True, primary=False)
    assert backup.handle(Initialise(1)) == [Drop(1)]
    backup.handle(Loaded(2))
    assert backup.handle(Contribute(2, 0, 1.0, 2)) == [Drop(2)]
    assert backup.handle(Decide(2, 0.5)) == []
    assert backup.handle(events.CaptureAt(5)) == [CaptureShard(6, missed=True)]
    assert backup.handle(FillBackup()) == []
    assert backup.handle(Acked(2)) == []


def test_a_promoted_backup_publishes_what_it_holds_and_goes_on_from_there() -> None:
    pair = caught_up(expected=2)
    pair.step(0)
    pair.deliver()
    assert pair.published == [0, 1]
    survivor = _Bench(pair.backup)
    assert survivor.handle(Assigned(primary=True, backup=False, fresh=False)) == [fx.Abandon(), Publish(1)]
    survivor.push(1, 1)
    survivor.push(1, 0)
    assert survivor.of(Publish) == [Publish(1), Publish(2)]


def test_a_demoted_primary_drops_its_sum_and_waits_for_the_state() -> None:
    pair = caught_up(expected=3)
    held = [pair.ticket(), pair.ticket()]
    pair.run(Contribute(0, 2, 1.0, held[0]))
    pair.run(Contribute(0, 0, 1.0, held[1]))
    assert pair.run(Assigned(primary=False, backup=False, fresh=False)) == [fx.Abandon()]
    assert (pair.primary.version, pair.primary.published, pair.primary.copies.backup.caught_up) == (-1, -1, False)
    assert missing(pair.primary) == [0, 1, 2]
    assert pair.primary.handle(Loaded(7)) == [Acknowledge(7)]
    assert pair.primary.handle(events.Replicated(7, False, 50)) == [Take(50, 1.0), applied(7, 1.0), Acknowledge(8)]


@given(st.integers(1, 5), st.data())
def test_every_ticket_leaves_once_whenever_the_primary_is_demoted_and_promoted_again(
    expected: int, data: st.DataObject
) -> None:
    bench = _ready(expected)
    for _ in range(data.draw(st.integers(0, 20))):
        if data.draw(st.integers(0, 5)):
            bench.push(max(0, bench.machine.version), data.draw(st.integers(0, expected - 1)))
        else:
            primary = data.draw(st.booleans())
            bench.handle(Assigned(primary, backup=False, fresh=False))
            if bench.machine.version < 0:
                bench.handle(Loaded(2))
    bench.handle(Assigned(primary=False, backup=False, fresh=False))
    out = Counter(effect.ticket for effect in bench.of(Take, fx.Add, Drop))  # type: ignore[attr-defined]
    assert out == Counter(list(bench.tickets))


# ---- snapshots ----


@given(st.integers(0, 5), st.integers(0, 8))
def test_a_capture_happens_at_exactly_its_version_or_is_too_late(now: int, wanted: int) -> None:
    bench = _ready(1)
    for step in range(now):
        bench.push(step, 0)
    effects = bench.handle(events.CaptureAt(wanted))
    if wanted < now:
        assert effects == [CaptureShard(now, missed=True)]
        return
    assert effects == ([CaptureShard(wanted)] if wanted == now else [])
    for step in range(now, 10):
        effects = bench.push(step, 0)
        captured = [effect for effect in effects if isinstance(effect, CaptureShard)]
        assert captured == ([CaptureShard(wanted)] if step + 1 == wanted else [])


def test_a_version_is_captured_before_it_is_published_and_even_while_the_backup_is_waited_for() -> None:
    pair = caught_up()
    pair.run(events.CaptureAt(1))
    assert pair.step(0)[2:] == [applied(0, 1.0, replicate=True), CaptureShard(1)]
    fresh = _Bench(ShardMachine(Sync(), 1))
    assert fresh.handle(events.CaptureAt(0)) == []
    assert fresh.handle(Initialise(1)) == [fx.InstallFirst(1), CaptureShard(0), Publish(0)]
    restored = ShardMachine(Sync(), 1)
    restored.handle(events.CaptureAt(3))
    assert restored.handle(Loaded(3)) == [CaptureShard(3), Publish(3)]


@pytest.mark.parametrize("policy", [Async(), BoundedStaleness(2)], ids=repr)
def test_a_capture_that_comes_while_a_shard_of_a_streaming_job_is_restored_is_made_when_it_is(policy: Policy) -> None:
    """Versions count updates there: the version that names the snapshot may never be one of the shard."""
    machine = ShardMachine(policy, 2, rounds=9)
    assert machine.handle(events.CaptureAt(4)) == []
    assert CaptureShard(9, clocks=(5, 4)) in machine.handle(Loaded(9, (5, 4)))
    assert not [effect for effect in machine.handle(Contribute(5, 0, 1.0, 1)) if isinstance(effect, CaptureShard)]


def test_a_capture_is_forgotten_with_the_role() -> None:
    bench = _ready(1)
    bench.handle(events.CaptureAt(1))
    bench.handle(Assigned(primary=False, backup=False, fresh=False))
    bench.handle(Loaded(0))
    bench.handle(Assigned(primary=True, backup=False, fresh=False))
    bench.push(0, 0)
    assert bench.of(CaptureShard) == []


def test_what_is_being_folded_when_a_backup_is_filled_is_in_its_state() -> None:
    primary = ShardMachine(Async(fold=3), 3, rounds=9)
    primary.handle(Assigned(primary=True, backup=True, fresh=True))
    primary.handle(Initialise(1))
    for replica in (0, 2):
        effects = primary.handle(Contribute(0, replica, 1.0, ticket=2 + replica))
    assert effects[-1] == fx.Gather(), "one more may come, or the owner's idle moment"
    *folded, fill = primary.handle(FillBackup())
    (applied,) = (effect for effect in folded if isinstance(effect, Apply))
    assert (applied.version, applied.replicate) == (1, False)
    assert fill == Fill(1, clocks=(1, 0, 1))
    assert primary.clocks.steps == [1, 0, 1], "told with the state: the backup drops both if they come again"
    assert primary.handle(events.Fold()) == []


def test_a_quorum_s_latecomers_are_dropped_once_and_are_no_repeats() -> None:
    machine = ShardMachine(Sync(quorum=2), 3, rounds=9)
    machine.handle(Initialise(1))
    machine.handle(Contribute(0, 0, 1.0, 2))
    machine.handle(Contribute(0, 2, 1.0, 3))
    assert (machine.tally.applied, machine.tally.dropped, machine.tally.repeats) == (2, 1, 0)
    assert machine.handle(Contribute(0, 1, 1.0, 4)) == [Drop(4)]
    assert (machine.tally.applied, machine.tally.dropped, machine.tally.repeats) == (2, 1, 0)
    for ticket, replica in ((5, 1), (6, 0)):
        assert machine.handle(Contribute(0, replica, 1.0, ticket)) == [Drop(ticket)]
    assert machine.tally.repeats == 2
    machine.validate()


def test_an_update_that_is_decided_before_a_third_server_is_filled_is_not_sent_to_it() -> None:
    """One list of effects may have both: with a view that names the third server, a verdict that was known already."""
    primary = ShardMachine(Sync(), 1, rounds=9)
    primary.handle(Assigned(primary=True, backup=True, fresh=True, incoming=True, incoming_fresh=True))
    primary.handle(Initialise(1))
    assert primary.handle(FillBackup()) == [Fill(0)]
    update = [effect for effect in primary.handle(Contribute(0, 0, 1.0, ticket=2)) if isinstance(effect, Apply)]
    assert primary.handle(FillBackup(incoming=True)) == [Fill(1, True)]
    assert [effect.copies for effect in update] == [(False,)]
    update = [effect for effect in primary.handle(Contribute(1, 0, 1.0, ticket=3)) if isinstance(effect, Apply)]
    assert [effect.copies for effect in update] == [(False, True)]
