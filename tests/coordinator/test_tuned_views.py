"""tune="auto": from step times to views with another pace."""

from __future__ import annotations

import msgspec

from rallypoint.config import record_of, resolve
from rallypoint.core.cluster.placing.tuning import Tuning
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.view import Assignment, Member, View, ViewNumber

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
        now += 1.5 if not seen.pace or seen.pace > RATE else RATE / seen.pace
        tuning.reached(step, now)
        if (decided := tuning.look(seen, job)) is not None:
            seen = msgspec.structs.replace(seen, pace=decided.value)
            said += [decided.said] * bool(decided.said)
    return seen, said


def test_a_job_that_is_tuned_ends_with_a_pace_just_below_its_links_rate() -> None:
    seen, said = play(Tuning(), record("auto"))
    assert seen.pace is not None
    assert 0.9 * RATE <= seen.pace <= RATE
    assert any(line.endswith("kept") for line in said)
    assert "tuning has ended" in said[-1]


def test_a_job_that_is_not_tuned_keeps_its_settings() -> None:
    assert play(Tuning(), record("off"), 60) == (view(), [])


def test_a_member_that_comes_takes_the_trial_back() -> None:
    tuning, job, now, seen = Tuning(), record("auto"), 0.0, view()
    for step in range(100):
        now += 1.5
        tuning.reached(step, now)
        if (decided := tuning.look(seen, job)) is not None:
            seen = msgspec.structs.replace(seen, pace=decided.value)
        if seen.pace:
            break
    assert seen.pace
    more = msgspec.structs.replace(seen, workers=(*seen.workers, Member("w2", "e")))
    decided = tuning.look(more, job)
    assert decided is not None
    assert decided.value == 0.0
