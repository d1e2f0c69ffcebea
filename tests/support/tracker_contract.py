"""What every `Tracker` does: call each function of TRACKER_CONTRACT with a fresh target.

`make` returns a tracker of one and the same target; `read` what the target shows: name -> [(step, value)], by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rallypoint.watch.tracking import RunFacts, Tracker

Shown = Mapping[str, list[tuple[int, float]]]
Make = Callable[[], Tracker]
Read = Callable[[], Shown]


def it_shows_what_it_was_given(make: Make, read: Read) -> None:
    tracker = make()
    tracker.start(RunFacts("run", {"workers": "2", "odd | `name`": "<b>"}))
    for step in range(5):
        tracker.log(step, {"loss": 5.0 - step, "lr": 0.5})
    tracker.log(5, {"evaluation/loss": 2.5})
    tracker.close()
    tracker.close()
    curves = read()
    assert curves["loss"] == [(step, 5.0 - step) for step in range(5)]
    assert curves["lr"] == [(step, 0.5) for step in range(5)]
    assert curves["evaluation/loss"] == [(5, 2.5)]


def it_shows_no_step_twice_when_a_run_goes_back(make: Make, read: Read) -> None:
    tracker = make()
    for step, last in ((0, 6), (3, 8), (0, 2), (2, 4)):
        tracker.start(RunFacts("run", step=step))
        for number in range(step, last):
            tracker.log(number, {"loss": float(last)})
    tracker.close()
    assert read()["loss"] == [(0, 2.0), (1, 2.0), (2, 4.0), (3, 4.0)]


def another_one_goes_on_where_one_has_ended(make: Make, read: Read) -> None:
    first = make()
    first.start(RunFacts("run"))
    for step in range(6):
        first.log(step, {"loss": 1.0})
    first.close()
    other = make()
    other.start(RunFacts("run", step=4))
    for step in range(4, 8):
        other.log(step, {"loss": 2.0})
    other.close()
    assert read()["loss"] == [(step, 1.0 if step < 4 else 2.0) for step in range(8)]


def values_need_not_be_finite(make: Make, read: Read) -> None:
    tracker = make()
    tracker.start(RunFacts("run"))
    tracker.log(0, {"loss": math.inf, "a figure": -math.inf, "b/ü": math.nan})
    tracker.close()
    assert read()["loss"] == [(0, math.inf)]


def it_may_be_closed_without_a_start(make: Make, read: Read) -> None:
    make().close()


TRACKER_CONTRACT = (
    it_shows_what_it_was_given, it_shows_no_step_twice_when_a_run_goes_back, another_one_goes_on_where_one_has_ended,
    values_need_not_be_finite, it_may_be_closed_without_a_start,
)  # fmt: skip
