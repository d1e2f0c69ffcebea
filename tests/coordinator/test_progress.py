"""Steps out of reports: each once, whatever is said twice, late or out of nowhere."""

from __future__ import annotations

import math

import msgspec
import pytest

from rallypoint.coordinator.progress import EvaluationMetrics, Lateness, StepTally, StreamTally
from rallypoint.core.protocol import Report, StepDone
from rallypoint.core.typed import MOST_METRICS
from rallypoint.core.view import ViewNumber

FIRST = ViewNumber()


def report(step: int, replica: int, loss: float = 1.0, weight: float = 1.0, generation: ViewNumber = FIRST) -> Report:
    return Report(step, replica, loss, weight, items=4, generation=generation)


def test_a_step_is_done_when_every_replica_has_reported_and_its_loss_is_their_weighted_mean() -> None:
    tally = StepTally(2)
    assert tally.add(report(0, 1, loss=4.0, weight=3.0)) is None
    assert tally.missing() == (0, [0])
    assert tally.add(report(0, 0, loss=2.0, weight=1.0)) == StepDone(0, (2.0 + 12.0) / 4, 8)
    assert tally.missing() == (1, [0, 1])


def test_what_scripts_log_is_the_weighted_mean_over_the_replicas_that_have_logged_it() -> None:
    tally = StepTally(2)
    tally.add(Report(0, 0, 1.0, 1.0, 4, figures={"accuracy": 0.5, "only": 7.0}))
    done = tally.add(Report(0, 1, 1.0, 3.0, 4, figures={"accuracy": 1.0}))
    assert done.figures == {"accuracy": (0.5 + 3.0) / 4, "only": 7.0}


@pytest.mark.parametrize(("one", "other"), [(math.inf, -math.inf), (1.7e308, 1.7e308)])
def test_figures_that_cannot_be_added_up_are_not_a_number_or_infinite_and_end_nothing(one: float, other: float) -> None:
    tally = StepTally(2)
    tally.add(Report(0, 0, 1.0, 1.0, 4, figures={"x": one}))
    done = tally.add(Report(0, 1, 1.0, 1.0, 4, figures={"x": other}))
    assert not math.isfinite(done.figures["x"])


def test_one_step_has_so_many_figures_and_no_more() -> None:
    found = EvaluationMetrics()
    for number in range(MOST_METRICS + 5):
        shown = found.add(3, {f"m{number}": 1.0})
    assert len(shown) == MOST_METRICS
    assert found.add(3, {"m0": 2.0})["m0"] == 2.0


def test_a_repeat_is_counted_as_work_done_twice_and_changes_nothing() -> None:
    tally = StepTally(2)
    tally.add(report(0, 0, loss=1.0))
    assert tally.add(report(0, 0, loss=99.0)) is None
    assert tally.add(report(0, 1, loss=3.0)) == StepDone(0, 2.0, 8, again=1)
    assert tally.add(report(0, 1, loss=3.0)) is None, "of a step that is done"
    assert tally.again == 2


def test_what_is_only_said_again_is_counted_once_and_is_no_work_done_twice() -> None:
    """A worker says its last reports again when its link was broken: one of them may be new to the coordinator."""
    tally = StepTally(2)
    tally.add(report(0, 0))
    for replica in (0, 1):
        done = tally.add(msgspec.structs.replace(report(0, replica), repeated=True))
    assert done == StepDone(0, 1.0, 8)
    assert tally.add(msgspec.structs.replace(report(0, 1), repeated=True)) is None
    assert tally.again == 0


@pytest.mark.parametrize("replica", [-1, 2, 1 << 40])
def test_a_replica_that_the_job_does_not_have_is_no_report(replica: int) -> None:
    tally = StepTally(2)
    tally.add(report(0, 0))
    assert tally.add(report(0, replica)) is None
    assert tally.missing() == (0, [1])
    assert tally.again == 0


