"""Whether a deal by speed has paid: only how long rounds take decides."""

from __future__ import annotations

import pytest

from rallypoint.core.placing.assigner import PAUSE_S, ROUNDS, Trial

FORMER = {"a": (0, 1), "b": (2, 3)}
REPLICAS = 4


class _Clock:
    """Rounds of so many seconds, one after the other."""

    def __init__(self) -> None:
        self.trial, self.step, self.now = Trial(), 0, 0.0

    def rounds(self, count: int, seconds: float) -> None:
        for _ in range(count):
            for _ in range(REPLICAS):
                self.now += seconds / REPLICAS
                self.trial.computed(self.step, REPLICAS, self.now)
            self.step += 1

    def begin(self, seconds: float = 1.0) -> None:
        self.rounds(ROUNDS + 1, seconds)
        assert self.trial.round(self.now) == pytest.approx(seconds)
        self.trial.begin(FORMER, seconds, self.step + 2)


@pytest.mark.parametrize(("after", "paid"), [(0.5, True), (0.94, True), (0.97, False), (1.0, False), (2.0, False)])
def test_an_assignment_has_paid_if_rounds_are_shorter_by_more_than_a_twentieth(after: float, paid: bool) -> None:
    clock = _Clock()
    clock.begin()
    clock.rounds(2, 100.0)  # before it counts
    clock.rounds(ROUNDS, after)
    assert clock.trial.verdict(clock.now, clock.step + 2) is None
    clock.rounds(1, after)
    assert clock.trial.verdict(clock.now, clock.step + 2) == (None if paid else FORMER)
    assert clock.trial.paid is paid
    assert clock.trial.verdict(clock.now, clock.step + 2) is None, "it is said once"


def test_what_counts_is_the_last_rounds_not_those_of_long_ago() -> None:
    clock = _Clock()
    clock.rounds(50, 0.5)
    clock.rounds(ROUNDS + 1, 2.0)  # somebody has become slow since
    clock.begin(2.0)
    clock.rounds(2 + ROUNDS + 1, 1.0)
    assert clock.trial.verdict(clock.now, clock.step + 2) is None
    assert clock.trial.paid


def test_after_one_that_has_not_paid_the_next_ones_wait_longer_and_longer() -> None:
    clock, waited = _Clock(), []
    for _ in range(3):
        clock.begin()
        clock.rounds(2 + ROUNDS + 1, 1.0)
        assert clock.trial.verdict(clock.now, clock.step + 2) == FORMER
        began = clock.now
        while clock.trial.round(clock.now) is None:
            clock.rounds(1, 1.0)
        waited.append(clock.now - began)
    assert waited == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]


def test_when_somebody_comes_or_goes_what_was_measured_is_stale_and_the_trial_over() -> None:
    clock = _Clock()
    clock.begin()
    clock.trial.restart()
    clock.rounds(ROUNDS, 5.0)
    assert clock.trial.verdict(clock.now, clock.step + 2) is None
    assert clock.trial.round(clock.now) is None
    clock.rounds(1, 5.0)
    assert clock.trial.verdict(clock.now, clock.step + 2) is None
    assert clock.trial.round(clock.now) is not None
