"""Tuning a knob: ends near the best value, is never slower for longer than a trial, and says what it did."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_core_stop import _begun

from rallypoint.core.cluster.terms import SnapshotPeriod
from rallypoint.core.placing.assigner import PAUSE_S, ROUNDS, Trial
from rallypoint.core.plan import tuning
from rallypoint.core.plan.failures import LONGEST_S, PRIOR_S, SHORTEST_S, TunedPeriod, daly_period
from rallypoint.core.plan.tuning import MEASURED, WARM_UP, Facts, Knob, Tuner, Window, in_flight_knob, pace_knob

Cost = Callable[[float], float]


def knob(*candidates: float, start: float = 0.0) -> Knob:
    return Knob("pace_mbit", "Mbit/s", start, candidates)


def played(tuner: Tuner, cost: Cost, noise: float = 0.0, seed: int = 0) -> tuple[list[float], list[str]]:
    """Step until the tuner has settled: the values that counted, step by step, and the log."""
    rng, values, log = random.Random(seed), list[float](), list[str]()
    while not tuner.settled:
        values.append(tuner.value)
        decided = tuner.stepped(cost(tuner.value) * (1 + noise * rng.random()))
        if decided is not None:
            assert decided.value == tuner.value
            log += [decided.said] * bool(decided.said)
        assert len(values) < 2000, "it never settles"
    return values, log


def paced(rate: float, at_once: float) -> Cost:
    """Seconds of a step of a job whose link carries `rate`: unpaced `at_once`; below the rate, as the pace says."""
    return lambda pace: at_once if pace in (0.0, *()) or pace > rate else 100.0 / pace


def test_a_pace_just_below_the_links_rate_is_found_and_kept() -> None:
    tuner = Tuner(knob(60.0, 70.0, 80.0, 90.0, 110.0))
    _, log = played(tuner, paced(100.0, 1.5))
    assert tuner.best == tuner.value == 90.0
    assert log[:2] == ["pace_mbit 60 Mbit/s is tried", "pace_mbit 60 Mbit/s: 0.90 x (2 steps), taken back"]
    (kept,) = (line for line in log if ", kept" in line)
    assert kept.startswith(
        "pace_mbit 90 Mbit/s in place of no pace_mbit: 1.35 x (12 steps, beside 12 of 1.5 s), kept; "
    )
    assert log[-1].endswith("tuning has ended: pace_mbit 90 Mbit/s")


def test_where_nothing_helps_the_start_stays() -> None:
    tuner = Tuner(knob(60.0, 70.0, 80.0))
    _, log = played(tuner, lambda pace: 1.0 if pace == 0 else 1.2)
    assert tuner.best == 0.0
    assert log[-1] == "tuning has ended: no pace_mbit"
    assert not any("kept" in line or "stays" in line for line in log)


@given(
    costs=st.lists(st.floats(0.5, 3.0), min_size=2, max_size=9), noise=st.sampled_from([0.0, 0.02, 0.05]),
    seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_on_any_cost_surface_it_ends_within_a_twentieth_of_the_best_and_is_never_slow_for_long(
    costs: list[float], noise: float, seed: int
) -> None:
    candidates = tuple(float(n) for n in range(1, len(costs)))
    cost = {float(n): seconds for n, seconds in enumerate(costs)}
    tuner = Tuner(knob(*candidates))
    values, _ = played(tuner, cost.__getitem__, noise, seed)
    assert cost[tuner.best] <= min(costs) * (1.05 + noise)
    slow = longest = 0
    for before, value in zip([0.0, *values], values, strict=False):
        slow = slow + 1 if cost[value] > costs[0] * 1.02 and value == before else int(cost[value] > costs[0] * 1.02)
        longest = max(longest, slow)
    assert longest <= WARM_UP + MEASURED
    assert cost[tuner.best] <= costs[0]


def test_when_members_change_the_value_in_force_comes_back_and_the_trial_begins_anew() -> None:
    tuner = Tuner(knob(60.0, 90.0))
    while tuner.value != 90.0:
        tuner.stepped(1.5)
    assert tuner.disturbed() == tuning.Decision(0.0, "")
    assert tuner.disturbed() is None  # it counts already
    played(tuner, paced(100.0, 1.5))
    assert tuner.best == 90.0


@given(when=st.lists(st.integers(1, 60), max_size=5))
def test_disturbances_at_any_time_lose_no_candidate(when: list[int]) -> None:
    tuner, cost = Tuner(knob(60.0, 75.0, 90.0)), paced(100.0, 1.5)
    for steps in when:
        for _ in range(steps):
            tuner.stepped(cost(tuner.value))
        tuner.disturbed()
        assert tuner.value == tuner.best
    played(tuner, cost)
    assert tuner.best == 90.0


def test_a_pace_that_limits_nothing_twice_ends_the_search_upward() -> None:
    tuner = Tuner(Knob("pace_mbit", "Mbit/s", 0.0, (80.0, 90.0, 110.0, 120.0, 130.0, 140.0), rising=True))
    values, log = played(tuner, paced(100.0, 1.5))
    assert tuner.best == 90.0
    assert max(values) == 120.0
    assert any("120 Mbit/s: 1.00 x (4 steps), taken back; higher ones would limit nothing" in line for line in log)


def test_a_candidate_is_compared_with_the_last_steps_beside_it_and_not_with_the_first() -> None:
    """All steps become slower by half after the first; the value that gains a tenth is found none the less."""
    tuner, steps = Tuner(knob(1.0, 2.0, 3.0, 4.0)), 0
    while not tuner.settled:
        steps += 1
        tuner.stepped((1.0 if steps < 16 else 1.5) * (0.9 if tuner.value == 4.0 else 1.0))
        assert steps < 2000
    assert tuner.best == 4.0


def test_candidates_begin_above_the_rate_that_steps_reach() -> None:
    found = pace_knob(0.0, Facts(25_000_000, workers=8, servers=8, seconds=1.5))  # 133 Mbit/s
    assert min(found.candidates) > 133
    assert any(180 <= pace <= 200 for pace in found.candidates)
    fewer = pace_knob(0.0, Facts(25_000_000, workers=8, servers=4, seconds=1.5))
    assert fewer.candidates[0] == pytest.approx(288, rel=0.01)
    assert 0.0 in pace_knob(50.0, Facts(25_000_000, workers=8, servers=8, seconds=1.5)).candidates
    told = pace_knob(0.0, Facts(25_000_000, workers=8, servers=8, seconds=1.5, told_mbit=200.0))
    assert told.candidates == (176.0, 186.0, 194.0)


def test_what_may_be_in_flight_is_tried_around_ten_milliseconds_of_the_rate() -> None:
    found = in_flight_knob(0.0, Facts(25_000_000, workers=8, servers=8, seconds=1.5))  # 167 Mbit/s are assumed
    assert found.candidates == (256 << 10, 512 << 10, 128 << 10, 1 << 20)
    assert found.phrase(256 << 10) == "in_flight_bytes 256 KiB"
    assert found.phrase(0.0) == "no in_flight_bytes"
    slow = in_flight_knob(0.0, Facts(250_000, workers=8, servers=8, seconds=1.5))
    assert slow.candidates == (128 << 10,), "a link has 16 KiB at least"
    given = in_flight_knob(256.0 * 1024, Facts(25_000_000, workers=8, servers=8, seconds=1.5))
    assert given.candidates == (0.0, 512 << 10, 128 << 10, 1 << 20)


@pytest.mark.parametrize("knob", [in_flight_knob, pace_knob])
@pytest.mark.parametrize("nbytes", [25_000, 25_000_000])
def test_what_is_tried_are_floats_as_in_every_members_view(knob: Callable[[float, Facts], Knob], nbytes: int) -> None:
    found = knob(0.0, Facts(nbytes, workers=8, servers=8, seconds=1.5))
    assert {type(value) for value in found.candidates} == {float}


def test_a_window_leaves_out_as_many_steps_as_certainty_allows() -> None:
    assert Window.of([float(n) for n in range(12)]) == (5.5, 2.0, 9.0, 12)
    with pytest.raises(ValueError, match="no step was measured"):
        Window.of([])


# ---- How often to take snapshots, by Daly's rule, from what the job has seen: only where nobody has said it ----


class Played:
    """A job of steps of a second, of which every tenth lasts `cost` longer, because a snapshot is under way."""

    def __init__(self, cost: float) -> None:
        self.period, self.cost, self.now, self.step = TunedPeriod(), cost, 0.0, 0

    def play(self, steps: int) -> list[str]:
        said = []
        for _ in range(steps):
            self.step += 1
            taken = self.step % 10 == 0
            if taken:
                self.period.look(self.step - 1, self.now, taking=True)
            self.now += 1.0 + (self.cost if taken else 0.0)
            said.append(self.period.look(self.step, self.now, taking=False))
        return [line for line in said if line]


def test_the_period_is_dalys_for_what_a_snapshot_costs_and_a_loss_in_an_hour_before_any_was_seen() -> None:
    played = Played(cost=2.0)
    (said,) = played.play(60)
    assert played.period.seconds == pytest.approx(daly_period(2.0, PRIOR_S + 36.0), rel=0.02)
    assert said.startswith(f"a snapshot is due every {played.period.seconds:.3g} s from now on (Daly): one costs 2 s")
    assert "and the state was lost never in" in said


def test_losses_make_the_period_shorter_and_it_says_their_number() -> None:
    played = Played(cost=2.0)
    played.play(60)
    before = played.period.seconds
    for _ in range(3):
        played.period.went_back()
    (said,) = played.play(20)
    assert played.period.seconds == pytest.approx(before / 2, rel=0.05), "four losses in place of one"
    assert "the state was lost 3 times in" in said


def test_the_time_in_which_the_job_went_back_is_no_snapshots_cost() -> None:
    played = Played(cost=2.0)
    played.play(45)
    played.period.went_back()
    played.now += 500.0
    played.play(60)
    assert played.period.seconds < daly_period(3.0, PRIOR_S)


@pytest.mark.parametrize(("cost", "bound"), [(0.0, SHORTEST_S), (50_000.0, LONGEST_S)])
def test_a_period_has_bounds(cost: float, bound: float) -> None:
    played = Played(cost)
    played.play(40)
    assert played.period.seconds == pytest.approx(bound, rel=0.2 if cost == 0.0 else 0.0)


def test_nothing_changes_before_three_snapshots_were_seen() -> None:
    played = Played(cost=2.0)
    assert played.play(29) == []
    assert played.period.seconds == 0.0


@pytest.mark.parametrize(
    ("tune", "told", "counts"), [("auto", True, 123.0), ("auto", False, 60.0), ("off", True, 60.0)]
)
def test_a_chosen_period_counts_only_where_nobody_has_said_another(tune: str, told: bool, counts: float) -> None:
    job = _begun(snapshots=True, snapshot_seconds=60.0, snapshot_tuned=told)
    course = job.machine.course
    course.record.config["tune"] = tune
    course.tuned_period.seconds = 123.0
    assert course.snapshot_period == SnapshotPeriod(0, counts)


# ---- Whether a deal by speed has paid: only how long rounds take decides ----


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