def test_a_step_whose_reports_were_lost_with_a_coordinator_is_passed_over() -> None:
    tally = StepTally(2)
    tally.add(report(0, 0))  # the other one's report was said to a coordinator that died
    tally.add(report(1, 0))
    assert tally.add(report(1, 1)) == StepDone(1, 1.0, 8)
    assert tally.missing() == (2, [0, 1])
    assert tally.add(report(0, 1)) is None


def test_after_a_roll_back_steps_are_reported_again() -> None:
    tally = StepTally(1)
    for step in range(4):
        tally.add(report(step, 0))
    tally.rewind(1, ViewNumber(1, 5))
    assert tally.missing() == (2, [0])
    assert tally.add(report(2, 0, loss=9.0)) is None, "of a past that is void"
    assert tally.add(report(2, 0, loss=5.0, generation=ViewNumber(1, 5))) == StepDone(2, 5.0, 4)


def test_a_step_that_was_done_before_a_worker_handed_it_on_is_not_lost() -> None:
    tally = StepTally(2)
    tally.add(report(0, 0, loss=1.0))
    tally.hand_over(ViewNumber(1, 3))  # from version 1: nobody will compute step 0 again
    assert tally.add(report(0, 1, loss=3.0)) == StepDone(0, 2.0, 8), "it was on its way"
    tally.add(report(1, 0, generation=ViewNumber(1, 3)))
    assert tally.add(report(1, 1, generation=ViewNumber(1, 3))) == StepDone(1, 1.0, 8)
    tally.rewind(0, ViewNumber(1, 4))
    for generation in (FIRST, ViewNumber(1, 3)):
        assert tally.add(report(1, 0, generation=generation)) is None
    assert tally.missing() == (1, [0, 1])


@pytest.mark.parametrize("replicas", [2, 3])
def test_where_replicas_have_clocks_the_slowest_is_waited_for_and_not_those_ahead_of_it(replicas: int) -> None:
    """SSP: replica 0 hangs at step 1. The others went on until the bound, and only wait for it."""
    tally = StreamTally(replicas)
    for replica in range(replicas):
        tally.add(report(0, replica))
    for step in (1, 2, 3):
        for replica in range(1, replicas):
            tally.add(report(step, replica))
    assert tally.missing() == (1, [0])


def test_a_streaming_step_is_told_however_far_ahead_others_are() -> None:
    tally = StreamTally(2)
    assert [tally.add(report(step, 1)) for step in range(3)] == [None] * 3
    assert tally.add(report(0, 0, loss=3.0)) == StepDone(0, 2.0, 8)
    assert tally.missing() == (1, [0])


def test_after_a_coordinator_whoever_has_not_reported_yet_is_named_before_those_who_have() -> None:
    tally = StreamTally(3)
    tally.take_over(9, FIRST)  # the furthest replica's step: others may be at any before it
    tally.add(report(7, 0))
    tally.add(report(10, 2))
    assert tally.missing() == (8, [1])
    tally.add(report(6, 1))
    assert tally.missing() == (7, [1])
    assert tally.again == 0, "a slow replica's step is no work done twice"


def test_a_step_in_progress_when_the_coordinator_died_may_still_be_completed_by_its_reports() -> None:
    tally = StepTally(2)
    tally.take_over(4, FIRST)
    assert tally.add(report(4, 0)) is None
    assert tally.add(report(4, 1)) == StepDone(4, 1.0, 8)
    fresh = StepTally(2)
    fresh.take_over(-1, FIRST)
    assert fresh.missing() == (0, [0, 1])


def test_lateness_is_told_by_its_median_and_its_worst_of_the_last_steps() -> None:
    late = Lateness()
    assert late.of("w0") == ""
    for step in range(1000):
        late.add({"w0": 9.0 if step == 0 else 0.1, "w1": 2.0 if step % 50 == 0 else 0.0})
    assert late.of("w0") == "usually 0.10 s behind the first, at worst 0.10 s (p50 and p99 of 256 steps)"
    assert late.of("w1") == "usually 0.00 s behind the first, at worst 2.00 s (p50 and p99 of 256 steps)"
