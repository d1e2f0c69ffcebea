"""The shard's machine: first of its name, in replica order, exactly once, whatever the network does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.core.policy import Sync
from rallypoint.core.policy import Verdict as Admission
from rallypoint.core.shard import (
    Add,
    Apply,
    Contribute,
    Decide,
    Drop,
    Effect,
    Event,
    Finish,
    Hold,
    Initialise,
    Install,
    Publish,
    ShardMachine,
    Take,
)

PURE = settings(derandomize=True, deadline=None, max_examples=60)


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

    def summed(self) -> list[tuple[int, int]]:
        """(step, replica) in the order in which they went into the sum."""
        return [(self.tickets[e.ticket].step, self.tickets[e.ticket].replica) for e in self.of(Take, Add)]  # type: ignore[attr-defined]


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


@PURE
@given(_storms(), st.booleans())
def test_contributions_are_summed_in_replica_order_whatever_order_they_arrive_in(
    storm: tuple[int, list[list[tuple[int, int]]]], decides: bool
) -> None:
    replicas, steps = storm
    bench = _ready(replicas, decides)
    _play(bench, steps)
    assert bench.summed() == [(step, replica) for step in range(len(steps)) for replica in range(replicas)]
    firsts = [bench.tickets[effect.ticket].replica for effect in bench.of(Take)]  # type: ignore[attr-defined]
    assert firsts == [0] * len(steps)


@PURE
@given(_storms(), st.booleans())
def test_every_ticket_goes_out_exactly_once(
    storm: tuple[int, list[list[tuple[int, int]]]], decides: bool
) -> None:
    replicas, steps = storm
    bench = _ready(replicas, decides)
    _play(bench, steps)
    out = Counter(effect.ticket for effect in bench.of(Take, Add, Drop))  # type: ignore[attr-defined]
    assert out == Counter(list(bench.tickets))
    held = [effect.ticket for effect in bench.of(Hold)]  # type: ignore[attr-defined]
    assert len(held) == len(set(held))
    assert not {e.ticket for e in bench.of(Drop)} & set(held)  # type: ignore[attr-defined]


@PURE
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
        expected += [Finish(step, total, decides), Apply(step, 0.5 if decides else 1.0), Publish(step + 1)]
    assert outcome == expected
    assert bench.machine.version == len(steps)
    assert bench.machine.missing == list(range(replicas))


@PURE
@given(_storms())
def test_only_contributions_to_a_future_step_are_a_fault(storm: tuple[int, list[list[tuple[int, int]]]]) -> None:
    replicas, steps = storm
    bench = _ready(replicas)
    for arrivals in steps:
        for step, replica in arrivals:
            version = bench.machine.version
            effects = bench.push(step, replica)
            if step > version:
                assert isinstance(effects[0], Drop)
                assert f"step {step}" in effects[0].fault
                assert f"version {version}" in effects[0].fault
            else:
                assert all(effect.fault == "" for effect in effects if isinstance(effect, Drop))


@PURE
@given(st.permutations(list(range(5))))
def test_the_next_in_order_is_added_at_once_and_missing_names_who_has_not_come(arrivals: list[int]) -> None:
    bench = _ready(5)
    for count, replica in enumerate(arrivals):
        come = set(arrivals[:count])
        assert bench.machine.missing == [r for r in range(5) if r not in come]
        in_turn = set(range(replica)) <= come
        first = bench.push(0, replica)[0]
        assert isinstance(first, Take if replica == 0 else Add) if in_turn else isinstance(first, Hold)


@PURE
@given(
    st.permutations(list(range(4))),
    st.lists(st.floats(0.001, 1e4), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_the_total_weight_is_the_sum_in_replica_order_and_bad_replicas_are_named(
    arrivals: list[int], weights: list[float], finite: list[bool]
) -> None:
    bench = _ready(4, decides=True)
    for replica in arrivals:
        bench.push(0, replica, weights[replica], finite[replica])
        bench.push(0, replica, 99.0, not finite[replica])  # a repeat changes neither
    total = ((0.0 + weights[0]) + weights[1] + weights[2]) + weights[3]
    bad = tuple(replica for replica in range(4) if not finite[replica])
    assert bench.of(Finish) == [Finish(0, total, True, bad)]
    assert [effect.weight for effect in bench.of(Take, Add)] == weights  # type: ignore[attr-defined]


def test_weights_and_flags_of_one_step_do_not_leak_into_the_next() -> None:
    bench = _ready(1)
    bench.push(0, 0, 3.0, finite=False)
    bench.push(1, 0, 5.0)
    assert bench.of(Finish) == [Finish(0, 3.0, False, (0,)), Finish(1, 5.0, False, ())]


def test_with_decisions_the_update_waits_and_a_repeat_or_a_stale_decision_is_ignored() -> None:
    bench = _ready(2, decides=True)
    assert bench.handle(Decide(7, 0.1)) == []
    bench.push(0, 0)
    assert bench.push(0, 1)[-1] == Finish(0, 2.0, True)
    assert bench.machine.awaiting
    assert bench.push(0, 1) == [Drop(3)]
    assert bench.handle(Decide(1, 0.1)) == []
    assert bench.handle(Decide(0, 0.25)) == [Apply(0, 0.25), Publish(1)]
    assert bench.handle(Decide(0, 0.5)) == []
    assert bench.machine.version == 1
    bench.push(1, 0)
    bench.push(1, 1)
    assert bench.handle(Decide(0, 0.5)) == []
    assert bench.handle(Decide(1, None)) == [Apply(1, None), Publish(2)]


def test_a_decision_that_comes_before_the_sum_is_finished_is_kept_for_that_step_only() -> None:
    bench = _ready(1, decides=True)
    assert bench.handle(Decide(0, None)) == []
    assert bench.push(0, 0)[1:] == [Finish(0, 1.0, True), Apply(0, None), Publish(1)]
    assert bench.push(1, 0)[1:] == [Finish(1, 1.0, True)]  # the old decision decides nothing
    assert bench.machine.awaiting


def test_a_contribution_to_the_next_step_while_a_decision_is_awaited_is_a_fault() -> None:
    bench = _ready(1, decides=True)
    bench.push(0, 0)
    (dropped,) = bench.push(1, 0)
    assert isinstance(dropped, Drop)
    assert dropped.fault


def test_a_buffer_shard_takes_replica_0_alone() -> None:
    bench = _ready(1)
    (dropped,) = bench.push(0, 1)
    assert isinstance(dropped, Drop)
    assert dropped.fault == "replica 1 does not contribute to this shard (it has 1)"
    assert bench.push(0, 0) == [Take(2, 1.0), Finish(0, 1.0, False), Apply(0, 1.0), Publish(1)]


def test_the_first_parameters_are_installed_and_later_ones_dropped_without_fault() -> None:
    bench = _Bench(ShardMachine(Sync(), 1))
    assert bench.machine.version == -1
    assert bench.handle(Initialise(10)) == [Install(10), Publish(0)]
    assert bench.handle(Initialise(11)) == [Drop(11)]
    bench.push(0, 0)
    assert bench.handle(Initialise(12)) == [Drop(12)]
    assert bench.machine.version == 1


def test_nothing_is_taken_before_the_first_parameters_have_come() -> None:
    bench = _Bench(ShardMachine(Sync(), 2))
    (dropped,) = bench.push(0, 0)
    assert isinstance(dropped, Drop)
    assert "version -1" in dropped.fault


@pytest.mark.parametrize(
    ("step", "replica", "expected"),
    [
        (3, 2, Admission.ADD),
        (3, 3, Admission.HOLD),
        (3, 1, Admission.DROP),  # in the sum
        (3, 4, Admission.DROP),  # held
        (2, 2, Admission.DROP),
        (4, 2, Admission.REJECT),
        (3, 6, Admission.REJECT),
        (2, 6, Admission.REJECT),
    ],
)
def test_sync_admits_by_step_and_turn(step: int, replica: int, expected: Admission) -> None:
    bench = _ready(6)
    for past in range(3):
        for each in range(6):
            bench.push(past, each)
    for each in (0, 1, 4):
        bench.push(3, each)
    assert Sync().admit(bench.machine, step, replica) is expected
    assert not Sync().complete(bench.machine)
