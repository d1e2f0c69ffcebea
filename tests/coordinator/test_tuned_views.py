"""tune="auto": from step times to views with another pace."""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.config import record_of, resolve
from rallypoint.config.values import check_values
from rallypoint.core.cluster.placing.tuning import Tuning
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.view import Assignment, LinkPace, Member, View, ViewNumber
from rallypoint.errors import ConfigError

RATE = 100.0  # Mbit/s; a step of K = 12.5 MB takes 1 s at that rate


def record(tune: str) -> JobRecord:
    config = resolve({"replicas": 2, "steps": 1000, "tune": tune})
    return record_of(config, build_layout([TensorSpec("w", (3_125_000,), "float32", 0)], config.shard_bytes))


def view(**more: object) -> View:
    number = ViewNumber(1, 1)
    first = View(
        number=number, generation=number, workers=(Member("w0", "a"), Member("w1", "b")),
        servers=(Member("s0", "c"), Member("s1", "d")), assignments=(Assignment(0, {"w0": (0,), "w1": (1,)}),),
        primary={n: f"s{n % 2}" for n in range(12)},
    )  # fmt: skip
    return msgspec.structs.replace(first, **more)


def play(tuning: Tuning, job: JobRecord, steps: int = 400) -> tuple[View, list[str]]:
    """Steps of 1.5 s without a pace; with one below the rate as long as it says, beyond it as without."""
    now, seen, said = 0.0, view(), list[str]()
    for step in range(steps):
        now += 1.5 if not seen.paced(0.0) or seen.paced(0.0) > RATE else RATE / seen.paced(0.0)
        tuning.reached(step, now)
        if (decided := tuning.look(seen, job)) is not None:
            seen = msgspec.structs.replace(seen, pace=decided.pace)
            said += [decided.said] * bool(decided.said)
    return seen, said


def test_a_job_that_is_tuned_ends_with_a_pace_just_below_its_links_rate() -> None:
    seen, said = play(Tuning(), record("auto"))
    assert seen.pace is not None
    assert 0.9 * RATE <= seen.pace.mbit == seen.pace.kept <= RATE
    assert any(", kept" in line for line in said)
    assert "tuning has ended" in said[-1]


def test_a_job_that_is_not_tuned_keeps_its_settings() -> None:
    assert play(Tuning(), record("off"), 60) == (view(), [])


def test_a_member_that_comes_takes_the_trial_back() -> None:
    tuning, job, now, seen = Tuning(), record("auto"), 0.0, view()
    for step in range(100):
        now += 1.5
        tuning.reached(step, now)
        if (decided := tuning.look(seen, job)) is not None:
            seen = msgspec.structs.replace(seen, pace=decided.pace)
        if seen.paced(0.0):
            break
    assert seen.paced(0.0)
    more = msgspec.structs.replace(seen, workers=(*seen.workers, Member("w2", "e")))
    decided = tuning.look(more, job)
    assert decided is not None
    assert decided.pace == LinkPace(0.0, 0.0)


def test_a_coordinator_that_goes_on_from_a_trial_goes_back_to_the_kept_pace_and_tries_from_there() -> None:
    on_trial, tuning = view(pace=LinkPace(300.0, 80.0)), Tuning()
    decided = tuning.look(on_trial, record("auto"))
    assert decided is not None
    assert decided.pace == LinkPace(80.0, 80.0)
    assert "ended with its coordinator" in decided.said
    seen, now = msgspec.structs.replace(on_trial, pace=decided.pace), 0.0
    for step in range(10):
        now += 1.25
        tuning.reached(step, now)
    assert tuning.look(seen, record("auto")) is None
    assert tuning.tuner is not None
    assert tuning.tuner.best == 80.0


def test_a_given_pace_is_where_tuning_begins_and_none_is_among_what_is_tried() -> None:
    config = resolve({"replicas": 2, "steps": 1000, "tune": "auto", "pace_mbit": 70.0})
    job = record_of(config, record("auto").layout)
    tuning, now = Tuning(), 0.0
    tuning.look(view(), job)
    for step in range(10):
        now += 1.5
        tuning.reached(step, now)
    tuning.look(view(), job)
    assert tuning.tuner is not None
    assert tuning.tuner.best == 70.0
    assert 0.0 in tuning.tuner.knob.candidates


def test_the_time_of_a_pause_is_no_steps_time() -> None:
    tuning, job = Tuning(), record("auto")
    tuning.look(view(), job)
    tuning.reached(1, 10.0)
    tuning.look(view(paused=2), job)
    tuning.reached(2, 500.0)
    tuning.look(view(), job)
    for step in range(3, 11):
        tuning.reached(step, 500.0 + step)
    tuning.look(view(), job)
    assert tuning.tuner is not None
    assert max(tuning.tuner.knob.candidates) > RATE  # of steps of a second


def test_with_aggregators_nobody_is_paced() -> None:
    assert view(pace=LinkPace(80.0, 80.0)).paced(70.0) == 80.0
    assert view().paced(70.0) == 70.0
    assert view(pace=LinkPace(80.0, 80.0), aggregators=(Member("a0", "e"),)).paced(70.0) == 0.0


def test_a_run_that_is_resumed_without_tuning_has_the_pace_of_its_settings() -> None:
    decided = Tuning().look(view(pace=LinkPace(300.0, 80.0)), record("off"))
    assert decided is not None
    assert decided.pace is None


@pytest.mark.parametrize("value", ["codec", ["codec"], True])
def test_what_changes_results_is_not_tuned_and_the_refusal_says_so(value: object) -> None:
    with pytest.raises(ConfigError, match=r"tune is .*one of off, auto\. What changes a job's results .* set it your"):
        resolve({"tune": value})
    with pytest.raises(ConfigError, match="never tried"):
        check_values({"tune": value})


def test_after_tuning_has_ended_other_numbers_of_members_are_tuned_anew_from_the_setting() -> None:
    tuning, job = Tuning(), record("auto")
    seen, said = play(tuning, job)
    assert "tuning has ended" in said[-1]
    fewer = msgspec.structs.replace(seen, servers=seen.servers[:1], primary=dict.fromkeys(seen.primary, "s0"))
    first = tuning.look(fewer, job)
    assert first is None or first.pace == seen.pace, "the first look notes the view"
    decided = tuning.look(fewer, job)
    assert decided is not None
    assert (decided.pace, tuning.tuner) == (LinkPace(0.0, 0.0), None)
    assert decided.said == "there are other numbers of members now: pace_mbit is tuned anew"
    assert tuning.look(msgspec.structs.replace(fewer, pace=decided.pace), job) is None
